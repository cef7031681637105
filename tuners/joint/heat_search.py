"""Find the heat: the fourth step of `tuners.joint`, from the machines that were chosen to the heat that is held.

The heat comes down while it hurts, then doubles window by window until it brings nothing more. The job continues from the
best model seen, at the heat that made it, or at half of that if twice of it has blown the model up; where none has learned
anything yet, at the hottest that does no harm and that other jobs may well have.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress

from tuners.actions import Evaluate, Rejected, Setting
from tuners.joint.heat import Heat, as_hot
from tuners.joint.learning_model import HELPED_NATS
from tuners.joint.training import Glance, Snapshot, Steps, Training

__all__ = ["HeatSearch"]

_DECADE = 10.0  # factor of the heat, downwards, while it hurts
_LOST_DECADES = 2  # below the start that are tried if nothing has helped
_IDLE = 0.02  # nats of training loss in a window that are no progress
_LITTLE = 0.1  # the same, that are little: a heat four times as high may still be far from too hot
_LEARNED = 0.3  # nats below the blank model: enough to tell whether a model has recovered
_HURT = 0.2  # nats of training loss above the best that are no noise
_EVALUATION_SHARE = 0.5  # of a window: an evaluation that takes longer is not made for a comparison
_STEP = 2.0  # factor of the heat, upwards
_COOLER = 1.05  # a heat is cooler that is so many times lower; less would be tried for nothing
_THROWN_OFF = 1.3  # a training loss so many times that of the untrained model may have lost it
_MAY_SERVE = 0.25  # a chance that the best heat is higher: below, a heat is left that brings no more than noise
_PROBABLE = 0.05  # a chance that the best heat is still higher: what hurts is then not far too hot


class HeatSearch:
    """One search along the axis `heat`, from the present model and setting."""

    def __init__(self, training: Training, heat: Heat, place: Callable[[], Steps[None]]) -> None:
        self._training, self._heat, self._gauge, self._place = training, heat, training.gauge, place
        self.hurting = math.inf  # the coolest heat that is known to hurt
        self.useless = math.inf  # the coolest heat that has brought nothing when it was tried
        self.in_vain = False  # whether the lowest heat of all hurts

    def run(self) -> Steps[None]:
        """Down by decades while the setting hurts, then up until it hurts; go on from the best model.

        Judged by training loss, which every push tells for nothing, so that a step takes no more than two pushes per worker.
        Where no heat from there upwards has helped, decades below are tried, too, unless the first heat was probable.
        """
        training, heat = self._training, self._heat
        yield from training.change(heat.scaled(training.setting, 1.0), "the same effective rate, without momentum")
        seen = yield from self._validated((yield from training.glance()))
        came_down = False
        while self._hurts(seen):
            self.hurting, came_down = heat.of(training.setting), True
            cooler = yield from self._cooler()
            if cooler is None:
                self.in_vain = True
                break
            seen = cooler
        if training.has_arrived:
            return
        start, is_probable = training.setting, heat.expected is not None and self._is_cool(1.0)
        helped, setting, kept = yield from self._rise(seen)
        if not (helped or heat.steps or came_down or is_probable) and training.first is not None:
            found = yield from self._rise_from_below(start)
            if found is not None:
                yield from training.drop(kept)
                setting, kept = found
        # A model that had hardly learned anything is soon as good again although it is ruined.
        learned = self._gauge.blank_level - training.lowest_level
        if kept is not None and not heat.steps and learned > _LEARNED and training.setting != kept.setting:
            now, as_good = heat.words(training.setting), training.lowest_level
            why = f"{now} -> {heat.words(setting)}: the best so far; may the job go on from the present model?"
            if (yield from training.recovers(kept, setting, as_good, why)):
                yield from training.drop(kept)
                return
        why = f"{heat.words(setting)} is the best so far, and the job goes on from its model"
        if kept is not None:
            kept = yield from training.return_to(kept, setting, why)
        else:
            yield from training.insist(setting, why)
        yield from training.drop(kept)

    def _validated(self, seen: Glance) -> Steps[Glance]:
        """What was seen; validated if the heat seems to hurt, because accuracy may rise while the loss is high."""
        training, gauge = self._training, self._gauge
        tells_nothing = training.diverged or math.isfinite(seen.validated) or gauge.target.metric == "loss"
        rate_is_held = self._heat.steps
        if tells_nothing or not (rate_is_held or self._evaluates_soon()) or not self._hurts(seen):
            return seen
        yield from training.evaluate()
        validated = training.level - gauge.untrained_level
        return seen._replace(validated=validated, helps=seen.helps or gauge.has_learned(seen.level, validated))

    def _validated_before(self, kept: Snapshot | None) -> Steps[float]:
        """The level of the model `kept`, above that of the untrained one; 0, where an evaluation would take too long."""
        training, gauge = self._training, self._gauge
        if kept is None or not self._evaluates_soon():
            return 0.0
        with suppress(Rejected):
            found = yield from Evaluate(kept.branch)
            training.seconds += training.job.evaluate_seconds
            return min(gauge.level(found.loss, found.accuracy) - gauge.untrained_level, 0.0)
        return 0.0

    def _evaluates_soon(self) -> bool:
        """Whether an evaluation takes little time, compared with a window."""
        window = 0.0 if self._training.newest is None else self._training.newest.seconds
        return self._training.job.evaluate_seconds <= _EVALUATION_SHARE * window

    def _hurts(self, seen: Glance) -> bool:
        """Whether the present heat makes the model worse than the untrained one, has thrown it far off for good, or has
        undone half of what an earlier window, before machines were chosen or where all waited, had learned."""
        doubt = 3 * seen.doubt  # the untrained loss may have been told by two mini-batches
        thrown_off = math.log(self._training.minibatches.highest / self._gauge.untrained) > max(math.log(_THROWN_OFF), doubt)
        worse = seen.level > max(_HURT, doubt)
        if self._training.diverged or self._is_undone(seen):
            return True
        return (worse or thrown_off) and seen.validated > 0 and not seen.helps

    def _is_undone(self, seen: Glance) -> bool:
        """Whether half of what mini-batches had told to be learned is gone, and of what validations had told, if any."""
        learned = -math.log(max(self._training.minibatches.lowest, 1e-9) / self._gauge.untrained)
        validated = self._training.lowest_level - self._gauge.untrained_level
        half = seen.validated > 0.5 * validated or math.isinf(seen.validated)
        return learned > _HURT and seen.level - seen.noise > -0.5 * learned and half

    def _cooler(self) -> Steps[Glance | None]:
        """Train a little at a tenth of the heat, from the untrained model if it was kept; None where it cannot be lower."""
        training, heat = self._training, self._heat
        probable = heat.expected is not None and heat.expected.chance_above(heat.of(training.setting)) > _PROBABLE
        cooler = heat.scaled(training.setting, _STEP**-2 if probable else 1 / _DECADE)
        if not heat.of(cooler) < heat.of(training.setting) / _COOLER:
            return None
        why = f"{heat.words(training.setting)} -> {heat.words(cooler)}: the model became worse than untrained"
        begun_again = yield from training.begin_again(cooler, why)
        if not begun_again and (training.diverged or not (yield from training.change(cooler, why))):
            return None
        return (yield from self._validated((yield from training.glance())))

    def _is_cool(self, factor: float) -> bool:
        """Whether the best heat is probably `factor` times as high as the present one, or nothing is known of it."""
        expected = self._heat.expected
        return expected is None or expected.chance_above(factor * self._heat.of(self._training.setting)) >= 0.5

    def _may_serve(self) -> bool:
        """Whether the best heat may well be as high as the present one, as far as is known from other jobs."""
        expected = self._heat.expected
        return expected is None or expected.chance_above(self._heat.of(self._training.setting)) > _MAY_SERVE

    def _rise_from_below(self, start: Setting) -> Steps[tuple[Setting, Snapshot | None] | None]:
        """The same from decades below `start`: it may have lost the untrained model at once, and no heat helps it since."""
        yield from self._training.begin_again(start, "no heat has helped: again from the untrained model")
        for _ in range(_LOST_DECADES):
            seen = yield from self._cooler()
            if seen is None:
                return None
            if seen.helps:
                self.hurting = min(self.hurting, _DECADE * self._heat.of(self._training.setting))
                _, setting, kept = yield from self._rise(seen)
                return setting, kept
        return None

    def _rise(self, seen: Glance) -> Steps[tuple[bool, Setting, Snapshot | None]]:
        """Raise the heat until it hurts, or has brought nothing more twice; whether anything was learned, the best setting,
        and a snapshot of its model.

        By four while a window brings little, else by two; a step by four that does not serve is taken back, and halved.
        While nothing happens, the hottest that does no harm is the best, as far as it may well serve: short windows do not
        tell small progress from noise, and a lucky window would choose a heat that learns nothing, or one far too high.
        """
        training, heat = self._training, self._heat
        best, noise, kept = seen.level, seen.noise, (yield from training.snapshot())
        validated = min(seen.validated, 0.0) if math.isfinite(seen.validated) else math.inf
        setting, bad, fallen, halved, blown_up = training.setting, 0, max(-best, 0.0), False, False
        while bad < 2 and not training.diverged:
            if training.cluster_changed and not heat.steps:
                yield from self._place()
                setting = as_hot(heat, training.placed(setting), setting)
            blank = self._gauge.blank_nats  # most of what falls to there is no learning
            idle = min(best - blank, validated, 0.0) > -max(_IDLE, 3 * noise)
            little = (idle or (best - blank > -2 * _LITTLE and fallen < _LITTLE)) and not (bad or halved or heat.steps)
            little = little and self._is_cool(_STEP**2)
            hotter = heat.scaled(training.setting, _STEP**2 if little else _STEP)
            if not heat.of(training.setting) < heat.of(hotter) <= self.hurting / 1.5:
                break
            why = (
                f"{heat.words(training.setting)} -> {heat.words(hotter)}: the loss is {math.exp(best):.3f} of the untrained"
            )
            if not (yield from training.change(hotter, why)):
                break
            seen = yield from training.glance()
            # Where nothing was learned yet, a heat that is hardly probable is to bring more than noise.
            serves = not idle or self._may_serve()
            falls = seen.level < best - (0.0 if serves else 2 * seen.noise)
            first = math.isfinite(seen.validated) and not math.isfinite(validated)
            if first:
                validated = 0.0 if falls else (yield from self._validated_before(kept))
            # Where the job has validated, that counts for more than a few mini-batches, if these do not tell much more. A
            # fall of their loss that may be noise excuses nothing.
            drop = max(best - seen.level - 2 * seen.noise, 0.0)
            clearly = seen.level < best - 2 * seen.noise
            harm = self._gauge.hurt if clearly or (first and validated < 0) else HELPED_NATS / 2
            worse = math.isfinite(seen.validated) and seen.validated > validated + harm + drop
            better = seen.validated < validated - HELPED_NATS or (falls and not worse)
            harmless = idle and serves and not worse and seen.level < min(max(best, blank), 0.0) + 2 * seen.noise
            if (better or harmless) and not training.diverged:
                fallen = best - seen.level
                best, noise, setting, bad = min(best, seen.level), seen.noise, training.setting, 0
                yield from training.drop(kept)
                kept = yield from training.snapshot()
            else:
                hurts = training.diverged or seen.level > best + max(_HURT, 3 * seen.noise)
                blown_up = training.diverged or (hurts and seen.level > 0)
                bad = 2 if hurts or not self._is_cool(1.0) else bad + 1
                self.useless = min(self.useless, heat.of(training.setting))
                if hurts:
                    self.hurting = min(self.hurting, heat.of(training.setting))
                if little and kept is not None and (hurts or best - blank < -HELPED_NATS):
                    why = f"{heat.words(training.setting)} -> {heat.words(setting)}: too large a step"
                    kept, bad, halved = (yield from training.return_to(kept, setting, why)), 0, True
            validated = min(validated, seen.validated)
        if blown_up and not heat.steps and heat.of(training.setting) < 3 * heat.of(setting):
            # A window is too short to tell what is just below the edge of stability.
            self.useless = min(self.useless, heat.of(setting))
            setting = heat.scaled(setting, 0.5)
        return self._gauge.has_learned(best + 2 * noise, validated), setting, kept
