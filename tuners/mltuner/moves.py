"""The next settings to try from a given one: one tunable at a time, one step up or down. The whole file is ours.

A job's own setting is a better place to begin than a random point, so the search walks from it. Each `Move` is a direction
of one tunable. Up is what usually trains faster and is less stable: a higher rate, more momentum, smaller batches, less
waiting. A rate is multiplied by its step; the others go to a value nearby, or a part of the way to the end of their range.

Staleness and policy are one tunable here, because they are one in the paper: its bound 0 is BSP, an unlimited one is ASP.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, TypeAlias

from tuners.actions import Job, Setting
from tuners.search.tunables import Which, no_tunable_is_free
from tuners.settings import BOUNDED, Choice, Integer, Knob, Real

__all__ = ["Move", "Step", "calmer", "moves", "no_move_is_free"]

Step: TypeAlias = Callable[[Setting, float], Setting]
"""The setting a step away; the same setting where the range ends. The number is the size of the step, 1 at first."""

_RATE = 4.0  # factor of one step
_MOMENTUM = 3.0  # factor of 1 - momentum


@dataclass(frozen=True, slots=True)
class Move:
    """A direction in which one tunable can be changed."""

    name: str
    up: bool
    step: Step
    dummy: bool = False  # a duplicate, which changes nothing

    def __repr__(self) -> str:
        return f"{self.name} {'up' if self.up else 'down'}"


def no_move_is_free(job: Job, tuned: Which = "all") -> str:
    """Why nothing can be tuned in `job` by comparing losses, or ""."""
    if job.target.counts:
        return no_tunable_is_free(job, tuned)
    if moves(job, tuned):
        return ""
    names = ("learning_rate", "momentum", "batch_size", "staleness", "policy")
    return f"No tunable is free here: {', '.join(names if tuned == 'all' else names[:1])}."


def moves(job: Job, which: Which = "all", *, copies: int = 1) -> tuple[Move, ...]:
    """Every move in the space of `job`; with `copies` above 1 each once more per copy, without effect (Section 5.6)."""
    found = list[Move]()
    for name, stepped in _STEPPED.items():
        knob = job.space.knob(name)
        if knob is not None and (which == "all" or name == "learning_rate"):
            found += [Move(name, up, _along(name, knob, stepped, up=up)) for up in (True, False)]
    ladder = _ladder(job) if which == "all" else ()
    if len(ladder) > 1:
        found += [Move("waiting", up, _climb(ladder, up=up)) for up in (True, False)]
    again = [Move(f"{m.name} {n}", m.up, _nothing, dummy=True) for n in range(2, copies + 1) for m in found]
    return (*found, *again)


def _nothing(setting: Setting, size: float) -> Setting:
    del size
    return setting


def calmer(found: Sequence[Move], setting: Setting, size: float) -> Setting | None:
    """A setting that diverges less easily: a lower rate, else less momentum, more waiting, larger batches; None if none."""
    order = ("learning_rate", "momentum", "waiting", "batch_size")
    for name in order:
        for move in found:
            changed = move.step(setting, size) if move.name == name and not move.up else setting
            if changed != setting:
                return changed
    return None


def _along(name: str, knob: Knob, stepped: Callable[[Knob, Any, float], float], *, up: bool) -> Step:
    def step(setting: Setting, size: float) -> Setting:
        now = getattr(setting, name)
        value = _nearest(knob, now, stepped(knob, now, size if up else -size))
        return setting if value == now else replace(setting, **{name: value})

    return step


def _nearest(knob: Knob, now: Any, wanted: float) -> Any:
    """The value of the knob nearest to `wanted`, but at least one away from `now` where there is one on that side."""
    higher = wanted > now
    if isinstance(knob, Real):
        return knob.nearest(wanted)
    if isinstance(knob, Integer):
        return knob.nearest(max(round(wanted), now + 1) if higher else min(round(wanted), now - 1))
    beyond = tuple(o for o in knob.options if isinstance(o, int | float) and (o > now if higher else o < now))
    return Choice(knob.name, beyond).nearest(wanted) if beyond else now


def _rate(knob: Knob, now: float, size: float) -> float:
    del knob
    return float(now * _RATE**size)


def _momentum(knob: Knob, now: float, size: float) -> float:
    top = max(knob.options) if isinstance(knob, Choice) else knob.high
    wanted = 1.0 - (1.0 - now) / float(_MOMENTUM**size)
    # A momentum of 1 never forgets; 0 is where a step down ends.
    return max(min(wanted, 0.99, float(top)), 0.0)


def _batch(knob: Knob, now: float, size: float) -> float:
    del knob
    return float(now * 2.0**-size)


_STEPPED: dict[str, Callable[[Knob, Any, float], float]] = {
    "learning_rate": _rate,
    "momentum": _momentum,
    "batch_size": _batch,
}

# ------------------------------------------------------------------------------------------------------- policy, staleness


def _ladder(job: Job) -> tuple[tuple[str, int], ...]:
    """The allowed policies and bounds, from those that wait most to those that wait least."""
    policy, bound = job.space.knob("policy"), job.space.knob("staleness")
    names = policy.options if isinstance(policy, Choice) else (job.start.policy,)
    strict = [("bsp", job.start.staleness)] if "bsp" in names else []
    bounds = sorted(_bounds(bound)) if bound is not None else [job.start.staleness]
    same = ("ssp", 0) if strict else None  # as BSP
    middle = [(name, b) for b in bounds for name in BOUNDED if name in names and (name, b) != same]
    loose = [("asp", job.start.staleness)] if "asp" in names else []
    return (*strict, *middle, *loose)


def _bounds(knob: Knob) -> list[int]:
    if isinstance(knob, Choice):
        return [o for o in knob.options if isinstance(o, int)]
    return list(range(int(knob.low), int(knob.high) + 1))


def _climb(ladder: tuple[tuple[str, int], ...], *, up: bool) -> Step:
    def step(setting: Setting, size: float) -> Setting:
        here = _rung(ladder, setting)
        if here is None:
            return setting
        # A whole step goes to the end of the ladder, half a step half of the way.
        far = (len(ladder) - 1 - here) if up else here
        rungs = min(far, max(1, round(far * size)))
        policy, bound = ladder[here + (rungs if up else -rungs)]
        return setting if rungs == 0 else replace(setting, policy=policy, staleness=bound)

    return step


def _rung(ladder: tuple[tuple[str, int], ...], setting: Setting) -> int | None:
    for i, (policy, bound) in enumerate(ladder):
        if policy == setting.policy and (policy not in BOUNDED or bound == setting.staleness):
            return i
    return None
