"""What a job does about losses, slow links and standstill: it looks for them, and returns the procedures that help."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterable, Mapping

import numpy as np
from numpy.typing import NDArray

from harness.live.coordinator.membership.views import ModelLost
from harness.live.driver.checkpoints.restore_points import RestorePoints
from harness.live.driver.repairs.emulated_nodes import EmulatedNodes
from harness.live.driver.repairs.links import SlowLink
from harness.live.driver.repairs.losses import Losses
from harness.live.driver.repairs.slow_links import SlowLinks
from harness.live.driver.repairs.standstill import Standstill
from harness.live.driver.view.cost_meter import CostMeter
from harness.live.driver.view.job_view import JobView
from harness.live.processes.runtime import Procedure, Runtime
from harness.live.protocol.messages import worker
from harness.live.protocol.names import EVALUATOR, node_of
from harness.live.worker.spec import Spec

__all__ = ["COPY_SECONDS", "MACHINE_SECONDS", "JobRepairs"]

COPY_SECONDS = 10.0
"""Longest wait for a node with a slow link to copy the blocks that only it has."""

MACHINE_SECONDS = 5.0
"""How long a node is without a machine before that is said: one that is free is found sooner."""

_LOSSES_SECONDS = 0.1


class JobRepairs:
    """Keeps a job training. `idle`: no procedure is in progress, so that a method may return the next one."""

    def __init__(
        self,
        runtime: Runtime,
        view: JobView,
        spec: Spec,
        restore_points: RestorePoints,
        still_seconds: float,
        emulated: EmulatedNodes | None,
    ) -> None:
        """`emulated`: where nodes come and go as the scenario says."""
        nodes = tuple(n.name for n in spec.job.nodes)
        self._runtime, self._view, self._restore_points = runtime, view, restore_points
        self.losses = Losses(runtime, nodes)
        self.standstill = Standstill(still_seconds)
        self.recovery: CostMeter | None = None  # from a loss, in progress
        self.trains = True  # until the last checkpoint
        self._links = SlowLinks(runtime, view, spec)
        self._emulated, self._slowdown = emulated, dict.fromkeys(nodes, 1.0)
        self._taken: set[str] = set()  # nodes that the scenario has just taken away
        if emulated is not None:
            self.losses.leaving = emulated.leaving
        self._told_lost: set[str] = set()  # processes of which the screen says so, until they join or get another machine
        self._without_machine: dict[str, float] = {}  # nodes, and since when
        self._told_without: frozenset[str] = frozenset()  # those of them of which the screen says so
        self._asked_seconds = 0.0  # when losses were last asked for
        self._repeating = False  # processes repeat what may be lost, because no push has come for too long
        self._given_up: dict[str, str] = {}  # processes that were stopped because training waited for them, and why

    # ----------------------------------------------------------------------------------------------- nodes come and go

    def emulate(self) -> None:
        """Let nodes come, go and slow down, where they are emulated. Not once the job has ended."""
        if self._emulated is None:
            return
        self._taken = set()
        for event in self._emulated.act(self._view.now):
            self.losses.tell(event)
            if event.event == "leaving":
                self._view.log_event(f"{event.node} will leave")
            elif event.event != "joined":
                self._taken.add(event.node)
        self.losses.leaving = self._emulated.leaving
        if (slowdown := self._emulated.slowdown) != self._slowdown:
            self._slowdown = slowdown
            self._runtime.coordinator.slow(slowdown)

    def find_lost(self) -> dict[str, str]:
        """Processes that are lost since the last time, with the reasons."""
        # What the scenario takes is lost at once, so that a window which tells of it has the setting that follows.
        urgent = self._taken or self._given_up
        if not urgent and self._runtime.now <= self._asked_seconds + _LOSSES_SECONDS:
            return {}
        self._asked_seconds = self._runtime.now
        given_up, self._given_up = self._given_up, {}
        return dict(self._runtime.processes.lost()) | given_up

    def record(self, lost: Mapping[str, str]) -> None:
        """Record the processes that are lost, with the reasons."""
        if set(lost) != {EVALUATOR}:
            self._repeating = False  # a repair takes its place
            self.begin_recovery()
        self.losses.record(lost, self._taken)
        # One that is lost again before it had joined tells nothing new: its machine is gone, and Ray has not noticed yet.
        new = {name: why for name, why in lost.items() if name not in self._told_lost}
        self._told_lost |= new.keys()
        for why, names in itertools.groupby(sorted(new, key=lambda n: (new[n], n)), new.__getitem__):
            self._view.log_event(f"{_are(names)} lost: {why}")
        for name in self.losses.given_up(lost):
            self._view.log_event(
                f"{name} is not started again, for it was lost each time before it had joined: {lost[name]}"
            )

    def returned(self, *, idle: bool) -> Procedure | None:
        """Start what is missing. Returns how branches get the nodes back that have returned."""
        members, without = self._runtime.latest.members, self.losses.without_machine
        placed = self._without_machine.keys() - without
        self._without_machine = {node: self._without_machine.get(node, self._runtime.now) for node in without}
        self._told_lost = {name for name in self._told_lost if name not in members and node_of(name) not in placed}
        working = {node_of(name) for name in {*members, *self._runtime.starting}}
        if gone := [node for node in self.losses.look() if node not in working]:  # the others' processes are lost, too
            self._view.log_event(f"{_are(gone)} gone")
        self.losses.start_missing()
        for node in self.losses.take_back():
            self._view.log_event(f"{node} {'is back' if node in self.losses.lost else 'has joined'}")
        self._tell_without_machine()
        # With no running branch, a switch to another one is in progress, which gives it its processes itself.
        if self.losses.any_returned and idle and self._view.running is not None:
            return self.losses.restore(self._view.branches, self._view.running)
        return None

    def _tell_without_machine(self) -> None:
        """Say which nodes have no machine, and what helps. Those that a scenario takes away get one when it says so."""
        if self._emulated is not None:
            return
        now = self._runtime.now
        told = frozenset(n for n, since in self._without_machine.items() if now > since + MACHINE_SECONDS)
        if told - self._told_without:
            names, several = ", ".join(sorted(told)), len(told) > 1
            waits = self.losses.lacks_nodes(self._view.branches[self._view.number].setting)
            goes_on = "waits for one" if waits else f"goes on without {'them' if several else 'it'}"
            # The way out comes early: a narrow terminal shows the first 60 letters.
            way = "run `ray start` on one, or free a CPU"
            self._view.log_event(f"{names} {'have' if several else 'has'} no machine: {way}; training {goes_on}")
        self._told_without = told

    def repair(self) -> Procedure:
        """Continue on the surviving nodes; restore the last checkpoint if all copies of a block are lost."""
        view, number = self._view, self._view.number
        restores = self.losses.lacks_blocks
        try:
            yield from self.losses.continue_without(view.branches, number)
        except ModelLost:
            seconds = self._restore_points.seconds
            view.log_event(f"servers are lost with all copies of their blocks: back to the checkpoint of {seconds:.1f} s")
            self._restore_points.roll_back(view.branches)
            yield from self.losses.continue_without(view.branches, number)
        self._train()
        if self.recovery is not None:
            self.recovery.steps += ["detect", *["restore"] * restores]
            self.recovery.done = True
            self.end_recovery()

    def begin_recovery(self) -> None:
        """From now on, measure what a loss costs. A recovery that another loss interrupts is one with the next."""
        if self.recovery is None:
            self.recovery = CostMeter(self.standstill.since_seconds)

    def end_recovery(self) -> None:
        """Tell the tuner what the recovery in progress, if there is one, has cost by now."""
        ended, self.recovery = self.recovery, None
        if ended is not None:
            self._view.branches[self._view.number].changes.append(ended.cost(self._view.now))

    def _train(self) -> None:
        """Let the running branch train again."""
        if self.trains and self._view.running is not None:
            self._runtime.coordinator.run(self._view.running)

    # ---------------------------------------------------------------------------------------------------------- slow links

    def slow_link(self, *, idle: bool) -> Procedure | None:
        """How a node whose link has become slow is replaced."""
        slow = self._links.found(idle=idle)
        return None if slow is None else self._replace_slow(slow)

    def _replace_slow(self, slow: SlowLink) -> Procedure:
        """Move a node with a slow link to another machine. If none is free, continue without the node if it slows the others
        down more than it helps and its roles have other nodes; else keep it."""
        node, runtime, why = slow.node, self._runtime, self._links.words(slow)
        here = [name for name in runtime.latest.members if node_of(name) == node]
        leaves = slow.hinders or runtime.processes.has_spare
        if leaves and len(here) > 1:
            # The node has a server and a worker: without a snapshot its worker's pushes could be lost with its server.
            runtime.coordinator.rest()
            index, until = runtime.coordinator.snapshot(), time.monotonic() + COPY_SECONDS
            while runtime.latest.durable < index and time.monotonic() < until:
                yield
        moved = leaves and runtime.processes.move_node(node)
        if not (moved or slow.hinders):
            self._links.tolerate(node)
            self._view.log_event(f"{node} stays on its machine, for no other is free: {why}")
            self._train()
            return
        if not moved:
            self.losses.excluded.add(node)
            runtime.processes.stop(here)
            why = f"{why}; its node is left out, for no other machine is free"
        self.record(dict.fromkeys(here, why))
        yield from self.repair()

    # ---------------------------------------------------------------------------------------------------------- standstill

    def pushed(self, moments: NDArray[np.float64]) -> None:
        """Pushes were completed at these times of the job, [n]."""
        if self.recovery is not None:
            self.recovery.pushed(moments)
        for seconds in moments[-1:]:
            self.standstill.pushed(float(seconds))

    def standing_still(self, *, idle: bool) -> Procedure | None:
        """Say what holds training up if no push has come for too long. First the processes repeat what servers may miss;
        then those that are waited for are replaced; then the job ends: raises RuntimeError.

        A process that hangs may not repeat what it should, so time counts then, too."""
        runtime, view = self._runtime, self._view
        self._repeating = self._repeating and not idle
        trains = view.running is not None and view.status == "running" and self.trains
        if not trains or not (idle or self._repeating):
            self.standstill.excuse(runtime.now)
            return None
        if not (waited := self.standstill.too_long(runtime.now)):
            return None
        causes = runtime.coordinator.held_up_by()
        why = "; ".join(f"{name} {what}" for name, what in causes.items()) or "no worker is in a mini-batch"
        view.log_event(f"no push for {waited:.0f} s: {why}")
        if self.standstill.found == 1:
            if causes and all(name == worker(node_of(name)) for name in causes):
                return None  # servers wait for nothing, and workers ask again by themselves for what they miss
            # A view begins, in which every process sends again what is not durable.
            self._repeating = True
            return runtime.recover(view.branches[view.number].setting)
        if self.standstill.found == 2 and causes:
            runtime.processes.stop(list(causes))
            self._given_up = dict.fromkeys(causes, "training waited too long")
            return None  # they are found lost, which also ends the repetition in progress
        raise RuntimeError(f"no push for {waited:.0f} s, and nothing helped: {why}")


def _are(names: Iterable[str]) -> str:
    *others, last = names
    return f"{', '.join((*others, last))} {'are' if others else 'is'}"
