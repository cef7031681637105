"""Cruise's monitors (Lee et al., ICDCS 2019, Section IV-A.1), and the input of the cost model, by kind of machine.

Every worker reports how long a mini-batch took to compute and to pull. The first mini-batches of each worker do not count,
nor do those that ended before the last reconfiguration was complete. Averages are moving: the k-th newest mini-batch has the
weight (1 - forget)^k, among the `recent` newest ones, or, where that is 0, among all since the last solve. By default, here
and in the public code, they are plain means.

A kind is a node type, as the vendor names it, or several similar ones. Its seconds per sample are the mean over its workers;
where no machine of the kind is a worker now, the mean of what was remembered of its machines; where none ever was, T / cores
as in the public code, T = sum_i C_i / sum_i(1 / cores_i) over the measured workers. The rate at which its machines serve is
the lowest that was measured and remembered of them, bytes over busy seconds, because they hold equal shares, and a pull ends
with the slowest; where none ever was a server, that of the vendor's NIC.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from math import log
from typing import NamedTuple

import numpy as np

from tuners.actions import Job, Window
from tuners.cruise.placement import MOST_KINDS, MachineKind
from tuners.settings import Node

__all__ = ["MeasuredKind", "Memory", "Monitor", "Reading", "measured_kinds"]


class Reading(NamedTuple):
    """What a mini-batch costs one worker, on average."""

    compute_seconds: float
    pull_seconds: float
    samples: float

    @property
    def seconds_per_sample(self) -> float:
        """C_w.proc."""
        return self.compute_seconds / self.samples


class Memory:
    """What was measured of each machine, kept while it has the other role: moving averages, by node."""

    def __init__(self, newest: float) -> None:
        """`newest` is the weight of the newest reading."""
        self._newest = newest
        self.seconds_per_sample: dict[str, float] = {}
        self.served_per_second: dict[str, float] = {}  # bytes

    def add(self, readings: Mapping[str, Reading], served: Mapping[str, float]) -> None:
        """Add what workers and servers have reported since the last solve."""
        for node, reading in readings.items():
            self._average(self.seconds_per_sample, node, reading.seconds_per_sample)
        for node, rate in served.items():
            self._average(self.served_per_second, node, rate)

    def _average(self, known: dict[str, float], node: str, now: float) -> None:
        known[node] = self._newest * now + (1 - self._newest) * known.get(node, now)


class Monitor:
    """The costs of each worker's mini-batches since the last solve, without its first few; and the servers' rates."""

    def __init__(self, skip: int, forget: float, recent: int, since_seconds: float = 0.0) -> None:
        self._skip, self._forget, self._recent = skip, forget, recent
        self._since_seconds = since_seconds
        self._seen: dict[str, int] = {}  # mini-batches per worker so far, with the skipped ones
        self._kept: dict[str, list[Reading]] = {}
        self._served: dict[str, tuple[float, float]] = {}  # by server: bytes and busy seconds of pulls
        self._hears_servers = False  # the last window had their measurements

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

        self._hears_servers = bool(window.servers)
        if window.start_seconds >= self._since_seconds:  # while blocks move, a server is slower
            for server in window.servers:
                size, seconds = self._served.get(server.node, (0.0, 0.0))
                self._served[server.node] = size + server.pull_bytes, seconds + server.pull_seconds

    def ready(self, workers: Iterable[str], least: int, servers: Iterable[str] = ()) -> bool:
        """Whether there are `workers`, and each has at least `least` measured mini-batches; and each of `servers`, where the
        system measures them, has been measured for a whole window.

        A server without measurements is waited for only while the system tells of its servers. One that was measured and
        was never busy counts as one that never served.
        """
        if self._hears_servers and not all(s in self._served for s in servers):
            return False
        return min((len(self._kept.get(w, ())) for w in workers), default=0) >= least

    def served_per_second(self) -> dict[str, float]:
        """The rate of each server, bytes per second that it was busy."""
        return {node: size / seconds for node, (size, seconds) in self._served.items() if seconds > 0}

    def readings(self, workers: Iterable[str]) -> dict[str, Reading]:
        """The moving averages of `workers`, which all have measurements."""
        return {w: self._average(self._kept[w]) for w in workers}

    def clear(self) -> None:
        """Forget the measurements, but not which workers are warm."""
        self._kept, self._served = {}, {}

    def _average(self, kept: list[Reading]) -> Reading:
        newest_first = np.array(kept[::-1][: self._recent or None])
        weights = (1.0 - self._forget) ** np.arange(len(newest_first))
        return Reading(*(newest_first * weights[:, None]).sum(axis=0) / weights.sum())


class MeasuredKind(NamedTuple):
    """A kind of machines, as measured: the cost model treats them as alike."""

    nodes: tuple[str, ...]
    seconds_per_sample: float
    bytes_per_second: float
    served_per_second: float | None = None  # as measured; None: never

    def modelled(self, achieved: float) -> MachineKind:
        """The kind as the cost model sees it, where pulls achieve that share of the vendor's bandwidth."""
        rate = achieved * self.bytes_per_second
        return MachineKind(
            count=len(self.nodes),
            compute_seconds=self.seconds_per_sample,
            bytes_per_second=rate,
            service_bytes_per_second=self.served_per_second,
        )


def measured_kinds(nodes: Iterable[Node], readings: Mapping[str, Reading], known: Memory) -> list[MeasuredKind]:
    """The kinds of `nodes`: their types or, where these are more than three, the most similar ones together."""
    nodes = tuple(nodes)
    types = dict.fromkeys(n.type for n in nodes)
    measured = {n: r.seconds_per_sample for n, r in readings.items()}
    found = []
    for name in types:
        members = [n for n in nodes if n.type == name]
        seconds = [measured[n.name] for n in members if n.name in measured]
        seconds = seconds or [known.seconds_per_sample[n.name] for n in members if n.name in known.seconds_per_sample]
        compute = float(np.mean(seconds)) if seconds else _by_cores(nodes, known.seconds_per_sample, members[0].cores)
        served = [known.served_per_second[n.name] for n in members if n.name in known.served_per_second]
        found.append(
            MeasuredKind(
                tuple(n.name for n in members),
                compute,
                min(n.nic_bytes_per_second for n in members),
                min(served, default=None),
            )
        )
    while len(found) > MOST_KINDS:
        found = _merged(found)
    return found


def _by_cores(nodes: Iterable[Node], known: Mapping[str, float], cores: int) -> float:
    """C = T / cores, from the nodes of other types."""
    told = [n for n in nodes if n.name in known]
    total = sum(known[n.name] for n in told) / sum(1 / n.cores for n in told)
    return total / cores


def _merged(found: list[MeasuredKind]) -> list[MeasuredKind]:
    """Join the two kinds that differ least in compute and bandwidth: mean compute, the lower bandwidth and service rate."""

    def apart(a: MeasuredKind, b: MeasuredKind) -> float:
        compute = log(max(a.seconds_per_sample, 1e-300) / max(b.seconds_per_sample, 1e-300))
        return abs(compute) + abs(log(a.bytes_per_second / b.bytes_per_second))

    pairs = [(a, b) for i, a in enumerate(found) for b in found[i + 1 :]]
    a, b = min(pairs, key=lambda pair: apart(*pair))
    mean = np.average([a.seconds_per_sample, b.seconds_per_sample], weights=[len(a.nodes), len(b.nodes)])
    served = [rate for rate in (a.served_per_second, b.served_per_second) if rate is not None]
    width = min(a.bytes_per_second, b.bytes_per_second)
    one = MeasuredKind(a.nodes + b.nodes, float(mean), width, min(served, default=None))
    return [*(k for k in found if k is not a and k is not b), one]
