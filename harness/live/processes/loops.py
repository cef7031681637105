"""The processes of a live job: loops that carry messages between a transport and a core, and the beat of their hearts.

A process introduces itself to the coordinator's (`Here`), which tells everybody who is where (`Peers`) on the very channel
that its core's messages take, so that whoever is named in one of them can be reached. A thread of its own beats while the
loop computes. `harness.live.processes.coordinator_process` is the coordinator's end of this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from harness.live.processes.host import Cores, keep_memory
from harness.live.protocol.blocks import Layout
from harness.live.protocol.messages import COORDINATOR, Message
from harness.live.protocol.wire import Beat, Here, Peers, Unreadable, decode, encode, signal
from harness.live.server.server import Server
from harness.live.server.store import Store
from harness.live.transport.transport import Transport
from harness.live.worker.worker import Computed, Worker, WorkerTask

__all__ = ["BEAT_SECONDS", "TICK_SECONDS", "Compute", "Heart", "Mail", "Member", "run_server", "run_worker"]

BEAT_SECONDS = 0.3
TICK_SECONDS = 0.25

_log = logging.getLogger(__name__)

Compute: TypeAlias = Callable[[WorkerTask], Computed]


class Mail:
    """A process's end of all its channels: messages over a transport, and who is where."""

    def __init__(self, name: str, generation: int, transport: Transport) -> None:
        self.name, self.generation, self.transport = name, generation, transport
        self.peers: dict[str, tuple[str, int]] = {}  # address and generation

    def send(self, receiver: str, message: Message) -> None:
        """As cores want it: returns at once, and loses what is sent to nobody."""
        self.transport.send(receiver, encode(self.name, message))

    def receive(self, timeout_seconds: float) -> tuple[str, Message] | None:
        """The next message, (sender, message), or None where none comes in time; what is no message is dropped."""
        while True:
            try:
                if (frames := self.transport.receive(timeout_seconds)) is None:
                    return None
                sender, message = decode(frames)
            except Unreadable as error:
                timeout_seconds = 0.0
                _log.warning("%s drops what it received: %s", self.name, error)
                continue
            head: object = message.head
            if not isinstance(head, Peers):
                return sender, message
            self.know(head)
            timeout_seconds = 0.0

    def know(self, everybody: Peers) -> None:
        """Connect to those who are new or elsewhere, and drop those who are gone."""
        now = {name: (address, generation) for name, address, generation in everybody.peers if name != self.name}
        for name in self.peers.keys() - now.keys():
            self.transport.forget(name)
        for name, place in now.items():
            if self.peers.get(name) != place:
                self.transport.connect(name, place[0])
        self.peers = now


class Heart(threading.Thread):
    """Beats to the coordinator's process until it is told to stop, whatever the rest of the process does."""

    def __init__(self, mail: Mail) -> None:
        super().__init__(name=f"heart of {mail.name}", daemon=True)
        self._mail = mail
        self._over = threading.Event()
        self._outlets = mail.transport.second_sender()

    def run(self) -> None:
        beat = encode(self._mail.name, signal(Beat(), self._mail.generation))
        connected: tuple[str, int] | None = None
        while not self._over.wait(BEAT_SECONDS):
            coordinator = self._mail.peers.get(COORDINATOR)
            if coordinator is not None and coordinator != connected:
                self._outlets.connect(COORDINATOR, coordinator[0])
                connected = coordinator
            self._outlets.send(COORDINATOR, beat)
        self._outlets.close()

    def stop(self) -> None:
        self._over.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a job that is not the coordinator's."""

    name: str
    generation: int
    transport: Transport  # closed by whoever runs it
    coordinator: str  # the address of the coordinator's process
    over: threading.Event


class _Core(Protocol):
    @property
    def view(self) -> int: ...

    def hello(self) -> None: ...

    def receive(self, sender: str, message: Message) -> None: ...


def run_server(member: Member, layout: Layout, optimizer: str, aggregation: str) -> None:
    """Be a server until `member.over`."""
    keep_memory()
    mail = Mail(member.name, member.generation, member.transport)
    store = Store(layout, optimizer, aggregation, member.transport.empty)
    core = Server(member.name, member.generation, layout, store, mail.send)
    _serve(member, mail, core, tick=lambda: None, work=lambda: None)


def run_worker(member: Member, layout: Layout, prepare: Callable[[], Compute], cores: Cores) -> None:
    """Be a worker, or an evaluator, until `member.over`. `prepare` imports and compiles what `Compute` needs.

    It computes between messages: XLA cannot be interrupted, so a thread would only add its hand-over to every clock.
    """
    keep_memory()
    mail = Mail(member.name, member.generation, member.transport)
    tasks: deque[WorkerTask] = deque()
    core = Worker(member.name, member.generation, layout, mail.send, time.monotonic, tasks.append)
    compute = prepare()

    def work() -> None:
        while tasks:
            while (heard := mail.receive(0.0)) is not None:  # a task may be void by now
                core.receive(*heard)
            task = tasks.popleft()
            if task.kind == "gradient" and any(later.kind == "gradient" for later in tasks):
                continue
            if task.work is not None:
                cores.use(task.work.intra_threads)
            core.computed(compute(task))

    _serve(member, mail, core, tick=core.tick, work=work)


def _serve(member: Member, mail: Mail, core: _Core, *, tick: Callable[[], None], work: Callable[[], None]) -> None:
    mail.know(Peers(((COORDINATOR, member.coordinator, 0),)))
    heart = Heart(mail)
    heart.start()
    due = 0.0
    try:
        while not member.over.is_set():
            if time.monotonic() >= due:
                if not core.view:
                    mail.send(COORDINATOR, signal(Here(mail.transport.address), mail.generation))
                    core.hello()
                tick()
                work()
                due = time.monotonic() + TICK_SECONDS
            heard = mail.receive(TICK_SECONDS)
            if heard is not None:
                core.receive(*heard)
                heard = None  # whose arrays may be large: the next message is to find their memory free
                work()
    finally:
        heart.stop()
        mail.transport.close()
