"""Calibration: the constants behind a recording are found, and constants that it does not determine are refused."""

from __future__ import annotations

import json
import math
import re
import tomllib
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
from scipy.optimize import least_squares

from harness.cli import main
from simulators.calibration import closed_form, simulations, validation
from simulators.calibration import least_squares as search
from simulators.calibration.fit import Constants, closed_form_cycles, completed, fit, fit_all, predicted
from simulators.calibration.model import cluster, plant
from simulators.calibration.output import Provenance, to_toml
from simulators.calibration.predictions import HELD_OUT, LARGER
from simulators.calibration.recorded.recordings import Recording, read_tables, with_snapshots
from simulators.calibration.recorded.row import Row, WorkerTime
from simulators.calibration.recorded.selection import EVERYTHING, Selection
from simulators.calibration.recorded.speeds import on_machines, with_speeds
from simulators.calibration.simulations import simulated
from simulators.calibration.spread import log_half_widths
from simulators.calibration.validation import check
from simulators.cluster.profiles import load_profiles
from simulators.engine import timing
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.reconfiguration import Load, plan_of
from simulators.workloads.catalogue import load_workloads, workload
from traces.importers.source import table
from traces.parts import scan
from traces.schema import TRACE, setting_text
from traces.shipped import locate
from tuners.actions import Run, Setting

TRUE = Constants(
    cores=8,
    fixed_seconds=0.2,
    sample_seconds=0.02,
    message_seconds=0.01,
    apply_seconds=0.04,
    jitter=0.1,
    nic_bytes_per_second=1e9,
)
ORIGIN = Provenance("made up", "tests", "ours", "0" * 64, "harness calibrate TRACE", "harness")


def row(workers, servers, batch=16, threads=1, policy="asp", **more):
    return Row("run", "toy", workers, servers, 1.0, batch, threads, policy=policy, machines=10, **more)


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Simulate fewer pushes and search for a shorter time: a little less exact, and much faster."""
    for name, value in (("_PUSHES", 120), ("_CYCLES", 10), ("_WARM_UP", 5), ("_LEAST_SEEDS", 2), ("_PRECISE", 1.0)):
        monkeypatch.setattr(simulations, name, value)
    monkeypatch.setattr(search, "_ROUNDS", 1)
    monkeypatch.setattr(closed_form, "_ROUNDS", 20)
    monkeypatch.setattr(search, "least_squares", partial(_roughly, search.least_squares))


def _roughly(least_squares, *given, **named):
    return least_squares(*given, **named | {"max_nfev": 15, "ftol": 1e-4, "xtol": 1e-4})


def timed(rows, constants=TRUE, noise=0.0, seed=0):
    """The rows as the engine times them, off by some noise."""
    off = np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return [replace(r, cycle_seconds=float(c)) for r, c in zip(rows, predicted(constants, rows) * off, strict=True)]


GRID = [row(w, s, b, t) for w, s in ((3, 7), (8, 2), (9, 1)) for b, t in ((8, 1), (32, 4), (32, 1), (8, 8))]

# ----------------------------------------------------------------------------------------------------- the engine's time


@pytest.mark.slow
def test_the_closed_form_is_close_to_the_engine():
    rows = [row(3, 2), row(9, 1), row(6, 4, 32, 4), row(4, 2, policy="bsp")]
    constants = replace(TRUE, model_bytes=2e7)
    closed = closed_form.spans([plant(constants, r) for r in rows], [r.barrier for r in rows])
    engine = [simulated(constants, r).spans for r in rows]
    assert closed.cycle == pytest.approx([e.cycle for e in engine], rel=0.04)
    assert closed.compute == pytest.approx([e.compute for e in engine], rel=0.03)


@pytest.mark.slow
def test_snapshots_slow_a_cycle_by_their_own_transfer_or_not_at_all():
    """A lone worker waits for a model more per snapshot: by the distance of those in the pushes of a row, whatever the
    distance in the recording."""
    given = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, jitter=0.0)
    often = row(1, 1, snapshot_clocks=20, cycle_snapshot_clocks=10)
    assert simulated(given, often).spans.cycle == pytest.approx(2.0 + 1 / 10, rel=1e-3)
    assert simulated(given, replace(often, cycle_snapshot_clocks=0)).spans.cycle == pytest.approx(2.0, rel=1e-3)
    assert simulated(replace(given, snapshots=False), often).spans.cycle == pytest.approx(2.0, rel=1e-3)
    seconds, _ = simulations.simulated_seconds(given, often, 100)  # the fifth begins with the last push
    assert seconds == pytest.approx(2.0 * 99 + 4)


@pytest.mark.parametrize(
    ("pushes", "every", "workers", "apart"),
    [
        (2000, 2500, 1, 20),
        (12, 13, 1, 0),  # the first is taken after 20
        (21, 26, 2, 21),
        (42, 52, 4, 21),  # after 20 and 40
        (48, 60, 1, 24),  # after 20 and 40: the one after the last push is in no cycle
        (240, 300, 6, 24),  # four pushes of each worker
        (2000, 0, 1, 20),  # of no segment
    ],
)
def test_short_rows_have_the_snapshots_that_fall_into_them(pushes, every, workers, apart):
    made = replace(row(workers, 1), pushes=pushes, all_pushes=every)
    (found,) = with_snapshots(Recording((made,), None, (), (), (), ()), 20).rows
    assert (found.snapshot_clocks, found.cycle_snapshot_clocks) == (max(20, 4 * workers), apart)
    (none,) = with_snapshots(Recording((found,), None, (), (), (), ()), 0).rows
    assert none.identity == made.identity  # times that were not recorded are nan


@pytest.mark.slow
def test_seeds_side_by_side_are_what_each_is_alone():
    """Also where a link is delayed from the beginning, which the control plane puts in force."""
    delayed = row(4, 2, delays=(0.3, 0.0, 0.0, 0.0, 0.1))
    for one in (row(3, 2), row(4, 1, policy="bsp"), delayed):
        each = [simulations.system_of(TRUE, one, seed).perform(Run(clocks=50)).pushes for seed in (0, 1, 2, 3)]
        alone = np.array([(p.seconds, p.compute_seconds, p.pull_seconds, p.push_seconds) for p in each])
        assert simulations.pushes_of(TRUE, one, range(4), 50) == pytest.approx(alone.swapaxes(1, 2), rel=1e-12)


def test_with_uneven_shares_some_push_while_others_pull():
    """Four workers at a barrier, and only transfers: fair shares end together, and a step takes eight transfers."""
    alone = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, jitter=0.0)
    fair, uneven = (
        simulated(replace(alone, discipline=d), row(4, 1, policy="bsp")).spans.cycle for d in ("maxmin", "uneven")
    )
    assert fair == pytest.approx(8.0, rel=0.01)
    assert 5.5 < uneven < 7.0  # five, if transfers were served one by one


def test_uneven_pushes_share_a_server_as_their_senders_send():
    """The queue of the server's link has twice as much of a worker whose own link is twice as fast."""
    given = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, jitter=0.0, discipline="uneven")
    inputs = simulations.system_of(given, row(2, 1, nics=(2.0, 1.0, 1.5)), 0).branches[0].inputs
    waiting = timing.all_waiting(len(inputs.nic), np.zeros(len(inputs.nic)), uneven=True)
    pushing = np.arange(len(inputs.nic)) < 2
    flight = waiting._replace(phase=np.where(pushing, timing.PUSH, timing.WAIT), remaining=np.where(pushing, 1e6, 0.0))
    found = timing.to_next_push(inputs, np.float64(0), flight, np.float64(np.inf), discipline="uneven", overlapping=False)
    seconds, _, worker, pushed = found
    assert (float(seconds), int(worker), bool(pushed)) == (pytest.approx(1.0), 0, True)  # 1 of the 1.5 MB/s


def test_servers_and_a_master_end_synchronous_steps_only():
    """Two servers take half of the time each, and the master that of four mini-batches of 16."""
    slow = replace(TRUE, jitter=0.0, apply_seconds=0.0, step_seconds=0.5, master_sample_seconds=0.01)
    fast = replace(slow, step_seconds=0.0, master_sample_seconds=0.0)
    each = [(simulated(c, row(4, 2, policy=p)).spans.cycle) for p in ("bsp", "asp") for c in (slow, fast)]
    assert each[0] - each[1] == pytest.approx(0.5 / 2 + 0.01 * 4 * 16)
    assert each[2] == pytest.approx(each[3])


def test_the_apply_exponent_is_for_uneven_shares_of_servers():
    assert float(plant(replace(TRUE, apply_exponent=0.5), row(2, 4)).costs.apply_seconds) == pytest.approx(0.04 / 2)
    assert float(plant(TRUE, row(2, 4)).costs.apply_seconds) == pytest.approx(0.04 / 4)


def test_the_server_with_most_of_the_model_decides():
    """Of two servers, one has three quarters: pulls and pushes through its link, and its updates, take that long."""
    given = Constants(cores=1, model_bytes=1e6, nic_bytes_per_second=1e6, apply_seconds=0.4, jitter=0.0)
    uneven, even = row(1, 2, nics=(9.0, 1.0, 1.0), model_shares=(0.25, 0.75)), row(1, 2, nics=(9.0, 1.0, 1.0))
    assert (uneven.largest_share, even.largest_share) == (0.75, 0.5)
    assert [simulated(given, r).spans.cycle for r in (uneven, even)] == pytest.approx([1.5 + 0.3, 1.0 + 0.2], rel=1e-3)
    assert closed_form_cycles(given, [uneven]) == pytest.approx([1.8], rel=1e-3)


def test_shares_of_servers_explain_what_looks_like_noise():
    """Six servers of which one has 0.4 of the model are slower than four equal ones."""
    shares = {1: (), 2: (0.7, 0.3), 4: (), 6: (0.4, 0.2, 0.1, 0.1, 0.1, 0.1)}
    rows = [row(w, s, policy="bsp", model_shares=shares[s]) for w in (1, 3, 6, 9) for s in shares]
    true = replace(TRUE, message_seconds=0.0, step_seconds=0.5)
    told = told_by_formula(rows, true)
    given = Constants(cores=8, model_bytes=1.0, jitter=0.1)
    with_shares, without = (fit(r, given, engine=False) for r in (told, [replace(x, model_shares=()) for x in told]))
    assert 5 * with_shares.error < 0.03 < without.error


def test_a_coordinator_hears_from_every_server_of_every_push():
    """Pushes queue there: six workers, each with nothing else to do, push one after the other."""
    given = Constants(cores=1, jitter=0.0, fixed_seconds=1e-3, commit_seconds=0.1)
    assert float(plant(replace(TRUE, commit_seconds=0.1), row(2, 4)).costs.apply_seconds) == pytest.approx(0.04 / 4 + 0.4)
    assert [simulated(given, row(6, s)).spans.cycle for s in (1, 3)] == pytest.approx([0.6, 1.8])


def test_a_change_of_policy_takes_a_restart_where_costs_say_so():
    before = Setting(workers=("a",), servers=("b",), policy="bsp")
    after = replace(before, policy="asp")
    load = Load(100.0, 1, 1.0)
    assert plan_of(before, after, "migrate", load, Costs()).steps == ()
    made = plan_of(before, after, "migrate", load, Costs(policy_restart_seconds=90.0))
    assert made.quiescent
    assert [(s.kind, s.seconds) for s in made.steps] == [("restart", 90.0)]
    assert plan_of(before, before, "migrate", load, Costs(policy_restart_seconds=90.0)).steps == ()


# --------------------------------------------------------------------------------------------------------------- fitting


def test_known_constants_are_found_again():
    true = replace(TRUE, serial_fraction=0.2, apply_exponent=0.7, apply_seconds=0.15)
    found = fit(timed(GRID, true, noise=0.005), Constants(cores=8, jitter=0.1, model_bytes=1.0), resamples=100)
    for name in ("fixed_seconds", "sample_seconds", "serial_fraction", "apply_seconds", "apply_exponent", "message_seconds"):
        low, high = found.intervals[name]
        assert getattr(found.constants, name) == pytest.approx(getattr(true, name), rel=0.2), name
        assert 0.9 * low < getattr(true, name) < 1.1 * high, name
    assert found.error < 0.01


def told_by_formula(rows, constants, noise=0.0):
    """The rows as the closed form times them, off by some noise."""
    off = np.exp(noise * np.random.default_rng(1).standard_normal(len(rows)))
    return [replace(r, cycle_seconds=float(c)) for r, c in zip(rows, closed_form_cycles(constants, rows) * off, strict=True)]


def test_synchronous_runs_alone_tell_what_servers_take_for_a_step():
    """One push per step costs as much as the step itself with one worker, but not with eight."""
    true = replace(TRUE, step_seconds=0.4, message_seconds=0.0)
    rows = told_by_formula([row(w, s, policy="bsp") for w in (1, 4, 8) for s in (1, 2, 4)], true, noise=0.005)
    found = fit(rows, Constants(cores=8, model_bytes=1.0, jitter=0.1), resamples=50, engine=False)
    low, high = found.intervals["step_seconds"]
    assert found.constants.step_seconds == pytest.approx(0.4, rel=0.15)
    assert 0.9 * low < 0.4 < 1.1 * high


def test_an_interval_says_where_a_constant_decides_that_no_fitted_row_determines():
    """On eight servers nobody queues for an update; on one, nine workers do little else."""
    true = replace(TRUE, message_seconds=0.0, apply_seconds=0.1)
    seen = told_by_formula([row(w, 8, b) for w in (1, 2, 3, 4) for b in (8, 16, 32)], true, noise=0.01)
    alike, queueing = told_by_formula([row(3, 8, 24), row(9, 1, 16)], true)
    found = fit(seen, Constants(cores=8, model_bytes=1.0, jitter=0.1), resamples=50, engine=False)
    assert "apply_seconds" in found.refused
    told = closed_form_cycles(found.constants, [alike, queueing])
    (below, above), (_, far) = log_half_widths(found, [alike, queueing], np.zeros(2))[:, 0]
    assert max(below, above) < 0.05
    assert math.log(alike.cycle_seconds / told[0]) < above
    assert 0.1 < math.log(queueing.cycle_seconds / told[1]) < far


def test_last_bits_of_a_recording_do_not_move_the_constants(monkeypatch):
    """Processors round the last bits of a logarithm differently, and four of nine constants are hardly determined here:
    before, they ended at up to 30 times the value."""
    monkeypatch.setattr(search, "least_squares", least_squares)
    folder = locate("shipped:homogeneous")
    recording = read_tables({name: scan(folder, name).collect() for name in TRACE})
    given = Constants(cores=1, nic_bytes_per_second=1e6)
    free = ("commit_seconds", "service_bytes_per_second", "message_seconds", "apply_seconds", "model_bytes", "fixed_seconds")

    def fitted(seed):
        problem = search.TimesProblem(recording.rows, given, engine=False)
        problem.measured *= 1 + seed * 1e-13 * np.random.default_rng(seed).standard_normal(problem.measured.shape)
        return problem.solve([*free, "sample_seconds", "step_seconds", "master_sample_seconds"]).at

    assert [fitted(seed).tolist() for seed in (1, 2)] == [fitted(0).tolist()] * 2


@pytest.mark.slow
def test_the_time_of_a_coordinator_is_told_apart_from_that_of_servers():
    true = replace(TRUE, apply_seconds=0.15, message_seconds=0.0, commit_seconds=0.03, model_bytes=1e6)
    rows = timed([row(w, s) for w in (1, 3, 8) for s in (1, 2, 4)], true, noise=0.005)
    free = ("fixed_seconds", "nic_bytes_per_second", "message_seconds", "apply_exponent")
    found = fit(rows, replace(true, apply_seconds=0.0, commit_seconds=0.0), resamples=100, without=free)
    for name in ("apply_seconds", "commit_seconds"):
        low, high = found.intervals[name]
        assert getattr(found.constants, name) == pytest.approx(getattr(true, name), rel=0.1), name
        assert 0.9 * low < getattr(true, name) < 1.1 * high, name


@pytest.mark.parametrize(
    ("rows", "constant", "why"),
    [
        ([row(w, 2) for w in (2, 4, 8)], "message_seconds", "number of servers never varied.* few and on many servers"),
        ([row(2, s) for s in (1, 2, 4)], "commit_seconds", "did not both vary: .* one, two and three servers"),
        ([row(w, 10 - w) for w in (2, 4, 8)], "fixed_seconds", "neither batch size nor threads ever varied"),
        ([row(w, 10 - w, 8 * w) for w in (2, 4, 8)], "serial_fraction", "did not both vary: record two batch sizes"),
        ([row(w, 10 - w) for w in (2, 4, 8)], "step_seconds", "no synchronous runs on three numbers of servers, or beside"),
        ([row(2, s, b) for s in (6, 7, 8) for b in (8, 32)], "apply_seconds", "hardly depend on it: .* one server with few"),
    ],
    ids=["servers", "commits", "batch", "threads", "policy", "idle"],
)
def test_constants_that_the_rows_do_not_determine_are_refused(rows, constant, why):
    told = told_by_formula(rows, replace(TRUE, apply_seconds=1e-5))
    found = fit(told, Constants(cores=8, model_bytes=1.0), resamples=0, engine=False)
    assert pytest.approx(getattr(Constants(), constant)) == getattr(found.constants, constant)
    assert re.search(why, found.refused[constant])
    assert constant not in found.intervals


def test_as_many_constants_as_rows_have_no_interval():
    """With a setting more than constants there is one, except for a constant that one row alone decides."""
    given = Constants(cores=8, model_bytes=1.0)
    free = ("apply_seconds", "sample_seconds")

    def fitted(rows, constants=TRUE):
        return fit(told_by_formula(rows, constants, noise=0.01), given, resamples=50, engine=False)

    few = fitted([row(2, 2), row(9, 2)], replace(TRUE, apply_seconds=0.2))
    assert few.intervals == dict.fromkeys(free)
    assert few.unsure == free
    more = fitted([row(w, 2) for w in (2, 4, 8, 9)])
    assert more.unsure == ()
    alone = fitted([*(row(w, 2) for w in (2, 4, 8, 9)), row(6, 2, policy="bsp")], replace(TRUE, step_seconds=0.5))
    assert alone.unsure == ("step_seconds",)
    text = to_toml({"toy": few}, Recording((row(2, 2),), None, (), (), (), ()), ORIGIN)
    said = tomllib.loads(text)["calibration"]["workloads"]["toy"]
    assert "intervals" not in said
    assert set(said["without_interval"]) == set(free)


def test_intervals_of_few_settings_are_wider_than_their_bootstrap():
    """Seven settings with noise: Student's t of six degrees is 1.25 times the normal quantile, times the root of 7/6."""
    rng = np.random.default_rng(0)
    true = Constants(cores=1, model_bytes=2e7, nic_bytes_per_second=1.25e8, sample_seconds=0.005, apply_seconds=0.03)
    bare = [row(w, s) for w in (1, 2, 4, 6) for s in (1, 2) if s <= w]
    told = closed_form.spans([plant(true, r) for r in bare], [r.barrier for r in bare])
    noise = np.exp(0.04 * rng.standard_normal(len(bare)))
    compute, pull, push, cycle = (part * noise for part in told)
    rows = [
        replace(r, cycle_seconds=c, compute_seconds=a, pull_seconds=b, push_seconds=d)
        for r, a, b, d, c in zip(bare, compute, pull, push, cycle, strict=True)
    ]
    given = replace(true, model_bytes=0.0, sample_seconds=0.0, apply_seconds=0.0)
    refused = fit(rows, given, resamples=0, engine=False).refused
    # The bootstrap alone: what refused constants may be is in draws and intervals, too.
    found = fit(rows, given, resamples=100, engine=False, without=tuple(refused))
    assert not found.refused
    low, high = np.log(found.intervals["model_bytes"]) - math.log(found.constants.model_bytes)
    ends = np.percentile(np.log(found.draws["model_bytes"]), [2.5, 97.5]) - math.log(found.constants.model_bytes)
    assert (low, high) == pytest.approx(tuple(1.3484 * ends), rel=1e-3)


def test_intervals_have_that_further_servers_may_make_updates_no_faster():
    """Updates that wait for each other over all servers take as long on one as on two, as where a coordinator takes a third
    of it for each server: on three, updates were 22 % too slow, with an interval of a per cent."""
    true = replace(TRUE, message_seconds=0.0, apply_seconds=0.15, apply_exponent=0.0)
    seen = told_by_formula([row(w, s, b) for w in (1, 4, 9) for s in (1, 2) for b in (8, 16)], true, noise=0.003)
    found = fit(seen, Constants(cores=8, model_bytes=1.0, jitter=0.1), resamples=50, engine=False)
    alike, further = told_by_formula([row(9, 2, 24), row(9, 3)], true)
    told = closed_form_cycles(found.constants, [alike, further])
    (near, _), (below, _) = log_half_widths(found, [alike, further], np.zeros(2))[:, 0]
    assert near < 0.02
    assert 0.1 < math.log(told[1] / further.cycle_seconds) < below + 0.01


def messages_that_no_row_tells():
    """Always two servers: four messages of a mini-batch, 80 ms, are as good as `fixed_seconds`, which are 50 ms."""
    true = Constants(cores=1, jitter=0.0, fixed_seconds=0.05, sample_seconds=0.004, message_seconds=0.02)
    rows = told_by_formula([row(w, 2, b) for w in (1, 2, 3) for b in (8, 16, 32)], true, noise=0.01)
    found = fit(rows, Constants(cores=1, jitter=0.1), resamples=100, engine=False)
    assert found.constants.fixed_seconds == pytest.approx(0.13, rel=0.1)
    assert "message_seconds" in found.refused
    return true, found


def test_intervals_have_what_refused_constants_may_take():
    true, found = messages_that_no_row_tells()
    for name, (low, high) in found.intervals.items():
        assert low < getattr(true, name) < high, name


def test_draws_have_refused_constants_in_turn_and_the_others_fitted_to_them():
    _, found = messages_that_no_row_tells()
    messages, fixed = np.array(found.draws["message_seconds"]), np.array(found.draws["fixed_seconds"])
    assert messages[0] == 0
    assert messages.max() > 0.02
    assert 0 < np.mean(messages > 0) < 0.5
    # The sum is what the rows tell, also where a message takes some of it.
    assert np.median((fixed + 4 * messages)[messages > 0]) == pytest.approx(0.13, rel=0.15)
    assert all(np.count_nonzero([found.draws[n][i] for n in found.refused if n in found.draws]) <= 1 for i in range(100))


def test_totals_with_and_without_a_barrier_tell_transfers():
    true = Constants(cores=1, model_bytes=4e7, nic_bytes_per_second=1.25e8, sample_seconds=0.02, apply_seconds=0.05)
    bare = [row(w, s, b, policy=p) for p in ("bsp", "asp") for w in (1, 3, 6) for s in (1, 3) for b in (16, 32)]
    noise = np.exp(0.01 * np.random.default_rng(0).standard_normal(len(bare)))
    rows = [replace(r, cycle_seconds=c) for r, c in zip(bare, closed_form_cycles(true, bare) * noise, strict=True)]
    given = replace(true, model_bytes=0.0, sample_seconds=0.0, apply_seconds=0.0)
    found = fit(rows, given, resamples=0, engine=False)
    assert found.constants.model_bytes == pytest.approx(4e7, rel=0.1)
    alone = fit([r for r in rows if not r.barrier], given, resamples=0, engine=False)
    assert "no runs with and without a barrier tell them" in alone.refused["model_bytes"]
    assert "pulls and pushes take no time, unless --model-bytes says otherwise" in alone.refused["model_bytes"]
    told = fit([r for r in rows if not r.barrier], replace(given, model_bytes=4e7), resamples=0, engine=False)
    assert told.refused["nic_bytes_per_second"].endswith("on one and more servers")


def test_constants_that_miss_their_own_rows_are_warned_of():
    """Times that nothing explains; and what a clean recording is off by."""
    rng = np.random.default_rng(0)
    rows = [replace(row(w, s), cycle_seconds=float(rng.lognormal(sigma=0.8))) for w in (1, 2, 3, 4) for s in (1, 2, 3)]
    bad = fit(rows, Constants(model_bytes=1.0), resamples=0, engine=False)
    assert bad.misfit.startswith(f"constants are off by {bad.error:.0%} in the median on their own 12 rows: ")
    true = Constants(model_bytes=1.0, sample_seconds=0.01, apply_seconds=0.02)
    rows = [replace(r, cycle_seconds=c) for r, c in zip(rows, closed_form_cycles(true, rows), strict=True)]
    clean = fit(rows, Constants(model_bytes=1.0), resamples=0, engine=False)
    assert not clean.misfit
    fine = tuple(replace(r, workload="fine") for r in rows)
    said = tomllib.loads(to_toml({"toy": bad, "fine": clean}, Recording((*rows, *fine), None, (), (), (), ()), ORIGIN))
    assert said["calibration"]["caveats"] == {"0": f"toy: {bad.misfit}"}
    assert said["workloads"]["toy"]["summary"] == "toy, as recorded: 1 to 4 workers"


@pytest.mark.parametrize(("recorded", "warned"), [(0.01, True), (0.04, False), (0.0, False)])
def test_smaller_errors_are_warned_of_where_recorded_means_are_certain(recorded, warned):
    """Something of 17 % that nothing explains: it may be noise, or what the simulator lacks."""
    true = Constants(model_bytes=1.0, sample_seconds=0.01, apply_seconds=0.02)
    bare = [row(w, s) for w in (1, 2, 3, 4, 6, 8) for s in (1, 2, 3)]
    odd = np.exp(0.17 * np.random.default_rng(1).standard_normal(len(bare)))
    cycle_seconds = closed_form_cycles(true, bare) * odd
    rows = [replace(r, cycle_seconds=c, error=recorded) for r, c in zip(bare, cycle_seconds, strict=True)]
    found = fit(rows, Constants(model_bytes=1.0), resamples=0, engine=False)
    assert 0.05 < found.error < 0.1
    assert ("whose recorded means are within 1.0%" in found.misfit) == warned


@pytest.mark.parametrize(("workers", "words"), [(1, "1 worker"), (2, "2 workers")])
def test_one_number_of_workers_is_no_range(workers, words):
    made = Recording((row(workers, 1), row(workers, 2)), None, (), (), (), ())
    text = to_toml({"toy": fit(made.rows, Constants(), resamples=0, engine=False)}, made, ORIGIN)
    assert tomllib.loads(text)["workloads"]["toy"]["summary"] == f"toy, as recorded: {words}"


def test_a_recording_without_rows_is_an_error():
    with pytest.raises(ValueError, match="no run has both a setting and times"):
        fit_all([], {})


def test_a_workload_borrows_constants_of_the_machines_from_others():
    true = replace(TRUE, apply_exponent=0.6, apply_seconds=0.2)
    busy = [replace(r, workload="busy") for r in timed([r for r in GRID if r.intra_threads == 1], true)]
    idle = timed([row(2, s, b) for s in (1, 8) for b in (8, 32)], true)
    given = dict.fromkeys(("busy", "toy"), Constants(cores=8, model_bytes=1.0))
    found = fit_all(busy + idle, given, resamples=0)
    assert found["toy"].borrowed["apply_exponent"] == pytest.approx(0.6, rel=0.1)


def times(*seconds, error=0.0):
    return tuple(WorkerTime(i, s, error) for i, s in enumerate(seconds))


def test_speeds_of_workers_follow_from_their_compute_times():
    one = row(3, 1, worker_times=times(1.2, 1.2, 2.2), pushes=10)
    assert with_speeds([one])[0].speeds == pytest.approx((1.0, 1.0, 0.545))
    assert with_speeds([one], 0.2)[0].speeds == pytest.approx((1.0, 1.0, 0.5))
    assert with_speeds([replace(one, worker_times=times(1.2, 1.21, 1.2))])[0].speeds == ()


def test_equal_workers_that_differ_by_chance_have_no_speeds():
    """Medians 5 to 10 % apart, each with an error of 4 %: chance. A worker that takes twice as long is slower."""
    apart = times(1.0, 1.06, 0.96, 1.03, error=0.04)
    assert with_speeds([row(4, 1, worker_times=apart, pushes=10)])[0].speeds == ()
    assert len(with_speeds([row(4, 1, worker_times=times(1.0, 1.06, 0.96, 1.03), pushes=10)])[0].speeds) == 4
    slower = times(1.0, 1.06, 0.96, 2.0, error=0.04)
    assert with_speeds([row(4, 1, worker_times=slower, pushes=10)])[0].speeds[3] == pytest.approx(0.515, abs=0.01)
    many = [row(4, s, worker_times=apart, pushes=10) for s in range(1, 33)]  # the same again and again is no chance
    assert many[0].worker_times == apart
    assert len(with_speeds(many)[0].speeds) == 4


@pytest.mark.parametrize("common", [0.0, 0.2])
def test_rows_of_few_workers_tell_the_speeds_that_all_rows_of_their_run_tell(common):
    """The median worker of two is not that of five; and a lone worker may be a quick one."""
    true = (1.5, 1.0, 0.4, 1.0, 0.7)
    crews = [range(5), range(2), range(3), range(4), [0], [2]]
    rows = []
    for slower, crew in zip((1.0, 1.1, 0.9, 1.0, 1.2, 1.0), crews, strict=True):
        timed = tuple(WorkerTime(w, common + slower / true[w], 1e-3) for w in crew)
        rows.append(row(len(crew), 1, worker_times=timed, pushes=10 * len(crew)))
    for crew, told in zip(crews, with_speeds(rows, common), strict=True):
        assert told.speeds == pytest.approx([true[w] for w in crew], abs=0.001)


def of_machines(run, crew, true, disturbed=1.0):
    """A row of workers on the machines of a crew, by name or number, of which each has a `true` speed."""
    seen = enumerate(crew)
    timed = tuple(WorkerTime(w, disturbed / true[name], 1e-3, str(name)) for w, name in seen)
    return replace(row(len(crew), 1, worker_times=timed, pushes=10 * len(crew)), run=run)


@pytest.mark.parametrize("disturbed", [1.0, 1.2])
def test_runs_that_have_some_machines_in_common_tell_their_speeds_together(disturbed):
    """By the median machine of each run, two quick and two slow machines had 1.5 and 0.75 times the speed of the quick ones
    alone, so that predictions were up to 25 % off."""
    true = {"a": 1.0, "b": 1.0, "c": 0.5, "d": 0.5}
    crews = ["ab", "abcd", "cd", "a", "bd"]
    rows = [of_machines(f"{i}", crew, true, disturbed if i == 1 else 1.0) for i, crew in enumerate(crews)]
    found, contradict = on_machines(rows)
    told = [r.speeds or (1.0,) * r.workers for r in with_speeds(found)]
    assert told == [pytest.approx([true[name] for name in crew], abs=0.002) for crew in crews]
    assert not contradict
    # In one row of each machine they are alike, and stay as they are.
    assert on_machines([rows[0], rows[3]])[0] == (rows[0], rows[3])


def test_runs_whose_machines_are_others_tell_speeds_alone():
    """Worker 1 is slow in one run and quick in another: numbers are no machines then, and that is said."""
    one = of_machines("a", (0, 1, 2), {0: 1.0, 1: 0.5, 2: 1.0})
    other = of_machines("b", (0, 1, 2, 3), {0: 0.5, 1: 1.0, 2: 1.0, 3: 1.0})
    assert on_machines([one, other]) == ((one, other), ("a", "b"))


def test_machines_of_about_the_same_speed_are_one_node_type():
    apart = [(1.0, 0.497, 1.0), (0.505, 1.0, 0.99), (1.0, 0.75, 1.0)]
    rows = [
        replace(r, run=r.run + str(i), worker_times=times(*(1 / s for s in speeds)), pushes=10)
        for i, (r, speeds) in enumerate(zip(told_by_formula([row(3, s) for s in (1, 2, 3)], TRUE), apart, strict=True))
    ]
    found = fit(rows, Constants(cores=8, model_bytes=1.0), resamples=0, engine=False)
    said = tomllib.loads(to_toml({"toy": found}, Recording(tuple(rows), None, (), (), (), ()), ORIGIN))
    assert [p["devices"][0]["speed"] for p in said["profiles"].values()] == pytest.approx([0.5, 0.75, 1.0], rel=0.05)


def of_unequal_batches(sizes, speeds, true=TRUE, **more):
    """A row whose workers compute so many samples each, at so many times the usual speed, as the closed form times it."""
    mean = round(sum(sizes) / len(sizes))
    one = row(len(sizes), 1, mean, batch_sizes=tuple(sizes), speeds=speeds, **more)
    compute = [
        0.2 + 2 * 0.01 + 0.02 * size / speed for size, speed in zip(sizes, speeds or (1.0,) * len(sizes), strict=True)
    ]
    timed = tuple(WorkerTime(i, seconds, 1e-3) for i, seconds in enumerate(compute))
    cycle = float(closed_form_cycles(true, [one])[0])
    return replace(one, worker_times=timed, cycle_seconds=cycle, compute_seconds=float(np.mean(compute)), pushes=100)


def test_the_batches_of_single_workers_are_told_apart_from_their_speeds():
    """Three machines, one of half the speed. Small batches took less time, and large ones were no sign of a slow machine."""
    equal, half = (), (1.0, 1.0, 0.5)
    made = [((16, 16, 16), half), ((24, 16, 8), equal), ((64, 64, 64), equal), ((10, 30, 8), half), ((90, 60, 30), half)]
    rows = [
        replace(of_unequal_batches(sizes, speeds, policy=policy), run=f"{i}")
        for policy in ("bsp", "asp")
        for i, (sizes, speeds) in enumerate(made)
    ]
    given = Constants(cores=1, model_bytes=1.0, jitter=0.1)
    found = fit(with_speeds(rows), given, engine=False, resamples=0)
    assert found.constants.sample_seconds == pytest.approx(0.02, rel=0.05)
    assert found.error < 0.02
    told = with_speeds(rows, found.common_seconds)
    for one, (_, speeds) in zip(told, 2 * made, strict=True):
        assert (one.speeds or (1.0,) * 3) == pytest.approx(speeds or (1.0,) * 3, rel=0.1)


def test_what_a_fit_to_equal_workers_tells_holds_for_unlike_ones():
    """The part of computing that is common to all is not longer on a slower machine, whose run the fit has not seen."""
    seen = [of_unequal_batches((size,) * 3, (), policy=policy) for policy in ("bsp", "asp") for size in (8, 16, 64)]
    found = fit(seen, Constants(cores=1, model_bytes=1.0, jitter=0.1), engine=False, resamples=0)
    other = [replace(of_unequal_batches((size,) * 3, (1.0, 1.0, 0.5)), run="other") for size in (8, 64)]
    for told in with_speeds(other, found.common_seconds):
        assert told.speeds == pytest.approx((1.0, 1.0, 0.5), rel=0.05)


def test_unequal_batches_explain_what_looks_like_noise():
    """Synchronous runs without times of computing: a step takes as long as the largest mini-batch."""
    sizes = ((), (28, 4), (16, 16, 16, 16), (40, 8, 8, 8), (100, 20), (60, 60, 60, 60), (30, 30, 30, 150))
    bare = [row(len(one) or 2, s, round(np.mean(one or 16)), policy="bsp", batch_sizes=one) for one in sizes for s in (1, 2)]
    rows = told_by_formula(bare, replace(TRUE, message_seconds=0.0))
    given = Constants(cores=1, model_bytes=1.0, jitter=0.1)
    told, ignored = (fit(r, given, engine=False) for r in (rows, [replace(x, batch_sizes=()) for x in rows]))
    assert 5 * told.error < 0.05 < ignored.error


def test_a_barrier_waits_for_the_largest_batch():
    quiet = Constants(cores=1, sample_seconds=0.01, jitter=0.0)
    uneven, even = row(2, 1, 32, policy="bsp", batch_sizes=(48, 16)), row(2, 1, 32, policy="bsp")
    assert predicted(quiet, [uneven, even]) == pytest.approx([0.48, 0.32], rel=1e-3)
    assert closed_form_cycles(quiet, [uneven, even]) == pytest.approx([0.48, 0.32], rel=1e-3)


def test_predictions_use_the_speeds_of_the_fit(monkeypatch):
    """Two workers of three are faster; without the time that is common to all, the difference is larger."""
    apart = times(0.8, 0.8, 1.1)
    rows = with_speeds([row(3, servers, worker_times=apart, pushes=10) for servers in (1, 2)])
    found = fit(rows[:1], TRUE, resamples=0, engine=False)
    assert found.common_seconds == pytest.approx(0.2 + 2 * 0.01)
    monkeypatch.setattr(validation, "fit_all", lambda *_, **__: {"toy": found})
    made = check(Recording(rows, None, (), (), (), ()), {"toy": TRUE}, ORIGIN, 2)
    told = predicted(found.constants, with_speeds(rows, 0.22))
    assert not np.allclose(told, predicted(found.constants, rows), rtol=0.01)
    assert [p.fitted for p in made.predictions] == pytest.approx(told)
    assert [p.held_out for p in made.predictions] == pytest.approx(told)


# ------------------------------------------------------------------------------------------------------------ recordings


def tables(runs, settings, **others):
    return {"runs": table("runs", runs), "settings": table("settings", settings)} | {
        name: table(name, rows) for name, rows in others.items()
    }


def test_rows_of_whole_runs():
    runs = [
        {"run": "a", "workload": "x", "seconds": 100.0, "steps": 1000},
        {"run": "b", "workload": "x", "samples_per_second": 64.0, "extras": '{"total_batch_size": 128}'},
        {"run": "c", "workload": "x", "trimmed_seconds": 50.0, "steps": 100},
    ]
    settings = [
        {"run": "a", "seconds": 0.0, "workers": 4, "servers": 2, "policy": "asp", "batch_size": 8, "intra_threads": 2},
        {"run": "b", "seconds": 0.0, "workers": 4, "servers": 2, "policy": "bsp"},
        {"run": "c", "seconds": 0.0, "workers": 4, "servers": 2, "policy": "bsp", "batch_size": 8},
    ]
    found = read_tables(tables(runs, settings))
    assert [r.cycle_seconds for r in found.rows] == pytest.approx([0.4, 2.0, 0.5])
    assert [r.batch_size for r in found.rows] == [8, 32, 8]
    assert "1 runs (x) have trimmed seconds only" in found.caveats[0]


def test_what_a_user_left_out_of_a_recording_is_said():
    """An unknown policy, no servers, no time, no batch size and no policy: before, three of them ended in a traceback."""
    usual = {"seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}
    other = [{"policy": "ring"}, {"servers": 0}, {}, {"batch_size": 0}, {"policy": None}]
    settings = [usual | changed | {"run": str(i)} for i, changed in enumerate([{}, *other])]
    runs = [{"run": str(i), "workload": "x", "seconds": 10.0 * (i != 3), "steps": 10} for i in range(6)]
    found = read_tables(tables(runs, settings))
    assert [(r.run, r.policy, r.batch_size, r.cycle_seconds) for r in found.rows] == [
        ("0", "bsp", 8, 1.0),
        ("4", "bsp", 1, 1.0),
        ("5", "asp", 8, 2.0),
    ]
    for why in (
        "policy ring are left out",
        "write bsp where all workers wait for each other, asp where none waits",
        "without workers and servers",
        "no seconds",
        "no batch size",
        "no policy",
    ):
        assert sum(f"1 settings {why}" in c or why in c for c in found.caveats) == 1, why


def test_cycles_of_minutes_are_asked_for_their_unit():
    setting = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}
    for seconds, said in ((150.0, ()), (150_000.0, ("a cycle takes 150 s in the median; if these are milliseconds,",))):
        found = read_tables(tables([{"run": "a", "workload": "x", "seconds": seconds, "steps": 1000}], [setting]))
        assert tuple(caveat[: len(said[0])] for caveat in found.caveats) == said if said else not found.caveats


def test_pushes_without_computing_or_without_time_are_no_parts_of_a_cycle():
    settings = [{"run": "a", "seconds": 0.0, "workers": 1, "servers": 1, "policy": "asp", "batch_size": 8}]
    pushes = [{"run": "a", "worker": 0, "clock": i, "seconds": i + 1.0, "compute_seconds": 0.0} for i in range(20)]
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert not found.rows[0].has_parts
    still = read_tables(tables([{"run": "a"}], settings, iterations=[p | {"seconds": 5.0} for p in pushes]))
    assert (still.rows, "no seconds" in still.caveats[0]) == ((), True)


def test_iterations_without_a_row_are_counted_by_the_numbers_of_the_others():
    """Of three workers that push once per second, every tenth row is lost: a cycle takes a second, and not 10 / 9. Numbers
    of the job's steps have gaps in each worker's rows, too, and tell nothing of lost ones."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    every = [{"run": "a", "worker": w, "clock": i, "seconds": i + 0.3 * w} for i in range(200) for w in range(3)]
    kept = [p for n, p in enumerate(every) if n % 10 != 4]
    found = read_tables(tables([{"run": "a"}], settings, iterations=kept))
    assert found.rows[0].cycle_seconds == pytest.approx(1.0, rel=0.01)
    assert "in 1 settings some iterations have no row, 10.0% in the median" in found.caveats[0]
    assert found.rows[0].all_pushes == pytest.approx(600, abs=2)
    steps = [p | {"clock": 3 * p["clock"] + p["worker"]} for p in every]
    whole = read_tables(tables([{"run": "a"}], settings, iterations=steps))
    assert whole.rows[0].cycle_seconds == pytest.approx(1.0, rel=0.01)
    assert not whole.caveats


def test_lost_rows_before_the_first_and_after_the_last_are_no_longer_cycles():
    """Two workers push once per second each. Of one, rows are lost in the middle and at the end."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}]
    every = [{"run": "a", "worker": w, "clock": i, "seconds": i + 0.5 * w} for i in range(20) for w in range(2)]
    kept = [p for p in every if not (p["worker"] and p["clock"] in (9, 10, 18, 19))]
    found = read_tables(tables([{"run": "a"}], settings, iterations=kept))
    assert found.rows[0].cycle_seconds == pytest.approx(1.0)


STEADY = {"seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}


def pushing(counts, run="a", since=0.0, cycle=1.0, first=(0.0, 0.0)):
    """Pushes of workers, so many of each, that take a `cycle` each; worker w begins at `first[w]`."""
    made = [
        {"run": run, "worker": w, "clock": i, "seconds": since + first[w] + cycle * (i + 1 - 0.3 * w)}
        for w, count in enumerate(counts)
        for i in range(count)
    ]
    return sorted(made, key=lambda push: push["seconds"])


@pytest.mark.parametrize(
    ("counts", "first", "used"),
    [((50, 20), (0.0, 0.0), "from 0 to 19"), ((50, 50), (0.0, 20.0), "from 19.7 to 49 of 68.7"), ((50, 49), (0.0, 0.0), "")],
    ids=["lost", "another clock", "all"],
)
def test_only_the_time_in_which_all_workers_push_tells_of_cycles(counts, first, used):
    """A worker that was lost halfway, or whose machine has another clock, made cycles 1.4 times as long, without a word."""
    found = read_tables(tables([{"run": "a"}], [STEADY | {"run": "a"}], iterations=pushing(counts, first=first)))
    assert found.rows[0].cycle_seconds == pytest.approx(1.0, rel=0.02)
    assert [used in caveat for caveat in found.caveats] == [True] * bool(used)


def stopping(runs, stops):
    """Pushes of runs of 60 cycles of 1 s of two workers, which begin with `stops` of 30 s: by run, worker and cycle."""
    stopped = dict.fromkeys(stops, 30.0)
    made = []
    for run in runs:
        for worker in range(2):
            computing = [1.0 + stopped.get((run, worker, i), 0.0) + 0.01 * (i % 3) for i in range(60)]
            made += [
                {"run": run, "worker": worker, "clock": i, "seconds": 0.3 * worker + float(end), "compute_seconds": took}
                for i, (took, end) in enumerate(zip(computing, np.cumsum(computing), strict=True))
            ]
    return sorted(made, key=lambda push: push["seconds"])


@pytest.mark.parametrize(
    "stops",
    [
        [("a", 1, 40)],
        [("a", 0, 20), ("b", 0, 40)],
        [("a", w, i) for w in (0, 1) for i in (10, 35)],
        [("a", w, 15 * i + 9 * w) for w in (0, 1) for i in (1, 2, 3)],
    ],
    ids=["one", "two", "both within the warm-up and later", "a sleep in every twentieth"],
)
def test_a_worker_that_stands_still_once_or_twice_tells_no_sleeps(stops):
    """One of 360 mini-batches that took 30 s was simulated in all predictions, 30 s in every 360th, and made a cycle of its
    setting 1.6 times as long. Where workers stand still often, that is a part of what cycles take."""
    settings = [STEADY | {"run": run} for run in "abc"]
    found = read_tables(tables([{"run": run} for run in "abc"], settings, iterations=stopping("abc", stops)))
    few = len(stops) < 5
    assert ([row.cycle_seconds for row in found.rows] == pytest.approx([1.01] * 3, rel=0.02)) == few
    assert (found.noise.sleeps is None) == few
    assert any("settings a worker stood still by itself: a for 31 s" in caveat for caveat in found.caveats) == few


def test_iterations_without_times_are_said_to_have_none():
    """Their run was said to have no iterations."""
    untimed = [{k: v for k, v in push.items() if k != "seconds"} | {"pull_seconds": 0.2} for push in pushing((9, 9), "b")]
    settings, runs = [STEADY | {"run": "a"}, STEADY | {"run": "b"}], [{"run": "a"}, {"run": "b"}]
    found = read_tables(tables(runs, settings, iterations=pushing((50, 50)) + untimed))
    assert [row.run for row in found.rows] == ["a"]
    (said,) = found.caveats
    assert said.startswith("1 runs are left out: their iterations have no seconds, so that cycles are not known; write")
    alone = read_tables(tables(runs[1:], settings[1:], iterations=untimed))
    assert not alone.rows
    assert "seconds, or step_seconds" in alone.caveats[0]


def test_workers_that_never_push_at_the_same_time_are_said_to_be_so():
    """The clock of one machine is an hour ahead, as in another time zone. A range that ends before it begins was named."""
    pushes = [push | {"seconds": push["seconds"] + 3600.0 * push["worker"]} for push in pushing((50, 50))]
    found = read_tables(tables([{"run": "a"}], [STEADY | {"run": "a"}], iterations=pushes))
    assert not found.rows
    assert "a, in which they never do; were workers lost, or do the clocks of machines differ?" in found.caveats[0]


@pytest.mark.parametrize(("slower", "rates", "said"), [(3.0, (), True), (1.2, (), False), (3.0, (3e6, 1e6, 3e6), False)])
def test_workers_whose_links_seem_slow_are_told_where_no_rates_are_recorded(slower, rates, said):
    """That something is lacking was said, and not what."""
    whole = setting_text(Setting(workers=("n0", "n1"), servers=("n2",)))
    nodes = {f"n{i}": {"nic_bytes_per_second": rate} for i, rate in enumerate(rates)}
    settings = [STEADY | {"run": "a"} | ({"setting": whole} if rates else {})]
    pushes = [
        push | {"pull_seconds": took, "push_seconds": took}
        for push in pushing((50, 50))
        for took in [0.1 * (slower if push["worker"] else 1.0)]
    ]
    found = read_tables(tables([{"run": "a", "extras": json.dumps({"nodes": nodes})}], settings, iterations=pushes))
    assert ["take longer than those beside them: worker 1 of a 3 times" in caveat for caveat in found.caveats] == [
        True
    ] * said


@pytest.mark.parametrize("late", [0.0, 0.8])
def test_the_last_push_of_a_worker_that_leaves_is_of_the_setting_before(late):
    """It is in flight when the setting changes, or its clock is late. Before, the whole setting after it was left out."""
    settings = [STEADY | {"run": "a", "workers": 3}, STEADY | {"run": "a", "seconds": 40.0}]
    leaving = pushing((0, 0, 41), first=(0.0, 0.0, 0.2 + late))
    pushes = sorted(pushing((100, 100)) + leaving, key=lambda push: push["seconds"])
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert [(row.workers, row.cycle_seconds) for row in found.rows] == [(3, pytest.approx(1.0)), (2, pytest.approx(1.0))]
    assert not found.caveats


def test_more_workers_than_a_setting_has_are_told():
    found = read_tables(tables([{"run": "a"}], [STEADY | {"run": "a"}], iterations=pushing((50, 50, 50), first=(0.0,) * 3)))
    assert "1 settings are left out: more workers pushed than they have" in found.caveats[0]


@pytest.mark.parametrize(("at", "said"), [(10.0, "19 iterations before the first setting of their run"), (0.0, "")])
def test_iterations_before_the_first_setting_are_told(at, said):
    settings = [STEADY | {"run": "a", "seconds": at}, STEADY | {"run": "b"}]
    found = read_tables(tables([{"run": "a"}, {"run": "b"}], settings, iterations=pushing((30, 30)) + pushing((9, 9), "b")))
    assert [said in caveat for caveat in found.caveats] == [True] * bool(said)


@pytest.mark.parametrize(("slow", "said"), [(2.0, True), (1.0, False)])
def test_cycles_that_get_shorter_for_longer_than_the_warm_up_are_told(slow, said):
    """A start that is slow for two fifths of one setting of eight: its first fifth alone is left out as a warm-up. Before,
    more than a fifth of the settings had to be so."""
    rng = np.random.default_rng(0)
    pushes, runs = [], "abcdefgh"
    for run in runs:
        cycles = np.where((np.arange(200) < 80) & (run == "a"), slow, 1.0) * np.exp(0.1 * rng.standard_normal((3, 200)))
        pushes += [
            {"run": run, "worker": w, "clock": i, "seconds": float(end)}
            for w, each in enumerate(cycles)
            for i, end in enumerate(np.cumsum(each))
        ]
    pushes.sort(key=lambda push: push["seconds"])
    settings = [STEADY | {"run": run, "workers": 3} for run in runs]
    found = read_tables(tables([{"run": run} for run in runs], settings, iterations=pushes))
    assert ["in 1 of 8 settings cycles are not steady: a from " in caveat for caveat in found.caveats] == [True] * said


def test_settings_of_few_iterations_and_runs_without_any_are_said_to_be_left_out():
    settings = [STEADY | {"run": run} for run in "abc"]
    pushes = pushing((20, 20)) + pushing((2, 2), run="b")
    found = read_tables(tables([{"run": run} for run in "abc"], settings, iterations=pushes))
    assert [row.run for row in found.rows] == ["a"]
    assert found.caveats == (
        "1 settings are left out: they have less than 3 iterations of each worker",
        "1 runs are left out: they have no iterations, and others have; calibrate to them alone",
    )


@pytest.mark.parametrize("strange", [{"policy": "ring"}, {"options": '{"local_steps": 4}'}, {"servers": 0}])
@pytest.mark.parametrize("recorded", ["iterations", "progress"])
def test_what_was_recorded_under_a_setting_that_is_left_out_is_none_of_the_one_before(strange, recorded):
    """Its cycles are three times as long, and counted as those of the setting before."""
    settings = [STEADY | {"run": "a", "seconds": at} | more for at, more in ((0.0, {}), (40.0, strange), (160.0, {}))]
    pushes = pushing((40, 40)) + pushing((40, 40), since=40.0, cycle=3.0) + pushing((40, 40), since=160.0)
    progress = [{"run": "a", "seconds": push["seconds"], "steps": i} for i, push in enumerate(pushes)]
    told = {"iterations": pushes} if recorded == "iterations" else {"progress": progress}
    found = read_tables(tables([{"run": "a"}], settings, **told))
    assert [row.cycle_seconds for row in found.rows] == pytest.approx([1.0, 1.0], rel=0.03)


@pytest.mark.parametrize("wanted", [EVERYTHING, Selection(workers=(2, 2))])
def test_totals_of_several_settings_are_of_none_of_them(wanted):
    """Neither where only one of them can be simulated, nor where only one is selected."""
    more = {"policy": "ring"} if wanted == EVERYTHING else {"workers": 3}
    settings = [STEADY | {"run": "a"}, STEADY | {"run": "a", "seconds": 5.0} | more, STEADY | {"run": "b"}]
    runs = [{"run": run, "seconds": 10.0, "steps": 10} for run in "ab"]
    found = read_tables(tables(runs, settings), wanted=wanted)
    assert [row.run for row in found.rows] == ["b"]
    assert "1 runs with several settings have totals only, and are left out: record progress" in found.caveats


def test_pushes_may_have_durations_only():
    """Each worker's follow each other: one of .5 s and one of 1 s complete three pushes per second."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp", "batch_size": 8}]
    took = [(0, 0.5, 40), (1, 1.0, 20)]
    pushes = [
        {"run": "a", "worker": w, "clock": i, "step_seconds": t, "compute_seconds": 0.8 * t}
        for w, t, count in took
        for i in range(count)
    ]
    found = read_tables(tables([{"run": "a"}], settings, iterations=pushes))
    assert found.rows[0].cycle_seconds == pytest.approx(2 / 3, rel=0.05)
    assert found.rows[0].speeds == pytest.approx((1.5, 0.75))
    assert found.caveats[0].startswith("pushes have no times, only durations")


@pytest.mark.parametrize(
    ("changed", "rows", "why"),
    [
        ({"workers": 2}, 0, "1 settings are left out: more workers pushed than they have"),
        ({"workers": 4}, 1, "in 1 settings fewer workers pushed than they have"),
        ({"workers": 3}, 1, None),
    ],
)
def test_workers_that_pushed_are_held_against_those_of_the_setting(changed, rows, why):
    setting = {"run": "a", "seconds": 0.0, "servers": 1, "policy": "asp", "batch_size": 8}
    found = read_tables(tables([{"run": "a"}], [setting | changed], iterations=iterations()))
    assert len(found.rows) == rows
    assert [c.startswith(why) for c in found.caveats] == [True] if why else found.caveats == ()


def test_parts_that_do_not_fit_into_their_cycle_are_told():
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    longer = [push | {"pull_seconds": 0.3} for push in iterations()]
    found = read_tables(tables([{"run": "a"}], settings, iterations=longer))
    assert found.caveats[0].startswith("in 1 settings the parts of a cycle take longer than the cycle")


@pytest.mark.parametrize("part", ["compute_seconds", "pull_seconds", "push_seconds"])
def test_parts_in_milliseconds_beside_moments_in_seconds_are_refused(part):
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    wrong = [push | {part: 1000 * push[part]} for push in iterations()]
    with pytest.raises(ValueError, match=rf"Cannot read {part}: it is \d+ times as long as the cycle .* one unit, seconds"):
        read_tables(tables([{"run": "a"}], settings, iterations=wrong))


@pytest.mark.parametrize(("repeats", "error"), [(1, 0.1 / 10), (5, 0.1 / 10 * 5**0.5)])
def test_the_error_of_a_recorded_mean_is_from_how_its_cycles_vary(repeats, error):
    """A worker's 100 cycles, without the warm-up, vary by a tenth; where five in a row are alike, there are 20 to tell."""
    rng, runs, pushes = np.random.default_rng(0), [str(i) for i in range(24)], []
    for run in runs:
        took = np.exp(0.1 * rng.standard_normal(125 // repeats)).repeat(repeats)
        pushes += [{"run": run, "worker": 0, "clock": i, "seconds": t} for i, t in enumerate(np.cumsum(took))]
    settings = [{"run": run, "seconds": 0.0, "workers": 1, "servers": 1, "policy": "asp", "batch_size": 8} for run in runs]
    found = read_tables(tables([{"run": run} for run in runs], settings, iterations=pushes))
    assert [row.error for row in found.rows] == pytest.approx([error] * 24, rel=0.3)


@pytest.mark.parametrize(
    ("told", "sizes", "mean"),
    [
        ({"batch_size": 8, "options": '{"batch_sizes": [48, 16]}'}, (48, 16), 32),
        ({"options": '{"batch_sizes": [20, 20]}'}, (), 20),
        ({"batch_size": 32, "setting": [[40, 8], [16, 0]]}, (48, 16), 32),
        ({"batch_size": 32}, (), 32),
    ],
)
def test_batches_of_single_workers_are_read(told, sizes, mean):
    given = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp"} | told
    if "setting" in told:
        loads = tuple(map(tuple, told["setting"]))
        given["setting"] = setting_text(Setting(workers=("v", "w"), servers=("a",), loads=loads))
    found = read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10}], [given]))
    assert (found.rows[0].batch_sizes, found.rows[0].batch_size) == (sizes, mean)


@pytest.mark.parametrize("sizes", ["[48]", "[48, 0]", "[48, 16.5]", '"48,16"', "[48, true]"])
def test_batches_that_are_none_are_refused(sizes):
    given = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "options": f'{{"batch_sizes": {sizes}}}'}
    with pytest.raises(ValueError, match=r"Cannot read the batch sizes .* of run 'a': give 2 whole numbers, one per worker"):
        read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10}], [given]))


@pytest.mark.parametrize(
    ("extras", "why"),
    [
        ('{"nodes": [1]}', "`object`, got `array` - at `$.nodes`"),
        ('{"nodes": {"n0": {"nic_bytes_per_second": 0}}}', "nic_bytes_per_second"),
        ('{"n_stragglers": "two", "straggler_delay_ms": 10}', "n_stragglers"),
        ('{"total_batch_size": "many"}', "total_batch_size"),
    ],
)
def test_extras_that_cannot_be_read_are_named(extras, why):
    """Before, two of them ended in a traceback, and two in a message that named no run."""
    given = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp"}
    with pytest.raises(
        ValueError, match=f"Cannot read the extras of run 'a'.*{re.escape(why)}.*correct it, or leave it out"
    ):
        read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10, "extras": extras}], [given]))


@pytest.mark.slow
def test_totals_are_fitted_from_both_starts_and_the_better_fit_is_kept(monkeypatch):
    """Totals of a made-up job with a model of 223 MB: its links are busy, and its updates are too short to be told. Started
    where updates are slow, the search ends in updates of 0.14 s, a model of 210 MB, and twice the error."""
    monkeypatch.setattr(search, "least_squares", least_squares)  # to the end: the two optima are near each other
    monkeypatch.setattr(search, "_ROUNDS", 2)
    recorded = [
        (row(1, 2, 64, model_shares=(0.29, 0.71)), 1.1986),
        (row(1, 3, 16, policy="bsp", model_shares=(0.179, 0.36, 0.461)), 0.6897),
        (row(1, 3, 64, policy="bsp", model_shares=(0.273, 0.339, 0.388)), 1.2129),
        (row(4, 2, 16, policy="bsp", model_shares=(0.324, 0.676)), 1.2607),
        (row(4, 2, 64, policy="bsp", model_shares=(0.658, 0.342)), 1.8006),
        (row(4, 2, 64, model_shares=(0.543, 0.457)), 1.2857),
        (row(6, 1, 16, policy="bsp"), 2.5311),
        (row(6, 2, 16, model_shares=(0.393, 0.607)), 0.8735),
        (row(6, 2, 64, model_shares=(0.49, 0.51)), 1.2547),
        (row(6, 3, 16, model_shares=(0.387, 0.258, 0.355)), 0.649),
    ]
    rows = [replace(setting, intra_threads=0, cycle_seconds=seconds) for setting, seconds in recorded]
    found = fit(rows, Constants(cores=1, jitter=0.1), resamples=0)
    assert found.constants.model_bytes == pytest.approx(223e6, rel=0.05)
    assert "apply_seconds" in found.refused
    assert found.error < 0.04


def test_a_setting_that_is_given_twice_counts_once_and_totals_of_several_are_said():
    one = {"run": "a", "seconds": 0.0, "workers": 2, "servers": 1, "policy": "bsp", "batch_size": 8}
    other = one | {"run": "b"}
    runs = [{"run": name, "workload": "x", "seconds": 10.0, "steps": 10} for name in "ab"]
    found = read_tables(tables(runs, [one, one, other, other | {"seconds": 5.0, "workers": 3}]))
    assert [r.run for r in found.rows] == ["a"]
    assert found.caveats == ("1 runs with several settings have totals only, and are left out: record progress",)


@pytest.mark.parametrize(
    ("told", "name"),
    [
        ({"options": '{"local_steps": 4}'}, "local_steps"),
        ({"setting": {"local_steps": 4}}, "local_steps"),
        ({"setting": {"node_steps": (("w", 2),)}}, "node_steps"),
        ({"setting": {"pull_clocks": 3}}, "pull_clocks"),
        ({"setting": {"policy": "quorum", "quorum": 1, "grace_seconds": 0.1}}, "quorum"),
        ({"setting": {"checkpoint_seconds": 60.0}}, "checkpoint_seconds"),
        ({"setting": {"cache_rows": 10, "cache_clocks": 4}}, "cache_rows"),
    ],
)
def test_settings_whose_times_no_row_tells_are_left_out_with_a_note(told, name):
    plain = {"seconds": 0.0, "workers": 1, "servers": 1, "policy": "asp"}
    if "setting" in told:
        told = {"setting": setting_text(Setting(workers=("w",), servers=("a",), **told["setting"]))}
    runs = [{"run": run, "seconds": 10.0, "steps": 10} for run in "ab"]
    found = read_tables(tables(runs, [{"run": "a"} | plain, {"run": "b"} | plain | told]))
    assert [r.run for r in found.rows] == ["a"]
    assert f"1 settings with {name} are left out: calibration does not know what it costs" in found.caveats


def test_options_that_differ_and_are_not_used_are_named():
    plain = {"seconds": 0.0, "workers": 2, "servers": 1, "policy": "asp"}
    told = ['{"fused": 1, "fuel": 1, "batch_sizes": [8, 16]}', '{"fused": 0, "fuel": 1}']
    runs = [{"run": run, "seconds": 10.0, "steps": 10} for run in "ab"]
    settings = [{"run": run, "options": options} | plain for run, options in zip("ab", told, strict=True)]
    found = read_tables(tables(runs, settings))
    assert "options that differ between settings are not used: fused" in found.caveats
    assert len(found.rows) == 2


def test_steps_and_seconds_are_enough_of_progress():
    settings = [{"run": "a", "seconds": 0.0, "workers": 4, "servers": 4, "policy": "bsp", "batch_size": 8}]
    progress = [{"run": "a", "seconds": 2.0 * i, "steps": 10 * i} for i in range(8)]
    found = read_tables(tables([{"run": "a"}], settings, progress=progress))
    assert [r.cycle_seconds for r in found.rows] == [pytest.approx(0.2)]


@pytest.mark.parametrize("policy", ["bsp", "asp"])
def test_brief_pauses_between_records_of_progress_do_not_count(policy):
    """An evaluation of 20 s after every fourth record, which are 40 pushes of four workers apart."""
    settings = [{"run": "a", "seconds": 0.0, "workers": 4, "servers": 4, "policy": policy, "batch_size": 8}]
    progress = [{"run": "a", "seconds": 2.0 * i + 20.0 * (i // 4), "steps": 40 * i} for i in range(16)]
    (found,) = read_tables(tables([{"run": "a"}], settings, progress=progress)).rows
    assert found.cycle_seconds == pytest.approx(0.2 if policy == "asp" else 0.05)


def test_a_recording_of_which_no_row_is_left_says_why(tmp_path, capsys):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "settings.csv").write_text("seconds,workers,servers,policy\n0,2,1,ring\n")
    (tmp_path / "mine" / "runs.csv").write_text("run,seconds,steps\nmine,10,10\n")
    assert main.main(["trace", "convert", str(tmp_path / "mine"), "--out", str(tmp_path / "trace")]) == 0
    assert main.main(["calibrate", str(tmp_path / "trace"), "--out", str(tmp_path / "made.toml")]) == 2
    assert "policy ring are left out: it cannot be simulated; write bsp where all workers wait" in capsys.readouterr().err


def test_rows_of_progress_leave_out_pauses_and_intervals_between_settings():
    settings = [
        {"run": "a", "seconds": 0.0, "workers": 4, "servers": 4, "policy": "bsp", "batch_size": 8},
        {"run": "a", "seconds": 1000.0, "workers": 4, "servers": 4, "policy": "asp", "batch_size": 8},
    ]
    seconds = [0.0, 10.0, 20.0, 90.0, 100.0, 1000.0, 1010.0, 1020.0, 1030.0]
    steps = [0, 10, 20, 30, 40, 50, 90, 130, 170]
    progress = [{"run": "a", "seconds": t, "steps": s, "training_loss": 1.0} for t, s in zip(seconds, steps, strict=True)]
    changes = [{"run": "a", "seconds": 1000.0, "method": "checkpoint", "total_seconds": 180.0, "done": True}]
    runs = [{"run": "a", "workload": "x"}, {"run": "b", "workload": "x", "extras": '{"n_stragglers": 1}'}]
    found = read_tables(tables(runs, settings, progress=progress, reconfigurations=changes))
    assert [(r.policy, r.cycle_seconds) for r in found.rows] == [("bsp", pytest.approx(1.0)), ("asp", pytest.approx(1.0))]
    assert found.switch_seconds == (180.0,)
    assert "stragglers" in found.caveats[0]


def test_runs_with_delayed_links_are_rows_with_their_delays():
    """Of the first stragglers, or by node; a run whose stragglers come and go, or are of unknown size, is left out."""
    known = {"s": '{"n_stragglers": 2, "straggler_delay_ms": 30}'}
    left = {"t": '{"n_stragglers": 1}', "u": '{"n_stragglers": 1, "straggler_delay_ms": 9, "straggler_freq": "4"}'}
    nodes = json.dumps({"nodes": {"n1": {"link_delay_seconds": 0.01}}})
    runs = [
        {"run": run, "workload": "x", "seconds": 10.0, "steps": 30, "extras": extras}
        for run, extras in (known | left | {"v": nodes}).items()
    ]
    named = setting_text(Setting(workers=("n0", "n1", "n2"), servers=("n3",)))
    set_to = [{"run": r["run"], "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8} for r in runs]
    set_to[-1]["setting"] = named
    found = read_tables(tables(runs, set_to))
    assert {row.run: row.delays for row in found.rows} == {"s": (0.03, 0.03, 0.0), "v": (0.0, 0.01, 0.0, 0.0)}
    assert found.rows[0].unlike == {"delays"}
    assert "2 runs with stragglers are left out" in found.caveats[0]


def test_a_delayed_link_makes_the_mini_batches_of_its_worker_longer():
    """Alone, a worker waits for so many messages; the closed form and the engine agree. The fit finds their number."""
    constants = replace(TRUE, jitter=0.0, delay_messages=5.0)
    plain, delayed = row(1, 1), row(1, 1, delays=(0.1, 0.2))
    longer = predicted(constants, [delayed]) - predicted(constants, [plain])
    assert longer == pytest.approx([5 * 0.3])
    spans = closed_form.spans([plant(constants, r) for r in (plain, delayed)], [False, False])
    assert np.diff(spans.cycle) == pytest.approx([5 * 0.3])
    rows = [row(w, 2, batch, delays=d) for w, batch in ((2, 8), (6, 32)) for d in ((), (0.2,), (0.1, 0.1))]
    found = fit(timed(rows, constants), Constants(cores=8, model_bytes=1.0, jitter=0.0), resamples=0)
    assert found.constants.delay_messages == pytest.approx(5, rel=0.1)
    none = told_by_formula([row(w, 2) for w in (2, 4)], TRUE)
    assert "delay_messages" in fit(none, Constants(model_bytes=1.0), resamples=0, engine=False).refused


def iterations(workers=3, cycles=60, sleepy=False):
    """Pushes of a worker that computes for half a second, more or less, and pulls and pushes for a tenth each."""
    rng = np.random.default_rng(0)
    rows = []
    for worker in range(workers):
        compute = 0.5 * np.exp(0.1 * rng.standard_normal(cycles))
        compute[::20] += 5.0 * sleepy
        ends = np.cumsum(compute + 0.2)
        for clock, (c, end) in enumerate(zip(compute, ends, strict=True)):
            rows.append({"run": "a", "seconds": end, "worker": worker, "clock": clock, "compute_seconds": c})
            rows[-1] |= {"pull_seconds": 0.1, "push_seconds": 0.1, "wait_seconds": 0.0}
    return sorted(rows, key=lambda r: r["seconds"])


@pytest.mark.parametrize("sleepy", [False, True])
def test_rows_and_noise_of_iterations(sleepy):
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    made = tables([{"run": "a", "workload": "x"}], settings, iterations=iterations(sleepy=sleepy))
    found = read_tables(made)
    assert found.rows[0].cycle_seconds == pytest.approx(0.7 + 0.25 * sleepy, rel=0.1)
    assert found.rows[0].pull_seconds == pytest.approx(0.1)
    assert found.noise.jitter == pytest.approx(0.1, rel=0.25)
    assert (found.noise.sleeps is not None) == sleepy
    if sleepy:
        assert found.noise.sleeps.probability == pytest.approx(0.05, rel=0.5)
        assert found.noise.sleeps.mean_seconds == pytest.approx(5.0, rel=0.1)


def test_rows_leave_out_pushes_during_a_reconfiguration():
    settings = [
        {"run": "a", "seconds": at, "workers": 3, "servers": 1, "policy": "asp", "batch_size": batch}
        for at, batch in ((0.0, 8), (30.0, 16))
    ]
    slow = [r | {"compute_seconds": 5.0} if 20.0 < r["seconds"] <= 30.0 else r for r in iterations()]
    changes = [{"run": "a", "seconds": 30.0, "method": "migrate", "total_seconds": 10.0}]
    found = read_tables(tables([{"run": "a", "workload": "x"}], settings, iterations=slow, reconfigurations=changes))
    assert [r.batch_size for r in found.rows] == [8, 16]
    assert max(r.compute_seconds for r in found.rows) < 0.6


def test_a_failed_reconfiguration_splits_its_setting_into_two_rows():
    settings = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8}]
    changes = [{"run": "a", "seconds": 30.0, "method": "migrate", "total_seconds": 10.0, "done": False}]
    found = read_tables(tables([{"run": "a", "workload": "x"}], settings, iterations=iterations(), reconfigurations=changes))
    assert [r.cycle_seconds for r in found.rows] == pytest.approx([0.7, 0.7], rel=0.1)
    assert [r.all_seconds for r in found.rows] == pytest.approx([20.0, 12.0], rel=0.1)


def test_rows_have_the_links_of_their_nodes():
    """Links of two rates: a row's NICs are those of its workers, then of its servers, over the usual one."""
    nodes = {f"n{i}": {"nic_bytes_per_second": rate} for i, rate in enumerate((1e6, 2e6, 1e6, 5e5))}
    names = setting_text(Setting(workers=("n0", "n1", "n2"), servers=("n3",)))
    set_to = [{"run": "a", "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8, "setting": names}]
    runs = [{"run": "a", "workload": "x", "extras": json.dumps({"nodes": nodes})}]
    found = read_tables(tables(runs, set_to, iterations=iterations()))
    (one,) = found.rows
    assert found.nic_bytes_per_second == 1e6
    assert one.nics == (1.0, 2.0, 1.0, 0.5)
    assert one.all_pushes == 180
    assert one.all_seconds == pytest.approx(60 * 0.7, rel=0.1)
    made = cluster(replace(TRUE, nic_bytes_per_second=1e6), one.setting_only())
    assert [kind.nic_bytes_per_second for _, kind in made.nodes] == [1e6, 2e6, 1e6, 5e5]


@pytest.mark.parametrize(
    ("told", "shares", "inferred"),
    [
        ({"options": '{"model_shares": [3, 1]}', "extras": '{"server_cpus": [1, 1]}'}, (0.75, 0.25), False),
        ({"options": '{"model_shares": [2, 2]}'}, (), False),
        ({"shares": (0.9, 0.1)}, (0.9, 0.1), False),
        ({"shares": (), "extras": '{"server_cpus": [1.5, 0.5]}'}, (0.75, 0.25), True),
        ({"extras": '{"server_cpus": [1.5, 0.5]}'}, (0.75, 0.25), True),
        ({"extras": '{"server_cpus": [1.5]}'}, (), False),
        ({"extras": '{"server_cpus": "two"}'}, (), False),
    ],
)
def test_rows_have_the_shares_of_their_servers(told, shares, inferred):
    """As the setting or its options say; else as the servers use processors, which is said."""
    given = {"run": "a", "seconds": 0.0, "workers": 1, "servers": 2, "policy": "asp", "batch_size": 8}
    given["options"] = told.get("options")
    if "shares" in told:
        given["setting"] = setting_text(Setting(workers=("w",), servers=("a", "b"), model_shares=told["shares"]))
    run = {"run": "a", "workload": "x", "seconds": 10.0, "steps": 10, "extras": told.get("extras")}
    found = read_tables(tables([run], [given]))
    assert found.rows[0].model_shares == pytest.approx(shares)
    assert ["as they use processors" in caveat for caveat in found.caveats] == [True] * inferred


@pytest.mark.parametrize("shares", ["[1]", "[0.5, -0.5]", "[0, 0]", '"even"', "0.5", "[true, null]"])
def test_shares_that_are_none_are_an_error(shares):
    given = {"run": "a", "seconds": 0.0, "workers": 1, "servers": 2, "options": f'{{"model_shares": {shares}}}'}
    with pytest.raises(ValueError, match=r"Cannot read the model shares .* of run 'a': give 2 numbers, one per server"):
        read_tables(tables([{"run": "a", "seconds": 10.0, "steps": 10}], [given]))


def linked(run, *rates, servers=("n3",)):
    """A run on hosts with links of these rates, in bytes per second, and its only setting."""
    names = setting_text(Setting(workers=("n0", "n1", "n2"), servers=servers))
    nodes = {f"n{i}": {"nic_bytes_per_second": rate} for i, rate in enumerate(rates)}
    setting = {"run": run, "seconds": 0.0, "workers": 3, "servers": 1, "policy": "asp", "batch_size": 8, "setting": names}
    return {"run": run, "workload": "x", "seconds": 10.0, "steps": 30, "extras": json.dumps({"nodes": nodes})}, setting


def test_the_links_of_a_run_are_relative_to_the_whole_recording():
    """The unit is the median over all runs, whichever run a row belongs to."""
    runs, settings = zip(linked("a", *[1e6] * 4), linked("b", *[5e5] * 4), linked("c", *[1e6] * 4), strict=True)
    found = read_tables(tables(runs, settings))
    assert found.nic_bytes_per_second == 1e6
    assert [r.nics for r in found.rows] == [(), (0.5,) * 4, ()]
    assert found.caveats == ()


def test_links_that_are_not_used_give_a_caveat():
    runs, settings = zip(linked("a", 1e6, 1e6, 2e6, servers=("n0",)), linked("b", *[1e6] * 3, servers=("n0",)), strict=True)
    found = read_tables(tables(runs, settings))
    assert [r.nics for r in found.rows] == [(), ()]
    (caveat,) = found.caveats
    assert caveat.startswith("1 settings have servers on workers' machines: all links")


@pytest.mark.parametrize(
    ("nodes", "named", "used"),
    [
        ([1e6, 1e6, 2e6, 1e6], None, False),
        ([1e6, 1e6, 2e6], '{"workers": ["n0", "n1", "n2"], "servers": ["n3"]}', False),
        ([1e6, 1e6, 2e6, 1e6], '{"workers": ["n0", "n1", "n2"], "servers": ["n3"]}', True),
        ([1e6, 1e6, 1e6, 1e6], None, True),
    ],
    ids=["no names", "another name", "names", "alike"],
)
def test_links_whose_machine_is_not_known_give_a_caveat(nodes, named, used):
    """They were ignored, and all links counted as alike, without a word."""
    run, setting = linked("a", *nodes)
    found = read_tables(tables([run], [setting | {"setting": named}]))
    assert found.rows[0].nics == ((1.0, 1.0, 2.0, 1.0) if named and used else ())
    assert ["the column setting does not name nodes that extras has" in caveat for caveat in found.caveats] == [True] * (
        not used
    )


def test_completion_is_the_engines_time_for_as_many_pushes():
    rows = [replace(row(2, 1, batch, policy="bsp"), all_pushes=20) for batch in (8, 32)]
    still = replace(TRUE, jitter=0.0)
    # Two workers push in each step, one directly after the other.
    assert completed(still, rows).seconds == pytest.approx(9.5 * predicted(still, rows), rel=0.06)


def test_a_source_whose_counts_do_not_match_its_seconds_is_refused():
    with pytest.raises(ValueError, match="trimtuner-tf-ps: its counts"):
        read_tables({}, "trimtuner-tf-ps")


# ------------------------------------------------------------------------------------------------------------------ files


def test_a_calibration_can_be_loaded_and_has_always_the_same_bytes(tmp_path):
    rows = timed([row(w, 10 - w, b) for w in (2, 4, 8) for b in (8, 32)])
    made = Recording(tuple(rows), None, (180.0, 190.0), (), (), ("some were left out",))
    fits = fit_all(rows, {"toy": Constants(cores=8, model_bytes=100.0)}, resamples=20)
    path = tmp_path / "made.toml"
    path.write_text(to_toml(fits, made, ORIGIN))
    again = fit_all(rows, {"toy": Constants(cores=8, model_bytes=100.0)}, resamples=20)
    assert path.read_text() == to_toml(again, made, ORIGIN)
    assert load_profiles(path)["toy"].cores == 8
    demand = workload("toy", tables=load_workloads(path)).demand
    assert demand.sample_seconds == pytest.approx(fits["toy"].constants.sample_seconds, rel=1e-4)
    said = tomllib.loads(path.read_text())
    assert said["calibration"]["digest"] == "0" * 64
    assert said["costs"]["policy_restart_seconds"] == 185.0
    assert "serial_fraction" in said["calibration"]["workloads"]["toy"]["refused"]
    latency = {"latency_seconds": fits["toy"].constants.latency_seconds}
    assert said["scenario"]["toy"]["cluster"] == pytest.approx({"discipline": "maxmin"} | latency)
    uneven = {"toy": replace(fits["toy"], constants=replace(fits["toy"].constants, discipline="uneven"))}
    assert '[scenario.toy.cluster]\ndiscipline = "uneven"' in to_toml(uneven, made, ORIGIN)
    apart = {"toy": replace(fits["toy"], constants=replace(fits["toy"].constants, independent_flows=True))}
    assert "independent_flows = true" in to_toml(apart, made, ORIGIN)
    said = tomllib.loads(to_toml(fits, with_snapshots(made, 20), ORIGIN))
    assert said["scenario"]["toy"]["cluster"]["snapshot_clocks"] == 20


def dl2_file(path: Path, noise=0.02) -> None:
    """Speeds in the source's format by a known law: a mini-batch computes, then waits for the servers to apply."""
    rng = np.random.default_rng(1)
    lines = []
    for servers in (1, 2, 4):
        for workers in (1, 2, 4, 6):
            step = 0.3 + 0.004 * (64 // workers) + 0.1 * workers / servers + 0.01 * servers
            speed = 64 / workers / (step * math.exp(noise * rng.standard_normal()))
            lines.append(
                f"('resnet-50', 'dist_sync', 64, {servers}, {workers}, {[round(speed, 3)] * workers}, [0.5], [0.5])"
            )
    path.write_text("\n".join(lines) + "\n")


def test_the_command_calibrates_to_speeds_of_dl2(tmp_path, capsys):
    dl2_file(tmp_path / "config_speed.txt")
    out = tmp_path / "new folder" / "made.toml"
    command = ["calibrate", "--from", "dl2-config-speed", str(tmp_path / "config_speed.txt"), "--out", str(out)]
    assert main.main(command) == 0
    said = tomllib.loads(out.read_text())
    assert said["calibration"]["workloads"]["resnet-50"]["median_relative_error"] < 0.08
    printed = capsys.readouterr().out
    assert "resnet-50: 12 settings, median error" in printed
    determined, refused = printed.split("  Not determined, so that the default holds:\n")
    assert "sample_seconds" in determined
    assert "step_seconds" in determined
    assert "serial_fraction" in refused
    (kind,) = said["profiles"]
    assert f'[cluster] has profiles = "{out}" and nodes of type {kind};' in printed
    assert f'[workload] has file = "{out}" and name = "resnet-50".' in printed


def test_the_command_wants_one_recording(tmp_path, capsys):
    assert main.main(["calibrate", "--out", str(tmp_path / "x.toml")]) == 2
    assert main.main(["calibrate", "--from", "nobody", ".", "--out", str(tmp_path / "x.toml")]) == 2
    assert "No importer is called 'nobody'" in capsys.readouterr().err


# --------------------------------------------------------------------------------------------------------------- held out


def test_every_row_is_held_out_once_and_combinations_stay_together():
    rows = [row(w, 10 - w, b) for w in (2, 4, 6, 9) for b in (8, 32)]
    rows = tuple(timed([*rows, rows[0]], noise=0.01))
    recording = Recording(rows, None, (100.0, 110.0), (), (), ())
    known = {"toy": Constants(cores=8, model_bytes=1.0)}
    with pytest.raises(ValueError, match="give at least 2, which are halves"):
        check(recording, known, ORIGIN, 1)
    made = check(recording, known, ORIGIN, 3)
    assert made.undivided == ()
    held = [p for p in made.predictions if (p.group, p.split) == ("toy, asp", HELD_OUT)]
    off = [abs(p.held_out / p.recorded - 1) for p in held]
    assert len(off) == 9
    assert len({p.held_out for p in held}) == 8  # two runs of one setting, one fold
    assert np.median(off) < 0.05
    assert all(p.low < p.held_out < p.high for p in held)
    assert all(0 < p.error < 0.1 for p in held)
    larger = [p.label for p in made.predictions if p.split == LARGER]
    assert [label.partition(",")[0] for label in larger] == ["6 workers"] * 2 + ["9 workers"] * 2
    switch = [p for p in made.predictions if p.group == "switch of policy"]
    assert [p.held_out for p in switch] == [110.0, 100.0]
    assert predicted(TRUE, rows) == pytest.approx([r.cycle_seconds for r in rows], rel=0.06)
    assert len(made.predictions) == 9 + 4 + 2
