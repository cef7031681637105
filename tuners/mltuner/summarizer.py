"""How fast a trial converges, and whether that can be told (MLtuner, Section 4.1).

The losses of a trial are averaged in K = 10 windows. The fall of the averages, less the largest rise from one to the next
(the noise), over the time between them, is the speed; nothing that rises has one. A trial is *converging* if its loss falls
and the noise is less than 1 / K of the fall, *diverged* if its numbers overflow, and else *unstable*: it may need to run
for longer. Where we differ or had to choose, always with the other way as an option:

* ``windows_rule="equal"`` cuts exactly K windows, as the paper says, or as many as there are losses; "code" cuts windows of
  floor(N / K) losses, K to 2 K - 1 of them, and drops what is left over.
* A common starting point is put before the windows, as the public code does and the paper does not: the loss of the parent,
  so that a trial whose first window is long or steep is not judged by what is left of its fall.
* ``diverges=10``: a last window above so many times the starting loss has diverged, too, the public code's only test;
  infinity leaves the paper's. With numbers that are not finite we go by the paper.

White noise is taken for convergence once in about 20,000 trials (ten windows, by simulation), far below the paper's
bound of 2^-K.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import ArrayLike, NDArray

__all__ = ["Label", "Summariser", "Summary"]

Label = Literal["converging", "diverged", "unstable"]
_Floats = NDArray[np.float64]


class Summary(NamedTuple):
    """What the progress of a trial comes to."""

    label: Label
    speed: float  # loss per second, zero or more
    fall: float = 0.0  # of the averaged loss, negative where it rises
    noise: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Summariser:
    """The progress summariser. Raises ValueError for a number of windows that allows no fall."""

    windows: int = 10  # K
    windows_rule: Literal["equal", "code"] = "equal"
    diverges: float = 10.0  # times the starting loss

    def __post_init__(self) -> None:
        if self.windows < 2 or not self.diverges > 1:
            raise ValueError(
                f"Cannot summarise with windows={self.windows}, diverges={self.diverges}: give 2 windows or more, "
                "and a factor above 1."
            )

    def __call__(self, seconds: ArrayLike, losses: ArrayLike, start: float | None = None) -> Summary:
        """The summary of losses, one per push in order, at so many seconds of the trial's own time. `start` is the loss of
        the parent; without it a trial starts at its first window."""
        x, t = np.asarray(losses, float), np.asarray(seconds, float)
        if not np.isfinite(x).all():
            return Summary("diverged", 0.0)
        if not len(x):
            return Summary("unstable", 0.0)
        height, moment = self._averaged(x), self._averaged(t)
        if start is not None:
            height, moment = np.append(start, height), np.append(t[0], moment)
        if height[-1] > self.diverges * height[0]:
            return Summary("diverged", 0.0)
        fall = float(height[0] - height[-1])
        noise = max(float(np.diff(height).max(initial=-math.inf)), 0.0)
        span = float(moment[-1] - moment[0])
        speed = max((fall - noise) / span, 0.0) if span > 0 else 0.0
        return Summary("converging" if fall > 0 and noise < fall / self.windows else "unstable", speed, fall, noise)

    def _averaged(self, values: _Floats) -> _Floats:
        """The means of the windows."""
        if self.windows_rule == "equal":
            return np.array([w.mean() for w in np.array_split(values, min(self.windows, len(values)))])
        length = max(len(values) // self.windows, 1)
        whole = len(values) // length * length
        means: _Floats = values[:whole].reshape(-1, length).mean(axis=1)
        return means
