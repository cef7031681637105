"""What RLP's policy sees, what it may do, and the Q-network between the two (Zhu et al. 2020, Sections 3.1 and 3.2).

State: four features of each of the last ten pushes, newest first (`with_push`), scaled for the network (`network_input`).
Actions: after a push release nobody (`HOLD`), the worker that pushed (`RELEASE_ONE`) or all workers that wait
(`RELEASE_ALL`). Nothing here depends on the number of workers.

Where we differ from the paper, which is silent or cannot be meant literally:

- `HOLD` is not allowed when no other worker is computing: then no push would ever come. This also holds in training.
- The feature that the paper calls the loss is the loss of the pushed mini-batch, measured on the servers, before and after
  the update.
- Features reach the network through a fixed affine scaling that is saved with it, and within limits: n counts to hundreds
  while a loss changes by hundredths, and a loss that is not finite must still lead to an allowed action.
- Leaky units leak 0.01.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np
from jax import Array

from tuners.actions import Decision, Push

__all__ = [
    "FEATURES",
    "HISTORY",
    "HOLD",
    "RELEASE_ALL",
    "RELEASE_ONE",
    "SIZES",
    "Network",
    "Scaling",
    "Trained",
    "allowed_actions",
    "decision_of",
    "may_hold",
    "network_input",
    "q_values",
    "untrained",
    "with_push",
]

HISTORY, FEATURES = 10, 4  # H pushes, newest first, of (n, L, change of L, pushes by others since the pull)
HOLD, RELEASE_ONE, RELEASE_ALL = range(3)  # the actions: release nobody, {W_s}, all workers that wait
SIZES = (HISTORY * FEATURES, 64, 32, 3)  # of the network's layers, input and output included
_LEAK = 0.01


class Network(NamedTuple):
    """A Q-network, or a pytree of its shape: layers of `SIZES` with leaky rectifiers between them."""

    weights: tuple[Any, ...]  # float32 [inputs, outputs] per layer
    biases: tuple[Any, ...]  # float32 [outputs] per layer


class Scaling(NamedTuple):
    """How features are scaled for the network: clip((raw - offset) * factor, -limit, limit)."""

    offset: Any = np.zeros(FEATURES, np.float32)
    factor: Any = np.array([1 / 400, 1.0, 10.0, 0.1], np.float32)  # an episode's pushes, nats, tenths of a nat, k = 10
    limit: Any = np.float32(10.0)


@dataclass(frozen=True, slots=True)
class Trained:
    """A policy as its file holds it: the network, the scaling of its inputs, and how it was trained."""

    network: Network
    scaling: Scaling = field(default_factory=Scaling)
    about: Mapping[str, Any] = field(default_factory=dict)  # the command and the seed that made it, and further facts


def untrained(seed: int) -> Network:
    """A network by He's initialisation: weights N(0, 2 / inputs), biases 0."""
    rng = np.random.default_rng(seed)
    shapes = list(pairwise(SIZES))
    weights = tuple((rng.normal(size=s) * np.sqrt(2.0 / s[0])).astype(np.float32) for s in shapes)
    return Network(weights, tuple(np.zeros(n, np.float32) for n in SIZES[1:]))


def q_values(network: Network, states: Array) -> Array:
    """Q(S, .), float32 [..., 3], of states [..., 40]."""
    x = states
    for weights, biases in zip(network.weights[:-1], network.biases[:-1], strict=True):
        x = x @ weights + biases
        x = jnp.maximum(x, _LEAK * x)
    values: Array = x @ network.weights[-1] + network.biases[-1]
    return values


# ----------------------------------------------------------------------------------------------------------------- state


def with_push(history: Array, push: Push) -> Array:
    """The raw features of the last H pushes, float32 [H, 4], newest first, `push` included; zeros before the first push."""
    change = jnp.asarray(push.loss_after) - push.loss_before
    newest = [history[0, 0] + 1, push.loss_before, change, push.staleness]
    row = jnp.stack([jnp.asarray(feature, jnp.float32) for feature in newest])
    return jnp.concatenate([row[None], history[:-1]])


def network_input(scaling: Scaling, history: Array) -> Array:
    """The state S_n as the network sees it, [..., 40], of histories [..., 10, 4]; a NaN becomes the limit."""
    scaled = (history - scaling.offset) * scaling.factor
    bounded = jnp.where(jnp.isnan(scaled), scaling.limit, jnp.clip(scaled, -scaling.limit, scaling.limit))
    return bounded.reshape(*history.shape[:-2], SIZES[0])


# ---------------------------------------------------------------------------------------------------------------- actions


def may_hold(push: Push) -> Array:
    """Whether some worker is still computing, so that another push comes even if no worker is released."""
    return jnp.any(push.active & ~push.waiting)


def allowed_actions(hold: Array) -> Array:
    """Which actions are allowed, bool [..., 3]; `hold` [...] says whether `HOLD` is."""
    return jnp.asarray(hold)[..., None] | (jnp.arange(SIZES[-1]) != HOLD)


def decision_of(action: Array, push: Push) -> Decision:
    """The decision that an action stands for after `push`. Every push is applied on its own, as in Algorithm 1."""
    one = jnp.arange(push.waiting.shape[0]) == push.worker
    release = push.waiting & ((action == RELEASE_ALL) | (one & (action == RELEASE_ONE)))
    return Decision(release=release)
