"""Links that delay: a program that passes frames on between two network devices, each after so many seconds.

    python delayed_links.py ONE OTHER SECONDS [ONE OTHER SECONDS ...]

`tc netem delay` does the same, but not every kernel has it. Frames stay in order, and as the kernel gave them: without a
checksum where it has computed none yet, and long where it has not cut them yet. The program says "ready" when all devices
are open, or why they cannot be, and ends when its standard input closes.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from typing import NamedTuple

__all__ = ["main"]

_EVERY_PROTOCOL = 0x0003  # of Linux's <linux/if_ether.h>, as those that follow are of <linux/if_packet.h>
_PACKET_LEVEL, _WITH_KERNELS_HEADER, _WITHOUT_SENT = 263, 15, 23
_SEND_BUFFER, _RECEIVE_BUFFER = 32, 33  # of <asm-generic/socket.h>: with these, root is not held to the usual limits
_LONGEST_BYTES = 1 << 17  # a frame that is not cut yet has up to 64 kB
_BUFFER_BYTES = 1 << 23  # frames that wait to be read, or for the link: its own queue, not this, is what may be full
_AT_ONCE = 64  # frames that are read before others are sent


class _Way(NamedTuple):
    """One direction of a link."""

    source: socket.socket
    target: socket.socket
    seconds: float
    waiting: deque[tuple[float, bytes]]  # moments at which frames go on, and these


def main(arguments: Sequence[str]) -> None:
    """Pass frames on until standard input closes."""
    ways = list[_Way]()
    try:
        for at in range(0, len(arguments), 3):
            one, other, seconds = _opened(arguments[at]), _opened(arguments[at + 1]), float(arguments[at + 2])
            ways += [_Way(one, other, seconds, deque()), _Way(other, one, seconds, deque())]
    except OSError as error:
        print(f"this process may not read frames ({error.strerror})")  # noqa: T201
        return
    print("ready", flush=True)  # noqa: T201
    by_source, ended = {way.source.fileno(): way for way in ways}, sys.stdin.fileno()
    while True:
        due = min((way.waiting[0][0] for way in ways if way.waiting), default=None)
        wait = None if due is None else max(due - time.monotonic(), 0.0)
        readable, _, _ = select.select([ended, *by_source], [], [], wait)
        if ended in readable:
            return
        for source in readable:
            _read(by_source[source])
        now = time.monotonic()
        for way in ways:
            while way.waiting and way.waiting[0][0] <= now:
                with suppress(OSError):  # the link's queue is full: the frame is lost, as on any link
                    way.target.send(way.waiting.popleft()[1])


def _opened(device: str) -> socket.socket:
    """A socket on all that a device receives."""
    opened = socket.socket(socket.AF_PACKET, socket.SOCK_RAW, socket.htons(_EVERY_PROTOCOL))
    opened.setsockopt(_PACKET_LEVEL, _WITH_KERNELS_HEADER, 1)
    opened.setsockopt(_PACKET_LEVEL, _WITHOUT_SENT, 1)
    opened.setsockopt(socket.SOL_SOCKET, _SEND_BUFFER, _BUFFER_BYTES)
    opened.setsockopt(socket.SOL_SOCKET, _RECEIVE_BUFFER, _BUFFER_BYTES)
    opened.bind((device, 0))
    opened.setblocking(False)
    return opened


def _read(way: _Way) -> None:
    with suppress(BlockingIOError):
        for _ in range(_AT_ONCE):
            frame = way.source.recv(_LONGEST_BYTES)
            way.waiting.append((time.monotonic() + way.seconds, frame))


if __name__ == "__main__":
    main(sys.argv[1:])
