"""The search for the heat: each of these decisions was wrong once, and cost an arena its target or its time."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy import job
from tests.tuners.joint.answers import RATE, Answers, course, flat, of
from tuners.actions import Evaluate, Evaluation, Reconfigure, Run
from tuners.joint.learning.heat import stress
from tuners.joint.learning.heat_search import HeatSearch
from tuners.settings import Real


def test_while_nothing_is_learned_the_hottest_harmless_rate_is_the_best():
    """Noise among windows that have learned nothing chose a rate that would have taken many times the budget."""
    made = of(space=(RATE,))
    draws = np.random.default_rng(0)

    def losses(setting, clocks):
        return (1.0 + 0.1 * draws.standard_normal(clocks)) * (1.0 if setting.learning_rate < 20 else 50.0)

    begun, answers = course(made), Answers(made, losses)
    answers.run(begun.find_heat(begun.heat))
    assert 1.0 < begun.heat.of(begun.training.branch.setting) < 20
    assert begun.hurting > 20


def losses_by_rate(best, dead=math.inf):
    """Mini-batch losses that fall the faster, the nearer the rate is to `best`; from the rate `dead` on, they blow up."""
    seen = {"loss": 1.0}

    def losses(setting, clocks):
        rate = setting.learning_rate
        if rate >= dead:
            return [5.0] * clocks
        seen["loss"] *= math.exp(-0.2 * min(rate / best, 1.0)) if rate <= best else 1.0
        return [seen["loss"]] * clocks

    return losses


def test_the_rise_ends_where_hotter_rates_bring_nothing_more():
    """Rates that brought nothing but did not blow up, either, were doubled on and on, up to seven windows for nothing."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.05, momentum=0.0))
    begun, answers = course(made), Answers(made, losses_by_rate(0.2))
    answers.run(begun.find_heat(begun.heat))
    assert max(s.learning_rate for s in answers.changes()) <= 0.81
    assert begun.training.branch.setting.learning_rate == pytest.approx(0.2)


def test_while_windows_bring_little_the_rate_is_quadrupled():
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.0125, momentum=0.0))
    begun, answers = course(made), Answers(made, losses_by_rate(0.4))
    answers.run(begun.find_heat(begun.heat))
    assert [s.learning_rate for s in answers.changes()][:2] == pytest.approx([0.05, 0.2])
    assert begun.training.branch.setting.learning_rate == pytest.approx(0.4)


def test_a_rate_at_which_the_model_learns_is_doubled_only():
    """A window that brought little, after much had been learned, asked for four times the rate, and that was far too hot."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    glances = iter([0.6, 0.57, 0.55])
    begun, answers = course(made), Answers(made, lambda setting, clocks: [next(glances, 0.9)] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert [s.learning_rate for s in answers.changes()][:2] == pytest.approx([0.2, 0.4])


def test_a_step_by_four_that_blows_up_is_halved():
    """The rate stayed a quarter of the one that had blown up, and the best one may lie between."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.05, momentum=0.0))
    seen = {0.05: 0.98, 0.2: 0.97, 0.8: 5.0, 0.4: 0.8}
    begun = course(made)
    answers = Answers(made, lambda setting, clocks: [seen[round(setting.learning_rate, 6)]] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert [s.learning_rate for s in answers.changes()] == pytest.approx([0.2, 0.8, 0.2, 0.4, 0.2])
    assert begun.hurting == pytest.approx(0.8 * stress(made.start))


def test_half_of_a_rate_that_has_blown_the_model_up_is_not_held():
    """One window at half of it had looked well, and the next ones lost all that had been learned."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    seen = {0.1: 0.8, 0.2: 0.6, 0.4: 0.5, 0.8: 1.5}
    begun = course(made)
    answers = Answers(made, lambda setting, clocks: [seen[round(setting.learning_rate, 6)]] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.branch.setting.learning_rate == pytest.approx(0.2)
    assert begun.useless == pytest.approx(0.4 * stress(made.start))


def test_a_rate_is_not_halved_because_the_loss_was_above_the_untrained_one_from_the_first_window_on():
    """A linear SVM's hinge loss rises while its accuracy does; half of the best rate was held, for 1.4 times as long."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    begun.gauge.begin(1.0, 0.1)
    answers.show((1.2, 1.2, 0.4), (1.1, 1.1, 0.5), after=(1.2, 1.2, 0.5))
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.branch.setting.learning_rate == answers.changes()[0].learning_rate  # the second window's


@pytest.mark.parametrize("share", [0.01, 10.0])
def test_a_rate_that_seems_to_hurt_is_validated_where_that_takes_little_of_a_window(share):
    """A linear SVM's hinge loss was 1.7 after one window, with half of all samples right; a tenth of the rate was tried."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1.7] * clocks)
    begun.gauge.begin(1.0, 0.1)
    answer = answers.answer
    answers.answer = lambda action: Evaluation(answers.now, 0, 1.6, 0.5) if isinstance(action, Evaluate) else answer(action)
    search = HeatSearch(begun.training, begun.heat, begun.placing.place_for_much)
    seen = answers.run(begun.training.glance())
    begun.training.job = replace(made, evaluate_seconds=share * begun.training.model.newest.seconds)
    assert search._hurts(seen)
    assert search._hurts(answers.run(search._validated(seen))) == (share > 1)


def test_a_heat_that_is_hardly_cooler_is_not_tried():
    """Of a rate that is held, all that momentum adds to it was gone, but for the last digit."""
    made = of(space=(Real("momentum", 0.0, 0.95),), start=replace(job().start, learning_rate=0.1, momentum=0.9))
    begun, answers = course(made), Answers(made, lambda setting, clocks: [1.7] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert min(s.momentum for s in answers.changes()) == pytest.approx(0.0)
    assert len({s.momentum for s in answers.changes()}) == 1


@pytest.mark.parametrize(
    ("young", "after", "windows"),
    [
        (0.6, 0.4, 1),
        (0.6, 0.75, 2),  # no longer than going back would lose: a model that needed 300 s for that missed its target
        (0.6, 0.99, 1),  # nothing is left of what was learned: it is given up at once
        (0.84, 0.4, 0),  # so little was learned that a ruined model is soon as good
    ],
)
def test_the_job_goes_on_from_the_hottest_windows_if_that_model_is_soon_as_good_as_before(young, after, windows):
    """It always went back to a snapshot. On `digits` it took 494 s, and 271 s from the model that had been thrown off."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    seen = {0.1: 0.85, 0.2: young, 0.4: 2.0, 0.8: 2.0}
    begun, turns = course(made), {"hot": False}

    def losses(setting, clocks):
        turns["hot"] |= setting.learning_rate > 0.3
        return [after if turns["hot"] and setting.learning_rate < 0.3 else seen[round(setting.learning_rate, 6)]] * clocks

    answers = Answers(made, losses)
    answer = answers.answer

    def validated(action):
        found = answer(action)
        if not isinstance(action, Run):
            return found
        loss = float(found.pushes.loss[-1])
        return replace(found, evaluations=(Evaluation(answers.now, int(answers.now), loss, float("nan")),))

    answers.answer = validated
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.branch.setting.learning_rate == pytest.approx(0.1)  # half of the best: twice of that blew up
    assert (begun.training.branch.number == 0) is (windows == 1 and after < young)
    assert sum(isinstance(a, Run) and a.branch == 0 for a in answers.asked) == 3 + windows


def test_a_probable_rate_that_hurts_is_quartered_and_not_divided_by_ten():
    made = of(space=(RATE,))
    median = course(made, prior=True).heat.expected.median
    made = replace(made, start=replace(made.start, learning_rate=median, momentum=0.0))
    begun = course(made, prior=True)
    answers = Answers(made, lambda setting, clocks: [9.0 if setting.learning_rate > median / 2 else 0.8] * clocks)
    answers.run(begun.find_heat(begun.heat))
    assert answers.changes()[0].learning_rate == pytest.approx(median / 4)


def test_a_rate_at_which_accuracy_rises_does_not_hurt_because_the_loss_rises_too():
    """A linear SVM's loss rose to 1.5 times the untrained one while its accuracy doubled; the job came down to a decade."""
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(RATE,), target=target, start=replace(job().start, learning_rate=1.0, momentum=0.0))
    for accuracy, hurt in ((0.2, False), (0.1, True)):
        begun, answers = course(made), Answers(made, lambda setting, clocks: [1.5] * clocks)
        begun.gauge.begin(1.0, 0.1)
        answer = answers.answer
        validation = (Evaluation(0.0, 0, 1.5, accuracy),)

        def validated(action, answer=answer, validation=validation):
            return replace(answer(action), evaluations=validation) if isinstance(action, Run) else answer(action)

        answers.answer = validated
        answers.run(begun.find_heat(begun.heat))
        assert any("worse than untrained" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is hurt


def test_mini_batches_do_not_choose_a_heat_that_validation_calls_worse():
    """A hot rate had damaged the model, a few lucky mini-batches chose it all the same, and it never reached its target."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    answers.show((0.9, 0.9), (0.8, 0.8), (0.7, 0.7), (0.68, 1.2), (0.66, 1.1), after=(5.0, 5.0))
    answers.run(begun.find_heat(begun.heat))
    tried = [s.learning_rate for s in answers.changes()]
    assert begun.training.branch.setting.learning_rate == pytest.approx(tried[1])  # with a loss of 0.7


def test_the_first_validation_of_all_does_not_choose_a_heat_that_has_blown_the_model_up():
    """The window before had not been validated, so any validation at all was taken for a better model."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made), Answers(made, flat)
    answers.show((0.6, None), (3.0, 5.0), after=(0.6, None))
    answers.run(begun.find_heat(begun.heat))
    assert max(s.learning_rate for s in answers.changes()) == pytest.approx(0.2)
    assert begun.hurting == pytest.approx(0.2 * stress(made.start))


def test_a_first_validation_that_is_worse_than_the_untrained_model_is_not_better():
    """On `tf36-logr`, twice as many workers and twice again were held, as nothing had been validated before."""
    made = of(space=(RATE,))
    begun, answers = course(made), Answers(made, flat)
    begun.gauge.begin(1.0)
    answers.show((0.99, None), (1.5, 1.4), (3.0, 2.9))
    answers.run(begun.find_heat(begun.heat))
    assert begun.training.branch.setting.learning_rate <= made.start.learning_rate


@pytest.mark.parametrize(("trained", "goes_on"), [(0.4, True), (0.69, False), (1.0, False)])
def test_a_validation_that_is_worse_by_noise_does_not_undo_a_clear_fall_of_the_loss(trained, goes_on):
    """Logistic regression had 58 % right, and 44 % one window later, while both of its losses fell: the rate was halved.

    A fall within the noise is none: a perceptron went on at twice the best rate after one, and took twice as long.
    """
    target = replace(job().target, metric="accuracy", value=0.9)
    made = of(space=(replace(RATE, high=1.0),), target=target, start=replace(job().start, learning_rate=0.1, momentum=0.0))
    begun, answers = course(made, prior=True), Answers(made, flat)
    begun.gauge.begin(1.0, 0.1)
    answers.show((0.7, 0.7, 0.58), (trained, 0.6, 0.46), after=(9.0, 9.0, 0.1), spread=0.3)
    answers.run(HeatSearch(begun.training, begun.heat, begun.placing.place_for_much).run())
    assert (max(s.learning_rate for s in answers.changes()) > 0.3) is goes_on
