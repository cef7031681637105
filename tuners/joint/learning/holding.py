"""Hold and cool: the longest part of a job under `tuners.joint`, from the heat that was found to the target.

The heat is held while the level drifts down. It is doubled where the seconds that this would save are worth a trial, halved
where much of what was learned is lost, and cooled for some windows where noise is all that separates the level from the
goal, or no drift is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

from tuners.actions import Setting
from tuners.joint.job.snapshots import Snapshot
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import CopyHeat, Heat, as_hot
from tuners.joint.learning.hotter_trials import HotterTrial, HotterTrials
from tuners.joint.learning.seen_levels import SeenLevels
from tuners.joint.models.learning_model import has_lost_half, is_lost, is_unlearned, over_fitted, stopped

__all__ = ["Holding", "RuleParts"]

_LEAST = 4  # windows from which a drift is measured
_STANDS, _STANDS_LONG = 0.25, 0.5  # of the job's time, in which no drift is left
_COOLING_WINDOWS = 4  # in which cooling is to reach the goal, at least; a drift that is as fast is not cooled
_COOLING_SHARE = 0.03  # of the job's time so far, in which each of its heats is held, at least
_SHED = 0.5  # of the noise that was expected: what 39 of 56 first coolings have shed, or less (see what_was_tried.md)
_SNAPSHOT_NATS = 0.15  # a level so much lower is worth another snapshot
_SETTLED_NATS = 0.03  # a lower level is progress


@dataclass(frozen=True, slots=True)
class RuleParts:
    """The parts of the rule; each can be left out, to measure what it is worth (see `tuners.joint.joint`)."""

    system_model: bool = True
    schedules: bool = True
    cost_rule: bool = True
    snapshots: bool = True
    one_setting: bool = False
    prior: bool = True


class Holding:
    """One attempt to reach the target from the present model, around the present heat."""

    def __init__(
        self,
        training: Training,
        heat: Heat,
        parts: RuleParts,
        place: Callable[[], Steps[None]],
        useless: float = math.inf,
    ) -> None:
        self.seen = SeenLevels()
        self.trials = HotterTrials(training, heat, self.seen, cost_rule=parts.cost_rule, useless=useless)
        self._training, self._heat, self._parts, self._place = training, heat, parts, place
        self.held = self.top = training.branch.setting
        self._kept: Snapshot | None = None  # of about the best model
        level = (
            math.inf if math.isnan(training.model.level) else training.model.level
        )  # the job may not have validated this model
        self.low = self._peak = level  # of the snapshot; of the best cooled model, which was seen at `_best_at`
        self._best_at, self._stops = training.seconds, 0  # how often no drift was left
        self._has_returned = False  # to the snapshot, and not seen yet what level follows
        self._noise = training.model.gauge.noise  # what cooling is expected to shed
        self._losses = list[float]()  # on validation data
        self.lost = False  # nothing was learned
        self.ended = ""  # why, in words

    def run(self) -> Steps[None]:
        """Train until the model is lost, has over-fitted, has diverged for good, or stands still in spite of all."""
        self._kept, gauge = (yield from self._training.snapshots.take()), self._training.model.gauge
        while not self.ended:
            yield from self.window()
            if is_lost(self.seen.course, gauge.blank_level, gauge.goal(self._training.model.loss)):
                self.lost, self.ended = True, "nothing was learned"
            elif over_fitted(self._losses, self.seen.course, self._training.model.minibatches.mean):
                self.ended = "the model has learned its samples by heart"
            elif self._is_too_hot() and (yield from self._has_lost_much()):
                yield from self._step_back()
            else:
                yield from self._keep()
                if len(self.seen.levels) >= _LEAST:
                    yield from self._decide()
        yield from self._training.snapshots.drop(self._kept)

    # ----------------------------------------------------------------------------------------------------- what is seen

    def window(self) -> Steps[None]:
        training = self._training
        model = training.model
        yield from training.window()
        self.seen.add(model.level, training.seconds)
        # Where heat is a policy or a number of workers, it changes the pace by itself.
        if training.branch.cluster_changed or (training.has_changed_pace() and not self._heat.steps):
            yield from self._place()
            self._follow()
        self._losses.append(model.loss)
        if len(self.seen.levels) == 3 and self._has_returned:
            # A snapshot is of a lucky moment: its level is not what this heat can hold.
            self.low, self._has_returned = max(self.low, self.seen.newest), False

    def _follow(self) -> None:
        """Hold the same heat on other machines: what was held names machines that may be gone."""
        if self._heat.limits_workers:
            self.held = self._training.branch.setting
        else:
            self.held, self.top = (as_hot(self._heat, self._training.branch.placed(s), s) for s in (self.held, self.top))

    @property
    def _hurt(self) -> float:
        """A rise of the level that is no noise, in nats."""
        return max(self._training.model.gauge.hurt, 2 * self.seen.spread)

    def _is_too_hot(self) -> bool:
        if self._training.model.diverged or self._is_coolest():
            return self._training.model.diverged  # from a snapshot, the same would happen again
        return has_lost_half(self.seen.levels, self.low, self._training.model.gauge.blank_level, self.seen.spread)

    def _is_coolest(self) -> bool:
        """Whether nothing is cooler than the present heat."""
        return not self._heat.of(self._heat.scaled(self.held, 0.5)) < self._heat.of(self.held)

    def _has_lost_much(self) -> Steps[bool]:
        """Whether the model is really worse than the snapshot, which is evaluated where half the heat has not helped.

        What was validated may have been an earlier model than the one that was kept.
        """
        if not self._has_returned or self._kept is None or self._training.model.diverged:
            return True
        self.low, self._has_returned = (yield from self._training.level_of(self._kept)), False
        return self._is_too_hot()

    def _keep(self) -> Steps[None]:
        """Renew the snapshot where the model is clearly better."""
        levels = self.seen.levels
        if len(levels) >= 2 and sum(levels[-2:]) / 2 < self.low - _SNAPSHOT_NATS:
            self.low = sum(levels[-2:]) / 2
            yield from self._renew()

    def _renew(self) -> Steps[None]:
        yield from self._training.snapshots.drop(self._kept)
        self._kept = yield from self._training.snapshots.take()

    # ----------------------------------------------------------------------------------------------------- what is done

    def _step_back(self) -> Steps[None]:
        """Return to the snapshot, at half the heat."""
        training, before = self._training, self.held
        model = training.model
        if self._is_coolest():
            self.lost, self.ended = True, "it has diverged at the lowest heat"
            return
        self.trials.was_too_hot(before, hurts=model.diverged)
        self.held, self._has_returned = self._heat.scaled(self.held, 0.5), True
        if not self._heat.of(self.top) < self._heat.of(before):
            self.top = self.held  # that heat has not served
        seen = "diverged" if model.diverged else f"level {self.seen.levels[-1]:.2f} after {self.low:.2f}"
        why = f"{self._heat.words(before)} -> {self._heat.words(self.held)}: too hot, {seen}"
        if self._kept is not None:
            self._kept = yield from training.snapshots.return_to(self._kept, self.held, why)
        elif model.diverged:
            self.ended = "it has diverged, and no snapshot is left"
            return
        else:
            yield from training.branch.insist(self.held, why)
            self.low = model.level
        self.seen.begin_anew()

    def _decide(self) -> Steps[None]:
        """Hold on, go hotter, or cool."""
        training, heat = self._training, self._heat
        model = training.model
        if isinstance(heat, CopyHeat):
            return  # younger copies take time, and help only where older ones have hurt
        level, goal = self.seen.newest, model.gauge.goal(model.loss)
        # Fewer workers learn more slowly: a level that stands still for a while is no reason.
        share = _STANDS_LONG if heat.limits_workers else _STANDS
        stop = stopped(self.seen.times, self.seen.levels, goal, training.job.budget_seconds, share=share)
        # What cooling can shed is not much more than what levels vary by.
        shedding = _SHED * min(self._noise, 4 * self.seen.spread)
        if not stop and (heat.steps or level - shedding > goal):
            yield from self.try_hotter(level, goal)
        elif heat.steps:
            before, self.held = self.held, heat.scaled(self.held, 0.5)
            yield from training.branch.insist(
                self.held, f"{heat.words(before)} -> {heat.words(self.held)}: no drift is left"
            )
            self.low = model.level
            self.seen.begin_anew()
        elif self._parts.schedules and (stop or not self._arrives_soon(goal)):
            seen = "no drift is left" if stop else f"{shedding:.2f} may be noise"
            yield from self._cool(level, goal, f"level {level:.2f}, goal {goal:.2f}: {seen}", stop=stop)

    def _arrives_soon(self, goal: float) -> bool:
        """Whether the goal is reached without cooling, in about as many windows as that takes."""
        drift = self.seen.drift(goal, self._training.job.budget_seconds)
        return drift.left.mean < _COOLING_WINDOWS * drift.window_seconds

    def try_hotter(self, level: float, goal: float) -> Steps[None]:
        """Train under a hotter setting for some windows, if that is worth it: a rate needs time to relax."""
        training = self._training
        trial = self.trials.worth_trying(self.held, self.seen.drift(goal, training.job.budget_seconds))
        if trial is None:
            return
        before = yield from training.snapshots.take()
        if (before is None and self._parts.snapshots) or not (yield from training.branch.change(trial.hotter, trial.why)):
            yield from training.snapshots.drop(before)
            self.trials.failed += 1
        else:
            yield from self._try(trial, level, before)
        self.seen.begin_anew()

    def _try(self, trial: HotterTrial, level: float, before: Snapshot | None) -> Steps[None]:
        """Hold what is on trial if it serves; else go on at the heat before, from `before` or soon as good a model."""
        training, heat, blank, hurt = self._training, self._heat, self._training.model.gauge.blank_level, self._hurt
        model = training.model
        levels = yield from _watched(training, trial.windows, level, hurt, self.seen.spread)
        newest = levels[trial.windows // 2 :]
        whole = len(levels) == trial.windows and not model.diverged
        found = sum(newest) / max(len(newest), 1)
        tolerance = min(0.5 * hurt, max(0.25 * (blank - level), 0.0))  # of what was learned
        if whole and found <= level + tolerance and not is_unlearned(found, level, blank):
            yield from training.snapshots.drop(before)
            self.held = self.top = training.branch.setting
            self.trials.failed = 0
            self.seen.course += levels
            if model.level <= self.low or not math.isfinite(self.low):
                self.low = model.level
                yield from self._renew()
            return
        self.trials.failed += 1
        self.trials.was_too_hot(trial.hotter, hurts=not whole or found > level + 1.5 * hurt)
        why = f"{self._heat.words(trial.hotter)} -> {self._heat.words(self.held)}: the trial has failed, "
        why += "diverged" if model.diverged else f"level {levels[-1]:.2f} after {level:.2f}"
        if before is not None and not heat.steps and (yield from training.recovers(before, self.held, level, why)):
            yield from training.snapshots.drop(before)
        elif before is not None:
            yield from training.snapshots.drop((yield from training.snapshots.return_to(before, self.held, why)))
        else:
            yield from training.branch.insist(self.held, why)

    def _cool(self, level: float, goal: float, why: str, *, stop: bool) -> Steps[None]:
        """Shed the noise, then go on as hot as before. Where no drift was left, go on as hot as it ever served, or half as
        hot where noise has hidden much; end where that was so before, and nothing has been better for long."""
        training = self._training
        coolest = yield from self._shed(self.held, why, goal)
        shed = level - coolest
        self._noise, self.trials.quiet = max(0.3 * self._noise, 0.7 * shed), False
        self._stops += stop
        if coolest < self._peak - _SETTLED_NATS:
            self._peak, self._best_at = coolest, training.seconds
        if self._stops >= 2 and training.seconds > 1.2 * self._best_at:
            self.ended = "it stands still in spite of all"
            return
        if stop and shed > training.model.gauge.hurt:
            self.held = self.top = self._heat.scaled(self.held, 0.5)
            why = "noise has hidden so much that half the heat may learn more"
        elif stop:
            # As hot as it was: noise leads out of a minimum that does not generalise.
            self.held, why = self.top, "the drift had stopped"
        elif shed < _SNAPSHOT_NATS:
            self.trials.failed, self.trials.quiet = 0, True  # noise is not what holds it up: a hotter setting may be
            why = "it was not noise that held it up"
        else:
            why = "that was noise"
        yield from self._renew()
        now = self._heat.words(training.branch.setting)
        yield from training.branch.insist(
            self.held, f"{now} -> {self._heat.words(self.held)}: cooling shed {shed:.2f}, {why}"
        )
        self.low = training.model.level + self._noise
        self.seen.begin_anew()

    def _shed(self, held: Setting, why: str, goal: float) -> Steps[float]:
        """Halve the heat, to a tenth, until the level falls too little to reach `goal`; the lowest level."""
        training, levels, idle, now = self._training, list[float](), 0, held
        model = training.model
        while idle < 2:
            if self._heat.of(now) > self._heat.of(held) / 10:
                now = self._heat.scaled(now, 0.5)
            yield from training.branch.change(
                now, f"{self._heat.words(training.branch.setting)} -> {self._heat.words(now)}, cooled: {why}"
            )
            began, seen = training.seconds, list[float]()
            while not seen or (training.seconds < (1 + _COOLING_SHARE) * began and not model.diverged):
                yield from training.window()
                seen.append(model.level)
            if model.diverged:
                break
            levels.append(sum(seen[-3:]) / len(seen[-3:]))
            little = max(_SETTLED_NATS / 3, (levels[-1] - goal) / _COOLING_WINDOWS)
            idle = idle + 1 if len(levels) >= 3 and levels[-1] > min(levels[:-1]) - little else 0
        return min(levels, default=math.inf)


def _watched(training: Training, windows: int, level: float, hurt: float, deviation: float) -> Steps[list[float]]:
    """The levels of so many windows, or of fewer where the model has become clearly worse than `level`."""
    levels = list[float]()
    while len(levels) < windows:
        yield from training.window()
        levels.append(training.model.level)
        lost = has_lost_half(levels, level, training.model.gauge.blank_level, deviation)
        if training.model.diverged or lost or training.model.level > level + 3 * hurt:
            break
        if len(levels) >= 3 and min(levels[-3:]) > level + 1.5 * hurt:
            break
    return levels
