"""Large frames in memory that the processes of one machine share: written once, and read without a copy.

The sender writes a frame into a slot, sets a mark in the slot, and sends a note that says where the frame is. The receiver
maps the slot, returns a view of the frame, and clears the mark when nothing refers to the view any more. A slot without
marks is free for the next frame.

A slot is an anonymous file (`memfd_create(2)`) that other processes open through /proc. So it vanishes with the last process
that has mapped it, even if that process is killed. A process that can open the file, and finds in it the token that it was
told, is on the same machine and of the same user.

A process that is treated as dead may still run and read. Therefore a slot that it has not given back is never written to
again: the slot is given up, and vanishes when no process maps it any more.
"""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import secrets
import struct
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np

from harness.live.protocol.messages import Array
from harness.live.protocol.wire import Buffer, Unreadable, byte_count

__all__ = ["BORROWED", "LARGE_BYTES", "LENT_BYTES", "NOTE", "NOTE_BYTES", "SLOTS", "SharedMemory", "SlotCounts"]

LARGE_BYTES = 2**16  # smaller frames are faster over a socket
LENT_BYTES = 2**30  # of all slots of a process; without room, a frame goes over a socket
SLOTS = 64  # of a process; each needs two of its file descriptors, and one of every reader
NOTE = b"LENT"  # begins the first frame of a message with borrowed frames; no message of `wire` begins so
NOTE_BYTES = len(NOTE)
BORROWED = 256  # slots of all lenders that stay mapped although nothing refers to them

_NAME = "harness-slot"
_HEAD = struct.Struct("<16sQ")  # token of the process, number of the slot
_MARKS = 64  # offset of the marks: one byte per reader
_DATA = mmap.PAGESIZE  # offset of the frame


class _Loan(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Where a frame is in the sender's memory."""

    place: int  # index in the message's frames
    file: int  # descriptor in the lender's process
    number: int  # of the slot
    mark: int
    size: int  # bytes


class _Note(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """The frames that a message lacks."""

    process: int
    token: bytes
    dropped: int  # how many slots the sender has dropped: if that changes, map its slots anew
    loans: tuple[_Loan, ...]


class _Slot:
    """Memory for one frame. Raises OSError if the system has none."""

    def __init__(self, token: bytes, number: int, capacity: int) -> None:
        self.number, self.capacity = number, capacity
        self.file = os.fdopen(os.memfd_create(_NAME, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING), "rb", buffering=0)
        os.ftruncate(self.file.fileno(), _DATA + capacity)
        fcntl.fcntl(self.file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK)  # a reader of a file that shrinks would be killed
        self.memory = mmap.mmap(self.file.fileno(), 0)
        self.memory[: _HEAD.size] = _HEAD.pack(token, number)
        self.readers: list[str] = []  # of the frame, by mark
        self.given_up = False
        self._source: weakref.ref[object] | None = None  # the array that was written here, while it lives

    @property
    def busy(self) -> bool:
        return self.memory.find(b"\1", _MARKS, _MARKS + len(self.readers)) >= 0

    def holds(self, array: object) -> bool:
        """Whether this array is here already, with room for one more reader. Senders do not change an array that they
        sent."""
        return self._source is not None and self._source() is array and len(self.readers) < _DATA - _MARKS

    def fill(self, frame: memoryview, array: object) -> None:
        self.readers.clear()
        self.memory[_DATA : _DATA + frame.nbytes] = frame
        self._source = None if array is None else weakref.ref(array)

    def array(self, size: int) -> Array:
        """An array for the caller to fill; the slot is busy until nothing refers to it any more."""
        made = np.frombuffer(self.memory, np.float32, size, _DATA)
        self.readers[:], self.memory[_MARKS], self._source = [""], 1, weakref.ref(made)
        weakref.finalize(made, self.memory.__setitem__, _MARKS, 0).atexit = False
        return made

    def lend(self, peer: str) -> int:
        """Set a mark; returns its number, for the reader to clear."""
        mark = len(self.readers)
        self.readers.append(peer)
        self.memory[_MARKS + mark] = 1
        return mark

    def forget(self, peer: str) -> None:
        for mark, reader in enumerate(self.readers):
            if reader == peer and self.memory[_MARKS + mark]:
                self.memory[_MARKS + mark], self.given_up, self._source = 0, True, None

    def close(self) -> None:
        self.file.close()
        with suppress(BufferError):  # arrays still refer to it: it is freed with the last one
            self.memory.close()


def _room(slots: Sequence[_Slot], capacity: int, share: int = 1) -> bool:
    """Whether another slot fits into that share of the limits."""
    return share * len(slots) < SLOTS and share * (sum(slot.capacity for slot in slots) + capacity) <= LENT_BYTES


class SlotCounts(NamedTuple):
    """The slots of a process."""

    made: int  # all that it has now
    busy: int  # with a mark: a reader has not given them back
    given_up: int  # never used again, because a reader is treated as dead


class SharedMemory:
    """The frames that a process lends to others, and borrows from them; used by one thread.

    Raises OSError or AttributeError if the system has no anonymous files.
    """

    def __init__(self) -> None:
        self._token = secrets.token_bytes(16)
        self._card = _Slot(self._token, 0, 0)  # others open it to check that they can share with this process
        self._slots: list[_Slot] = []
        self._made = self._dropped = 0
        self._last: list[tuple[_Slot, int]] = []  # lent with the last message, for `take_back`
        self._peers: dict[str, tuple[int, bytes]] = {}  # peers that share memory: process and token
        self._borrowed: dict[tuple[int, bytes], tuple[int, dict[int, mmap.mmap]]] = {}  # their `dropped`, and slots
        self._unread: list[tuple[_Note, _Loan]] = []  # not readable yet, because no file descriptor was left

    @property
    def slots(self) -> SlotCounts:
        """How many slots it has."""
        return SlotCounts(len(self._slots), sum(s.busy for s in self._slots), sum(s.given_up for s in self._slots))

    @property
    def identity(self) -> str:
        """The text that others need to share memory with this process."""
        return f"{os.getpid()}.{self._card.file.fileno()}.{self._token.hex()}"

    def connect(self, peer: str, identity: str) -> bool:
        """Share memory with a peer from now on. Returns whether that is possible."""
        self.forget(peer)
        with suppress(OSError, ValueError):
            process, file, token = identity.split(".")
            whose = int(process), bytes.fromhex(token)
            _opened(*whose, int(file), 0).close()
            self._peers[peer] = whose
        return peer in self._peers

    def process_of(self, peer: str) -> int:
        """The process of a peer with which it shares memory."""
        return self._peers[peer][0]

    def forget(self, peer: str) -> None:
        """A peer is gone: give up the slots that it has not given back."""
        self._borrowed.pop(self._peers.pop(peer, (0, b"")), None)
        for slot in self._slots:
            slot.forget(peer)
        self._last.clear()
        self._drop([slot for slot in self._slots if slot.given_up and not slot.busy])

    def close(self) -> None:
        """Drop all slots. Other processes keep those that they have mapped."""
        for kept in (self._peers, self._borrowed, self._last, self._unread):
            kept.clear()
        self._drop(list(self._slots))
        self._card.close()

    # --------------------------------------------------------------------------------------------------------------- lend

    def lend(self, peer: str, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """Put large frames into slots; returns the frames to send in place of these."""
        self._last.clear()
        # The first frame describes the others, and is short.
        if len(frames) == 1 or peer not in self._peers or max(map(byte_count, frames)) < LARGE_BYTES:
            return frames
        loans, rest = [], []
        for place, frame in enumerate(frames):
            size = byte_count(frame)
            slot = self._slot(memoryview(frame)) if size >= LARGE_BYTES else None
            if slot is None:
                rest.append(frame)
            else:
                mark = slot.lend(peer)
                self._last.append((slot, mark))
                loans.append(_Loan(place, slot.file.fileno(), slot.number, mark, size))
        note = _Note(os.getpid(), self._token, self._dropped, tuple(loans))
        return [NOTE + msgspec.msgpack.encode(note), *rest]

    def empty(self, size: int) -> Array:
        """An array of float32, [size], in a slot if there is room, so that it is lent without a copy. Such arrays take at
        most half of the room."""
        room = 4 * size >= LARGE_BYTES and _room([slot for slot in self._slots if slot.busy], 4 * size, share=2)
        slot = self._free(4 * size) if room else None
        return np.empty(size, np.float32) if slot is None else slot.array(size)

    def take_back(self) -> None:
        """The last message was not sent: clear its marks."""
        for slot, mark in self._last:
            slot.memory[_MARKS + mark] = 0

    def _slot(self, frame: memoryview) -> _Slot | None:
        """A slot with that frame in it; None if there is no room."""
        owner: object = frame.obj
        array = owner if isinstance(owner, np.ndarray) and owner.nbytes == frame.nbytes else None
        for slot in self._slots if array is not None else ():
            if slot.holds(array):
                return slot
        found = self._free(frame.nbytes)
        if found is not None:
            found.fill(frame, array)
        return found

    def _free(self, size: int) -> _Slot | None:
        fitting = [slot for slot in self._slots if slot.capacity >= size and not slot.busy and not slot.given_up]
        return min(fitting, key=lambda slot: slot.capacity, default=None) or self._new(size)

    def _new(self, size: int) -> _Slot | None:
        capacity = 2 ** (size - 1).bit_length()  # a power of 2, for reuse; pages that are never written take no memory
        if not _room(self._slots, capacity):
            self._drop([slot for slot in self._slots if not slot.busy])
            if not _room(self._slots, capacity):
                return None
        self._made += 1
        with suppress(OSError):
            self._slots.append(_Slot(self._token, self._made, capacity))
            return self._slots[-1]
        return None

    def _drop(self, slots: Sequence[_Slot]) -> None:
        for slot in slots:
            self._slots.remove(slot)
            slot.close()
            self._dropped += 1

    # ------------------------------------------------------------------------------------------------------------- borrow

    def borrow(self, frames: Sequence[Buffer]) -> Sequence[Buffer]:
        """All frames of a message, from those that arrived. Raises Unreadable if one cannot be read: its sender is dead, or
        never sent it, or this process has no file descriptors left."""
        if frames[0][:NOTE_BYTES] != NOTE:
            return frames
        self._return_unread()
        try:
            note = msgspec.msgpack.decode(frames[0][len(NOTE) :], type=_Note)
            whole = list(frames[1:])
            for loan in note.loans:
                view = self._lent(note, loan)
                if view is not None:
                    whole.insert(loan.place, view)
        except (OSError, ValueError, OverflowError, msgspec.MsgspecError) as error:
            raise Unreadable(f"Cannot read what another process lends: {error}.") from None
        if any(of is note for of, _ in self._unread):
            raise Unreadable("Cannot read what another process lends: no file descriptor is left; raise `ulimit -n`.")
        return whole

    def _return_unread(self) -> None:
        """Read, and so give back, the frames that could not be read before: their lender waits for their marks."""
        unread, self._unread = self._unread, []
        for note, loan in unread:
            with suppress(OSError, ValueError):
                self._lent(note, loan)

    def _lent(self, note: _Note, loan: _Loan) -> memoryview | None:
        """A frame; None if no file descriptor is left, in which case it is given back later."""
        if sum(len(slots) for _, slots in self._borrowed.values()) >= BORROWED:
            self._borrowed.clear()
        try:
            return _view(self._mapped(note, loan), loan)
        except OSError as error:
            if error.errno not in (errno.EMFILE, errno.ENFILE):
                raise
        if self._borrowed:
            self._borrowed.clear()  # drops the mappings to which nothing refers
            return self._lent(note, loan)
        self._unread.append((note, loan))
        return None

    def _mapped(self, note: _Note, loan: _Loan) -> mmap.mmap:
        whose = note.process, note.token
        dropped, slots = self._borrowed.get(whose, (-1, {}))
        if dropped != note.dropped:
            slots = {}
        if loan.number not in slots:
            slots[loan.number] = _opened(*whose, loan.file, loan.number)
        self._borrowed[whose] = note.dropped, slots
        return slots[loan.number]


def _opened(process: int, token: bytes, file: int, number: int) -> mmap.mmap:
    """Map a slot of another process. Raises OSError if it cannot be opened, ValueError if it is no slot of that process."""
    path = Path(f"/proc/{process}/fd/{file}")
    if not str(path.readlink()).startswith(f"/memfd:{_NAME}"):  # opening another kind of file can have side effects
        raise ValueError(f"{path} is no slot")
    opened = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    try:
        sealed = fcntl.fcntl(opened, fcntl.F_GET_SEALS) & fcntl.F_SEAL_SHRINK
        memory = mmap.mmap(opened, 0)
    finally:
        os.close(opened)
    if not sealed or len(memory) < _DATA or memory[: _HEAD.size] != _HEAD.pack(token, number):
        raise ValueError(f"{path} is another's slot")
    return memory


def _view(memory: mmap.mmap, loan: _Loan) -> memoryview:
    """A frame, read-only. All views of it refer to one array; when that is freed, the mark is cleared."""
    if not (0 < loan.size <= len(memory) - _DATA and 0 <= loan.mark < _DATA - _MARKS):
        raise ValueError(f"{loan.size} bytes, mark {loan.mark}, are not in a slot of {len(memory) - _DATA}")
    array = np.frombuffer(memory, np.uint8, loan.size, _DATA)
    array.flags.writeable = False
    weakref.finalize(array, memory.__setitem__, _MARKS + loan.mark, 0).atexit = False
    return array.data
