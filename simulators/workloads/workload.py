"""What a job is: its demand on the hardware (`Demand`), the model that learns (`Proxy`), and the two together (`Workload`).

These types import neither JAX nor the catalogue, so that models, datasets and the engine can use them alike.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import msgspec

from tuners.settings import Scalar

if TYPE_CHECKING:
    from jax import Array

__all__ = ["Demand", "OptionEffect", "Proxy", "Workload"]


class OptionEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one value of a graph option does to compute. Raises ValueError for a factor that no compute can have."""

    name: str  # as in `Setting.options`
    value: Scalar  # in force; any other has no effect
    factor: float = 1.0  # a mini-batch's compute takes so many times as long ...
    thread_exponent: float = 0.0  # ... times threads inside one operation, to this power

    def __post_init__(self) -> None:
        if not (0 < self.factor < math.inf and math.isfinite(self.thread_exponent)):
            raise ValueError(
                f"Option {self.name!r} cannot have factor {self.factor} and thread_exponent {self.thread_exponent}: "
                "give a positive, finite factor and a finite exponent."
            )


class Demand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What one job asks of the hardware, at nominal size. Raises ValueError for what no job can ask."""

    model_bytes: float  # one full pull at 32 bits
    sample_seconds: float  # computing one sample's gradient on one reference core
    push_bytes: float | None = None  # one full push at 32 bits; None is model_bytes
    fixed_seconds: float = 0.0  # per mini-batch, whatever its size
    serial_fraction: float = 0.0  # of the compute that threads do not speed up (Amdahl)
    message_seconds: float = 0.0  # worker's cost per message; a pull and a push send one to every server
    apply_seconds: float = 0.0  # one server applying a full push alone; divided by shares when servers divide the model
    apply_exponent: float = 1.0  # a server with a share applies that in share^this of the time: below 1, division is uneven
    master_seconds: float = 0.0  # per synchronous step, where a master drives all workers in step
    master_sample_seconds: float = 0.0  # likewise, per sample of all workers' mini-batches: the master prepares them
    aggregate_seconds: float = 0.0  # per mini-batch, where more than one device of a machine takes part
    sample_bytes: float = 0.0  # of training data per sample: what moves when data blocks change workers
    data_blocks: int = 0  # that training data is divided into, to move; 0: as many as there are mini-batches
    touched_fraction: float = 1.0  # of the parameters that one mini-batch pulls and pushes (sparse models: less)
    crowding_exponent: float = 0.0  # compute takes ((intra + inter threads) / cores)^this times as long where that is over 1
    options: tuple[OptionEffect, ...] = ()  # of graph options; one that is not named here has none

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "options" and value is not None and not 0 <= value < math.inf:
                raise ValueError(f"A job cannot ask {name} {value}: give a finite number, 0 or more.")
        for name in ("serial_fraction", "touched_fraction", "apply_exponent"):
            if getattr(self, name) > 1:
                raise ValueError(f"A job cannot ask {name} {getattr(self, name)}: it lies in [0, 1].")


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
    optimizer: str = "sgd"  # sgd | momentum | nesterov | adam | rmsprop | adagrad | adadelta | adarevision
    aggregation: str = "each"  # apply "each" push as it comes, or the "sum" or "mean" of a group at the barrier
    samples: int = 0  # of training data; shared out among the workers
    skew: float = 0.0  # share of the data that is handed out by class, see `simulators.jobs.drawn`
    batch_size: int = 16  # that the job's authors use, for one worker
    learning_rate: float = 0.01  # that works without any tuning
    summary: str = ""  # one line
    source: str = ""  # where the figures are published
