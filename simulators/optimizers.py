"""The servers' optimizers, by name, on optax. Rate and momentum may be traced, so changing them compiles nothing anew."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

__all__ = ["OPTIMIZERS", "optimizer", "slots"]

OPTIMIZERS: dict[str, Callable[[Any, Any], optax.GradientTransformation]] = {
    "sgd": lambda rate, _: optax.sgd(rate),
    "momentum": lambda rate, momentum: optax.sgd(rate, momentum=momentum),
    "nesterov": lambda rate, momentum: optax.sgd(rate, momentum=momentum, nesterov=True),
    "adam": lambda rate, _: optax.adam(rate),
    "rmsprop": lambda rate, _: optax.rmsprop(rate),
    "adagrad": lambda rate, _: optax.adagrad(rate, initial_accumulator_value=0.0),  # as published (Duchi et al. 2011)
    "adadelta": lambda rate, _: optax.adadelta(rate),
}


def optimizer(name: str, learning_rate: Any, momentum: Any) -> optax.GradientTransformation:
    """The transformation that servers apply to a gradient (or to a group's sum or mean).

    `momentum` counts for "momentum" and "nesterov" only, as a heavy ball. Raises ValueError for an unknown name.
    """
    if name not in OPTIMIZERS:
        raise ValueError(f"Cannot apply gradients with {name!r}: choose one of {', '.join(OPTIMIZERS)}.")
    return OPTIMIZERS[name](learning_rate, momentum)


def slots(name: str) -> int:
    """How many numbers servers keep for every parameter beside itself."""
    kept = jax.eval_shape(optimizer(name, 0.0, 0.0).init, jnp.zeros(1))
    return sum(x.size for x in jax.tree.leaves(kept) if x.ndim)
