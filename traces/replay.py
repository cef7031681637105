"""A System that answers from recorded runs: what was recorded is told, what was not is refused.

As with tabular benchmarks, the table holds whole runs, each under one setting from its beginning to its end. So a branch
stands for one recorded run: a fork with a setting, or a reconfiguration, begins that setting's run anew (the table cannot
say how a model trained under one setting goes on under another), and neither takes time, for none was recorded. A run
advances at its recorded mean rate. Its loss and accuracy are known where they were recorded, at its end at least, and
nothing is made up in between. When it is over, time passes and nothing else happens: asked for more clocks, it takes as
long as they would have taken and brings none, for a tuner may always run the job on and no table knows how it went on.

Machines have no names in such tables. The job has two nodes, which stand for all workers and for all servers; where their
numbers vary they are the options "workers" and "servers" of a setting.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar, cast

import numpy as np
import polars as pl

from traces.parts import scan
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
from tuners.settings import Choice, Knob, Node
from tuners.system import Handlers, branch_of, check_not_last, handler_of

__all__ = ["Recorded", "RecordedSystem", "recorded_job", "recorded_runs"]

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
_OFFERED = 3  # nearest settings that a refusal names


@dataclass(frozen=True, slots=True)
class Recorded:
    """One recorded run."""

    setting: Setting
    seconds: float
    clocks: int  # steps
    evaluations: tuple[Evaluation, ...]  # in order of time, the last at its end; `seconds` since the run began


def recorded_runs(folder: Path, workload: str) -> list[Recorded]:
    """The runs of `workload` in a trace that have one setting, a duration and a number of steps.

    `folder` is a trace or has some at any depth, as the results of a comparison that was recorded. Raises as
    `traces.parts.scan` does, and ValueError where there are none.
    """
    inside = [] if (folder / "trace.json").is_file() else sorted(p.parent for p in folder.rglob("trace.json"))
    runs = [run for trace in inside or [folder] for run in _runs_in(trace, workload)]
    if not runs:
        raise ValueError(
            f"Cannot replay {workload!r} from {folder}: it has no run of it with one setting, seconds and steps."
        )
    return runs


def _runs_in(folder: Path, workload: str) -> list[Recorded]:
    once = scan(folder, "settings").group_by("run").len().filter(pl.col("len") == 1).select("run")
    settings = scan(folder, "settings").join(once, on="run").select("run", *_COUNTS, *_FIELDS, "options")
    known = (pl.col("workload") == workload) & (pl.col("seconds") > 0) & (pl.col("steps") > 0)
    runs = scan(folder, "runs").filter(known).select("run", "steps", "loss", "accuracy", run_seconds="seconds")
    rows = runs.join(settings, on="run").collect().sort("run")
    along: dict[str, list[Evaluation]] = {}
    for row in scan(folder, "progress").sort("run", "seconds").collect().to_dicts():
        if row["seconds"] is not None and (row["validation_loss"] is not None or row["accuracy"] is not None):
            made = Evaluation(row["seconds"], row["steps"], _number(row["validation_loss"]), _number(row["accuracy"]))
            along.setdefault(row["run"], []).append(made)
    return [_recorded(row, along.get(row["run"], [])) for row in rows.to_dicts()]


def recorded_job(
    name: str,
    runs: list[Recorded],
    *,
    target: Target,
    budget_seconds: float,
    seed: int = 0,
    samples: int = 1,
    start: Mapping[str, Scalar] = MappingProxyType({}),
) -> Job:
    """The job of which `runs` are the recordings: its knobs are what differs between them, and it starts under the first
    of those that have what `start` says, by knob.

    `samples` is the size of the training data, for tuners that count epochs. Raises Rejected where no run has that start.
    """
    wanted = [run.setting for run in runs if start.items() <= _values(run.setting).items()]
    if not wanted:
        told = ", ".join(f"{name} {value}" for name, value in start.items())
        raise Rejected(
            f"Cannot start with {told}: no such run was recorded; runs have {', '.join(_values(runs[0].setting))}."
        )
    begin = wanted[0]
    nodes = tuple(Node(role, "recorded", 1, ("cpu",), 1e9, 1e9) for role in _COUNTS)
    knobs: list[Knob] = []
    values = [_values(run.setting) for run in runs]
    for knob in values[0]:
        found = {type(v[knob]).__name__ + repr(v[knob]): v[knob] for v in values if knob in v}
        if len(found) > 1:
            knobs.append(Choice(knob, tuple(sorted(found.values(), key=lambda v: (str(type(v)), v)))))
    space = Space(begin, nodes, tuple(knobs))
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
    )


@dataclass
class _Branch:
    run: Recorded
    seconds: float = 0.0  # into the run; beyond its end, nothing happens any more

    @property
    def over(self) -> bool:
        return self.seconds >= self.run.seconds

    def clocks(self, seconds: float) -> int:
        """Steps completed so many seconds into the run."""
        return int(np.floor(min(seconds / self.run.seconds, 1.0) * self.run.clocks + 1e-9))


class RecordedSystem:
    """Carries out what a table of recorded runs can answer. Raises ValueError where two of them have one setting."""

    def __init__(self, job: Job, runs: list[Recorded]) -> None:
        self.job = job
        self.now = 0.0
        self.status: Status = "running"
        self._runs: dict[Setting, Recorded] = {}
        for run in runs:
            if run.setting in self._runs:
                raise ValueError(f"Cannot replay two runs under one setting: {_told(job, run.setting)}. Leave one out.")
            self._runs[run.setting] = run
        self._branches = {0: _Branch(self._run_of(job.start))}
        self._next = 1

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, where the table has no answer."""
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
        each = branch.run.seconds / branch.run.clocks
        if action.clocks is None:
            until = branch.seconds + cast(float, action.seconds)
        elif branch.over:
            until = branch.seconds + action.clocks * each
        else:
            until = min((branch.clocks(branch.seconds) + action.clocks) * each, branch.run.seconds)
        until = min(until, self._budget_end(branch))
        reached = self._reached(branch, until)
        if reached is not None:
            until, self.status = reached, "target"
        return self._window(branch, until)

    def _budget_end(self, branch: _Branch) -> float:
        """When the budget is spent, in seconds into the branch's run."""
        return branch.seconds + (self.job.budget_seconds - self.now)

    def _reached(self, branch: _Branch, until: float) -> float | None:
        """When the target is reached, in seconds into the branch's run; None where that is not before `until`."""
        target, run = self.job.target, branch.run
        if target.counts:
            steps = target.value if target.metric == "clocks" else np.ceil(target.value / run.setting.batch_size)
            at = float(steps) * run.seconds / run.clocks
            return max(at, branch.seconds) if at <= min(until, run.seconds) else None
        there = [e.seconds for e in run.evaluations if e.seconds <= until and target.reached(e.loss, e.accuracy)]
        return max(there[0], branch.seconds) if there else None

    def _window(self, branch: _Branch, until: float) -> Window:
        begun, start = branch.seconds, self.now
        seen = [e for e in branch.run.evaluations if begun < e.seconds <= until]
        done = np.arange(branch.clocks(begun), branch.clocks(until), dtype=np.int32)
        # Exactly, or a tuner that goes on would never come to the end.
        self.now = self.job.budget_seconds if until == self._budget_end(branch) else start + (until - begun)
        branch.seconds = until
        each, nan = branch.run.seconds / branch.run.clocks, np.full(len(done), np.nan)
        none = np.zeros(len(done), np.int32)
        seconds = np.asarray(start - begun + (done + 1) * each, np.float64)
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
        if run is not branch.run:
            self._branches[action.branch] = _Branch(run)
        return Cost(seconds=0.0, stall_seconds=0.0)

    def _install(self, action: Install) -> None:
        del action
        raise Rejected("Cannot carry out a policy: these runs are recorded, and what they did cannot be changed.")

    def _fork(self, action: Fork) -> int:
        parent = branch_of(self._branches, action.branch)
        if action.testing:
            raise Rejected("Cannot fork a testing branch: these runs are recorded, and all of them trained.")
        run = parent.run if action.setting is None else self._run_of(action.setting)
        number, self._next = self._next, self._next + 1
        self._branches[number] = _Branch(run, parent.seconds if run is parent.run else 0.0)
        return number

    def _free(self, action: Free) -> None:
        branch_of(self._branches, action.branch)
        check_not_last(self._branches, action.branch)
        del self._branches[action.branch]

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch = branch_of(self._branches, action.branch)
        before = [e for e in branch.run.evaluations if e.seconds <= branch.seconds]
        if not before:
            raise Rejected(f"Cannot evaluate branch {action.branch}: nothing was recorded before {branch.run.seconds:g} s.")
        return before[-1]._replace(seconds=self.now)

    def _run_of(self, setting: Setting) -> Recorded:
        """The run that was recorded under `setting`. Raises Rejected, which offers the nearest, where there is none."""
        if setting in self._runs:
            return self._runs[setting]
        wanted = self.job.space.values(setting)
        nearest = sorted(self._runs, key=lambda s: self._distance(wanted, self.job.space.values(s)))[:_OFFERED]
        offers = "; ".join(_told(self.job, s) for s in nearest)
        raise Rejected(f"Cannot run {_told(self.job, setting)}: no such run was recorded. Nearest are {offers}.")

    def _distance(self, one: Mapping[str, Scalar], other: Mapping[str, Scalar]) -> float:
        """How many knobs differ, and, far less, by how many steps of their lists."""
        apart = 0.0
        for knob in self.job.space.knobs:
            options = cast(Choice, knob).options
            if one[knob.name] != other[knob.name]:
                steps = abs(_place(options, one[knob.name]) - _place(options, other[knob.name]))
                apart += 1 + 0.01 * steps / len(options)
        return apart


def _place(options: tuple[Scalar, ...], value: Scalar) -> float:
    """Where in the list of what was recorded a value is, or would be."""
    if value in options:
        return float(options.index(value))
    comparable = [o for o in options if isinstance(o, str) == isinstance(value, str)]
    return sum(o < value for o in comparable) - 0.5  # type: ignore[operator]


def _told(job: Job, setting: Setting) -> str:
    return ", ".join(f"{name} {value}" for name, value in job.space.values(setting).items())


def _values(setting: Setting) -> dict[str, Scalar]:
    """What a setting of a recorded run may differ in, by the name of the knob that sets it."""
    return {n: getattr(setting, n) for n in _FIELDS} | {f"option/{n}": value for n, value in setting.options}


def _recorded(row: Mapping[str, Any], along: list[Evaluation]) -> Recorded:
    options: dict[str, Scalar] = {k: v for k, v in json.loads(row["options"] or "{}").items() if isinstance(v, Scalar)}
    options |= {name: row[name] for name in _COUNTS if row[name] is not None}
    given = {name: row[name] for name in _FIELDS if row[name] is not None}
    setting = Setting(workers=_COUNTS[:1], servers=_COUNTS[1:], options=tuple(sorted(options.items())), **given)
    seconds, clocks = row["run_seconds"], row["steps"]
    last = Evaluation(seconds, clocks, _number(row["loss"]), _number(row["accuracy"]))
    return Recorded(setting, seconds, clocks, (*(e for e in along if e.seconds < seconds), last))


def _number(value: float | None) -> float:
    return float("nan") if value is None else value
