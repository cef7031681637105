"""What a replayed trace does to a run, as series of numbers: of the recording, and of the conditions that runs get from it.

| role | one series is of | a number is |
| --- | --- | --- |
| compute | a worker | the time of a mini-batch over the usual one |
| stragglers | a machine | how much slower it is than the usual one, at intervals of recorded seconds |
| bandwidth | a machine | recorded seconds at its full rate until it is throttled, while it sends all the time |
| nodes | as many places as the cluster has nodes | how many of them are lost in an interval |

The series of runs are made from the expanded conditions of their seeds (`trace_driven.expand_replay`), which
the engine and the control plane carry out as they are.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from simulators.cluster import trace_driven
from simulators.cluster.compute_factors import Factors
from simulators.cluster.conditions import Conditions, Episode, Replay, ReplayedTrace
from simulators.cluster.profiles import NodeType
from simulators.cluster.trace_driven_nodes import Places
from traces.parts import scan

__all__ = ["STEPS", "ConditionSeries", "condition_series", "with_fitted"]

_Floats = NDArray[np.float64]
_Nodes = tuple[tuple[str, NodeType], ...]

STEPS = {
    "compute": "mini-batches",
    "stragglers": "probes of the recording",
    "nodes": "intervals",
}
"""What one step along a series is, by role; a series of the others has one number."""

_UNTHROTTLED = 10_000.0  # seconds, in place of infinity; longer than the recordings of machines that were not throttled
_INTERVALS = 40  # of a run, in which losses are counted
_SUBSETS = 30  # of the recorded places, each as many as the cluster has nodes
_MOST = 2000  # numbers of one series


class ConditionSeries(NamedTuple):
    """The series of one role."""

    recorded: list[_Floats]
    simulated: list[list[_Floats]]  # by seed


def with_fitted(conditions: Conditions) -> Conditions:
    """The same conditions with every replayed trace replaced by draws from distributions that are fitted to it."""
    given = (conditions.replay or Replay()).traces()
    fitted = {role: msgspec.structs.replace(trace, fitted=True, deal="lot") for role, trace in given.items()}
    return msgspec.structs.replace(conditions, replay=Replay(**fitted))


def condition_series(
    conditions: Conditions, nodes: _Nodes, budget_seconds: float, seeds: Sequence[int]
) -> dict[str, ConditionSeries]:
    """By role, the series of the recording, and those of the runs with these seeds, for at most `budget_seconds`.

    Raises ValueError as `expand_replay` does.
    """
    found = {}
    expanded = [trace_driven.expand_replay(conditions, nodes, budget_seconds, seed) for seed in seeds]
    for role, recording in trace_driven.roles(conditions.replay or Replay()).items():
        if role == "compute":
            times = trace_driven.relative_times(recording)
            recorded = [worker.factors for run in times.values() for worker in run]
            simulated = [_factor_rows(factors) for _, factors in expanded]
        elif role == "bandwidth":
            recorded, simulated = _full_rate_seconds(recording, [made for made, _ in expanded], nodes)
        elif role == "nodes":
            recorded, simulated = _losses(recording, [made for made, _ in expanded], nodes, budget_seconds)
        else:
            recorded, simulated = _slowness(recording, [made for made, _ in expanded], nodes, budget_seconds)
        found[role] = ConditionSeries(recorded, simulated)
    return found


def _factor_rows(factors: Factors) -> list[_Floats]:
    values = np.asarray(factors.values, np.float64)
    return [row[:count] for row, count in zip(values, factors.counts, strict=True) if count]


# ----------------------------------------------------------------------------------------------------------------- rates


def _full_rate_seconds(recording: ReplayedTrace, made: Sequence[Conditions], nodes: _Nodes) -> ConditionSeries:
    """Recordings of rates end soon after the throttling begins, so the rate over time is not compared."""
    known = [_UNTHROTTLED if one is None else one.seconds for one in trace_driven.throttles(recording)]
    kinds = dict(nodes)
    simulated = []
    for one in made:
        lasts = dict.fromkeys(kinds, _UNTHROTTLED)
        for bucket in one.buckets:
            for node in bucket.nodes:
                spare = kinds[node].nic_bytes_per_second - bucket.refill_bytes_per_second
                lasts[node] = bucket.capacity_bytes / max(spare, 1e-9) * recording.faster
        simulated.append([np.array([min(seconds, _UNTHROTTLED)]) for seconds in lasts.values()])
    return ConditionSeries([np.array([min(seconds, _UNTHROTTLED)]) for seconds in known], simulated)


# ---------------------------------------------------------------------------------------------------------------- losses


def _losses(
    recording: ReplayedTrace, made: Sequence[Conditions], nodes: _Nodes, budget_seconds: float
) -> tuple[list[_Floats], list[list[_Floats]]]:
    """Losses per interval. A recording that is shorter than the run ends it, for nodes stay as they are then."""
    by_run: dict[str, Places] = trace_driven.places_of(recording)
    # How long a run without events was is not known: it counts with as many intervals as those that are simulated.
    ends = [one.events[-1].seconds for one in by_run.values() if one.events and one.events[-1].seconds > 0]
    span = min([budget_seconds * recording.faster, *(0.8 * end for end in ends)])
    bins = np.linspace(0.0, span, _INTERVALS + 1)
    driven = [n for n, _ in nodes if not recording.nodes or n in recording.nodes]
    rng = np.random.default_rng(0)
    recorded = []
    for one in by_run.values():
        lost = [(e.seconds, e.place) for e in one.events if e.event != "joins"]
        places = sorted({place for _, place in lost} | one.taken_at_start)
        edges = np.arange(0.0, one.events[-1].seconds, bins[1]) if one.events else bins
        edges = edges if len(edges) > 1 else bins
        for _ in range(_SUBSETS):
            ours = set(rng.permutation(places)[: len(driven)].tolist())
            recorded.append(_counted([seconds for seconds, place in lost if place in ours], edges))
    simulated = [
        [_counted([c.seconds * recording.faster for c in one.nodes for _ in c.nodes if c.event != "joins"], bins)]
        for one in made
    ]
    return recorded, simulated


def _counted(moments: Sequence[float], edges: _Floats) -> _Floats:
    return np.histogram(moments, edges)[0].astype(np.float64)


# -------------------------------------------------------------------------------------------------------------- slowness


def _slowness(
    recording: ReplayedTrace, made: Sequence[Conditions], nodes: _Nodes, budget_seconds: float
) -> tuple[list[_Floats], list[list[_Floats]]]:
    runs = trace_driven.slowness_of(recording)
    probes = scan(Path(recording.trace), "probes").select("run", "node", "seconds").collect().sort("run", "node", "seconds")
    steps = probes["seconds"].diff().filter(probes["seconds"].diff() > 0)
    tick = float(steps.to_numpy().min()) if len(steps) else budget_seconds  # machines that were measured once
    recorded = []
    for run in runs.values():
        at = np.arange(0.0, run.seconds or tick, max(tick, run.seconds / _MOST))
        recorded += [_slow([Episode("", s, e - s, f) for s, e, f in m.episodes], at, m.always) for m in run.machines]
    at = np.arange(0.0, budget_seconds, max(tick / recording.faster, budget_seconds / _MOST))
    simulated = [[_slow([e for e in one.episodes if e.node == node], at) for node, _ in nodes] for one in made]
    return recorded, simulated


def _slow(episodes: Sequence[Episode], at: _Floats, always: float = 1.0) -> _Floats:
    found = np.full(len(at), always)
    for one in episodes:
        since = at - one.start_seconds
        inside = since % one.every_seconds if one.every_seconds else since
        found = np.where((since >= 0) & (inside < one.seconds), found * one.factor, found)
    return found
