"""What a recording's repetitions tell of its noise, and where they tell nothing."""

from __future__ import annotations

import numpy as np
import pytest

from reports.fidelity.repetitions import exact, once_more, repeated
from simulators.calibration.predictions import Prediction


def recorded(*settings):
    """Predictions of repetitions; each of `settings` has the seconds of its own."""
    return [
        Prediction("job, asp", f"r{k}", f"{i} workers", s, s, s, s, s, workers=1, setting=i)
        for i, seconds in enumerate(settings)
        for k, s in enumerate(seconds)
    ]


def test_settings_that_were_recorded_once_tell_nothing():
    assert [list(values) for values in repeated(recorded((1.0, 1.1), (2.0,), (3.0, 2.0, 4.0)))] == [
        [1.0, 1.1],
        [3.0, 2.0, 4.0],
    ]
    switch = Prediction("switch", "0", "switch", 1.0, 1.0, 1.0, 1.0, 1.0)
    assert repeated([switch, switch]) == []
    assert exact([]) == once_more([]) == []


def test_every_repetition_is_predicted_by_the_others_of_its_setting():
    """Of three repetitions, each by the next and by the one after; with two, always by the other one."""
    first, second = once_more([np.array([1.0, 2.0, 3.0]), np.array([5.0, 7.0])])
    assert [list(told.predicted) for told in (first, second)] == [[2.0, 3.0, 1.0, 7.0, 5.0], [3.0, 1.0, 2.0, 7.0, 5.0]]
    assert list(first.recorded) == list(second.recorded) == [1.0, 2.0, 3.0, 5.0, 7.0]


def test_repetitions_without_noise_are_predicted_exactly():
    for told in exact([np.array([2.0, 2.0]), np.array([3.0, 3.0, 3.0])]):
        assert told.predicted == pytest.approx([2.0, 2.0, 3.0, 3.0, 3.0])
        assert told.recorded == pytest.approx(told.predicted)


def test_the_error_of_an_exact_prediction_is_the_noise_of_a_row():
    """Three repetitions of 400 settings, noise of 5 %: a standard deviation of .05, of once more .05 times the root of 2.

    A mean over 1200 rows of squares, of which two thirds are free, has a standard error of about 5 %.
    """
    rng = np.random.default_rng(1)
    settings = [np.exp(m + 0.05 * rng.standard_normal(3)) for m in rng.uniform(0, 3, 400)]

    def deviation(several):
        return float(np.sqrt(np.mean([np.log(told.predicted / told.recorded) ** 2 for told in several])))

    assert deviation(exact(settings)) == pytest.approx(0.05, rel=0.1)
    assert deviation(once_more(settings)) == pytest.approx(0.05 * np.sqrt(2), rel=0.1)
