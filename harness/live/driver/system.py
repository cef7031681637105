"""A System of real processes: training continues while a tuner thinks, and the next window reports it.

`perform` asks for something and waits; the thread in `harness.live.driver.control` does the work. All branches have their
model on the same servers, those of the branch that trains; another branch's setting takes effect when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from types import MappingProxyType, TracebackType
from typing import TypeVar

import numpy as np

from harness.live.driver.checkpoints.checkpoint_file import Checkpoint
from harness.live.driver.control import Control
from harness.live.driver.repairs.emulated_nodes import EmulatedNodes
from harness.live.driver.repairs.standstill import Limits
from harness.live.driver.setting_changes import SettingChanges
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.driver.view.status import JobStatus
from harness.live.processes.runtime import Processes
from harness.live.worker.spec import Spec
from simulators import jobs
from simulators.engine import preparation
from tuners import policies
from tuners.actions import (
    Action,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Reconfigure,
    Rejected,
    Run,
    Status,
    SyncPolicy,
    Window,
)
from tuners.playing.system import (
    Handlers,
    branch_of,
    check_nodes,
    check_not_last,
    check_other_branch,
    check_running,
    handler_of,
    policy_of,
)

__all__ = ["LiveSystem"]

T = TypeVar("T")

_BUSY_SECONDS = 0.5
"""Longest wait of a person for the status of the job: longer than the driver mostly takes for its turn."""


class LiveSystem:
    """One job on its processes, until it is closed. Raises ValueError for a job that cannot run on real processes."""

    def __init__(
        self,
        spec: Spec,
        processes: Processes,
        begun: Checkpoint | None = None,
        keep: Callable[[Checkpoint], None] = lambda _: None,
        installed: Mapping[int, SyncPolicy] = MappingProxyType({}),
        limits: Limits = Limits(),  # noqa: B008 - it is immutable
        say: Callable[[str], None] = lambda _: None,
        *,
        emulates: bool = False,
    ) -> None:
        """`keep` is called with every checkpoint of the job; another system continues from it if it is given as `begun`.
        `installed` are the policies that the tuner had installed by then, by the number of the exchange: a checkpoint has no
        code. `say` is called with what the processes are at while they start. With `emulates`, nodes come, go and slow down
        as the scenario says."""
        self.job, self._spec = spec.job, spec
        start = spec.job.start
        try:
            spec.job.space.check(start)
            spec.check(start)
            policy = policies.of_setting(start)
            emulated = EmulatedNodes(processes, spec) if emulates else None
            if emulated is not None:
                emulated.act(0.0 if begun is None else begun.seconds)
                check_nodes(start, spec.job, emulated.nodes if begun is None else processes.nodes)
        except Rejected as error:
            raise ValueError(f"Cannot deploy {spec.name}: {error}") from error
        self._control = Control(spec, emulated or processes, policy, begun, keep, installed, limits, say, emulated)
        self._view = self._control.view
        self._settings = SettingChanges(spec, self._control)
        self._latest_status: JobStatus | None = None
        self._refused = "", ""  # the latest action's reason, and why it was refused; empty where it was not

    @property
    def now(self) -> float:
        """Seconds since the job began; constant once the job has ended."""
        return self._view.now

    @property
    def status(self) -> Status:
        """The target is reached once any branch has reached it; the job runs while any branch runs."""
        return self._view.status

    @property
    def control(self) -> Control:
        """The running job, in more detail than a tuner sees."""
        return self._control

    def job_status(self) -> JobStatus:
        """The status of the job now, to be shown to a person."""
        with self._control.news:
            self._latest_status = self._view.job_status(self._control.losses.away)
            return self._latest_status

    def latest_status(self) -> JobStatus:
        """The same; while the driver waits for the coordinator, the one before, with the events up to now: that the
        coordinator has died, for example. No push counts then."""
        latest = self._latest_status
        if latest is None:
            return self.job_status()
        if self._control.news.acquire(timeout=_BUSY_SECONDS):
            try:
                return self.job_status()
            finally:
                self._control.news.release()
        return replace(latest, seconds=self.now, clocks_per_second=0.0, events=tuple(self._view.events))

    @property
    def waits_for(self) -> tuple[str, ...]:
        """Lost nodes, while the repair of a loss is in progress; a checkpoint waits for its end."""
        with self._control.news:
            return tuple(sorted(self._control.losses.away)) if self._control.procedure is not None else ()

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, where it cannot be done; RuntimeError where the job is
        broken for good."""
        handlers: Handlers = {
            Run: self._run,
            Reconfigure: self._settings.reconfigure,
            Install: self._settings.install,
            Fork: self._fork,
            Free: self._free,
            Evaluate: self._evaluate,
        }
        handler = handler_of(action, handlers)
        with self._control.news:
            self._control.wait(lambda: True)
            reason = getattr(action, "reason", "")
            if reason and reason != self._refused[0]:
                self._view.log_event(f"tuner: {reason}")
            try:
                answer = handler(action)
            except Rejected as error:
                self._view.performed += 1
                if self._refused != (reason, str(error)):  # a tuner may ask again and again
                    self._refused = reason, str(error)
                    self._view.log_event(f"refused: {error}")
                raise
            self._refused = "", ""
            self._view.performed += 1
            return answer

    def checkpoint(self) -> None:
        """Stop training for good and make a last checkpoint. Raises OSError if it cannot be written."""
        with self._control.news:
            self._control.checkpoint()

    def close(self) -> None:
        """Stop watching the job. Its processes go on; they are ended where they were started."""
        self._control.close()

    def __enter__(self) -> LiveSystem:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------------- run

    def _run(self, action: Run) -> Window:
        branch = branch_of(self._view.branches, action.branch)
        if not len(branch.unseen_rows):
            check_running(f"run branch {action.branch}", branch.status)
        reconfiguration = self._control.reconfiguration
        other = reconfiguration is not None and reconfiguration.branch != action.branch
        check_other_branch(action.branch, is_reconfigured=other)
        if not self._control.is_over:
            self._control.switch_to(action.branch)
        goal = math.inf if action.clocks is None else branch.clocks + action.clocks
        limit = min(self.job.budget_seconds, math.inf if action.seconds is None else self.now + action.seconds)
        self._control.wait(lambda: branch.clocks >= goal or branch.status != "running", limit)
        # The driver's clock may be at the budget a little before the next report is, by which `is_over` judges.
        waited_to_budget = limit == self.job.budget_seconds and branch.clocks < goal and branch.status == "running"
        if self._control.is_over or waited_to_budget:
            self._control.wait_for_last_costs()
        return self._window(branch, goal, limit)

    def _window(self, branch: DriverBranch, goal: float, limit: float) -> Window:
        """A window of the unseen pushes: to the push at which the clocks reach `goal`, else to the time `limit`; all pushes
        once the branch has ended."""
        moments = branch.unseen_rows[:, 0]
        rows, end = len(moments), self.now
        if branch.clocks >= goal:
            rows -= int(branch.clocks - goal)
            end = float(moments[rows - 1])
        elif branch.status == "running":
            rows, end = int(np.searchsorted(moments, limit, side="right")), limit
        events, self._control.losses.node_events = tuple(self._control.losses.node_events), []
        loads = preparation.loads(self._spec.scenario.cluster.nodes, branch.setting)
        return branch.window(
            self.job,
            rows=rows,
            # `now` lags behind the coordinator's clock by the time of an answer; no window ends before its last push.
            end_seconds=max((end, *map(float, moments[rows - 1 : rows]))),
            available=self._control.losses.available,
            events=events,
            samples={w: sum(row) for w, row in loads.items()},
            rows_of_blocks=partial(self._spec.rows_of_pushes, branch.setting),
        )

    # ------------------------------------------------------------------------------------------------------------ branches

    def _fork(self, action: Fork) -> int:
        branches = self._view.branches
        parent = branch_of(branches, action.branch)
        self._settings.check_idle(parent, f"fork branch {action.branch}")
        setting = self._settings.admitted(action.setting or parent.setting, parent)
        policy = policy_of(setting, parent.setting, parent.policy)
        jobs.check_memory(self.job, [setting, *(branch.setting for branch in branches.values())])
        number = self._control.runtime.coordinator.fork(action.branch, setting, policy, testing=action.testing)
        branches[number] = parent.fork(action.branch, setting, policy, self.now, testing=action.testing)
        branches[number].setting_before_loss = parent.whole(setting, self.job.space)
        return number

    def _free(self, action: Free) -> None:
        control = self._control
        branch = branch_of(self._view.branches, action.branch)
        check_not_last(self._view.branches, action.branch)
        if control.reconfiguration is not None and control.reconfiguration.branch == action.branch:
            self._settings.check_idle(branch, f"free branch {action.branch}")
        self._settings.wait_until_idle(f"free branch {action.branch}")  # a procedure may use this branch
        if self._view.running == action.branch:
            control.runtime.coordinator.rest()
            self._view.running = None
        control.runtime.coordinator.free(action.branch)
        del self._view.branches[action.branch]

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch_of(self._view.branches, action.branch)
        control, request = self._control, 0

        def over() -> bool:
            return request in self._view.measured or request <= control.runtime.latest.cancelled_requests

        # A coordinator that died, or was rolled back, has forgotten the request: ask again.
        while request not in self._view.measured:
            request = control.runtime.coordinator.evaluate(action.branch)
            control.wait(over, self.job.budget_seconds)
            if not over():
                raise Rejected(f"Cannot evaluate branch {action.branch}: the budget ended before that was done.")
        return self._view.measured.pop(request)
