"""`joint`: every free knob by one rule.

    expected seconds left = pushes left (learning model) x seconds per push (system model)

over schedules of settings: warm up, hold the hottest setting that serves, cool when noise is all that is left. A change is
made only where it is expected to save more than it costs. In the order in which a job meets them:

1. *Placement only*: where roles are free and nothing is that learning depends on, and the job counts work or loads are free,
   the exact methods of Cruise take over, or those of the bespoke BO, once bits, threads and the like are chosen. Changes are
   made by the cheapest method that the job offers.
2. *Nobody waits* (`JointCourse.begin`): first, a job whose changes are restarts and that tells nothing to predict a
   saving from goes on as it began (`recorded_course`), and so does a quorum where the rate is held. Else the
   policy that lets every worker go on, if it is free, or a rate that makes up for staleness is free and policies may be
   installed. A rate that is hotter, or very far cooler, than those that were best in other jobs
   (`learning.heat.rate_prior`) is left for the cooler half of them. Any other start is tried first: it is held while
   it brings the target so near that no search can pay, and left for the same unless it teaches the model something.
   Where workers take local steps, these are few until their time is known, and the servers' rate for what they have
   changed is the usual one.
3. *System* (`machines.placing`): after one and a half pushes per worker the system model knows compute, pull and push
   seconds. The setting with the most progress per second, also in local steps of a push, is chosen by the cheapest method,
   verified, and taken back if it is worse. The same again whenever machines come or go, or pushes have become much slower
   or faster. Where waiting for each other takes hardly any time, because servers are the bottleneck, all workers wait after
   all; where slow workers hold up rounds of local steps, nobody waits (`machines.all_waiting`).
   Every setting that is compared has its best shares of model, data and samples, where these are free
   (`models.shares`); loads become equal again where workers' data turn out to differ.
   Machines may both work and serve, or be given back (`machines.candidates`); where the cheapest run is wanted, progress
   per USD counts. Of embedding tables, hot blocks move (`models.tables`). Knobs that no model knows are tried
   (`other_knobs`): where the rate is searched, after that, as a model that has learned more bears less heat.
4. *Heat* (`learning.heat_search`): the setting (`learning.heat`) comes down while it hurts, by four where it was
   probable and by decades below, then doubles window by window until it brings nothing more. The job continues from the
   best model seen, at the heat that made it, or at half of that if twice of it has blown the model up; where none has
   learned anything yet, at the hottest that does no harm. To give every class its frequency is not learning. Races of short
   forks would not do: they always prefer the cooler setting, because it sheds noise at once.
   Where the rate is held and policies may be installed, this and the next step are `learning.waiting` instead: how many
   gradients count at once.
5. *Hold and cool* (`JointCourse.learn`, `learning.holding`): hold the heat while the level drifts down, and double it
   where the seconds that this would save are worth the trial (`learning.hotter_trials`). Cool by halves when the measured
   noise is all that separates the level from the goal and the drift would take longer, or when the drift has stopped.
   Return to a snapshot when half of what was learned is lost or the job has diverged, to an early one when it has
   over-fitted or stands still. A model that a hot window has thrown off is kept where it is soon as good as before. One
   that is as good as the target asks for is held, cooled, until the job validates it.

The interval of checkpoints, where servers have no replicas, is chosen beside all this (`machines.checkpoints`). How soon
machines are lost again counts in 3 and in the interval (`models.machine_losses`).

Forks serve as snapshots only, so they cost little; without room for them the heat changes in place, and none is asked for
again before a branch is freed or machines have changed. What the system refuses while it makes up for a loss is asked for
again. Every decision carries its numbers, as the reason of the action that it leads to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from itertools import cycle

from tuners.actions import Job, Setting, Tuner
from tuners.applicability import no_knob_is_free, nothing_to_tune_if
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.schedules import is_free as loads_are_free
from tuners.cruise import cruise
from tuners.joint.job.steps import JobOver, Steps, changed_cheaply
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import CopyHeat, Heat, PolicyHeat, RateHeat, as_hot, fresh
from tuners.joint.learning.heat_search import HeatSearch
from tuners.joint.learning.holding import Holding, RuleParts
from tuners.joint.learning.waiting import Waiting
from tuners.joint.machines.all_waiting import AllWaiting
from tuners.joint.machines.candidates import highest, options
from tuners.joint.machines.checkpoints import first_checkpoint_seconds, with_checkpoints
from tuners.joint.machines.placing import LEFT_SHARE, Placing
from tuners.joint.models.learning_model import is_lost
from tuners.joint.models.system_model import SystemModel, waits
from tuners.joint.other_knobs import OtherKnobs
from tuners.joint.recorded_course import RecordedCourse
from tuners.joint.start_heat import StartHeat
from tuners.reasons import counted
from tuners.settings import BOUNDED, OF_NODES

__all__ = ["JointCourse", "joint"]

_LEARNING = ("learning_rate", "momentum", "batch_size", "policy", "staleness")
_PLACES = ("role", "load", "data_share", "model_share")  # what Cruise chooses
_SPOILING = ("workers", "batch_size", "local_steps", "loads")  # what the system model chooses, and learning depends on
_BATCHES = 3  # mini-batches per worker before roles are chosen: with Cruise's 10, much of a short job is over by then
_DECADES = (0.1, 10.0, 0.01, 100.0, 1e-3, 1e3, 1e-4)  # factors of a heat at which nothing was learned: outwards from it
_NEWEST = 20  # validations that tell whether a model has died
_LOOK_AGAIN = 1.25  # times as late as before: whether machines that were left alone are worth a change by now
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
    parts = RuleParts(system_model, schedules, cost_rule, snapshots, one_setting, prior)
    places_only = not any(space.knob(name) for name in _LEARNING) and space.frees("role")
    if places_only and not job.blocks and loads_are_free(job):
        yield from changed_cheaply(job, bespoke_bo(job))
        return
    if places_only and not job.blocks and job.target.counts and job.target.minimise == "seconds":
        others = tuple(k for k in space.knobs if k.name.partition("/")[0] not in _PLACES)
        try:
            start = yield from JointCourse(replace(job, space=replace(space, knobs=others)), parts).choose()
        except JobOver:
            return
        yield from changed_cheaply(job, cruise(replace(job, start=start), batches=_BATCHES, warmup=1, least=2))
        return
    course = JointCourse(job, parts)
    yield from with_checkpoints(job, course.play(), course.training.machine_losses)


class JointCourse:
    """The course of one job."""

    def __init__(self, job: Job, parts: RuleParts) -> None:
        self.job, self.parts, self.system = job, parts, SystemModel(job)
        self.training = Training(job, self.system, snapshots=parts.snapshots)
        self.gauge = self.training.model.gauge
        self.placing = Placing(job, self.training, self.system, parts)
        if isinstance(self.heat, CopyHeat):
            # After a fork all workers pull at once, and all copies are equally old.
            self.training.snapshots.are_wanted = False
        self.start = StartHeat(job, self.training, self.placing, parts)
        self.recorded = RecordedCourse(job, self.training, self.system)
        self.hurting = math.inf  # the coolest heat that is known to hurt
        self.useless = math.inf  # the coolest heat that has brought nothing when it was tried

    @property
    def heat(self) -> Heat | None:
        """The axis that learning is searched along; None where nothing that makes it hotter is free."""
        return self.placing.heat

    def play(self) -> Tuner:
        """Tune until the job ends."""
        try:
            if not (yield from self.recorded.may_pay()):
                yield from self.recorded.play()
                return
            yield from self.await_checkpoint()
            yield from self.begin()
            if self.training.snapshots.first is None and not self.training.model.pushes:
                yield from self.keep_untrained()
            yield from self.start.measure()
            yield from self.placing.place()
            others = OtherKnobs(self.job, self.training, self.placing)
            if self.heat is None or self.heat.steps:
                yield from others.run()
            yield from AllWaiting(self.job, self.training, self.system, self.placing, self.parts).run()
            if isinstance(self.heat, PolicyHeat) and self.job.installs_policies:
                yield from Waiting(self.job, self.training, self.placing.place_anew, self.as_begun).run()
            if self.heat is not None:
                yield from self.find_heat(self.heat)
                if (yield from self.placing.share_evenly()):
                    yield from self.find_heat(self.heat)
                if not self.heat.steps:  # not before: the search would end at a lower heat
                    yield from others.run()
                if not self.parts.one_setting:
                    yield from self.learn(self.heat)
            yield from self.go_on()
        except JobOver:
            return

    def keep_untrained(self) -> Steps[None]:
        """Keep the untrained model, where the job may have to begin again."""
        space = self.job.space
        may_spoil = self.heat is not None or any(map(space.frees, ("role", "load", "batch_size", "local_steps")))
        if may_spoil and not self.job.target.counts:
            self.training.snapshots.first = yield from self.training.snapshots.take()

    def await_checkpoint(self) -> Steps[None]:
        """Train as the job begins until its first checkpoint tells what one takes, where that is worth waiting for."""
        training = self.training
        model = training.model
        if seconds := first_checkpoint_seconds(self.job, training.machine_losses):
            yield from self.keep_untrained()
            yield from training.run_seconds(seconds, "first, what a checkpoint takes")
            # Also where servers that were lost have undone it since.
            best = model.lowest_level - self.gauge.untrained_level
            self.start.learns = model.has_learned or self.gauge.has_learned(math.inf, best)
            if model.diverged:
                yield from training.snapshots.begin_again(training.branch.setting, "the start's model has diverged")
                self.start.harms = True

    def choose(self) -> Steps[Setting]:
        """Choose what is free beside places, where nothing is free that learning depends on; the setting from then on."""
        if self.job.space.knobs and (yield from self.recorded.may_pay()):
            yield from self.placing.measure()
            yield from self.placing.place()
            yield from OtherKnobs(self.job, self.training, self.placing).run()
        return self.training.branch.setting

    def go_on(self) -> Steps[None]:
        """Train to the end, where no heat is free or all of it was tried; machines and blocks are still placed."""
        training, placing = self.training, self.placing
        branch = training.branch
        looked = learned = training.seconds
        course = list[float]()  # validated levels, since the job last began
        while True:
            # Machines that are back may be away again soon.
            rounds = 0.25 if placing.lacks_machines else 1.0 if self.job.space.frees("role") else 4.0
            yield from training.run(math.ceil(rounds * len(branch.setting.workers)))
            yield from placing.share_evenly()
            learned = training.seconds if training.model.has_learned else learned
            course += training.model.validated
            # Longer than that the job was not expected to last.
            late = training.seconds - learned > LEFT_SHARE * self.job.budget_seconds
            lost = self.heat is None and (late or self._stands_at_blank(course))
            if lost and (yield from self.as_begun()):
                learned, course = training.seconds, []
            elif lost and training.snapshots.first is not None and len(branch.setting.workers) > 1:
                learned, course, workers = training.seconds, [], len(branch.setting.workers)
                placing.most_workers = max(1, workers // 2)
                why = f"nothing was learned by {counted(workers, 'worker')}; again from the untrained model"
                yield from training.snapshots.begin_again(placing.best(placing.most_workers), why)
            elif branch.cluster_changed or (placing.lacks_machines and training.seconds > _LOOK_AGAIN * looked):
                looked = training.seconds  # how long machines last is known better
                yield from placing.place_anew()
            elif self.job.blocks or placing.shares.is_free:
                placing.learn_blocks()
                if training.seconds > 2 * looked or training.has_changed_pace():  # loads are known better
                    looked = training.seconds
                    yield from placing.place()

    def _stands_at_blank(self, levels: list[float]) -> bool:
        """Whether so many validations have told of neither progress nor drift that the model is lost, or has died since."""
        gauge = self.training.model.gauge
        return is_lost(levels[-_NEWEST:], gauge.blank_level, gauge.goal(self.training.model.loss))

    def as_begun(self) -> Steps[bool]:
        """Begin again as the job began, and leave its system so, once; whether that was done.

        Where the rate is held, nothing makes up for what workers, mini-batches, local steps and staleness do to learning.
        """
        job, training, axis = self.job, self.training, self.heat
        branch = training.branch
        before, start = branch.setting, branch.placed(job.start)
        rate_is_free = isinstance(axis, RateHeat) and not axis.is_outer
        changed = any(getattr(before, name) != getattr(job.start, name) for name in _SPOILING)
        # The mean of all workers' gradients bears the rate of one, where they do not wait only a fraction of that.
        changed = changed or (waits(job.start) and not waits(before))
        if rate_is_free or not changed or self.placing.stays or training.snapshots.first is None:
            return False
        start = replace(start, **{name: getattr(job.start, name) for name in (*_SPOILING, *OF_NODES)})
        if not branch.available.issuperset({*start.workers, *start.servers}):
            return False
        self.placing.stays = True
        return (
            yield from training.snapshots.begin_again(
                start, "nothing was learned: again from the untrained model, as the job began"
            )
        )

    # ------------------------------------------------------------------------------------------------ 2. nobody waits

    def begin(self) -> Steps[None]:
        """Let no worker wait, where that is free, because heat is searched next and makes up for staleness."""
        setting, space = self.job.start, self.job.space
        policies = options(space.knob("policy"))
        staleness = space.knob("staleness")
        # What makes up for staleness must be free, too; for local steps, see `machines.all_waiting`.
        searched = policies or (isinstance(self.heat, RateHeat) and not space.takes_local_steps)
        has_quorum = setting.policy == "quorum" and 0 < setting.quorum < len(setting.workers)
        if has_quorum and not isinstance(self.heat, RateHeat):
            pass  # it waits for no slow worker, and a rate that is held may be right for it
        elif "asp" in policies or (self.job.installs_policies and searched):
            setting = replace(setting, policy="asp")
        elif staleness is not None:
            setting = replace(setting, policy=next((p for p in BOUNDED if p in policies), setting.policy))
        if staleness is not None and setting.policy in BOUNDED:
            setting = replace(setting, staleness=int(highest(staleness)))
        yield from self.training.branch.change(
            setting, "nobody waits: the heat is searched next, and makes up for staleness"
        )
        if not isinstance(self.heat, CopyHeat):
            why = "copies that are as old make gradients too stale"
            yield from self.training.branch.change(fresh(self.job, self.training.branch.setting), why)
        yield from self.start.begin()

    # -------------------------------------------------------------------------------------------------------- 4. heat

    def find_heat(self, heat: Heat) -> Steps[None]:
        """Search along the axis `heat`, and go on from the best model."""
        if isinstance(heat, CopyHeat):
            return  # it is at its hottest, and a return to a snapshot would make all copies equally old
        search = HeatSearch(self.training, heat, self.placing.place_for_much)
        yield from search.run()
        if not (search.in_vain and (yield from self.as_begun())):
            self.hurting, self.useless = search.hurting, search.useless

    # ----------------------------------------------------------------------------------------------- 5. hold and cool

    def learn(self, heat: Heat) -> Steps[None]:
        """Hold and cool; where that has over-fitted or stands still, again from an early model, at another heat.

        Where nothing was learned at all, the model was lost when it was still untrained, or the heat is far too low: then
        from the untrained model, outwards by decades.
        """
        training, top = self.training, self.training.branch.setting
        branch = training.branch
        origin = top  # the heat at which nothing was learned for the first time
        seedling, decades, factors = (yield from training.snapshots.take()), iter(_DECADES), cycle(_RESTARTS)
        while True:
            holding = Holding(training, heat, self.parts, self.placing.place_anew, self.useless)
            yield from holding.run()
            yield from self.placing.share_evenly()
            self.hurting = min(self.hurting, holding.trials.hurting)
            if not heat.limits_workers:
                origin, top = (as_hot(heat, branch.placed(s), s) for s in (origin, top))
            if holding.lost and (yield from self.as_begun()):
                origin = top = branch.setting
                yield from training.snapshots.drop(seedling)
                seedling = yield from training.snapshots.take()
                continue
            elsewhere = (
                self.elsewhere(heat, origin, decades) if holding.lost and training.snapshots.first is not None else None
            )
            if elsewhere is not None:
                why = f"{heat.words(branch.setting)} -> {heat.words(elsewhere)}: nothing was learned; again from the start"
                yield from training.snapshots.begin_again(elsewhere, why)
                top = branch.setting
                yield from training.snapshots.drop(seedling)
                seedling = yield from training.snapshots.take()
            elif seedling is not None:
                setting = heat.scaled(top, next(factors))
                why = f"{heat.words(branch.setting)} -> {heat.words(setting)}: {holding.ended}; again from an early model"
                seedling = yield from training.snapshots.return_to(seedling, setting, why)
            else:
                return

    def elsewhere(self, heat: Heat, top: Setting, decades: Iterator[float]) -> Setting | None:
        """The next setting outwards by decades from `top` that differs from it and is not known to hurt."""
        for factor in decades:
            setting = heat.scaled(top, factor)
            if heat.of(setting) != heat.of(top) and heat.of(setting) < self.hurting:
                return setting
        return None
