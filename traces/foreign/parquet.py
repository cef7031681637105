"""Reads a Parquet file of other people in a process of its own: ``python -m traces.foreign.parquet FILE COLUMNS ROWS``.

A damaged file can crash the process that reads it, or make it allocate all memory; so a child process with limits reads it.
The child writes Arrow IPC to standard output and returns 0, or writes a message and returns 1.
"""

from __future__ import annotations

import io
import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl

from traces.foreign.text import MOST_ROWS, bytes_of
from traces.plausible import TableRules, check, fault

__all__ = ["read_parquet"]

_CHILD_SECONDS = 300
_MOST_MEMORY_BYTES = 8 << 30
_MOST_CPU_SECONDS = 240


def read_parquet(path: Path, table: TableRules) -> pl.DataFrame:
    """The columns of `table`, of any type that can be cast to theirs, checked.

    Raises TraceError, with file, row and column, for any other file, and for one that crashes its reader.
    """
    bytes_of(path)
    command = [sys.executable, "-m", "traces.foreign.parquet", str(path), json.dumps(list(table.columns)), str(MOST_ROWS)]
    try:
        done = subprocess.run(command, capture_output=True, timeout=_CHILD_SECONDS, check=False)  # noqa: S603 (our own)
    except subprocess.TimeoutExpired:
        raise fault(path, f"it could not be read in {_CHILD_SECONDS} s.") from None
    if done.returncode != 0:
        reason = done.stdout.decode(errors="replace").strip()
        raise fault(path, reason or "it is damaged or cut short: the Parquet reader crashed.")
    frame = _cast(pl.read_ipc(io.BytesIO(done.stdout)), table, path)
    check(frame, table, path)
    return frame


def _cast(frame: pl.DataFrame, table: TableRules, path: Path) -> pl.DataFrame:
    columns: list[Any] = []
    for name, column in table.columns.items():
        values = frame[name]
        try:
            cast = values.cast(column.kind, strict=False)
        except pl.exceptions.PolarsError:
            raise fault(path, f"it holds {values.dtype}, not {column.kind}.", column=name) from None
        lost = cast.is_null() & values.is_not_null()
        if lost.any():
            row = int(lost.arg_true()[0])
            raise fault(path, f"{str(values[row])[:80]!r} is no {column.kind}.", row=row, column=name)
        columns.append(cast)
    return pl.DataFrame(columns)


# ----------------------------------------------------------------------------------------------------- in the child process


def _main(arguments: list[str]) -> int:
    """Read the columns COLUMNS (a JSON list of names) of FILE, which may have at most ROWS rows."""
    for what, most in ((resource.RLIMIT_AS, _MOST_MEMORY_BYTES), (resource.RLIMIT_CPU, _MOST_CPU_SECONDS)):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, names, most_rows = Path(arguments[0]), json.loads(arguments[1]), int(arguments[2])
    try:
        lazy = pl.scan_parquet(path, glob=False)
        has = lazy.collect_schema().names()
        missing = [name for name in names if name not in has]
        if missing:
            return _say(f"column {missing[0]!r} is missing; there are {', '.join(n[:40] for n in has[:20]) or 'none'}.")
        rows = lazy.select(pl.len()).collect().item()
        if rows > most_rows:
            return _say(f"it has {rows} rows, and more than {most_rows} are not read.")
        frame = pl.read_parquet(path, columns=names, glob=False)
    except Exception as error:
        return _say(f"it is damaged, cut short, or no Parquet file ({str(error).splitlines()[0][:200]}).")
    out = io.BytesIO()
    frame.write_ipc(out)
    sys.stdout.buffer.write(out.getvalue())
    return 0


def _say(why: str) -> int:
    sys.stdout.write(why)
    return 1


if __name__ == "__main__":
    sys.exit(_main(sys.argv[1:]))
