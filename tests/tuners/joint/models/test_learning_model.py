"""What the learning model makes of losses and levels."""

import math
from dataclasses import replace

import numpy as np
import pytest

from tests.support.toy import job
from tests.tuners.joint.answers import RATE, Answers, course, of
from tuners.actions import Reconfigure
from tuners.joint.models.learning_model import (
    HELPED_NATS,
    Gauge,
    falls,
    is_lost,
    seconds_left,
    stopped,
)


@pytest.mark.parametrize(("batches", "hurt"), [(1, False), (math.inf, True)])
def test_a_model_is_not_called_worse_than_an_untrained_one_that_a_single_mini_batch_has_told(batches, hurt):
    """The first mini-batch had half of the others' loss by chance, so the rate came down by decades."""
    made = of(space=(RATE,), start=replace(job().start, learning_rate=1.0, momentum=0.0))
    begun, draws = course(made), np.random.default_rng(0)
    begun.gauge.begin(0.5, batches=batches)
    answers = Answers(made, lambda setting, clocks: list(np.exp(0.35 * draws.standard_normal(clocks))))
    answers.run(begun.find_heat(begun.heat))
    assert any("worse than untrained" in a.reason for a in answers.asked if isinstance(a, Reconfigure)) is hurt


def test_a_slow_drift_that_is_no_noise_and_reaches_the_goal_has_not_stopped():
    times = [10.0 * i for i in range(1, 101)]
    slow = [-0.001 * i for i in range(100)]
    assert falls(slow)
    assert not stopped(times, slow, goal=-1.0, budget_seconds=20_000.0)
    assert stopped(times, slow, goal=-9.0, budget_seconds=20_000.0)
    assert seconds_left(times, slow, -1.0, 20_000.0).mean == pytest.approx(9020.0, rel=1e-3)
    assert str(seconds_left(times, slow[::-1], -1.0, 2_000.0)) == "1000 +- 1000 s"


@pytest.mark.parametrize(("drift", "lost"), [(0.0, True), (0.004, False)])
def test_a_model_with_little_progress_is_lost_only_without_drift(drift, lost):
    assert is_lost([1.0 - drift * i for i in range(10)], blank=1.0, goal=-2.0) is lost


def test_a_model_that_is_right_by_chance_once_is_lost():
    """One validation of 17 had an accuracy of 0.27 in place of 0.1: `learning` 72 held its rate, and missed its target."""
    levels = [0.02, 0.04, 0.03, 0.02, -0.15, 0.03, 0.04, 0.03, 0.04, 0.03]
    assert is_lost(levels, blank=0.11, goal=-1.8)
    assert not is_lost([level - 0.3 for level in levels], blank=0.11, goal=-1.8)
    assert not is_lost(levels[1:], blank=0.11, goal=-1.8)


def test_a_dead_model_that_gives_every_class_its_frequency_is_lost():
    """It was a little better than the untrained one, so the job held it until the end of its budget."""
    gauge = Gauge(replace(job().target, metric="loss", value=0.1))
    gauge.begin(2.67)
    chance = gauge.level(math.log(10), float("nan"))
    assert chance < gauge.untrained_level - HELPED_NATS
    assert is_lost([chance + 0.001 * (-1) ** i for i in range(10)], gauge.untrained_level, gauge.goal(2.0))


def test_what_an_untrained_model_gains_by_giving_every_class_its_frequency_is_not_learned():
    """An untrained network was sure of wrong answers, so a model that had died was far better, and was held for good."""
    gauge = Gauge(replace(job().target, metric="loss", value=0.265))
    gauge.begin(2.81, 0.1)
    assert gauge.blank == gauge.untrained
    gauge.see(1.6, 0.51)
    gauge.see(2.2, 0.26)  # ten classes, and little is learned; but it is right more often than it says
    assert gauge.blank == gauge.untrained
    gauge.see(2.303, 0.103)
    assert gauge.blank == 2.303
    assert gauge.blank_level == gauge.level(2.303, 0.103) < gauge.untrained_level
    assert not gauge.has_learned(math.log(2.303 / 2.81))
    assert gauge.has_learned(math.log(1.6 / 2.81))
    assert gauge.has_learned(0.0, gauge.level(1.6, 0.51) - gauge.untrained_level)
    assert is_lost([gauge.level(2.31, 0.1)] * 10, gauge.blank_level, gauge.goal(2.31))


def test_the_hinge_of_a_model_that_is_often_right_is_not_taken_for_that_of_a_blank_one():
    gauge = Gauge(replace(job().target, metric="accuracy", value=0.9))
    gauge.begin(1.0, 0.12)
    for loss, accuracy in ((0.9, 0.3), (0.7, 0.6)):  # exp(-loss) is higher than the accuracy
        gauge.see(loss, accuracy)
    assert gauge.blank == 1.0


def test_a_level_that_stands_still_in_the_last_quarter_has_not_done_so_in_half_of_the_time():
    """`tf36-logr` halved its workers four times because no drift was left for a moment."""
    times = [float(i + 1) for i in range(100)]
    levels = [-0.02 * min(i, 70) for i in range(100)]
    assert stopped(times, levels, goal=-9.0, budget_seconds=200.0)
    assert not stopped(times, levels, goal=-9.0, budget_seconds=200.0, share=0.5)
