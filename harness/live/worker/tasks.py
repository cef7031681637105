"""What a worker's core lets its loop compute."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from harness.live.protocol.messages import Array, Release

__all__ = ["Computed", "RowsOf", "Start", "TaskKind", "WorkerTask"]

TaskKind: TypeAlias = Literal["gradient", "before", "after", "evaluate"]
"""gradient: loss and gradient of a mini-batch. before, after: its loss before and after its push. evaluate: loss and
accuracy on the validation data."""


class WorkerTask(NamedTuple):
    """Something to compute on a whole model, or on those of its rows that it looks up."""

    kind: TaskKind
    number: int  # the cycle, or the number of the evaluation
    work: Release | None  # says which mini-batch; None for the validation data
    parameters: Array  # [P] float32, or [rows * width]
    rows: Array | None = None  # their numbers, int32 and sorted; None: it is the whole model


class Computed(NamedTuple):
    """The result of a task."""

    number: int
    kind: TaskKind
    loss: float
    gradient: Array | None = None  # float32, as long as the parameters; read-only from now on
    accuracy: float = 0.0
    seconds: float = 0.0


RowsOf: TypeAlias = Callable[["Release | None"], Array]
"""The rows, int32 and sorted, that a mini-batch looks up (None: the validation data), and the dense ones."""

Start: TypeAlias = Callable[[WorkerTask], None]
"""Starts a task. Its result goes to `Worker.computed`, at once or later, on the thread that calls `receive`."""
