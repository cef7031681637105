"""The start's rate: tried, held while the target is near, or left for one that is more probable."""

from __future__ import annotations

import math
from dataclasses import replace

from tuners.actions import Job
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import Expected, Heat, outer_heat
from tuners.joint.learning.holding import RuleParts
from tuners.joint.machines.placing import Placing

__all__ = ["StartHeat"]

_FIRST_STEPS = 8  # local steps of the first windows, at most
_EVALUATION_SHARE = 0.01  # of the seconds left that the first evaluation may take
_SEARCH_ROUNDS = 12  # mini-batches of every worker that a search takes, at least
# Deviations from the median of what is expected, of a start that is tried first. A cool one costs a few windows, while a
# hot one may spoil the model.
_PLAUSIBLE = (-3.0, 0.5)
_HARMED = 4.0  # times cooler than a start that has spoilt the model
_COOLER_DEVIATIONS = 0.5  # below the median of what is expected: heat that is too low costs less than one that is too high


class StartHeat:
    """What becomes of the heat that one job starts with."""

    def __init__(self, job: Job, training: Training, placing: Placing, parts: RuleParts) -> None:
        self.job, self.training, self.placing, self.parts = job, training, placing, parts
        self.learns = self.harms = False  # whether the start has clearly taught the model something, or spoilt it

    def begin(self) -> Steps[None]:
        """Before the first push: few local steps, and another rate, where the start's is improbable."""
        yield from self._begin_local_steps()
        if not self.is_plausible:
            yield from self._begin_where_probable()

    @property
    def is_plausible(self) -> bool:
        """Whether the start may learn well, as far as is known before it was tried."""
        if self.job.target.counts or self.job.space.takes_local_steps:
            return False
        heat = self.placing.heat
        if heat is None or heat.expected is None:
            return True
        apart = math.log(heat.of(self.job.start) / heat.expected.median) / heat.expected.deviation
        return _PLAUSIBLE[0] <= apart <= _PLAUSIBLE[1]

    def measure(self) -> Steps[None]:
        """Train until the system is known; then leave the start's rate, if another one is more probable."""
        if not self.is_plausible:
            yield from self.placing.measure()
            return
        yield from self.try_start()
        yield from self._begin_where_probable()

    def try_start(self) -> Steps[None]:
        """Train at the start's rate, as long as the target is so near, at the drift that is seen, that no search can pay."""
        training, gauge, setting = self.training, self.training.model.gauge, self.training.branch.setting
        model = training.model
        workers, rounds, unseen, validated = len(setting.workers), 2, 0, False
        begun, known = (training.seconds, model.told_level) if model.pushes else (0.0, math.nan)
        seen = yield from training.glance(2 * workers)
        # The first mini-batches have told the level of the untrained model.
        times, levels = [begun], [gauge.untrained_level if math.isnan(known) else known]
        is_near = False
        while not model.diverged and rounds < 2 * _SEARCH_ROUNDS:
            self.learns = self.learns or seen.helps
            # Of what was validated before, mini-batches do not tell how it goes on.
            unseen = 0 if model.validated or not validated else unseen + 1
            validated = validated or bool(model.validated)
            if not unseen:
                times.append(training.seconds)
                levels.append(model.told_level)
                at = len(levels) // 2 - 1 if len(levels) > 3 else 0  # the newest half of the time
                fallen, distance = levels[at] - levels[-1], levels[-1] - gauge.goal(model.minibatches.mean)
                left = distance * (times[-1] - times[at]) / fallen if fallen > 0 else math.inf
                is_near = left <= _SEARCH_ROUNDS * (training.seconds - begun) / rounds
            if not is_near or unseen > 2:
                break
            seen = yield from training.glance(workers)
            rounds += 1
        worse = math.isfinite(levels[0]) and not levels[-1] < gauge.blank_level + gauge.hurt
        self.harms = model.diverged or (worse and not self.learns)
        training.usual_push_seconds = training.push_seconds
        self.placing.learn_blocks()

    def _begin_local_steps(self) -> Steps[None]:
        """Where local steps are free: few of them until it is known what they take, with the usual outer optimizer."""
        setting, knob, outer = self.training.branch.setting, self.job.space.knob("local_steps"), outer_heat(self.job)
        if knob is not None:
            setting = replace(setting, local_steps=int(knob.nearest(min(setting.local_steps, _FIRST_STEPS))), node_steps=())
        if outer is not None and outer.expected is not None and self.parts.prior:
            setting = outer.scaled(setting, outer.expected.median / outer.of(setting))
        yield from self.training.branch.change(setting, "few local steps until their time is known; the usual outer rate")

    def _begin_where_probable(self) -> Steps[None]:
        """Leave a start that is hotter or cooler than the best heats of most jobs, for the cooler half of these."""
        heat = self.placing.heat
        if heat is None:
            return
        if heat.expected is not None:
            yield from self._leave_start(heat, heat.expected)
        # The first mini-batches tell the loss of the untrained model, too, but with more noise.
        if self.job.evaluate_seconds < _EVALUATION_SHARE * self.placing.seconds_left():
            yield from self.training.evaluate_untrained()

    def _leave_start(self, heat: Heat, expected: Expected) -> Steps[None]:
        """Leave the start's heat for a more probable one, unless the start has taught the model something: that tells more
        than other jobs do."""
        training = self.training
        branch = training.branch
        wanted = expected.median * math.exp(-_COOLER_DEVIATIONS * expected.deviation)
        here = heat.of(branch.setting)
        if self.harms:
            wanted = min(wanted, here / _HARMED)
        elif self.learns or abs(math.log(here / wanted)) <= _COOLER_DEVIATIONS * expected.deviation:
            return
        setting = heat.scaled(branch.setting, wanted / here)
        usual = heat.words(heat.scaled(branch.setting, expected.median / here))
        why = (
            f"{heat.words(branch.setting)} -> {heat.words(setting)}: {usual} would be as hot as the best of other jobs, "
            f"within a factor of {math.exp(expected.deviation):.2g} of two in three"
        )
        # A model that has learned a little bears less heat, so the search would end at a lower one.
        if not (yield from training.snapshots.begin_again(setting, why)):
            yield from branch.change(setting, why)
