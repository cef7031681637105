"""The control plane in simulated time (SimPy): what happens to nodes and settings while the engine trains.

SimPy holds the events of the control plane, at exact times that do not depend on how a run is cut into windows: episodes
of slowness begin and end, steps of a reconfiguration take their time. `SimulatedSystem` lets the engine train up to the
next of them, and then steps through it.
"""

from __future__ import annotations

from collections.abc import Generator
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import simpy

from simulators.conditions import Conditions, Episode
from simulators.profiles import NodeType
from simulators.reconfigure import Step

__all__ = ["Cluster", "ControlPlane"]


@dataclass(frozen=True, slots=True)
class Cluster:
    """Machines and how their network shares bandwidth. Raises ValueError where that is no cluster."""

    nodes: tuple[tuple[str, NodeType], ...]  # (name, type)
    discipline: Literal["maxmin", "fifo"] = "maxmin"
    latency_seconds: float = 0.0  # one way, once per pull and per push

    def __post_init__(self) -> None:
        names = [name for name, _ in self.nodes]
        if len(names) < 1 or len(set(names)) != len(names):
            raise ValueError(f"Cannot make a cluster of nodes {names}: give at least one, each under a name of its own.")
        if self.discipline not in ("maxmin", "fifo"):
            raise ValueError(f"Cannot share a network by {self.discipline!r}: choose maxmin or fifo.")
        if not 0 <= self.latency_seconds < float("inf"):
            raise ValueError(f"Cannot use latency_seconds = {self.latency_seconds}: it must be finite and not negative.")


class ControlPlane:
    """What the control plane has scheduled, and the state it keeps of the nodes."""

    def __init__(self, nodes: tuple[str, ...], conditions: Conditions) -> None:
        self._env = simpy.Environment()
        self._nodes = nodes
        self.slowdown = np.ones(len(nodes))  # compute takes so many times as long just now, [k]
        for episode in conditions.episodes:
            self._env.process(self._slow(episode))

    @property
    def next_seconds(self) -> float:
        """When the control plane acts next; inf if never."""
        return float(self._env.peek())

    def act(self) -> None:
        """Carry out everything that is due at `next_seconds`."""
        due = self._env.peek()
        while self._env.peek() == due:
            self._env.step()

    def carry_out(self, steps: tuple[Step, ...], now: float) -> simpy.Process:
        """Begin the steps of a reconfiguration at `now`, one after another; the process ends with the last."""
        if now > self._env.now:
            self._env.run(until=now)
        return self._env.process(self._steps(steps))

    def _steps(self, steps: tuple[Step, ...]) -> Generator[simpy.Event, Any, float]:
        for step in steps:
            yield self._env.timeout(step.seconds)
        return float(self._env.now)

    def _slow(self, episode: Episode) -> Generator[simpy.Event, Any, None]:
        node = self._nodes.index(episode.node)
        yield self._env.timeout(episode.start_seconds)
        self.slowdown[node] *= episode.factor
        yield self._env.timeout(episode.seconds)
        self.slowdown[node] /= episode.factor
