"""Checks of a recorded table: columns and their types, plausible ranges, unique rows, time that never runs backwards.

The same rules describe the tables of a trace (`traces.schema`) and the files that importers read, so that every error names
file, row and column. Rows are counted from 1; the header of a CSV file is not counted.
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
    "check_units",
    "check_values",
    "disorder",
    "fault",
]


class TraceError(ValueError):
    """A recording that cannot be read or is not plausible. Takes the finished message: file, row, column, what is wrong."""


class Column(NamedTuple):
    """The rules for one column."""

    kind: pl.DataType
    required: bool = True  # whether every row must have a value; otherwise null means: not recorded
    low: float = -math.inf  # least plausible value
    high: float = math.inf  # greatest plausible value
    among: tuple[str, ...] = ()  # allowed words; () is any


class TableRules(NamedTuple):
    """The rules for one table."""

    columns: Mapping[str, Column]
    key: tuple[str, ...] = ()  # no two rows have equal values in all of these columns; () is not checked
    time: str = ""  # the column that must not run backwards; "" is none
    by: tuple[str, ...] = ()  # time is checked within each group of these columns

    @property
    def schema(self) -> dict[str, pl.DataType]:
        """Column names and types, as polars expects them."""
        return {name: column.kind for name, column in self.columns.items()}


def fault(where: Path | str, why: str, *, row: int | None = None, column: str | None = None) -> TraceError:
    """The error about a place in the file `where`; `row` counts from 0."""
    at = "" if row is None else f", row {row + 1}"
    at += "" if column is None else f", column {column!r}"
    return TraceError(f"Cannot use {where}{at}: {why}")


def check(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError at the first violation of the rules `table`."""
    check_columns(frame, table, where)
    check_values(frame, table, where)
    check_order(frame, table, where)


def check_columns(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError unless all columns exist, each of its type."""
    has = dict(frame.schema)  # computed once: it is slow for thousands of columns
    for name, kind in table.schema.items():
        if name not in has:
            shown = ", ".join(found[:40] for found in list(has)[:20]) + (", ..." if len(has) > 20 else "")
            raise fault(where, f"the column is missing; there are {shown or 'none'}.", column=name)
        if has[name] != kind:
            raise fault(where, f"it holds {has[name]}, not {kind}.", column=name)


def check_values(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError at the first value that is missing, no finite number, out of range, or not an allowed word."""
    wrongs = [(name, wrong, why) for name, column in table.columns.items() for wrong, why in _wrongs(name, column)]
    # All columns in one query, because there may be thousands; the row is searched only for a column with an error.
    any_wrong = frame.select(wrong.any().alias(str(i)) for i, (_, wrong, _) in enumerate(wrongs)).row(0)
    for (name, wrong, why), is_wrong in zip(wrongs, any_wrong, strict=True):
        if is_wrong:
            row = _first(frame.select(wrong).to_series())
            value = frame[name][row]
            raise fault(where, why if value is None else f"the value is {str(value)[:80]}, {why}", row=row, column=name)


def _wrongs(name: str, column: Column) -> Iterator[tuple[pl.Expr, str]]:
    """The possible violations of a column: an expression that is true for wrong rows, and the message."""
    values = pl.col(name)
    if column.required:
        yield values.is_null(), "the value is missing."
    if column.kind.is_float():
        yield ~values.is_finite(), "which is no finite number."
    if column.low > -math.inf:
        yield values < column.low, f"which is below {column.low:g}, the least that is plausible."
    if column.high < math.inf:
        units = " (are these milliseconds?)" if "second" in name or "time" in name else ""
        units = " (are these bits?)" if name.endswith("bytes_per_second") else units
        units = (
            " (are these milliseconds, or seconds since 1970? They count from the beginning of the run)"
            if name == "seconds"
            else units
        )
        units = " (is this per cent? Shares are from 0 to 1)" if column.high == 1 else units
        yield values > column.high, f"which is above {column.high:g}, the most that is plausible{units}."
    if column.among:
        yield ~values.is_in(column.among), f"and only {', '.join(column.among)} are known."


def check_order(frame: pl.DataFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError where two rows have the same key, or time runs backwards."""
    found = disorder(frame, table)
    if found is not None:
        raise fault(where, found.why, row=found.row, column=found.column)


def check_units(frame: pl.LazyFrame, table: TableRules, where: Path | str) -> None:
    """Raise TraceError if the parts of iterations take much longer than the time between the first and the last."""
    parts = [c for c in table.columns if c in ("compute_seconds", "pull_seconds", "push_seconds", "wait_seconds")]
    if not parts or not table.time:
        return
    spent = pl.sum_horizontal(pl.col(parts).fill_null(0.0))
    by = frame.group_by("run", "branch", "worker")
    sums = by.agg(spent.sum(), since=pl.col("seconds").max() - pl.col("seconds").min()).collect()
    # In seconds the sum is about as long as the time; in milliseconds it is a thousand times as long.
    wrong = sums.filter(pl.col("since") > 0, pl.col(parts[0]) > 100 * pl.col("since")).sort("run", "branch", "worker")
    if wrong.height:
        run, worker = wrong["run"][0], wrong["worker"][0]
        took = f"{wrong[parts[0]][0]:g} s in all, within {wrong['since'][0]:g} s"
        why = f"the iterations of run {run!r}, worker {worker}, take {took} (are these milliseconds?)."
        raise fault(where, why, column=parts[0])


class Disorder(NamedTuple):
    """A duplicate row, or a row out of order."""

    row: int  # from 0
    column: str | None
    why: str


def disorder(frame: pl.DataFrame, table: TableRules) -> Disorder | None:
    """The first duplicate row, or else the first row that follows later ones; None if there is none."""
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
            after = f"{frame[table.time][row]} follows later ones; sort the rows by {table.time}"
            why = f"time runs backwards: {after}, or correct times where a clock was set back."
            return Disorder(row, table.time, why)
    return None


def _first(mask: pl.Series) -> int:
    return int(mask.arg_true()[0])
