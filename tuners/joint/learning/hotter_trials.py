"""Whether `tuners.joint` tries a hotter setting: the seconds that it may save, its chance, and what the trial costs."""

from __future__ import annotations

import math
from typing import NamedTuple

from tuners.actions import Setting
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import Heat
from tuners.joint.learning.seen_levels import Drift, SeenLevels
from tuners.joint.models.learning_model import HELPED_NATS, SecondsLeft, falls, likely_seconds

__all__ = ["HotterTrial", "HotterTrials"]

_WINDOWS = 4  # in which a hotter setting is tried, at least
_CHANCE = 0.5  # that twice the heat serves, as far as is known
_CHANCE_QUIET = 0.7  # the same where noise is small, because a hotter setting makes more of it
_QUIET_SHARE = 0.05  # of what was learned: noise that is small
_CHANCE_AGAIN = 0.25  # the same, after each trial that has failed, times so much
_SERVED = 0.7  # trials that have served, of those that were expected to: 70 of 100, of 136 (see what_was_tried.md)
_TRIAL_SHARE = 0.05  # of the seconds left that a trial takes
_STEP = 2.0  # factor of the heat, upwards


class HotterTrial(NamedTuple):
    """A trial that is expected to save more seconds than it costs."""

    hotter: Setting
    windows: int
    why: str


class HotterTrials:
    """What an attempt knows of hotter settings: which were too hot, and how many trials have failed."""

    def __init__(
        self, training: Training, heat: Heat, seen: SeenLevels, *, cost_rule: bool = True, useless: float = math.inf
    ) -> None:
        """With `cost_rule`, a trial must be worth its seconds. `useless`: the coolest heat that is known to have brought
        nothing."""
        self._training, self._heat, self._seen = training, heat, seen
        self._cost_rule, self._useless = cost_rule, useless
        self.hurting = math.inf  # the coolest heat that has made the model clearly worse
        self._ceiling = math.inf  # the coolest heat that was too hot, or whose trial has failed
        self.failed = 0  # trials since one has served
        self.quiet = False  # whether the last cooling has shed next to nothing

    def was_too_hot(self, setting: Setting, *, hurts: bool) -> None:
        """The model was better before `setting`; with `hurts`, clearly so."""
        self._ceiling = min(self._ceiling, self._heat.of(setting))
        if hurts:
            self.hurting = min(self.hurting, self._heat.of(setting))

    def worth_trying(self, held: Setting, drift: Drift) -> HotterTrial | None:
        """The trial of a setting hotter than `held`, if there is one, and if it may save more seconds than it costs."""
        training, heat, left, hotter = self._training, self._heat, drift.left, self._heat.scaled(held, _STEP)
        if not heat.of(held) < heat.of(hotter) < self.hurting:
            return None
        likely = likely_seconds(left, self._seen.times[-1], training.job.budget_seconds)
        windows = min(max(_WINDOWS, math.ceil(_TRIAL_SHARE * likely / drift.window_seconds)), 4 * _WINDOWS)
        cost = windows * drift.window_seconds + (2 * training.branch.change_seconds if heat.limits_workers else 0.0)
        chance = _SERVED * self.chance(hotter, held, is_slow=self._is_slow(left))
        saved = likely * (1 - 1 / _STEP) * chance
        # A goal that is reached before a trial would end needs none. A trial that serves costs nothing.
        if left.mean + 2 * left.deviation < cost and self._cost_rule:
            return None
        lost = (1 - chance) * cost
        if saved <= lost and self._cost_rule:
            return None
        why = (
            f"{heat.words(held)} -> {heat.words(hotter)}, on trial for {cost:.0f} s: {likely:.0f} s may be left, "
            f"{left} at this drift; {saved:.0f} s may be saved (chance {chance:.2g}), and {lost:.0f} s lost"
        )
        return HotterTrial(hotter, windows, why)

    def chance(self, hotter: Setting, held: Setting, *, is_slow: bool = False) -> float:
        """That `hotter` serves better than `held`, as far as is known. `is_slow`: the drift at `held` leads nowhere."""
        heat, again = self._heat, _CHANCE_AGAIN**self.failed
        if heat.of(hotter) > 0.99 * self._ceiling:
            again *= _CHANCE_AGAIN
        if heat.expected is None:
            return _CHANCE * again
        if self._is_quiet() or is_slow:
            return _CHANCE_QUIET * again
        chance = heat.expected.chance_above(math.sqrt(heat.of(hotter) * heat.of(held)))
        return chance * again * (_CHANCE if heat.of(hotter) >= self._useless else 1.0)

    def _is_slow(self, left: SecondsLeft) -> bool:
        """Whether the budget ends before the goal, at a drift that noise does not hide, and cooling could do little."""
        training, seen = self._training, self._seen
        is_late = left.mean > 0.99 * (training.job.budget_seconds - seen.times[-1])
        is_small = seen.spread < _QUIET_SHARE * (seen.newest - training.model.gauge.goal(training.model.loss))
        return is_late and is_small and falls(seen.levels)

    def _is_quiet(self) -> bool:
        """Whether noise is not what holds the job up. Then a hotter setting may serve, whatever was expected."""
        learned = self._training.model.gauge.blank_level - self._seen.newest
        if learned <= HELPED_NATS:
            return False  # a dead model is quiet, too
        return self.quiet or self._seen.spread < _QUIET_SHARE * learned < math.inf
