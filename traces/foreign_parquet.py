"""Reads one foreign Parquet file in a process of its own: ``python -m traces.foreign_parquet FILE COLUMNS ROWS``.

The file may crash this process (see `traces.foreign.read_parquet`). Writes Arrow IPC to standard output and returns 0, or
writes a message and returns 1.
"""

from __future__ import annotations

import io
import json
import resource
import sys
from pathlib import Path

import polars as pl

__all__ = ["main"]

_MOST_MEMORY_BYTES = 8 << 30
_MOST_CPU_SECONDS = 240


def main(arguments: list[str]) -> int:
    """Read the columns COLUMNS (a JSON list of names) of FILE, which may have at most ROWS rows."""
    for what, most in ((resource.RLIMIT_AS, _MOST_MEMORY_BYTES), (resource.RLIMIT_CPU, _MOST_CPU_SECONDS)):
        resource.setrlimit(what, (most, most))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    path, names, most_rows = Path(arguments[0]), json.loads(arguments[1]), int(arguments[2])
    try:
        lazy = pl.scan_parquet(path)
        has = lazy.collect_schema().names()
        missing = [name for name in names if name not in has]
        if missing:
            return _say(f"column {missing[0]!r} is missing; there are {', '.join(n[:40] for n in has[:20]) or 'none'}.")
        rows = lazy.select(pl.len()).collect().item()
        if rows > most_rows:
            return _say(f"it has {rows} rows, and more than {most_rows} are not read.")
        frame = pl.read_parquet(path, columns=names)
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
    sys.exit(main(sys.argv[1:]))
