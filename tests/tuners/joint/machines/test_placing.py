"""Choices of machines: each of these was wrong once, and cost an arena its target or its time."""

import math
from dataclasses import replace

import pytest

from tests.support.toy import job
from tests.tuners.joint.answers import RATE, Answers, course, flat, of
from tuners.actions import Run
from tuners.joint.learning.holding import Holding, RuleParts
from tuners.joint.machines.all_waiting import AllWaiting
from tuners.settings import Choice, Integer


def test_a_job_whose_machine_is_about_to_leave_is_moved_although_that_gains_nothing():
    """Every change of the rate is refused as long as the setting names a machine that is not available."""
    made = of(space=tuple(Choice(f"role/{n.name}", ("worker", "server", "both", "idle")) for n in job().nodes))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    begun.training.branch.available -= {made.start.workers[-1]}
    answers.run(begun.placing.place())
    assert answers.changes()
    assert made.start.workers[-1] not in begun.training.branch.setting.workers


@pytest.mark.parametrize(("methods", "changes"), [(("checkpoint", "relocate"), True), (("checkpoint", "migrate"), False)])
def test_what_moves_nothing_is_changed_where_that_saves_a_few_seconds(methods, changes):
    """A short job kept bits of which others would have saved 11 s, because moving machines takes 15 s."""
    made = replace(of(space=(Choice("transfer_bits", (16, 32)),), methods=methods), budget_seconds=150.0)
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    answers.run(begun.placing.place())
    assert any(s.transfer_bits == 16 for s in answers.changes()) is changes


@pytest.mark.parametrize(("pace", "windows"), [(1.0, 0), (1.4, 0), (3.0, 1), (0.5, 1)])
def test_machines_are_chosen_again_where_pushes_have_become_much_slower_or_faster(pace, windows):
    """The links were throttled a minute after the machines had been chosen, and every push took eight times as long."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    chosen = []

    def place():
        chosen.append(answers.now)
        yield from begun.placing.place_anew()

    answer = answers.answer

    def slower(action):
        found = answer(action)
        return replace(found, end_seconds=found.start_seconds + pace * found.clocks) if isinstance(action, Run) else found

    holding = Holding(begun.training, begun.heat, RuleParts(), place)
    begun.training.usual_push_seconds = 1.0
    answers.answer = slower
    for _ in range(3):
        holding.seen.begin_anew()
        answers.run(holding.window())
    assert len(chosen) == windows


@pytest.mark.parametrize("metric", ["clocks", "samples"])
def test_of_a_job_that_counts_its_work_it_is_known_how_long_it_lasts(metric):
    """A fifth of the budget was expected to be left, however little was left to count."""
    start = job().start
    counted = 1 if metric == "clocks" else start.batch_size
    made = of(target=replace(job().target, metric=metric, value=200.0 * counted), start=replace(start, loads=()))
    begun, answers = course(made), Answers(made, flat)
    assert begun.placing.seconds_left() == 0.2 * made.budget_seconds
    answers.run(begun.training.run(40))
    assert begun.placing.seconds_left() == pytest.approx(160 * begun.system.push_seconds(made.start))


def test_a_change_of_the_system_is_judged_by_pushes_that_began_after_it():
    made = of(space=tuple(Choice(f"role/{n.name}", ("worker", "server", "both", "idle")) for n in job().nodes))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.placing.measure())
    asked = len(answers.asked)
    begun.training.branch.placed_seconds = answers.now + math.ceil(1.5 * len(made.start.workers))  # it takes so long
    answers.run(begun.placing.measure())
    assert len(answers.asked) == asked + 2


WAITING = (RATE, Choice("policy", ("bsp", "asp")), Integer("staleness", 0, 7))


@pytest.mark.parametrize(
    ("space", "slower", "tried", "stays"),
    [
        (WAITING, 0.7, True, True),
        (WAITING, 1.1, True, False),
        (WAITING[1:], 0.7, False, False),  # no rate is free that could be higher
        (WAITING[:1], 0.7, False, False),
    ],
)
def test_all_workers_wait_for_each_other_where_that_takes_no_time(space, slower, tried, stays):
    """Nobody waited in five drawn jobs whose best fixed settings let all wait: they took 1.7 to 3.6 times as long."""
    made = of(space=space, start=replace(job().start, policy="asp", momentum=0.0))
    begun, answers = course(made, prior=True), Answers(made, flat)
    answer, start = answers.answer, made.start

    def paced(action):
        found, policy = answer(action), answers.settings[0].policy
        if not isinstance(action, Run):
            return found
        return replace(found, end_seconds=found.start_seconds + found.clocks * (slower if policy == "bsp" else 1.0))

    answers.answer = paced
    answers.run(begun.placing.measure())
    before = begun.heat.expected
    answers.run(AllWaiting(made, begun.training, begun.system, begun.placing, begun.parts).run())
    assert any(s.policy == "bsp" for s in answers.changes()) is tried
    assert begun.training.branch.setting == (replace(start, policy="bsp") if stays else start)
    assert begun.heat.expected == before
    if stays:  # the same rate is less hot
        hot = begun.heat.of(begun.training.branch.setting)
        assert hot == pytest.approx(begun.heat.of(start) / len(start.workers) ** 0.5)
        assert begun.training.usual_push_seconds == begun.training.push_seconds


def test_the_rate_follows_the_mini_batch_that_is_chosen():
    """A rate that large mini-batches had learned well at blew the model up where small ones were chosen instead."""
    made = of(space=(RATE, Choice("batch_size", (4, 16))), start=replace(job().start, policy="asp", momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    answer = answers.answer

    def quick(action):  # next to transfers, a mini-batch takes no time
        found = answer(action)
        if not isinstance(action, Run):
            return found
        return replace(found, pushes=found.pushes._replace(compute_seconds=0.01 * found.pushes.compute_seconds))

    answers.answer = quick
    answers.run(begun.placing.measure())
    answers.run(begun.placing.place())
    chosen = begun.training.branch.setting
    assert (made.start.batch_size, chosen.batch_size) == (4, 16)
    assert chosen.learning_rate == pytest.approx(made.start.learning_rate * 2)  # the square root of four times the samples
    assert begun.heat.of(chosen) == pytest.approx(begun.heat.of(made.start))
