"""How fast the workers of a run are: from what each of them computes a mini-batch in.

A recording tells speeds relative to each other. What of a mini-batch does not depend on the worker's speed is told where
workers differ and mini-batches, too (`common_seconds`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from scipy.stats import chi2

from simulators.calibration.model import ALIKE, Row, WorkerTime

__all__ = ["comparable", "with_speeds"]

_CHANCE = 0.99  # probability below which a difference between workers counts as chance


def with_speeds(rows: Sequence[Row], common_seconds: float = 0.0) -> tuple[Row, ...]:
    """The rows with each worker's speed over that of the median worker of its run.

    A run's machines keep their speeds, so all its rows tell them together: the logarithm of a time is that of the row plus
    that of the worker, by least squares, weighted by pushes (analysis of two-way layouts). A row of few workers has another
    median worker, and would tell other speeds by itself. `common_seconds` of the compute time depend neither on speed nor on
    the samples in a mini-batch. The workers of a row count as equal if they and the median worker differ by less than 5 %,
    or by what chance does to machines that are equal (chi-squared test of homogeneity): of ten equal workers with few
    mini-batches each, two are almost always 5 % apart.
    """
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    speed = {(run, worker): found for run, mine in runs.items() for worker, found in _speeds(mine, common_seconds).items()}
    made = []
    for row in rows:
        mine = [speed[row.run, t.worker] for t in row.worker_times]
        made.append(replace(row, speeds=() if len(mine) != row.workers or _equal(mine) else tuple(s for s, _ in mine)))
    return tuple(made)


def _speeds(rows: Sequence[Row], common_seconds: float) -> dict[int, tuple[float, float]]:
    """The speed of each timed worker of one run, relative to the median worker, and its standard error."""
    workers = sorted({t.worker for row in rows for t in row.worker_times})
    if not workers:
        return {}
    count = len(workers)
    normal, told, noise = np.zeros((count, count)), np.zeros(count), np.zeros((count, count))
    for row in rows:
        own = _own_seconds(row, common_seconds)
        at = [workers.index(worker) for worker in own]
        seconds, errors = np.array(list(own.values())).reshape(-1, 2).T
        # Without the row's mean; of a lone worker, nothing is left.
        away = max(row.pushes, 1) * (np.eye(len(at)) - 1 / max(len(at), 1))
        normal[np.ix_(at, at)] += away
        told[at] += away @ np.log(seconds)
        noise[np.ix_(at, at)] += away @ np.diag((errors / seconds) ** 2) @ away
    solve = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    own_times = np.exp(solve @ told)  # up to a common factor
    deviations = np.sqrt(np.maximum(np.diag(solve @ noise @ solve), 0.0))
    speeds = np.median(own_times) / own_times
    return {w: (round(float(s), 3), float(s * e)) for w, s, e in zip(workers, speeds, deviations, strict=True)}


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows of one workload as a fit begins with them: on clusters of one size, with speeds where batches differ."""
    machines = max(r.workers + r.servers for r in rows)
    rows = [replace(r, machines=machines) for r in rows]
    if any(r.batch_sizes for r in rows):
        # Without a guess of what does not grow with the batch, workers with small batches look slow in the first fit.
        return list(with_speeds(rows, _common_guess(rows)))
    return rows


def _common_guess(rows: Sequence[Row]) -> float:
    """Seconds of computing that do not grow with the batch: those without which a sample takes the median worker of every
    row about as long. 0 if no worker was timed."""
    timed = [row for row in rows if row.worker_times]
    if not timed:
        return 0.0

    def differs(common_seconds: float) -> float:
        each: dict[int, list[float]] = {}  # by threads, which decide how long a sample takes
        for row in timed:
            own = [(t.seconds - common_seconds) / size for t, size in _timed(row)]
            each.setdefault(row.intra_threads, []).append(math.log(float(np.median(own))))
        return sum(float(np.var(logs)) * len(logs) for logs in each.values())

    shortest = min(t.seconds for row in timed for t in row.worker_times)
    return float(min(np.linspace(0.0, 0.95, 96) * shortest, key=differs))


def _own_seconds(row: Row, common_seconds: float) -> dict[int, tuple[float, float]]:
    """What each worker computes a mini-batch of the mean size in, without `common_seconds`, and its standard error."""
    usual = float(np.mean([size for _, size in _timed(row)] or [1]))
    return {
        t.worker: (max(t.seconds - common_seconds, 0.05 * t.seconds) * (usual / size), t.error * (usual / size))
        for t, size in _timed(row)
    }


def _timed(row: Row) -> list[tuple[WorkerTime, int]]:
    """The workers that were timed, with the samples in a mini-batch of each: equal ones where not all workers were timed."""
    sizes = row.batches if len(row.worker_times) == row.workers else (row.batch_size,) * len(row.worker_times)
    return list(zip(row.worker_times, sizes, strict=True))


def _equal(speeds: Sequence[tuple[float, float]]) -> bool:
    """Whether speeds, each with its standard error, may be those of workers that are as fast as the median one, 1."""
    values, errors = np.array(speeds).T
    if max(values.max(), 1.0) < (1 + ALIKE) * min(values.min(), 1.0):
        return True
    apart = float((((values - 1.0) / np.maximum(errors, 1e-9)) ** 2).sum())
    return apart < float(chi2.ppf(_CHANCE, len(values)))
