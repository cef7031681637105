"""Random settings; Optuna's pruners stop the worse ones early.

One setting after the other trains a fork of the first model by the epoch, until its plateau, or until the pruner stops it:
asynchronous successive halving (``pruner="asha"``, Li et al. 2018: a setting continues after each rung, 1, 4,
16, ... epochs, only if it is in the best quarter of those that reached the rung) or the median rule (``pruner="median"``,
Golovin et al. 2017: it stops where its best quality is below the median of the others' after as many epochs). The best
model so far is kept.
"""

from __future__ import annotations

import math
from typing import Any, Literal

import optuna

from tuners.actions import Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.factory_options import Count
from tuners.search.branches import TrainedBranch, fork_from
from tuners.search.epochs import Course, check_plateau, keep_better, train_on
from tuners.search.tunables import Convention, Which, no_tunable_is_free, tunables

__all__ = ["asha"]

_REFUSALS = 3  # of forks in a row, after which it stops


@nothing_to_tune_if(no_tunable_is_free)
def asha(
    job: Job,
    *,
    tuned: Which = "all",
    momentum: Convention = "heavy_ball",
    pruner: Literal["asha", "median"] = "asha",
    plateau_epochs: Count = 5,
) -> Tuner:
    """Train settings, and prune them, without end. A job without a free tunable, or without losses, just runs.

    Args:
        job: what is tuned.
        tuned: all free tunables, or the learning rate alone.
        momentum: the convention of rate and momentum in the searched space (see `tuners.search.tunables`).
        pruner: asynchronous successive halving, or the median rule.
        plateau_epochs: epochs without improvement after which a training has reached its plateau.
    """
    check_plateau(plateau_epochs)
    what = tunables(job, tuned, convention=momentum)
    if no_tunable_is_free(job, tuned):
        return
    study, distributions = _study(job, pruner), what.space.to_optuna()
    best: Course | None = None
    refusals, parent = 0, TrainedBranch(0, job.start)
    while refusals < _REFUSALS:
        trial = study.ask(distributions)
        parent, forked = yield from fork_from(parent, what.made(dict(trial.params)))
        if forked is None:
            study.tell(trial, state=optuna.trial.TrialState.FAIL)
            refusals += 1
            continue
        refusals = 0
        course = yield from train_on(job, Course(forked), plateau_epochs=plateau_epochs, enough=_Behind(trial))
        parent = parent._replace(nodes=course.trained.nodes)
        _tell(study, trial, course)
        best = yield from keep_better(best, course)


def _study(job: Job, pruner: str) -> optuna.Study:
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    rules: dict[str, Any] = {
        "asha": lambda: optuna.pruners.SuccessiveHalvingPruner(min_resource=1, reduction_factor=4),
        "median": lambda: optuna.pruners.MedianPruner(n_startup_trials=5, n_warmup_steps=1),
    }
    if pruner not in rules:
        raise ValueError(f"Cannot prune by {pruner!r}: choose one of {', '.join(rules)}.")
    sampler = optuna.samplers.RandomSampler(seed=job.seed)
    return optuna.create_study(direction="maximize", sampler=sampler, pruner=rules[pruner]())


class _Behind:
    """Whether the pruner stops a course."""

    def __init__(self, trial: optuna.Trial) -> None:
        self._trial = trial

    def __call__(self, course: Course) -> bool:
        if math.isfinite(course.qualities[-1]):
            self._trial.report(course.qualities[-1], len(course.qualities))
        return bool(self._trial.should_prune())


def _tell(study: optuna.Study, trial: optuna.Trial, course: Course) -> None:
    if course.lost or not math.isfinite(course.peak):
        study.tell(trial, state=optuna.trial.TrialState.FAIL)
    else:
        study.tell(trial, course.peak)
