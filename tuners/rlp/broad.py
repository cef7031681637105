"""RLP's broad policy: a network gives every worker a threshold, and the share of workers that wait decides who goes on.

After a push each worker has a threshold, made by a network from what it and the others do (`tuners.rlp.sight`). A worker
that waits goes on when the share of active workers that wait has reached its threshold. A worker that still computes
abandons its mini-batch and begins anew on fresh parameters when that share has reached *its* threshold and somebody goes on.

Known rules are constant thresholds: 0 for those that wait is ASP, 1 is BSP, K / k is K-async, and K / k for those that
compute, too, is K-sync (Dutta et al. 2018). The network moves between them while the job runs.

Each worker has an encoder of the same weights, and the job sees the mean of all encodings, so that workers can be renamed or
be any number (Zaheer et al. 2017, "Deep Sets")::

    each worker's row --encoder--> e_i --mean over workers--+
                                    |                       v
                                    |      the job's row, mean --context--> c
                                    v                                       |
    threshold_i = base + own . e_i + shared . c + e_i . both . c  <---------+

What no weights can change (`decided`): a worker that has waited for `MOST_ROUNDS` rounds of pushes by others goes on, one
begins anew at most `MOST_RESTARTS` times between two pushes of its own, and somebody goes on if no worker computes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tuners.actions import Decision, Push, SyncPolicy
from tuners.rlp.sight import JOB, WORKER, Sight, features, first_sight, seen

__all__ = [
    "BROAD_DECISION_SECONDS",
    "MOST_RESTARTS",
    "MOST_ROUNDS",
    "UNITS",
    "PooledNetwork",
    "TrainedBroad",
    "broad_policy",
    "decided",
    "rule_network",
    "thresholds",
]

MOST_ROUNDS = 2  # of pushes by others, as many as there are active workers in each, for which a worker waits at most
MOST_RESTARTS = 3  # of a mini-batch, one after the other; then it is finished
UNITS = 2  # of an encoding, and of the context
BROAD_DECISION_SECONDS = 0.0005
_SLACK = 1e-6  # a share that equals a threshold but for rounding has reached it


class PooledNetwork(NamedTuple):
    """The network, or a pytree of its shape. Arrays are float32; J = len(JOB), W = len(WORKER), U = UNITS."""

    worker_weights: Any  # [W, U]
    worker_biases: Any  # [U]
    job_weights: Any  # [J + U, U]
    job_biases: Any  # [U]
    own: Any  # [U]
    shared: Any  # [U]
    both: Any  # [U, U]
    base: Any  # []


@dataclass(frozen=True, slots=True)
class TrainedBroad:
    """A broad policy as its file holds it: the network, and how it was trained."""

    network: PooledNetwork
    about: Mapping[str, Any] = field(default_factory=dict)  # the command and the seed that made it, and further facts


def thresholds(network: PooledNetwork, job: Array, each: Array, active: Array) -> Array:
    """The threshold of every worker, [k], from the rows about the job [J] and the workers [k, W]."""
    own = jnp.tanh(each @ network.worker_weights + network.worker_biases)
    pooled = jnp.sum(jnp.where(active[:, None], own, 0.0), axis=0) / jnp.maximum(jnp.sum(active), 1)
    context = jnp.tanh(jnp.concatenate([job, pooled]) @ network.job_weights + network.job_biases)
    found: Array = network.base + own @ (network.own + network.both @ context) + network.shared @ context
    return found


def rule_network(
    *, round_from: float, group: float, undone: float, seed: int | None = None, sharpness: float = 4.0
) -> PooledNetwork:
    """The rule of three numbers as a network: K-sync where staleness does harm, else ASP.

    It begins where training begins, and is what training must beat. With a `seed`, units that the rule does not need get
    small random weights for training; they have no effect yet.

    Args:
        round_from: a round of fresh pushes that would change losses by more than this share does harm.
        group: share of the workers whose pushes end a group, K / k.
        undone: weight of drift, which speaks against groups: others undo what a worker does, its data differs.
        seed: of the units that are not needed.
        sharpness: how sharply the rule changes from ASP to groups.
    """
    units, outer = len(WORKER), len(JOB) + UNITS
    rng = np.random.default_rng(0 if seed is None else seed)
    scale = 0.0 if seed is None else 1.0
    worker, job = rng.normal(size=(units, UNITS)) * 0.3 * scale, rng.normal(size=(outer, UNITS)) * 0.15 * scale
    worker_biases, job_biases = np.zeros(UNITS), np.zeros(UNITS)
    worker[:, 0] = job[:, 0] = 0.0
    worker[WORKER.index("busy"), 0], worker_biases[0] = 4.0, -2.0  # about -1 where it waits, 1 where it computes
    job[JOB.index("fresh"), 0], job[JOB.index("drift"), 0] = sharpness, -undone
    job_biases[0] = -sharpness * np.log(round_from)
    # Thresholds: for those that wait from 0 (ASP) to `group`; for those that compute from 1.3 (never) to a little less.
    waits, computes = np.array([0.0, group]), np.array([1.3, 0.8 * group])
    middle, half = (waits + computes) / 2, (computes - waits) / 2 / np.tanh(2.0)
    own, shared, both = np.zeros(UNITS), np.zeros(UNITS), np.zeros((UNITS, UNITS))
    own[0], shared[0], both[0, 0] = half.mean(), (middle[1] - middle[0]) / 2, (half[1] - half[0]) / 2
    parts = (worker, worker_biases, job, job_biases, own, shared, both, middle.mean())
    return PooledNetwork(*(np.asarray(part, np.float32) for part in parts))


class _Memory(NamedTuple):
    network: PooledNetwork
    sight: Sight


def broad_policy(network: PooledNetwork, *, seconds: float = BROAD_DECISION_SECONDS) -> SyncPolicy:
    """The policy of a network; each decision takes `seconds` of simulated time. All share one compiled engine."""
    held = PooledNetwork(*(jnp.asarray(part, jnp.float32) for part in network))

    def init(active: Array) -> _Memory:
        return _Memory(held, first_sight(active))

    return SyncPolicy("rlp", init, _decide, probes=True, seconds=seconds)


@jax.jit  # for callers that are not compiled, such as live servers; inside the compiled engine it changes nothing
def _decide(memory: _Memory, push: Push) -> tuple[_Memory, Decision]:
    sight = seen(memory.sight, push)
    release, restart = decided(sight, push, thresholds(memory.network, *features(sight, push), push.active))
    return memory._replace(sight=sight.after(push, release, restart)), Decision(release=release)


def decided(sight: Sight, push: Push, limits: Array) -> tuple[Array, Array]:
    """Which workers go on, and which of these abandon a mini-batch for it, both bool [k], under thresholds `limits` [k]."""
    workers = jnp.maximum(jnp.sum(push.active), 1)
    busy = push.active & ~push.waiting
    reached = jnp.sum(push.waiting) / workers >= limits - _SLACK
    overdue = sight.missed >= MOST_ROUNDS * workers
    start = push.waiting & (reached | overdue | ~jnp.any(busy))
    restart = busy & reached & jnp.any(push.waiting & reached) & (sight.again < MOST_RESTARTS)
    return start | restart, restart
