"""Checks tables that a user has written against each other, before they become a trace.

What contradicts itself is refused: a reader would take one of two values, or leave one out, without a word. So is what all
readers refuse, or would not find because a key has another name.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from difflib import get_close_matches
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from traces.extras import Extras, NodeExtras
from traces.plausible import fault
from traces.schema import NODE_ORDER, TRACE, setting_from
from tuners.near_names import did_you_mean
from tuners.settings import Setting

__all__ = ["FIRST_SETTING", "NUMBERED", "check_agreement"]

FIRST_SETTING = "give the seconds from when on a setting holds, 0 for the first of a run"
NUMBERED = "number the workers of a run, from 0"

_OFTEN = 0.05  # share of a worker's rows whose clock is below that of the row before, from which its times are wrong
_RESTARTS = 5  # such rows that may be restarts
_NEAR = 0.85  # similarity of a key to a known one, from which it is taken for a slip

_OPTIONS = ("batch_sizes", "model_shares", "servers_share_nodes")  # the options that are read, in tables without names


def check_agreement(tables: dict[str, pl.DataFrame], files: Mapping[str, Path]) -> None:
    """Raise TraceError at the first contradiction. Gives runs rows of their own where there is no table of runs.

    `files` are those of the tables, by name.
    """
    _check_runs(tables, files)
    if "runs" in files:
        _check_extras(tables["runs"], files["runs"])
    if "iterations" in tables:
        _check_clocks(tables["iterations"], files["iterations"])
    if "settings" not in tables:
        return
    _check_options(tables["settings"], files["settings"])
    _check_moments(tables, files["settings"])
    if "progress" in tables:
        _check_policies(tables["settings"], tables["progress"], files["progress"])
    if "iterations" in tables:
        _check_workers(tables, files["iterations"])
        _check_numbers(tables, files["iterations"])


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
        said = (
            f"run {run!r} has another setting from second {seconds:g} on; {FIRST_SETTING}, and each run its own name (run)."
        )
        raise fault(file, said, row=row, column="seconds")


def _check_workers(tables: dict[str, pl.DataFrame], file: Path) -> None:
    """Refuse a run with iterations of more workers than its settings ever have. Numbers are names: they may have gaps."""
    most = tables["settings"].group_by("run").agg(most=pl.col("workers").max(), named=pl.col("setting").is_not_null().any())
    found = tables["iterations"].group_by("run", maintain_order=True).agg(pl.col("worker").unique().sort())
    both = found.join(most.filter(~pl.col("named")), on="run", maintain_order="left")  # a named node may be a worker later
    for run, workers, limit in (
        both.select("run", "worker", "most").filter(pl.col("worker").list.len() > pl.col("most")).rows()
    ):
        raise fault(
            file,
            f"run {run!r} has iterations of {len(workers)} workers (the last one is {workers[-1]}), and at most {limit} "
            f"workers in settings: {NUMBERED}; one that replaces another takes its number.",
        )


def _check_numbers(tables: dict[str, pl.DataFrame], file: Path) -> None:
    """Refuse iterations of a number to which the run's extras give no node, or one that never works: all may be shifted."""
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
                    file,
                    f"run {run!r} has iterations of worker {number}, which is {named} by {NODE_ORDER} in its extras, and no "
                    f"setting has it as a worker ({', '.join(sorted(crews[run]))}); {NODE_ORDER} begins with number 0.",
                )


def _check_extras(runs: pl.DataFrame, file: Path) -> None:
    """Refuse extras that no reader can read, and keys that are nearly those which are read."""
    for row, text in enumerate(runs["extras"]):
        if text is None:
            continue
        try:
            msgspec.json.decode(text, type=Extras)
        except msgspec.MsgspecError as error:
            raise fault(file, f"{error}; correct it, or leave it out.", row=row, column="extras") from None
        extras: dict[str, Any] = json.loads(text)
        order = extras.get(NODE_ORDER, [])
        if twice := [name for name in order if order.count(name) > 1]:
            said = f"{NODE_ORDER} has {twice[0]!r} twice: give each node once, in the order of their numbers."
            raise fault(file, said, row=row, column="extras")
        keys = [*_slips(extras, Extras.__struct_fields__)]
        keys += [slip for node in extras.get("nodes", {}).values() for slip in _slips(node, NodeExtras.__struct_fields__)]
        if keys:
            raise fault(file, f"nobody reads the key {keys[0][0]!r}; did you mean {keys[0][1]}?", row=row, column="extras")


def _slips(given: Mapping[str, Any], known: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """The keys that are nearly one of those `known`, which is not given, too; and that one. `batch_size` is a column."""
    for key in given.keys() - {*known, "batch_size"}:
        near = get_close_matches(key, known, 1, _NEAR)
        if near and near[0] not in given:
            yield key, near[0]


def _check_options(settings: pl.DataFrame, file: Path) -> None:
    """Refuse options without a number per worker or server, and those that are nearly called as one that is read."""
    columns = ("options", "setting", "workers", "servers")
    for row, (text, whole, workers, servers) in enumerate(settings.select(columns).iter_rows()):
        if slip := next(_slips(json.loads(whole or "{}"), tuple(Setting.__dataclass_fields__)), None):
            raise fault(file, f"a setting has no {slip[0]!r}; did you mean {slip[1]}?", row=row, column="setting")
        options: dict[str, Any] = json.loads(text or "{}")
        if slip := next(_slips(options, _OPTIONS), None):
            raise fault(file, f"nobody reads the option {slip[0]!r}; did you mean {slip[1]}?", row=row, column="options")
        for name, count, role in (("batch_sizes", workers, "worker"), ("model_shares", servers, "server")):
            given = options.get(name)
            kind, least, each = (
                (int, 1, "whole numbers, each 1 or more")
                if name == "batch_sizes"
                else (int | float, 0, "numbers, none negative")
            )
            fits = isinstance(given, list) and all(
                isinstance(x, kind) and not isinstance(x, bool) and x >= least for x in given
            )
            if given is not None and (not fits or count not in (None, len(given)) or not sum(given)):
                said = f"{name} is {str(given)[:60]}: give {count or 'as many'} {each}, one per {role}."
                raise fault(file, said, row=row, column="options")


def _check_clocks(iterations: pl.DataFrame, file: Path) -> None:
    """Refuse a worker whose clocks often go back while time goes on: its time was set back, and rows were sorted."""
    back = (pl.col("clock").diff() < 0).over("run", "branch", "worker")
    each = iterations.filter(pl.col("seconds").is_not_null()).select("run", "branch", "worker", back=back)
    counts = each.group_by("run", "branch", "worker", maintain_order=True).agg(pl.col("back").sum(), rows=pl.len())
    odd = counts.filter(pl.col("back") > _RESTARTS, pl.col("back") > _OFTEN * pl.col("rows"))
    for run, _, worker, times, _ in odd.rows()[:1]:
        said = (
            f"clocks of worker {worker} of run {run!r} go back {times} times while seconds go on: was a machine's clock set "
            "back, and were rows sorted by time? Correct the times, or leave out what is before or after."
        )
        raise fault(file, said, column="clock")


def _check_policies(settings: pl.DataFrame, progress: pl.DataFrame, file: Path) -> None:
    """Refuse progress under one policy in a run whose settings all have another one."""
    one = settings.drop_nulls("policy").group_by("run").agg(pl.col("policy").unique(), said=pl.col("options").first())
    one = one.filter(pl.col("policy").list.len() == 1).with_columns(pl.col("policy").list.first().alias("set"))
    seen = progress.drop_nulls("policy").with_row_index("row").join(one.drop("policy"), on="run", maintain_order="left")
    scheduled = pl.col("said").fill_null("").str.contains('"bsp_percent"')
    for run, policy, known in (
        seen.filter(pl.col("policy") != pl.col("set"), ~scheduled).select("run", "policy", "set").rows()[:1]
    ):
        said = (
            f"run {run!r} has progress under {policy}, and {known} in its settings; correct one, or write the change there."
        )
        raise fault(file, said, column="policy")
