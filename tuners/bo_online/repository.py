"""The memory of `tuners.bo_online`: stretches of the job under one setting each, and the triples that the model learns from.

A triple <X, l, Y> says: at loss l, the job would end after Y more seconds under setting X (III-B, Fig. 4). Triples are made
from all stretches each time, because epsilon may be known better by then.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Evaluation, Target
from tuners.bo_online.convergence import Estimator, Remaining, Segment

__all__ = ["Repeats", "Stretch", "Triple", "contiguous", "threshold", "triples"]

_Floats = NDArray[np.float64]

Repeats = Literal["latest", "all", "contiguous"]

_EVALUATIONS = 10
_SHARE = 0.1
_MOST_TRIPLES = 100  # the latest; the time of a Gaussian process grows with their cube


class Stretch(NamedTuple):
    """Consecutive clocks of the job under one setting."""

    row: _Floats  # the setting, encoded
    segment: Segment
    seconds: float  # of all its clocks together
    loss_after: float  # level of the loss at its end


class Triple(NamedTuple):
    """One observation of the remaining seconds."""

    row: _Floats  # X, encoded
    state: float  # l: the loss just before X was used; for a job that counts clocks, the remaining clocks
    seconds: float  # Y, from then on
    progress: bool = True  # False: Y is not an estimate but that of the worst stretch
    remaining: Remaining | None = None  # the estimate behind Y; None for a job that counts clocks


def triples(
    stretches: Sequence[Stretch],
    target: Target,
    budget_seconds: float,
    epsilon: float,
    estimator: Estimator,
    repeats: Repeats = "latest",
    state: Literal["before", "last"] = "before",
) -> list[Triple]:
    """Every stretch as a triple, the latest last; the options are those of `bo_online`.

    Of several stretches of one setting the latest counts, or, with "contiguous", the latest ones without another setting
    between them; with "all", each. No triples where epsilon is not known.
    """
    counts = target.metric == "clocks"
    if not counts and not 0 < epsilon < np.inf:
        return []
    used = contiguous(stretches) if repeats == "contiguous" else list(stretches)
    if repeats != "all":
        latest = {s.row.tobytes(): i for i, s in enumerate(used)}
        used = [used[i] for i in sorted(latest.values())]
    used = used[-_MOST_TRIPLES:]
    if counts:
        made = [_counted(s, target, state) for s in used]
    else:
        estimates = estimator.together([s.segment for s in used], epsilon)
        made = [_estimated(s, r, state) for s, r in zip(used, estimates, strict=True)]
    known = [t.seconds for t in made if t.progress]
    worst = max(known, default=budget_seconds)
    return [t if t.progress else t._replace(seconds=worst) for t in made if np.isfinite(t.state)]


def _counted(stretch: Stretch, target: Target, state: Literal["before", "last"]) -> Triple:
    left = target.value - stretch.segment.clocks_before
    done = len(stretch.segment.losses)
    return Triple(stretch.row, left if state == "before" else left - done, stretch.seconds / done * left)


def _estimated(stretch: Stretch, remaining: Remaining, state: Literal["before", "last"]) -> Triple:
    per_clock = stretch.seconds / len(stretch.segment.losses)
    loss = stretch.segment.loss_before if state == "before" else stretch.loss_after
    return Triple(stretch.row, loss, per_clock * remaining.iterations, remaining.progress, remaining)


def contiguous(stretches: Sequence[Stretch]) -> list[Stretch]:
    """The stretches, where those that follow each other under one setting without a gap are joined."""
    joined: list[Stretch] = []
    for s in stretches:
        last = joined[-1] if joined else None
        if (
            last is not None
            and np.array_equal(last.row, s.row)
            and last.segment.clocks_before + len(last.segment.losses) == s.segment.clocks_before
        ):
            losses = np.concatenate([last.segment.losses, s.segment.losses])
            joined[-1] = Stretch(s.row, last.segment._replace(losses=losses), last.seconds + s.seconds, s.loss_after)
        else:
            joined.append(s)
    return joined


def threshold(target: Target, evaluations: Sequence[Evaluation], first_loss: float, epsilon: float | None = None) -> float:
    """epsilon, the loss at which the job is done: `epsilon` if given, else the target if it is a loss; nan for clocks.

    For a target on accuracy: the loss at that accuracy on a least-squares line through the latest evaluations, but at most
    the lowest of these losses and at least half of it. Without two evaluations: a tenth of the first loss.
    """
    if epsilon is not None:
        return epsilon
    if target.metric == "clocks":
        return np.nan
    if target.metric == "loss" and target.value > 0:
        return target.value
    seen = [(e.accuracy, e.loss) for e in evaluations if np.isfinite(e.accuracy) and np.isfinite(e.loss)]
    accuracy, loss = np.array(seen[-_EVALUATIONS:], float).reshape(-1, 2).T
    spread = accuracy - accuracy.mean() if len(accuracy) else accuracy
    if not spread.any():
        return _SHARE * first_loss
    line = loss.mean() + (spread @ loss) / (spread @ spread) * (target.value - accuracy.mean())
    return float(np.clip(line, loss.min() / 2, loss.min()))
