"""Frames over ZeroMQ: each process has one socket that receives, and one to each peer. Everything is encrypted, and every
caller is known. Processes on one machine put large frames into shared memory, and send the rest by Unix sockets of their
own, without ZeroMQ (`harness.live.transport.unix_sockets`).

Messages go one way, so sockets are PUSH and PULL, the simplest that keep order. Each process makes its own pair of keys
(CurveZMQ, https://rfc.zeromq.org/spec/26); the public half is part of its address. A process accepts the keys of its peers,
and of nobody else: so each end proves which process it is, and a stranger can neither send, nor receive, nor read.
"""

from __future__ import annotations

import ipaddress
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple, NoReturn
from urllib.parse import urlsplit

import numpy as np
import zmq
from zmq.utils import z85

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import LARGEST_BYTES, Buffer
from harness.live.transport.shared_memory import NOTE, NOTE_BYTES, SharedMemory
from harness.live.transport.transport import Received
from harness.live.transport.unix_sockets import TICKET_BYTES, UnixSockets

__all__ = ["Address", "KeyPair", "ZmqTransport", "on_loopback"]

_log = logging.getLogger(__name__)

_DOMAIN = b"job"
_GATE = "inproc://zeromq.zap.01"  # where libzmq asks about callers (https://rfc.zeromq.org/spec/27)
_END = b"end"  # asked by this process itself: the gate's thread ends
_WAITING_CALLERS = 1000  # with unknown keys; then the first of them is forgotten
_LOOK_MILLISECONDS = 20  # from one look whether their keys are known to the next
_KEY_CHARACTERS = 64  # of a public key in hexadecimal digits
_NO_WAIT = int(zmq.DONTWAIT)  # an int: pyzmq's enum costs much of the time of a small message
_READABLE = int(zmq.POLLIN)
_WAITING_MESSAGES = 10_000  # to one peer; messages answer one another, so a few dozen are many already
_LOOPBACK_BYTES = 2**18  # kernel's send buffer on this machine: more would leave the cache before it is read
_RECONNECT_MILLISECONDS = (50, 1000)  # first and longest pause before another attempt
_TICKET = b"LINE"  # begins a message with the ticket of a Unix socket; no message of `wire` begins so
_TICKET_BYTES = len(_TICKET) + TICKET_BYTES


@dataclass(frozen=True, slots=True)
class KeyPair:
    """The keys of one process, as ZeroMQ writes them. The secret half never leaves the process."""

    public: bytes
    secret: bytes

    @classmethod
    def fresh(cls) -> KeyPair:
        return cls(*zmq.curve_keypair())

    @classmethod
    def kept(cls, path: Path) -> KeyPair:
        """The keys in a file that only its owner can read; made where there is none. A process that is started again must
        have the keys that its peers accept."""
        if path.exists():
            return cls(*path.read_bytes().split())
        made = cls.fresh()
        with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "wb") as out:
            out.write(made.public + b"\n" + made.secret)
        return made

    @property
    def name(self) -> str:
        """The public half, in hexadecimal digits."""
        return z85.decode(self.public).hex()

    def __repr__(self) -> str:
        return f"KeyPair({self.name})"  # the secret half must not appear in a log

    def __reduce__(self) -> NoReturn:
        raise TypeError(f"Cannot send {self!r} to another process, nor keep it: its secret half is of this process alone.")


class Address(NamedTuple):
    """Where a process is reached, and by which key it is known. As text: ``tcp://HOST:PORT?KEY``, ``#MEMORY`` after it where
    it shares memory."""

    place: str  # tcp://HOST:PORT
    key: str  # public, in hexadecimal digits
    memory: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """Raises ValueError for what is no address of a process."""
        try:
            parts = urlsplit(text)
            if parts.scheme == "tcp" and parts.hostname and parts.port and len(parts.query) == _KEY_CHARACTERS:
                return cls(f"tcp://{parts.netloc}", bytes.fromhex(parts.query).hex(), parts.fragment)
        except ValueError:
            pass
        raise ValueError(f"Cannot reach a process at {text!r}: write tcp://HOST:PORT?KEY.")

    def __str__(self) -> str:
        return f"{self.place}?{self.key}" + (f"#{self.memory}" if self.memory else "")


class _Gate(threading.Thread):
    """Answers libzmq for each caller whether its key is accepted (ZAP). A caller whose key is unknown waits: it may have
    started before this process was told of it. libzmq ends a connection that waits for 30 s, and the caller tries again."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], accepts: Callable[[str], bool]) -> None:
        super().__init__(name="gate", daemon=True)
        self._context, self._accepts = context, accepts
        self._socket = context.socket(zmq.ROUTER)
        self._socket.bind(_GATE)
        self._waiting: deque[tuple[str, list[bytes]]] = deque(maxlen=_WAITING_CALLERS)  # key, and the beginning of an answer

    def run(self) -> None:
        with self._socket as questions:
            while True:
                if questions.poll(_LOOK_MILLISECONDS if self._waiting else None):
                    # Whose connection it is, an empty frame, and the frames of a request.
                    whose, empty, *request = questions.recv_multipart()
                    if request == [_END]:
                        return
                    version, number, domain, _, _, mechanism, *credentials = request
                    if (domain, mechanism) == (_DOMAIN, b"CURVE"):
                        self._waiting.append((credentials[0].hex(), [whose, empty, version, number]))
                for _ in range(len(self._waiting)):
                    key, answer = self._waiting.popleft()
                    if self._accepts(key):
                        questions.send_multipart([*answer, b"200", b"OK", key.encode(), b""])
                    else:
                        self._waiting.append((key, answer))

    def stop(self) -> None:
        """End the thread."""
        if self.is_alive():
            with self._context.socket(zmq.REQ) as last:
                last.connect(_GATE)
                last.send(_END)
                self.join()
        self._socket.close()


def on_loopback(host: str) -> bool:
    """Whether only this machine can reach that address. A host name counts as reachable from others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unix_socket(place: str) -> str:
    """The abstract Unix socket (unix(7)) of a process that shares memory. It is named after the port, so that peers
    reconnect to a process that is started again at the same port."""
    return f"\0harness/{urlsplit(place).netloc}"


class _Sender:
    """A socket to each peer, opened when something is sent to it."""

    def __init__(self, context: zmq.Context[zmq.Socket[bytes]], keys: KeyPair) -> None:
        self._context, self._keys = context, keys
        self._addresses: dict[str, tuple[str, bytes]] = {}  # place and public key
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._refused: set[str] = set()

    def connect(self, peer: str, address: str) -> None:
        self.forget(peer)
        place, key, _ = Address.parse(address)
        self._addresses[peer] = place, z85.encode(bytes.fromhex(key))

    def forget(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        self._refused.discard(peer)
        socket = self._sockets.pop(peer, None)
        if socket is not None:
            socket.close(linger=0)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        self.try_to_send(peer, frames)

    def try_to_send(self, peer: str, frames: Sequence[Buffer]) -> bool:
        """Like `send`. Returns whether the message is on its way."""
        socket = self._sockets.get(peer)
        if socket is None:
            if peer not in self._addresses:
                return False
            socket = self._sockets[peer] = self._calling(*self._addresses[peer])
        try:
            if len(frames) == 1:  # as most often; `send_multipart` would look at it again, and ask for another copy
                socket.send(frames[0], _NO_WAIT)
            else:
                socket.send_multipart(frames, _NO_WAIT, copy=False)
        except zmq.Again:
            self.refuse(peer)
            return False
        return True

    def refuse(self, peer: str) -> None:
        """A message to that peer is dropped: say so once."""
        if peer not in self._refused:
            self._refused.add(peer)
            _log.warning(
                "Cannot send to %s: it does not accept our key, or leaves %d messages waiting.", peer, _WAITING_MESSAGES
            )

    def _calling(self, address: str, key: bytes) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MILLISECONDS[1])
        if on_loopback(urlsplit(address).hostname or ""):  # otherwise the kernel sizes the buffer to the link
            socket.setsockopt(zmq.SNDBUF, _LOOPBACK_BYTES)
        socket.curve_serverkey = key
        socket.curve_publickey, socket.curve_secretkey = self._keys.public, self._keys.secret
        socket.connect(address)
        return socket

    def close(self) -> None:
        for peer in list(self._sockets):
            self.forget(peer)


class _OneMachine:
    """What processes of one machine have in place of ZeroMQ: shared memory for large frames, Unix sockets for the rest.

    A peer whose line has broken, or where another process listens now, is reached by ZeroMQ until it is connected again.
    Raises OSError or AttributeError if the system has no anonymous files.
    """

    def __init__(self, place: str, inlet: int, sender: _Sender) -> None:
        self._sender = sender
        self.memory = SharedMemory()
        try:
            self.lines = UnixSockets(_unix_socket(place), inlet)
        except BaseException:
            self.memory.close()
            raise
        self._there: dict[str, tuple[str, int]] = {}  # peers without a line yet: its name, and the process that listens

    def connect(self, peer: str, address: Address) -> None:
        self.forget(peer)
        if self.memory.connect(peer, address.memory):
            self._there[peer] = _unix_socket(address.place), self.memory.process_of(peer)

    def forget(self, peer: str) -> None:
        self._there.pop(peer, None)
        self.lines.forget(peer)
        self.memory.forget(peer)  # after the line, which may still send from it

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        sent = self.memory.lend(peer, frames)
        try:
            on_its_way = self.lines.out.send(peer, sent)
            if not on_its_way:
                self._sender.refuse(peer)
        except OSError:  # there is no line, or it has broken
            on_its_way = self._called(peer, sent) or self._sender.try_to_send(peer, sent)
        if not on_its_way and sent is not frames:
            self.memory.take_back()

    def _called(self, peer: str, frames: Sequence[Buffer]) -> bool:
        """Make a line to a peer that has none yet, and send by it. Returns False if there is none after all."""
        if peer not in self._there:
            return False
        try:
            ticket = self.lines.connect(peer, *self._there.pop(peer))
            self._sender.send(peer, [_TICKET + ticket])
            return self.lines.out.send(peer, frames)
        except OSError:
            return False

    def close(self) -> None:
        self.lines.close()
        self.memory.close()


class ZmqTransport:
    """A `Transport` that listens on one address of this host, on any free port where none is given.

    On loopback it shares memory, unless `share` is False; its address says how. Raises ValueError if it cannot listen there.
    """

    def __init__(self, host: str, port: int = 0, *, keys: KeyPair | None = None, share: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys or KeyPair.fresh()
        self._peers: dict[str, str] = {}  # by public key; replaced and never changed, because the gate's thread reads it
        self._here: _OneMachine | None = None
        self._sender = _Sender(self._context, self._keys)
        self._gate = _Gate(self._context, lambda key: key in self._peers)
        self._gate.start()
        try:
            self._inlet, place = self._listening(f"tcp://{host}:{port or '*'}")
        except BaseException:
            self.close()
            raise
        if share and on_loopback(host):
            with suppress(OSError, AttributeError):  # the system has no anonymous files, or no such sockets: use ZeroMQ only
                self._here = _OneMachine(place, int(self._inlet.getsockopt(zmq.FD)), self._sender)
        self._address = str(Address(place, self._keys.name, "" if self._here is None else self._here.memory.identity))
        self._timeout_seconds = -1.0  # the socket's default: wait for ever
        self._inlet_waits = True  # it may have messages

    def _listening(self, place: str) -> tuple[zmq.Socket[bytes], str]:
        inlet = self._context.socket(zmq.PULL)
        inlet.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        inlet.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        inlet.setsockopt(zmq.ZAP_DOMAIN, _DOMAIN)
        inlet.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # without an answer of the gate, accept nobody instead of everybody
        inlet.curve_publickey, inlet.curve_secretkey = self._keys.public, self._keys.secret
        inlet.curve_server = True
        try:
            inlet.bind(place)
            found = inlet.getsockopt_string(zmq.LAST_ENDPOINT)
        except zmq.ZMQError as error:
            raise ValueError(
                f"Cannot listen on {place}: {os.strerror(error.errno or 0)}. Give a free port, or 0 for any."
            ) from None
        return inlet, found

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        parsed = Address.parse(address)
        self._peers = {k: name for k, name in self._peers.items() if name != peer} | {parsed.key: peer}
        if self._here is not None:
            self._here.connect(peer, parsed)
        self._sender.connect(peer, address)

    def forget(self, peer: str) -> None:
        self._peers = {k: name for k, name in self._peers.items() if name != peer}
        self._sender.forget(peer)
        if self._here is not None:
            self._here.forget(peer)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        here = self._here
        if here is None:
            self._sender.send(peer, frames)
        elif len(frames) > 1 or (line := here.lines.out.lines.get(peer)) is None or not line.send_alone(frames[0]):
            here.send(peer, frames)

    def second_sender(self) -> _Sender:
        return _Sender(self._context, self._keys)

    def empty(self, size: int) -> Array:
        return np.empty(size, np.float32) if self._here is None else self._here.memory.empty(size)

    def receive(self, timeout_seconds: float) -> Received | None:
        here = self._here
        if here is None:
            return self._receive_by_zeromq(timeout_seconds)
        arrived, until = here.lines.arrived, 0.0
        while True:
            while arrived:
                key, frames = arrived.popleft()
                if (caller := self._peers.get(key)) is not None:  # else it was a peer when it connected
                    return Received(caller, here.memory.borrow(frames) if frames[0][:NOTE_BYTES] == NOTE else frames)
            if self._inlet_waits and self._take_by_zeromq(here):
                continue
            now = time.monotonic()
            if not until:
                until = now + timeout_seconds
            elif now >= until:
                return None
            self._inlet_waits = here.lines.wait(until - now)

    def _take_by_zeromq(self, here: _OneMachine) -> bool:
        """Take what has come by ZeroMQ: a message, or the ticket of a line. Returns False if there is nothing."""
        if (found := self._by_zeromq(0.0)) is None:
            return False
        key, frames = found
        first = frames[0]
        if len(first) != _TICKET_BYTES or first[: len(_TICKET)] != _TICKET:
            here.lines.arrived.append(found)
        elif key in self._peers:
            here.lines.admit(bytes(first[len(_TICKET) :]), key)
        return True

    def _receive_by_zeromq(self, timeout_seconds: float) -> Received | None:
        while (found := self._by_zeromq(timeout_seconds)) is not None:
            if (caller := self._peers.get(found[0])) is not None:  # else it was a peer when it connected
                return Received(caller, found[1])
        return None

    def _by_zeromq(self, timeout_seconds: float) -> tuple[str, Sequence[Buffer]] | None:
        if timeout_seconds:
            if timeout_seconds != self._timeout_seconds:
                self._inlet.setsockopt(zmq.RCVTIMEO, round(timeout_seconds * 1000))
                self._timeout_seconds = timeout_seconds
        elif not int(self._inlet.getsockopt(zmq.EVENTS)) & _READABLE:  # `Again` takes longer
            return None
        try:
            frame = self._inlet.recv(0 if timeout_seconds else _NO_WAIT, copy=False)
        except zmq.Again:
            return None
        key = str(frame.get("User-Id"))
        frames: list[Buffer] = [frame.bytes]
        while frame.more:
            frame = self._inlet.recv(copy=False)
            frames.append(frame.buffer)
        return key, frames

    def close(self) -> None:
        self._gate.stop()
        self._context.destroy(linger=0)
        if self._here is not None:
            self._here.close()
