"""Frames between processes of one machine by Unix sockets. The thread that has a message sends it, and the one that wants a
message reads it: no thread stands between them, whose wake-ups cost more than a small message itself.

Each process listens, and has a line to every peer that it sends to. Who calls is proved twice. The kernel says which user,
and which process, is at the other end of a line. And a caller begins with a ticket, a random number that it has also sent by
ZeroMQ, where its key proves which peer it is. Nothing else is read from a line until both tickets are there. The kernel
keeps what is on a line from everybody else, so it is not encrypted.

A line carries packets (`SOCK_SEQPACKET`, unix(7)). A message of one short frame, as most are, is one packet: the frame.
Others are one packet, too: a mark, the number of frames, their sizes, the frames; or, if that is too long, a packet with the
mark and the sizes, then pieces of the frames.
"""

from __future__ import annotations

import os
import secrets
import select
import socket
import struct
from collections import deque
from collections.abc import Sequence
from contextlib import suppress

from harness.live.protocol.wire import Buffer, Unreadable
from harness.live.transport.framing import MOST_BUFFERS, frames_in, head_and_bytes, head_bytes, sizes_in
from harness.live.transport.outlets import Outlets

__all__ = ["TICKET_BYTES", "UnixSockets"]

TICKET_BYTES = 32

_PACKET_BYTES = 2**16  # the kernel finds memory for longer ones less easily
_SIZES = b"size"  # begins a packet with the sizes of a message's frames
_LINE_BYTES = 2**20  # on their way to one peer, as far as the system allows; the rest waits until this process receives
_WAITING_PACKETS = 10_000  # to one peer; then messages to it are dropped
_WAITING_CALLERS = 256  # who have not proved who they are; then the first of them is dropped
_CREDENTIALS = struct.Struct("iII")  # of the other end (SO_PEERCRED): process, user, group


def _other_end(line: socket.socket) -> tuple[int, int]:
    """The process and the user at the other end, as of its `connect` or `listen`."""
    process, user, _ = _CREDENTIALS.unpack(line.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size))
    return process, user


def _check_listener(line: socket.socket, process: int) -> None:
    if _other_end(line) != (process, os.geteuid()):
        raise PermissionError(f"Another process than {process} listens there.")


def _packets(frames: Sequence[Buffer]) -> list[list[Buffer]]:
    """Those of a message; each as what it is put together of."""
    head, size = head_and_bytes(frames)
    if len(_SIZES) + size <= _PACKET_BYTES and len(frames) < MOST_BUFFERS - 1:
        return [[_SIZES, head, *frames]]
    packets: list[list[Buffer]] = [[_SIZES, head]]
    for frame in frames:
        whole = memoryview(frame).cast("B")
        packets += [[whole[start : start + _PACKET_BYTES]] for start in range(0, len(whole), _PACKET_BYTES)]
    return packets


class _LineOut:
    """A line to a peer. Raises OSError if nobody listens there, or another process than that one."""

    def __init__(self, name: str, process: int, ticket: bytes) -> None:
        self.socket = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.waiting: deque[list[Buffer]] = deque()  # packets for which the kernel has no room now
        try:
            self.socket.setblocking(False)
            self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _LINE_BYTES)
            self.socket.connect(name)
            _check_listener(self.socket, process)
            self.socket.send(ticket)
        except BaseException:
            self.socket.close()
            raise

    def send(self, frames: Sequence[Buffer]) -> bool:
        """Send a message, or let it wait. Returns False, and drops it, if too many packets wait."""
        waiting = self.waiting
        if len(waiting) >= _WAITING_PACKETS:
            return False
        packets = _packets(frames)
        waiting.extend(packets)
        if len(waiting) == len(packets):  # nothing waited before
            self.flush()
        return True

    def send_alone(self, frame: Buffer) -> bool:
        """Send a message of one frame, if that goes at once, as a packet without its size: as most often. Returns whether it
        was sent."""
        # An empty packet is the end of a line.
        if self.waiting or not isinstance(frame, bytes) or not 0 < len(frame) <= _PACKET_BYTES or frame.startswith(_SIZES):
            return False
        try:
            self.socket.send(frame)
        except OSError:  # no room now, or the peer has closed it: `send` tells which
            return False
        return True

    def flush(self) -> None:
        """Send what waits, as far as the kernel has room."""
        with suppress(BlockingIOError):
            while self.waiting:
                self.socket.sendmsg(self.waiting[0])
                self.waiting.popleft()


class _LineIn:
    """A line from a caller. `key`: the one that has proved who it is; "" until then. `ticket`: what it began with."""

    def __init__(self, line: socket.socket) -> None:
        self.socket, self.key, self.ticket = line, "", b""
        self._frames: list[bytearray] = []  # of a message that comes in several packets
        self._filled = [0, 0]  # its frames that are complete, and the bytes of the next one

    def message(self, packet: bytes) -> Sequence[Buffer] | None:
        """The message that this packet completes; None if there is more to come. Raises Unreadable for another packet."""
        if self._frames:
            return self._more(packet)
        if not packet.startswith(_SIZES):
            return (packet,)
        if (sizes := sizes_in(packet, len(_SIZES))) is None:
            raise Unreadable("Cannot read a message without the sizes of its frames.")
        at = len(_SIZES) + head_bytes(sizes)
        if len(packet) == at + sum(sizes):
            return frames_in(packet, at, sizes)
        if len(packet) != at:
            raise Unreadable(f"Cannot read a message of {sum(sizes)} bytes, of which {len(packet) - at} came.")
        self._frames, self._filled = [bytearray(size) for size in sizes], [0, 0]
        return None

    def _more(self, packet: bytes) -> Sequence[Buffer] | None:
        frames = self._frames
        number, start = self._filled
        while start == len(frames[number]):  # the frame before, or an empty one
            number, start = number + 1, 0
        end = start + len(packet)
        if end > len(frames[number]):
            self._frames = []
            raise Unreadable(f"Cannot read {end} bytes of a frame of {len(frames[number])}.")
        frames[number][start:end] = packet
        self._filled = [number, end]
        if end < len(frames[number]) or any(map(len, frames[number + 1 :])):
            return None
        self._frames = []
        return [bytes(frames[0]), *(memoryview(frame).toreadonly() for frame in frames[1:])]


class UnixSockets:
    """One process's lines, used by one thread. Raises OSError if it cannot listen under `name`."""

    def __init__(self, name: str, watched: int) -> None:
        """`watched`: a file descriptor that ends `wait`, too, when it can be read."""
        self._watched = watched
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.setblocking(False)
        self._listener.bind(name)
        self._listener.listen(128)
        self._events = select.epoll()
        self._events.register(watched, select.EPOLLIN)
        self._events.register(self._listener, select.EPOLLIN)
        self.out = Outlets[_LineOut](self._events)
        self._in: dict[int, _LineIn] = {}  # by descriptor
        self._callers: dict[bytes, _LineIn] = {}  # by ticket: its other half has not come by ZeroMQ
        self._tickets: dict[bytes, str] = {}  # that came by ZeroMQ, and whose key sent them; not yet on a line
        self.arrived: deque[tuple[str, Sequence[Buffer]]] = deque()  # messages, each with the key of its sender

    # --------------------------------------------------------------------------------------------------------------- send

    def connect(self, peer: str, name: str, process: int) -> bytes:
        """Make a line to the process that listens under `name`. Returns the ticket, which has to be sent by ZeroMQ. Raises
        OSError if nobody listens there, or another process than that one."""
        self.forget(peer)
        ticket = secrets.token_bytes(TICKET_BYTES)
        self.out.add(peer, _LineOut(name, process, ticket))
        return ticket

    def __contains__(self, peer: str) -> bool:
        return peer in self.out.lines

    def forget(self, peer: str) -> None:
        """Close the line to a peer, and drop what waits."""
        self.out.forget(peer)

    def send(self, peer: str, frames: Sequence[Buffer]) -> bool:
        """Send a message on the peer's line; returns at once. False: it is dropped, because too many wait. Raises OSError,
        and closes the line, if the peer has closed it."""
        return self.out.send(peer, frames)

    # ------------------------------------------------------------------------------------------------------------ receive

    def take(self) -> tuple[str, Sequence[Buffer]] | None:
        """The next message that has arrived, with the key of its sender."""
        return self.arrived.popleft() if self.arrived else None

    def wait(self, seconds: float) -> bool:
        """Wait until something can be read or sent, and do that. Returns whether `watched` can be read. Raises Unreadable
        for what is no message; the line that it came by is closed."""
        watched, unreadable = False, None
        for descriptor, _ in self._events.poll(seconds):
            line = self._in.get(descriptor)
            if line is not None:
                try:
                    self._read(line)
                except Unreadable as error:
                    self._close(line)
                    unreadable = error
            elif descriptor == self._watched:
                watched = True
            elif descriptor == self._listener.fileno():
                self._accept()
            else:
                self.out.flush(descriptor)
        if unreadable is not None:
            # It is not lost that `watched` can be read: the next call says so, too.
            raise unreadable
        return watched

    def admit(self, ticket: bytes, key: str) -> None:
        """A ticket has come by ZeroMQ, from the owner of that key."""
        line = self._callers.pop(ticket, None)
        if line is None:
            self._tickets[ticket] = key
            if len(self._tickets) > _WAITING_CALLERS:
                del self._tickets[next(iter(self._tickets))]
        else:
            self._events.register(line.socket, select.EPOLLIN)
            self._begin(line, key)

    def _accept(self) -> None:
        with suppress(OSError):  # it has gone again, or no descriptor is left
            made, _ = self._listener.accept()
            if _other_end(made)[1] != os.geteuid():
                made.close()
                return
            made.setblocking(False)
            self._in[made.fileno()] = _LineIn(made)
            self._events.register(made, select.EPOLLIN)
        waiting = [line for line in self._in.values() if not line.key]
        if len(waiting) > _WAITING_CALLERS:
            self._close(waiting[0])

    def _read(self, line: _LineIn) -> None:
        try:
            packet = line.socket.recv(_PACKET_BYTES)
        except BlockingIOError:
            return
        except OSError:
            packet = b""
        if not packet:  # the other end has closed it
            self._close(line)
        elif line.key:
            message = line.message(packet)
            if message is not None:
                self.arrived.append((line.key, message))
        else:
            self._present(line, packet)

    def _present(self, line: _LineIn, ticket: bytes) -> None:
        """A caller's ticket has come on its line."""
        if len(ticket) != TICKET_BYTES or ticket in self._callers:
            raise Unreadable("Cannot accept a caller without a ticket.")
        key = self._tickets.pop(ticket, None)
        if key is not None:
            self._begin(line, key)
            return
        # Until the ticket comes by ZeroMQ, too, what follows waits in the kernel.
        line.ticket, self._callers[ticket] = ticket, line
        self._events.unregister(line.socket)

    def _begin(self, line: _LineIn, key: str) -> None:
        for former in [one for one in self._in.values() if one.key == key]:
            self._close(former)  # what is left on it must not come after what comes now
        line.key = key

    def _close(self, line: _LineIn) -> None:
        self._callers.pop(line.ticket, None)
        del self._in[line.socket.fileno()]
        line.socket.close()

    def close(self) -> None:
        """Close everything, and drop what waits."""
        self.out.close()
        for line in list(self._in.values()):
            self._close(line)
        self._listener.close()
        self._events.close()
