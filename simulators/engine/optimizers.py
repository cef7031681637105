"""The servers' optimizers, by name, on optax. Rate and momentum may be traced, so changing them compiles nothing."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

__all__ = ["OPTIMIZERS", "OUTER", "WITH_MOMENTUM", "optimizer", "slots"]


class _Revised(NamedTuple):
    """AdaRevision's slots, each of the shape of the parameters."""

    total: Any  # of all gradients so far
    squares: Any  # z: of their squares, and the products of gradients computed without each other's updates
    largest: Any  # z': the largest of these so far


def _adarevision(rate: Any) -> optax.GradientTransformationExtraArgs:
    """AdaptiveRevision (McMahan & Streeter 2014): AdaGrad for delayed gradients. `missed` is the sum of gradients
    applied between a gradient's pull and its push; the steps taken for these are revised to the rate that they would have
    had. Without delay it is AdaGrad with the same initial value."""

    def init(parameters: Any) -> _Revised:
        zeros = jax.tree.map(jnp.zeros_like, parameters)
        return _Revised(zeros, zeros, zeros)

    def update(gradients: Any, kept: optax.OptState, parameters: Any = None, *, missed: Any, **_: Any) -> tuple[Any, Any]:
        del parameters
        total, z, largest = (getattr(kept, name) for name in _Revised._fields)
        z = jax.tree.map(lambda z, g, u: z + g * g + 2 * g * u, z, gradients, missed)
        most = jax.tree.map(jnp.maximum, largest, z)
        old, new = (jax.tree.map(_scale, tree) for tree in (largest, most))
        steps = jax.tree.map(lambda o, n, g, u: rate * ((o - n) * u - n * g), old, new, gradients, missed)
        return steps, _Revised(jax.tree.map(jnp.add, total, gradients), z, most)

    return optax.GradientTransformationExtraArgs(init, update)


def _scale(squares: jax.Array) -> jax.Array:
    """1 / sqrt, as optax's AdaGrad has it."""
    return jnp.where(squares > 0, jax.lax.rsqrt(squares + 1e-7), 0.0)


OPTIMIZERS: dict[str, Callable[[Any, Any], optax.GradientTransformation]] = {
    "sgd": lambda rate, _: optax.sgd(rate),
    "momentum": lambda rate, momentum: optax.sgd(rate, momentum=momentum),
    "nesterov": lambda rate, momentum: optax.sgd(rate, momentum=momentum, nesterov=True),
    "adam": lambda rate, _: optax.adam(rate),
    "rmsprop": lambda rate, _: optax.rmsprop(rate),
    "adagrad": lambda rate, _: optax.adagrad(rate, initial_accumulator_value=0.0),  # as published (Duchi et al. 2011)
    "adadelta": lambda rate, _: optax.adadelta(rate),
    "adarevision": lambda rate, _: _adarevision(rate),
}
WITH_MOMENTUM = ("momentum", "nesterov")
"""Optimizers that a setting's `momentum` matters to; the others leave it out."""

OUTER = "nesterov"
"""The servers' optimizer for what workers change in local steps, as in DiLoCo (Douillard et al. 2023)."""


def optimizer(name: str, learning_rate: Any, momentum: Any) -> optax.GradientTransformationExtraArgs:
    """The transformation that servers apply to a gradient (or to a group's sum or mean).

    `momentum` matters to those of `WITH_MOMENTUM` only, as a heavy ball. Raises ValueError for an unknown name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"Cannot apply gradients with {name!r}: choose one of {', '.join(OPTIMIZERS)}.")
    return optax.with_extra_args_support(OPTIMIZERS[name](learning_rate, momentum))


@cache
def slots(name: str) -> int:
    """How many numbers servers keep for every parameter besides the parameter itself."""
    kept = jax.eval_shape(optimizer(name, 0.0, 0.0).init, np.zeros(1))
    return sum(x.size for x in jax.tree.leaves(kept) if x.ndim)
