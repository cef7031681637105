"""What the engine simulates for the constants and a recorded `Row`: mean times, over as many seeds as make them precise."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.branch import stacked
from simulators.calibration.closed_form import Spans
from simulators.calibration.model import Constants, cluster, demand, setting
from simulators.calibration.recorded.row import Row
from simulators.cluster.conditions import Conditions, LinkDelay, Stragglers
from simulators.engine.job_state import Records
from simulators.engine.loop import advance_lanes
from simulators.jobs import JobSpec
from simulators.system import SimulatedSystem
from simulators.workloads.workload import Workload
from tuners.actions import Target

__all__ = [
    "SEEDS",
    "Estimate",
    "over_seeds",
    "pushes_of",
    "relative_error",
    "simulated",
    "simulated_seconds",
    "stragglers",
    "system_of",
]

_WARM_UP, _CYCLES, _PUSHES = 20, 40, 1600  # of one seed: cycles per worker before and while measuring, and the least pushes
_LEAST_SEEDS = 4  # that a simulated mean is taken over
SEEDS = 64  # at most
_FEWEST_ROWS = 64  # of the engine's table
_PRECISE = 0.005  # relative standard error at which no further seed is simulated


class Estimate(NamedTuple):
    """A mean over independent seeds of the engine."""

    spans: Spans  # of the whole setting: scalars
    error: float  # relative standard error of the cycle's mean


def simulated(constants: Constants, row: Row, seeds: int = SEEDS) -> Estimate:
    """The mean parts of a cycle that the engine simulates for a row, after a warm-up in which workers fall out of step.

    A mean over seeds (independent replications; Law, Simulation Modeling and Analysis, Section 9.5.2): as many as it takes
    to bring its standard error to `_PRECISE`, at most `seeds`. nan if the engine completes no push.
    """

    row = replace(row, snapshot_clocks=row.cycle_snapshot_clocks)
    warm_up = _WARM_UP * row.workers
    clocks = max(_CYCLES, -(-_PUSHES // row.workers)) * row.workers

    def several(seeds: Sequence[int]) -> NDArray[np.float64]:
        pushes = pushes_of(constants, row, seeds, warm_up + clocks)
        cycle = (pushes[:, -1, 0] - pushes[:, warm_up - 1, 0]) * row.workers / clocks
        return np.column_stack([pushes[:, warm_up:, 1:].mean(axis=1), cycle])

    found = over_seeds(several, seeds)
    return Estimate(Spans(*found.mean(axis=0)), relative_error(found[:, 3]))


def simulated_seconds(constants: Constants, row: Row, pushes: int) -> tuple[float, float]:
    """Simulated seconds from the first to the last of so many `pushes`, for a job that starts under the row's setting.

    A mean over seeds as in `simulated`, and its relative standard error.
    """

    def several(seeds: Sequence[int]) -> NDArray[np.float64]:
        seconds = pushes_of(constants, row, seeds, pushes)[:, :, 0]
        return seconds[:, -1:] - seconds[:, :1]

    found = over_seeds(several)[:, 0]
    return float(found.mean()), relative_error(found)


def relative_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of independent values, relative to the mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values)) / max(abs(values.mean()), 1e-300))


def over_seeds(several: Callable[[Sequence[int]], NDArray[np.float64]], most: int = SEEDS) -> NDArray[np.float64]:
    """The results of `several` seeds, 0, 1, ... until the mean of the last column is precise, [seeds, k]."""
    found = several(range(_LEAST_SEEDS))
    while len(found) < most and relative_error(found[:, -1]) > _PRECISE:
        # Twice as many: a stop after every seed would favour means whose error is small by chance.
        upcoming = range(len(found), min(2 * len(found), most))
        # So many at a time, always: the engine is compiled once for a number of lanes.
        parts = [upcoming[at : at + _LEAST_SEEDS] for at in range(0, len(upcoming), _LEAST_SEEDS)]
        found = np.concatenate([found, *map(several, parts)])
    return found


def pushes_of(constants: Constants, row: Row, seeds: Sequence[int], clocks: int) -> NDArray[np.float64]:
    """For the first `clocks` pushes with each seed, when, and seconds of compute, pull and push, [seeds, clocks, 4].

    nan where fewer are completed. Seeds are lanes of one engine: alone, each would cost more in calls than in computing.
    """
    systems = [system_of(constants, row, seed) for seed in seeds]
    for system in systems:
        system.begin()
    found = np.full((len(seeds), clocks, 4), np.nan)
    branches = [system.branches[0] for system in systems]
    rows = 1 << max(clocks - 1, _FEWEST_ROWS - 1).bit_length()  # a static size: few of them, for few programs
    _, table, used = advance_lanes(
        branches[0].program, *stacked(branches), np.int32(clocks), np.float64(np.inf), rows=rows, own_data=True
    )
    columns = [Records._fields.index(name) for name in ("seconds", "compute_seconds", "pull_seconds", "push_seconds")]
    for made, rest, count in zip(found, np.asarray(table)[:, :, columns], np.asarray(used), strict=True):
        made[:count] = rest[:count]
    return found


def stragglers(row: Row, *, vary: bool = True) -> Stragglers | None:
    """The workers of a row that sleep, each with its mean and all with the mean of their deviations; None if none does."""
    asleep = [(f"n{i}", s) for i, s in enumerate(row.sleeps) if s.mean_seconds]
    if not asleep:
        return None
    mean, sd = (float(np.mean([s[k] for _, s in asleep])) for k in (0, 1))
    names, each = tuple(name for name, _ in asleep), tuple(s.mean_seconds for _, s in asleep)
    return Stragglers(mean, sd * vary, nodes=names, node_seconds=each)


def system_of(constants: Constants, row: Row, seed: int) -> SimulatedSystem:
    """A job of these constants under the row's setting, on nodes as the row has them."""
    job = Workload(name=row.workload, demand=demand(constants), proxy=None)
    delays = tuple(LinkDelay((f"n{i}",), seconds) for i, seconds in enumerate(row.delays) if seconds)
    slow = stragglers(row, vary=constants.sleeps_vary)
    conditions = Conditions(jitter=constants.jitter, sleeps=constants.sleeps, stragglers=slow, delays=delays)
    spec = JobSpec(
        name="calibration",
        cluster=cluster(constants, row),
        workload=job,
        start=setting(row),
        target=Target("clocks", 2**30),
        budget_seconds=1e12,
        evaluate_clocks=2**30,
        conditions=conditions,
        seed=seed,
    )
    return SimulatedSystem(spec)
