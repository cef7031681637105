"""Nodes that join, leave, fail and slow down at the times of the scenario, on real processes.

The same `ControlPlane` that moves nodes in simulated time says here, at the job's time, which of them are there, and what
the tuner is told of it: the same events at the same times, however late the driver looks and however long processes take to
start. Processes of a node that goes are killed, and the driver repairs what is lost, as it does where a machine dies.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

from harness.live.processes.client import CoordinatorClient
from harness.live.processes.runtime import Processes
from harness.live.protocol.names import EVALUATOR, node_of
from harness.live.worker.spec import Spec
from simulators.cluster import trace_driven
from simulators.reconfiguration.control_plane import ControlPlane
from tuners.actions import NodeEvent

__all__ = ["EmulatedNodes"]


class EmulatedNodes:
    """A `harness.live.processes.runtime.Processes`: that of a job, less the nodes that the scenario takes away."""

    def __init__(self, processes: Processes, spec: Spec) -> None:
        scenario, nodes = spec.scenario, spec.scenario.cluster.nodes
        conditions, _ = trace_driven.expand_replay(scenario.conditions, nodes, scenario.budget.seconds, spec.seed)
        self._processes, self._plane = processes, ControlPlane(scenario.cluster, conditions)
        self._names = tuple(name for name, _ in nodes)
        self._running: set[str] = set()
        self._waiting: set[str] = set()  # to be started when their node joins
        self._gone: dict[str, str] = {}  # not yet reported by `lost`
        self._told = 0  # events of the control plane

    def act(self, seconds: float) -> tuple[NodeEvent, ...]:
        """Do what is due up to this time of the job. Returns what happened to nodes since the last call, in order; the
        processes that were killed are in `lost`."""
        gone: set[str] = set()  # also of those that are back by now
        while self._plane.next_seconds <= seconds:
            before = self._plane.present
            self._plane.act()
            gone |= before - self._plane.present
        present = self._plane.present
        if killed := [n for n in self._running if n != EVALUATOR and node_of(n) in gone]:
            self.stop(killed)
            self._gone |= dict.fromkeys(killed, "the scenario takes the node away")
        if here := [n for n in self._waiting if node_of(n) in present]:
            self.start(here)
        new, self._told = self._plane.events[self._told :], len(self._plane.events)
        return tuple(new)

    @property
    def leaving(self) -> frozenset[str]:
        """Nodes that are present and have said that they will be gone."""
        return self._plane.present - self._plane.available

    @property
    def slowdown(self) -> dict[str, float]:
        """How many times as long each node takes to compute just now."""
        return dict(zip(self._names, map(float, self._plane.disturbance.slowdown), strict=True))

    # ------------------------------------------------------------------------------------------------------- as Processes

    @property
    def coordinator(self) -> CoordinatorClient:
        """The coordinator."""
        return self._processes.coordinator

    def tell(self, hear: Callable[[str], None]) -> None:
        """Call `hear` with what becomes of the coordinator, in the thread that asks it."""
        self._processes.tell(hear)

    def start(self, names: Collection[str]) -> None:
        """Start processes; those of absent nodes when their node joins."""
        able = [n for n in names if n == EVALUATOR or node_of(n) in self._plane.present]
        self._waiting = (self._waiting | set(names)) - set(able)
        self._running.update(able)
        self._processes.start(able)

    def stop(self, names: Collection[str]) -> None:
        """End processes that are not needed; returns at once."""
        self._waiting.difference_update(names)
        self._running.difference_update(names)
        self._processes.stop(names)

    def lost(self) -> Mapping[str, str]:
        """Processes that have died or hung since the last call, with the reason."""
        found = {**self._processes.lost(), **self._gone}
        self._running.difference_update(found)
        self._gone = {}
        return found

    def host(self, name: str) -> str:
        """The address of the machine that a process is on, or is to start on; "" where all are on one."""
        return self._processes.host(name)

    @property
    def nodes(self) -> frozenset[str]:
        """Nodes of the job that have a machine, and are present in the scenario, now."""
        return self._processes.nodes & self._plane.present

    @property
    def expects_nodes(self) -> bool:
        """Whether a node that is absent will join, or one that is present may still get a machine."""
        waiting = self._plane.present - self._processes.nodes
        return self._plane.expects_nodes or bool(waiting and self._processes.expects_nodes)

    @property
    def has_spare(self) -> bool:
        """Whether a machine has room and runs none of the job's nodes."""
        return self._processes.has_spare

    def move_node(self, node: str) -> bool:
        """End a node's processes and give it a machine that runs none of the job's nodes; False if there is none."""
        return self._processes.move_node(node)
