"""Recorded runs, each under one setting from its beginning to its end, and the job that they make.

A run that switches from BSP to ASP is under one setting, too: its policy is "sync_switch", and the option "bsp_percent" says
when it switches.

Machines have no names in such tables. The job has two nodes, one for all workers and one for all servers. If the numbers of
workers and servers vary, they are the options "workers" and "servers" of a setting. What else tells two recorded settings
apart is an option, too: lists as JSON, for example "batch_sizes" as "[48, 16]", and which nodes work as "worker_nodes".
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, cast

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from traces.parts import is_like, scan
from traces.schema import setting_from
from tuners.actions import (
    Evaluation,
    Job,
    Rejected,
    Scalar,
    Setting,
    Space,
    Target,
)
from tuners.near_names import near_names
from tuners.prices import UNKNOWN, Prices, Rate
from tuners.settings import BY_STALENESS, Choice, Knob, Node

__all__ = ["Recorded", "change_seconds", "left_out", "recorded_job", "recorded_runs"]

_FIELDS = (
    "batch_size",
    "policy",
    "staleness",
    "intra_threads",
    "inter_threads",
    "transfer_bits",
    "learning_rate",
    "momentum",
)
_COUNTS = ("workers", "servers")
_SCHEDULED = "sync_switch"  # the policy of runs that go from BSP to ASP
_NOT_TOLD = "none"  # the value of an option that only other runs have
_WORKLOAD = pl.col("workload").fill_null("unnamed")  # as `harness calibrate` calls it, too
_NAMES = 8  # of runs or values that a message lists, at most


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded run."""

    setting: Setting
    seconds: float
    clocks: int  # steps
    evaluations: tuple[Evaluation, ...]  # in the order of time; `seconds` count from the run's start
    # Moments at which the number of steps is known, both increasing: seconds since the run's start, and steps. (): its end.
    course: tuple[tuple[float, int], ...] = ()
    switch: float | None = None  # steps after which it switched from BSP to ASP; inf: never; None: it has no such schedule
    restart_seconds: float | None = None  # the mean stall of its recorded reconfigurations
    rate: Rate = UNKNOWN  # its machines and their price; nan: not recorded
    untold: tuple[str, ...] = ()  # fields of the setting that were not recorded, and have their default

    def clocks_at(self, seconds: float) -> int:
        """Steps completed `seconds` after the start of the run."""
        if self.course:
            done = float(np.interp(seconds, [s for s, _ in self.course], [c for _, c in self.course]))
        else:
            done = min(seconds / self.seconds, 1.0) * self.clocks
        # 1e-9: rounding errors of the seconds must not lose a step that is just complete.
        return int(np.floor(done + 1e-9))

    def seconds_at(self, clocks: ArrayLike) -> NDArray[np.float64]:
        """When each of `clocks` steps were completed, seconds since the start of the run."""
        if self.course:
            moments, steps = [s for s, _ in self.course], [c for _, c in self.course]
            return np.asarray(np.interp(np.asarray(clocks, np.float64), steps, moments), np.float64)
        return np.asarray(clocks, np.float64) * (self.seconds / self.clocks)


def recorded_runs(folder: Path, workload: str, pattern: str = "*") -> list[Recorded]:
    """The runs of `workload` in a trace that have one setting, a duration, a number of steps, and a name like `pattern`.

    `folder` is a trace, or contains traces at any depth, like the results of a recorded comparison. Raises as
    `traces.parts.scan` does, and ValueError if there is no such run.
    """
    inside = [] if (folder / "trace.json").is_file() else sorted(p.parent for p in folder.rglob("trace.json"))
    found = [run for trace in inside or [folder] for run in _runs_in(trace, workload, pattern)]
    _check_told([run for run, _ in found], f"{workload!r} from {folder}")
    runs = _told_apart(found)
    if not runs:
        all_runs = [scan(trace, "runs").select(_WORKLOAD).collect() for trace in inside or [folder]]
        known = sorted({one for table in all_runs for one in table["workload"]})
        if known and workload not in known:
            raise ValueError(
                f"Cannot replay {workload!r} from {folder}: its runs are of {', '.join(known)}; name one of these as its "
                "workload. Of runs that were recorded with a scenario, that is the scenario's name."
            )
        named = "" if pattern == "*" else f" called {pattern!r}"
        called = sorted(name for trace in inside or [folder] for name in scan(trace, "runs").collect()["run"])
        if not any(is_like(name, pattern) for name in called):
            names = f"{', '.join(called[:_NAMES])}{', ...' * (len(called) > _NAMES)}"
            raise ValueError(f"Cannot replay runs {pattern!r} of {folder}: its runs are {names or 'none'}.")
        raise ValueError(
            f"Cannot replay {workload!r} from {folder}: it has no run of it{named} with one setting, seconds and steps. "
            "Record each setting as a run of its own, with its seconds and steps (in the table runs, or progress)."
        )
    return runs


def left_out(folder: Path, workload: str, pattern: str, found: Sequence[Recorded]) -> int:
    """How many runs of `workload` with a name like `pattern` are not among those `found` by `recorded_runs`."""
    traces = [folder] if (folder / "trace.json").is_file() else [p.parent for p in folder.rglob("trace.json")]
    runs = [scan(trace, "runs").filter(_WORKLOAD.eq(workload)).select("run").collect()["run"] for trace in traces]
    return sum(is_like(run, pattern) for names in runs for run in names) - len(found)


def _check_told(runs: Sequence[Recorded], of: str) -> None:
    """Raise ValueError where some runs tell a field of their setting, and others do not: these would have its default."""
    for name in _FIELDS:
        silent = [run for run in runs if name in run.untold]
        told = next((run for run in runs if name not in run.untold), None)
        if silent and told is not None:
            known, one = getattr(told.setting, name), ", ".join(f"{n} {role}" for role, n in silent[0].setting.options)
            raise ValueError(
                f"Cannot replay {of}: {len(silent)} of its runs do not tell {name}, such as that of {one}, and others do, "
                f"as {known!r}: write it for all of them, or for none, in the table settings."
            )


def _told_apart(runs: list[tuple[Recorded, Mapping[str, Scalar]]]) -> list[Recorded]:
    """The runs, all with the same options: also what else was recorded of settings, where two of them are else the same."""
    names = {name: None for _, more in runs for name in more}
    seen: dict[tuple[Setting, str], set[Scalar]] = {}
    for run, more in runs:
        for name in names:
            seen.setdefault((run.setting, name), set()).add(more.get(name, _NOT_TOLD))
    differ = {name: None for (_, name), values in seen.items() if len(values) > 1}
    names = differ | {name: None for run, _ in runs for name, _ in run.setting.options}
    told = []
    for run, more in runs:
        known = {**more, **dict(run.setting.options)}
        options = tuple((name, known.get(name, _NOT_TOLD)) for name in sorted(names))
        same = options == run.setting.options  # as in most tables; a new setting checks all of its values
        told.append(run if same else replace(run, setting=replace(run.setting, options=options)))
    return told


def _runs_in(folder: Path, workload: str, pattern: str) -> list[tuple[Recorded, Mapping[str, Scalar]]]:
    """The recorded runs of one trace, see `recorded_runs`, and what else was recorded of their settings, by name."""
    columns = ("run", "workload", "seconds", "steps", "loss", "accuracy", "cost_usd")
    moments = scan(folder, "progress").group_by("run").agg(last=pl.col("seconds").max(), most=pl.col("steps").max())
    runs = scan(folder, "runs").select(*columns).join(moments, on="run", how="left").collect()
    runs = runs.with_columns(pl.coalesce("steps", "most"), run_seconds=pl.coalesce("seconds", "last"))
    runs = runs.filter(_WORKLOAD.eq(workload), pl.col("run_seconds") > 0, pl.col("steps") > 0)
    runs = runs.drop("workload", "seconds", "last", "most")
    runs = runs.filter([is_like(run, pattern) for run in runs["run"]]).sort("run")
    said = scan(folder, "settings").select("run", "branch", *_COUNTS, *_FIELDS, "options", "setting")
    settings = said.unique(maintain_order=True).collect()  # one that is logged again is the same
    progress = scan(folder, "progress").filter(pl.col("seconds").is_not_null()).sort("run", "seconds").collect()
    stalls = scan(folder, "reconfigurations").group_by("run").agg(pl.col("stall_seconds").mean()).collect()
    by_run = {run: one for (run,), one in progress.group_by("run")}
    of_run = {run: one.to_dicts() for (run,), one in settings.group_by("run", maintain_order=True)}
    stall = dict(stalls.iter_rows())
    found: list[tuple[Recorded, Mapping[str, Scalar]]] = []
    for row in runs.to_dicts():
        setting = _one_setting(of_run.get(row["run"], []))
        if setting is not None:
            along = by_run.get(row["run"], progress.clear())
            found.append((_recorded(row | setting, along, stall.get(row["run"])), _further(setting)))
    return found


def _further(row: Mapping[str, Any]) -> dict[str, Scalar]:
    """What a row of `settings` says beside `_FIELDS`, the numbers of nodes and plain options; lists and objects as JSON."""
    options = json.loads(row["options"] or "{}")
    found = {name: value for name, value in options.items() if not isinstance(value, Scalar)}
    if row["setting"]:
        whole = setting_from(row["setting"])
        found |= {"worker_nodes": whole.workers, "server_nodes": whole.servers}
        found |= {n: getattr(whole, n) for n in Setting.__dataclass_fields__ if n not in {*_FIELDS, *_COUNTS, "options"}}
    return {n: v if isinstance(v, Scalar) else json.dumps(v, sort_keys=True) for n, v in found.items()}


def _one_setting(rows: list[dict[str, Any]]) -> dict[str, Any] | None:
    """The setting of a run from its rows in `settings`; None if it changed otherwise than from BSP to ASP, as it says."""
    if not rows:
        return None
    first = rows[0]
    scheduled = "bsp_percent" in json.loads(first["options"] or "{}")
    if any({**row, "policy": first["policy"]} != first for row in rows) or (len(rows) > 1 and not scheduled):
        return None
    return first | {"policy": _SCHEDULED} if scheduled else first


def recorded_job(
    name: str,
    runs: list[Recorded],
    *,
    target: Target,
    budget_seconds: float,
    budget_usd: float = math.inf,
    seed: int = 0,
    samples: int = 0,
    start: Mapping[str, Scalar] = MappingProxyType({}),
) -> Job:
    """The job of the recorded `runs`. Its knobs are the values that differ between runs. It starts under the setting of the
    first run that has the values of `start`, by knob.

    `samples` is the size of the training data, for tuners that count epochs; 0: unknown. Raises Rejected if no run has these
    values.
    """
    matches = [run.setting for run in runs if start.items() <= _values(run.setting).items()]
    if not matches:
        wanted = ", ".join(f"{name} {value!r}" for name, value in start.items())
        raise Rejected(f"Cannot start with {wanted}: no such run was recorded; {_other_starts(runs, start)}")
    begin = matches[0]
    recorded = dict.fromkeys(run.setting for run in runs)
    nodes = tuple(Node(role, "recorded", 1, ("cpu",), 1e9, 1e9) for role in _COUNTS)
    knobs: list[Knob] = []
    values = [_values(run.setting) for run in runs]
    for knob in values[0]:
        # By type and text, because True == 1 == 1.0 would fall together in a set.
        found = {type(v[knob]).__name__ + repr(v[knob]): v[knob] for v in values if knob in v}
        if len(found) > 1:
            knobs.append(Choice(knob, tuple(sorted(found.values(), key=lambda v: (str(type(v)), v)))))
    space = Space(begin, nodes, tuple(knobs), recorded)
    return Job(
        name=name,
        nodes=nodes,
        start=begin,
        space=space,
        target=target,
        budget_seconds=budget_seconds,
        model_bytes=0.0,
        samples=samples,
        seed=seed,
        prices=Prices(by_setting=_rates(runs)),
        budget_usd=budget_usd,
    )


def _other_starts(runs: list[Recorded], start: Mapping[str, Scalar]) -> str:
    """What to start with, where no run has the values of `start`."""
    values = [_values(run.setting) for run in runs]
    if unknown := next((name for name in start if name not in values[0]), None):
        near = [name for name in values[0] if name == f"option/{unknown}"] or values[0]
        return f"runs have no {unknown}; {near_names(unknown, near)}"
    for name, wanted in start.items():
        if all(one[name] != wanted for one in values):
            known = list({repr(one[name]): None for one in values})
            return f"of {name}, runs have {', '.join(known[:_NAMES])}{', ...' * (len(known) > _NAMES)}."
    near = max(values, key=lambda one: sum(one[name] == wanted for name, wanted in start.items()))
    return f"the nearest has {', '.join(f'{name} {near[name]!r}' for name in start)}."


def _rates(runs: list[Recorded]) -> dict[Setting, Rate]:
    """The machines of every setting and their price; the median over its runs."""
    found: dict[Setting, list[Rate]] = {}
    for run in runs:
        found.setdefault(run.setting, []).append(run.rate)
    return {s: Rate(median(r.machines for r in of), median(r.usd_per_hour for r in of)) for s, of in found.items()}


def change_seconds(runs: Sequence[Recorded]) -> float | None:
    """What a change from one run to another takes: the median stall of their own reconfigurations; None: not recorded."""
    recorded = [run.restart_seconds for run in runs if run.restart_seconds is not None]
    return median(recorded) if recorded else None


def _values(setting: Setting) -> dict[str, Scalar]:
    """The values of a recorded setting that may differ between runs, by the name of their knob."""
    return {n: getattr(setting, n) for n in _FIELDS} | {f"option/{n}": value for n, value in setting.options}


def _recorded(row: Mapping[str, Any], progress: pl.DataFrame, restart_seconds: float | None) -> Recorded:
    options: dict[str, Scalar] = {k: v for k, v in json.loads(row["options"] or "{}").items() if isinstance(v, Scalar)}
    options |= {name: row[name] for name in _COUNTS if row[name] is not None}
    given = {name: row[name] for name in _FIELDS if row[name] is not None}
    setting = Setting(workers=_COUNTS[:1], servers=_COUNTS[1:], options=tuple(sorted(options.items())), **given)
    seconds, clocks = row["run_seconds"], row["steps"]
    ended = progress.filter(pl.col("seconds") >= seconds).select(pl.col("validation_loss", "accuracy").drop_nulls().last())
    loss, accuracy = ended.row(0) if ended.height else (None, None)
    loss, accuracy = (seen if told is None else told for told, seen in ((row["loss"], loss), (row["accuracy"], accuracy)))
    last = Evaluation(seconds, clocks, _number(loss), _number(accuracy))
    along = tuple(e for e in _evaluations(progress) if 0 <= e.seconds < seconds)
    trained = progress.filter(pl.col("training_loss").is_not_null())
    switch = None
    if setting.policy == _SCHEDULED:
        in_bsp = cast(int, trained.filter(policy="bsp")["steps"].max() or 0)
        switch = math.inf if in_bsp == trained["steps"].max() else in_bsp
    rate = Rate(_machines(row, options), _number(row["cost_usd"]) / seconds * 3600)
    course = _course(trained if trained.height else progress, seconds, clocks)
    # An end of which nothing is known must not hide what was known before.
    evaluations = along if along and math.isnan(last.loss) and math.isnan(last.accuracy) else (*along, last)
    bounded = setting.policy in BY_STALENESS  # of other policies, the bound has no effect
    untold = tuple(name for name in _FIELDS if name not in given and (name != "staleness" or bounded))
    return Recorded(setting, seconds, clocks, evaluations, course, switch, restart_seconds, rate, untold)


def _machines(row: Mapping[str, Any], options: Mapping[str, Scalar]) -> float:
    """The number of machines of a recorded run; nan where it was not recorded."""
    if row["setting"]:
        whole = setting_from(row["setting"])
        return float(len({*whole.workers, *whole.servers}))  # one that works and serves is one machine
    workers, servers = row["workers"], row["servers"]
    if workers is None or servers is None:
        return math.nan
    return float(max(workers, servers) if options.get("servers_share_nodes") is True else workers + servers)


def _evaluations(progress: pl.DataFrame) -> Iterator[Evaluation]:
    for row in progress.to_dicts():
        if row["validation_loss"] is not None or row["accuracy"] is not None:
            yield Evaluation(row["seconds"], row["steps"], _number(row["validation_loss"]), _number(row["accuracy"]))


def _course(trained: pl.DataFrame, seconds: float, clocks: int) -> tuple[tuple[float, int], ...]:
    """`Recorded.course` from rows of `progress`."""
    course = [(0.0, 0)]
    for at, step in trained.select("seconds", "steps").iter_rows():
        if at > course[-1][0] and course[-1][1] < step < clocks and at < seconds:
            course.append((at, step))
    return (*course, (seconds, clocks)) if len(course) > 1 else ()


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
