"""AdaSync: K-async SGD whose K grows as the loss falls, from asynchronous to synchronous.

Dutta, Wang, Joshi, "Slow and Stale Gradients Can Win the Race", IEEE Journal on Selected Areas in Information Theory 2021,
section on AdaSync: staleness does little harm while the loss is high, and sets the error floor at the end; so K is raised in
proportion to the inverse square root of the loss, K = K_0 sqrt(F(w_0) / F(w)).

Where we differ: the paper sets K at equal intervals of time; here it is set when a group of K pushes ends. F is the
mean training loss of the mini-batches, over a moving window of some pushes per worker; F(w_0) is that of the first push of
each worker.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import learns_nothing, nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import Count

__all__ = ["AdaptiveGroup", "adasync", "adasync_policy", "grow", "no_loss"]

_WINDOW = 4  # pushes per worker over which the loss is averaged, exponentially


def no_loss(job: Job) -> str:
    """Why K cannot be set by the loss of this job; an empty text where it can."""
    return learns_nothing(job, "it has no loss that could set K") or policy_cannot_be_installed(job)


@nothing_to_tune_if(no_loss)
def adasync(job: Job, *, initial: Count = 1) -> Tuner:
    """Install K-async with K = `initial` sqrt(first loss / loss now), at most the number of workers.

    Args:
        job: what is tuned.
        initial: K at the start; 1 is asynchronous.
    """
    if not no_loss(job):
        with suppress(Rejected):
            yield from Install(adasync_policy(initial))


class AdaptiveGroup(NamedTuple):
    """The state of a policy whose K grows as the loss falls."""

    initial: Array  # int32 scalar: K_0
    size: Array  # int32 scalar: K of this group
    pushed: Array  # int32 scalar: in this group so far
    seen: Array  # int32 scalar: pushes so far
    first: Array  # float scalar: mean loss of the first push of each worker, F(w_0)
    loss: Array  # float scalar: moving mean, F(w)


def adasync_policy(initial: int) -> SyncPolicy:
    """K-async (`tuners.policies.k_async`) with K = `initial` sqrt(F(w_0) / F(w)). Raises ValueError for a K below 1."""
    if initial < 1:
        raise ValueError(f"Cannot wait for {initial} workers (adasync): give at least 1.")

    def init(active: Array) -> AdaptiveGroup:
        del active
        size, none, zero = jnp.asarray(initial, jnp.int32), jnp.asarray(0, jnp.int32), jnp.zeros(())
        return AdaptiveGroup(size, size, none, none, zero, zero)

    return SyncPolicy(f"adasync({initial})", init, grow)


def grow(state: AdaptiveGroup, push: Push) -> tuple[AdaptiveGroup, Decision]:
    """Count a push; where it completes a group, release the workers that wait, and set the K of the next one."""
    workers = jnp.sum(push.active)
    seen, pushed = state.seen + 1, state.pushed + 1
    loss = state.loss + (push.loss - state.loss) / jnp.minimum(seen, _WINDOW * workers)
    first = jnp.where(seen <= workers, loss, state.first)
    full = pushed >= jnp.minimum(state.size, workers)
    grown = jnp.ceil(state.initial * jnp.sqrt(first / jnp.maximum(loss, 1e-12)))
    wanted = jnp.clip(jnp.nan_to_num(grown, nan=1.0), state.initial, jnp.maximum(workers, 1)).astype(jnp.int32)
    state = state._replace(
        size=jnp.where(full, wanted, state.size), pushed=jnp.where(full, 0, pushed), seen=seen, first=first, loss=loss
    )
    return state, Decision(release=full & push.waiting, step=full)
