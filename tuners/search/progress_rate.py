"""How fast a job learns in a window: the measure by which online search compares settings.

The result of a run is its completion time, but a trial ends long before that. Under a good setting the loss of SGD falls by
about the same *factor* per second, so the measure is minus the slope of the logarithm of the training loss over simulated
seconds. It is relative, so it compares an early trial, at a high loss, with a late one; it is per second, so it includes
hardware and statistical efficiency. The score of a trial is this rate minus its standard error, so that random draws of a
few mini-batches do not win (MLtuner, Section 4.1, also penalises noise). The measure sees only training loss within the
trial: it overestimates a setting that starts fast and then stalls.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Pushes, Setting, Target, Window

__all__ = ["Decay", "loss_decay", "progress_per_second"]

_TINY_LOSS = 1e-12
_GROUPS = 10  # of pushes, in order, to whose mean losses a line is fitted


class Decay(NamedTuple):
    """How fast a loss falls."""

    per_second: float  # fall of the logarithm of the loss
    error: float  # standard error of `per_second`


def progress_per_second(seen: Window, target: Target) -> float:
    """The score of a trial, larger is better; minus infinity for one that diverged or cannot continue.

    Clocks or samples per second where the target counts these (by share: at the pace of the worker that takes longest for
    its part), else the decay of the training loss minus its error.
    """
    if seen.status in ("diverged", "deadlock"):
        return -np.inf
    if target.by_share and seen.setting is not None:
        return _slowest_pace(seen, seen.setting, target)
    if target.counts:
        done = seen.clocks if target.metric == "clocks" else sum(w.samples for w in seen.workers)
        return done / seen.seconds if seen.seconds > 0 else 0.0
    decay = loss_decay(seen.pushes)
    return decay.per_second - decay.error


def _slowest_pace(seen: Window, setting: Setting, target: Target) -> float:
    """Clocks or samples per second of all workers, if each went as far in its own part as the slowest one does in its part.

    From the mean cycle of each worker, because a trial has few pushes per worker to count.
    """
    parts, paces = setting.data_by_worker(), []
    for worker in seen.workers:
        cycles = worker.compute_seconds + worker.pull_seconds + worker.push_seconds + worker.wait_seconds
        done = worker.pushes if target.metric == "clocks" else worker.samples
        if parts.get(worker.node, 0.0) > 0:
            paces.append(done / cycles / parts[worker.node] if cycles > 0 else 0.0)
    return min(paces, default=0.0)


def loss_decay(pushes: Pushes) -> Decay:
    """Minus the least-squares slope of ln(mean training loss) over seconds, each mean over one of ten equal groups.

    The means are taken before the logarithm because mini-batch losses are noisy and the logarithm is not linear. With fewer
    than three groups the decay is zero, because a line fits them without error. With a loss that is not finite it is minus
    infinity.
    """
    if not np.isfinite(pushes.loss).all():
        return Decay(-np.inf, 0.0)
    parts = min(_GROUPS, len(pushes.loss))
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
