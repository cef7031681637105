"""Whether all workers wait for each other: the last part of the choice of a system in `joint`.

The system model predicts what waiting takes, but not well from workers that do not wait. So it is tried, and taken back.
"""

from __future__ import annotations

import math
from dataclasses import replace

from tuners.actions import Job, Setting
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import MomentumHeat, RateHeat, outer_heat
from tuners.joint.learning.holding import RuleParts
from tuners.joint.machines.candidates import lowest, options
from tuners.joint.machines.placing import Placing
from tuners.joint.models.system_model import SystemModel, waits

__all__ = ["AllWaiting"]

_UNDERESTIMATED = 1.9  # times that pushes of workers that wait were at most faster than predicted
_WORTH_WAITING = 1.2  # times the progress for which all workers wait for each other
_WORTH_NOT_WAITING = 2.0  # predicted times as many pushes for which no worker waits for others' local steps
_SAVES_WAITING = 1.5  # the same, seen


class AllWaiting:
    """Decides whether all workers of one job wait for each other."""

    def __init__(self, job: Job, training: Training, system: SystemModel, placing: Placing, parts: RuleParts) -> None:
        self._job, self._training, self._system, self._placing, self._parts = job, training, system, placing, parts

    def run(self) -> Steps[None]:
        """Try both: that nobody waits for local steps, and that all wait where nobody does."""
        yield from self._stop()
        yield from self._begin()

    def _stop(self) -> Steps[None]:
        """Let no worker wait for others' local steps, where that doubles the pushes and policies may be installed.

        Servers then average half as many pushes as workers (`Training`), of older models. These bear no momentum of the
        servers, so that the usual outer rate is 1, and not that of rounds.
        """
        training, job, heat = self._training, self._job, self._placing.heat
        before = training.branch.setting
        outer = outer_heat(job, prior=self._parts.prior, in_rounds=False)
        in_rounds = waits(before) and job.space.takes_local_steps and job.space.knob("policy") is None
        if not (in_rounds and job.installs_policies) or outer is None:
            return
        if training.model.diverged or not self._system.knows or not self._parts.system_model:
            return
        free = replace(before, policy="asp", staleness=0)
        free = outer.scaled(free, 1 / outer.of(free))
        alone = training.push_seconds
        flow = self._system.flow(free)
        gain = alone * flow.pushes_per_second * flow.evenness  # few workers that push most bring less
        if gain < _WORTH_NOT_WAITING:
            return
        why = f"nobody waits for others' local steps, on trial: {gain:.2f} times as many pushes"
        if not (yield from training.branch.change(free, why)):
            return
        yield from self._placing.measure()
        seen = alone / training.push_seconds if training.push_seconds else math.inf
        if seen < _SAVES_WAITING:
            yield from training.branch.insist(before, f"taken back: {seen:.2f} times as many pushes")
            return
        if isinstance(heat, RateHeat | MomentumHeat) and heat.is_outer:
            self._placing.heat = outer
        yield from self._placing.place()

    def _begin(self) -> Steps[None]:
        """Let all workers wait for each other after all, where that costs less time than staleness does.

        Where none of k workers waits, a gradient is k - 1 updates old, and the highest stable rate per push is pi / (2k - 1)
        of the inverse curvature; where all wait, and one update is made of k pushes, it is 2 / k. Where servers are the
        bottleneck, waiting may take no time at all. Workers that do not wait do not tell that well, so it is tried.
        """
        training, heat = self._training, self._placing.heat
        branch, model = training.branch, training.model
        waiting, workers = self._waiting(branch.setting), len(branch.setting.workers)
        if not isinstance(heat, RateHeat) or waiting is None or workers < 2 or not self._parts.system_model:
            return
        if model.diverged or not self._system.knows:
            return
        stable = 4 / math.pi * (workers - 0.5) / workers  # the highest rate per push, over that of workers that do not wait
        gain = stable * self._system.push_seconds(branch.setting) / self._system.push_seconds(waiting)
        if _UNDERESTIMATED * gain < _WORTH_WAITING:
            return
        yield from training.run(2 * workers, "may all workers wait for each other? First, how often they push as they are")
        before, alone, waiting = branch.setting, training.push_seconds, self._waiting(branch.setting)
        why = f"on trial: progress may be {gain:.2f} to {_UNDERESTIMATED * gain:.2f} times as fast if workers wait"
        if model.diverged or waiting is None or not (yield from branch.change(waiting, why)):
            return
        yield from training.run(workers)  # these were begun before
        yield from training.run(2 * workers)
        gain = stable * alone / training.push_seconds
        if model.diverged or gain < _WORTH_WAITING:
            why = f"taken back: where all wait for each other, progress is {gain:.2f} times as fast"
            yield from branch.insist(branch.placed(before), why)
            return
        training.usual_push_seconds = training.push_seconds

    def _waiting(self, setting: Setting) -> Setting | None:
        """`setting` with workers that wait for each other after every push; None where they do already, or cannot."""
        policies, staleness = options(self._job.space.knob("policy")), self._job.space.knob("staleness")
        if waits(setting):
            return None
        if "bsp" in policies:
            return replace(setting, policy="bsp")
        if "ssp" in (*policies, setting.policy) and staleness is not None and lowest(staleness) == 0:
            return replace(setting, policy="ssp", staleness=0)
        return None
