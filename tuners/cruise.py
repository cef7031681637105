"""Cruise: how many machines work and how many serve, from a cost model of an epoch (Lee et al., "Automating System
Configuration of Distributed Machine Learning", ICDCS 2019).

Monitors report what a mini-batch costs each worker; from that the model predicts the time of an epoch under every split of
the machines, and the job is reconfigured when the best split is predicted to gain enough. This file holds the paper's part
for alike machines: the cost model for even shares (Eqs. 1-4) and its O(N) optimum (Eq. 5). Where we differ or had to choose:

* The gain is predicted against predicted, as the public code does; measured against predicted would charge the model's own
  error to the current split. The paper's threshold of 5 % is the default (the code's is 0).
* ``C_w.proc`` is seconds per sample, measured; mini-batches are not rounded up, as in Eq. 5. ``M`` is what one pull moves
  under the current setting. ``b`` is the narrowest NIC, as the vendor states it, or with ``bandwidth="measured"`` what the
  pulls themselves achieved: a server may serve slower than its NIC.
* The first mini-batches of each worker are skipped, and after a change the first one, since it may mix both settings; what
  was measured before a change is forgotten.
* A split is reached with the fewest changes of role: current workers stay workers first. A split that the system refused is
  not asked for again, and a tie keeps the current split.
* When a machine of the current split is gone its cost is infinite, so that the job is always brought to what is left.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

import numpy as np

from tuners.actions import Job, Method, Reconfigure, Rejected, Run, Setting, Tuner, Window

__all__ = ["Measured", "best_worker_count", "cruise", "epoch_seconds"]


def cruise(
    job: Job,
    *,
    gain: float = 0.05,
    batches: int = 10,
    warmup: int = 3,
    resume: int = 1,
    least: int = 3,
    bandwidth: Literal["nic", "measured"] = "nic",
) -> Tuner:
    """Watch, predict, and reconfigure the split into workers and servers when that gains more than `gain`.

    The model is consulted every `batches` mini-batches per worker, once every worker has at least `least` of them measured
    after skipping its first `warmup`, and its first `resume` after each change. A job whose roles are not free just runs.
    """
    if not (job.space.frees("worker_count") or job.space.frees("role")):
        return
    current, monitor, refused = job.start, _Monitor(warmup), set[int]()
    while True:
        seen = yield from Run(clocks=batches * len(current.workers))
        monitor.add(seen, job)
        available = tuple(n.name for n in seen.nodes or job.nodes)
        at_work = [w for w in current.workers if w in available]
        if not monitor.ready(at_work, least):
            continue
        measured = monitor.measured(job, current, at_work, available, bandwidth)
        allowed = [w for w in _splits(job, current, available) if w not in refused]
        best = best_worker_count(measured, allowed)
        if best is not None and _gains(measured, current, available, best, gain):
            wanted = _even_split(current, best, available)
            try:
                yield from Reconfigure(wanted, method=_method(job))
            except Rejected:
                refused.add(best)
            else:
                current, refused = wanted, set()
                monitor = _Monitor(resume)
                continue
        monitor = monitor.cleared()


# --------------------------------------------------------------------------------------------- the cost model (III-A, B)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measured:
    """What the cost model knows of a job on alike machines, in the paper's letters."""

    machines: int  # N
    samples: int  # D, in an epoch
    batch_size: float  # B, samples in a mini-batch
    compute_seconds: float  # C_w.proc, per sample
    model_bytes: float  # M, moved by one pull
    bytes_per_second: float  # b


def epoch_seconds(workers: int, servers: int, measured: Measured) -> float:
    """Time of an epoch under an even split, Eqs. 1-4: the minimand of Eq. 5 where workers and servers make up N.

    Infinite where either is missing.
    """
    if workers < 1 or servers < 1:
        return np.inf
    pull_seconds = measured.model_bytes / measured.bytes_per_second * max(1.0, workers / servers)
    return measured.samples / workers * (measured.compute_seconds + pull_seconds / measured.batch_size)


# ------------------------------------------------------------------------------------------------ the solver (III-C, Eq. 5)


def best_worker_count(measured: Measured, allowed: Iterable[int] | None = None) -> int | None:
    """The number of workers of least epoch time in O(N), among 1 .. N - 1 or those `allowed`; the fewest of equals.

    None where no split is possible.
    """
    counts = [w for w in (allowed if allowed is not None else range(1, measured.machines)) if 1 <= w < measured.machines]
    return min(sorted(counts), key=lambda w: epoch_seconds(w, measured.machines - w, measured), default=None)


# ------------------------------------------------------------------------------------------------- the monitors (IV-A.1)


class _Sample(NamedTuple):
    compute_seconds: float
    pull_seconds: float
    samples: float


class _Monitor:
    """What each worker's mini-batches cost since the last solve, less the first few of each."""

    def __init__(self, skip: int, seen: dict[str, int] | None = None) -> None:
        self._skip = skip
        self._seen = dict(seen or {})  # mini-batches per worker so far, skipped ones included
        self._kept: dict[str, list[_Sample]] = {}

    def add(self, window: Window, job: Job) -> None:
        """Take in what `window` measured."""
        per_push = {w.node: w.samples / w.pushes for w in window.workers if w.pushes}
        pushes = window.pushes
        for row, worker in enumerate(pushes.worker):
            node = job.nodes[worker].name
            self._seen[node] = self._seen.get(node, 0) + 1
            if self._seen[node] > self._skip and node in per_push:
                sample = _Sample(float(pushes.compute_seconds[row]), float(pushes.pull_seconds[row]), per_push[node])
                self._kept.setdefault(node, []).append(sample)

    def ready(self, workers: Iterable[str], least: int) -> bool:
        """Whether there are `workers`, and each has at least so many mini-batches measured."""
        counts = [len(self._kept.get(w, ())) for w in workers]
        return min(counts, default=0) >= least

    def cleared(self) -> _Monitor:
        """A monitor that has forgotten the measurements but not whom it has warmed up."""
        return _Monitor(self._skip, self._seen)

    def measured(
        self,
        job: Job,
        current: Setting,
        workers: Iterable[str],
        available: tuple[str, ...],
        bandwidth: Literal["nic", "measured"],
    ) -> Measured:
        """The model's constants: plain means over each worker's mini-batches (the code's default), then over `workers`."""
        compute, pull, samples = np.mean([np.mean(self._kept[w], axis=0) for w in workers], axis=0)
        model_bytes = job.model_bytes * current.transfer_bits / 32
        rate = min(n.nic_bytes_per_second for n in job.nodes if n.name in available)
        if bandwidth == "measured" and pull > 0:
            rate = model_bytes * max(1.0, len(current.workers) / len(current.servers)) / pull
        return Measured(
            machines=len(available),
            samples=job.samples,
            batch_size=float(samples),
            compute_seconds=float(compute / samples),
            model_bytes=model_bytes,
            bytes_per_second=float(rate),
        )


# ----------------------------------------------------------------------------------------- trigger and execution (IV-A.2, 3)


def _gains(measured: Measured, current: Setting, available: tuple[str, ...], best: int, gain: float) -> bool:
    """Whether the best split is predicted to take less than 1 - `gain` of what the current one is predicted to take."""
    gone = set(current.workers + current.servers) - set(available)
    before = np.inf if gone else epoch_seconds(len(current.workers), len(current.servers), measured)
    return epoch_seconds(best, measured.machines - best, measured) < (1 - gain) * before


def _even_split(current: Setting, workers: int, available: tuple[str, ...]) -> Setting:
    """So many workers, all other machines servers, even shares, and as few changes of role from `current` as can be."""
    kept = [n for n in dict.fromkeys(current.workers + current.servers) if n in available]
    order = kept + [n for n in available if n not in kept]
    return replace(
        current,
        workers=tuple(order[:workers]),
        servers=tuple(order[workers:]),
        loads=(),
        data_shares=(),
        model_shares=(),
    )


def _splits(job: Job, current: Setting, available: tuple[str, ...]) -> list[int]:
    """The numbers of workers whose split the job's space admits."""
    counts = []
    for workers in range(1, len(available)):
        try:
            job.space.check(_even_split(current, workers, available))
        except Rejected:
            continue
        counts.append(workers)
    return counts


def _method(job: Job) -> Method | None:
    """Cruise migrates blocks; a system that cannot gets its own first method."""
    return "migrate" if "migrate" in job.methods else None
