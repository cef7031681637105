"""What a server keeps: for every branch the parameters, the optimizer's slots and the sum of the group."""

from __future__ import annotations

import numpy as np

from harness.live.blocks import Layout, Runs
from harness.live.log import Commit
from harness.live.messages import Array, Held
from harness.live.pieces import Piece
from harness.live.server_optimizer import Rates, slots, step

__all__ = ["PARAMETERS", "Store"]

PARAMETERS = "parameters"
_GROUP = "group"


class Store:
    """Vectors as long as the model, of which only the server's own blocks are ever touched and take memory."""

    def __init__(self, layout: Layout, optimizer: str, aggregation: str) -> None:
        self._layout, self._optimizer, self._aggregation = layout, optimizer, aggregation
        self._slots = slots(optimizer)
        self.vectors = (PARAMETERS, *self._slots, *(() if aggregation == "each" else (_GROUP,)))
        self.branches: dict[int, dict[str, Array]] = {}

    def apply(self, commit: Commit, runs: Runs, pieces: list[tuple[tuple[int, int], Array]]) -> None:
        """A push takes effect on the blocks `runs`; `pieces` are its gradients, nothing where it is not accepted."""
        if self._aggregation == "each":
            if commit.take:
                for run, gradient in pieces:
                    self._step(commit, run, gradient)
            return
        group = self.branches[commit.branch][_GROUP]
        for run, gradient in pieces:
            part = group[self._layout.span(run)]
            part += gradient if self._aggregation == "sum" else np.float32(commit.weight) * gradient
        if commit.take:
            for run in runs:
                part = group[self._layout.span(run)]
                self._step(commit, run, part / np.float32(commit.grouped) if self._aggregation == "mean" else part)
                part[:] = 0

    def _step(self, commit: Commit, run: tuple[int, int], gradient: Array) -> None:
        span, vectors = self._layout.span(run), self.branches[commit.branch]
        kept = {name: vectors[name][span] for name in self._slots}
        rates = Rates(commit.learning_rate, commit.momentum, commit.steps)
        step(self._optimizer, vectors[PARAMETERS][span], kept, gradient, rates)

    def fork(self, branch: int, parent: int, runs: Runs) -> None:
        """These blocks of a branch are those of its parent."""
        of, made = self.branches[parent], self._branch(branch)
        for name in self.vectors:
            for run in runs:
                span = self._layout.span(run)
                made[name][span] = of[name][span]

    def copied(self, runs: Runs, branches: list[int]) -> Piece:
        """All that is kept of these blocks."""
        held = tuple(Held(branch, self.vectors) for branch in branches)
        spans = [self._layout.span(run) for run in runs]
        arrays = (self.branches[b][name][span].copy() for b in branches for name in self.vectors for span in spans)
        return Piece(runs, held, tuple(arrays))

    def parameters(self, branch: int, runs: Runs, dtype: str) -> tuple[Array, ...]:
        """A copy of the parameters of these blocks."""
        of = self.branches[branch][PARAMETERS]
        return tuple(of[self._layout.span(run)].astype(dtype) for run in runs)

    def install(self, piece: Piece) -> None:
        """Blocks come: what `copied` has given somewhere."""
        given = iter(piece.arrays)
        for branch, name in ((h.branch, name) for h in piece.held for name in h.vectors):
            vector = self._branch(branch)[name]
            for run in piece.runs:
                vector[self._layout.span(run)] = next(given)

    def _branch(self, branch: int) -> dict[str, Array]:
        if branch not in self.branches:
            self.branches[branch] = {name: np.zeros(self._layout.size, np.float32) for name in self.vectors}
        return self.branches[branch]
