"""The progress that a setting makes per second, or per USD, by what the system model predicts."""

from __future__ import annotations

import math

from tuners.actions import Job, Setting
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import BATCH_GAIN, Heat, RateHeat
from tuners.joint.models.link_network import PushFlow
from tuners.joint.models.shares import Shares
from tuners.joint.models.system_model import SystemModel, round_gradients, waits

__all__ = ["PredictedProgress"]

_MANY_STEPS = 8  # local steps of a push whose copies are so far apart that it brings half of what as many pushes would


class PredictedProgress:
    """Progress of one job under any setting, up to a factor. `heat` is the axis of learning, None where it has none."""

    def __init__(self, job: Job, training: Training, system: SystemModel, shares: Shares, heat: Heat | None) -> None:
        self._job, self._training, self._system, self._shares, self._heat = job, training, system, shares, heat

    def per_second(self, setting: Setting) -> float:
        """Progress per second, up to a factor; for a job that counts, of what it counts."""
        if self._job.target.metric == "samples" and not self._shares.counts_by_share:
            return self._system.samples_per_second(setting)
        if self._shares.counts_by_share:
            return 1 / self._shares.push_seconds(setting)
        gain, flow = 1.0, self._system.flow(setting)
        if not self._job.target.counts and self._job.space.whole_batch and waits(setting):
            # A round has the same samples, whoever computes them.
            return self._counting(setting) / len(setting.workers) * flow.pushes_per_second
        if not self._job.target.counts:
            gain = float(setting.batch_size**BATCH_GAIN) * setting.local_steps / (1 + setting.local_steps / _MANY_STEPS)
            gain *= self._counting(setting)
            gain *= self._of_data(setting, flow)
        if (self._heat is None or self.is_frugal) and not self._job.target.counts:
            # Nothing makes up for staleness, or only a lower rate, while every machine has its price: the gradients of all
            # workers, or of a quorum, are at one model, as those of a larger mini-batch.
            gain *= round_gradients(setting) ** (BATCH_GAIN - 1)
        return gain * flow.pushes_per_second * self._training.machine_losses.productive(setting.servers)

    @property
    def is_frugal(self) -> bool:
        """Whether the cheapest run is wanted, of a job whose rate is free: few workers bear a higher one."""
        return self._training.saves_usd and isinstance(self._heat, RateHeat)

    def _of_data(self, setting: Setting, flow: PushFlow) -> float:
        """What is left of the progress of a push, as the model learns mostly from the data of workers that push more often,
        and gradients of the others are older.

        Gradients that come after their round has ended bring nothing. Without its slow workers, a quorum would be as fast,
        but the data of these workers would not count.
        """
        if setting.policy != "quorum":
            return flow.evenness
        return flow.applied * min(len(setting.workers) * flow.evenness / len(self._job.start.workers), 1.0)

    def _counting(self, setting: Setting) -> float:
        """What uneven loads leave of the progress of a round; a rate that is free makes up for a part of the noise."""
        return math.pow(self._shares.coverage(setting), 1.0 if self._heat is None else BATCH_GAIN)

    def worth(self, setting: Setting) -> float:
        """Progress per second, or per USD where the cheapest run is wanted, up to a factor."""
        return self.per_second(setting) / self.price(setting)

    def price(self, setting: Setting) -> float:
        """USD per hour where the cheapest run is wanted and they are known; else 1."""
        usd = self._job.prices.setting_rate(setting).usd_per_hour if self._job.target.minimise == "usd" else 1.0
        return usd if usd > 0 else 1.0
