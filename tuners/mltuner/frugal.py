"""Tuning that pays for itself: MLtuner's branches, with trials that begin only while they are worth their time.

The paper first searches, for as long as that takes, and then trains. On jobs of minutes or hours the search then costs more
than it saves. Here the job trains, and tries another setting now and then. All of it is ours.

* **Segments.** The job trains from a snapshot for some seconds: first for three clocks of every worker or a fifth of an
  epoch, later for a share of the time that it has trained. This run is the reference. The fifth of an epoch, and ten times
  what a trial's evaluations take, count up to a twentieth of the budget: a job may be over before trials of that length pay.
* **A trial** forks the snapshot with one tunable changed (`moves`), and trains for as long as the reference has. `Evaluate`
  gives the loss of the snapshot, the reference and the trial on the same samples, so that neither the draw of mini-batches
  nor a rise at the start of a trial counts. If the trial's loss has fallen further, by a tenth at least, the job goes on
  with the trial, and the trial is the next reference. If it has not but falls faster at the end, both go on once more.
* **A trial is cut short** if it diverges, if its training loss has tripled, and if from its middle on its training loss is
  above the reference's and does not fall fast enough to come down to it.
* **A trial begins only if it is expected to pay**: the expected gain, a share of the time left, must exceed its cost. The
  time left is extrapolated from the validation of the job (`time_left`), and the expected gain is a number per move
  (`beliefs`). None begins after evaluations and trials that failed in a row have taken 3.5 % of the job's expected time. So
  a good setting is left alone after a few trials, and a job that is over soon is not disturbed at all.
* **A poor start has little to lose**: while the training loss would not even halve within the budget at its pace so far, the
  accuracy is not extrapolated, other rates are expected to gain much, and the 3.5 % do not count. Nor do they while the job
  is expected to end with its budget.
* **If the reference diverges**, the job goes back to the snapshot with a lower rate. The snapshot is renewed only by a
  better model, so the job also comes back from settings that fail later, and from over-fitting.

There are never more than three branches: the snapshot, the job, and a trial.
"""

from __future__ import annotations

import math
from collections.abc import Generator
from dataclasses import dataclass, field
from typing import Any

from tuners.actions import Action, Job, Run, Setting, Tuner
from tuners.mltuner.beliefs import Beliefs
from tuners.mltuner.branch_record import BranchRecord
from tuners.mltuner.moves import Move, moves, no_move_is_free
from tuners.mltuner.segments import PARTS, Segments
from tuners.mltuner.time_left import POINTS
from tuners.reasons import changes, short
from tuners.search.branches import TrainedBranch, drop, fork
from tuners.search.tunables import Which

__all__ = ["frugal"]

_PLATEAU = 3  # segments that made nothing better
_BETTER = 0.1  # of a trial's fall, that the reference must miss
_CAUTION = 0.5  # steps down are so long, but at the start
_CATCHES_UP = 0.25  # expected gain of a trial that falls faster at its end
_WASTE = 0.035  # of the job's time: no trial begins after evaluations and failed trials in a row have taken this
_FORGETS = 0.1  # failures forgotten per segment, while the time left is the time so far


def frugal(job: Job, *, tuned: Which = "all", copies: int = 1) -> Tuner:
    """Train, and try other settings as far as that pays. A job without free tunables, or without losses, runs as it is."""
    if no_move_is_free(job, tuned):
        return
    segments = Segments(job, moves(job, tuned, copies=copies))
    trials = _Trials(segments)
    while (yield from segments.segment()):
        trials.recall()
        while trials.worthwhile() is not None:
            yield from segments.measure()
            # What has just been measured may show that it is not.
            if (move := trials.worthwhile()) is not None:
                yield from trials.attempt(move)


@dataclass(slots=True)
class _Trials:
    """Which trials are worth their time, and what comes of them."""

    segments: Segments
    beliefs: Beliefs = field(default_factory=Beliefs)
    tried: list[tuple[int | None, Setting]] = field(default_factory=list)  # from which snapshot, and under which setting
    hope: str = ""  # what the next trial is expected to save, for people

    @property
    def cost(self) -> float:
        """Seconds of one trial."""
        segments = self.segments
        return segments.main.seconds + segments.overhead

    def recall(self) -> None:
        """Failures are forgotten with time; sooner, if the target is far."""
        segments = self.segments
        self.beliefs.forget(min(_FORGETS * segments.left / segments.now, 1.0) if segments.now > 0 else 0.0)

    def worthwhile(self) -> Move | None:
        """The move with the largest expected gain, if that is worth a trial."""
        segments = self.segments
        left, learns = segments.left, segments.learns
        alone = segments.trained_seconds + segments.main.seconds + left  # what the job takes without a further trial
        known = sum(math.isfinite(level) for _, level in segments.curve)
        late = known >= POINTS and left >= segments.job.budget_seconds - segments.now
        # A job that ends with its budget has nothing to lose by trials.
        if segments.snapshot is None or (learns and not late and segments.wasted > _WASTE * alone):
            return None
        fall = segments.fall(segments.main) / abs(segments.before.loss or 1.0)
        if not learns and not fall < 0:
            fall = 0.0
        # A single loss that is no better may be noise.
        stuck = not (learns and segments.trained_seconds) or segments.idle >= _PLATEAU
        possible = [m for m in segments.moves if self.changed(m) is not None]
        gains = {m: self.beliefs.expected(m, segments.main, fall, stuck=stuck) for m in possible}
        move = max(gains, key=lambda m: gains[m], default=None)
        if move is None or not gains[move] * left > self.cost:
            return None
        self.hope = f"it may save {short(gains[move] * left)} s of {short(left)} s left, and costs {short(self.cost)} s"
        return move

    def changed(self, move: Move) -> Setting | None:
        """The setting after a move; None if the range ends here, or if it has been tried."""
        segments, main = self.segments, self.segments.main
        size = self.beliefs.size(move) * (1.0 if move.up or not segments.trained_seconds else _CAUTION)
        setting = move.step(main.trained.setting, size)
        if move.dummy:
            return setting
        return None if setting == main.trained.setting or (segments.snapshot, setting) in self.tried else setting

    def attempt(self, move: Move) -> Generator[Action[Any], Any, None]:
        """One trial; the job goes on with it if it is better."""
        segments = self.segments
        setting, begun, branch = self.changed(move), segments.now, None
        if setting is not None and segments.snapshot is not None:
            why = f"{changes(segments.main.trained.setting, setting)}, on trial: {self.hope}"
            branch = yield from fork(segments.snapshot, setting, segments.reason(why))
        if setting is None or branch is None:
            self.beliefs.failed(move, flat=False, lost=False)
            return
        self.tried.append((segments.snapshot, setting))
        trial = BranchRecord(TrainedBranch(branch, setting))
        run = Run(seconds=segments.main.seconds / PARTS, branch=branch)
        yield from segments.run_parts(trial, run, hopeless=lambda: self.hopeless(trial))
        gain = yield from self.gain(trial)
        if gain < _BETTER and self.catches_up(trial):
            begun += segments.main.seconds  # the job's own training is no waste
            for record in (segments.main, trial):
                yield from segments.run_parts(record, Run(seconds=record.seconds / PARTS, branch=record.trained.branch))
            if not segments.main.lost:
                yield from segments.evaluate(segments.main, segments.main.trained.branch)
            gain = yield from self.gain(trial)
        segments.outcome = self.outcome(trial, gain)
        if gain >= _BETTER:
            self.beliefs.succeeded(move, gain)
            yield from drop(segments.main.trained.branch)
            segments.main, segments.wasted = trial, 0.0
        else:
            flat = not trial.lost and max(abs(segments.fall(trial)), abs(segments.fall(segments.main))) < segments.least_fall
            self.beliefs.failed(move, flat=flat, lost=trial.lost)
            yield from drop(branch)
            segments.wasted += segments.now - begun
        if not trial.lost:
            segments.overhead = max(segments.now - begun - trial.seconds, segments.job.evaluate_seconds)

    def outcome(self, trial: BranchRecord, gain: float) -> str:
        """What came of a trial."""
        segments, main = self.segments, self.segments.main
        if trial.lost:
            return "the trial was cut short: its loss was too high"
        falls = f"its loss fell by {short(segments.fall(trial))}"
        falls += "" if main.lost else f", that of the job by {short(segments.fall(main))}"
        return f"the job goes on with the trial: {falls}" if gain >= _BETTER else f"the trial was no better: {falls}"

    def gain(self, trial: BranchRecord) -> Generator[Action[Any], Any, float]:
        """The share of the reference's time that the trial saves; 0 for one that makes no progress."""
        segments, main = self.segments, self.segments.main
        if trial.lost:
            return 0.0
        yield from segments.evaluate(trial, trial.trained.branch)
        if segments.fall(trial) < segments.least_fall:
            return 0.0
        return 1.0 if main.lost else 1.0 - max(segments.fall(main), 0.0) / segments.fall(trial)

    def catches_up(self, trial: BranchRecord) -> bool:
        """Whether a trial that is not better yet falls so much faster that it will be, and that is worth waiting for.

        A higher rate may first raise the loss.
        """
        segments, main = self.segments, self.segments.main
        if trial.lost or len(trial.levels) < PARTS or not main.levels or _CATCHES_UP * segments.left <= self.cost:
            return False
        last, middle = trial.levels[-1], trial.levels[-1 - PARTS // 2]
        ending = 2 * last.mean - middle.mean
        reference = 2 * main.level_at(last.seconds) - main.level_at(middle.seconds)
        return ending + 2 * (last.error + main.levels[-1].error) + segments.least_fall < reference

    def hopeless(self, trial: BranchRecord) -> bool:
        """Whether the trial's training loss is above the reference's, and does not fall fast enough to come down to it."""
        main = self.segments.main
        done = len(trial.levels)
        if done < PARTS // 2 or not main.levels:
            return False
        last, before = trial.levels[-1], trial.levels[-2]
        ending = last.mean + min(last.mean - before.mean, 0.0) * (PARTS - done)
        middle = main.seconds * (1 - 0.5 / PARTS)  # of the last part
        return ending > main.level_at(middle) + 4 * main.levels[-1].error
