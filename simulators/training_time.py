"""Trains branches in simulated time, while the control plane acts and a reconfiguration goes on.

The engine (`simulators.engine`) and the control plane (SimPy) each have a clock. They meet in `train`: the engine trains
until the control plane's next event, then the control plane acts, then the branch is told what has changed.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.branch import Branch
from simulators.branch_costs import refill_seconds
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.reconfiguration import Load, Reconfiguration
from simulators.unreported import NO_RECORDS
from tuners.actions import Cost

__all__ = ["FOR_EVER", "TrainingTime"]

FOR_EVER = 2**31 - 1
"""A number of clocks that is never reached: another limit comes first."""

_ROWS = 512  # of pushes per call of the engine


class TrainingTime:
    """What time it is in a job, which branch trains, and which reconfiguration is in progress."""

    def __init__(self, first: Branch, control: ControlPlane, load: Load, costs: Costs, budget_seconds: float) -> None:
        self._control, self._load, self._costs, self._budget_seconds = control, load, costs, budget_seconds
        self.now = 0.0  # simulated seconds since the job began
        self.reconfiguration: Reconfiguration | None = None  # in progress; one at a time
        self.waited_cost = Cost(seconds=0.0, stall_seconds=0.0)  # of the last one that was waited for
        self._cached: Branch | None = first  # its model is in the workers' caches
        self.latest = first  # to train

    def switch_to(self, branch: Branch) -> None:
        """Branches share the workers' caches, so that training another one clears them (MLtuner, Section 4.6)."""
        if branch is not self._cached and branch.status == "running":
            self._cached = branch
            self.pass_seconds(refill_seconds(branch))

    def resume(self, branch: Branch) -> None:
        """Shift a branch's clock to now; another one may have trained last."""
        branch.resume_at(self.now, self.latest)
        if self.latest is not branch:
            branch.unreported.resume_at(self.now)
        self.latest = branch

    def bring_to_now(self, branch: Branch) -> None:
        """Resume a branch that has not trained for a while; if nodes are lost meanwhile, begin to recover."""
        if self.reconfiguration is None and not np.array_equal(branch.inputs.slowdown, self._control.disturbance.slowdown):
            branch.catch_up(branch.until_seconds)  # what was done until then is done at the old speed
        self.resume(branch)
        self._apply_effects(branch)
        if lost := self.lost(branch):
            branch.catch_up(self.now)
            self._lose(branch, lost)

    def forget(self, branch: Branch) -> None:
        """This branch is freed: it is in no cache."""
        self._cached = None if branch is self._cached else self._cached

    def pass_seconds(self, seconds: float) -> None:
        """Let time pass in which no branch trains."""
        end = self.now + seconds
        while self._control.next_seconds <= end:
            self._control.act()
        self._control.be_at(end)
        self.now = end

    def begin_conditions(self) -> None:
        """Put in force the conditions that hold from the beginning, as `train` does before the first push."""
        self.pass_seconds(0.0)
        self.bring_to_now(self.latest)

    def train_unreported(self, branch: Branch, limit: float, *, change_only: bool = False) -> None:
        """Train outside of a window, to `limit` or, with `change_only`, to the end of the reconfiguration; the next window
        reports it."""
        start = self.now
        stalls = self.reconfiguration is not None and self.reconfiguration.quiescent
        table = self.train(branch, FOR_EVER, limit, change_only=change_only)
        branch.unreported.add_records(table, self.now)
        # A tuner has been told the stall that it waited for as a cost, so the window does not include it, unless the window
        # begins before the stall because of earlier training.
        if not (change_only and stalls) or branch.unreported.seconds > 0:
            branch.unreported.seconds += self.now - start

    def train(self, branch: Branch, clocks: int, limit: float, *, change_only: bool = False) -> NDArray[np.float64]:
        """Train `branch` for `clocks`, to `limit` or, with `change_only`, to the end of the reconfiguration. The
        control plane acts meanwhile. Returns the records, [n, 11]."""
        tables, left = [NO_RECORDS], clocks
        while left > 0 and branch.status == "running" and not (change_only and self.reconfiguration is None):
            if self.now >= limit and not branch.inputs.active.any():
                break  # the budget ended while a reconfiguration had no worker: no deadlock, nobody will push any more
            interval = branch.setting.checkpoint_seconds if self.reconfiguration is None else 0.0
            due = branch.checkpoints.due_seconds(interval)
            until = min(self._control.next_seconds, limit, due)
            most = min(left, _ROWS)
            table = NO_RECORDS
            if self.reconfiguration is None:
                table = branch.advance(most, until, _ROWS)
            elif self.reconfiguration.trains:
                # Steps that depend on pushes must be told of each at its time: one push per call of the engine, then.
                most = 1 if self.reconfiguration.follows_pushes else most
                table = branch.advance(most, until, _ROWS)
            tables.append(table)
            left -= len(table)
            # The engine stopped for a reason of its own, before `until`: `most` pushes, or the end of the job.
            if len(table) == most or branch.status != "running":
                self.now = max(self.now, float(branch.state.clock.seconds))
                if self.reconfiguration is not None:
                    self._progress(branch, int(table[-1, 1]) if len(table) else None)
                continue
            self.now = max(self.now, until)  # the limit may be past: a stall can end after the budget
            if until >= limit:
                break
            # The engine stopped at its last event before `until`. Progress up to now is made at the old rates, so it must be
            # computed before the control plane changes them.
            branch.catch_up(self.now)
            if due < self._control.next_seconds:
                self._checkpoint(branch)
            else:
                self._control.act()
            self._progress(branch, None)
        over = branch.status != "running" or self.now >= self._budget_seconds
        if over and self.reconfiguration is not None:  # its cost so far is reported with the job's last window
            self.reconfiguration.cancel()
            self._end_reconfiguration()
        branch.until_seconds = self.now
        return np.concatenate(tables)

    def _checkpoint(self, branch: Branch) -> None:
        """Write a checkpoint of `branch`, while all workers pause. Without effect where a server is lost before its end."""
        written, branch.until_seconds = branch.checkpoints.taken(branch.inputs, branch.state), self.now
        seconds = self._load.model_bytes / self._costs.checkpoint_bytes_per_second
        self.pass_seconds(seconds)
        self.resume(branch)
        complete = not self.lost(branch) & frozenset(branch.setting.servers)
        branch.checkpoints.keep(written if complete else None, self.now)
        branch.unreported.changes.append(
            Cost(seconds=seconds, stall_seconds=seconds, bytes_moved=self._load.model_bytes, steps=("checkpoint",))
        )

    def _progress(self, branch: Branch, pushed: int | None) -> None:
        """Tell the reconfiguration in progress which worker has pushed, and `branch` what the control plane has done."""
        if self.reconfiguration is not None:
            self.reconfiguration.progress(None if pushed is None else branch.context.job.nodes[pushed].name, self.now)
            if self.reconfiguration.over:
                self._end_reconfiguration()
        self._apply_effects(branch)
        if lost := self.lost(branch):
            self._lose(branch, lost)

    def _apply_effects(self, branch: Branch) -> None:
        if self.reconfiguration is None:
            branch.disturb(self._control.disturbance)
        else:
            self.reconfiguration.apply_effects(self.now)

    def lost(self, branch: Branch) -> frozenset[str]:
        """Nodes that `branch` uses, or needs for its reconfiguration, and that are gone."""
        if self.reconfiguration is not None and self.reconfiguration.branch is branch:
            return self.reconfiguration.lost_nodes
        return frozenset((*branch.setting.workers, *branch.setting.servers)) - self._control.present

    def _lose(self, branch: Branch, lost: frozenset[str]) -> None:
        """Continue on the surviving nodes. A reconfiguration in progress is completed without the lost ones, or rolled back
        where it needs them; where no setting can go on, it waits for nodes that join."""
        reconfiguration = self.reconfiguration or Reconfiguration(branch, self._control, self._load, self._costs)
        if reconfiguration.recover(lost, self.now):
            self.reconfiguration = reconfiguration
            self._apply_effects(branch)
        else:
            branch.end("deadlock")
            self._end_reconfiguration()

    def begin(self, reconfiguration: Reconfiguration) -> None:
        """Begin to carry out a reconfiguration that takes steps."""
        branch = reconfiguration.branch
        # First the branch moves into the workers' caches, which takes time; only then it is known when the steps begin.
        self.switch_to(branch)
        self.resume(branch)
        branch.catch_up(self.now)
        branch.disturb(self._control.disturbance)
        reconfiguration.begin(self.now)
        self.reconfiguration = reconfiguration
        self._progress(branch, None)

    def _end_reconfiguration(self) -> None:
        ended, self.reconfiguration = self.reconfiguration, None
        if ended is not None and ended.waited:
            self.waited_cost = ended.cost(self.now)
        elif ended is not None:
            ended.branch.unreported.changes.append(ended.cost(self.now))
