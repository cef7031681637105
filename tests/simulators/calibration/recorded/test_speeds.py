"""Speeds of machines, and batches of single workers, are told apart from the constants."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from simulators.calibration import validation
from simulators.calibration.fit import Constants, closed_form_cycles, fit, predicted
from simulators.calibration.output import to_toml
from simulators.calibration.recorded.recordings import Recording
from simulators.calibration.recorded.row import WorkerTime
from simulators.calibration.recorded.speeds import on_machines, with_speeds
from simulators.calibration.validation import check
from tests.simulators.calibration.made_up import ORIGIN, TRUE, row, told_by_formula

pytestmark = pytest.mark.usefixtures("short")


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


def test_the_usual_machine_of_runs_that_are_told_together_is_the_median_one():
    """It was the first by name of those in most rows, which is slow here: predictions were up to 64 % off."""
    true = {"a": 0.5, "b": 1.0, "c": 1.0, "d": 1.1}
    crews = ["ab", "abcd", "cd"]
    found, _ = on_machines([of_machines(f"{i}", crew, true) for i, crew in enumerate(crews)])
    told = [r.speeds or (1.0,) * r.workers for r in with_speeds(found)]
    assert told == [pytest.approx([true[name] for name in crew], abs=0.002) for crew in crews]


def test_several_workers_may_be_on_one_machine():
    """One of a machine's workers counted, and its speed was up to 8 % off."""
    true = {"a": 0.625, "b": 0.5, "c": 0.77, "d": 1.0}
    crews = ["adcaa", "cbbcb", "cbcddc"]
    rows = [of_machines(f"{i}", crew, true, 1.0 + i) for i, crew in enumerate(crews)]
    found, contradict = on_machines(rows)
    assert not contradict
    told = with_speeds(found)
    assert [r.speeds for r in told] == [pytest.approx([true[n] / true["c"] for n in crew], abs=0.002) for crew in crews]


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
