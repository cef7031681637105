"""The coordinator's journal on disk: records that are appended one by one, and replayed by the next coordinator."""

from __future__ import annotations

import os
import struct
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol

__all__ = ["FileJournal", "Journal"]

_HEAD = struct.Struct("<II")  # length, checksum


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
    """A journal in a file. Ignores a last record that was cut short; the next one overwrites it."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, path.open("a+b", buffering=0)
        self._file.truncate(sum(_HEAD.size + len(record) for record in self))
        self._file.seek(0, os.SEEK_END)

    def append(self, record: bytes) -> None:
        self._file.write(_framed(record))

    def restart(self, record: bytes) -> None:
        aside = self._path.with_name(self._path.name + ".new")
        # Written aside, then renamed: whenever this process dies, one of the two is whole.
        aside.write_bytes(_framed(record))
        aside.replace(self._path)
        self._file.close()
        self._file = self._path.open("a+b", buffering=0)

    def __iter__(self) -> Iterator[bytes]:
        self._file.seek(0)
        data = self._file.read()
        at = 0
        while at + _HEAD.size <= len(data):
            length, checksum = _HEAD.unpack_from(data, at)
            record = data[at + _HEAD.size : at + _HEAD.size + length]
            # The process died while it wrote this record.
            if len(record) < length or zlib.crc32(record) != checksum:
                return
            yield record
            at += _HEAD.size + length

    def close(self) -> None:
        self._file.close()


def _framed(record: bytes) -> bytes:
    return _HEAD.pack(len(record), zlib.crc32(record)) + record
