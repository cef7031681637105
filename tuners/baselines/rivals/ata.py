"""ATA, adaptive task allocation: a bandit decides how many gradients of a round each worker computes.

Maranjyan, Saad, Richtarik, Orabona, "ATA: Adaptive Task Allocation for Efficient Resource Management in Distributed Machine
Learning", ICML 2025. A round needs B gradients. Worker i gets a_i of them, with sum a_i = B, so that max a_i s_i is least,
where s_i is a lower confidence bound of the mean time of one gradient of worker i. No worker computes more than its a_i, and
no work is thrown away; the greedy way, in which all compute until B gradients have come, wastes what is in progress.

From memory, and to be checked: s_i = (mean_i - confidence_i)+ with confidence_i in proportion to sqrt(ln(2 r^2) / K_i), r
rounds and K_i observed gradients. The factor is here `width` times the mean, which stands for the paper's bound on the
distribution of the times. The time of a gradient is from the worker's release to the end of its push: a policy of this
contract sees that, and no time of computing.
"""

from __future__ import annotations

from contextlib import suppress
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner
from tuners.applicability import nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import Count, NonNegative

__all__ = ["allocated", "ata", "ata_policy"]


@nothing_to_tune_if(policy_cannot_be_installed)
def ata(job: Job, *, tasks: Count = 1, width: NonNegative = 0.25) -> Tuner:
    """Install rounds of `tasks` gradients per worker on average, most of them computed by the workers that are fast.

    Args:
        job: what is tuned.
        tasks: gradients of a round, per worker.
        width: of the confidence in a worker's mean time after one gradient, as a share of that mean; 0 explores nothing.
    """
    if not policy_cannot_be_installed(job):
        with suppress(Rejected):
            yield from Install(ata_policy(tasks, width), reason=f"{tasks * len(job.start.workers)} gradients per round")


class _Allocation(NamedTuple):
    tasks: Array  # int32 scalar: gradients per round and worker
    width: Array  # float scalar
    round: Array  # int32 scalar: rounds completed
    given: Array  # int32 [k]: a_i of this round
    done: Array  # int32 [k]: gradients of this round
    begun_seconds: Array  # float [k]: release of each worker; nan where it is not known
    seen: Array  # int32 [k]: gradients timed, K_i
    seconds: Array  # float [k]: their mean time


def ata_policy(tasks: int, width: float) -> SyncPolicy:
    """Rounds of `tasks` gradients per active worker, allocated by lower confidence bounds of their times.

    Raises ValueError for less than one gradient per worker, and for a negative width.
    """
    if tasks < 1 or width < 0:
        raise ValueError(f"Cannot allocate {tasks} gradients per worker with width {width:g}: give at least 1, and 0.")

    def init(active: Array) -> _Allocation:
        nodes = active.shape[0]
        none, zeros = jnp.asarray(0, jnp.int32), jnp.zeros(nodes, jnp.int32)
        each = jnp.where(active, tasks, 0).astype(jnp.int32)
        unknown = jnp.full(nodes, jnp.nan)
        return _Allocation(
            jnp.asarray(tasks, jnp.int32), jnp.asarray(width, float), none, each, zeros, unknown, zeros, jnp.zeros(nodes)
        )

    return SyncPolicy(f"ata({tasks},{width:g})", init, _by_allocation)


def _by_allocation(state: _Allocation, push: Push) -> tuple[_Allocation, Decision]:
    mine = jnp.arange(push.active.shape[0]) == push.worker
    took = push.seconds - state.begun_seconds[push.worker]
    seen = state.seen + (mine & jnp.isfinite(took))
    seconds = state.seconds + jnp.where(mine & jnp.isfinite(took), (took - state.seconds) / jnp.maximum(seen, 1), 0.0)
    done = state.done + mine
    full = jnp.all(~push.active | (done >= state.given))  # no worker waits for one that has left
    now = state.round + full
    spread = state.width * jnp.sqrt(jnp.log(2.0 * jnp.maximum(now, 1) ** 2) / jnp.maximum(seen, 1))
    bounds = jnp.where(seen > 0, seconds * jnp.maximum(1.0 - spread, 0.0), 0.0)
    fresh = allocated(bounds, push.active, state.tasks * jnp.sum(push.active))
    given, done = jnp.where(full, fresh, state.given), jnp.where(full, 0, done)
    release = push.waiting & (done < given) & (full | mine)
    begun = jnp.where(release, push.seconds, state.begun_seconds)
    return (
        _Allocation(state.tasks, state.width, now, given, done, begun, seen, seconds),
        Decision(release=release, step=full),
    )


def allocated(seconds: Array, active: Array, tasks: Array) -> Array:
    """How many of `tasks` each worker gets, int32 [k], so that the largest product with `seconds` [k] is least.

    One after another each task goes to the worker that would have done it first; of equals to the one with the fewest, then
    to the first. Workers that are not `active` get none.
    """
    least = jnp.maximum(seconds, 1e-12)  # equal bounds of zero: tasks are dealt out evenly

    def deal(_: Array, given: Array) -> Array:
        return given.at[jnp.argmin(jnp.where(active, (given + 1) * least, jnp.inf))].add(1)

    dealt: Array = jax.lax.fori_loop(0, tasks, deal, jnp.zeros(seconds.shape, jnp.int32))
    return dealt
