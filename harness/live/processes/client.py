"""What a driver may ask the coordinator, with types, and how a question reaches it in another thread or process.

`TrainingControl` is what `harness.live.coordinator.coordinator.Coordinator` answers itself; its docstrings are there.
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

__all__ = ["CoordinatorClient", "RemoteCoordinator", "TrainingControl"]

P = ParamSpec("P")
T = TypeVar("T")


class TrainingControl(Protocol):
    """Questions and commands about training. All return at once; `poll` tells what has become of a command."""

    # Beginning and restoring.
    def begin(self, setting: Setting, policy: SyncPolicy, parameters: Array) -> None: ...

    def begin_from(
        self, state: bytes, vectors: dict[int, dict[str, Array]], policies: Mapping[int, SyncPolicy]
    ) -> dict[int, int]: ...

    def snapshot(self, *, save: bool = False) -> int: ...

    def checkpoint(self, index: int) -> bytes: ...

    def saved(self, index: int) -> dict[int, dict[str, Array]]: ...

    # Branches.
    def run(self, branch: int) -> None: ...

    def finish(self) -> bool: ...

    def rest(self) -> None: ...

    def fork(
        self, parent: int, setting: Setting, policy: SyncPolicy | None = None, *, testing: bool = False, number: int = 0
    ) -> int: ...

    def free(self, branch: int) -> None: ...

    def evaluate(self, branch: int) -> int: ...

    # Settings and the blocks of the model.
    def put(self, branch: int, setting: Setting, policy: SyncPolicy | None = None) -> None: ...

    def halt(self, branch: int) -> None: ...

    def launch(self, branch: int) -> None: ...

    def place(
        self,
        servers: tuple[str, ...],
        shares: tuple[float, ...],
        *,
        owners: tuple[str, ...] = (),
        on_demand: bool = False,
        at_once: int = 4,
    ) -> None: ...

    # Processes that join, leave and die.
    def expect(self, name: str, generation: int) -> None: ...

    def lose(self, names: Iterable[str]) -> None: ...

    def recover(
        self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()
    ) -> None: ...

    def retire(self, names: Iterable[str]) -> None: ...

    def needed(self, name: str) -> bool: ...

    def slow(self, factors: Mapping[str, float]) -> None: ...

    # What has happened.
    def poll(self, taken: Mapping[int, int] | None = None) -> Poll: ...

    def held_up_by(self) -> dict[str, str]: ...

    @property
    def members(self) -> Mapping[str, int]: ...

    @property
    def durable(self) -> int: ...


class CoordinatorClient(TrainingControl, Protocol):
    """All that can be asked of the coordinator's process."""

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
        """These processes are gone for good; nothing is sent to them any more."""
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

    begin = _forwarded(TrainingControl.begin)
    begin_from = _forwarded(TrainingControl.begin_from)
    snapshot = _forwarded(TrainingControl.snapshot)
    checkpoint = _forwarded(TrainingControl.checkpoint)
    saved = _forwarded(TrainingControl.saved)
    run = _forwarded(TrainingControl.run)
    finish = _forwarded(TrainingControl.finish)
    rest = _forwarded(TrainingControl.rest)
    fork = _forwarded(TrainingControl.fork)
    free = _forwarded(TrainingControl.free)
    evaluate = _forwarded(TrainingControl.evaluate)
    put = _forwarded(TrainingControl.put)
    halt = _forwarded(TrainingControl.halt)
    launch = _forwarded(TrainingControl.launch)
    place = _forwarded(TrainingControl.place)
    expect = _forwarded(TrainingControl.expect)
    lose = _forwarded(TrainingControl.lose)
    recover = _forwarded(TrainingControl.recover)
    retire = _forwarded(TrainingControl.retire)
    needed = _forwarded(TrainingControl.needed)
    slow = _forwarded(TrainingControl.slow)
    poll = _forwarded(TrainingControl.poll)
    held_up_by = _forwarded(TrainingControl.held_up_by)
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
