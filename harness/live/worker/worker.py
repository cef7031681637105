"""A worker: it pulls parameters, computes gradients, pushes them, and keeps its pushes until they are durable.

It has no state of training: each `Release` says which mini-batch to compute. In a job with embedding tables it pulls the
rows that this mini-batch looks up, and the dense ones, and pushes the gradients of the same rows.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
from msgspec.structs import replace

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in, members, runs_of, table_of
from harness.live.protocol.messages import (
    COORDINATOR,
    Array,
    EvaluationRequest,
    EvaluationResult,
    GradientDone,
    Head,
    Hello,
    LossProbed,
    Message,
    OwnerTable,
    ProbeLoss,
    Pull,
    Pulled,
    Redirect,
    Release,
    ResendPush,
    Rest,
    Send,
    StagePush,
    TableSeen,
    UnaskedBlocks,
    View,
)

__all__ = ["Computed", "RowsOf", "Start", "TaskKind", "Worker", "WorkerTask"]

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


@dataclass
class _Pulling:
    """A pull of the whole model, or of some rows, that is in progress."""

    number: int  # of the request
    kind: TaskKind
    of: int  # the cycle, or the number of the evaluation
    branch: int
    after: int
    bits: int
    rows: Array | None  # None: the whole model
    missing: Blocks
    parameters: Array
    begun_seconds: float
    asked_seconds: float
    patience_seconds: float
    index: int = 2**62  # all blocks that have arrived contain the log up to this entry
    asked: dict[int, str] = field(default_factory=dict)  # the server that was asked, by block


class _Push(NamedTuple):
    branch: int
    gradient: Array
    rows: Array | None  # None: of the whole model


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
        rows_of: RowsOf | None = None,
    ) -> None:
        """`rows_of` is for a layout with embedding tables."""
        self.name, self.generation, self.view = name, generation, 0
        self._layout, self._send, self._now, self._start = layout, send, now, start
        self._retry_seconds, self._rows_of = retry_seconds, rows_of
        self._rows: Array | None = None  # those of the pull that was completed last
        self._table: dict[int, str] = {}
        self._table_index = 0
        self._grouped_table: dict[int, str] = self._table
        self._all_owners: dict[str, Blocks] = {}  # all blocks of `_grouped_table`, by owner
        self._members: dict[str, int] = {}  # the lowest accepted generation, by process
        self.refused = 0  # messages of an older view or generation
        self._last_request = 0  # number of the last pull
        self._work: Release | None = None  # the last release
        self._done: GradientDone | None = None  # the result of its gradient
        self._done_is_final = False  # it lacks no loss before the push, so it can travel with the push
        self._pulling: _Pulling | None = None
        self._early: list[tuple[UnaskedBlocks, tuple[Array, ...]]] = []  # parameters that arrived before their release
        self._pulled = (0.0, 0)  # of the last pull: seconds, and entry of the log
        self._pushes: dict[int, _Push] = {}  # pushes that may have to be staged again, by cycle
        self._evaluations: list[EvaluationRequest] = []  # the first is in progress

    @property
    def kept(self) -> int:
        """How many pushes it keeps because they are not known to be durable."""
        return len(self._pushes)

    def hello(self) -> None:
        """Ask to join; may be repeated."""
        self._tell(COORDINATOR, Hello())

    def receive(self, sender: str, message: Message) -> None:
        """Handle one message."""
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
            case UnaskedBlocks():
                self._on_given(head, arrays)
            case Redirect():
                self._on_redirect(head)
            case OwnerTable():
                self._update_table(head.index, table_of(head.owners))
                self._tell(COORDINATOR, TableSeen(head.index))
            case ProbeLoss():
                if self._work is not None and head.cycle == self._work.cycle:
                    self._pull("after", self._work, head.after)
            case ResendPush():
                if head.cycle in self._pushes:
                    self._stage(head.cycle, self._layout.everything)
            case Rest():
                self._work = self._pulling = None
                self._evaluations.clear()
            case EvaluationRequest():
                if head not in self._evaluations:
                    self._evaluations.append(head)
                    if len(self._evaluations) == 1:  # otherwise it waits for those before it
                        self._evaluate_next()

    def tick(self) -> None:
        """Call this now and then: it asks again for blocks that have not arrived."""
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
        for cycle in [c for c in self._pushes if c <= head.durable]:
            del self._pushes[cycle]
        self._work, self._done, self._done_is_final = head, None, False
        self._pull("gradient", head, head.after, unasked=head.unasked)
        early, self._early = self._early, []
        for given, arrays in early:
            self._on_given(given, arrays)

    def computed(self, result: Computed) -> None:
        """A task has ended. Its result is ignored if its cycle was dropped meanwhile."""
        if result.kind == "evaluate":
            if self._evaluations and self._evaluations[0].number == result.number:
                del self._evaluations[0]
                self._tell(COORDINATOR, EvaluationResult(result.number, self._pulled[1], result.loss, result.accuracy))
                self._evaluate_next()
            return
        work = self._work
        if work is None or work.cycle != result.number:
            return
        if result.kind == "gradient" and result.gradient is not None:
            gradient = result.gradient.astype(np.float16) if work.bits == 16 else result.gradient
            self._pushes[work.cycle] = _Push(work.branch, gradient, self._rows)
            self._done = GradientDone(work.cycle, result.loss, self._pulled[0], result.seconds, self._pulled[1])
            self._done_is_final = not work.probes
            self._stage(work.cycle, self._layout.everything)
            if work.probes:
                self._pull("before", work, self._table_index)
        elif result.kind == "before" and self._done is not None:
            self._done, self._done_is_final = replace(self._done, loss_before=result.loss), True
            self._tell(COORDINATOR, self._done)
        elif result.kind == "after":
            self._tell(COORDINATOR, LossProbed(work.cycle, result.loss))

    def _evaluate_next(self) -> None:
        if self._evaluations and self._pulling is None:
            self._pull("evaluate", self._evaluations[0], self._evaluations[0].after)

    # -------------------------------------------------------------------------------------------------- its pulls and pushes

    def _pull(self, kind: TaskKind, of: Release | EvaluationRequest, after: int, *, unasked: bool = False) -> None:
        number, bits = (of.cycle, of.bits) if isinstance(of, Release) else (of.number, 32)
        self._last_request += 1
        # All blocks are asked for, also those of which no row is wanted: few different runs, which are cached.
        missing, size, rows, tables = self._layout.everything, self._layout.size, None, self._layout.tables
        if self._rows_of is not None and tables is not None:
            rows = self._rows_of(of if isinstance(of, Release) else None)
            size = len(rows) * tables.width
        made, now, wait = np.empty(size, np.float32), self._now(), self._retry_seconds
        pulling = _Pulling(self._last_request, kind, number, of.branch, after, bits, rows, missing, made, now, now, wait)
        self._pulling = pulling
        # Otherwise `tick` asks if they do not arrive.
        if not unasked:
            self._ask(pulling, pulling.missing)

    def _ask(self, pulling: _Pulling, blocks: Blocks) -> None:
        pulling.asked_seconds = self._now()
        for owner, those in self._owners(blocks).items():
            pulling.asked.update(dict.fromkeys(those, owner))
            # The owner must have applied the entry that made it the owner.
            after = max(pulling.after, self._table_index)
            runs = runs_of(those)
            rows = () if pulling.rows is None else (self._rows_in(pulling.rows, pulling.rows, runs),)
            self._tell(owner, Pull(pulling.number, pulling.branch, after, runs, pulling.bits), rows)

    def _rows_in(self, rows: Array, values: Array, runs: Runs) -> Array:
        """`values`, some of each of `rows`, for those of the rows that are in `runs`."""
        width = len(values) // max(len(rows), 1)
        parts = [values[at.start * width : at.stop * width] for at in self._layout.rows_in(rows, runs)]
        return parts[0] if len(parts) == 1 else np.concatenate(parts)

    def _owners(self, blocks: Blocks) -> dict[str, Blocks]:
        """Group some blocks by their owner."""
        # All blocks are asked for in every cycle, so that grouping is cached for each table.
        if len(blocks) < self._layout.count:
            return members(self._table, blocks)
        if self._grouped_table is not self._table:
            self._grouped_table, self._all_owners = self._table, members(self._table, blocks)
        return self._all_owners

    def _on_given(self, head: UnaskedBlocks, arrays: tuple[Array, ...]) -> None:
        pulling = self._pulling
        if self._work is None or head.cycle > self._work.cycle:
            self._early.append((head, arrays))
        elif pulling is not None and pulling.kind == "gradient" and head.cycle == pulling.of:
            self._take(pulling, head, arrays)

    def _take(self, pulling: _Pulling, head: Pulled | UnaskedBlocks, arrays: tuple[Array, ...]) -> None:
        # The whole model from one server: use its array without a copy.
        if pulling.rows is None and head.runs == ((0, self._layout.count),) and arrays[0].dtype == np.float32:
            pulling.parameters = arrays[0]
        elif pulling.rows is not None:
            self._take_rows(pulling, pulling.rows, head.runs, arrays[0])
        else:
            for run, array in zip(head.runs, arrays, strict=True):
                pulling.parameters[self._layout.span(run)] = array
        pulling.missing -= blocks_in(head.runs)
        pulling.index = min(pulling.index, head.index)
        if not pulling.missing:
            self._pulling = None
            if pulling.kind in ("gradient", "evaluate"):
                self._pulled = self._now() - pulling.begun_seconds, pulling.index
            work, self._rows = None if pulling.kind == "evaluate" else self._work, pulling.rows
            self._start(WorkerTask(pulling.kind, pulling.of, work, pulling.parameters, pulling.rows))

    def _take_rows(self, pulling: _Pulling, rows: Array, runs: Runs, values: Array) -> None:
        width, begin = len(pulling.parameters) // len(rows), 0
        for at in self._layout.rows_in(rows, runs):
            end = begin + (at.stop - at.start) * width
            pulling.parameters[at.start * width : at.stop * width] = values[begin:end]
            begin = end

    def _stage(self, cycle: int, blocks: Blocks) -> None:
        push = self._pushes[cycle]
        done = self._done if self._done_is_final and self._work is not None and self._work.cycle == cycle else None
        for owner, those in self._owners(blocks).items():
            runs = runs_of(those)
            if push.rows is None:
                arrays = tuple(push.gradient[self._layout.span(run)] for run in runs)
            else:
                arrays = tuple(self._rows_in(push.rows, values, runs) for values in (push.rows, push.gradient))
            self._tell(owner, StagePush(cycle, push.branch, self._table_index, runs, done), arrays)

    def _on_redirect(self, head: Redirect) -> None:
        blocks = blocks_in(head.runs)
        sent = self._update_table(head.index, table_of(head.owners))
        if head.push:
            # `_update_table` may have staged some blocks of the present push already.
            again = blocks - sent if self._work is not None and head.number == self._work.cycle else blocks
            if head.number in self._pushes:
                self._stage(head.number, again)
        elif self._pulling is not None and head.number == self._pulling.number:
            asked = self._pulling.asked
            self._ask(self._pulling, frozenset(b for b in blocks & self._pulling.missing if asked.get(b) != self._table[b]))

    def _update_table(self, index: int, table: dict[int, str]) -> Blocks:
        """Use a newer table. Old owners may be gone, so ask the new ones for the blocks that are missing. Returns the blocks
        of the present push that were staged again."""
        if index <= self._table_index:
            return frozenset()
        changed = frozenset(b for b, owner in table.items() if self._table[b] != owner)
        self._table, self._table_index = table, index
        pulling = self._pulling
        if pulling is not None:
            self._ask(pulling, frozenset(b for b in pulling.missing if pulling.asked.get(b, table[b]) != table[b]))
        if not changed or self._work is None or self._work.cycle not in self._pushes:
            return frozenset()
        self._stage(self._work.cycle, changed)
        return changed

    def _on_view(self, head: View) -> None:
        """Servers have gone back to a snapshot and dropped all staged pushes: stage all that are not durable again."""
        if head.number <= self.view:
            return
        self.view, self._members, self._early = head.number, head.members, []
        self._table, self._table_index = table_of(head.owners), head.index
        # In order, so that servers can apply the replayed log while later pushes still arrive.
        for cycle in sorted(self._pushes):
            self._stage(cycle, self._layout.everything)
        if self._pulling is not None:
            self._pull_again(self._pulling)

    def _pull_again(self, pulling: _Pulling) -> None:
        """Start a pull again: blocks that have arrived are of an older view."""
        self._last_request += 1
        pulling.number, pulling.missing, pulling.index = self._last_request, self._layout.everything, 2**62
        self._ask(pulling, pulling.missing)
