"""The system model of `tuners.joint`: seconds between two pushes of the job, for any setting, from what windows measured.

Every worker computes, pulls and pushes in a closed circle. Under ASP and SSP the job is a closed queueing network: the
workers' mean compute time is the think time, the servers are one station for pulls and one for pushes, and mean-value
analysis (Schweitzer's approximation; Lazowska et al. 1984, Section 7.4) gives the rate of pushes. Under BSP a round lasts as
long as its slowest worker, and all transfers of a round share the servers.

What is fitted: compute seconds (`tuners.joint.models.compute_model`), and, of pulls and of pushes, how much longer than the
NICs' rates say one takes alone, and how much longer it occupies a server. One setting tells only the one of these two that
its transfers wait for; until another setting tells the other, both count as equal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median

import numpy as np

from tuners.actions import Job, Pushes, Setting, Window
from tuners.joint.models.compute_model import ComputeModel, samples_of_devices

__all__ = ["SystemModel", "closed_network", "waits"]

_JITTER = 0.1  # relative deviation of compute times at a barrier: a guess
_LEAST, _MOST = 0.02, 50.0  # that transfers are believed to take, over what the NICs' rates say of the whole model
_LEAST_OF_TABLES = 1e-5  # the same of embedding tables: a mini-batch pulls and pushes some of their rows
_ROUNDING = 1e-9  # of a moment in seconds, that the sum of a push's parts may be off
_ROUNDS = 80  # of the fixed point; it moves less than a millionth after 40


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
        self.compute = ComputeModel(job)
        # Bytes per second that servers were seen to serve, where shares of the model are free; else the NICs' rates count.
        self._served, self._rates_count = dict[str, float](), job.space.frees("model_share")
        self._transfers = dict[str, float]()  # seconds of a pull and a push of each worker, measured
        least = _LEAST_OF_TABLES if job.blocks else _LEAST
        self._pull, self._push = _Factors(least), _Factors(least)

    @property
    def knows(self) -> bool:
        """Whether anything was measured."""
        return self.compute.knows

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
        computing = dict[str, float]()
        for index in np.unique(pushes.worker):
            name = self._names[int(index)]
            seconds = float(np.mean(pushes.compute_seconds[pushes.worker == index]))
            if name in setting.workers and 0 < seconds < math.inf:  # a table of recorded runs may not tell
                computing[name] = seconds
                self._transfers[name] = float(np.mean((pushes.pull_seconds + pushes.push_seconds)[pushes.worker == index]))
        self.compute.learn(setting, window, computing)
        if not self.knows:
            return False
        if self._rates_count:
            self._served |= {s.node: s.pull_bytes / s.pull_seconds for s in window.servers if s.pull_seconds > 0}
        self._learn_transfers(setting, float(np.mean(pushes.pull_seconds)), float(np.mean(pushes.push_seconds)))
        return True

    def push_seconds(self, setting: Setting) -> float:
        """Mean seconds between two pushes of the job under `setting`."""
        return self._solve(setting)[0]

    def samples_per_second(self, setting: Setting) -> float:
        """Training samples per second under `setting`."""
        samples = np.mean([setting.steps_of(w) * sum(samples_of_devices(setting, w)) for w in setting.workers])
        return float(samples) / self.push_seconds(setting)

    def cycle_seconds(self, setting: Setting) -> list[float]:
        """Seconds of each worker from one push to the next; transfers as they were measured, because NICs differ."""
        seconds, pull, push = self._solve(setting)
        if waits(setting):
            return [seconds * len(setting.workers)] * len(setting.workers)
        each = zip(setting.workers, self._compute_seconds(setting), strict=True)
        return [compute + self._transfers.get(worker, pull + push) for worker, compute in each]

    def served_per_second(self, server: str) -> float:
        """Bytes per second that a server serves at most."""
        nic = self._nodes[server].nic_bytes_per_second
        return min(self._served.get(server, nic), nic)

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
        compute = [self.compute.seconds(setting, w) for w in setting.workers]
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
