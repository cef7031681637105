"""Nodes that are lost together and come back after a repair: draws of the condition `losses`.

Clouds take spot instances of one zone back at the same moment, and a fault of a rack, a switch or a power supply takes all
that hangs on it. In recordings that ship, one event takes 2.2 nodes on average (spot instances p3, Bamboo), 1.6 (g4dn), 1.1
(faults of 400 GPU servers, InfiniteHBD). A job that survives losses one by one need not survive the same number at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np

from simulators.cluster.conditions import NodeChange, RackLosses
from simulators.cluster.profiles import NodeType

__all__ = ["check_exposed", "drawn_losses", "exposed"]

_STREAM = 8
"""Number of this module's stream of random numbers; `trace_driven` has the one before it."""


def exposed(losses: RackLosses, nodes: Sequence[tuple[str, NodeType]]) -> list[str]:
    """The nodes that can be lost: the named ones, else all; of these, with `spot`, the spot instances."""
    return [n for n, kind in nodes if (not losses.nodes or n in losses.nodes) and (kind.spot or not losses.spot)]


def check_exposed(every: Sequence[RackLosses], nodes: Sequence[tuple[str, NodeType]]) -> None:
    """Raise ValueError for losses of spot instances where none of the nodes is one, which is never meant."""
    for losses in every:
        if not exposed(losses, nodes):
            named = ", ".join(losses.nodes or (name for name, _ in nodes))
            raise ValueError(
                f"Cannot lose spot instances: none of {named} is one; give spot = true to a group of [cluster] nodes, or "
                "leave it out here."
            )


def drawn_losses(
    every: Sequence[RackLosses], nodes: Sequence[tuple[str, NodeType]], budget_seconds: float, seed: int
) -> list[NodeChange]:
    """The changes of nodes in the run of that seed, in the order of time.

    Events come at random (a Poisson process). An event strikes a node, drawn uniformly, and with it others of its rack, so
    that the number of nodes is geometric with mean `together`, at most those of the rack that are present. One that strikes
    a node that is away does nothing. Repairs are lognormal and independent.
    """
    made: list[NodeChange] = []
    for number, losses in enumerate(every):
        rng = np.random.default_rng([seed, _STREAM, number])
        names = exposed(losses, nodes)
        made += _changes(losses, names, budget_seconds, rng) if names else []
    return sorted(made, key=lambda change: change.seconds)


def _changes(losses: RackLosses, names: list[str], budget_seconds: float, rng: np.random.Generator) -> Iterator[NodeChange]:
    """The losses and returns of the nodes `names`, event by event."""
    size = losses.rack or len(names)
    away = np.zeros(len(names))  # until when each node is
    now = 0.0
    while True:
        now += rng.exponential(losses.every_seconds * losses.together / len(names))
        if now >= budget_seconds:
            return
        # The same number of draws in every event, so that an event changes only which nodes are away at the next.
        struck, count = int(rng.integers(len(names))), int(rng.geometric(1 / losses.together))
        order, deviates = rng.permutation(len(names)), rng.normal(size=len(names))
        if away[struck] > now:
            continue
        company = [i for i in order if i != struck and i // size == struck // size and away[i] <= now]
        gone = sorted([struck, *company[: count - 1]])
        yield NodeChange(tuple(names[i] for i in gone), now, losses.event, losses.notice_seconds)
        for i in gone:
            repair = losses.repair_seconds * float(np.exp(losses.repair_spread * deviates[i]))
            away[i] = now + losses.notice_seconds + repair if losses.repair_seconds else np.inf
            if away[i] < np.inf:
                yield NodeChange((names[i],), float(away[i]), "joins")
