"""Whether a hotter setting is worth a trial: each of these decisions was wrong once."""

import math
from dataclasses import replace

import pytest

from tests.support.toy import job
from tests.tuners.joint.answers import RATE, course, of
from tuners.joint.learning.heat import Expected
from tuners.joint.learning.hotter_trials import HotterTrials
from tuners.joint.learning.seen_levels import SeenLevels

TARGET = replace(job().target, metric="loss", value=0.001)
MADE = of(space=(RATE,), target=TARGET, start=replace(job().start, learning_rate=0.1, momentum=0.0))


def worth(levels, away, *, first=1.0, expected=None, useless=math.inf):
    """The trial under a rate of 0.1, after a window a second from `first` on, each with its level, `away` from the goal."""
    begun, seen = course(MADE), SeenLevels()
    for number, level in enumerate(levels):
        seen.add(level, first + number)
    heat = begun.heat if expected is None else replace(begun.heat, expected=expected)
    trials = HotterTrials(begun.training, heat, seen, useless=useless)
    return trials.worth_trying(MADE.start, seen.drift(levels[-1] - away, MADE.budget_seconds))


@pytest.mark.parametrize(("away", "tried"), [(0.1, False), (3.0, True)])
def test_nothing_hotter_is_tried_where_the_goal_is_reached_before_the_trial_ends(away, tried):
    """110 +- 9 s before its target, `learning` 309 began a trial of 180 s, which failed and threw the model off."""
    assert (worth([-0.2 * i for i in range(8)], away, first=100.0) is not None) is tried


@pytest.mark.parametrize(("away", "swings", "likely"), [(300.0, 1e-4, True), (3.0, 1e-4, False), (300.0, 0.1, False)])
def test_a_hotter_rate_may_serve_where_a_drift_without_noise_leads_nowhere(away, swings, likely):
    """Ratings were hardly learned for 3,700 s at an eighth of a good rate: the chance of a hotter one was taken for 0.18,
    as a window of the search had blown the model up, while the drift told that the budget would not do."""
    levels = [-0.02 - 0.001 * i + swings * (-1) ** i for i in range(12)]
    here = course(MADE).heat.of(MADE.start)
    trial = worth(levels, away, expected=Expected(here, 1.0), useless=2 * here)
    assert (trial is not None and "chance 0.49" in trial.why) is likely
