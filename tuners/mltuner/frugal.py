"""Tuning that pays for itself: MLtuner's branches, with trials that begin only while they are worth their time.

The paper first searches, for as long as that takes, and then trains. On jobs of minutes or hours the search then costs more
than it saves. Here the job trains, and tries another setting now and then. The whole file is ours.

* **Segments.** The job trains from a snapshot for some seconds: first for three clocks of every worker or a fifth of an
  epoch, later for a share of the time that it has trained. This run is the reference.
* **A trial** forks the snapshot with one tunable changed (`moves`), and trains for as long as the reference has. `Evaluate`
  gives the loss of the snapshot, the reference and the trial on the same samples, so that neither the draw of mini-batches
  nor a rise at the start of a trial counts. If the trial's loss has fallen further, by a tenth at least, the job goes on
  with the trial, and the trial is the next reference.
* **A trial is cut short** if it diverges, if its training loss has tripled, and if from its middle on its training loss is
  above the reference's and does not fall fast enough to come down to it.
* **A trial begins only if it is expected to pay**: the expected gain, a share of the time left, must exceed its cost. The
  time left is extrapolated from the evaluations (`seconds_left`), the cost was measured on the trials before, and the
  expected gain is a number per move (`_Beliefs`). Trials that fail in a row take a tenth of the job's expected time at most.
  So a good setting is left alone after a few trials, and a job that is over soon is not disturbed at all.
* **If the reference diverges**, the job goes back to the snapshot with a lower rate. The snapshot is renewed only by a
  better model, so the job also comes back from settings that fail later, and from over-fitting.

There are never more than three branches: the snapshot, the job, and a trial.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from tuners.actions import Action, Evaluate, Evaluation, Job, Rejected, Run, Setting, Tuner, Window
from tuners.mltuner.moves import Move, calmer, moves, no_move_is_free
from tuners.search.epochs import TrainedBranch, drop, epoch_clocks, fork
from tuners.search.tunables import Which

__all__ = ["frugal", "seconds_left"]

_CLOCKS = 3  # of every worker, in the first segment,
_EPOCH = 0.2  # or this share of an epoch where that is longer,
_MOST_CLOCKS = 40  # up to so many of every worker
_SHARE = 0.05  # of the time trained: a later segment
_OVERHEAD = 20.0  # a segment is at least so many times as long as a snapshot and an evaluation take
_PARTS = 4  # of a segment or a trial, after each of which it may be ended
_DIVERGES = 3.0  # times the starting loss
_LEAST_RISE = 0.1  # of the first loss
_BETTER = 0.1  # of a trial's fall, that the reference must miss
_LEAST_FALL = 0.005  # of the loss; less is no progress
_HORIZON = 30.0  # times the time so far: the most that is taken for the time left
_WASTE = 0.1  # of the job's time: the most for trials that fail in a row
_PLATEAU = 3  # segments that made nothing better
_REFUSALS = 3  # snapshots refused in a row, after which the tuner ends


def frugal(job: Job, *, tuned: Which = "all", copies: int = 1) -> Tuner:
    """Train, and try other settings as far as that pays. A job without free tunables, or without losses, runs as it is."""
    if no_move_is_free(job, tuned):
        return
    found = moves(job, tuned, copies=copies)
    tuning = _Tuning(job, found, _Stretch(TrainedBranch(0, job.start)))
    while (yield from tuning.segment()):
        tuning.recall()
        while (move := tuning.worthwhile()) is not None:
            yield from tuning.attempt(move)


def seconds_left(job: Job, curve: Sequence[tuple[float, float]], now: float) -> float:
    """Seconds to the target under the present setting, extrapolated from `curve`, pairs of (seconds trained, level).

    The level is the validation loss, or 1 - accuracy. The latter half of the curve is extended as an exponential decay. A
    power law fits better but is too long on most jobs, and late trials, which mostly favour settings that are calm and slow,
    then cost more than they save. At most what is left of the budget, and 30 times the time so far.
    """
    most = max(min(job.budget_seconds - now, _HORIZON * now), 0.0)
    goal = 1.0 - job.target.value if job.target.metric == "accuracy" else job.target.value
    known = [(s, level) for s, level in curve if math.isfinite(level)]
    if len(known) < 2:
        return most
    seconds, levels = np.array(known).T
    levels = np.minimum.accumulate(levels)
    since = int(np.searchsorted(seconds, seconds[-1] / 2, side="right")) - 1
    since = max(min(since, len(seconds) - 2), 0)
    span, before, last = seconds[-1] - seconds[since], levels[since], levels[-1]
    if not (span > 0 and before > last):
        return most
    if goal > 0:
        return float(min(most, span * max(math.log(last / goal), 0.0) / math.log(before / last)))
    return float(min(most, span * max(last - goal, 0.0) / (before - last)))


# --------------------------------------------------------------------------------------------------------------- stretch


class _Level(NamedTuple):
    """The training loss in one run of a branch."""

    seconds: float  # the middle of the run, since the snapshot
    mean: float
    error: float  # standard error of the mean
    median: float


@dataclass(slots=True)
class _Stretch:
    """A branch since the snapshot."""

    trained: TrainedBranch
    seconds: float = 0.0
    levels: list[_Level] = field(default_factory=list)
    loss: float = math.nan  # of the model as it is: on the validation set, or of the last mini-batches if that is unknown
    level: float = math.nan  # of the model as it is: what `seconds_left` extrapolates
    accuracy: float = math.nan
    waiting: float = 0.0  # share of the workers' time in which the policy made them wait
    computing: float = 0.0  # share of the workers' time that passes or passed in forward and backward passes
    lost: bool = False  # it has diverged, or the system refuses to run it

    def record(self, seen: Window) -> None:
        losses, middle = seen.pushes.loss, self.seconds + seen.seconds / 2
        self.seconds += seen.seconds
        self.trained = self.trained.after(seen)
        self.lost = seen.status in ("diverged", "deadlock") or not np.isfinite(losses).all()
        if len(losses) and not self.lost:
            error = float(losses.std() / math.sqrt(len(losses)))
            self.levels.append(_Level(middle, float(losses.mean()), error, float(np.median(losses))))
        if seen.seconds > 0 and seen.workers:
            total = seen.seconds * len(seen.workers)
            self.waiting = min(float(seen.pushes.wait_seconds.sum()) / total, 1.0)
            self.computing = min(float(seen.pushes.compute_seconds.sum()) / total, 1.0)

    def level_at(self, seconds: float) -> float:
        """The mean training loss at that time, between those of the runs."""
        return float(np.interp(seconds, [x.seconds for x in self.levels], [x.mean for x in self.levels]))


# --------------------------------------------------------------------------------------------------------------- beliefs

_HIGHER_RATE = 0.1  # expected gain of a higher rate
_LITTLE = 0.05  # expected gain of the other moves
_STUCK = 0.4  # expected gain of another rate while the loss does not fall
_LEAST_SIZE = 0.25  # of a step
_CAUTION = 0.5  # steps down are so long, but at the start
_CATCHES_UP = 0.25  # expected gain of a trial that falls faster at its end
_FORGETS = 0.1  # failures forgotten per segment, while the time left is the time so far


@dataclass(slots=True)
class _Beliefs:
    """What is expected of each move: the share of the time left that it saves.

    After a success it is half of what that has gained. After a failure it is a quarter of what it was, or a sixteenth if the
    trial was cut short, and the next step is half as long. All are halved with every failure in a row. If the trial's loss
    was just that of the reference, the next step is twice as long instead.
    """

    known: dict[Move, float] = field(default_factory=dict)  # since a success
    doubt: dict[Move, float] = field(default_factory=dict)  # factor since failures
    sizes: dict[Move, float] = field(default_factory=dict)  # of steps
    failures: float = 0.0  # in a row

    def expected(self, move: Move, reference: _Stretch, fall: float, *, stuck: bool) -> float:
        """The expected gain, where the loss of the reference has fallen by the share `fall`."""
        prior = self._prior(move, reference, fall, stuck=stuck) * self.doubt.get(move, 1.0)
        return max(prior, self.known.get(move, 0.0)) * 0.5**self.failures

    def forget(self, much: float) -> None:
        """Forget so many failures."""
        self.failures = max(self.failures - much, 0.0)
        self.doubt = {move: min(doubt * 4**much, 1.0) for move, doubt in self.doubt.items()}

    def _prior(self, move: Move, reference: _Stretch, fall: float, *, stuck: bool) -> float:
        if not (move.up or stuck):
            return 0.0  # a lower rate always looks good for a while, because losses are less noisy, and is slower then
        if move.name == "learning_rate":
            if stuck and fall < _LEAST_FALL:
                return _STUCK if move.up == (fall > -_LEAST_FALL) else _STUCK / 2
            return _HIGHER_RATE if move.up else _LITTLE
        if move.name == "waiting" and move.up:
            return max(_LITTLE, reference.waiting / 2)
        if move.name == "batch_size" and move.up:
            return max(_LITTLE, reference.computing / 4)
        return _LITTLE

    def size(self, move: Move) -> float:
        return self.sizes.get(move, 1.0)

    def succeeded(self, move: Move, gain: float) -> None:
        self.known[move], self.failures, self.sizes[move] = gain / 2, 0, 1.0

    def failed(self, move: Move, *, flat: bool, lost: bool) -> None:
        self.failures += 1
        self.known.pop(move, None)
        if flat:
            self.sizes[move] = 2 * self.size(move)
        else:
            self.doubt[move] = self.doubt.get(move, 1.0) / (16 if lost else 4)
            self.sizes[move] = max(self.size(move) / 2, _LEAST_SIZE)


# ---------------------------------------------------------------------------------------------------------------- tuning


@dataclass(slots=True)
class _Tuning:
    """The job, its snapshot, and the trials."""

    job: Job
    moves: tuple[Move, ...]
    main: _Stretch  # the job since the snapshot: the reference of trials
    snapshot: int | None = None
    before: _Stretch | None = None  # the job at the snapshot, if it was evaluated
    start: float = math.nan  # training loss at the snapshot
    first: float = math.nan  # training loss when the job began
    trained_seconds: float = 0.0  # up to the snapshot
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds trained, level) up to the snapshot
    now: float = 0.0
    overhead: float = 0.0  # seconds of a snapshot and an evaluation
    least_seconds: float = 0.0  # of a segment
    wasted: float = 0.0  # seconds of trials that have failed since one has not
    refusals: int = 0  # of snapshots, in a row
    tried: list[Setting] = field(default_factory=list)  # since the snapshot
    idle: int = 0  # segments since the snapshot
    beliefs: _Beliefs = field(default_factory=_Beliefs)

    # -------------------------------------------------------------------------------------------------------- segments

    def segment(self) -> Generator[Action[Any], Any, bool]:
        """Train for a segment, and evaluate; a better model is the next snapshot. False if there is nothing to tune."""
        begun = self.now
        if self.better():
            self.idle = 0
            yield from self.renew()
        trained, size = (yield from self.train()), 1.0
        while self.main.lost:
            if not (yield from self.go_back(size)):
                return False
            begun, size = self.now, 2 * size
            trained = yield from self.train()
        if self.before is None and self.snapshot is not None:
            self.before = _Stretch(TrainedBranch(self.snapshot, self.job.start), loss=self.start)
            yield from self.evaluate(self.before)
            self.curve.append((self.trained_seconds, self.before.level))
        yield from self.evaluate(self.main)
        self.idle += 1
        self.overhead = max(self.now - begun - trained, 0.0)
        return self.refusals < _REFUSALS

    def better(self) -> bool:
        """Whether the model is better than the snapshot, by its loss or by its accuracy."""
        if self.snapshot is None or self.before is None:
            return True
        return not (self.main.loss >= self.before.loss) or self.main.accuracy > self.before.accuracy

    def renew(self) -> Generator[Action[Any], Any, None]:
        """Take the model as it is as the snapshot."""
        self.tried = []
        if self.snapshot is not None:
            yield from drop(self.snapshot)
        self.snapshot = yield from fork(self.main.trained.branch)
        self.refusals = 0 if self.snapshot is not None else self.refusals + 1
        self.trained_seconds += self.main.seconds
        self.before = self.main if self.main.seconds else None
        if self.before is not None:
            self.curve.append((self.trained_seconds, self.before.level))
        self.start = max((x.mean for x in self.main.levels[-2:]), default=math.nan)
        self.main = _Stretch(self.main.trained._replace(clocks=0))

    def train(self) -> Generator[Action[Any], Any, float]:
        """Train the job for a segment, or until it is lost; the seconds that it has trained."""
        course, already = self.main, self.main.seconds
        if not self.least_seconds:
            setting = course.trained.setting
            samples = min(_EPOCH * epoch_clocks(self.job, setting), _MOST_CLOCKS * len(setting.workers))
            clocks = max(_CLOCKS * len(setting.workers), math.ceil(samples)) // _PARTS
            yield from self.run_parts(course, Run(clocks=max(clocks, 1), branch=course.trained.branch))
            if course.lost:
                return course.seconds - already
            self.least_seconds = course.seconds
        overhead = max(self.overhead, self.job.evaluate_seconds)
        share = _SHARE * (self.trained_seconds + course.seconds)
        # Where a segment has made nothing better, the next is as long as all since the snapshot, as in Algorithm 1.
        seconds = max(share, _OVERHEAD * overhead, self.least_seconds, already) - (course.seconds - already)
        if seconds > 0:
            yield from self.run_parts(course, Run(seconds=seconds / _PARTS, branch=course.trained.branch))
        return course.seconds - already

    def go_back(self, size: float) -> Generator[Action[Any], Any, bool]:
        """Begin again at the snapshot with a setting that diverges less easily; False if there is none."""
        setting = calmer(self.moves, self.main.trained.setting, size)
        branch = None
        if self.snapshot is not None and setting is not None:
            branch = yield from fork(self.snapshot, setting)
        if self.snapshot is not None:
            yield from drop(self.main.trained.branch)
        if branch is None or setting is None:
            return False
        self.main = _Stretch(TrainedBranch(branch, setting))
        return True

    # ---------------------------------------------------------------------------------------------------------- trials

    @property
    def left(self) -> float:
        """Seconds to the target, as far as known."""
        now = (self.trained_seconds + self.main.seconds, self.main.level)
        return seconds_left(self.job, [*self.curve, now], self.now)

    def recall(self) -> None:
        """Failures are forgotten with time; sooner, if the target is far."""
        self.beliefs.forget(min(_FORGETS * self.left / self.now, 1.0) if self.now > 0 else 0.0)

    def worthwhile(self) -> Move | None:
        """The move with the largest expected gain, if that is worth a trial."""
        main, before, left = self.main, self.before, self.left
        if self.snapshot is None or before is None:
            return None
        possible = [m for m in self.moves if self.changed(m) is not None]
        fall = self.fall(main) / abs(before.loss or 1.0)
        # A single loss that is no better may be noise, and a lower rate always looks good for a while.
        stuck = not self.trained_seconds or self.idle >= _PLATEAU
        gains = {m: self.beliefs.expected(m, main, fall, stuck=stuck) for m in possible}
        move = max(gains, key=lambda m: gains[m], default=None)
        if move is None or self.wasted + self.cost > _WASTE * (self.now + left) or self.cost > gains[move] * left:
            return None
        return move

    @property
    def cost(self) -> float:
        """Seconds of one trial."""
        return self.main.seconds + self.overhead

    def changed(self, move: Move) -> Setting | None:
        """The setting after a move; None if the range ends here."""
        size = self.beliefs.size(move) * (1.0 if move.up or not self.trained_seconds else _CAUTION)
        setting = move.step(self.main.trained.setting, size)
        if move.dummy:
            return setting
        return None if setting == self.main.trained.setting or setting in self.tried else setting

    def fall(self, course: _Stretch) -> float:
        """The fall of a course's loss since the snapshot."""
        return self.before.loss - course.loss if self.before is not None else math.nan

    def attempt(self, move: Move) -> Generator[Action[Any], Any, None]:
        """One trial; the job goes on with it if it is better."""
        setting, branch, begun = self.changed(move), None, self.now
        if self.snapshot is not None and setting is not None:
            branch = yield from fork(self.snapshot, setting)
        if branch is None or setting is None:
            self.beliefs.failed(move, flat=False, lost=False)
            return
        self.tried.append(setting)
        trial = _Stretch(TrainedBranch(branch, setting))
        yield from self.run_parts(trial, Run(seconds=self.main.seconds / _PARTS, branch=branch), cuts=True)
        gain, flat = yield from self.gain(trial)
        if gain < _BETTER and self.catches_up(trial):
            for course in (self.main, trial):
                yield from self.run_parts(course, Run(seconds=course.seconds / _PARTS, branch=course.trained.branch))
            if self.main.lost:
                gain = 1.0 if not trial.lost else 0.0
            else:
                yield from self.evaluate(self.main)
                gain, flat = yield from self.gain(trial)
        if gain >= _BETTER:
            self.beliefs.succeeded(move, gain)
            yield from drop(self.main.trained.branch)
            self.main, self.wasted = trial, 0.0
        else:
            self.beliefs.failed(move, flat=flat, lost=trial.lost)
            yield from drop(branch)
            self.wasted += self.now - begun

    def gain(self, trial: _Stretch) -> Generator[Action[Any], Any, tuple[float, bool]]:
        """The share of the reference's time that the trial saves, and whether it is just like the reference."""
        if trial.lost:
            return 0.0, False
        yield from self.evaluate(trial)
        fall, least = self.fall(trial), _LEAST_FALL * abs(self.fall(trial) + trial.loss)
        return (1.0 - max(self.fall(self.main), 0.0) / fall if fall >= least else 0.0), abs(
            trial.loss - self.main.loss
        ) < least

    def catches_up(self, trial: _Stretch) -> bool:
        """Whether a trial that is not better yet falls so much faster that it will be, and that this is worth waiting for.

        A higher rate may first raise the loss.
        """
        if trial.lost or self.main.seconds * 1.01 < trial.seconds or min(len(trial.levels), len(self.main.levels)) < _PARTS:
            return False
        half = _PARTS // 2
        middle = trial.levels[-1].seconds
        early = trial.levels[-1 - half].seconds
        mine = 2 * trial.levels[-1].mean - trial.levels[-1 - half].mean
        its = 2 * self.main.level_at(middle) - self.main.level_at(early)
        noise = 2 * (trial.levels[-1].error + self.main.levels[-1].error)
        return mine + noise < its and _CATCHES_UP * self.left > self.cost

    def diverges(self, course: _Stretch) -> bool:
        """Whether the training loss has tripled since the snapshot. Where it is next to nothing it may, so by a tenth of the
        first loss at least."""
        rise = course.levels[-1].median - self.start if course.levels else 0.0
        return rise > max((_DIVERGES - 1) * abs(self.start), _LEAST_RISE * abs(self.first))

    def hopeless(self, trial: _Stretch) -> bool:
        """Whether the trial's training loss is above the reference's, and does not fall fast enough to come down to it."""
        done = len(trial.levels)
        if done < _PARTS // 2 or not self.main.levels:
            return False
        last, before = trial.levels[-1], trial.levels[-2]
        ending = last.mean + min(last.mean - before.mean, 0.0) * (_PARTS - done)
        middle = self.main.seconds * (1 - 0.5 / _PARTS)  # of the last part
        return ending > self.main.level_at(middle) + 4 * self.main.levels[-1].error

    # --------------------------------------------------------------------------------------------------------- actions

    def run_parts(self, course: _Stretch, run: Run, *, cuts: bool = False) -> Generator[Action[Any], Any, None]:
        """Train a branch for some runs, or until it is lost or, if it may be cut short, hopeless."""
        for _ in range(_PARTS):
            try:
                seen = yield from Run(run.clocks, run.seconds, run.branch)
            except Rejected:
                course.lost = True
                return
            self.now = seen.end_seconds
            course.record(seen)
            if math.isnan(self.start) and len(seen.pushes.loss):
                # Before the first update, or nearly.
                self.start = float(np.mean(seen.pushes.loss[: len(course.trained.setting.workers)]))
                self.first = self.start if math.isnan(self.first) else self.first
            course.lost = course.lost or self.diverges(course) or (cuts and self.hopeless(course))
            if course.lost:
                return

    def evaluate(self, course: _Stretch) -> Generator[Action[Any], Any, None]:
        """Measure the loss and the level of a branch, as far as the system can."""
        course.loss = course.levels[-1].mean if course.levels else course.loss
        try:
            seen: Evaluation = yield from Evaluate(course.trained.branch)
        except Rejected:
            return
        self.now = max(self.now, seen.seconds)
        course.loss = seen.loss if math.isfinite(seen.loss) else course.loss
        course.accuracy = seen.accuracy
        course.level = 1.0 - seen.accuracy if self.job.target.metric == "accuracy" else course.loss
