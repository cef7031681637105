"""Hold and cool: the longest part of a job under `tuners.joint`, from the heat that was found to the target.

The heat is held while the level drifts down. It is doubled where the seconds that this would save are worth a trial, halved
where much of what was learned is lost, and cooled for some windows where noise is all that separates the level from the
goal, or no drift is left.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from tuners.actions import Setting
from tuners.joint.job.snapshots import Snapshot
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import CopyHeat, Heat, as_hot
from tuners.joint.models.learning_model import (
    HELPED_NATS,
    SecondsLeft,
    falls,
    has_lost_half,
    is_lost,
    is_unlearned,
    likely_seconds,
    over_fitted,
    seconds_left,
    spread,
    stopped,
)

__all__ = ["Holding", "RuleParts"]

_LEAST = 4  # windows from which a drift is measured
_TRIAL = 4  # windows in which a hotter setting is tried, at least
_CHANCE = 0.5  # that twice the heat serves, as far as is known
_CHANCE_QUIET = 0.7  # the same where noise is small, because a hotter setting makes more of it
_QUIET_SHARE = 0.05  # of what was learned: noise that is small
_CHANCE_AGAIN = 0.25  # the same, after each trial that has failed, times so much
_SERVED = 0.7  # trials that have served, of those that were expected to: 70 of 100, of 136 (see what_was_tried.md)
_TRIAL_SHARE = 0.05  # of the seconds left that a trial takes
_STEP = 2.0  # factor of the heat, upwards
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


class _Drift(NamedTuple):
    """What the newest levels tell of the way to the goal."""

    window_seconds: float
    left: SecondsLeft

    @property
    def arrives_soon(self) -> bool:
        """Whether the goal is reached without cooling, in about as many windows as that takes."""
        return self.left.mean < _COOLING_WINDOWS * self.window_seconds


class _Trial(NamedTuple):
    hotter: Setting
    windows: int
    why: str


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
        self._useless = useless  # the coolest heat that is known to have brought nothing
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
        self._quiet = False  # whether the last cooling has shed next to nothing
        self._failed_trials = 0
        self.levels, self.times = list[float](), list[float]()  # since the heat was last changed or tried
        # All levels that the model came by, and losses on validation data.
        self._course, self._losses = list[float](), list[float]()
        self.hurting = math.inf  # the coolest heat that has made the model clearly worse
        self._ceiling = math.inf  # the coolest heat that was too hot, or whose trial has failed
        self.lost = False  # nothing was learned
        self.ended = ""  # why, in words

    def run(self) -> Steps[None]:
        """Train until the model is lost, has over-fitted, has diverged for good, or stands still in spite of all."""
        self._kept, gauge = (yield from self._training.snapshots.take()), self._training.model.gauge
        while not self.ended:
            if self._training.model.has_arrived and self._parts.schedules and not self._heat.steps:
                yield from self._hold_the_target()
                continue
            yield from self.window()
            if is_lost(self._course, gauge.blank_level, gauge.goal(self._training.model.loss)):
                self.lost, self.ended = True, "nothing was learned"
            elif over_fitted(self._losses, self._course, self._training.model.minibatches.mean):
                self.ended = "the model has learned its samples by heart"
            elif self._is_too_hot():
                yield from self._step_back()
            else:
                yield from self._keep()
                if len(self.levels) >= _LEAST:
                    yield from self._decide()
        yield from self._training.snapshots.drop(self._kept)

    # ----------------------------------------------------------------------------------------------------- what is seen

    def window(self) -> Steps[None]:
        training = self._training
        model = training.model
        yield from training.window()
        self.levels.append(model.level)
        self.times.append(training.seconds)
        self._course.append(model.level)
        # Where heat is a policy or a number of workers, it changes the pace by itself.
        if training.branch.cluster_changed or (training.has_changed_pace() and not self._heat.steps):
            yield from self._place()
            self._follow()
        self._losses.append(model.loss)
        if len(self.levels) == 3 and self._has_returned:
            # A snapshot is of a lucky moment: its level is not what this heat can hold.
            self.low, self._has_returned = max(self.low, sum(self.levels) / 3), False

    def _follow(self) -> None:
        """Hold the same heat on other machines: what was held names machines that may be gone."""
        if self._heat.limits_workers:
            self.held = self._training.branch.setting
        else:
            self.held, self.top = (as_hot(self._heat, self._training.branch.placed(s), s) for s in (self.held, self.top))

    @property
    def _hurt(self) -> float:
        """A rise of the level that is no noise, in nats."""
        return max(self._training.model.gauge.hurt, 2 * spread(self._course))

    def _is_too_hot(self) -> bool:
        if self._training.model.diverged or self._is_coolest():
            return self._training.model.diverged  # from a snapshot, the same would happen again
        return has_lost_half(self.levels, self.low, self._training.model.gauge.blank_level, spread(self._course))

    def _is_coolest(self) -> bool:
        """Whether nothing is cooler than the present heat."""
        return not self._heat.of(self._heat.scaled(self.held, 0.5)) < self._heat.of(self.held)

    def _keep(self) -> Steps[None]:
        """Renew the snapshot where the model is clearly better."""
        if len(self.levels) >= 2 and sum(self.levels[-2:]) / 2 < self.low - _SNAPSHOT_NATS:
            self.low = sum(self.levels[-2:]) / 2
            yield from self._renew()

    def _hold_the_target(self) -> Steps[None]:
        """Shed the noise until the job validates: it may do so rarely, and by then a hot model may be a worse one."""
        training, heat = self._training, self._heat
        branch, model = training.branch, training.model
        cool = heat.scaled(self.held, 0.1)
        why = f"{heat.words(branch.setting)} -> {heat.words(cool)}: the target is reached, until the job validates"
        yield from branch.change(cool, why)
        while True:
            yield from training.toward_validation()
            if model.validated or model.diverged or model.level > model.gauge.goal(model.loss):
                break
            if branch.cluster_changed:
                yield from self._place()
                self._follow()
        if model.diverged:
            yield from self._step_back()
            return
        yield from branch.insist(self.held, f"{heat.words(cool)} -> {heat.words(self.held)}: the job has not found so")
        self._begin_anew()

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
        self._ceiling = min(self._ceiling, self._heat.of(before))
        if model.diverged:
            self.hurting = min(self.hurting, self._heat.of(before))
        self.held, self._has_returned = self._heat.scaled(self.held, 0.5), True
        if not self._heat.of(self.top) < self._heat.of(before):
            self.top = self.held  # that heat has not served
        seen = "diverged" if model.diverged else f"level {self.levels[-1]:.2f} after {self.low:.2f}"
        why = f"{self._heat.words(before)} -> {self._heat.words(self.held)}: too hot, {seen}"
        if self._kept is not None:
            self._kept = yield from training.snapshots.return_to(self._kept, self.held, why)
        elif model.diverged:
            self.ended = "it has diverged, and no snapshot is left"
            return
        else:
            yield from training.branch.insist(self.held, why)
            self.low = model.level
        self._begin_anew()

    def _begin_anew(self) -> None:
        self.levels, self.times = [], []

    def _decide(self) -> Steps[None]:
        """Hold on, go hotter, or cool."""
        training, heat = self._training, self._heat
        model = training.model
        if isinstance(heat, CopyHeat):
            return  # younger copies take time, and help only where older ones have hurt
        level, goal = sum(self.levels[-3:]) / 3, model.gauge.goal(model.loss)
        # Fewer workers learn more slowly: a level that stands still for a while is no reason.
        share = _STANDS_LONG if heat.limits_workers else _STANDS
        stop = stopped(self.times, self.levels, goal, training.job.budget_seconds, share=share)
        # What cooling can shed is not much more than what levels vary by.
        shedding = _SHED * min(self._noise, 4 * spread(self._course))
        if not stop and (heat.steps or level - shedding > goal):
            yield from self.try_hotter(level, goal)
        elif heat.steps:
            before, self.held = self.held, heat.scaled(self.held, 0.5)
            yield from training.branch.insist(
                self.held, f"{heat.words(before)} -> {heat.words(self.held)}: no drift is left"
            )
            self.low = model.level
            self._begin_anew()
        elif self._parts.schedules and (stop or not self._drift(goal).arrives_soon):
            seen = "no drift is left" if stop else f"{shedding:.2f} may be noise"
            yield from self._cool(level, goal, f"level {level:.2f}, goal {goal:.2f}: {seen}", stop=stop)

    def _drift(self, goal: float) -> _Drift:
        window_seconds = (self.times[-1] - self.times[0]) / (len(self.times) - 1)
        return _Drift(window_seconds, seconds_left(self.times, self.levels, goal, self._training.job.budget_seconds))

    def try_hotter(self, level: float, goal: float) -> Steps[None]:
        """Train under a hotter setting for some windows, if that is worth it: a rate needs time to relax."""
        training, trial = self._training, self._trial(self._drift(goal))
        if trial is None:
            return
        before = yield from training.snapshots.take()
        if (before is None and self._parts.snapshots) or not (yield from training.branch.change(trial.hotter, trial.why)):
            yield from training.snapshots.drop(before)
            self._failed_trials += 1
        else:
            yield from self._try(trial, level, before)
        self._begin_anew()

    def _trial(self, drift: _Drift) -> _Trial | None:
        """The trial of a hotter setting, if there is one and it is expected to save more seconds than it costs."""
        training, heat, left, hotter = self._training, self._heat, drift.left, self._heat.scaled(self.held, _STEP)
        if not heat.of(self.held) < heat.of(hotter) < self.hurting:
            return None
        likely = likely_seconds(left, self.times[-1], training.job.budget_seconds)
        windows = min(max(_TRIAL, math.ceil(_TRIAL_SHARE * likely / drift.window_seconds)), 4 * _TRIAL)
        cost = windows * drift.window_seconds + (2 * training.branch.change_seconds if heat.limits_workers else 0.0)
        chance = _SERVED * self._chance(hotter, is_slow=self._is_slow(left))
        saved = likely * (1 - 1 / _STEP) * chance
        # A goal that is reached before a trial would end needs none. A trial that serves costs nothing.
        if left.mean + 2 * left.deviation < cost and self._parts.cost_rule:
            return None
        if saved <= (1 - chance) * cost and self._parts.cost_rule:
            return None
        why = (
            f"{self._heat.words(self.held)} -> {self._heat.words(hotter)}, on trial: {likely:.0f} s may be left, "
            f"{left} at this drift; {saved:.0f} s may be saved (chance {chance:.2g}); the trial costs {cost:.0f} s"
        )
        return _Trial(hotter, windows, why)

    def _try(self, trial: _Trial, level: float, before: Snapshot | None) -> Steps[None]:
        """Hold what is on trial if it serves; else go on at the heat before, from `before` or soon as good a model."""
        training, heat, blank, hurt = self._training, self._heat, self._training.model.gauge.blank_level, self._hurt
        model = training.model
        levels = yield from _watched(training, trial.windows, level, hurt, spread(self._course))
        newest = levels[trial.windows // 2 :]
        whole = len(levels) == trial.windows and not model.diverged
        found = sum(newest) / max(len(newest), 1)
        tolerance = min(0.5 * hurt, max(0.25 * (blank - level), 0.0))  # of what was learned
        if whole and found <= level + tolerance and not is_unlearned(found, level, blank):
            yield from training.snapshots.drop(before)
            self.held = self.top = training.branch.setting
            self._failed_trials = 0
            self._course += levels
            if model.level <= self.low or not math.isfinite(self.low):
                self.low = model.level
                yield from self._renew()
            return
        self._failed_trials += 1
        self._ceiling = min(self._ceiling, heat.of(trial.hotter))
        if not whole or found > level + 1.5 * hurt:
            self.hurting = min(self.hurting, heat.of(trial.hotter))
        why = f"{self._heat.words(trial.hotter)} -> {self._heat.words(self.held)}: the trial has failed, "
        why += "diverged" if model.diverged else f"level {levels[-1]:.2f} after {level:.2f}"
        if before is not None and not heat.steps and (yield from training.recovers(before, self.held, level, why)):
            yield from training.snapshots.drop(before)
        elif before is not None:
            yield from training.snapshots.drop((yield from training.snapshots.return_to(before, self.held, why)))
        else:
            yield from training.branch.insist(self.held, why)

    def _is_slow(self, left: SecondsLeft) -> bool:
        """Whether the budget ends before the goal, at a drift that noise does not hide, and cooling could do little."""
        training, now, level = self._training, self.times[-1], sum(self.levels[-3:]) / len(self.levels[-3:])
        is_late = left.mean > 0.99 * (training.job.budget_seconds - now)
        is_small = spread(self._course) < _QUIET_SHARE * (level - training.model.gauge.goal(training.model.loss))
        return is_late and is_small and falls(self.levels)

    def _chance(self, hotter: Setting, *, is_slow: bool = False) -> float:
        """That `hotter` serves, as far as is known."""
        heat, again = self._heat, _CHANCE_AGAIN**self._failed_trials
        if heat.of(hotter) > 0.99 * self._ceiling:
            again *= _CHANCE_AGAIN
        if heat.expected is None:
            return _CHANCE * again
        if self._is_quiet() or is_slow:
            return _CHANCE_QUIET * again
        chance = heat.expected.chance_above(math.sqrt(heat.of(hotter) * heat.of(self.held)))
        return chance * again * (_CHANCE if heat.of(hotter) >= self._useless else 1.0)

    def _is_quiet(self) -> bool:
        """Whether noise is not what holds the job up. Then a hotter setting may serve, whatever was expected."""
        learned = self._training.model.gauge.blank_level - sum(self.levels[-3:]) / len(self.levels[-3:])
        if learned <= HELPED_NATS:
            return False  # a dead model is quiet, too
        return self._quiet or spread(self._course) < _QUIET_SHARE * learned < math.inf

    def _cool(self, level: float, goal: float, why: str, *, stop: bool) -> Steps[None]:
        """Shed the noise, then go on as hot as before; as hot as it ever served where no drift was left. End where that was
        so before, and nothing has been better for long."""
        training = self._training
        coolest = yield from self._shed(self.held, why, goal)
        shed = level - coolest
        self._noise, self._quiet = max(0.3 * self._noise, 0.7 * shed), False
        self._stops += stop
        if coolest < self._peak - _SETTLED_NATS:
            self._peak, self._best_at = coolest, training.seconds
        if self._stops >= 2 and training.seconds > 1.2 * self._best_at:
            self.ended = "it stands still in spite of all"
            return
        if stop:
            # As hot as it was: noise leads out of a minimum that does not generalise.
            self.held, why = self.top, "the drift had stopped"
        elif shed < _SNAPSHOT_NATS:
            self._failed_trials, self._quiet = 0, True  # noise is not what holds it up: a hotter setting may be
            why = "it was not noise that held it up"
        else:
            why = "that was noise"
        yield from self._renew()
        now = self._heat.words(training.branch.setting)
        yield from training.branch.insist(
            self.held, f"{now} -> {self._heat.words(self.held)}: cooling shed {shed:.2f}, {why}"
        )
        self.low = training.model.level + self._noise
        self._begin_anew()

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
