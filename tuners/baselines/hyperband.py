"""Hyperband with an infinite horizon, as MLtuner measured it (Li et al. 2016, first version; MLtuner, Section 5.2).

How many epochs a model needs is not known, so the budget doubles without end, and each budget is spent in several ways: on
many settings that are halved early, or on few that train long. Settings are random; after each stage the half with the
lower peak of validation quality is dropped. A setting that has reached its plateau is not trained further.

``schedule="measured"`` is that of MLtuner's public code: budgets of B = 2^(K+1) epochs for K = 1, 2, ..., and for L = 1, 2,
4, ... as long as K - L >= log2 L a bracket of 2^(L+1) settings and L stages. At the end of a stage a setting has been
trained for B / (settings left) / L epochs in all. Two settings are left in the end. ``schedule="paper"`` is Hyperband's
own: for l = 1, 2, ... as long as K - l >= log2 l a bracket of 2^l settings and B = 2^K epochs, which each stage *adds*.
"""

from __future__ import annotations

from collections.abc import Generator, Iterator
from itertools import count
from typing import Any, Literal, NamedTuple

import numpy as np

from tuners.actions import Action, Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.factory_options import Count
from tuners.search.branches import TrainedBranch, drop, fork_from
from tuners.search.epochs import Course, check_plateau, train_on
from tuners.search.tunables import Convention, Tunables, Which, no_tunable_is_free, tunables

__all__ = ["Bracket", "Schedule", "brackets", "hyperband"]

Schedule = Literal["measured", "paper"]


class Bracket(NamedTuple):
    """One successive halving."""

    settings: int
    epochs: tuple[int, ...]  # of a setting in all, at the end of each stage


@nothing_to_tune_if(no_tunable_is_free)
def hyperband(
    job: Job,
    *,
    tuned: Which = "all",
    momentum: Convention = "heavy_ball",
    schedule: Schedule = "measured",
    plateau_epochs: Count = 5,
) -> Tuner:
    """Halve random settings, without end. A job without a free tunable, or without losses, just runs.

    Args:
        job: what is tuned.
        tuned: all free tunables, or the learning rate alone.
        momentum: the convention of rate and momentum in the searched space (see `tuners.search.tunables`).
        schedule: the brackets of MLtuner's public code, or those of Hyperband's paper.
        plateau_epochs: epochs without improvement after which a training has reached its plateau.
    """
    check_plateau(plateau_epochs)
    what = tunables(job, tuned, convention=momentum)
    if no_tunable_is_free(job, tuned):
        return
    rng = np.random.default_rng(job.seed)
    parent = TrainedBranch(0, job.start)
    for bracket in brackets(schedule):
        parent, courses = yield from _drawn(parent, what, bracket.settings, rng)
        if not courses:
            return
        for epochs in bracket.epochs:
            trained = yield from _stage(job, courses, epochs, plateau_epochs)
            parent = parent._replace(nodes=trained[-1].trained.nodes)
            courses = yield from _better_half(trained)
        for course in courses:
            yield from drop(course.trained.branch)


def brackets(schedule: Schedule) -> Iterator[Bracket]:
    """All brackets in order, without end. Raises ValueError for an unknown schedule."""
    if schedule not in ("measured", "paper"):
        raise ValueError(f'Cannot schedule by {schedule!r}: choose "measured" or "paper".')
    for k in count(1):
        if schedule == "paper":
            yield from (_added(2**k, stages) for stages in range(1, k + 1) if 2 ** (k - stages) >= stages)
        else:
            powers = ((power, 2**power) for power in range(k) if k - 2**power >= power)
            yield from (_in_all(2 ** (k + 1), stages) for _, stages in powers)


def _in_all(budget: int, stages: int) -> Bracket:
    return Bracket(2 ** (stages + 1), tuple(budget // 2 ** (stages + 1 - i) // stages for i in range(stages)))


def _added(budget: int, stages: int) -> Bracket:
    more = [budget // (2 ** (stages - i) * stages) for i in range(stages)]
    return Bracket(2**stages, tuple(int(x) for x in np.cumsum(more)))


def _drawn(
    parent: TrainedBranch, what: Tunables, settings: int, rng: np.random.Generator
) -> Generator[Action[Any], Any, tuple[TrainedBranch, list[Course]]]:
    """Forks of the first model under random settings, without those that the system refuses; and that model."""
    made = []
    for _ in range(settings):
        parent, trial = yield from fork_from(parent, what.made(what.space.sample(rng)))
        if trial is not None:
            made.append(Course(trial))
    return parent, made


def _stage(job: Job, courses: list[Course], epochs: int, plateau_epochs: int) -> Generator[Action[Any], Any, list[Course]]:
    """Train each course up to that number of epochs in all."""
    trained = []
    for course in courses:
        trained.append((yield from train_on(job, course, plateau_epochs=plateau_epochs, epochs=epochs)))
    return trained


def _better_half(trained: list[Course]) -> Generator[Action[Any], Any, list[Course]]:
    """Free the worse half; of equals the earlier is better."""
    ranked = sorted(trained, key=lambda c: -c.peak)
    kept = len(ranked) - len(ranked) // 2
    for course in ranked[kept:]:
        yield from drop(course.trained.branch)
    return ranked[:kept]
