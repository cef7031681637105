"""The coordinator's process: the coordinator itself, the list of all processes, and answers to what the driver asks.

The list is kept in a file beside the coordinator's journal. A process that is started again in the same folder continues
from both: it tells every other process its new address, waits until each of them was heard or must be taken for dead, and
recovers.
"""

from __future__ import annotations

import logging
import queue
import threading
import time
from collections.abc import Callable, Collection
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeAlias
from urllib.parse import urlsplit

import msgspec

from harness.live.coordinator.branches.branch import LiveJob
from harness.live.coordinator.coordinator import Coordinator
from harness.live.coordinator.ledger.journal import FileJournal
from harness.live.processes.client import (
    CoordinatorClient,
    ProcessQuestions,
    RemoteCoordinator,
    ReportQuestions,
    StateQuestions,
    TrainingQuestions,
)
from harness.live.processes.loops import TICK_SECONDS, Mailbox
from harness.live.processes.transfers import NodePair, Transfer, TransferMeter
from harness.live.protocol.messages import COORDINATOR, Message
from harness.live.protocol.wire import Beat, Peers, signal
from harness.live.transport.transport import Transport

__all__ = ["SILENT_SECONDS", "STARTING_SECONDS", "CoordinatorProcess", "answers_of", "last_port"]

SILENT_SECONDS = 3.0
"""A process that was not heard for so long, ten heartbeats, hangs, or is cut off; unless the user says otherwise."""

STARTING_SECONDS = 30.0
"""The same for a process that has not joined yet: an import or a compilation may hold up its heartbeats for seconds."""

_log = logging.getLogger(__name__)

_TURN_SECONDS = 0.02  # longest wait of a question while no message comes
_STALL_SECONDS = 1.0  # of a turn, or a third of the silence that is allowed: this process was held up, and heard no other

_LIST = "peers.msgpack"

_PeerList: TypeAlias = tuple[tuple[str, str, int], ...]  # name, address, generation
_Question: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any], "Future[Any]"]

_OF_PROCESS = {"address", "silent", "starting", "transfers", "register", "forget"}
"""Questions that this process answers; the coordinator answers all others."""


class CoordinatorProcess:
    """The coordinator's loop, on a thread of its own from `start` to `stop`. Other threads use `client`, or `ask`."""

    def __init__(self, job: LiveJob, transport: Transport, folder: Path, silent_seconds: float = SILENT_SECONDS) -> None:
        """`silent_seconds`: after which a process that is not heard hangs, or is cut off."""
        self._silent_seconds = silent_seconds
        self._stall_seconds = min(_STALL_SECONDS, silent_seconds / 3)
        self.client: CoordinatorClient = RemoteCoordinator(self.ask)
        self._questions: queue.SimpleQueue[_Question] = queue.SimpleQueue()
        self._over = threading.Event()
        self._failed: Exception | None = None
        self._list = folder / _LIST
        self._journal = FileJournal(folder / "journal")
        begun = next(iter(self._journal), None) is not None
        generation, _, known = _read(self._list) if self._list.exists() else (0, "", ())
        self._mailbox = Mailbox(COORDINATOR, generation + 1, transport)
        self._heard = {name: time.monotonic() for name, _, _ in known}
        self._turned = time.monotonic()  # when the loop last listened
        self._registered: dict[str, float] = {}  # when each process was
        self._unheard = {name for name, _, _ in known}
        self._mailbox.update(Peers(known))
        self._to_recover = begun and bool(known)
        make: Callable[..., Coordinator] = Coordinator.restored if begun else Coordinator
        self._meter = TransferMeter()
        self._core = make(job, self._send, time.monotonic, self._journal)
        self._answers = answers_of(self._core)
        self._thread = threading.Thread(target=self._run, name=COORDINATOR, daemon=True)

    def start(self) -> None:
        """Begin the loop."""
        self._thread.start()

    def stop(self) -> None:
        """End the loop, and close its transport and journal."""
        self._over.set()
        self._thread.join()

    # ----------------------------------------------------------------------------------------------- for other threads

    def ask(self, name: str, *given: Any, **named: Any) -> Any:
        """The value of the member of `CoordinatorClient` of that name; methods are called with the arguments.

        The loop answers between two messages; what it raises is raised here. Raises RuntimeError once the loop has ended,
        with the reason as its cause.
        """
        answer: Future[Any] = Future()
        self._questions.put((name, given, named, answer))
        while self._thread.is_alive():
            try:
                return answer.result(timeout=1.0)
            except TimeoutError:
                if answer.done():  # then it is the answer that raises TimeoutError
                    raise
        if answer.done():
            return answer.result()
        raise RuntimeError(f"Cannot ask the coordinator for {name!r}: it has ended ({self._failed}).") from self._failed

    # ------------------------------------------------------------------------------ answers of the process itself

    @property
    def address(self) -> str:
        """Where the coordinator's process is reached."""
        return self._mailbox.transport.address

    def silent(self) -> dict[str, int]:
        """Processes that were not heard for too long, with their generations, until they are forgotten."""
        now = time.monotonic()
        if now - self._turned > self._stall_seconds:
            return {}  # this process was held up, and has not heard since what waits for it
        peers = self._mailbox.peers
        members = self._core.ledger.members
        # One that has not joined yet imports and compiles, and may hold up its own heartbeats.
        joined, starting = self._silent_seconds, max(STARTING_SECONDS, self._silent_seconds)
        late = (n for n, at in self._heard.items() if now - at > (joined if n in members else starting))
        return {n: peers[n][1] for n in late if n in peers}

    def starting(self) -> dict[str, float]:
        """Processes that have started and not joined yet, and for how many seconds: they import, load and compile."""
        now, members, peers = time.monotonic(), self._core.ledger.members, self._mailbox.peers
        return {n: now - at for n, at in self._registered.items() if n in peers and n not in members}

    def transfers(self) -> dict[NodePair, Transfer]:
        """Transfers that were completed since the last call."""
        return self._meter.take()

    def register(self, name: str, generation: int, address: str) -> str:
        """A process that is expected has started, and is reached at `address`, which has its public key. Returns the
        coordinator's address.

        Ask this over a channel on which only processes of the job can ask. Raises ValueError for a process that is not
        expected, and for a second one of the same name and generation.
        """
        known = self._mailbox.peers.get(name)
        if self._core.ledger.expected.get(name) != generation or (known is not None and known[1] == generation):
            if known == (address, generation):  # it asks again, because the answer was lost
                return self.address
            raise ValueError(f"Cannot register {name}, generation {generation}: it is not expected, or is here already.")
        self._heard[name] = self._registered[name] = time.monotonic()
        self._publish(self._mailbox.peers | {name: (address, generation)})
        return self.address

    def forget(self, names: Collection[str]) -> None:
        """Send nothing more to these processes, which are gone for good."""
        for name in names:
            self._heard.pop(name, None)
        self._publish({n: place for n, place in self._mailbox.peers.items() if n not in names})

    # -------------------------------------------------------------------------------------------------------- the loop

    def _send(self, receiver: str, message: Message) -> None:
        now = time.monotonic()
        self._mailbox.send(receiver, message)  # first: others wait for it
        self._meter.sent(receiver, message.head, now)

    def _run(self) -> None:
        try:
            self._publish(self._mailbox.peers)
            self._serve()
        except Exception as error:
            self._failed = error
            _log.exception("The coordinator's process ends.")
        finally:
            self._mailbox.transport.close()
            self._journal.close()

    def _serve(self) -> None:
        receive, questions, clock = self._mailbox.receive, self._questions, time.monotonic
        self._turned = due = clock()
        while not self._over.is_set():
            while not questions.empty():
                self._answer(*questions.get())
            heard = receive(_TURN_SECONDS)
            now = clock()
            if (held_up := now - self._turned) > self._stall_seconds:
                # The others were not silent: their heartbeats were waiting for us.
                self._heard = {name: at + held_up for name, at in self._heard.items()}
            self._turned = now
            if heard is not None:
                self._take(*heard, now)
            if now >= due:
                due = now + TICK_SECONDS
                self._core.tick()
                self._recover_when_all_are_heard()

    def _take(self, sender: str, message: Message, now: float) -> None:
        head: object = message.head
        if not isinstance(head, Beat):
            self._meter.received(sender, message.head, now)
            self._core.receive(sender, message)
        elif (known := self._mailbox.peers.get(sender)) is not None and message.generation == known[1]:
            self._heard[sender] = now
            self._unheard.discard(sender)

    def _publish(self, peers: dict[str, tuple[str, int]]) -> None:
        """Write the list of processes to its file, then send it to all of them."""
        listed = tuple((name, *place) for name, place in peers.items())
        self._mailbox.update(Peers(listed))
        part = self._list.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode((self._mailbox.generation, self.address, listed)))
        part.replace(self._list)
        generation = self._mailbox.generation
        message = signal(Peers(((COORDINATOR, self.address, generation), *listed)), generation)
        for name in peers:
            self._mailbox.send(name, message)

    def _recover_when_all_are_heard(self) -> None:
        if self._to_recover and not self._unheard - self.silent().keys():
            self._to_recover = False
            if dead := self.silent():
                self._core.processes.lose(dead)
            with suppress(RuntimeError):  # blocks are lost: the driver starts servers, and has checkpoints
                self._core.processes.recover()

    def _answer(self, name: str, given: tuple[Any, ...], named: dict[str, Any], answer: Future[Any]) -> None:
        try:
            if name in _OF_PROCESS:
                found = getattr(self, name)
                answer.set_result(found(*given, **named) if callable(found) else found)
            else:
                answer.set_result(self._answers(name, *given, **named))
        except Exception as error:
            answer.set_exception(error)


def answers_of(core: Coordinator) -> Callable[..., Any]:
    """Answers (name, *arguments, **keyword_arguments) about a job: the value of the member of that name; methods are called
    with the arguments. Raises AttributeError for what nobody may ask."""
    states: StateQuestions = core.states
    training: TrainingQuestions = core.training
    processes: ProcessQuestions = core.processes
    reports: ReportQuestions = core.reports
    answering: tuple[tuple[type, object], ...] = (
        (StateQuestions, states),
        (TrainingQuestions, training),
        (ProcessQuestions, processes),
        (ReportQuestions, reports),
    )
    owners = {name: owner for kind, owner in answering for name in vars(kind) if not name.startswith("_")}

    def answer(name: str, *given: Any, **named: Any) -> Any:
        if name not in owners:
            raise AttributeError(f"Cannot ask the coordinator for {name!r}: a driver may ask {', '.join(sorted(owners))}.")
        found = getattr(owners[name], name)
        return found(*given, **named) if callable(found) else found

    return answer


def last_port(folder: Path) -> int:
    """The port on which the coordinator of this folder listened before; 0 if there was none.

    The next one should listen there again: a process that was started meanwhile knows no other address.
    """
    path = folder / _LIST
    return (urlsplit(_read(path)[1]).port if path.exists() else None) or 0


def _read(path: Path) -> tuple[int, str, _PeerList]:
    """The generation of the coordinator that wrote the list, its address, and the list."""
    return msgspec.msgpack.decode(path.read_bytes(), type=tuple[int, str, _PeerList])
