"""The coordinator's plan for blocks that move to other servers."""

from __future__ import annotations

from typing import NamedTuple

from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.protocol.blocks import Blocks, members, moves_to, runs_of
from harness.live.protocol.log import MoveEntry
from harness.live.protocol.messages import FetchBlocks

__all__ = ["Goal", "Moves"]


class Goal(NamedTuple):
    """The servers that shall own the model, and their shares of it."""

    servers: tuple[str, ...]
    shares: tuple[float, ...]
    on_demand: bool
    at_once: int  # blocks in transfer at a time, from one source to one target
    owners: tuple[str, ...] = ()  # of each block; () as the shares say


class Moves:
    """Changes the table of owners into the goal: some blocks at a time, or all at once and sent on demand."""

    journaled = ("goal",)

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.goal: Goal | None = None
        self.under_way: dict[int, tuple[str, str]] = {}  # source and target, by block
        self._unasked: dict[int, tuple[str, int]] = {}  # on-demand blocks still to fetch: source, and index of the move
        self.seconds = 0.0  # when a block arrived last

    @property
    def remaining(self) -> int:
        """Blocks that are not yet where the goal wants them."""
        return len(self.under_way) + sum(len(blocks - self.under_way.keys()) for blocks, _, _ in self._wanted())

    @property
    def ends(self) -> set[str]:
        """The servers that blocks in transfer leave, or will reach."""
        return {name for pair in self.under_way.values() for name in pair}

    def _wanted(self) -> list[tuple[Blocks, str, str]]:
        if self.goal is None:
            return []
        return moves_to(self._ledger.table, self.goal.servers, self.goal.shares, self.goal.owners)

    def advance(self) -> None:
        """Begin all transfers that may begin now."""
        if self.goal is None:
            return
        for blocks, source, target in self._wanted():
            ready = sorted(blocks - self.under_way.keys())
            if not self.goal.on_demand:
                ready = ready[: max(self.goal.at_once - sum(m == (source, target) for m in self.under_way.values()), 0)]
            if ready:
                self._move(frozenset(ready), source, target)
        self._sweep()

    def _move(self, blocks: Blocks, source: str, target: str) -> None:
        on_demand = self.goal is not None and self.goal.on_demand
        self.under_way.update(dict.fromkeys(blocks, (source, target)))
        index = self._ledger.append(MoveEntry(runs_of(blocks), source, target, on_demand))
        if on_demand:
            self._unasked.update(dict.fromkeys(blocks, (source, index)))

    def _sweep(self) -> None:
        """Fetch a few on-demand blocks that nobody has asked for."""
        # Only while few others travel, so that blocks that a worker waits for come first.
        if self.goal is None or not self._unasked or len(self.under_way) - len(self._unasked) >= self.goal.at_once:
            return
        chosen = sorted(self._unasked)[: self.goal.at_once]
        for source, blocks in members({b: self._unasked[b][0] for b in chosen}, chosen).items():
            self._ledger.tell(source, FetchBlocks(max(self._unasked[b][1] for b in blocks), runs_of(blocks)))
        for block in chosen:
            del self._unasked[block]

    def arrived(self, blocks: Blocks, seconds: float) -> None:
        """Blocks have reached their new owner."""
        self.seconds = seconds
        for block in blocks:
            self.under_way.pop(block, None)
            self._unasked.pop(block, None)
        self.advance()

    def reset(self) -> None:
        """A view begins, with every block at its owner. Drop a goal that names servers that are gone."""
        self.under_way.clear()
        self._unasked.clear()
        if self.goal is not None and not set(self.goal.servers) <= self._ledger.members.keys():
            self.goal = None
