"""Online search: one trial after the other on the running job; then the job continues with the best of them.

Trials cost the time of the job, and a bad one (say, a learning rate beyond the edge of stability) ruins the model that it
trains. So every trial runs on a fork of the job as it was when the search began, which also makes trials comparable. The job
continues on the best fork; the others are freed. There are never more than three branches: the parent, the best and the
trial. On a system without forks the trials run one after the other on the only model, and each changes it.

All trials take the same time, not the same number of clocks, as in MLtuner: otherwise a setting with few workers would take
the time of many trials. The start setting is always the first trial, so that a search never ends with a setting that
measured worse than the start. A setting that was never in force, because a machine was lost while the job changed to it,
counts as refused.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from typing import Any, NamedTuple, TypeAlias

import numpy as np

from tuners.actions import Action, Job, Reconfigure, Rejected, Run, Scalar, Setting, Tuner, Window
from tuners.search.branches import TrainedBranch, TrainingWindows, drop, fork_from, train
from tuners.search.progress_rate import progress_per_second

__all__ = ["search"]

_WORTHLESS = -np.inf
"""The score of a trial that diverged, and of a refused setting."""

_Made: TypeAlias = Callable[[TrainedBranch], Setting | None]
"""The setting of a trial, from the branch that it changes; None where the job would refuse it."""


class _Trial(NamedTuple):
    setting: Setting
    made: _Made  # makes the setting
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

    Every trial takes the same time, or `clocks` where that is given; none begins after the share is spent. `tell`
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
    """The search itself, see `search`: every trial lasts `length`, and none begins after `until_seconds`."""
    parent, start = TrainedBranch(0, job.start), _made(job, job.space.values(job.start), job.start)
    parent, best = yield from _on_a_fork(job, parent, start, length)
    attempt = _on_a_fork if best else _in_place
    if best is None:
        parent, best = yield from _in_place(job, parent, start, length)
    now = best.end_seconds if best else 0.0
    for _ in range(trials):
        if now >= until_seconds:
            break
        values = ask()
        parent, trial = yield from attempt(job, parent, _made(job, values), length)
        tell(values, trial.score if trial else _WORTHLESS)
        if trial is None:
            continue
        now = trial.end_seconds
        best, loser = (trial, best) if best is None or trial.score > best.score else (best, trial)
        if loser is not None and loser.branch is not None:
            yield from drop(loser.branch)
    if best is not None:
        yield from _stay_with(best, job, parent)


def _on_a_fork(
    job: Job, parent: TrainedBranch, made: _Made, length: Run
) -> Generator[Action[Any], Any, tuple[TrainedBranch, _Trial | None]]:
    """A trial on a fork of the job's own branch, which is returned as well; None where the system refuses."""
    parent, forked = yield from fork_from(parent, made)
    if forked is None:
        return parent, None
    try:
        done = yield from train(forked, length)
    except Rejected:
        yield from drop(forked.branch)
        return parent, None
    before, parent = parent.setting, parent._replace(nodes=done.last.nodes)
    if _rolled_back(before, forked.setting, done.seen):
        yield from drop(forked.branch)
        return parent, None
    return parent, _scored(job, forked, made, done)


def _in_place(
    job: Job, own: TrainedBranch, made: _Made, length: Run
) -> Generator[Action[Any], Any, tuple[TrainedBranch, _Trial | None]]:
    """A trial on the job itself; its branch after that; None where the system refuses."""
    setting = made(own)
    if setting is None:
        return own, None
    changed = own._replace(setting=setting)
    try:
        if changed != own and not (yield from Reconfigure(setting)).done:
            return (yield from train(own, Run(clocks=len(own.setting.workers)))).trained, None
        done = yield from train(changed, length)
    except Rejected:
        return own, None
    return done.trained, _scored(job, changed, made, done)._replace(branch=None)


def _stay_with(best: _Trial, job: Job, parent: TrainedBranch) -> Generator[Action[Any], Any, None]:
    """Continue the job with the best trial; where even that one diverged, with the parent."""
    if best.branch is None:
        # Machines of its setting may have been lost since.
        setting = best.made(parent) if parent._replace(setting=best.setting).lost else best.setting
        if setting is not None:
            with suppress(Rejected):
                yield from Reconfigure(setting)
    elif best.score == _WORTHLESS:
        yield from drop(best.branch)
    else:
        yield from drop(0)
        with suppress(Rejected):
            yield from Run(seconds=job.budget_seconds, branch=best.branch)


def _rolled_back(before: Setting, wanted: Setting, seen: Window) -> bool:
    """Whether a fork was to change from the setting `before` to `wanted`, and a machine of that was lost before the change
    ended: then the fork has trained under the setting before, on the machines that were left."""
    lost = {e.node for e in seen.events if e.event in ("left", "failed") and e.seconds <= seen.start_seconds}
    changed = [name for name in Setting.__slots__ if getattr(wanted, name) != getattr(before, name)]
    return (
        seen.setting is not None
        and bool(lost & {*wanted.workers, *wanted.servers})
        and any(getattr(seen.setting, name) != getattr(wanted, name) for name in changed)
    )


def _scored(job: Job, tried: TrainedBranch, made: _Made, done: TrainingWindows) -> _Trial:
    score = progress_per_second(done.seen, job.target)
    return _Trial(tried.setting, made, score, tried.branch, done.last.end_seconds)


def _made(job: Job, values: Mapping[str, Scalar], whole: Setting | None = None) -> _Made:
    """These values on the machines that are there, and the setting in force for the rest; `whole` where all are there."""

    def made(branch: TrainedBranch) -> Setting | None:
        if whole is not None and not branch._replace(setting=whole).lost:
            return whole
        space = job.space.among(branch.nodes or job.nodes, branch.setting)
        there = {*space.names, *values.keys() - job.space.names}  # a name that is no knob is refused
        try:
            setting = space.setting({name: value for name, value in values.items() if name in there})
            job.space.check(setting, branch.setting)
        except (Rejected, ValueError):
            return None
        return setting

    return made
