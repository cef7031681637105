"""Trying settings in branches: how long a trial must be, and which setting wins (MLtuner, Section 3.3 and Algorithm 1).

Every trial is forked from one parent, so that all start from the same snapshot. As long as no trial is converging, the time
of a trial is doubled, a further setting is tried, and those tried before go on for as long; the ones that diverge are
freed. Once one converges its time is every later trial's, and from then on there are no more than three branches: the
parent, the best and the trial. Where we differ or had to choose:

* The paper begins with the time that the searcher takes to decide. Simulated time does not depend on the host, so that is an
  option; by default the time begins as what the first trial takes for the few clocks that every trial has at least, by which
  its seconds per clock are measured. A clock of MLtuner is one push of every worker.
* With nothing but diverged trials the time is not doubled, for a longer one would tell no more.
* The parent's loss is measured on a TESTING branch for up to 10 clocks: the starting point of all trials. The public code's
  is a branch with a learning rate of zero for 100 clocks, which is the same, but for a job whose space has no such rate.
* What ends a search: the searcher (one that raises, too, with a warning), `most` trials, `until_seconds`, three refusals in
  a row. Then an unstable trial wins if none is converging but it does have a speed; else nothing has been found.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np

from tuners.actions import Action, Fork, Job, Rejected, Run, Window
from tuners.mltuner.summarizer import Summariser, Summary
from tuners.search.epochs import TrainedBranch, drop, epoch_clocks, fork
from tuners.search.searchers import Point, Searcher
from tuners.search.tunables import Tunables

__all__ = ["Found", "Rules", "find", "warn_of"]

_REFUSALS = 3  # of forks in a row, before a search is given up
_NOTHING = Summary("unstable", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """What binds one search."""

    most: int  # trials
    epochs: float = math.inf  # that one trial may last
    until_seconds: float = math.inf  # of the job, when no further trial begins
    least_clocks: int = 3  # of every trial, one push of each worker each
    start_clocks: int = 10  # for the loss of the parent; 0: trials start at their first window
    decision_seconds: float = 0.0  # that the searcher takes
    longest: bool = False  # the time decided is that of the branch that converged, as in the public code


class Found(NamedTuple):
    """What came of a search."""

    line: TrainedBranch | None  # the winner, still there; None: nothing is better than nothing
    tried: int  # proposals


@dataclass(slots=True)
class _Trial:
    """A branch on trial, and its progress in its own time."""

    values: Point
    line: TrainedBranch
    seconds: float = 0.0
    moments: list[np.ndarray[Any, Any]] = field(default_factory=list)
    losses: list[np.ndarray[Any, Any]] = field(default_factory=list)
    summary: Summary = _NOTHING
    lost: bool = False  # it diverged, or the system will not run it

    def take(self, seen: Window) -> None:
        self.moments.append(seen.pushes.seconds - seen.start_seconds + self.seconds)
        self.losses.append(seen.pushes.loss)
        self.seconds += seen.seconds
        self.line = self.line.after(seen)
        self.lost = seen.status in ("diverged", "deadlock")

    @property
    def pace(self) -> float:
        """Seconds per push."""
        return self.seconds / self.line.clocks if self.line.clocks else math.inf


@dataclass(slots=True)
class _Search:
    """One search, as far as it has come."""

    job: Job
    parent: TrainedBranch
    tunables: Tunables
    searcher: Searcher
    summariser: Summariser
    rules: Rules
    start: float | None = None  # the loss of the parent
    tried: int = 0
    now: float = 0.0

    def summarise(self, trial: _Trial) -> None:
        """Judge a trial, and let the searcher know."""
        moments, losses = (np.concatenate(parts) if parts else np.zeros(0) for parts in (trial.moments, trial.losses))
        trial.summary = Summary("diverged", 0.0) if trial.lost else self.summariser(moments, losses, self.start)
        trial.lost = trial.summary.label == "diverged"
        self.tell(trial.values, trial.summary.speed)

    def tell(self, values: Point, speed: float) -> None:
        try:
            self.searcher.tell(values, speed)
        except Exception as error:  # whatever a library's searcher may fail with
            warn_of(error, "It goes on without that score")

    def cap(self, trial: _Trial) -> float:
        """The most pushes of a trial."""
        return self.rules.epochs * epoch_clocks(self.job, trial.line.setting)


def find(
    job: Job, parent: TrainedBranch, tunables: Tunables, searcher: Searcher, summariser: Summariser, rules: Rules
) -> Generator[Action[Any], Any, Found]:
    """The setting under which `parent` converges fastest, as a branch that has already begun. The parent stays as it is."""
    at = _Search(job, parent, tunables, searcher, summariser, rules)
    if rules.start_clocks:
        at.start = yield from _parent_loss(at)
    best, seconds = yield from _decide_time(at)
    while best is not None and seconds is not None:
        trial = yield from _begun(at)
        if trial is None:
            break
        yield from _prolong(at, trial, seconds)
        at.summarise(trial)
        loser = trial
        if trial.summary.speed > best.summary.speed:
            best, loser = trial, best
        yield from drop(loser.line.branch)
    return Found(best.line if best is not None else None, at.tried)


def _parent_loss(at: _Search) -> Generator[Action[Any], Any, float | None]:
    """The mean training loss of the parent as it is, or None where the system will not tell."""
    setting = at.parent.setting
    clocks = min(at.rules.start_clocks * len(setting.workers), epoch_clocks(at.job, setting))
    try:
        branch = yield from Fork(at.parent.branch, testing=True)
    except Rejected:
        return None
    loss = math.nan
    try:
        seen = yield from Run(clocks=max(clocks, len(setting.workers)), branch=branch)
        at.now = seen.end_seconds
        loss = float(np.mean(seen.pushes.loss)) if seen.clocks else math.nan
    except Rejected:
        pass
    yield from drop(branch)
    return loss if math.isfinite(loss) else None


def _decide_time(at: _Search) -> Generator[Action[Any], Any, tuple[_Trial | None, float | None]]:
    """Algorithm 1: the best trial so far and how long trials shall be; no time where there is nothing left to try."""
    seconds, live = at.rules.decision_seconds, list[_Trial]()
    while True:
        fresh = yield from _begun(at)
        if fresh is not None:
            live.append(fresh)
            yield from _measure(at, fresh)
            seconds = seconds or fresh.seconds
        for trial in live:
            yield from _prolong(at, trial, seconds)
            at.summarise(trial)
        for trial in [t for t in live if t.lost]:
            live.remove(trial)
            yield from drop(trial.line.branch)
        converging = [t for t in live if t.summary.label == "converging"]
        if converging:
            best = yield from _only_best(live, converging)
            return best, best.seconds if at.rules.longest else seconds
        growing = [t for t in live if t.line.clocks < at.cap(t)]
        if fresh is None and (not growing or at.now >= at.rules.until_seconds):
            best = yield from _only_best(live, [t for t in live if t.summary.speed > 0])
            return best, None
        if growing:
            seconds *= 2


def _only_best(live: list[_Trial], candidates: list[_Trial]) -> Generator[Action[Any], Any, Any]:
    """The fastest of the candidates, the first of equals; all other branches are freed."""
    best = max(candidates, key=lambda t: t.summary.speed, default=None)
    for trial in live:
        if trial is not best:
            yield from drop(trial.line.branch)
    return best


def _begun(at: _Search) -> Generator[Action[Any], Any, _Trial | None]:
    """A branch with the next setting; None where there is nothing more to try."""
    for _ in range(_REFUSALS):
        values = _proposal(at)
        if values is None:
            return None
        at.tried += 1
        setting = at.tunables.setting(values, at.parent.setting)
        branch = yield from fork(at.parent.branch, setting)
        if branch is not None:
            return _Trial(values, TrainedBranch(branch, setting))
        at.tell(values, 0.0)
    return None


def _proposal(at: _Search) -> Point | None:
    """What the searcher proposes. One that raises has nothing more to propose."""
    if at.tried >= at.rules.most or at.now >= at.rules.until_seconds:
        return None
    try:
        return at.searcher.propose()
    except Exception as error:
        warn_of(error, "The search ends with what it has found")
        return None


def warn_of(error: Exception, consequence: str) -> None:
    """A searcher's failure is no failure of the job, but somebody should know."""
    warnings.warn(f"The searcher raised {type(error).__name__}: {error}. {consequence}.", RuntimeWarning, stacklevel=2)


def _measure(at: _Search, trial: _Trial) -> Generator[Action[Any], Any, None]:
    """Let a new trial run for the least clocks, by which its pace is known."""
    least = at.rules.least_clocks * len(trial.line.setting.workers)
    yield from _train(at, trial, Run(clocks=int(min(least, at.cap(trial))), branch=trial.line.branch))


def _prolong(at: _Search, trial: _Trial, seconds: float) -> Generator[Action[Any], Any, None]:
    """Bring a trial to so many seconds of its own, if it may last so long."""
    if not trial.line.clocks and not trial.lost:
        yield from _measure(at, trial)
    left = seconds - trial.seconds
    if trial.lost or left < trial.pace:
        return
    pushes = at.cap(trial) - trial.line.clocks
    if left / trial.pace >= pushes:
        if pushes >= 1:
            yield from _train(at, trial, Run(clocks=math.ceil(pushes), branch=trial.line.branch))
    else:
        yield from _train(at, trial, Run(seconds=left, branch=trial.line.branch))


def _train(at: _Search, trial: _Trial, run: Run) -> Generator[Action[Any], Any, None]:
    try:
        seen = yield from replace(run)
    except Rejected:
        trial.lost = True
        return
    at.now = seen.end_seconds
    trial.take(seen)
