"""Trials of settings in branches: how long a trial must be, and which setting wins (MLtuner, Section 3.3).

`find` is one search; `decide_trial_time` is the paper's Algorithm 1, its first part. Every trial is forked from one parent,
so all trials start from the same snapshot. While no trial is converging, the trial time is doubled, one more setting is
tried, and earlier trials continue up to that time; trials that diverge are freed. When one converges, its time becomes the
time of every later trial. From then on there are at most three branches: the parent, the best trial and the current trial.
Where we differ or had to choose:

* The paper begins with the time that the searcher takes to decide. Simulated time must not depend on the host, so that time
  is an option. By default the trial time begins with the time that the first trial takes for the least number of clocks of
  any trial, which measure its seconds per clock. A clock of MLtuner is one push of every worker.
* If all trials have diverged, the time is not doubled: longer trials would tell no more.
* The starting point of all trials is the parent's loss, measured on a TESTING branch for up to 10 clocks. The public code
  uses a branch with learning rate 0 for 100 clocks, which is equivalent, but impossible if the job's space has no such rate.
* Where machines are lost, the trial under way trains on until it has recovered, and so does the parent before its next fork.
  This further training is no part of a trial's time. The paper has no such losses.
* A search ends with the searcher (also if it raises, with a warning), after `most` trials, at `until_seconds`, or after
  three refusals in a row. If no trial is converging then, the fastest unstable trial with a positive speed wins; else no
  trial. The paper is silent about such a search; the public code does the same.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tuners.actions import Action, Fork, Job, Rejected, Run
from tuners.mltuner.summariser import ProgressSummary, Summariser
from tuners.reasons import changes, counted, short
from tuners.search.branches import TrainedBranch, TrainingWindows, drop, fork_from, recover, train
from tuners.search.epochs import epoch_clocks
from tuners.search.searchers import Point, Searcher
from tuners.search.tunables import Tunables

__all__ = ["Found", "Rules", "decide_trial_time", "find", "warn_of"]

_REFUSALS = 3  # refused forks in a row that end a search
_NOTHING = ProgressSummary("unstable", 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Rules:
    """The limits of one search."""

    most: float  # trials
    epochs: float = math.inf  # longest trial
    until_seconds: float = math.inf  # time of the job after which no trial begins
    least_clocks: int = 3  # of every trial; one push of each worker per clock
    start_clocks: int = 10  # for the loss of the parent; 0: trials start at their first window
    decision_seconds: float = 0.0  # first trial time; 0: measured on the first trial
    own_time: bool = False  # later trials last as long as the branch that converged did, as in the public code


class Found(NamedTuple):
    """The result of a search."""

    parent: TrainedBranch  # trained further only where it had to recover from a loss of machines
    winner: TrainedBranch | None  # its branch still exists; None: no trial made progress
    tried: int  # proposals
    why: str  # the winner won, for people


@dataclass(slots=True)
class _Trial:
    """A trial: its branch, and its progress in its own time."""

    values: Point
    trained: TrainedBranch
    seconds: float = 0.0
    moments: list[np.ndarray[Any, Any]] = field(default_factory=list)
    losses: list[np.ndarray[Any, Any]] = field(default_factory=list)
    summary: ProgressSummary = _NOTHING
    lost: bool = False  # it diverged, or the system refuses to run it

    def record(self, done: TrainingWindows) -> None:
        seen = done.seen
        self.moments.append(seen.pushes.seconds - seen.start_seconds + self.seconds)
        self.losses.append(seen.pushes.loss)
        self.seconds += seen.seconds
        self.trained = done.trained
        self.lost = done.last.status in ("diverged", "deadlock")

    @property
    def pace(self) -> float:
        """Seconds per push."""
        return self.seconds / self.trained.clocks if self.trained.clocks else math.inf


@dataclass(slots=True)
class _Search:
    """The state of one search."""

    job: Job
    parent: TrainedBranch
    tunables: Tunables
    searcher: Searcher
    summariser: Summariser
    rules: Rules
    start: float | None = None  # the loss of the parent
    tried: int = 0
    now: float = 0.0
    news: str = ""  # what came of the last trial, for people; the next fork tells it

    def summarise(self, trial: _Trial) -> None:
        """Summarise a trial, and tell the searcher its speed."""
        moments, losses = (np.concatenate(parts) if parts else np.zeros(0) for parts in (trial.moments, trial.losses))
        trial.summary = ProgressSummary("diverged", 0.0) if trial.lost else self.summariser(moments, losses, self.start)
        trial.lost = trial.summary.label == "diverged"
        self.tell(trial.values, trial.summary.speed)

    def noticed(self, done: TrainingWindows) -> None:
        """Take over what any branch shows: the time, and the machines that are there."""
        self.now = done.last.end_seconds
        self.parent = self.parent._replace(nodes=done.last.nodes)

    def tell(self, values: Point, speed: float) -> None:
        try:
            self.searcher.tell(values, speed)
        except Exception as error:  # searchers wrap libraries, which raise all sorts of errors
            warn_of(error, "It goes on without that score")

    def most_pushes(self, trial: _Trial) -> float:
        """The most pushes of a trial."""
        return self.rules.epochs * epoch_clocks(self.job, trial.trained.setting)


def find(
    job: Job,
    parent: TrainedBranch,
    tunables: Tunables,
    searcher: Searcher,
    summariser: Summariser,
    rules: Rules,
    why: str = "",
) -> Generator[Action[Any], Any, Found]:
    """One search, for the reason `why`: the setting under which `parent` converges fastest, as a trained branch."""
    search = _Search(job, parent, tunables, searcher, summariser, rules, news=f"{why}; " if why else "")
    if rules.start_clocks:
        search.start = yield from _parent_loss(search)
    best, seconds = yield from decide_trial_time(search)
    while best is not None and seconds is not None:
        trial = yield from _next_trial(search)
        if trial is None:
            break
        yield from _extend(search, trial, seconds)
        search.summarise(trial)
        search.news = f"trial {search.tried}: {trial.summary}, the best so far {short(best.summary.speed)}; "
        loser = trial
        if trial.summary.speed > best.summary.speed:
            best, loser = trial, best
        yield from drop(loser.trained.branch)
    won = "" if best is None else f"the best of {counted(search.tried, 'trial')} goes on: {best.summary}"
    return Found(search.parent, best.trained if best is not None else None, search.tried, won)


def _parent_loss(search: _Search) -> Generator[Action[Any], Any, float | None]:
    """The mean training loss of the parent as it is, or None if the system refuses."""
    if search.parent.lost:
        search.parent = (yield from recover(search.parent)) or search.parent
    setting = search.parent.setting
    clocks = min(search.rules.start_clocks * len(setting.workers), epoch_clocks(search.job, setting))
    try:
        branch = yield from Fork(search.parent.branch, testing=True)
    except Rejected:
        return None
    loss = math.nan
    try:
        done = yield from train(TrainedBranch(branch, setting), Run(clocks=max(clocks, len(setting.workers))))
        search.noticed(done)
        loss = float(np.mean(done.seen.pushes.loss)) if done.seen.clocks else math.nan
    except Rejected:
        pass
    yield from drop(branch)
    return loss if math.isfinite(loss) else None


def decide_trial_time(search: _Search) -> Generator[Action[Any], Any, tuple[_Trial | None, float | None]]:
    """Algorithm 1: the best trial so far and the trial time; None for the time if no further trial is possible."""
    seconds, live = search.rules.decision_seconds, list[_Trial]()
    while True:
        fresh = yield from _next_trial(search)
        if fresh is not None:
            live.append(fresh)
            yield from _run_least(search, fresh)
            seconds = seconds or fresh.seconds
        # Earlier trials continue: all have run for the same time when they are compared.
        for trial in live:
            yield from _extend(search, trial, seconds)
            search.summarise(trial)
        for trial in [t for t in live if t.lost]:
            live.remove(trial)
            yield from drop(trial.trained.branch)
        search.news = f"no trial is converging after {short(seconds)} s; "
        converging = [t for t in live if t.summary.label == "converging"]
        if converging:
            best = yield from _keep_best(live, converging)
            seconds = best.seconds if search.rules.own_time else seconds
            search.news = f"the trial time is {short(seconds)} s, as a trial is {best.summary}; "
            return best, seconds
        growing = [t for t in live if t.trained.clocks < search.most_pushes(t)]
        if fresh is None and (not growing or search.now >= search.rules.until_seconds):
            best = yield from _keep_best(live, [t for t in live if t.summary.speed > 0])
            return best, None
        if growing:
            seconds *= 2


def _keep_best(live: list[_Trial], candidates: list[_Trial]) -> Generator[Action[Any], Any, Any]:
    """The fastest candidate, the first if several are equal; all other branches are freed."""
    best = max(candidates, key=lambda t: t.summary.speed, default=None)
    for trial in live:
        if trial is not best:
            yield from drop(trial.trained.branch)
    return best


def _next_trial(search: _Search) -> Generator[Action[Any], Any, _Trial | None]:
    """A branch with the searcher's next setting; None if the search has to end."""
    for _ in range(_REFUSALS):
        values = _proposal(search)
        if values is None:
            return None
        search.tried += 1
        made = search.tunables.made(values)
        what = changes(search.parent.setting, made(search.parent))
        search.parent, trained = yield from fork_from(search.parent, made, f"{search.news}trial {search.tried}: {what}")
        if trained is not None:
            return _Trial(values, trained)
        search.tell(values, 0.0)
    return None


def _proposal(search: _Search) -> Point | None:
    """The searcher's next proposal; None if it has none, if it raises, or if a limit is reached."""
    if search.tried >= search.rules.most or search.now >= search.rules.until_seconds:
        return None
    try:
        return search.searcher.propose()
    except Exception as error:
        warn_of(error, "The search ends with what it has found")
        return None


def warn_of(error: Exception, consequence: str) -> None:
    """Warn of an error of a searcher; the job goes on."""
    warnings.warn(f"The searcher raised {type(error).__name__}: {error}. {consequence}.", RuntimeWarning, stacklevel=2)


def _run_least(search: _Search, trial: _Trial) -> Generator[Action[Any], Any, None]:
    """Run a new trial for the least number of clocks, which measures its pace."""
    least = search.rules.least_clocks * len(trial.trained.setting.workers)
    yield from _train(search, trial, Run(clocks=int(min(least, search.most_pushes(trial))), branch=trial.trained.branch))


def _extend(search: _Search, trial: _Trial, seconds: float) -> Generator[Action[Any], Any, None]:
    """Train a trial until it has run for `seconds`, or for the longest that the rules allow."""
    if not trial.trained.clocks and not trial.lost:
        yield from _run_least(search, trial)
    left = seconds - trial.seconds
    if trial.lost or left < trial.pace:
        return
    pushes = search.most_pushes(trial) - trial.trained.clocks
    if left / trial.pace >= pushes:
        if pushes >= 1:
            yield from _train(search, trial, Run(clocks=math.ceil(pushes), branch=trial.trained.branch))
    else:
        yield from _train(search, trial, Run(seconds=left, branch=trial.trained.branch))


def _train(search: _Search, trial: _Trial, run: Run) -> Generator[Action[Any], Any, None]:
    there = trial.trained._replace(nodes=search.parent.nodes)  # another branch has shown which machines are lost
    try:
        done = yield from train(there, run, there.lost)
    except Rejected:
        trial.lost = True
        return
    search.noticed(done)
    trial.record(done)
