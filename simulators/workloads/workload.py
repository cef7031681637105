"""The types of a workload: the demand on the hardware (`Demand`), the model that learns (`Proxy`), and both (`Workload`).

This module imports neither JAX nor the catalogue, so that the models, the engine and the catalogue can all import it.
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

__all__ = ["Demand", "Embedding", "OptionEffect", "Proxy", "Workload"]


class OptionEffect(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """How one value of a graph option changes compute time. Raises ValueError for an impossible factor or exponent."""

    name: str  # as in `Setting.options`
    value: Scalar  # the value that has the effect; any other has none
    factor: float = 1.0  # compute time of a mini-batch is multiplied by factor * intra_threads^thread_exponent
    thread_exponent: float = 0.0

    def __post_init__(self) -> None:
        if not (0 < self.factor < math.inf and math.isfinite(self.thread_exponent)):
            raise ValueError(
                f"Option {self.name!r} cannot have factor {self.factor} and thread_exponent {self.thread_exponent}: "
                "give a positive, finite factor and a finite exponent."
            )


class Demand(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The demand of one job on the hardware, at nominal size. Raises ValueError for an impossible value."""

    model_bytes: float  # one full pull at 32 bits
    sample_seconds: float  # to compute one sample's gradient on one reference core
    push_bytes: float | None = None  # one full push at 32 bits; None is model_bytes
    fixed_seconds: float = 0.0  # per mini-batch, whatever its size
    serial_fraction: float = 0.0  # of the compute that threads do not speed up (Amdahl)
    message_seconds: float = 0.0  # of the worker, per message; a pull and a push send one message to every server each
    apply_seconds: float = 0.0  # for one server to apply a full push; servers that divide the model apply their shares
    apply_exponent: float = 1.0  # a server with share s of the model takes s^this of the time; below 1: uneven shares
    apply_growth: float = 0.0  # by so much of it, each further worker makes an apply longer
    commit_seconds: float = 0.0  # per push and server, of a coordinator that hears from each and tells each; pushes queue
    step_seconds: float = 0.0  # for one server to end a synchronous step; servers that divide the model: their shares
    master_sample_seconds: float = 0.0  # per synchronous step and sample of all workers: a master prepares mini-batches
    aggregate_seconds: float = 0.0  # per mini-batch, where more than one device of a machine computes
    delay_messages: float = 2.0  # messages of a mini-batch that follow each other and wait for a link's delay; 2: pull, push
    sample_bytes: float = 0.0  # size of one training sample; moves when data blocks change workers
    data_blocks: int = 0  # number of blocks in which training data moves; 0: as many as there are mini-batches
    # Share of the parameters that one mini-batch touches (sparse models: less): how soon parameters that are relocated on
    # demand have moved. It makes no transfer smaller: `model_bytes` and `push_bytes` are what a pull and a push carry.
    touched_fraction: float = 1.0
    crowding_exponent: float = 0.0  # compute takes max(1, (intra + inter threads) / cores)^this times as long
    options: tuple[OptionEffect, ...] = ()  # effects of graph options; an option that is not listed has none

    @property
    def whole_push_bytes(self) -> float:
        """Bytes of one full push at 32 bits."""
        return self.model_bytes if self.push_bytes is None else self.push_bytes

    def __post_init__(self) -> None:
        for name in self.__struct_fields__:
            value = getattr(self, name)
            if name != "options" and value is not None and not 0 <= value < math.inf:
                raise ValueError(f"A job cannot ask {name} {value}: give a finite number, 0 or more.")
        for name in ("serial_fraction", "touched_fraction", "apply_exponent"):
            if getattr(self, name) > 1:
                raise ValueError(f"A job cannot ask {name} {getattr(self, name)}: it lies in [0, 1].")


class Embedding(NamedTuple):
    """The embedding tables of a proxy: all rows in one array, of which a mini-batch touches few.

    Parameters are then a dictionary in which "rows" has the tables, [rows, width], one after another; the rest is dense. The
    first array of a batch has the rows that its samples look up, [n, lookups] int32, counted from 0 over all tables.
    """

    rows: int  # of all tables together
    lookups: int  # rows that one sample looks up
    losses: Callable[[Any, Array, tuple[Array, ...]], Array]  # (dense, looked up [n, lookups, width], batch) -> losses [n]


class Proxy(NamedTuple):
    """A model that JAX trains. All functions are pure and traceable; a batch is a tuple of arrays, sample axis first."""

    init: Callable[[int], Any]  # seed -> parameters, a pytree of float32 arrays of NumPy; not traceable
    losses: Callable[[Any, tuple[Array, ...]], Array]  # (parameters, batch of n) -> per-sample losses [n]
    correct: Callable[
        [Any, tuple[Array, ...]], Array
    ]  # same -> share that is right per sample [n], of a text's characters; else 1.0 / 0.0; nan without classes
    train: tuple[Array, ...]
    valid: tuple[Array, ...]
    embedding: Embedding | None = None  # None: every mini-batch pulls and pushes the whole model


@dataclass(frozen=True, slots=True, kw_only=True)
class Workload:
    """A job: its demand on the hardware and, unless it is timing-only, the proxy that it trains."""

    name: str
    demand: Demand
    proxy: Proxy | None  # None: timing-only
    optimizer: str = "sgd"  # sgd | momentum | nesterov | adam | rmsprop | adagrad | adadelta | adarevision
    aggregation: str = "each"  # servers apply "each" push on arrival, or the "sum" or "mean" of a group at the barrier
    samples: int = 0  # training samples, divided among the workers
    skew: float = 0.0  # share of the data that is divided by class, see `simulators.jobs.drawn`
    batch_size: int = 16  # of one worker, as the job's authors use it
    learning_rate: float = 0.01  # a value that works without tuning
    summary: str = ""  # one line
    source: str = ""  # publication of the figures

    @property
    def has_tables(self) -> bool:
        """Whether mini-batches pull and push rows of embedding tables, and not the whole model."""
        return self.proxy is not None and self.proxy.embedding is not None
