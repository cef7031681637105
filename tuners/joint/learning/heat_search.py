"""Find the heat: the fourth step of `tuners.joint`, from the machines that were chosen to the heat that is held.

The heat comes down while it hurts, then doubles window by window until it brings nothing more. The job continues from the
best model seen, at the heat that made it, or at half of that if twice of it has blown the model up; where none has learned
anything yet, at the hottest that does no harm.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from tuners.actions import Setting
from tuners.joint.job.running_model import Glance
from tuners.joint.job.snapshots import Snapshot
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import Heat, as_hot
from tuners.joint.models.learning_model import HELPED_NATS

__all__ = ["HeatSearch"]

_DECADE = 10.0  # factor of the heat, downwards, while it hurts
_IDLE = 0.02  # nats of training loss in a window that are no progress
_LITTLE = 0.1  # the same, that are little: a heat four times as high may still be far from too hot
_LEARNED = 0.3  # nats below the blank model: enough to tell whether a model has recovered
_HURT = 0.2  # nats of training loss above the best that are no noise
_EVALUATION_SHARE = 0.5  # of a window: an evaluation that takes longer is not made for a comparison
_STEP = 2.0  # factor of the heat, upwards
_COOLER = 1.05  # a heat is cooler that is so many times lower; less would be tried for nothing
_PROBABLE = 0.05  # a chance that the best heat is still higher: what hurts is then not far too hot


class HeatSearch:
    """One search along the axis `heat`, from the present model and setting."""

    def __init__(self, training: Training, heat: Heat, place: Callable[[], Steps[None]]) -> None:
        self._training, self._heat, self._gauge, self._place = training, heat, training.model.gauge, place
        self.hurting = math.inf  # the coolest heat that is known to hurt
        self.useless = math.inf  # the coolest heat that has brought nothing when it was tried
        self.in_vain = False  # whether the lowest heat of all hurts

    def run(self) -> Steps[None]:
        """Down by decades while the setting hurts, then up until it hurts; go on from the best model.

        Judged by training loss, which every push tells for nothing, so that a step takes no more than two pushes per worker.
        """
        training, heat = self._training, self._heat
        branch, model = training.branch, training.model
        yield from branch.change(heat.scaled(branch.setting, 1.0), "the same effective rate, without momentum")
        seen = yield from self._validated((yield from training.glance()))
        while self._hurts(seen):
            self.hurting = heat.of(branch.setting)
            cooler = yield from self._cooler()
            if cooler is None:
                self.in_vain = True
                break
            seen = cooler
        setting, kept = yield from self._rise(seen)
        # A model that had hardly learned anything is soon as good again although it is ruined.
        learned = self._gauge.blank_level - model.lowest_level
        if kept is not None and not heat.steps and learned > _LEARNED and branch.setting != kept.setting:
            now, as_good = heat.words(branch.setting), model.lowest_level
            why = f"{now} -> {heat.words(setting)}: the best so far; may the job go on from the present model?"
            if (yield from training.recovers(kept, setting, as_good, why)):
                yield from training.snapshots.drop(kept)
                return
        why = f"{heat.words(setting)} is the best so far, and the job goes on from its model"
        if kept is not None:
            kept = yield from training.snapshots.return_to(kept, setting, why)
        else:
            yield from branch.insist(setting, why)
        yield from training.snapshots.drop(kept)

    def _validated(self, seen: Glance) -> Steps[Glance]:
        """What was seen; validated if the heat seems to hurt, because accuracy may rise while the loss is high."""
        training, gauge = self._training, self._gauge
        tells_nothing = training.model.diverged or math.isfinite(seen.validated) or gauge.target.metric == "loss"
        rate_is_held = self._heat.steps
        if tells_nothing or not (rate_is_held or self._evaluates_soon()) or not self._hurts(seen):
            return seen
        yield from training.evaluate()
        validated = training.model.level - gauge.untrained_level
        return seen._replace(validated=validated, helps=seen.helps or gauge.has_learned(seen.level, validated))

    def _evaluates_soon(self) -> bool:
        """Whether an evaluation takes little time, compared with a window."""
        window = 0.0 if self._training.model.newest is None else self._training.model.newest.seconds
        return self._training.job.evaluate_seconds <= _EVALUATION_SHARE * window

    def _hurts(self, seen: Glance) -> bool:
        """Whether the model has diverged at the present heat, or is worse than the untrained one."""
        worse = seen.level > max(_HURT, 3 * seen.doubt)  # the untrained loss may have been told by two mini-batches
        return self._training.model.diverged or (worse and seen.validated > 0 and not seen.helps)

    def _cooler(self) -> Steps[Glance | None]:
        """Train a little at a tenth of the heat, from the untrained model if it was kept; None where it cannot be lower."""
        training, heat = self._training, self._heat
        branch = training.branch
        probable = heat.expected is not None and heat.expected.chance_above(heat.of(branch.setting)) > _PROBABLE
        cooler = heat.scaled(branch.setting, _STEP**-2 if probable else 1 / _DECADE)
        if not heat.of(cooler) < heat.of(branch.setting) / _COOLER:
            return None
        why = f"{heat.words(branch.setting)} -> {heat.words(cooler)}: the model became worse than untrained"
        begun_again = yield from training.snapshots.begin_again(cooler, why)
        if not begun_again and (training.model.diverged or not (yield from branch.change(cooler, why))):
            return None
        return (yield from self._validated((yield from training.glance())))

    def _is_cool(self, factor: float) -> bool:
        """Whether the best heat is probably `factor` times as high as the present one, or nothing is known of it."""
        expected = self._heat.expected
        return expected is None or expected.chance_above(factor * self._heat.of(self._training.branch.setting)) >= 0.5

    def _rise(self, seen: Glance) -> Steps[tuple[Setting, Snapshot | None]]:
        """Raise the heat until it hurts, or has brought nothing more twice; the best setting, and a snapshot of its model.

        By four while a window brings little, else by two; a step by four that does not serve is taken back, and halved.
        While nothing happens, the hottest that does no harm is the best: short windows do not tell small progress from
        noise, and a lucky window would choose a heat that learns nothing.
        """
        training, heat = self._training, self._heat
        branch, model = training.branch, training.model
        best, noise, kept = seen.level, seen.noise, (yield from training.snapshots.take())
        validated = min(seen.validated, 0.0)
        setting, bad, fallen, halved, blown_up = branch.setting, 0, max(-best, 0.0), False, False
        while bad < 2 and not model.diverged:
            if branch.cluster_changed and not heat.steps:
                yield from self._place()
                setting = as_hot(heat, branch.placed(setting), setting)
            blank = self._gauge.blank_nats  # most of what falls to there is no learning
            idle = min(best - blank, validated, 0.0) > -max(_IDLE, 3 * noise)
            little = (idle or (best - blank > -2 * _LITTLE and fallen < _LITTLE)) and not (bad or halved or heat.steps)
            little = little and self._is_cool(_STEP**2)
            hotter = heat.scaled(branch.setting, _STEP**2 if little else _STEP)
            if not heat.of(branch.setting) < heat.of(hotter) <= self.hurting / 1.5:
                break
            why = f"{heat.words(branch.setting)} -> {heat.words(hotter)}: the loss is {math.exp(best):.3f} of the untrained"
            if not (yield from branch.change(hotter, why)):
                break
            seen = yield from training.glance()
            # What the job has validated counts for more than a few mini-batches, unless their loss clearly falls.
            harm = self._gauge.hurt if seen.level < best - 2 * seen.noise else HELPED_NATS / 2
            worse = math.isfinite(seen.validated) and seen.validated > validated + harm
            better = seen.validated < validated - HELPED_NATS or (seen.level < best and not worse)
            harmless = idle and not worse and seen.level < min(max(best, blank), 0.0) + 2 * seen.noise
            if (better or harmless) and not model.diverged:
                fallen = best - seen.level
                best, noise, setting, bad = min(best, seen.level), seen.noise, branch.setting, 0
                yield from training.snapshots.drop(kept)
                kept = yield from training.snapshots.take()
            else:
                hurts = model.diverged or seen.level > best + max(_HURT, 3 * seen.noise)
                blown_up = model.diverged or (hurts and seen.level > 0)
                bad = 2 if hurts or not self._is_cool(1.0) else bad + 1
                self.useless = min(self.useless, heat.of(branch.setting))
                if hurts:
                    self.hurting = min(self.hurting, heat.of(branch.setting))
                if little and kept is not None and (hurts or best - blank < -HELPED_NATS):
                    why = f"{heat.words(branch.setting)} -> {heat.words(setting)}: too large a step"
                    kept, bad, halved = (yield from training.snapshots.return_to(kept, setting, why)), 0, True
            validated = min(validated, seen.validated)
        if blown_up and not heat.steps and heat.of(branch.setting) < 3 * heat.of(setting):
            # A window is too short to tell what is just below the edge of stability.
            self.useless = min(self.useless, heat.of(setting))
            setting = heat.scaled(setting, 0.5)
        return setting, kept
