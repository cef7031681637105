"""A worker's pull of the whole model, or of some rows of embedding tables: from the first question to the last block."""

from __future__ import annotations

import math
from collections.abc import Callable

import msgspec
import numpy as np

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in, runs_of, without
from harness.live.protocol.messages import Array, EvaluationRequest, Pull, Pulled, Release, UnaskedBlocks
from harness.live.protocol.outbox import Outbox
from harness.live.worker.tasks import RowsOf, TaskKind
from harness.live.worker.worker_table import WorkerTable

__all__ = ["Arrived", "Pulling", "rows_in"]

_RETRY_SECONDS = 2.0  # after which blocks that have not arrived are asked for again


class _InProgress(msgspec.Struct):
    """A pull that is in progress."""

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
    asked: dict[int, str] = msgspec.field(default_factory=dict)  # the server that was asked, by block


class Arrived(msgspec.Struct, frozen=True):
    """A pull that is complete."""

    kind: TaskKind
    of: int  # the cycle, or the number of the evaluation
    parameters: Array  # [P] float32, or [rows * width]
    rows: Array | None  # their numbers; None: it is the whole model
    entry: int  # of the log; all blocks contain it, and those before
    begun_seconds: float


class Pulling:
    """At most one pull at a time; what it was for is over when another one begins."""

    def __init__(
        self,
        layout: Layout,
        table: WorkerTable,
        outbox: Outbox,
        now: Callable[[], float],
        rows_of: RowsOf | None,
    ) -> None:
        """`rows_of` is for a layout with embedding tables."""
        self._layout, self._table, self._outbox, self._now, self._rows_of = layout, table, outbox, now, rows_of
        self._last = 0  # number of the last request
        self._pull: _InProgress | None = None

    @property
    def kind(self) -> TaskKind | None:
        """What is pulled for; None: no pull is in progress."""
        return None if self._pull is None else self._pull.kind

    def begin(
        self,
        kind: TaskKind,
        of: Release | EvaluationRequest,
        after: int,
        *,
        unasked: bool = False,
        released_seconds: float = math.inf,
    ) -> None:
        """Pull as of entry `after` of the log or later. `unasked`: servers send the blocks without being asked, as soon as
        the worker is released, at `released_seconds` if that is past."""
        number, bits = (of.cycle, of.bits) if isinstance(of, Release) else (of.number, 32)
        self._last += 1
        # All blocks are asked for, also those of which no row is wanted: few different runs, which are cached.
        missing, size, rows, tables = self._layout.everything, self._layout.size, None, self._layout.tables
        if self._rows_of is not None and tables is not None:
            rows = self._rows_of(of if isinstance(of, Release) else None)
            size = len(rows) * tables.width
        made, now, wait = np.empty(size, np.float32), self._now(), _RETRY_SECONDS
        begun = min(now, released_seconds)
        self._pull = _InProgress(self._last, kind, number, of.branch, after, bits, rows, missing, made, begun, now, wait)
        # Otherwise `tick` asks if they do not arrive.
        if not unasked:
            self._ask(self._pull, missing)

    def drop(self) -> None:
        """Give up the pull in progress."""
        self._pull = None

    def begin_again(self) -> None:
        """A view has begun: blocks that have arrived are of an older one."""
        if (pull := self._pull) is not None:
            self._last += 1
            pull.number, pull.missing, pull.index = self._last, self._layout.everything, 2**62
            self._ask(pull, pull.missing)

    # --------------------------------------------------------------------------------------------------------- questions

    def _ask(self, pull: _InProgress, blocks: Blocks) -> None:
        pull.asked_seconds = self._now()
        for owner, those in self._table.group(blocks).items():
            pull.asked.update(dict.fromkeys(those, owner))
            # The owner must have applied the entry that made it the owner.
            after = max(pull.after, self._table.index)
            runs = runs_of(those)
            rows = () if pull.rows is None else (rows_in(self._layout, pull.rows, pull.rows, runs),)
            self._outbox.tell(owner, Pull(pull.number, pull.branch, after, runs, pull.bits), rows)

    def ask_new_owners(self) -> None:
        """Owners have changed, and the old ones may be gone: ask the new ones for the blocks that are missing."""
        if self._pull is not None:
            self._ask_others(self._pull, self._pull.missing)

    def redirected(self, number: int, blocks: Blocks) -> None:
        """A server does not own blocks that request `number` asked it for."""
        if self._pull is not None and number == self._pull.number:
            self._ask_others(self._pull, self._pull.missing & blocks)

    def _ask_others(self, pull: _InProgress, blocks: Blocks) -> None:
        owners = self._table.owners
        # Blocks that nobody was asked for come unasked.
        self._ask(pull, frozenset(b for b in blocks if pull.asked.get(b, owners[b]) != owners[b]))

    def tick(self) -> Blocks:
        """Ask again for blocks that have not arrived for too long; the next time, wait twice as long. Returns them."""
        pull = self._pull
        if pull is None or self._now() - pull.asked_seconds <= pull.patience_seconds:
            return frozenset()
        pull.patience_seconds *= 2
        self._ask(pull, pull.missing)
        return pull.missing

    # ----------------------------------------------------------------------------------------------------------- answers

    def answered(self, head: Pulled, arrays: tuple[Array, ...]) -> Arrived | None:
        """Blocks that a request has asked for. Returns the pull if they are its last."""
        if self._pull is None or head.number != self._pull.number:
            return None
        return self._take(self._pull, head, arrays)

    def sent_unasked(self, head: UnaskedBlocks, arrays: tuple[Array, ...]) -> Arrived | None:
        """Blocks for a cycle. Returns the pull if they are its last."""
        if self._pull is None or self._pull.kind != "gradient" or head.cycle != self._pull.of:
            return None
        return self._take(self._pull, head, arrays)

    def _take(self, pull: _InProgress, head: Pulled | UnaskedBlocks, arrays: tuple[Array, ...]) -> Arrived | None:
        # The whole model from one server: use its array without a copy.
        if pull.rows is None and head.runs == ((0, self._layout.count),) and arrays[0].dtype == np.float32:
            pull.parameters = arrays[0]
        elif pull.rows is not None:
            self._take_rows(pull, pull.rows, head.runs, arrays[0])
        else:
            for run, array in zip(head.runs, arrays, strict=True):
                pull.parameters[self._layout.span(run)] = array
        pull.missing = without(pull.missing, blocks_in(head.runs))
        if head.index < pull.index:
            pull.index = head.index
        if pull.missing:
            return None
        self._pull = None
        return Arrived(pull.kind, pull.of, pull.parameters, pull.rows, pull.index, pull.begun_seconds)

    def _take_rows(self, pull: _InProgress, rows: Array, runs: Runs, values: Array) -> None:
        width, begin = len(pull.parameters) // len(rows), 0
        for at in self._layout.rows_in(rows, runs):
            end = begin + (at.stop - at.start) * width
            pull.parameters[at.start * width : at.stop * width] = values[begin:end]
            begin = end


def rows_in(layout: Layout, rows: Array, values: Array, runs: Runs) -> Array:
    """`values`, some of each of `rows`, for those of the rows that are in `runs`."""
    width = len(values) // max(len(rows), 1)
    parts = [values[at.start * width : at.stop * width] for at in layout.rows_in(rows, runs)]
    return parts[0] if len(parts) == 1 else np.concatenate(parts)
