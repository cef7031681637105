"""Parts of a model in arrays: copies of blocks, snapshots made of them, and pushes that wait for their commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in, overlap, runs_of
from harness.live.protocol.messages import Array, Held, Part

__all__ = ["Gradients", "Keeper", "Parts", "Piece", "Staging", "cut"]

Gradients: TypeAlias = list[tuple[tuple[int, int], Array]]
"""Runs of blocks with the numbers for them."""


def cut(layout: Layout, runs: Runs, arrays: tuple[Array, ...], blocks: Blocks) -> Gradients:
    """What there is of `blocks` in arrays for `runs`; views."""
    if blocks == blocks_in(runs):
        return list(zip(runs, arrays, strict=True))
    made = []
    for i, first, end in overlap(runs, runs_of(blocks)):
        begin = layout.bounds[runs[i][0]]
        made.append(((first, end), arrays[i][layout.bounds[first] - begin : layout.bounds[end] - begin]))
    return made


class Parts:
    """Blocks of one vector, in arrays that are never written to: they can be sent, kept and shared without a copy."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._arrays: dict[tuple[int, int], Array] = {}  # by run

    @property
    def blocks(self) -> Blocks:
        """Those that there are."""
        return blocks_in(tuple(self._arrays))

    def get(self, run: tuple[int, int]) -> Array:
        """A run, joined where it lies in several arrays."""
        if run in self._arrays:
            return self._arrays[run]
        arrays = [array for _, array in self._cut(blocks_in((run,)))]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def put(self, run: tuple[int, int], array: Array) -> None:
        """In the place of what there was of that run; not to be written to from now on."""
        if run not in self._arrays:
            self.drop(blocks_in((run,)))
        self._arrays[run] = array

    def drop(self, blocks: Blocks) -> None:
        """Forget these blocks."""
        self._arrays = dict(self._cut(self.blocks - blocks))

    def _cut(self, blocks: Blocks) -> Gradients:
        runs = tuple(sorted(self._arrays))
        return cut(self._layout, runs, tuple(self._arrays[run] for run in runs), blocks)


class Piece(NamedTuple):
    """Everything that is kept of some blocks; for each vector of `held`, one array per run. Its arrays never change."""

    runs: Runs
    held: tuple[Held, ...]
    arrays: tuple[Array, ...]

    def of(self, layout: Layout, blocks: Blocks) -> Piece:
        """Of these blocks only."""
        blocks = blocks & blocks_in(self.runs)
        runs, vectors, width = runs_of(blocks), sum(len(h.vectors) for h in self.held), len(self.runs)
        rows = (cut(layout, self.runs, self.arrays[v * width : (v + 1) * width], blocks) for v in range(vectors))
        return Piece(runs, self.held, tuple(array for row in rows for _, array in row))


class Keeper:
    """Snapshots, by the log's index, as far as this peer keeps them."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: dict[int, list[Piece]] = {}

    def put(self, index: int, piece: Piece) -> None:
        """One part more; what is there already is left out."""
        new = blocks_in(piece.runs) - self.blocks(index)
        if new:
            self._kept.setdefault(index, []).append(piece.of(self._layout, new))

    def blocks(self, index: int) -> Blocks:
        """Which blocks of a snapshot are kept here."""
        return frozenset().union(*(blocks_in(piece.runs) for piece in self._kept.get(index, ())))

    def pick(self, index: int, blocks: Blocks) -> Iterator[Piece]:
        """These blocks of a snapshot, as far as they are here."""
        for piece in self._kept.get(index, ()):
            if blocks & blocks_in(piece.runs):
                yield piece.of(self._layout, blocks)

    def forget(self, before: int) -> None:
        """Drop the snapshots older than that at `before`."""
        for index in [i for i in self._kept if i < before]:
            del self._kept[index]

    def forget_after(self, index: int) -> None:
        """Drop the snapshots younger than that at `index`."""
        for later in [i for i in self._kept if i > index]:
            del self._kept[later]


class Staging:
    """Pushes, or parts of them, that wait for their commit."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pushes: dict[str, dict[int, tuple[Blocks, Gradients]]] = {}

    def blocks(self, worker: str, cycle: int) -> Blocks:
        """Which blocks of a push have come."""
        return self._pushes.get(worker, {}).get(cycle, (frozenset(), []))[0]

    def add(self, worker: str, cycle: int, runs: Runs, arrays: tuple[Array, ...], blocks: Blocks) -> None:
        """`blocks` of a push in arrays for `runs`; those that have come before are left out."""
        have, pieces = self._pushes.setdefault(worker, {}).get(cycle, (frozenset[int](), []))
        new = blocks - have
        self._pushes[worker][cycle] = have | new, pieces + cut(self._layout, runs, arrays, new)

    def take(self, worker: str, cycle: int, blocks: Blocks) -> Gradients:
        """Remove these blocks of a push, and of what the worker had staged before it and given up."""
        taken: Gradients = []
        for number in [n for n in self._pushes.get(worker, ()) if n <= cycle]:
            pieces = self._remove(worker, number, blocks)
            taken = pieces if number == cycle else taken
        return taken

    def depart(self, blocks: Blocks) -> tuple[tuple[Part, ...], tuple[Array, ...]]:
        """Remove all that is staged for these blocks, to be sent away."""
        parts, arrays = [], []
        for worker, cycles in self._pushes.items():
            for cycle in list(cycles):
                pieces = sorted(self._remove(worker, cycle, blocks), key=lambda p: p[0])
                # Neighbours may have come apart; every one travels as a part of its own.
                for run, array in pieces:
                    parts.append(Part(worker, cycle, (run,)))
                    arrays.append(array)
        return tuple(parts), tuple(arrays)

    def clear(self) -> None:
        """Forget everything."""
        self._pushes.clear()

    def _remove(self, worker: str, cycle: int, blocks: Blocks) -> Gradients:
        have, pieces = self._pushes[worker][cycle]
        if have <= blocks:
            del self._pushes[worker][cycle]
            return pieces
        self._pushes[worker][cycle] = have - blocks, [p for g in pieces for p in self._cut(g, have - blocks)]
        return [p for g in pieces for p in self._cut(g, blocks)]

    def _cut(self, piece: tuple[tuple[int, int], Array], blocks: Blocks) -> Gradients:
        return cut(self._layout, (piece[0],), (piece[1],), blocks)
