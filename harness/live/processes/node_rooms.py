"""Room in a Ray cluster for the nodes of a job: a placement group each, which the node's server and worker share.

When a machine dies, another group is requested, first on a machine with few of the job's nodes; the node returns as soon as
the cluster has room.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Mapping
from typing import Any

import ray
from ray.util import placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from harness.live.processes.placement import ClusterNode, NodePlacement

__all__ = ["NodeRooms", "cluster_node", "ray_nodes", "this_machine"]

_SHARE = 0.001  # of the resource "node:ADDRESS", of which every node of a cluster has 1
_PLACE_SECONDS = 15.0  # longest wait for room: Ray gives free CPUs within a second, so that others use them
_LOOK_SECONDS = 0.25  # from one question to Ray about its nodes to the next
_SPARE_SECONDS = 3.0  # wait for room on the chosen machine, then accept any


def ray_nodes() -> list[dict[str, Any]]:
    """The nodes of the cluster that this process has joined, as Ray describes them; dead ones, too."""
    found: list[dict[str, Any]] = ray.nodes()  # type: ignore[no-untyped-call]
    return found


def cluster_node(node: Mapping[str, Any], home: str, *, counted: bool) -> ClusterNode:
    """A node as Ray describes it. `home`: the identity of the driver's node. `counted`: whether its CPUs count."""
    resources = node["Resources"]
    cpus = resources.get("CPU", 0.0) if counted else math.inf
    names, gpus = frozenset(resources), resources.get("GPU", 0.0)
    return ClusterNode(node["NodeID"], node["NodeManagerAddress"], cpus, names, node["NodeID"] == home, gpus)


def this_machine() -> NodeAffinitySchedulingStrategy:
    """How Ray is to start a process beside this one, in no node's room."""
    return NodeAffinitySchedulingStrategy(ray.get_runtime_context().get_node_id(), soft=False)


class NodeRooms:
    """The room of each node, and the machine that it is on."""

    def __init__(self, placement: NodePlacement) -> None:
        self._placement = placement
        self._groups: dict[str, Any] = {}
        self._machines: dict[str, str] = {}  # of each node that has room now
        self._hosts = {name: place.host for name, place in placement.places}  # the latest of each node
        self._noted: dict[str, str] = {}  # those of which `_hosts` has the address
        self._looked_seconds = -math.inf
        self._slow_machines: set[str] = set()  # that a node has left because of its link
        self._give_up_seconds: dict[str, float] = {}  # by node: when to accept room on any machine
        self._gone: set[str] = set()  # nodes that have lost their room, not yet told by `take_gone`

    def reserve(self) -> None:
        """Reserve room for all nodes. Raises ValueError if there is none."""
        for name, place in self._placement.places:
            self._groups[name] = self._group(name, place)
        until = time.monotonic() + _PLACE_SECONDS
        self._look()
        while missing := self._groups.keys() - self._machines.keys():
            if time.monotonic() > until:
                raise ValueError(
                    f"Cannot place {', '.join(sorted(missing))}: for {_PLACE_SECONDS:g} s the Ray cluster had no CPUs free "
                    "for them. Others use it; wait for them, or add nodes."
                )
            time.sleep(_LOOK_SECONDS)
            self._look()
        self._gone.clear()  # nothing was there yet

    def release(self) -> None:
        """Give up all room."""
        for group in self._groups.values():
            remove_placement_group(group)
        self._groups.clear()

    def strategy(self, node: str) -> PlacementGroupSchedulingStrategy:
        """How Ray is to start a process in a node's room."""
        return PlacementGroupSchedulingStrategy(self._groups[node], 0)

    @property
    def machines(self) -> Mapping[str, str]:
        """Identity of the machine of each node that has room now."""
        if time.monotonic() - self._looked_seconds > _LOOK_SECONDS:
            self._look()
        return self._machines

    def host(self, node: str) -> str:
        """The address of the machine that a node has, or had last."""
        return self._hosts[node]

    def take_gone(self) -> set[str]:
        """Nodes that have lost their room since the last call. Others were requested for them."""
        gone, self._gone = self._gone, set()
        return gone

    def slot(self, node: str) -> int:
        """Index of a node among the job's nodes on the same machine."""
        machine = self._machines.get(node)
        return sum(self._machines[other] == machine for other in sorted(self._machines) if other < node)

    @property
    def unused(self) -> ClusterNode | None:
        """A machine with room that runs none of the job's nodes, and that none has left because of its link; or None."""
        self._look()
        counts = Counter(self._machines.values())
        spare = self._spare(counts)
        return None if spare is None or spare.identity in {*counts, *self._slow_machines} else spare

    def move(self, node: str, spare: ClusterNode) -> None:
        """Give up a node's room, because its machine's link is slow, and request room on `spare`."""
        self._slow_machines.update({self._machines.pop(node)} if node in self._machines else ())
        self._place(node, spare)

    def _group(self, node: str, place: ClusterNode | None) -> Any:
        """Room for a node on this machine, or, with None, on any machine of the cluster."""
        room = {} if place is not None and math.isinf(place.cpus) else {"CPU": self._placement.cpus_per_node}
        if node in self._placement.accelerated:
            room["GPU"] = 1
        if place is not None:
            room[f"node:{place.host}"] = _SHARE
        return placement_group([room], strategy="STRICT_PACK")

    def _look(self) -> None:
        """Find out which nodes have room now, and request other room for those whose machine is gone."""
        now = self._looked_seconds = time.monotonic()
        table = placement_group_table()
        found = {name: table.get(group.id.hex(), {}) for name, group in self._groups.items()}
        self._machines = {n: entry["bundles_to_node_id"][0] for n, entry in found.items() if entry.get("state") == "CREATED"}
        counts = Counter(self._machines.values())
        self._note_hosts()
        for name, entry in found.items():
            gone = entry.get("state") in {"RESCHEDULING", "REMOVED"}
            if gone or (name not in self._machines and now > self._give_up_seconds.get(name, math.inf)):
                spare = self._spare(counts) if gone else None
                counts.update([spare.identity] if spare else [])
                self._gone.add(name)
                self._place(name, spare)

    def _note_hosts(self) -> None:
        if self._machines == self._noted:
            return
        self._noted = self._machines
        addresses = {node["NodeID"]: node["NodeManagerAddress"] for node in ray_nodes()}
        self._hosts |= {name: addresses[machine] for name, machine in self._machines.items() if machine in addresses}

    def _place(self, node: str, spare: ClusterNode | None) -> None:
        """Give up a node's room, and request other room: on `spare`, or on any machine."""
        remove_placement_group(self._groups[node])
        self._groups[node] = self._group(node, spare)
        self._give_up_seconds[node] = time.monotonic() + _SPARE_SECONDS if spare else math.inf

    def _spare(self, counts: Mapping[str, int]) -> ClusterNode | None:
        """The machine with free CPUs that runs the fewest of our nodes, so that few are lost if it dies next; or None.

        `counts` has the number of our nodes on each machine.
        """
        cpus = self._placement.cpus_per_node
        alive = (cluster_node(node, "", counted=True) for node in ray_nodes() if node["Alive"])
        able = [place for place in alive if place.cpus >= cpus * (counts.get(place.identity, 0) + 1)]
        return min(able, key=lambda p: (p.identity in self._slow_machines, counts.get(p.identity, 0)), default=None)
