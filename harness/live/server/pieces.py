"""Blocks of a model in arrays: the parts of a vector, snapshots, and pushes that wait for their commit."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple, TypeAlias

import numpy as np

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in, overlap, runs_of
from harness.live.protocol.messages import Array, BranchVectors, StagedPart

__all__ = ["Cuts", "Gradients", "Keeper", "Parts", "Piece", "PushPart", "RowParts", "Staging", "cut", "cut_rows"]

Cuts: TypeAlias = list[tuple[tuple[int, int], Array]]
"""Runs of blocks, each with its array."""


class PushPart(NamedTuple):
    """Part of a push: a run of blocks and its array; or any runs, with the numbers and the gradients of their rows."""

    runs: Runs
    arrays: tuple[Array, ...]


Gradients: TypeAlias = list[PushPart]
"""Parts of a push that have no block in common."""


def cut(layout: Layout, runs: Runs, arrays: tuple[Array, ...], blocks: Blocks) -> Cuts:
    """Select `blocks` from the arrays of `runs`, as views."""
    whole = blocks_in(runs)
    if blocks is whole or blocks == whole:  # the usual case, and the fastest
        return list(zip(runs, arrays, strict=True))
    made = []
    for i, first, end in overlap(runs, runs_of(blocks)):
        begin = layout.bounds[runs[i][0]]
        made.append(((first, end), arrays[i][layout.bounds[first] - begin : layout.bounds[end] - begin]))
    return made


def cut_rows(layout: Layout, runs: Runs, arrays: tuple[Array, ...], blocks: Blocks) -> tuple[Array, ...]:
    """Select the rows in `blocks` from those in `runs`: their numbers and, if there is a second array, [rows * width], what
    comes with them."""
    if blocks == blocks_in(runs):  # the usual case
        return arrays
    at = layout.rows_in(arrays[0], runs_of(blocks))
    widths = (len(array) // max(len(arrays[0]), 1) for array in arrays)
    return tuple(np.concatenate([a[s.start * w : s.stop * w] for s in at]) for a, w in zip(arrays, widths, strict=True))


class Parts:
    """Blocks of one vector, in arrays that are never written to, so that they can be sent and kept without a copy."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._arrays: dict[tuple[int, int], Array] = {}  # by run

    @property
    def blocks(self) -> Blocks:
        """The blocks that are here."""
        return blocks_in(tuple(self._arrays))

    def get(self, run: tuple[int, int]) -> Array:
        """The array of a run; concatenated if it is in several arrays."""
        if (found := self._arrays.get(run)) is not None:
            return found
        arrays = [array for _, array in self._cut(blocks_in((run,)))]
        return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)

    def put(self, run: tuple[int, int], array: Array) -> None:
        """Replace a run. The array is read-only from now on."""
        # The usual case replaces the same run; only a run with other bounds has to be cut out of its neighbours.
        if run not in self._arrays:
            self.drop(blocks_in((run,)))
        self._arrays[run] = array

    def drop(self, blocks: Blocks) -> None:
        """Remove these blocks."""
        self._arrays = dict(self._cut(self.blocks - blocks))

    def _cut(self, blocks: Blocks) -> Cuts:
        runs = tuple(sorted(self._arrays))
        return cut(self._layout, runs, tuple(self._arrays[run] for run in runs), blocks)


class RowParts:
    """Blocks of one vector with embedding tables. Steps change single rows in place, so whatever leaves is a copy. It is as
    long as the model, but takes memory only for the blocks that were ever here, which alone it touches."""

    def __init__(self, layout: Layout) -> None:
        self._layout, self.blocks = layout, frozenset[int]()
        self._vector = np.zeros(layout.size, np.float32)
        self._rows = self._vector.reshape(-1, layout.tables.width if layout.tables else 1)

    def get(self, run: tuple[int, int]) -> Array:
        """A copy of a run."""
        return self._vector[self._layout.span(run)].copy()

    def put(self, run: tuple[int, int], array: Array) -> None:
        """Replace a run, by a copy."""
        self._vector[self._layout.span(run)] = array
        self.blocks |= blocks_in((run,))

    def drop(self, blocks: Blocks) -> None:
        """Remove these blocks."""
        self.blocks -= blocks

    def look_up(self, rows: Array, made: Array) -> Array:
        """Copy these rows to `made`, [rows * width]."""
        np.take(self._rows, rows, axis=0, out=made.reshape(-1, self._rows.shape[1]), mode="clip")
        return made

    def change(self, rows: Array, values: Array) -> None:
        """Replace these rows."""
        self._rows[rows] = values.reshape(-1, self._rows.shape[1])


class Piece(NamedTuple):
    """All vectors of some blocks: for each vector of `held`, one array per run. The arrays never change."""

    runs: Runs
    held: tuple[BranchVectors, ...]
    arrays: tuple[Array, ...]

    def of(self, layout: Layout, blocks: Blocks) -> Piece:
        """The piece reduced to these blocks."""
        blocks = blocks & blocks_in(self.runs)
        runs, vectors, width = runs_of(blocks), sum(len(h.vectors) for h in self.held), len(self.runs)
        rows = (cut(layout, self.runs, self.arrays[v * width : (v + 1) * width], blocks) for v in range(vectors))
        return Piece(runs, self.held, tuple(array for row in rows for _, array in row))


class Keeper:
    """The copies that this process keeps of snapshots, by their index in the log."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._kept: dict[int, list[Piece]] = {}

    def put(self, index: int, piece: Piece) -> None:
        """Add a piece, without the blocks that are here already."""
        new = blocks_in(piece.runs) - self.blocks(index)
        if new:
            self._kept.setdefault(index, []).append(piece.of(self._layout, new))

    def blocks(self, index: int) -> Blocks:
        """The blocks of a snapshot that are kept here."""
        return frozenset().union(*(blocks_in(piece.runs) for piece in self._kept.get(index, ())))

    def pick(self, index: int, blocks: Blocks) -> Iterator[Piece]:
        """Those of these blocks of a snapshot that are kept here."""
        for piece in self._kept.get(index, ()):
            if blocks & blocks_in(piece.runs):
                yield piece.of(self._layout, blocks)

    def forget(self, before: int) -> None:
        """Drop the snapshots before that index."""
        for index in [i for i in self._kept if i < before]:
            del self._kept[index]

    def forget_after(self, index: int) -> None:
        """Drop the snapshots after that index."""
        for later in [i for i in self._kept if i > index]:
            del self._kept[later]


class Staging:
    """Pushes, or parts of them, that wait for their commit."""

    def __init__(self, layout: Layout) -> None:
        self._layout = layout
        self._pushes: dict[str, dict[int, tuple[Blocks, Gradients]]] = {}

    def blocks(self, worker: str, cycle: int) -> Blocks:
        """The blocks of a push that are staged here."""
        pushes = self._pushes.get(worker)
        return frozenset() if pushes is None or cycle not in pushes else pushes[cycle][0]

    def add(self, worker: str, cycle: int, runs: Runs, arrays: tuple[Array, ...], blocks: Blocks) -> None:
        """Stage `blocks` of a push from the arrays of `runs`, without those that are staged already."""
        pushes = self._pushes.setdefault(worker, {})
        if cycle not in pushes:
            pushes[cycle] = blocks, self._parts(runs, arrays, blocks)
            return
        have, pieces = pushes[cycle]
        new = blocks - have
        pushes[cycle] = have | new, pieces + self._parts(runs, arrays, new)

    def arrays_of(self, part: StagedPart) -> int:
        """How many arrays that part of a push has."""
        return len(part.runs) if self._layout.tables is None else 2

    def take(self, worker: str, cycle: int, blocks: Blocks) -> Gradients:
        """Remove and return these blocks of a push. Also removes what the worker staged in earlier cycles and gave up."""
        pushes = self._pushes.get(worker, {})
        if len(pushes) == 1 and cycle in pushes and pushes[cycle][0] is blocks:  # the usual case
            return pushes.pop(cycle)[1]
        taken: Gradients = []
        # A worker is in one cycle at a time, so pushes of earlier cycles will never be committed.
        for number in [n for n in pushes if n <= cycle]:
            pieces = self._remove(worker, number, blocks)
            taken = pieces if number == cycle else taken
        return taken

    def depart(self, blocks: Blocks) -> tuple[tuple[StagedPart, ...], tuple[Array, ...]]:
        """Remove and return all that is staged for these blocks, to send it to their new owner."""
        parts, arrays = list[StagedPart](), list[Array]()
        for worker, cycles in self._pushes.items():
            for cycle in list(cycles):
                pieces = sorted(self._remove(worker, cycle, blocks), key=lambda p: p.runs)
                # Adjacent blocks may be staged as separate arrays, so every array travels as a part of its own.
                for piece in pieces:
                    parts.append(StagedPart(worker, cycle, piece.runs))
                    arrays += piece.arrays
        return tuple(parts), tuple(arrays)

    def clear(self) -> None:
        """Remove everything."""
        self._pushes.clear()

    def _remove(self, worker: str, cycle: int, blocks: Blocks) -> Gradients:
        have, pieces = self._pushes[worker][cycle]
        if have is blocks or have <= blocks:
            del self._pushes[worker][cycle]
            return pieces
        self._pushes[worker][cycle] = have - blocks, [p for g in pieces for p in self._parts(*g, have - blocks)]
        return [p for g in pieces for p in self._parts(*g, blocks)]

    def _parts(self, runs: Runs, arrays: tuple[Array, ...], blocks: Blocks) -> Gradients:
        """These blocks of a push."""
        if self._layout.tables is None:
            if len(runs) == 1 and blocks is blocks_in(runs):  # the usual case
                return [PushPart(runs, arrays)]
            return [PushPart((run,), (array,)) for run, array in cut(self._layout, runs, arrays, blocks)]
        kept = blocks & blocks_in(runs)
        return [PushPart(runs_of(kept), cut_rows(self._layout, runs, arrays, kept))] if kept else []
