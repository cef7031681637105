"""What coordinator, servers and workers say to one another: small heads, each with arrays beside it.

Channels deliver in order between any two, and may lose or repeat what was under way when somebody died; everything here
may be received twice. Every message carries the view that it belongs to and its sender's generation, so that what is left of
the past is refused (see `harness.live.coordinator.membership`). Peers are named "coordinator", "server/NODE" and
"worker/NODE"; "worker/..." may also be an evaluator that is no node.

Blocks are given as runs, (first, end) pairs. Where a head has `runs`, one array per run goes with it, unless it says
otherwise.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, TypeAlias

import msgspec
from numpy.typing import NDArray

from harness.live.protocol.blocks import Owners, Runs
from harness.live.protocol.log import Entry

__all__ = [
    "COORDINATOR",
    "Again",
    "Array",
    "Copy",
    "Data",
    "Done",
    "Durable",
    "Fetch",
    "Given",
    "Head",
    "Held",
    "Hello",
    "Kept",
    "Log",
    "Measure",
    "Measured",
    "Message",
    "Missing",
    "Moved",
    "Part",
    "Probe",
    "Probed",
    "Pull",
    "Pulled",
    "Ready",
    "Redirect",
    "Release",
    "Rest",
    "Seen",
    "Send",
    "Stage",
    "Staged",
    "Table",
    "View",
    "server",
    "worker",
]

COORDINATOR = "coordinator"
Array: TypeAlias = NDArray[Any]  # one axis; float32, or float16 where a transfer is halved


def server(node: str) -> str:
    """The name of the server process on a node."""
    return f"server/{node}"


def worker(node: str) -> str:
    """The name of the worker process on a node."""
    return f"worker/{node}"


class _Head(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """Immutable; its first field on the wire is its class's name."""


# ------------------------------------------------------------------------------------------------------------- the log


class Log(_Head, frozen=True):
    """Coordinator to servers: entry `index` of the log."""

    index: int
    entry: Entry


class Missing(_Head, frozen=True):
    """Server to coordinator: an entry came whose predecessors did not; send again what is after `index`."""

    index: int


# ----------------------------------------------------------------------------------------------- one cycle of a worker


class Release(_Head, frozen=True):
    """Coordinator to worker: pull, compute, push. Whatever it was doing before is given up."""

    cycle: int  # unique, larger than all before
    branch: int
    clock: int  # which of the worker's mini-batches, from 0
    after: int  # pull what the log's entries up to this one have made of the model
    durable: int  # this worker's pushes up to this cycle need not be kept any longer
    samples: int  # in the mini-batch
    shard_start: int  # of the worker's part of the training data
    shard_length: int
    given: bool = False  # servers send the model unasked
    bits: int = 32  # of a number in transfer
    probes: bool = False  # wants the loss before and after the push
    intra_threads: int = 0
    inter_threads: int = 0


class Rest(_Head, frozen=True):
    """Coordinator to worker: give up what you are doing, and wait."""


class Pull(_Head, frozen=True):
    """Worker to server: send these blocks (no arrays), as of the log's entry `after` or later."""

    number: int  # of the request; the worker's own count
    branch: int
    after: int
    runs: Runs
    bits: int = 32


class Pulled(_Head, frozen=True):
    """Server to worker: the blocks as of entry `index`, or some of them later."""

    number: int
    index: int
    runs: Runs


class Given(_Head, frozen=True):
    """Server to worker, unasked: the blocks as of entry `index`, the commit that released it for this cycle."""

    cycle: int
    index: int
    runs: Runs


class Done(_Head, frozen=True):
    """Worker to coordinator: the gradient is computed. It goes with the push, in `Stage` and `Staged`; where the loss before
    the push is wanted, which takes longer, it is sent by itself."""

    cycle: int
    loss: float  # mean over the mini-batch, at the parameters pulled
    pull_seconds: float
    compute_seconds: float
    index: int  # of the log's entries, the last that all blocks pulled contain
    loss_before: float = 0.0  # with probes: of the same mini-batch at the servers' parameters, before the push


class Stage(_Head, frozen=True):
    """Worker to server: these blocks' part of a push. Takes effect by its `Commit`."""

    cycle: int
    branch: int
    after: int  # the table that it was addressed by is as of this entry
    runs: Runs
    done: Done | None = None  # for the coordinator


class Redirect(_Head, frozen=True):
    """Server to worker: these blocks (no arrays) of your pull or push have other owners, as of entry `index`."""

    number: int  # of the pull, or the push's cycle
    push: bool
    runs: Runs
    index: int
    owners: Owners


class Staged(_Head, frozen=True):
    """Server to coordinator: I have these blocks (no arrays) of that push, or had them before."""

    worker: str
    cycle: int
    runs: Runs
    done: Done | None = None  # as it came with them


class Probe(_Head, frozen=True):
    """Coordinator to worker: the loss of this cycle's mini-batch again, as of entry `after`."""

    cycle: int
    after: int


class Probed(_Head, frozen=True):
    """Worker to coordinator."""

    cycle: int
    loss: float


class Again(_Head, frozen=True):
    """Coordinator to worker: parts of that push have not come; send them again."""

    cycle: int


class Table(_Head, frozen=True):
    """Coordinator to worker: who owns what, as of entry `index`."""

    index: int
    owners: Owners


class Seen(_Head, frozen=True):
    """Worker to coordinator: I go by the table as of entry `index`."""

    index: int


class Measure(_Head, frozen=True):
    """Coordinator to evaluator: evaluate a branch as of entry `after` or later."""

    number: int
    branch: int
    after: int


class Measured(_Head, frozen=True):
    """Evaluator to coordinator."""

    number: int
    index: int
    loss: float
    accuracy: float


# ----------------------------------------------------------------------------------------------- blocks that travel


class Held(_Head, frozen=True):
    """What is kept of one branch; for each vector (parameters, optimizer slots, group) one array per run."""

    branch: int
    vectors: tuple[str, ...]


class Part(_Head, frozen=True):
    """Blocks of a push that is not committed; one array per run."""

    worker: str
    cycle: int
    runs: Runs


class Data(_Head, frozen=True):
    """Owner, or holder of a copy, to the new owner: blocks as of entry `index`; arrays of `branches`, then of `parts`."""

    index: int
    runs: Runs
    branches: tuple[Held, ...]
    parts: tuple[Part, ...] = ()


class Copy(_Head, frozen=True):
    """Owner to buddy: blocks as of the snapshot at entry `index`; arrays of `branches`."""

    index: int
    runs: Runs
    branches: tuple[Held, ...]


class Kept(_Head, frozen=True):
    """Buddy to coordinator: I have a copy of these blocks (no arrays) of `owner`'s, as of the snapshot at `index`."""

    index: int
    runs: Runs
    owner: str


class Durable(_Head, frozen=True):
    """Coordinator to all: the snapshot at `index` is complete; older ones are needed no longer."""

    index: int


class Fetch(_Head, frozen=True):
    """To the owner before: send these blocks (no arrays), that move on demand since entry `index` or before, now."""

    index: int
    runs: Runs


class Moved(_Head, frozen=True):
    """New owner to coordinator: these blocks (no arrays) have come, and are up to date."""

    runs: Runs


# --------------------------------------------------------------------------------------------------------- membership


class Hello(_Head, frozen=True):
    """To coordinator: this generation of me is there, and knows nothing."""


class View(_Head, frozen=True):
    """Coordinator to all: everything is as of the snapshot at entry `index`; what came after comes again.

    `sources` says who of those that hold copies sends which blocks to their owner. A peer that joins gets its first view
    with nothing to restore.
    """

    number: int
    index: int
    end: int  # of the log so far: entries up to this one follow
    owners: Owners
    members: dict[str, int]  # generation by name
    sources: tuple[tuple[Runs, str], ...]


class Ready(_Head, frozen=True):
    """Server to coordinator: view `number` is restored, and the log applied up to where the view began."""

    number: int


Head: TypeAlias = (
    Again
    | Copy
    | Data
    | Done
    | Durable
    | Fetch
    | Given
    | Hello
    | Kept
    | Log
    | Measure
    | Measured
    | Missing
    | Moved
    | Probe
    | Probed
    | Pull
    | Pulled
    | Ready
    | Redirect
    | Release
    | Rest
    | Seen
    | Stage
    | Staged
    | Table
    | View
)


class Message(NamedTuple):
    """What is sent. Arrays are not to be written to by either side."""

    head: Head
    arrays: tuple[Array, ...] = ()
    view: int = 0
    generation: int = 0  # of the sender


Send: TypeAlias = Callable[[str, Message], None]
"""(receiver, message); returns at once, and loses messages to those that are not there."""
