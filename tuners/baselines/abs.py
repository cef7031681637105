"""ABS, adaptive bounded staleness: groups of K gradients, and a worker that is too stale starts over.

Tan, Zhu, Zhang, "ABS: Adaptive Bounded Staleness Converges Faster and Communicates Less", 2023 (arXiv 2301.08895). Two rules
are the paper's:

1. The servers wait for K workers per round, and K changes during the job: it grows.
2. After a round, a worker whose parameters are too many rounds old abandons its mini-batch and starts over with the present
   ones. The bound on the age changes during the job, too.

The paper was read through its abstract, its introduction and a public summary, which have no formula for K or for the bound.
So these two are not the paper's:

- K is AdaSync's (`tuners.baselines.adasync`), K_0 sqrt(F(w_0) / F(w)), which the paper compares itself with.
- The bound is ours: `patience` M / K rounds, with M workers. Where all workers are equally fast, a gradient comes M / K
  rounds after its pull, so `patience` says how many times as long a worker may take. The bound falls as K grows.

The paper also has local steps; here they are the job's, because they are a knob of its own. A worker that always takes
longer than the bound never finishes a mini-batch: its data is not learned.
"""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated, NamedTuple

import jax.numpy as jnp
from jax import Array
from msgspec import Meta

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.adasync import AdaptiveGroup, adasync_policy, grow, no_loss
from tuners.factory_options import Count

__all__ = ["abs_policy", "adaptive_bounded_staleness"]


@nothing_to_tune_if(no_loss)
def adaptive_bounded_staleness(job: Job, *, initial: Count = 1, patience: Annotated[float, Meta(ge=1)] = 2.0) -> Tuner:
    """Install AdaSync's groups, in which workers that are too stale start over.

    Args:
        job: what is tuned.
        initial: K at the start; 1 is asynchronous.
        patience: the age at which a worker starts over, as a multiple of the age where all workers are equally fast.
    """
    if not no_loss(job):
        with suppress(Rejected):
            yield from Install(abs_policy(initial, patience), reason="groups that grow, without the stalest workers")


class _BoundedGroup(NamedTuple):
    group: AdaptiveGroup
    patience: Array  # float scalar
    round: Array  # int32 scalar: rounds completed
    begun: Array  # int32 [k]: round in which each worker pulled


def abs_policy(initial: int, patience: float) -> SyncPolicy:
    """AdaSync's policy (`tuners.baselines.adasync`), in which a worker older than `patience` M / K rounds starts over.

    Raises ValueError for a K or a `patience` below 1, and a `patience` that is no number.
    """
    if not patience >= 1:
        raise ValueError(f"Cannot let workers start over after {patience:g} times the mean age (abs): give at least 1.")
    groups = adasync_policy(initial)

    def init(active: Array) -> _BoundedGroup:
        none = jnp.asarray(0, jnp.int32)
        return _BoundedGroup(groups.init(active), jnp.asarray(patience, float), none, jnp.zeros(active.shape, jnp.int32))

    return SyncPolicy(f"abs({initial},{patience:g})", init, _without_stale)


def _without_stale(state: _BoundedGroup, push: Push) -> tuple[_BoundedGroup, Decision]:
    group, decision = grow(state.group, push)
    now = state.round + decision.step
    bound = state.patience * jnp.sum(push.active) / group.size
    late = push.active & ~push.waiting & (now - state.begun > bound)
    release = decision.release | (decision.step & late)
    begun = jnp.where(release, now, state.begun)
    return _BoundedGroup(group, state.patience, now, begun), decision._replace(release=release)
