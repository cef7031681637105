"""From exchanges to a row: what counts as cost, as a trial, and as the history of the job."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from harness.drive import Outcome, Played, play
from harness.score import Scored, score, unplayed
from simulators.cluster.conditions import Conditions, NodeChange
from tests.support.small_jobs import learning
from traces import schema, store
from traces.exchanges import Exchange
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Job,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Target,
    Tuner,
    Window,
)
from tuners.knobs import Real
from tuners.testing.toys import toys

JOB = replace(toys()["every knob"](0).job, target=Target("loss", 0.02), budget_seconds=20.0)
FAST = replace(JOB.start, learning_rate=0.5)
FASTER = replace(JOB.start, learning_rate=1.5)


def window(start: float, end: float, clocks: int, *evaluations: Evaluation) -> Window:
    nothing = Pushes(*(np.zeros(0) for _ in Pushes._fields))
    return Window(start_seconds=start, end_seconds=end, clocks=clocks, pushes=nothing, workers=(), evaluations=evaluations)


def scored(*exchanges: tuple[float, Action[Any], Any], status: Any = "target", reason: str = "") -> Scored:
    log = tuple(Exchange(*e) for e in exchanges)
    played = Played(JOB, log, Outcome(status, reason, log[-1].seconds if log else 0.0, 0.5))
    return score(played, scenario="s", tuner="t", seed=4)


def test_a_run_that_reached_its_target_counts_with_its_seconds() -> None:
    made = scored((3.0, Run(clocks=30), window(0, 3, 30, Evaluation(3.0, 30, 0.01, 0.9))))
    row = made.score
    assert (row.scenario, row.tuner, row.seed) == ("s", "t", 4)
    assert (row.status, row.reached, row.completion_seconds, row.budget_seconds) == ("target", True, 3.0, 20.0)
    assert (row.final_loss, row.final_accuracy, row.clocks) == (0.01, 0.9, 30)
    assert row.reason == ""


def test_a_target_that_is_reached_during_a_change_is_in_the_row() -> None:
    """Training goes on while parameters are relocated. Only a Run tells of it, so that a last one is asked for."""
    untrained = Target("loss", -1.0)
    seen = learning(target=untrained).perform(Run(clocks=100)).evaluations  # one after every ten pushes
    best = min(seen, key=lambda e: e.loss)

    def changes(job: Job) -> Tuner:
        yield from Run(clocks=best.clocks - 1)
        yield from Reconfigure(replace(job.start, servers=("e",)), method="relocate")
        raise AssertionError("the target is reached")

    played = play(changes, learning(target=Target("loss", best.loss)))
    row = score(played, scenario="s", tuner="t", seed=0).score
    assert (row.status, row.final_loss, row.clocks) == ("target", best.loss, best.clocks)
    assert [e.asked for e in played.exchanges] == [True, True, False]
    assert played.exchanges[-1].seconds == played.outcome.seconds == row.completion_seconds


def test_a_setting_made_before_a_loss_counts_as_what_it_is_after_it() -> None:
    """Roles are held: the tuner changes the rate, and the lost node is not there under the setting that it names."""

    def changes(job: Job) -> Tuner:
        yield from Run(seconds=30.0)
        yield from Reconfigure(replace(job.start, learning_rate=0.05))

    gone = Conditions(nodes=(NodeChange(("b",), 10.0, "fails"),))
    system = learning(gone, knobs=(Real("learning_rate", 0.01, 1.0),), target=Target("clocks", 60))
    made = score(play(changes, system), scenario="s", tuner="t", seed=0)
    assert made.score.reconfigurations == 1
    taken = [(s.workers, s.learning_rate) for _, s in made.settings]
    assert taken == [(("a", "b", "c"), 0.1), (("a", "c"), 0.1), (("a", "c"), 0.05)]


def test_a_run_that_missed_its_target_counts_with_its_budget_and_a_reason() -> None:
    run = (3.0, Run(clocks=30), window(0, 3, 30))
    judged = (3.0, Run(clocks=30), window(0, 3, 30, Evaluation(3.0, 30, 0.9, 0.5)))
    assert scored(judged, status="budget").score.reason == "The target loss 0.02 was not reached in 20 s."
    assert scored(run, status="budget").score.reason == (
        "The target loss 0.02 was not reached in 20 s: the model was not validated once. Lower [target] check_clocks, or "
        "raise [budget] seconds."
    )
    assert "no push was completed in this time" in scored(status="budget").score.reason
    stopped = (20.0, Evaluate(), Evaluation(0.0, 0, 2.3, 0.1))
    assert (
        "as training was stopped for 20 s of these, by what the tuner asked for, or by machines"
        in scored(stopped, status="budget").score.reason
    )
    assert scored(run, status="diverged").score.reason == "The loss was no longer finite after 3 s."
    assert "no worker was left" in scored(run, status="deadlock").score.reason
    row = scored(run, status="error", reason="It rained.").score
    assert (row.reason, row.completion_seconds, row.reached) == ("It rained.", 20.0, False)
    assert math.isnan(row.final_loss)


def test_an_evaluation_that_was_asked_for_is_overhead() -> None:
    made = scored(
        (5.0, Run(clocks=10), window(0, 5, 10)),
        (6.5, Evaluate(), Evaluation(5.0, 10, 0.5, 0.5)),
        (8.0, Evaluate(branch=7), Rejected("no")),
        (12.0, Run(clocks=10), window(8, 12, 10, Evaluation(12.0, 20, 0.01, 0.9))),
    )
    assert made.score.overhead_seconds == 1.5
    assert [e.seconds for e in made.evaluations] == [5.0, 12.0]


def test_a_run_that_is_not_played_is_a_row_with_its_reason() -> None:
    row = unplayed("not applicable", "Nothing is free here.", scenario="s", tuner="t", seed=3, budget_seconds=20.0).score
    assert (row.status, row.reason, row.reached, row.clocks) == (schema.NOT_APPLICABLE, "Nothing is free here.", False, 0)
    assert math.isnan(row.completion_seconds)
    assert row.budget_seconds == 20.0


def test_the_costs_of_reconfigurations_are_summed() -> None:
    cost = Cost(seconds=2.0, stall_seconds=1.5, slow_seconds=0.5, bytes_moved=10.0)
    made = scored(
        (2.0, Reconfigure(FAST), cost),
        (2.0, Reconfigure(FAST), Cost(seconds=0.0, stall_seconds=0.0)),  # no change, so it is not counted
        (2.0, Reconfigure(FASTER), Rejected("no")),
        (4.0, Reconfigure(FASTER), cost),
        (5.0, Run(clocks=1), window(4, 5, 1)),
    )
    row = made.score
    assert (row.reconfigurations, row.overhead_seconds, row.slow_seconds, row.bytes_moved) == (2, 3.0, 1.0, 20.0)
    assert row.rejected == 1
    assert made.settings == ((0.0, JOB.start), (2.0, FAST), (4.0, FASTER))
    assert schema.setting_from(row.final_setting) == FASTER


def test_a_stall_that_ends_after_the_budget_counts_until_its_end() -> None:
    change = (25.0, Reconfigure(FAST), Cost(seconds=9.0, stall_seconds=9.0, slow_seconds=6.0))
    row = scored((16.0, Run(seconds=16), window(0, 16, 9)), change, status="budget").score
    assert (row.overhead_seconds, row.slow_seconds) == (4.0, 1.0)
    forked = scored((16.0, Run(seconds=16), window(0, 16, 9)), (29.0, Fork(), 1), status="budget").score
    assert forked.overhead_seconds == 4.0
    refused = (16.0, Fork(), Rejected("Cannot fork."))  # in a job whose tuners' thinking takes time, in which it trains
    assert scored(refused, (16.0, Run(seconds=16), window(0, 16, 9)), status="budget").score.overhead_seconds == 0.0
    judged = (29.0, Evaluate(), Evaluation(18.0, 9, 1.0, 0.5))
    assert scored((18.0, Run(seconds=18), window(0, 18, 9)), judged, status="budget").score.overhead_seconds == 2.0


BEFORE_BUDGET_ENDS = {
    "the tuner waits": lambda job: (yield from _change(job, wait=True)),
    "the tuner goes on": lambda job: (yield from _change(job, wait=False)),
    "a machine fails": lambda job: (yield from ()),
}


def _change(job: Job, *, wait: bool) -> Tuner:
    yield from Run(seconds=18.0)
    yield from Reconfigure(replace(job.start, servers=("e",)), method="checkpoint", wait=wait)


@pytest.mark.parametrize("cause", BEFORE_BUDGET_ENDS)
@pytest.mark.parametrize("thinking_seconds", [0.0, 0.5])
def test_a_reconfiguration_in_progress_when_the_budget_ends_is_overhead(cause: str, thinking_seconds: float) -> None:
    """It begins at 18 s, stalls training for more than 3 s, and the budget ends at 20 s."""
    fails = (NodeChange(("e",), 18.0, "fails"),) if cause == "a machine fails" else ()
    conditions = Conditions(nodes=fails, thinking_seconds=thinking_seconds)
    played = play(BEFORE_BUDGET_ENDS[cause], learning(conditions, budget_seconds=20.0))
    row = score(played, scenario="s", tuner="t", seed=0).score
    late = 0.0 if cause == "a machine fails" else 2 * thinking_seconds  # before each of two actions
    assert row.overhead_seconds == pytest.approx(20.0 - 18.0 - late)


def test_what_trains_on_other_branches_is_a_trial() -> None:
    made = scored(
        (1.0, Run(clocks=10), window(0, 1, 10, Evaluation(1.0, 10, 9.0, 0.1))),
        (1.0, Fork(0, FAST), 1),
        (3.0, Run(clocks=20, branch=1), window(1, 3, 20, Evaluation(3.0, 30, 8.0, 0.2))),
        (3.0, Fork(0, FASTER), 2),
        (7.0, Run(clocks=40, branch=2), window(3, 7, 40, Evaluation(7.0, 50, 7.0, 0.3))),
        (7.0, Free(2), None),
        (15.0, Run(clocks=5, branch=0), window(7, 15, 5, Evaluation(15.0, 15, 6.0, 0.4))),  # the parent, after the fork
        (16.0, Fork(1), 3),
        (17.0, Reconfigure(FASTER, branch=3), Cost(seconds=1.0, stall_seconds=1.0)),
        (18.0, Evaluate(3), Evaluation(18.0, 30, 5.0, 0.5)),
        (18.5, Run(clocks=5, branch=3), window(18, 18.5, 5, Evaluation(18.5, 35, 4.0, 0.6))),
    )
    assert made.score.trial_seconds == 4.0 + 8.0
    assert made.score.clocks == 80
    assert [e.seconds for e in made.evaluations] == [1.0, 3.0, 18.0, 18.5]
    assert made.settings == ((0.0, JOB.start), (1.0, FAST), (17.0, FASTER))
    assert made.score.final_accuracy == 0.6


def test_a_stall_within_a_trial_is_overhead_and_no_trial() -> None:
    """A machine is lost: in 10 of the trial's 14 seconds nobody trains, some of them before the window that tells it."""
    recovered = replace(window(8.0, 14.0, 3), changes=(Cost(seconds=11.0, stall_seconds=10.0),))
    made = scored(
        (0.0, Fork(0), 1), (8.0, Run(seconds=8.0, branch=1), window(0.0, 8.0, 5)),
        (14.0, Run(clocks=3, branch=1), recovered), (14.0, Free(1), None),
        (20.0, Run(clocks=9), window(14.0, 20.0, 9)),
    )  # fmt: skip
    assert made.score.trial_seconds == 4.0
    assert made.score.overhead_seconds == 10.0


def test_the_same_evaluation_seen_twice_is_one() -> None:
    seen = Evaluation(1.0, 10, 9.0, 0.1)
    made = scored((1.0, Run(clocks=10), window(0, 1, 10, seen)), (1.0, Evaluate(), seen), (1.0, Evaluate(), seen))
    assert made.evaluations == (seen,)


def test_a_run_without_a_single_exchange_is_a_row_too() -> None:
    made = scored(status="error", reason="It never began.")
    assert made.settings == ((0.0, JOB.start),)
    assert made.score.clocks == 0
    lost = unplayed("error", "It died.", scenario="s", tuner="t", seed=1, budget_seconds=7.0)
    assert (lost.score.status, lost.score.completion_seconds, lost.score.reached) == ("error", 7.0, False)


def test_rows_fit_their_tables(tmp_path: Path) -> None:
    def forks(job: Job) -> Tuner:
        branch = yield from Fork(0, FAST)
        yield from Run(clocks=20, branch=branch)

    made = score(play(forks, toys()["every knob"](0)), scenario="s", tuner="t", seed=0)
    rows = made.rows()
    for name, columns in (("scores", schema.SCORES), ("evaluations", schema.EVALUATIONS), ("settings", schema.SETTINGS)):
        assert rows[name]
        store.write(pl.DataFrame(rows[name], schema=columns), tmp_path / name, columns)
        assert store.read(tmp_path / name, columns).height == len(rows[name])
    lost = unplayed("error", "x", scenario="s", tuner="t", seed=0, budget_seconds=1.0).rows()
    assert pl.DataFrame(lost["scores"], schema=schema.SCORES).height == 1


def test_a_setting_of_the_final_row_is_a_setting() -> None:
    made = scored((3.0, Run(clocks=30), window(0, 3, 30)))
    assert isinstance(schema.setting_from(made.score.final_setting), Setting)
