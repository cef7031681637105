"""Frames over ZeroMQ: each process has one socket that receives, and one to each peer. With the job's keys it is encrypted.
Without keys, processes on one machine put large frames into shared memory, and send the rest through abstract Unix sockets.

Messages go one way, so sockets are PUSH and PULL, the simplest that keep order. With `Keys` (CurveZMQ,
https://rfc.zeromq.org/spec/26), the receiving end proves that it belongs to the job, and accepts only processes of the job:
without the keys one can neither send, nor receive, nor read the traffic.
"""

from __future__ import annotations

import ipaddress
import logging
import os
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from urllib.parse import urldefrag, urlsplit

import numpy as np
import zmq
from zmq.auth.thread import ThreadAuthenticator

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import LARGEST_BYTES, Buffer
from harness.live.transport.shared_memory import SharedMemory

__all__ = ["Keys", "ZmqTransport", "on_loopback"]

_log = logging.getLogger(__name__)

_DOMAIN = "job"
_NO_WAIT = int(zmq.DONTWAIT)  # an int: pyzmq's enum costs much of the time of a small message
_WAITING_MESSAGES = 10_000  # to one peer; messages answer one another, so a few dozen are many already
_LOOPBACK_BYTES = 2**18  # kernel's send buffer on this machine: more would leave the cache before it is read
_RECONNECT_MILLISECONDS = (50, 1000)  # first and longest pause before another attempt


@dataclass(frozen=True, slots=True)
class Keys:
    """A job's keys, the same for all its processes: (public, secret) of those who listen, and of those who call."""

    listen: tuple[bytes, bytes]
    call: tuple[bytes, bytes]

    @classmethod
    def fresh(cls) -> Keys:
        return cls(zmq.curve_keypair(), zmq.curve_keypair())

    def __repr__(self) -> str:
        return "Keys(...)"  # keys must not appear in a log

    def callback(self, domain: str, key: bytes) -> bool:
        """Whether a caller with that public key is accepted (ZeroMQ requires this name)."""
        return domain == _DOMAIN and key == self.call[0]


def on_loopback(host: str) -> bool:
    """Whether only this machine can reach that address. A host name counts as reachable from others."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def _unix_socket(place: str) -> str:
    """The abstract Unix socket (unix(7)) of a process that shares memory. It is named after the port, so that peers
    reconnect to a process that is started again at the same port."""
    return f"ipc://@harness/{urlsplit(place).netloc}"


class _Sender:
    """A socket to each peer, opened when something is sent to it."""

    def __init__(
        self, context: zmq.Context[zmq.Socket[bytes]], keys: Keys | None, memory: SharedMemory | None = None
    ) -> None:
        self._context, self._keys, self._memory = context, keys, memory
        self._addresses: dict[str, str] = {}
        self._sockets: dict[str, zmq.Socket[bytes]] = {}
        self._refused: set[str] = set()

    def connect(self, peer: str, address: str) -> None:
        self.forget(peer)
        place, identity = urldefrag(address)
        shares = self._memory is not None and self._memory.connect(peer, identity)
        self._addresses[peer] = _unix_socket(place) if shares else place

    def forget(self, peer: str) -> None:
        self._addresses.pop(peer, None)
        self._refused.discard(peer)
        socket = self._sockets.pop(peer, None)
        if socket is not None:
            socket.close(linger=0)
        if self._memory is not None:  # after the socket, which may still send from it
            self._memory.forget(peer)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        socket = self._sockets.get(peer)
        if socket is None:
            if peer not in self._addresses:
                return
            socket = self._sockets[peer] = self._calling(self._addresses[peer])
        sent = frames if self._memory is None else self._memory.lend(peer, frames)
        try:
            socket.send_multipart(sent, _NO_WAIT, copy=False)
        except zmq.Again:
            if self._memory is not None:
                self._memory.take_back()
            if peer not in self._refused:
                self._refused.add(peer)
                _log.warning("Cannot send to %s: it has other keys, or leaves %d messages waiting.", peer, _WAITING_MESSAGES)

    def _calling(self, address: str) -> zmq.Socket[bytes]:
        socket = self._context.socket(zmq.PUSH)
        socket.setsockopt(zmq.SNDHWM, _WAITING_MESSAGES)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MILLISECONDS[0])
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _RECONNECT_MILLISECONDS[1])
        if on_loopback(urlsplit(address).hostname or ""):  # otherwise the kernel sizes the buffer to the link
            socket.setsockopt(zmq.SNDBUF, _LOOPBACK_BYTES)
        if self._keys is not None:
            socket.curve_serverkey = self._keys.listen[0]
            socket.curve_publickey, socket.curve_secretkey = self._keys.call
        socket.connect(address)
        return socket

    def close(self) -> None:
        for peer in list(self._sockets):
            self.forget(peer)


class ZmqTransport:
    """A `Transport` that listens on one address of this host, on any free port where none is given.

    On loopback and without keys it shares memory, unless `share` is False; its address says how, after `#`. Raises
    ValueError if it cannot listen there.
    """

    def __init__(self, host: str, port: int = 0, *, keys: Keys | None = None, share: bool = True) -> None:
        self._context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
        self._keys = keys
        self._guard: ThreadAuthenticator | None = None
        self._memory: SharedMemory | None = None
        if share and keys is None and on_loopback(host):
            with suppress(OSError, AttributeError):  # the system has no anonymous files: use sockets only
                self._memory = SharedMemory()
        self._sender = _Sender(self._context, keys, self._memory)
        try:
            self._inlet, self._address = self._listening(f"tcp://{host}:{port or '*'}")
        except BaseException:
            self.close()
            raise
        if self._memory is not None:
            self._address += f"#{self._memory.identity}"
        self._timeout_seconds = -1.0  # the socket's default: wait for ever

    def _listening(self, place: str) -> tuple[zmq.Socket[bytes], str]:
        inlet = self._context.socket(zmq.PULL)
        inlet.setsockopt(zmq.MAXMSGSIZE, LARGEST_BYTES)
        inlet.setsockopt(zmq.RCVHWM, _WAITING_MESSAGES)
        if self._keys is not None:
            self._guard = ThreadAuthenticator(self._context)
            self._guard.start()
            self._guard.configure_curve_callback(_DOMAIN, self._keys)
            inlet.setsockopt_string(zmq.ZAP_DOMAIN, _DOMAIN)
            inlet.setsockopt(zmq.ZAP_ENFORCE_DOMAIN, 1)  # if the authenticator fails, accept nobody instead of everybody
            inlet.curve_publickey, inlet.curve_secretkey = self._keys.listen
            inlet.curve_server = True
        try:
            inlet.bind(place)
            found = inlet.getsockopt_string(zmq.LAST_ENDPOINT)
            if self._memory is not None:
                inlet.bind(_unix_socket(found))
        except zmq.ZMQError as error:
            raise ValueError(
                f"Cannot listen on {place}: {os.strerror(error.errno or 0)}. Give a free port, or 0 for any."
            ) from None
        return inlet, found

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        self._sender.connect(peer, address)

    def forget(self, peer: str) -> None:
        self._sender.forget(peer)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        self._sender.send(peer, frames)

    def second_sender(self) -> _Sender:
        return _Sender(self._context, self._keys)

    def empty(self, size: int) -> Array:
        return np.empty(size, np.float32) if self._memory is None else self._memory.empty(size)

    def receive(self, timeout_seconds: float) -> Sequence[Buffer] | None:
        if timeout_seconds and timeout_seconds != self._timeout_seconds:
            self._inlet.setsockopt(zmq.RCVTIMEO, round(timeout_seconds * 1000))
            self._timeout_seconds = timeout_seconds
        try:
            frame = self._inlet.recv(0 if timeout_seconds else _NO_WAIT, copy=False)
        except zmq.Again:
            return None
        frames: list[Buffer] = [frame.bytes]
        while frame.more:
            frame = self._inlet.recv(copy=False)
            frames.append(frame.buffer)
        return frames if self._memory is None else self._memory.borrow(frames)

    def close(self) -> None:
        if self._guard is not None:
            self._guard.stop()
        self._context.destroy(linger=0)
        if self._memory is not None:
            self._memory.close()
