"""The control plane in simulated time (SimPy): it owns the time of everything except training, and the nodes.

Its events have exact times that do not depend on how a run is cut into windows: episodes of slowness and delays of links
begin and end, nodes join, leave and fail, steps of a reconfiguration end. `TrainingTime` lets the engine train up to the
next event, and then lets the control plane act.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from typing import Any, Literal

import numpy as np
import simpy

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, Disturbance, Episode, LinkDelay, NodeChange, absent_at_start
from tuners.actions import NodeEvent

__all__ = ["ControlPlane"]


class ControlPlane:
    """The events to come, and which nodes are present. A reconfiguration runs its steps as processes of `env`."""

    def __init__(self, cluster: Cluster, conditions: Conditions) -> None:
        self.env = simpy.Environment()
        self._nodes = tuple(name for name, _ in cluster.nodes)
        self.disturbance = Disturbance(np.ones(len(self._nodes)), np.zeros(len(self._nodes)))  # changed in place
        # In force at present. Processes begin after the first mini-batches have, which the delays from 0 s on are for, too.
        self._delays: list[LinkDelay] = [d for d in conditions.delays if d.start_seconds == 0]
        self._add_up_delays()
        self._present = set(self._nodes) - absent_at_start(conditions)
        self._leaving: set[str] = set()
        self.events: list[NodeEvent] = []  # in the order of time
        self.joining = self.env.event()  # happens when the next nodes join
        self._joins_left = sum(change.event == "joins" for change in conditions.nodes)
        for episode in conditions.episodes:
            self.env.process(self._slow(episode))
        for delay in conditions.delays:
            self.env.process(self._delay(delay))
        for change in conditions.nodes:
            self.env.process(self._come_or_go(change))

    @property
    def next_seconds(self) -> float:
        """When the control plane acts next; inf if never."""
        return float(self.env.peek())

    @property
    def present(self) -> frozenset[str]:
        """Nodes that work, those under notice included."""
        return frozenset(self._present)

    @property
    def available(self) -> frozenset[str]:
        """Nodes that a new setting may use."""
        return frozenset(self._present - self._leaving)

    @property
    def expects_nodes(self) -> bool:
        """Whether a node will still join."""
        return self._joins_left > 0

    def act(self) -> None:
        """Carry out everything that is due at `next_seconds`."""
        # All events of one instant, because some create others at the same instant: half of them is no state to train in.
        due = self.env.peek()
        while self.env.peek() == due:
            self.env.step()

    def settle(self) -> None:
        """Carry out what has just become due, and all that follows at this instant."""
        while self.env.peek() <= self.env.now:
            self.env.step()

    def be_at(self, now: float) -> None:
        """Bring the control plane to `now`; nothing of its own may be due before."""
        # The engine's clock may be behind: a stall can pass the time at which the last push came.
        if now > self.env.now:
            self.env.run(until=now)

    def _slow(self, episode: Episode) -> Generator[simpy.Event, Any, None]:
        node = self._nodes.index(episode.node)
        yield self.env.timeout(episode.start_seconds)
        while True:
            self.disturbance.slowdown[node] *= episode.factor
            yield self.env.timeout(episode.seconds)
            self.disturbance.slowdown[node] /= episode.factor
            if not episode.every_seconds:
                return
            yield self.env.timeout(episode.every_seconds - episode.seconds)

    def _delay(self, delay: LinkDelay) -> Generator[simpy.Event, Any, None]:
        if delay.start_seconds > 0:
            yield self.env.timeout(delay.start_seconds)
            self._begin_delay(delay)
        while delay.seconds:
            yield self.env.timeout(delay.seconds)
            self._delays.remove(delay)
            self._add_up_delays()
            if not delay.every_seconds:
                return
            yield self.env.timeout(delay.every_seconds - delay.seconds)
            self._begin_delay(delay)

    def _begin_delay(self, delay: LinkDelay) -> None:
        self._delays.append(delay)
        self._add_up_delays()

    def _add_up_delays(self) -> None:
        # Summed anew: adding and taking off would leave a rest of rounding behind.
        for i, node in enumerate(self._nodes):
            self.disturbance.delay_seconds[i] = math.fsum(d.delay_seconds for d in self._delays if node in d.nodes)

    def _come_or_go(self, change: NodeChange) -> Generator[simpy.Event, Any, None]:
        yield self.env.timeout(change.seconds)
        if change.event == "joins":
            self._present |= set(change.nodes)
            self._tell(change.nodes, "joined")
            self._joins_left -= 1
            joined, self.joining = self.joining, self.env.event()
            joined.succeed()
            return
        if change.event == "leaves":
            self._leaving |= set(change.nodes)
            self._tell(change.nodes, "leaving")
            yield self.env.timeout(change.notice_seconds)
        self._present -= set(change.nodes)
        self._leaving -= set(change.nodes)
        self._tell(change.nodes, "left" if change.event == "leaves" else "failed")

    def _tell(self, nodes: tuple[str, ...], event: Literal["joined", "leaving", "left", "failed"]) -> None:
        self.events += [NodeEvent(float(self.env.now), node, event) for node in nodes]
