"""A message as bytes on a socket: how many frames it has, their sizes, and the frames."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from functools import lru_cache

from harness.live.protocol.wire import LARGEST_BYTES, Buffer, Unreadable, byte_count

__all__ = ["MOST_BUFFERS", "frames_in", "head_and_bytes", "head_bytes", "only_frame", "sizes_in"]

MOST_BUFFERS = 1000  # that are sent at once; the kernel takes 1024
_MOST_FRAMES = 8000  # of a message: their sizes are in one packet
_COUNT = struct.Struct("<I")


@lru_cache(maxsize=64)
def _head(count: int) -> struct.Struct:
    return struct.Struct(f"<I{count}Q")


_SIZE_BYTES = 8
_OF_ONE = _head(1)  # most messages have one frame
_ONE_BYTES = _OF_ONE.size


def head_and_bytes(frames: Sequence[Buffer]) -> tuple[bytes, int]:
    """How a message of these frames begins, and how many bytes it has with that."""
    if len(frames) == 1:
        frame = frames[0]
        size = len(frame) if isinstance(frame, bytes) else frame.nbytes  # `byte_count`, without a call for each message
        return _OF_ONE.pack(1, size), _COUNT.size + _SIZE_BYTES + size
    sizes = list(map(byte_count, frames))
    head = _head(len(sizes))
    return head.pack(len(sizes), *sizes), head.size + sum(sizes)


def only_frame(data: bytes) -> Sequence[Buffer] | None:
    """The message that has one frame, if that is all of `data`, as most often; else None."""
    rest = len(data) - _ONE_BYTES
    return (memoryview(data)[_ONE_BYTES:],) if rest >= 0 and _OF_ONE.unpack_from(data) == (1, rest) else None


def head_bytes(sizes: Sequence[int]) -> int:
    """How many bytes the beginning of a message with so many sizes has."""
    return _COUNT.size + _SIZE_BYTES * len(sizes)


def sizes_in(data: Buffer, at: int = 0) -> tuple[int, ...] | None:
    """The sizes of a message's frames, from its first bytes, which are `at` in `data`; None if there are too few. Raises
    Unreadable for what no message begins with."""
    held = len(data) - at
    if held < _COUNT.size:
        return None
    (count,) = _COUNT.unpack_from(data, at)
    if not 0 < count <= _MOST_FRAMES:
        raise Unreadable(f"Cannot read a message of {count} frames.")
    head = _OF_ONE if count == 1 else _head(count)
    if held < head.size:
        return None
    sizes: tuple[int, ...] = head.unpack_from(data, at)[1:]
    if max(sizes) > LARGEST_BYTES:
        raise Unreadable(f"Cannot read a frame of {max(sizes)} bytes: at most {LARGEST_BYTES} are accepted.")
    return sizes


def frames_in(data: bytes, at: int, sizes: Sequence[int]) -> list[Buffer]:
    """Frames of these sizes, one after the other from byte `at` on, without a copy."""
    whole = memoryview(data)
    if len(sizes) == 1:
        return [whole[at : at + sizes[0]]]
    frames: list[Buffer] = []
    for size in sizes:
        frames.append(whole[at : at + size])
        at += size
    return frames
