"""The compute model of `tuners.joint`: seconds of a worker's mini-batches, for any setting, from what windows measured.

What is fitted: each machine's compute seconds, and how they grow with the mini-batch (from two batch sizes, if two were
seen). A machine that was never a worker counts as its type does, and an unknown type by its cores.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median
from typing import NamedTuple

from tuners.actions import Job, Setting, Window

__all__ = ["ComputeModel", "samples_of_devices"]

_FIXED_SHARE = 0.1  # of a mini-batch's compute seconds that do not depend on its size: a guess until two sizes were measured
_SERIAL_SHARE = 0.1  # of a mini-batch's computing that more threads do not speed up: a guess
_NEWEST = 0.5  # weight of the newest measurement of a machine


class _Work(NamedTuple):
    """What a device computes of a mini-batch: its samples, and the threads that compute them."""

    node: str
    device: int
    samples: int
    threads: int


class ComputeModel:
    """Predicts how long a worker computes. Knows nothing before `learn` was called."""

    def __init__(self, job: Job) -> None:
        self._nodes = {n.name: n for n in job.nodes}
        self._seconds = dict[_Work, float]()  # measured
        self._predicted = dict[_Work, float]()  # from what was measured, until more is; a choice asks for each many times
        # Compute seconds that do not depend on the mini-batch's size, in samples that would take as long.
        self._fixed_samples = _FIXED_SHARE / (1 - _FIXED_SHARE) * job.start.batch_size

    @property
    def knows(self) -> bool:
        """Whether anything was measured."""
        return bool(self._seconds)

    def learn(self, setting: Setting, window: Window, seconds: Mapping[str, float]) -> None:
        """Take in the mean `seconds` between pull and push of each worker of a window that was trained under `setting`."""
        for worker, each in seconds.items():
            for work, part in self._parts(setting, worker, window):
                self._take(work, part * each / setting.steps_of(worker))
        self._fixed_samples = self._fitted_samples()
        self._predicted.clear()

    def forget(self, nodes: frozenset[str]) -> None:
        """Forget what was measured on machines that may have changed."""
        self._seconds = {work: s for work, s in self._seconds.items() if work.node not in nodes}
        self._predicted.clear()

    def seconds(self, setting: Setting, worker: str) -> float:
        """Seconds that a worker computes from a pull to the push: its slowest device, in all its local steps."""
        return setting.steps_of(worker) * max(map(self._compute, self._works(setting, worker)))

    def device_seconds(self, setting: Setting, worker: str, device: int, samples: int) -> tuple[float, float] | None:
        """Seconds of each of about so many `samples` on that device, and of what does not depend on their number.

        None before it, or one like it, was seen to compute.
        """
        work = _Work(worker, device, max(samples, 1), self._threads(setting, worker))
        if not any(self._kind(seen) == self._kind(work) for seen in self._seconds):
            return None
        each = self._compute(work) / (work.samples + self._fixed_samples)
        return each, self._fixed_samples * each

    # ------------------------------------------------------------------------------------------ what was measured, and where

    def _works(self, setting: Setting, worker: str) -> list[_Work]:
        """What the devices of a worker compute, all at the same time."""
        threads = self._threads(setting, worker)
        return [_Work(worker, device, n, threads) for device, n in enumerate(samples_of_devices(setting, worker)) if n]

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
        """Seconds of a mini-batch."""
        if work not in self._predicted:
            self._predicted[work] = self._scaled_seconds(work)
        return self._predicted[work]

    def _scaled_seconds(self, work: _Work) -> float:
        """Seconds of a mini-batch: measured, or scaled from the most similar one on this device, on its kind, or on any."""
        own = self._scaled(work, [w for w in self._seconds if (w.node, w.device) == (work.node, work.device)])
        if own is not None:
            return own
        alike = [w for w in self._seconds if self._kind(w) == self._kind(work)] or list(self._seconds)
        by_node = [self._scaled(work, [w for w in alike if w.node == n]) for n in dict.fromkeys(w.node for w in alike)]
        return median([s for s in by_node if s is not None] or [1.0])

    def _scaled(self, work: _Work, seen: Sequence[_Work]) -> float | None:
        """The seconds of `work` from the measured work that is most like it."""
        if not seen:
            return None
        like = min(seen, key=lambda w: (abs(math.log(w.samples / work.samples)), abs(w.threads - work.threads)))
        by_size = (self._fixed_samples + work.samples) / (self._fixed_samples + like.samples)
        return self._seconds[like] * by_size * _amdahl(work.threads) / _amdahl(like.threads)


def samples_of_devices(setting: Setting, worker: str) -> tuple[int, ...]:
    """Samples of each device of a worker."""
    return setting.loads[setting.workers.index(worker)] if setting.loads else (setting.batch_size,)


def _amdahl(threads: int) -> float:
    return _SERIAL_SHARE + (1 - _SERIAL_SHARE) / threads
