"""The entries of the coordinator's log that some block of a server has not passed yet, and the branches that they free."""

from __future__ import annotations

from collections.abc import Iterable

from harness.live.protocol.log import FreeEntry, LogEntry

__all__ = ["ServerLog"]


class ServerLog:
    """What has arrived of the log, from the oldest entry that is still needed to the last one."""

    def __init__(self) -> None:
        self.end = 0  # index of the last entry that has arrived
        self._entries: dict[int, LogEntry] = {}
        self._freed: dict[int, int] = {}  # freed branches, and the entry that freed them

    def __len__(self) -> int:
        return len(self._entries)

    def __getitem__(self, index: int) -> LogEntry:
        return self._entries[index]

    def append(self, entry: LogEntry) -> None:
        """The entry after the last one has arrived."""
        self.end += 1
        self._entries[self.end] = entry
        if isinstance(entry, FreeEntry):
            self._freed[entry.branch] = self.end

    def begin_again(self, index: int) -> None:
        """The entries after `index` come again, perhaps with other contents."""
        self.end = index
        self._entries.clear()
        self._freed.clear()

    def live(self, branches: Iterable[int], index: int) -> list[int]:
        """Those of the `branches` that are not freed at that entry."""
        return [b for b in branches if self._freed.get(b, index + 1) > index]

    def forget(self, oldest: int) -> list[int]:
        """Drop the entries up to `oldest`, which all blocks have passed; returns the branches that these entries freed.

        A freed branch stays until then: blocks before the entry that frees it still apply its commits.
        """
        while self._entries and (index := next(iter(self._entries))) <= oldest:
            del self._entries[index]
        freed = [b for b, index in self._freed.items() if index <= oldest] if self._freed else []
        for branch in freed:
            del self._freed[branch]
        return freed
