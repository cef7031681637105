"""Reads a recording that its owner has written as tables: CSV or JSON lines, a file per table of `traces.schema.TRACE`.

A file is named after its table (`iterations.csv`, `runs.jsonl`) and has that table's columns, in any order. A column that is
left out, an empty field, and NaN mean: not recorded. Left out may also be `run`, where everything is of one run, which is
then named after the folder; `branch`, which is 0; and the whole table `runs`. Rows may be in the order of workers, with a
log after the other, as long as the time of each worker does not run backwards. Whole numbers may be written as 4.0, as
programs do whose columns have gaps; policies as TensorFlow calls them (sync, async), which are bsp and asp. Durations that
are negative by rounding, as differences of times may be, count as 0. Names (of runs and nodes) may be any words, such as NA.

Tables that contradict each other or themselves are refused (`traces.foreign.agreement`).
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from traces.convert import atomic_folder
from traces.foreign.agreement import FIRST_SETTING, NUMBERED, check_agreement
from traces.foreign.text import json_lines, read_texts, typed
from traces.parts import Origin, TraceWriter, digest_of
from traces.plausible import Column, TableRules, check, check_order, check_units, fault
from traces.schema import TRACE, setting_from
from tuners.near_names import near_names
from tuners.settings import POLICIES

__all__ = ["from_tables", "has_tables"]

_ENDINGS = (".csv", ".jsonl")
_POLICIES = {name: name for name in POLICIES} | {
    word: name for name, start in (("bsp", "sync"), ("asp", "async")) for word in (start, f"{start}hronous")
}
_WAYS_OUT = {  # what to write instead, by column
    "seconds": "give the seconds since the run began",
    "worker": NUMBERED,
    "clock": "number the iterations of each worker, from 0",
}
_NAMED = ("workers", "servers")  # numbers of nodes, whose names are in the column `setting`
_TOLD_TWICE = ("batch_size", "policy", "staleness")  # columns of `settings` that its column `setting` may have, too
_ROUNDING_SECONDS = 1e-6  # by which a difference of two times may be below 0: a Unix time in a float has steps of 2.4e-7
_NAME = Column(pl.String())  # the rules of a column with names
_RENAMED = re.compile(r"_duplicated_\d+$")  # what Polars adds to the name of a second column
_NOT_RECORDED = ("", "nan", "na", "n/a", "null", "none")


def has_tables(path: Path) -> bool:
    """Whether `path` is a table, or a folder with some, also in a form that is not read."""
    return bool(_table_files(path)) or (path.is_dir() and any(p.is_file() and p.stem in TRACE for p in path.iterdir()))


def _table_files(path: Path) -> list[Path]:
    if path.is_dir():
        return sorted(p for p in path.iterdir() if p.suffix.lower() in _ENDINGS)
    return [path] if path.suffix.lower() in _ENDINGS else []


def from_tables(path: Path, out: Path, *, made_by: str) -> None:
    """Write a trace of the tables in the folder `path`, or of the one file `path`, completely or not at all.

    `made_by` is the program and version that the trace names. Raises ValueError if `out` exists, TraceError, naming file,
    row and column, for what is no such table.
    """
    files = _table_files(path)
    for other in sorted(set(path.iterdir() if path.is_dir() else ()) - set(files)):
        name = other.name.split(".")[0]  # as of iterations.csv.gz
        if name in TRACE:
            raise fault(other, f"it would be left out: write the table as CSV or as JSON lines, {name}.csv or .jsonl.")
        if below := [file for file in _table_files(other) if other.is_dir() and file.stem in TRACE]:
            said = "it would be left out: put every table into the folder itself, with a column run where there are several."
            raise fault(below[0], said)
    run = (path if path.is_dir() else path.parent).absolute().name
    tables: dict[str, pl.DataFrame] = {}
    named: dict[str, Path] = {}
    for file in files:
        if file.stem not in TRACE:
            raise fault(file, f"no table of a trace is called {file.stem!r}; {near_names(file.stem, TRACE)}")
        if file.stem in tables:
            raise fault(file, f"there is another file with the table {file.stem}; leave one of them out.")
        tables[file.stem], named[file.stem] = _read(file, file.stem, run), file
    if not any(frame.height for frame in tables.values()):
        raise fault(path, "its tables have no rows.")
    check_agreement(tables, named)
    origin = Origin("own tables", made_by, path.name, inputs=tuple((f.name, digest_of(f.read_bytes())) for f in files))
    with atomic_folder(out) as folder, TraceWriter(folder, origin, part_rows=1 << 20) as writer:
        for name in TRACE:
            if name in tables:
                writer.add(name, tables[name])


def _read(file: Path, name: str, run: str) -> pl.DataFrame:
    """A table, complete, in order and checked."""
    rules = TRACE[name]
    if file.suffix.lower() == ".csv":
        _check_lines(file)
    texts = json_lines(file) if file.suffix.lower() == ".jsonl" else read_texts(file, ends=False, full_rows=True)
    columns = [_RENAMED.sub("", c.strip()) for c in texts.columns]
    if twice := [c for c in columns if columns.count(c) > 1]:
        raise fault(file, "there are two columns of this name; leave one of them out.", column=twice[0])
    texts.columns = columns
    # Empty lines at the end, as editors and `echo` leave them. Others are refused: rows are counted in messages.
    filled = texts.select(pl.any_horizontal(pl.all().str.strip_chars().fill_null("") != "")).to_series().arg_true()
    texts = texts.head(filled[-1] + 1 if len(filled) else 0)
    for column in columns:
        if column not in rules.columns:
            raise fault(file, f"{name} has no such column; {_advice(column, rules)}", column=column)
    absent: dict[str, str | None] = {c: None for c in rules.columns if c not in texts.columns}
    absent |= {c: value for c, value in (("run", run), ("branch", "0")) if c in absent}
    for column in absent:
        if rules.columns[column].required and absent[column] is None:
            way_out = FIRST_SETTING if (name, column) == ("settings", "seconds") else _WAYS_OUT.get(column, "")
            way_out = f": {way_out}" if way_out else ""
            raise fault(file, f"the column is missing, and every row of {name} needs it{way_out}.", column=column)
    plain = pl.col(pl.String).str.strip_chars()
    names = [c for c in columns if rules.columns[c] == _NAME]  # a run may be called "none"
    recorded = texts.with_columns(plain).with_columns(
        pl.when(pl.col(c).str.to_lowercase().is_in(_NOT_RECORDED)).then(None).otherwise(pl.col(c)).alias(c)
        for c in columns
        if c not in names
    )
    recorded = recorded.with_columns(_plain_words(columns, rules))
    whole = recorded.with_columns(pl.lit(value, pl.String).alias(c) for c, value in absent.items()).select(
        list(rules.columns)
    )
    frame = _without_rounding(typed(whole, _rounded(rules)._replace(key=(), time=""), file, _WAYS_OUT), rules)
    for column, parse in _PARSERS.items():
        if column in frame.columns:
            _check_parsed(frame[column], parse, file)
    if name == "settings":
        frame = _with_named(frame, file)
    if name == "iterations":
        check_order(frame, rules._replace(by=("run", "branch", "worker")), file)
        # One log may follow the other; the numbers of rows in messages are those of the file until here.
        frame = frame.sort("run", "branch", "seconds", nulls_last=True, maintain_order=True)
    check(frame, rules, file)
    check_units(frame.lazy(), rules, file)
    return frame


def _durations(rules: TableRules) -> list[str]:
    return [name for name in rules.columns if name.endswith("_seconds")]


def _rounded(rules: TableRules) -> TableRules:
    """The rules, but durations may be negative by rounding."""
    allowed = {name: rules.columns[name]._replace(low=-_ROUNDING_SECONDS) for name in _durations(rules)}
    return rules._replace(columns={**rules.columns, **allowed})


def _without_rounding(frame: pl.DataFrame, rules: TableRules) -> pl.DataFrame:
    """The frame with 0 for durations that are negative by rounding."""
    return frame.with_columns(pl.col(name).clip(lower_bound=0.0) for name in _durations(rules))


def _plain_words(columns: Sequence[str], rules: TableRules) -> list[pl.Expr]:
    """Whole numbers without a fraction of zeros, and policies by our names for them; other words stay as they are."""
    numbers = [c for c in columns if rules.columns[c].kind.is_integer()]
    named = pl.col("policy").str.to_lowercase().replace_strict(_POLICIES, default=pl.col("policy"), return_dtype=pl.String)
    return [pl.col(c).str.replace(r"\.0+$", "") for c in numbers] + [named] * ("policy" in columns)


def _check_lines(file: Path) -> None:
    """Raise TraceError where lines of a CSV file have other ends, or the names in the first one are divided by something
    else than commas."""
    with file.open("rb") as opened:
        head = opened.readline(1 << 16)
    if b"\r" in head.rstrip(b"\r\n"):
        raise fault(file, "its lines end with a carriage return alone: end them with a newline.")
    for mark, word in ((b";", "semicolons"), (b"\t", "tabs")):
        if mark in head and b"," not in head:
            said = f"its fields are divided by {word}: divide them by commas, and write numbers with a point, as in 0.25."
            raise fault(file, said, row=None)


def _advice(column: str, rules: TableRules) -> str:
    """What to write in place of an unknown column."""
    if not column or column.startswith("Unnamed: "):  # as pandas writes, and reads, the numbers of its rows
        return "if it has the numbers of rows, leave it out: pandas does so with index=False."
    units = (
        " Times are in seconds." if any(word in column.lower() for word in ("ms", "milli", "time", "_us", "micro")) else ""
    )
    near = near_names(column, rules.columns)
    return f"{near.replace('choose', 'leave it out, or choose', 1)}{units}"


def _object(text: str) -> None:
    if not isinstance(json.loads(text), dict):
        raise TypeError


_PARSERS: Mapping[str, Callable[[str], Any]] = {"extras": _object, "options": _object, "setting": setting_from}
_FORMS = {"setting": "a setting as `traces.schema.setting_text` writes it"}


def _check_parsed(column: pl.Series, parse: Callable[[str], Any], file: Path) -> None:
    for row, text in enumerate(column):
        try:
            if text is not None:
                parse(text)
        except (ValueError, TypeError, msgspec.MsgspecError):
            form = _FORMS.get(column.name, 'a JSON object, as in {"zone": "a"}')
            raise fault(file, f"{text[:80]!r} is not {form}.", row=row, column=column.name) from None


def _with_named(settings: pl.DataFrame, file: Path) -> pl.DataFrame:
    """The settings with what their column `setting` tells, where other columns are for it and have no value: numbers of
    workers and servers, the policy and its bound, the batch size.

    Raises TraceError where both have a value, and these differ.
    """
    filled = {column: settings[column].to_list() for column in (*_NAMED, *_TOLD_TWICE)}
    for row, text in enumerate(settings["setting"]):
        whole: dict[str, Any] = {} if text is None else json.loads(text)
        told = {role: len(whole[role]) for role in _NAMED if role in whole}
        told |= {column: whole[column] for column in _TOLD_TWICE if column in whole}
        for column, value in told.items():
            given, of = filled[column][row], f" ({', '.join(whole[column])})" if column in _NAMED else ""
            if given not in (None, value):
                said = f"it is {given}, and {value}{of} in the column setting; correct one of them."
                raise fault(file, said, row=row, column=column)
            filled[column][row] = value
    return settings.with_columns(pl.Series(name, of, settings.schema[name]) for name, of in filled.items())
