"""Cruise's monitors (Lee et al., ICDCS 2019, Section IV-A.1), and the input of the cost model, by kind of machine.

Every worker reports how long a mini-batch took to compute and to pull. The first mini-batches of each worker do not count,
nor do those that ended before the last reconfiguration was complete. Averages are moving: the k-th newest mini-batch has the
weight (1 - forget)^k, among the `recent` newest ones, or, where that is 0, among all since the last solve. By default, here
and in the public code, they are plain means.

A kind is a node type, as the vendor names it. Its seconds per sample are the mean over its workers; where no machine of the
kind is a worker now, the mean of what was remembered of its machines; where none ever was, T / cores as in the public code,
T = sum_i C_i / sum_i(1 / cores_i) over the measured workers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log
from typing import NamedTuple

import numpy as np

from tuners.actions import Job, Window
from tuners.cruise.placement import MachineKind
from tuners.settings import Node

__all__ = ["MachineGroup", "Monitor", "Reading", "groups", "remember"]

_MOST_GROUPS = 3


class Reading(NamedTuple):
    """What a mini-batch costs one worker, on average."""

    compute_seconds: float
    pull_seconds: float
    samples: float

    @property
    def seconds_per_sample(self) -> float:
        """C_w.proc."""
        return self.compute_seconds / self.samples


class Monitor:
    """The costs of each worker's mini-batches since the last solve, without its first few."""

    def __init__(self, skip: int, forget: float, recent: int, since_seconds: float = 0.0) -> None:
        self._skip, self._forget, self._recent = skip, forget, recent
        self._since_seconds = since_seconds
        self._seen: dict[str, int] = {}  # mini-batches per worker so far, with the skipped ones
        self._kept: dict[str, list[Reading]] = {}

    def add(self, window: Window, job: Job) -> None:
        """Add the measurements of `window`."""
        per_push = {w.node: w.samples / w.pushes for w in window.workers if w.pushes}
        pushes = window.pushes
        for row in np.flatnonzero(pushes.seconds > self._since_seconds):
            node = job.nodes[pushes.worker[row]].name
            self._seen[node] = self._seen.get(node, 0) + 1
            if self._seen[node] > self._skip and node in per_push:
                reading = Reading(float(pushes.compute_seconds[row]), float(pushes.pull_seconds[row]), per_push[node])
                self._kept.setdefault(node, []).append(reading)

    def ready(self, workers: Iterable[str], least: int) -> bool:
        """Whether there are `workers`, and each has at least `least` measured mini-batches."""
        return min((len(self._kept.get(w, ())) for w in workers), default=0) >= least

    def readings(self, workers: Iterable[str]) -> dict[str, Reading]:
        """The moving averages of `workers`, which all have measurements."""
        return {w: self._average(self._kept[w]) for w in workers}

    def clear(self) -> None:
        """Forget the measurements, but not which workers are warm."""
        self._kept = {}

    def _average(self, kept: list[Reading]) -> Reading:
        newest_first = np.array(kept[::-1][: self._recent or None])
        weights = (1.0 - self._forget) ** np.arange(len(newest_first))
        return Reading(*(newest_first * weights[:, None]).sum(axis=0) / weights.sum())


def remember(known: dict[str, float], readings: Mapping[str, Reading], newest: float) -> None:
    """Update `known`, the seconds per sample of each node: the newest reading has the weight `newest`."""
    for node, reading in readings.items():
        now = reading.seconds_per_sample
        known[node] = newest * now + (1 - newest) * known.get(node, now)


class MachineGroup(NamedTuple):
    """Machines that the cost model treats as alike."""

    nodes: tuple[str, ...]
    seconds_per_sample: float
    bytes_per_second: float

    def kind(self, achieved: float) -> MachineKind:
        """The group as the cost model sees it, where pulls achieve that share of the vendor's bandwidth."""
        rate = achieved * self.bytes_per_second
        return MachineKind(count=len(self.nodes), compute_seconds=self.seconds_per_sample, bytes_per_second=rate)


def groups(nodes: Iterable[Node], readings: Mapping[str, Reading], known: Mapping[str, float]) -> list[MachineGroup]:
    """`nodes` by type, with their speed; where there are more than three types, the most similar ones become one."""
    nodes = tuple(nodes)
    types = dict.fromkeys(n.type for n in nodes)
    measured = {n: r.seconds_per_sample for n, r in readings.items()}
    found = []
    for kind in types:
        members = [n for n in nodes if n.type == kind]
        seconds = [measured[n.name] for n in members if n.name in measured]
        seconds = seconds or [known[n.name] for n in members if n.name in known]
        compute = float(np.mean(seconds)) if seconds else _by_cores(nodes, known, members[0].cores)
        found.append(MachineGroup(tuple(n.name for n in members), compute, min(n.nic_bytes_per_second for n in members)))
    while len(found) > _MOST_GROUPS:
        found = _merged(found)
    return found


def _by_cores(nodes: Iterable[Node], known: Mapping[str, float], cores: int) -> float:
    """C = T / cores, from the nodes of other types."""
    told = [n for n in nodes if n.name in known]
    total = sum(known[n.name] for n in told) / sum(1 / n.cores for n in told)
    return total / cores


def _merged(found: list[MachineGroup]) -> list[MachineGroup]:
    """Join the two groups that differ least in compute and bandwidth: mean compute, the lower bandwidth."""

    def apart(a: MachineGroup, b: MachineGroup) -> float:
        compute = log(max(a.seconds_per_sample, 1e-300) / max(b.seconds_per_sample, 1e-300))
        return abs(compute) + abs(log(a.bytes_per_second / b.bytes_per_second))

    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    a, b = min(pairs, key=lambda pair: apart(*pair))
    mean = np.average([a.seconds_per_sample, b.seconds_per_sample], weights=[len(a.nodes), len(b.nodes)])
    one = MachineGroup(a.nodes + b.nodes, float(mean), min(a.bytes_per_second, b.bytes_per_second))
    return [*(g for g in found if g is not a and g is not b), one]
