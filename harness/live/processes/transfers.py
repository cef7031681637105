"""How long each worker's push takes to reach each server, read from the messages that the coordinator sends and receives.

Nothing is measured for this alone: releases and receipts pass through the coordinator anyway.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field
from statistics import median
from typing import NamedTuple, TypeAlias

from harness.live.processes.names import node_of
from harness.live.protocol.blocks import blocks_in
from harness.live.protocol.log import CommitEntry
from harness.live.protocol.messages import GradientDone, Head, LogAppend, PushStaged, Release

__all__ = ["NodePair", "Transfer", "TransferMeter"]

_MOST_PUSHES = 1000  # remembered of each pair until they are asked for

NodePair: TypeAlias = tuple[str, str]
"""The nodes of a worker and of a server."""


class Transfer(NamedTuple):
    """The pushes from a worker to a server in some interval."""

    pushes: int
    seconds: float  # median, from the worker's release to the server's receipt, less its pull and its gradient
    blocks: int  # in each push


@dataclass
class _Cycle:
    number: int
    released_seconds: float
    staged: dict[str, tuple[float, int]] = field(default_factory=dict)  # by server: time of receipt, number of blocks


class TransferMeter:
    """Measures transfers from the coordinator's messages."""

    def __init__(self) -> None:
        self._cycles: dict[str, _Cycle] = {}  # the latest, by worker
        self._found: dict[tuple[str, str], deque[tuple[float, int]]] = {}  # by worker and server
        self._sent: Head | None = None  # the last one: an entry of the log goes to all servers

    def sent(self, receiver: str, head: Head, now: float) -> None:
        """Take note of a message that the coordinator sends."""
        if isinstance(head, LogAppend):
            if head is not self._sent and isinstance(head.entry, CommitEntry):
                for begun in head.entry.released:
                    self._begin(begun.worker, begun.cycle, now)
        elif isinstance(head, Release):
            self._begin(receiver, head.cycle, now)
        self._sent = head

    def _begin(self, worker: str, number: int, now: float) -> None:
        cycle = self._cycles.get(worker)
        # What is sent again, after a timeout or to another server, does not start the cycle again.
        if cycle is None or cycle.number < number:
            self._cycles[worker] = _Cycle(number, now)

    def received(self, sender: str, head: Head, now: float) -> None:
        """Take note of a message that the coordinator receives."""
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
                    self._count(head.worker, sender, cycle, head.done, now, blocks)
        elif isinstance(head, GradientDone):
            cycle = self._cycles.get(sender)
            if cycle is not None and cycle.number == head.cycle:
                self._close(sender, cycle, head)

    def _close(self, worker: str, cycle: _Cycle, done: GradientDone) -> None:
        """Count what has been staged so far."""
        if cycle.staged:
            for server, (at, blocks) in cycle.staged.items():
                self._count(worker, server, cycle, done, at, blocks)
            cycle.staged.clear()

    def _count(self, worker: str, server: str, cycle: _Cycle, done: GradientDone, at: float, blocks: int) -> None:
        found = self._found.get((worker, server))
        if found is None:
            found = self._found[worker, server] = deque(maxlen=_MOST_PUSHES)
        spent = at - cycle.released_seconds - done.pull_seconds - done.compute_seconds
        found.append((spent if spent > 0.0 else 0.0, blocks))

    def take(self) -> dict[NodePair, Transfer]:
        """Transfers that were completed since the last call."""
        found, self._found = self._found, {}
        return {
            (node_of(worker), node_of(server)): Transfer(
                len(those), median(spent for spent, _ in those), max(blocks for _, blocks in those)
            )
            for (worker, server), those in found.items()
        }
