"""The model that trains: its level, as validations and mini-batches tell it."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Evaluation, Job, Window
from tuners.joint.models.learning_model import Gauge, MinibatchLosses

__all__ = ["Glance", "RunningModel"]


class Glance(NamedTuple):
    """What the newest mini-batches tell of the model, in nats above the untrained one."""

    level: float  # logarithm of their loss
    noise: float  # its standard error
    doubt: float = 0.0  # its standard error together with that of the untrained model's loss
    validated: float = math.inf  # mean level of the job's own validations; infinite if there was none
    helps: bool = False  # whether the model has clearly learned something


class RunningModel:
    """The model of the branch that trains. `level` and `loss` are as of the last measurement; a level that is not known is
    nan."""

    def __init__(self, job: Job) -> None:
        self.gauge = Gauge(job.target)
        self.level = self.loss = math.inf
        self.diverged = False
        self.pushes = 0  # of the branch, since the job began
        self.newest: Window | None = None
        self.minibatches = MinibatchLosses([n.name for n in job.nodes] if job.space.frees("load") else ())
        self.validated = list[float]()  # levels by the job's own validations in the last window
        self.lowest_level = math.inf  # of all validations, since the last return to a snapshot
        self.check_clocks = 0  # the job validates by itself after every so many pushes; 0: not known

    def see(self, window: Window) -> None:
        """Take in what a window tells of the model."""
        self.pushes += window.clocks
        self.diverged = window.status != "running"
        if math.isinf(self.gauge.untrained) and len(window.pushes.loss):
            # Not those of clock 0: where a machine is lost before the first push, all workers begin their second mini-batch.
            first = window.pushes.clock == window.pushes.clock.min()
            self.gauge.begin(float(np.mean(window.pushes.loss[first])), batches=int(np.sum(first)))
        if len(window.pushes.loss):
            self.minibatches.see(window.pushes)
        self.newest = window
        self._see_validations(window.evaluations)

    def _see_validations(self, evaluations: Sequence[Evaluation]) -> None:
        """Take in the job's own validations in a window. The level is that of the newest half, where the last one is of the
        model as it is now; else it is not known."""
        for found in evaluations:
            self.gauge.see(found.loss, found.accuracy)
            self.check_clocks = math.gcd(self.check_clocks, found.clocks)
        self.validated = [self.gauge.level(found.loss, found.accuracy) for found in evaluations]
        self.lowest_level = min([self.lowest_level, *self.validated])
        self.level = math.inf if self.diverged else math.nan
        if evaluations and evaluations[-1].clocks == self.pushes:
            self.take_validated(evaluations)

    def take_validated(self, evaluations: Sequence[Evaluation]) -> None:
        """Take the newest half of the window's validations for the level of the present model."""
        newest = self.validated[len(evaluations) // 2 :]
        self.loss, self.level = evaluations[-1].loss, sum(newest) / len(newest)

    def take_evaluated(self, found: Evaluation) -> None:
        """Take in an evaluation of the present model."""
        self.loss = found.loss
        self.gauge.see(found.loss, found.accuracy)
        self.level = self.gauge.level(found.loss, found.accuracy)

    @property
    def newest_losses(self) -> NDArray[np.float64]:
        """Those of the newest half of the last window's mini-batches."""
        return self.newest.pushes.loss[len(self.newest.pushes.loss) // 2 :] if self.newest is not None else np.zeros(0)

    @property
    def told_level(self) -> float:
        """The level by the newest validation of the last window, else by the newest half of its mini-batches."""
        if self.validated:
            return self.validated[-1]
        losses = self.newest_losses
        return self.gauge.told_level(float(np.mean(losses))) if len(losses) else math.inf

    def glance(self) -> Glance:
        """The loss of the newest half of the last window's mini-batches, and what validation told in it."""
        window, losses, gauge = self.newest, self.newest_losses, self.gauge
        mean = float(np.mean(losses)) if len(losses) else math.inf
        if window is None or self.diverged or not 0 < mean < math.inf:
            return Glance(math.inf, 0.0)
        validated = sum(self.validated) / len(self.validated) - gauge.untrained_level if self.validated else math.inf
        noise = float(np.std(losses)) / mean / math.sqrt(len(losses))
        # A single mini-batch of a few samples may have a third of the others' loss: logarithms tell how far such lows reach.
        single = float(np.std(np.log(np.maximum(window.pushes.loss, 1e-9))))
        doubt = math.hypot(noise, single / math.sqrt(gauge.untrained_batches))
        level = math.log(mean / gauge.untrained)
        return Glance(level, noise, doubt, validated, gauge.has_learned(level + 2 * noise, validated))

    @property
    def has_learned(self) -> bool:
        """Whether the newest mini-batches, or a validation, were clearly better than those of a model that knows nothing."""
        loss = self.minibatches.mean
        validated = self.level - self.gauge.untrained_level if math.isfinite(self.level) else math.inf
        return not 0 < loss < math.inf or self.gauge.has_learned(math.log(loss / self.gauge.untrained), validated)
