"""`joint`: every free knob by one rule.

    expected seconds left = pushes left (learning model) x seconds per push (system model)

over schedules of settings: warm up, hold the hottest setting that serves, cool when noise is all that is left. A change is
made only where it is expected to save more than it costs. In the order in which a job meets them:

1. *Placement only*: where roles are free and nothing is that learning depends on, and the job counts work or loads are free,
   the exact methods of Cruise take over, or those of the bespoke BO, once bits, threads and the like are chosen. Changes are
   made by the cheapest method that the job offers.
2. *Nobody waits* (`JointCourse.begin`): first, a job whose changes are restarts and that tells nothing to predict a
   saving from goes on as it began (`JointCourse.play_recorded`), and so does a quorum where the rate is held. Else the
   policy that lets every worker go on, if it is free, or a rate that makes up for staleness is free and policies may be
   installed. A rate that is hotter, or very far cooler, than those that were best in other jobs
   (`tuners.joint.heat.rate_prior`) is left for the cooler half of them. Any other start is tried first: it is held while
   it brings the target so near that no search can pay, and left for the same unless it teaches the model something.
   Where workers take local steps, these are few until their time is known, and the servers' rate for what they have
   changed is the usual one.
3. *System* (`tuners.joint.placing`): after one and a half pushes per worker the system model knows compute, pull and push
   seconds. The setting with the most progress per second, also in local steps of a push, is chosen by the cheapest method,
   verified, and taken back if it is worse. The same again whenever machines come or go, or pushes have become much slower
   or faster. Where waiting for each other takes hardly any time, because servers are the bottleneck, all workers wait after
   all (`Placing.wait`); where slow workers hold up rounds of local steps, nobody waits (`Placing.stop_waiting`).
   Every setting that is compared has its best shares of model, data and samples, where these are free
   (`tuners.joint.shares`); loads become equal again where workers' data turn out to differ.
   Machines may both work and serve, or be given back (`tuners.joint.candidates`); where the cheapest run is wanted, progress
   per USD counts. Of embedding tables, hot blocks move (`tuners.joint.tables`). Knobs that no model knows are tried
   (`tuners.joint.other_knobs`): where the rate is searched, after that, as a model that has learned more bears less heat.
4. *Heat* (`tuners.joint.heat_search`): the setting (`tuners.joint.heat`) comes down while it hurts, by four where it was
   probable and by decades below, then doubles window by window until it brings nothing more. The job continues from the
   best model seen, at the heat that made it, or at half of that if twice of it has blown the model up; where none has
   learned anything yet, at the hottest that does no harm. To give every class its frequency is not learning. Races of short
   forks would not do: they always prefer the cooler setting, because it sheds noise at once.
   Where the rate is held and policies may be installed, this and the next step are `tuners.joint.waiting` instead: how many
   gradients count at once.
5. *Hold and cool* (`JointCourse.learn`, `tuners.joint.holding`): hold the heat while the level drifts down, and double it
   where the seconds that this would save are worth the trial. Cool by halves when the measured noise is all that separates
   the level from the goal and the drift would take longer, or when the drift has stopped. Return to a snapshot when half of
   what was learned is lost or the job has diverged, to an early one when it has over-fitted or stands still. A model that a
   hot window has thrown off is kept where it is soon as good as before. One that is as good as the target asks for is held,
   cooled, until the job validates it.

The interval of checkpoints, where servers have no replicas, is chosen beside all this (`tuners.joint.checkpoints`). How soon
machines are lost again counts in 3 and in the interval (`tuners.joint.machine_losses`).

Forks serve as snapshots only, so they cost little; without room for them the heat changes in place, and none is asked for
again before a branch is freed or machines have changed. What the system refuses while it makes up for a loss is asked for
again. Every decision carries its numbers, as the reason of the action that it
leads to.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import replace
from itertools import cycle

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Setting, Tuner
from tuners.applicability import no_knob_is_free, nothing_to_tune_if
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.schedules import is_free as loads_are_free
from tuners.cruise import cruise
from tuners.joint.candidates import highest, options
from tuners.joint.checkpoints import first_checkpoint_seconds, with_checkpoints
from tuners.joint.heat import CopyHeat, Expected, Heat, PolicyHeat, RateHeat, as_hot, fresh, outer_heat
from tuners.joint.heat_search import HeatSearch
from tuners.joint.holding import Holding, RuleParts
from tuners.joint.learning_model import is_lost
from tuners.joint.other_knobs import OtherKnobs
from tuners.joint.placing import LEFT_SHARE, Placing
from tuners.joint.system_model import SystemModel, waits
from tuners.joint.training import JobOver, Steps, Training, changed_cheaply
from tuners.joint.waiting import Waiting
from tuners.reasons import counted
from tuners.settings import BOUNDED, OF_NODES

__all__ = ["JointCourse", "joint"]

_LEARNING = ("learning_rate", "momentum", "batch_size", "policy", "staleness")
_PLACES = ("role", "load", "data_share", "model_share")  # what Cruise chooses
_SPOILING = ("workers", "batch_size", "local_steps", "loads")  # what the system model chooses, and learning depends on
_FIRST_STEPS = 8  # local steps of the first windows, at most
_EVALUATION_SHARE = 0.01  # of the seconds left that the first evaluation may take
_SEARCH_ROUNDS = 12  # mini-batches of every worker that a search takes, at least
# Deviations from the median of what is expected, of a start that is tried first. A cool one costs a few windows, while a
# hot one may spoil the model.
_PLAUSIBLE = (-3.0, 0.5)
_HARMED = 4.0  # times cooler than a start that has spoilt the model
_BATCHES = 3  # mini-batches per worker before roles are chosen: with Cruise's 10, much of a short job is over by then
_DECADES = (0.1, 10.0, 0.01, 100.0, 1e-3, 1e3, 1e-4)  # factors of a heat at which nothing was learned: outwards from it
_NEWEST = 20  # validations that tell whether a model has died
_ENDING = 8  # a window has so many times fewer pushes than the run so far: one that ends with it is followed by an idle one
_LOOK_AGAIN = 1.25  # times as late as before: whether machines that were left alone are worth a change by now
_COOLER_DEVIATIONS = 0.5  # below the median of what is expected: heat that is too low costs less than one that is too high
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
        self.gauge = self.training.gauge
        self.placing = Placing(job, self.training, self.system, parts)
        if isinstance(self.heat, CopyHeat):
            self.training.takes_snapshots = False  # after a fork all workers pull at once, and all copies are equally old
        self.learns = self.harms = False  # whether the start has clearly taught the model something, or spoilt it
        self.hurting = math.inf  # the coolest heat that is known to hurt
        self.useless = math.inf  # the coolest heat that has brought nothing when it was tried

    @property
    def heat(self) -> Heat | None:
        """The axis that learning is searched along; None where nothing that makes it hotter is free."""
        return self.placing.heat

    def play(self) -> Tuner:
        """Tune until the job ends."""
        try:
            if not (yield from self.may_pay()):
                yield from self.play_recorded()
                return
            yield from self.await_checkpoint()
            yield from self.begin()
            if self.training.first is None and not self.training.pushes:
                yield from self.keep_untrained()
            yield from self.measure()
            yield from self.placing.place()
            others = OtherKnobs(self.job, self.training, self.placing)
            if self.heat is None or self.heat.steps:
                yield from others.run()
            yield from self.placing.stop_waiting()
            yield from self.placing.wait()
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
            self.training.first = yield from self.training.snapshot()

    def await_checkpoint(self) -> Steps[None]:
        """Train as the job begins until its first checkpoint tells what one takes, where that is worth waiting for."""
        training = self.training
        if seconds := first_checkpoint_seconds(self.job, training.machine_losses):
            yield from self.keep_untrained()
            yield from training.run_seconds(seconds, "first, what a checkpoint takes")
            # Also where servers that were lost have undone it since.
            best = training.lowest_level - self.gauge.untrained_level
            self.learns = training.has_learned or self.gauge.has_learned(math.inf, best)
            if training.diverged:
                yield from training.begin_again(training.setting, "the start's model has diverged")
                self.harms = True

    def choose(self) -> Steps[Setting]:
        """Choose what is free beside places, where nothing is free that learning depends on; the setting from then on."""
        if self.job.space.knobs and (yield from self.may_pay()):
            yield from self.placing.measure()
            yield from self.placing.place()
            yield from OtherKnobs(self.job, self.training, self.placing).run()
        return self.training.setting

    def go_on(self) -> Steps[None]:
        """Train to the end, where no heat is free or all of it was tried; machines and blocks are still placed."""
        training, placing = self.training, self.placing
        looked = learned = training.seconds
        course = list[float]()  # validated levels, since the job last began
        while True:
            # Machines that are back may be away again soon.
            rounds = 0.25 if placing.lacks_machines else 1.0 if self.job.space.frees("role") else 4.0
            yield from training.run(math.ceil(rounds * len(training.setting.workers)))
            yield from placing.share_evenly()
            learned = training.seconds if training.has_learned else learned
            course += training.validated
            # Longer than that the job was not expected to last.
            late = training.seconds - learned > LEFT_SHARE * self.job.budget_seconds
            lost = self.heat is None and (late or self._stands_at_blank(course))
            if lost and (yield from self.as_begun()):
                learned, course = training.seconds, []
            elif lost and training.first is not None and len(training.setting.workers) > 1:
                learned, course, workers = training.seconds, [], len(training.setting.workers)
                placing.most_workers = max(1, workers // 2)
                why = f"nothing was learned by {counted(workers, 'worker')}; again from the untrained model"
                yield from training.begin_again(placing.best(placing.most_workers), why)
            elif training.cluster_changed or (placing.lacks_machines and training.seconds > _LOOK_AGAIN * looked):
                looked = training.seconds  # how long machines last is known better
                yield from placing.place_anew()
            elif self.job.blocks or placing.shares.is_free:
                placing.learn_blocks()
                if training.seconds > 2 * looked or training.has_changed_pace():  # loads are known better
                    looked = training.seconds
                    yield from placing.place()

    def _stands_at_blank(self, levels: list[float]) -> bool:
        """Whether so many validations have told of neither progress nor drift that the model is lost, or has died since."""
        gauge = self.training.gauge
        return is_lost(levels[-_NEWEST:], gauge.blank_level, gauge.goal(self.training.loss))

    def as_begun(self) -> Steps[bool]:
        """Begin again as the job began, and leave its system so, once; whether that was done.

        Where the rate is held, nothing makes up for what workers, mini-batches, local steps and staleness do to learning.
        """
        job, training, axis = self.job, self.training, self.heat
        before, start = training.setting, training.placed(job.start)
        rate_is_free = isinstance(axis, RateHeat) and not axis.is_outer
        changed = any(getattr(before, name) != getattr(job.start, name) for name in _SPOILING)
        # The mean of all workers' gradients bears the rate of one, where they do not wait only a fraction of that.
        changed = changed or (waits(job.start) and not waits(before))
        if rate_is_free or not changed or self.placing.stays or training.first is None:
            return False
        start = replace(start, **{name: getattr(job.start, name) for name in (*_SPOILING, *OF_NODES)})
        if not training.available.issuperset({*start.workers, *start.servers}):
            return False
        self.placing.stays = True
        return (
            yield from training.begin_again(start, "nothing was learned: again from the untrained model, as the job began")
        )

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

    def play_recorded(self) -> Steps[None]:
        """Train to the end of the recorded run, then of those under other settings, each once, until one reaches the target.

        Only a run that is over is left: it completes no push any more, so no other one can be worse.
        """
        training, pushes = self.training, self.training.pushes
        for setting in self._other_runs():
            done = asked = 0
            while done == asked:
                pushes += done
                asked = max(1, pushes // _ENDING)
                done = (yield from training.run(asked)).clocks
            why = "the run is over, and has not reached the target: another recorded setting"
            with suppress(Rejected):
                training.seconds += (yield from Reconfigure(setting, branch=training.branch, reason=why)).seconds
                training.setting, pushes = setting, 0

    def _other_runs(self) -> list[Setting]:
        """The recorded settings beside the start in a drawn order; where the cheapest run is wanted, those of the lowest
        price by the hour first."""
        settings = [s for s in self.job.space.recorded if s != self.job.start]
        drawn = [settings[at] for at in np.random.default_rng(self.job.seed).permutation(len(settings))]
        if self.job.target.minimise == "seconds":
            return drawn
        prices = {s: self.job.prices.setting_rate(s).usd_per_hour for s in drawn}
        return sorted(drawn, key=lambda s: math.inf if math.isnan(prices[s]) else prices[s])

    # ------------------------------------------------------------------------------------------------ 2. nobody waits

    def begin(self) -> Steps[None]:
        """Let no worker wait, where that is free, because heat is searched next and makes up for staleness."""
        setting, space = self.job.start, self.job.space
        policies = options(space.knob("policy"))
        staleness = space.knob("staleness")
        # What makes up for staleness must be free, too; for local steps, see `Placing.stop_waiting`.
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
        yield from self.training.change(setting, "nobody waits: the heat is searched next, and makes up for staleness")
        if not isinstance(self.heat, CopyHeat):
            why = "copies that are as old make gradients too stale"
            yield from self.training.change(fresh(self.job, self.training.setting), why)
        yield from self._begin_local_steps()
        if not self.start_is_plausible:
            yield from self._begin_where_probable()

    @property
    def start_is_plausible(self) -> bool:
        """Whether the start may learn well, as far as is known before it was tried."""
        if self.job.target.counts or self.job.space.takes_local_steps:
            return False
        heat = self.heat
        if heat is None or heat.expected is None:
            return True
        apart = math.log(heat.of(self.job.start) / heat.expected.median) / heat.expected.deviation
        return _PLAUSIBLE[0] <= apart <= _PLAUSIBLE[1]

    def measure(self) -> Steps[None]:
        """Train until the system is known; then leave the start's rate, if another one is more probable."""
        if not self.start_is_plausible:
            yield from self.placing.measure()
            return
        yield from self.try_start()
        yield from self._begin_where_probable()

    def try_start(self) -> Steps[None]:
        """Train at the start's rate, as long as the target is so near, at the drift that is seen, that no search can pay."""
        training, gauge, setting = self.training, self.gauge, self.training.setting
        workers, rounds, unseen, validated = len(setting.workers), 2, 0, False
        begun, known = (training.seconds, training.told_level) if training.pushes else (0.0, math.nan)
        seen = yield from training.glance(2 * workers)
        # The first mini-batches have told the level of the untrained model.
        times, levels = [begun], [gauge.untrained_level if math.isnan(known) else known]
        is_near = False
        while not training.diverged and rounds < 2 * _SEARCH_ROUNDS:
            self.learns = self.learns or seen.helps
            # Of what was validated before, mini-batches do not tell how it goes on.
            unseen = 0 if training.validated or not validated else unseen + 1
            validated = validated or bool(training.validated)
            if not unseen:
                times.append(training.seconds)
                levels.append(training.told_level)
                at = len(levels) // 2 - 1 if len(levels) > 3 else 0  # the newest half of the time
                fallen, distance = levels[at] - levels[-1], levels[-1] - gauge.goal(training.minibatches.mean)
                left = distance * (times[-1] - times[at]) / fallen if fallen > 0 else math.inf
                is_near = left <= _SEARCH_ROUNDS * (training.seconds - begun) / rounds
            if not is_near or unseen > 2:
                break
            seen = yield from training.glance(workers)
            rounds += 1
        worse = math.isfinite(levels[0]) and not levels[-1] < gauge.blank_level + gauge.hurt
        self.harms = training.diverged or (worse and not self.learns)
        training.usual_push_seconds = training.push_seconds
        self.placing.learn_blocks()

    def _begin_local_steps(self) -> Steps[None]:
        """Where local steps are free: few of them until it is known what they take, with the usual outer optimizer."""
        setting, knob, outer = self.training.setting, self.job.space.knob("local_steps"), outer_heat(self.job)
        if knob is not None:
            setting = replace(setting, local_steps=int(knob.nearest(min(setting.local_steps, _FIRST_STEPS))), node_steps=())
        if outer is not None and outer.expected is not None and self.parts.prior:
            setting = outer.scaled(setting, outer.expected.median / outer.of(setting))
        yield from self.training.change(setting, "few local steps until their time is known; the usual outer rate")

    def _begin_where_probable(self) -> Steps[None]:
        """Leave a start that is hotter or cooler than the best heats of most jobs, for the cooler half of these."""
        heat = self.heat
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
        wanted = expected.median * math.exp(-_COOLER_DEVIATIONS * expected.deviation)
        here = heat.of(training.setting)
        if self.harms:
            wanted = min(wanted, here / _HARMED)
        elif self.learns or abs(math.log(here / wanted)) <= _COOLER_DEVIATIONS * expected.deviation:
            return
        setting = heat.scaled(training.setting, wanted / here)
        usual = heat.words(heat.scaled(training.setting, expected.median / here))
        why = (
            f"{heat.words(training.setting)} -> {heat.words(setting)}: {usual} would be as hot as the best of other jobs, "
            f"within a factor of {math.exp(expected.deviation):.2g} of two in three"
        )
        # A model that has learned a little bears less heat, so the search would end at a lower one.
        if not (yield from training.begin_again(setting, why)):
            yield from training.change(setting, why)

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
        training, top = self.training, self.training.setting
        origin = top  # the heat at which nothing was learned for the first time
        seedling, decades, factors = (yield from training.snapshot()), iter(_DECADES), cycle(_RESTARTS)
        while True:
            holding = Holding(training, heat, self.parts, self.placing.place_anew, self.useless)
            yield from holding.run()
            yield from self.placing.share_evenly()
            self.hurting = min(self.hurting, holding.hurting)
            if not heat.limits_workers:
                origin, top = (as_hot(heat, training.placed(s), s) for s in (origin, top))
            if holding.lost and (yield from self.as_begun()):
                origin = top = training.setting
                yield from training.drop(seedling)
                seedling = yield from training.snapshot()
                continue
            elsewhere = self.elsewhere(heat, origin, decades) if holding.lost and training.first is not None else None
            if elsewhere is not None:
                why = f"{heat.words(training.setting)} -> {heat.words(elsewhere)}: nothing was learned; again from the start"
                yield from training.begin_again(elsewhere, why)
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
