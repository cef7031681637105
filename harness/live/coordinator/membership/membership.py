"""The owner of membership: processes that join, retire and die."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Moves
from harness.live.coordinator.membership.views import Views
from harness.live.coordinator.membership.worker_tables import WorkerTables

__all__ = ["Membership"]


class Membership:
    """Decides who is a member. It never begins a view by itself: `lose` returns whether the coordinator must."""

    journaled = ("released",)

    def __init__(self, ledger: Ledger, moves: Moves, tables: WorkerTables, views: Views) -> None:
        self._ledger, self._moves, self._tables, self._views = ledger, moves, tables, views
        self.released: dict[str, int] = {}  # the last cycle of every worker

    def admit(self, name: str, generation: int) -> bool:
        """A process has said hello. Returns whether it is new."""
        new = self._ledger.members.get(name) != generation
        self._ledger.members[name] = generation
        self._views.welcome(name)
        return new

    def lose(self, name: str) -> bool:
        """A process is dead. Returns whether a view must begin at once. After the death of a server that owns blocks, or is
        about to, the driver has to call `recover`."""
        generation = self._ledger.members.pop(name)
        self._ledger.retiring.pop(name, None)
        if not name.startswith("worker/"):
            self._views.server_died(name)
            return False
        self._views.worker_left(name, generation, self.released.get(name, 0))
        return self._views.waits_for_pushes_of(name)

    def keep(self, names: Iterable[str]) -> None:
        """Let these processes retire no longer: they are needed again."""
        for name in names:
            self._ledger.retiring.pop(name, None)

    def dismiss_retired(self, busy: Collection[str]) -> bool:
        """Remove the retiring processes with which nothing would be lost. `busy`: workers that are in a mini-batch. Returns
        whether there were any."""
        before = len(self._ledger.members)
        for name in sorted(self._ledger.retiring):
            if name in self._ledger.members and not self._needed(name, busy):
                generation = self._ledger.members.pop(name)
                del self._ledger.retiring[name]
                if name.startswith("worker/"):
                    self._views.worker_left(name, generation, self.released.get(name, 0))
        return len(self._ledger.members) < before

    def _needed(self, name: str, busy: Collection[str]) -> bool:
        ledger = self._ledger
        if name.startswith("worker/"):
            return name in busy or ledger.oldest_commit(name) is not None or self._views.recovering
        holds = ledger.durable < ledger.retiring[name]
        owns = name in self._moves.ends or name in ledger.table.values()
        return self._views.recovering or holds or self._tables.some_behind or owns
