"""Blocks by how far the log is applied to them.

All blocks of a server are at the same entry of the log, except those that have just arrived: these catch up as a cohort of
their own.
"""

from __future__ import annotations

from harness.live.protocol.blocks import Blocks, one_of, runs_of

__all__ = ["Cohort", "Cohorts"]


class Cohort:
    """Blocks to which the log is applied up to the same entry, `position`."""

    def __init__(self, blocks: Blocks, position: int) -> None:
        self.position = position
        self.hold(blocks)
        self.done: dict[str, int] = {}  # the last committed cycle, by worker

    def hold(self, blocks: Blocks) -> None:
        """Have these blocks from now on, in `blocks` and, as runs, in `runs`."""
        self.blocks = one_of(blocks)
        self.runs = runs_of(self.blocks)


class Cohorts:
    """All blocks that are here."""

    def __init__(self) -> None:
        self.all: list[Cohort] = []

    def clear(self) -> None:
        """Drop all."""
        self.all = []

    def add(self, blocks: Blocks, position: int) -> None:
        """Blocks have arrived, as of an entry of the log."""
        self.all.append(Cohort(blocks, position))

    def merge(self) -> bool:
        """Make cohorts at the same entry one, and drop empty ones. Returns whether there were two at the same."""
        if len(self.all) == 1 and self.all[0].blocks:  # the usual case
            return False
        kept: dict[int, Cohort] = {}
        for cohort in sorted(self.all, key=lambda c: -len(c.done)):
            same = kept.setdefault(cohort.position, cohort)
            if same is not cohort:
                same.hold(same.blocks | cohort.blocks)
                same.done = {w: max(same.done.get(w, 0), cohort.done.get(w, 0)) for w in {**same.done, **cohort.done}}
        merged = len(kept) < len(self.all)
        self.all = [c for c in kept.values() if c.blocks]
        return merged

    def at(self, after: int, blocks: Blocks) -> list[Cohort]:
        """The cohorts that have some of these blocks, and have reached that entry."""
        return [c for c in self.all if c.position >= after and c.blocks & blocks]

    def not_past(self, worker: str, cycle: int, blocks: Blocks) -> Blocks:
        """Those of these blocks to which that push, or a later one of the worker, is not applied yet. Also blocks that have
        not arrived."""
        for cohort in self.all:
            if cohort.done.get(worker, 0) >= cycle:
                blocks -= cohort.blocks
        return blocks
