"""A worker: pulls, computes gradients, pushes; keeps its pushes until they cannot be lost any more.

It holds no state of training: which mini-batch it computes comes with each `Release`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from harness.live.protocol.blocks import Blocks, Layout, blocks_in, members, runs_of, table_of
from harness.live.protocol.messages import (
    COORDINATOR,
    Again,
    Array,
    Done,
    Given,
    Head,
    Hello,
    Measure,
    Measured,
    Message,
    Probe,
    Probed,
    Pull,
    Pulled,
    Redirect,
    Release,
    Rest,
    Seen,
    Send,
    Stage,
    Table,
    View,
)

__all__ = ["Computed", "Kind", "Start", "Task", "Worker"]

Kind: TypeAlias = Literal["gradient", "before", "after", "evaluate"]
"""Of a mini-batch, loss and gradient, or the loss alone before or after its push; of validation data, loss and accuracy."""


class Task(NamedTuple):
    """Something to compute on a whole model."""

    kind: Kind
    number: int  # the cycle, or the number of the evaluation
    work: Release | None  # which mini-batch; None for the validation set
    parameters: Array  # [P] float32


class Computed(NamedTuple):
    """What came of a task."""

    number: int
    kind: Kind
    loss: float
    gradient: Array | None = None  # [P] float32; not to be written to from now on
    accuracy: float = 0.0
    seconds: float = 0.0


Start: TypeAlias = Callable[[Task], None]
"""Begins to compute. Whoever does calls `Worker.computed`, at once or later, from the thread that calls `receive`."""


@dataclass
class _Pulling:
    """A whole model on its way here."""

    number: int
    kind: Kind
    of: int  # the cycle, or the number of the evaluation
    branch: int
    after: int
    bits: int
    missing: Blocks
    parameters: Array
    begun_seconds: float
    asked_seconds: float
    patience_seconds: float
    index: int = 2**62
    asked: dict[int, str] = field(default_factory=dict)  # block to server


class _Push(NamedTuple):
    branch: int
    gradient: Array


class Worker:
    """The core of a worker process, or of an evaluator, without sockets, threads or a clock of its own."""

    def __init__(
        self,
        name: str,
        generation: int,
        layout: Layout,
        send: Send,
        now: Callable[[], float],
        start: Start,
        retry_seconds: float = 2.0,
    ) -> None:
        self.name, self.generation, self.view = name, generation, 0
        self._layout, self._send, self._now, self._start = layout, send, now, start
        self._retry_seconds = retry_seconds
        self._table: dict[int, str] = {}
        self._table_index = 0
        self._of_table: dict[int, str] = self._table
        self._all_owners: dict[str, Blocks] = {}  # of that table
        self._members: dict[str, int] = {}  # the least generation that is listened to
        self.refused = 0  # messages of the past
        self._numbers = 0
        self._work: Release | None = None  # what it was released for last
        self._done: Done | None = None  # what came of it,
        self._told = False  # and whether that is all, and goes with the push
        self._pulling: _Pulling | None = None
        self._early: list[tuple[Given, tuple[Array, ...]]] = []  # came before their release
        self._pulled = (0.0, 0)  # seconds of the cycle's pull, and its index
        self._kept: dict[int, _Push] = {}  # pushes, by cycle
        self._measures: list[Measure] = []

    def hello(self) -> None:
        """Ask to be admitted; again as often as one likes."""
        self._tell(COORDINATOR, Hello())

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in."""
        head = message.head
        if isinstance(head, View):
            self._on_view(head)
        elif message.view == self.view and message.generation >= self._members.get(sender, 0):
            self._handle(head, message.arrays)
        else:
            self.refused += 1

    def _handle(self, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case Release():
                self._on_release(head)
            case Pulled():
                if self._pulling is not None and head.number == self._pulling.number:
                    self._take(self._pulling, head, arrays)
            case Given():
                self._on_given(head, arrays)
            case Redirect():
                self._on_redirect(head)
            case Table():
                self._learn(head.index, table_of(head.owners))
                self._tell(COORDINATOR, Seen(head.index))
            case Probe():
                if self._work is not None and head.cycle == self._work.cycle:
                    self._pull("after", self._work, head.after)
            case Again():
                if head.cycle in self._kept:
                    self._stage(head.cycle, self._layout.everything)
            case Rest():
                self._work = self._pulling = None
                self._measures.clear()
            case Measure():
                if head not in self._measures:
                    self._measures.append(head)
                    if len(self._measures) == 1:  # else it comes when those before it are done
                        self._measure()

    def tick(self) -> None:
        """Now and then: ask again for what has not come."""
        pulling = self._pulling
        if pulling is not None and self._now() - pulling.asked_seconds > pulling.patience_seconds:
            pulling.patience_seconds *= 2
            self._ask(pulling, pulling.missing)

    def _tell(self, receiver: str, head: Head, arrays: tuple[Array, ...] = ()) -> None:
        self._send(receiver, Message(head, arrays, self.view, self.generation))

    # ------------------------------------------------------------------------------------------------------- one cycle

    def _on_release(self, head: Release) -> None:
        if self._work is not None and head.cycle <= self._work.cycle:
            return
        for cycle in [c for c in self._kept if c <= head.durable]:
            del self._kept[cycle]
        self._work, self._done, self._told = head, None, False
        self._pull("gradient", head, head.after, given=head.given)
        early, self._early = self._early, []
        for given, arrays in early:
            self._on_given(given, arrays)

    def computed(self, result: Computed) -> None:
        """A task has ended; it may be one that nobody waits for any longer."""
        if result.kind == "evaluate":
            if self._measures and self._measures[0].number == result.number:
                del self._measures[0]
                self._tell(COORDINATOR, Measured(result.number, self._pulled[1], result.loss, result.accuracy))
                self._measure()
            return
        work = self._work
        if work is None or work.cycle != result.number:
            return
        if result.kind == "gradient" and result.gradient is not None:
            gradient = result.gradient.astype(np.float16) if work.bits == 16 else result.gradient
            self._kept[work.cycle] = _Push(work.branch, gradient)
            self._done = Done(work.cycle, result.loss, self._pulled[0], result.seconds, self._pulled[1])
            self._told = not work.probes
            self._stage(work.cycle, self._layout.everything)
            if work.probes:
                self._pull("before", work, self._table_index)
        elif result.kind == "before" and self._done is not None:
            self._done, self._told = replace(self._done, loss_before=result.loss), True
            self._tell(COORDINATOR, self._done)
        elif result.kind == "after":
            self._tell(COORDINATOR, Probed(work.cycle, result.loss))

    def _measure(self) -> None:
        if self._measures and self._pulling is None:
            self._pull("evaluate", self._measures[0], self._measures[0].after)

    # ----------------------------------------------------------------------------------------------------- its requests

    def _pull(self, kind: Kind, of: Release | Measure, after: int, *, given: bool = False) -> None:
        number, bits = (of.cycle, of.bits) if isinstance(of, Release) else (of.number, 32)
        self._numbers += 1
        missing, now = self._layout.everything, self._now()
        whole, wait = np.empty(self._layout.size, np.float32), self._retry_seconds
        pulling = _Pulling(self._numbers, kind, number, of.branch, after, bits, missing, whole, now, now, wait)
        self._pulling = pulling
        if not given:
            self._ask(pulling, pulling.missing)

    def _ask(self, pulling: _Pulling, blocks: Blocks) -> None:
        pulling.asked_seconds = self._now()
        for owner, those in self._owners(blocks).items():
            pulling.asked.update(dict.fromkeys(those, owner))
            after = max(pulling.after, self._table_index)
            self._tell(owner, Pull(pulling.number, pulling.branch, after, runs_of(those), pulling.bits))

    def _owners(self, blocks: Blocks) -> dict[str, Blocks]:
        """Who has which of these blocks."""
        if len(blocks) < self._layout.count:
            return members(self._table, blocks)
        if self._of_table is not self._table:
            self._of_table, self._all_owners = self._table, members(self._table, blocks)
        return self._all_owners

    def _on_given(self, head: Given, arrays: tuple[Array, ...]) -> None:
        pulling = self._pulling
        if self._work is None or head.cycle > self._work.cycle:
            self._early.append((head, arrays))
        elif pulling is not None and pulling.kind == "gradient" and head.cycle == pulling.of:
            self._take(pulling, head, arrays)

    def _take(self, pulling: _Pulling, head: Pulled | Given, arrays: tuple[Array, ...]) -> None:
        if head.runs == ((0, self._layout.count),) and arrays[0].dtype == np.float32:
            pulling.parameters = arrays[0]
        else:
            for run, array in zip(head.runs, arrays, strict=True):
                pulling.parameters[self._layout.span(run)] = array
        pulling.missing -= blocks_in(head.runs)
        pulling.index = min(pulling.index, head.index)
        if not pulling.missing:
            self._pulling = None
            if pulling.kind in ("gradient", "evaluate"):
                self._pulled = self._now() - pulling.begun_seconds, pulling.index
            work = None if pulling.kind == "evaluate" else self._work
            self._start(Task(pulling.kind, pulling.of, work, pulling.parameters))

    def _stage(self, cycle: int, blocks: Blocks) -> None:
        push = self._kept[cycle]
        done = self._done if self._told and self._work is not None and self._work.cycle == cycle else None
        for owner, those in self._owners(blocks).items():
            runs = runs_of(those)
            arrays = tuple(push.gradient[self._layout.span(run)] for run in runs)
            self._tell(owner, Stage(cycle, push.branch, self._table_index, runs, done), arrays)

    def _on_redirect(self, head: Redirect) -> None:
        blocks = blocks_in(head.runs)
        sent = self._learn(head.index, table_of(head.owners))
        if head.push:
            again = blocks - sent if self._work is not None and head.number == self._work.cycle else blocks
            if head.number in self._kept:
                self._stage(head.number, again)
        elif self._pulling is not None and head.number == self._pulling.number:
            asked = self._pulling.asked
            self._ask(self._pulling, frozenset(b for b in blocks & self._pulling.missing if asked.get(b) != self._table[b]))

    def _learn(self, index: int, table: dict[int, str]) -> Blocks:
        """A newer table: what was asked of former owners, who may be gone, is asked of the new ones; the blocks of the
        present push that were sent again."""
        if index <= self._table_index:
            return frozenset()
        changed = frozenset(b for b, owner in table.items() if self._table[b] != owner)
        self._table, self._table_index = table, index
        pulling = self._pulling
        if pulling is not None:
            self._ask(pulling, frozenset(b for b in pulling.missing if pulling.asked.get(b, table[b]) != table[b]))
        if not changed or self._work is None or self._work.cycle not in self._kept:
            return frozenset()
        self._stage(self._work.cycle, changed)
        return changed

    def _on_view(self, head: View) -> None:
        """Servers have gone back: what they had from here, and may not have any more, is sent again."""
        if head.number <= self.view:
            return
        self.view, self._members, self._early = head.number, head.members, []
        self._table, self._table_index = table_of(head.owners), head.index
        for cycle in sorted(self._kept):
            self._stage(cycle, self._layout.everything)
        if self._pulling is not None:
            self._pull_again(self._pulling)

    def _pull_again(self, pulling: _Pulling) -> None:
        """From the beginning: what has come is of the past."""
        self._numbers += 1
        pulling.number, pulling.missing, pulling.index = self._numbers, self._layout.everything, 2**62
        self._ask(pulling, pulling.missing)
