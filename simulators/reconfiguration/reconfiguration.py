"""One reconfiguration of one branch: its progress in simulated time, its effects on training, and its cost.

A `Reconfiguration` has a plan (`simulators.reconfiguration.plan`), and carries it out while the branch trains. The steps of
the plan are SimPy processes, which run concurrently (`PlanSteps`). Two things flow between steps and training:

* Steps tell the branch what the cluster is like at present: which workers may begin a mini-batch, how the model is divided,
  what bandwidth is left (`Reconfiguration.apply_effects`).
* The branch tells the steps which worker has pushed and which nodes are at rest (`Reconfiguration.progress`): a worker
  stops after the mini-batch that it is at, and with relocation on demand a parameter moves with the push of a worker that
  has pulled it since the graph was switched.

Where nodes are lost meanwhile, the same reconfiguration continues with a recovery plan (`Reconfiguration.recover`), and its
cost includes what was done before.
"""

from __future__ import annotations

import math

from simulators.branch import Branch, PreparedSetting
from simulators.engine.preparation import Effects, loads
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.plan import NO_STEPS, WAIT, Load, ReconfigurationPlan, plan_of, recovery_plan
from simulators.reconfiguration.shares import survivors
from simulators.reconfiguration.steps import PlanEnds, PlanSteps
from simulators.reconfiguration.transfers import Transfers
from tuners.actions import Cost, Method, Setting, SyncPolicy

__all__ = ["Reconfiguration"]


class Reconfiguration:
    """A reconfiguration that a tuner has requested (`target` is given), or a recovery that the runtime begins by itself.

    `begin` or `recover` starts it; from then on call `progress` after every push and every event of the control plane, and
    `apply_effects` before training goes on, until it is `over`.
    """

    def __init__(
        self,
        branch: Branch,
        control: ControlPlane,
        load: Load,
        costs: Costs,
        *,
        target: PreparedSetting | None = None,
        method: Method = "checkpoint",
        waited: bool = False,
    ) -> None:
        self.branch, self.waited = branch, waited  # waited: a tuner waits for its end, and gets the cost as an answer
        self.over = False
        self._control, self._load, self._costs = control, load, costs
        self._target, self._requested = target, target is not None
        self.plan = NO_STEPS  # the one requested; steps in progress may be those of a recovery
        if target is not None:
            self.plan = plan_of(branch.setting, target.setting, method, load, costs)
        self._steps: PlanSteps | None = None  # of the plan in progress
        self._policy = self._old_policy = branch.policy
        self._workers: frozenset[str] = frozenset()  # that may begin a mini-batch, as of the last `_joined`
        self._applied: tuple[Setting, Effects] | None = None
        self._begun_seconds = 0.0
        # While all old workers have stopped and no new one has started, no worker trains, whatever the method:
        self._idle_seconds, self._idle_from = 0.0, math.inf  # in the plan in progress; since when, inf: some worker trains
        # Of plans that losses have interrupted:
        self._earlier_stall_seconds = self._earlier_bytes = 0.0
        self._earlier_steps: tuple[str, ...] = ()
        self._rolled_back = False
        self._waits = False  # no node is left that the job could continue on
        self._lost: frozenset[str] = frozenset()  # before and during the wait; a node that comes back has lost its part

    @property
    def in_place(self) -> bool:
        """Whether the change takes no steps, so that `Branch.change_in_place` is all there is to do."""
        return not self.plan.steps

    @property
    def quiescent(self) -> bool:
        """Whether no worker trains until it is over."""
        return self._steps is not None and self._steps.plan.quiescent

    @property
    def trains(self) -> bool:
        """Whether any worker is in a mini-batch."""
        return not self.quiescent and len(self.branch.resting) < len(self.branch.context.job.nodes)

    @property
    def follows_pushes(self) -> bool:
        """Whether a single push can change something at present, so that it must be told of each."""
        return self._steps is not None and self._steps.follows_pushes

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Nodes to `recover` from, which it needs and which are gone: of the new setting, and of the old one until they are
        deleted. While it waits for nodes there are none."""
        if self._steps is None:
            return frozenset()
        if self._waits:
            return self._lost if self._steps.finished else frozenset()
        return self._steps.needed_nodes - self._control.present

    # ---------------------------------------------------------------------------------------------- from begin to end

    def begin(self, now: float) -> None:
        """Begin to bring the branch to the target, at `now`."""
        if self._target is None:
            raise ValueError("Cannot begin a reconfiguration without a target: give one, or call recover.")
        self._begun_seconds = now
        self._start(self.plan, self._target.setting, self._target.policy, frozenset(), now)

    def recover(self, lost: frozenset[str], now: float) -> bool:
        """Begin what the runtime does when the branch has lost nodes; False where those left cannot continue, and no other
        will join.

        A requested reconfiguration is completed where its new setting does without the lost nodes, and rolled back
        otherwise. Either way all workers stop and the model is placed anew, so that no block is left between two servers.
        Where those left cannot continue, the recovery begins anew with each node that joins.
        """
        branch, steps = self.branch, self._steps
        wanted, policy, completes = branch.setting, branch.policy, True
        if steps is not None:
            steps.cancel()
            completes = not self._requested or not lost & {*steps.ends.new.workers, *steps.ends.new.servers}
            wanted = steps.ends.new if self._requested and completes else steps.ends.old
            policy = self._policy if completes else self._old_policy
            branch.restore(steps.ends.old, self._old_policy)
        # Nodes that a step had already deleted are lost as well: a roll-back would need them.
        lost |= frozenset((*branch.setting.workers, *branch.setting.servers)) - self._control.present
        lost |= self._lost
        # A node under notice may stay where it is used, but is not chosen anew.
        usable = self._control.available | (self._control.present & set(wanted.workers + wanted.servers))
        nodes = branch.context.cluster.nodes
        able = frozenset(name for name, kind in nodes if kind.devices[0].speed > 0)  # it gets the first device's load
        left = survivors(wanted, usable, tuple(name for name, _ in nodes), able)
        if left is None and not self._control.expects_nodes:
            return False
        if steps is None:
            self._begun_seconds = now
        else:
            so_far = self.cost(now)
            self._earlier_stall_seconds, self._earlier_bytes = so_far.stall_seconds, so_far.bytes_moved
            outcome = ("complete" if completes else "roll back",) if self._requested and not self._waits else ()
            self._earlier_steps = so_far.steps + outcome
            self._rolled_back = self._rolled_back or not completes
        self._waits, self._lost = left is None, lost
        if left is None:
            self._start(WAIT, wanted, policy, lost, now)
            return True
        half_way = steps is not None and self._requested
        servers = {*branch.setting.servers, *(steps.ends.new.servers if steps is not None else ())}
        if branch.setting.checkpoint_seconds and lost & servers:
            # No replicas: the whole model is as the last checkpoint has it.
            half_way = True
            self._earlier_steps += (f"lose {branch.roll_back()} clocks",)
        plan = recovery_plan(branch.setting, lost, half_way, self._load, self._costs)
        branch.stop_workers(lost, now)
        self._target = None  # the survivors' setting is prepared at the end
        self._start(plan, left, policy, lost, now)
        return True

    def progress(self, pushed: str | None, now: float) -> None:
        """`pushed` (None: no worker) has completed a push at `now`; steps continue as far as that lets them."""
        steps = self._started
        # Steps see the time of the push, even where the control plane has no event of its own.
        self._control.be_at(now)
        if pushed is not None:
            steps.pushed(pushed)
        steps.at_rest(self.branch.resting)
        # What the push has ended may end further steps at this instant; they must, before training goes on.
        self._control.settle()
        if steps.finished and not self._waits:
            self._finish(now)

    def apply_effects(self, now: float) -> None:
        """Let the branch train on the cluster as the steps have it at present; workers that may begin, begin."""
        steps, branch, disturbance = self._started, self.branch, self._control.disturbance
        switched = steps.switched and branch.setting != steps.ends.new
        has_work = switched and branch.install(self._prepared(), disturbance)
        setting, effects = steps.setting, steps.effects
        self._idle_seconds = self._idle_until(now)
        self._idle_from = math.inf if setting.workers else now
        if self._waits or not setting.workers:  # all have stopped, and no other has begun
            branch.without_workers()
        elif (setting, effects) != self._applied:
            # Building inputs takes milliseconds, and most pushes change nothing.
            self._applied = setting, effects
            has_work = branch.apply_effects(setting, effects) or has_work
        branch.disturb(disturbance)
        joined = self._joined(steps.workers, now)
        if (joined or switched or has_work) and not steps.plan.quiescent:
            branch.launch_waiting_workers()

    def cost(self, now: float) -> Cost:
        """What it has cost until `now`."""
        steps = self._started
        # A quiescent plan stalls training for all its time; others slow it down, and stall it while there is no worker.
        stalled = self._earlier_stall_seconds
        stalled += now - steps.begun_seconds if steps.plan.quiescent else self._idle_until(now)
        return Cost(
            seconds=now - self._begun_seconds,
            stall_seconds=stalled,
            slow_seconds=max(now - self._begun_seconds - stalled, 0.0),
            bytes_moved=math.fsum((self._earlier_bytes, steps.bytes_moved)),
            steps=(*self._earlier_steps, *steps.completed),
            done=not self._rolled_back and steps.finished,
        )

    def _idle_until(self, now: float) -> float:
        """Seconds of the plan in progress in which it had no worker."""
        return self._idle_seconds + max(now - self._idle_from, 0.0)

    def cancel(self) -> None:
        """Give up the steps that are not completed; the branch stays what it is."""
        self._started.cancel()

    def _start(self, plan: ReconfigurationPlan, new: Setting, policy: SyncPolicy, lost: frozenset[str], now: float) -> None:
        branch = self.branch
        nodes = branch.context.cluster.nodes
        ends = PlanEnds(branch.setting, new, {**loads(nodes, new), **loads(nodes, branch.setting)}, lost)
        touched = branch.context.workload.demand.touched_fraction
        nics = {name: kind.nic_bytes_per_second for name, kind in nodes}
        self._control.be_at(now)  # before any process is made: a process begins at the control plane's present time
        transfers = Transfers(self._control.env, nics)
        self._steps = PlanSteps(self._control, transfers, plan, ends, self._costs, touched, self._load)
        self._control.settle()
        self._policy, self._old_policy = policy, branch.policy
        self._workers, self._applied = frozenset(branch.setting.workers), None
        self._idle_seconds, self._idle_from = 0.0, math.inf
        if plan.quiescent:
            branch.stop_all(now)

    def _finish(self, now: float) -> None:
        steps, branch, new_policy = self._started, self.branch, self._policy is not self.branch.policy
        has_work = branch.install(self._prepared(), self._control.disturbance)
        if steps.plan.quiescent:
            branch.stop_all(now)
            branch.launch(branch.inputs.active)
        elif new_policy or has_work or self._lost or frozenset(branch.setting.workers) != frozenset(steps.ends.old.workers):
            self._joined(frozenset(branch.setting.workers), now)
            branch.launch_waiting_workers()
        self.over = True

    def _joined(self, workers: frozenset[str], now: float) -> frozenset[str]:
        """The nodes that have become workers, where `workers` may begin a mini-batch from `now` on."""
        joined, self._workers = workers - self._workers, workers
        if joined:
            # A node that joins has no mini-batch yet; its waiting is counted from now.
            self.branch.stop_workers(joined, now)
        return joined

    def _prepared(self) -> PreparedSetting:
        return self._target or self.branch.context.prepare(self._started.ends.new, self._policy)

    @property
    def _started(self) -> PlanSteps:
        if self._steps is None:
            raise ValueError("Cannot carry on a reconfiguration that has not begun: call begin or recover first.")
        return self._steps
