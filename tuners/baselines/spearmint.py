"""Spearmint as MLtuner measured it: Bayesian optimisation over complete trainings (Snoek, Larochelle & Adams 2012; MLtuner,
Section 5.2).

Every setting trains a fork of the first model until the validation quality has reached its plateau. The Gaussian process
learns the peak quality and proposes the next setting by expected improvement. The first setting has every tunable at its
minimum, as the authors of MLtuner always observed. Spearmint has no stopping rule. With ``stops=True`` it stops when the
best five peaks differ by less than 10 %, as in the paper's second comparison, and the job continues with the best.
"""

from __future__ import annotations

from tuners.actions import Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.factory_options import Count
from tuners.search.branches import TrainedBranch, drop, fork_from
from tuners.search.epochs import Course, check_plateau, keep_better, score, train_on
from tuners.search.searchers import searcher
from tuners.search.tunables import Convention, Which, no_tunable_is_free, tunables

__all__ = ["spearmint"]

_REFUSALS = 3  # of forks in a row, after which it stops


@nothing_to_tune_if(no_tunable_is_free)
def spearmint(
    job: Job,
    *,
    tuned: Which = "all",
    momentum: Convention = "heavy_ball",
    plateau_epochs: Count = 5,
    stops: bool = False,
) -> Tuner:
    """Train one setting after the other to completion. A job without a free tunable, or without losses, just runs.

    Args:
        job: what is tuned.
        tuned: all free tunables, or the learning rate alone.
        momentum: the convention of rate and momentum in the searched space (see `tuners.search.tunables`).
        plateau_epochs: epochs without improvement after which a training has reached its plateau.
        stops: whether to stop when the best five peaks differ by less than 10 %.
    """
    check_plateau(plateau_epochs)
    what = tunables(job, tuned, convention=momentum)
    if no_tunable_is_free(job, tuned):
        return
    search = searcher("gp", what.space, (job.seed,), stops=stops)
    best: Course | None = None
    refusals, parent = 0, TrainedBranch(0, job.start)
    while refusals < _REFUSALS and (values := search.propose()) is not None:
        parent, trial = yield from fork_from(parent, what.made(values))
        if trial is None:
            search.tell(values, 0.0)
            refusals += 1
            continue
        refusals = 0
        course = yield from train_on(job, Course(trial), plateau_epochs=plateau_epochs)
        parent = parent._replace(nodes=course.trained.nodes)
        search.tell(values, score(job, course.peak))
        best = yield from keep_better(best, course)
    if best is not None:
        yield from drop(0)
