"""A System that answers from recorded runs. It answers what was recorded, and rejects everything else.

As in tabular benchmarks, the table holds whole runs, each under one setting from its beginning to its end, and only their
settings exist. So a branch is one recorded run. A fork with a setting, or a reconfiguration, starts the run of that setting
from its beginning, because the table does not say how a model trained under one setting continues under another. That takes
the time that the recording or the scenario gives for a restart. A run advances as it was recorded: along the steps of its
progress (those with a training loss, where it has any), or else at its mean rate. Its loss and accuracy are known at the
recorded times, at least at its end; they are not interpolated. What was evaluated at the end or after it is known at its
end. After the end of the run, time still passes: asked for more clocks, the run takes the time that they would have taken,
but completes none. (A tuner may always continue the job, and no table says how it went on.)

A run that goes from BSP to ASP is, up to its switch, like any other with a later one. So a reconfiguration to a switch that
is still to come continues the job at the same step of the other run, without a restart.

Several runs under one setting are repetitions: the job's seed says which one is played.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TypeVar, cast

import numpy as np

from traces.recorded_runs import Recorded, change_seconds
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
    Status,
    Window,
    WorkerWindow,
)
from tuners.playing.system import Handlers, branch_of, check_not_last, handler_of
from tuners.settings import Choice

__all__ = ["RecordedSystem"]

T = TypeVar("T")

_OFFERED = 3  # number of nearest settings in the message of a rejection


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
        worker = WorkerWindow(branch.run.setting.workers[0], len(done), samples, np.nan, np.nan, np.nan, np.nan, (np.nan,))
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
