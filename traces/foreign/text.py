"""Reads text files of other people, with limits on size and with checks, because a file may be damaged or hostile.

Every function returns the whole content, or raises TraceError with file, row and column.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, TypeVar

import msgspec
import polars as pl

from traces.plausible import TableRules, TraceError, check, check_columns, fault

__all__ = [
    "MOST_ROWS",
    "bytes_of",
    "json_lines",
    "json_of",
    "lines_of",
    "read_csv",
    "read_texts",
    "text_of",
    "typed",
]

T = TypeVar("T")

MOST_ROWS = 50_000_000
"""Of a table of another source."""

_MOST_BYTES = 1 << 30
_MOST_COLUMNS = 10_000
_LONGEST_LINE = 1 << 20


def bytes_of(path: Path, *, most: int = _MOST_BYTES) -> bytes:
    """The bytes of a file that is not larger than `most`."""
    try:
        size = path.stat().st_size
        if size > most:
            raise fault(path, f"it has {size} bytes, and more than {most} are not read. Cut it into smaller files.")
        return path.read_bytes()
    except OSError as error:
        raise fault(path, f"{error.strerror or error}.") from None


def text_of(path: Path, *, most: int = _MOST_BYTES) -> str:
    """The text of a file in UTF-8, without its byte order mark."""
    data = bytes_of(path, most=most)
    _check_text(data, path)
    return data.decode("utf-8-sig")


def lines_of(path: Path, *, ends: bool = True) -> list[str]:
    """The lines of a text file, each at most 1 MiB long. If `ends`, a last line without a newline means a file cut short."""
    text = text_of(path)
    if ends and text and not text.endswith("\n"):
        raise fault(path, "its last line has no end: the file was cut short.", row=text.count("\n"))
    lines = text.splitlines()
    for row, line in enumerate(lines):
        if len(line) > _LONGEST_LINE:
            raise fault(path, f"the line has {len(line)} characters.", row=row)
    return lines


def json_of(path: Path, kind: type[T]) -> T:
    """The content of a JSON file, which must be of type `kind` (a msgspec struct, for example)."""
    try:
        return msgspec.json.decode(bytes_of(path), type=kind)
    except (msgspec.MsgspecError, RecursionError, UnicodeDecodeError) as error:
        raise fault(path, f"its content is not of the expected form ({error}).") from None


def json_lines(path: Path) -> pl.DataFrame:
    """The objects of a file with a JSON object per line, as texts: a column per key; null where an object lacks it."""
    rows: list[dict[str, str | None]] = []
    for number, line in enumerate(lines_of(path, ends=False)):
        if not line.strip():
            continue
        try:
            found = json.loads(line, object_pairs_hook=_once)
        except (ValueError, RecursionError) as error:
            raise fault(path, f"it is no JSON ({error}).", row=number) from None
        if not isinstance(found, dict):
            raise fault(path, "it is no JSON object: write one per line, with the columns as keys.", row=number)
        rows.append({k: None if v is None else v if isinstance(v, str) else json.dumps(v) for k, v in found.items()})
    if not rows:
        raise fault(path, "it is empty.")
    names = dict.fromkeys(name for row in rows for name in row)
    if len(names) > _MOST_COLUMNS:
        raise fault(path, f"it has more than {_MOST_COLUMNS} columns.")
    return pl.DataFrame({name: [row.get(name) for row in rows] for name in names}, schema=dict.fromkeys(names, pl.String()))


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """The object of these pairs. Raises ValueError for a key that is there twice, of which Python would take the last."""
    found = dict(pairs)
    if len(found) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)!r} is there twice")
    return found


# ------------------------------------------------------------------------------------------------------------------ CSV


def read_csv(path: Path, table: TableRules, *, header: bool = True, ends: bool = True, index: str = "") -> pl.DataFrame:
    """The columns of `table`, typed and checked. Without `header`, the file has exactly these columns in this order.

    If `ends`, the last line must end with a newline, because the program that writes such files writes one. `index` names a
    first column that has no name.
    """
    return typed(read_texts(path, names=None if header else list(table.columns), ends=ends, index=index), table, path)


def read_texts(
    path: Path, *, names: list[str] | None = None, ends: bool = True, index: str = "", full_rows: bool = False
) -> pl.DataFrame:
    """All columns of a CSV file as texts. `names` are those of its columns where it has no header; else as `read_csv`.

    With `full_rows`, a row with fewer fields than the first line is refused. Else its missing fields are null.
    """
    header = names is None
    data = bytes_of(path)
    _check_text(data, path)
    head = data[: _LONGEST_LINE + 1].split(b"\n", 1)[0]
    if len(head) > _LONGEST_LINE or head.count(b",") >= _MOST_COLUMNS:
        raise fault(path, f"it has more than {_MOST_COLUMNS} columns, or is no CSV file at all.", row=None)
    if not data.strip():
        raise fault(path, "it is empty.")
    if ends and not data.endswith(b"\n"):
        raise fault(path, "its last line has no end: the file was cut short.", row=max(0, data.count(b"\n") - header))
    try:
        frame = pl.read_csv(io.BytesIO(data), has_header=header, infer_schema=False, new_columns=names)
    except (pl.exceptions.PolarsError, pl.exceptions.PanicException) as error:
        raise _ragged(data, path, header, str(error)) from None
    if full_rows:
        _check_full(data, path, header)
    if index and frame.columns[0] == "":
        frame = frame.rename({"": index})
    if frame.height > MOST_ROWS:
        raise fault(path, f"it has {frame.height} rows, and more than {MOST_ROWS} are not read.")
    return frame


def typed(frame: pl.DataFrame, table: TableRules, path: Path, ways_out: Mapping[str, str] | None = None) -> pl.DataFrame:
    """The columns of `table` from a frame of texts, cast and checked. `ways_out` says what to write, by column."""
    names = list(table.columns)
    check_columns(frame, TableRules({n: c._replace(kind=pl.String()) for n, c in table.columns.items()}), path)
    texts = frame.select(pl.col(names).str.strip_chars().replace("", None))
    others = [name for name in names if table.columns[name].kind != pl.String]
    cast = texts.with_columns(_of_kind(name, table.columns[name].kind) for name in others)
    lost = cast.select(others).null_count().row(0) if others else ()
    for name, nulls in zip(others, lost, strict=True):
        if nulls != texts[name].null_count():
            row = int((cast[name].is_null() & texts[name].is_not_null()).arg_true()[0])
            way_out = f": {ways_out[name]}" if ways_out and name in ways_out else ""
            said = f"{texts[name][row][:80]!r} is no {_word(table.columns[name].kind)}{way_out}."
            raise fault(path, said, row=row, column=name)
    check(cast, table, path)
    return cast


def _word(kind: pl.DataType) -> str:
    return "number" if kind.is_float() else "whole number" if kind.is_integer() else "true or false"


def _of_kind(name: str, kind: pl.DataType) -> pl.Expr:
    """A column of texts as another type; null where a text is of no such type."""
    if kind == pl.Boolean:
        words = {word: word == "true" for word in ("true", "false")}
        return pl.col(name).str.to_lowercase().replace_strict(words, default=None, return_dtype=pl.Boolean)
    return pl.col(name).cast(kind, strict=False)


def _check_text(data: bytes, path: Path) -> None:
    """Raise TraceError unless `data` is text in UTF-8."""
    if (at := data.find(b"\0")) >= 0:
        raise fault(path, "it holds a zero byte, and is no text in UTF-8: save it as such.", row=data.count(b"\n", 0, at))
    if not data.isascii():
        try:
            data.decode()
        except UnicodeDecodeError as error:
            raise fault(
                path, f"byte {error.start} is no text in UTF-8: save it as such.", row=data.count(b"\n", 0, error.start)
            ) from None


def _check_full(data: bytes, path: Path, header: bool) -> None:
    """Raise TraceError at the first row that has fewer fields than the first line, as the last row of a file cut short."""
    lines = [line for line in data.splitlines() if line.strip()]
    if b'"' not in data and data.count(b",") == lines[0].count(b",") * len(lines):
        return  # counted without parsing, which would take a minute for a large file
    try:
        found = _uneven_row(data)
    except csv.Error:
        return  # Polars could read it
    if found:
        row, fields, width = found
        cut = ": is the file cut short?" if fields < width else "."
        raise fault(path, f"it has {fields} fields, and the first line has {width}{cut}", row=row + (not header))


def _ragged(data: bytes, path: Path, header: bool, why: str) -> TraceError:
    """The error for a CSV file that cannot be parsed: the first row with another number of fields, if there is one."""
    try:
        if found := _uneven_row(data):
            row, fields, width = found
            return fault(path, f"it has {fields} fields, and the first line has {width}.", row=row + (not header))
    except (csv.Error, StopIteration) as error:
        why = str(error) or why
    return fault(path, f"it is no CSV file that can be read ({why.splitlines()[0][:200]}).")


def _uneven_row(data: bytes) -> tuple[int, int, int] | None:
    """The first row after the first line with another number of fields: which row, from 0, its fields, and those of the
    first line. Empty lines do not count as such."""
    csv.field_size_limit(_LONGEST_LINE)
    rows = csv.reader(io.StringIO(data.decode("utf-8-sig"), newline=""))
    width = len(next(rows))
    return next(((row, len(fields), width) for row, fields in enumerate(rows) if fields and len(fields) != width), None)
