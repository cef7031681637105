"""Conditions drawn from distributions that are fitted to a recording, in place of its replay.

They keep how large and how frequent troubles are, and forget which machine has them and in which order: mini-batches are
independent and machines alike, nodes are lost one by one. That is what a simulator without recordings assumes. Where a
comparison ends differently under replay, the identity of machines or the order of events decides.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.cluster.conditions import Episode, NodeChange

__all__ = ["NodeLosses", "fitted_changes", "fitted_episodes", "fitted_factors", "lognormal"]

_Floats = NDArray[np.float64]


def lognormal(values: Sequence[float] | _Floats, count: int, rng: np.random.Generator) -> _Floats:
    """`count` independent draws, lognormal, with the mean and the deviation of the logarithms of `values`."""
    logs = np.log(np.asarray(values, np.float64))
    made: _Floats = np.exp(rng.normal(float(logs.mean()), float(logs.std()), count))
    return made


def fitted_factors(recorded: Sequence[_Floats], workers: int, rng: np.random.Generator) -> list[_Floats]:
    """Compute times of mini-batches over the usual one for each worker; all of them from one distribution."""
    length = max(map(len, recorded))
    return [lognormal(np.concatenate(recorded), length, rng) for _ in range(workers)]


class NodeLosses(NamedTuple):
    """How often machines were lost and came back, over all places of a recorded cluster."""

    per_second: float  # losses of a place that is taken
    back_per_second: float  # of a place that is free, until it is taken again; 0: it stays free
    fails: float  # share of the losses without notice because of a fault
    notice_seconds: float  # mean of the others


def fitted_changes(
    losses: NodeLosses, nodes: Sequence[str], budget_seconds: float, rng: np.random.Generator, faster: float
) -> list[NodeChange]:
    """Every node leaves or fails, and comes back, after exponential times of its own."""
    made: list[NodeChange] = []
    for node in nodes:
        now = 0.0
        while losses.per_second > 0:
            now += rng.exponential(1 / (losses.per_second * faster))
            if now >= budget_seconds:
                break
            event: Literal["fails", "leaves"] = "fails" if rng.random() < losses.fails else "leaves"
            notice = losses.notice_seconds / faster if event == "leaves" else 0.0
            made.append(NodeChange((node,), now, event, notice))
            if not losses.back_per_second > 0:
                break
            now += notice + rng.exponential(1 / (losses.back_per_second * faster))
            made.append(NodeChange((node,), now, "joins"))
    return sorted(made, key=lambda change: change.seconds)


def fitted_episodes(
    always: Sequence[float],
    episodes: Sequence[tuple[float, float, float]],
    recorded_seconds: float,
    nodes: Sequence[str],
    budget_seconds: float,
    rng: np.random.Generator,
    faster: float,
) -> list[Episode]:
    """Every node is slower by a factor of its own, and has episodes at random times, of exponential lengths.

    `always` are the lasting factors of the recorded machines; `episodes` (start, end, factor) those of all of them together.
    """
    made: list[Episode] = []
    lengths = [end - start for start, end, _ in episodes]
    # Machines that were measured once have no episodes, and a recording without a length.
    each_second = len(episodes) / (len(always) * recorded_seconds) * faster if episodes else 0.0
    for node, lasting in zip(nodes, lognormal(always, len(nodes), rng), strict=True):
        if not math.isclose(lasting, 1.0):
            made.append(Episode(node, 0.0, budget_seconds, float(lasting)))
        count = int(rng.poisson(each_second * budget_seconds)) if episodes else 0
        starts = np.sort(rng.uniform(0.0, budget_seconds, count))
        seconds = rng.exponential(float(np.mean(lengths)) / faster, count) if count else np.zeros(0)
        factors = lognormal([factor for *_, factor in episodes], count, rng) if count else np.zeros(0)
        made += [Episode(node, *map(float, row)) for row in zip(starts, seconds, factors, strict=True)]
    return made
