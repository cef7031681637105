"""RLP: a learned synchronisation policy (Zhu et al. 2020, "Learning Efficient Parameter Server Synchronization Policies").

At every push a small network looks at the last ten and says who goes on: nobody, the pusher, or everybody who waits
(Section 3.2). This file is the policy and the tuner that installs it; `tuners.rlp.dqn` trains it, `tuners.rlp.policy_file`
keeps it. No part knows how many workers there are.

Where we differ from the print, which is silent or cannot be meant:

- "Nobody" is barred when nobody is left at work, where it would stand still for ever; in training, too.
- The feature that the paper calls the loss is the pushed mini-batch's, at the servers, before and after the update.
- Features reach the network through a fixed affine scaling that is saved with it, and within limits: n counts to hundreds
  where a loss changes by hundredths, and a loss that is not finite must not end in an action that is not one.
- Leaky units leak 0.01. Deciding takes what Table 1 says of it, 1.4 % of 311 s for 380 decisions, as simulated time.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

from tuners.actions import Decision, Install, Job, Push, Rejected, SyncPolicy, Tuner

__all__ = [
    "DECISION_SECONDS",
    "FEATURES",
    "HISTORY",
    "HOLD",
    "RELEASE_ALL",
    "RELEASE_ONE",
    "SIZES",
    "Network",
    "Scaling",
    "Trained",
    "allowed",
    "decided",
    "encoded",
    "may_hold",
    "policy",
    "q_values",
    "remembered",
    "rlp",
    "untrained",
]

HISTORY, FEATURES = 10, 4  # H pushes, newest first, of (n, L, change of L, pushes by others since the pull)
HOLD, RELEASE_ONE, RELEASE_ALL = range(3)  # the actions: nobody, {W_s}, all who wait
SIZES = (HISTORY * FEATURES, 64, 32, 3)  # of the network's layers, input and output included
DECISION_SECONDS = 0.0115
_LEAK = 0.01


class Network(NamedTuple):
    """A Q-network, or anything of its shape: layers of `SIZES`, leaky rectifiers between them."""

    weights: tuple[Any, ...]  # float32 [inputs, outputs] per layer
    biases: tuple[Any, ...]  # float32 [outputs] per layer


class Scaling(NamedTuple):
    """What features are before the network sees them: clip((raw - offset) * factor, -limit, limit)."""

    offset: Any = np.zeros(FEATURES, np.float32)
    factor: Any = np.array([1 / 400, 1.0, 10.0, 0.1], np.float32)  # an episode's pushes, nats, tenths of a nat, k = 10
    limit: Any = np.float32(10.0)


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy as it is kept: the network, what it expects, and how it came to be."""

    network: Network
    scaling: Scaling = field(default_factory=Scaling)
    about: Mapping[str, Any] = field(default_factory=dict)  # the command and the seed that made it, and what else is known


def rlp(job: Job, *, policy: str = "", decision_seconds: float = DECISION_SECONDS) -> Tuner:
    """Install the policy of the file `policy`, as `harness train rlp` writes it, or the one that ships with this package.

    Raises ValueError for a file that holds none.
    """
    from tuners.rlp import policy_file

    del job
    trained = policy_file.load(policy) if policy else policy_file.shipped()
    with suppress(Rejected):
        yield from Install(_policy(trained, seconds=decision_seconds))


def policy(trained: Trained, *, seconds: float = DECISION_SECONDS) -> SyncPolicy:
    """What decides greedily by `trained`, each decision in so much simulated time.

    All such policies share one `decide`, and so one compiled engine.
    """
    network, scaling = trained.network, trained.scaling

    def init(active: Array) -> _Memory:
        del active
        return _Memory(*_as_arrays(network, scaling), jnp.zeros((HISTORY, FEATURES), jnp.float32))

    return SyncPolicy("rlp", init, _decide, probes=True, seconds=seconds)


_policy = policy  # the tuner's option has its name


def untrained(seed: int) -> Network:
    """A network by He's initialisation: weights N(0, 2 / inputs), no bias."""
    rng = np.random.default_rng(seed)
    shapes = list(pairwise(SIZES))
    weights = tuple((rng.normal(size=s) * np.sqrt(2.0 / s[0])).astype(np.float32) for s in shapes)
    return Network(weights, tuple(np.zeros(n, np.float32) for n in SIZES[1:]))


class _Memory(NamedTuple):
    network: Network
    scaling: Scaling
    history: Array  # float32 [H, 4]


@jax.jit  # for whoever calls it at every push; where it is traced, it changes nothing
def _decide(memory: _Memory, push: Push) -> tuple[_Memory, Decision]:
    history = remembered(memory.history, push)
    values = q_values(memory.network, encoded(memory.scaling, history))
    action = jnp.argmax(jnp.where(allowed(may_hold(push)), values, -jnp.inf))
    return memory._replace(history=history), decided(action, push)


# ------------------------------------------------------------------------------------------------ state, action, network


def remembered(history: Array, push: Push) -> Array:
    """The raw features of the last H pushes, float32 [H, 4], newest first, once `push` has come; zeros before the first."""
    change = jnp.asarray(push.loss_after) - push.loss_before
    newest = [history[0, 0] + 1, push.loss_before, change, push.staleness]
    row = jnp.stack([jnp.asarray(feature, jnp.float32) for feature in newest])
    return jnp.concatenate([row[None], history[:-1]])


def encoded(scaling: Scaling, history: Array) -> Array:
    """The state S_n that the network sees, [..., 40], of histories [..., 10, 4]; what is not finite is at the limit."""
    scaled = (history - scaling.offset) * scaling.factor
    bounded = jnp.where(jnp.isnan(scaled), scaling.limit, jnp.clip(scaled, -scaling.limit, scaling.limit))
    return bounded.reshape(*history.shape[:-2], SIZES[0])


def may_hold(push: Push) -> Array:
    """Whether somebody is still at work, so that another push will come though nobody is released."""
    return jnp.any(push.active & ~push.waiting)


def allowed(hold: Array) -> Array:
    """Which actions there are, bool [..., 3], where `hold` [...] says whether nobody may be released."""
    return jnp.asarray(hold)[..., None] | (jnp.arange(SIZES[-1]) != HOLD)


def decided(action: Array, push: Push) -> Decision:
    """What an action means after `push`. Every push is applied by itself, as in Algorithm 1."""
    one = jnp.arange(push.waiting.shape[0]) == push.worker
    release = push.waiting & ((action == RELEASE_ALL) | (one & (action == RELEASE_ONE)))
    return Decision(release=release)


def q_values(network: Network, states: Array) -> Array:
    """Q(S, .), float32 [..., 3], of states [..., 40]."""
    x = states
    for weights, biases in zip(network.weights[:-1], network.biases[:-1], strict=True):
        x = x @ weights + biases
        x = jnp.maximum(x, _LEAK * x)
    values: Array = x @ network.weights[-1] + network.biases[-1]
    return values


def _as_arrays(network: Network, scaling: Scaling) -> tuple[Network, Scaling]:
    return (
        Network(tuple(map(jnp.asarray, network.weights)), tuple(map(jnp.asarray, network.biases))),
        Scaling(*map(jnp.asarray, scaling)),
    )
