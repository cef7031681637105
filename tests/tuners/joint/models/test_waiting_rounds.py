"""How often workers push that wait for each other: closed forms, and what is dropped."""

import math

import pytest

from tuners.joint.models.waiting_rounds import pace_of_rounds

SLOW = (1.0, 1.0, 1.0, 10.0), (0.0,) * 4


def test_a_quorum_of_all_ends_with_the_slower_one_of_two():
    """The larger one of two normal numbers is 1 / sqrt(pi) deviations above their mean, and the deviation is 0.1."""
    pace = pace_of_rounds((1.0, 1.0), (0.5, 0.5), 2, 0.0)
    assert pace.pushes_per_second == pytest.approx(2 / (1.5 + 0.1 / math.sqrt(math.pi)), rel=0.02)
    assert (pace.applied, pace.evenness) == (1.0, 1.0)


def test_a_slow_worker_is_not_waited_for_and_its_gradients_are_dropped():
    pace, barrier = (pace_of_rounds(*SLOW, quorum, 0.0) for quorum in (3, 4))
    assert pace.pushes_per_second == pytest.approx(3 / 1.08 + 0.1, rel=0.05)
    assert pace.pushes_per_second * (1 - pace.applied) == pytest.approx(0.1, rel=0.4)
    assert pace.evenness == pytest.approx(3 / 4)
    assert barrier.pushes_per_second == pytest.approx(4 / 10, rel=0.05)


def test_grace_waits_for_workers_that_are_a_little_later():
    two = (1.0, 1.0, 2.0, 10.0), (0.0,) * 4
    short, some, long = (pace_of_rounds(*two, 2, grace) for grace in (0.0, 1.5, 20.0))
    assert some.evenness == pytest.approx(3 / 4, abs=0.01)
    assert short.pushes_per_second * short.applied == pytest.approx(2 / 1.06, rel=0.05)
    assert long.pushes_per_second == pytest.approx(pace_of_rounds(*two, 4, 0.0).pushes_per_second)
    assert long.applied == 1.0


def test_who_was_late_is_behind_in_the_next_round():
    """Rounds of two of three that take 1, 1 and 1.5 s: the third is dropped, and would be in time for no round either."""
    pace = pace_of_rounds((1.0, 1.0, 1.5), (0.0,) * 3, 2, 0.0)
    assert pace.evenness < 0.75
    assert 0.1 < 1 - pace.applied < 0.3
