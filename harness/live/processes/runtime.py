"""What a live job runs on: processes that can be started, stopped and lost, and the coordinator's latest report.

A procedure (a reconfiguration, the repair after a loss) is a generator that yields wherever it has to wait. The driver
resumes it after each new report of the coordinator.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Collection, Generator, Iterable, Mapping
from typing import Any, NamedTuple, Protocol, TypeAlias

from harness.live.processes.client import CoordinatorClient
from harness.live.protocol import messages
from harness.live.protocol.driver_reports import Poll
from harness.live.protocol.names import EVALUATOR
from tuners.actions import Setting

__all__ = ["NOT_UP", "BlockPlaces", "Procedure", "Processes", "Runtime", "starting_words"]

Procedure: TypeAlias = Generator[None, None, None]

NOT_UP = (
    " Ray has not started those that are not up: raylet.out among its logs says why. Its ports for workers may be taken "
    "(`ray start --min-worker-port`, --max-worker-port), or the machine has no memory left."
)

_RECOVER_SECONDS = 10.0
"""First wait for a recovery that a coordinator which died may have forgotten; it doubles. Too short costs a view more."""


class Processes(Protocol):
    """The processes of one job. Names are those of `harness.live.protocol.messages`."""

    @property
    def coordinator(self) -> CoordinatorClient:
        """The coordinator; a question waits while it restarts."""
        ...

    def tell(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with what becomes of the coordinator, in the thread that asks it."""
        ...

    def start(self, names: Collection[str]) -> None:
        """Start processes, each under its next generation, and tell the coordinator to expect them; returns at once."""
        ...

    def stop(self, names: Collection[str]) -> None:
        """End processes that are not needed; returns at once."""
        ...

    def lost(self) -> Mapping[str, str]:
        """Processes that have died or hung since the last call, with the reason. They are dead now."""
        ...

    def host(self, name: str) -> str:
        """The address of the machine that a process is on, or is to start on; "" where all are on one."""
        ...

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes of the job that have a machine now."""
        ...

    @property
    def expects_nodes(self) -> bool:
        """Whether a node that has no machine now may get one later."""
        ...

    @property
    def has_spare(self) -> bool:
        """Whether a machine has room and runs none of the job's nodes."""
        ...

    def move_node(self, node: str) -> bool:
        """End a node's processes and give it a machine that runs none of the job's nodes; False if there is none."""
        ...


class BlockPlaces(NamedTuple):
    """Where a setting has the blocks of the model."""

    servers: tuple[str, ...] = ()
    shares: tuple[float, ...] = ()
    owners: tuple[str, ...] = ()  # of each block of embedding tables; (): there are none

    def same_as(self, other: BlockPlaces) -> bool:
        """Whether both are the same but for the order of the servers."""
        shares, others = (dict(zip(p.servers, p.shares, strict=True)) for p in (self, other))
        return self.owners == other.owners and shares == others


class Runtime:
    """The processes of a job, and the coordinator's latest report."""

    def __init__(self, processes: Processes, join_seconds: float = 300.0, table_blocks: int = 0) -> None:
        """`table_blocks`: of the embedding tables; 0: there are none."""
        self.processes, self._join_seconds, self._table_blocks = processes, join_seconds, table_blocks
        self.latest: Poll
        self.placed = BlockPlaces()
        self.starting: set[str] = set()
        self.rows_taken: dict[int, int] = {}  # by branch
        self._offset_seconds = float("inf")  # this process's clock minus the coordinator's
        self._zero_seconds = 0.0  # when the job began, on the coordinator's clock

    @property
    def coordinator(self) -> CoordinatorClient:
        """The coordinator."""
        return self.processes.coordinator

    def poll(self) -> Poll:
        """What has happened since the last poll."""
        self.latest = latest = self.coordinator.poll(self.rows_taken)
        for number, report in latest.reports.items():
            # The coordinator repeats rows until it is told that they were taken, so that none is lost with it.
            new = report.rows[max(self.rows_taken.get(number, 0) - report.first, 0) :]
            latest.reports[number] = report._replace(rows=new)
            self.rows_taken[number] = report.first + len(report.rows)
        self.starting -= latest.members.keys()
        # The difference contains the time that the answer took, so the smallest one is the most exact.
        self._offset_seconds = min(self._offset_seconds, time.monotonic() - latest.now)
        return latest

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._offset_seconds - self._zero_seconds

    def begin_at(self, seconds: float) -> None:
        """Set the job's time to `seconds` now."""
        self._zero_seconds += self.now - seconds

    def job_seconds(self, coordinator_seconds: Any) -> Any:
        """The coordinator's time as time of the job."""
        return coordinator_seconds - self._zero_seconds

    # -------------------------------------------------------------------------------------------------- parts of procedures

    def start_first(self, names: Collection[str]) -> None:
        """Start the first processes of the job, beside the coordinator, which has not reported yet."""
        self.processes.start(names)
        self.starting.update(names)

    def start(self, names: Iterable[str]) -> tuple[str, ...]:
        """Start those processes that neither run nor are starting; returns their names."""
        lacking = tuple(n for n in names if n not in self.latest.members and n not in self.starting)
        if lacking:
            self.processes.start(lacking)
            self.starting.update(lacking)
        return lacking

    def wait_joined(self, names: Iterable[str]) -> Procedure:
        """Wait until these processes have joined. Raises RuntimeError if one does not."""
        awaited, until = set(names), time.monotonic() + self._join_seconds
        while not awaited <= self.latest.members.keys():
            if time.monotonic() > until:
                late, up = awaited - self.latest.members.keys(), self.coordinator.starting()
                raise RuntimeError(
                    f"Cannot start {', '.join(sorted(late))} within {self._join_seconds:g} s "
                    f"({starting_words(late, up, self.processes.host)}). "
                    f"Allow more with --join-limit.{'' if late <= up.keys() else NOT_UP}"
                )
            yield

    def place(self, setting: Setting, *, on_demand: bool = False, at_once: int = 4) -> Procedure:
        """Begin to move the model's blocks to where `setting` has them."""
        self.placed = self.placement(setting)
        servers, shares, owners = self._named(self.placed)
        self.coordinator.place(servers, shares, owners=owners, on_demand=on_demand, at_once=at_once)
        yield  # the next report says how many blocks have to move

    def placement(self, setting: Setting) -> BlockPlaces:
        """Where `setting` has the blocks of the model."""
        return BlockPlaces(
            setting.servers, setting.shares()[1], setting.owners(self._table_blocks) if self._table_blocks else ()
        )

    def _named(self, placed: BlockPlaces) -> BlockPlaces:
        """The places of blocks with names of processes in place of those of nodes. The block of the dense parameters, the
        last one, is at the first server."""
        owners = (*placed.owners, placed.servers[0]) if placed.owners else ()
        return BlockPlaces(tuple(map(messages.server, placed.servers)), placed.shares, tuple(map(messages.server, owners)))

    def wait_placed(self) -> Procedure:
        """Wait until all blocks are in their place."""
        while self.latest.moving or self.latest.recovering:
            yield

    def recover(self, setting: Setting) -> Procedure:
        """Restore blocks without an owner from the last snapshot, on `setting`'s servers. Raises ModelLost if no process
        has a copy."""
        self.placed = self.placement(setting)
        patience_seconds = _RECOVER_SECONDS
        while True:
            self.coordinator.recover(*self._named(self.placed))
            until = time.monotonic() + patience_seconds
            yield  # the next report says that recovery has begun
            while self.latest.recovering and time.monotonic() < until:
                yield
            if not self.latest.recovering:
                return
            # A coordinator that died in the middle has forgotten the request: ask again, and wait longer each time.
            patience_seconds *= 2

    def wait_durable(self, index: int) -> Procedure:
        """Wait until nothing up to this entry of the log can be lost with one process."""
        while self.latest.durable < index:
            yield

    def end_all_but(self, kept: Collection[str]) -> Procedure:
        """End all processes but `kept` and the evaluator, as soon as nothing would be lost with them."""
        spare = [n for n in self.latest.members if n not in kept and n != EVALUATOR]
        if spare:
            self.coordinator.retire(spare)
            while any(self.coordinator.needed(name) for name in spare):
                yield
            self.processes.stop(spare)


def starting_words(names: Iterable[str], up: Mapping[str, float], host: Callable[[str], str]) -> str:
    """What these processes, which have not joined yet, are at. `up`: those that have started, and for how many seconds.
    `host`: as of `Processes`; an operator of several machines has to know at which one to look."""
    names = sorted(names)
    serve = [n for n in names if n in up and n.startswith(messages.server(""))]
    compile_ = [n for n in names if n in up and n not in serve]
    words = [
        f"{what}, {max(up[n] for n in those):.0f} s: {', '.join(those)}"
        for what, those in (("joining", serve), ("compiling", compile_))
        if those
    ]
    waiting = defaultdict[str, list[str]](list)
    for name in names:
        if name not in up:
            waiting[host(name)].append(name)
    # Last, what has no machine beside it: it would seem to have that of the others.
    groups = [
        ", ".join(those) + (f" (on {at})" if at else "") for at, those in sorted(waiting.items(), key=lambda g: not g[0])
    ]
    if groups:
        words.append(f"not up yet: {', '.join(groups)}")
    return "; ".join(words)
