"""Training of branches by the epoch, as MLtuner and its rivals need it.

An epoch is one pass over the training data: as many pushes as that takes with the mini-batches of the setting. After each
epoch the branch is evaluated on the validation data. Training has converged when that has not improved for some epochs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

from tuners.actions import Action, Evaluate, Evaluation, Job, Rejected, Run, Setting
from tuners.search.branches import TrainedBranch, drop, train

__all__ = [
    "Course",
    "Epoch",
    "check_plateau",
    "epoch_clocks",
    "keep_better",
    "plateaued",
    "quality",
    "score",
    "train_epoch",
    "train_on",
    "validate",
]


class Epoch(NamedTuple):
    """A branch after an epoch."""

    trained: TrainedBranch  # at its end
    quality: float  # minus infinity where the branch is lost: it diverged, or the system refuses to run it
    lost: bool = False


class Course(NamedTuple):
    """A branch and its quality after each epoch."""

    trained: TrainedBranch
    qualities: tuple[float, ...] = ()
    lost: bool = False

    @property
    def peak(self) -> float:
        return max(self.qualities, default=-math.inf)


def epoch_clocks(job: Job, setting: Setting) -> int:
    """Pushes in one pass over the training data; a push has the samples of all its local steps."""
    rows = setting.loads
    samples = sum(map(sum, rows)) / len(rows) if rows else setting.batch_size
    steps = sum(map(setting.steps_of, setting.workers)) / len(setting.workers)
    return max(1, math.ceil(job.epoch_samples / (samples * steps)))


def quality(job: Job, seen: Evaluation) -> float:
    """The quality of a model, larger is better: its accuracy, or minus its loss where the target is no accuracy."""
    value = seen.accuracy if job.target.metric == "accuracy" else -seen.loss
    return value if math.isfinite(value) else -math.inf


def score(job: Job, peak: float) -> float:
    """A quality as a score for searchers: larger is better, zero is worthless."""
    return peak if job.target.metric == "accuracy" and math.isfinite(peak) else math.exp(peak)


def plateaued(qualities: Sequence[float], epochs: int) -> bool:
    """Whether none of the last `epochs` entries is greater than all entries before them."""
    return len(qualities) > epochs and max(qualities[:-epochs]) >= max(qualities[-epochs:])


def check_plateau(epochs: int) -> None:
    """Raise ValueError unless `plateaued` can be asked about that number of epochs."""
    if epochs < 1:
        raise ValueError(f"Cannot train to a plateau of {epochs} epochs: give at least 1.")


def train_epoch(job: Job, trained: TrainedBranch, why: str = "") -> Generator[Action[Any], Any, Epoch]:
    """Train to the end of the current epoch, for the reason `why`, and evaluate."""
    whole = epoch_clocks(job, trained.setting)
    try:
        trained, _, seen = yield from train(trained, Run(clocks=whole - trained.clocks % whole, reason=why))
    except Rejected:
        return Epoch(trained, -math.inf, lost=True)
    if seen.status in ("diverged", "deadlock"):
        return Epoch(trained, -math.inf, lost=True)
    return Epoch(trained, (yield from validate(job, trained.branch)))


def train_on(
    job: Job,
    course: Course,
    *,
    plateau_epochs: int,
    epochs: float = math.inf,
    enough: Callable[[Course], bool] = lambda _: False,
) -> Generator[Action[Any], Any, Course]:
    """Train until the plateau, until `epochs` epochs have been trained in all, or until `enough`."""
    while not (course.lost or len(course.qualities) >= epochs or plateaued(course.qualities, plateau_epochs)):
        done = yield from train_epoch(job, course.trained)
        course = Course(done.trained, (*course.qualities, done.quality), done.lost)
        if enough(course):
            break
    return course


def keep_better(best: Course | None, course: Course) -> Generator[Action[Any], Any, Course | None]:
    """The one of the two with the higher peak, the earlier of equals; the other is freed. A lost `course` is never kept."""
    if not course.lost and (best is None or course.peak > best.peak):
        best, course = course, best or course
    if course is not best:
        yield from drop(course.trained.branch)
    return best


def validate(job: Job, branch: int) -> Generator[Action[Any], Any, float]:
    """The quality of a branch now; minus infinity where the system refuses to evaluate it."""
    try:
        return quality(job, (yield from Evaluate(branch)))
    except Rejected:
        return -math.inf
