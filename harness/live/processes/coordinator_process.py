"""The coordinator's process: its core, the list of who is where, and the questions of whoever drives the job.

The list is kept in a file beside the core's journal. A coordinator that is started again in the same folder goes on from
there: it tells everybody where it is now, waits until they have been heard or must be taken for dead, and recovers.
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

from harness.live.coordinator.branch import LiveJob
from harness.live.coordinator.coordinator import Coordinator
from harness.live.coordinator.journal import FileJournal
from harness.live.driver.links import Meter, Pair, Transfer
from harness.live.processes.loops import TICK_SECONDS, Mail
from harness.live.protocol.messages import COORDINATOR, Message
from harness.live.protocol.wire import Beat, Here, Peers, signal
from harness.live.transport.transport import Transport

__all__ = ["SILENT_SECONDS", "Coordination", "last_port"]

SILENT_SECONDS = 3.0
"""A process that was not heard for so long hangs, or is cut off."""

_log = logging.getLogger(__name__)

_TURN_SECONDS = 0.02  # how long a question waits at most while nothing happens
_STALL_SECONDS = 1.0  # a turn that takes longer was our own absence, not that of others

_LIST = "peers.msgpack"

_Everybody: TypeAlias = tuple[tuple[str, str, int], ...]  # name, address, generation
_Ask: TypeAlias = tuple[str, tuple[Any, ...], dict[str, Any], "Future[Any]"]


class Coordination:
    """The loop of the coordinator's process, on a thread of its own from `start` to `stop`; `call` is for all others."""

    def __init__(self, job: LiveJob, transport: Transport, folder: Path) -> None:
        self._asked: queue.SimpleQueue[_Ask] = queue.SimpleQueue()
        self._over = threading.Event()
        self._failed: Exception | None = None
        self._list = folder / _LIST
        self._journal = FileJournal(folder / "journal")
        begun = next(iter(self._journal), None) is not None
        generation, _, known = _read(self._list) if self._list.exists() else (0, "", ())
        self._mail = Mail(COORDINATOR, generation + 1, transport)
        self._heard = {name: time.monotonic() for name, _, _ in known}
        self._unheard = {name for name, _, _ in known}
        self._mail.know(Peers(known))
        self._to_recover = begun and bool(known)
        make: Callable[..., Coordinator] = Coordinator.restored if begun else Coordinator
        self._meter = Meter()
        self._core = make(job, self._send, time.monotonic, self._journal)
        self._thread = threading.Thread(target=self._run, name=COORDINATOR, daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        """End the loop, and close its transport and journal."""
        self._over.set()
        self._thread.join()

    # ---------------------------------------------------------------------------------------------- for those who drive it

    def call(self, name: str, *given: Any, **named: Any) -> Any:
        """What the core's method of that name returns, or its property is, or one of this process: `address`, `silent`,
        `transfers`, `forget`. Carried out between two messages; what it raises is raised here.

        Raises RuntimeError once the loop has ended, with what ended it as the cause.
        """
        answer: Future[Any] = Future()
        self._asked.put((name, given, named, answer))
        while self._thread.is_alive():
            try:
                return answer.result(timeout=1.0)
            except TimeoutError:
                if answer.done():
                    raise
        if answer.done():
            return answer.result()
        raise RuntimeError(f"Cannot ask the coordinator for {name!r}: it has ended ({self._failed}).") from self._failed

    @property
    def address(self) -> str:
        """Where the coordinator's process is reached."""
        return self._mail.transport.address

    def silent(self) -> dict[str, int]:
        """Those who have not been heard for `SILENT_SECONDS`, with their generations; they are named until forgotten."""
        now = time.monotonic()
        peers = self._mail.peers
        return {n: peers[n][1] for n, at in self._heard.items() if n in peers and now - at > SILENT_SECONDS}

    def transfers(self) -> dict[Pair, Transfer]:
        """Those that were completed since this was asked last."""
        return self._meter.take()

    def forget(self, names: Collection[str]) -> None:
        """Those are gone for good; nothing is sent to them any more."""
        for name in names:
            self._heard.pop(name, None)
        self._publish({n: place for n, place in self._mail.peers.items() if n not in names})

    # -------------------------------------------------------------------------------------------------------------- the loop

    def _send(self, receiver: str, message: Message) -> None:
        self._meter.sent(receiver, message.head, time.monotonic())
        self._mail.send(receiver, message)

    def _run(self) -> None:
        try:
            self._publish(self._mail.peers)
            self._serve()
        except Exception as error:
            self._failed = error
            _log.exception("The coordinator's process ends.")
        finally:
            self._mail.transport.close()
            self._journal.close()

    def _serve(self) -> None:
        turned = due = time.monotonic()
        while not self._over.is_set():
            while not self._asked.empty():
                self._answer(*self._asked.get())
            heard = self._mail.receive(_TURN_SECONDS)
            now = time.monotonic()
            if now - turned > _STALL_SECONDS:
                self._heard = {name: at + now - turned for name, at in self._heard.items()}
            turned = now
            if heard is not None:
                self._take(*heard)
            if now >= due:
                due = now + TICK_SECONDS
                self._core.tick()
                self._recover_when_all_are_heard()

    def _take(self, sender: str, message: Any) -> None:
        known = self._mail.peers.get(sender)
        if isinstance(message.head, Here):
            place = (message.head.address, message.generation)
            if place != known and message.generation >= (known[1] if known else 0):
                self._heard[sender] = time.monotonic()
                self._publish(self._mail.peers | {sender: place})
        elif isinstance(message.head, Beat):
            if known is not None and message.generation == known[1]:
                self._heard[sender] = time.monotonic()
                self._unheard.discard(sender)
        else:
            self._meter.heard(sender, message.head, time.monotonic())
            self._core.receive(sender, message)

    def _publish(self, peers: dict[str, tuple[str, int]]) -> None:
        """Keep the list, and give it to everybody in it."""
        everybody = tuple((name, *place) for name, place in peers.items())
        self._mail.know(Peers(everybody))
        part = self._list.with_suffix(".part")
        part.write_bytes(msgspec.msgpack.encode((self._mail.generation, self.address, everybody)))
        part.replace(self._list)
        told = signal(Peers(((COORDINATOR, self.address, self._mail.generation), *everybody)), self._mail.generation)
        for name in peers:
            self._mail.send(name, told)

    def _recover_when_all_are_heard(self) -> None:
        if self._to_recover and not self._unheard - self.silent().keys():
            self._to_recover = False
            if dead := self.silent():
                self._core.lose(dead)
            with suppress(RuntimeError):  # whoever drives the job starts servers, and has its checkpoints
                self._core.recover()

    def _answer(self, name: str, given: tuple[Any, ...], named: dict[str, Any], answer: Future[Any]) -> None:
        try:
            found = getattr(self if name in {"address", "silent", "transfers", "forget"} else self._core, name)
            answer.set_result(found(*given, **named) if callable(found) else found)
        except Exception as error:
            answer.set_exception(error)


def last_port(folder: Path) -> int:
    """Where the coordinator of this folder listened before; 0 if there was none. The next one should listen there, too: a
    process that was started meanwhile has been told of no other place."""
    path = folder / _LIST
    return (urlsplit(_read(path)[1]).port if path.exists() else None) or 0


def _read(path: Path) -> tuple[int, str, _Everybody]:
    """The generation of the coordinator that wrote the list, its address, and whom it knew."""
    return msgspec.msgpack.decode(path.read_bytes(), type=tuple[int, str, _Everybody])
