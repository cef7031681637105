"""Workers that sleep in every mini-batch are told from slower ones, and sleep in predictions."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import polars as pl
import pytest

from simulators.calibration import closed_form
from simulators.calibration.model import Constants, Row, plant, simulated, system_of, with_speeds
from simulators.calibration.recordings import read_tables
from simulators.calibration.stragglers import Sleeper, sleepers
from traces.importers.source import table
from tuners.actions import Run

SETTING = {"run": "a", "seconds": 0.0, "workers": 4, "servers": 1, "policy": "asp", "batch_size": 8}
CYCLES = 400


def computing(factor=1.0, sleep=None, rarely=None, seed=0):
    """Seconds of mini-batches of 50 ms, which vary by a tenth."""
    rng = np.random.default_rng(seed)
    seconds = 0.05 * factor * np.exp(0.1 * rng.standard_normal(CYCLES))
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


def test_a_worker_that_was_never_seen_beside_a_steady_one_is_compared_with_nobody():
    segments = [
        ({"run": "a"}, pl.DataFrame({"worker": [w] * CYCLES, "compute_seconds": seconds}))
        for w, seconds in enumerate([computing(), computing(seed=1, sleep=(0.08, 0.03))])
    ]
    assert sleepers(segments) == {}


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
    assert with_speeds([row])[0].sleeps == row.sleeps
    assert replace(row, cycle_seconds=0.1).unlike == {"speeds"}


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
