"""The owner of the log: its entries since the last durable snapshot, the owners of all blocks, and the members of the
job."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from functools import lru_cache
from typing import Any

from harness.live.coordinator.ledger.journal import Journal
from harness.live.protocol.blocks import Layout, blocks_in, owners_of
from harness.live.protocol.log import CommitEntry, LogEntry, MoveEntry
from harness.live.protocol.messages import COORDINATOR, Array, Head, LogAppend, Message, OwnerTable, Send

__all__ = ["Ledger"]


@lru_cache(maxsize=16)
def _servers_among(members: tuple[str, ...]) -> tuple[str, ...]:
    """Cached, because every entry is sent to all, and who is a member seldom changes."""
    return tuple(sorted(m for m in members if m.startswith("server/")))


class Ledger:
    """The log and its readers. An appended entry is written to the journal first, then sent to all servers."""

    journaled = (
        "index",
        "entries",
        "durable",
        "holders",
        "view",
        "generation",
        "table",
        "table_index",
        "members",
        "expected",
        "retiring",
    )

    def __init__(self, layout: Layout, send: Send, journal: Journal) -> None:
        self.layout, self.send, self.journal = layout, send, journal
        self.records = 0  # in the journal since its last restart
        self.replaying = False  # a journal is read back: nothing is sent or written
        self.index = 0  # of the last entry
        self.entries: dict[int, LogEntry] = {}  # after the durable snapshot
        self.durable = 0  # index of the last complete snapshot
        self.holders: dict[int, set[str]] = {}  # processes with a copy of that snapshot, by block
        self.view, self.generation = 0, 1
        self.table: dict[int, str] = {}  # owners, by block
        self.table_index = 0  # of the entry that changed the table last
        self.members: dict[str, int] = {}  # generations of the processes that have joined
        self.expected: dict[str, int] = {}  # generations that may join
        self.retiring: dict[str, int] = {}  # processes that leave once the log is durable up to this entry
        self.reset()

    def reset(self) -> None:
        """Drop all entries: the coordinator itself gives the model, as of now, at the next view."""
        self.durable, self.entries = self.index, {}
        self.holders = {b: {COORDINATOR} for b in self.layout.everything}
        self.table = dict.fromkeys(self.layout.everything, COORDINATOR)

    @property
    def servers(self) -> tuple[str, ...]:
        """Servers that have joined, sorted."""
        return _servers_among(tuple(self.members))

    @property
    def workers(self) -> list[str]:
        """Workers that have joined, the evaluator included, sorted."""
        return sorted(m for m in self.members if m.startswith("worker/"))

    @property
    def generations(self) -> dict[str, int]:
        """The lowest generation of each process that is accepted, the coordinator's included."""
        return {**self.members, COORDINATOR: self.generation}

    def tell(self, receiver: str, head: Head, arrays: tuple[Array, ...] = ()) -> None:
        """Send a message of the present view and generation."""
        if not self.replaying:
            self.send(receiver, Message(head, arrays, self.view, self.generation))

    def append(self, entry: LogEntry, *record: Any) -> int:
        """Append an entry; returns its index. `record`: what to write to the journal in place of the entry."""
        self.index += 1
        # Before any server can hear of it: a successor must know every entry that a server may have applied.
        self.write(*(record or ("entry", entry)))
        self.entries[self.index] = entry
        if isinstance(entry, MoveEntry):
            self.table.update(dict.fromkeys(blocks_in(entry.runs), entry.target))
            self.table_index = self.index
        # One message to all, so that it is encoded once.
        if not self.replaying:
            message = Message(LogAppend(self.index, entry), (), self.view, self.generation)
            for name in self.servers:
                self.send(name, message)
        return self.index

    def write(self, *record: Any) -> None:
        """Append a record to the journal."""
        if not self.replaying:
            self.records += 1
            self.journal.append(pickle.dumps(record))

    def restart_journal(self, record: bytes) -> None:
        """Replace the whole journal by one record."""
        if not self.replaying:
            self.records = 0
            self.journal.restart(record)

    def take_over(self) -> None:
        """Continue after a coordinator that died, and with it the copies that it held."""
        self.generation += 1
        for holders in self.holders.values():
            holders.discard(COORDINATOR)

    def resend(self, receiver: str, after: int) -> None:
        """Send a server again all entries after that one."""
        for index in range(after + 1, self.index + 1):
            self.tell(receiver, LogAppend(index, self.entries[index]))

    def oldest_commit(self, worker: str) -> int | None:
        """The cycle of a worker's first push that is not durable yet; None if all are."""
        # Every release asks. A worker's cycles are committed in order, so the first entry that is its own has the lowest.
        for entry in self.entries.values():
            if isinstance(entry, CommitEntry) and entry.worker == worker:
                return entry.cycle
        return None

    def last_commit(self, worker: str) -> int:
        """The entry of a worker's last push that is not durable yet; 0 if all are."""
        return max((i for i, e in self.entries.items() if isinstance(e, CommitEntry) and e.worker == worker), default=0)

    def make_durable(self, index: int, holders: dict[int, set[str]]) -> None:
        """The snapshot at `index` is complete: entries up to it are no longer needed."""
        self.write("durable", index, holders)
        self.durable, self.holders = index, holders
        self.entries = {i: e for i, e in self.entries.items() if i > index}

    def send_table(self, workers: Iterable[str]) -> None:
        """Tell workers the owners of all blocks."""
        for name in workers:
            self.tell(name, OwnerTable(self.table_index, owners_of(self.table)))
