"""Which machines are lost how often, and what a loss of servers without replicas costs, as far as the job has shown.

After t seconds with n losses of a machine, its mean time to the next one is taken to be between t / n and that of machines
that are alike: those of t seconds with n losses of k such machines are lost every t / (n + 1/2). Where servers have no
replicas, the model is written every sqrt(2 C M) seconds: a checkpoint pauses all workers for C seconds, and a loss every
M seconds costs what was pushed since the last one (Young 1974). Both together take sqrt(2 C / M) of the time, and the
recovery R / M.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable

from tuners.actions import Job, Window

__all__ = ["MachineLosses"]

_STORED_BYTES_PER_SECOND = 20e6  # of a slow store: what TensorFlowOnline's published checkpoints were fitted to
_BEFORE = 0.5  # losses that are counted before any was seen
_LEAST_PRODUCTIVE = 0.05  # share of the time: somehow the job goes on


class MachineLosses:
    """What is known of the losses of machines, and of the pause that a checkpoint takes, until one was seen that of a slow
    store. A window may be taken in twice."""

    def __init__(self, job: Job) -> None:
        self._writes = job.start.checkpoint_seconds > 0
        self.pause_seconds = job.model_bytes / _STORED_BYTES_PER_SECOND if self._writes else 0.0
        self.measured = False  # whether `pause_seconds` was
        self._recovery_seconds = 0.0  # that a loss of servers took at most
        self._seconds = 0.0
        self._moments = defaultdict[str, set[float]](set)  # at which a machine was lost
        roles = ((job.start.workers, "works"), (job.start.servers, "serves"))
        self._kinds = {n.name: " ".join(word for names, word in roles if n.name in names) for n in job.nodes}
        self._alike = defaultdict[str, list[str]](list)
        for name, kind in self._kinds.items():
            self._alike[kind].append(name)

    def see(self, window: Window) -> None:
        """Take in a window."""
        self._seconds = max(self._seconds, window.end_seconds)
        for event in window.events:
            if event.event in ("failed", "left"):
                self._moments[event.node].add(event.seconds)
        for change in window.changes:
            if change.steps == ("checkpoint",):
                self.pause_seconds, self.measured = change.stall_seconds, True
            elif "detect" in change.steps:
                self._recovery_seconds = max(self._recovery_seconds, change.stall_seconds)

    def told(self, servers: Iterable[str]) -> str:
        """What is known of the losses of `servers`, in words."""
        if not any(self._moments.values()):
            return f"no machine was lost in {self._seconds:.0f} s"
        return f"these servers are lost every {self.mean_seconds(servers):.3g} s"

    def mean_seconds(self, servers: Iterable[str]) -> float:
        """Between two losses of any of `servers`: those of one moment cost one return. A job that has just begun is taken to
        be as old as four checkpoints are long."""
        age = max(self._seconds, 4 * self.pause_seconds)
        servers = list(servers)
        alike = {n for name in servers for n in self._alike[self._kinds.get(name, "")]}
        each = [moment for name in alike for moment in self._moments.get(name, ())]
        together = len(set(each)) / len(each) if each else 1.0
        rate = together * sum(map(self._losses_each, servers))
        return age / rate if rate > 0 else math.inf

    def lifetime_seconds(self, names: Iterable[str]) -> float:
        """Mean time until one of `names` is lost, each by itself; infinite for none, or where none was lost yet."""
        names = list(names)
        if not any(self._moments.get(name) for name in names):
            return math.inf
        return self._seconds * len(names) / sum(map(self._losses_each, names))

    def _losses_each(self, name: str) -> float:
        """How often this machine is expected to be lost in a time as long as the job's: as often as it was and, as that was
        seldom, as machines were that had the same roles at the start; the latter counts as much as one loss."""
        alike = self._alike[self._kinds.get(name, "")]
        usual = (sum(len(self._moments.get(n, ())) for n in alike) + _BEFORE) / max(len(alike), 1)
        return (len(self._moments.get(name, ())) + 1) / (1 + 1 / usual)

    def productive(self, servers: Iterable[str]) -> float:
        """Share of the time in which the job trains and what it trains is not lost again; 1 where servers have replicas."""
        if not self._writes:
            return 1.0
        mean = self.mean_seconds(servers)
        return max(1 - math.sqrt(2 * self.pause_seconds / mean) - self._recovery_seconds / mean, _LEAST_PRODUCTIVE)
