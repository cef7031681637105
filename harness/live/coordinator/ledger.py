"""What the coordinator knows of its servers: the log since the last durable snapshot, who owns which block, who is there."""

from __future__ import annotations

import pickle
from collections.abc import Iterable
from typing import Any

from harness.live.coordinator.journal import Journal
from harness.live.protocol.blocks import Layout, blocks_in, owners_of
from harness.live.protocol.log import Commit, Entry, Move
from harness.live.protocol.messages import COORDINATOR, Array, Head, Log, Message, Send, Table

__all__ = ["Ledger"]

_KEPT = ("index", "entries", "durable", "holders", "view", "generation", "table", "table_index", "members", "expected")


class Ledger:
    """The log and its readers. What is appended is journalled first, then sent to all servers."""

    def __init__(self, layout: Layout, send: Send, journal: Journal) -> None:
        self.layout, self.send, self.journal = layout, send, journal
        self.notes = 0  # in the journal since it was begun anew
        self.muted = False  # while a journal is read back, nothing is sent or written
        self.index = 0  # of the last entry
        self.entries: dict[int, Entry] = {}  # after the durable snapshot
        self.durable = 0
        self.holders: dict[int, set[str]] = {}  # of the durable snapshot, by block
        self.view, self.generation = 0, 1
        self.table: dict[int, str] = {}
        self.table_index = 0
        self.members: dict[str, int] = {}
        self.expected: dict[str, int] = {}
        self.begin_anew()

    def begin_anew(self) -> None:
        """What was before does not matter any more; the coordinator has what comes now."""
        self.durable, self.entries = self.index, {}
        self.holders = {b: {COORDINATOR} for b in self.layout.everything}
        self.table = dict.fromkeys(self.layout.everything, COORDINATOR)

    def dump(self) -> dict[str, Any]:
        """All of it that a successor needs."""
        return {name: getattr(self, name) for name in _KEPT}

    def load(self, kept: dict[str, Any]) -> None:
        """The way back from `dump`."""
        for name in _KEPT:
            setattr(self, name, kept[name])

    @property
    def servers(self) -> list[str]:
        """Those that are there, in order."""
        return sorted(m for m in self.members if m.startswith("server/"))

    @property
    def workers(self) -> list[str]:
        """Those that are there, evaluators included, in order."""
        return sorted(m for m in self.members if m.startswith("worker/"))

    def tell(self, receiver: str, head: Head, arrays: tuple[Array, ...] = ()) -> None:
        """Send, as what the coordinator says now."""
        if not self.muted:
            self.send(receiver, Message(head, arrays, self.view, self.generation))

    def append(self, entry: Entry, *record: Any) -> int:
        """The log's next entry; `record` is what the journal has to remember in its place. Its index."""
        self.index += 1
        self.note(*(record or ("entry", entry)))
        self.entries[self.index] = entry
        if isinstance(entry, Move):
            self.table.update(dict.fromkeys(blocks_in(entry.runs), entry.target))
            self.table_index = self.index
        head = Log(self.index, entry)
        for name in self.servers:
            self.tell(name, head)
        return self.index

    def note(self, *record: Any) -> None:
        """Write a record into the journal."""
        if not self.muted:
            self.notes += 1
            self.journal.append(pickle.dumps(record))

    def inherit(self) -> None:
        """The coordinator before this one has died, with the copies that it held."""
        self.generation += 1
        for holders in self.holders.values():
            holders.discard(COORDINATOR)

    def restart(self, record: bytes) -> None:
        """Begin the journal anew with a record of everything."""
        if not self.muted:
            self.notes = 0
            self.journal.restart(record)

    def repeat(self, receiver: str, after: int) -> None:
        """Send a server all entries after that one again."""
        for index in range(after + 1, self.index + 1):
            self.tell(receiver, Log(index, self.entries[index]))

    def commits(self, worker: str) -> list[int]:
        """The cycles of a worker's pushes that are not durable."""
        return [e.cycle for e in self.entries.values() if isinstance(e, Commit) and e.worker == worker]

    def settle(self, index: int, holders: dict[int, set[str]]) -> None:
        """The snapshot at `index` is durable."""
        self.note("durable", index, holders)
        self.durable, self.holders = index, holders
        self.entries = {i: e for i, e in self.entries.items() if i > index}

    def table_to(self, workers: Iterable[str]) -> None:
        """Tell workers who owns what."""
        for name in workers:
            self.tell(name, Table(self.table_index, owners_of(self.table)))
