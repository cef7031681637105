"""The entries of the coordinator's log, which orders all changes to the state of the servers."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from harness.live.protocol.blocks import Runs

__all__ = [
    "CommitEntry",
    "DropEntry",
    "ForkEntry",
    "FreeEntry",
    "LogEntry",
    "MoveEntry",
    "NextCycle",
    "SkipEntry",
    "SnapshotEntry",
]


class _Entry(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Immutable. The first field on the wire is the name of the class."""


class NextCycle(msgspec.Struct, frozen=True, array_like=True):
    """What a worker begins with a commit. It hears of that from servers, with the parameters."""

    worker: str
    cycle: int
    clock: int  # number of the mini-batch
    terms: int  # the cycle whose `Release` says all the rest; the same cycle if a `Release` follows
    seconds: float = 0.0  # when it was released, on the coordinator's clock


class CommitEntry(_Entry, frozen=True):
    """A push is complete. It holds everything that a server needs to apply it, so that replaying the log gives the same
    model.

    Grouped gradients are summed until an entry with `take` applies the sum.
    """

    branch: int
    worker: str
    cycle: int
    accept: bool  # False: drop its gradient, which may be missing
    take: bool  # apply an optimizer step: with this gradient, or the sum or mean of the group
    grouped: int  # gradients in that step
    weight: float  # of this gradient in the mean of a group
    steps: int  # of this branch's optimizer, including this one
    learning_rate: float
    momentum: float
    released: tuple[NextCycle, ...] = ()  # servers send these workers parameters unasked
    bits: int = 32  # per number in transfer


class ForkEntry(_Entry, frozen=True):
    """A new branch begins as a copy of `parent`."""

    branch: int
    parent: int


class FreeEntry(_Entry, frozen=True):
    """A branch ends."""

    branch: int


class MoveEntry(_Entry, frozen=True):
    """Blocks change their owner. `on_demand`: the old owner sends them when asked; otherwise at once."""

    runs: Runs
    source: str
    target: str
    on_demand: bool = False


class DropEntry(_Entry, frozen=True):
    """A worker is dead: servers refuse messages of its generations up to this one, and drop its staged pushes."""

    worker: str
    generation: int
    cycle: int  # the last one that it was released for


class SnapshotEntry(_Entry, frozen=True):
    """Every server copies its blocks to `backups[server]`; with `save`, also to the coordinator."""

    backups: dict[str, str]
    save: bool = False


class SkipEntry(_Entry, frozen=True):
    """No operation: replaces an entry that a new view has cancelled."""


LogEntry: TypeAlias = CommitEntry | ForkEntry | FreeEntry | MoveEntry | DropEntry | SnapshotEntry | SkipEntry
