"""A server's storage: for every branch the parameters, the optimizer's slots and the sum of the open group."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in
from harness.live.protocol.log import CommitEntry
from harness.live.protocol.messages import Array, BranchVectors
from harness.live.server.optimizer import Rates, slots, step
from harness.live.server.pieces import Gradients, Parts, Piece, RowParts

__all__ = ["PARAMETERS", "Store"]

PARAMETERS = "parameters"
_GROUP = "group"


@dataclass
class _Branch:
    """Every step makes a new array of parameters, because the old one may still be in transfer to workers; of embedding
    tables, it changes the rows that are touched. All other vectors are changed in place. They are as long as the model, but
    take memory only for the server's own blocks, which alone it touches."""

    parameters: Parts | RowParts
    others: dict[str, Array]


def _empty(size: int) -> Array:
    return np.empty(size, np.float32)


def _rates(commit: CommitEntry) -> Rates:
    return Rates(commit.learning_rate, commit.momentum, commit.steps)


class Store:
    """The server's blocks, for every branch."""

    def __init__(self, layout: Layout, optimizer: str, aggregation: str, empty: Callable[[int], Array] = _empty) -> None:
        """`empty` allocates the arrays of parameters."""
        self._layout, self._optimizer, self._aggregation, self._empty = layout, optimizer, aggregation, empty
        self._slots = slots(optimizer)
        self.vectors = (PARAMETERS, *self._slots, *(() if aggregation == "each" else (_GROUP,)))
        self.branches: dict[int, _Branch] = {}

    def apply(self, commit: CommitEntry, runs: Runs, pieces: Gradients) -> None:
        """Apply a push to the blocks `runs`. `pieces` are its gradients; none if it is not accepted."""
        if self._aggregation == "each":
            if commit.take:
                # The runs in which the gradient came, which need not be those of the blocks here.
                for piece in pieces:
                    if isinstance(table := self.branches[commit.branch].parameters, RowParts):
                        self._step_rows(commit, table, *piece.arrays)
                    else:
                        self._step(commit, piece.runs[0], *piece.arrays)
            return
        group = self.branches[commit.branch].others[_GROUP]
        for (run,), (gradient,) in pieces:
            part = group[self._layout.span(run)]
            part += gradient if self._aggregation == "sum" else np.float32(commit.weight) * gradient
        if commit.take:
            for run in runs:
                part = group[self._layout.span(run)]
                # Every run of the cohort, also where the last gradient was not accepted.
                self._step(commit, run, part / np.float32(commit.grouped) if self._aggregation == "mean" else part)
                part[:] = 0

    def _step(self, commit: CommitEntry, run: tuple[int, int], gradient: Array) -> None:
        branch, kept = self.branches[commit.branch], dict[str, Array]()
        if self._slots:
            span = self._layout.span(run)
            kept = {name: branch.others[name][span] for name in self._slots}
        # A new array from the transport: it may be in shared memory already, and is then sent without a copy.
        before, made = branch.parameters.get(run), self._empty(len(gradient))
        branch.parameters.put(run, step(self._optimizer, before, kept, gradient, _rates(commit), made))

    def _step_rows(self, commit: CommitEntry, table: RowParts, rows: Array, gradient: Array) -> None:
        """Step the rows that a push touches, and no others."""
        before, made = np.empty(len(gradient), np.float32), np.empty(len(gradient), np.float32)
        table.change(rows, step(self._optimizer, table.look_up(rows, before), {}, gradient, _rates(commit), made))

    def fork(self, branch: int, parent: int, runs: Runs) -> None:
        """Copy these blocks from the parent to a new branch."""
        self._put(branch, runs, self.vectors, self._arrays(parent, runs))

    def copied(self, runs: Runs, branches: list[int]) -> Piece:
        """All vectors of these blocks in these branches, except branches whose fork these blocks have not reached yet."""
        # A block that has just arrived may lag behind the fork; it gets the branch when it applies that entry.
        begun = [b for b in branches if blocks_in(runs) <= self.branches[b].parameters.blocks]
        held = tuple(BranchVectors(branch, self.vectors) for branch in begun)
        return Piece(runs, held, tuple(a for b in begun for a in self._arrays(b, runs)))

    def parameters(self, branch: int, runs: Runs, dtype: str) -> tuple[Array, ...]:
        """The parameters of these blocks now; later steps do not change the arrays."""
        parts = self.branches[branch].parameters
        if dtype == "float32":  # as they are kept
            return tuple(map(parts.get, runs))
        return tuple([parts.get(run).astype(dtype) for run in runs])

    def rows(self, branch: int, rows: Array, dtype: str) -> Array:
        """The parameters of these rows now, [rows * width]; later steps do not change the array."""
        table, width = self.branches[branch].parameters, 1 if self._layout.tables is None else self._layout.tables.width
        if not isinstance(table, RowParts):
            raise TypeError("Cannot look up rows: this model has no embedding tables.")
        return table.look_up(rows, self._empty(len(rows) * width)).astype(dtype, copy=False)

    def install(self, piece: Piece) -> None:
        """Add blocks, from the result of `copied` elsewhere."""
        given = iter(piece.arrays)
        for held in piece.held:
            self._put(held.branch, piece.runs, held.vectors, given)

    def drop(self, blocks: Blocks) -> None:
        """Remove blocks."""
        for branch in self.branches.values():
            branch.parameters.drop(blocks)

    def _arrays(self, branch: int, runs: Runs) -> Iterator[Array]:
        """For each vector, one array per run; a copy if the vector changes in place."""
        of = self.branches[branch]
        for name in self.vectors:
            for run in runs:
                yield of.parameters.get(run) if name == PARAMETERS else of.others[name][self._layout.span(run)].copy()

    def _put(self, branch: int, runs: Runs, vectors: tuple[str, ...], arrays: Iterator[Array]) -> None:
        if branch not in self.branches:
            others = {name: np.zeros(self._layout.size, np.float32) for name in self.vectors if name != PARAMETERS}
            parts = Parts(self._layout) if self._layout.tables is None else RowParts(self._layout)
            self.branches[branch] = _Branch(parts, others)
        of = self.branches[branch]
        for name in vectors:
            for run in runs:
                if name == PARAMETERS:
                    of.parameters.put(run, next(arrays))
                else:
                    of.others[name][self._layout.span(run)] = next(arrays)
