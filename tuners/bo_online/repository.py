"""The memory of `tuners.bo_online`: stretches of the job under one setting each, and the triples that the model learns from.

A triple <X, l, Y> says: at loss l, the job would end after Y more seconds under setting X (III-B, Fig. 4). Triples are made
from all stretches each time, because epsilon may be known better by then.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Hashable, Iterable, Sequence
from itertools import islice
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Evaluation, Target
from tuners.bo_online.convergence import Estimator, LossCurve, Remaining
from tuners.bo_online.job_fit import LevelRecorder, Levels, fitted_job, likeness, never_rising

__all__ = ["Observations", "Repeats", "Stretch", "StretchMemory", "Triple", "contiguous", "threshold", "triples"]

_Floats = NDArray[np.float64]

Repeats = Literal["latest", "all", "contiguous"]

_EVALUATIONS = 10
_SHARE = 0.1
_RECENT = 4  # stretches
_MOST_TRIPLES = 100  # the latest; the time of a Gaussian process grows with their cube


class Stretch(NamedTuple):
    """Consecutive clocks of the job under one setting."""

    row: _Floats  # the setting, encoded
    curve: LossCurve
    seconds: float  # of all its clocks together
    loss_after: float  # level of the loss at its end
    kind: Hashable = None  # what of the setting, besides the number of workers, may change the progress per clock
    samples: float = 0.0  # of all its clocks together


class StretchMemory:
    """What follows from all stretches of a job, kept while they become more: made anew for every decision, it would take a
    time that grows with the square of their number."""

    def __init__(self, estimator: Estimator) -> None:
        self._count = 0  # stretches that were taken in
        self._latest: dict[bytes, Stretch] = {}  # by setting; the order is that of their being used last
        self._recent: dict[bytes, deque[Stretch]] = {}  # the last few of every setting
        self._numbers: dict[tuple[int, Hashable], int] = {}  # of kinds of settings: workers, and all else that matters
        self._levels = LevelRecorder(estimator.outliers)
        self.fastest = np.inf  # least seconds per clock of a stretch

    def follow(self, stretches: Sequence[Stretch]) -> None:
        """Take in those of `stretches` that are new: all before them must be those of the last time."""
        new = stretches[self._count :]
        _put_last(self._latest, new)
        for s in new:
            self._recent.setdefault(s.row.tobytes(), deque(maxlen=_RECENT)).append(s)
            self._numbers.setdefault((s.curve.workers, s.kind), len(self._numbers))
            self._levels.add(s.curve, self.number(s))
            self.fastest = min(self.fastest, s.seconds / len(s.curve.losses))
        self._count += len(new)

    def latest(self) -> list[Stretch]:
        """The latest stretch of each setting, the last one last, at most as many as there may be triples."""
        return list(self._latest.values())[-_MOST_TRIPLES:]

    def last(self, row: _Floats) -> Stretch | None:
        """The latest stretch of a setting; None where it was not observed."""
        return self._latest.get(row.tobytes())

    def seconds_per_clock(self, row: _Floats) -> float:
        """Seconds per clock in the last few stretches of a setting that was observed: their noise has no use, their drift
        has."""
        recent = self._recent[row.tobytes()]
        return sum(s.seconds for s in recent) / sum(len(s.curve.losses) for s in recent)

    @property
    def scatter(self) -> float:
        """How far the seconds per clock of a stretch scatter about the mean of its setting's last few, as a share of it; 0
        while none was observed twice."""
        squares, freedom = 0.0, 0
        for recent in self._recent.values():
            each = np.array([s.seconds / len(s.curve.losses) for s in recent])
            if len(each) > 1 and each.mean() > 0:
                squares += float(((each / each.mean() - 1) ** 2).sum())
                freedom += len(each) - 1
        return float(np.sqrt(squares / freedom)) if freedom else 0.0

    def observed(self, row: _Floats) -> int:
        """Stretches of a setting that `seconds_per_clock` averages."""
        return len(self._recent.get(row.tobytes(), ()))

    @property
    def kinds(self) -> list[tuple[int, Hashable]]:
        """The kinds of settings, by their number."""
        return list(self._numbers)

    def number(self, stretch: Stretch) -> int:
        """The number of the kind of its setting."""
        return self._numbers[stretch.curve.workers, stretch.kind]

    def levels(self) -> Levels:
        """The levels of the loss over all stretches."""
        return self._levels.levels(len(self._numbers))


def _put_last(latest: dict[bytes, Stretch], stretches: Iterable[Stretch]) -> None:
    """Put the latest stretch of each setting into `latest`, in the order of the latest."""
    for s in stretches:
        latest.pop(s.row.tobytes(), None)
        latest[s.row.tobytes()] = s


class Triple(NamedTuple):
    """One observation of the remaining seconds."""

    row: _Floats  # X, encoded
    state: float  # l: the loss just before X was used; for a job that counts clocks or samples, those that remained
    seconds: float  # Y, from then on
    progress: bool = True  # False: Y is not an estimate but that of the worst stretch
    remaining: Remaining | None = None  # the estimate behind Y, where each stretch is estimated by itself
    clocks: float = 1.0  # that remained at that state by one estimate for the whole job; 1: there is none


class Observations(NamedTuple):
    """What is known of the job: its triples, the latest last, and the clocks that remain now, in the unit of theirs."""

    triples: list[Triple]
    clocks: float = 1.0
    stateless: bool = False  # the seconds per remaining clock do not depend on the state, which only adds its noise


def triples(
    stretches: Sequence[Stretch],
    target: Target,
    budget_seconds: float,
    epsilon: float,
    estimator: Estimator,
    repeats: Repeats = "latest",
    state: Literal["before", "last"] = "before",
    *,
    pooled: bool = False,
    clocks: int = 0,
    done: float = 0.0,
    memory: StretchMemory | None = None,
) -> Observations:
    """Every stretch as a triple; the options are those of `bo_online`. A `memory` of earlier stretches of the same job saves
    the time of going through them again.

    Of several stretches of one setting the latest counts, or, with "contiguous", the latest ones without another setting
    between them; with "all", each. No triples where epsilon is not known. `clocks` and `done` are the clocks of the job by
    now, and the work by now in the unit of a target that counts.
    """
    if not target.counts and not 0 < epsilon < np.inf:
        return Observations([])
    memory = StretchMemory(estimator) if memory is None else memory
    memory.follow(stretches)
    if repeats == "all":
        used = list(stretches[-_MOST_TRIPLES:])
    elif repeats == "contiguous":
        joined = dict[bytes, Stretch]()
        _put_last(joined, contiguous(stretches))
        used = list(joined.values())[-_MOST_TRIPLES:]
    else:
        used = memory.latest()
    if target.counts:
        return _counted(used, target, state, clocks, done)
    if pooled and (seen := _pooled(memory, used, epsilon, state, clocks)) is not None:
        return seen
    made = [_estimated(s, epsilon, estimator, state) for s in used]
    known = [t.seconds for t in made if t.progress]
    worst = max(known, default=budget_seconds)
    return Observations([t if t.progress else t._replace(seconds=worst) for t in made if np.isfinite(t.state)])


def _counted(
    used: Sequence[Stretch], target: Target, state: Literal["before", "last"], clocks: int, done: float
) -> Observations:
    """The observations of a job that counts clocks or samples, whose remaining ones are known."""
    each = done / clocks if target.metric == "samples" and done > 0 else 1.0  # samples of a clock, over the whole job
    made = []
    for s in used:
        count = len(s.curve.losses)
        left = max(target.value - each * s.curve.clocks_before, each)
        mine = s.samples / count if target.metric == "samples" and s.samples > 0 else 1.0
        at = left if state == "before" else left - mine * count
        made.append(Triple(s.row, at, s.seconds / count * left / mine, clocks=left / each))
    return Observations(made, max((target.value - done) / each, 1.0), stateless=True)


def _pooled(
    memory: StretchMemory, used: Sequence[Stretch], epsilon: float, state: Literal["before", "last"], clocks: int
) -> Observations | None:
    """One estimate for the whole job: the clocks to epsilon, divided by the progress per clock under each setting."""
    kinds, levels = memory.kinds, memory.levels()
    fit = fitted_job(levels, likeness(kinds), clocks, epsilon)
    if fit is None:
        return None
    efficiency = never_rising(kinds, fit.efficiency, levels.under[-1])
    made = []
    for s in used:
        left = fit.clocks_left + clocks - s.curve.clocks_before
        per_clock = memory.seconds_per_clock(s.row) / efficiency[memory.number(s)]
        loss = s.curve.loss_before if state == "before" else s.loss_after
        made.append(Triple(s.row, loss, per_clock * left, clocks=left))
    return Observations([t for t in made if np.isfinite(t.state)], fit.clocks_left, stateless=True)


def _estimated(stretch: Stretch, epsilon: float, estimator: Estimator, state: Literal["before", "last"]) -> Triple:
    remaining = estimator.remaining(stretch.curve, epsilon)
    per_clock = stretch.seconds / len(stretch.curve.losses)
    loss = stretch.curve.loss_before if state == "before" else stretch.loss_after
    return Triple(stretch.row, loss, per_clock * remaining.clocks, remaining.progress, remaining)


def contiguous(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches, where those that follow each other under one setting without a gap are joined."""
    joined: list[Stretch] = []
    for s in stretches:
        last = joined[-1] if joined else None
        if (
            last is not None
            and np.array_equal(last.row, s.row)
            and last.curve.clocks_before + len(last.curve.losses) == s.curve.clocks_before
        ):
            losses = np.concatenate([last.curve.losses, s.curve.losses])
            joined[-1] = s._replace(
                curve=last.curve._replace(losses=losses),
                seconds=last.seconds + s.seconds,
                samples=last.samples + s.samples,
            )
        else:
            joined.append(s)
    return joined


def threshold(target: Target, evaluations: Sequence[Evaluation], first_loss: float, epsilon: float | None = None) -> float:
    """epsilon, the loss at which the job is done: `epsilon` if given, else a target that is a loss; nan where work counts.

    For a target on accuracy: the loss at that accuracy on a least-squares line through the latest evaluations, but at most
    the lowest of these losses and at least half of it. Without two evaluations: a tenth of the first loss.
    """
    if epsilon is not None:
        return epsilon
    if target.counts:
        return np.nan
    if target.metric == "loss" and target.value > 0:
        return target.value
    latest = ((e.accuracy, e.loss) for e in reversed(evaluations) if np.isfinite(e.accuracy) and np.isfinite(e.loss))
    accuracy, loss = np.array(list(islice(latest, _EVALUATIONS))[::-1], float).reshape(-1, 2).T
    spread = accuracy - accuracy.mean() if len(accuracy) else accuracy
    if not spread.any():
        return _SHARE * first_loss
    line = loss.mean() + (spread @ loss) / (spread @ spread) * (target.value - accuracy.mean())
    return float(np.clip(line, loss.min() / 2, loss.min()))
