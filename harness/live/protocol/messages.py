"""The messages between coordinator, servers and workers: a small head, and arrays beside it.

A channel delivers in order between two processes. It may lose or repeat messages when a process dies, so every receiver must
accept any message twice. Every message carries its view and its sender's generation, and receivers refuse messages of an
older view or generation (see `harness.live.coordinator.membership`). Processes are named "coordinator", "server/NODE" and
"worker/NODE"; one "worker/..." is the evaluator, whose name is no node of the job.

Blocks are given as runs, (first, end) pairs. A head with `runs` comes with one array per run, unless its docstring says
"no arrays". In a job with embedding tables, pulls and pushes carry rows: `Pull` comes with the numbers of the rows that are
wanted of these blocks, int32 and sorted, `Pulled` with their parameters in that order, and `StagePush` and `StagedPart` with
numbers and gradients of the rows that the push touches. A block of which it touches no row is named all the same.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache
from typing import Any, TypeAlias

import msgspec
from numpy.typing import NDArray

from harness.live.protocol.blocks import Owners, Runs
from harness.live.protocol.log import LogEntry

__all__ = [
    "COORDINATOR",
    "Array",
    "BlockData",
    "BlocksAwaited",
    "BlocksMoved",
    "BranchVectors",
    "CopyKept",
    "EntriesMissing",
    "EvaluationRequest",
    "EvaluationResult",
    "FetchBlocks",
    "GradientDone",
    "Head",
    "Hello",
    "LogAppend",
    "LossProbed",
    "Message",
    "OwnerTable",
    "ProbeLoss",
    "Pull",
    "Pulled",
    "PushStaged",
    "Redirect",
    "Release",
    "ResendPush",
    "Rest",
    "Send",
    "SnapshotCopy",
    "SnapshotDurable",
    "StagePush",
    "StagedPart",
    "TableSeen",
    "UnaskedBlocks",
    "View",
    "ViewReady",
    "may_send",
    "server",
    "worker",
]

COORDINATOR = "coordinator"
Array: TypeAlias = NDArray[Any]  # one axis; float32, or float16 where a transfer is halved; int32 for numbers of rows


def server(node: str) -> str:
    """The name of the server process on a node."""
    return f"server/{node}"


def worker(node: str) -> str:
    """The name of the worker process on a node."""
    return f"worker/{node}"


class _Head(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Immutable. The first field on the wire is the name of the class."""


# ------------------------------------------------------------------------------------------------------------- the log


class LogAppend(_Head, frozen=True):
    """Coordinator to servers: this is entry `index` of the log."""

    index: int
    entry: LogEntry


class EntriesMissing(_Head, frozen=True):
    """Server to coordinator: entries are missing before the one that came; send again all after `index`."""

    index: int


# ----------------------------------------------------------------------------------------------- one cycle of a worker


class Release(_Head, frozen=True):
    """Coordinator to worker: pull, compute, push. The worker drops the cycle that it is in, if any.

    It also holds for later cycles that name it (`UnaskedBlocks.terms`), but for `cycle`, `clock` and `after`.
    """

    cycle: int  # a unique number, larger than all before
    branch: int
    clock: int  # number of the worker's mini-batch, from 0
    after: int  # pull the model as of this entry of the log, or later
    durable: int  # the worker may drop its copies of pushes up to this cycle
    samples: int  # in the mini-batch
    shard_start: int  # of the worker's part of the training data
    shard_length: int
    unasked: bool = False  # servers send the parameters without a pull
    bits: int = 32  # of a number in transfer
    probes: bool = False  # the policy needs the loss before and after the push
    intra_threads: int = 0
    inter_threads: int = 0
    slowdown: float = 1.0  # an emulated node takes so many times as long
    seconds: float = 0.0  # when the cycle was released, on the coordinator's clock


class Rest(_Head, frozen=True):
    """Coordinator to worker: drop the cycle or the evaluations that you are at, and wait."""


class Pull(_Head, frozen=True):
    """Worker to server: send these blocks (no arrays, or numbers of rows), as of entry `after` or later."""

    number: int  # of the request, counted by the worker
    branch: int
    after: int
    runs: Runs
    bits: int = 32


class Pulled(_Head, frozen=True):
    """Server to worker: the blocks asked for, as of entry `index`; some of them may be later."""

    number: int
    index: int
    runs: Runs


class UnaskedBlocks(_Head, frozen=True):
    """Server to worker, without a pull: the blocks as of entry `index`, the commit that released the worker for this
    cycle. The worker begins it, if it has the release that the cycle goes by."""

    cycle: int
    index: int
    runs: Runs
    clock: int  # number of the mini-batch
    terms: int  # the cycle of that release
    seconds: float = 0.0  # when the worker was released, on the coordinator's clock


class GradientDone(_Head, frozen=True):
    """Worker to coordinator: the gradient is computed.

    It normally travels inside `StagePush` and `PushStaged`. With probes it is sent by itself, because the loss before the
    push takes longer to compute.
    """

    cycle: int
    loss: float  # mean over the mini-batch, at the parameters pulled
    pull_seconds: float
    compute_seconds: float
    index: int  # of the log: all pulled blocks contain the entries up to this one
    loss_before: float = 0.0  # with probes: same mini-batch, at the servers' parameters before the push


class BlocksAwaited(_Head, frozen=True):
    """Worker to coordinator: these blocks (no arrays) of what this cycle pulls have not arrived in time, and are asked for
    again; or none: they have arrived since."""

    cycle: int
    runs: Runs


class StagePush(_Head, frozen=True):
    """Worker to server: a push's gradients for these blocks. The server applies them at the push's `CommitEntry`."""

    cycle: int
    branch: int
    after: int  # the worker's table of owners is as of this entry
    runs: Runs
    done: GradientDone | None = None  # forwarded to the coordinator


class Redirect(_Head, frozen=True):
    """Server to worker: I do not own these blocks (no arrays) of your pull or push; `owners` is the table as of `index`."""

    number: int  # of the pull, or the push's cycle
    push: bool
    runs: Runs
    index: int
    owners: Owners


class PushStaged(_Head, frozen=True):
    """Server to coordinator: I have, or had before, these blocks (no arrays) of that push."""

    worker: str
    cycle: int
    runs: Runs
    done: GradientDone | None = None  # as it came with the push


class ProbeLoss(_Head, frozen=True):
    """Coordinator to worker: compute the loss of this cycle's mini-batch again, as of entry `after`."""

    cycle: int
    after: int


class LossProbed(_Head, frozen=True):
    """Worker to coordinator: the answer to `ProbeLoss`."""

    cycle: int
    loss: float


class ResendPush(_Head, frozen=True):
    """Coordinator to worker: parts of that push have not arrived; send all of it again."""

    cycle: int


class OwnerTable(_Head, frozen=True):
    """Coordinator to worker: the owner of each block, as of entry `index`."""

    index: int
    owners: Owners


class TableSeen(_Head, frozen=True):
    """Worker to coordinator: I use the table as of entry `index`."""

    index: int


class EvaluationRequest(_Head, frozen=True):
    """Coordinator to evaluator: evaluate a branch as of entry `after` or later."""

    number: int
    branch: int
    after: int


class EvaluationResult(_Head, frozen=True):
    """Evaluator to coordinator: the answer to `EvaluationRequest`."""

    number: int
    index: int
    loss: float
    accuracy: float


# ----------------------------------------------------------------------------------------------- transfers of blocks

# `BranchVectors` and `StagedPart` are parts of the messages after them, and are never sent alone.


class BranchVectors(_Head, frozen=True):
    """The vectors of one branch (parameters, optimizer slots, group sum); one array per vector and run."""

    branch: int
    vectors: tuple[str, ...]


class StagedPart(_Head, frozen=True):
    """Blocks of a push that waits for its commit; one array per run, or numbers and gradients of rows."""

    worker: str
    cycle: int
    runs: Runs


class BlockData(_Head, frozen=True):
    """Old owner, or holder of a copy, to new owner: blocks as of entry `index`; arrays of `branches`, then of `parts`."""

    index: int
    runs: Runs
    branches: tuple[BranchVectors, ...]
    parts: tuple[StagedPart, ...] = ()


class SnapshotCopy(_Head, frozen=True):
    """Owner to who keeps a copy, another server or the coordinator: blocks as of the snapshot at entry `index`; arrays of
    `branches`."""

    index: int
    runs: Runs
    branches: tuple[BranchVectors, ...]


class CopyKept(_Head, frozen=True):
    """Backup to coordinator: I keep a copy of these blocks (no arrays) of `owner`, as of the snapshot at `index`."""

    index: int
    runs: Runs
    owner: str


class SnapshotDurable(_Head, frozen=True):
    """Coordinator to servers: the snapshot at `index` is complete; drop older ones."""

    index: int


class FetchBlocks(_Head, frozen=True):
    """To the old owner: send now these blocks (no arrays), which move on demand since entry `index` or earlier."""

    index: int
    runs: Runs


class BlocksMoved(_Head, frozen=True):
    """New owner to coordinator: these blocks (no arrays) have arrived and are up to date."""

    runs: Runs


# --------------------------------------------------------------------------------------------------------- membership


class Hello(_Head, frozen=True):
    """Server or worker to coordinator: this generation of me has started, and has no state."""


class View(_Head, frozen=True):
    """Coordinator to all: go back to the snapshot at entry `index`; the entries after it are sent again.

    `sources` says which holder of a copy sends which blocks to their owner. A process that joins gets its first view with
    nothing to restore.
    """

    number: int
    index: int
    end: int  # last entry of the log when the view began: entries up to it follow
    owners: Owners
    members: dict[str, int]  # generation by name
    sources: tuple[tuple[Runs, str], ...]


class ViewReady(_Head, frozen=True):
    """Server to coordinator: I have restored view `number` and applied the log up to the view's `end`."""

    number: int


Head: TypeAlias = (
    ResendPush
    | BlocksAwaited
    | SnapshotCopy
    | BlockData
    | GradientDone
    | SnapshotDurable
    | FetchBlocks
    | UnaskedBlocks
    | Hello
    | CopyKept
    | LogAppend
    | EvaluationRequest
    | EvaluationResult
    | EntriesMissing
    | BlocksMoved
    | ProbeLoss
    | LossProbed
    | Pull
    | Pulled
    | ViewReady
    | Redirect
    | Release
    | Rest
    | TableSeen
    | StagePush
    | PushStaged
    | OwnerTable
    | View
)


_ONLY_FROM: dict[str, tuple[type[_Head], ...]] = {
    COORDINATOR: (
        LogAppend,
        Release,
        Rest,
        ProbeLoss,
        ResendPush,
        OwnerTable,
        EvaluationRequest,
        SnapshotDurable,
        View,
    ),
    "server": (
        EntriesMissing,
        Pulled,
        UnaskedBlocks,
        Redirect,
        PushStaged,
        SnapshotCopy,
        CopyKept,
        BlocksMoved,
        ViewReady,
    ),
    "worker": (Pull, BlocksAwaited, GradientDone, StagePush, LossProbed, TableSeen, EvaluationResult),
}
_SENDERS: dict[type[Any], str] = {kind: role for role, kinds in _ONLY_FROM.items() for kind in kinds}


@lru_cache(maxsize=4096)  # every message that arrives asks
def may_send(sender: str, kind: type[Any]) -> bool:
    """Whether processes of the sender's role send messages with heads of this class."""
    role = _SENDERS.get(kind)
    return role is None or sender == role or sender.startswith(role + "/")


class Message(msgspec.Struct, frozen=True):
    """One message. Neither side may write to its arrays: they can be shared memory, or kept by the sender."""

    head: Head
    arrays: tuple[Array, ...] = ()
    view: int = 0
    generation: int = 0  # of the sender


Send: TypeAlias = Callable[[str, Message], None]
"""(receiver, message); returns at once, and drops messages to processes that do not exist."""
