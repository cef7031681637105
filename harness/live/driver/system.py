"""A System of real processes: training goes on while a tuner thinks, and its next window tells of it.

A thread watches the job: it takes in what the coordinator says, carries changes on, and acts on losses. `perform` asks and
waits. All branches are on the same servers, those of the one that trains; another's setting is brought about when it runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from types import TracebackType
from typing import TypeVar

import numpy as np

from harness.live.deploy.progress_view import Glimpse, setting_words
from harness.live.driver.branch_view import Sight
from harness.live.driver.checkpoint_file import Checkpoint
from harness.live.driver.control import Control
from harness.live.driver.reconfiguration import Change
from harness.live.processes.runtime import Procedure, Processes, peers
from harness.live.worker.spec import Spec
from simulators import jobs
from simulators.engine import inputs
from simulators.engine.optimizers import slots
from simulators.reconfiguration import plan
from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Status,
    SyncPolicy,
    Window,
)
from tuners.system import (
    Handlers,
    branch_of,
    check_no_reconfiguration,
    check_nodes,
    check_not_last,
    check_other_branch,
    check_running,
    handler_of,
    method_of,
    policy_of,
)

__all__ = ["LiveSystem"]

T = TypeVar("T")


class LiveSystem:
    """One job on its processes, watched until it is closed. Raises ValueError for a job that cannot be played live."""

    def __init__(
        self,
        spec: Spec,
        processes: Processes,
        begun: Checkpoint | None = None,
        keep: Callable[[Checkpoint], None] = lambda _: None,
    ) -> None:
        """`keep` is given what the job can go on from as `begun`, in another system: now and then, and by `checkpoint`."""
        self.job, self._spec = spec.job, spec
        start = spec.job.start
        try:
            spec.job.space.check(start)
            spec.check(start)
            policy = policies.named(start.policy, start.staleness)
        except Rejected as error:
            raise ValueError(f"Cannot deploy {spec.name}: {error}") from error
        self._control = Control(spec, processes, policy, begun, keep)

    @property
    def now(self) -> float:
        """Seconds since the job began; it stands still once the job has ended."""
        return self._control.now

    @property
    def status(self) -> Status:
        """Done when any branch is; lost when every branch is."""
        return self._control.status

    def glimpse(self) -> Glimpse:
        """The job just now, for whoever watches."""
        return self._control.glimpse()

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, where it cannot be done; RuntimeError where the job is
        broken for good."""
        handlers: Handlers = {
            Run: self._run,
            Reconfigure: self._reconfigure,
            Install: self._install,
            Fork: self._fork,
            Free: self._free,
            Evaluate: self._evaluate,
        }
        handler = handler_of(action, handlers)
        with self._control.news:
            self._control.wait(lambda: True)
            try:
                answer = handler(action)
            except Rejected:
                self._control.performed += 1
                raise
            self._control.performed += 1
            return answer

    def checkpoint(self) -> None:
        """Have everything kept as it is. Nobody trains from now on."""
        with self._control.news:
            self._control.checkpoint()

    def close(self) -> None:
        """End the watching; the processes are whoever started them's to end."""
        self._control.close()

    def __enter__(self) -> LiveSystem:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.close()

    # ----------------------------------------------------------------------------------------------------------------- run

    def _run(self, action: Run) -> Window:
        sight = branch_of(self._control.sights, action.branch)
        if not len(sight.unseen):
            check_running(f"run branch {action.branch}", sight.status)
        other = self._control.change is not None and self._control.change.branch != action.branch
        check_other_branch(action.branch, is_reconfigured=other)
        self._switch_to(action.branch)
        goal = math.inf if action.clocks is None else sight.clocks + action.clocks
        limit = min(self.job.budget_seconds, math.inf if action.seconds is None else self.now + action.seconds)
        self._control.wait(lambda: sight.clocks >= goal or sight.status != "running", limit)
        return self._window(sight, goal, limit)

    def _window(self, sight: Sight, goal: float, limit: float) -> Window:
        """What nobody has seen: to the push that brings the clocks to `goal`, or to `limit`; all once the job is over."""
        moments = sight.unseen[:, 0]
        rows, end = len(moments), self.now
        if sight.clocks >= goal:
            rows -= int(sight.clocks - goal)
            end = float(moments[rows - 1])
        elif sight.status == "running":
            rows, end = int(np.searchsorted(moments, limit, side="right")), limit
        events, self._control.losses.events = tuple(self._control.losses.events), []
        return sight.window(
            self.job,
            rows=rows,
            end_seconds=max((end, *map(float, moments[rows - 1 : rows]))),
            available=self._control.losses.present,
            events=events,
            samples={w: sum(row) for w, row in inputs.loads(self._spec.scenario.cluster.nodes, sight.setting).items()},
        )

    def _switch_to(self, number: int) -> None:
        """Train that branch and no other, with the model and the processes where its setting has them."""
        sight = self._control.sights[number]
        if number == self._control.running or sight.status != "running":
            return
        self._control.runtime.call("rest")
        self._control.running = None
        self._control.do(lambda: self._brought(sight.setting))
        self._control.runtime.call("put", number, sight.setting)  # losses may have changed it since the branch ran last
        self._control.runtime.call("run", number)
        self._control.running, sight.since_seconds = number, self.now

    def _brought(self, setting: Setting) -> Procedure:
        runtime = self._control.runtime
        runtime.start(peers(setting))
        yield from runtime.joined(peers(setting))
        if runtime.placed != (setting.servers, setting.shares()[1]):
            yield from runtime.place(setting, at_once=self._spec.layout.count)
            yield from runtime.settled()

    # ----------------------------------------------------------------------------------------------- settings, policies

    def _reconfigure(self, action: Reconfigure) -> Cost:
        number, setting = action.branch, action.setting
        sight = branch_of(self._control.sights, number)
        method = method_of(action, self.job)
        self._check_free(sight, f"reconfigure branch {number}")
        self._check(setting)
        policy = policy_of(setting, sight.setting, sight.policy)
        sight.before = None
        if plan.in_place(sight.setting, setting, method):
            self._put(number, setting, policy)
            return Cost(seconds=0.0, stall_seconds=0.0)
        self._switch_to(number)
        change = Change(
            self._control.runtime,
            number,
            sight.setting,
            setting,
            None if policy is sight.policy else policy,
            method,
            kept={name for n, other in self._control.sights.items() if n != number for name in peers(other.setting)},
            block_bytes=self._block_bytes(),
            blocks=self._spec.layout.count,
            blocks_in_flight=self._spec.scenario.costs.blocks_in_flight,
            waited=action.wait,
        )
        self._control.begin(change)
        if not action.wait:
            return Cost(seconds=0.0, stall_seconds=0.0)
        self._control.wait(lambda: self._control.change is not change)
        return change.cost()

    def _install(self, action: Install) -> None:
        sight = branch_of(self._control.sights, action.branch)
        self._check_free(sight, f"install a policy in branch {action.branch}")
        self._put(action.branch, sight.setting, action.policy)

    def _put(self, number: int, setting: Setting, policy: SyncPolicy) -> None:
        sight = self._control.sights[number]
        self._control.runtime.call("put", number, setting, None if policy is sight.policy else policy)
        if setting != sight.setting:
            self._control.happened(f"set: {setting_words(setting)}")
        elif policy is not sight.policy:
            self._control.happened(f"policy {policy.name} is installed")
        sight.setting, sight.policy = setting, policy

    def _block_bytes(self) -> float:
        layout = self._spec.layout
        return 4.0 * layout.size / layout.count * (1 + slots(self._spec.workload.optimizer)) * len(self._control.sights)

    def _check(self, setting: Setting) -> None:
        """Raise Rejected where the job cannot run under `setting`, here and now."""
        self.job.space.check(setting)
        self._spec.check(setting)
        check_nodes(setting, self.job, self._control.losses.present)

    def _check_free(self, sight: Sight, wanted: str) -> None:
        """Raise Rejected during a reconfiguration, and where the branch cannot go on as it is; a loss is made good first."""
        check_no_reconfiguration(wanted, self._control.change)
        self._control.wait_for_hands()
        check_running(wanted, sight.status)

    # ------------------------------------------------------------------------------------------------------------ branches

    def _fork(self, action: Fork) -> int:
        parent = branch_of(self._control.sights, action.branch)
        self._check_free(parent, f"fork branch {action.branch}")
        setting = parent.setting if action.setting is None else action.setting
        self._check(setting)
        policy = policy_of(setting, parent.setting, parent.policy)
        jobs.check_memory(self.job, [setting, *(sight.setting for sight in self._control.sights.values())])
        number: int = self._control.runtime.call("fork", action.branch, setting, policy, testing=action.testing)
        self._control.sights[number] = parent.fork(action.branch, setting, policy, self.now, testing=action.testing)
        return number

    def _free(self, action: Free) -> None:
        branch_of(self._control.sights, action.branch)
        check_not_last(self._control.sights, action.branch)
        if self._control.change is not None and self._control.change.branch == action.branch:
            self._check_free(self._control.sights[action.branch], f"free branch {action.branch}")
        self._control.wait_for_hands()  # they may be at work on this branch
        if self._control.running == action.branch:
            self._control.runtime.call("rest")
            self._control.running = None
        self._control.runtime.call("free", action.branch)
        del self._control.sights[action.branch]

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch_of(self._control.sights, action.branch)
        control, request = self._control, 0

        def over() -> bool:
            return request in control.measured or request <= control.runtime.seen.forgotten

        while request not in control.measured:  # a coordinator that died, or went back, is to be asked anew
            request = control.runtime.call("evaluate", action.branch)
            control.wait(over)
        return control.measured.pop(request)
