"""How fast the machines of a recording are, relative to each other: the speeds of the workers in each `Row`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from scipy.stats import chi2

from simulators.calibration.recorded.row import ALIKE, Row, WorkerTime

__all__ = ["comparable", "on_machines", "with_speeds"]

_CHANCE = 0.99  # probability below which a difference between workers counts as chance


def with_speeds(rows: Sequence[Row], common_seconds: float = 0.0, scaled: float = 0.0) -> tuple[Row, ...]:
    """The rows with each worker's speed over that of the median worker of its run, or of the usual machine of several.

    A run's machines keep their speeds, so all its rows tell them together: the logarithm of a time is that of the row plus
    that of the worker, by least squares, weighted by pushes (analysis of two-way layouts). A row of few workers has another
    median worker, and would tell other speeds by itself. `common_seconds` of the compute time depend neither on speed nor on
    the samples in a mini-batch; `scaled` samples are added to those of every mini-batch (see `scaled_samples`). The workers
    of a row count as equal if they and the median worker differ by less than 5 %, or by what chance does to machines that
    are equal (chi-squared test of homogeneity): of ten equal workers with few mini-batches each, two are almost always 5 %
    apart.
    """
    speed = {group: _speeds(mine, common_seconds, scaled) for group, mine in _by(_told_with, rows).items()}
    made = []
    for row in rows:
        mine = [speed[_told_with(row)][_who(row, t)] for t in row.worker_times]
        made.append(replace(row, speeds=() if len(mine) != row.workers or _equal(mine) else tuple(s for s, _ in mine)))
    return tuple(made)


def on_machines(rows: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The rows with the usual machine of runs that have some machines in common, not all; and the runs of which that would
    be said, but that contradict each other in how fast these machines are.

    Which machine is the median one of a run depends on the others in it: two quick and two slow ones, beside a run of the
    quick ones alone, had 1.5 and 0.75 times the speed of these. So such runs tell speeds together, relative to the machine
    of median speed. Where all machines are alike, nothing changes.
    """
    runs = _by(lambda row: row.run, rows)
    unlike = {row.run for row in with_speeds(rows) if row.speeds}
    usual, contradict = dict[str, str](), list[str]()
    for group in _in_common({run: (mine[0].workload, {*_machines(mine)}) for run, mine in runs.items()}):
        most = _usual([row for run in group for row in runs[run]])
        if not unlike & {*group} or len({frozenset(_machines(runs[run])) for run in group}) == 1:
            continue
        if _agree([runs[run] for run in group], most):
            usual |= dict.fromkeys(group, most)
        else:
            contradict += group
    return tuple(replace(row, usual_machine=usual.get(row.run, "")) for row in rows), tuple(contradict)


def _usual(rows: Sequence[Row]) -> str:
    """The machine of median speed, of two the faster one; an empty name where none is timed."""
    machines = sorted({*_machines(rows)})
    if not machines:
        return ""
    speeds = _speeds([replace(row, usual_machine=machines[0]) for row in rows], 0.0, 0.0)
    return sorted(machines, key=lambda machine: speeds[machine][0])[len(machines) // 2]


def _in_common(crews: Mapping[str, tuple[str, set[str]]]) -> list[list[str]]:
    """Runs by whether they have a machine in common, with each other or with a third; by run, its workload and machines."""
    found: list[tuple[str, set[str], list[str]]] = []
    for run, (workload, machines) in crews.items():
        mine = [group for group in found if group[0] == workload and group[1] & machines]
        whole = (workload, machines.union(*(of for _, of, _ in mine)), [*(r for _, _, some in mine for r in some), run])
        found = [*(group for group in found if group not in mine), whole]
    return [some for _, _, some in found]


def _agree(runs: Sequence[Sequence[Row]], usual: str) -> bool:
    """Whether the runs tell the same of their machines, each by itself and together: up to a factor of each run, by 5 % or
    by chance."""
    together = _speeds([replace(row, usual_machine=usual) for mine in runs for row in mine], 0.0, 0.0)
    for mine in runs:
        names = {t.worker: t.machine for row in mine for t in row.worker_times}
        alone = _speeds([replace(row, usual_machine="") for row in mine], 0.0, 0.0)
        times = {worker: speed / together[names[worker]][0] for worker, (speed, _) in alone.items()}
        middle = float(np.median(list(times.values()))) if times else 1.0
        if times and not _equal([(times[w] / middle, alone[w][1] / alone[w][0]) for w in times]):
            return False
    return True


def _machines(rows: Sequence[Row]) -> list[str]:
    return [t.machine for row in rows for t in row.worker_times]


def _by(key: Callable[[Row], str], rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _told_with(row: Row) -> str:
    """Equal for rows that tell speeds together."""
    return f"machine {row.usual_machine}" if row.usual_machine else f"run {row.run}"


def _who(row: Row, time: WorkerTime) -> str | int:
    return time.machine if row.usual_machine else time.worker


def _speeds(rows: Sequence[Row], common_seconds: float, scaled: float) -> dict[Any, tuple[float, float]]:
    """The speed of each timed worker of rows that tell speeds together, relative to their usual machine or to the median
    worker, and its standard error; by machine, or by number."""
    workers = sorted({_who(row, t) for row in rows for t in row.worker_times})
    if not workers:
        return {}
    count = len(workers)
    normal, told, noise = np.zeros((count, count)), np.zeros(count), np.zeros((count, count))
    for row in rows:
        own = _own_seconds(row, common_seconds, scaled)
        at = [workers.index(_who(row, t)) for t in row.worker_times]
        seconds, errors = np.array(list(own.values())).reshape(-1, 2).T
        # Without the row's mean; of a lone worker, nothing is left.
        away = max(row.pushes, 1) * (np.eye(len(at)) - 1 / max(len(at), 1))
        # Several workers of a row may be on one machine: `+=` would take in one of them only.
        np.add.at(normal, np.ix_(at, at), away)
        np.add.at(told, at, away @ np.log(seconds))
        np.add.at(noise, np.ix_(at, at), away @ np.diag((errors / seconds) ** 2) @ away)
    solve = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    own_times = np.exp(solve @ told)  # up to a common factor
    deviations = np.sqrt(np.maximum(np.diag(solve @ noise @ solve), 0.0))
    usual = rows[0].usual_machine
    speeds = (own_times[workers.index(usual)] if usual in workers else np.median(own_times)) / own_times
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
