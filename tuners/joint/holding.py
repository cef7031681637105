"""Hold and cool: the longest part of a job under `tuners.joint`, from the heat that was found to the target.

The heat is held while the level drifts down. It is doubled where the seconds that this would save are worth a trial, halved
where the level rises, and cooled for some windows where noise is all that separates the level from the goal.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tuners.actions import Setting
from tuners.joint.heat import Heat
from tuners.joint.learning_model import noisy, over_fitted, slope, spread, stopped
from tuners.joint.training import HELPED_NATS, Snapshot, Steps, Training

__all__ = ["Holding"]

_LEAST = 4  # windows from which a drift is measured
_LOST = 10  # windows without progress after which a model is lost
_TRIAL = 4  # windows in which a hotter setting is tried, at least
_TRIAL_SHARE = 0.05  # of the seconds left that a trial takes
_STEP = 2.0  # factor of the heat, upwards
_SNAPSHOT_NATS = 0.15  # a level so much lower is worth another snapshot
_SETTLED_NATS = 0.03  # a lower level is progress


class Holding:
    """One attempt to reach the target from the present model, around the present heat."""

    def __init__(self, training: Training, heat: Heat, untrained: Snapshot | None, place: Callable[[], Steps[None]]) -> None:
        self._training, self._heat, self._place = training, heat, place
        self._untrained = untrained  # the model before the first push
        self._held = self._top = training.setting
        self._kept: Snapshot | None = None  # of about the best model
        self._low = self._coolest = self._peak = training.level  # of the snapshot; of all cooled models; at `_best_at`
        self._best_at = training.seconds
        self._noise = training.gauge.noise  # what cooling is expected to shed
        self._settling = False  # after a return to a snapshot
        self._stops = self._failed_trials = 0
        self._levels, self._times = list[float](), list[float]()  # since the heat was last changed or tried
        self._course, self._losses = list[float](), list[float]()  # all levels, and losses on validation data
        self._steady_since = 0  # length of the course when the heat was last changed
        self._steady = self._held

    def run(self) -> Steps[bool]:
        """Train until the model has over-fitted, has diverged for good, or stands still in spite of all.

        Returns whether it is lost: not better than the untrained one after many windows.
        """
        self._kept = yield from self._training.snapshot()
        while True:
            yield from self._window()
            lost = self._is_lost()
            if lost or over_fitted(self._losses, self._course, self._training.training_loss):
                yield from self._training.drop(self._kept)
                return lost
            if self._is_too_hot():
                goes_on = yield from self._step_back()
            else:
                yield from self._keep()
                goes_on = len(self._levels) < _LEAST or (yield from self._decide())
            if not goes_on:
                return False

    # ----------------------------------------------------------------------------------------------------- what is seen

    def _window(self) -> Steps[None]:
        training = self._training
        yield from training.window()
        self._levels.append(training.level)
        self._times.append(training.seconds)
        self._course.append(training.level)
        if training.cluster_changed:
            yield from self._place()
        self._losses.append(training.loss)
        if len(self._levels) == 3 and self._settling:
            # A snapshot is of a lucky moment: its level is not what this heat can hold.
            self._low, self._settling = max(self._low, sum(self._levels) / 3), False

    def _is_lost(self) -> bool:
        known = self._untrained
        return known is not None and len(self._course) >= _LOST and min(self._course) > known.level - HELPED_NATS

    @property
    def _hurt(self) -> float:
        """A rise of the level that is no noise, in nats."""
        return max(self._training.gauge.hurt, 2 * spread(self._course))

    def _is_too_hot(self) -> bool:
        risen = len(self._levels) >= _LEAST and min(self._levels[-3:]) > self._low + 1.5 * self._hurt
        return self._training.diverged or risen

    def _keep(self) -> Steps[None]:
        """Renew the snapshot where the model is clearly better."""
        if len(self._levels) >= 2 and sum(self._levels[-2:]) / 2 < self._low - _SNAPSHOT_NATS:
            self._low = sum(self._levels[-2:]) / 2
            yield from self._renew()

    def _renew(self) -> Steps[None]:
        yield from self._training.drop(self._kept)
        self._kept = yield from self._training.snapshot()

    # ----------------------------------------------------------------------------------------------------- what is done

    def _step_back(self) -> Steps[bool]:
        """Return to the snapshot, at half the heat; False where the model has diverged and there is none."""
        training = self._training
        self._held = self._heat.scaled(self._held, 0.5)
        if self._kept is not None:
            self._kept = yield from training.return_to(self._kept, self._held)
        elif training.diverged:
            return False
        else:
            yield from training.change(self._held)
            self._low = training.level
        self._begin_anew(settling=True)
        return True

    def _begin_anew(self, *, settling: bool) -> None:
        self._levels, self._times, self._settling = [], [], settling

    def _decide(self) -> Steps[bool]:
        """Hold on, go hotter, or cool; False where the drift has stopped for good."""
        training, heat = self._training, self._heat
        level, goal = sum(self._levels[-3:]) / 3, training.gauge.goal(training.loss)
        stop = stopped(self._times, self._levels)
        if self._held != self._steady:
            self._steady, self._steady_since = self._held, len(self._course)
        watched = len(self._course) >= self._steady_since + 2 * _LEAST
        hidden = not heat.steps and watched and noisy(self._course[-2 * _LEAST :])
        # What cooling can shed is not much more than what levels vary by.
        shedding = min(self._noise, 4 * spread(self._course))
        if not (stop or hidden) and (heat.steps or level - shedding > goal):
            yield from self._try_hotter(level, goal)
            return True
        if heat.steps:
            self._held = heat.scaled(self._held, 0.5)
            yield from training.change(self._held)
            self._low = training.level
            self._begin_anew(settling=self._settling)
            return True
        return (yield from self._cool(level, stop=stop, hidden=hidden))

    def _try_hotter(self, level: float, goal: float) -> Steps[None]:
        """Train under a hotter setting for some windows, if that is worth it: a rate needs time to relax."""
        training, heat = self._training, self._heat
        hotter = heat.scaled(self._held, _STEP)
        windows = self._trial_windows(level - goal)
        if heat.of(hotter) <= heat.of(self._held) or not windows:
            return
        before = yield from training.snapshot()
        if before is None or not (yield from training.change(hotter)):
            yield from training.drop(before)
            self._failed_trials += 1
            self._begin_anew(settling=self._settling)
            return
        levels, hurt = list[float](), self._hurt
        for _ in range(windows):
            yield from training.window()
            levels.append(training.level)
            if training.diverged or training.level > level + 3 * hurt:
                break
        newest = levels[windows // 2 :]
        whole = len(levels) == windows and not training.diverged
        if whole and sum(newest) / len(newest) <= level + 0.5 * hurt:
            yield from training.drop(before)
            self._held, self._low, self._failed_trials = training.setting, training.level, 0
            yield from self._renew()
        else:
            yield from training.drop((yield from training.return_to(before, self._held)))
            self._failed_trials += 1
        self._begin_anew(settling=self._settling)

    def _trial_windows(self, distance: float) -> int:
        """Windows in which a hotter setting is tried, `distance` nats from the goal.

        0 where half of the seconds left, times the chance of success, is less than the trial takes.
        """
        levels, times = self._levels, self._times
        window_seconds = (times[-1] - times[0]) / (len(times) - 1)
        newest = len(levels) // 2 if len(levels) >= 2 * _LEAST else 0  # the first levels after a change fall faster
        drift = -slope(times[newest:], levels[newest:])
        # Nothing is known of a job's length but that it has lasted so long.
        left = min(self._training.job.budget_seconds - times[-1], 2 * times[-1])
        if drift > 0:
            left = min(left, distance / drift)
        windows = min(max(_TRIAL, math.ceil(_TRIAL_SHARE * left / window_seconds)), 4 * _TRIAL)
        change_seconds = self._training.change_seconds if self._heat.limits_workers else 0.0
        saved = 0.5 * left * 0.5 ** (self._failed_trials + 1)
        return windows if saved > windows * window_seconds + 2 * change_seconds else 0

    def _cool(self, level: float, *, stop: bool, hidden: bool) -> Steps[bool]:
        """Shed the noise, then go on at a heat that follows from what was shed; False where nothing helps any more."""
        training, heat = self._training, self._heat
        coolest = yield from self._shed(self._held)
        shed = level - coolest
        self._noise = max(0.3 * self._noise, 0.7 * shed)
        self._steady, self._steady_since = self._held, len(self._course)
        if hidden and shed > 2 * _SNAPSHOT_NATS:
            self._held = heat.scaled(self._held, 0.5)  # noise has hidden all progress
        elif stop:
            # As hot as it was: noise leads out of a minimum that does not generalise.
            self._held, self._stops = self._top, self._stops + 1
        elif shed < _SNAPSHOT_NATS:
            self._failed_trials = 0  # noise is not what holds it up: a hotter setting may be
        elif coolest > self._coolest - _SETTLED_NATS:
            self._held = heat.scaled(self._held, max(0.5, 0.1 * heat.of(self._top) / heat.of(self._held)))
        if coolest < self._peak - _SETTLED_NATS:
            self._peak, self._best_at = coolest, training.seconds
        self._coolest = min(self._coolest, coolest)
        if self._stops >= 2 and training.seconds > 1.2 * self._best_at:
            yield from training.drop(self._kept)
            return False
        yield from self._renew()
        yield from training.change(self._held)
        self._low = training.level + self._noise
        self._begin_anew(settling=self._settling)
        return True

    def _shed(self, held: Setting) -> Steps[float]:
        """Halve the heat window by window, to a tenth, until the level falls no more; the lowest level."""
        training, levels, idle, now = self._training, list[float](), 0, held
        while idle < 2:
            if self._heat.of(now) > self._heat.of(held) / 10:
                now = self._heat.scaled(now, 0.5)
            yield from training.change(now)
            yield from training.window()
            if training.diverged:
                break
            levels.append(training.level)
            idle = idle + 1 if len(levels) > 3 and training.level > min(levels[:-1]) - 0.01 else 0
        return min(levels, default=math.inf)
