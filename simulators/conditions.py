"""What a run meets besides its cluster: noise, stragglers, sleeps, slow-downs, nodes that come and go.

Read straight from a scenario's TOML.

Chance is drawn from the run's seed only, so that every tuner meets the same luck.
"""

from __future__ import annotations

import math
from typing import Literal

import msgspec
import numpy as np

__all__ = ["Conditions", "Episode", "NodeChange", "Sleeps", "Stragglers", "absent_at_start", "check", "straggling"]


class Sleeps(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Random sleeps: in every mini-batch, each worker sleeps with `probability` for max(0, N(mean, sd))."""

    probability: float
    mean_seconds: float
    sd_seconds: float = 0.0


class Stragglers(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Persistent slow nodes: they sleep for max(0, N(mean, sd)) in every mini-batch (RLP, Section 4.1).

    Which ones is said by name (`nodes`), or drawn once per seed, each node with `probability`. With `spread_seconds` the
    mean is each one's own, drawn once per seed from N(mean, spread).
    """

    mean_seconds: float
    sd_seconds: float = 0.0
    probability: float = 0.0
    nodes: tuple[str, ...] = ()
    spread_seconds: float = 0.0


class Episode(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """For a while, computing on one node takes `factor` times as long."""

    node: str
    start_seconds: float
    seconds: float
    factor: float


class NodeChange(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Nodes come, go or fail. One whose first change is that it joins is absent at the start.

    A node that leaves works on until its notice is over, and is gone then, in use or not; one that fails gives no notice.
    """

    nodes: tuple[str, ...]
    seconds: float
    event: Literal["joins", "leaves", "fails"]
    notice_seconds: float = 0.0  # for "leaves" only


class Conditions(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Everything that chance and circumstance add to a run."""

    jitter: float = 0.2  # coefficient of variation of the compute time (lognormal)
    stagger: bool = True  # workers begin at random points of their first cycle, not in lockstep
    sleeps: Sleeps | None = None
    stragglers: Stragglers | None = None
    episodes: tuple[Episode, ...] = ()
    nodes: tuple[NodeChange, ...] = ()  # those of one node in the order of time
    thinking_seconds: float = 0.0  # simulated time charged for every action that a tuner asks for


def check(conditions: Conditions, nodes: tuple[str, ...]) -> None:
    """Raise ValueError for conditions that cannot be, or that name a node the cluster lacks."""
    _check_nodes(conditions)
    named = (
        [e.node for e in conditions.episodes]
        + [n for c in conditions.nodes for n in c.nodes]
        + list(conditions.stragglers.nodes if conditions.stragglers else ())
    )
    for name in named:
        if name not in nodes:
            raise ValueError(f"Cannot let anything happen to node {name!r}: this cluster has {', '.join(nodes)}.")
    for label, value in _probabilities(conditions):
        if not 0 <= value <= 1:
            raise ValueError(f"Cannot use {label} = {value}: give a probability, from 0 to 1.")
    for label, value in _amounts(conditions):
        if not (value >= 0 and math.isfinite(value)):
            raise ValueError(f"Cannot use {label} = {value}: it must be finite and not negative.")
    for episode in conditions.episodes:
        if not (episode.factor > 0 and math.isfinite(episode.factor)):
            raise ValueError(f"Cannot slow {episode.node} down by {episode.factor}: the factor must be positive and finite.")


def absent_at_start(conditions: Conditions) -> frozenset[str]:
    """The nodes that have yet to join."""
    first: dict[str, str] = {}
    for change in conditions.nodes:
        for node in change.nodes:
            first.setdefault(node, change.event)
    return frozenset(node for node, event in first.items() if event == "joins")


def _check_nodes(conditions: Conditions) -> None:
    """Raise ValueError unless every node's changes follow from one another."""
    absent = absent_at_start(conditions)
    there: dict[str, tuple[bool, float]] = {}
    for change, node in ((c, n) for c in conditions.nodes for n in c.nodes):
        what = f"Cannot let node {node} be one that {change.event} at {change.seconds:g} s"
        present, since = there.get(node, (node not in absent, 0.0))
        if change.seconds < since:
            raise ValueError(f"{what}: its change before ends at {since:g} s; give changes in the order of time.")
        if present == (change.event == "joins"):
            raise ValueError(f"{what}: it is {'there already' if present else 'not there'}.")
        if change.notice_seconds and change.event != "leaves":
            raise ValueError(f"{what} with notice: only a node that leaves gives any.")
        there[node] = (change.event == "joins", change.seconds + change.notice_seconds)


def _probabilities(conditions: Conditions) -> list[tuple[str, float]]:
    found = []
    if conditions.sleeps:
        found.append(("sleeps.probability", conditions.sleeps.probability))
    if conditions.stragglers:
        found.append(("stragglers.probability", conditions.stragglers.probability))
    return found


def _amounts(conditions: Conditions) -> list[tuple[str, float]]:
    found = [("jitter", conditions.jitter), ("thinking_seconds", conditions.thinking_seconds)]
    for label, sleep in (("sleeps", conditions.sleeps), ("stragglers", conditions.stragglers)):
        if sleep:
            found += [(f"{label}.mean_seconds", sleep.mean_seconds), (f"{label}.sd_seconds", sleep.sd_seconds)]
    if conditions.stragglers:
        found.append(("stragglers.spread_seconds", conditions.stragglers.spread_seconds))
    for episode in conditions.episodes:
        found += [("episodes.start_seconds", episode.start_seconds), ("episodes.seconds", episode.seconds)]
    for change in conditions.nodes:
        found += [("nodes.seconds", change.seconds), ("nodes.notice_seconds", change.notice_seconds)]
    return found


def straggling(conditions: Conditions, nodes: tuple[str, ...], rng: np.random.Generator) -> np.ndarray:
    """Which nodes straggle in this run, bool [k]. Draws one number per node, whether it is needed or not."""
    drawn = rng.random(len(nodes))
    if conditions.stragglers is None:
        return np.zeros(len(nodes), bool)
    named = np.array([n in conditions.stragglers.nodes for n in nodes])
    return named | (drawn < conditions.stragglers.probability)
