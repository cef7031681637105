"""Hold, try hotter, cool, return: each of these decisions was wrong once, and cost an arena its target or its time."""

import math
from contextlib import suppress
from dataclasses import replace

import pytest

from tests.support.toy import job
from tests.tuners.joint.answers import RATE, Answers, course, flat, of
from tuners.actions import Evaluate, Evaluation, Reconfigure, Run
from tuners.joint.job.steps import JobOver
from tuners.joint.learning.heat import stress
from tuners.joint.learning.holding import Holding, RuleParts
from tuners.joint.models.learning_model import (
    SecondsLeft,
    has_lost_half,
    likely_seconds,
    seconds_left,
)
from tuners.joint.tuner import JointCourse


def test_after_a_trial_that_failed_the_model_is_kept_if_it_is_soon_as_good():
    holding, answers = holding_of([-0.5, -0.6, -0.7, -0.8], cost_rule=False)
    losses, answer = iter([9.0, 0.7, math.exp(-0.9)]), answers.answer

    def measured(action):
        return Evaluation(answers.now, 0, next(losses), float("nan")) if isinstance(action, Evaluate) else answer(action)

    answers.answer = measured
    answers.run(holding.try_hotter(-0.8, -9.0))
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([0.2, 0.1])
    assert all(a.branch == 0 for a in answers.asked if isinstance(a, Run))
    assert sum(isinstance(a, Run) for a in answers.asked) == 3


def test_a_young_model_that_has_lost_half_of_what_it_had_learned_is_too_hot():
    """It had learned 0.4 nats and lost them all. That is no rise of 0.45 nats, so the job held the rate for 770 s."""
    assert has_lost_half([-0.4, -0.1, -0.05], before=-0.4, blank=0.05, deviation=0.05)
    assert not has_lost_half([-0.4, -0.1, -0.35], before=-0.4, blank=0.05, deviation=0.05)  # one window only
    assert not has_lost_half([-0.4, -0.1, -0.05], before=-0.4, blank=0.05, deviation=0.2)  # noise
    assert not has_lost_half([-2.4, -2.1, -2.0], before=-2.4, blank=0.05, deviation=0.05)


def test_a_model_that_has_died_is_given_up_and_not_tried_hotter():
    """Its levels stood still, so noise did not seem to hold it up, and four hotter rates were tried one after the other."""
    target = replace(job().target, metric="loss", value=0.265)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.2, momentum=0.0))
    begun, answers = JointCourse(made, RuleParts(prior=False)), Answers(made, lambda setting, clocks: [2.3] * clocks)
    begun.gauge.begin(2.81, 0.1)
    begun.gauge.see(2.303, 0.1)
    seen = [(2.17, 0.24), (2.18, 0.26), (1.86, 0.43), (1.61, 0.51), *[(2.31, 0.1), (2.308, 0.103)] * 40]
    turns, answer = iter(seen), answers.answer

    def measured(action):
        if isinstance(action, Run) and answers.now > 60 * 16:
            return replace(answer(action), status="budget")
        return Evaluation(answers.now, 0, *next(turns)) if isinstance(action, Evaluate) else answer(action)

    answers.answer = measured
    with suppress(JobOver):
        answers.run(Holding(begun.training, begun.heat, RuleParts(), begun.placing.place_for_much).run())
    died = [a for a in answers.asked if isinstance(a, Reconfigure) and "too hot" in a.reason]
    assert died
    assert not any("on trial" in a.reason and "chance 0.7" in a.reason for a in answers.asked if isinstance(a, Reconfigure))


def test_the_heat_that_is_held_follows_the_job_to_other_machines():
    """What was held named a machine that had left, so every later change of the rate was refused, or moved the job back."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    moved = replace(made.start, workers=made.start.workers[:-1], learning_rate=0.2)
    holding = Holding(
        begun.training, begun.heat, RuleParts(), lambda: begun.training.branch.change(moved, "a machine has left")
    )
    begun.training.branch.cluster_changed = True
    answers.run(holding.window())
    assert holding.held == holding.top
    assert holding.held.workers == moved.workers
    # One worker less of three, and a gradient is less old: the rate may be higher.
    assert holding.held.learning_rate == pytest.approx(made.start.learning_rate * 3 / 2)


def show(holding, levels):
    """The windows since the heat was changed had these `levels`, a second each."""
    holding.seen.levels, holding.seen.times = list(levels), [float(i + 1) for i in range(len(levels))]


def holding_of(levels, rate=0.1, goal=0.001, *, cost_rule=True):
    """A job at this rate whose windows had these `levels`, a second each."""
    target = replace(job().target, metric="loss", value=goal)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=rate, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    holding = Holding(begun.training, begun.heat, RuleParts(cost_rule=cost_rule), begun.placing.place_anew)
    show(holding, levels)
    holding.seen.course, holding._losses = list(levels), [math.exp(level) for level in levels]
    holding.low = min(levels)
    return holding, answers


@pytest.mark.parametrize(("rate", "goes_back"), [(0.1, True), (0.001, False)])
def test_a_job_at_its_lowest_heat_does_not_go_back_to_a_snapshot(rate, goes_back):
    """At a rate of 30 that was held, with no momentum, it went back four times, to train the same windows again."""
    holding, _ = holding_of([-2.0, -2.0, -1.0, -1.0, -1.0], rate)
    assert holding._is_too_hot() is goes_back


@pytest.mark.parametrize(("began", "windows"), [(10.0, 1), (10_000.0, 10)])
def test_a_heat_that_is_cooled_is_held_for_a_share_of_the_jobs_time(began, windows):
    """Late in a job, cooling by halves, window by window, was over before anything was shed: `learning` 306 missed."""
    holding, answers = holding_of([-0.5, -0.6, -0.7, -0.8])
    answers.now = holding._training.branch.seconds = began
    answers.run(holding._shed(holding.held, "now", -9.0))
    runs = [isinstance(a, Run) for a in answers.asked]
    first, second, *_ = (at for at, a in enumerate(answers.asked) if isinstance(a, Reconfigure))
    assert sum(runs[first:second]) == windows


def test_a_heat_that_was_too_hot_has_not_served():
    """Where no drift was left, the job went back to it, lost half of what it knew, and took 68,000 s in place of 35,000."""
    holding, answers = holding_of([-0.5, -0.6, -0.7, 0.0])
    holding._kept = answers.run(holding._training.snapshots.take())
    before = holding.held.learning_rate
    assert holding.top.learning_rate == before
    answers.run(holding._step_back())
    assert holding.top == holding.held
    assert holding.top.learning_rate == pytest.approx(before / 2)


@pytest.mark.parametrize(("kept", "has_lost"), [(0.36, False), (0.13, True)])
def test_a_snapshot_is_evaluated_before_the_heat_is_halved_once_more(kept, has_lost):
    """The snapshot was worse than the model that had been validated before it, so `learning` 13 went back to it until its
    rate was 1,000 times too low."""
    holding, answers = holding_of([-2.0, -2.0, -1.0, -1.0])
    answer = answers.answer
    answers.answer = lambda a: Evaluation(answers.now, 0, kept, math.nan) if isinstance(a, Evaluate) else answer(a)
    holding._kept = answers.run(holding._training.snapshots.take())
    assert holding._is_too_hot()
    assert answers.run(holding._has_lost_much())  # the first time it is believed
    assert not any(isinstance(a, Evaluate) for a in answers.asked)
    holding._has_returned = True
    assert answers.run(holding._has_lost_much()) is has_lost
    assert answers.asked[-1] == Evaluate(holding._kept.branch)
    assert holding._is_too_hot() is has_lost


@pytest.mark.parametrize(("cooled", "share"), [(1.0, 1.0), (0.95, 1.0), (0.6, 0.5)])
def test_where_no_drift_is_left_the_job_goes_on_as_hot_as_it_ever_served_or_half_as_hot_after_much_noise(cooled, share):
    """`mixed` 71 shed 1.1 nats, and went back to the heat whose noise had hidden them, twice."""
    holding, answers = holding_of([0.0] * 4)
    answer, before = answers.answer, holding.held.learning_rate
    answers.answer = lambda a: Evaluation(answers.now, 0, cooled, math.nan) if isinstance(a, Evaluate) else answer(a)
    holding._kept = answers.run(holding._training.snapshots.take())
    answers.run(holding._cool(0.0, -9.0, "no drift is left", stop=True))
    assert not holding.ended
    assert holding.held == holding.top == holding._training.branch.setting
    assert holding.held.learning_rate == pytest.approx(share * before)


@pytest.mark.parametrize(
    ("drift", "elapsed", "expected"), [(100.0, 100.0, 100.0), (1e6, 100.0, 631.0), (1e6, 9_900.0, 100.0)]
)
def test_a_job_is_likely_to_last_about_as_long_as_it_has(drift, elapsed, expected):
    """What the drift of some windows told of the seconds left was wrong by a factor of five."""
    assert likely_seconds(SecondsLeft(drift, drift), elapsed, 10_000.0) == pytest.approx(expected, rel=0.01)


def test_a_heat_that_was_left_as_too_hot_is_less_likely_to_serve():
    """A rate that the job had just come down from was tried again: many other jobs have their best one above it."""
    holding, answers = holding_of([-0.3, -0.5, -0.7, -0.9])
    before, chance = holding.held, holding.trials.chance(holding.held, holding.held)
    answers.run(holding._step_back())
    assert holding.trials.chance(before, holding.held) == pytest.approx(chance / 4)


@pytest.mark.parametrize(("fall", "cooled"), [(0.1, False), (0.01, True)])
def test_a_job_whose_drift_arrives_as_soon_is_not_cooled(fall, cooled):
    """A job three windows from its target was cooled for six windows, which it did not reach, and then for five again."""
    noise = [0.0, 0.1, -0.1, 0.05, -0.05, 0.1, -0.1, 0.0]
    levels = [-4.0 - fall * i + x for i, x in enumerate(noise)]
    goal = math.exp(levels[-1] - 0.05) / 0.1  # a level of 0.05 less
    holding, answers = holding_of(levels, goal=goal)
    turns = answers.answer

    def ending(action):
        found = turns(action)
        return replace(found, status="budget") if isinstance(action, Run) else found

    answers.answer = ending
    with suppress(JobOver):
        answers.run(holding._decide())
    assert any("cooled" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is cooled


def test_levels_that_cannot_be_measured_tell_no_time():
    assert seconds_left([1.0, 2.0, 3.0], [float("nan")] * 3, 0.0, 10.0).mean == 7.0


def test_a_trial_that_fails_clearly_is_not_made_again():
    """The same rate was tried three times, and each trial cost a twentieth of the run."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [0.5] * clocks)
    answer = answers.answer

    def measured(action):
        hot = answers.settings[action.branch].learning_rate > 0.15 if isinstance(action, Evaluate) else False
        return Evaluation(0.0, 0, 3.0 if hot else 0.5, float("nan")) if isinstance(action, Evaluate) else answer(action)

    answers.answer = measured
    holding = Holding(begun.training, begun.heat, RuleParts(cost_rule=False), begun.placing.place_anew)
    level = begun.gauge.level(0.5, float("nan"))
    for _ in range(3):
        show(holding, [level] * 4)
        holding.low = level
        answers.run(holding.try_hotter(level, -9.0))
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([0.2, 0.1])
    assert holding.trials.hurting == pytest.approx(0.2 * stress(made.start))


@pytest.mark.parametrize(("after", "held"), [(0.8, 0.2), (1.0, 0.1)])
def test_a_trial_that_unlearns_what_was_learned_has_failed(after, held):
    """A hot trial killed the model. That was within the tolerance of noise, so it stayed,
    and so did every hotter trial after it."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun = course(made)
    begun.gauge.begin(1.0, 0.1)
    answers = Answers(made, lambda setting, clocks: [after] * clocks)
    answer = answers.answer
    measured = Evaluation(0.0, 0, after, 0.1 if after == 1.0 else 0.25)
    answers.answer = lambda action: measured if isinstance(action, Evaluate) else answer(action)
    holding = Holding(begun.training, begun.heat, RuleParts(cost_rule=False), begun.placing.place_anew)
    levels = [begun.gauge.level(0.8, 0.17 + 0.01 * i) for i in range(4)]
    show(holding, levels)
    holding.low = levels[-1]
    answers.run(holding.try_hotter(levels[-1], -2.0))
    assert holding.held.learning_rate == pytest.approx(held)
    assert holding.top == holding.held  # what the job goes back to where the drift stops
    assert holding.low == levels[-1] or after < 1.0
