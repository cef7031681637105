"""MLtuner's progress summarizer: how fast a trial converges, and how reliable that is (Section 4.1).

The losses of a trial are averaged in K = 10 windows. Its speed is the fall of the averages, less the largest rise from one
to the next (the noise), over the time between the first and the last; 0 for a trial whose loss rises. A trial is
*converging* if its loss falls and the noise is less than 1 / K of the fall, *diverged* if its numbers overflow, and else
*unstable*: it may need to run longer. Where we differ or had to choose, the other way is an option but for the first point:

* A loss is that of one push. The paper's is that of a clock, summed over all workers: windows of many clocks have the same
  means, but for the number of workers; windows of a push or two are noisier.
* ``windows_rule="equal"`` cuts exactly K windows, as the paper says, or as many as there are losses. "code" cuts windows of
  floor(N / K) losses, K to 2 K - 1 of them, and drops the remainder, as the public code does.
* The loss of the parent is put before the windows as a common starting point, as in the public code but not in the paper.
  Otherwise a trial with a long or steep first window would be judged only by the rest of its fall.
* ``diverges=10``: a trial has also diverged if its last window is above 10 times the starting loss, which is the public
  code's only test; infinity leaves only the paper's test. For numbers that are not finite we follow the paper.

White noise is taken for convergence once in about 20,000 trials (ten windows, by simulation), far below the paper's bound
of 2^-K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Label", "ProgressSummary", "Summariser"]

Label = Literal["converging", "diverged", "unstable"]
_Floats = NDArray[np.float64]


class ProgressSummary(NamedTuple):
    """The summary of a trial's progress."""

    label: Label
    speed: float  # loss per second, zero or more
    fall: float = 0.0  # of the averaged loss; negative if it rises
    noise: float = 0.0  # largest rise of the averaged loss from one window to the next

    def __str__(self) -> str:
        return self.label if self.label == "diverged" else f"{self.label} at {self.speed:.3g} of loss per second"


@dataclass(frozen=True, slots=True, kw_only=True)
class Summariser:
    """The progress summarizer, a function of losses over time. Raises ValueError for fewer than 2 windows."""

    windows: int = 10  # K
    windows_rule: Literal["equal", "code"] = "equal"
    diverges: float = 10.0  # times the starting loss

    def __post_init__(self) -> None:
        if self.windows < 2 or not self.diverges > 1:
            raise ValueError(
                f"Cannot summarise with windows={self.windows}, diverges={self.diverges}: give 2 windows or more, "
                "and a factor above 1."
            )

    def __call__(self, seconds: ArrayLike, losses: ArrayLike, start: float | None = None) -> ProgressSummary:
        """The summary of `losses`, one per push in order, at `seconds` of the trial's own time.

        `start` is the loss of the parent; without it, a trial starts at its first window.
        """
        x, t = np.asarray(losses, float), np.asarray(seconds, float)
        if not np.isfinite(x).all():
            return ProgressSummary("diverged", 0.0)
        if not len(x):
            return ProgressSummary("unstable", 0.0)
        height, moment = self.window_means(x), self.window_means(t)
        if start is not None:
            height, moment = np.append(start, height), np.append(t[0], moment)
        if height[-1] > self.diverges * height[0]:
            return ProgressSummary("diverged", 0.0)
        fall = float(height[0] - height[-1])
        noise = max(float(np.diff(height).max(initial=-math.inf)), 0.0)
        span = float(moment[-1] - moment[0])
        speed = max((fall - noise) / span, 0.0) if span > 0 else 0.0
        return ProgressSummary("converging" if fall > 0 and noise < fall / self.windows else "unstable", speed, fall, noise)

    def window_means(self, values: _Floats) -> _Floats:
        """The mean of `values` in each window."""
        if self.windows_rule == "equal":
            return np.array([w.mean() for w in np.array_split(values, min(self.windows, len(values)))])
        length = max(len(values) // self.windows, 1)
        whole = len(values) // length * length
        means: _Floats = values[:whole].reshape(-1, length).mean(axis=1)
        return means
