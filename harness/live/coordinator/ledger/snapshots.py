"""The coordinator's side of snapshots: which process keeps which copies, and when a snapshot is durable.

Every server copies its blocks as of one entry of the log and sends the copy to a backup server on another node. In a job
with one server the coordinator is the backup.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable

import numpy as np

from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.protocol.blocks import blocks_in, members, runs_of
from harness.live.protocol.log import SnapshotEntry
from harness.live.protocol.messages import (
    COORDINATOR,
    Array,
    BlockData,
    BranchVectors,
    CopyKept,
    SnapshotCopy,
    SnapshotDurable,
)
from harness.live.server.pieces import Keeper, Piece

__all__ = ["Snapshots"]


class Snapshots:
    """Snapshots in progress, and the copies that the coordinator keeps itself."""

    def __init__(self, ledger: Ledger, now: Callable[[], float]) -> None:
        self._ledger, self._now, self.keeper = ledger, now, Keeper(ledger.layout)
        self.under_way: dict[int, dict[int, set[str]]] = {}  # holders, by index and block
        self.uncopied = 0  # pushes since the last snapshot
        self.taken_seconds = -math.inf  # when that was begun
        self._saves: set[int] = set()
        self._states: dict[int, bytes] = {}  # of the coordinator, at snapshots taken with `save`
        self._saved: tuple[int, tuple[Piece, ...]] = (-1, ())

    @property
    def latest(self) -> int:
        """The index of the last snapshot that is complete or in progress."""
        return max(self.under_way, default=self._ledger.durable)

    def take(self, *, save: bool = False) -> int:
        """Begin a snapshot; returns its index. With `save`, the coordinator gets a copy, too."""
        self.uncopied, self.taken_seconds = 0, self._now()
        # Servers that shall leave are backups of none.
        ring = [s for s in self._ledger.servers if s not in self._ledger.retiring]
        backups = {s: _next(ring, s) for s in self._ledger.servers}
        index = self._ledger.append(SnapshotEntry(backups, save))
        self.under_way[index] = {}
        if save:
            self._saves.add(index)
        return index

    def copied(self, owner: str, head: SnapshotCopy, arrays: tuple[Array, ...]) -> bool:
        """A copy has arrived here. Returns whether that makes a snapshot durable."""
        self.keeper.put(head.index, Piece(head.runs, head.branches, arrays))
        return self.kept(COORDINATOR, CopyKept(head.index, head.runs, owner))

    def kept(self, keeper: str, head: CopyKept) -> bool:
        """A copy has arrived at a backup. Returns whether that makes a snapshot durable."""
        holders = self.under_way.get(head.index)
        if holders is None:
            return False
        for block in blocks_in(head.runs):
            holders.setdefault(block, set()).update((keeper, head.owner))
        everything = self._ledger.layout.everything
        # Two holders of every block, so that the death of any one process loses nothing.
        if holders.keys() != everything or not all(len(h) > 1 for h in holders.values()):
            return False
        if head.index in self._saves and self.keeper.blocks(head.index) != everything:
            return False
        self._complete(head.index, holders)
        return True

    def _complete(self, index: int, holders: dict[int, set[str]]) -> None:
        if index in self._saves:
            self._saved = index, tuple(self.keeper.pick(index, self._ledger.layout.everything))
            self._states = {i: state for i, state in self._states.items() if i >= index}
        self.under_way = {i: h for i, h in self.under_way.items() if i > index}
        self._saves = {i for i in self._saves if i > index}
        self.keeper.forget(index)
        self._ledger.make_durable(index, holders)
        for name in self._ledger.servers:
            self._ledger.tell(name, SnapshotDurable(index))

    def keep_state(self, index: int, state: bytes) -> None:
        """Keep the coordinator's state at a snapshot that was taken with `save`."""
        self._states[index] = state

    def state(self, index: int) -> bytes:
        """What `keep_state` was given. Raises KeyError if a later one of these snapshots is complete."""
        return self._states[index]

    def saved(self, index: int) -> dict[int, dict[str, Array]]:
        """A whole snapshot that was taken with `save`. Raises KeyError unless it is the last complete one of these."""
        if index != self._saved[0]:
            raise KeyError(f"Cannot give the snapshot at {index}: the last one that was saved is at {self._saved[0]}.")
        layout, made = self._ledger.layout, dict[int, dict[str, Array]]()
        for piece in self._saved[1]:
            given = iter(piece.arrays)
            for branch, name in ((h.branch, name) for h in piece.held for name in h.vectors):
                vector = made.setdefault(branch, {}).setdefault(name, np.zeros(layout.size, np.float32))
                for run in piece.runs:
                    vector[layout.span(run)] = next(given)
        return made

    def lose(self, name: str) -> None:
        """A server is dead, and with it all copies that it kept."""
        for snapshot in (self._ledger.holders, *self.under_way.values()):
            for holders in snapshot.values():
                holders.discard(name)

    def reset(self) -> None:
        """A view begins: cancel the snapshots in progress."""
        self.under_way.clear()
        self._saves.clear()
        self.keeper.forget_after(self._ledger.durable)

    def send_durable(self, blocks: Iterable[int]) -> None:
        """Send the coordinator's own copies of these blocks of the durable snapshot to their owners."""
        index = self._ledger.durable
        for owner, those in members(self._ledger.table, blocks).items():
            for piece in self.keeper.pick(index, those):
                self._ledger.tell(owner, BlockData(index, piece.runs, piece.held), piece.arrays)

    def keep_model(self, branches: dict[int, dict[str, Array]]) -> None:
        """Keep vectors of the whole model, by branch, as the durable snapshot: a job begins with them."""
        held = tuple(BranchVectors(branch, tuple(vectors)) for branch, vectors in branches.items())
        arrays = tuple(np.asarray(v, np.float32) for vectors in branches.values() for v in vectors.values())
        self.keeper.put(self._ledger.durable, Piece(runs_of(self._ledger.layout.everything), held, arrays))


def _next(ring: list[str], server: str) -> str:
    others = [s for s in ring if s != server]
    return next((s for s in others if s > server), others[0]) if others else COORDINATOR
