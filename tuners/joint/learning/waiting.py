"""Who waits for whom, under `tuners.joint`, where the rate is held and policies may be installed.

Nobody waits, as long as that learns well: it has the most pushes per second, and at a low rate an old gradient is as good
as a new one. Near the edge of stability it is not: of k workers that do not wait, a gradient is k - 1 updates old, and
makes the model swing, so that a job may need several times as many pushes. A model swings if its validated losses do not
clearly fall. Then half as many gradients count at once, from the best model; and half of these again where the level stands
still, that is, where none of the newest half of its windows is as low as one before, and the loss does not clearly fall
either. Where nothing is learned, the job begins again: as it began, once, if its workers waited for each other there or its
machines were others; then with an eighth of the gradients.

A gradient that is older than that is dropped (`discard`), and nobody waits for anybody: validations stay as frequent as they
were, and workers do not pull at one time. But slow workers' gradients are dropped more often. Where workers' data differ, so
few gradients are in progress instead (`admit`).

Where nobody waits, a slow worker's data count less, too. If these differ from the others', the model may learn nothing of
them. Where that is seen, and the target is out of reach without them, all workers push equally often from then on.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from tuners.actions import Job, Setting
from tuners.joint.job.snapshots import Snapshot
from tuners.joint.job.steps import JobOver, Steps
from tuners.joint.job.training import Training
from tuners.joint.models.learning_model import HELPED_NATS, is_unlearned, slope
from tuners.joint.models.system_model import round_gradients
from tuners.reasons import counted
from tuners.settings import BOUNDED

__all__ = ["Waiting", "clearly_falls", "data_differ", "left_out", "stands_still"]

_DROPPING = ("discard", "quorum")  # policies that drop late gradients
_LINE = 3  # values through which a line with an error can be drawn
_LINE_ERRORS = 4.0  # standard errors by which it then falls; by two, the end of a first swing does
_LEAST = 4  # windows, of as many gradients that count as two for every worker, that tell whether a model learns
_SWINGING = 6  # validations, at least, by which a model swings whose losses do not clearly fall
_FEWER = 2  # times fewer gradients at once where a model has learned something
_FAR_FEWER = 8  # the same where nothing is learned
_SNAPSHOT_NATS = 0.03  # a level so much lower is worth another snapshot
_LITTLE, _HALF = 0.1, 0.5  # of the way from the blank model to the goal: less is no progress; more is worth keeping
_SELDOM = 0.6  # times as many pushes as the median worker: fewer are seldom
_UNLEARNED = 0.25  # times the fall of the others' losses: a fall that is less is none
_FEWEST = 6  # losses of a worker that tell whether they fall
_AHEAD = 2  # pushes that a worker may be ahead of the slowest one, where all push equally often
# Share of the variance of losses that is between workers: more tells that their data differ. Where gradients are dropped,
# the model learns more of some workers' data, and their losses differ by that alone.
_DIFFER, _DIFFER_IF_DROPPED = 0.2, 0.5


def clearly_falls(values: Sequence[float], errors: float = 2.0) -> bool:
    """Whether the line through three `values` or more falls by more than so many standard errors."""
    times, y = range(len(values)), np.array(values)
    drift, since = slope(times, values), np.array(times) - (len(y) - 1) / 2
    noise = math.sqrt(float(np.sum((y - y.mean() - drift * since) ** 2)) / (len(y) - 2))
    return -drift > errors * noise / math.sqrt(float(np.sum(since**2)))


def stands_still(levels: Sequence[float], patience: int) -> bool:
    """Whether none of the newest half of `levels`, and of the newest `patience`, is as low as one before."""
    newest = max(patience, len(levels) // 2)
    return len(levels) > newest and min(levels[-newest:]) >= min(levels[:-newest])


class Waiting:
    """The job from its first windows to the target: nobody waits, or fewer gradients at once."""

    def __init__(
        self, job: Job, training: Training, place: Callable[[], Steps[None]], as_begun: Callable[[], Steps[bool]]
    ) -> None:
        self._job, self._training, self._place, self._as_begun = job, training, place, as_begun
        # Since the policy was changed: levels by window, logarithms of validated losses, shares of samples that are right.
        self.levels, self._validated, self._right = list[float](), list[float](), list[float]()
        self._kept: Snapshot | None = None  # of about the best model
        self._equal = False  # whether all workers push equally often
        # Of every worker, since the policy was changed: logarithms of its losses; its losses over their window's mean.
        self._own, self._losses = defaultdict[str, list[float]](list), defaultdict[str, list[float]](list)

    def run(self) -> Steps[None]:
        """Train until the job ends."""
        training = self._training
        branch = training.branch
        while True:
            yield from self._window()
            if training.model.diverged:
                yield from self._leave("it has diverged", learned=True)
            elif branch.cluster_changed:
                yield from self._place()
                self._begin_anew()
            elif not (yield from self._include()):
                yield from self._keep()
                why, learned = self._stand()
                if why:
                    yield from self._leave(why, learned=learned)
                elif branch.setting.policy == "discard" and data_differ(self._losses, _DIFFER_IF_DROPPED):
                    why = "workers' data differ: no gradient is dropped, and as few are in progress"
                    yield from branch.change(replace(branch.setting, policy="admit"), why)
                    self._begin_anew()

    # ----------------------------------------------------------------------------------------------------- what is seen

    def _window(self) -> Steps[None]:
        training = self._training
        model = training.model
        yield from training.window()
        self.levels.append(model.level)
        window = model.newest
        if window is not None and window.evaluations:
            self._right.append(window.evaluations[-1].accuracy)
            self._validated += [math.log(max(found.loss, 1e-9)) for found in window.evaluations]
        else:
            self._validated.append(math.log(max(model.loss, 1e-9)))
        if window is None or not len(window.pushes.loss):
            return
        mean = float(np.mean(window.pushes.loss))
        for worker, loss in zip(window.pushes.worker, window.pushes.loss, strict=True):
            name = self._job.nodes[int(worker)].name
            self._losses[name].append(float(loss) / mean if mean > 0 else 1.0)
            self._own[name].append(math.log(max(float(loss), 1e-9)))

    def _begin_anew(self) -> None:
        self.levels, self._validated, self._right = [], [], []
        self._own.clear()
        self._losses.clear()

    def _keep(self) -> Steps[None]:
        """Renew the snapshot where the model is clearly better."""
        if self._kept is None or self._training.model.level < self._kept.level - _SNAPSHOT_NATS:
            yield from self._training.snapshots.drop(self._kept)
            self._kept = yield from self._training.snapshots.take()

    def _stand(self) -> tuple[str, bool]:
        """Why fewer gradients at once are better, or "", and whether the model has learned anything."""
        training, setting, levels = self._training, self._training.branch.setting, self.levels
        nobody_waits, level = _gradients(setting) == len(setting.workers), sum(levels[-2:]) / 2
        before = math.inf if self._kept is None else self._kept.level
        if len(levels) >= 2 and not nobody_waits and is_unlearned(level, before, training.model.gauge.blank_level):
            return f"all that was learned is lost: level {level:.2f} after {before:.2f}", False
        # Of gradients that are dropped nothing is learned, so a window tells less.
        patience = _LEAST * (math.ceil(len(setting.workers) / _gradients(setting)) if setting.policy in _DROPPING else 1)
        if len(levels) < patience or not all(map(math.isfinite, (*levels, *self._validated))):
            return "", True
        # A model that swings may be sure of its wrong answers, so that its loss is high while it learns.
        learns = sum(self._right[-2:]) > sum(self._right[:2])
        # And the share of samples that are right may stand still where the loss falls in a line.
        drifts = clearly_falls(self._validated[-2 * patience :], _LINE_ERRORS)
        if not (self._is_past(level, _LITTLE) or clearly_falls(levels[-2 * patience :]) or learns or drifts):
            return "nothing is learned", False
        if nobody_waits and len(self._validated) >= _SWINGING and not clearly_falls(self._validated):
            return "the model swings", True
        if stands_still(levels, patience) and not drifts:
            return f"level {min(levels):.2f} was not reached again in {max(patience, len(levels) // 2)} windows", True
        return "", True

    # ----------------------------------------------------------------------------------------------------- what is done

    def _include(self) -> Steps[bool]:
        """Let all workers push equally often, if the target needs data that are left out so far; whether this has begun."""
        training, workers = self._training, self._training.branch.setting.workers
        branch = training.branch
        # While the level falls, their data may still be learned: later, as they push seldom.
        if self._equal or len(self.levels) < _LINE or clearly_falls(self.levels[-2 * _LEAST :]):
            return False
        missed = left_out({w: self._own[w] for w in workers})
        # Where a model swings, losses of few mini-batches differ by when they were told.
        if not (missed and data_differ(self._losses) and training.model.gauge.needs(len(missed) / len(workers))):
            return False
        start, self._equal = self._job.start, True
        why = (
            f"all push equally often: losses of {', '.join(missed)}, which push seldom, do not fall as the others' do, and "
            "the target is out of reach without their data"
        )
        if _gradients(branch.setting) < len(workers):
            # As few gradients at once as before: more made the model swing.
            yield from branch.change(replace(branch.setting, policy="admit"), why)
        else:
            ahead = start.staleness if start.policy in BOUNDED else _AHEAD
            equal = replace(branch.setting, policy="ssp", staleness=ahead, quorum=0)
            # What was learned so far is wrong for these data.
            if not (yield from training.snapshots.begin_again(equal, f"{why}; from the untrained model")):
                yield from branch.change(equal, why)
        self._begin_anew()
        return True

    def _leave(self, seen: str, *, learned: bool) -> Steps[None]:
        """Go on from the best model, with fewer gradients at once. Where none is better than the untrained one, go on from
        that: as the job began, if this was not tried yet, else with fewer gradients, too."""
        training, now = self._training, _gradients(self._training.branch.setting)
        # What swings have learned by chance, where nothing else was learned, leads nowhere.
        kept = self._kept if self._kept is not None and self._is_past(self._kept.level, 0.0 if learned else _HALF) else None
        fewer = max(now // (_FEWER if learned and kept is not None else _FAR_FEWER), 1)
        if not training.model.diverged and fewer == now:
            return
        if kept is None and not self._equal and (yield from self._as_begun()):
            self._begin_anew()
            return
        policy = "admit" if self._equal or data_differ(self._losses) else "discard"
        stricter = replace(training.branch.setting, policy=policy, staleness=fewer - 1, quorum=0)
        again = f"from {'the best model' if kept else 'the start'}"
        why = f"{seen}: {counted(fewer, 'gradient')} at once instead of {now}, {again}"
        if kept is not None:
            self._kept = yield from training.snapshots.return_to(kept, stricter, why)
        elif not (yield from training.snapshots.begin_again(stricter, why)):
            if training.model.diverged:
                raise JobOver
            yield from training.branch.insist(stricter, why)
        self._begin_anew()

    def _is_past(self, level: float, share: float) -> bool:
        """Whether a model of this level is past such a share of the way from one that knows nothing to the goal."""
        blank, goal = self._training.model.gauge.blank_level, self._training.model.gauge.goal(self._training.model.loss)
        return level < blank - max(share * (blank - goal), HELPED_NATS)


def _gradients(setting: Setting) -> int:
    """How many gradients of the same age count at once."""
    workers = round_gradients(setting)
    return min(setting.staleness + 1, workers) if setting.policy in ("admit", "discard") else workers


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


def data_differ(losses: Mapping[str, Sequence[float]], least: float = _DIFFER) -> bool:
    """Whether the share of the variance of losses, each over its window's mean, that is between workers is above `least`.

    Not whether they differ at all: a worker's few hundred samples always do, and many losses tell that.
    """
    groups = [np.array(x) for x in losses.values() if len(x) > 1]
    count = sum(map(len, groups))
    if len(groups) < 2 or count < 2 * _LEAST * len(groups):
        return False
    whole = sum(float(x.sum()) for x in groups) / count
    between = sum(len(x) * (float(x.mean()) - whole) ** 2 for x in groups) / (len(groups) - 1)
    within = sum(float(np.sum((x - x.mean()) ** 2)) for x in groups) / (count - len(groups))
    each = count / len(groups)
    return between - within > least * (between + (each - 1) * within)
