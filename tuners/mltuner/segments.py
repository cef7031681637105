"""The job, trained in segments from snapshots that it can go back to. Ours: see `tuners.mltuner.frugal`."""

from __future__ import annotations

import math
from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any

import numpy as np

from tuners.actions import Action, Evaluate, Evaluation, Job, Rejected, Run
from tuners.mltuner.beliefs import LEAST_FALL
from tuners.mltuner.branch_record import BranchRecord
from tuners.mltuner.moves import Move, calmer
from tuners.mltuner.time_left import seconds_left
from tuners.reasons import changes
from tuners.search.branches import TrainedBranch, drop, fork, fork_from
from tuners.search.epochs import epoch_clocks

__all__ = ["PARTS", "Segments"]

PARTS = 4  # of a segment or a trial, after each of which it may be ended

# The first segment has `_CLOCKS` clocks of every worker, or the share `_EPOCH` of an epoch where that is longer, but at most
# `_MOST_CLOCKS` clocks of every worker.
_CLOCKS, _EPOCH, _MOST_CLOCKS = 3, 0.2, 40
_OVERHEAD = 10.0  # least length of a segment over that of the forks and evaluations of a trial
# A later segment takes this share of the time trained. An epoch, and `_OVERHEAD`, may lengthen a segment up to this share of
# the budget.
_SHARE = 0.05
_REFUSALS = 3  # snapshots refused in a row, after which the tuner ends
_LEARNS = 2.0  # a job learns if, at its pace so far, its loss falls by this factor within the budget
_DIVERGES = 3.0  # times the loss at the snapshot
_LEAST_RISE = 0.1  # of the first loss


def _never() -> bool:
    """The condition of a run that nothing ends before its time."""
    return False


def _level(job: Job, record: BranchRecord) -> float:
    """What has to fall to reach the target."""
    return 1.0 - record.accuracy if job.target.metric == "accuracy" else record.loss


class Segments:
    """The job and its snapshot. The job since the snapshot, `main`, is the reference of trials."""

    def __init__(self, job: Job, moves: tuple[Move, ...]) -> None:
        self.job, self.moves = job, moves  # of these, those that calm a job are made where it diverges
        self.main = BranchRecord(TrainedBranch(0, job.start))
        self.before = self.main  # the job at the snapshot
        self.snapshot: int | None = None
        self.start = math.nan  # training loss at the snapshot
        self.first = math.nan  # training loss when the job began
        self.trained_seconds = 0.0  # up to the snapshot
        self.least_seconds = 0.0  # of a segment
        self.overhead = job.evaluate_seconds  # of the forks and evaluations of a trial
        self.now = 0.0
        self.curve: list[tuple[float, float]] = []  # (seconds trained, level) up to the snapshot
        self.idle = 0  # segments since the snapshot
        self.refusals = 0  # of snapshots, in a row
        self.wasted = 0.0  # seconds of evaluations, and of trials that have failed, since a trial has not
        self.outcome = ""  # of the last trial, for people; the next fork or run tells it

    def segment(self) -> Generator[Action[Any], Any, bool]:
        """Train for a segment, from a new snapshot if the model has become better. False if tuning is impossible."""
        if not self.main.lost:
            if self.snapshot is None or self.better():
                yield from self.renew()
            yield from self.train()
        size = 1.0
        while self.main.lost:
            if not (yield from self.go_back(size)):
                return False
            yield from self.train()
            size *= 2
        self.idle += 1
        known = [seconds for seconds, level in self.curve if math.isfinite(level)]
        # The system has not validated for long: the job may have become slow.
        if math.isnan(self.main.loss) and self.trained_seconds > 4 * max(known, default=math.inf):
            yield from self.measure()
        return self.refusals < _REFUSALS

    def better(self) -> bool:
        """Whether the model is better than the snapshot, by its loss or by its accuracy, or may be."""
        return not (self.main.loss >= self.before.loss) or self.main.accuracy > self.before.accuracy

    def renew(self) -> Generator[Action[Any], Any, None]:
        """Take the model as it is as the snapshot."""
        if self.snapshot is not None:
            yield from drop(self.snapshot)
        self.snapshot = yield from fork(self.main.trained.branch)
        # While the job recovers from a loss of machines, every system refuses.
        recovers = bool(self.main.trained.lost)
        self.refusals = 0 if self.snapshot is not None else self.refusals + (not recovers)
        self.trained_seconds += self.main.seconds
        self.before, self.idle = self.main, 0
        self.curve.append((self.trained_seconds, _level(self.job, self.before)))
        self.start = max((x.mean for x in self.before.levels[-2:]), default=math.nan)
        self.main = BranchRecord(self.main.trained._replace(clocks=0))

    def train(self) -> Generator[Action[Any], Any, None]:
        """Train the job for a segment, or until it is lost."""
        main, already = self.main, self.main.seconds
        # A job that may be over after some evaluations or epochs has no time for trials that are as long as those.
        brief = _SHARE * self.job.budget_seconds
        if not self.least_seconds:
            yield from self.train_first(brief)
            if main.lost:
                return
            self.least_seconds = main.seconds
        share = _SHARE * (self.trained_seconds + main.seconds)
        wanted = max(share, min(_OVERHEAD * self.overhead, brief), self.least_seconds)
        # Where a segment has made nothing better, the next is as long as all since the snapshot, as in Algorithm 1.
        seconds = max(wanted, already) - (main.seconds - already)
        if seconds > 0:
            yield from self.run_parts(main, Run(seconds=seconds / PARTS, branch=main.trained.branch))

    def train_first(self, brief: float) -> Generator[Action[Any], Any, None]:
        """The first segment: some clocks of every worker, and a share of an epoch if that takes `brief` seconds at most."""
        main = self.main
        least = _CLOCKS * len(main.trained.setting.workers)
        epoch = min(_EPOCH * epoch_clocks(self.job, main.trained.setting), least * _MOST_CLOCKS / _CLOCKS)
        wanted = max(least, math.ceil(epoch))
        first = wanted if wanted <= PARTS * least else least
        run = Run(clocks=math.ceil(first / PARTS), branch=main.trained.branch)
        yield from self.run_parts(main, run, until=lambda: main.seconds >= brief and main.trained.clocks >= least)
        rest = wanted - main.trained.clocks
        if not main.lost and rest > 0 and main.seconds * wanted <= brief * main.trained.clocks:
            yield from self.run_parts(main, replace(run, clocks=math.ceil(rest / PARTS)))

    def go_back(self, size: float) -> Generator[Action[Any], Any, bool]:
        """Begin again at the snapshot with a setting that diverges less easily; False if there is none."""
        setting = calmer(self.moves, self.main.trained.setting, size)
        if self.snapshot is None:
            return False
        again = None
        if setting is not None:
            why = self.reason(f"the job diverges; back to the snapshot with {changes(self.main.trained.setting, setting)}")
            # Machines may have been lost since: then the snapshot has to recover, and is forked after that.
            kept = TrainedBranch(self.snapshot, self.before.trained.setting, nodes=self.main.trained.nodes)
            again = (yield from fork_from(kept, lambda _: setting, why)).trial
        yield from drop(self.main.trained.branch)
        if again is None:
            return False
        self.main = BranchRecord(again)
        return True

    # ------------------------------------------------------------------------------------------------- how far it is

    @property
    def left(self) -> float:
        """Seconds to the target, as far as known."""
        here = (self.trained_seconds + self.main.seconds, _level(self.job, self.main))
        return seconds_left(self.job, [*self.curve, here] if self.learns else [], self.now)

    @property
    def learns(self) -> bool:
        """Whether the training loss falls at all, for a job of this budget. As long as it does not, an accuracy that rises
        says nothing about the time left, and the setting is a poor one."""
        levels, seconds = self.main.levels or self.before.levels, self.trained_seconds + self.main.seconds
        if not levels or not min(self.first, levels[-1].mean) > 0:
            return True
        return math.log(self.first / levels[-1].mean) * self.job.budget_seconds > math.log(_LEARNS) * seconds

    def fall(self, record: BranchRecord) -> float:
        """The fall of the loss since the snapshot."""
        return self.before.loss - record.loss

    @property
    def least_fall(self) -> float:
        """A fall of the loss that is progress."""
        return LEAST_FALL * abs(self.before.loss)

    def diverges(self, record: BranchRecord) -> bool:
        """Whether the training loss has tripled since the snapshot. A loss that is next to nothing may, so it must also have
        risen by a tenth of the first one. The median, because single mini-batches may be far off."""
        rise = record.levels[-1].median - self.start if record.levels else 0.0
        return rise > max((_DIVERGES - 1) * abs(self.start), _LEAST_RISE * abs(self.first))

    def reason(self, why: str = "") -> str:
        """The outcome of the last trial, if it was not told yet, and `why`, for the next action."""
        told, self.outcome = self.outcome, ""
        return "; ".join(words for words in (told, why) if words)

    # --------------------------------------------------------------------------------------------------------- actions

    def run_parts(
        self, record: BranchRecord, run: Run, *, until: Callable[[], bool] = _never, hopeless: Callable[[], bool] = _never
    ) -> Generator[Action[Any], Any, None]:
        """Train a branch for some runs, or `until` that is enough, or it is lost or hopeless."""
        for _ in range(PARTS):
            try:
                seen = yield from Run(run.clocks, run.seconds, run.branch, self.reason())
            except Rejected:
                record.lost = True
                return
            self.now = seen.end_seconds
            record.add(seen)
            if math.isnan(self.start) and len(seen.pushes.loss):
                # Before the first update, or nearly.
                self.start = float(np.mean(seen.pushes.loss[: len(record.trained.setting.workers)]))
                self.first = self.start if math.isnan(self.first) else self.first
            record.lost = record.lost or self.diverges(record) or hopeless()
            if record.lost or until():
                return

    def measure(self) -> Generator[Action[Any], Any, None]:
        """Evaluate the snapshot and the reference as they are."""
        begun = self.now
        if not self.before.exact and self.snapshot is not None:
            yield from self.evaluate(self.before, self.snapshot)
            self.curve[-1] = (self.trained_seconds, _level(self.job, self.before))
        if not self.main.exact:
            yield from self.evaluate(self.main, self.main.trained.branch)
        self.wasted += self.now - begun

    def evaluate(self, record: BranchRecord, branch: int) -> Generator[Action[Any], Any, None]:
        """Measure the loss of a branch as it is, as far as the system can."""
        record.exact = True
        record.loss = record.levels[-1].mean if record.levels else self.start
        try:
            seen: Evaluation = yield from Evaluate(branch)
        except Rejected:
            return
        self.now = max(self.now, seen.seconds)
        record.loss = seen.loss if math.isfinite(seen.loss) else record.loss
        record.accuracy = seen.accuracy
