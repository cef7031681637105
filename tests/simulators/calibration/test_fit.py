"""The constants behind a recording are found, and constants that it does not determine are refused."""

from __future__ import annotations

import math
import re
import tomllib
from dataclasses import replace

import numpy as np
import pytest
from scipy.optimize import least_squares

from simulators.calibration import closed_form
from simulators.calibration import least_squares as search
from simulators.calibration.determined import fittable
from simulators.calibration.fit import Constants, closed_form_cycles, fit, fit_all
from simulators.calibration.links import Sharing
from simulators.calibration.model import plant
from simulators.calibration.output import to_toml
from simulators.calibration.recorded.recordings import Recording, read_tables
from simulators.calibration.spread import log_half_widths
from tests.simulators.calibration.made_up import GRID, ORIGIN, TRUE, row, timed, told_by_formula
from tests.support.marks import slow
from traces.parts import scan
from traces.schema import TRACE
from traces.shipped import locate

pytestmark = pytest.mark.usefixtures("short")


def test_known_constants_are_found_again():
    true = replace(TRUE, serial_fraction=0.2, apply_exponent=0.7, apply_seconds=0.15)
    found = fit(timed(GRID, true, noise=0.005), Constants(cores=8, jitter=0.1, model_bytes=1.0), resamples=100)
    for name in ("fixed_seconds", "sample_seconds", "serial_fraction", "apply_seconds", "apply_exponent", "message_seconds"):
        low, high = found.intervals[name]
        assert getattr(found.constants, name) == pytest.approx(getattr(true, name), rel=0.2), name
        assert 0.9 * low < getattr(true, name) < 1.1 * high, name
    assert found.error < 0.01


def test_synchronous_runs_alone_tell_what_servers_take_for_a_step():
    """One push per step costs as much as the step itself with one worker, but not with eight."""
    true = replace(TRUE, step_seconds=0.4, message_seconds=0.0)
    rows = told_by_formula([row(w, s, policy="bsp") for w in (1, 4, 8) for s in (1, 2, 4)], true, noise=0.005)
    found = fit(rows, Constants(cores=8, model_bytes=1.0, jitter=0.1), resamples=50, engine=False)
    low, high = found.intervals["step_seconds"]
    assert found.constants.step_seconds == pytest.approx(0.4, rel=0.15)
    assert 0.9 * low < 0.4 < 1.1 * high


@pytest.mark.parametrize("carried", [1.5, slow(1.2), slow(1.8), slow(0.8)])
@pytest.mark.parametrize("discipline", ["fifo", slow("maxmin")])
def test_a_switch_is_told_that_carries_more_than_one_link(discipline, carried, monkeypatch):
    """Every search came to a switch as wide as one link and stayed there, as one that is slightly wider is no better: of
    made-up runs of one and two workers, messages were refused, and larger clusters 11 % off."""
    monkeypatch.setattr(search, "least_squares", least_squares)  # until it ends: which optimum matters
    given = Sharing(discipline, switch="each way").put_into(Constants(cores=1, nic_bytes_per_second=1e6))
    true = replace(given, model_bytes=1e5, fixed_seconds=0.01, sample_seconds=7e-4, message_seconds=1e-3)
    true = replace(true, apply_seconds=4e-3, switch_bytes_per_second=carried * 1e6)
    bare = [row(w, s, b, policy=p) for p in ("bsp", "asp") for w in (1, 2) for s in (1, 2) for b in (16, 64)]
    parts = closed_form.spans([plant(true, r) for r in bare], [r.barrier for r in bare])
    names = [f"{name}_seconds" for name in parts._fields]
    rows = [
        replace(r, **dict(zip(names, map(float, of), strict=True))) for r, of in zip(bare, np.array(parts).T, strict=True)
    ]
    problem = search.TimesProblem(rows, given, engine=False)
    found = problem.begun([name for name in fittable(rows, given)[0] if name != "latency_seconds"])
    assert found.cost < 1e-3
    at = found.constants
    assert at.model_bytes / at.switch_bytes_per_second == pytest.approx(0.1 / carried, rel=0.02)
    if carried > 1:
        assert at.switch_bytes_per_second == pytest.approx(carried * 1e6, rel=0.02)
        assert at.apply_seconds == pytest.approx(4e-3, rel=0.1)


def test_errors_may_be_beside_computing_where_that_was_timed():
    rows = told_by_formula([row(w, s, b) for w in (1, 2, 4) for s in (1, 2) for b in (8, 32)], TRUE, noise=0.02)
    bare = closed_form.spans([plant(TRUE, r) for r in rows], [False] * len(rows))
    parts = [replace(r, compute_seconds=float(c)) for r, c in zip(rows, bare.compute, strict=True)]
    whole, apart = (fit(r, Constants(cores=8, model_bytes=1.0), resamples=0, engine=False) for r in (rows, parts))
    assert whole.discrepancy.beside is None
    assert apart.discrepancy.beside == pytest.approx(search.beside_computing(apart.constants, rows), rel=0.05)
    assert max(apart.discrepancy.beside) > 2 * min(apart.discrepancy.beside)


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


def test_intervals_have_that_a_delayed_link_may_hold_up_more_messages_than_a_pull_and_a_push():
    """A pull and a push that are confirmed are four messages. No fitted row has a delayed link, so none tells how many."""
    true = replace(TRUE, message_seconds=0.0, delay_messages=3.5)
    seen = told_by_formula([row(w, s, b) for w in (1, 3, 6) for s in (1, 2) for b in (8, 32)], true, noise=0.003)
    found = fit(seen, Constants(cores=8, model_bytes=1.0, jitter=0.1), resamples=50, engine=False)
    assert "delay_messages" in found.refused
    alike, delayed = told_by_formula([row(3, 1, 16), replace(row(3, 1, 16), delays=(0.1, 0.1, 0.1, 0.0))], true)
    told = closed_form_cycles(found.constants, [alike, delayed])
    (near, usual), (below, above) = log_half_widths(found, [alike, delayed], np.zeros(2))[:, 0]
    assert (near, usual) == pytest.approx((below, below), rel=0.5)
    assert 2 * usual < math.log(delayed.cycle_seconds / told[1]) < above


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


def test_rows_that_do_not_fit_leave_open_what_a_refused_constant_may_take():
    """All mini-batches are of one size, so that all of computing may be fixed, and one of four times the size hardly longer.

    Rows that are far off weigh less: a tenth of computing was left open, as if the others could not make up for it.
    """
    rows = told_by_formula([row(w, s, policy=p) for w in (1, 2, 4, 8) for s in (1, 2) for p in ("bsp", "asp")], TRUE)
    odd = [replace(r, cycle_seconds=(1.3 if i % 4 == 1 else 1.0) * r.cycle_seconds) for i, r in enumerate(rows)]
    found = fit(odd, Constants(cores=8, model_bytes=1.0, jitter=0.1), resamples=0, engine=False)
    assert "fixed_seconds" in found.refused
    most = max(other.fixed_seconds for other in found.alternatives)
    assert most > 0.7 * found.constants.sample_seconds * 16


def test_draws_have_refused_constants_in_turn_and_the_others_fitted_to_them():
    _, found = messages_that_no_row_tells()
    messages, fixed = np.array(found.draws["message_seconds"]), np.array(found.draws["fixed_seconds"])
    assert messages[0] == 0
    assert messages.max() > 0.02
    assert 0 < np.mean(messages > 0) < 0.5
    # The sum is what the rows tell, also where a message takes some of it.
    assert np.median((fixed + 4 * messages)[messages > 0]) == pytest.approx(0.13, rel=0.15)
    assert all(np.count_nonzero([found.draws[n][i] for n in found.refused if n in found.draws]) <= 1 for i in range(100))


@pytest.mark.parametrize("in_transfers", [True, False])
def test_delays_of_links_are_told_where_transfers_were_timed_with_them(in_transfers):
    """Four workers of six are 20 ms from the servers, which recorded pulls and pushes have: delays were sought in computing
    alone, found to be none, and messages of 3 ms and a coordinator stood in for them."""
    true = replace(TRUE, model_bytes=2e7, message_seconds=0.0, fixed_seconds=0.02, sample_seconds=0.002, delay_messages=4.0)
    far = (0.0, 0.02, 0.02, 0.0, 0.02, 0.02)
    rows = [row(w, s, b) for w in (1, 2, 3, 6) for s in (1, 2) for b in (8, 32)]
    rows = [replace(r, delays=far[: r.workers] + (0.0,) * r.servers) for r in rows]
    spans = closed_form.spans([plant(true, r) for r in rows], [False] * len(rows))
    between = [4.0 * float(np.mean(r.delays[: r.workers])) * in_transfers for r in rows]
    names = ("compute_seconds", "pull_seconds", "push_seconds", "cycle_seconds")
    off = np.array([(-x, x / 2, x / 2, 0.0) for x in between])
    made = [replace(r, **dict(zip(names, x, strict=True))) for r, x in zip(rows, np.stack(spans, axis=1) + off, strict=True)]
    found = fit(made, Constants(cores=8, jitter=0.1, nic_bytes_per_second=1e9), resamples=0, engine=False)
    assert found.constants.in_transfers == in_transfers
    assert found.constants.delay_messages == pytest.approx(4.0, rel=0.02)
    assert found.constants.fixed_seconds == pytest.approx(0.02, rel=0.05)


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


def test_few_rows_that_are_far_off_are_warned_of_where_the_others_are_described():
    """One setting that takes 30 % longer than all others tell, recorded three times."""
    true = Constants(model_bytes=1.0, sample_seconds=0.01, apply_seconds=0.02)
    bare = [row(w, s, error=0.01) for w in (1, 2, 3, 4, 6) for s in (1, 2)]
    steady = [replace(r, cycle_seconds=c) for r, c in zip(bare, closed_form_cycles(true, bare), strict=True)]
    odd = ("asp", 3, 2)

    def fitted(*longer, recorded=0.01):
        """The fit, where the repetitions of one setting take so many times as long."""
        times = [(r, 1.0, run) if r.combination != odd else (r, x, run) for run, x in enumerate(longer) for r in steady]
        made = [replace(r, run=f"r{run}", error=recorded, cycle_seconds=x * r.cycle_seconds) for r, x, run in times]
        return fit(made, Constants(model_bytes=1.0), resamples=0, engine=False)

    found = fitted(1.3, 1.31, 1.29)
    assert found.error < 0.02
    assert [(of.policy, of.workers, of.servers, of.rows) for of in found.far] == [("asp", 3, 2, 3)]
    assert "far more, and beyond noise, on 3 of these: asp with 3 workers and 2 servers (" in found.misfit
    assert "% too fast, noise 1.0%)" in found.misfit
    assert not fitted(1.6, 1.3, 1.0).misfit
    assert not fitted(1.3, recorded=0.0).misfit
    assert not fitted(1.0).misfit


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
