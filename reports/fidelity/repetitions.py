"""How good a prediction of a recording can be: what its own repetitions tell of its noise.

A recorded time is the time that a setting takes in the mean, times noise. So even a predictor that knows every mean has
errors, and puts settings that are near each other in the wrong order. Two predictors that use the recording itself show how
much:

* *An exact prediction* knows the mean of every setting. The mean m of the logarithms of a setting's repetitions is taken for
  the truth, and recordings of it are made up: m + sqrt(R / (R - 1)) e, where e is drawn from the R residuals of the setting.
  (A residual of R values is too small by that factor. Residual bootstrap: Efron and Tibshirani 1993, An Introduction to the
  Bootstrap, Chapter 9; Davison and Hinkley 1997, Bootstrap Methods and their Application, Section 6.2.3.) It is slightly
  too good at the order, because noise also moves the means apart.
* *Recording once more*: each repetition is predicted by another one of the same setting, by the next, then by the one after
  that, and so on. Both have noise, so errors are larger than those of an exact prediction, by about the square root of 2.

Noise that all repetitions share, such as a machine that was busy throughout, is in neither. Where no setting was recorded
twice, *an exact prediction of steady runs* is left: what was recorded is taken for the truth, and recordings of it are made
up with the standard errors of the means, which tell how cycles vary within a run. What differs between runs is not in it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from simulators.calibration.predictions import Prediction

__all__ = ["SAMPLES", "Told", "exact", "exact_of_cycles", "once_more", "repeated"]

SAMPLES = 200  # made-up recordings


class Told(NamedTuple):
    """A predictor's values and the recorded ones."""

    predicted: NDArray[np.float64]  # seconds, [n]
    recorded: NDArray[np.float64]  # seconds, [n]


def repeated(made: Sequence[Prediction]) -> list[NDArray[np.float64]]:
    """The recorded seconds of every setting that was recorded more than once, in the order of `made`."""
    found: dict[int, list[float]] = {}
    for p in made:
        if p.setting >= 0:
            found.setdefault(p.setting, []).append(p.recorded)
    return [np.array(values) for values in found.values() if len(values) > 1]


def exact(settings: Sequence[NDArray[np.float64]], *, most: bool = False) -> list[Told]:
    """Made-up recordings of `repeated` settings, predicted by their true means; none for no settings.

    With `most`, the noise is as large as repetitions of this number may hide: the upper end of a one-sided 95 % interval of
    its standard deviation (of a chi-squared variable; few repetitions may be near each other by chance).
    """
    if not settings:
        return []
    rng, logs = np.random.default_rng(0), [np.log(values) for values in settings]
    truth = np.concatenate([np.full(len(y), y.mean()) for y in logs])
    freedom = sum(len(y) - 1 for y in logs)
    factor = float(np.sqrt(freedom / chi2.ppf(0.05, freedom))) if most else 1.0
    noise = [factor * np.sqrt(len(y) / (len(y) - 1)) * rng.choice(y - y.mean(), (SAMPLES, len(y))) for y in logs]
    return [Told(np.exp(truth), np.exp(truth + drawn)) for drawn in np.concatenate(noise, axis=1)]


def exact_of_cycles(made: Sequence[Prediction]) -> list[Told]:
    """Made-up recordings of what was recorded, by the standard errors of its means; none where these are not known."""
    truth, errors = np.array([(p.recorded, p.recorded_error) for p in made]).reshape(-1, 2).T
    if not len(truth) or not (errors > 0).all():
        return []
    drawn = np.random.default_rng(0).standard_normal((SAMPLES, len(truth)))
    return [Told(truth, truth * np.exp(errors * z)) for z in drawn]


def once_more(settings: Sequence[NDArray[np.float64]]) -> list[Told]:
    """Every repetition of `repeated` settings, predicted by the next one, by the one after that, and so on, in a circle.

    As often as the most repetitions of a setting need; a setting with fewer begins again. None for no settings.
    """
    most = max((len(values) for values in settings), default=1)
    return [_shifted(settings, k) for k in range(most - 1)]


def _shifted(settings: Sequence[NDArray[np.float64]], k: int) -> Told:
    another = [np.roll(values, -1 - k % (len(values) - 1)) for values in settings]
    return Told(np.concatenate(another), np.concatenate(settings))
