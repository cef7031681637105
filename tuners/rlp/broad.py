"""RLP's broad policy: at every push, a network chooses by which simple rule the workers go on.

The rules (`MODES`) are ASP, K-async and K-sync (Dutta et al. 2018), written as thresholds for the share of active workers
that wait. A worker that waits goes on when that share has reached the first threshold. A worker that still computes
abandons its mini-batch, and begins anew on fresh parameters, when the share has reached the second one, too.

The network sees what `tuners.rlp.features` makes of the pushes so far. Each worker has an encoder of the same weights, and
the job sees the mean of all encodings, so that workers can be renamed and be any number (Zaheer et al. 2017, "Deep Sets")::

    each worker's row --encoder--> mean over workers --+
                                                       +--hidden units--> a value for each mode; the largest is chosen
    the job's row -------------------------------------+

What no weights can change (`decided`): a worker that has waited for `MOST_ROUNDS` rounds of pushes by others goes on, one
begins anew at most `MOST_RESTARTS` times between two pushes of its own, and at least one worker goes on if none computes.
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
from tuners.rlp.features import JOB, WORKER, PushStatistics, counted, features, no_statistics

__all__ = [
    "BROAD_DECISION_SECONDS",
    "MODES",
    "MOST_RESTARTS",
    "MOST_ROUNDS",
    "BroadMemory",
    "Mode",
    "PooledNetwork",
    "TrainedBroad",
    "broad_policy",
    "decided",
    "mode_values",
    "rule_network",
]

MOST_ROUNDS = 2  # of pushes by others, as many as there are active workers in each, for which a worker waits at most
MOST_RESTARTS = 3  # of a mini-batch, one after the other; then it is finished
BROAD_DECISION_SECONDS = 0.0005  # 0.2 to 0.35 ms on one core for 4 to 64 nodes, and a margin
_NEVER = 2.0  # a share that is not reached
_SLACK = 1e-6  # a share that equals a threshold but for rounding has reached it
_ENCODED, _HIDDEN = 4, 8


class Mode(NamedTuple):
    """A simple rule: shares of the workers that have to wait, until ..."""

    name: str
    waits: float  # ... those that wait go on
    computes: float  # ... those that compute begin anew


MODES = (
    Mode("asp", 0.0, _NEVER),
    Mode("k_async(0.4k)", 0.4, _NEVER),
    Mode("k_async(0.7k)", 0.7, _NEVER),
    Mode("k_sync(0.4k)", 0.4, 0.4),
    Mode("k_sync(0.7k)", 0.7, 0.7),
)
_ASP = 0  # index into `MODES`
_THRESHOLDS = np.array([mode[1:] for mode in MODES], np.float32)  # [modes, 2]


class PooledNetwork(NamedTuple):
    """The network, or a pytree of its shape. Arrays are float32; J = len(JOB), W = len(WORKER), M = len(MODES)."""

    worker_weights: Any  # [W, encoded]
    worker_biases: Any  # [encoded]
    job_weights: Any  # [J + encoded, hidden]
    job_biases: Any  # [hidden]
    mode_weights: Any  # [hidden, M]
    mode_biases: Any  # [M]


@dataclass(frozen=True, slots=True)
class TrainedBroad:
    """A broad policy as its file holds it: the network, and how it was trained."""

    network: PooledNetwork
    about: Mapping[str, Any] = field(default_factory=dict)  # the command and the seed that made it, and further facts


def mode_values(network: PooledNetwork, job: Array, each: Array, active: Array) -> Array:
    """The value of every mode, [M], from the rows about the job [J] and the workers [k, W]."""
    encoded = jnp.tanh(each @ network.worker_weights + network.worker_biases)
    pooled = jnp.sum(jnp.where(active[:, None], encoded, 0.0), axis=0) / jnp.maximum(jnp.sum(active), 1)
    hidden = jnp.tanh(jnp.concatenate([job, pooled]) @ network.job_weights + network.job_biases)
    values: Array = hidden @ network.mode_weights + network.mode_biases
    return values


def rule_network(*, round_from: float, mode: int, undone: float, seed: int | None = None) -> PooledNetwork:
    """The rule of three numbers as a network: groups where staleness does harm, else ASP. Training must beat it.

    Args:
        round_from: a round of fresh pushes that would change losses by more than this share does harm.
        mode: index into `MODES` of the groups.
        undone: weight of drift, which speaks against groups: others undo what a worker does, as its data differs.
        seed: if given, the weights that the rule does not need are small and random, for training; else they are 0.
    """
    rng, outer = np.random.default_rng(0 if seed is None else seed), len(JOB) + _ENCODED
    scale = 0.0 if seed is None else 0.2
    shapes = ((len(WORKER), _ENCODED), (_ENCODED,), (outer, _HIDDEN), (_HIDDEN,), (_HIDDEN, len(MODES)), (len(MODES),))
    worker, worker_biases, job, job_biases, values, biases = (rng.normal(size=shape) * scale for shape in shapes)
    job[:, 0], values[0] = 0.0, 0.0
    job[JOB.index("fresh"), 0], job[JOB.index("drift"), 0] = 1.0, -undone / 4
    job_biases[0] = -np.log(round_from)
    values[0, _ASP], values[0, mode] = -1.0, 1.0
    if seed is None:  # the other modes are never chosen: values lie within -1 and 1
        biases -= 9.0 * np.array([n not in (_ASP, mode) for n in range(len(MODES))])
    return PooledNetwork(*(np.asarray(x, np.float32) for x in (worker, worker_biases, job, job_biases, values, biases)))


class BroadMemory(NamedTuple):
    """The state of the policy."""

    network: PooledNetwork
    statistics: PushStatistics


def broad_policy(network: PooledNetwork, *, seconds: float = BROAD_DECISION_SECONDS) -> SyncPolicy:
    """The policy of a network; each decision takes `seconds` of simulated time. All share one compiled engine."""
    held = PooledNetwork(*(jnp.asarray(part, jnp.float32) for part in network))

    def init(active: Array) -> BroadMemory:
        return BroadMemory(held, no_statistics(active))

    return SyncPolicy("rlp", init, _decide, probes=True, seconds=seconds)


@jax.jit  # for callers that are not compiled, such as live servers; inside the compiled engine it changes nothing
def _decide(memory: BroadMemory, push: Push) -> tuple[BroadMemory, Decision]:
    statistics = counted(memory.statistics, push)
    mode = jnp.argmax(mode_values(memory.network, *features(statistics, push), push.active))
    release, restart = decided(statistics, push, mode)
    return memory._replace(statistics=statistics.after(push, release, restart)), Decision(release=release)


def decided(statistics: PushStatistics, push: Push, mode: Array) -> tuple[Array, Array]:
    """Which workers go on in a mode (index into `MODES`), and which of these abandon a mini-batch for it, both bool [k]."""
    waits, computes = jnp.asarray(_THRESHOLDS)[mode]
    workers = jnp.maximum(jnp.sum(push.active), 1)
    share = jnp.sum(push.waiting) / workers + _SLACK
    busy = push.active & ~push.waiting
    overdue = statistics.missed >= MOST_ROUNDS * workers
    start = push.waiting & ((share >= waits) | overdue | ~jnp.any(busy))
    restart = busy & (share >= jnp.maximum(waits, computes)) & (statistics.again < MOST_RESTARTS)
    return start | restart, restart
