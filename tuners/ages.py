"""How old gradients are, and where their age comes from.

The age of a gradient, `Pushes.staleness`, counts the updates between its worker's pull and its push. Asynchronous
reinforcement learning tells the same age apart by where it arises, because each part has a remedy of its own: while weights
are published, while samples are generated, and while they wait for the trainer. Here these are the pull, the mini-batch's
computing, and the push with its wait for the servers.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Pushes

__all__ = ["Ages", "ages"]

_ROUNDING = 1e-9  # relative


class Ages(NamedTuple):
    """The age of every gradient in updates, in parts that sum to its staleness; every field has shape [n]."""

    publishing: NDArray[np.float64]  # while the worker received the parameters, and while it kept a copy that it had
    generation: NDArray[np.float64]  # while it computed the gradient
    queueing: NDArray[np.float64]  # while the gradient was sent, and waited for the servers


def ages(pushes: Pushes) -> Ages:
    """Divide the staleness of every push among the phases in which it arose.

    Each phase gets its part of the pushes that other workers completed between this push's pull and its end. That is exact
    where every gradient is applied; where a policy drops some, it takes the dropped ones as spread evenly. Of a push that
    began before the first one of `pushes` ended, the others are not all known: its staleness is divided by seconds.

    Where workers skip pulls (`Setting.pull_clocks`), a gradient without a pull was computed on a copy that was old already:
    the updates that its own cycle does not explain came while the worker kept it, and count as publishing.
    """
    ends = np.asarray(pushes.seconds, float)
    sent = ends - pushes.push_seconds
    computed = sent - pushes.compute_seconds
    began = computed - pushes.pull_seconds
    edges = np.stack([began, computed, sent, ends])  # [4, n]
    # Of pushes at one instant, an earlier row was applied earlier; a worker pulls after what was applied at that instant.
    # A difference of sums may miss the instant by its rounding, and the worker's own push before would count.
    rounding = _ROUNDING * np.max(ends, initial=0.0)
    before = np.searchsorted(ends, edges + rounding, side="right")
    before[3] = np.arange(len(ends))
    parts = np.maximum(np.diff(before, axis=0), 0).astype(float)  # [3, n]
    whole_cycle = began + rounding >= np.min(ends, initial=np.inf)
    kept = whole_cycle & (pushes.pull_seconds <= 0)
    parts[0] += np.where(kept, np.maximum(pushes.staleness - parts.sum(axis=0), 0), 0)
    known = whole_cycle & (parts.sum(axis=0) > 0)
    parts = np.where(known, parts, np.diff(edges, axis=0))
    whole = parts.sum(axis=0)
    share = np.divide(parts, whole, out=np.full_like(parts, 1 / 3), where=whole > 0)
    return Ages(*(share * pushes.staleness))
