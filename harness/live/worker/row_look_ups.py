"""Models with embedding tables as rows: which of them a mini-batch looks up, and how a vector of rows is the model."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.live.protocol.messages import Release
from simulators.engine.learning import TrainingData

__all__ = ["RowLookUps", "TablesAndRest"]


@dataclass(frozen=True)
class TablesAndRest:
    """Turns a vector of rows of embedding tables, any number of them, and of dense parameters into the model's pytree."""

    unravel: Any  # dense parameters [dense] -> pytree
    dense: int  # how many these are
    rest: int  # the same, filled up to whole rows
    width: int

    def __call__(self, flat: Any) -> Any:
        tables = len(flat) - self.rest
        rows = flat[:tables].reshape(-1, self.width)
        return self.unravel(flat[tables : tables + self.dense]) | {"rows": rows}


class RowLookUps:
    """The rows that samples look up. The dense parameters are rows, too, the last ones, and every mini-batch has them."""

    def __init__(self, data: TrainingData, size: int, model: TablesAndRest) -> None:
        """`size`: of the model, numbers."""
        self.width = model.width
        self.dense = model.rest // model.width  # rows
        self._train, self._valid = np.asarray(data.train[0]), np.asarray(data.valid[0])  # [n, look-ups]
        self._rows = size // model.width

    @property
    def per_sample(self) -> int:
        """Look-ups of one sample."""
        return int(self._train.shape[1])

    def of(self, work: Release | None) -> NDArray[np.int32]:
        """The rows of a mini-batch (None: of the validation data), each once and in order, and the dense ones."""
        if work is None:
            return self._validated
        at = (work.clock * work.samples + np.arange(work.samples)) % work.shard_length + work.shard_start
        return self._with_dense(self._train[np.minimum(at, len(self._train) - 1)])

    @cached_property
    def _validated(self) -> NDArray[np.int32]:
        return self._with_dense(self._valid)

    def _with_dense(self, rows: NDArray[np.int32]) -> NDArray[np.int32]:
        dense = np.arange(self._rows - self.dense, self._rows, dtype=np.int32)
        return np.concatenate([np.unique(rows), dense])
