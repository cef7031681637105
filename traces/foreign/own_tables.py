"""Reads a recording that its owner has written as tables: CSV or JSON lines, a file per table of `traces.schema.TRACE`.

A file is named after its table (`iterations.csv`, `runs.jsonl`) and has that table's columns, in any order. A column that is
left out, an empty field, and NaN mean: not recorded. Left out may also be `run`, where everything is of one run, which is
then named after the folder; `branch`, which is 0; and the whole table `runs`. Rows may be in the order of workers, with a
log after the other, as long as the time of each worker does not run backwards. Whole numbers may be written as 4.0, as
programs do whose columns have gaps; policies as TensorFlow calls them (sync, async), which are bsp and asp. Durations that
are negative by rounding, as differences of times may be, count as 0. Names (of runs and nodes) may be any words, such as NA.

Tables that contradict each other or themselves are refused: a reader would take one of two values without a word.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from traces.convert import atomic_folder
from traces.foreign.text import json_lines, read_texts, typed
from traces.parts import Origin, TraceWriter, digest_of
from traces.plausible import Column, TableRules, check, check_order, check_units, fault
from traces.schema import NODE_ORDER, TRACE, setting_from
from tuners.near_names import did_you_mean, near_names
from tuners.settings import POLICIES

__all__ = ["from_tables", "has_tables"]

_ENDINGS = (".csv", ".jsonl")
_POLICIES = {name: name for name in POLICIES} | {
    word: name for name, start in (("bsp", "sync"), ("asp", "async")) for word in (start, f"{start}hronous")
}
_WAYS_OUT = {  # what to write instead, by column
    "seconds": "give the seconds since the run began",
    "worker": "number the workers of a run, from 0",
    "clock": "number the iterations of each worker, from 0",
}
_NAMED = ("workers", "servers")  # numbers of nodes, whose names are in the column `setting`
_TOLD_TWICE = ("batch_size", "policy", "staleness")  # columns of `settings` that its column `setting` may have, too
_ROUNDING_SECONDS = 1e-6  # by which a difference of two times may be below 0: a Unix time in a float has steps of 2.4e-7
_FIRST = "give the seconds from when on a setting holds, 0 for the first of a run"
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
    _check_runs(tables, named)
    if "settings" in tables:
        _check_moments(tables, named["settings"])
        _check_workers(tables, path)
        _check_numbers(tables, path)
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
    for column in columns:
        if column not in rules.columns:
            raise fault(file, f"{name} has no such column; {_advice(column, rules)}", column=column)
    absent: dict[str, str | None] = {c: None for c in rules.columns if c not in texts.columns}
    absent |= {c: value for c, value in (("run", run), ("branch", "0")) if c in absent}
    for column in absent:
        if rules.columns[column].required and absent[column] is None:
            way_out = _FIRST if (name, column) == ("settings", "seconds") else _WAYS_OUT.get(column, "")
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


def _check_moments(tables: dict[str, pl.DataFrame], file: Path) -> None:
    """Refuse two different settings of a run from the same second on: the first would hold for no time.

    A change of the setting that took no time is recorded as one, in the table reconfigurations.
    """
    at = ("run", "branch", "seconds")
    numbered = tables["settings"].with_row_index("row")
    later = numbered.unique(tables["settings"].columns, keep="first", maintain_order=True).filter(
        ~pl.struct(at).is_first_distinct()
    )  # fmt: skip
    if "reconfigurations" in tables:
        later = later.join(tables["reconfigurations"], on=at, how="anti", maintain_order="left")
    for row, run, seconds in later.select("row", "run", "seconds").rows()[:1]:
        said = f"run {run!r} has another setting from second {seconds:g} on; {_FIRST}, and each run a name of its own (run)."
        raise fault(file, said, row=row, column="seconds")


def _check_workers(tables: dict[str, pl.DataFrame], path: Path) -> None:
    """Refuse a run with iterations of more workers than its settings ever have. Numbers are names: they may have gaps."""
    if "iterations" not in tables:
        return
    most = tables["settings"].group_by("run").agg(most=pl.col("workers").max(), named=pl.col("setting").is_not_null().any())
    found = tables["iterations"].group_by("run", maintain_order=True).agg(pl.col("worker").unique().sort())
    both = found.join(most.filter(~pl.col("named")), on="run", maintain_order="left")  # a named node may be a worker later
    for run, workers, limit in (
        both.select("run", "worker", "most").filter(pl.col("worker").list.len() > pl.col("most")).rows()
    ):
        raise fault(
            path,
            f"run {run!r} has iterations of {len(workers)} workers (the last one is {workers[-1]}), and at most {limit} "
            f"workers in settings: {_WAYS_OUT['worker']}; one that replaces another takes its number.",
        )


def _check_numbers(tables: dict[str, pl.DataFrame], path: Path) -> None:
    """Refuse iterations of a number to which the run's extras give no node, or one that never works: all may be shifted."""
    if "iterations" not in tables:
        return
    extras = {run: json.loads(text) for run, text in tables["runs"].select("run", "extras").iter_rows() if text}
    crews: dict[str, set[str]] = {}
    for run, text in tables["settings"].select("run", "setting").drop_nulls().iter_rows():
        crews.setdefault(run, set()).update(setting_from(text).workers)
    for run, numbers in (
        tables["iterations"].group_by("run", maintain_order=True).agg(pl.col("worker").unique().sort()).rows()
    ):
        order = extras.get(run, {}).get(NODE_ORDER)
        if not isinstance(order, list) or run not in crews:
            continue
        for number in numbers:
            if number >= len(order) or order[number] not in crews[run]:
                named = repr(order[number]) if number < len(order) else "no node"
                raise fault(
                    path,
                    f"run {run!r} has iterations of worker {number}, which is {named} by {NODE_ORDER} in its extras, and no "
                    f"setting has it as a worker ({', '.join(sorted(crews[run]))}); {NODE_ORDER} begins with number 0.",
                )


def _check_runs(tables: dict[str, pl.DataFrame], files: Mapping[str, Path]) -> None:
    """Give runs that are in no table `runs` a row of their own, where there is no such table; else refuse them."""
    named = {name: frame["run"].unique(maintain_order=True) for name, frame in tables.items()}
    if "runs" in tables:
        known = set(named["runs"])
        for name, found in named.items():
            if missing := [run for run in found if run not in known]:
                near = [run for run in known if run.lower() == missing[0].lower()] or get_close_matches(missing[0], known)
                said = f"the run {missing[0]!r} is not in runs; write its row there, or its name as it is there."
                raise fault(files[name], f"{said}{did_you_mean(near)}", column="run")
    else:
        every = dict.fromkeys(run for found in named.values() for run in found)
        schema = TRACE["runs"].schema
        tables["runs"] = pl.DataFrame({"run": list(every)}).select(
            pl.col(c) if c == "run" else pl.lit(None, kind).alias(c) for c, kind in schema.items()
        )
