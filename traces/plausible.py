"""What a recorded table must hold to be believed: columns and their types, ranges, one row each, time that runs forwards.

The same description serves for the tables of a trace (`traces.schema`) and for the files that importers read, so that an
error names the file, the row and the column it is about. Rows are counted from 1, the header of a CSV file not counted.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

import polars as pl

__all__ = [
    "Column",
    "Disorder",
    "TableRules",
    "TraceError",
    "check",
    "check_columns",
    "check_order",
    "check_values",
    "disorder",
    "fault",
]


class TraceError(ValueError):
    """A recording that cannot be read or believed. Takes the finished message: file, row, column, what is wrong."""


class Column(NamedTuple):
    """What a column holds."""

    kind: pl.DataType
    required: bool = True  # whether every row has it; elsewhere null says that nobody recorded it
    low: float = -math.inf  # least and greatest value that is plausible
    high: float = math.inf
    among: tuple[str, ...] = ()  # the words it may hold; () is any


class TableRules(NamedTuple):
    """What a table holds, beyond the columns one by one."""

    columns: Mapping[str, Column]
    key: tuple[str, ...] = ()  # no two rows agree in all of these; () is not checked
    time: str = ""  # the column that must not run backwards; "" is none
    by: tuple[str, ...] = ()  # within each group of these

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Column names and types, as polars wants them."""
        return {name: column.kind for name, column in self.columns.items()}


def fault(where: Path | str, why: str, *, row: int | None = None, column: str | None = None) -> TraceError:
    """The error to raise about `where`; `row` counts from 0."""
    at = "" if row is None else f", row {row + 1}"
    at += "" if column is None else f", column {column!r}"
    return TraceError(f"Cannot use {where}{at}: {why}")


def check(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError at the first thing about `frame` that `table` does not allow."""
    check_columns(frame, table, where)
    check_values(frame, table, where)
    check_order(frame, table, where)


def check_columns(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError unless the columns are there, each of its type."""
    has = dict(frame.schema)  # asked for once: with thousands of columns it takes its time
    for name, kind in table.schema.items():
        if name not in has:
            shown = ", ".join(found[:40] for found in list(has)[:20]) + (", ..." if len(has) > 20 else "")
            raise fault(where, f"the column is missing; there are {shown or 'none'}.", column=name)
        if has[name] != kind:
            raise fault(where, f"it holds {has[name]}, not {kind}.", column=name)


def check_values(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError at the first value that is missing, no number, out of range, or no word of its column."""
    wrongs = [(name, wrong, why) for name, column in table.columns.items() for wrong, why in _wrongs(name, column)]
    # All at once, for there may be thousands of columns; which row it is matters only where there is one.
    any_wrong = frame.select(wrong.any().alias(str(i)) for i, (_, wrong, _) in enumerate(wrongs)).row(0)
    for (name, wrong, why), is_wrong in zip(wrongs, any_wrong, strict=True):
        if is_wrong:
            row = _first(frame.select(wrong).to_series())
            value = frame[name][row]
            raise fault(where, why if value is None else f"the value is {str(value)[:80]}, {why}", row=row, column=name)


def _wrongs(name: str, column: Column) -> Iterator[tuple[pl.Expr, str]]:
    """What can be wrong with a value, and how to say it."""
    values = pl.col(name)
    if column.required:
        yield values.is_null(), "the value is missing."
    if column.kind.is_float():
        yield ~values.is_finite(), "which is no finite number."
    if column.low > -math.inf:
        yield values < column.low, f"which is below {column.low:g}, the least that is plausible."
    if column.high < math.inf:
        milliseconds = " (are these milliseconds?)" if "second" in name or "time" in name else ""
        yield values > column.high, f"which is above {column.high:g}, the most that is plausible{milliseconds}."
    if column.among:
        yield ~values.is_in(column.among), f"and only {', '.join(column.among)} are known."


def check_order(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError where two rows are the same, or time runs backwards."""
    found = disorder(frame, table)
    if found is not None:
        raise fault(where, found.why, row=found.row, column=found.column)


class Disorder(NamedTuple):
    """What is wrong with the order of a table."""

    row: int  # from 0
    column: str | None
    why: str


def disorder(frame: pl.DataFrame, table: TableRules) -> Disorder | None:
    """The first row that is there twice, or that comes after later ones; None where there is none."""
    if table.key:
        twice = ~frame.select(pl.struct(table.key).is_first_distinct()).to_series()
        if twice.any():
            row = _first(twice)
            same = ", ".join(f"{k} {frame[k][row]!r}" for k in table.key)
            return Disorder(row, None, f"there is a row with {same} already; give each once.")
    if table.time:
        behind = pl.col(table.time) < pl.col(table.time).cum_max().shift(1)
        if table.by:
            behind = behind.over(table.by)
        back = frame.select(behind.fill_null(value=False)).to_series()
        if back.any():
            row = _first(back)
            return Disorder(row, table.time, f"time runs backwards: {frame[table.time][row]} follows later ones.")
    return None


def _first(mask: pl.Series) -> int:
    return int(mask.arg_true()[0])
