"""The model as one vector, cut into blocks of consecutive parameters; and tables of which server owns which block.

A vector with embedding tables consists of rows of one width: those of the tables, then the dense parameters, filled up with
zeros. Pulls and pushes name the rows that they carry, sorted, and everything else is done with whole blocks.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from simulators.reconfiguration.shares import block_counts, moves, moves_of_blocks

__all__ = [
    "Blocks",
    "Layout",
    "Owners",
    "Runs",
    "TableShape",
    "blocks_in",
    "members",
    "moves_to",
    "one_of",
    "overlap",
    "owners_of",
    "runs_of",
    "table_of",
    "union",
    "without",
]

Runs: TypeAlias = tuple[tuple[int, int], ...]
"""Ranges [first, end) of blocks, in order."""

Owners: TypeAlias = tuple[tuple[int, int, str], ...]
"""Ranges (first, end, owner) of blocks, in order and without a gap."""

Blocks: TypeAlias = frozenset[int]


@dataclass(frozen=True)
class TableShape:
    """The embedding tables at the beginning of a vector: their blocks are those of the simulator, the last ones shorter."""

    rows: int
    width: int  # numbers in a row
    blocks: int

    @property
    def block_rows(self) -> int:
        """Rows in each block but the last ones, as `simulators.engine.embedding.block_of` has them."""
        return -(-self.rows // self.blocks)


@dataclass(frozen=True)
class Layout:
    """Cuts `size` parameters into `count` blocks of nearly equal size. Raises ValueError if a block would be empty.

    With `tables`, the last block has the dense parameters, and the others are those of the tables. Raises ValueError for
    another count, and for a size that is not one of rows.
    """

    size: int
    count: int
    tables: TableShape | None = None

    def __post_init__(self) -> None:
        tables = self.tables
        if not 1 <= self.count <= self.size:
            raise ValueError(f"Cannot cut {self.size} parameters into {self.count} blocks: give 1 to {self.size}.")
        rest = 0 if tables is None else self.size - tables.rows * tables.width  # of the dense parameters
        if tables and (self.count != tables.blocks + 1 or rest < 0 or rest % tables.width):
            raise ValueError(f"Cannot cut {self.size} parameters into {self.count} blocks: they do not agree with {tables}.")

    @cached_property
    def bounds(self) -> tuple[int, ...]:
        """First parameter of each block, and the end of the last one, [count + 1]."""
        if (tables := self.tables) is not None:
            rows = (min(b * tables.block_rows, tables.rows) for b in range(self.count))
            return (*(row * tables.width for row in rows), self.size)
        return tuple(self.size * b // self.count for b in range(self.count + 1))

    @cached_property
    def row_bounds(self) -> NDArray[np.int64]:
        """First row of each block, and the end of the last one, [count + 1]. Only with `tables`."""
        return np.array(self.bounds) // (self.tables.width if self.tables else 1)

    def rows_in(self, rows: NDArray[np.int32], runs: Runs) -> tuple[slice, ...]:
        """Where in `rows`, sorted, those of each run are."""
        ends = np.searchsorted(rows, self.row_bounds[np.array(runs, int).reshape(-1, 2)]).tolist()
        return tuple(slice(first, end) for first, end in ends)

    @cached_property
    def everything(self) -> Blocks:
        return frozenset(range(self.count))

    def span(self, run: tuple[int, int]) -> slice:
        """The parameters in a run of blocks."""
        return slice(self.bounds[run[0]], self.bounds[run[1]])


# Few different sets occur, and every message needs them: cached, these four cost nothing.
@lru_cache(maxsize=4096)
def runs_of(blocks: Blocks) -> Runs:
    """Blocks as the longest possible runs."""
    made: list[tuple[int, int]] = []
    for block in sorted(blocks):
        if made and made[-1][1] == block:
            made[-1] = (made[-1][0], block + 1)
        else:
            made.append((block, block + 1))
    return tuple(made)


@lru_cache(maxsize=4096)
def blocks_in(runs: Runs) -> Blocks:
    """All blocks of some runs."""
    return frozenset(b for first, end in runs for b in range(first, end))


@lru_cache(maxsize=4096)
def union(blocks: Blocks, others: Blocks) -> Blocks:
    """The blocks of both."""
    return blocks | others


@lru_cache(maxsize=4096)
def without(blocks: Blocks, others: Blocks) -> Blocks:
    """The first blocks that are not among the others."""
    return blocks - others


def one_of(blocks: Blocks) -> Blocks:
    """The same blocks, as the one object that `blocks_in` gives of their runs: who has it, need not compare them one by
    one."""
    return blocks_in(runs_of(blocks))


def overlap(runs: Runs, others: Runs) -> Iterator[tuple[int, int, int]]:
    """The overlaps of two lists of runs, as (index in `runs`, first, end)."""
    for i, (first, end) in enumerate(runs):
        for start, stop in others:
            if first < stop and start < end:
                yield i, max(first, start), min(end, stop)


def table_of(owners: Owners) -> dict[int, str]:
    """The owner of each block, from the form that is sent."""
    return {b: owner for first, end, owner in owners for b in range(first, end)}


def owners_of(table: Mapping[int, str]) -> Owners:
    """The table in the form that is sent: adjacent blocks of one owner are one row."""
    made: list[tuple[int, int, str]] = []
    for block in sorted(table):
        if made and made[-1][2] == table[block]:
            made[-1] = (made[-1][0], block + 1, table[block])
        else:
            made.append((block, block + 1, table[block]))
    return tuple(made)


def members(table: Mapping[int, str], blocks: Iterable[int]) -> dict[str, Blocks]:
    """Group some blocks by their owner."""
    found: dict[str, set[int]] = {}
    for block in blocks:
        found.setdefault(table[block], set()).add(block)
    return {owner: frozenset(those) for owner, those in found.items()}


def moves_to(
    table: Mapping[int, str], servers: tuple[str, ...], shares: tuple[float, ...], owners: tuple[str, ...] = ()
) -> list[tuple[Blocks, str, str]]:
    """The fewest moves (blocks, source, target) from a table to these shares; a source gives its last blocks first. With
    `owners`, of each block, to these."""
    if owners:
        named = moves_of_blocks(tuple(table[b] for b in range(len(owners))), owners)
        return [(frozenset(blocks), source, target) for source, target, blocks in named]
    have = {owner: sorted(those) for owner, those in members(table, table).items()}
    found = []
    counts = block_counts(servers, shares, len(table))
    for source, target, count in moves({o: len(b) for o, b in have.items()}, counts):
        have[source], moved = have[source][:-count], have[source][-count:]
        found.append((frozenset(moved), source, target))
    return found
