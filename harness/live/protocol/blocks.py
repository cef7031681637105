"""A model as a row of numbers, cut into blocks of consecutive ones; who owns which."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

from simulators.reconfiguration.plan import block_counts, moves

__all__ = [
    "Blocks",
    "Layout",
    "Owners",
    "Runs",
    "blocks_in",
    "members",
    "moves_to",
    "overlap",
    "owners_of",
    "runs_of",
    "table_of",
]

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Blocks [first, end) that follow one another, in order."""

Owners: TypeAlias = tuple[tuple[int, int, str], ...]
"""Blocks [first, end) and their owner, in order, without a gap."""

Blocks: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class Layout:
    """How `size` numbers are cut into `count` blocks, as equal as can be. Raises ValueError where a block would be empty."""

    size: int
    count: int

    def __post_init__(self) -> None:
        if not 1 <= self.count <= self.size:
            raise ValueError(f"Cannot cut {self.size} parameters into {self.count} blocks: give 1 to {self.size}.")

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """Where each block begins, and where the last one ends."""
        return tuple(self.size * b // self.count for b in range(self.count + 1))

    @cached_property
    def everything(self) -> Blocks:
        return frozenset(range(self.count))

    def span(self, run: tuple[int, int]) -> slice:
        """The numbers of a run of blocks."""
        return slice(self.bounds[run[0]], self.bounds[run[1]])


@lru_cache(maxsize=4096)
def runs_of(blocks: Blocks) -> Runs:
    """The longest runs that blocks form."""
    made: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if made and made[-1][1] == block:
            made[-1] = (made[-1][0], block + 1)
        else:
            made.append((block, block + 1))
    return tuple(made)


@lru_cache(maxsize=4096)
def blocks_in(runs: Runs) -> Blocks:
    """The blocks of runs."""
    return frozenset(b for first, end in runs for b in range(first, end))


def overlap(runs: Runs, others: Runs) -> Iterator[tuple[int, int, int]]:
    """Where runs meet `others`, both in order: (index of the run, first, end)."""
    for i, (first, end) in enumerate(runs):
        for start, stop in others:
            if first < stop and start < end:
                yield i, max(first, start), min(end, stop)


def table_of(owners: Owners) -> dict[int, str]:
    """Each block's owner."""
    return {b: owner for first, end, owner in owners for b in range(first, end)}


def owners_of(table: Mapping[int, str]) -> Owners:
    """The table as it is sent: neighbours of one owner together."""
    made: list[tuple[int, int, str]] = []
    for block in sorted(table):
        if made and made[-1][2] == table[block]:
            made[-1] = (made[-1][0], block + 1, table[block])
        else:
            made.append((block, block + 1, table[block]))
    return tuple(made)


def members(table: Mapping[int, str], blocks: Iterable[int]) -> dict[str, Blocks]:
    """Blocks by owner."""
    found: dict[str, set[int]] = {}
    for block in blocks:
        found.setdefault(table[block], set()).add(block)
    return {owner: frozenset(those) for owner, those in found.items()}


def moves_to(table: Mapping[int, str], servers: tuple[str, ...], shares: tuple[float, ...]) -> list[tuple[Blocks, str, str]]:
    """(blocks, source, target) that bring a table to these shares, as few as can be; the last of a source's blocks first."""
    have = {owner: sorted(those) for owner, those in members(table, table).items()}
    found = []
    counts = block_counts(servers, shares, len(table))
    for source, target, count in moves({o: len(b) for o, b in have.items()}, counts):
        have[source], moved = have[source][:-count], have[source][-count:]
        found.append((frozenset(moved), source, target))
    return found
