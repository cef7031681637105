"""The servers' optimizers in NumPy: those of `simulators.engine.optimizers`, equal up to rounding.

NumPy and not JAX, because a server steps runs of blocks whose lengths change with every move, and JAX would compile for each
length. Long runs are stepped in pieces, so that intermediate results stay in the processor's cache.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

import msgspec
import numpy as np

from harness.live.protocol.messages import Array

__all__ = ["Rates", "slots", "step"]

_PIECE = 1 << 16  # parameters: 256 KiB of float32


class Rates(msgspec.Struct, frozen=True):
    """The scalars of a step."""

    learning_rate: float
    momentum: float
    steps: int  # so far, including this one


_Step: TypeAlias = Callable[[Array, Mapping[str, Array], Array, Rates], Array]
"""(scratch, slots, gradient, rates): updates the slots; writes to `scratch` what to subtract from the parameters."""


def _sgd(scratch: Array, _: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    return np.multiply(gradient, np.float32(rates.learning_rate), out=scratch)


def _heavy_ball(scratch: Array, slots: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    velocity = slots["velocity"]
    velocity *= np.float32(rates.momentum)
    velocity += gradient
    return np.multiply(velocity, np.float32(rates.learning_rate), out=scratch)


def _nesterov(scratch: Array, slots: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    _heavy_ball(scratch, slots, gradient, rates)
    np.multiply(slots["velocity"], np.float32(rates.momentum), out=scratch)
    scratch += gradient
    scratch *= np.float32(rates.learning_rate)
    return scratch


def _adam(scratch: Array, slots: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    first, second = slots["first_moment"], slots["second_moment"]
    _decay(first, 0.9, gradient, scratch)
    _decay(second, 0.999, np.square(gradient), scratch)
    np.multiply(second, np.float32(1 / (1 - 0.999**rates.steps)), out=scratch)
    np.sqrt(scratch, out=scratch)
    scratch += np.float32(1e-8)
    np.divide(first, scratch, out=scratch)
    scratch *= np.float32(rates.learning_rate / (1 - 0.9**rates.steps))
    return scratch


def _rmsprop(scratch: Array, slots: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    squares = slots["squares"]
    _decay(squares, 0.9, np.square(gradient), scratch)
    np.sqrt(squares + np.float32(1e-8), out=scratch)
    np.divide(gradient, scratch, out=scratch)
    scratch *= np.float32(rates.learning_rate)
    return scratch


def _adagrad(scratch: Array, slots: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    squares = slots["squares"]
    squares += np.square(gradient)
    np.sqrt(squares + np.float32(1e-7), out=scratch)
    np.divide(gradient, scratch, out=scratch)
    scratch *= np.float32(rates.learning_rate)
    return scratch


def _adadelta(scratch: Array, slots: Mapping[str, Array], gradient: Array, rates: Rates) -> Array:
    squares, steps = slots["squares"], slots["squared_steps"]
    _decay(squares, 0.9, np.square(gradient), scratch)
    delta = gradient * np.sqrt(steps + np.float32(1e-6)) / np.sqrt(squares + np.float32(1e-6))
    _decay(steps, 0.9, np.square(delta), scratch)
    return np.multiply(delta, np.float32(rates.learning_rate), out=scratch)


def _decay(average: Array, keep: float, new: Array, scratch: Array) -> None:
    """Update an exponential moving average."""
    average *= np.float32(keep)
    average += np.multiply(new, np.float32(1 - keep), out=scratch)


_STEPS: dict[str, tuple[tuple[str, ...], _Step]] = {
    "sgd": ((), _sgd),
    "momentum": (("velocity",), _heavy_ball),
    "nesterov": (("velocity",), _nesterov),
    "adam": (("first_moment", "second_moment"), _adam),
    "rmsprop": (("squares",), _rmsprop),
    "adagrad": (("squares",), _adagrad),
    "adadelta": (("squares", "squared_steps"), _adadelta),
}


def slots(optimizer: str) -> tuple[str, ...]:
    """The names of the vectors that an optimizer keeps beside the parameters, all zero at first.

    Raises ValueError for an optimizer that is unknown, or cannot run live.
    """
    if optimizer not in _STEPS:
        known = optimizer == "adarevision"
        reason = "servers would have to keep what every worker pulled" if known else "it is not known"
        raise ValueError(f"Cannot train live with {optimizer!r}: {reason}; choose one of {', '.join(_STEPS)}.")
    return _STEPS[optimizer][0]


def step(optimizer: str, parameters: Array, kept: Mapping[str, Array], gradient: Array, rates: Rates, made: Array) -> Array:
    """One step: writes the new parameters to `made`, and updates the slots `kept` in place. All are [n] float32."""
    compute = _STEPS[optimizer][1]
    if len(parameters) <= _PIECE:
        return np.subtract(parameters, compute(made, kept, gradient, rates), out=made)
    for start in range(0, len(parameters), _PIECE):
        piece = slice(start, start + _PIECE)
        part = made[piece]
        change = compute(part, {name: v[piece] for name, v in kept.items()}, gradient[piece], rates)
        np.subtract(parameters[piece], change, out=part)
    return made
