"""What a driver may ask the coordinator, with types, and how a question reaches it in another thread or process.

Each of the four `...Questions` about a job is answered by one owner in `harness.live.coordinator`, where the docstrings are.
`CoordinatorClient` adds what the coordinator's process knows. `RemoteCoordinator` is the only place that turns a method into
a name: `harness.live.processes.coordinator_process` looks the name up on the other side.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from typing import Any, Concatenate, ParamSpec, Protocol, TypeVar, cast

from harness.live.processes.transfers import NodePair, Transfer
from harness.live.protocol.driver_reports import Poll
from harness.live.protocol.messages import Array
from tuners.actions import Setting, SyncPolicy

__all__ = [
    "CoordinatorClient",
    "ProcessQuestions",
    "RemoteCoordinator",
    "ReportQuestions",
    "StateQuestions",
    "TrainingQuestions",
]

P = ParamSpec("P")
T = TypeVar("T")


class StateQuestions(Protocol):
    """What the job begins with, and what a checkpoint saves: `StateRequests`."""

    def begin(self, setting: Setting, policy: SyncPolicy, parameters: Array) -> None: ...

    def begin_from(
        self, state: bytes, vectors: dict[int, dict[str, Array]], policies: Mapping[int, SyncPolicy]
    ) -> dict[int, int]: ...

    def snapshot(self, *, save: bool = False) -> int: ...

    def checkpoint(self, index: int) -> bytes: ...

    def saved(self, index: int) -> dict[int, dict[str, Array]]: ...


class TrainingQuestions(Protocol):
    """Which branch trains, with which setting and policy: `TrainingRequests`."""

    def run(self, branch: int) -> None: ...

    def finish(self) -> bool: ...

    def rest(self) -> None: ...

    def put(self, branch: int, setting: Setting, policy: SyncPolicy | None = None) -> None: ...

    def halt(self, branch: int) -> None: ...

    def launch(self, branch: int) -> None: ...

    def fork(
        self, parent: int, setting: Setting, policy: SyncPolicy | None = None, *, testing: bool = False, number: int = 0
    ) -> int: ...

    def free(self, branch: int) -> None: ...

    def evaluate(self, branch: int) -> int: ...

    def slow(self, factors: Mapping[str, float]) -> None: ...


class ProcessQuestions(Protocol):
    """Processes that join, leave and die, and where blocks are: `ProcessRequests`."""

    def expect(self, name: str, generation: int) -> None: ...

    def lose(self, names: Iterable[str]) -> None: ...

    def recover(
        self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()
    ) -> None: ...

    def retire(self, names: Iterable[str]) -> None: ...

    def needed(self, name: str) -> bool: ...

    def place(
        self,
        servers: tuple[str, ...],
        shares: tuple[float, ...],
        *,
        owners: tuple[str, ...] = (),
        on_demand: bool = False,
        at_once: int = 4,
    ) -> None: ...


class ReportQuestions(Protocol):
    """What has happened: `JobReports`."""

    def poll(self, taken: Mapping[int, int] | None = None) -> Poll: ...

    def held_up_by(self) -> dict[str, str]: ...

    @property
    def members(self) -> Mapping[str, int]: ...

    @property
    def durable(self) -> int: ...


class CoordinatorClient(StateQuestions, TrainingQuestions, ProcessQuestions, ReportQuestions, Protocol):
    """All that can be asked of the coordinator's process. Commands return at once; `poll` tells what has become of one."""

    @property
    def address(self) -> str:
        """Where the coordinator's process is reached."""
        ...

    def silent(self) -> dict[str, int]:
        """Processes that were not heard for too long, with their generations, until they are forgotten."""
        ...

    def starting(self) -> dict[str, float]:
        """Processes that have started and not joined yet, and for how many seconds: they import, load and compile."""
        ...

    def transfers(self) -> dict[NodePair, Transfer]:
        """Transfers that were completed since the last call."""
        ...

    def register(self, name: str, generation: int, address: str) -> str:
        """A process that is expected has started, and is reached at `address`, which has its public key. Returns the
        coordinator's address. Raises ValueError for a process that is not expected."""
        ...

    def forget(self, names: Collection[str]) -> None:
        """Send nothing more to these processes, which are gone for good."""
        ...


def _forwarded(method: Callable[Concatenate[Any, P], T]) -> Callable[Concatenate[RemoteCoordinator, P], T]:
    """A method of `RemoteCoordinator` with the types of `method`, which asks for it by its name."""

    def ask(self: RemoteCoordinator, /, *given: P.args, **named: P.kwargs) -> T:
        return cast(T, self.ask(method.__name__, *given, **named))

    return ask


class RemoteCoordinator:
    """A `CoordinatorClient` whose every question goes through `ask(name, *arguments, **keyword_arguments)`."""

    def __init__(self, ask: Callable[..., Any]) -> None:
        self.ask = ask

    begin = _forwarded(StateQuestions.begin)
    begin_from = _forwarded(StateQuestions.begin_from)
    snapshot = _forwarded(StateQuestions.snapshot)
    checkpoint = _forwarded(StateQuestions.checkpoint)
    saved = _forwarded(StateQuestions.saved)
    run = _forwarded(TrainingQuestions.run)
    finish = _forwarded(TrainingQuestions.finish)
    rest = _forwarded(TrainingQuestions.rest)
    fork = _forwarded(TrainingQuestions.fork)
    free = _forwarded(TrainingQuestions.free)
    evaluate = _forwarded(TrainingQuestions.evaluate)
    put = _forwarded(TrainingQuestions.put)
    halt = _forwarded(TrainingQuestions.halt)
    launch = _forwarded(TrainingQuestions.launch)
    place = _forwarded(ProcessQuestions.place)
    expect = _forwarded(ProcessQuestions.expect)
    lose = _forwarded(ProcessQuestions.lose)
    recover = _forwarded(ProcessQuestions.recover)
    retire = _forwarded(ProcessQuestions.retire)
    needed = _forwarded(ProcessQuestions.needed)
    slow = _forwarded(TrainingQuestions.slow)
    poll = _forwarded(ReportQuestions.poll)
    held_up_by = _forwarded(ReportQuestions.held_up_by)
    starting = _forwarded(CoordinatorClient.starting)
    silent = _forwarded(CoordinatorClient.silent)
    transfers = _forwarded(CoordinatorClient.transfers)
    register = _forwarded(CoordinatorClient.register)
    forget = _forwarded(CoordinatorClient.forget)

    @property
    def members(self) -> Mapping[str, int]:
        return cast("Mapping[str, int]", self.ask("members"))

    @property
    def durable(self) -> int:
        return cast(int, self.ask("durable"))

    @property
    def address(self) -> str:
        return cast(str, self.ask("address"))
