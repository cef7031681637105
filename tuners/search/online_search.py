"""Online search: one trial after the other on the running job; then the job continues with the best of them.

Trials cost the time of the job, and a bad one (say, a learning rate beyond the edge of stability) ruins the model that it
trains. So every trial runs on a fork of the job as it was when the search began, which also makes trials comparable. The job
continues on the best fork; the others are freed. There are never more than three branches: the parent, the best and the
trial. On a system without forks the trials run one after the other on the only model, and each changes it.

All trials take the same time, not the same number of clocks, as in MLtuner: otherwise a setting with few workers would take
the time of many trials. The start setting is always the first trial, so that a search never ends with a setting that
measured worse than the start.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from tuners.actions import Action, Fork, Free, Job, Reconfigure, Rejected, Run, Scalar, Setting, Tuner, Window
from tuners.search.progress_rate import progress_per_second

__all__ = ["search"]

_WORTHLESS = -np.inf
"""The score of a trial that diverged, and of a refused setting."""


class _Trial(NamedTuple):
    setting: Setting
    score: float
    branch: int | None  # None: made in place
    end_seconds: float


def search(
    job: Job,
    ask: Callable[[], Mapping[str, Scalar]],
    tell: Callable[[Mapping[str, Scalar], float], None],
    *,
    trials: int,
    share: float,
    clocks: int | None = None,
) -> Tuner:
    """Try the start and up to `trials` proposals of `ask` within `share` of the job's budget, then keep the best.

    Every trial takes the same time, or so many `clocks` where that is given; none begins after the share is spent. `tell`
    gets every proposal with its score: larger is better, minus infinity for one that diverged or was refused. Raises
    ValueError unless `trials` is positive and `share` in (0, 1].
    """
    if trials < 1 or not 0 < share <= 1:
        raise ValueError(f"Cannot search with trials={trials}, share={share}: give at least 1, and a share in (0, 1].")
    until_seconds = share * job.budget_seconds
    length = Run(clocks=clocks) if clocks is not None else Run(seconds=until_seconds / (trials + 1))
    return _search(job, ask, tell, trials, length, until_seconds)


def _search(
    job: Job,
    ask: Callable[[], Mapping[str, Scalar]],
    tell: Callable[[Mapping[str, Scalar], float], None],
    trials: int,
    length: Run,
    until_seconds: float,
) -> Tuner:
    best = yield from _on_a_fork(job, job.start, length)
    attempt = _on_a_fork if best else _in_place
    if best is None:
        best = yield from _in_place(job, None, length)
    now = best.end_seconds if best else 0.0
    for _ in range(trials):
        if now >= until_seconds:
            break
        values = ask()
        setting = _admitted(job, values)
        trial = (yield from attempt(job, setting, length)) if setting is not None else None
        tell(values, trial.score if trial else _WORTHLESS)
        if trial is None:
            continue
        now = trial.end_seconds
        best, loser = (trial, best) if best is None or trial.score > best.score else (best, trial)
        if loser is not None and loser.branch is not None:
            yield from _free(loser.branch)
    if best is not None:
        yield from _stay_with(best, job)


def _on_a_fork(job: Job, setting: Setting, length: Run) -> Generator[Action[Any], Any, _Trial | None]:
    """A trial on a fork of the job's own branch; None where the system refuses."""
    try:
        branch = yield from Fork(0, setting)
    except Rejected:
        return None
    try:
        seen = yield from replace(length, branch=branch)
    except Rejected:
        yield from _free(branch)
        return None
    return _scored(job, setting, branch, seen)


def _in_place(job: Job, setting: Setting | None, length: Run) -> Generator[Action[Any], Any, _Trial | None]:
    """A trial on the job itself, under `setting` or the start setting; None where the system refuses."""
    try:
        if setting is not None:
            yield from Reconfigure(setting)
        seen = yield from length
    except Rejected:
        return None
    return _scored(job, setting or job.start, None, seen)


def _stay_with(best: _Trial, job: Job) -> Generator[Action[Any], Any, None]:
    """Continue the job with the best trial; where even that one diverged, with the parent."""
    if best.branch is None:
        with suppress(Rejected):
            yield from Reconfigure(best.setting)
    elif best.score == _WORTHLESS:
        yield from _free(best.branch)
    else:
        yield from _free(0)
        with suppress(Rejected):
            yield from Run(seconds=job.budget_seconds, branch=best.branch)


def _free(branch: int) -> Generator[Action[Any], Any, None]:
    with suppress(Rejected):
        yield from Free(branch)


def _scored(job: Job, setting: Setting, branch: int | None, seen: Window) -> _Trial:
    return _Trial(setting, progress_per_second(seen, job.target), branch, seen.end_seconds)


def _admitted(job: Job, values: Mapping[str, Scalar]) -> Setting | None:
    """The setting of these values, or None where the job would refuse it."""
    try:
        setting = job.space.setting(values)
        job.space.check(setting)
    except (Rejected, ValueError):
        return None
    return setting
