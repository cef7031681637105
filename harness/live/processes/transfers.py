"""How long each worker's push takes to reach each server, read from the messages that the coordinator sends and receives.

Nothing is measured for this alone: releases and receipts pass through the coordinator anyway.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

from harness.live.protocol.blocks import blocks_in
from harness.live.protocol.log import CommitEntry
from harness.live.protocol.messages import GradientDone, Head, LogAppend, PushStaged, Release
from harness.live.protocol.names import node_of

__all__ = ["NodePair", "Transfer", "TransferMeter"]

_MEASURED = 100  # pushes of each pair until they are asked for; more are counted, but tell no more about the link

NodePair: TypeAlias = tuple[str, str]
"""The nodes of a worker and of a server."""


class Transfer(NamedTuple):
    """The pushes from a worker to a server in some interval."""

    pushes: int
    seconds: float  # median of the first ones, from the worker's release to the server's receipt, less pull and gradient
    blocks: int  # in each push


@dataclass
class _Cycle:
    number: int
    released_seconds: float
    staged: dict[str, tuple[float, int]] = field(default_factory=dict)  # by server: time of receipt, number of blocks


class TransferMeter:
    """Measures transfers from the coordinator's messages: of each worker, the first pushes after every `take`. Later ones
    are counted only, because to measure them takes the coordinator time in every push and says nothing new."""

    def __init__(self) -> None:
        self._latest: dict[str, int] = {}  # the number of the latest cycle, by worker
        self._begun: dict[str, int] = {}  # how many cycles since the last `take`, by worker
        self._cycles: dict[str, _Cycle] = {}  # the latest of those that are measured, by worker
        self._found: dict[tuple[str, str], list[tuple[float, int]]] = {}  # by worker and server
        self._sent: Head | None = None  # the last one: an entry of the log goes to all servers

    def sent(self, receiver: str, head: Head, now: float) -> None:
        """Take note of a message that the coordinator sends."""
        if head is self._sent:
            return
        self._sent = head
        if isinstance(head, LogAppend):
            if isinstance(head.entry, CommitEntry):
                for begun in head.entry.released:
                    self._begin(begun.worker, begun.cycle, now)
        elif isinstance(head, Release):
            self._begin(receiver, head.cycle, now)

    def _begin(self, worker: str, number: int, now: float) -> None:
        # What is sent again, after a timeout or to another server, does not start the cycle again.
        if number <= self._latest.get(worker, 0):
            return
        self._latest[worker] = number
        self._begun[worker] = begun = self._begun.get(worker, 0) + 1
        if begun <= _MEASURED:
            self._cycles[worker] = _Cycle(number, now)
        else:
            self._cycles.pop(worker, None)

    def received(self, sender: str, head: Head, now: float) -> None:
        """Take note of a message that the coordinator receives."""
        if not self._cycles:  # none is measured
            return
        if isinstance(head, PushStaged):
            cycle = self._cycles.get(head.worker)
            if cycle is not None and cycle.number == head.cycle:
                blocks = len(blocks_in(head.runs))
                if cycle.staged:
                    blocks += cycle.staged.pop(sender, (0.0, 0))[1]
                if head.done is None:
                    cycle.staged[sender] = now, blocks
                else:
                    self._close(head.worker, cycle, head.done)
                    self._add(head.worker, sender, cycle, head.done, now, blocks)
        elif isinstance(head, GradientDone):
            cycle = self._cycles.get(sender)
            if cycle is not None and cycle.number == head.cycle:
                self._close(sender, cycle, head)

    def _close(self, worker: str, cycle: _Cycle, done: GradientDone) -> None:
        """Add what has been staged so far."""
        for server, (at, blocks) in cycle.staged.items():
            self._add(worker, server, cycle, done, at, blocks)
        cycle.staged.clear()

    def _add(self, worker: str, server: str, cycle: _Cycle, done: GradientDone, at: float, blocks: int) -> None:
        spent = at - cycle.released_seconds - done.pull_seconds - done.compute_seconds
        self._found.setdefault((worker, server), []).append((max(spent, 0.0), blocks))

    def take(self) -> dict[NodePair, Transfer]:
        """Transfers that were completed since the last call."""
        found, self._found = self._found, {}
        begun, self._begun = self._begun, {}
        return {
            (node_of(worker), node_of(server)): Transfer(
                len(those) + max(begun.get(worker, 0) - _MEASURED, 0),
                median(spent for spent, _ in those),
                max(blocks for _, blocks in those),
            )
            for (worker, server), those in found.items()
        }
