"""The learning model of `tuners.joint`: how far the job is from its target, in nats, and what a rate does to that.

The *level* of a model is the logarithm of what is left: of the error for a target on accuracy (with a small part of the
loss, which still moves where accuracy stands still), of the loss above nine tenths of the target for a target on loss. While
learning goes well it falls about linearly. Level = drift + noise: the drift falls with the sum of the rates, the noise of a
rate is shed within a few windows after the rate was lowered. So a rate is judged by the drift, and cooled only when the
noise is all that is left between the level and the goal.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from itertools import pairwise
from statistics import median
from typing import NamedTuple

import numpy as np

from tuners.actions import Pushes, Target

__all__ = [
    "HELPED_NATS",
    "Gauge",
    "MinibatchLosses",
    "SecondsLeft",
    "falls",
    "has_lost_half",
    "is_lost",
    "is_unlearned",
    "likely_seconds",
    "over_fitted",
    "seconds_left",
    "slope",
    "spread",
    "stopped",
]

HELPED_NATS = 0.1
"""Below the blank model: progress."""

_LOSS_PART = 0.15  # of the loss in the level of a target on accuracy
_NO_BETTER = 1.25  # times the accuracy of a model that knows nothing: no better, as far as a validation set tells
_MOST_BLANK = 0.55  # accuracy of a model that knows nothing, at most: two classes, and a validation set's noise
_BEYOND = 0.3  # of the target's error: a level does not fall further, as a validation set is small
_WIDE_GAP = 5.0  # the same, and nothing is left to learn
_GAP = 2.0  # a validation loss so many times the training loss: the model has learned its samples by heart
_BLOWN_UP = 2.0  # times the loss of the untrained model: more counts in full, if accuracy does not tell more
_FAR_UP = 6.0  # nats above that: 400 times as much loss is blown up, whatever the accuracy
_TELLS = 0.25  # of the way from chance to all right: accuracy that tells that a model has learned
_DRIFT_NATS = 0.05  # from the first to the second half of the newest levels: it drifts still
_MANY = 8  # levels, of which the newest half tells the drift
_DRIFT_WEIGHT = 0.2  # of the drift, beside the time so far, in how long a job is likely to last
_LOST = 10  # levels without progress or drift after which a model is lost
_LITTLE = 0.1  # of the way from the blank model to the goal: less is no progress
_ABOVE = 0.9  # of a target on loss: what counts as the end of the scale


class Gauge:
    """Levels of one job. `hurt` and `noise` are in nats."""

    def __init__(self, target: Target) -> None:
        self.target = target
        on_loss = target.metric == "loss"
        self.untrained, self.untrained_level = math.inf, math.inf  # loss and level of the untrained model
        self.untrained_batches = math.inf  # mini-batches that have told that loss; infinite where it was validated
        # The same of the *blank* model, which knows nothing. Many an untrained network does worse, because it is sure of
        # wrong answers; what it gains by giving every class its frequency is not learning, and leads nowhere.
        self.blank, self.blank_level = math.inf, math.inf
        self._least_accuracy = 1.0  # of all models that were validated
        self.hurt = 0.1 if on_loss else 0.3  # a rise above the best level so far that is no noise
        self.noise = 0.15 if on_loss else 0.4  # what cooling is expected to shed, until that was measured

    def begin(self, loss: float, accuracy: float | None = None, batches: float = math.inf) -> None:
        """Take in the loss of the untrained model, and its accuracy if that was measured, else of how many mini-batches.

        A model that gives the right class the probability p has a loss of about -log p, so the loss tells the accuracy, too.
        """
        if math.isfinite(loss):
            self.untrained, self.untrained_batches = max(loss, 1e-9), batches
            self.untrained_level = self.told_level(loss) if accuracy is None else self.level(loss, accuracy)
            self.blank, self.blank_level = self.untrained, self.untrained_level
            self.see(loss, math.nan if accuracy is None else accuracy)

    def told_level(self, loss: float) -> float:
        """The level of a model of this loss, which tells about how often it is right."""
        return self.level(loss, math.exp(-min(loss, 700.0))) if math.isfinite(loss) else math.inf

    def see(self, loss: float, accuracy: float) -> None:
        """Take in a validation; if its model knows nothing, the blank model's loss is at most as high.

        A model gives the right class a probability of exp(-loss), as a geometric mean, so one that tells samples apart is
        right more often than that. One that does not is right as often as the worst model that was seen.
        """
        if not (math.isfinite(loss) and math.isfinite(accuracy)):
            return
        self._least_accuracy = min(self._least_accuracy, accuracy)
        knows_nothing = accuracy <= min(_NO_BETTER * min(math.exp(-loss), self._least_accuracy), _MOST_BLANK)
        if knows_nothing and loss < self.blank:
            self.blank, self.blank_level = max(loss, 1e-9), self.level(loss, accuracy)

    @property
    def blank_nats(self) -> float:
        """Logarithm of the blank model's loss over that of the untrained one: 0, or less."""
        return math.log(self.blank / self.untrained) if math.isfinite(self.untrained) else 0.0

    def has_learned(self, level: float, validated: float = math.inf) -> bool:
        """Whether a model is clearly better than one that knows nothing.

        Args:
            level: Logarithm of its loss over that of the untrained model.
            validated: Its level above that of the untrained model. Accuracy may rise while the loss still does, too.
        """
        blank_level = self.blank_level - self.untrained_level if math.isfinite(self.untrained_level) else 0.0
        return min(level - self.blank_nats, validated - blank_level) < -HELPED_NATS

    def level(self, loss: float, accuracy: float) -> float:
        """The level of a model with this validation loss and accuracy; infinite if it has diverged."""
        if not math.isfinite(loss):
            return math.inf
        if self.target.metric == "loss":
            return math.log(max(loss - _ABOVE * self.target.value, 1e-6))
        error = max(1 - accuracy, _BEYOND * (1 - self.target.value), 1e-6)
        level = self._loss_part(loss) + (1 - _LOSS_PART) * math.log(error)
        # Accuracy is never worse than chance, so there only the loss tells that a model has blown up. One that is right far
        # more often has not, although it is very sure of what it gets wrong; up to where its weights never come back from.
        chance = math.exp(-self.untrained)
        unknown = min(max(1 - (accuracy - chance) / (_TELLS * (1 - chance)), 0.0), 1.0)
        excess = math.log(max(loss / (_BLOWN_UP * self.untrained), 1.0))
        return level + unknown * (1 + _LOSS_PART) * min(excess, _FAR_UP) + max(excess - _FAR_UP, 0.0)

    def _loss_part(self, loss: float) -> float:
        """The part of the loss in the level of a target on accuracy, up to the loss of a model that may have blown up."""
        return _LOSS_PART * math.log(max(min(loss, _BLOWN_UP * self.untrained), 1e-9))

    def goal(self, loss: float) -> float:
        """The level at the target, for a model with this validation loss."""
        if self.target.metric == "loss":
            return math.log(max((1 - _ABOVE) * self.target.value, 1e-6))
        return self._loss_part(loss) + (1 - _LOSS_PART) * math.log(max(1 - self.target.value, 1e-6))

    def needs(self, share: float) -> bool:
        """Whether a model that knows nothing of such a share of the data cannot be at the target."""
        if self.target.metric == "loss":
            return share * self.blank > self.target.value
        return share * (1 - math.exp(-self.blank)) > 1 - self.target.value


class MinibatchLosses:
    """The training losses of the branch, as windows tell them. `workers`: the names of all nodes, where each worker's losses
    are to be told apart; else ()."""

    def __init__(self, workers: Sequence[str] = ()) -> None:
        self._workers = workers
        self.mean = math.inf  # of the last window
        # Of every worker, since loads were changed: its losses over the mean of their window.
        self.relative = defaultdict[str, list[float]](list)

    def see(self, pushes: Pushes) -> None:
        """Take in a window that has losses."""
        self.mean = float(np.mean(pushes.loss))
        if self._workers and self.mean > 0:
            for worker, loss in zip(pushes.worker, pushes.loss, strict=False):
                self.relative[self._workers[int(worker)]].append(float(loss) / self.mean)


def over_fitted(losses: Sequence[float], levels: Sequence[float], training_loss: float) -> bool:
    """Whether more training will not make the model better.

    Then the losses on validation data are far above the training loss, and the newest levels, as means of three, are all
    above an earlier one; or they are so far above it that there is nothing left to learn, and the levels stand still. The
    newest ones are a third of them all: to learn as much again takes as long as it did. Above an earlier one means by more
    than noise, because the least of many noisy levels is below the least of a few.
    """
    recent = max(8, len(levels) // 3)
    gap = min(losses[-recent:]) / max(training_loss, 1e-9)
    if len(levels) < recent + 6 or gap < _GAP:
        return False
    smooth = [sum(levels[i : i + 3]) / 3 for i in range(len(levels) - 2)]
    noise = spread(levels) / math.sqrt(3)  # of a mean of three
    return min(smooth[-recent + 2 :]) > min(smooth[: -recent + 2]) + noise + (0.05 if gap < _WIDE_GAP else -0.05)


def is_lost(levels: Sequence[float], blank: float, goal: float) -> bool:
    """Whether a model is hardly better than `blank` in the mean of the newest of many `levels`, and has no drift that could
    make it so.

    A dead model that gives every class its frequency is a little better than one that gives all of them the same, and
    stays so for good.
    """
    newest = levels[-_LOST:]
    if len(newest) < _LOST or not math.isfinite(blank):
        return False
    little = max(HELPED_NATS, _LITTLE * (blank - goal))
    return sum(newest) / _LOST > blank - little and not (falls(levels) or falls(newest))


def is_unlearned(level: float, before: float, blank: float) -> bool:
    """Whether a model that had learned something `before` is no better than `blank`: its units may be dead for good."""
    return before < blank - HELPED_NATS < level


def has_lost_half(levels: Sequence[float], before: float, blank: float, deviation: float) -> bool:
    """Whether half of what the model had learned `before` is gone in the last two levels, which vary by `deviation`.

    A young model cannot become much worse than that, so a fixed rise of the level does not tell.
    """
    if len(levels) < 2 or not math.isfinite(before):
        return False
    lost = min(levels[-2:]) - before
    return lost > max(0.5 * (blank - before), HELPED_NATS, 2 * deviation)


def stopped(
    times: Sequence[float],
    levels: Sequence[float],
    goal: float,
    budget_seconds: float,
    share: float = 0.25,
) -> bool:
    """Whether the newest levels show no drift: those of the last `share` of the job's time, a dozen at least.

    Their second half is then not lower than the first by `_DRIFT_NATS`, and a drift that is smaller but no noise would not
    reach `goal` within the budget.
    """
    first = next(i for i, t in enumerate(times) if t > (1 - share) * times[-1])
    newest = levels[first:]
    if len(newest) < 12 or not first:
        return False  # too few, or the heat was changed less than that time ago
    half = len(newest) // 2
    if sum(newest[half:]) / (len(newest) - half) <= sum(newest[:half]) / half - _DRIFT_NATS:
        return False
    left = seconds_left(times[first:], newest, goal, budget_seconds)
    return not falls(newest) or times[-1] + left.mean >= budget_seconds


def slope(times: Sequence[float], levels: Sequence[float]) -> float:
    """The drift of `levels`, in nats per second, by least squares."""
    mean_time, mean_level = sum(times) / len(times), sum(levels) / len(levels)
    over = sum((t - mean_time) * (level - mean_level) for t, level in zip(times, levels, strict=True))
    under = sum((t - mean_time) ** 2 for t in times)
    return over / under if under > 0 else 0.0


class SecondsLeft(NamedTuple):
    """Seconds until a level is reached: mean and deviation."""

    mean: float
    deviation: float

    def __str__(self) -> str:
        return f"{self.mean:.0f} +- {self.deviation:.0f} s"


def seconds_left(times: Sequence[float], levels: Sequence[float], goal: float, budget_seconds: float) -> SecondsLeft:
    """When `levels` reach `goal` if they go on as they drift now, by least squares; at most the end of the budget.

    Of many levels, only the newest half counts: the first ones after a change fall faster.
    """
    newest = len(levels) // 2 if len(levels) >= _MANY else 0
    times, levels = times[newest:], levels[newest:]
    whole, drift = budget_seconds - times[-1], -slope(times, levels)
    distance = sum(levels[-3:]) / len(levels[-3:]) - goal
    if not (drift > 0 and math.isfinite(distance)):
        return SecondsLeft(whole, whole)
    left = max(distance, 0.0) / drift
    mean = sum(times) / len(times)
    error = spread(levels) / math.sqrt(sum((t - mean) ** 2 for t in times))
    return SecondsLeft(min(left, whole), min(left * error / drift, whole))


def likely_seconds(left: SecondsLeft, elapsed: float, budget_seconds: float) -> float:
    """How long a job that has lasted `elapsed` seconds is likely to last still: about as long, whatever its drift says.

    In 136 trials, the logarithm of what was left in fact had a deviation of 1.65 from that by the drift, of 1.04 from that
    of the time so far, and of 0.93 from their best combination.
    """
    likely = math.pow(max(left.mean, 1.0), _DRIFT_WEIGHT) * math.pow(elapsed, 1 - _DRIFT_WEIGHT)
    return min(likely, budget_seconds - elapsed)


def falls(levels: Sequence[float]) -> bool:
    """Whether the second half of `levels` is lower than the first by more than two standard errors."""
    half = len(levels) // 2
    if not half or not all(map(math.isfinite, levels)):
        return False
    fallen = sum(levels[:half]) / half - sum(levels[half:]) / (len(levels) - half)
    return fallen > max(2 * spread(levels) * math.sqrt(1 / half + 1 / (len(levels) - half)), 1e-4)


def spread(levels: Sequence[float]) -> float:
    """The deviation of `levels` about their drift, in nats, from the median of their newest differences; 0 for too few."""
    steps = [abs(b - a) for a, b in pairwise(levels[-9:]) if math.isfinite(a) and math.isfinite(b)]
    # Of two independent normal values, half of the differences are below 0.954 deviations.
    return median(steps) / 0.954 if len(steps) >= 3 else 0.0
