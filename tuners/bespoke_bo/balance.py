"""Balancing loads: how many samples each device gets so that all finish together (Dalibard et al., "Tuning the Scheduling of
Distributed Stochastic Gradient Descent with Bayesian Optimization", Section 3: the load of each machine is optimised
individually).

In one draw of the model the seconds of every machine are a known function of its load. The least time in which some machines
compute the batch is found by bisection on the moment at which all finish; each machine begins after a delay of its own, the
time of its own transfer. The same bisection is used within a machine, over its devices, for each set of devices that may
take part. Then loads are rounded: each machine gets the whole part of its share, and each sample that is left goes to the
machine that finishes first with one more. If all speeds are equal, this is the method of the largest remainder; otherwise it
is better, and optimal as long as more samples take longer.
"""

from __future__ import annotations

from collections.abc import Callable
from heapq import heapify, heapreplace
from itertools import combinations

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_bo.draws import Draws

__all__ = ["Balance"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]
_MOMENTS = 512  # entries of a table of samples by time
_HALVINGS = 30


class _Table:
    """How many samples a device or machine has computed by a given time; from its log seconds [R, G] at the grid's loads.

    The R rows are those of `Balance`.
    """

    def __init__(self, logs: _Floats, seconds: _Floats) -> None:
        # A drawn function can dip. It is made to rise, because bisection needs one answer per moment.
        rising = np.maximum.accumulate(seconds, axis=1) + 1e-9 * np.arange(seconds.shape[1])
        self.seconds = rising
        self.low, self.high = float(rising.min()), float(rising.max())
        self._moments = np.linspace(self.low, self.high + 1e-9, _MOMENTS)
        self._step = self._moments[1] - self._moments[0]
        self._loads = np.array([np.exp(np.interp(self._moments, row, logs)) for row in rising])

    def samples_by(self, moments: _Floats) -> _Floats:
        """Samples computed by log seconds `moments` [.., R]; 0 before the first is complete."""
        at = (moments - self.low) / self._step
        left = np.minimum(np.maximum(at.astype(int), 0), _MOMENTS - 2)
        share = np.minimum(np.maximum(at - left, 0.0), 1.0)
        rows = np.arange(len(self._loads))
        found = self._loads[rows, left] * (1 - share) + self._loads[rows, left + 1] * share
        return np.where(moments >= self.seconds[:, 0], found, 0.0)


class Balance:
    """Loads that finish together, in R rows: one per draw for the first `most` draws, and one for their geometric mean.

    Workers have one of two roles: pure workers, and machines that also serve.
    """

    def __init__(self, draws: Draws, most: int) -> None:
        self.draws = draws
        self.used = min(most, draws.count)
        self.rows = self.used + 1
        self._logs = np.log(draws.grid)
        self._devices = [[_with_mean(table[0, : self.used]) for table in tables] for tables in draws.log_seconds]
        self._splits = dict[tuple[int, int, int], tuple[float, tuple[int, ...]]]()
        self._machines = [self._machine(group) for group in range(len(draws.cluster.groups))]

    # --------------------------------------------------------------------------------------------- many placements at once

    def seconds(self, counts: _Ints, delay: _Floats) -> _Floats:
        """The least seconds in which numbers of workers, `counts` [V, groups, 2], compute the batch, [V, R].

        Every worker begins after a `delay` [V, R, groups, 2] and computes at least one sample.
        """
        used = [(t, g, k) for g, t in enumerate(self._machines) for k in (0, 1) if t is not None and counts[:, g, k].any()]
        least = [np.where(counts[:, [g], k] > 0, delay[:, :, g, k] + np.exp(t.seconds[:, 0]), 0.0) for t, g, k in used]
        low: _Floats = np.max(least, axis=0)
        high = low + max(float(np.exp(t.high)) for t, _, _ in used)
        for _ in range(_HALVINGS):
            middle = np.sqrt(low * high)
            done = sum(counts[:, [g], k] * t.samples_by(_log(middle - delay[:, :, g, k])) for t, g, k in used)
            enough = done >= self.draws.cluster.batch
            low, high = np.where(enough, low, middle), np.where(enough, middle, high)
        return high

    def shares(self, seconds: _Floats) -> _Floats:
        """Samples that one machine of each group computes in `seconds` [V, R], [V, R, groups]."""
        none = np.zeros(seconds.shape)
        return np.stack([none if t is None else t.samples_by(_log(seconds)) for t in self._machines], axis=-1)

    def _machine(self, group: int) -> _Table | None:
        """The least log seconds of a machine at the grid's loads, over all sets of its devices."""
        tables = self._devices[group]
        if not tables:
            return None
        found = [_Table(self._logs, np.min(tables, axis=0)).seconds]
        for several in _subsets(len(tables), 2):
            found.append(self._together(group, several))
        return _Table(self._logs, np.min(found, axis=0))

    def _together(self, group: int, several: tuple[int, ...]) -> _Floats:
        """Log seconds of several devices of a machine at the grid's loads, the sum of their gradients included, [R, G]."""
        tables = [_Table(self._logs, self._devices[group][d]) for d in several]
        grid = self.draws.grid
        low = np.broadcast_to(np.max([t.seconds[:, 0] for t in tables], axis=0), (len(grid), self.rows))
        high = np.full((len(grid), self.rows), max(t.high for t in tables))
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            done = sum(t.samples_by(middle) for t in tables) >= grid[:, None]
            low, high = np.where(done, low, middle), np.where(done, middle, high)
        loads = np.zeros((self.rows, len(grid), len(self._devices[group])))
        loads[:, :, several] = np.stack([t.samples_by(high).T for t in tables], axis=-1)
        summing = self.draws.aggregation_seconds(group, loads[:-1], slice(self.used))
        seconds = np.log(np.exp(high.T) + np.vstack([summing, summing.mean(0)]))
        return np.where(grid >= len(several), seconds, np.inf)

    # ------------------------------------------------------------------------------------------------- whole loads of one

    def loads(self, counts: _Ints, delay: _Floats, row: int, seconds: float) -> list[list[tuple[int, ...]]]:
        """Samples per device of every worker in one row, by groups, for `counts` and `delay` [groups, 2].

        `seconds` is the moment at which all finish, from `Balance.seconds`. In each group pure workers come first. Every
        worker gets at least one sample.
        """
        workers = [(g, k) for g in range(len(counts)) for k in (0, 1) for _ in range(counts[g, k])]
        moments = [np.full(self.rows, np.log(max(seconds - delay[g, k], 1e-12))) for g, k in workers]
        tables = [self._machines[g] for g, _ in workers]
        real = np.array([0.0 if t is None else t.samples_by(m)[row] for t, m in zip(tables, moments, strict=True)])

        def finishes(worker: int, samples: int) -> float:
            group, role = workers[worker]
            return float(delay[group, role]) + self._best(group, row, samples)[0]

        found: list[list[tuple[int, ...]]] = [[] for _ in counts]
        for (group, _), samples in zip(workers, _whole(real, self.draws.cluster.batch, finishes), strict=True):
            found[group].append(self._best(group, row, samples)[1])
        return found

    def _best(self, group: int, row: int, samples: int) -> tuple[float, tuple[int, ...]]:
        """The least seconds of one machine for `samples`, and how its devices share them."""
        key = group, row, samples
        if key not in self._splits:
            count = len(self._devices[group])
            split = [self._split(group, row, samples, several) for several in _subsets(count, 1) if len(several) <= samples]
            self._splits[key] = min(split)
        return self._splits[key]

    def _split(self, group: int, row: int, samples: int, several: tuple[int, ...]) -> tuple[float, tuple[int, ...]]:
        """Seconds and loads with exactly these devices."""
        logs = [self._devices[group][d][row] for d in several]
        loads = [0] * len(self._devices[group])
        if len(several) == 1:
            loads[several[0]] = samples
            return self._seconds(logs[0], samples), tuple(loads)
        low, high = max(x[0] for x in logs), max(x[-1] for x in logs)
        rising = [np.maximum.accumulate(x) for x in logs]
        for _ in range(_HALVINGS):
            middle = 0.5 * (low + high)
            done = sum(np.exp(np.interp(middle, x, self._logs)) for x in rising) >= samples
            low, high = (low, middle) if done else (middle, high)
        real = np.array([np.exp(np.interp(high, x, self._logs)) for x in rising])
        whole = _whole(real, samples, lambda d, n: self._seconds(logs[d], n))
        for device, n in zip(several, whole, strict=True):
            loads[device] = n
        rows = slice(self.used) if row == self.used else slice(row, row + 1)
        extra = float(self.draws.aggregation_seconds(group, np.array([loads], float), rows).mean())
        return max(self._seconds(x, n) for x, n in zip(logs, whole, strict=True)) + extra, tuple(loads)

    def _seconds(self, logs: _Floats, samples: int) -> float:
        return float(np.exp(np.interp(np.log(samples), self._logs, logs)))


def _subsets(count: int, least: int) -> list[tuple[int, ...]]:
    """The sets of at least `least` of `count` devices."""
    return [s for size in range(least, count + 1) for s in combinations(range(count), size)]


def _log(seconds: _Floats) -> _Floats:
    """The logarithm of a time that is left, which may be negative: no sample is computed in it."""
    return np.log(np.maximum(seconds, 1e-12))


def _with_mean(table: _Floats) -> _Floats:
    return np.vstack([table, table.mean(0)])


def _whole(real: _Floats, total: int, seconds: Callable[[int, int], float]) -> list[int]:
    """Whole shares that sum to `total`, from real ones; what is left goes to the member that finishes first with one more.

    Every member gets at least one. `seconds(member, samples)` is when a member finishes.
    """
    scaled = real * (total / real.sum())
    whole = [max(1, int(x - 1e-9)) for x in scaled]
    while sum(whole) > total:  # the minimum of one sample can exceed the share
        latest = max((w for w in range(len(whole)) if whole[w] > 1), key=lambda w: seconds(w, whole[w]))
        whole[latest] -= 1
    soonest = [(seconds(w, n + 1), w) for w, n in enumerate(whole)]
    heapify(soonest)
    for _ in range(total - sum(whole)):
        _, first = soonest[0]
        whole[first] += 1
        heapreplace(soonest, (seconds(first, whole[first] + 1), first))
    return whole
