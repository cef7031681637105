"""What every importer has in common: who is to be named, and what it hands over."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from traces.plausible import fault
from traces.schema import TRACE

__all__ = ["Imported", "Source", "as_text", "found", "nothing_known", "once", "table"]


@dataclass(frozen=True, slots=True)
class Imported:
    """What an importer read: tables of `traces.schema.TRACE`, and the files they come from."""

    tables: Mapping[str, pl.DataFrame]
    inputs: tuple[Path, ...]


@dataclass(frozen=True, slots=True)
class Source:
    """A public recording: its importer, and whom to name."""

    summary: str  # one line for lists
    of: str  # repository and commit whose format this is
    licence: str
    cite: str
    read: Callable[[Path], Imported]  # of a file or a folder; raises TraceError where it is not in the source's format


def table(name: str, rows: Iterable[Mapping[str, Any]] | pl.DataFrame) -> pl.DataFrame:
    """Rows of a trace's table; columns that are not given are null, and the branch is 0 where there are none."""
    schema = TRACE[name].schema
    frame = (
        rows
        if isinstance(rows, pl.DataFrame)
        else pl.DataFrame(list(rows), schema_overrides=schema, infer_schema_length=None)
    )
    if not frame.width:
        return pl.DataFrame(schema=schema)
    given = {n: pl.col(n) if n in frame.columns else pl.lit(0 if n == "branch" else None) for n in schema}
    return frame.select(given[n].cast(kind).alias(n) for n, kind in schema.items())


def as_text(value: Mapping[str, Any]) -> str:
    """A JSON object on one line, for the columns `extras` and `options`."""
    return json.dumps(value, sort_keys=True)


def found(path: Path, *patterns: str) -> list[Path]:
    """The files below `path` that are like the first pattern that any is like; `path` itself if it is a file."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise fault(path, "there is no such file or folder.")
    for pattern in patterns:
        paths = sorted(p for p in path.glob(pattern) if p.is_file())
        if paths:
            return paths
    return []


def once(frame: pl.DataFrame, path: Path, *key: str) -> pl.DataFrame:
    """The rows without those that are there before, exactly the same. Raises TraceError for two that only agree in `key`."""
    again = ~frame.select(pl.struct(key).is_first_distinct()).to_series()
    other = again & frame.select(pl.struct(pl.all()).is_first_distinct()).to_series()
    if other.any():
        row = int(other.arg_true()[0])
        same = ", ".join(f"{k} {frame[k][row]!r}" for k in key)
        raise fault(path, f"there is a row with {same} already, and it says something else.", row=row)
    return frame.filter(~again)


def nothing_known(path: Path, *patterns: str) -> Exception:
    """The error for a folder in which there is nothing to import."""
    return fault(path, f"it holds nothing that this importer knows: {', '.join(patterns)}.")
