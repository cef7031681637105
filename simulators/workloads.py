"""Workloads: what a job asks of the hardware (`Demand`) and what it learns (`Proxy`, a JAX model that fits a laptop)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
from jax import Array

__all__ = ["Demand", "Proxy", "Workload"]


class Demand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one job asks of the hardware, at nominal size."""

    model_bytes: float  # one full pull at 32 bits
    sample_seconds: float  # computing one sample's gradient on one reference core
    push_bytes: float | None = None  # one full push at 32 bits; None is model_bytes
    fixed_seconds: float = 0.0  # per mini-batch, whatever its size
    serial_fraction: float = 0.0  # of the compute that threads do not speed up (Amdahl)
    message_seconds: float = 0.0  # worker's cost per message; a pull and a push send one to every server
    apply_seconds: float = 0.0  # one server applying a full push alone; divided by shares when servers divide the model
    aggregate_seconds: float = 0.0  # per mini-batch, where more than one device of a machine takes part


class Proxy(NamedTuple):
    """A model that really learns. All functions are pure and traceable; a batch is a tuple of arrays, sample axis first."""

    init: Callable[[Array], Any]  # PRNG key -> parameters, a pytree of float32
    losses: Callable[[Any, tuple[Array, ...]], Array]  # (parameters, batch of n) -> per-sample losses [n]
    correct: Callable[[Any, tuple[Array, ...]], Array]  # same -> 1.0 / 0.0 per sample [n]; nan where there is no such thing
    train: tuple[Array, ...]
    valid: tuple[Array, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job: hardware demand and, unless it is timing-only, a proxy that learns."""

    name: str
    demand: Demand
    proxy: Proxy | None  # None: timing-only
    optimizer: str = "sgd"  # sgd | momentum | nesterov | adam | rmsprop | adagrad | adadelta
    aggregation: str = "each"  # apply "each" push as it comes, or the "sum" or "mean" of a group at the barrier
    samples: int = 0  # of training data; shared out among the workers
