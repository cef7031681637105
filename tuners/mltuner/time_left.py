"""How long a job still takes under its present setting, extrapolated from its validation. Ours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Job

__all__ = ["POINTS", "seconds_left"]

POINTS = 4  # of a curve, from which a power law is told from an exponential decay
_HORIZON = 30.0  # times the time so far: the most that is taken for the time left


def seconds_left(job: Job, curve: Sequence[tuple[float, float]], now: float) -> float:
    """Seconds to the target under the present setting, extrapolated from `curve`, pairs of (seconds trained, level).

    The level is the validation loss, or 1 - accuracy; nan where it is unknown. The last three quarters of the curve are
    extended as an exponential decay or as a power law (Hestness et al. 2017), whichever fits better; with fewer than four
    points as an exponential decay, which is the sooner at the target. At most what is left of the budget, and 30 times the
    time so far.
    """
    most = max(min(job.budget_seconds - now, _HORIZON * now), 0.0)
    goal = 1.0 - job.target.value if job.target.metric == "accuracy" else job.target.value
    known = [(s, level) for s, level in curve if math.isfinite(level)]
    recent = [(s, level) for s, level in known if s >= known[-1][0] / 4]
    seconds, levels = np.array(recent if len(recent) > 1 else known).reshape(-1, 2).T
    if len(levels) < 2:
        return most
    positive = min(goal, levels.min()) > 0
    if positive:
        goal, levels = math.log(goal), np.log(levels)
    line = _line(seconds, levels)
    ending = line.at(goal)
    if positive and len(levels) >= POINTS and seconds[0] > 0:
        power = _line(np.log(seconds), levels)
        if power.residual < line.residual:
            ending = math.exp(min(power.at(goal), 700.0))
    return float(min(most, max(ending - curve[-1][0], 0.0)))


class _Line(NamedTuple):
    """A line through points, by least squares."""

    slope: float
    level: float  # at 0
    residual: float  # sum of squares

    def at(self, level: float) -> float:
        """Where the curve comes down to a level; infinite for one that does not fall."""
        return (level - self.level) / self.slope if self.slope < 0 else math.inf


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> _Line:
    slope, level = np.polyfit(x, y, 1)
    return _Line(float(slope), float(level), float(np.sum((y - level - slope * x) ** 2)))
