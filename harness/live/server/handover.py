"""Blocks that arrive at a server and leave it, with the pushes that are staged for them."""

from __future__ import annotations

from typing import TypeAlias

from harness.live.protocol.blocks import Blocks, Layout, blocks_in, members, runs_of
from harness.live.protocol.log import MoveEntry
from harness.live.protocol.messages import Array, BlockData, FetchBlocks, StagedPart
from harness.live.protocol.outbox import Outbox
from harness.live.server.cohorts import Cohort
from harness.live.server.pieces import Piece, Staging
from harness.live.server.server_table import ServerTable
from harness.live.server.store import Store

__all__ = ["Handover"]

_Staged: TypeAlias = tuple[tuple[StagedPart, ...], tuple[Array, ...]]
"""Parts of pushes that wait for their commit, and their arrays."""


class Handover:
    """Blocks that this server waits for, and those that wait here until their new owner asks."""

    def __init__(self, layout: Layout, store: Store, staging: Staging, table: ServerTable, outbox: Outbox) -> None:
        self._layout, self._store, self._staging, self._table, self._outbox = layout, store, staging, table, outbox
        self.awaited: dict[int, int] = {}  # blocks that have not arrived yet, and the entry as of which they will
        self._on_demand: dict[int, str] = {}  # those of them that were not asked for yet, and their old owner
        self._departed: dict[int, tuple[int, Piece, _Staged]] = {}  # that move on demand, until the new owner asks

    def clear(self) -> None:
        """A view begins, with every block at its owner."""
        for kept in (self.awaited, self._on_demand, self._departed):
            kept.clear()

    # ----------------------------------------------------------------------------------------------------------- arriving

    def expect(self, blocks: Blocks, index: int, source: str | None = None) -> None:
        """Wait for these blocks, which arrive as of entry `index`. `source`: the server that sends them only when it is
        asked."""
        self.awaited.update(dict.fromkeys(blocks, index))
        if source is not None:
            self._on_demand.update(dict.fromkeys(blocks, source))

    def fetch(self, blocks: Blocks) -> None:
        """Ask the old owners for those of `blocks` that move on demand."""
        wanted = blocks & self._on_demand.keys()
        for source, those in members(self._on_demand, wanted).items():
            self._outbox.tell(source, FetchBlocks(max(self.awaited[b] for b in those), runs_of(those)))
        for block in wanted:
            del self._on_demand[block]

    def fetch_all(self) -> None:
        """Ask for all that move on demand."""
        if self._on_demand:
            self.fetch(frozenset(self._on_demand))

    def arrived(self, head: BlockData, arrays: tuple[Array, ...]) -> Piece | None:
        """Take blocks that are awaited, and the pushes staged for them. Returns the piece; None if it was a repetition."""
        # Anything else is a repetition: those blocks are here already, and have moved on.
        expected = frozenset(b for b in blocks_in(head.runs) if self.awaited.get(b) == head.index)
        if not expected:  # entries that these blocks would need next may be dropped already
            return None
        at = sum(len(h.vectors) for h in head.branches) * len(head.runs)
        piece = Piece(head.runs, head.branches, arrays[:at]).of(self._layout, expected)
        self._store.install(piece)
        for part in head.parts:
            end = at + self._staging.arrays_of(part)
            self._staging.add(part.worker, part.cycle, part.runs, arrays[at:end], blocks_in(part.runs) & expected)
            at = end
        for block in expected:
            del self.awaited[block]
            self._on_demand.pop(block, None)
        return piece

    # ------------------------------------------------------------------------------------------------------------ leaving

    def leave(self, cohort: Cohort, move: MoveEntry, index: int, branches: list[int]) -> Blocks:
        """Entry `index` moves blocks from here, with their vectors of these branches. Returns those that the cohort had."""
        leaving = cohort.blocks & blocks_in(move.runs)
        if not leaving:
            return leaving
        cohort.hold(cohort.blocks - leaving)
        if move.on_demand:
            for block in leaving:
                self._departed[block] = index, *self._packed(frozenset([block]), branches)
        else:
            self.send(move.target, index, *self._packed(leaving, branches))
        self._store.drop(leaving)
        return leaving

    def _packed(self, blocks: Blocks, branches: list[int]) -> tuple[Piece, _Staged]:
        # Staged pushes leave with their blocks: workers send them again only if they hear of the new table.
        return self._store.copied(runs_of(blocks), branches), self._staging.depart(blocks)

    def asked_for(self, head: FetchBlocks) -> None:
        """Send blocks that wait here to their new owners."""
        for block in blocks_in(head.runs):
            if block in self._departed:  # otherwise it is sent already: several may ask
                self.send(self._table.owners[block], *self._departed.pop(block))

    def send(self, target: str, index: int, piece: Piece, staged: _Staged = ((), ())) -> None:
        """Send blocks as of entry `index` to a server, with what is staged for them."""
        self._outbox.tell(target, BlockData(index, piece.runs, piece.held, staged[0]), piece.arrays + staged[1])
