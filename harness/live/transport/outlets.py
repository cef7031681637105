"""Sockets to peers on which the thread that has a message sends it itself. It never waits: what the kernel has no room for
waits in this process, until there is room and the process looks (`Outlets.flush`)."""

from __future__ import annotations

import select
import socket
from collections.abc import Sequence, Sized
from typing import Generic, Protocol, TypeVar

from harness.live.protocol.wire import Buffer

__all__ = ["LineOut", "Outlets"]


class LineOut(Protocol):
    """A connection to one peer. Its methods raise OSError if the peer has closed it, or is not there."""

    @property
    def socket(self) -> socket.socket: ...

    @property
    def waiting(self) -> Sized:
        """What waits for room."""
        ...

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message, or let it wait. Returns False, and drops it, if too much waits."""
        ...

    def flush(self) -> None:
        """Send what waits, as far as the kernel has room."""
        ...


Line = TypeVar("Line", bound=LineOut)


class Outlets(Generic[Line]):
    """The lines to all peers, used by one thread. While something waits on one, `events` reports its descriptor."""

    def __init__(self, events: select.epoll) -> None:
        self._events = events
        self.lines: dict[str, Line] = {}  # by peer
        self._full: dict[int, str] = {}  # peers for which something waits, by descriptor

    def add(self, peer: str, line: Line) -> None:
        """Send to that peer by this line from now on."""
        self.forget(peer)
        self.lines[peer] = line

    def forget(self, peer: str) -> None:
        """Close the line to a peer, and drop what waits."""
        line = self.lines.pop(peer, None)
        if line is not None:
            self._full.pop(line.socket.fileno(), None)
            line.socket.close()  # also ends its registration

    def send(self, peer: str, frames: Sequence[Buffer]) -> bool:
        """Send a message on the peer's line; returns at once. False: it is dropped, because too much waits. Raises OSError
        if there is no line, or the peer has closed it; then it is closed here, too."""
        line = self.lines.get(peer)
        if line is None:
            raise ConnectionError(f"There is no line to {peer}.")
        try:
            sent = line.send(frames)
        except OSError:
            self.forget(peer)
            raise
        if line.waiting and line.socket.fileno() not in self._full:
            self._full[line.socket.fileno()] = peer
            self._events.register(line.socket, select.EPOLLOUT)
        return sent

    def flush(self, descriptor: int) -> None:
        """`events` has reported this descriptor: send what waits there, if it is one of these lines."""
        if (peer := self._full.get(descriptor)) is None:
            return
        line = self.lines[peer]
        try:
            line.flush()
        except OSError:
            self.forget(peer)
            return
        if not line.waiting:
            del self._full[descriptor]
            self._events.unregister(line.socket)

    def close(self) -> None:
        """Close all lines, and drop what waits."""
        for peer in list(self.lines):
            self.forget(peer)
