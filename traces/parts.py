"""A trace on disk: written during the run; after a crash it can be read up to the last batch.

TRACE/
  iterations/000000.parquet    a table is a folder of parts, in order; so are the others of `traces.schema.TRACE`
  trace.json                   origin, rows and parts of each table; written last: without it, the recording was not finished

Every batch is a file of its own. A Parquet file has its directory at its end, so a single growing file could not be read
after a crash, whereas finished parts stay readable. The metadata of each part names its table, version and origin, and holds
the SHA-256 of the part's bytes (computed with 64 zeros in place of the digest). A damaged part is refused before its bytes
reach the Parquet reader, because damaged bytes can crash the reader.
"""

from __future__ import annotations

import hashlib
import io
import re
from contextlib import nullcontext, suppress
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from types import TracebackType
from typing import Any

import msgspec
import polars as pl

from traces.plausible import TraceError, check_columns, check_units, check_values, disorder, fault
from traces.schema import TRACE, TRACE_VERSION
from traces.store import is_job, write_bytes

__all__ = ["Manifest", "Origin", "TraceWriter", "check_trace", "digest_of", "is_like", "manifest", "origin", "scan"]

_DIGEST = "harness_digest"
_BLANK = "0" * 64
_FIND_DIGEST = re.compile(_DIGEST.encode() + rb"[^0-9a-f]{1,3}([0-9a-f]{64})")
_TAIL_BYTES = 1 << 20  # the digest is the last entry of the metadata; only a few bytes per column follow it
_PART_ROWS = 1 << 13


def is_like(name: str, pattern: str) -> bool:
    """Whether a run's name is `pattern`, or fits it with wildcards, as "minibatch/*". A name may have brackets itself."""
    return name == pattern or fnmatchcase(name, pattern)


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of a trace."""

    source: str  # "harness", or the importer's name
    made_by: str  # program and version
    of: str = ""  # scenario, tuner and seed; or repository and commit
    licence: str = ""
    cite: str = ""
    inputs: tuple[tuple[str, str], ...] = ()  # imported files: name, SHA-256


@dataclass(frozen=True, slots=True)
class Manifest:
    """The content of `trace.json`."""

    trace: int  # version
    origin: Origin
    rows: dict[str, int]  # by table
    parts: dict[str, int]


# ---------------------------------------------------------------------------------------------------------------- write


class TraceWriter:
    """Writes a trace batch by batch. As a context manager it is closed at the end; an exception leaves it unfinished.

    Raises ValueError if `folder` exists and is not empty, and for columns that the table does not have.
    """

    def __init__(self, folder: Path, origin: Origin, *, part_rows: int = _PART_ROWS, waits: bool = False) -> None:
        """`waits`: where the disk is full, rows wait in memory until there is room, or until `close`."""
        if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
            raise ValueError(f"Cannot write a trace to {folder}: it is there already. Name another folder.")
        folder.mkdir(parents=True, exist_ok=True)
        self._folder, self._origin, self._part_rows, self._waits = folder, origin, part_rows, waits
        self._waiting: dict[str, list[pl.DataFrame]] = {}
        self._heights: dict[str, int] = {}
        self._rows: dict[str, int] = {}
        self._parts: dict[str, int] = {}

    def add(self, table: str, frame: pl.DataFrame) -> None:
        """Add rows to a table; columns that `frame` lacks are null.

        When one table has enough waiting rows, the waiting rows of all tables are written, so that they stay in step.
        """
        self._waiting.setdefault(table, []).append(_completed(frame, table))
        self._heights[table] = self._heights.get(table, 0) + frame.height
        if self._heights[table] >= self._part_rows:
            with suppress(OSError) if self._waits else nullcontext():
                self._flush()

    def close(self) -> None:
        """Write the waiting rows, and the manifest, which marks the trace as finished."""
        self._flush()
        made = Manifest(TRACE_VERSION, self._origin, self._rows, self._parts)
        write_bytes(self._folder / "trace.json", msgspec.json.format(msgspec.json.encode(made), indent=1) + b"\n")

    def _flush(self) -> None:
        for table, frames in list(self._waiting.items()):
            frame = pl.concat(frames) if len(frames) > 1 else frames[0]
            (self._folder / table).mkdir(exist_ok=True)
            number = self._parts.get(table, 0)
            write_bytes(self._folder / table / f"{number:06}.parquet", _packed(frame, table, self._origin))
            self._parts[table] = number + 1
            self._rows[table] = self._rows.get(table, 0) + frame.height
            del self._waiting[table], self._heights[table]  # now: the next table may not be written

    def __enter__(self) -> TraceWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self.close()


def _completed(frame: pl.DataFrame, table: str) -> pl.DataFrame:
    """`frame` with every column of the table, in order."""
    schema = TRACE[table].schema
    if frame.schema == schema:
        return frame
    unknown = [name for name in frame.columns if name not in schema]
    if unknown:
        raise ValueError(f"Cannot add column {unknown[0]!r} to {table}: it has {', '.join(schema)}.")
    return frame.select(
        pl.col(name).cast(kind) if name in frame.columns else pl.lit(None, kind).alias(name) for name, kind in schema.items()
    )


def _packed(frame: pl.DataFrame, table: str, origin: Origin) -> bytes:
    metadata = {"harness_trace": str(TRACE_VERSION), "table": table, "origin": msgspec.json.encode(origin).decode()}
    out = io.BytesIO()
    # The digest is the last entry, so that a search from the end finds it without parsing the file.
    frame.write_parquet(out, compression="zstd", metadata=metadata | {_DIGEST: _BLANK})
    data = bytearray(out.getvalue())
    at = data.rindex(_BLANK.encode())
    data[at : at + 64] = hashlib.sha256(data).hexdigest().encode()
    return bytes(data)


def digest_of(data: bytes) -> str:
    """SHA-256, as hexadecimal digits."""
    return hashlib.sha256(data).hexdigest()


# ----------------------------------------------------------------------------------------------------------------- read


def scan(folder: Path, table: str) -> pl.LazyFrame:
    """A table of a trace, lazily; after a crash, all rows up to the last batch.

    The digest of every part is verified first. Raises TraceError, naming the part, if one is damaged, cut short, of another
    version, or missing; ValueError if `folder` is no trace.
    """
    paths = _parts(folder, table)
    for path in paths:
        _verify(path, table)
    if not paths:
        return pl.LazyFrame(schema=TRACE[table].schema)
    return pl.scan_parquet(paths, schema=TRACE[table].schema, glob=False)  # a folder may be called run[1]


def manifest(folder: Path) -> Manifest | None:
    """The manifest of a finished trace; None if the recording was not finished.

    Raises ValueError if `folder` is no trace, TraceError if its trace.json is damaged or of another version.
    """
    path = folder / "trace.json"
    if not path.is_file():
        if is_job(folder):
            raise ValueError(f"Cannot read a trace from {folder}: it has a deployed job. Its trace is {folder / 'trace'}.")
        if (folder / "manifest.json").is_file():  # its folder `runs` has the name of a table
            raise ValueError(
                f"Cannot read a trace from {folder}: it has the results of a comparison. With --record, each of its runs "
                "has a folder `trace`."
            )
        if any((folder / f"{table}.{ending}").is_file() for table in TRACE for ending in ("csv", "jsonl")):
            raise ValueError(
                f"Cannot read a trace from {folder}: it has tables of your own. Make a trace of them with `harness trace "
                f"convert {folder} --out TRACE`, and name that."
            )
        if not any((folder / table).is_dir() for table in TRACE):
            raise ValueError(
                f"Cannot read a trace from {folder}: it has no trace.json and no tables. Name a trace's folder."
            )
        return None
    try:
        version = msgspec.json.decode(path.read_bytes(), type=dict[str, Any]).get("trace")
        _check_version(path, version)
        return msgspec.json.decode(path.read_bytes(), type=Manifest)
    except msgspec.MsgspecError as error:
        raise fault(path, f"it is damaged or cut short ({error}).") from None


def origin(folder: Path) -> Origin:
    """The origin of the trace in `folder`, finished or not."""
    found = manifest(folder)
    if found is not None:
        return found.origin
    first = next((path for table in TRACE for path in _parts(folder, table)), None)
    if first is None:
        raise ValueError(f"Cannot read a trace from {folder}: its recording broke off before anything was written.")
    _verify(first, first.parent.name)
    return msgspec.json.decode(_metadata(first, first.parent.name)["origin"], type=Origin)


def check_trace(folder: Path) -> dict[str, int]:
    """Check the whole trace against the rules of its tables, and return the number of rows of each table.

    Raises TraceError at the first violation, naming part, row and column; ValueError if `folder` is no trace.
    """
    manifest(folder)
    return {table: _check_table(folder, table) for table in TRACE if (folder / table).is_dir()}


def _check_table(folder: Path, table: str) -> int:
    """Check one table of a trace, and return its number of rows. Raises TraceError at the first violation."""
    rule, paths = TRACE[table], _parts(folder, table)
    # Values are checked part by part; only the columns that order and uniqueness need are kept for the whole table.
    kept = [c for c in rule.columns if c in (*rule.key, rule.time, *rule.by)]
    starts, frames, rows = [], [], 0
    for path in paths:
        _verify(path, table)
        frame = pl.read_parquet(path, glob=False)
        check_columns(frame, rule, path)
        check_values(frame, rule, path)
        starts.append(rows)
        frames.append(frame.select(kept))
        rows += frame.height
    if frames and (found := disorder(pl.concat(frames), rule)):
        part = max(i for i, start in enumerate(starts) if start <= found.row)
        raise fault(paths[part], found.why, row=found.row - starts[part], column=found.column)
    check_units(scan(folder, table), rule, folder / table)
    return rows


def _parts(folder: Path, table: str) -> list[Path]:
    """The parts of a table in order. Raises TraceError where one is missing."""
    finished = manifest(folder)
    paths = sorted((folder / table).glob("[0-9]*.parquet"))
    expected = len(paths) if finished is None else finished.parts.get(table, 0)
    for number in range(expected):
        path = folder / table / f"{number:06}.parquet"
        if number >= len(paths) or paths[number] != path:
            raise fault(path, "this part is missing.")
    if len(paths) > expected:
        raise fault(paths[expected], "this part is not among those that trace.json lists.")
    return paths


def _verify(path: Path, table: str) -> None:
    """Raise TraceError unless `path` is an undamaged part of `table` of this version."""
    with path.open("rb") as opened:
        data = bytearray(opened.read())
    found = None
    for found in _FIND_DIGEST.finditer(data, max(0, len(data) - _TAIL_BYTES)):  # noqa: B007
        pass
    if found is None:
        raise fault(path, "it is no part of a trace, or cut short.")
    digest, at = found[1].decode(), found.start(1)
    data[at : at + 64] = _BLANK.encode()
    if hashlib.sha256(data).hexdigest() != digest:
        raise fault(path, "it is damaged: its digest is another. Record or import it again.")
    metadata = _metadata(path, table)
    _check_version(path, metadata.get("harness_trace"))
    if metadata.get("table") != table:
        raise fault(path, f"it is a part of table {metadata.get('table')!r}, not of {table!r}.")


def _metadata(path: Path, table: str) -> dict[str, str]:
    try:
        return pl.read_parquet_metadata(path)
    except pl.exceptions.PolarsError as error:
        raise fault(path, f"it is no part of {table} ({error}).") from None


def _check_version(path: Path, found: Any) -> None:
    if str(found) != str(TRACE_VERSION):
        raise TraceError(
            f"Cannot use {path}: it has format {found}, and this harness reads format {TRACE_VERSION}. "
            "Use the version that wrote it, or import it again."
        )
