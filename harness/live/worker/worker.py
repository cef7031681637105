"""A worker: it pulls parameters, computes gradients, pushes them, and keeps its pushes until they are durable.

It has no state of training: each `Release` says which mini-batch to compute. In a job with embedding tables it pulls the
rows that this mini-batch looks up, and the dense ones, and pushes the gradients of the same rows.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable

import msgspec
import numpy as np
from msgspec.structs import replace

from harness.live.protocol.blocks import Blocks, Layout, Owners, blocks_in, runs_of
from harness.live.protocol.messages import (
    COORDINATOR,
    Array,
    BlocksAwaited,
    EvaluationRequest,
    EvaluationResult,
    GradientDone,
    Head,
    Hello,
    LossProbed,
    Message,
    OwnerTable,
    ProbeLoss,
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
from harness.live.protocol.outbox import Outbox
from harness.live.worker.pulling import Arrived, Pulling, rows_in
from harness.live.worker.tasks import Computed, RowsOf, Start, WorkerTask
from harness.live.worker.worker_table import WorkerTable

__all__ = ["Worker"]

_RELEASES = 8  # the last ones, of which the quickest tells how far the coordinator's clock is behind


class _Push(msgspec.Struct, frozen=True):
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
        rows_of: RowsOf | None = None,
    ) -> None:
        """`rows_of` is for a layout with embedding tables."""
        self.name, self.generation, self._outbox = name, generation, Outbox(send, generation)
        self._layout, self._start, self._now = layout, start, now
        self._table = WorkerTable(layout)
        self._pulling = Pulling(layout, self._table, self._outbox, now, rows_of)
        self._members: dict[str, int] = {}  # the lowest accepted generation, by process
        self.refused = 0  # messages of an older view or generation
        self._work: Release | None = None  # the cycle that it is in
        self._terms: Release | None = None  # the last release that the coordinator sent: later cycles may go by it
        self._ahead: deque[float] = deque(maxlen=_RELEASES)  # seconds of this clock over the coordinator's, by releases
        self._late = 0  # the cycle of which the coordinator was told that blocks are late
        self._done: GradientDone | None = None  # the result of its gradient
        self._done_is_final = False  # it lacks no loss before the push, so it can travel with the push
        self._early: list[tuple[UnaskedBlocks, tuple[Array, ...]]] = []  # parameters that arrived before their release
        self._pulled = (0.0, 0)  # of the last pull for a gradient or an evaluation: seconds, and entry of the log
        self._rows: Array | None = None  # those of the pull that was completed last
        self._pushes: dict[int, _Push] = {}  # pushes that may have to be staged again, by cycle
        self._evaluations: list[EvaluationRequest] = []  # the first is in progress

    @property
    def view(self) -> int:
        """The number of the present view."""
        return self._outbox.view

    @property
    def kept(self) -> int:
        """How many pushes it keeps because they are not known to be durable."""
        return len(self._pushes)

    def hello(self) -> None:
        """Ask to join; may be repeated."""
        self._outbox.tell(COORDINATOR, Hello())

    def receive(self, sender: str, message: Message) -> None:
        """Handle one message."""
        head = message.head
        if isinstance(head, View):
            self._on_view(head)
        elif message.view == self._outbox.view and message.generation >= self._members.get(sender, 0):
            self._handle(head, message.arrays)
        else:
            self.refused += 1

    def _handle(self, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case UnaskedBlocks():
                self._on_given(head, arrays)
            case Release():
                if self._work is None or head.cycle > self._work.cycle:
                    self._terms = head
                    self._ahead.append(self._now() - head.seconds)
                    self._begin(head)
            case Pulled():
                self._begin_task(self._pulling.answered(head, arrays))
            case Redirect():
                self._on_redirect(head)
            case OwnerTable():
                self._update_table(head.index, head.owners)
                self._outbox.tell(COORDINATOR, TableSeen(head.index))
            case ProbeLoss():
                if self._work is not None and head.cycle == self._work.cycle:
                    self._pulling.begin("after", self._work, head.after)
            case ResendPush():
                if head.cycle in self._pushes:
                    self._stage(head.cycle, self._layout.everything)
            case Rest():
                self._work = self._terms = None
                self._pulling.drop()
                self._evaluations.clear()
            case EvaluationRequest():
                if head not in self._evaluations:
                    self._evaluations.append(head)
                    if len(self._evaluations) == 1:  # otherwise it waits for those before it
                        self._evaluate_next()

    def tick(self) -> None:
        """Call this now and then: it asks again for blocks that have not arrived, and says so."""
        late = self._pulling.tick()
        if late and self._work is not None and self._pulling.kind != "evaluate":
            self._late = self._work.cycle
            self._outbox.tell(COORDINATOR, BlocksAwaited(self._late, runs_of(late)))

    # ------------------------------------------------------------------------------------------------------- one cycle

    def _begin(self, work: Release) -> None:
        while self._pushes and (oldest := next(iter(self._pushes))) <= work.durable:
            del self._pushes[oldest]
        self._work, self._done, self._done_is_final = work, None, False
        # Parameters that nobody asked for are on their way since the release, of which the worker may hear with them. Of a
        # message that was late by what its link carried before it, clocks look further apart than they are.
        released = work.seconds + min(self._ahead, default=math.inf) if work.unasked else math.inf
        self._pulling.begin("gradient", work, work.after, unasked=work.unasked, released_seconds=released)
        early, self._early = self._early, []
        for given, arrays in early:
            self._on_given(given, arrays)

    def computed(self, result: Computed) -> None:
        """A task has ended. Its result is ignored if its cycle was dropped meanwhile."""
        if result.kind == "evaluate":
            if self._evaluations and self._evaluations[0].number == result.number:
                del self._evaluations[0]
                self._outbox.tell(
                    COORDINATOR, EvaluationResult(result.number, self._pulled[1], result.loss, result.accuracy)
                )
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
                self._pulling.begin("before", work, self._table.index)
        elif result.kind == "before" and self._done is not None:
            self._done, self._done_is_final = replace(self._done, loss_before=result.loss), True
            self._outbox.tell(COORDINATOR, self._done)
        elif result.kind == "after":
            self._outbox.tell(COORDINATOR, LossProbed(work.cycle, result.loss))

    def _evaluate_next(self) -> None:
        if self._evaluations and self._pulling.kind is None:
            self._pulling.begin("evaluate", self._evaluations[0], self._evaluations[0].after)

    # -------------------------------------------------------------------------------------------------- its pulls and pushes

    def _on_given(self, head: UnaskedBlocks, arrays: tuple[Array, ...]) -> None:
        if self._work is None or head.cycle > self._work.cycle:
            terms = self._terms
            if terms is None or head.terms != terms.cycle:
                self._early.append((head, arrays))
                return
            self._begin(
                replace(terms, cycle=head.cycle, clock=head.clock, after=head.index, unasked=True, seconds=head.seconds)
            )
        self._begin_task(self._pulling.sent_unasked(head, arrays))

    def _begin_task(self, pull: Arrived | None) -> None:
        """Compute on what was pulled. None: blocks are missing."""
        if pull is None:
            return
        if self._late == pull.of and pull.kind != "evaluate":
            self._outbox.tell(COORDINATOR, BlocksAwaited(self._late, ()))
            self._late = 0
        if pull.kind in ("gradient", "evaluate"):
            self._pulled = self._now() - pull.begun_seconds, pull.entry
        work, self._rows = None if pull.kind == "evaluate" else self._work, pull.rows
        self._start(WorkerTask(pull.kind, pull.of, work, pull.parameters, pull.rows))

    def _stage(self, cycle: int, blocks: Blocks) -> None:
        push = self._pushes[cycle]
        done = self._done if self._done_is_final and self._work is not None and self._work.cycle == cycle else None
        for owner, those in self._table.group(blocks).items():
            runs = runs_of(those)
            if push.rows is None:
                arrays = tuple([push.gradient[self._layout.span(run)] for run in runs])
            else:
                arrays = tuple(rows_in(self._layout, push.rows, values, runs) for values in (push.rows, push.gradient))
            self._outbox.tell(owner, StagePush(cycle, push.branch, self._table.index, runs, done), arrays)

    def _on_redirect(self, head: Redirect) -> None:
        blocks = blocks_in(head.runs)
        sent = self._update_table(head.index, head.owners)
        if not head.push:
            self._pulling.redirected(head.number, blocks)
        elif head.number in self._pushes:
            # `_update_table` may have staged some blocks of the present push already.
            is_present = self._work is not None and head.number == self._work.cycle
            self._stage(head.number, blocks - sent if is_present else blocks)

    def _update_table(self, index: int, owners: Owners) -> Blocks:
        """Use a newer table. Returns the blocks of the present push that were staged again, because they have new owners."""
        changed = self._table.update(owners, index)
        if changed is None:
            return frozenset()
        self._pulling.ask_new_owners()
        if not changed or self._work is None or self._work.cycle not in self._pushes:
            return frozenset()
        self._stage(self._work.cycle, changed)
        return changed

    def _on_view(self, head: View) -> None:
        """Servers have gone back to a snapshot and dropped all staged pushes: stage all that are not durable again."""
        if head.number <= self.view:
            return
        self._ahead.clear()  # the coordinator may be another process, with another clock
        self._outbox.view, self._members, self._early = head.number, head.members, []
        self._table.reset(head.owners, head.index)
        # In order, so that servers can apply the replayed log while later pushes still arrive.
        for cycle in sorted(self._pushes):
            self._stage(cycle, self._layout.everything)
        self._pulling.begin_again()
