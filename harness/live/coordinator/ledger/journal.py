"""The coordinator's journal on disk: records that are appended one by one, and replayed by the next coordinator.

Records can have the code of a policy that a tuner has installed. So each has a digest with a key that only the owner of the
job can read, over its number and its bytes; it is checked before a record is given to anybody.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
import struct
from collections.abc import Iterator
from io import FileIO
from pathlib import Path
from typing import Protocol

__all__ = ["FileJournal", "Journal"]

_HEAD = struct.Struct("<I16s")  # length, digest


class Journal(Protocol):
    """Records in order."""

    def append(self, record: bytes) -> None:
        """Add a record; it survives the death of this process once the call returns."""
        ...

    def restart(self, record: bytes) -> None:
        """Replace all records by this one."""
        ...

    def __iter__(self) -> Iterator[bytes]:
        """All records, the oldest first."""
        ...


class FileJournal:
    """A journal in a file that only its owner can read; its key is in a file beside it. Ignores a last record that was cut
    short, or was not written with that key, and all after it; the next one overwrites them."""

    def __init__(self, path: Path) -> None:
        self._path, self._key = path, _key(path.with_name(path.name + ".key"))
        self._file = _opened(path)
        self._count, size = 0, 0
        for record in self:
            self._count, size = self._count + 1, size + _HEAD.size + len(record)
        self._file.truncate(size)
        self._file.seek(0, os.SEEK_END)

    def append(self, record: bytes) -> None:
        _write(self._file, self._framed(self._count, record))
        self._count += 1

    def restart(self, record: bytes) -> None:
        aside = self._path.with_name(self._path.name + ".new")
        # Written aside, then renamed: whenever this process dies, one of the two is whole.
        aside.unlink(missing_ok=True)
        with _opened(aside) as out:
            _write(out, self._framed(0, record))
        aside.replace(self._path)
        self._file.close()
        self._file = _opened(self._path)
        self._count = 1

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        data = self._file.read()
        at = number = 0
        while at + _HEAD.size <= len(data):
            length, digest = _HEAD.unpack_from(data, at)
            record = data[at + _HEAD.size : at + _HEAD.size + length]
            # The process died while it wrote this record, or somebody else wrote it.
            if len(record) < length or not secrets.compare_digest(self._digest(number, record), digest):
                return
            yield record
            at, number = at + _HEAD.size + length, number + 1

    def close(self) -> None:
        self._file.close()

    def _framed(self, number: int, record: bytes) -> bytes:
        return _HEAD.pack(len(record), self._digest(number, record)) + record

    def _digest(self, number: int, record: bytes) -> bytes:
        # The number is part of it: a record in another place is not the one that was written there.
        return hashlib.blake2b(number.to_bytes(8, "little") + record, key=self._key, digest_size=16).digest()


def _write(file: FileIO, data: bytes) -> None:
    """Write all of it. Raises OSError if the disk is full: a file without buffer writes a part then, and says nothing."""
    if file.write(data) != len(data):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), file.name)


def _key(path: Path) -> bytes:
    if not path.exists():
        with _opened(path) as out:
            out.write(secrets.token_bytes(32))
    return path.read_bytes()


def _opened(path: Path) -> FileIO:
    """The file, to be read and added to. If it is new, only its owner can read it."""
    return FileIO(os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o600), "a+")
