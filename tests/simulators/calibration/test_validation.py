"""What is held out: whole combinations of policy, workers and servers; and the intervals of what is predicted."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import norm

from simulators.calibration import closed_form, predictions, simulations, validation
from simulators.calibration import least_squares as search
from simulators.calibration.discrepancy import Discrepancy, positions
from simulators.calibration.fit import Constants, Fit, closed_form_cycles, fit_all, predicted
from simulators.calibration.output import Provenance
from simulators.calibration.predictions import LARGER, OTHER, UNLIKE
from simulators.calibration.recorded.recordings import Recording, joined, with_links_of
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.stragglers import Sleeper
from simulators.calibration.recorded.timed_pushes import Noise
from simulators.calibration.spread import log_half_widths
from simulators.calibration.validation import ablated, check, check_other, lacking

ORIGIN = Provenance("made up", "tests", "ours", "0" * 64, "harness calibrate TRACE", "harness")


def row(workers, servers, batch=16, policy="asp", seconds=1.0, **more):
    return Row(more.pop("run", "run"), more.pop("workload", "toy"), workers, servers, seconds, batch, policy=policy, **more)


def recording(rows, link=None):
    return Recording(tuple(rows), None, (), (), (), (), link)


GRID = [row(w, s, b, p) for p in ("asp", "bsp") for w in (1, 2, 3, 4) for s in (1, 2) for b in (8, 32)]


@pytest.mark.parametrize("folds", [2, 3, 5])
def test_no_fold_has_a_combination_of_another(folds):
    fold_of, undivided = validation.in_folds(GRID, folds)
    seen = [{r.combination for r, f in zip(GRID, fold_of, strict=True) if f == fold} for fold in range(folds)]
    assert sum(map(len, seen)) == len({r.combination for r in GRID}) == 16
    assert undivided == ()


def test_each_half_has_all_policies_and_numbers_of_servers():
    """In the order of the settings, one half would have all combinations with one server, and the other those with two."""
    fold_of, _ = validation.in_folds(GRID, 2)
    for fold in (0, 1):
        half = [r for r, f in zip(GRID, fold_of, strict=True) if f == fold]
        assert {r.policy for r in half} == {"asp", "bsp"}
        assert {r.servers for r in half} == {1, 2}


def test_nothing_is_held_out_of_a_workload_with_one_combination():
    rows = [*GRID, *(row(2, 1, b, workload="other") for b in (8, 16, 32))]
    fold_of, undivided = validation.in_folds(rows, 5)
    assert undivided == ("other",)
    assert set(fold_of[-3:]) == {-1}
    assert min(fold_of[:-3]) == 0


def test_larger_clusters_and_unlike_hosts_are_extrapolated_to():
    rows = [*GRID[:4], row(3, 1), row(4, 1), row(2, 1, nics=(1.0, 0.5, 1.0)), row(2, 2, nics=(0.5,) * 4)]
    found = {
        split: ([rows[i] for i in kept], [rows[i] for i in out]) for split, kept, out in validation.extrapolations(rows)
    }
    kept, out = found[LARGER]
    assert {r.workers for r in kept} == {1, 2}
    assert {r.workers for r in out} == {3, 4}
    kept, out = found[UNLIKE]
    assert [r.nics for r in out] == [(1.0, 0.5, 1.0)]
    assert rows[-1] in kept  # slower than the usual, but alike
    assert validation.extrapolations([row(2, 1, b) for b in (8, 16)]) == []


def test_speeds_that_hardly_change_a_cycle_make_no_unlike_hosts():
    """Mini-batches of 2 ms in a cycle of a second: whether one worker took 3 ms is chance."""
    assert row(2, 1, speeds=(1.0, 1.5), compute_seconds=0.002).unlike == set()
    assert row(2, 1, speeds=(1.0, 1.5), compute_seconds=0.2).unlike == {"speeds"}
    assert row(2, 1, speeds=(1.0, 1.5), compute_seconds=0.002, nics=(1.0, 2.0, 1.0)).unlike == {"nics"}


def test_the_plain_form_is_fitted_to_all_other_combinations():
    """It finds a linear law again, and does not see the combination that it predicts."""
    law = [
        replace(r, cycle_seconds=0.1 + 0.01 * r.batch_size + 0.05 * r.servers + 0.2 * r.workers / r.servers) for r in GRID
    ]
    told = predictions.left_out(law).cycle.seconds
    assert told == pytest.approx([r.cycle_seconds for r in law], rel=1e-6)
    changed = [replace(r, cycle_seconds=99.0) if r.combination == ("asp", 4, 1) else r for r in law]
    mine = [r.combination == ("asp", 4, 1) for r in law]
    assert predictions.left_out(changed).cycle.seconds[mine] == pytest.approx(told[mine])


def test_the_plain_form_has_an_interval_from_its_errors_with_own_combinations_left_out():
    """Twenty times noise of 4 % on a linear law: nine of ten rows are inside."""
    rng = np.random.default_rng(0)

    def noisy(r):
        law = 0.1 + 0.01 * r.batch_size + 0.05 * r.servers + 0.2 * r.workers / r.servers
        return replace(r, cycle_seconds=law * math.exp(0.04 * rng.standard_normal()))

    inside = []
    for _ in range(20):
        rows = [noisy(r) for r in GRID]
        told = predictions.left_out(rows)
        inside.extend(abs(np.log([r.cycle_seconds for r in rows] / told.cycle.seconds)) < told.widths[:, 0, 0])
    assert 0.88 < np.mean(inside) < 0.96  # of 640, of which rows of one recording are not independent
    few = [r for r in GRID if r.policy == "asp" and r.workers == 1 and r.servers == 1]
    assert np.isnan(predictions.left_out(few).widths).all()  # one combination tells nothing


@pytest.mark.slow
def test_the_closed_network_needs_no_simulation(monkeypatch):
    """Rows that the closed form made are fitted by it exactly, and predicted; its interval is as the simulator's is made."""
    monkeypatch.setattr(simulations, "pushes_of", None)
    true = Constants(cores=1, sample_seconds=0.02, apply_seconds=0.3, jitter=0.05)
    bare = [row(w, s, b) for w in (1, 2, 4) for s in (1, 2) for b in (8, 32)]
    made = [replace(r, cycle_seconds=float(c)) for r, c in zip(bare, closed_form_cycles(true, bare), strict=True)]
    found = fit_all(made, {"toy": Constants(cores=1, jitter=0.05, model_bytes=1.0)}, engine=False, resamples=50)
    assert found["toy"].error < 0.01
    assert found["toy"].constants.apply_seconds == pytest.approx(0.3, rel=0.02)
    monkeypatch.undo()
    other = recording([row(3, 1, 16, run="new", seconds=1.0)])
    (told,) = check_other(FIT, recording(made), other, ORIGIN, network=found, whole=False).predictions
    assert told.network_held_out == pytest.approx(closed_form_cycles(true, [row(3, 1, 16)])[0], rel=0.02)
    assert told.network_low < told.network_held_out < told.network_high
    (without,) = check_other(FIT, recording(made), other, ORIGIN, whole=False).predictions
    assert math.isnan(without.network_held_out)


# ------------------------------------------------------------------------------------------------------ other recordings

FIT = {"toy": Fit(Constants(cores=1, sample_seconds=0.1, jitter=0.0), {}, {}, {}, 1, 0.0)}


def test_rows_that_were_fitted_are_not_predicted():
    with pytest.raises(ValueError, match=r"Cannot predict 1 rows that are fitted as well.*\[runs="):
        check_other(FIT, recording(GRID), recording([GRID[3]]), ORIGIN)


def test_a_workload_that_nothing_was_fitted_to_is_an_error():
    others = [row(1, 1, workload=name) for name in ("one", "two")]
    with pytest.raises(ValueError, match="Cannot predict one, two from a fit to toy: name recordings"):
        check_other(FIT, recording(GRID), recording(others), ORIGIN)


def test_one_workload_on_each_side_is_the_same_job():
    made = check_other(FIT, recording(GRID), recording([row(1, 1, workload="other")]), ORIGIN)
    assert made.caveats == ("other is predicted as the same job as toy",)
    assert made.fits == {"other": FIT["toy"]}
    (told,) = made.predictions
    assert told.held_out == pytest.approx(1.6, rel=1e-3)
    assert told.plain_held_out > 0


def test_other_recordings_are_predicted_by_the_fit_alone():
    """One worker that computes 1.6 s; a second workload has no fit."""
    other = recording([row(1, 1, run="new", seconds=1.5), row(1, 1, workload="other")])
    made = check_other(FIT, recording(GRID), other, ORIGIN, "the grid")
    assert made.caveats == ("not predicted, as no fitted recording has them: other",)
    told = {p.group: p for p in made.predictions}
    assert told["toy, asp"].held_out == pytest.approx(1.6, rel=1e-3)
    assert math.isnan(told["toy, asp"].fitted)
    assert math.isnan(told["toy, asp"].low)  # a fit without residuals
    assert math.isnan(told["other, asp"].held_out)
    assert made.fitted_to == "the grid"


def test_a_recording_in_other_units_is_told():
    """1.6 s are predicted; recorded are 1,500 that may be milliseconds. Ten times as long is a matter of the fit."""
    for seconds, said in ((1500.0, True), (0.0015, True), (16.0, False)):
        made = check_other(FIT, recording(GRID), recording([row(1, 1, run="new", seconds=seconds)]), ORIGIN)
        assert any("are the times of both recordings in seconds?" in caveat for caveat in made.caveats) == said


def test_machines_that_compute_at_another_speed_are_told():
    """By the fit, a mini-batch takes 1.6 s. Twice as long may be slower machines, unless it is little of a cycle."""
    for computing, cycle, said in ((3.2, 3.3, True), (1.7, 1.8, False), (3.2, 32.0, False)):
        slow = row(1, 1, run="new", seconds=cycle, compute_seconds=computing)
        made = check_other(FIT, recording(GRID), recording([slow]), ORIGIN, whole=False)
        assert any("took 2 times as long to compute as by the fit" in caveat for caveat in made.caveats) == said


def test_delays_of_links_are_no_slower_machines():
    """Computing was recorded without them. The fit saw none, and had them in computing: 0.4 times as long as by it."""
    delayed = row(1, 1, run="new", seconds=4.0, compute_seconds=1.6, delays=(1.2, 0.0))
    made = check_other(FIT, recording(GRID), recording([delayed]), ORIGIN, whole=False)
    assert not any("times as long to compute" in caveat for caveat in made.caveats)
    assert made.predictions[0].held_out == pytest.approx(1.6 + 2 * 1.2, rel=1e-3)


def test_links_become_relative_to_those_of_the_fit():
    known = recording([row(2, 1)], 8e6)
    fast = recording([row(2, 1), row(2, 1, nics=(1.0, 0.5, 1.0)), row(2, 2, shared=True)], 16e6)
    assert [r.nics for r in with_links_of(fast, known).rows] == [(2.0,) * 3, (2.0, 1.0, 2.0), (2.0, 2.0)]
    assert with_links_of(known, known) is known
    (caveat,) = with_links_of(recording([row(2, 1)]), known).caveats
    assert caveat.startswith("only some of the recordings have the rates of links")


def test_joined_recordings_keep_their_runs_apart():
    few, many = Noise(0.1, None, 10, 1.2, 1.2), Noise(0.3, None, 90, 2.0, 2.0)
    a, b = replace(recording([row(2, 1)], 8e6), noise=few), replace(recording([row(2, 1)], 16e6), noise=many)
    made = joined([("a", a), ("b", b), ("a", a)])
    assert [(r.run, r.nics) for r in made.rows] == [("a/run", ()), ("b/run", (2.0,) * 3)]  # the same row twice counts once
    assert made.noise == many
    assert made.nic_bytes_per_second == 8e6


# ------------------------------------------------------------------------------------------------- seeds and intervals


def test_means_are_taken_over_seeds_until_they_are_precise():
    """Noise needs more seeds, up to a limit; what is told is the error of the mean."""
    rng = np.random.default_rng(0)
    quiet, noisy, wild = (
        simulations.over_seeds(lambda seeds, s=s: 1 + s * rng.standard_normal((len(seeds), 1))) for s in (0.001, 0.02, 0.5)
    )
    assert len(quiet) == 4
    assert 8 <= len(noisy) <= 32
    assert simulations.relative_error(noisy[:, 0]) <= 0.005
    assert len(wild) == 64
    assert simulations.relative_error(wild[:, 0]) == pytest.approx(0.5 / 8, rel=0.3)


def with_residuals(residuals, **more):
    """A fit of one constant, of which each residual is of another number of workers."""
    known, by = [row(1 + i, 1) for i in range(len(residuals))], np.ones((len(residuals), 1))
    none = np.zeros(len(residuals))
    made = Discrepancy(positions(known), none > 0, by, residuals, none, none, 49.0 * np.eye(1), np.zeros(1), 0.0)
    return replace(FIT["toy"], intervals={"sample_seconds": (0.09, 0.11)}, discrepancy=made, **more)


def test_intervals_hold_nine_recorded_values_of_ten():
    """Rows around a true time: each interval is from eight of them, and is to hold another one with nine of ten chances."""
    rng, one, chances = np.random.default_rng(0), row(1, 1), []
    for _ in range(40):
        known = 0.05 * rng.standard_normal(8)
        half = log_half_widths(with_residuals(known.mean() - known), [one], np.zeros(1))[0, 0, 0]
        chances.append(norm.cdf((known.mean() + half) / 0.05) - norm.cdf((known.mean() - half) / 0.05))
    assert np.mean(chances) == pytest.approx(0.9, abs=0.04)


def test_intervals_are_wider_where_the_mean_is_less_certain():
    """Of the simulated seeds, and of the recorded cycles: their errors are of one kind. Fitted rows of few cycles owe a part
    of their noise to that, which rows of many cycles do not have."""
    fit = with_residuals(np.array([0.02, -0.05, 0.03, 0.04, -0.04]))
    none, some = np.zeros(1), np.full(1, 0.1)
    (plain, of_seeds), (of_cycles, _) = (
        log_half_widths(fit, [replace(row(1, 1), error=error)], none, some)[0, :, 0] for error in (0.0, 0.1)
    )
    assert of_seeds == of_cycles > 1.5 * plain
    short = fit.discrepancy._replace(variances=np.full(5, 0.05**2))
    steady = log_half_widths(replace(fit, discrepancy=short), [row(1, 1)], none)[0, 0, 0]
    assert steady < 0.8 * plain


def test_without_a_degree_of_freedom_there_is_no_interval():
    assert math.isnan(log_half_widths(FIT["toy"], [row(1, 1)], np.zeros(1))[0, 0, 0])
    sure = with_residuals(np.array([0.01, -0.01]))
    assert log_half_widths(sure, [row(1, 1)], np.zeros(1))[0, 0, 0] > 0
    unsure = replace(sure, intervals={"sample_seconds": None})
    assert math.isnan(log_half_widths(unsure, [row(1, 1)], np.zeros(1))[0, 0, 0])
    one = [row(1, 1, 16, run=f"r{i}", seconds=0.1 + 0.01 * i) for i in range(4)]  # a combination, however often recorded
    assert fit_all(one, {"toy": Constants(cores=1, model_bytes=1.0)}, engine=False)["toy"].discrepancy is None


def test_only_parts_of_the_physics_that_are_on_can_be_left_out():
    given = {"toy": Constants(control_queue=1.0, discipline="uneven")}
    made = lacking(given)
    assert {part: (less.given["toy"].control_queue, less.given["toy"].discipline) for part, less in made.items()} == {
        "requests behind queued pushes": (0.0, "uneven"),
        "uneven shares of links": (1.0, "maxmin"),
        "updates at the servers": (1.0, "uneven"),
        "messages of a coordinator": (1.0, "uneven"),
        "the cost of a synchronous step": (1.0, "uneven"),
    }
    assert made["updates at the servers"].without == ("apply_seconds", "apply_exponent")
    assert made["messages of a coordinator"].without == ("commit_seconds",)
    always = ["updates at the servers", "messages of a coordinator", "the cost of a synchronous step"]
    assert list(lacking({"toy": Constants()})) == always
    asleep = lacking({"toy": Constants()}, [row(2, 1, sleeps=(Sleeper(1.0, 0.5), Sleeper(0.0, 0.0)))])
    assert list(asleep) == ["how stragglers' sleeps vary", *always]
    assert not asleep["how stragglers' sleeps vary"].given["toy"].sleeps_vary
    apart = {"toy": Constants(independent_flows=True)}
    assert list(lacking(apart, [row(2, 2)])) == always
    both = lacking(apart, [row(2, 2, shared=True)])
    assert list(both) == ["flows that end by themselves", *always]
    assert not both["flows that end by themselves"].given["toy"].independent_flows
    sent = lacking({"toy": Constants()}, [row(2, 1, snapshot_clocks=20)])
    assert list(sent) == ["snapshots of the servers", *always]
    assert not sent["snapshots of the servers"].given["toy"].snapshots
    delayed = lacking({"toy": Constants()}, [row(2, 1, delays=(0.1, 0.0, 0.0))])
    assert list(delayed) == ["delays of links", *always]


def test_without_delays_of_links_a_fit_predicts_none():
    """The constant is fitted, so that it has to stay 0 as well as begin there."""
    rows = [row(2, 1, 8, seconds=s, delays=d) for s, d in ((0.1, ()), (0.4, (0.1, 0.1, 0.0)))]
    rows += [row(2, 1, 32, seconds=s, delays=d) for s, d in ((0.2, ()), (0.5, (0.1, 0.1, 0.0)))]
    given = {"toy": Constants(cores=1)}
    less = lacking(given, rows)["delays of links"]
    whole, without = fit_all(rows, given, engine=False), fit_all(rows, less.given, without=less.without, engine=False)
    assert whole["toy"].constants.delay_messages > 1
    assert without["toy"].constants.delay_messages == 0


@pytest.mark.slow
def test_without_a_part_the_same_cycles_are_predicted_by_a_fit_that_lacks_it(monkeypatch):
    """Servers that take .3 s per push: without their updates, the fit has no constant for what more workers wait."""
    for name, value in (("_PUSHES", 120), ("_CYCLES", 10), ("_WARM_UP", 5), ("_LEAST_SEEDS", 2), ("_PRECISE", 1.0)):
        monkeypatch.setattr(simulations, name, value)
    for name, value in (("_ROUNDS", 1), ("_EVALUATIONS", 15)):
        monkeypatch.setattr(search, name, value)
    monkeypatch.setattr(closed_form, "_ROUNDS", 20)
    true = Constants(cores=1, sample_seconds=0.02, apply_seconds=0.3, jitter=0.05)
    bare = [row(w, s, b) for w in (1, 2, 4) for s in (1, 2) for b in (8, 32)]
    rows = [replace(r, cycle_seconds=float(c)) for r, c in zip(bare, predicted(true, bare), strict=True)]
    given = {"toy": Constants(cores=1, jitter=0.05, model_bytes=1.0)}
    whole = check(recording(rows), given, ORIGIN, folds=2)
    assert all(math.isfinite(p.network_held_out) for p in whole.predictions)
    less = ablated(recording(rows), lacking(given)["updates at the servers"], folds=2)
    keys = [(p.split, p.label, p.recorded) for p in whole.predictions]
    assert [(p.split, p.label, p.recorded) for p in less] == keys
    assert {p.split for p in less} == {"held out", LARGER}
    off = [np.median([abs(p.held_out / p.recorded - 1) for p in made]) for made in (whole.predictions, less)]
    assert off[0] < 0.05
    assert off[1] > 0.1


def test_larger_clusters_and_unlike_hosts_of_another_recording_are_extrapolations():
    known = [row(w, 1) for w in (1, 2)]
    unlike = row(2, 1, nics=(1.0, 0.5, 1.0))
    assert validation.split_of_others(known, [row(2, 2), row(1, 1)]) == OTHER
    assert validation.split_of_others(known, [row(3, 1), row(4, 1), row(1, 1)]) == LARGER
    assert validation.split_of_others(known, [unlike, unlike, row(1, 1)]) == UNLIKE
    assert validation.split_of_others([*known, unlike], [unlike, unlike]) == OTHER
    faster = row(2, 1, speeds=(1.0, 1.2), compute_seconds=0.5)  # which says nothing of links
    assert validation.split_of_others([*known, faster], [unlike, unlike]) == UNLIKE
