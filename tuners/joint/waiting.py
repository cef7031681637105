"""Who waits for whom, under `tuners.joint`, where the rate is held and policies may be installed.

    expected seconds left = pushes left x seconds per push

Nobody waits, as long as that learns well: it has the most pushes per second, and at a low rate an old gradient is as good as
a new one. Near the edge of stability it is not: of k workers that do not wait, a gradient is k - 1 updates old, and makes
the model swing: by then, a job may need several times as many pushes. Swings are what tells: losses that vary about their
drift by more than they drift. Then fewer gradients are computed at once: three quarters as many or half as many. What is
expected to save more seconds is tried where that is more than the trial costs, and taken back where it is clearly worse than
where the drift before led, or where the drift that follows is slower.

A round of any K pushes, after which all workers start anew (`k_batch_sync`: Dutta et al. 2018), has the most stable updates;
but a slow worker's gradients are dropped. Where workers' data differ, K of them are in progress instead (`admit`).

Where nobody waits, a slow worker's data count less, too. If these differ from the others', the model may learn nothing of
them. Where that is seen, and the target is out of reach without them, all workers push equally often from then on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import fdtrc

from tuners.actions import Job, Setting
from tuners.joint.learning_model import slope
from tuners.joint.system_model import SystemModel
from tuners.joint.training import JobOver, Snapshot, Steps, Training
from tuners.settings import BOUNDED

__all__ = ["Line", "Waiting", "data_differ", "left_out", "seconds_left", "seconds_per_push", "stable_rate"]

_LINE = 3  # windows through which a line with an error can be drawn
_LEAST = 4  # windows from which a drift is measured
_NEWEST = 8  # windows that tell it, at most
_TRIAL = 4  # windows in which fewer gradients at once are tried, at most
# Power of the ratio of stable rates that is the ratio of pushes where a job swings: with half as many gradients at once,
# 2.7 to 5.9 times fewer pushes on `rlp-mild`, `rlp-edge` and two members of `ages`; the ratio of stable rates is 2.5.
_FEWER = 1.5
_STEADY = 2  # windows in which a loss that does not swing falls by more than it varies
_AGAIN = 0.25  # times the chance that a trial serves, after each that has failed
_LITTLE = 0.1  # of the way from the blank model to the goal: less is no progress
_SLOWER = 1.2  # times the seconds left for which a policy is taken back
_CYCLES = 8  # of every worker, of which rounds are drawn
_ROUNDS = 300  # that are drawn
_REPEATS = 3  # pushes of a worker in a round, at most
_SELDOM = 0.6  # times as many pushes as the median worker: fewer are seldom
_UNLEARNED = 0.25  # times the fall of the others' losses: a fall that is less is none
_FEWEST = 6  # losses of a worker that tell whether they fall
_AHEAD = 2  # pushes that a worker may be ahead of the slowest one, where all push equally often
_DIFFER = 0.01  # chance of losses by worker that are so different, if their data were alike


@dataclass(frozen=True, slots=True)
class Line:
    """The straight line through values of the newest windows."""

    mean_seconds: float
    mean: float
    slope: float  # per second
    slope_deviation: float
    noise: float  # deviation of a window from the line

    @classmethod
    def of(cls, times: Sequence[float], values: Sequence[float]) -> Line:
        """Of at least three windows."""
        t, y = np.array(times), np.array(values)
        rising, since = slope(times, values), t - t.mean()
        noise = float(np.sqrt(np.sum((y - y.mean() - rising * since) ** 2) / (len(y) - 2)))
        return cls(float(t.mean()), float(y.mean()), rising, noise / float(np.sqrt(np.sum(since**2))), noise)

    @property
    def falls(self) -> bool:
        """Whether it falls by more than two standard errors."""
        return -self.slope > 2 * self.slope_deviation

    def at(self, seconds: float) -> float:
        """Where it leads by then; levels that rise are expected to rise no further."""
        return self.mean + min(self.slope, 0.0) * (seconds - self.mean_seconds)

    def error_at(self, seconds: float) -> float:
        """Standard error of `at`."""
        return math.hypot(self.noise / 2, self.slope_deviation * (seconds - self.mean_seconds))


def seconds_left(distance: float, drift: float) -> float:
    """Of so many nats, at so many per second; infinite where there is no drift."""
    return max(distance, 0.0) / drift if drift > 0 else math.inf


class _Offer(NamedTuple):
    setting: Setting
    slower: float  # times the seconds per push
    saved: float  # seconds, as expected
    cost: float  # seconds, as expected


class Waiting:
    """The job from its first windows to the target: nobody waits, or fewer gradients at once."""

    def __init__(
        self,
        job: Job,
        training: Training,
        system: SystemModel,
        place: Callable[[], Steps[None]],
        *,
        cost_rule: bool = True,
    ) -> None:
        self._job, self._training, self._system, self._place = job, training, system, place
        self._cost_rule = cost_rule
        # Since the policy was changed: levels, losses on validation data, shares of samples that are right, seconds.
        self.levels, self._validated, self._right, self.times = list[float](), list[float](), list[float](), list[float]()
        self._looser: tuple[Setting, Line] | None = None  # the policy before, and its course
        self._failed = 0
        self._kept: Snapshot | None = None  # of about the best model
        self._equal = False  # whether all workers push equally often
        self._own = defaultdict[str, list[float]](list)  # logarithms of losses by worker, since the policy was changed
        self._cycles, self._losses = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def run(self) -> Steps[None]:
        """Train until the job ends."""
        training, windows = self._training, 0
        while True:
            yield from self._window()
            windows += 1
            if training.diverged:
                yield from self._leave("it has diverged")
            elif training.cluster_changed:
                yield from self._place()
                self._begin_anew()
            elif not (yield from self._include()):
                if windows % _NEWEST == 0 and (self._kept is None or training.level < self._kept.level):
                    yield from training.drop(self._kept)
                    self._kept = yield from training.snapshot()
                if len(self.levels) >= _LEAST:
                    yield from self._decide()

    # ----------------------------------------------------------------------------------------------------- what is seen

    def _window(self) -> Steps[None]:
        training = self._training
        yield from training.window()
        self.levels.append(training.level)
        self._validated.append(training.loss)
        self.times.append(training.seconds)
        window = training.newest
        if window is not None and window.evaluations:
            self._right.append(window.evaluations[-1].accuracy)
        if window is None or not len(window.pushes.loss):
            return
        pushes, mean = window.pushes, float(np.mean(window.pushes.loss))
        cycles = pushes.compute_seconds + pushes.pull_seconds + pushes.push_seconds
        for worker, cycle, loss in zip(pushes.worker, cycles, pushes.loss, strict=True):
            name = self._job.nodes[int(worker)].name
            self._losses[name].append(float(loss) / mean if mean > 0 else 1.0)
            self._own[name].append(math.log(max(float(loss), 1e-9)))
            # Of workers that are stopped, only fast mini-batches are seen.
            if training.setting.policy != "k_batch_sync":
                self._cycles[name] = [*self._cycles[name], float(cycle)][-_CYCLES:]

    def _begin_anew(self) -> None:
        self.levels, self._validated, self._right, self.times = [], [], [], []
        self._own.clear()

    # ----------------------------------------------------------------------------------------------------- what is done

    def _decide(self) -> Steps[None]:
        """Go on, take the last step back, or try half as many gradients at once."""
        training = self._training
        levels, times = self.levels[-_NEWEST:], self.times[-_NEWEST:]
        if not all(map(math.isfinite, (*levels, *self._validated[-_NEWEST:]))):
            return
        course, level, goal = Line.of(times, levels), sum(levels[-2:]) / 2, training.gauge.goal(training.loss)
        if self._looser is not None and len(levels) == _NEWEST:
            setting, before = self._looser
            # It would swing again, and its drift is known as little as that has let it be.
            then = seconds_left(level + before.noise - goal, -before.slope - before.slope_deviation)
            now = seconds_left(level - goal, course.slope_deviation - course.slope)
            if _SLOWER * then < now:
                self._looser, self._failed = None, self._failed + 1
                yield from self._change(setting, f"taken back: {now:.0f} s left at this drift, {then:.0f} s at that before")
                return
        window_seconds = (times[-1] - times[0]) / (len(times) - 1)
        # A model that swings may be sure of its wrong answers, so that its loss is high while it learns.
        learns = sum(self._right[-2:]) > sum(self._right[:2])
        if not (self._has_learned(level) or course.falls or learns):
            yield from self._leave("nothing is learned")
            return
        # The loss tells swings: the share of samples that are right varies by chance, as these are few.
        losses = Line.of(times, [math.log(max(loss, 1e-9)) for loss in self._validated[-_NEWEST:]])
        ratio = losses.noise / max(-losses.slope * _STEADY * window_seconds, 1e-9)
        chance = ratio**2 / (1 + ratio**2) * _AGAIN**self._failed
        left = min(seconds_left(level - goal, -course.slope), 2 * training.seconds)  # all that is known is that it lasts
        offers = [self._offer(s, chance, left, window_seconds) for s in self._stricter()]
        best = max(offers, key=lambda o: o.saved - o.cost, default=None)
        if best is None:
            return
        if best.saved > best.cost or not self._cost_rule:
            why = (
                f"on trial: the loss varies by {losses.noise:.2g} and falls by {-losses.slope * window_seconds:.2g} nats in "
                f"a window; of {left:.0f} s left, {best.saved:.0f} s may be saved with {_gradients(best.setting)} gradients "
                f"at once (chance {chance:.2g}, {best.slower:.2f} times the seconds a push); a trial costs {best.cost:.0f} s"
            )
            yield from self._try(best, course, why)

    def _include(self) -> Steps[bool]:
        """Let all workers push equally often, if the target needs data that are left out so far; whether this has begun."""
        training, workers = self._training, self._training.setting.workers
        # While the level falls, their data may still be learned: later, as they push seldom.
        if self._equal or len(self.levels) < _LINE or Line.of(self.times[-_NEWEST:], self.levels[-_NEWEST:]).falls:
            return False
        missed = left_out({w: self._own[w] for w in workers})
        if not (missed and training.gauge.needs(len(missed) / len(workers))):
            return False
        start, self._equal = self._job.start, True
        equal = replace(
            training.setting, policy="ssp", staleness=start.staleness if start.policy in BOUNDED else _AHEAD, quorum=0
        )
        why = (
            f"all push equally often: losses of {', '.join(missed)}, which push seldom, do not fall as the others' do, and "
            "the target is out of reach without their data"
        )
        # What was learned so far is wrong for these data.
        if not (yield from training.begin_again(equal, f"{why}; from the untrained model")):
            yield from training.change(equal, why)
        self._begin_anew()
        return True

    def _offer(self, stricter: Setting, chance: float, left: float, window_seconds: float) -> _Offer:
        """What a trial of `stricter` may save, and what it costs."""
        here = self._training.setting
        slower, fewer = self._seconds_per_push(stricter) / self._seconds_per_push(here), _fewer(stricter, here)
        cost = (1 - chance) * _TRIAL * window_seconds * max(slower - 1, 0.0)
        return _Offer(stricter, slower, chance * left * (1 - slower / fewer), cost)

    def _try(self, offer: _Offer, course: Line, why: str) -> Steps[None]:
        """Train under what was offered, and hold it unless it is clearly worse than where the drift before led, or so slow
        that fewer pushes cannot make up for it."""
        training, before, alone = self._training, self._training.setting, self._training.push_seconds
        if not (yield from training.change(offer.setting, why)):
            self._failed += 1
            return
        self._begin_anew()
        worse, slower = 0.0, 1.0
        while len(self.levels) < _TRIAL and not training.diverged:
            yield from self._window()
            newest, times = self.levels[-2:], self.times[-2:]
            worse = (sum(newest) / len(newest) - course.at(sum(times) / len(times))) / course.error_at(times[-1])
            slower = training.push_seconds / alone
            if len(self.levels) >= 2 and (abs(worse) > 2 or slower > _fewer(offer.setting, before)):
                break
        if worse < 1 and slower < _fewer(offer.setting, before) and not training.diverged:
            self._looser = before, course
            return
        seen = f"level {self.levels[-1]:.2f}, {worse:.1f} standard errors above the drift before"
        yield from self._change(before, f"taken back: {seen}, {slower:.2f} times the seconds per push")
        self._failed += 1

    def _leave(self, seen: str) -> Steps[None]:
        """Go on with half as many gradients at once from the best model that was kept; where none has learned anything, the
        rate is far too high for so many: with a quarter of them, from the untrained model."""
        training = self._training
        kept = self._kept if self._kept is not None and self._has_learned(self._kept.level) else None
        stricter = self._with(max(_gradients(training.setting) // (2 if kept else 4), 1))
        if kept is None and stricter == training.setting and not training.diverged:
            return
        why = f"{seen}: {_gradients(stricter)} gradients at once, from {'the best model' if kept else 'the start'}"
        if kept is not None:
            self._kept = yield from training.return_to(kept, stricter, why)
        elif not (yield from training.begin_again(stricter, why)):
            if training.diverged:
                raise JobOver
            yield from training.change(stricter, why)
        self._looser = None
        self._begin_anew()

    def _has_learned(self, level: float) -> bool:
        """Whether a model of this level is clearly better than one that knows nothing."""
        blank, goal = self._training.gauge.blank_level, self._training.gauge.goal(self._training.loss)
        return level <= blank - _LITTLE * (blank - goal)

    def _change(self, setting: Setting, why: str) -> Steps[None]:
        yield from self._training.change(setting, why)
        self._begin_anew()

    # ------------------------------------------------------------------------------------------------- which policy waits

    def _stricter(self) -> list[Setting]:
        """Half and three quarters as many gradients at once as there are workers, where these are fewer than now."""
        if self._equal:
            return []
        workers = len(self._training.setting.workers)
        sizes = dict.fromkeys((workers // 2, 3 * workers // 4))
        return [self._with(size) for size in sizes if 1 <= size < _gradients(self._training.setting)]

    def _with(self, size: int) -> Setting:
        """So many gradients at once, by the policy with the most stable progress per second."""
        here = self._training.setting
        found = [replace(here, policy="admit", staleness=size - 1)]
        if not data_differ(self._losses):
            found.append(replace(here, policy="k_batch_sync", quorum=size))
        return max(found, key=lambda s: stable_rate(s) / self._seconds_per_push(s))

    def _seconds_per_push(self, setting: Setting) -> float:
        known = [np.array(self._cycles[w]) for w in setting.workers if self._cycles[w]]
        return seconds_per_push(known, setting, self._system.together_seconds(setting)) if known else 1.0


def _gradients(setting: Setting) -> int:
    """How many gradients are of the same parameters, or in progress at once."""
    workers = len(setting.workers)
    if setting.policy == "k_batch_sync":
        return min(setting.quorum, workers)
    return min(setting.staleness + 1, workers) if setting.policy == "admit" else workers


def stable_rate(setting: Setting) -> float:
    """The highest stable rate per push, in inverse curvatures, of gradient descent on a quadratic.

    Where n gradients are of the same parameters, 2 / n; where a gradient is d updates old, 2 sin(pi / (4d + 2)).
    """
    n = _gradients(setting)
    return 2 / n if setting.policy == "k_batch_sync" else 2 * math.sin(math.pi / (4 * n - 2))


def _fewer(stricter: Setting, looser: Setting) -> float:
    """How many times as few pushes a job that swings is expected to need."""
    return math.pow(stable_rate(stricter) / stable_rate(looser), _FEWER)


def seconds_per_push(cycles: Sequence[NDArray[np.float64]], setting: Setting, together_seconds: float = 0.0) -> float:
    """Mean seconds between two pushes, if workers take for a pull, a mini-batch and a push what they took in `cycles`.

    `together_seconds`: that a pull takes longer where all workers begin it at once, as in a round.
    """
    n, means = min(_gradients(setting), len(cycles)), [float(np.mean(c)) for c in cycles]
    if setting.policy == "k_batch_sync":
        random = np.random.default_rng(0)
        drawn = np.stack([random.choice(c, (_ROUNDS, _REPEATS)) for c in cycles], axis=1)
        done = np.sort(np.cumsum(drawn, axis=2).reshape(_ROUNDS, -1), axis=1)
        return (float(np.mean(done[:, n - 1])) + together_seconds) / n
    if n < len(cycles):
        return sum(means) / len(means) / n  # workers take turns
    return 1 / sum(1 / m for m in means)


def left_out(losses: Mapping[str, Sequence[float]]) -> list[str]:
    """Workers that push seldom, and of whose data the model learns nothing: logarithms of their losses, by worker, are above
    those of the others in the newest half, and have not fallen as those have, by more than two standard errors."""
    usual = median(map(len, losses.values()))
    often = [x for x in losses.values() if len(x) > _SELDOM * usual and len(x) >= _FEWEST]
    fallen = [_halves(x) for x in often]
    if len(often) < 2:
        return []
    newest, noise = sum(b for _, b, _ in fallen) / len(fallen), math.hypot(*(e for *_, e in fallen)) / len(fallen)
    fall = sum(a - b for a, b, _ in fallen) / len(fallen)
    found = []
    for worker, x in losses.items():
        if len(x) <= _SELDOM * usual and len(x) >= _FEWEST and fall > 2 * noise:
            before, now, error = _halves(x)
            doubt = 2 * math.hypot(noise, error)
            if now > newest + doubt and before - now < _UNLEARNED * fall and fall - (before - now) > doubt:
                found.append(worker)
    return found


def _halves(values: Sequence[float]) -> tuple[float, float, float]:
    """Means of the first and the second half, and the standard error of their difference."""
    first, second = np.array_split(np.array(values), 2)
    deviation = math.sqrt((float(np.var(first)) + float(np.var(second))) / 2)
    error = deviation * math.sqrt(1 / len(first) + 1 / len(second))
    return float(np.mean(first)), float(np.mean(second)), error


def data_differ(losses: Mapping[str, Sequence[float]]) -> bool:
    """Whether workers' data differ: their losses, each over its window's mean, by one-way analysis of variance."""
    groups = [np.array(x) for x in losses.values() if len(x) > 1]
    count = sum(map(len, groups))
    if len(groups) < 2 or count <= 2 * len(groups):
        return False
    whole = sum(float(x.sum()) for x in groups) / count
    between = sum(len(x) * (float(x.mean()) - whole) ** 2 for x in groups) / (len(groups) - 1)
    within = sum(float(np.sum((x - x.mean()) ** 2)) for x in groups) / (count - len(groups))
    return bool(fdtrc(len(groups) - 1, count - len(groups), between / max(within, 1e-12)) < _DIFFER)
