"""Tuning that pays for itself: MLtuner's branches, with trials that begin only while they are worth their time.

The paper first searches, for as long as that takes, and then trains. On jobs of minutes or hours the search then costs more
than it saves. Here the job trains, and tries another setting now and then. The whole file is ours.

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
  time left is extrapolated from the validation of the job (`seconds_left`), and the expected gain is a number per move
  (`_Beliefs`). None begins after evaluations and trials that failed in a row have taken 3.5 % of the job's expected time. So
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
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Action, Evaluate, Evaluation, Job, Rejected, Run, Setting, Tuner, Window
from tuners.mltuner.moves import Move, calmer, moves, no_move_is_free
from tuners.search.branches import TrainedBranch, drop, fork
from tuners.search.epochs import epoch_clocks
from tuners.search.tunables import Which

__all__ = ["frugal", "seconds_left"]

# Segments
_CLOCKS = 3  # of every worker, in the first segment,
_EPOCH = 0.2  # or this share of an epoch where that is longer,
_MOST_CLOCKS = 40  # up to so many of every worker
_OVERHEAD = 10.0  # a segment is at least so many times as long as the forks and evaluations of a trial
_SHARE = 0.05  # of the time trained: a later segment; of the budget: the most that a segment takes for the two above
_PARTS = 4  # of a segment or a trial, after each of which it may be ended
_PLATEAU = 3  # segments that made nothing better
_REFUSALS = 3  # snapshots refused in a row, after which the tuner ends

# Trials
_BETTER = 0.1  # of a trial's fall, that the reference must miss
_LEAST_FALL = 0.005  # of the loss; less is no progress
_LEARNS = 2.0  # a job learns if its loss would fall to the first one / so much within the budget, at its pace so far
_DIVERGES = 3.0  # times the loss at the snapshot
_LEAST_RISE = 0.1  # of the first loss
_CAUTION = 0.5  # steps down are so long, but at the start
_CATCHES_UP = 0.25  # expected gain of a trial that falls faster at its end
_WASTE = 0.035  # of the job's time: after so much for evaluations and failed trials in a row no trial begins
_POINTS = 4  # of a curve, from which a power law is told from an exponential decay
_HORIZON = 30.0  # times the time so far: the most that is taken for the time left

# Expected gains
_HIGHER_RATE = 0.1  # of a higher rate
_LITTLE = 0.05  # of the other moves
_STUCK = 0.4  # of another rate while the loss does not fall
_SIZES = (0.25, 8.0)  # of steps, the least and the most
_FORGETS = 0.1  # failures forgotten per segment, while the time left is the time so far


def frugal(job: Job, *, tuned: Which = "all", copies: int = 1) -> Tuner:
    """Train, and try other settings as far as that pays. A job without free tunables, or without losses, runs as it is."""
    if no_move_is_free(job, tuned):
        return
    tuning = _Tuning(job, moves(job, tuned, copies=copies), _Stretch(TrainedBranch(0, job.start)), job.evaluate_seconds)
    while (yield from tuning.segment()):
        tuning.recall()
        while tuning.worthwhile() is not None:
            yield from tuning.measure()
            # What has just been measured may show that it is not.
            if (move := tuning.worthwhile()) is not None:
                yield from tuning.attempt(move)


def seconds_left(job: Job, curve: Sequence[tuple[float, float]], now: float) -> float:
    """Seconds to the target under the present setting, extrapolated from `curve`, pairs of (seconds trained, level).

    The level is the validation loss, or 1 - accuracy; nan where it is unknown. The last three quarters of the curve are
    extended as an exponential decay or as a power law (Hestness et al. 2017), whichever fits better; with fewer than four
    points as an exponential decay, which is the sooner at the target. At most what is left of the budget, and 30 times the
    time so far.
    """
    most = max(min(job.budget_seconds - now, _HORIZON * now), 0.0)
    goal = 1.0 - job.target.value if job.target.metric == "accuracy" else job.target.value
    known = [(s, level) for s, level in curve if math.isfinite(level)]
    recent = [(s, level) for s, level in known if s >= known[-1][0] / 4]
    seconds, levels = np.array(recent if len(recent) > 1 else known).reshape(-1, 2).T
    if len(levels) < 2:
        return most
    positive = min(goal, levels.min()) > 0
    if positive:
        goal, levels = math.log(goal), np.log(levels)
    line = _line(seconds, levels)
    ending = line.at(goal)
    if positive and len(levels) >= _POINTS and seconds[0] > 0:
        power = _line(np.log(seconds), levels)
        if power.residual < line.residual:
            ending = math.exp(min(power.at(goal), 700.0))
    return float(min(most, max(ending - curve[-1][0], 0.0)))


class _Line(NamedTuple):
    """A line through points, by least squares."""

    slope: float
    level: float  # at 0
    residual: float  # sum of squares

    def at(self, level: float) -> float:
        """Where it comes down to a level; infinite for one that does not fall."""
        return (level - self.level) / self.slope if self.slope < 0 else math.inf


def _line(x: NDArray[np.float64], y: NDArray[np.float64]) -> _Line:
    slope, level = np.polyfit(x, y, 1)
    return _Line(float(slope), float(level), float(np.sum((y - level - slope * x) ** 2)))


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
    loss: float = math.nan  # on the validation set, or of the last mini-batches if the system cannot tell
    accuracy: float = math.nan
    exact: bool = False  # these are of the model as it is; else of the last validation that the system has made
    waiting: float = 0.0  # share of the workers' time in which the policy made them wait
    computing: float = 0.0  # share of the workers' time that passed in forward and backward passes
    lost: bool = False  # it has diverged, or the system refuses to run it

    def record(self, seen: Window) -> None:
        losses, middle = seen.pushes.loss, self.seconds + seen.seconds / 2
        self.seconds += seen.seconds
        self.trained = self.trained.after(seen)
        self.lost = seen.status in ("diverged", "deadlock") or not np.isfinite(losses).all()
        self.exact = False
        if seen.evaluations:
            self.loss, self.accuracy = seen.evaluations[-1].loss, seen.evaluations[-1].accuracy
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


@dataclass(slots=True)
class _Beliefs:
    """What is expected of each move: the share of the time left that it saves.

    After a success it is half of what that has gained. After a failure it is a quarter of what it was, or a sixteenth if the
    trial was cut short, and the next step is half as long. All are halved with every failure in a row. If neither the trial
    nor the reference has made any progress, the next step is twice as long instead.
    """

    known: dict[Move, float] = field(default_factory=dict)  # since a success
    doubt: dict[Move, float] = field(default_factory=dict)  # factor since failures
    sizes: dict[Move, float] = field(default_factory=dict)  # of steps
    failures: float = 0.0  # in a row

    def expected(self, move: Move, reference: _Stretch, fall: float, *, stuck: bool) -> float:
        """The expected gain, where the loss of the reference has fallen by the share `fall`."""
        prior = _prior(move, reference, fall, stuck=stuck) * self.doubt.get(move, 1.0)
        return float(max(prior, self.known.get(move, 0.0)) * 0.5**self.failures)

    def size(self, move: Move) -> float:
        return self.sizes.get(move, 1.0)

    def forget(self, much: float) -> None:
        """Forget so many failures."""
        self.failures = max(self.failures - much, 0.0)
        self.doubt = {move: min(doubt * 4**much, 1.0) for move, doubt in self.doubt.items()}

    def succeeded(self, move: Move, gain: float) -> None:
        self.known[move], self.failures, self.sizes[move] = gain / 2, 0.0, 1.0

    def failed(self, move: Move, *, flat: bool, lost: bool) -> None:
        self.failures += 1
        self.known.pop(move, None)
        if not flat:
            self.doubt[move] = self.doubt.get(move, 1.0) / (16 if lost else 4)
        self.sizes[move] = min(max(self.size(move) * (2.0 if flat else 0.5), _SIZES[0]), _SIZES[1])


def _prior(move: Move, reference: _Stretch, fall: float, *, stuck: bool) -> float:
    """The expected gain of a move that has not been tried."""
    if not (move.up or stuck):
        return 0.0  # a calmer setting always looks good for a while, because losses are less noisy, and is slower then
    if move.name == "learning_rate":
        if stuck and fall < _LEAST_FALL:
            return _STUCK if move.up == (fall > -_LEAST_FALL) else _STUCK / 2
        return _HIGHER_RATE if move.up else _LITTLE
    if move.name == "waiting" and move.up:
        return max(_LITTLE, reference.waiting / 2)
    if move.name == "batch_size" and move.up:
        return max(_LITTLE, reference.computing / 4)
    return _LITTLE


# ---------------------------------------------------------------------------------------------------------------- tuning


@dataclass(slots=True)
class _Tuning:
    """The job, its snapshot, and the trials."""

    job: Job
    moves: tuple[Move, ...]
    main: _Stretch  # the job since the snapshot: the reference of trials
    overhead: float  # seconds of the forks and evaluations of a trial
    snapshot: int | None = None
    before: _Stretch = field(init=False)  # the job at the snapshot
    start: float = math.nan  # training loss at the snapshot
    first: float = math.nan  # training loss when the job began
    trained_seconds: float = 0.0  # up to the snapshot
    least_seconds: float = 0.0  # of a segment
    now: float = 0.0
    curve: list[tuple[float, float]] = field(default_factory=list)  # (seconds trained, level) up to the snapshot
    idle: int = 0  # segments since the snapshot
    refusals: int = 0  # of snapshots, in a row
    beliefs: _Beliefs = field(default_factory=_Beliefs)
    tried: list[Setting] = field(default_factory=list)  # since the snapshot
    wasted: float = 0.0  # seconds of evaluations, and of trials that have failed, since a trial has not

    def __post_init__(self) -> None:
        self.before = self.main

    # -------------------------------------------------------------------------------------------------------- segments

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
        self.refusals = 0 if self.snapshot is not None else self.refusals + 1
        self.trained_seconds += self.main.seconds
        self.before, self.idle, self.tried = self.main, 0, []
        self.curve.append((self.trained_seconds, self.level(self.before)))
        self.start = max((x.mean for x in self.before.levels[-2:]), default=math.nan)
        self.main = _Stretch(self.main.trained._replace(clocks=0))

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
            yield from self.run_parts(main, Run(seconds=seconds / _PARTS, branch=main.trained.branch))

    def train_first(self, brief: float) -> Generator[Action[Any], Any, None]:
        """The first segment: some clocks of every worker, and a share of an epoch if that takes `brief` seconds at most."""
        main = self.main
        least = _CLOCKS * len(main.trained.setting.workers)
        epoch = min(_EPOCH * epoch_clocks(self.job, main.trained.setting), least * _MOST_CLOCKS / _CLOCKS)
        wanted = max(least, math.ceil(epoch))
        first = wanted if wanted <= _PARTS * least else least
        run = Run(clocks=math.ceil(first / _PARTS), branch=main.trained.branch)
        yield from self.run_parts(main, run, until=lambda: main.seconds >= brief and main.trained.clocks >= least)
        rest = wanted - main.trained.clocks
        if not main.lost and rest > 0 and main.seconds * wanted <= brief * main.trained.clocks:
            yield from self.run_parts(main, replace(run, clocks=math.ceil(rest / _PARTS)))

    def go_back(self, size: float) -> Generator[Action[Any], Any, bool]:
        """Begin again at the snapshot with a setting that diverges less easily; False if there is none."""
        setting = calmer(self.moves, self.main.trained.setting, size)
        if self.snapshot is None:
            return False
        branch = None if setting is None else (yield from fork(self.snapshot, setting))
        yield from drop(self.main.trained.branch)
        if branch is None or setting is None:
            return False
        self.main = _Stretch(TrainedBranch(branch, setting))
        return True

    # ---------------------------------------------------------------------------------------------- whether a trial pays

    def level(self, stretch: _Stretch) -> float:
        """What has to fall to reach the target."""
        return 1.0 - stretch.accuracy if self.job.target.metric == "accuracy" else stretch.loss

    @property
    def left(self) -> float:
        """Seconds to the target, as far as known."""
        here = (self.trained_seconds + self.main.seconds, self.level(self.main))
        return seconds_left(self.job, [*self.curve, here] if self.learns else [], self.now)

    @property
    def learns(self) -> bool:
        """Whether the training loss falls at all, for a job of this budget. As long as it does not, an accuracy that rises
        says nothing about the time left, and the setting is a poor one."""
        levels, seconds = self.main.levels or self.before.levels, self.trained_seconds + self.main.seconds
        if not levels or not min(self.first, levels[-1].mean) > 0:
            return True
        return math.log(self.first / levels[-1].mean) * self.job.budget_seconds > math.log(_LEARNS) * seconds

    @property
    def cost(self) -> float:
        """Seconds of one trial."""
        return self.main.seconds + self.overhead

    def recall(self) -> None:
        """Failures are forgotten with time; sooner, if the target is far."""
        self.beliefs.forget(min(_FORGETS * self.left / self.now, 1.0) if self.now > 0 else 0.0)

    def worthwhile(self) -> Move | None:
        """The move with the largest expected gain, if that is worth a trial."""
        left, learns = self.left, self.learns
        alone = self.trained_seconds + self.main.seconds + left  # what the job takes without a further trial
        known = sum(math.isfinite(level) for _, level in self.curve)
        late = known >= _POINTS and left >= self.job.budget_seconds - self.now
        # A job that ends with its budget has nothing to lose by trials.
        if self.snapshot is None or (learns and not late and self.wasted > _WASTE * alone):
            return None
        fall = self.fall(self.main) / abs(self.before.loss or 1.0)
        if not learns and not fall < 0:
            fall = 0.0
        # A single loss that is no better may be noise.
        stuck = not (learns and self.trained_seconds) or self.idle >= _PLATEAU
        possible = [m for m in self.moves if self.changed(m) is not None]
        gains = {m: self.beliefs.expected(m, self.main, fall, stuck=stuck) for m in possible}
        move = max(gains, key=lambda m: gains[m], default=None)
        return move if move is not None and gains[move] * left > self.cost else None

    def changed(self, move: Move) -> Setting | None:
        """The setting after a move; None if the range ends here, or if it has been tried."""
        size = self.beliefs.size(move) * (1.0 if move.up or not self.trained_seconds else _CAUTION)
        setting = move.step(self.main.trained.setting, size)
        if move.dummy:
            return setting
        return None if setting == self.main.trained.setting or setting in self.tried else setting

    def fall(self, stretch: _Stretch) -> float:
        """The fall of the loss since the snapshot."""
        return self.before.loss - stretch.loss

    # ---------------------------------------------------------------------------------------------------------- trials

    def measure(self) -> Generator[Action[Any], Any, None]:
        """Evaluate the snapshot and the reference as they are."""
        begun = self.now
        if not self.before.exact and self.snapshot is not None:
            yield from self.evaluate(self.before, self.snapshot)
            self.curve[-1] = (self.trained_seconds, self.level(self.before))
        if not self.main.exact:
            yield from self.evaluate(self.main, self.main.trained.branch)
        self.wasted += self.now - begun

    def attempt(self, move: Move) -> Generator[Action[Any], Any, None]:
        """One trial; the job goes on with it if it is better."""
        setting, begun, branch = self.changed(move), self.now, None
        if setting is not None and self.snapshot is not None:
            branch = yield from fork(self.snapshot, setting)
        if setting is None or branch is None:
            self.beliefs.failed(move, flat=False, lost=False)
            return
        self.tried.append(setting)
        trial = _Stretch(TrainedBranch(branch, setting))
        yield from self.run_parts(trial, Run(seconds=self.main.seconds / _PARTS, branch=branch), cuts=True)
        gain = yield from self.gain(trial)
        if gain < _BETTER and self.catches_up(trial):
            begun += self.main.seconds  # the job's own training is no waste
            for stretch in (self.main, trial):
                yield from self.run_parts(stretch, Run(seconds=stretch.seconds / _PARTS, branch=stretch.trained.branch))
            if not self.main.lost:
                yield from self.evaluate(self.main, self.main.trained.branch)
            gain = yield from self.gain(trial)
        if gain >= _BETTER:
            self.beliefs.succeeded(move, gain)
            yield from drop(self.main.trained.branch)
            self.main, self.wasted = trial, 0.0
        else:
            flat = not trial.lost and max(abs(self.fall(trial)), abs(self.fall(self.main))) < self.least_fall
            self.beliefs.failed(move, flat=flat, lost=trial.lost)
            yield from drop(branch)
            self.wasted += self.now - begun
        if not trial.lost:
            self.overhead = max(self.now - begun - trial.seconds, self.job.evaluate_seconds)

    @property
    def least_fall(self) -> float:
        """A fall of the loss that is progress."""
        return _LEAST_FALL * abs(self.before.loss)

    def gain(self, trial: _Stretch) -> Generator[Action[Any], Any, float]:
        """The share of the reference's time that the trial saves; 0 for one that makes no progress."""
        if trial.lost:
            return 0.0
        yield from self.evaluate(trial, trial.trained.branch)
        if self.fall(trial) < self.least_fall:
            return 0.0
        return 1.0 if self.main.lost else 1.0 - max(self.fall(self.main), 0.0) / self.fall(trial)

    def catches_up(self, trial: _Stretch) -> bool:
        """Whether a trial that is not better yet falls so much faster that it will be, and that is worth waiting for.

        A higher rate may first raise the loss.
        """
        if trial.lost or len(trial.levels) < _PARTS or not self.main.levels or _CATCHES_UP * self.left <= self.cost:
            return False
        last, middle = trial.levels[-1], trial.levels[-1 - _PARTS // 2]
        ending = 2 * last.mean - middle.mean
        reference = 2 * self.main.level_at(last.seconds) - self.main.level_at(middle.seconds)
        return ending + 2 * (last.error + self.main.levels[-1].error) + self.least_fall < reference

    def diverges(self, stretch: _Stretch) -> bool:
        """Whether the training loss has tripled since the snapshot. A loss that is next to nothing may, so it must also have
        risen by a tenth of the first one. The median, because single mini-batches may be far off."""
        rise = stretch.levels[-1].median - self.start if stretch.levels else 0.0
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

    def run_parts(
        self, stretch: _Stretch, run: Run, *, cuts: bool = False, until: Callable[[], bool] = lambda: False
    ) -> Generator[Action[Any], Any, None]:
        """Train a branch for some runs, or `until` that is enough, or it is lost or, if it may be cut short, hopeless."""
        for _ in range(_PARTS):
            try:
                seen = yield from Run(run.clocks, run.seconds, run.branch)
            except Rejected:
                stretch.lost = True
                return
            self.now = seen.end_seconds
            stretch.record(seen)
            if math.isnan(self.start) and len(seen.pushes.loss):
                # Before the first update, or nearly.
                self.start = float(np.mean(seen.pushes.loss[: len(stretch.trained.setting.workers)]))
                self.first = self.start if math.isnan(self.first) else self.first
            stretch.lost = stretch.lost or self.diverges(stretch) or (cuts and self.hopeless(stretch))
            if stretch.lost or until():
                return

    def evaluate(self, stretch: _Stretch, branch: int) -> Generator[Action[Any], Any, None]:
        """Measure the loss of a branch as it is, as far as the system can."""
        stretch.exact = True
        stretch.loss = stretch.levels[-1].mean if stretch.levels else self.start
        try:
            seen: Evaluation = yield from Evaluate(branch)
        except Rejected:
            return
        self.now = max(self.now, seen.seconds)
        stretch.loss = seen.loss if math.isfinite(seen.loss) else stretch.loss
        stretch.accuracy = seen.accuracy
