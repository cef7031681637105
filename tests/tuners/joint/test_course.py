"""Where a job of joint begins, and begins again: each of these decisions was wrong once, and cost an arena its time."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy import job, window
from tests.tuners.joint.answers import RATE, Answers, course, flat, noisy_validations, of
from tuners.actions import Evaluate, Evaluation, Install, Reconfigure, Run
from tuners.joint.job.steps import JobOver
from tuners.joint.learning.heat import PolicyHeat, stress
from tuners.joint.learning.holding import RuleParts
from tuners.joint.tuner import JointCourse
from tuners.settings import Choice, Integer, Real


@pytest.mark.parametrize(("factor", "moved"), [(1e-3, True), (0.6, False), (30.0, True)])
def test_the_search_begins_at_a_probable_rate(factor, moved):
    """From a start that was far too low, the rate was raised window by window for a third of the job."""
    made = of(space=(RATE,))
    median, deviation = course(made, prior=True).heat.expected
    rate = factor * median / stress(made.start)
    made = replace(made, start=replace(made.start, learning_rate=rate, momentum=0.0))
    begun, answers = course(made, prior=True), Answers(made, flat)
    answers.run(begun.begin())
    answers.run(begun.start.measure())
    assert begun.heat.of(begun.training.branch.setting) == pytest.approx(
        median * math.exp(-deviation / 2) if moved else factor * median
    )
    assert any("other jobs" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is moved


def test_jobs_without_a_free_rate_expect_nothing():
    made = of(space=(Choice("policy", ("bsp", "asp", "ssp")),))
    assert course(made, prior=True).heat.expected is None


def test_policies_are_not_tried_from_the_start_again_because_little_was_learned():
    """Each step down the ladder of policies cost a new start of the job, which one slow window had asked for."""
    made = of(space=(Choice("policy", ("bsp", "asp", "ssp")),), start=replace(job().start, policy="asp"))
    begun, answers = course(made), Answers(made, flat)
    begun.training.snapshots.first = answers.run(begun.training.snapshots.take())
    assert isinstance(begun.heat, PolicyHeat)
    answers.run(begun.find_heat(begun.heat))
    assert {s.policy for s in answers.changes()} <= {"asp"}


def test_a_model_that_is_lost_is_left_outwards_by_decades_and_not_downwards_only():
    made = of(space=(RATE,))
    begun = course(made)
    top = replace(made.start, learning_rate=0.1, momentum=0.0)
    found, decades = [], iter((0.1, 10.0, 0.01, 100.0))
    begun.hurting = 5.0
    while (setting := begun.elsewhere(begun.heat, top, decades)) is not None:
        found.append(setting.learning_rate)
    assert found == pytest.approx([0.01, 1.0, 0.001])


@pytest.mark.parametrize(("knobs", "installs"), [((RATE,), True), ((Integer("transfer_bits", 16, 32),), False)])
def test_a_policy_that_no_knob_names_is_installed_where_a_rate_makes_up_for_staleness(knobs, installs):
    """Where the rate was free and policies could be installed, all workers waited for three stragglers to the end."""
    made = of(space=knobs, installs_policies=True)
    start = replace(made.start, policy="bsp")
    made = replace(made, start=start, space=replace(made.space, base=start))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.begin())
    assert (begun.training.branch.setting.policy == "asp") is installs
    assert any(isinstance(a, Install) for a in answers.asked) is installs


@pytest.mark.parametrize(("share", "asks"), [(0.0001, True), (0.05, False)])
def test_the_untrained_model_is_evaluated_only_where_that_is_cheap(share, asks):
    made = of(evaluate_seconds=share * 1e5)
    begun, answers = JointCourse(made, RuleParts()), Answers(made, flat)
    answers.run(begun.begin())
    answers.run(begun.placing.measure())
    assert any(isinstance(a, Evaluate) for a in answers.asked) is asks
    assert begun.gauge.untrained == pytest.approx(1.0, rel=0.11)


def test_a_model_that_is_lost_again_is_not_sent_back_to_the_heat_that_has_lost_it():
    """The decades counted from the newest attempt, so every second one was the first heat again."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=1.0, momentum=0.0))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1.0] * clocks)
    begun.training.snapshots.first = answers.run(begun.training.snapshots.take())
    answer = answers.answer

    def ending(action):
        found = answer(action)
        return replace(found, status="budget") if isinstance(action, Run) and answers.now > 20_000 else found

    answers.answer = ending
    with pytest.raises(JobOver):
        answers.run(begun.learn(begun.heat))
    again = [a for a in answers.asked if isinstance(a, Reconfigure) and "again from the start" in a.reason]
    assert [a.setting.learning_rate for a in again[:4]] == pytest.approx([0.1, 10.0, 0.01, 100.0])


@pytest.mark.parametrize(("compute", "goes_on"), [(math.nan, False), (0.04, True)])
def test_where_every_change_is_a_restart_nothing_is_changed_before_a_saving_can_be_expected(compute, goes_on):
    """On tables of recorded runs joint paid for a restart before its first window, and for up to ten trials after it."""
    made = of(methods=("checkpoint",))
    answers = Answers(made, flat)
    answer = answers.answer

    def measured(action):
        if not isinstance(action, Run):
            return answer(action)
        now = answers.now
        answers.now += action.clocks
        made_window = window(made, [1.0] * action.clocks, now + np.arange(1.0, action.clocks + 1), compute=compute)
        return replace(made_window, status="budget" if answers.now > 2_000 else "running")

    answers.answer = measured
    answers.run(JointCourse(made, RuleParts()).play())
    assert isinstance(answers.asked[0], Run)
    assert answers.asked[0].clocks == 1
    assert any(isinstance(a, Reconfigure) for a in answers.asked) is goes_on
    assert goes_on or all(isinstance(a, Run) for a in answers.asked)


def test_where_nothing_is_learned_under_a_held_rate_the_job_goes_on_as_it_began():
    """More local steps were to save a third of the time, and ruined the model for good: 70,000 s and no target, where the
    start takes 16,752."""
    knobs = (Real("momentum", 0.0, 0.9), Choice("batch_size", (4, 16)))
    made = of(space=knobs, start=replace(job().start, batch_size=4, loads=(), momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    noisy_validations(made, answers, lambda setting: 5.0 if setting.batch_size == 16 else 0.5)
    begun.training.snapshots.first = answers.run(begun.training.snapshots.take())
    answers.run(begun.training.branch.change(replace(made.start, batch_size=16), "a choice of the system"))
    with pytest.raises(JobOver):
        answers.run(begun.learn(begun.heat))
    assert [
        a.setting.batch_size for a in answers.asked if isinstance(a, Reconfigure) and "as the job began" in a.reason
    ] == [4]
    assert begun.training.branch.setting.batch_size == 4
    assert begun.placing.stays


@pytest.mark.parametrize(("policy", "staleness", "again"), [("bsp", 0, True), ("asp", 0, False), ("admit", 16, False)])
def test_a_start_that_had_all_workers_wait_is_gone_back_to(policy, staleness, again):
    """Where nobody had waited before, either, the same would happen once more: 440 s of `ages` 1."""
    start = replace(job().start, policy=policy, staleness=staleness, loads=())
    made = of(space=(Choice("policy", ("bsp", "asp")),), start=start, installs_policies=True)
    begun, answers = course(made), Answers(made, flat)
    begun.training.snapshots.first = answers.run(begun.training.snapshots.take())
    answers.run(begun.training.branch.change(replace(start, policy="asp", staleness=0), "nobody waits"))
    assert answers.run(begun.as_begun()) is again
    assert begun.training.branch.setting.policy == (policy if again else "asp")


def test_a_model_that_has_died_begins_again_as_the_job_began_where_mini_batches_and_local_steps_are_free():
    """Two local steps killed a network that had 32 % right by then; `joint` looked on for 550 s, and `fixed` takes 572."""
    knobs = (Choice("batch_size", (4, 8)), Integer("local_steps", 1, 4))
    made = of(space=knobs, start=replace(job().start, batch_size=4, loads=()))
    begun, answers = course(made), Answers(made, flat)
    answers.run(begun.keep_untrained())
    answers.run(begun.training.branch.change(replace(made.start, local_steps=2), "a choice of the system"))
    answers.show(*[(1.0, 1.0)] * 3, (0.6, 0.6), after=(1.0, 1.0))
    refuse, answers.refuse = answers.refuse, lambda action: len(answers.asked) > 80 or refuse(action)
    with pytest.raises(JobOver):
        answers.run(begun.go_on())
    again = [a.setting.local_steps for a in answers.asked if isinstance(a, Reconfigure) and "as the job began" in a.reason]
    assert again == [1]


def test_where_only_places_are_free_a_model_is_given_up_after_ten_validations_without_progress():
    """Fewer workers were tried after a fifth of the budget, which was too late for `preempted` 9."""
    made = of(space=tuple(Choice(f"role/{n.name}", ("worker", "server")) for n in job().nodes))
    begun, answers = course(made), Answers(made, flat)
    answer, validations = answers.answer, []

    def validated(action):
        found = answer(action)
        if not isinstance(action, Run):
            return found
        validations.append(answers.now)
        over = "budget" if len(validations) > 14 else "running"
        return replace(found, evaluations=(Evaluation(answers.now, action.clocks, 1.0, math.nan),), status=over)

    answers.answer = validated
    begun.training.snapshots.first = answers.run(begun.training.snapshots.take())
    with pytest.raises(JobOver):
        answers.run(begun.go_on())
    first = next(i for i, a in enumerate(answers.asked) if isinstance(a, Reconfigure) and "nothing was learned" in a.reason)
    assert sum(isinstance(a, Run) for a in answers.asked[:first]) == 10
    assert len(answers.asked[first].setting.workers) < len(made.start.workers)


@pytest.mark.parametrize("near", [True, False])
def test_the_rate_of_the_start_is_held_while_it_brings_the_target_near(near):
    """A job that was over after two rounds took three times as long: a rate that others had liked spoilt its model."""
    made = of(space=(RATE,), start=replace(job().start, momentum=0.0))
    median = course(made, prior=True).heat.expected.median
    made = replace(made, start=replace(made.start, learning_rate=0.1 * median / stress(made.start)))
    answers = Answers(made, flat)

    def answer(action):
        if not isinstance(action, Run):
            return Answers.answer(answers, action)
        now = answers.now + np.arange(1.0, action.clocks + 1)
        made_window = window(made, np.exp(-now / 5) if near else np.ones(action.clocks), now)
        answers.now += action.clocks
        return replace(made_window, status="target" if answers.now > 12 else "running")

    answers.answer = answer
    answers.run(JointCourse(made, RuleParts()).play())
    assert any("other jobs" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is not near


def test_a_start_that_spoils_the_model_is_left_from_the_untrained_one():
    made = of(space=(RATE,), start=replace(job().start, momentum=0.0))
    median = course(made, prior=True).heat.expected.median
    made = replace(made, start=replace(made.start, learning_rate=1.5 * median / stress(made.start)))
    begun, answers = course(made, prior=True), Answers(made, lambda setting, clocks: [9.0] * clocks)
    begun.training.snapshots.first = kept = answers.run(begun.training.snapshots.take())
    answers.run(begun.start.measure())
    assert begun.training.branch.number == kept.branch
    assert begun.heat.of(begun.training.branch.setting) == pytest.approx(1.5 / 4 * median)
