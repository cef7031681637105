"""The system model of `tuners.joint`: seconds between two pushes of the job, for any setting, from what windows measured.

Every worker computes, pulls and pushes in a closed circle. Under ASP and SSP the job is a closed queueing network: the
workers' mean compute time is the think time, the servers are one station for pulls and one for pushes, and mean-value
analysis (Schweitzer's approximation; Lazowska et al. 1984, Section 7.4) gives the rate of pushes. Under BSP a round lasts as
long as its slowest worker, and all transfers of a round share the servers.

What is fitted: each machine's compute seconds; how they grow with the mini-batch (from two batch sizes, if two were seen);
and, of pulls and of pushes, how much longer than the NICs' rates say one takes alone, and how much longer it occupies a
server. One setting tells only the one of these two that its transfers wait for; until another setting tells the other, both
count as equal. A machine that was never a worker counts as its type does, and an unknown type by its cores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from tuners.actions import Job, Pushes, Setting, Window

__all__ = ["SystemModel", "closed_network", "waits"]

_FIXED_SHARE = 0.1  # of a mini-batch's compute seconds that do not depend on its size: a guess until two sizes were measured
_SERIAL_SHARE = 0.1  # of a mini-batch's computing that more threads do not speed up: a guess
_JITTER = 0.1  # relative deviation of compute times at a barrier: a guess
_NEWEST = 0.5  # weight of the newest measurement of a machine
_LEAST, _MOST = 0.02, 50.0  # that transfers are believed to take, over what the NICs' rates say of the whole model
_LEAST_OF_TABLES = 1e-5  # the same of embedding tables: a mini-batch pulls and pushes some of their rows
_ROUNDING = 1e-9  # of a moment in seconds, that the sum of a push's parts may be off
_ROUNDS = 80  # of the fixed point; it moves less than a millionth after 40


@dataclass(frozen=True, slots=True)
class _Work:
    """What a device computes of a mini-batch: its samples, and the threads that compute them."""

    node: str
    device: int
    samples: int
    threads: int


@dataclass(slots=True)
class _Factors:
    """How much longer a transfer takes than the NICs' rates say: alone, and at the busiest server; None: not measured."""

    least: float
    alone: float | None = None
    server: float | None = None

    def of(self, alone: float, server: float) -> tuple[float, float]:
        """The seconds of a transfer alone, and those at the busiest server, from those that the NICs' rates say."""
        return alone * (self.alone or self.server or 1.0), server * (self.server or self.alone or 1.0)

    def learn(self, seconds: float, alone: float, server: float) -> None:
        """Take in that a transfer took so many `seconds`, where the NICs' rates say `alone`, and `server` with its queue."""
        by_worker, by_server = self.of(alone, server)
        most_alone, most_server = (
            float(np.clip(seconds / s, self.least, _MOST)) if s > 0 else None for s in (alone, server)
        )
        if by_server > by_worker:  # the transfers wait for the server, so that they tell of a transfer alone only a bound
            self.server = most_server
            self.alone = min(self.alone, most_alone) if self.alone and most_alone else self.alone
        else:
            self.alone = most_alone
            self.server = min(self.server, most_server) if self.server and most_server else self.server


class SystemModel:
    """Predicts how often the job completes a push. Knows nothing before `learn` was called."""

    def __init__(self, job: Job) -> None:
        self._nodes = {n.name: n for n in job.nodes}
        self._names = [n.name for n in job.nodes]
        self._model_bytes = job.model_bytes
        self._seconds = dict[_Work, float]()  # of computing, measured
        # Bytes per second that servers were seen to serve, where shares of the model are free; else the NICs' rates count.
        self._served, self._rates_count = dict[str, float](), job.space.frees("model_share")
        self._transfers = dict[str, float]()  # seconds of a pull and a push of each worker, measured
        # Compute seconds that do not depend on the mini-batch's size, in samples that would take as long.
        self._fixed_samples = _FIXED_SHARE / (1 - _FIXED_SHARE) * job.start.batch_size
        least = _LEAST_OF_TABLES if job.blocks else _LEAST
        self._pull, self._push = _Factors(least), _Factors(least)

    @property
    def knows(self) -> bool:
        """Whether anything was measured."""
        return bool(self._seconds)

    def learn(
        self,
        setting: Setting,
        window: Window,
        since_seconds: float = 0.0,
        until_seconds: float = math.inf,
        ignored: Sequence[int] = (),
    ) -> bool:
        """Take in the measurements of a window that was trained under `setting`; whether there were any.

        What workers had begun before `since_seconds`, with their pulls, does not count: it may be of another size, or from
        other servers. Nor does what was pushed after `until_seconds`, when a machine had been lost, nor the
        pushes `ignored`, by their place in the window.
        """
        begun = (
            window.pushes.seconds - window.pushes.push_seconds - window.pushes.compute_seconds - window.pushes.pull_seconds
        )
        # What began at that moment counts: the sum of its parts is rounded.
        counts = ~(begun < since_seconds - _ROUNDING * window.end_seconds) & ~(window.pushes.seconds > until_seconds)
        counts[list(ignored)] = False
        pushes = Pushes._make(values[counts] for values in window.pushes)
        if not len(pushes.seconds):
            return False
        for index in np.unique(pushes.worker):
            name = self._names[int(index)]
            seconds = float(np.mean(pushes.compute_seconds[pushes.worker == index]))
            if name in setting.workers and 0 < seconds < math.inf:  # a table of recorded runs may not tell
                for work, part in self._parts(setting, name, window):
                    self._take(work, part * seconds / setting.steps_of(name))
                self._transfers[name] = float(np.mean((pushes.pull_seconds + pushes.push_seconds)[pushes.worker == index]))
        if not self._seconds:
            return False
        self._fixed_samples = self._fitted_samples()
        if self._rates_count:
            self._served |= {s.node: s.pull_bytes / s.pull_seconds for s in window.servers if s.pull_seconds > 0}
        self._learn_transfers(setting, float(np.mean(pushes.pull_seconds)), float(np.mean(pushes.push_seconds)))
        return True

    def forget(self, nodes: frozenset[str]) -> None:
        """Forget what was measured on machines that may have changed."""
        self._seconds = {work: s for work, s in self._seconds.items() if work.node not in nodes}

    def push_seconds(self, setting: Setting) -> float:
        """Mean seconds between two pushes of the job under `setting`."""
        return self._solve(setting)[0]

    def samples_per_second(self, setting: Setting) -> float:
        """Training samples per second under `setting`."""
        samples = np.mean([setting.steps_of(w) * _samples(setting, w) for w in setting.workers])
        return float(samples) / self.push_seconds(setting)

    def cycle_seconds(self, setting: Setting) -> list[float]:
        """Seconds of each worker from one push to the next; transfers as they were measured, because NICs differ."""
        seconds, pull, push = self._solve(setting)
        if waits(setting):
            return [seconds * len(setting.workers)] * len(setting.workers)
        each = zip(setting.workers, self._compute_seconds(setting), strict=True)
        return [compute + self._transfers.get(worker, pull + push) for worker, compute in each]

    def device_seconds(self, setting: Setting, worker: str, device: int, samples: int) -> tuple[float, float] | None:
        """Seconds of each of about so many `samples` on that device, and of what does not depend on their number.

        None before it, or one like it, was seen to compute.
        """
        work = _Work(worker, device, max(samples, 1), self._threads(setting, worker))
        if not any(self._kind(seen) == self._kind(work) for seen in self._seconds):
            return None
        each = self._compute(work) / (work.samples + self._fixed_samples)
        return each, self._fixed_samples * each

    def served_per_second(self, server: str) -> float:
        """Bytes per second that a server serves at most."""
        nic = self._nodes[server].nic_bytes_per_second
        return min(self._served.get(server, nic), nic)

    # ---------------------------------------------------------------------------------------------------- compute seconds

    def _works(self, setting: Setting, worker: str) -> list[_Work]:
        """What the devices of a worker compute, all at the same time."""
        threads = self._threads(setting, worker)
        return [_Work(worker, device, n, threads) for device, n in enumerate(_row(setting, worker)) if n]

    def _threads(self, setting: Setting, worker: str) -> int:
        cores = self._nodes[worker].cores
        return min(setting.intra_threads or cores, cores)

    def _kind(self, work: _Work) -> tuple[str, int]:
        """Devices of one kind are alike."""
        return self._nodes[work.node].type, work.device

    def _parts(self, setting: Setting, worker: str, window: Window) -> list[tuple[_Work, float]]:
        """What the devices of a worker compute, and for which part of its compute seconds each is busy."""
        works = self._works(setting, worker)
        if len(works) == 1:
            return [(works[0], 1.0)]
        busy = next((w.device_seconds for w in window.workers if w.node == worker), ())
        longest = max(busy, default=0.0)
        return [(w, busy[w.device] / longest) for w in works if longest > 0 and busy[w.device] > 0]

    def _take(self, work: _Work, seconds: float) -> None:
        before = self._seconds.get(work)
        self._seconds[work] = seconds if before is None else _NEWEST * seconds + (1 - _NEWEST) * before

    def _fitted_samples(self) -> float:
        """The fixed part of compute seconds, in samples, from machines that were seen with two batch sizes."""
        seen = defaultdict[tuple[str, int, int], list[tuple[int, float]]](list)
        for work, seconds in self._seconds.items():
            seen[work.node, work.device, work.threads].append((work.samples, seconds))
        found = []
        for points in seen.values():
            points.sort()
            (small, fast), (large, slow) = points[0], points[-1]
            if large > small:
                slope = max((slow - fast) / (large - small), 1e-3 * slow / large)
                found.append(max(fast / slope - small, 0.0))
        return median(found) if found else self._fixed_samples

    def _compute(self, work: _Work) -> float:
        """Seconds of a mini-batch: measured, or scaled from the most similar one on this device, or on its kind."""
        own = self._scaled(work, [w for w in self._seconds if (w.node, w.device) == (work.node, work.device)])
        if own is not None:
            return own
        alike = [w for w in self._seconds if self._kind(w) == self._kind(work)]
        by_node = [self._scaled(work, [w for w in alike if w.node == n]) for n in dict.fromkeys(w.node for w in alike)]
        known = [s for s in by_node if s is not None]
        if known:
            return median(known)
        cores = self._nodes[work.node].cores
        others = [
            s * self._nodes[n].cores / cores
            for n in dict.fromkeys(w.node for w in self._seconds)
            if (s := self._scaled(work, [w for w in self._seconds if w.node == n])) is not None
        ]
        return median(others) if others else 1.0

    def _scaled(self, work: _Work, seen: Sequence[_Work]) -> float | None:
        """The seconds of `work` from the measured work that is most like it."""
        if not seen:
            return None
        like = min(seen, key=lambda w: (abs(math.log(w.samples / work.samples)), abs(w.threads - work.threads)))
        by_size = (self._fixed_samples + work.samples) / (self._fixed_samples + like.samples)
        return self._seconds[like] * by_size * _amdahl(work.threads) / _amdahl(like.threads)

    # ------------------------------------------------------------------------------------------------- transfers, network

    def _learn_transfers(self, setting: Setting, pull: float, push: float) -> None:
        """Take in the mean seconds of pulls and of pushes, so that exactly these are predicted for `setting`."""
        alone, server = self._demands(setting)
        busy = _busy(setting)
        rate = busy / (_think(self._compute_seconds(setting)) + pull + push)
        for factors, seconds in ((self._pull, pull), (self._push, push)):
            # A transfer finds so many others at the server: by Little's law, or all of them where all begin at once.
            queue = len(setting.workers) - 1 if waits(setting) else rate * seconds * (busy - 1) / busy
            factors.learn(seconds, alone, server * (1 + queue))

    def _demands(self, setting: Setting) -> tuple[float, float]:
        """What the NICs' rates say: seconds that a transfer takes alone, and seconds that it occupies the busiest server."""
        size = self._model_bytes * setting.transfer_bits / 32
        shares = setting.shares()[1]
        server = max(size * m / self.served_per_second(s) for s, m in zip(setting.servers, shares, strict=True))
        # A machine with both roles keeps its own part, and its NIC carries both roles' transfers.
        both = set(setting.workers) & set(setting.servers)
        if not waits(setting):  # else all pull at one time, and all push at another
            server *= 1.0 + len(both) / len(setting.workers)
        return float(np.mean([size / self._nodes[w].nic_bytes_per_second for w in setting.workers])), server

    def _compute_seconds(self, setting: Setting) -> list[float]:
        """Of each worker, from a pull to the push; the slowest worker holds others back under a narrow bound."""
        compute = [setting.steps_of(w) * max(map(self._compute, self._works(setting, w))) for w in setting.workers]
        if setting.policy == "ssp" and 0 < setting.staleness < 4:
            compute = [0.5 * c + 0.5 * max(compute) for c in compute]
        return compute

    def _solve(self, setting: Setting) -> tuple[float, float, float]:
        """Seconds between two pushes of the job, of a pull, and of a push."""
        workers, compute = len(setting.workers), self._compute_seconds(setting)
        alone, server = zip(*(f.of(*self._demands(setting)) for f in (self._pull, self._push)), strict=True)
        if waits(setting):
            pull, push = (max(a, workers * s) for a, s in zip(alone, server, strict=True))
            slowest = max(max(compute), median(compute) * (1 + _JITTER * math.sqrt(2 * math.log(max(workers, 2)))))
            return (slowest + pull + push) / workers, pull, push
        rate, (pull, push) = closed_network(_think(compute), alone, server, _busy(setting))
        return 1 / rate, pull, push


def _row(setting: Setting, worker: str) -> tuple[int, ...]:
    """Samples of each device of a worker."""
    return setting.loads[setting.workers.index(worker)] if setting.loads else (setting.batch_size,)


def _samples(setting: Setting, worker: str) -> int:
    return sum(_row(setting, worker))


def _think(compute: Sequence[float]) -> float:
    """Mean seconds that workers compute, where faster ones do so more often."""
    return len(compute) / sum(1 / max(c, 1e-12) for c in compute)


def _busy(setting: Setting) -> int:
    """How many workers compute or transfer at a time."""
    return min(len(setting.workers), setting.staleness + 1) if setting.policy == "admit" else len(setting.workers)


def waits(setting: Setting) -> bool:
    """Whether every worker waits for all others after each push."""
    return setting.policy == "bsp" or (setting.policy == "ssp" and setting.staleness == 0)


def closed_network(think: float, alone: Sequence[float], served: Sequence[float], workers: int) -> tuple[float, list[float]]:
    """Pushes per second of so many `workers`, and the seconds of their transfers, by Schweitzer's approximation.

    Args:
        think: mean seconds that a worker computes.
        alone: of each transfer of a cycle, the seconds that it takes where nobody else transfers.
        served: of each, the seconds that it occupies the busiest server.
        workers: that compute or transfer.
    """
    queue, seconds, rate = [0.0] * len(alone), list(alone), 0.0
    for _ in range(_ROUNDS):
        seconds = [max(a, s * (1 + q * (workers - 1) / workers)) for a, s, q in zip(alone, served, queue, strict=True)]
        rate = workers / (think + sum(seconds))
        queue = [0.5 * q + 0.5 * rate * s for q, s in zip(queue, seconds, strict=True)]
    return rate, seconds


def _amdahl(threads: int) -> float:
    return _SERIAL_SHARE + (1 - _SERIAL_SHARE) / threads
