"""Rounds that end before all workers have pushed: how often workers push, and what is dropped, by a sample of rounds.

A mini-batch of worker w takes m_w exp(s z - s^2 / 2) + t_w seconds: its mean compute seconds m_w, which vary by the relative
deviation s, and its transfers t_w. The same normal numbers z serve for every setting, so that luck does not choose.

A round ends with the k-th gradient that was begun in it, or some grace later. Who has not pushed by then is late: that
mini-batch is finished and dropped, and another one is begun in the round that is under way. So the k-th order statistic of
the seconds of one mini-batch is not enough: who was late is behind in the next round, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["JITTER", "Pace", "pace_of_rounds"]

JITTER = 0.1
"""Relative deviation of the compute seconds of one worker: a guess. To measure it predicts no better."""

_PATHS = 16  # that the mini-batches of a job may take
_ROUNDS = 20  # of each path
_FIRST = 4  # rounds that do not count: nobody is late at their start


class Pace(NamedTuple):
    """How often workers push in rounds."""

    pushes_per_second: float  # with those that are dropped
    applied: float  # share of the pushes that the servers apply
    evenness: float  # of workers' shares of these: 1 where they are equal, 1 / workers where one makes nearly all


def pace_of_rounds(
    compute_seconds: Sequence[float], transfer_seconds: Sequence[float], quorum: int, grace_seconds: float
) -> Pace:
    """The pace of rounds that end so long after the first `quorum` gradients, or when all workers have pushed.

    Args:
        compute_seconds: mean of each worker.
        transfer_seconds: the same, of a pull and a push together.
        quorum: gradients; not more than workers.
        grace_seconds: that are waited after these.
    """
    workers = len(compute_seconds)
    late = np.zeros((_PATHS, workers))  # seconds left of the mini-batch of before; 0: none
    lasted, pushes, applied = 0.0, 0, np.zeros(workers)
    for number, drawn in enumerate(_normal(workers)):
        varied = np.asarray(compute_seconds) * np.exp(JITTER * drawn - JITTER**2 / 2)
        ends = late + varied + np.asarray(transfer_seconds)  # of the first gradient that was begun in this round
        of_quorum = np.partition(ends, quorum - 1, axis=1)[:, quorum - 1, None]
        over = np.minimum(of_quorum + grace_seconds, ends.max(axis=1, keepdims=True))
        counts, dropped = ends <= over, (late > 0) & (late <= over)
        if number >= _FIRST:
            lasted += float(over.sum())
            pushes += int(counts.sum() + dropped.sum())
            applied += counts.sum(axis=0)
        late = np.where(counts, 0.0, np.where(late > over, late, ends) - over)
    counted = float(applied.sum())
    return Pace(pushes / lasted, counted / pushes, counted**2 / (workers * float((applied**2).sum())))


@cache
def _normal(workers: int) -> NDArray[np.float64]:
    """Normal numbers, [round, path, worker]."""
    return np.random.default_rng(0).standard_normal((_ROUNDS, _PATHS, workers))
