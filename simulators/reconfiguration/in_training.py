"""A branch on its way from one setting to another: how training feels it, and what becomes of it when nodes are lost."""

from __future__ import annotations

import math

import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simulators.branch import Branch
from simulators.engine.inputs import UnderWay, loads
from simulators.reconfiguration import plan as reconfigure
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.execution import Change, Ends
from simulators.reconfiguration.plan import Costs, Load, Plan
from tuners.actions import Cost, Setting, SyncPolicy

__all__ = ["Transition"]


class Transition:
    """A change under way and the branch it is about."""

    def __init__(self, branch: Branch, change: Change, policy: SyncPolicy, *, waited: bool, now: float) -> None:
        self.branch, self.waited = branch, waited
        self.over = False
        self._change, self._policy, self._old_policy = change, policy, branch.policy
        self._begun, self._stalled = now, 0.0
        self._steps: list[str] = []  # of changes that this one replaced
        self._bytes = 0.0
        self._done = True
        self._asked = not change.lost  # a tuner's change, or what has become of one; not the runtime's own
        self._workers = frozenset(branch.setting.workers)
        self._inputs_for: tuple[Setting, UnderWay] | None = None
        if change.quiescent:
            branch.stop_all(now)

    @classmethod
    def begin(
        cls,
        branch: Branch,
        plan: Plan,
        new: Setting,
        policy: SyncPolicy,
        control: ControlPlane,
        load: Load,
        costs: Costs,
        *,
        waited: bool,
        now: float,
        lost: frozenset[str] = frozenset(),
    ) -> Transition:
        """Begin to bring `branch` to a setting and a policy, at `now`."""
        nodes = branch.context.cluster.nodes
        ends = Ends(branch.setting, new, {**loads(nodes, new), **loads(nodes, branch.setting)}, lost)
        touched = branch.context.workload.demand.touched_fraction
        return cls(branch, control.begin(plan, ends, load, costs, touched, now), policy, waited=waited, now=now)

    @classmethod
    def after_loss(
        cls,
        branch: Branch,
        before: Transition | None,
        lost: frozenset[str],
        control: ControlPlane,
        load: Load,
        costs: Costs,
        now: float,
    ) -> Transition | None:
        """What the runtime begins when `branch` has lost nodes; None where too few are left to go on.

        A change under way (`before`) is completed where its new setting does without them, and rolled back otherwise; either
        way everybody stops and the model is placed anew, so that nothing is left between.
        """
        names = tuple(n.name for n in branch.context.job.nodes)
        wanted, policy, done = branch.setting, branch.policy, True
        half_way = before is not None and before._asked
        if before is not None:
            before._change.cancel()
            done = not half_way or not lost & {*before._change.new.workers, *before._change.new.servers}
            wanted = before._change.new if half_way and done else before._change.old
            policy = before._policy if done else before._old_policy
            branch.setting, branch.policy = before._change.old, before._old_policy
        # Also those that the change had done with, and deleted, before it was given up.
        lost |= frozenset((*branch.setting.workers, *branch.setting.servers)) - control.present
        left = reconfigure.survivors(
            wanted, control.available | (control.present & set(wanted.workers + wanted.servers)), names
        )
        if left is None:
            return None
        plan = reconfigure.recovery(branch.setting, lost, half_way, load, costs)
        branch.stop_workers(lost, now)
        after = cls.begin(branch, plan, left, policy, control, load, costs, waited=False, now=now, lost=lost)
        if before is not None:
            after._follow(before, done, now)
        return after

    @property
    def quiescent(self) -> bool:
        return self._change.quiescent

    @property
    def trains(self) -> bool:
        """Whether anybody is in a mini-batch."""
        return not self._change.quiescent and len(self.branch.resting) < len(self.branch.context.job.nodes)

    @property
    def counts_on(self) -> frozenset[str]:
        """Nodes that the change still needs: those of the new setting, and of the old one until they are deleted."""
        old, new = self._change.old, self._change.new
        gone = {n for n in (*old.workers, *old.servers) if f"delete {n}" in self._change.completed}
        return frozenset((*new.workers, *new.servers, *old.workers, *old.servers)) - gone - self._change.lost

    @property
    def listens(self) -> bool:
        """Whether it matters to the change who pushes next."""
        return self._change.listens

    def tell(self, control: ControlPlane, pushed: str | None, now: float) -> None:
        """`pushed` (or nobody) has completed a push at `now`; the change goes on as far as that lets it."""
        if pushed is not None:
            self._change.pushed(pushed)
        self._change.at_rest(self.branch.resting)
        control.settle()
        if self._change.finished:
            self._finish(control.slowdown, now)

    def put(self, slowdown: NDArray[np.float64], now: float) -> None:
        """Let training feel the change as it is just now; workers that are ready to begin do."""
        change, branch = self._change, self.branch
        switched = change.switched and branch.setting != change.new
        if switched:
            branch.put_in_force(change.new, self._policy, slowdown)
        key = (change.setting, change.under_way)
        if not change.setting.workers:  # all have stopped, and no other has begun
            branch.inputs = branch.inputs._replace(active=jnp.zeros_like(branch.inputs.active))
        elif key != self._inputs_for:
            self._inputs_for = key
            branch.program = branch.context.program(change.setting, branch.policy)
            branch.inputs = branch.context.inputs(change.setting, branch.policy, slowdown, change.under_way)
        branch.set_slowdown(slowdown)
        joined, self._workers = change.workers - self._workers, change.workers
        if joined:
            branch.stop_workers(joined, now)
        if (joined or switched) and not change.quiescent:
            branch.launch_waiting_workers()

    def cost(self, now: float) -> Cost:
        """What it has cost so far."""
        stalled = self._stalled + (now - self._change.begun_seconds if self._change.quiescent else 0.0)
        return Cost(
            seconds=now - self._begun,
            stall_seconds=stalled,
            slow_seconds=max(now - self._begun - stalled, 0.0),
            bytes_moved=math.fsum((self._bytes, self._change.bytes_moved)),
            steps=(*self._steps, *self._change.completed),
            done=self._done and self._change.finished,
        )

    def cancel(self) -> None:
        """Give the change up; the branch is what it was."""
        self._change.cancel()

    def _follow(self, before: Transition, done: bool, now: float) -> None:
        """This is what has become of `before`."""
        so_far = before.cost(now)
        self.waited, self._done = before.waited, done and before._done
        self._begun, self._stalled = before._begun, so_far.stall_seconds
        self._asked = before._asked
        self._steps = [*so_far.steps, *(["complete" if done else "roll back"] if before._asked else [])]
        self._bytes = so_far.bytes_moved

    def _finish(self, slowdown: NDArray[np.float64], now: float) -> None:
        branch, renewed = self.branch, self._policy is not self.branch.policy
        branch.put_in_force(self._change.new, self._policy, slowdown)
        if self._change.quiescent:
            branch.stop_all(now)
            branch.launch(branch.inputs.active)
        elif renewed or frozenset(branch.setting.workers) != frozenset(self._change.old.workers):
            branch.launch_waiting_workers()
        self.over = True
