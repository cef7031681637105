"""A worker: pulls, computes gradients, pushes; keeps its pushes until they cannot be lost any more.

It holds no state of training: which mini-batch it computes comes with each `Release`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, NamedTuple, TypeAlias

from harness.live.blocks import Layout
from harness.live.messages import Array, Message, Release, Send

__all__ = ["Computed", "Start", "Task", "Worker"]


class Task(NamedTuple):
    """Something to compute on a whole model."""

    kind: Literal["gradient", "loss", "evaluate"]
    number: int  # the cycle, or the number of the evaluation
    work: Release | None  # which mini-batch; None for the validation set
    parameters: Array  # [P] float32


class Computed(NamedTuple):
    """What came of a task."""

    number: int
    kind: Literal["gradient", "loss", "evaluate"]
    loss: float
    gradient: Array | None = None  # [P] float32; not to be written to from now on
    accuracy: float = 0.0
    seconds: float = 0.0


Start: TypeAlias = Callable[[Task], None]
"""Begins to compute. Whoever does calls `Worker.computed`, at once or later, from the thread that calls `receive`."""


class Worker:
    """The core of a worker process, or of an evaluator, without sockets, threads or a clock of its own."""

    def __init__(
        self, name: str, generation: int, layout: Layout, send: Send, now: Callable[[], float], start: Start
    ) -> None:
        self.name, self.generation, self.layout = name, generation, layout
        self.send, self.now, self.start = send, now, start

    def hello(self) -> None:
        """Ask to be admitted; again as often as one likes."""

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in."""

    def computed(self, result: Computed) -> None:
        """A task has ended; it may be one that nobody waits for any longer."""

    def tick(self) -> None:
        """Now and then: ask again for what has not come."""
