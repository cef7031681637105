"""A System in simulated time: the engine trains, the control plane acts, and tuners' actions are carried out in between.

The engine (`simulators.engine`) and the control plane (SimPy) each have a clock. `_train` is where they meet: the engine
trains up to the control plane's next event, then the control plane acts, then the branch is told what has changed.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from simulators import jobs, windows
from simulators.branch import NO_RECORDS, Branch, JobContext, PreparedSetting, first_branch
from simulators.branch_costs import copy_bytes, noise_seconds, refill_seconds
from simulators.cluster import trace_driven
from simulators.cluster.conditions import check as check_conditions
from simulators.engine.inputs import compute_times, loads
from simulators.evaluation import evaluation, gradient_noise
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.costs import check_costs
from simulators.reconfiguration.reconfiguration import Load, Reconfiguration
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
from tuners.system import (
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

_ROWS = 512  # of pushes per call of the engine
_FOR_EVER = 2**31 - 1  # clocks


class SimulatedSystem:
    """A parameter server in simulated time. Raises ValueError where scenario, cluster and workload do not fit together."""

    def __init__(self, spec: jobs.JobSpec) -> None:
        workload, start, seed, nodes = spec.workload, spec.start, spec.seed, spec.cluster.nodes
        check_conditions(spec.conditions, tuple(n for n, _ in nodes))
        check_costs(spec.costs)
        conditions, factors = trace_driven.expand_replay(spec.conditions, nodes, spec.budget_seconds, seed)
        self._conditions, self._costs = conditions, spec.costs
        self._control = ControlPlane(spec.cluster, conditions)
        self._now = 0.0
        self._reported_events = 0  # events of nodes that windows have told of
        self._reconfiguration: Reconfiguration | None = None  # in progress; one at a time
        self._waited_cost = Cost(seconds=0.0, stall_seconds=0.0)  # of the last one that was waited for
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
            self._branches = {0: first_branch(self._context, start, policy, self._control.disturbance, parameters)}
        except Rejected as error:
            raise ValueError(f"Scenario {spec.name!r} cannot start: {error}") from error
        self._next_branch = 1
        self._cached: Branch | None = self._branches[0]  # its model is in the workers' caches
        self._latest = self._branches[0]  # to train

    @property
    def now(self) -> float:
        """Simulated seconds since the job began."""
        return self._now

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
        branch = branch_of(self._branches, action.branch)
        if not len(branch.unreported):
            check_running(f"run branch {action.branch}", branch.status)
        other = self._reconfiguration is not None and self._reconfiguration.branch is not branch
        check_other_branch(action.branch, is_reconfigured=other)
        self._switch_to(branch)
        self._bring_to_now(branch)
        start = self._now
        limit = min(self.job.budget_seconds, np.inf if action.seconds is None else start + action.seconds)
        table = self._train(branch, _FOR_EVER if action.clocks is None else action.clocks, limit)
        table, branch.unreported = np.concatenate([branch.unreported, table]), NO_RECORDS
        start, branch.unreported_seconds = start - branch.unreported_seconds, 0.0
        events, self._reported_events = tuple(self._control.events[self._reported_events :]), len(self._control.events)
        changes, branch.changes = tuple(branch.changes), []
        served, branch.served = branch.served, np.zeros_like(branch.served)
        touched, branch.touched = tuple(map(float, branch.touched)), np.zeros_like(branch.touched)
        nodes = self._context.cluster.nodes
        return windows.window(
            self.job,
            branch.setting,
            table,
            start_seconds=start,
            end_seconds=self._now,
            pushes_before=int(branch.state.clock.pushes) - len(table),
            status=branch.status,
            devices=compute_times(nodes, self._context.workload.demand, branch.setting),
            samples={w: branch.setting.steps_of(w) * sum(row) for w, row in loads(nodes, branch.setting).items()},
            available=self._control.available,
            events=events,
            changes=changes,
            served=served,
            blocks=touched,
        )

    def _think(self, action: Action[Any]) -> None:
        """While a tuner thinks, the branch of its action trains on; the next window reports what happened meanwhile."""
        branch = self._branches.get(getattr(action, "branch", -1))
        other = self._reconfiguration is not None and self._reconfiguration.branch is not branch
        if branch is not None and branch.status == "running" and not other:
            self._switch_to(branch)
            self._bring_to_now(branch)
            self._train_unreported(branch, self._now + self._conditions.thinking_seconds)

    def _train_unreported(self, branch: Branch, limit: float, *, change_only: bool = False) -> None:
        """Train outside of a window, to `limit` or, with `change_only`, to the end of the reconfiguration; the next window
        reports it."""
        start = self._now
        stalls = self._reconfiguration is not None and self._reconfiguration.quiescent
        table = self._train(branch, _FOR_EVER, limit, change_only=change_only)
        branch.unreported = np.concatenate([branch.unreported, table])
        # A tuner has been told the stall that it waited for as a cost, so the window does not include it, unless the window
        # begins before the stall because of earlier training.
        if not (change_only and stalls) or branch.unreported_seconds > 0:
            branch.unreported_seconds += self._now - start

    def _train(self, branch: Branch, clocks: int, limit: float, *, change_only: bool = False) -> NDArray[np.float64]:
        """Train `branch` for so many clocks, to `limit` or, with `change_only`, to the end of the reconfiguration. The
        control plane acts meanwhile. Returns the records, [n, 11]."""
        tables, left = [NO_RECORDS], clocks
        while left > 0 and branch.status == "running" and not (change_only and self._reconfiguration is None):
            due = branch.checkpoint_due_seconds if self._reconfiguration is None else np.inf
            until = min(self._control.next_seconds, limit, due)
            most = min(left, _ROWS)
            table = NO_RECORDS
            if self._reconfiguration is None:
                table = branch.advance(most, until, _ROWS)
            elif self._reconfiguration.trains:
                # Steps that depend on pushes must be told of each at its time: one push per call of the engine, then.
                most = 1 if self._reconfiguration.follows_pushes else most
                table = branch.advance(most, until, _ROWS)
            tables.append(table)
            left -= len(table)
            # The engine stopped for a reason of its own, before `until`: so many pushes, or the end of the job.
            if len(table) == most or branch.status != "running":
                self._now = max(self._now, float(branch.state.clock.seconds))
                if self._reconfiguration is not None:
                    self._progress(branch, int(table[-1, 1]) if len(table) else None)
                continue
            self._now = max(self._now, until)  # the limit may be past: a stall can end after the budget
            if until >= limit:
                break
            # The engine stopped at its last event before `until`. Progress up to now is made at the old rates, so it must be
            # computed before the control plane changes them.
            branch.catch_up(self._now)
            if due < self._control.next_seconds:
                self._checkpoint(branch)
            else:
                self._control.act()
            self._progress(branch, None)
        over = branch.status != "running" or self._now >= self.job.budget_seconds
        if over and self._reconfiguration is not None:  # what it has cost by now is told with the job's last window
            self._reconfiguration.cancel()
            self._end_reconfiguration()
        branch.until_seconds = self._now
        return np.concatenate(tables)

    def _checkpoint(self, branch: Branch) -> None:
        """Write a checkpoint of `branch`, while all workers pause. Without effect where a server is lost before its end."""
        written, branch.until_seconds = branch.checkpoint(), self._now
        seconds = self._load.model_bytes / self._costs.checkpoint_bytes_per_second
        self._pass_seconds(seconds)
        self._resume(branch)
        complete = not self._lost(branch) & frozenset(branch.setting.servers)
        branch.keep(written if complete else None, self._now)
        branch.changes.append(
            Cost(seconds=seconds, stall_seconds=seconds, bytes_moved=self._load.model_bytes, steps=("checkpoint",))
        )

    def _progress(self, branch: Branch, pushed: int | None) -> None:
        """Tell the reconfiguration in progress which worker has pushed, and `branch` what the control plane has done."""
        if self._reconfiguration is not None:
            self._reconfiguration.progress(None if pushed is None else self.job.nodes[pushed].name, self._now)
            if self._reconfiguration.over:
                self._end_reconfiguration()
        self._apply_effects(branch)
        if lost := self._lost(branch):
            self._lose(branch, lost)

    def _apply_effects(self, branch: Branch) -> None:
        if self._reconfiguration is None:
            branch.disturb(self._control.disturbance)
        else:
            self._reconfiguration.apply_effects(self._now)

    def _bring_to_now(self, branch: Branch) -> None:
        """Resume a branch that has not trained for a while; if nodes are lost meanwhile, begin to recover."""
        if self._reconfiguration is None and not np.array_equal(branch.inputs.slowdown, self._control.disturbance.slowdown):
            branch.catch_up(branch.until_seconds)  # what was done until then is done at the old speed
        self._resume(branch)
        self._apply_effects(branch)
        if lost := self._lost(branch):
            branch.catch_up(self._now)
            self._lose(branch, lost)

    def _resume(self, branch: Branch) -> None:
        """Shift a branch's clock to now; another one may have trained last."""
        branch.resume_at(self._now, self._latest)
        self._latest = branch

    # ---------------------------------------------------------------------------------------------------------- nodes

    def _lost(self, branch: Branch) -> frozenset[str]:
        """Nodes that `branch` uses, or needs for its reconfiguration, and that are gone."""
        if self._reconfiguration is not None and self._reconfiguration.branch is branch:
            return self._reconfiguration.lost_nodes
        return frozenset((*branch.setting.workers, *branch.setting.servers)) - self._control.present

    def _lose(self, branch: Branch, lost: frozenset[str]) -> None:
        """Continue on the surviving nodes. A reconfiguration in progress is completed without the lost ones, or rolled back
        where it needs them; where no setting can go on, it waits for nodes that join."""
        reconfiguration = self._reconfiguration or Reconfiguration(branch, self._control, self._load, self._costs)
        if reconfiguration.recover(lost, self._now):
            self._reconfiguration = reconfiguration
            self._apply_effects(branch)
        else:
            branch.mark_deadlocked()
            self._end_reconfiguration()

    def _end_reconfiguration(self) -> None:
        ended, self._reconfiguration = self._reconfiguration, None
        if ended is not None and ended.waited:
            self._waited_cost = ended.cost(self._now)
        elif ended is not None:
            ended.branch.changes.append(ended.cost(self._now))

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
        limit = np.inf if begun.plan.quiescent else max(self.job.budget_seconds, self._now)
        self._train_unreported(branch, limit, change_only=True)
        return self._waited_cost if self._reconfiguration is None else self._reconfiguration.cost(self._now)

    def _install(self, action: Install) -> None:
        branch = branch_of(self._branches, action.branch)
        check_installs(action.policy, self.job)
        self._check_free(branch, f"install a policy in branch {action.branch}")
        prepared = self._context.prepare(branch.setting, action.policy)  # before anything changes: it may be Rejected
        branch.check_group(prepared)
        self._bring_to_now(branch)
        branch.change_in_place(prepared, self._control.disturbance, self._now)

    def _begin(self, branch: Branch, prepared: PreparedSetting, method: Method, *, waited: bool) -> Reconfiguration | None:
        """Begin to put `branch` under a setting and a policy; None where that has happened in place.

        In place, mini-batches in progress continue, and a new policy releases those that wait.
        """
        reconfiguration = Reconfiguration(
            branch, self._control, self._load, self._costs, target=prepared, method=method, waited=waited
        )
        if reconfiguration.in_place:
            self._resume(branch)
            branch.change_in_place(prepared, self._control.disturbance, self._now)
            return None
        # First the branch moves into the workers' caches, which takes time; only then it is known when the steps begin.
        self._switch_to(branch)
        self._resume(branch)
        branch.catch_up(self._now)
        branch.disturb(self._control.disturbance)
        reconfiguration.begin(self._now)
        self._reconfiguration = reconfiguration
        self._progress(branch, None)
        return reconfiguration

    def _check_free(self, branch: Branch, wanted: str) -> None:
        """Raise Rejected during a reconfiguration, and where `branch` has ended or must first recover from a loss."""
        check_no_reconfiguration(wanted, self._reconfiguration)
        check_running(wanted, branch.status)
        if lost := self._lost(branch):
            raise Rejected(f"Cannot {wanted}: it has lost {', '.join(sorted(lost))}; run it, and it goes on without.")

    # -------------------------------------------------------------------------------------------------------- branches

    def _fork(self, action: Fork) -> int:
        parent = branch_of(self._branches, action.branch)
        self._check_free(parent, f"fork branch {action.branch}")
        setting = admitted(action.setting or parent.setting, parent.setting, self.job, self._control.available)
        prepared = self._context.prepare(setting, policy_of(setting, parent.setting, parent.policy))
        jobs.check_memory(self.job, [setting, *(b.setting for b in self._branches.values())])
        self._bring_to_now(parent)
        self._pass_seconds(copy_bytes(parent) / self._costs.fork_bytes_per_second)
        child = parent.snapshot(testing=action.testing)
        number, self._next_branch = self._next_branch, self._next_branch + 1
        self._branches[number] = child
        if self._begin(child, prepared, "checkpoint", waited=True) is not None:
            self._train_unreported(child, np.inf, change_only=True)
        return number

    def _switch_to(self, branch: Branch) -> None:
        """Branches share the workers' caches, so that training another one clears them (MLtuner, Section 4.6)."""
        if branch is not self._cached and branch.status == "running":
            self._cached = branch
            self._pass_seconds(refill_seconds(branch))

    def _pass_seconds(self, seconds: float) -> None:
        """Let time pass in which no branch trains."""
        end = self._now + seconds
        while self._control.next_seconds <= end:
            self._control.act()
        self._control.be_at(end)
        self._now = end

    def _free(self, action: Free) -> None:
        branch = branch_of(self._branches, action.branch)
        check_not_last(self._branches, action.branch)
        if self._reconfiguration is not None and self._reconfiguration.branch is branch:
            self._check_free(branch, f"free branch {action.branch}")
        del self._branches[action.branch]
        self._cached = None if branch is self._cached else self._cached

    def _evaluate(self, action: Evaluate) -> Evaluation:
        branch = branch_of(self._branches, action.branch)
        check_no_reconfiguration(f"evaluate branch {action.branch}", self._reconfiguration)
        found = evaluation(branch, self._now)
        self._pass_seconds(self.job.evaluate_seconds)
        return found

    def _measure_noise(self, action: MeasureNoise) -> GradientNoise:
        branch = branch_of(self._branches, action.branch)
        check_no_reconfiguration(f"measure the noise of branch {action.branch}", self._reconfiguration)
        if branch.inputs.placement:
            raise Rejected("Cannot measure the noise of sparse gradients: mini-batches touch different rows of the tables.")
        found = gradient_noise(branch, self._now, action.batches)
        self._pass_seconds(noise_seconds(branch, action.batches))
        return found
