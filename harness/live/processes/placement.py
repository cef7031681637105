"""Which node of a scenario lives on which node of a Ray cluster."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from tuners.settings import Node

__all__ = ["Offer", "Placement", "plan"]


@dataclass(frozen=True, slots=True)
class Offer:
    """A node of a Ray cluster."""

    identity: str
    host: str  # its address
    cpus: float  # in Ray's count; inf: nobody counts them, its processes share what there is
    names: frozenset[str] = frozenset()  # of its other resources
    home: bool = False  # where whoever drives the job is


@dataclass(frozen=True, slots=True)
class Placement:
    """Where each node of a scenario lives. As text, one line per node."""

    places: tuple[tuple[str, Offer], ...]
    cpus_per_node: float

    def __str__(self) -> str:
        width = max(len(name) for name, _ in self.places)
        counted = f", {self.cpus_per_node:g} CPU" if not math.isinf(self.places[0][1].cpus) else ""
        return "\n".join(f"{name:<{width}}  on {offer.host}{counted}" for name, offer in self.places)


def plan(nodes: Sequence[Node], offers: Sequence[Offer], *, cpus_per_node: float = 1.0) -> Placement:
    """A place for every node of a scenario: on the node of the cluster that has a resource of its name, where there is one
    (`ray start --resources='{"n0": 1}'`), else where most CPUs are free, so that they spread.

    Raises ValueError, with what is needed and what is there, where they do not all find room.
    """
    free = {offer.identity: offer.cpus for offer in offers}
    places: dict[str, Offer] = {}
    named = {name: offer for offer in offers for name in offer.names}
    for node in sorted(nodes, key=lambda n: n.name not in named):  # those that have no choice first
        offer = named.get(node.name) or max(offers, key=lambda o: free[o.identity], default=None)
        if offer is None or free[offer.identity] < cpus_per_node:
            raise ValueError(_too_few(nodes, offers, cpus_per_node, node.name if node.name in named else ""))
        free[offer.identity] -= cpus_per_node
        places[node.name] = offer
    return Placement(tuple((node.name, places[node.name]) for node in nodes), cpus_per_node)


def _too_few(nodes: Sequence[Node], offers: Sequence[Offer], cpus_per_node: float, pinned: str) -> str:
    there = ", ".join(f"{o.host}: {o.cpus:g}" for o in offers) or "none"
    whom = f" ({pinned} only where a resource has its name)" if pinned else ""
    return (
        f"Cannot place {len(nodes)} nodes of {cpus_per_node:g} CPU each{whom} on this Ray cluster: it has {len(offers)} "
        f"nodes, with these CPUs: {there}. Add nodes to it, or deploy a smaller scenario."
    )
