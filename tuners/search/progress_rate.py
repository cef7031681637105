"""How fast a job learns, measured from a stretch of it: what online search compares settings by.

Completion time is what counts, but a trial is over long before completion. The loss of SGD falls by about the same
*factor* per second while a setting serves it well, so the measure is the rate of that factor: minus the slope of the
logarithm of training loss over simulated seconds. Being relative, it compares a trial made early, at a high loss, with
one made late; being per second, it weighs hardware and statistical efficiency together. The score of a trial is that rate
less its own standard error, so that a few lucky mini-batches do not win (MLtuner's Section 4.1 penalises noise likewise).
It sees only training loss, at the horizon of a trial: a setting that starts fast and stalls deceives it.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Pushes, Target, Window

__all__ = ["Decay", "loss_decay", "progress_per_second"]

_TINY_LOSS = 1e-12


class Decay(NamedTuple):
    """How fast a loss shrinks."""

    per_second: float  # of the loss's logarithm
    error: float  # the standard error of that


def progress_per_second(seen: Window, target: Target) -> float:
    """The score of a trial, larger is better; minus infinity for one that diverged or can no longer go on.

    Clocks or samples per second where the job only counts these, else the decay of its training loss less its error.
    """
    if seen.status in ("diverged", "deadlock"):
        return -np.inf
    if target.counts:
        done = seen.clocks if target.metric == "clocks" else sum(w.samples for w in seen.workers)
        return done / seen.seconds if seen.seconds > 0 else 0.0
    decay = loss_decay(seen.pushes)
    return decay.per_second - decay.error


def loss_decay(pushes: Pushes, *, groups: int = 10) -> Decay:
    """Minus the least-squares slope of ln(mean training loss) over seconds, each mean over one of `groups` equal groups.

    The means come before the logarithm because mini-batch losses are noisy and the logarithm is not linear. Nothing is
    claimed of fewer than three groups, which fit a line without error; a loss that is not finite decays at minus infinity.
    """
    if not np.isfinite(pushes.loss).all():
        return Decay(-np.inf, 0.0)
    parts = min(groups, len(pushes.loss))
    if parts < 3:
        return Decay(0.0, 0.0)
    seconds = _means(pushes.seconds, parts)
    level = np.log(np.maximum(_means(pushes.loss, parts), _TINY_LOSS))
    seconds, level = seconds - seconds.mean(), level - level.mean()
    spread = float(seconds @ seconds)
    if spread == 0:
        return Decay(0.0, 0.0)
    slope = float(seconds @ level) / spread
    residual = level - slope * seconds
    return Decay(-slope, float(np.sqrt(residual @ residual / (parts - 2) / spread)))


def _means(values: NDArray[np.float64], parts: int) -> NDArray[np.float64]:
    return np.array([part.mean() for part in np.array_split(values, parts)])
