"""How fast a job learns, measured from a stretch of it: what online search compares settings by.

Completion time is what counts, but a trial is over long before completion. The loss of SGD falls by about the same
*factor* per second while a setting serves it well, so the measure is the rate of that factor: minus the slope of the
logarithm of training loss over simulated seconds. Being relative, it compares a trial made early, at a high loss, with
one made late; being per second, it weighs hardware and statistical efficiency together. It sees only training loss, at
the horizon of a trial: a setting that starts fast and stalls deceives it, as it deceives MLtuner.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Pushes, Target, Window

__all__ = ["loss_decay_per_second", "progress_per_second"]

_TINY_LOSS = 1e-12


def progress_per_second(seen: Window, target: Target) -> float:
    """The score of a trial, larger is better; minus infinity for one that diverged or can no longer go on.

    Clocks per second where the job only counts clocks, else the rate at which its training loss decays.
    """
    if seen.status in ("diverged", "deadlock"):
        return -np.inf
    if target.metric == "clocks":
        return seen.clocks / seen.seconds if seen.seconds > 0 else 0.0
    return loss_decay_per_second(seen.pushes)


def loss_decay_per_second(pushes: Pushes, *, groups: int = 10) -> float:
    """Minus the least-squares slope of ln(mean training loss) over seconds, each mean over one of `groups` equal groups.

    The means come before the logarithm because mini-batch losses are noisy and the logarithm is not linear. 0 where there
    are too few pushes to draw a line through, minus infinity where a loss is not finite.
    """
    if not np.isfinite(pushes.loss).all():
        return -np.inf
    parts = min(groups, len(pushes.loss))
    if parts < 2:
        return 0.0
    seconds = _means(pushes.seconds, parts)
    level = np.log(np.maximum(_means(pushes.loss, parts), _TINY_LOSS))
    from_centre = seconds - seconds.mean()
    spread = float(from_centre @ from_centre)
    return -float(from_centre @ level) / spread if spread > 0 else 0.0


def _means(values: NDArray[np.float64], parts: int) -> NDArray[np.float64]:
    return np.array([part.mean() for part in np.array_split(values, parts)])
