"""A branch since the job's snapshot: its training losses, and what is known of its model. Ours."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np

from tuners.actions import Window
from tuners.search.branches import TrainedBranch

__all__ = ["BranchRecord"]


class _Level(NamedTuple):
    """The training loss in one run of a branch."""

    seconds: float  # the middle of the run, since the snapshot
    mean: float
    error: float  # standard error of the mean
    median: float


class BranchRecord:
    """What is known of a branch that is trained from the snapshot on."""

    def __init__(self, trained: TrainedBranch) -> None:
        self.trained = trained
        self.seconds = 0.0
        self.levels: list[_Level] = []
        self.loss = math.nan  # on the validation set, or of the last mini-batches if the system cannot tell
        self.accuracy = math.nan
        self.exact = False  # these are of the model as it is; else of the last validation that the system has made
        self.waiting = 0.0  # share of the workers' time in which the policy made them wait
        self.computing = 0.0  # share of the workers' time that passed in forward and backward passes
        self.lost = False  # it has diverged, or the system refuses to run it

    def add(self, seen: Window) -> None:
        """Count one run of the branch."""
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
