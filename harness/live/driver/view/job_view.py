"""What is known of a running job: its branches, what they have reported, and what has happened."""

from __future__ import annotations

import math
from collections.abc import Collection
from typing import Any

import numpy as np
from numpy.typing import NDArray

from harness.live.driver.view.branch_view import DriverBranch
from harness.live.driver.view.recent_pushes import RecentPushes
from harness.live.driver.view.status import JobStatus
from harness.live.processes.runtime import Runtime
from harness.live.protocol.driver_reports import Poll
from simulators.engine.job_state import Records
from tuners.actions import Evaluation, Job, Status

__all__ = ["DECIMALS", "JobView"]

DECIMALS = 6
"""Of seconds: clocks of several processes agree on less, and what is beyond would be two thirds of the exchange log."""

_TIMES = [Records._fields.index(f"{name}seconds") for name in ("", "compute_", "pull_", "push_", "wait_")]


class JobView:
    """The branches as the driver sees them. The coordinator's reports and the tuner's actions change it."""

    def __init__(self, job: Job, runtime: Runtime, branches: dict[int, DriverBranch], running: int | None) -> None:
        self._job, self._runtime = job, runtime
        self.branches = branches
        self.running = running  # the branch that trains
        self.measured: dict[int, Evaluation] = {}  # requested evaluations, by number of the request
        self.events: list[tuple[float, str]] = []
        self.performed = 0  # actions, rejected ones included
        self.lost_pushes = 0
        self.recent = RecentPushes(job)
        self.lacks_nodes = ""  # why the job cannot go on; its model is lost then
        self._ended_seconds: float | None = None

    @property
    def now(self) -> float:
        """Seconds since the job began; constant once the job has ended."""
        return self._runtime.now if self._ended_seconds is None else self._ended_seconds

    @property
    def budget_seconds(self) -> float:
        """When the job ends at the latest."""
        return self._job.budget_seconds

    @property
    def status(self) -> Status:
        """The target is reached once any branch has reached it; the job runs while any branch runs."""
        found = [branch.status for branch in self.branches.values()]
        if "target" in found:
            return "target"
        return "running" if "running" in found else found[-1]

    @property
    def number(self) -> int:
        """The running branch, or the first one if none is running."""
        return next(iter(self.branches)) if self.running is None else self.running

    def log_event(self, what: str) -> None:
        """Add a sentence to the events of the job's status."""
        self.events.append((max(self.now, 0.0), what))  # before the first report, no time is known

    def take(self, report: Poll) -> NDArray[np.float64]:
        """Take what the coordinator reports. Returns when pushes were completed, [n], in seconds of the job."""
        if report.lost_pushes > self.lost_pushes:
            self.log_event(f"{report.lost_pushes - self.lost_pushes} pushes are lost for good, and no longer count")
            self.lost_pushes = report.lost_pushes
        moments = [np.zeros(0)]
        for number, news in report.reports.items():
            if number in self.branches:
                moments.append(self._add(self.branches[number], news.rows))
                self._add_evaluations(self.branches[number], news.evaluations)
        for number, branch in self.branches.items():
            known = report.statuses.get(number, branch.status)
            branch.status = "deadlock" if self.lacks_nodes and known == "running" else known
        if self.status != "running" and self._ended_seconds is None:
            self._ended_seconds = self._runtime.now
        return np.concatenate(moments)

    def end_without_nodes(self, why: str) -> None:
        """Too few nodes are left: the job ends, as one in simulation does."""
        if not self.lacks_nodes:
            self.lacks_nodes = why
            self.log_event(why)

    def _add(self, branch: DriverBranch, rows: Any) -> NDArray[np.float64]:
        rows = np.array(rows, np.float64)
        rows[:, 0] = self._runtime.job_seconds(rows[:, 0])
        rows[:, _TIMES] = np.round(rows[:, _TIMES], DECIMALS)
        branch.add(rows)
        self.recent.add(rows)
        # Not only in `job_status`: without a viewer the rows of the whole job would be kept.
        self.recent.drop_old(self.now)
        moments: NDArray[np.float64] = rows[:, 0]
        return moments

    def _add_evaluations(self, branch: DriverBranch, evaluations: Collection[tuple[int, Evaluation]]) -> None:
        for request, made in evaluations:
            seconds = self._runtime.job_seconds(made.seconds)
            evaluation = made._replace(seconds=seconds, clocks=made.clocks + branch.lost_pushes)
            branch.latest_evaluation = evaluation
            if request:
                self.measured[request] = evaluation
            else:
                branch.evaluations.append(evaluation)

    def job_status(self, away: Collection[str]) -> JobStatus:
        """The status of the job now; nodes in `away` are lost."""
        branch, now = self.branches[self.number], self.now
        self.recent.drop_old(now)
        latest = branch.latest_evaluation
        return JobStatus(
            seconds=now,
            budget_seconds=self.budget_seconds,
            status=self.status,
            clocks=branch.clocks,
            clocks_per_second=self.recent.clocks_per_second,
            loss=self.recent.loss,
            accuracy=math.nan if latest is None else latest.accuracy,
            setting=branch.setting,
            nodes=self.recent.nodes(branch.setting, away, self._runtime.latest.held_seconds),
            events=tuple(self.events),
        )
