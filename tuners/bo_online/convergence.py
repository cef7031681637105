"""How many clocks a job still needs, estimated from the losses of a stretch of it (TensorFlowOnline, Section IV).

A convergence bound says how many clocks, the paper's iterations, bring a loss to some level, up to a hidden constant. The
constant is fitted online, to the losses of one setting from clock j0 on, so it belongs to that setting. The bound at the
threshold epsilon then gives the remaining clocks: Eq. 3 is the curve, Eq. 4 the same curve at epsilon, and Eq. 5 sets d,
which cannot be fitted as well. What the paper leaves open, what its public code does differently, and what we found:

* The fit is least squares through the origin with d fixed, H = sum(x y) / sum(x x), over y = 1 .. a clocks from j0.
  The code counts from the first loss that it kept (``origin="first"``) and uses the maximum loss as d (``d_rule="max"``).
* A loss above d would make x negative; it counts as x = 0, which has no weight in the fit.
* d <= epsilon: no clocks remain. No loss below d: no estimate.
* Losses that *rise* give a small H and so a small remainder, because d is then the last loss and the first ones look far
  below it. Hence the slope must fall by more than `falls` standard errors; None drops the guard, as in paper and code.
* With d the largest of noisy losses a slow stretch seems fast: of 16,094 clocks to go (a = 108, epsilon 0.2, first loss
  1) noise of 2 % leaves 7,000 and noise of 10 % 1,600, while 161 stay 152. So means of `smoothing` losses are fitted, by
  default of one loss per worker: with 36 workers some 9,000 remain under 10 % of noise. Paper and code fit single losses.

The estimate uses training losses of mini-batches; a target on validation loss is treated as the same level.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["ESTIMATORS", "Estimator", "Form", "LossCurve", "Remaining", "bound", "inliers", "slope"]

_Floats = NDArray[np.float64]


class LossCurve(NamedTuple):
    """The losses of a stretch: of consecutive clocks under one setting."""

    losses: _Floats  # [n], after clocks j0 + 1 .. j0 + n of the job
    loss_before: float = np.nan  # of clock j0, under the setting before; nan where there was none
    clocks_before: int = 0  # j0
    workers: int = 1  # number of workers that pushed them


class Remaining(NamedTuple):
    """The estimate from one stretch: the clocks to epsilon."""

    clocks: float  # from j0 on; infinite where the losses show no progress
    progress: bool
    hidden: float = np.nan  # H, fitted
    distance: float = np.nan  # d, set
    falls: float = np.nan  # number of standard errors by which the slope of the losses is below zero


def bound(losses: _Floats, d: float) -> _Floats:
    """The clocks that the convergence bound allows for each of `losses`, over the hidden constant H; zero or less from d on.

    Eq. 2, z >= (H / epsilon) log(d / epsilon): strongly convex and smooth, whether workers wait for each other or not.
    """
    return np.log(d / losses) / losses


@dataclass(frozen=True, slots=True, kw_only=True)
class Estimator:
    """Eqs. 3-5, and how they are fitted. The defaults are the paper's, except where noise would deceive it (see above)."""

    d_rule: Literal["eq5", "max"] = "eq5"  # Eq. 5, or as the public code: the largest loss alone
    origin: Literal["before", "first"] = "before"  # y runs 1 .. a, or as the public code: from 0 at the first loss kept
    outliers: float = 3.0  # median absolute deviations from the median beyond which a loss is dropped; inf keeps all
    smoothing: int | None = None  # losses in a running mean; None: one per worker; 1 as in paper and code
    falls: float | None = 0.0  # standard errors that the losses' slope must fall by; None: no such guard

    def remaining(self, curve: LossCurve, epsilon: float) -> Remaining:
        """The clocks from the stretch's j0 to a loss of `epsilon`. Raises ValueError for one that is not positive."""
        if not 0 < epsilon < np.inf:
            raise ValueError(f"Cannot estimate the way to epsilon = {epsilon}: give a positive loss.")
        kept = inliers(curve.losses, self.outliers)
        losses, steps = curve.losses[kept], 1.0 + np.flatnonzero(kept).astype(np.float64)
        falls = slope(steps, losses)
        width = self.width(curve, len(losses))
        losses, steps = _running_mean(losses, width), _running_mean(steps, width)
        if not len(losses) or losses.max() <= 0:
            return Remaining(np.inf, False, falls=falls)
        losses = np.maximum(losses, 1e-3 * epsilon)  # a hinge loss can be zero, where the bound is not defined
        d = self._distance(losses, curve.loss_before)
        if d <= epsilon:
            return Remaining(0.0, True, distance=d, falls=falls)
        skipped = (width - 1) / 2  # clocks by which the running mean has moved every point
        j0 = steps[0] if self.origin == "first" else skipped
        y = steps - j0
        x = np.maximum(bound(losses, d), 0.0)  # Eq. 3 is y = H x
        hidden = float(x @ y / (x @ x)) if x.any() else np.nan
        if not hidden > 0 or (self.falls is not None and not falls > self.falls):
            return Remaining(np.inf, False, hidden, d, falls)
        left = hidden * float(bound(np.array([epsilon]), d)[0]) + skipped  # Eq. 4
        return Remaining(max(left, 0.0), True, hidden, d, falls)

    def width(self, curve: LossCurve, count: int) -> int:
        """The width of the running mean over `count` losses, such that at least three means are left."""
        return max(1, min(self.smoothing or curve.workers, count // 3))

    def level(self, losses: _Floats, workers: int, *, first: bool = False) -> float:
        """The level of the loss at the end, or the beginning, of a stretch: a mean as wide as the smoothing of the fit."""
        width = self.smoothing or workers
        return float(np.mean(losses[:width] if first else losses[-width:])) if len(losses) else np.nan

    def _distance(self, losses: _Floats, before: float) -> float:
        """d, Eq. 5: the largest loss, but at most the bound's supremum 2 l."""
        highest = float(losses.max())
        return min(2 * before, highest) if self.d_rule == "eq5" and before > 0 else highest


Form: TypeAlias = Literal["ours", "paper", "code"]
"""Whose form of a part: our default, what the paper prints, or what its public code does."""

ESTIMATORS: dict[Form, Estimator] = {
    "ours": Estimator(),
    "paper": Estimator(smoothing=1, falls=None),
    "code": Estimator(d_rule="max", origin="first", smoothing=1, falls=None),
}
"""The estimator of each form."""


def inliers(losses: _Floats, most: float = 3.0) -> NDArray[np.bool_]:
    """Which losses lie less than `most` median absolute deviations from the median; all finite ones where that is 0."""
    finite = np.isfinite(losses)
    if not finite.any():
        return finite
    off = np.abs(losses - np.median(losses[finite]))
    typical = float(np.median(off[finite]))
    return finite & (off < most * typical) if typical > 0 and most < np.inf else finite


def slope(steps: _Floats, losses: _Floats) -> float:
    """By how many standard errors the least-squares slope of `losses` lies below zero; nan of fewer than three."""
    if len(losses) < 3:
        return np.nan
    x, y = steps - steps.mean(), losses - losses.mean()
    rise = float(x @ y / (x @ x))
    residual = y - rise * x
    error = float(np.sqrt(residual @ residual / (len(x) - 2) / (x @ x)))
    return -rise / error if error > 0 else float(np.sign(-rise)) * np.inf if rise else 0.0


def _running_mean(values: _Floats, width: int) -> _Floats:
    return np.convolve(values, np.full(width, 1.0 / width), "valid") if len(values) else values
