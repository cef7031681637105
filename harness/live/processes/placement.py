"""Which node of a Ray cluster each node of a scenario runs on."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import groupby

from tuners.settings import Node

__all__ = ["ClusterNode", "NodePlacement", "place_nodes"]


@dataclass(frozen=True, slots=True)
class ClusterNode:
    """A node of a Ray cluster."""

    identity: str
    host: str  # its address
    cpus: float  # as Ray counts them; inf: not counted, its processes share what the machine has
    names: frozenset[str] = frozenset()  # of its other resources
    home: bool = False  # where the driver runs
    gpus: float = 0.0  # as Ray counts them


@dataclass(frozen=True, slots=True)
class NodePlacement:
    """Where each node of a scenario runs. As text, a line for nodes in a row with the same place."""

    places: tuple[tuple[str, ClusterNode], ...]
    cpus_per_node: float
    accelerated: frozenset[str] = frozenset()  # nodes whose worker has a GPU of its own

    def __str__(self) -> str:
        counted = f", {self.cpus_per_node:g} CPU" if not math.isinf(self.places[0][1].cpus) else ""
        where = {name: f"on {place.host}{counted}{', 1 GPU' * (name in self.accelerated)}" for name, place in self.places}
        rows = [(place, list(names)) for place, names in groupby(where, key=where.__getitem__)]
        named = [f"{names[0]} ... {names[-1]}" if len(names) > 2 else ", ".join(names) for _, names in rows]
        width = max(map(len, named))
        each = [" each" * (bool(counted) and len(names) > 1) for _, names in rows]
        return "\n".join(f"{n:<{width}}  {place}{e}" for n, (place, _), e in zip(named, rows, each, strict=True))


def place_nodes(nodes: Sequence[Node], machines: Sequence[ClusterNode], *, cpus_per_node: float = 1.0) -> NodePlacement:
    """Choose a place for every node of a scenario: the cluster's node that has a resource of its name
    (`ray start --resources='{"n0": 1}'`), otherwise the one with most CPUs free, so that nodes spread. A node of the
    scenario that has a GPU goes where one is free, and its worker gets it; where none is left, it computes on its CPU.

    Raises ValueError, with what is needed and what the cluster has, if there is not room for all.
    """
    free = {machine.identity: machine.cpus for machine in machines}
    free_gpus = {machine.identity: machine.gpus for machine in machines}
    accelerated = set()
    places: dict[str, ClusterNode] = {}
    named = {name: machine for machine in machines for name in machine.names}
    # Nodes whose machine is fixed by a resource come first, or others could take their CPUs.
    for node in sorted(nodes, key=lambda n: (n.name not in named, "gpu" not in n.devices)):
        wants = "gpu" in node.devices

        def room(machine: ClusterNode, wants: bool = wants) -> tuple[bool, bool, float]:
            """Nodes with a GPU go where one is free; others leave those machines to them."""
            has = free_gpus[machine.identity] >= 1
            return free[machine.identity] >= cpus_per_node, has == wants, free[machine.identity]

        chosen = named.get(node.name) or max(machines, key=room, default=None)
        if chosen is None or free[chosen.identity] < cpus_per_node:
            raise ValueError(_too_few(nodes, machines, cpus_per_node, node.name if node.name in named else ""))
        free[chosen.identity] -= cpus_per_node
        if wants and free_gpus[chosen.identity] >= 1:
            free_gpus[chosen.identity] -= 1
            accelerated.add(node.name)
        places[node.name] = chosen
    return NodePlacement(tuple((node.name, places[node.name]) for node in nodes), cpus_per_node, frozenset(accelerated))


def _too_few(nodes: Sequence[Node], machines: Sequence[ClusterNode], cpus_per_node: float, pinned: str) -> str:
    found = ", ".join(f"{m.host}: {m.cpus:g}" for m in machines) or "none"
    where = f" ({pinned} only where a resource has its name)" if pinned else ""
    return (
        f"Cannot place {len(nodes)} nodes of {cpus_per_node:g} CPU each{where} on this Ray cluster: it has {len(machines)} "
        f"nodes, with these CPUs: {found}. Add nodes to it, or deploy a smaller scenario."
    )
