"""A server's table of owners: which blocks are its own, and who has the others."""

from __future__ import annotations

from harness.live.protocol.blocks import Blocks, Owners, blocks_in, one_of, owners_of, runs_of, table_of
from harness.live.protocol.log import MoveEntry
from harness.live.protocol.messages import Redirect
from harness.live.protocol.outbox import Outbox

__all__ = ["ServerTable"]


class ServerTable:
    """The owner of each block as of the last entry that has arrived, which some blocks here may not have reached yet."""

    def __init__(self, name: str, outbox: Outbox) -> None:
        """`name`: of this server."""
        self._name, self._outbox = name, outbox
        self.owners: dict[int, str] = {}  # by block
        self.mine: Blocks = frozenset()
        self._index = 0  # of the entry that changed it last

    def reset(self, owners: Owners, index: int) -> None:
        """A view has this table, as of entry `index`."""
        self.owners, self._index = table_of(owners), index
        self.mine = one_of(frozenset(b for b, owner in self.owners.items() if owner == self._name))

    def move(self, index: int, move: MoveEntry) -> None:
        """Entry `index` moves blocks."""
        blocks = blocks_in(move.runs)
        self.owners.update(dict.fromkeys(blocks, move.target))
        self._index = index
        self.mine = one_of(self.mine | blocks if move.target == self._name else self.mine - blocks)

    def redirect(self, sender: str, number: int, blocks: Blocks, *, push: bool) -> Blocks:
        """Tell the sender of a pull or a push who owns the blocks that this server does not. Returns those that it owns."""
        if blocks is self.mine:  # the usual case
            return blocks
        mine = blocks & self.mine
        if mine != blocks:
            others = runs_of(blocks - mine)
            self._outbox.tell(sender, Redirect(number, push, others, self._index, owners_of(self.owners)))
        return mine
