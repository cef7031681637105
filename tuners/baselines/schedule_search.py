"""The baselines of the bespoke optimiser (Bespoke BO, Section 4): two simple schedules, and searches without a model of an
iteration.

`uniform_devices` shares the batch out evenly among all devices, `uniform_gpus` among the GPUs; every worker serves, too.
`schedule_search` searches the job's space, of about 30 dimensions: by a bandit over techniques, as OpenTuner
does (`tuners.baselines.bandit`); by a Gaussian process, as Spearmint does; by CMA-ES (Hansen and Ostermeier 2001,
of the cmaes library); by the tree-structured Parzen estimator; or at random.
"""

from __future__ import annotations

import itertools
from collections.abc import Generator, Mapping, Sequence
from contextlib import suppress
from typing import Any, Literal

import numpy as np
from cmaes import CMA

from tuners.actions import Action, Job, Reconfigure, Rejected, Run, Scalar, Setting, Tuner, Window
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.bandit import Bandit
from tuners.bespoke_bo.schedules import MeasuredSchedule, Schedule, devices, evenly, measure, schedule_is_held, setting
from tuners.bo_online.surrogate import Encoding
from tuners.factory_options import Count
from tuners.search.searchers import Point, Searcher, searcher
from tuners.space import Space

__all__ = ["Evolution", "schedule_search", "uniform_devices", "uniform_gpus"]

_REFUSED = 10  # proposals in a row that cannot be run, after which the search stops


def _uniform_is_held(job: Job) -> str:
    return schedule_is_held(job) or _nothing_to_change(job, setting(job, _on_all(job)))


def _no_gpu(job: Job) -> str:
    if reason := schedule_is_held(job) or ("" if _gpus(job) else "No machine has a GPU here."):
        return reason
    return _nothing_to_change(job, setting(job, evenly(job, _gpus(job))))


def _nothing_to_change(job: Job, wanted: Setting) -> str:
    """Why a tuner that wants this setting from the start has nothing to tune, or ""."""
    if wanted == job.start:
        return "The job starts with this schedule already."
    try:
        job.space.check(wanted)
    except Rejected as error:
        return str(error)
    return ""


def _on_all(job: Job) -> Schedule:
    return evenly(job, devices(job))


def _gpus(job: Job) -> list[tuple[int, int]]:
    return [(i, d) for i, d in devices(job) if job.nodes[i].devices[d] == "gpu"]


@nothing_to_tune_if(_uniform_is_held)
def uniform_devices(job: Job) -> Tuner:
    """Share the batch out evenly among all devices."""
    if not schedule_is_held(job):
        yield from _stay(setting(job, _on_all(job)), job.start)


@nothing_to_tune_if(_no_gpu)
def uniform_gpus(job: Job) -> Tuner:
    """Share the batch out evenly among the GPUs; a job without GPUs keeps its start setting."""
    if not _no_gpu(job):
        yield from _stay(setting(job, evenly(job, _gpus(job))), job.start)


@nothing_to_tune_if(schedule_is_held)
def schedule_search(
    job: Job, *, kind: Literal["bandit", "gp", "cmaes", "tpe", "random"] = "bandit", evaluations: Count = 30
) -> Tuner:
    """Try `evaluations` schedules on the running job, its start first, then keep the best that can still be run.

    Raises ValueError for an unknown kind, and for fewer than one evaluation.

    Args:
        job: what is tuned.
        kind: a bandit over techniques, a Gaussian process, CMA-ES, a Parzen estimator, or at random.
        evaluations: schedules that are measured, the start among them.
    """
    if evaluations < 1:
        raise ValueError(f"Cannot search with {evaluations} evaluations: give at least 1.")
    made = _searcher(job, kind)
    if not schedule_is_held(job):
        yield from _explored(job, made, evaluations)


def _explored(job: Job, search: Searcher, evaluations: int) -> Generator[Action[Any], Any, None]:
    found: list[MeasuredSchedule] = []
    current, there, refused = job.start, {n.name for n in job.nodes}, 0
    for point in itertools.chain([None], iter(search.propose, None)):  # the start setting is not a proposal
        wanted = job.start if point is None else _runnable(job, point, there)
        seen = (yield from measure(wanted, current)) if wanted is not None else None
        if point is not None:
            search.tell(point, 1 / seen.seconds if isinstance(seen, MeasuredSchedule) else 0.0)
        refused = 0 if isinstance(seen, MeasuredSchedule) else refused + 1
        if wanted is not None:
            window = seen.window if isinstance(seen, MeasuredSchedule) else seen or (yield from _iteration(current))
            if window is None or window.status != "running":
                return
            current, there = window.setting or current, {n.name for n in window.nodes}
        if isinstance(seen, MeasuredSchedule):
            found.append(seen)
        if len(found) == evaluations or refused == _REFUSED:
            break
    able = [m for m in found if there.issuperset((*m.setting.workers, *m.setting.servers))]
    if able:
        yield from _stay(min(able, key=lambda m: m.seconds).setting, current)


def _iteration(current: Setting) -> Generator[Action[Any], Any, Window | None]:
    """One iteration of a job that has refused a schedule, to see its state; None where it refuses that, too."""
    try:
        return (yield from Run(clocks=len(current.workers)))
    except Rejected:
        return None


def _stay(wanted: Setting, current: Setting) -> Generator[Action[Any], Any, None]:
    if wanted != current:
        with suppress(Rejected):
            yield from Reconfigure(wanted)


def _runnable(job: Job, point: Point, there: set[str]) -> Setting | None:
    """The setting of a point, without nodes that are gone; None where no worker or no server is left."""
    gone = {f"role/{n.name}": "idle" for n in job.nodes if n.name not in there and f"role/{n.name}" in point}
    wanted = job.space.setting(point | gone)
    return wanted if job.space.admits(wanted) else None


def _searcher(job: Job, kind: str) -> Searcher:
    if kind == "bandit":
        return Bandit(job.space, (job.seed,))
    if kind == "cmaes":
        return Evolution(job.space, (job.seed,))
    if kind not in ("gp", "tpe", "random"):
        raise ValueError(f"Cannot search schedules by {kind!r}: choose bandit, gp, cmaes, tpe or random.")
    return searcher(kind, job.space, (job.seed,), stops=False)  # type: ignore[arg-type]


class Evolution:
    """CMA-ES as a searcher, see `tuners.search.searchers`: one column in [0, 1] per number and per option of a choice."""

    def __init__(self, space: Space, seed: Sequence[int]) -> None:
        self._encoding = Encoding(space)
        width = self._encoding.width
        first = int(np.random.SeedSequence(list(seed)).generate_state(1)[0])
        self._strategy = CMA(
            mean=np.full(width, 0.5), sigma=0.3, bounds=np.tile([0.0, 1.0], (width, 1)), seed=first, n_max_resampling=10
        )
        self._asked = np.zeros(width)
        self._generation: list[tuple[Any, float]] = []

    def propose(self) -> Point | None:
        self._asked = self._strategy.ask()
        return self._encoding.values(self._encoding.snap(self._asked[None])[0])

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        del values
        self._generation.append((self._asked, -score))
        if len(self._generation) == self._strategy.population_size:
            self._strategy.tell(self._generation)
            self._generation = []
