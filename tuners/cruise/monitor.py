"""Cruise's monitors (Lee et al., ICDCS 2019, Section IV-A.1), and what the cost model makes of them, by kind of machine.

Every worker reports what a mini-batch took it to compute and to pull. The first ones of each worker do not count, nor those
that ended before the last change was complete. Averages are moving: the k-th newest mini-batch weighs (1 - forget)^k, of
the `recent` newest ones, or of all since the last solve where that is 0; by default, here and in the public code, they are
plain means.

A kind is a node type, as the vendor names it. What it takes to compute a sample there is the mean over its workers; where
none works at the moment, what its machines were last remembered to take; where none ever did, T / cores as in the public
code, T = sum_i C_i / sum_i(1 / cores_i) over the workers measured.
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
    """What a mini-batch costs one worker, averaged."""

    compute_seconds: float
    pull_seconds: float
    samples: float

    @property
    def seconds_per_sample(self) -> float:
        """C_w.proc."""
        return self.compute_seconds / self.samples


class Monitor:
    """What each worker's mini-batches cost since the last solve, less the first few of each."""

    def __init__(self, skip: int, forget: float, recent: int, since_seconds: float = 0.0) -> None:
        self._skip, self._forget, self._recent = skip, forget, recent
        self._since_seconds = since_seconds
        self._seen: dict[str, int] = {}  # mini-batches per worker so far, skipped ones included
        self._kept: dict[str, list[Reading]] = {}

    def add(self, window: Window, job: Job) -> None:
        """Take in what `window` measured."""
        per_push = {w.node: w.samples / w.pushes for w in window.workers if w.pushes}
        pushes = window.pushes
        for row in np.flatnonzero(pushes.seconds > self._since_seconds):
            node = job.nodes[pushes.worker[row]].name
            self._seen[node] = self._seen.get(node, 0) + 1
            if self._seen[node] > self._skip and node in per_push:
                reading = Reading(float(pushes.compute_seconds[row]), float(pushes.pull_seconds[row]), per_push[node])
                self._kept.setdefault(node, []).append(reading)

    def ready(self, workers: Iterable[str], least: int) -> bool:
        """Whether there are `workers`, and each has at least so many mini-batches measured."""
        return min((len(self._kept.get(w, ())) for w in workers), default=0) >= least

    def readings(self, workers: Iterable[str]) -> dict[str, Reading]:
        """The moving averages of `workers`, all of whom have been measured."""
        return {w: self._average(self._kept[w]) for w in workers}

    def clear(self) -> None:
        """Forget the measurements, but not whom we have warmed up."""
        self._kept = {}

    def _average(self, kept: list[Reading]) -> Reading:
        newest_first = np.array(kept[::-1][: self._recent or None])
        weights = (1.0 - self._forget) ** np.arange(len(newest_first))
        return Reading(*(newest_first * weights[:, None]).sum(axis=0) / weights.sum())


def remember(known: dict[str, float], readings: Mapping[str, Reading], newest: float) -> None:
    """Bring what `known` says of each node, seconds per sample, up to date: the newest reading weighs `newest`."""
    for node, reading in readings.items():
        now = reading.seconds_per_sample
        known[node] = newest * now + (1 - newest) * known.get(node, now)


class MachineGroup(NamedTuple):
    """Machines that the cost model takes to be alike."""

    nodes: tuple[str, ...]
    seconds_per_sample: float
    bytes_per_second: float

    def kind(self, achieved: float) -> MachineKind:
        """To the cost model, where pulls achieve that share of the stated bandwidth."""
        rate = achieved * self.bytes_per_second
        return MachineKind(count=len(self.nodes), compute_seconds=self.seconds_per_sample, bytes_per_second=rate)


def groups(nodes: Iterable[Node], readings: Mapping[str, Reading], known: Mapping[str, float]) -> list[MachineGroup]:
    """`nodes` by type, with what is known of each; of more than three types, the most similar are taken as one."""
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
    """The two groups least apart in compute and bandwidth as one: mean compute, the narrower bandwidth."""

    def apart(a: MachineGroup, b: MachineGroup) -> float:
        compute = log(max(a.seconds_per_sample, 1e-300) / max(b.seconds_per_sample, 1e-300))
        return abs(compute) + abs(log(a.bytes_per_second / b.bytes_per_second))

    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    a, b = min(pairs, key=lambda pair: apart(*pair))
    mean = np.average([a.seconds_per_sample, b.seconds_per_sample], weights=[len(a.nodes), len(b.nodes)])
    one = MachineGroup(a.nodes + b.nodes, float(mean), min(a.bytes_per_second, b.bytes_per_second))
    return [*(g for g in found if g is not a and g is not b), one]
