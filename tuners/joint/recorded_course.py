"""A job whose every change is a restart, as of recorded runs: whether a change may save anything, and what to do if not."""

from __future__ import annotations

import math
from contextlib import suppress

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Setting
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.models.system_model import SystemModel

__all__ = ["RecordedCourse"]

_ENDING = 8  # a window has so many times fewer pushes than the run so far: one that ends with it is followed by an idle one


class RecordedCourse:
    """The course of one job, if every change is a restart."""

    def __init__(self, job: Job, training: Training, system: SystemModel) -> None:
        self.job, self.training, self.system = job, training, system

    def may_pay(self) -> Steps[bool]:
        """Whether a change may save anything. Where every change is a restart, the first push is looked at before.

        A table of recorded runs tells neither what its pushes take nor what they learn until a run is over. Then nothing
        can be expected of another setting, while the restart and the model that it gives up are certain.
        """
        if self.job.methods != ("checkpoint",):
            return True
        yield from self.training.run(1, "every change is a restart: first, what the job tells of its pushes")
        if not self.system.knows:
            yield from self.training.run(1, "it tells nothing to predict a saving from: no change pays a restart")
        return self.system.knows

    def play(self) -> Steps[None]:
        """Train to the end of the recorded run, then of those under other settings, each once, until one reaches the target.

        Only a run that is over is left: it completes no push any more, so no other one can be worse.
        """
        training, pushes = self.training, self.training.model.pushes
        branch = training.branch
        for setting in self._other_runs():
            done = asked = 0
            while done == asked:
                pushes += done
                asked = max(1, pushes // _ENDING)
                done = (yield from training.run(asked)).clocks
            why = "the run is over, and has not reached the target: another recorded setting"
            with suppress(Rejected):
                branch.seconds += (yield from Reconfigure(setting, branch=branch.number, reason=why)).seconds
                branch.setting, pushes = setting, 0

    def _other_runs(self) -> list[Setting]:
        """The recorded settings beside the start in a drawn order; where the cheapest run is wanted, those of the lowest
        price by the hour first."""
        settings = [s for s in self.job.space.recorded if s != self.job.start]
        drawn = [settings[at] for at in np.random.default_rng(self.job.seed).permutation(len(settings))]
        if self.job.target.minimise == "seconds":
            return drawn
        prices = {s: self.job.prices.setting_rate(s).usd_per_hour for s in drawn}
        return sorted(drawn, key=lambda s: math.inf if math.isnan(prices[s]) else prices[s])
