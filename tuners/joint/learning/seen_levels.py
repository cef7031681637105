"""The levels that one attempt of `tuners.joint` to reach the target has seen, and the drift that the newest of them tell."""

from __future__ import annotations

from typing import NamedTuple

from tuners.joint.models.learning_model import SecondsLeft, seconds_left, spread

__all__ = ["Drift", "SeenLevels"]


class Drift(NamedTuple):
    """What the newest levels tell of the way to the goal."""

    window_seconds: float
    left: SecondsLeft


class SeenLevels:
    """Levels in nats, window by window."""

    def __init__(self) -> None:
        self.levels, self.times = list[float](), list[float]()  # since the heat was last changed or tried
        self.course = list[float]()  # all that the model came by

    def add(self, level: float, seconds: float) -> None:
        """A window has ended at `seconds` of the job."""
        self.levels.append(level)
        self.times.append(seconds)
        self.course.append(level)

    def begin_anew(self) -> None:
        """The heat was changed or tried."""
        self.levels, self.times = [], []

    @property
    def newest(self) -> float:
        """The mean of the newest three levels."""
        return sum(self.levels[-3:]) / len(self.levels[-3:])

    @property
    def spread(self) -> float:
        """By how much levels vary from window to window."""
        return spread(self.course)

    def drift(self, goal: float, budget_seconds: float) -> Drift:
        """What at least two levels tell of the way to the level `goal`."""
        window_seconds = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        return Drift(window_seconds, seconds_left(self.times, self.levels, goal, budget_seconds))
