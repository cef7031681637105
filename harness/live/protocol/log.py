"""The coordinator's log: the one order of everything that changes what servers keep."""

from __future__ import annotations

from typing import TypeAlias

import msgspec

from harness.live.protocol.blocks import Runs

__all__ = ["Commit", "Drop", "Entry", "Fork", "Free", "Move", "Skip", "Snapshot"]


class _Entry(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Immutable; its first field on the wire is its class's name."""


class Commit(_Entry, frozen=True):
    """A worker's push counts, with all that applying it depends on. A group's sum waits until one takes."""

    branch: int
    worker: str
    cycle: int
    accept: bool  # False: its gradient is dropped, and need not be there
    take: bool  # the servers step: with this gradient, or with the group's sum or mean
    grouped: int  # gradients in that step
    weight: float  # of this gradient in a mean
    steps: int  # of this branch's optimizer, this one counted
    learning_rate: float
    momentum: float
    released: tuple[tuple[str, int], ...] = ()  # workers and their new cycles: servers send them their blocks unasked
    bits: int = 32  # of a number in transfer


class Fork(_Entry, frozen=True):
    """A branch begins as a copy of `parent`."""

    branch: int
    parent: int


class Free(_Entry, frozen=True):
    """A branch ends."""

    branch: int


class Move(_Entry, frozen=True):
    """Blocks change their owner. On demand: only when somebody asks for them; else at once."""

    runs: Runs
    source: str
    target: str
    on_demand: bool = False


class Drop(_Entry, frozen=True):
    """A worker is gone: messages of its generations up to this one are refused, what it staged is forgotten."""

    worker: str
    generation: int
    cycle: int  # the last that it was released for


class Snapshot(_Entry, frozen=True):
    """Every server copies its blocks, for `buddies[server]` to keep, and for the coordinator where `save` says so."""

    buddies: dict[str, str]
    save: bool = False


class Skip(_Entry, frozen=True):
    """Nothing: in the place of an entry that a new view has made void."""


Entry: TypeAlias = Commit | Fork | Free | Move | Drop | Snapshot | Skip
