"""A System in simulated time: the engine trains, the control plane acts, and tuners' actions are carried out between."""

from __future__ import annotations

from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from simulators import jobs, windows
from simulators.branch import NO_RECORDS, Branch, Ground, first_branch
from simulators.cluster import trace_driven
from simulators.cluster.conditions import Conditions
from simulators.cluster.conditions import check as check_conditions
from simulators.engine.inputs import compute_times, loads
from simulators.reconfiguration import plan as reconfigure
from simulators.reconfiguration.control_plane import Cluster, ControlPlane
from simulators.reconfiguration.in_training import Transition
from simulators.reconfiguration.plan import Costs, Load
from simulators.workloads.catalogue import Workload
from tuners import policies
from tuners.actions import (
    Action,
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    Install,
    Method,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Status,
    SyncPolicy,
    Target,
    Window,
)
from tuners.settings import Knob
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

__all__ = ["SimulatedSystem"]

T = TypeVar("T")

_ROWS = 512  # of pushes per call of the engine
_FOR_EVER = 2**31 - 1  # clocks


class SimulatedSystem:
    """A parameter server in simulated time. Raises ValueError where scenario, cluster and workload do not fit together."""

    def __init__(
        self,
        name: str,
        cluster: Cluster,
        workload: Workload,
        start: Setting,
        knobs: tuple[Knob, ...],
        target: Target,
        budget_seconds: float,
        conditions: Conditions,
        costs: Costs,
        evaluate_clocks: int,
        seed: int,
    ) -> None:
        names = tuple(n for n, _ in cluster.nodes)
        check_conditions(conditions, names)
        reconfigure.check(costs)
        conditions, factors = trace_driven.unfolded(conditions, cluster.nodes, budget_seconds, seed)
        self._conditions, self._costs = conditions, costs
        self._control = ControlPlane(cluster, conditions)
        self._now = 0.0
        self._told = 0  # events of nodes that windows have told
        self._transition: Transition | None = None  # the reconfiguration under way
        self._waited_cost = Cost(seconds=0.0, stall_seconds=0.0)  # of the last one that was waited for
        self.job = jobs.job(name, cluster, workload, start, knobs, target, budget_seconds, seed)
        blocks = workload.demand.data_blocks or max(len(names), workload.samples // workload.batch_size)
        self._load = Load(self.job.model_bytes, blocks, workload.demand.sample_bytes * workload.samples / blocks)
        try:
            self.job.space.check(start)
            check_nodes(start, self.job, self._control.available)
            data, parameters = jobs.drawn(workload, seed, len(start.workers))
            self._ground = Ground(cluster, workload, conditions, self.job, data, evaluate_clocks, seed, factors)
            policy = policies.named(start.policy, start.staleness)
            self._branches = {0: first_branch(self._ground, start, policy, self._control.slowdown, parameters)}
        except Rejected as error:
            raise ValueError(f"Scenario {name!r} cannot start: {error}") from error
        self._next_branch = 1
        self._cached: Branch | None = self._branches[0]  # whose model the workers' caches hold
        self._latest = self._branches[0]  # to train

    @property
    def now(self) -> float:
        """Simulated seconds since the job began."""
        return self._now

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
        }
        handler = handler_of(action, handlers)
        if self._conditions.thinking_seconds > 0:
            self._think(action)
        return handler(action)

    # ------------------------------------------------------------------------------------------------------------ run

    def _run(self, action: Run) -> Window:
        branch = branch_of(self._branches, action.branch)
        if not len(branch.unseen):
            check_running(f"run branch {action.branch}", branch.status)
        other = self._transition is not None and self._transition.branch is not branch
        check_other_branch(action.branch, is_reconfigured=other)
        self._switch_to(branch)
        self._bring_to_now(branch)
        start = self._now
        limit = min(self.job.budget_seconds, np.inf if action.seconds is None else start + action.seconds)
        table = self._train(branch, _FOR_EVER if action.clocks is None else action.clocks, limit)
        table, branch.unseen = np.concatenate([branch.unseen, table]), NO_RECORDS
        start, branch.unseen_seconds = start - branch.unseen_seconds, 0.0
        events, self._told = tuple(self._control.events[self._told :]), len(self._control.events)
        changes, branch.changes = tuple(branch.changes), []
        nodes = self._ground.cluster.nodes
        return windows.window(
            self.job,
            branch.setting,
            table,
            start_seconds=start,
            end_seconds=self._now,
            pushes_before=int(branch.state.clock.pushes) - len(table),
            status=branch.status,
            devices=compute_times(nodes, self._ground.workload.demand, branch.setting),
            samples={w: sum(row) for w, row in loads(nodes, branch.setting).items()},
            available=self._control.available,
            events=events,
            changes=changes,
        )

    def _think(self, action: Action[Any]) -> None:
        """While a tuner thinks, the branch it thinks about goes on; its next window tells what happened meanwhile."""
        branch = self._branches.get(getattr(action, "branch", -1))
        other = self._transition is not None and self._transition.branch is not branch
        if branch is not None and branch.status == "running" and not other:
            self._switch_to(branch)
            self._bring_to_now(branch)
            self._train_unseen(branch, self._now + self._conditions.thinking_seconds)

    def _train_unseen(self, branch: Branch, limit: float, *, change_only: bool = False) -> None:
        """Train without anybody looking, to `limit` or to the end of the change under way."""
        start = self._now
        stands = self._transition is not None and self._transition.quiescent
        table = self._train(branch, _FOR_EVER, limit, change_only=change_only)
        branch.unseen = np.concatenate([branch.unseen, table])
        # A standstill is told of by its cost; what is unseen already makes the next window begin before it.
        if not (change_only and stands) or branch.unseen_seconds > 0:
            branch.unseen_seconds += self._now - start

    def _train(self, branch: Branch, clocks: int, limit: float, *, change_only: bool = False) -> NDArray[np.float64]:
        """Train `branch` for so many clocks, to `limit` or to the end of the change under way, control events included; the
        records, [n, 11]."""
        tables, left = [NO_RECORDS], clocks
        while left > 0 and branch.status == "running" and not (change_only and self._transition is None):
            until = min(self._control.next_seconds, limit)
            most = min(left, _ROWS)
            table = NO_RECORDS
            if self._transition is None:
                table = branch.advance(most, until, _ROWS)
            elif self._transition.trains:
                most = 1 if self._transition.listens else most
                table = branch.advance(most, until, _ROWS)
            tables.append(table)
            left -= len(table)
            if len(table) == most or branch.status != "running":
                self._now = max(self._now, float(branch.state.clock.seconds))
                if self._transition is not None:
                    self._progress(branch, int(table[-1, 1]) if len(table) else None)
                continue
            self._now = max(self._now, until)  # the limit may be past: a change can end after the budget
            if until >= limit:
                break
            branch.coast(self._now)
            self._control.act()
            self._progress(branch, None)
        if branch.status != "running" and self._transition is not None:
            self._transition.cancel()
            self._end_transition()
        branch.until_seconds = self._now
        return np.concatenate(tables)

    def _progress(self, branch: Branch, pushed: int | None) -> None:
        """Let `branch` feel what the control plane has done, and a change under way know who has pushed."""
        if self._transition is not None:
            self._control.be_at(self._now)
            self._transition.tell(self._control, None if pushed is None else self.job.nodes[pushed].name, self._now)
            if self._transition.over:
                self._end_transition()
        self._feel(branch)
        if lost := self._lost(branch):
            self._lose(branch, lost)

    def _feel(self, branch: Branch) -> None:
        if self._transition is None:
            branch.slow(self._control.slowdown)
        else:
            self._transition.put(self._control.slowdown, self._now)

    def _bring_to_now(self, branch: Branch) -> None:
        """A branch that stood still goes on as if no time had passed for it."""
        if self._transition is None and not np.array_equal(branch.plant.slowdown, self._control.slowdown):
            branch.coast(branch.until_seconds)  # what was done before is not done slower, or faster
        self._stand(branch)
        self._feel(branch)
        if lost := self._lost(branch):
            branch.coast(self._now)
            self._lose(branch, lost)

    def _stand(self, branch: Branch) -> None:
        """A branch that stood still goes on now; another may have trained last."""
        branch.stand(self._now, self._latest)
        self._latest = branch

    # ---------------------------------------------------------------------------------------------------------- nodes

    def _lost(self, branch: Branch) -> frozenset[str]:
        """Nodes that `branch` has been using, or is to use, and that are no longer there."""
        used = frozenset((*branch.setting.workers, *branch.setting.servers))
        if self._transition is not None and self._transition.branch is branch:
            used = self._transition.counts_on
        return used - self._control.present

    def _lose(self, branch: Branch, lost: frozenset[str]) -> None:
        """Nodes are lost: the runtime goes on with those that are left. A change under way is completed without them, or
        rolled back where it counts on them."""
        before = self._transition
        self._transition = Transition.after_loss(branch, before, lost, self._control, self._load, self._costs, self._now)
        if self._transition is None:
            branch.give_up()
            self._transition = before
            self._end_transition()
        else:
            self._feel(branch)

    def _end_transition(self) -> None:
        ended, self._transition = self._transition, None
        if ended is not None and ended.waited:
            self._waited_cost = ended.cost(self._now)
        elif ended is not None:
            ended.branch.changes.append(ended.cost(self._now))

    # ----------------------------------------------------------------------------------------------- settings, policies

    def _reconfigure(self, action: Reconfigure) -> Cost:
        branch, setting = branch_of(self._branches, action.branch), action.setting
        method = method_of(action, self.job)
        self._check_free(branch, f"reconfigure branch {action.branch}")
        self.job.space.check(setting)
        check_nodes(setting, self.job, self._control.available)
        transition = self._begin(
            branch, setting, policy_of(setting, branch.setting, branch.policy), method, waited=action.wait
        )
        if transition is None or not action.wait:
            return Cost(seconds=0.0, stall_seconds=0.0)
        # Where nobody trains anyway, the change may end after the budget.
        limit = np.inf if transition.quiescent else max(self.job.budget_seconds, self._now)
        self._train_unseen(branch, limit, change_only=True)
        return self._waited_cost if self._transition is None else self._transition.cost(self._now)

    def _install(self, action: Install) -> None:
        branch = branch_of(self._branches, action.branch)
        self._check_free(branch, f"install a policy in branch {action.branch}")
        self._bring_to_now(branch)
        self._change_in_place(branch, branch.setting, action.policy)

    def _begin(
        self, branch: Branch, setting: Setting, policy: SyncPolicy, method: Method, *, waited: bool
    ) -> Transition | None:
        """Begin to put `branch` under a setting and a policy; None where that has happened in place.

        In place, mini-batches under way go on, and a new policy releases those that wait. Raises Rejected, and changes
        nothing, where the setting cannot be.
        """
        self._ground.program(setting, policy)
        self._ground.plant(setting, policy, self._control.slowdown)
        plan = reconfigure.plan(branch.setting, setting, method, self._load, self._costs)
        if plan.steps:
            self._switch_to(branch)
        self._stand(branch)
        branch.coast(self._now)
        branch.slow(self._control.slowdown)
        if not plan.steps:
            self._change_in_place(branch, setting, policy)
            return None
        begun = Transition.begin(
            branch, plan, setting, policy, self._control, self._load, self._costs, waited=waited, now=self._now
        )
        self._transition = begun
        self._progress(branch, None)
        return begun

    def _change_in_place(self, branch: Branch, setting: Setting, policy: SyncPolicy) -> None:
        branch.coast(self._now)
        renewed = policy is not branch.policy
        branch.bring_under(setting, policy, self._control.slowdown)
        branch.until_seconds = self._now
        if renewed:
            branch.launch_waiting()

    def _check_free(self, branch: Branch, wanted: str) -> None:
        """Raise Rejected during a reconfiguration, and where `branch` cannot go on as it is."""
        check_no_reconfiguration(wanted, self._transition)
        check_running(wanted, branch.status)
        if lost := self._lost(branch):
            raise Rejected(f"Cannot {wanted}: it has lost {', '.join(sorted(lost))}; run it, and it goes on without.")

    # -------------------------------------------------------------------------------------------------------- branches

    def _fork(self, action: Fork) -> int:
        parent = branch_of(self._branches, action.branch)
        setting = parent.setting if action.setting is None else action.setting
        self._check_free(parent, f"fork branch {action.branch}")
        self.job.space.check(setting)
        check_nodes(setting, self.job, self._control.available)
        policy = policy_of(setting, parent.setting, parent.policy)
        self._ground.program(setting, policy)
        self._ground.plant(setting, policy, self._control.slowdown)
        jobs.check_memory(self.job, [setting, *(b.setting for b in self._branches.values())])
        self._bring_to_now(parent)
        self._pass_seconds(parent.copy_bytes() / self._costs.fork_bytes_per_second)
        child = parent.snapshot(testing=action.testing)
        number, self._next_branch = self._next_branch, self._next_branch + 1
        self._branches[number] = child
        transition = self._begin(child, setting, policy, "checkpoint", waited=True)
        if transition is not None:
            self._train_unseen(child, np.inf, change_only=True)
        return number

    def _switch_to(self, branch: Branch) -> None:
        """Branches share the workers' caches, so that training another one clears them (MLtuner, Section 4.6)."""
        if branch is not self._cached and branch.status == "running":
            self._cached = branch
            self._pass_seconds(branch.refill_seconds())

    def _pass_seconds(self, seconds: float) -> None:
        """Let time pass in which nobody trains."""
        end = self._now + seconds
        while self._control.next_seconds <= end:
            self._control.act()
        self._control.be_at(end)
        self._now = end

    def _free(self, action: Free) -> None:
        branch = branch_of(self._branches, action.branch)
        check_not_last(self._branches, action.branch)
        if self._transition is not None and self._transition.branch is branch:
            self._check_free(branch, f"free branch {action.branch}")
        del self._branches[action.branch]
        self._cached = None if branch is self._cached else self._cached

    def _evaluate(self, action: Evaluate) -> Evaluation:
        return branch_of(self._branches, action.branch).evaluation(self._now)
