"""Blocks on their way to other owners, as the coordinator sees them."""

from __future__ import annotations

from typing import NamedTuple

from harness.live.coordinator.ledger import Ledger
from harness.live.protocol.blocks import Blocks, members, moves_to, runs_of
from harness.live.protocol.log import Move
from harness.live.protocol.messages import Fetch

__all__ = ["Goal", "Moves"]


class Goal(NamedTuple):
    """Where blocks are to be."""

    servers: tuple[str, ...]
    shares: tuple[float, ...]
    on_demand: bool
    at_once: int  # of one source's blocks on their way to one target


class Moves:
    """From the table as it is to a goal, some blocks at a time, or all at once and on demand."""

    def __init__(self, ledger: Ledger) -> None:
        self._ledger = ledger
        self.goal: Goal | None = None
        self.under_way: dict[int, tuple[str, str]] = {}  # block: source and target
        self._lazy: dict[int, tuple[str, int]] = {}  # those that wait for the sweep: source, and the move's entry
        self.seconds = 0.0  # when something last came

    @property
    def left(self) -> int:
        """Blocks that are not yet where they are to be."""
        return len(self.under_way) + sum(len(blocks - self.under_way.keys()) for blocks, _, _ in self._wanted())

    def _wanted(self) -> list[tuple[Blocks, str, str]]:
        if self.goal is None:
            return []
        return moves_to(self._ledger.table, self.goal.servers, self.goal.shares)

    def go_on(self) -> None:
        """Begin what can begin now."""
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
        index = self._ledger.append(Move(runs_of(blocks), source, target, on_demand))
        if on_demand:
            self._lazy.update(dict.fromkeys(blocks, (source, index)))

    def _sweep(self) -> None:
        """Fetch some of those that nobody has asked for."""
        if self.goal is None or not self._lazy or len(self.under_way) - len(self._lazy) >= self.goal.at_once:
            return
        chosen = sorted(self._lazy)[: self.goal.at_once]
        for source, blocks in members({b: self._lazy[b][0] for b in chosen}, chosen).items():
            self._ledger.tell(source, Fetch(max(self._lazy[b][1] for b in blocks), runs_of(blocks)))
        for block in chosen:
            del self._lazy[block]

    def come(self, blocks: Blocks, seconds: float) -> None:
        """Blocks have come to their new owner."""
        self.seconds = seconds
        for block in blocks:
            self.under_way.pop(block, None)
            self._lazy.pop(block, None)
        self.go_on()

    def restart(self) -> None:
        """A view begins, with every block at its owner; a goal that counts on the dead is given up."""
        self.under_way.clear()
        self._lazy.clear()
        if self.goal is not None and not set(self.goal.servers) <= self._ledger.members.keys():
            self.goal = None
