"""Messages as frames of bytes, and back: a first frame that describes the message, then each array as a frame of its own
memory, so that neither side copies it. Short arrays follow in the first frame: to copy them takes less time than a frame.

The first frame is a magic number, the version of this format (two bytes), two zeros, the length of a row (four bytes), all
little-endian, and the row in MessagePack: sender, its generation, the view, (type, length) of every array, the head. Zeros
after it make its length a multiple of four. Everything that arrives is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from harness.live.protocol import messages
from harness.live.protocol.messages import Array, Message

__all__ = [
    "LARGEST_BYTES",
    "SHORT_BYTES",
    "VERSION",
    "Beat",
    "Buffer",
    "Peers",
    "Unreadable",
    "byte_count",
    "decode",
    "encode",
    "signal",
]

VERSION = 8
SHORT_BYTES = 60 * 2**10
"""Arrays of at most so many bytes in all follow in the first frame: with it, they fit into one packet of 64 KiB."""

LARGEST_BYTES = 2**31
"""Limit of one frame: half a billion parameters in one run. The receiver refuses larger ones before it allocates memory."""

Buffer: TypeAlias = bytes | memoryview


def byte_count(frame: Buffer) -> int:
    """How many bytes a frame has."""
    return len(frame) if isinstance(frame, bytes) else frame.nbytes


_PROGRAM = b"PSLV"
_BEGIN = struct.pack("<4sHxx", _PROGRAM, VERSION)
_MARK = struct.Struct("<8sI")  # `_BEGIN`, bytes of the row
_MARK_BYTES = _MARK.size
_FILL = (b"", bytes(3), bytes(2), bytes(1))  # by the bytes of the row over a multiple of four: arrays are aligned
_TYPES: dict[str, np.dtype[Any]] = {"f4": np.dtype("<f4"), "f2": np.dtype("<f2"), "i4": np.dtype("<i4")}
_NAMES = {kind: name for name, kind in _TYPES.items()}


class Unreadable(ValueError):
    """Frames that are not a valid message; says what is wrong."""


class Peers(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """From the coordinator's process: (name, address, generation) of all processes; one that is not listed is gone."""

    peers: tuple[tuple[str, str, int], ...]


class Beat(msgspec.Struct, frozen=True, tag=True, array_like=True):
    """To the coordinator's process: I am alive."""


def signal(head: Peers | Beat, generation: int) -> Message:
    """A message between two process loops; their cores never see it."""
    return Message(cast(messages.Head, head), (), 0, generation)


class _First(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    sender: str
    generation: int
    view: int
    arrays: tuple[tuple[str, int], ...]  # (type, length)
    head: messages.Head | Peers | Beat


_row_of = msgspec.msgpack.Encoder().encode
_read_row = msgspec.msgpack.Decoder(_First).decode


def encode(sender: str, message: Message) -> list[Buffer]:
    """The frames of a message; long arrays are not copied. Raises Unreadable for arrays that this format cannot carry."""
    arrays: tuple[Array, ...] = message.arrays
    if not arrays:
        row = _row_of((sender, message.generation, message.view, (), message.head))
        return [b"".join((_MARK.pack(_BEGIN, len(row)), row, _FILL[len(row) & 3]))]
    kinds: list[tuple[str, int]] = []
    data: list[Buffer] = []
    bytes_left = SHORT_BYTES
    for array in arrays:
        kind, size = _NAMES.get(array.dtype), array.nbytes
        if kind is None or array.ndim != 1 or size > LARGEST_BYTES:
            raise Unreadable(
                f"Cannot send an array of {array.dtype}, shape {array.shape}: give at most {LARGEST_BYTES} bytes "
                "of float32, float16 or int32, along one axis."
            )
        kinds.append((kind, len(array)))
        data.append(array.data if array.flags.c_contiguous else np.ascontiguousarray(array).data)
        bytes_left -= size
    row = _row_of((sender, message.generation, message.view, kinds, message.head))  # as `_First`
    first = _MARK.pack(_BEGIN, len(row)), row, _FILL[len(row) & 3]
    return [b"".join((*first, *data))] if bytes_left >= 0 else [b"".join(first), *data]


def decode(frames: Sequence[Buffer]) -> tuple[str, Message]:
    """(sender, message); its arrays are read-only views of the frames.

    Raises Unreadable for garbage, for another version, and if there are more or fewer bytes than the first frame says.
    """
    try:
        begin, length = _MARK.unpack_from(first := frames[0])
    except (IndexError, struct.error):
        raise Unreadable(
            "Cannot read a message without its first frame: it was cut short, or another program sent it."
        ) from None
    if begin != _BEGIN:
        raise _foreign(begin)
    end = _MARK_BYTES + length
    try:
        said = _read_row(first[_MARK_BYTES:end])
    # msgspec raises the last two for bytes that are no text, and for rows nested too deeply.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(f"Cannot read the head of a message: {error}.") from None
    end += -length & 3
    kinds = said.arrays
    arrays: tuple[Array, ...] = ()
    if len(frames) > 1:
        if len(kinds) != len(frames) - 1 or len(first) != end:
            raise Unreadable(f"Cannot read a message with {len(frames) - 1} arrays: its head says {len(kinds)}.")
        arrays = tuple([_array(*kind, frame) for kind, frame in zip(kinds, frames[1:], strict=True)])
    elif kinds or end != len(first):
        arrays = _short(kinds, first if isinstance(first, bytes) else first.toreadonly(), end)
    head: Any = said.head
    return said.sender, Message(head, arrays, said.view, said.generation)


def _foreign(begin: bytes) -> Unreadable:
    """Why a frame that begins so is not the first one of a message."""
    program, version = struct.unpack("<4sHxx", begin)
    if program != _PROGRAM:
        return Unreadable(f"Cannot read a message that begins with {program!r}: another program sent it.")
    return Unreadable(f"Cannot read a message of version {version}: this is version {VERSION}; use one release everywhere.")


def _short(kinds: Sequence[tuple[str, int]], first: Buffer, at: int) -> tuple[Array, ...]:
    """The arrays that follow in the first frame, from byte `at` on."""
    made: list[Array] = []
    for kind, size in kinds:
        dtype = _TYPES.get(kind)
        if dtype is None:
            raise _unknown(kind)
        end = at + size * dtype.itemsize
        if not at <= end <= len(first):
            raise _cut(kind, size, len(first) - at)
        made.append(np.frombuffer(first, dtype, size, at))
        at = end
    if at != len(first):
        raise Unreadable(f"Cannot read a message of {len(first)} bytes: its head says {at}.")
    return tuple(made)


def _array(kind: str, size: int, frame: Buffer) -> Array:
    dtype, given = _TYPES.get(kind), byte_count(frame)
    if dtype is None:
        raise _unknown(kind)
    if not 0 <= size * dtype.itemsize == given:
        raise _cut(kind, size, given)
    made: Array = np.frombuffer(frame, dtype)
    made.flags.writeable = False  # the frame may be another process's memory
    return made


def _unknown(kind: str) -> Unreadable:
    return Unreadable(f"Cannot read an array of type {kind!r}: known are {', '.join(_TYPES)}.")


def _cut(kind: str, size: int, given: int) -> Unreadable:
    return Unreadable(f"Cannot read an array of {size} numbers of {kind} from {given} bytes: it was cut short or damaged.")
