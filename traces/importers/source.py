"""What all importers share: the types `Source` and `Imported`, and functions that find files and make tables."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import polars as pl

from traces.plausible import fault
from traces.schema import TRACE

__all__ = [
    "Imported",
    "RemoteFile",
    "Source",
    "find_files",
    "json_text",
    "nothing_to_import",
    "table",
    "without_duplicates",
]


@dataclass(frozen=True, slots=True)
class Imported:
    """The result of an importer: tables of `traces.schema.TRACE`, and the files that it read."""

    tables: Mapping[str, pl.DataFrame]
    inputs: tuple[Path, ...]
    left_out: str = ""  # a sentence about rows of another kind that the files also have; "" if there are none

    @property
    def rows(self) -> dict[str, int]:
        """The number of rows of each table."""
        return {name: frame.height for name, frame in self.tables.items()}


@dataclass(frozen=True, slots=True)
class RemoteFile:
    """A file of a source's repository that `harness trace fetch` downloads."""

    path: str  # in the source's folder of the repository, at its commit
    sha256: str = ""  # of its bytes; "": not known to us, so that the user must confirm the one that was downloaded


@dataclass(frozen=True, slots=True, kw_only=True)
class Source:
    """A public recording: where it is, its licence and citation, and its importer."""

    summary: str  # one line for lists
    repository: str  # owner/name on GitHub
    commit: str  # 40 hexadecimal digits; the format is that of this commit
    folder: str = ""  # of the recording in the repository; "" is its root
    licence: str
    cite: str
    read: Callable[[Path], Imported]  # reads a file or a folder; raises TraceError if it is not in this format
    files: tuple[RemoteFile, ...] = ()  # (): to be fetched by hand, see `size`
    size: str = ""  # of the files that the importer reads, for people; "": not known to us

    @property
    def of(self) -> str:
        """Repository, commit and folder, as a trace's origin names them."""
        return f"{self.repository} @ {self.commit}" + (f" ({self.folder})" if self.folder else "")

    @property
    def address(self) -> str:
        """The page of the recording at its commit."""
        return f"https://github.com/{self.repository}/tree/{self.commit}" + (f"/{self.folder}" if self.folder else "")


def table(name: str, rows: Iterable[Mapping[str, Any]] | pl.DataFrame) -> pl.DataFrame:
    """Rows of a trace's table. Columns that are not given are null, except `branch`, which is 0."""
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


def json_text(value: Mapping[str, Any]) -> str:
    """A JSON object on one line, for the columns `extras` and `options`."""
    return json.dumps(value, sort_keys=True)


def find_files(path: Path, *patterns: str) -> list[Path]:
    """The files below `path` that match the first pattern with any match; `path` itself if it is a file."""
    if path.is_file():
        return [path]
    if not path.is_dir():
        raise fault(path, "there is no such file or folder.")
    for pattern in patterns:
        paths = sorted(p for p in path.glob(pattern) if p.is_file())
        if paths:
            return paths
    return []


def without_duplicates(frame: pl.DataFrame, path: Path, *key: str) -> pl.DataFrame:
    """The rows without exact duplicates. Raises TraceError for two different rows with an equal `key`."""
    again = ~frame.select(pl.struct(key).is_first_distinct()).to_series()
    other = again & frame.select(pl.struct(pl.all()).is_first_distinct()).to_series()
    if other.any():
        row = int(other.arg_true()[0])
        same = ", ".join(f"{k} {frame[k][row]!r}" for k in key)
        raise fault(path, f"there is a row with {same} already, and it has other values.", row=row)
    return frame.filter(~again)


def nothing_to_import(path: Path, *patterns: str) -> Exception:
    """The error for a folder without files to import."""
    return fault(path, f"it holds nothing that this importer knows: {', '.join(patterns)}.")
