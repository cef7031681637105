"""A worker's table of owners: which server it asks for which blocks."""

from __future__ import annotations

from harness.live.protocol.blocks import Blocks, Layout, Owners, members, table_of

__all__ = ["WorkerTable"]


class WorkerTable:
    """The owner of each block, as of entry `index` of the log."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self.owners: dict[int, str] = {}  # by block; never changed in place
        self.index = 0
        self._grouped, self._all = self.owners, dict[str, Blocks]()  # all blocks of the first, by owner

    def reset(self, owners: Owners, index: int) -> None:
        """A view has this table."""
        self.owners, self.index = table_of(owners), index

    def update(self, owners: Owners, index: int) -> Blocks | None:
        """Use a newer table. Returns the blocks that have other owners now; None if it is not newer."""
        if index <= self.index:
            return None
        table = table_of(owners)
        changed = frozenset(b for b, owner in table.items() if self.owners[b] != owner)
        self.owners, self.index = table, index
        return changed

    def group(self, blocks: Blocks) -> dict[str, Blocks]:
        """Some blocks by their owner."""
        # All blocks are asked for in every cycle, so that grouping is cached for each table.
        if len(blocks) < self._layout.count:
            return members(self.owners, blocks)
        if self._grouped is not self.owners:
            self._grouped, self._all = self.owners, members(self.owners, blocks)
        return self._all
