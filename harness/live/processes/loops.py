"""The loops of the processes of a live job: they carry messages between a transport and a core, and send heartbeats.

A new process is registered with the coordinator's process, which tells every process the address of every other (`Peers`).
It does so on the same channel that the core's messages take, so a process that is named in a message can be reached.
Heartbeats come from a thread of their own, because the loop may compute for a long time.
`harness.live.processes.coordinator_process` is the coordinator's end of this.
"""

from __future__ import annotations

import logging
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Protocol, TypeAlias

from harness.live.processes.host import Cores, keep_memory
from harness.live.protocol.blocks import Layout
from harness.live.protocol.messages import COORDINATOR, Message, may_send
from harness.live.protocol.wire import Beat, Buffer, Peers, Unreadable, decode, encode, signal
from harness.live.server.server import Server
from harness.live.server.store import Store
from harness.live.transport.transport import Transport
from harness.live.worker.tasks import Computed, RowsOf, WorkerTask
from harness.live.worker.worker import Worker

__all__ = ["BEAT_SECONDS", "TICK_SECONDS", "Compute", "Heartbeat", "Mailbox", "Member", "run_server", "run_worker"]

BEAT_SECONDS = 0.3
"""From one heartbeat to the next: ten of them may be lost or late before a process is taken for dead."""

TICK_SECONDS = 0.25
"""From one look for answers that have not come to the next; messages themselves are handled at once."""

_log = logging.getLogger(__name__)

Compute: TypeAlias = Callable[[WorkerTask], Computed]


class Mailbox:
    """A process's end of all its channels: messages over a transport, and the addresses of the other processes."""

    def __init__(self, name: str, generation: int, transport: Transport) -> None:
        self.name, self.generation, self.transport = name, generation, transport
        self.peers: dict[str, tuple[str, int]] = {}  # address and generation
        self.refused = 0  # messages that cannot be read, or that their sender may not send
        self._listed = 0  # generation of the coordinator that sent the last list
        # The last message without arrays, and its frames: it may go to others, too.
        self._encoded: tuple[Message | None, list[Buffer]] = (None, [])

    def send(self, receiver: str, message: Message) -> None:
        """Send a message. Returns at once; a message to a process that does not exist is lost."""
        if message.arrays:
            frames = encode(self.name, message)
        else:
            if self._encoded[0] is not message:
                self._encoded = message, encode(self.name, message)
            frames = self._encoded[1]
        self.transport.send(receiver, frames)

    def receive(self, timeout_seconds: float) -> tuple[str, Message] | None:
        """The next (sender, message), or None if none comes in time; frames that are no message are dropped."""
        while True:
            try:
                if (received := self.transport.receive(timeout_seconds)) is None:
                    return None
                sender, message = heard = decode(received.frames)
            except Unreadable as error:
                self._refuse(f"drops what it received: {error}")
            else:
                head: object = message.head
                caller = received.caller
                if caller != sender and caller is not None:
                    self._refuse(f"refuses a message that {caller} sends in the name of {sender!r}")
                elif not may_send(sender, type(message.head)):
                    self._refuse(f"refuses {type(head).__name__} of {sender}, which is not for its role to say")
                elif not isinstance(head, Peers):
                    return heard
                elif sender != COORDINATOR or message.generation < self._listed:
                    self._refuse(f"refuses a list of processes of {sender}, generation {message.generation}")
                else:
                    self._listed = message.generation
                    self.update(head)
            timeout_seconds = 0.0

    def _refuse(self, what: str) -> None:
        self.refused += 1
        if self.refused & (self.refused - 1) == 0:  # the 1st, 2nd, 4th, ...: who sends many is not to fill the disk
            _log.warning("%s %s (%d so far)", self.name, what, self.refused)

    def update(self, peers: Peers) -> None:
        """Connect to processes that are new or have moved, and drop those that are gone."""
        now = {name: (address, generation) for name, address, generation in peers.peers if name != self.name}
        for name in self.peers.keys() - now.keys():
            self.transport.forget(name)
        for name, place in now.items():
            if self.peers.get(name) != place:
                self.transport.connect(name, place[0])
        self.peers = now


class Heartbeat(threading.Thread):
    """A thread that sends heartbeats to the coordinator's process until it is stopped."""

    def __init__(self, mailbox: Mailbox) -> None:
        super().__init__(name=f"heartbeat of {mailbox.name}", daemon=True)
        self._mailbox = mailbox
        self._over = threading.Event()
        self._sender = mailbox.transport.second_sender()

    def run(self) -> None:
        beat = encode(self._mailbox.name, signal(Beat(), self._mailbox.generation))
        connected: tuple[str, int] | None = None
        while not self._over.wait(BEAT_SECONDS):
            coordinator = self._mailbox.peers.get(COORDINATOR)
            # A coordinator that was restarted may have another address.
            if coordinator is not None and coordinator != connected:
                self._sender.connect(COORDINATOR, coordinator[0])
                connected = coordinator
            self._sender.send(COORDINATOR, beat)
        self._sender.close()

    def stop(self) -> None:
        """End the thread."""
        self._over.set()
        self.join()


@dataclass(frozen=True, slots=True)
class Member:
    """A process of a job, other than the coordinator's."""

    name: str
    generation: int
    transport: Transport  # closed when its loop ends
    coordinator: str  # the address of the coordinator's process, which knows this one's
    over: threading.Event


class _Core(Protocol):
    @property
    def view(self) -> int: ...

    def hello(self) -> None: ...

    def receive(self, sender: str, message: Message) -> None: ...


def run_server(member: Member, layout: Layout, optimizer: str, aggregation: str) -> None:
    """Run a server until `member.over` is set."""
    keep_memory()
    with _heard(member) as mailbox:
        store = Store(layout, optimizer, aggregation, member.transport.empty)
        core = Server(member.name, member.generation, layout, store, mailbox.send)
        _serve(member, mailbox, core, tick=lambda: None, work=lambda: None)


def run_worker(
    member: Member, layout: Layout, prepare: Callable[[], Compute], cores: Cores, rows_of: RowsOf | None = None
) -> None:
    """Run a worker or an evaluator until `member.over` is set. `prepare` imports and compiles what `Compute` needs; it may
    take long, and the process is heard meanwhile. `rows_of` is for a layout with embedding tables.

    The loop computes between messages: XLA cannot be interrupted, so a thread would only add its hand-over to every clock.
    """
    keep_memory()
    with _heard(member) as mailbox:
        _work(member, mailbox, layout, prepare(), cores, rows_of)


def _work(member: Member, mailbox: Mailbox, layout: Layout, compute: Compute, cores: Cores, rows_of: RowsOf | None) -> None:
    tasks: deque[WorkerTask] = deque()
    core = Worker(member.name, member.generation, layout, mailbox.send, time.monotonic, tasks.append, rows_of=rows_of)

    def work() -> None:
        while tasks:
            # A message that waits may cancel the task or add a later one, so all of them are read first.
            while (heard := mailbox.receive(0.0)) is not None:
                core.receive(*heard)
            task = tasks.popleft()
            if tasks and task.kind == "gradient" and any(later.kind == "gradient" for later in tasks):
                continue
            if task.work is not None:
                cores.use(task.work.intra_threads)
            core.computed(compute(task))

    _serve(member, mailbox, core, tick=core.tick, work=work)


@contextmanager
def _heard(member: Member) -> Iterator[Mailbox]:
    """The mailbox of a process that sends heartbeats until the context ends."""
    mailbox = Mailbox(member.name, member.generation, member.transport)
    # Generation 0 is below every real one: the first list from the coordinator replaces this entry.
    mailbox.update(Peers(((COORDINATOR, member.coordinator, 0),)))
    heartbeat = Heartbeat(mailbox)
    heartbeat.start()
    try:
        yield mailbox
    finally:
        heartbeat.stop()
        mailbox.transport.close()


def _serve(member: Member, mailbox: Mailbox, core: _Core, *, tick: Callable[[], None], work: Callable[[], None]) -> None:
    receive, handle, now = mailbox.receive, core.receive, time.monotonic
    while not member.over.is_set():
        if not core.view:  # not admitted yet, or the announcement was lost: announce again
            core.hello()
        tick()
        work()
        due = now() + TICK_SECONDS
        while now() < due and (heard := receive(TICK_SECONDS)) is not None:
            handle(*heard)
            heard = None  # its arrays may be large: free them before the next message is received
            work()
