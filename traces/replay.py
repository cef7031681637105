"""A System that answers from recorded runs. It answers what was recorded, and rejects everything else.

As in tabular benchmarks, the table holds whole runs, each under one setting from its beginning to its end, and only their
settings exist. So a branch is one recorded run. A fork with a setting, or a reconfiguration, starts the run of that setting
from its beginning, because the table does not say how a model trained under one setting continues under another. That takes
the time that the recording or the scenario gives for a restart. A run advances as it was recorded: along the steps of its
progress (those with a training loss, where it has any), or else at its mean rate. Its loss and accuracy are known at the
recorded times, at least at its end; they are not interpolated. What was evaluated at the end or after it is known at its
end. After the end of the run, time still passes: asked for more clocks, the run takes the time that they would have taken,
but completes none. (A tuner may always continue the job, and no table says how it went on.)

A run that switches from BSP to ASP is under one setting, too: its policy is "sync_switch", and the option "bsp_percent" says
when it switches. Up to its switch it is like any other run with a later one. So a reconfiguration to a switch that is still
to come continues the job at the same step of the other run, without a restart.

Several runs under one setting are repetitions: the job's seed says which one is played.

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
from typing import Any, TypeVar, cast

import numpy as np
import polars as pl
from numpy.typing import ArrayLike, NDArray

from traces.parts import is_like, scan
from traces.schema import setting_from
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Job,
    Pushes,
    Reconfigure,
    Rejected,
    Run,
    Scalar,
    Setting,
    Space,
    Status,
    Target,
    Window,
    WorkerWindow,
)
from tuners.near_names import near_names
from tuners.prices import UNKNOWN, Prices, Rate
from tuners.settings import Choice, Knob, Node
from tuners.system import Handlers, branch_of, check_not_last, handler_of

__all__ = ["Recorded", "RecordedSystem", "change_seconds", "recorded_job", "recorded_runs"]

T = TypeVar("T")

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
_NAMES = 8  # of runs or values that a message lists, at most
_OFFERED = 3  # number of nearest settings in the message of a rejection


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
    runs = _told_apart([run for trace in inside or [folder] for run in _runs_in(trace, workload, pattern)])
    if not runs:
        all_runs = [scan(trace, "runs").select("workload").collect() for trace in inside or [folder]]
        known = sorted({one for table in all_runs for one in table["workload"] if one})
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
    runs = runs.filter(pl.col("workload") == workload, pl.col("run_seconds") > 0, pl.col("steps") > 0)
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


@dataclass
class _Branch:
    run: Recorded
    seconds: float = 0.0  # since the start of the run; may exceed its length

    @property
    def over(self) -> bool:
        return self.seconds >= self.run.seconds

    @property
    def clocks(self) -> int:
        return self.run.clocks_at(self.seconds)


class RecordedSystem:
    """A System over a table of recorded runs.

    A change from one run to another takes `restart_seconds`; if None, the median of what the runs' own reconfigurations
    took, or no time if none was recorded.
    """

    def __init__(self, job: Job, runs: list[Recorded], *, restart_seconds: float | None = None) -> None:
        self.job = job
        self.now = 0.0
        self.status: Status = "running"
        self._restart_seconds = change_seconds(runs) or 0.0 if restart_seconds is None else restart_seconds
        repetitions: dict[Setting, list[Recorded]] = {}
        for run in runs:
            repetitions.setdefault(run.setting, []).append(run)
        self._runs = {setting: same[job.seed % len(same)] for setting, same in repetitions.items()}
        self._branches = {0: _Branch(self._run_of(job.start))}
        self._next = 1

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, if the table has no answer."""
        handlers: Handlers = {
            Run: self._run,
            Reconfigure: self._reconfigure,
            Install: self._install,
            Fork: self._fork,
            Free: self._free,
            Evaluate: self._evaluate,
        }
        return handler_of(action, handlers)(action)

    def _run(self, action: Run) -> Window:
        branch = branch_of(self._branches, action.branch)
        if action.clocks is None:
            until = branch.seconds + cast(float, action.seconds)
        elif branch.over:
            until = branch.seconds + action.clocks * branch.run.seconds / branch.run.clocks
        else:
            until = min(float(branch.run.seconds_at(branch.clocks + action.clocks)), branch.run.seconds)
            until = max(until, branch.seconds)
        until = min(until, self._budget_end(branch))
        reached = self._reached(branch, until)
        if reached is not None:
            until, self.status = reached, "target"
        return self._window(branch, until)

    def _budget_end(self, branch: _Branch) -> float:
        """When the budget is spent, in seconds since the start of the branch's run."""
        return branch.seconds + (self.job.budget_seconds - self.now)

    def _reached(self, branch: _Branch, until: float) -> float | None:
        """When the target is reached, in seconds since the start of the branch's run; None if not up to `until`."""
        target, run = self.job.target, branch.run
        if target.counts:
            steps = target.value if target.metric == "clocks" else np.ceil(target.value / run.setting.batch_size)
            if steps > run.clocks:
                return None
            at = float(run.seconds_at(float(steps)))
            return max(at, branch.seconds) if at <= min(until, run.seconds) else None
        reached = [e.seconds for e in run.evaluations if e.seconds <= until and target.reached(e.loss, e.accuracy)]
        return max(reached[0], branch.seconds) if reached else None

    def _window(self, branch: _Branch, until: float) -> Window:
        """The window from the branch's time to `until`, read off the recorded run."""
        begun, start = branch.seconds, self.now
        seen = [e for e in branch.run.evaluations if begun < e.seconds <= until]
        done = np.arange(branch.run.clocks_at(begun), branch.run.clocks_at(until), dtype=np.int32)
        # Set the end of the budget exactly: with a rounding error, a tuner would go on in ever shorter windows.
        self.now = self.job.budget_seconds if until == self._budget_end(branch) else start + (until - begun)
        branch.seconds = until
        nan, none = np.full(len(done), np.nan), np.zeros(len(done), np.int32)
        seconds = start - begun + branch.run.seconds_at(done + 1)
        samples = len(done) * branch.run.setting.batch_size
        worker = WorkerWindow(_COUNTS[0], len(done), samples, np.nan, np.nan, np.nan, np.nan, (np.nan,))
        return Window(
            start_seconds=start,
            end_seconds=self.now,
            clocks=len(done),
            pushes=Pushes(seconds, none, done, nan, nan, nan, nan, none, nan),
            workers=(worker,),
            evaluations=tuple(e._replace(seconds=start - begun + e.seconds) for e in seen),
            nodes=self.job.nodes,
            setting=branch.run.setting,
            status=self.status,
        )

    def _reconfigure(self, action: Reconfigure) -> Cost:
        branch, run = branch_of(self._branches, action.branch), self._run_of(action.setting)
        made, seconds = self._changed(branch, run)
        self._branches[action.branch] = made
        return Cost(seconds=seconds, stall_seconds=seconds, steps=("restart",) if seconds else ())

    def _changed(self, branch: _Branch, run: Recorded) -> tuple[_Branch, float]:
        """The branch after a change to `run`, and the seconds that it took, which have passed."""
        if run is branch.run:
            return _Branch(run, branch.seconds), 0.0
        if branch.run.switch is not None and run.switch is not None and branch.clocks <= min(branch.run.switch, run.switch):
            # Up to here the two runs do the same: both are in BSP.
            return _Branch(run, float(run.seconds_at(branch.clocks))), 0.0
        self.now += self._restart_seconds
        return _Branch(run), self._restart_seconds

    def _install(self, action: Install) -> None:
        del action
        raise Rejected("Cannot carry out a policy: these runs are recorded, and what they did cannot be changed.")

    def _fork(self, action: Fork) -> int:
        parent = branch_of(self._branches, action.branch)
        if action.testing:
            raise Rejected("Cannot fork a testing branch: these runs are recorded, and all of them trained.")
        run = parent.run if action.setting is None else self._run_of(action.setting)
        number, self._next = self._next, self._next + 1
        self._branches[number], _ = self._changed(parent, run)
        return number

    def _free(self, action: Free) -> None:
        branch_of(self._branches, action.branch)
        check_not_last(self._branches, action.branch)
        del self._branches[action.branch]

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch = branch_of(self._branches, action.branch)
        before = [e for e in branch.run.evaluations if e.seconds <= branch.seconds]
        if not before:
            first = next((e.seconds for e in branch.run.evaluations), branch.run.seconds)
            raise Rejected(f"Cannot evaluate branch {action.branch}: nothing was recorded before {first:g} s of its run.")
        return before[-1]._replace(seconds=self.now)

    def _run_of(self, setting: Setting) -> Recorded:
        """The run that was recorded under `setting`. Raises Rejected, naming the nearest settings, if there is none."""
        if setting in self._runs:
            return self._runs[setting]
        wanted = self.job.space.values(setting)
        nearest = sorted(self._runs, key=lambda s: self._distance(wanted, self.job.space.values(s)))[:_OFFERED]
        offers = "; ".join(_describe(self.job, s) for s in nearest)
        raise Rejected(f"Cannot run {_describe(self.job, setting)}: no such run was recorded. Nearest are {offers}.")

    def _distance(self, one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> float:
        """The number of knobs that differ, plus a small term for how far apart the values are in the knobs' lists."""
        apart = 0.0
        for knob in self.job.space.knobs:
            options = cast(Choice, knob).options
            if one[knob.name] != other[knob.name]:
                steps = abs(_place(options, one[knob.name]) - _place(options, other[knob.name]))
                apart += 1 + 0.01 * steps / len(options)
        return apart


def _place(options: tuple[Scalar, ...], value: Scalar) -> float:
    """The position of a value in the sorted list of recorded values; between two positions if it is not in the list."""
    if value in options:
        return float(options.index(value))
    comparable = [o for o in options if isinstance(o, str) == isinstance(value, str)]
    return sum(o < value for o in comparable) - 0.5  # type: ignore[operator]


def _describe(job: Job, setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in job.space.values(setting).items())


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
    return Recorded(setting, seconds, clocks, evaluations, course, switch, restart_seconds, rate)


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
