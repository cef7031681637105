"""Workers that sleep in every mini-batch are told from slower ones, and sleep in predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from simulators.calibration import closed_form
from simulators.calibration.model import Constants, plant
from simulators.calibration.recorded.recordings import read_tables
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.speeds import with_speeds
from simulators.calibration.recorded.stragglers import Sleeper, sleepers
from simulators.calibration.simulations import simulated, system_of
from traces.importers.source import table
from tuners.actions import Run

SETTING = {"run": "a", "seconds": 0.0, "workers": 4, "servers": 1, "policy": "asp", "batch_size": 8}
CYCLES = 400


def computing(factor=1.0, sleep=None, rarely=None, seed=0, usual=0.05):
    """Seconds of mini-batches of usually 50 ms, which vary by a tenth."""
    rng = np.random.default_rng(seed)
    seconds = usual * factor * np.exp(0.1 * rng.standard_normal(CYCLES))
    if sleep is not None:
        seconds += np.maximum(rng.normal(*sleep, CYCLES), 0.0)
    if rarely is not None:
        seconds[::12] += rarely
    return seconds


def pushes(*of_workers):
    rows = [
        {"run": "a", "seconds": float(end), "worker": w, "clock": i, "compute_seconds": float(c)}
        | {"pull_seconds": 0.01, "push_seconds": 0.01, "wait_seconds": 0.0}
        for w, seconds in enumerate(of_workers)
        for i, (c, end) in enumerate(zip(seconds, np.cumsum(seconds + 0.02), strict=True))
    ]
    return sorted(rows, key=lambda row: row["seconds"])


def found_in(*of_workers):
    return sleepers([(SETTING, pl.DataFrame(pushes(*of_workers)))])


def test_a_sleep_is_found_with_its_mean_and_deviation():
    found = found_in(computing(), computing(seed=1, sleep=(0.08, 0.03)), computing(seed=2))
    assert found.keys() == {("a", 1)}
    assert found["a", 1].mean_seconds == pytest.approx(0.08, rel=0.05)
    assert found["a", 1].sd_seconds == pytest.approx(0.03, rel=0.15)


@pytest.mark.parametrize(
    "other",
    [computing(factor=3.0, seed=1), computing(rarely=0.5, seed=1), computing(sleep=(0.001, 0.0), seed=1)],
    ids=["slower", "now and then", "hardly"],
)
def test_a_worker_that_does_not_sleep_in_every_mini_batch_is_none(other):
    assert found_in(computing(), other, computing(seed=2)) == {}


@pytest.mark.parametrize("delay", [0.02, 0.08, 0.3])
@pytest.mark.parametrize("quick", [1.0, 1.5])
def test_a_constant_delay_is_a_sleep_without_noise(delay, quick):
    """A slower machine would have longer noise, by the factor of its time. A single quick machine is no reference."""
    found = found_in(
        computing(),
        computing(seed=1, sleep=(delay, 0.0)),
        computing(seed=2),
        computing(1 / quick, seed=3),
        computing(seed=4),
    )
    assert found.keys() == {("a", 1)}
    assert found["a", 1].mean_seconds == pytest.approx(delay, rel=0.1)
    assert found["a", 1].sd_seconds < 0.004  # of 5 ms, which computing varies by


@pytest.mark.parametrize("sd", [0.0, 0.1, 0.5])
@pytest.mark.parametrize("share", [0.5, 1.0])
def test_mini_batches_of_two_sizes_tell_sleeps_from_slower_machines(sd, share):
    """A slower machine's difference grows with the mini-batch, also where a part of it is equal on all machines."""

    def sized(usual, seed):
        slower = computing(seed=seed, usual=(1 + share) * usual - share * 0.01)
        asleep = computing(seed=seed + 1, usual=usual, sleep=(0.06, 0.06 * sd))
        return [computing(seed=seed + 2, usual=usual), slower, asleep, computing(seed=seed + 3, usual=usual)]

    segments = [
        (
            {"run": "a"},
            pl.DataFrame([{"worker": w, "compute_seconds": float(x)} for w, of in enumerate(workers) for x in of]),
        )
        for workers in (sized(0.05, 0), sized(0.15, 10))
    ]
    found = sleepers(segments)
    assert found.keys() == {("a", 2)}
    assert found["a", 2].mean_seconds == pytest.approx(0.06, rel=0.1)
    assert found["a", 2].sd_seconds == pytest.approx(0.06 * sd, abs=0.008)


def test_workers_are_compared_with_those_that_have_as_large_mini_batches():
    """The last worker takes twice as long for twice the samples, and the one before sleeps."""
    times = [computing(), computing(seed=1), computing(seed=2, sleep=(0.05, 0.0)), 2 * computing(seed=3)]
    segments = [({"run": "a"}, pl.DataFrame(pushes(*workers))) for workers in (times, times[:3])]
    assert sleepers(segments, [(8, 8, 8, 16), (8, 8, 8)]).keys() == {("a", 2)}


@pytest.mark.parametrize("first", [0, 1])
def test_mini_batches_of_workers_are_in_the_order_of_their_numbers(first):
    """These may begin with 1, which was an error."""
    times = [computing(), computing(seed=1), computing(seed=2, sleep=(0.05, 0.0)), 2 * computing(seed=3)]
    frame = pl.DataFrame(pushes(*times)).with_columns(pl.col("worker") + first)
    assert sleepers([({"run": "a"}, frame)], [(8, 8, 8, 16)]).keys() == {("a", 2 + first)}


def test_chance_makes_no_sleeper_of_equal_workers():
    """The slowest of sixteen with twenty to forty mini-batches each takes 10 to 20 % longer than the usual one by chance: in
    one recording of six it was said to sleep."""
    rng = np.random.default_rng(0)
    times = [(0.05 * np.exp(0.3 * rng.standard_normal((16, 20 * (1 + i % 2))))) for i in range(60)]
    frames = [
        pl.DataFrame([{"worker": w, "compute_seconds": x} for w, of in enumerate(each) for x in of.tolist()])
        for each in times
    ]
    assert sum(bool(sleepers([({"run": "a"}, frame)])) for frame in frames) <= 2


def test_a_worker_that_was_never_seen_beside_a_steady_one_is_compared_with_nobody():
    segments = [
        ({"run": "a"}, pl.DataFrame({"worker": [w] * CYCLES, "compute_seconds": seconds}))
        for w, seconds in enumerate([computing(), computing(seed=1, sleep=(0.08, 0.03))])
    ]
    assert sleepers(segments) == {}


@pytest.mark.parametrize("lost", [0, 3])
def test_workers_that_were_not_timed_count_as_awake(lost):
    """One of four workers has no rows. The sleeps of three were no row's of four, and predictions ended in an error."""
    of = [computing(), computing(seed=1, sleep=(0.08, 0.03)), computing(seed=2), computing(seed=3)]
    rows = [row for row in pushes(*of) if row["worker"] != lost]
    kept = {"runs": [{"run": "a", "workload": "x"}], "settings": [SETTING], "iterations": rows}
    found = read_tables({name: table(name, each) for name, each in kept.items()})
    sleeps = [sleep.mean_seconds for sleep in found.rows[0].sleeps]
    assert [seconds > 0 for seconds in sleeps] == [False, True, False, False]
    asleep = plant(Constants(), found.rows[0]).costs.compute_seconds
    assert asleep[:4] == pytest.approx(sleeps)


def test_rows_have_the_sleeps_apart_from_speeds_and_noise():
    of = [computing(), computing(seed=1, sleep=(0.08, 0.03)), computing(seed=2), computing(seed=3)]
    blank = {"runs": [{"run": "a", "workload": "x"}], "settings": [SETTING], "iterations": pushes(*of)}
    names = ("runs", "settings", "iterations", "progress", "reconfigurations")
    found = read_tables({name: table(name, blank.get(name, [])) for name in names})
    (row,) = found.rows
    assert [s.mean_seconds > 0 for s in row.sleeps] == [False, True, False, False]
    assert row.speeds == ()
    assert row.compute_seconds > 0.05  # as recorded, with sleeps
    assert found.noise.jitter == pytest.approx(0.1, rel=0.1)
    assert found.noise.sleeps is None
    assert any("worker 1 of a 0.0" in caveat for caveat in found.caveats)
    assert with_speeds([row])[0].sleeps == row.sleeps
    assert replace(row, cycle_seconds=0.1).unlike == {"speeds"}


@pytest.mark.parametrize(("policy", "cycle"), [("bsp", 1.6), ("asp", 3 / (1 / 0.1 + 1 / 0.5 + 1 / 1.6))])
def test_each_worker_sleeps_for_its_own_time(policy, cycle):
    """At a barrier, all wait for the longer sleep, not for the mean of both."""
    constants = Constants(cores=1, jitter=0.0, fixed_seconds=0.1)
    asleep = Row("r", "toy", 3, 1, 2.0, policy=policy, sleeps=(Sleeper(0.4, 0.0), Sleeper(0.0, 0.0), Sleeper(1.5, 0.0)))
    assert simulated(constants, asleep).spans.cycle == pytest.approx(cycle, rel=0.02)


def test_sleeps_are_simulated():
    """At a barrier, all wait for the longer sleep of two workers: mean + deviation / sqrt(pi)."""
    constants = Constants(cores=1, jitter=0.0, fixed_seconds=0.1)
    slow = Sleeper(1.0, 0.2)
    asleep = Row("r", "toy", 3, 1, 2.0, policy="bsp", sleeps=(slow, Sleeper(0.0, 0.0), slow))
    assert simulated(constants, asleep).spans.cycle == pytest.approx(1.1 + 0.2 / math.sqrt(math.pi), rel=0.02)
    same = simulated(replace(constants, sleeps_vary=False), asleep).spans.cycle
    assert same == pytest.approx(1.1)
    alone = system_of(constants, replace(asleep, policy="asp"), 0).perform(Run(clocks=800)).pushes
    means = [alone.compute_seconds[alone.worker == w].mean() for w in range(3)]
    assert means == pytest.approx([1.1, 0.1, 1.1], rel=0.1)
    told = closed_form.spans([plant(constants, replace(asleep, sleeps=s)) for s in (asleep.sleeps, ())], [False, False])
    assert told.cycle[0] > told.cycle[1] == pytest.approx(0.1)
