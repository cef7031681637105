"""Place the system: the third step of `tuners.joint`, by the seconds per push that the system model predicts.

Roles, batch, threads, bits and local steps with the most progress per second, or per USD where the cheapest run is wanted;
and where blocks of embedding tables lie. What is chosen is verified by what is then seen, and taken back if it is worse. The
same again whenever machines come or go, or pushes become much slower or faster.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

from tuners.actions import Job, Setting
from tuners.joint.job.running_branch import machines_of
from tuners.joint.job.snapshots import Snapshot
from tuners.joint.job.steps import Steps
from tuners.joint.job.training import Training
from tuners.joint.learning.heat import Heat, as_hot, heat
from tuners.joint.learning.holding import RuleParts
from tuners.joint.learning.waiting import data_differ
from tuners.joint.machines.candidates import Candidates, RoleSearch, options
from tuners.joint.machines.predicted_progress import PredictedProgress
from tuners.joint.models.shares import Shares
from tuners.joint.models.system_model import SystemModel, waits
from tuners.joint.models.tables import BlockModel
from tuners.reasons import counted, machines

__all__ = ["CHANGE_SECONDS", "LEFT_SHARE", "WORTH", "Placing"]

LEFT_SHARE = 0.2
"""Of the budget: how long a job is expected to last, until its drift was measured."""

WORTH = 1.07
"""Gain of a change of the system that is worth its risk, predicted or seen."""

CHANGE_SECONDS = 15.0
"""Of a change of the system, until one was measured."""

_IN_PLACE_SECONDS = 2.0  # of a change that leaves roles and shares as they are: what TensorFlowOnline needs for its graph
_PLACES = ("workers", "servers", "data_shares", "model_shares", "block_owners")
_SYSTEM = ("worker_count", "role", "transfer_bits", "batch_size", "intra_threads", "local_steps")
_SHARES = ("load", "data_share", "model_share")
_TRUSTED = 2.0  # times as few workers as at the start: what the progress of a push is trusted to be known for
_SLOWEST = 0.6  # of the highest progress per second: what the cheapest run makes at least, as it has to end in time
_FRUGAL_TRUSTED, _FRUGAL_SLOWEST = 4.0, 0.4  # the same, where a rate that is free makes up for the number of workers
_TELLING = 8  # losses of every worker that tell whether their data differ
_MUCH = 1.5  # times the progress for which a search is interrupted
_CHOICES = 3  # of the system in a row
_SOON = 2.0  # times as long as the job has trained: what a move of blocks takes at most
_AS_PREDICTED = 0.7  # of the predicted progress: less of it tells that the system model did not know the setting


class _Choice(NamedTuple):
    """A system to change to."""

    setting: Setting
    why: str
    before_worth: float  # progress of the setting before, as `PredictedProgress.worth` has it
    stranded: bool  # the setting before uses a machine that is gone: there is no way back


class Placing:
    """Chooses the system of one job, as often as that changes."""

    def __init__(self, job: Job, training: Training, system: SystemModel, parts: RuleParts) -> None:
        self._job, self._training, self._system, self._parts = job, training, system, parts
        self._tables, self.shares = BlockModel(job), Shares(job, system)
        self._candidates = Candidates(job, training, self.shares)
        self.heat: Heat | None = None if job.target.counts else heat(job, self.best, prior=parts.prior)
        self._progress = PredictedProgress(job, training, system, self.shares, self.heat)
        self.most_workers = len(job.start.workers) if self.heat is not None and self.heat.limits_workers else len(job.nodes)
        self._even: Snapshot | None = None  # from before loads became less even, until it is known whether data differ
        self._placed = False  # whether machines were chosen before
        self.stays = False  # whether the system is left as it is, where it can be
        self._unit = "second" if job.target.minimise == "seconds" else "USD"

    def measure(self) -> Steps[None]:
        """Train until pushes were measured that began under the present setting; in vain, twice as long at the most."""
        setting = self._training.branch.setting
        clocks = math.ceil((1.0 if waits(setting) else 1.5) * len(setting.workers))
        yield from self._training.run(clocks)
        # First cycles that began with another number of local steps do not count.
        if not self._training.measured and (self._system.knows or setting.local_steps != self._job.start.local_steps):
            yield from self._training.run(clocks)
        self._training.usual_push_seconds = self._training.push_seconds
        self.learn_blocks()

    def learn_blocks(self) -> None:
        """Take in what the newest window tells of the servers' loads by blocks of embedding tables."""
        if self._training.model.newest is not None:
            self._tables.learn(self._training.branch.setting, self._training.model.newest)

    def place(self) -> Steps[None]:
        """Choose what the system model says is best, once it knows the machines; take it back if it is worse.

        Where a choice is kept that is much slower than predicted, the model has learned what it did not know: choose again.
        """
        for _ in range(_CHOICES):
            if not (yield from self._choose()):
                return

    def place_anew(self) -> Steps[None]:
        """Choose again: machines have come or gone, or have become slower or faster."""
        if self._training.branch.cluster_changed and self.heat is not None:
            yield from self.measure()
        self._training.usual_push_seconds = self._training.push_seconds
        yield from self.place()

    def place_for_much(self) -> Steps[None]:
        """Choose again while heat is searched, which pushes that verify a choice hold up: only for much more progress."""
        training = self._training
        if not (self._system.knows and self.places_are_free) or training.model.diverged:
            return
        if self._progress.worth(self.best(self.most_workers)) > _MUCH * self._progress.worth(training.branch.setting):
            yield from self.place()

    def _choose(self) -> Steps[bool]:
        """Make one choice; whether it is kept, and far from what the system model had predicted."""
        training = self._training
        branch, model = training.branch, training.model
        branch.cluster_changed = False
        if model.diverged or not self._parts.system_model:
            return False
        if self._job.blocks:
            yield from self._place_blocks()
            return False
        if not (self.places_are_free or self.lacks_machines):
            return False
        before, usual = branch.setting, training.usual_push_seconds
        choice = self._weighed()
        if choice is None:
            return False
        if not (yield from self._made(choice)):
            # While the system makes up for a loss, no change is accepted. What remains may be so slow that a window takes
            # longer than all of the rest would on other machines.
            if not (branch.cluster_changed or (model.newest is not None and model.newest.events)):
                return False
            yield from training.run(1, "machines come and go: choose again after a push")
            branch.cluster_changed = True
            return not model.diverged
        predicted = self._progress.worth(choice.setting)
        yield from self.measure()
        seen = self._progress.worth(branch.setting)
        if model.diverged or branch.cluster_changed:
            return False
        if seen < choice.before_worth and not choice.stranded:
            times = seen / choice.before_worth
            why = f"taken back: {times:.2f} times the progress per {self._unit} of {self._words(before)}"
            yield from branch.change(before, why)
            training.usual_push_seconds = usual
            return False
        return seen < _AS_PREDICTED * predicted

    def _weighed(self) -> _Choice | None:
        """The best system for the rest of the job; None where a change to it is not worth its cost and its risk."""
        training, before = self._training, self._training.branch.setting
        branch = training.branch
        here, best = self._progress.worth(before), self.best(self.most_workers)
        # The mean of one batch bears the same rate, whoever computes how much of it.
        best = best if self._job.space.whole_batch and waits(best) else as_hot(self.heat, best, branch.chosen)
        gain = self._progress.worth(best) / here if here > 0 else math.inf
        left, cost = self.seconds_left(), branch.change_seconds or self._expected_cost(best)
        lasts = min(left, training.machine_losses.lifetime_seconds(machines_of(best) - machines_of(before)))
        saved = lasts * (1 - 1 / gain) if gain > 0 else 0.0
        worth = gain > WORTH and saved > cost if self._parts.cost_rule else gain > 1
        stranded = not branch.available.issuperset(machines_of(before))  # no other change is accepted then
        if best == before or not ((worth and not self.stays) or stranded):
            return None
        why = (
            f"{self._words(before)} -> {self._words(best)}: {left / gain:.0f} s left instead of {left:.0f}, "
            f"{gain:.2f} times the progress per {self._unit}; the change costs {cost:.0f} s"
        )
        if lasts < left:
            why += f", and its machines may be lost again after {lasts:.0f} s"
        if stranded:
            why = f"a machine is not available any more: {self._words(before)} -> {self._words(best)}"
        return _Choice(best, why, here, stranded)

    def _expected_cost(self, setting: Setting) -> float:
        """Seconds of a change to `setting`, before any was measured."""
        now = self._training.branch.setting
        stays = all(getattr(now, name) == getattr(setting, name) for name in _PLACES)
        return _IN_PLACE_SECONDS if stays and "relocate" in self._job.methods else CHANGE_SECONDS

    def _made(self, choice: _Choice) -> Steps[bool]:
        """Change to what was chosen; whether the branch now runs under it."""
        training, before, best = self._training, self._training.branch.setting, choice.setting
        # Also given up is what more workers than may learn have made of the model.
        first, self._placed = not self._placed or len(before.workers) > self.most_workers, True
        fewer = self.heat is None and len(best.workers) < len(before.workers)
        anew = first and not training.model.has_learned and (fewer or training.saves_usd)
        if self._even is None and self.shares.is_less_even(best, before) and not self._job.target.counts:
            self._even = yield from training.snapshots.take()
        if anew and training.snapshots.first is not None:
            # It loses nothing, and staleness may have spoilt it for good; or its snapshot would hold machines.
            yield from training.snapshots.begin_again(best, f"{choice.why}; from the untrained model")
            return training.branch.setting == best
        return (yield from training.branch.change(best, choice.why))

    @property
    def places_are_free(self) -> bool:
        """Whether anything is free that the system model chooses."""
        return any(self._job.space.frees(name) for name in (*_SYSTEM, *_SHARES))

    @property
    def lacks_machines(self) -> bool:
        """Whether machines of the start are gone, or are back and not used again."""
        start, now = self._job.start, self._training.branch.setting
        return not self.places_are_free and (set(start.workers), set(start.servers)) != (set(now.workers), set(now.servers))

    def _place_blocks(self) -> Steps[None]:
        """Move hot blocks of embedding tables to machines that have less to do, as many as save more time than they take."""
        training, left = self._training, self.seconds_left()
        found = self._tables.best(training.branch.setting, left)
        # How long the job lasts is hardly known, so no move may make one that is over soon more than three times as long.
        if found is None or found.gain <= WORTH or found.cost_seconds > _SOON * training.seconds:
            return
        why = (
            f"{counted(found.blocks, 'block')} to {counted(len(found.setting.servers), 'server')}: "
            f"{found.gain:.2f} times as many pushes, {left / found.gain:.0f} s left instead of {left:.0f}; "
            f"this takes {found.cost_seconds:.0f} s"
        )
        began = training.seconds
        if (yield from training.branch.change(found.setting, why)):
            self._tables.moved(found, training.seconds - began)
            yield from self.measure()

    def share_evenly(self) -> Steps[bool]:
        """Give all workers equal loads for good, where their data differ: else those of slow workers would hardly count.
        Whether this was a change."""
        training, start = self._training, self._job.start
        branch, model = training.branch, training.model
        self.shares.are_even = self.shares.are_even or data_differ(model.minibatches.relative)
        if not (self.shares.are_even and self.shares.is_less_even(branch.setting, start)):
            if min(map(len, model.minibatches.relative.values()), default=0) >= _TELLING:
                model.minibatches.relative.clear()
                yield from training.snapshots.drop(self._even)
                self._even = None
            return False
        even = self.shares.balanced(replace(branch.setting, loads=()))
        even = replace(even, loads=start.loads) if even.workers == start.workers else even
        why = "workers' data differ: equal loads, so that all of them count"
        if self._even is None:
            yield from branch.insist(even, why, ("loads",))
        else:  # what was learned since then may be wrong for the data of slow workers
            yield from training.snapshots.drop(
                (yield from training.snapshots.return_to(self._even, even, f"{why}, and again from before"))
            )
            self._even = None
        return True

    def copies_gain(self, setting: Setting, clocks: int) -> float:
        """How many times as many pushes there are at most where workers keep copies of rows for so many mini-batches."""
        return self._tables.copies_gain(setting, 1 / (1 + clocks)) if self._parts.system_model else 1.0

    @property
    def has_cost_rule(self) -> bool:
        """Whether a trial must save more than it costs."""
        return self._parts.cost_rule

    def _words(self, setting: Setting) -> str:
        """What the system model predicts for `setting`."""
        kinds = f"batch {setting.batch_size}, {setting.transfer_bits} bits"
        kinds += "".join(f", {name} {min(x):.3g} to {max(x):.3g}" for name, x in _uneven(setting))
        return f"{machines(setting)}, {kinds} ({self._system.push_seconds(setting):.3g} s per push)"

    def seconds_left(self) -> float:
        """Until the job ends, before any drift was measured; known where it counts work and the system is known."""
        training, target = self._training, self._job.target
        branch = training.branch
        whole = self._job.budget_seconds - training.seconds
        if not (target.counts and self._system.knows):
            return min(whole, LEFT_SHARE * self._job.budget_seconds)
        if self.shares.counts_by_share:
            left = target.value * self.shares.push_seconds(branch.setting) - training.seconds
        elif target.metric == "samples":
            left = (target.value - training.samples) / self._system.samples_per_second(branch.setting)
        else:
            left = (target.value - training.model.pushes) * self._system.push_seconds(branch.setting)
        return min(whole, max(left, 0.0))

    def best(self, most_workers: int) -> Setting:
        """The setting of the system with the most progress per second, or per USD, with at most so many workers."""
        now = self._training.branch.setting
        found = self._candidates.best(self._progress.per_second, most_workers)
        kinds = {option for k in self._job.space.knobs if k.name.startswith("role/") for option in options(k)}
        if not kinds & {"both", "idle"}:
            return found
        # A run that is cheap must still end in time.
        trusted, slowest = (_FRUGAL_TRUSTED, _FRUGAL_SLOWEST) if self._progress.is_frugal else (_TRUSTED, _SLOWEST)
        least = slowest * self._progress.per_second(found) if self._training.saves_usd else 0.0
        fewest = 0.0 if self._job.target.counts else min(len(self._job.start.workers) / trusted, most_workers)

        def value(setting: Setting) -> float:
            progress = self._progress.per_second(setting) if fewest <= len(setting.workers) <= most_workers else 0.0
            return progress / self._progress.price(setting) if progress >= least else 0.0

        return RoleSearch(self._job, now, self._training.branch.available, self.shares).best(found, value)


def _uneven(setting: Setting) -> Iterator[tuple[str, Sequence[float]]]:
    """Shares that differ, by their names."""
    loads = [n for row in setting.loads for n in row if n]
    yield from (
        (name, x) for name, x in (("loads", loads), ("data", setting.data_shares), ("model", setting.model_shares)) if x
    )
