"""Parameters for workers: pulls that wait, answers, and what the workers that a push releases are sent unasked."""

from __future__ import annotations

from typing import Any, NamedTuple

import msgspec

from harness.live.protocol.blocks import Blocks, Layout, Runs, runs_of
from harness.live.protocol.log import CommitEntry
from harness.live.protocol.messages import Array, Pull, Pulled, UnaskedBlocks
from harness.live.protocol.outbox import Outbox
from harness.live.server.cohorts import Cohort, Cohorts
from harness.live.server.pieces import cut_rows
from harness.live.server.server_table import ServerTable
from harness.live.server.store import Store

__all__ = ["Pulls"]


class _Parameters(msgspec.Struct):
    """A copy of the parameters of some blocks. No entry from `since` up to, but without, `until` changes them."""

    arrays: tuple[Array, ...]
    since: int
    until: int | None = None  # None: they have not changed yet


class _Waiting(NamedTuple):
    """A pull that waits for blocks or entries."""

    sender: str
    pull: Pull
    rows: tuple[Array, ...]  # their numbers, where there are embedding tables
    blocks: Blocks


class Pulls:
    """The pulls that wait, and the copies of parameters that were sent last."""

    def __init__(self, layout: Layout, store: Store, table: ServerTable, cohorts: Cohorts, outbox: Outbox) -> None:
        self._layout, self._store, self._table, self._cohorts, self._outbox = layout, store, table, cohorts, outbox
        self._waiting: list[_Waiting] = []
        self._copies: dict[tuple[Any, ...], _Parameters] = {}  # by branch, runs and type
        self._changed: dict[int, int] = {}  # the last entry that changed each branch's parameters

    def clear(self) -> None:
        """A view begins: nobody waits, and nothing that was sent counts."""
        self._waiting = []
        self._copies.clear()
        self._changed.clear()

    def add(self, sender: str, pull: Pull, rows: tuple[Array, ...], blocks: Blocks) -> None:
        """A worker waits for these blocks."""
        self._waiting.append(_Waiting(sender, pull, rows, blocks))

    def answer(self) -> None:
        """Answer the pulls whose blocks are all here and recent enough."""
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        for wait in waiting:
            sender, pull = wait.sender, wait.pull
            # Blocks may have moved away while the pull waited.
            blocks = self._table.redirect(sender, pull.number, wait.blocks, push=False)
            if not blocks:
                continue
            there = self._cohorts.at(pull.after, blocks)
            if not blocks <= frozenset[int]().union(*(c.blocks for c in there)):
                self._waiting.append(wait._replace(blocks=blocks))
            elif pull.branch in self._store.branches and self._layout.tables is not None:
                (rows,) = cut_rows(self._layout, pull.runs, wait.rows, blocks)
                made = self._store.rows(pull.branch, rows, _dtype(pull.bits))
                # Rows that another worker has pulled are not kept, so a worker that is late may see a later entry.
                self._outbox.tell(sender, Pulled(pull.number, min(c.position for c in there), runs_of(blocks)), (made,))
            elif pull.branch in self._store.branches:
                copy = self._parameters(pull.branch, pull.bits, pull.after, runs_of(blocks))
                index = min(c.position for c in there) if copy.until is None else copy.until - 1
                self._outbox.tell(sender, Pulled(pull.number, index, runs_of(blocks)), copy.arrays)

    def send_unasked(self, cohort: Cohort, commit: CommitEntry, index: int) -> None:
        """Send parameters to the workers that this push, entry `index`, releases, without being asked."""
        arrays = self._parameters(commit.branch, commit.bits, index, cohort.runs).arrays
        for begun in commit.released:
            head = UnaskedBlocks(begun.cycle, index, cohort.runs, begun.clock, begun.terms, begun.seconds)
            self._outbox.tell(begun.worker, head, arrays)

    def _parameters(self, branch: int, bits: int, after: int, runs: Runs) -> _Parameters:
        """The parameters of some blocks. If another worker pulled them as of `after`, the same copy: a worker that is late
        at a barrier must see what the others saw."""
        dtype = _dtype(bits)
        key = (branch, runs, dtype)
        copy = self._copies.get(key)
        if copy is None or not copy.since <= after < (copy.until or after + 1):
            copy = _Parameters(self._store.parameters(branch, runs, dtype), self._changed.get(branch, 0))
            self._copies[key] = copy
        return copy

    def stepped(self, branch: int, index: int) -> None:
        """Entry `index` has changed the branch's parameters."""
        self._changed[branch] = index
        for key, copy in self._copies.items():
            if key[0] == branch and copy.until is None:
                copy.until = index

    def forget_copies(self) -> None:
        """Blocks have come or gone: copies of other blocks are of no use."""
        self._copies.clear()

    def forget_branch(self, branch: int) -> None:
        """The branch is freed."""
        self._copies = {key: copy for key, copy in self._copies.items() if key[0] != branch}


def _dtype(bits: int) -> str:
    return "float16" if bits == 16 else "float32"
