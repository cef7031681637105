"""Messages as frames of bytes, and back: a first frame that describes the message, then each array as a frame of its own
memory, so that neither side copies it.

The first frame is a magic number, the version of this format (two bytes, little-endian), and a MessagePack row: sender, its
generation, the view, (type, length) of every array, the head. Everything that arrives is checked before it is used.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any, TypeAlias, cast

import msgspec
import numpy as np

from harness.live.protocol import messages
from harness.live.protocol.messages import Array, Message

__all__ = ["LARGEST_BYTES", "VERSION", "Beat", "Buffer", "Peers", "Unreadable", "byte_count", "decode", "encode", "signal"]

VERSION = 6
LARGEST_BYTES = 2**31
"""Limit of one frame: half a billion parameters in one run. The receiver refuses larger ones before it allocates memory."""

Buffer: TypeAlias = bytes | memoryview


def byte_count(frame: Buffer) -> int:
    """How many bytes a frame has."""
    return len(frame) if isinstance(frame, bytes) else frame.nbytes


_MARK = struct.Struct("<4sH")
_PROGRAM = b"PSLV"
_BEGIN = _MARK.pack(_PROGRAM, VERSION)
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


_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(_First)


def encode(sender: str, message: Message) -> list[Buffer]:
    """The frames of a message; arrays are not copied. Raises Unreadable for arrays that this format cannot carry."""
    kinds: list[tuple[str, int]] = []
    data: list[Buffer] = []
    for array in message.arrays:
        kind = _NAMES.get(array.dtype)
        if kind is None or array.ndim != 1 or array.nbytes > LARGEST_BYTES:
            raise Unreadable(
                f"Cannot send an array of {array.dtype}, shape {array.shape}: give at most {LARGEST_BYTES} bytes "
                "of float32, float16 or int32, along one axis."
            )
        kinds.append((kind, array.size))
        data.append(np.ascontiguousarray(array).data)
    head: Any = message.head
    first = _encoder.encode(_First(sender, message.generation, message.view, tuple(kinds), head))
    return [_BEGIN + first, *data]


def decode(frames: Sequence[Buffer]) -> tuple[str, Message]:
    """(sender, message); its arrays are read-only views of the frames.

    Raises Unreadable for garbage, for another version, and if a frame's length differs from what the first one says.
    """
    first = bytes(frames[0]) if frames else b""
    if not first.startswith(_BEGIN):
        raise _foreign(first)
    try:
        said = _decoder.decode(first[_MARK.size :])
    # msgspec raises the last two for bytes that are no text, and for rows nested too deeply.
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Unreadable(f"Cannot read the head of a message: {error}.") from None
    if len(said.arrays) != len(frames) - 1:
        raise Unreadable(f"Cannot read a message with {len(frames) - 1} arrays: its head says {len(said.arrays)}.")
    arrays = tuple([_array(*kind, frame) for kind, frame in zip(said.arrays, frames[1:], strict=True)])
    head: Any = said.head
    return said.sender, Message(head, arrays, said.view, said.generation)


def _foreign(first: bytes) -> Unreadable:
    """Why a frame is not the first one of a message."""
    if len(first) < _MARK.size:
        return Unreadable("Cannot read a message without its first frame: it was cut short, or another program sent it.")
    name, version = _MARK.unpack_from(first)
    if name != _PROGRAM:
        return Unreadable(f"Cannot read a message that begins with {name!r}: another program sent it.")
    return Unreadable(f"Cannot read a message of version {version}: this is version {VERSION}; use one release everywhere.")


def _array(kind: str, size: int, frame: Buffer) -> Array:
    dtype = _TYPES.get(kind)
    if dtype is None:
        raise Unreadable(f"Cannot read an array of type {kind!r}: known are {', '.join(_TYPES)}.")
    given = byte_count(frame)
    if not 0 <= size * dtype.itemsize == given:
        raise Unreadable(
            f"Cannot read an array of {size} numbers of {kind} from {given} bytes: it was cut short or damaged."
        )
    made: Array = np.frombuffer(frame, dtype)
    made.flags.writeable = False  # the frame may be another process's memory
    return made
