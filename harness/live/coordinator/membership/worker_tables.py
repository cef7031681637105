"""The owner of what workers know of the table of owners: what each was told, and what it has confirmed."""

from __future__ import annotations

from harness.live.coordinator.ledger.ledger import Ledger

__all__ = ["WorkerTables"]


class WorkerTables:
    """The table of owners that each worker has. A table is named by the entry of the log that changed it last."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self._sent: dict[str, int] = {}
        self._used: dict[str, int] = {}

    def update(self, name: str) -> None:
        """Tell a worker the owners of all blocks, unless it was told since they changed."""
        if self._sent.get(name) != self._ledger.table_index:
            self._sent[name] = self._ledger.table_index
            self._ledger.send_table([name])

    def in_view(self, name: str) -> None:
        """A process got the present table with its first view."""
        self._sent[name] = self._used[name] = self._ledger.table_index

    def all_in_view(self) -> None:
        """All workers, and no others, got the present table with a new view."""
        self._sent = dict.fromkeys(self._ledger.workers, self._ledger.table_index)
        self._used = dict(self._sent)

    def confirmed(self, name: str, index: int) -> None:
        """A worker confirms that it uses the table as of `index`."""
        self._used[name] = max(index, self._used.get(name, 0))

    @property
    def some_behind(self) -> bool:
        """Whether a worker may still send a push or a pull to a former owner."""
        return any(self._used.get(name, -1) < self._ledger.table_index for name in self._ledger.workers)
