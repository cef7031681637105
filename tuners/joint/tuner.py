"""`joint`: every free knob by one rule.

    expected seconds left = pushes left (learning model) x seconds per push (system model)

over schedules of settings: warm up, hold the hottest setting that serves, cool when noise is all that is left. A change is
made only where it is expected to save more than it costs. In the order in which a job meets them:

1. *Placement only*: where nothing is free that learning depends on, and the job counts work or loads are free, the exact
   methods of Cruise take over, or those of the bespoke BO. Changes are made by the cheapest method that the job offers.
2. *Nobody waits* (`JointCourse.begin`): first, a job whose changes are restarts and that tells nothing to predict a saving
   from goes on as it began. Else the policy that lets every worker go on, if it is free. A rate far from those that were
   best in other jobs (`tuners.joint.rate_prior`) is left for the cooler half of them. Where workers take local steps, these
   are few until their time is known, and the servers' rate for what they have changed is the usual one.
3. *System* (`JointCourse.place`): after one and a half pushes per worker the system model knows compute, pull and push
   seconds. The setting with the most progress per second, also in local steps of a push, is chosen by the cheapest method,
   verified, and taken back if it is worse. The same again whenever machines come or go, or pushes have become much slower
   or faster. Where waiting for each other takes hardly any time, because servers are the bottleneck, all workers wait after
   all (`JointCourse.wait`).
   Machines may both work and serve, or be given back (`tuners.joint.roles`); where the cheapest run is wanted, progress per
   USD counts. Of embedding tables, hot blocks move, and workers may keep copies of rows (`tuners.joint.tables`).
4. *Heat* (`JointCourse.find_heat`): the setting (`tuners.joint.heat`) comes down while it hurts, by four where it was
   probable and by decades below, then doubles window by window until it brings nothing more. The job continues from the
   best model seen, at the heat that made it, or at half of that if twice of it has blown the model up; where none has
   learned anything yet, at the hottest that does no harm. To give every class its frequency is not learning. Races of
   short forks would not do: they always prefer the cooler setting, because it sheds noise at once.
   Where the rate is held and policies may be installed, this and the next step are `tuners.joint.waiting` instead: how many
   gradients are computed at once.
5. *Hold and cool* (`JointCourse.learn`, `tuners.joint.holding`): hold the heat while the level drifts down, and double it
   where the seconds that this would save are worth the trial. Halve it where noise hides all drift. Cool by halves when the
   measured noise is all that separates the level from the goal and the drift would take longer, or when the drift has
   stopped. Return to a snapshot when half of what was learned is lost or the job has diverged, to an early one when it has
   over-fitted. A model that a hot window has thrown off is kept where it is soon as good as before.

The interval of checkpoints, where servers have no replicas, is chosen beside all this (`tuners.joint.checkpoints`). How soon
machines are lost again counts in 3 and in the interval (`tuners.joint.losses`).

Forks serve as snapshots only, so they cost little; without room for them the heat changes in place. Every decision carries
its numbers, as the reason of the action that it leads to.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import replace
from itertools import cycle, product
from typing import Any

from tuners.actions import Job, Setting, Tuner
from tuners.applicability import no_knob_is_free, nothing_to_tune_if
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.schedules import is_free as loads_are_free
from tuners.cruise import cruise
from tuners.joint.checkpoints import with_checkpoints
from tuners.joint.heat import Heat, PolicyHeat, RateHeat, heat, outer_heat
from tuners.joint.holding import Holding, RuleParts
from tuners.joint.learning_model import HELPED_NATS
from tuners.joint.roles import RoleSearch
from tuners.joint.system_model import SystemModel, waits
from tuners.joint.tables import BlockModel
from tuners.joint.training import Glance, JobOver, Snapshot, Steps, Training, changed_cheaply
from tuners.joint.waiting import Waiting
from tuners.settings import BOUNDED, Choice, Real

__all__ = ["JointCourse", "joint"]

_LEARNING = ("learning_rate", "momentum", "batch_size", "policy", "staleness")
_SYSTEM = ("worker_count", "role", "transfer_bits", "batch_size", "intra_threads", "local_steps")
_BATCH_GAIN = 0.5  # a mini-batch of b samples adds b^0.5 to the progress of a push
_MANY_STEPS = 16  # local steps of a push whose copies are so far apart that it brings half of what as many pushes would
_FIRST_STEPS = 8  # local steps of the first windows, at most
_WORTH = 1.07  # predicted gain of a change of the system that is worth its risk
_MOST_SPLITS = 400  # roles of machines that are compared
_CHANGE_SECONDS = 15.0  # of a change of the system, until one was measured
_EVALUATION_SHARE = 0.01  # of the seconds left that the first evaluation may take
_LEFT_SHARE = 0.2  # of the budget: how long the job is expected to last, until its drift was measured
_BATCHES = 3  # mini-batches per worker before roles are chosen: with Cruise's 10, much of a short job is over by then
_TRUSTED = 2.0  # times as few workers as at the start: what the progress of a push is trusted to be known for
_SLOWEST = 0.6  # of the highest progress per second: what the cheapest run makes at least, as it has to end in time
_UNDERESTIMATED = 1.9  # times that pushes of workers that wait were at most faster than predicted
_COPIED = 4  # mini-batches for which workers keep copies of rows
_WORTH_WAITING = 1.2  # times the progress for which all workers wait for each other
_DECADE = 10.0  # factor of the heat, downwards, while it hurts
_LOST_DECADES = 2  # below the start that are tried if nothing has helped
_DECADES = (0.1, 10.0, 0.01, 100.0, 1e-3, 1e3, 1e-4)  # factors of a heat at which nothing was learned: outwards from it
_IDLE = 0.02  # nats of training loss in a window that are no progress
_LITTLE = 0.1  # the same, that are little: a heat four times as high may still be far from too hot
_LOOK_AGAIN = 1.25  # times as late as before: whether machines that were left alone are worth a change by now
_CHOICES = 3  # of the system in a row
_AS_PREDICTED = 0.7  # of the predicted progress: less of it tells that the system model did not know the setting
_LEARNED = 0.3  # nats below the blank model: enough to tell whether a model has recovered
_HURT = 0.2  # nats of training loss above the best that are no noise
_STEP = 2.0  # factor of the heat, upwards
_THROWN_OFF = 1.3  # a training loss so many times that of the untrained model may have lost it
_COOLER_DEVIATIONS = 0.5  # below the median of what is expected: heat that is too low costs less than one that is too high
_PROBABLE = 0.05  # a chance that the best heat is still higher: what hurts is then not far too hot
_RESTARTS = (0.5, 2.0, 0.7, 1.4, 0.35, 2.8)  # factors of the heat, from one restart to the next; 1 would repeat itself


@nothing_to_tune_if(no_knob_is_free)
def joint(
    job: Job,
    *,
    system_model: bool = True,
    schedules: bool = True,
    cost_rule: bool = True,
    snapshots: bool = True,
    one_setting: bool = False,
    prior: bool = True,
) -> Tuner:
    """Tune every free knob of `job` by expected seconds left. A job without free knobs runs as it is.

    Args:
        system_model: Whether roles, batch, threads and bits are chosen by the system model; otherwise they stay.
        schedules: Whether the heat is cooled when noise is all that is left.
        cost_rule: Whether a trial or a change must save more than it costs; otherwise all of them are made.
        snapshots: Whether the job may go back to earlier models; otherwise settings change in place.
        one_setting: Whether the setting with the best first windows is kept to the end.
        prior: Whether the search for the rate begins where other jobs had their best one; otherwise at the start's.
    """
    space = job.space
    if not space.knobs:
        return
    places_only = not any(space.knob(name) for name in _LEARNING) and (space.frees("role") or space.frees("load"))
    if places_only and not job.blocks and (job.target.counts or loads_are_free(job)):
        if loads_are_free(job):
            yield from changed_cheaply(job, bespoke_bo(job))
        else:
            yield from changed_cheaply(job, cruise(job, batches=_BATCHES, warmup=1, least=2))
        return
    parts = RuleParts(system_model, schedules, cost_rule, snapshots, one_setting, prior)
    course = JointCourse(job, parts)
    yield from with_checkpoints(job, course.play(), course.training.losses)


class JointCourse:
    """The course of one job."""

    def __init__(self, job: Job, parts: RuleParts) -> None:
        self.job, self.parts, self.system, self.tables = job, parts, SystemModel(job), BlockModel(job)
        self.training = Training(job, self.system, snapshots=parts.snapshots)
        self.gauge = self.training.gauge
        self.heat: Heat | None = None if job.target.counts else heat(job, self._best, prior=parts.prior)
        self.first: Snapshot | None = None  # the untrained model
        self.hurting = math.inf  # the coolest heat that is known to hurt
        self.useless = math.inf  # the coolest heat that has brought nothing when it was tried
        self.placed = False  # whether machines were chosen before
        self.unit = "second" if job.target.minimise == "seconds" else "USD"
        self.cap = len(job.start.workers) if self.heat is not None and self.heat.limits_workers else len(job.nodes)

    def play(self) -> Tuner:
        """Tune until the job ends."""
        try:
            if not (yield from self.may_pay()):
                return
            yield from self.begin()
            if not self.job.target.counts and (self.heat is not None or self.job.space.frees("role")):
                self.first = yield from self.training.snapshot()
            yield from self.measure()
            yield from self.place()
            yield from self.keep_copies()
            yield from self.wait()
            if isinstance(self.heat, PolicyHeat) and self.job.installs_policies:
                cost_rule = self.parts.cost_rule
                yield from Waiting(
                    self.job, self.training, self.system, self.place_anew, self.first, cost_rule=cost_rule
                ).run()
            if self.heat is not None:
                yield from self.find_heat(self.heat)
                if not self.parts.one_setting:
                    yield from self.learn(self.heat)
            yield from self.go_on()
        except JobOver:
            return

    def go_on(self) -> Steps[None]:
        """Train to the end, where no heat is free or all of it was tried; machines and blocks are still placed."""
        training = self.training
        looked = learned = training.seconds
        while True:
            # Machines that are back may be away again soon.
            rounds = 0.25 if self.lacks_machines else 1.0 if self.job.space.frees("role") else 4.0
            yield from training.run(math.ceil(rounds * len(training.setting.workers)))
            learned = training.seconds if self.has_learned else learned
            # Longer than that the job was not expected to last.
            lost = training.seconds - learned > _LEFT_SHARE * self.job.budget_seconds and self.heat is None
            if lost and self.first is not None and len(training.setting.workers) > 1:
                learned, workers = training.seconds, len(training.setting.workers)
                self.cap = max(1, workers // 2)
                best, why = self._best(self.cap), f"nothing was learned by {workers} workers; again from the untrained model"
                self.first = yield from training.return_to(self.first, best, why)
            elif training.cluster_changed or (self.lacks_machines and training.seconds > _LOOK_AGAIN * looked):
                looked = training.seconds  # how long machines last is known better
                yield from self.place_anew()
            elif self.job.blocks and training.newest is not None:
                self.tables.learn(training.setting, training.newest)
                if training.seconds > 2 * looked:  # loads are known better
                    looked = training.seconds
                    yield from self.place()

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

    # ------------------------------------------------------------------------------------------------ 2. nobody waits

    def begin(self) -> Steps[None]:
        """Let no worker wait, where that is free, because heat is searched next and makes up for staleness."""
        setting, space = self.job.start, self.job.space
        policies = _options(space.knob("policy"))
        staleness = space.knob("staleness")
        if "asp" in policies or (policies and self.job.installs_policies):
            setting = replace(setting, policy="asp")
        elif staleness is not None:
            setting = replace(setting, policy=next((p for p in BOUNDED if p in policies), setting.policy))
        if staleness is not None and setting.policy in BOUNDED:
            setting = replace(setting, staleness=int(_highest(staleness)))
        yield from self.training.change(setting, "nobody waits: the heat is searched next, and makes up for staleness")
        yield from self._begin_local_steps()
        if self.heat is not None:
            yield from self._begin_where_probable(self.heat)
        # The first mini-batches tell the loss of the untrained model, too, but with more noise.
        if self.heat is not None and self.job.evaluate_seconds < _EVALUATION_SHARE * self._seconds_left():
            yield from self.training.evaluate()
            self.gauge.begin(self.training.loss, self.training.accuracy)

    def _begin_local_steps(self) -> Steps[None]:
        """Where local steps are free: few of them until it is known what they take, with the usual outer optimizer."""
        setting, knob, outer = self.training.setting, self.job.space.knob("local_steps"), outer_heat(self.job)
        if knob is not None:
            setting = replace(setting, local_steps=int(knob.nearest(min(setting.local_steps, _FIRST_STEPS))), node_steps=())
        if outer is not None and outer.expected is not None and self.parts.prior:
            setting = outer.scaled(setting, outer.expected.median / outer.of(setting))
        yield from self.training.change(setting, "few local steps until their time is known; the usual outer rate")

    def _begin_where_probable(self, heat: Heat) -> Steps[None]:
        """Leave a start that is hotter or cooler than the best heats of most jobs, for the cooler half of these."""
        training, expected = self.training, heat.expected
        if expected is None:
            return
        wanted = expected.median * math.exp(-_COOLER_DEVIATIONS * expected.deviation)
        here = heat.of(training.setting)
        if abs(math.log(here / wanted)) <= _COOLER_DEVIATIONS * expected.deviation:
            return
        setting = heat.scaled(training.setting, wanted / here)
        why = (
            f"{heat.words(training.setting)} -> {heat.words(setting)}: {expected.median:.3g} was the best of other jobs, "
            f"within a factor of {math.exp(expected.deviation):.2g} of two in three"
        )
        yield from training.change(setting, why)

    # ------------------------------------------------------------------------------------------------------ 3. system

    def place(self) -> Steps[None]:
        """Choose what the system model says is best, once it knows the machines; take it back if it is worse.

        Where a choice is kept that is much slower than predicted, the model has learned what it did not know: choose again.
        """
        for _ in range(_CHOICES):
            if not (yield from self._choose()):
                return

    def _choose(self) -> Steps[bool]:
        """Make one choice; whether it is kept, and far from what the system model had predicted."""
        training = self.training
        training.cluster_changed = False
        if training.diverged or not self.parts.system_model:
            return False
        if self.job.blocks:
            yield from self.place_blocks()
            return False
        if not (self.places_are_free or self.lacks_machines):
            return False
        before, here, usual = training.setting, self._worth(training.setting), training.usual_push_seconds
        best = self._best(self.cap)
        gain = self._worth(best) / here if here > 0 else math.inf
        left, cost = self._seconds_left(), training.change_seconds or _CHANGE_SECONDS
        lasts = min(left, training.losses.lifetime_seconds(_machines(best) - _machines(before)))
        saved = lasts * (1 - 1 / gain) if gain > 0 else 0.0
        worth = gain > _WORTH and saved > cost if self.parts.cost_rule else gain > 1
        stranded = not training.available.issuperset(_machines(before))  # no other change is accepted then
        if best == before or not (worth or stranded):
            return False
        why = (
            f"{self._words(before)} -> {self._words(best)}: {left / gain:.0f} s left instead of {left:.0f}, "
            f"{gain:.2f} times the progress per {self.unit}; the change costs {cost:.0f} s"
        )
        if lasts < left:
            why += f", and its machines may be lost again after {lasts:.0f} s"
        if stranded:
            why = f"a machine is not available any more: {self._words(before)} -> {self._words(best)}"
        anew, self.placed = self.heat is None and not (self.placed or self.has_learned), True
        if anew and self.first is not None and len(best.workers) < len(before.workers):
            # It loses nothing, and staleness may have spoilt it for good.
            self.first = yield from training.return_to(self.first, best, f"{why}; from the untrained model")
            changed = training.setting == best
        else:
            changed = yield from training.change(best, why)
        if not changed:
            # While the system makes up for a loss, no change is accepted: ask again after the next window.
            training.cluster_changed = training.newest is not None and bool(training.newest.events)
            return False
        predicted = self._worth(best)
        yield from self.measure()
        seen = self._worth(training.setting)
        if training.diverged or training.cluster_changed:
            return False
        if seen < here and not stranded:
            why = f"taken back: {seen / here:.2f} times the progress per {self.unit} of {self._words(before)}"
            yield from training.change(before, why)
            training.usual_push_seconds = usual
            return False
        return seen < _AS_PREDICTED * predicted

    @property
    def has_learned(self) -> bool:
        """Whether the newest mini-batches were clearly better than those of a model that knows nothing."""
        loss = self.training.training_loss
        return not 0 < loss < math.inf or self.gauge.has_learned(math.log(loss / self.gauge.untrained))

    @property
    def places_are_free(self) -> bool:
        """Whether anything is free that the system model chooses."""
        return any(self.job.space.frees(name) for name in _SYSTEM)

    @property
    def lacks_machines(self) -> bool:
        """Whether machines of the start are gone, or are back and not used again."""
        start, now = self.job.start, self.training.setting
        return not self.places_are_free and (set(start.workers), set(start.servers)) != (set(now.workers), set(now.servers))

    def place_blocks(self) -> Steps[None]:
        """Move hot blocks of embedding tables to machines that have less to do, as many as save more time than they take."""
        training, left = self.training, self._seconds_left()
        found = self.tables.best(training.setting, left)
        if found is None or found.gain <= _WORTH:
            return
        why = (
            f"{found.blocks} blocks move to {len(found.setting.servers)} servers: {found.gain:.2f} times as many pushes, "
            f"{left / found.gain:.0f} s left instead of {left:.0f}; this takes {found.cost_seconds:.0f} s"
        )
        began = training.seconds
        if (yield from training.change(found.setting, why)):
            self.tables.moved(found, training.seconds - began)
            yield from self.measure()

    def keep_copies(self) -> Steps[None]:
        """Let workers keep copies of popular rows for a few mini-batches, if they are then seen to push more often.

        That takes effect at once and moves nothing, so it is tried; copies make gradients as stale as some more workers do.
        """
        training, rows, clocks = self.training, self.job.space.knob("cache_rows"), self.job.space.knob("cache_clocks")
        before, workers = training.setting, len(training.setting.workers)
        if rows is None or clocks is None or before.cache_rows or isinstance(rows, Real) or isinstance(clocks, Real):
            return
        wanted = replace(before, cache_rows=int(_highest(rows)), cache_clocks=int(clocks.nearest(_COPIED)))
        gain = self.tables.copies_gain(before, 1 / (1 + wanted.cache_clocks))
        if not self.parts.system_model or training.diverged or gain < _WORTH:
            return
        yield from training.run(
            2 * workers, "may workers keep copies of popular rows? First, how often they push as they are"
        )
        alone, why = training.push_seconds, f"copies of {wanted.cache_rows} rows for {wanted.cache_clocks} mini-batches"
        if not (yield from training.change(wanted, f"{why}, on trial: at most {gain:.2f} times as many pushes")):
            return
        yield from training.run(2 * workers)  # workers have no copies yet
        yield from training.run(2 * workers)
        seen = alone / training.push_seconds if training.push_seconds else 0.0
        if seen < _WORTH:
            yield from training.change(
                replace(training.setting, cache_rows=0), f"taken back: {seen:.2f} times as many pushes"
            )

    def measure(self) -> Steps[None]:
        """Train until pushes were measured that began under the present setting; in vain, twice as long at the most."""
        setting = self.training.setting
        clocks = math.ceil((1.0 if waits(setting) else 1.5) * len(setting.workers))
        yield from self.training.run(clocks)
        # First cycles that began with another number of local steps do not count.
        if not self.training.measured and (self.system.knows or setting.local_steps != self.job.start.local_steps):
            yield from self.training.run(clocks)
        self.training.usual_push_seconds = self.training.push_seconds
        if self.training.newest is not None:
            self.tables.learn(self.training.setting, self.training.newest)

    def wait(self) -> Steps[None]:
        """Let all workers wait for each other after all, where that costs less time than staleness does.

        Where none of k workers waits, a gradient is k - 1 updates old, and the highest stable rate per push is pi / (2k - 1)
        of the inverse curvature; where all wait, and one update is made of k pushes, it is 2 / k. Where servers are the
        bottleneck, waiting may take no time at all. Workers that do not wait do not tell that well, so it is tried.
        """
        training, heat = self.training, self.heat
        waiting, workers = self._waiting(training.setting), len(training.setting.workers)
        if not isinstance(heat, RateHeat) or waiting is None or workers < 2 or not self.parts.system_model:
            return
        if training.diverged or not self.system.knows:
            return
        stable = 4 / math.pi * (workers - 0.5) / workers  # the highest rate per push, over that of workers that do not wait
        gain = stable * self.system.push_seconds(training.setting) / self.system.push_seconds(waiting)
        if _UNDERESTIMATED * gain < _WORTH_WAITING:
            return
        yield from training.run(2 * workers, "may all workers wait for each other? First, how often they push as they are")
        before, alone, waiting = training.setting, training.push_seconds, self._waiting(training.setting)
        why = f"on trial: progress may be {gain:.2f} to {_UNDERESTIMATED * gain:.2f} times as fast if workers wait"
        if training.diverged or waiting is None or not (yield from training.change(waiting, why)):
            return
        yield from training.run(workers)  # these were begun before
        yield from training.run(2 * workers)
        gain = stable * alone / training.push_seconds
        if training.diverged or gain < _WORTH_WAITING:
            why = f"taken back: where all wait for each other, progress is {gain:.2f} times as fast"
            yield from training.change(training.placed(before), why)
            return
        training.usual_push_seconds = training.push_seconds
        if heat.expected is not None:
            # An update is the mean of so many pushes: the best rate is between as high as before and so many times as high.
            median = heat.expected.median * math.sqrt(workers)
            self.heat = replace(heat, expected=heat.expected._replace(median=median))

    def _waiting(self, setting: Setting) -> Setting | None:
        """`setting` with workers that wait for each other after every push; None where they do already, or cannot."""
        policies, staleness = _options(self.job.space.knob("policy")), self.job.space.knob("staleness")
        if waits(setting):
            return None
        if "bsp" in policies:
            return replace(setting, policy="bsp")
        if "ssp" in (*policies, setting.policy) and staleness is not None and _lowest(staleness) == 0:
            return replace(setting, policy="ssp", staleness=0)
        return None

    def _words(self, setting: Setting) -> str:
        """What the system model predicts for `setting`."""
        roles = f"{len(setting.workers)} workers, {len(setting.servers)} servers"
        kinds = f"batch {setting.batch_size}, {setting.transfer_bits} bits"
        return f"{roles}, {kinds} ({self.system.push_seconds(setting):.3g} s per push)"

    def _seconds_left(self) -> float:
        """Until the job ends, before any drift was measured."""
        return min(self.job.budget_seconds - self.training.seconds, _LEFT_SHARE * self.job.budget_seconds)

    def _progress(self, setting: Setting) -> float:
        """Progress per second, up to a factor; for a job that counts, of what it counts."""
        if self.job.target.metric == "samples":
            return self.system.samples_per_second(setting)
        gain = 1.0
        if not self.job.target.counts:
            gain = float(setting.batch_size**_BATCH_GAIN) * setting.local_steps / (1 + setting.local_steps / _MANY_STEPS)
        if self.heat is None and not self.job.target.counts:
            # Nothing makes up for staleness: the gradients of all workers are at one model, as those of a larger mini-batch.
            gain *= len(setting.workers) ** (_BATCH_GAIN - 1)
        return gain / self.system.push_seconds(setting) * self.training.losses.productive(setting.servers)

    def _worth(self, setting: Setting) -> float:
        """Progress per second, or per USD where the cheapest run is wanted, up to a factor."""
        return self._progress(setting) / self._price(setting)

    def _price(self, setting: Setting) -> float:
        """USD per hour where the cheapest run is wanted and they are known; else 1."""
        usd = self.job.prices.setting_rate(setting).usd_per_hour if self.job.target.minimise == "usd" else 1.0
        return usd if usd > 0 else 1.0

    def _best(self, most_workers: int) -> Setting:
        """The setting of the system with the most progress per second, or per USD, with at most so many workers."""
        now = self.training.setting
        found = max((s for s in self._candidates() if len(s.workers) <= most_workers), key=self._progress, default=now)
        kinds = {option for k in self.job.space.knobs if k.name.startswith("role/") for option in _options(k)}
        if not kinds & {"both", "idle"}:
            return found
        # A run that is cheap must still end in time.
        least = _SLOWEST * self._progress(found) if self.job.target.minimise == "usd" else 0.0
        fewest = 0.0 if self.job.target.counts else min(len(self.job.start.workers) / _TRUSTED, most_workers)

        def value(setting: Setting) -> float:
            progress = self._progress(setting) if fewest <= len(setting.workers) <= most_workers else 0.0
            return progress / self._price(setting) if progress >= least else 0.0

        return RoleSearch(self.job, now, self.training.available).best(found, value)

    def _candidates(self) -> Iterator[Setting]:
        """Settings of the system on the machines that are there."""
        space, now = self.job.space, self.training.setting
        bits = _options(space.knob("transfer_bits")) or [now.transfer_bits]
        sizes = _options(space.knob("batch_size")) or [now.batch_size]
        threads = space.knob("intra_threads")
        intra = sorted({now.intra_threads, int(_highest(threads))}) if threads is not None else [now.intra_threads]
        for roles in self._placements():
            for b in bits:
                for size in sizes:
                    for t, steps in product(intra, self._local_steps()):
                        yield replace(roles, transfer_bits=int(b), batch_size=int(size), intra_threads=t, local_steps=steps)

    def _local_steps(self) -> list[int]:
        """Numbers of local steps, each about 1.4 times as many as the one before; the present one where none are free."""
        knob = self.job.space.knob("local_steps")
        if knob is None:
            return [self.training.setting.local_steps]
        most = int(math.log2(_highest(knob)) * 2)
        return sorted({int(knob.nearest(2 ** (half / 2))) for half in range(most + 1)})

    def _placements(self) -> Iterator[Setting]:
        """The present setting with other roles, as far as these are free, on the machines that are there."""
        now, names = self.training.setting, [n.name for n in self.job.nodes]
        count = self.job.space.knob("worker_count")
        found: Iterable[Setting] = ()
        if count is not None:
            counts = _options(count) or range(int(_lowest(count)), int(_highest(count)) + 1)
            found = (_with_roles(now, names[: int(c)], names[int(c) :]) for c in counts)
        elif self.job.space.frees("role"):
            found = self._splits()
        else:  # the system has dropped machines that it has lost; when they are back, they have to be asked for
            start = self.job.start
            found = (replace(now, workers=start.workers, servers=start.servers, model_shares=start.model_shares),)
        for setting in (now, *found):
            if setting.workers and setting.servers and {*setting.workers, *setting.servers} <= self.training.available:
                yield setting

    def _splits(self) -> Iterator[Setting]:
        """Every number of workers of each type of machine; the other machines serve, as much as their NICs carry."""
        now, nodes = self.training.setting, [n for n in self.job.nodes if n.name in self.training.available]
        # Present workers first and servers last, so that as few machines as possible change their role.
        order = sorted(nodes, key=lambda n: (n.name in now.servers, n.name not in now.workers))
        kinds = [[n for n in order if n.type == kind] for kind in dict.fromkeys(n.type for n in nodes)]
        step = max(1, math.ceil((math.prod(len(k) + 1 for k in kinds) / _MOST_SPLITS) ** (1 / len(kinds))))
        for counts in product(*(range(0, len(k) + 1, step) for k in kinds)):
            workers = [n.name for k, c in zip(kinds, counts, strict=True) for n in k[:c]]
            servers = [n for k, c in zip(kinds, counts, strict=True) for n in k[c:]]
            carried = sum(n.nic_bytes_per_second for n in servers)
            shares = tuple(n.nic_bytes_per_second / carried for n in servers)
            uneven = len({n.nic_bytes_per_second for n in servers}) > 1
            split = replace(_with_roles(now, workers, [n.name for n in servers]), model_shares=shares if uneven else ())
            if self.job.space.admits(split):
                yield split

    # -------------------------------------------------------------------------------------------------------- 4. heat

    def find_heat(self, heat: Heat) -> Steps[None]:
        """Down by decades while the setting hurts, then up until it hurts; go on from the best model.

        Judged by training loss, which every push tells for nothing, so that a step takes no more than two pushes per worker.
        Where no heat from there upwards has helped, decades below are tried, too, unless the first heat was probable.
        """
        training = self.training
        yield from training.change(heat.scaled(training.setting, 1.0), "the same effective rate, without momentum")
        seen = yield from training.glance()
        came_down = False
        while self._hurts(seen):
            self.hurting, came_down = heat.of(training.setting), True
            cooler = yield from self._cooler(heat)
            if cooler is None:
                break
            seen = cooler
        start, is_probable = training.setting, heat.expected is not None and self._is_cool(heat, 1.0)
        helped, setting, kept = yield from self._rise(heat, seen)
        if not (helped or heat.steps or came_down or is_probable) and self.first is not None:
            found = yield from self._rise_from_below(heat, start, self.first)
            if found is not None:
                yield from training.drop(kept)
                setting, kept = found
        # A model that had hardly learned anything is soon as good again although it is ruined.
        learned = self.gauge.blank_level - training.lowest_level
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
            yield from training.change(setting, why)
        yield from training.drop(kept)

    def _hurts(self, seen: Glance) -> bool:
        """Whether the present heat makes the model worse than the untrained one, has thrown it far off for good, or has
        undone half of what an earlier window, before machines were chosen or where all waited, had learned."""
        doubt = 3 * seen.doubt  # the untrained loss may have been told by two mini-batches
        thrown_off = math.log(self.training.highest_loss / self.gauge.untrained) > max(math.log(_THROWN_OFF), doubt)
        worse = seen.level > max(_HURT, doubt)
        if self.training.diverged or self._is_undone(seen):
            return True
        return (worse or thrown_off) and seen.validated > 0 and not seen.helps

    def _is_undone(self, seen: Glance) -> bool:
        """Whether half of what mini-batches had told to be learned is gone, and of what validations had told, if any."""
        learned = -math.log(max(self.training.lowest_loss, 1e-9) / self.gauge.untrained)
        validated = self.training.lowest_level - self.gauge.untrained_level
        half = seen.validated > 0.5 * validated or math.isinf(seen.validated)
        return learned > _HURT and seen.level - seen.noise > -0.5 * learned and half

    def _cooler(self, heat: Heat) -> Steps[Glance | None]:
        """Train a little at a tenth of the heat, from the untrained model if it was kept; None where it cannot be lower."""
        training = self.training
        probable = heat.expected is not None and heat.expected.chance_above(heat.of(training.setting)) > _PROBABLE
        cooler = heat.scaled(training.setting, _STEP**-2 if probable else 1 / _DECADE)
        if heat.of(cooler) >= heat.of(training.setting):
            return None
        why = f"{heat.words(training.setting)} -> {heat.words(cooler)}: the model became worse than untrained"
        if self.first is not None:
            self.first = yield from training.return_to(self.first, cooler, why)
        elif training.diverged or not (yield from training.change(cooler, why)):
            return None
        return (yield from training.glance())

    def _is_cool(self, heat: Heat, factor: float) -> bool:
        """Whether the best heat is probably `factor` times as high as the present one, or nothing is known of it."""
        expected = heat.expected
        return expected is None or expected.chance_above(factor * heat.of(self.training.setting)) >= 0.5

    def _rise_from_below(self, heat: Heat, start: Setting, first: Snapshot) -> Steps[tuple[Setting, Snapshot | None] | None]:
        """The same from decades below `start`: it may have lost the untrained model at once, and no heat helps it since."""
        why = "no heat has helped: again from the untrained model"
        self.first = yield from self.training.return_to(first, start, why)
        for _ in range(_LOST_DECADES):
            seen = yield from self._cooler(heat)
            if seen is None:
                return None
            if seen.helps:
                self.hurting = min(self.hurting, _DECADE * heat.of(self.training.setting))
                _, setting, kept = yield from self._rise(heat, seen)
                return setting, kept
        return None

    def _rise(self, heat: Heat, seen: Glance) -> Steps[tuple[bool, Setting, Snapshot | None]]:
        """Raise the heat until it hurts, or has brought nothing more twice; whether anything was learned, the best setting,
        and a snapshot of its model.

        By four while a window brings little, else by two; a step by four that does not serve is taken back, and halved.
        While nothing happens, the hottest that does no harm is the best: short windows do not tell small progress from
        noise, and a lucky window would choose a heat that learns nothing.
        """
        training = self.training
        best, noise, validated, kept = seen.level, seen.noise, seen.validated, (yield from training.snapshot())
        setting, bad, fallen, halved, blown_up = training.setting, 0, max(-best, 0.0), False, False
        while bad < 2 and not training.diverged:
            blank = self.gauge.blank_nats  # most of what falls to there is no learning
            idle = min(best - blank, validated) > -max(_IDLE, 3 * noise)
            little = (idle or (best - blank > -2 * _LITTLE and fallen < _LITTLE)) and not (bad or halved or heat.steps)
            little = little and self._is_cool(heat, _STEP**2)
            hotter = heat.scaled(training.setting, _STEP**2 if little else _STEP)
            if not heat.of(training.setting) < heat.of(hotter) <= self.hurting / 1.5:
                break
            why = (
                f"{heat.words(training.setting)} -> {heat.words(hotter)}: the loss is {math.exp(best):.3f} of the untrained"
            )
            if not (yield from training.change(hotter, why)):
                break
            seen = yield from training.glance()
            # Where the job has validated, that counts for more than a few mini-batches, if these do not tell much more.
            drop = max(best - seen.level - 2 * seen.noise, 0.0)
            worse = math.isfinite(seen.validated) and seen.validated > validated + HELPED_NATS / 2 + drop
            better = seen.validated < validated - HELPED_NATS or (seen.level < best and not worse)
            harmless = idle and not worse and seen.level < min(max(best, blank), 0.0) + 2 * seen.noise
            if (better or harmless) and not training.diverged:
                fallen = best - seen.level
                best, noise, setting, bad = min(best, seen.level), seen.noise, training.setting, 0
                yield from training.drop(kept)
                kept = yield from training.snapshot()
            else:
                hurts = training.diverged or seen.level > best + max(_HURT, 3 * seen.noise)
                blown_up = training.diverged or seen.level > 0
                bad = 2 if hurts or not self._is_cool(heat, 1.0) else bad + 1
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
        return self.gauge.has_learned(best + 2 * noise, validated), setting, kept

    # ----------------------------------------------------------------------------------------------- 5. hold and cool

    def learn(self, heat: Heat) -> Steps[None]:
        """Hold and cool; where that has over-fitted or stands still, again from an early model, at another heat.

        Where nothing was learned at all, the model was lost when it was still untrained, or the heat is far too low: then
        from the untrained model, outwards by decades.
        """
        training, top = self.training, self.training.setting
        origin = top  # the heat at which nothing was learned for the first time
        seedling, decades, factors = (yield from training.snapshot()), iter(_DECADES), cycle(_RESTARTS)
        while True:
            holding = Holding(training, heat, self.parts, self.place_anew, self.useless)
            yield from holding.run()
            self.hurting = min(self.hurting, holding.hurting)
            if not heat.limits_workers:
                origin, top = training.placed(origin), training.placed(top)
            elsewhere = self.elsewhere(heat, origin, decades) if holding.lost and self.first is not None else None
            if elsewhere is not None and self.first is not None:
                why = f"{heat.words(training.setting)} -> {heat.words(elsewhere)}: nothing was learned; again from the start"
                self.first = yield from training.return_to(self.first, elsewhere, why)
                top = training.setting
                yield from training.drop(seedling)
                seedling = yield from training.snapshot()
            elif seedling is not None:
                setting = heat.scaled(top, next(factors))
                why = f"{heat.words(training.setting)} -> {heat.words(setting)}: {holding.ended}; again from an early model"
                seedling = yield from training.return_to(seedling, setting, why)
            else:
                return

    def elsewhere(self, heat: Heat, top: Setting, decades: Iterator[float]) -> Setting | None:
        """The next setting outwards by decades from `top` that differs from it and is not known to hurt."""
        for factor in decades:
            setting = heat.scaled(top, factor)
            if heat.of(setting) != heat.of(top) and heat.of(setting) < self.hurting:
                return setting
        return None

    def place_anew(self) -> Steps[None]:
        """Choose again: machines have come or gone, or have become slower or faster."""
        if self.training.cluster_changed and self.heat is not None:
            yield from self.measure()
        self.training.usual_push_seconds = self.training.push_seconds
        yield from self.place()


def _options(knob: Any) -> list[Any]:
    return list(knob.options) if isinstance(knob, Choice) else []


def _highest(knob: Any) -> float:
    return float(max(knob.options) if isinstance(knob, Choice) else knob.high)


def _lowest(knob: Any) -> float:
    return float(min(knob.options) if isinstance(knob, Choice) else knob.low)


def _machines(setting: Setting) -> set[str]:
    return {*setting.workers, *setting.servers}


def _with_roles(setting: Setting, workers: Sequence[str], servers: Sequence[str]) -> Setting:
    """`setting` with these roles, and with equal shares if they differ from its own."""
    if (set(workers), set(servers)) == (set(setting.workers), set(setting.servers)):
        return setting
    return replace(setting, workers=tuple(workers), servers=tuple(servers), loads=(), data_shares=(), model_shares=())
