"""What a live job runs on: processes that can be started, stopped and lost, and what their coordinator last said.

A procedure (a change of setting, what is done about a loss) is a generator that yields wherever it has to wait; whoever
watches the job goes on with it as soon as the coordinator has said something new.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Generator, Iterable, Mapping
from typing import TYPE_CHECKING, Any, Protocol, TypeAlias

from harness.live.protocol import messages
from tuners.actions import Setting

if TYPE_CHECKING:
    from harness.live.coordinator.coordinator import Poll

__all__ = ["EVALUATOR", "Procedure", "Processes", "Runtime", "node_of", "peers"]

EVALUATOR = messages.worker("evaluator")
"""The process that validates, so that nobody else waits for it."""

Procedure: TypeAlias = Generator[None, None, None]

_JOIN_SECONDS = 60.0
_RECOVER_SECONDS = 10.0


class Processes(Protocol):
    """The processes of one job, which whoever started them ends. Names are those of `harness.live.protocol.messages`."""

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """What the coordinator's method of that name returns; waits for a coordinator that is coming back."""
        ...

    def start(self, names: Collection[str]) -> None:
        """Start processes, under their next generation, and let the coordinator expect them; returns at once."""
        ...

    def stop(self, names: Collection[str]) -> None:
        """End processes that nobody needs; returns at once."""
        ...

    def lost(self) -> Mapping[str, str]:
        """Those that have died or hung since one last asked, and what is known about why. They are dead now."""
        ...

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes of the job that have a place to run just now."""
        ...

    @property
    def spare(self) -> bool:
        """Whether there is a place where none of the job's nodes is."""
        ...

    def elsewhere(self, node: str) -> bool:
        """Give a node another place, where no other of the job's is, and end its processes; False where there is none."""
        ...


def peers(setting: Setting) -> tuple[str, ...]:
    """The processes that a setting needs."""
    return (*map(messages.server, setting.servers), *map(messages.worker, setting.workers))


def node_of(name: str) -> str:
    """The node that a process runs on."""
    return name.partition("/")[2]


class Runtime:
    """The processes of a job, and what the coordinator said when it was last looked at."""

    def __init__(self, processes: Processes) -> None:
        self.processes = processes
        self.seen: Poll
        self.placed: tuple[tuple[str, ...], tuple[float, ...]] = ((), ())  # servers and their shares of the model
        self.starting: set[str] = set()
        self.taken: dict[int, int] = {}  # rows of each branch, so far
        self._offset_seconds = float("inf")  # of this clock to the coordinator's
        self._zero_seconds = 0.0  # of the coordinator's clock, when the job began

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        return self.processes.call(name, *given, **named)

    def look(self) -> Poll:
        """What has happened since the last look."""
        self.seen = seen = self.call("poll", self.taken)
        for number, report in seen.reports.items():
            new = report.rows[max(self.taken.get(number, 0) - report.first, 0) :]
            seen.reports[number] = report._replace(rows=new)
            self.taken[number] = report.first + len(report.rows)
        self.starting -= self.seen.members.keys()
        # How long the answer took is in it, too: the quickest answer comes nearest.
        self._offset_seconds = min(self._offset_seconds, time.monotonic() - self.seen.now)
        return self.seen

    @property
    def now(self) -> float:
        """Seconds since the job began."""
        return time.monotonic() - self._offset_seconds - self._zero_seconds

    def begin_at(self, seconds: float) -> None:
        """It is so many seconds since the job began, now."""
        self._zero_seconds += self.now - seconds

    def job_seconds(self, coordinator_seconds: Any) -> Any:
        """The coordinator's time as time of the job."""
        return coordinator_seconds - self._zero_seconds

    # -------------------------------------------------------------------------------------------------- parts of procedures

    def start(self, names: Iterable[str]) -> tuple[str, ...]:
        """Start those that are not there, nor on their way; who that is."""
        lacking = tuple(n for n in names if n not in self.seen.members and n not in self.starting)
        if lacking:
            self.processes.start(lacking)
            self.starting.update(lacking)
        return lacking

    def joined(self, names: Iterable[str]) -> Procedure:
        """Wait until they take part. Raises RuntimeError where one does not come."""
        awaited, until = set(names), time.monotonic() + _JOIN_SECONDS
        while not awaited <= self.seen.members.keys():
            if time.monotonic() > until:
                late = ", ".join(sorted(awaited - self.seen.members.keys()))
                raise RuntimeError(f"Cannot start {late}: nothing was heard of it for {_JOIN_SECONDS:g} s.")
            yield

    def place(self, setting: Setting, *, on_demand: bool = False, at_once: int = 4) -> Procedure:
        """Begin to move the model to where `setting` has it."""
        self.placed = (setting.servers, setting.shares()[1])
        self.call(
            "place", tuple(map(messages.server, setting.servers)), self.placed[1], on_demand=on_demand, at_once=at_once
        )
        yield  # until the coordinator has told how much there is to move

    def settled(self) -> Procedure:
        """Wait until all blocks are where they are to be."""
        while self.seen.moving or self.seen.recovering:
            yield

    def recover(self, setting: Setting) -> Procedure:
        """Bring the model back from the last snapshot, to those of `setting`'s servers that lack blocks. Raises ModelLost
        where nobody has a copy."""
        self.placed = (setting.servers, setting.shares()[1])
        patience_seconds = _RECOVER_SECONDS
        while True:
            self.call("recover", tuple(map(messages.server, setting.servers)), self.placed[1])
            until = time.monotonic() + patience_seconds
            yield  # until the coordinator has told that it does
            while self.seen.recovering and time.monotonic() < until:
                yield
            if not self.seen.recovering:
                return
            patience_seconds *= 2  # a coordinator that has died takes with it what it was about to give

    def durable(self, index: int) -> Procedure:
        """Wait until nothing up to an entry of the log can be lost."""
        while self.seen.durable < index:
            yield

    def dismiss(self, kept: Collection[str]) -> Procedure:
        """End all processes but those `kept`, as soon as they can be spared."""
        spare = [n for n in self.seen.members if n not in kept and n != EVALUATOR]
        if spare:
            self.call("retire", spare)
            while any(self.call("needed", name) for name in spare):
                yield
            self.processes.stop(spare)
