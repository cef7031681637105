"""`joint`: every free knob by one rule.

    expected seconds left = pushes left (learning model) x seconds per push (system model)

over schedules of settings: warm up, hold the highest rate that serves, cool when noise is all that is left. A change is made
only where it is expected to save more than it costs. In the order in which a job meets them:

1. *Placement only* (nothing that learning depends on is free): the exact methods of Cruise, or of the bespoke BO where loads
   are free, take over.
2. *Nobody waits* (`_Course.begin`): the policy that lets every worker go on, if it is free, because the rate, which is
   searched next, makes up for staleness.
3. *System* (`_Course.place`): after one and a half pushes per worker the system model knows compute, pull and push seconds.
   The setting with the most progress per second is chosen once, by the cheapest method, verified, and taken back if worse.
4. *Rate* (`_Course.find_rate`): the effective rate, lr / (1 - momentum), comes down by decades while it hurts, then doubles
   window by window until it hurts twice. The job goes on from the best model seen, at the rate that made it. Races of
   short forks would not do: they always prefer the smaller rate, because it sheds noise at once.
5. *Hold and cool* (`_Course.hold`): hold the rate while the level drifts down; cool by halves when the measured noise is all
   that separates it from the goal, or when the drift has stopped; go back to a snapshot when the job has diverged.
6. *Changes of the cluster*: whenever machines come or go, the system model chooses again.

Forks serve as snapshots only, so they cost little; without them the rate comes down in place.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Iterator
from dataclasses import dataclass, replace
from typing import Any, TypeAlias, TypeVar

from tuners.actions import (
    Action,
    Evaluate,
    Fork,
    Free,
    Job,
    Method,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Tuner,
    Window,
)
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.schedules import is_free as loads_are_free
from tuners.cruise import cruise
from tuners.joint.learning_model import Gauge, stopped
from tuners.joint.system_model import SystemModel
from tuners.settings import Choice, Integer, Real

__all__ = ["joint"]

T = TypeVar("T")
Steps: TypeAlias = Generator[Action[Any], Any, T]

_LEARNING = ("learning_rate", "momentum", "batch_size", "policy", "staleness")
_BATCH_GAIN = 0.5  # a mini-batch of b samples adds b^0.5 to the progress of a push
_WORTH = 1.07  # predicted gain of a change of the system that is worth its risk
_STEP = 2.0  # of the rate, upwards
_DECADE = 10.0  # of the rate, downwards, while it hurts
_QUIET = 0.05  # of a window's seconds that an evaluation may take


def joint(job: Job) -> Tuner:
    """Tune every free knob of `job` by expected seconds left. A job without free knobs runs as it is."""
    space = job.space
    if not space.knobs:
        return
    if not any(space.knob(name) for name in _LEARNING) and (space.frees("role") or space.frees("load")):
        yield from bespoke_bo(job) if loads_are_free(job) else cruise(job)
        return
    yield from _Course(job).play()


class _Over(Exception):
    """The job has ended."""


@dataclass(frozen=True, slots=True)
class _Snapshot:
    """A branch that nobody trains, and what is known of its model."""

    branch: int
    pushes: int
    level: float
    loss: float


class _Course:
    """The course of one job: what is known, and the branch and setting that train."""

    def __init__(self, job: Job) -> None:
        self.job, self.system, self.gauge = job, SystemModel(job), Gauge(job.target)
        self.setting, self.branch = job.start, 0
        self.now = 0.0
        self.pushes = 0  # of the branch, since the job began
        self.level = self.loss = math.inf
        self.diverged = False
        self._check_clocks = 0  # the job validates by itself after every so many pushes; 0: not known
        self._available = frozenset(n.name for n in job.nodes)
        self._changed = False  # machines have come or gone since the last placement

    def play(self) -> Tuner:
        """Tune until the job ends."""
        try:
            yield from self.begin()
            yield from self.place()
            if self.job.target.counts:
                while True:
                    yield from self.window()
            if self._rate_is_free:
                yield from self.find_rate()
            yield from self.hold()
        except _Over:
            return

    # ------------------------------------------------------------------------------------------------ asking the job

    def run(self, clocks: int) -> Steps[Window]:
        """Train so many clocks; the system model learns from the window, and so does the list of machines."""
        window: Window = yield from Run(clocks=max(1, clocks), branch=self.branch)
        self.now = window.end_seconds
        self.pushes += window.clocks
        if window.status in ("target", "budget"):
            raise _Over
        self.diverged = window.status != "running"
        if window.setting is not None and window.setting != self.setting:
            self.setting, self._changed = window.setting, True
        elif not window.events:
            self.system.learn(self.setting, window)
        available = frozenset(n.name for n in window.nodes or self.job.nodes)
        if available != self._available:
            self.system.forget(available - self._available)
            self._available, self._changed = available, True
        for found in window.evaluations:
            self._check_clocks = math.gcd(self._check_clocks, found.clocks)
        if window.evaluations and window.evaluations[-1].clocks == self.pushes:
            self._measured(window.evaluations[-1].loss, window.evaluations[-1].accuracy)
        return window

    def window(self) -> Steps[Window]:
        """Train about two pushes per worker, and measure the level after them, by the job's own validation if possible."""
        least = max(2 * len(self.setting.workers), 16)
        push_seconds = self.system.push_seconds(self.setting) if self.system.knows else 0.0
        dear = getattr(self.job, "evaluate_seconds", 0.0)
        if push_seconds > 0 and not self.job.target.counts:
            least = max(least, min(math.ceil(dear / _QUIET / push_seconds), 8 * least))
        clocks, every = least, self._check_clocks
        if every and every <= 2 * least:
            clocks = every * math.ceil((self.pushes + least) / every) - self.pushes
        before = self.pushes
        measured = self.level
        self.level = math.nan
        window = yield from self.run(clocks)
        if self.diverged:
            self.level = math.inf
        elif math.isnan(self.level) and not self.job.target.counts:
            yield from self.evaluate()
        if math.isnan(self.level):
            self.level = measured
        if self._changed and self.pushes > before and not self.diverged:
            yield from self.place()
        return window

    def evaluate(self) -> Steps[None]:
        try:
            found = yield from Evaluate(self.branch)
        except Rejected:
            return
        self.now = found.seconds
        self._measured(found.loss, found.accuracy)

    def _measured(self, loss: float, accuracy: float) -> None:
        self.loss, self.level = loss, self.gauge.level(loss, accuracy)

    def change(self, setting: Setting) -> Steps[bool]:
        """Reconfigure the branch by the cheapest method; whether the job now runs under `setting`."""
        if setting == self.setting:
            return True
        for method in self._methods():
            try:
                cost = yield from Reconfigure(setting, method, self.branch)
            except Rejected:
                continue
            self.now += cost.seconds
            if cost.done:
                self.setting = setting
            return cost.done
        return False

    def _methods(self) -> Iterator[Method]:
        """From the cheapest to the dearest."""
        wanted: tuple[Method, ...] = ("relocate", "migrate", "checkpoint")
        return (m for m in wanted if m in self.job.methods)

    # ----------------------------------------------------------------------------------------------------- snapshots

    def snapshot(self) -> Steps[_Snapshot | None]:
        """A fork of the branch; None where the job has no room for one."""
        try:
            branch = yield from Fork(self.branch)
        except Rejected:
            return None
        return _Snapshot(branch, self.pushes, self.level, self.loss)

    def drop(self, kept: _Snapshot | None) -> Steps[None]:
        if kept is not None and kept.branch != self.branch:
            try:
                yield from Free(kept.branch)
            except Rejected:
                return

    def return_to(self, kept: _Snapshot, setting: Setting) -> Steps[_Snapshot | None]:
        """Go on from `kept`, under `setting`, and keep a copy of it."""
        lost = self.branch
        self.branch, self.pushes, self.level, self.loss = kept.branch, kept.pushes, kept.level, kept.loss
        self.diverged = False
        try:
            yield from Free(lost)
        except Rejected:
            pass
        again = yield from self.snapshot()
        yield from self._change_always(setting)
        return again

    def _change_always(self, setting: Setting) -> Steps[None]:
        """Change to `setting` though it may be the branch's already: a fork keeps the setting of its time."""
        for method in self._methods():
            try:
                cost = yield from Reconfigure(setting, method, self.branch)
            except Rejected:
                continue
            self.now += cost.seconds
            self.setting = setting
            return

    # --------------------------------------------------------------------------------------------------------- policy

    def begin(self) -> Steps[None]:
        """Nobody waits, where policy and rate are free; where the rate is held, staleness is bounded."""
        space, setting = self.job.space, self.setting
        policies = _options(space.knob("policy"))
        staleness = space.knob("staleness")
        highest = max(_options(staleness) or [staleness.high]) if staleness is not None else setting.staleness  # type: ignore[union-attr]
        free = self._rate_is_free or self.job.target.counts
        if "asp" in policies and free:
            setting = replace(setting, policy="asp")
        elif "ssp" in policies and staleness is not None:
            setting = replace(setting, policy="ssp", staleness=min(3, int(highest)))
        if staleness is not None and setting.policy == "ssp" and free:
            setting = replace(setting, staleness=int(highest))
        yield from self.change(setting)
        if not self.job.target.counts:
            yield from self.evaluate()

    # --------------------------------------------------------------------------------------------------------- system

    def place(self) -> Steps[None]:
        """Choose what the system model says is best, once it knows the machines; take it back if it is worse."""
        self._changed = False
        if not any(self.job.space.frees(n) for n in ("worker_count", "transfer_bits", "batch_size", "intra_threads")):
            return
        yield from self.run(math.ceil(1.5 * len(self.setting.workers)))
        if self.diverged or not self.system.knows:
            return
        before, here = self.setting, self._progress_rate(self.setting)
        best = max(self._candidates(), key=self._progress_rate, default=before)
        if self._progress_rate(best) <= _WORTH * here or not (yield from self.change(best)):
            return
        measured = self.system.push_seconds(before)
        yield from self.run(math.ceil(1.5 * len(self.setting.workers)))
        if self.diverged or self._progress_rate(self.setting) >= here or self._changed:
            return
        del measured
        yield from self.change(before)

    def _progress_rate(self, setting: Setting) -> float:
        """Progress per second, up to a factor: for a job that counts, of what it counts."""
        pushes = 1 / self.system.push_seconds(setting)
        if self.job.target.counts:
            return pushes if self.job.target.metric == "clocks" else self.system.samples_per_second(setting)
        return pushes * float(setting.batch_size**_BATCH_GAIN)

    def _candidates(self) -> Iterator[Setting]:
        """Settings of the system on the machines that are there."""
        space, names = self.job.space, [n.name for n in self.job.nodes]
        count = space.knob("worker_count")
        counts = _options(count) or (list(range(count.low, count.high + 1)) if isinstance(count, Integer) else [None])
        bits = _options(space.knob("transfer_bits")) or [self.setting.transfer_bits]
        batches = _options(space.knob("batch_size")) or [self.setting.batch_size]
        knob = space.knob("intra_threads")
        threads = [knob.high if isinstance(knob, Integer) else self.setting.intra_threads]
        for c in counts:
            roles = self.setting
            if c is not None:
                if not 0 < int(c) < len(names):
                    continue
                workers, servers = tuple(names[: int(c)]), tuple(names[int(c) :])
                if (workers, servers) != (roles.workers, roles.servers):
                    roles = replace(roles, workers=workers, servers=servers, loads=(), data_shares=(), model_shares=())
            if not {*roles.workers, *roles.servers} <= self._available:
                continue
            for b in bits:
                for size in batches:
                    for t in dict.fromkeys((self.setting.intra_threads, *threads)):
                        yield replace(roles, transfer_bits=int(b), batch_size=int(size), intra_threads=int(t))

    # ----------------------------------------------------------------------------------------------------------- rate

    @property
    def _rate_is_free(self) -> bool:
        return self.job.space.knob("learning_rate") is not None

    @property
    def _rate(self) -> float:
        """The effective rate."""
        return self.setting.learning_rate / (1 - min(self.setting.momentum, 0.99))

    def _at_rate(self, effective: float) -> Setting:
        """The setting with this effective rate, or the nearest one: without momentum, as long as the knob reaches so far."""
        knob, free_momentum = self.job.space.knob("learning_rate"), self.job.space.knob("momentum")
        if not isinstance(knob, Real):
            return self.setting
        momentum = self.setting.momentum
        if isinstance(free_momentum, Real):
            momentum = free_momentum.low
            if effective * (1 - momentum) > knob.high:
                momentum = min(max(1 - knob.high / effective, free_momentum.low), free_momentum.high, 0.9)
        rate = min(max(effective * (1 - momentum), knob.low), knob.high)
        return replace(self.setting, learning_rate=float(rate), momentum=float(momentum))

    def find_rate(self) -> Steps[None]:
        """Down by decades while the rate hurts, then up by doubling until it hurts twice; go on from the best model."""
        hurt, start = self.gauge.hurt, self.level
        first = yield from self.snapshot()
        if self.setting.momentum:
            yield from self.change(self._at_rate(self._rate))
        limit = math.inf  # a rate that is known to hurt
        yield from self.window()
        while self.diverged or self.level > start + hurt:
            limit = self._rate
            lower = self._at_rate(self._rate / _DECADE)
            if lower.learning_rate >= self.setting.learning_rate:
                break
            if first is not None:
                first = yield from self.return_to(first, lower)
            else:
                yield from self.change(lower)
            yield from self.window()
        best, kept, rate, bad = self.level, (yield from self.snapshot()), self._rate, 0
        while bad < 2 and not self.diverged:
            higher = self._at_rate(self._rate * _STEP)
            if higher == self.setting or self._rate * _STEP > limit / 1.5 or not (yield from self.change(higher)):
                break
            yield from self.window()
            if not self.diverged and self.level < best:
                best, rate, bad = self.level, self._rate, 0
                yield from self.drop(kept)
                kept = yield from self.snapshot()
            elif self.diverged or self.level > best + hurt:
                bad += 1
        if kept is not None and (self.diverged or self.level > best):
            yield from self.drop((yield from self.return_to(kept, self._at_rate(rate))))
        else:
            yield from self.drop(kept)
            yield from self.change(self._at_rate(rate))
        yield from self.drop(first)

    # ---------------------------------------------------------------------------------------------------- hold and cool

    def hold(self) -> Steps[None]:
        """Hold the rate while the level drifts down; cool it when noise is all that is left, or when the drift has stopped."""
        hurt, noise, top, fails = self.gauge.hurt, self.gauge.noise, self._rate, 0
        kept, seedling = (yield from self.snapshot()), (yield from self.snapshot())
        rate, low, cooled = top, self.level, self.level
        levels, since, best_at, peak = list[float](), self.now, self.now, self.level
        while True:
            yield from self.window()
            levels.append(self.level)
            if self.diverged or (len(levels) >= 4 and min(levels[-3:]) > low + 1.5 * hurt):
                rate /= 2
                if kept is not None and (self.diverged or self.level > low + 3 * hurt):
                    kept = yield from self.return_to(kept, self._at_rate(rate))
                elif self.diverged:
                    return
                else:
                    yield from self.change(self._at_rate(rate))
                levels, since, low = [], self.now, self.level
                continue
            if len(levels) < 4:
                continue
            level = sum(levels[-3:]) / 3
            stop = len(levels) >= 12 and self.now - since > 0.25 * self.now and stopped(levels)
            if not (stop or level - noise <= self.gauge.goal(self.loss)) or not self._rate_is_free:
                continue
            coolest = yield from self.cool(rate)
            noise = max(0.3 * noise, 0.7 * (level - coolest))
            if stop or coolest > cooled - 0.03:
                fails += 1
                rate = max(rate / 2, top / 10) if fails % 4 else top
            if coolest < peak - 0.02:
                peak, best_at = coolest, self.now
            cooled = min(cooled, coolest)
            yield from self.drop(kept)
            if stop and fails >= 3 and self.now > 1.5 * best_at and seedling is not None:
                # The model has over-fitted: learn again from the early snapshot, at half the rate.
                top = rate = max(top / 2, 1e-5)
                fails, cooled, peak, best_at = 0, math.inf, math.inf, self.now
                seedling = yield from self.return_to(seedling, self._at_rate(rate))
            kept = yield from self.snapshot()
            yield from self.change(self._at_rate(rate))
            levels, since, low = [], self.now, self.level + noise

    def cool(self, rate: float) -> Steps[float]:
        """Halve the rate window by window, to a tenth, until the level falls no more; the lowest level."""
        levels, idle, now = list[float](), 0, rate
        while idle < 2:
            now = now / 2 if now > rate / 10 else now
            yield from self.change(self._at_rate(now))
            yield from self.window()
            if self.diverged:
                break
            levels.append(self.level)
            idle = idle + 1 if len(levels) > 3 and self.level > min(levels[:-1]) - 0.01 else 0
        return min(levels, default=math.inf)


def _options(knob: Any) -> list[Any]:
    return list(knob.options) if isinstance(knob, Choice) else []
