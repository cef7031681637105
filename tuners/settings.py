"""Nodes, and settings of a job.

Part of the contract: `tuners.actions` re-exports what authors of tuners need. The file is separate because this is plain
data, without time.
"""

from __future__ import annotations

import numbers
import operator
import zlib
from collections.abc import Sequence
from dataclasses import FrozenInstanceError, dataclass, replace
from difflib import get_close_matches
from typing import Any, NoReturn, Self

import numpy as np

from tuners.knobs import Choice, Integer, Knob, Real, Scalar

__all__ = [
    "BOUNDED",
    "BY_STALENESS",
    "MOST",
    "OF_CACHES",
    "OF_CHECKPOINTS",
    "OF_LOCAL_STEPS",
    "OF_NODES",
    "OF_PULLS",
    "OF_QUORUM",
    "OF_REPLICAS",
    "OF_TABLES",
    "PLACEMENTS",
    "POLICIES",
    "Choice",
    "Integer",
    "Knob",
    "Node",
    "Real",
    "Rejected",
    "Scalar",
    "Setting",
    "shared_out",
]


class Rejected(Exception):
    """A system refuses an action: what cannot be done, the value, the way out. The tuner gets it as an exception; the job
    continues."""


@dataclass(frozen=True, slots=True)
class Node:
    """One machine, as its vendor describes it, which may differ from how it performs."""

    name: str
    type: str
    cores: int
    devices: tuple[str, ...]  # that can compute: "cpu", "gpu", ...
    nic_bytes_per_second: float  # each direction
    memory_bytes: float


_WHOLE, _NUMBER = "a whole number", "a number"
_KINDS: tuple[tuple[str, type, str], ...] = (
    ("workers", tuple, "a tuple of node names"),
    ("servers", tuple, "a tuple of node names"),
    ("batch_size", numbers.Integral, _WHOLE),
    ("loads", tuple, "a tuple of rows, a tuple of samples per device for each worker"),
    ("data_shares", tuple, "a tuple of shares, one per worker"),
    ("model_shares", tuple, "a tuple of shares, one per server"),
    ("policy", str, 'a name, as in policy="asp"'),
    ("staleness", numbers.Integral, _WHOLE),
    ("intra_threads", numbers.Integral, _WHOLE),
    ("inter_threads", numbers.Integral, _WHOLE),
    ("transfer_bits", numbers.Integral, _WHOLE),
    ("options", tuple, "a tuple of pairs, a name and its value"),
    ("learning_rate", numbers.Real, _NUMBER),
    ("momentum", numbers.Real, _NUMBER),
    ("local_steps", numbers.Integral, _WHOLE),
    ("node_steps", tuple, "a tuple of pairs, a worker's name and its local steps"),
    ("outer_rate", numbers.Real, _NUMBER),
    ("outer_momentum", numbers.Real, _NUMBER),
    ("placement", str, 'a name, as in placement="hash"'),
    ("block_owners", tuple, "a tuple of node names"),
    ("cache_rows", numbers.Integral, _WHOLE),
    ("cache_clocks", numbers.Integral, _WHOLE),
    ("checkpoint_seconds", numbers.Real, _NUMBER),
    ("pull_clocks", numbers.Integral, _WHOLE),
    ("replicas", numbers.Integral, _WHOLE),
    ("hot_blocks", numbers.Integral, _WHOLE),
    ("quorum", numbers.Integral, _WHOLE),
    ("grace_seconds", numbers.Real, _NUMBER),
)
"""Fields of a setting, their types, and what to give."""


MOST = 2**31 - 1
"""The highest whole number of a setting, which systems count with."""

PLACEMENTS = ("range", "hash")
"""How blocks of embedding tables are placed where a setting does not name their servers; see `Setting.owners`."""

POLICIES = ("bsp", "asp", "ssp", "dssp", "discard", "admit", "quorum")
"""The names of policies that a setting of a simulated or live job can have; see `tuners.policies`."""

BOUNDED = ("ssp", "discard", "admit")
"""The names of policies that have `Setting.staleness` as their one bound; see `tuners.policies`."""

BY_STALENESS = (*BOUNDED, "dssp")
"""The names of policies that `Setting.staleness` changes; under others it has no effect."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """The values of all knobs of a job. `Space.check` says whether a job admits a setting. Raises TypeError for a value of
    another type than its field's."""

    workers: tuple[str, ...]  # node names; may overlap with servers
    servers: tuple[str, ...]
    batch_size: int = 16  # samples in one worker's mini-batch
    loads: tuple[tuple[int, ...], ...] = ()  # samples per device, a row per worker; () puts batch_size on the first device
    data_shares: tuple[float, ...] = ()  # of the training data, per worker, sum 1; () is equal shares
    model_shares: tuple[float, ...] = ()  # of the model, per server, sum 1; () is equal shares
    policy: str = "asp"  # a name in `tuners.policies`
    staleness: int = 0  # the policy's bound: SSP's s in Ho et al.'s sense (0 is BSP); of `discard` and `admit`, an age
    intra_threads: int = 0  # threads inside one operation; 0 is one per core
    inter_threads: int = 0  # operations at once; 0 is the framework's default
    transfer_bits: int = 32  # 16 halves the bytes of pull and push
    options: tuple[tuple[str, Scalar], ...] = ()  # graph options, by name
    learning_rate: float = 0.01
    # Heavy ball: v <- momentum v + g, w <- w - learning_rate v, where the workload's optimizer is "momentum" (or Nesterov's,
    # "nesterov"). The others, "sgd" among them, which is the default, have no momentum: this changes nothing.
    momentum: float = 0.0
    local_steps: int = 1  # mini-batches of a worker between its pull and its push, each applied to its own copy
    node_steps: tuple[tuple[str, int], ...] = ()  # local steps of single workers, by name; the others take `local_steps`
    outer_rate: float = 1.0  # of the servers, for what a worker's local steps have changed
    outer_momentum: float = 0.0  # Nesterov's, with that rate
    placement: str = "range"  # of blocks of embedding tables: consecutive ones together ("range"), or scattered ("hash")
    block_owners: tuple[str, ...] = ()  # the server of each block; () as `placement` and `model_shares` say
    cache_rows: int = 0  # of embedding tables: each worker keeps copies of this number of rows, the most popular ones
    cache_clocks: int = 0  # mini-batches for which it uses a copy after the one that pulled it
    checkpoint_seconds: float = 0.0  # between two checkpoints of the model; 0: servers have replicas, and need none
    pull_clocks: int = 1  # mini-batches per pull; a worker computes all but the first on the copy that it has
    replicas: int = 1  # servers that hold each hot block of embedding tables: they share its pulls, and all apply its pushes
    hot_blocks: int = 0  # number of hot blocks, those that the training data looks up most often (`Job.hottest`)
    quorum: int = 0  # of the policy "quorum": pushes after which a round ends, some grace later; 0: those of all workers
    grace_seconds: float = 0.0  # of the same policy; what comes later is dropped

    def __new__(cls, **given: Any) -> Self:
        """Raise TypeError, with what to write, for a name that is no field, as in ``replace(job.start, worker_count=3)``."""
        if not given.keys() <= cls.__dataclass_fields__.keys():
            name = next(name for name in given if name not in cls.__dataclass_fields__)
            if _is_knob(name):
                hint = f"it is a knob, and `job.space.setting({{{name!r}: ...}})` makes a setting of knobs"
            else:
                near = get_close_matches(name, cls.__dataclass_fields__, n=1)
                hint = f"did you mean {near[0]}" if near else f"it has {', '.join(cls.__dataclass_fields__)}"
            raise TypeError(f"Cannot make a setting with {name!r}: {hint}.")
        return object.__new__(cls)

    def __post_init__(self) -> None:
        """Raise TypeError, with what to write, for a value of another type; `Space.check` judges what has the right type."""
        for name, kind, advice in _KINDS:
            value = getattr(self, name)
            if not isinstance(value, kind) or isinstance(value, bool):
                hint = f", as in {tuple(value)!r}" if kind is tuple and isinstance(value, list | set) else ""
                raise TypeError(f"Cannot make a setting with {name} {value!r}: give {advice}{hint}.")
        for name in self.__slots__:
            # Scalars of numpy are equal to Python's, but have other types: knobs and logs know Python's only.
            value = getattr(self, name)
            if (plain := _plain(value)) is not value:
                object.__setattr__(self, name, plain)

    def shares(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """Data share per worker and model share per server; equal shares are written out."""
        data = self.data_shares or _equal(len(self.workers))
        if self.block_owners:
            return data, tuple(self.block_owners.count(s) / len(self.block_owners) for s in self.servers)
        return data, self.model_shares or _equal(len(self.servers))

    def data_by_worker(self) -> dict[str, float]:
        """The part of the training data that each worker has."""
        return dict(zip(self.workers, self.shares()[0], strict=True))

    def model_by_server(self) -> dict[str, float]:
        """The part of the model that each server owns."""
        return dict(zip(self.servers, self.shares()[1], strict=True))

    def steps_of(self, worker: str) -> int:
        """Mini-batches of `worker` between its pull and its push."""
        return dict(self.node_steps).get(worker, self.local_steps)

    @property
    def waits_for_all(self) -> bool:
        """Whether every worker waits for all others after each push: under "bsp", "ssp" with staleness 0, or a "quorum" of
        all workers."""
        if self.policy == "quorum":
            return not 0 < self.quorum < len(self.workers)
        return self.policy == "bsp" or (self.policy == "ssp" and self.staleness == 0)

    def role_of(self, node: str) -> str:
        """What a node is: "worker", "server", "both" or "idle"."""
        works, serves = node in self.workers, node in self.servers
        return "both" if works and serves else "worker" if works else "server" if serves else "idle"

    def owners(self, blocks: int) -> tuple[str, ...]:
        """The server of each of `blocks` blocks of embedding tables.

        Without `block_owners`, every server has a part of [0, 1), as long as its model share. Block i is there at
        (i + 1/2) / blocks ("range"), or where a hash of i is ("hash").
        """
        if self.block_owners:
            return self.block_owners
        ends = np.cumsum(self.shares()[1])
        if self.placement == "hash":
            at = np.array([zlib.crc32(f"block {i}".encode()) / 2**32 for i in range(blocks)])
        else:
            at = (np.arange(blocks) + 0.5) / blocks
        found = np.minimum(np.searchsorted(ends, at, side="right"), len(ends) - 1)
        return tuple(self.servers[j] for j in found)

    def holders(self, blocks: int, hottest: Sequence[int]) -> tuple[tuple[str, ...], ...]:
        """The servers that hold each of `blocks` blocks, its owner first.

        Of a hot block these are `replicas`: its owner, and those that come after it in `servers`, in a ring. `hottest` has
        the numbers of the blocks, the one that is looked up most often first.
        """
        hot, ring = frozenset(hottest[: self.hot_blocks]), self.servers * 2
        first = {server: i for i, server in enumerate(self.servers)}
        return tuple(
            ring[first[owner] : first[owner] + self.replicas] if block in hot else (owner,)
            for block, owner in enumerate(self.owners(blocks))
        )

    def held(self, blocks: int, hottest: Sequence[int]) -> dict[str, float]:
        """The part of the model that each server keeps; with copies of hot blocks, these sum to more than 1."""
        found = self.model_by_server()
        if self.replicas > 1 and self.hot_blocks:
            for _, *copies in self.holders(blocks, hottest):
                for server in copies:
                    found[server] += 1 / blocks
        return found

    def on(self, workers: tuple[str, ...], servers: tuple[str, ...]) -> Setting:
        """The same on other nodes: those that stay keep their loads, and share data and model in proportion; a block whose
        server goes is given to the one with the fewest blocks. Loads and shares of nodes that come are equal."""
        rows = dict(zip(self.workers, self.loads, strict=False))
        return replace(
            self,
            workers=workers,
            servers=servers,
            loads=tuple(rows[w] for w in workers) if all(w in rows for w in workers) else (),
            data_shares=_rescaled(self.workers, self.data_shares, workers),
            model_shares=_rescaled(self.servers, self.model_shares, servers),
            block_owners=_inherited(self.block_owners, servers),
            replicas=min(self.replicas, len(servers)),
        )


def _refuse_change(setting: Setting, name: str, value: object) -> NoReturn:
    """Raise FrozenInstanceError, with what to write, for ``setting.worker_count = 3``."""
    way = "replace(setting, ...) makes another one"
    if name in setting.__slots__:
        way = f"write replace(setting, {name}={value!r}), which makes another one"
    elif _is_knob(name):
        way = f"{name} is a knob, and job.space.setting({{{name!r}: {value!r}}}) makes a setting of knobs"
    raise FrozenInstanceError(f"Cannot set {name} of a setting, which never changes: {way}.")


# What `dataclass` writes with slots has an error of its own for a name that is no field: "super(type, obj): ...".
Setting.__setattr__ = _refuse_change  # type: ignore[method-assign, assignment]


def _is_knob(name: str) -> bool:
    """Whether a name that is no field is that of a knob."""
    return name == "worker_count" or "/" in name


_PYTHONS = frozenset((int, float, str, bool))


def _plain(value: Any) -> Any:
    """`value`, itself if it is of Python's types only, else with these in place of numpy's."""
    if isinstance(value, np.generic):
        return value.item()
    # Tuners make thousands of settings, with hundreds of names: most tuples are looked through by `map` alone.
    if not isinstance(value, tuple) or _PYTHONS.issuperset(map(type, value)):
        return value
    made = tuple(map(_plain, value))
    return value if all(map(operator.is_, made, value)) else made


def _inherited(owners: tuple[str, ...], servers: tuple[str, ...]) -> tuple[str, ...]:
    """Owners of blocks among `servers`: a block whose owner is none of them goes to the one with the fewest blocks."""
    found, count = list(owners), {s: owners.count(s) for s in servers}
    for block, owner in enumerate(owners):
        if owner not in count:
            found[block] = min(servers, key=lambda s: count[s])
            count[found[block]] += 1
    return tuple(found)


def _rescaled(members: tuple[str, ...], shares: tuple[float, ...], left: tuple[str, ...]) -> tuple[float, ...]:
    kept = dict(zip(members, shares, strict=False))
    total = sum(kept.get(n, 0.0) for n in left)
    return tuple(kept[n] / total for n in left) if total > 0 and all(n in kept for n in left) else ()


def _equal(count: int) -> tuple[float, ...]:
    """Equal shares; none for a setting without workers or servers, which `Space.check` refuses."""
    return (1.0 / max(count, 1),) * count


OF_LOCAL_STEPS = {"local_steps": 1, "outer_rate": 1.0, "outer_momentum": 0.0}
"""The fields of a setting that say how workers take local steps, and their values where a push is one gradient."""

OF_TABLES: dict[str, Any] = {"placement": "range", "block_owners": ()}
"""The fields of a setting that place blocks of embedding tables, and their values where there are none."""

OF_CACHES = {"cache_rows": 0, "cache_clocks": 0}
"""The fields of a setting that say which rows of embedding tables workers keep, and their values where they keep none."""

OF_QUORUM = {"quorum": 0, "grace_seconds": 0.0}
"""The fields of a setting that the policy "quorum" has, and their values under which it waits for all workers."""

OF_REPLICAS = {"replicas": 1, "hot_blocks": 0}
"""The fields of a setting that say how many servers hold a block of embedding tables, and their values where one does."""

OF_CHECKPOINTS = {"checkpoint_seconds": 0.0}
"""The fields of a setting that say when checkpoints are made, and their values where servers have replicas."""

OF_PULLS = {"pull_clocks": 1}
"""The field of a setting that says how often workers pull, and its value where they pull before every mini-batch."""

OF_NODES = ("workers", "servers", "loads", "data_shares", "model_shares", "block_owners", "replicas")
"""The fields of a setting that name nodes, or go with those that do: a loss of nodes changes them."""


def shared_out(weights: Sequence[float], total: int) -> tuple[int, ...]:
    """Whole numbers with the sum `total`, in proportion to `weights`: by largest remainder, the first of equals first.

    Raises ValueError for weights that are negative, not finite or all zero.
    """
    exact = np.asarray(weights, float)
    if not (np.all(exact >= 0) and 0 < exact.sum() < np.inf):
        raise ValueError(f"Cannot share {total} out by weights {list(weights)}: give some that are positive, none negative.")
    exact = exact / exact.sum() * total
    counts = np.floor(exact + 1e-9).astype(int)
    order = np.argsort(counts - exact, kind="stable")
    counts[order[: total - counts.sum()]] += 1
    return tuple(int(n) for n in counts)
