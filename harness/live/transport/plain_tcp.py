"""Frames over TCP as they are, in a network that only the job's processes reach: nothing is encrypted, and nobody is asked
who he is. The thread that has a message sends it, and the one that wants a message reads it, large frames straight into
arrays of their own: ZeroMQ's threads take as much time again as the kernel.
"""

from __future__ import annotations

import logging
import os
import select
import socket
import time
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from itertools import islice
from urllib.parse import urlsplit

import numpy as np

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import Buffer, Unreadable, byte_count
from harness.live.transport.framing import MOST_BUFFERS, frames_in, head_and_bytes, head_bytes, only_frame, sizes_in
from harness.live.transport.outlets import Outlets
from harness.live.transport.transport import Received

__all__ = ["PlainTcp"]

_log = logging.getLogger(__name__)

_SCHEME = "plain"  # of an address: plain://HOST:PORT
_READ_BYTES = 2**16  # at once of short messages; a longer one is read into arrays of its own
_WAITING_BUFFERS = 20_000  # to one peer; then messages to it are dropped


def _place_of(address: str) -> tuple[str, int]:
    """Host and port. Raises ValueError for what is no address of a process."""
    with suppress(ValueError):
        parts = urlsplit(address)
        if parts.scheme == _SCHEME and parts.hostname and parts.port:
            return parts.hostname, parts.port
    raise ValueError(f"Cannot reach a process at {address!r}: write {_SCHEME}://HOST:PORT.")


def _unsent(buffers: Iterable[Buffer], sent: int) -> Iterator[memoryview]:
    """What is left of buffers whose first `sent` bytes are gone."""
    for buffer in buffers:
        size = byte_count(buffer)
        if sent < size:
            yield memoryview(buffer).cast("B")[sent:]
        sent = max(sent - size, 0)


class _LineOut:
    """A connection to a peer. Raises OSError if it cannot be made; what is sent before it is made waits."""

    def __init__(self, made: socket.socket, place: tuple[str, int]) -> None:
        self.socket = made
        self.waiting: deque[memoryview] = deque()
        try:
            made.setblocking(False)
            made.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with suppress(BlockingIOError):
                made.connect(place)
        except BaseException:
            made.close()
            raise

    def send(self, frames: Sequence[Buffer]) -> bool:
        if self.waiting:
            self.flush()
            if len(self.waiting) >= _WAITING_BUFFERS:
                return False
        head, size = head_and_bytes(frames)
        buffers, sent = [head, *frames], 0
        if not self.waiting and len(buffers) <= MOST_BUFFERS:
            try:
                sent = self.socket.sendmsg(buffers)
            except BlockingIOError:
                sent = 0  # the kernel has no room now
        if sent < size:
            self.waiting.extend(_unsent(buffers, sent))
        return True

    def flush(self) -> None:
        with suppress(BlockingIOError):
            while self.waiting:
                tried = list(islice(self.waiting, MOST_BUFFERS))
                rest = list(_unsent(tried, self.socket.sendmsg(tried)))
                for _ in tried:
                    self.waiting.popleft()
                self.waiting.extendleft(reversed(rest))


class _LineIn:
    """A connection from a caller."""

    def __init__(self, made: socket.socket) -> None:
        self.socket = made
        self._held = b""  # begins a message
        self._frames: list[memoryview] = []  # of a message that is longer
        self._unfilled: deque[memoryview] = deque()  # what is still to come of it

    def read(self) -> list[Sequence[Buffer]]:
        """The messages that are complete with what has come. Raises Unreadable for what is no message, EOFError at the end,
        and OSError for a broken connection."""
        try:
            while self._unfilled:
                rest = self._unfilled[0][self._received(self._unfilled[0]) :]
                if rest:
                    self._unfilled[0] = rest
                    continue
                self._unfilled.popleft()
                if not self._unfilled:
                    return [self._completed()]
            data = self.socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        if not data:
            raise EOFError
        if self._held:
            return self._parsed(self._held + data)
        message = only_frame(data)
        return self._parsed(data) if message is None else [message]

    def _received(self, into: memoryview) -> int:
        size = self.socket.recv_into(into)
        if not size:
            raise EOFError
        return size

    def _completed(self) -> Sequence[Buffer]:
        frames, self._frames = self._frames, []
        return [bytes(frames[0]), *(frame.toreadonly() for frame in frames[1:])]

    def _parsed(self, data: bytes) -> list[Sequence[Buffer]]:
        found: list[Sequence[Buffer]] = []
        at = 0
        while at < len(data) and (sizes := sizes_in(data, at)) is not None:
            start = at + head_bytes(sizes)
            end = start + sum(sizes)
            if end <= len(data):
                # Views of what has come: nothing else is ever written there.
                found.append(frames_in(data, start, sizes))
                at = end
                continue
            if end - at > _READ_BYTES:
                self._begin_long(sizes, memoryview(data)[start:])
                at = len(data)
            break
        self._held = data[at:]  # begins the next message
        return found

    def _begin_long(self, sizes: Sequence[int], data: memoryview) -> None:
        """A message that begins with `data` goes into arrays of its own, which no other message will overwrite."""
        self._frames = [np.empty(size, np.uint8).data for size in sizes]
        for frame in self._frames:
            have = min(len(data), len(frame))
            frame[:have], data = data[:have], data[have:]
            if have < len(frame):
                self._unfilled.append(frame[have:])


class _PlainSender:
    """A connection to each peer, made when something is sent to it."""

    def __init__(self, opened: Callable[[], socket.socket], events: select.epoll) -> None:
        self._opened, self._outlets = opened, Outlets[_LineOut](events)
        self._places: dict[str, tuple[str, int]] = {}
        self._refused: set[str] = set()

    def connect(self, peer: str, address: str) -> None:
        self.forget(peer)
        self._places[peer] = _place_of(address)

    def forget(self, peer: str) -> None:
        self._places.pop(peer, None)
        self._refused.discard(peer)
        self._outlets.forget(peer)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        outlets = self._outlets
        try:
            if peer not in outlets.lines:
                if peer not in self._places:
                    return
                outlets.add(peer, _LineOut(self._opened(), self._places[peer]))
            if not outlets.send(peer, frames) and peer not in self._refused:
                self._refused.add(peer)
                _log.warning("Cannot send to %s: it leaves %d frames waiting.", peer, _WAITING_BUFFERS)
        except OSError:
            pass  # nobody is there, or no more: this message is lost, and the next one tries again

    def flush(self, descriptor: int) -> None:
        """There is room on the connection of that descriptor."""
        self._outlets.flush(descriptor)

    def close(self) -> None:
        self._outlets.close()


class PlainTcp:
    """A `Transport` that listens on one address, on any free port where none is given. `opened` makes the sockets, which
    belong to a network that only the job's processes reach. Raises ValueError if it cannot listen there."""

    def __init__(self, host: str, port: int = 0, opened: Callable[[], socket.socket] = socket.socket) -> None:
        self._opened, self._events = opened, select.epoll()
        self._sender = _PlainSender(opened, self._events)
        self._listener = opened()
        self._in: dict[int, _LineIn] = {}  # by descriptor
        self._arrived: deque[Sequence[Buffer]] = deque()
        try:
            self._listener.setblocking(False)
            self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # where a process has just ended
            self._listener.bind((host, port))
            self._listener.listen(128)
        except OSError as error:
            self.close()
            raise ValueError(
                f"Cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}. Give a free port, or 0 for any."
            ) from None
        self._events.register(self._listener, select.EPOLLIN)
        self._address = f"{_SCHEME}://{host}:{self._listener.getsockname()[1]}"

    @property
    def address(self) -> str:
        return self._address

    def connect(self, peer: str, address: str) -> None:
        self._sender.connect(peer, address)

    def forget(self, peer: str) -> None:
        self._sender.forget(peer)

    def send(self, peer: str, frames: Sequence[Buffer]) -> None:
        self._sender.send(peer, frames)

    def second_sender(self) -> _PlainSender:
        return _PlainSender(self._opened, select.epoll())

    def empty(self, size: int) -> Array:
        return np.empty(size, np.float32)

    def receive(self, timeout_seconds: float) -> Received | None:
        if not self._arrived:
            until = time.monotonic() + timeout_seconds
            self._wait(timeout_seconds)
            while not self._arrived:
                if (rest := until - time.monotonic()) <= 0:
                    return None
                self._wait(rest)
        return Received(None, self._arrived.popleft())

    def _wait(self, seconds: float) -> None:
        """Wait until something can be read or sent, and do that."""
        for descriptor, _ in self._events.poll(seconds):
            line = self._in.get(descriptor)
            if line is not None:
                self._read(line)
            elif descriptor == self._listener.fileno():
                self._accept()
            else:
                self._sender.flush(descriptor)

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again, or no descriptor is left
            made, _ = self._listener.accept()
            made.setblocking(False)
            self._in[made.fileno()] = _LineIn(made)
            self._events.register(made, select.EPOLLIN)

    def _read(self, line: _LineIn) -> None:
        try:
            self._arrived.extend(line.read())
        except (Unreadable, EOFError, OSError) as error:
            del self._in[line.socket.fileno()]
            line.socket.close()
            if isinstance(error, Unreadable):
                raise

    def close(self) -> None:
        self._sender.close()
        for line in self._in.values():
            line.socket.close()
        self._in.clear()
        self._listener.close()
        self._events.close()
