"""A System in simulated time: carries out tuners' actions. `TrainingTime` lets the time pass in which branches train."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np

from simulators import jobs, windows
from simulators.branch import Branch, JobContext, PreparedSetting, first_branch
from simulators.branch_costs import copy_bytes, noise_seconds
from simulators.cluster import trace_driven
from simulators.cluster.conditions import check as check_conditions
from simulators.engine.preparation import compute_times, loads
from simulators.evaluation import evaluation, gradient_noise
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.costs import check_costs
from simulators.reconfiguration.reconfiguration import Load, Reconfiguration
from simulators.training_time import FOR_EVER, TrainingTime
from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    GradientNoise,
    Install,
    MeasureNoise,
    Method,
    Reconfigure,
    Rejected,
    Run,
    Status,
    Window,
)
from tuners.playing.system import (
    Handlers,
    admitted,
    branch_of,
    check_installs,
    check_no_reconfiguration,
    check_nodes,
    check_not_last,
    check_other_branch,
    check_running,
    handler_of,
    method_of,
    policy_of,
)

__all__ = ["SimulatedSystem"]

T = TypeVar("T")


class SimulatedSystem:
    """A parameter server in simulated time. Raises ValueError where scenario, cluster and workload do not fit together."""

    def __init__(self, spec: jobs.JobSpec) -> None:
        workload, start, seed, nodes = spec.workload, spec.start, spec.seed, spec.cluster.nodes
        check_conditions(spec.conditions, tuple(n for n, _ in nodes))
        check_costs(spec.costs)
        conditions, factors = trace_driven.expand_replay(spec.conditions, nodes, spec.budget_seconds, seed)
        self._conditions, self._costs = conditions, spec.costs
        self._control = ControlPlane(spec.cluster, conditions)
        self._reported_events = 0  # number of node events that windows have reported
        self.job = jobs.job(spec)
        blocks = workload.demand.data_blocks or max(len(nodes), workload.samples // workload.batch_size)
        block_bytes = workload.demand.sample_bytes * workload.samples / blocks
        self._load = Load(
            self.job.model_bytes, blocks, block_bytes, has_tables=self.job.blocks > 0, hottest=self.job.hottest
        )
        try:
            self.job.space.check(start)
            check_nodes(start, self.job, self._control.available)
            data, parameters = jobs.drawn(workload, seed, len(start.workers))
            self._context = JobContext(
                spec.cluster, workload, conditions, self.job, data, spec.evaluate_clocks, seed, factors
            )
            policy = policies.of_setting(start)
            first = first_branch(self._context, start, policy, self._control.disturbance, parameters)
        except Rejected as error:
            raise ValueError(f"Scenario {spec.name!r} cannot start: {error}") from error
        self._branches, self._next_branch = {0: first}, 1
        self._time = TrainingTime(first, self._control, self._load, spec.costs, spec.budget_seconds)

    @property
    def now(self) -> float:
        """Simulated seconds since the job began."""
        return self._time.now

    @property
    def branches(self) -> Mapping[int, Branch]:
        """The branches that are not freed, by number: their parameters and records, which no tuner sees. Only to read."""
        return MappingProxyType(self._branches)

    @property
    def status(self) -> Status:
        """Done when any branch is; lost when every branch is."""
        found = [b.status for b in self._branches.values()]
        if "target" in found:
            return "target"
        return "running" if "running" in found else found[-1]

    def begin(self) -> None:
        """Put in force the conditions that hold from the beginning, as the first `Run` does. For callers that train
        `branches` in the engine themselves, without `perform`."""
        self._time.begin_conditions()

    def perform(self, action: Action[T]) -> T:
        """Carry out `action`. Raises Rejected, and changes nothing, where it cannot be done."""
        handlers: Handlers = {
            Run: self._run,
            Reconfigure: self._reconfigure,
            Install: self._install,
            Fork: self._fork,
            Free: self._free,
            Evaluate: self._evaluate,
            MeasureNoise: self._measure_noise,
        }
        handler = handler_of(action, handlers)
        if self._conditions.thinking_seconds > 0:
            self._think(action)
        return handler(action)

    # ------------------------------------------------------------------------------------------------------------ run

    def _run(self, action: Run) -> Window:
        """Train a branch for the window that the action asks for."""
        branch = branch_of(self._branches, action.branch)
        if not len(branch.unreported.records):
            check_running(f"run branch {action.branch}", branch.status)
        other = self._time.reconfiguration is not None and self._time.reconfiguration.branch is not branch
        check_other_branch(action.branch, is_reconfigured=other)
        self._time.switch_to(branch)
        self._time.bring_to_now(branch)
        start = self._time.now
        limit = min(self.job.budget_seconds, np.inf if action.seconds is None else start + action.seconds)
        table = self._time.train(branch, FOR_EVER if action.clocks is None else action.clocks, limit)
        report = branch.report()
        table = np.concatenate([report.records, table])
        events, self._reported_events = tuple(self._control.events[self._reported_events :]), len(self._control.events)
        nodes = self._context.cluster.nodes
        return windows.window(
            self.job,
            branch.setting,
            table,
            start_seconds=start - report.seconds,
            end_seconds=self._time.now,
            pushes_before=int(branch.state.clock.pushes) - len(table),
            status=branch.status,
            devices=compute_times(nodes, self._context.workload.demand, branch.setting),
            samples={w: branch.setting.steps_of(w) * sum(row) for w, row in loads(nodes, branch.setting).items()},
            available=self._control.available,
            events=events,
            changes=tuple(report.changes),
            served=report.served,
            blocks=tuple(map(float, report.rows)),
        )

    def _think(self, action: Action[Any]) -> None:
        """While a tuner thinks, training goes on, and the next window reports what happened meanwhile: of the branch that is
        being reconfigured, else of the one that it is going to run, else of the one that trained last.

        No other branch is trained because it is forked, freed, evaluated or changed: trials from one parent would begin from
        different models.
        """
        branch, seconds = self._time.latest, self._conditions.thinking_seconds
        if self._time.reconfiguration is not None:
            branch = self._time.reconfiguration.branch
        elif isinstance(action, Run):
            branch = self._branches.get(action.branch, branch)
        if branch.status == "running" and branch in self._branches.values():
            self._time.switch_to(branch)
            self._time.bring_to_now(branch)
            # Not beyond the budget: the job is over by then, and what was trained later would count.
            until = min(self._time.now + seconds, max(self.job.budget_seconds, self._time.now))
            self._time.train_unreported(branch, until)
        elif self.status == "running":
            self._time.pass_seconds(seconds)

    # ----------------------------------------------------------------------------------------------- settings, policies

    def _reconfigure(self, action: Reconfigure) -> Cost:
        branch = branch_of(self._branches, action.branch)
        method = method_of(action, self.job)
        self._check_free(branch, f"reconfigure branch {action.branch}")
        setting = admitted(action.setting, branch.setting, self.job, self._control.available)
        prepared = self._context.prepare(setting, policy_of(setting, branch.setting, branch.policy))
        begun = self._begin(branch, prepared, method, waited=action.wait)
        if begun is None or not action.wait:
            return Cost(seconds=0.0, stall_seconds=0.0)
        # Where no worker trains anyway, the reconfiguration may end after the budget.
        limit = np.inf if begun.plan.quiescent else max(self.job.budget_seconds, self._time.now)
        self._time.train_unreported(branch, limit, change_only=True)
        return (
            self._time.waited_cost if self._time.reconfiguration is None else self._time.reconfiguration.cost(self._time.now)
        )

    def _begin(self, branch: Branch, prepared: PreparedSetting, method: Method, *, waited: bool) -> Reconfiguration | None:
        """Begin to put `branch` under a setting and a policy; None where that has happened in place.

        In place, mini-batches in progress continue, and a new policy releases those that wait.
        """
        reconfiguration = Reconfiguration(
            branch, self._control, self._load, self._costs, target=prepared, method=method, waited=waited
        )
        if reconfiguration.in_place:
            self._time.resume(branch)
            branch.change_in_place(prepared, self._control.disturbance, self._time.now)
            return None
        self._time.begin(reconfiguration)
        return reconfiguration

    def _install(self, action: Install) -> None:
        branch = branch_of(self._branches, action.branch)
        check_installs(action.policy, self.job)
        self._check_free(branch, f"install a policy in branch {action.branch}")
        prepared = self._context.prepare(branch.setting, action.policy)  # before anything changes: it may be Rejected
        branch.check_group(prepared)
        self._time.bring_to_now(branch)
        branch.change_in_place(prepared, self._control.disturbance, self._time.now)

    def _check_free(self, branch: Branch, wanted: str) -> None:
        """Raise Rejected during a reconfiguration, and where `branch` has ended or must first recover from a loss."""
        check_no_reconfiguration(wanted, self._time.reconfiguration)
        check_running(wanted, branch.status)
        if lost := self._time.lost(branch):
            raise Rejected(f"Cannot {wanted}: it has lost {', '.join(sorted(lost))}; run it, and it goes on without.")

    # -------------------------------------------------------------------------------------------------------- branches

    def _fork(self, action: Fork) -> int:
        parent = branch_of(self._branches, action.branch)
        self._check_free(parent, f"fork branch {action.branch}")
        setting = admitted(action.setting or parent.setting, parent.setting, self.job, self._control.available)
        prepared = self._context.prepare(setting, policy_of(setting, parent.setting, parent.policy))
        jobs.check_memory(self.job, [setting, *(b.setting for b in self._branches.values())])
        self._time.bring_to_now(parent)
        self._time.pass_seconds(copy_bytes(parent) / self._costs.fork_bytes_per_second)
        child = parent.snapshot(testing=action.testing)
        number, self._next_branch = self._next_branch, self._next_branch + 1
        self._branches[number] = child
        if self._begin(child, prepared, "checkpoint", waited=True) is not None:
            self._time.train_unreported(child, np.inf, change_only=True)
        return number

    def _free(self, action: Free) -> None:
        branch = branch_of(self._branches, action.branch)
        check_not_last(self._branches, action.branch)
        if self._time.reconfiguration is not None and self._time.reconfiguration.branch is branch:
            self._check_free(branch, f"free branch {action.branch}")
        del self._branches[action.branch]
        self._time.forget(branch)

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch = branch_of(self._branches, action.branch)
        check_no_reconfiguration(f"evaluate branch {action.branch}", self._time.reconfiguration)
        found = evaluation(branch, self._time.now)
        self._time.pass_seconds(self.job.evaluate_seconds)
        target = self.job.target
        if branch.status == "running" and not target.counts and target.reached(found.loss, found.accuracy):
            branch.end("target")
        return found

    def _measure_noise(self, action: MeasureNoise) -> GradientNoise:
        branch = branch_of(self._branches, action.branch)
        check_no_reconfiguration(f"measure the noise of branch {action.branch}", self._time.reconfiguration)
        if branch.inputs.placement:
            raise Rejected("Cannot measure the noise of sparse gradients: mini-batches touch different rows of the tables.")
        found = gradient_noise(branch, self._time.now, action.batches)
        self._time.pass_seconds(noise_seconds(branch, action.batches))
        return found
