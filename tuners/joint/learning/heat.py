"""How hot a setting is: the one axis along which `tuners.joint` searches the settings that learning depends on.

A hotter setting makes more progress per second, and more noise; one that is too hot diverges. Which knob makes it hotter
depends on what is free: the effective rate, lr / (1 - momentum); if it is held, the same of the servers' rate for what local
steps have changed, by their momentum alone where that rate is held; then the policy, because staleness acts as momentum does
(Hadjis et al. 2016); if that is held, too, the momentum; and if all of these are held and workers do not wait for each
other, their number; if nothing else is free, how old a copy of the model workers may use.

One rate is not as hot everywhere. Where none of k workers waits, a gradient is k - 1 updates old, and the highest stable
rate falls with one over k. A mini-batch of b samples has 1 / sqrt(b) of the noise, and bears a rate that is so much higher.
So the heat of a rate is that of one worker with mini-batches of one sample, and stays where machines or mini-batches change.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from importlib.resources import files
from typing import Any, NamedTuple, Protocol, TypeGuard

from tuners.actions import Job, Setting
from tuners.joint.models.system_model import waits
from tuners.reasons import counted
from tuners.settings import BOUNDED, Choice, Integer, Real

__all__ = [
    "BATCH_GAIN",
    "COPIED",
    "CopyHeat",
    "Expected",
    "Heat",
    "MomentumHeat",
    "PolicyHeat",
    "RateHeat",
    "RateShare",
    "WorkerHeat",
    "as_hot",
    "fresh",
    "heat",
    "outer_heat",
    "rate_prior",
    "stress",
]

BATCH_GAIN = 0.5
"""A mini-batch of b samples bears b^0.5 times the rate, and adds b^0.5 to the progress of a push."""

COPIED = 4
"""Mini-batches for which copies of rows of embedding tables serve: they make gradients as stale as some more workers do."""

_MOST_MOMENTUM = 0.99  # more of it is not told apart
_SLOT = 0.5  # bytes that are kept for a parameter, over its own, from which they are more than itself
_LEAST_RATE = 1e-30  # what a rate of 0 counts as: no factor leads from 0 to another rate
_SMALL = math.log(1.5)  # a factor below this is a correction, and does not ask for another one of a few rates
_OUTER_MEDIAN, _OUTER_DEVIATION = 7.0, math.log(2.0)  # of effective outer rates: DiLoCo's, 0.7 with a momentum of 0.9


class Expected(NamedTuple):
    """What is known of the best heat before the job has begun: a log-normal distribution."""

    median: float
    deviation: float  # of the logarithm

    def chance_above(self, heat: float) -> float:
        """The probability that the best heat is above `heat`."""
        return 0.5 * math.erfc(math.log(heat / self.median) / (math.sqrt(2.0) * self.deviation))


class Heat(Protocol):
    """An axis of settings."""

    @property
    def steps(self) -> bool:
        """Whether it has a few coarse values, so that there is nothing to cool by halves."""
        ...

    @property
    def limits_workers(self) -> bool:
        """Whether it is the number of workers."""
        ...

    @property
    def expected(self) -> Expected | None:
        """Which heat is probably the best; None where nothing is known."""
        ...

    def of(self, setting: Setting) -> float:
        """How hot `setting` is."""
        ...

    def scaled(self, setting: Setting, factor: float) -> Setting:
        """`setting` made hotter or cooler by about `factor`; itself where the knob reaches no further."""
        ...

    def words(self, setting: Setting) -> str:
        """How hot `setting` is, for people."""
        ...


@dataclass(frozen=True, slots=True)
class RateHeat:
    """The effective rate, for one worker and one sample: without momentum, as long as the rate's knob reaches so far."""

    rate: Real | Choice  # of options, those above 0 count
    momentum: Real | None
    expected: Expected | None = None
    steps: bool = False
    limits_workers: bool = False
    has_momentum: bool = True  # whether the optimizer has any; plain gradient descent does as if it were 0

    @property
    def is_outer(self) -> bool:
        """Whether it is the servers' rate for what local steps have changed."""
        return self.rate.name == "outer_rate"

    @property
    def _momentum(self) -> str:
        return "outer_momentum" if self.is_outer else "momentum"

    def of(self, setting: Setting) -> float:
        return self._effective(setting) * (1.0 if self.is_outer else stress(setting))

    def _effective(self, setting: Setting) -> float:
        return _effective_rate(getattr(setting, self.rate.name), self._momentum_of(setting))

    def _momentum_of(self, setting: Setting) -> float:
        momentum: float = getattr(setting, self._momentum)
        return momentum if self.has_momentum else 0.0

    def scaled(self, setting: Setting, factor: float) -> Setting:
        effective, momentum = self._effective(setting) * factor, self._momentum_of(setting)
        made: dict[str, Any] = {}
        if self.momentum is not None:
            momentum, highest = self.momentum.low, _highest(self.rate)
            if effective * (1 - momentum) > highest:
                momentum = min(max(1 - highest / effective, self.momentum.low), self.momentum.high, 0.9)
            made[self._momentum] = float(momentum)
        wanted = effective * (1 - momentum)
        if isinstance(self.rate, Real):
            made[self.rate.name] = float(min(max(wanted, self.rate.low), self.rate.high))
        else:
            made[self.rate.name] = _option(_rates(self.rate), wanted, getattr(setting, self.rate.name), factor)
        return replace(setting, **made)

    def words(self, setting: Setting) -> str:
        return f"effective {'outer ' if self.is_outer else ''}rate {self._effective(setting):.3g}"


def _effective_rate(rate: float, momentum: float) -> float:
    return max(rate, _LEAST_RATE) / (1 - min(momentum, _MOST_MOMENTUM))


def _rates(knob: Any) -> list[float]:
    """The options of a knob that are rates, in ascending order; none for a range."""
    options = knob.options if isinstance(knob, Choice) else ()
    return sorted(o for o in options if isinstance(o, int | float) and not isinstance(o, bool) and o > 0)


def _momenta(knob: Any) -> list[float]:
    """The options of a knob that are momenta; none for a range."""
    options = knob.options if isinstance(knob, Choice) else ()
    return [o for o in options if isinstance(o, int | float) and not isinstance(o, bool) and 0 <= o <= _MOST_MOMENTUM]


def _is_axis(knob: Any) -> TypeGuard[Real | Choice]:
    """Whether rates can be searched along a knob: a range that reaches beyond 0, or two rates or more."""
    return (isinstance(knob, Real) and knob.high > 0) or len(_rates(knob)) > 1


def _is_momentum_axis(knob: Any) -> TypeGuard[Real | Choice]:
    """The same for momenta."""
    return isinstance(knob, Real) or len(_momenta(knob)) > 1


def _highest(knob: Real | Choice) -> float:
    return knob.high if isinstance(knob, Real) else _rates(knob)[-1]


def _option(rates: list[float], wanted: float, now: float, factor: float) -> float:
    """The rate that is nearest to `wanted`, by their ratio. Where that is the present one, `now`, although `factor` asks for
    another one, the next in its direction, if there is one."""
    nearest = min(rates, key=lambda rate: abs(math.log(rate / wanted)))
    if nearest != now or abs(math.log(factor)) < _SMALL:
        return nearest
    further = [rate for rate in rates if (rate > now if factor > 1 else rate < now)]
    return min(further, key=lambda rate: abs(rate - now), default=now)


@dataclass(frozen=True, slots=True)
class MomentumHeat:
    """The effective rate, for one worker and one sample, where the rate is held: by the momentum."""

    momentum: Real | Choice
    expected: Expected | None = None
    steps: bool = False
    limits_workers: bool = False

    @property
    def is_outer(self) -> bool:
        """Whether it is the servers' momentum for what local steps have changed."""
        return self.momentum.name == "outer_momentum"

    def of(self, setting: Setting) -> float:
        return self._effective(setting) * (1.0 if self.is_outer else stress(setting))

    def _effective(self, setting: Setting) -> float:
        return _effective_rate(setting.outer_rate if self.is_outer else setting.learning_rate, self._momentum_of(setting))

    def _momentum_of(self, setting: Setting) -> float:
        return setting.outer_momentum if self.is_outer else setting.momentum

    def scaled(self, setting: Setting, factor: float) -> Setting:
        now = 1 / (1 - min(self._momentum_of(setting), _MOST_MOMENTUM))
        if isinstance(self.momentum, Choice):
            by_factor = {1 / (1 - m): m for m in _momenta(self.momentum)}
            momentum = by_factor[_option(sorted(by_factor), now * factor, now, factor)]
        else:
            highest = min(self.momentum.high, _MOST_MOMENTUM)
            momentum = min(max(1 - 1 / (now * factor), self.momentum.low), highest)
        made: dict[str, Any] = {self.momentum.name: float(momentum)}
        return replace(setting, **made)

    def words(self, setting: Setting) -> str:
        return f"effective {'outer ' if self.is_outer else ''}rate {self._effective(setting):.3g}"


@dataclass(frozen=True, slots=True)
class PolicyHeat:
    """The synchronisation policy, from the coolest to the hottest: names with bounds on staleness."""

    ladder: tuple[tuple[str, int], ...]
    expected: Expected | None = None
    steps: bool = True
    limits_workers: bool = False

    def of(self, setting: Setting) -> float:
        here = (setting.policy, setting.staleness if setting.policy in BOUNDED else 0)
        return float(self.ladder.index(here)) if here in self.ladder else 0.0

    def scaled(self, setting: Setting, factor: float) -> Setting:
        at = int(self.of(setting)) + (factor > 1) - (factor < 1)
        policy, staleness = self.ladder[min(max(at, 0), len(self.ladder) - 1)]
        return replace(setting, policy=policy, staleness=staleness if policy in BOUNDED else setting.staleness)

    def words(self, setting: Setting) -> str:
        return f"policy {setting.policy}{f' {setting.staleness}' if setting.policy in BOUNDED else ''}"


@dataclass(frozen=True, slots=True)
class WorkerHeat:
    """The number of workers; `best` gives the best setting with at most so many."""

    best: Callable[[int], Setting]
    most: int
    expected: Expected | None = None
    steps: bool = True
    limits_workers: bool = True

    def of(self, setting: Setting) -> float:
        return float(len(setting.workers))

    def scaled(self, setting: Setting, factor: float) -> Setting:
        if factor == 1:
            return setting
        wanted = len(setting.workers) * factor
        found = self.best(max(1, min(self.most, round(wanted))))
        further = (len(found.workers) > len(setting.workers)) == (factor > 1)
        return found if further and len(found.workers) != len(setting.workers) else setting

    def words(self, setting: Setting) -> str:
        return counted(len(setting.workers), "worker")


@dataclass(frozen=True, slots=True)
class CopyHeat:
    """For how many mini-batches workers use a copy of the model: as many as at the start, or the fewest, which is cooler.

    More of them save a part of the pulls at most, and may cost the whole model.
    """

    fewest: int
    most: int
    expected: Expected | None = None
    steps: bool = True
    limits_workers: bool = False

    def of(self, setting: Setting) -> float:
        return float(setting.pull_clocks)

    def scaled(self, setting: Setting, factor: float) -> Setting:
        return setting if factor == 1 else replace(setting, pull_clocks=self.most if factor > 1 else self.fewest)

    def words(self, setting: Setting) -> str:
        return f"a pull for {setting.pull_clocks} mini-batches"


def stress(setting: Setting) -> float:
    """How much hotter a rate is under `setting` than for one worker with mini-batches of one sample.

    Where all workers wait for each other, an update is the mean of so many pushes: its best rate is between as high as that
    of workers that do not wait, and so many times as high.
    """
    together = math.pow(len(setting.workers), 0.5 if waits(setting) else 1.0)
    return together / math.pow(setting.batch_size, BATCH_GAIN)


def fresh(job: Job, setting: Setting) -> Setting:
    """`setting` with copies of the model, and of rows of tables, that are no older than usual, as far as that is free."""
    for name, usual in (("pull_clocks", 1), ("cache_clocks", COPIED)):
        knob, now = job.space.knob(name), getattr(setting, name)
        if knob is not None and now > usual:
            younger: dict[str, Any] = {name: min(int(knob.nearest(usual)), now)}
            setting = replace(setting, **younger)
    return setting


def as_hot(axis: Heat | None, setting: Setting, like: Setting) -> Setting:
    """`setting` at the rate that makes it as hot as `like`."""
    if axis is None or axis.steps or math.isclose(axis.of(setting), axis.of(like)):
        return setting
    return axis.scaled(setting, axis.of(like) / axis.of(setting))


def _has_momentum(job: Job) -> bool:
    """Whether momentum matters, as far as that is known: then servers keep a number for every parameter beside itself.

    Plain gradient descent keeps none. Of local steps, the workers keep it.
    """
    return job.space.takes_local_steps or not 0 < job.branch_bytes < (1 + _SLOT) * job.model_bytes


class RateShare(NamedTuple):
    """The best heat over the highest rate of its knob, in other jobs: a log-normal distribution."""

    median: float
    deviation: float  # of the logarithm


@cache
def rate_prior() -> RateShare:
    """The distribution that ships, `rate_prior.toml`; `python -m harness.training.learn_rates` makes it from drawn jobs."""
    read = tomllib.loads(files("tuners.joint.learning").joinpath("rate_prior.toml").read_text(encoding="utf-8"))
    return RateShare(math.exp(read["mean_log_share"]), float(read["deviation_log_share"]))


def outer_heat(job: Job, *, prior: bool = True, in_rounds: bool | None = None) -> RateHeat | MomentumHeat | None:
    """The servers' rate for what local steps have changed, or their momentum where the rate is held; None where both are.

    What is expected of it depends on whether workers take the steps `in_rounds`; without that, on whether the job's do.
    """
    rate, momentum = job.space.knob("outer_rate"), job.space.knob("outer_momentum")
    rounds = _in_rounds(job) if in_rounds is None else in_rounds
    expected = Expected(_OUTER_MEDIAN if rounds else 1.0, _OUTER_DEVIATION) if prior else None
    if _is_axis(rate):
        return RateHeat(rate, momentum if isinstance(momentum, Real) else None, expected)
    return MomentumHeat(momentum, expected) if _is_momentum_axis(momentum) else None


def _in_rounds(job: Job) -> bool:
    """Whether all workers wait for each other to the end."""
    return waits(job.start) and job.space.knob("policy") is None


def _ladder(job: Job) -> tuple[tuple[str, int], ...]:
    """The policies and bounds that the job admits: first where workers wait most, last where none waits."""
    policy, staleness = job.space.knob("policy"), job.space.knob("staleness")
    names = policy.options if isinstance(policy, Choice) else (job.start.policy,)
    bounds = [job.start.staleness]
    if isinstance(staleness, Choice):
        bounds = sorted(int(s) for s in staleness.options)
    elif isinstance(staleness, Integer):
        bounds = [s for s in (0, 1, 3, 7, 15) if staleness.low <= s <= staleness.high] or [staleness.low]
    ladder = [("bsp", 0)] if "bsp" in names else []
    strict = ("ssp", 0) if "bsp" in names else None  # the same as BSP
    ladder += [(name, s) for s in bounds for name in BOUNDED if name in names and (name, s) != strict]
    return (*ladder, ("asp", 0)) if "asp" in names else tuple(ladder)


def heat(job: Job, best: Callable[[int], Setting], *, prior: bool = True) -> Heat | None:
    """The axis of this job; None where nothing that makes learning hotter is free. Without `prior` no heat is expected."""
    space, has_momentum = job.space, _has_momentum(job)
    rate, momentum = space.knob("learning_rate"), space.knob("momentum") if has_momentum else None
    if _is_axis(rate):
        share = rate_prior()
        expected = Expected(share.median * _highest(rate), share.deviation) if prior else None
        return RateHeat(rate, momentum if isinstance(momentum, Real) else None, expected, has_momentum=has_momentum)
    outer = outer_heat(job, prior=prior)
    if outer is not None:
        return outer
    ladder = _ladder(job)
    if len(ladder) > 1:
        return PolicyHeat(ladder)
    if _is_momentum_axis(momentum):
        return MomentumHeat(momentum)
    count = space.knob("worker_count")
    # Where all wait for each other, fewer workers make an update noisier, and not cooler.
    if isinstance(count, Integer) and not waits(job.start):
        return WorkerHeat(best, count.high)
    fewest, most = fresh(job, job.start).pull_clocks, job.start.pull_clocks
    return CopyHeat(fewest, most) if fewest < most else None
