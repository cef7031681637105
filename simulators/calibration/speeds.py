"""How fast the workers of a run are: from what each of them computes a mini-batch in.

A recording tells speeds relative to each other. What of a mini-batch does not depend on the worker's speed is told where
workers differ and mini-batches, too (`scaled_samples`).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import chi2, f

from simulators.calibration.model import ALIKE, Row, WorkerTime

__all__ = ["comparable", "scaled_samples", "with_speeds"]

_CHANCE = 0.99  # probability below which a difference between workers counts as chance
_LEAST_ERROR = 0.003  # relative, of a worker's median, at least


def with_speeds(rows: Sequence[Row], common_seconds: float = 0.0, scaled: float = 0.0) -> tuple[Row, ...]:
    """The rows with each worker's speed over that of the median worker of its run.

    A run's machines keep their speeds, so all its rows tell them together: the logarithm of a time is that of the row plus
    that of the worker, by least squares, weighted by pushes (analysis of two-way layouts). A row of few workers has another
    median worker, and would tell other speeds by itself. `common_seconds` of the compute time depend neither on speed nor on
    the samples in a mini-batch; `scaled` samples are added to those of every mini-batch (see `scaled_samples`). The workers
    of a row count as equal if they and the median worker differ by less than 5 %, or by what chance does to machines that
    are equal (chi-squared test of homogeneity): of ten equal workers with few mini-batches each, two are almost always 5 %
    apart.
    """
    runs: dict[str, list[Row]] = {}
    for row in rows:
        runs.setdefault(row.run, []).append(row)
    speed = {
        (run, worker): found for run, mine in runs.items() for worker, found in _speeds(mine, common_seconds, scaled).items()
    }
    made = []
    for row in rows:
        mine = [speed[row.run, t.worker] for t in row.worker_times]
        made.append(replace(row, speeds=() if len(mine) != row.workers or _equal(mine) else tuple(s for s, _ in mine)))
    return tuple(made)


def _speeds(rows: Sequence[Row], common_seconds: float, scaled: float) -> dict[int, tuple[float, float]]:
    """The speed of each timed worker of one run, relative to the median worker, and its standard error."""
    workers = sorted({t.worker for row in rows for t in row.worker_times})
    if not workers:
        return {}
    count = len(workers)
    normal, told, noise = np.zeros((count, count)), np.zeros(count), np.zeros((count, count))
    for row in rows:
        own = _own_seconds(row, common_seconds, scaled)
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


def _own_seconds(row: Row, common_seconds: float, scaled: float) -> dict[int, tuple[float, float]]:
    """What each worker computes a mini-batch of the mean size in, without `common_seconds`, and its standard error."""
    timed = _timed(row)
    usual = float(np.mean([size for _, size in timed] or [1]))
    times = {t.worker: (usual + scaled) / (size + scaled) for t, size in timed}
    return {
        t.worker: (max(t.seconds - common_seconds, 0.05 * t.seconds) * times[t.worker], t.error * times[t.worker])
        for t, _ in timed
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


def scaled_samples(rows: Sequence[Row]) -> tuple[float, bool]:
    """How many samples take as long as the part of computing that slower workers take longer for, whatever the mini-batch;
    and whether the rows tell it: not where that may be all of what does not grow with the mini-batch, or nothing of it.

    Worker w takes c + k_w (n + s) seconds for n samples: c on any machine, s samples' time on its own. Each worker's times
    are a line over n, and c and s are told by how the lines of slow workers differ from those of fast ones. s is 0 unless
    the rows contradict that (an F-test, 99 %): many recordings have one size of mini-batches, or machines that are alike.
    """
    told = [
        (row, t) for row in rows if not row.batch_sizes and len(row.worker_times) == row.workers for t in row.worker_times
    ]
    if not any(row.speeds for row, _ in told) or len({row.intra_threads for row, _ in told}) > 1:
        return 0.0, True
    names = {key: i for i, key in enumerate(dict.fromkeys((row.run, t.worker) for row, t in told))}
    who = np.array([names[row.run, t.worker] for row, t in told])
    samples = np.array([float(row.batch_size) for row, _ in told])
    seconds = np.array([t.seconds for _, t in told])
    errors = np.maximum([t.error for _, t in told], _LEAST_ERROR * seconds)
    spare = len(told) - len(names) - 2
    if spare < 1 or len({*samples}) < 2:
        return 0.0, False

    def fitted(*, alone: bool, scaled: bool) -> tuple[float, float]:
        """The sum of squares, and s: with a part that is the same `alone`, and with one that is `scaled` by speed."""

        def off(at: NDArray[np.float64]) -> NDArray[np.float64]:
            taken: NDArray[np.float64] = at[0] * alone + np.exp(at[2:])[who] * (samples + at[1] * scaled)
            apart: NDArray[np.float64] = (taken - seconds) / errors
            return apart

        least, most = float(seconds.min()), float(samples.max())
        start = np.array(
            [
                0.3 * least,
                0.3 * float(samples.min()),
                *np.log(0.5 * np.array([np.median(seconds[who == i] / samples[who == i]) for i in range(len(names))])),
            ]
        )
        bounds = ([0.0, 0.0, *[-np.inf] * len(names)], [least, 100 * most, *[np.inf] * len(names)])
        found = least_squares(off, start, bounds=bounds, x_scale=np.array([least, most, *[1.0] * len(names)]))
        return 2 * float(found.cost), float(found.x[1])

    (both, s), (fixed, _), (own, _) = (
        fitted(alone=alone, scaled=scaled) for alone, scaled in ((True, True), (True, False), (False, True))
    )
    # What disturbs a row is in the times of all its workers: together they tell no more than one (design effect, Kish 1965).
    alike = len(told) / len({id(row) for row, _ in told})
    clear = max(both / spare, 1.0) * alike * float(f.ppf(_CHANCE, 1, spare))
    if fixed - both > clear:
        return s, True
    return 0.0, own - both > clear
