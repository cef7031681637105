"""The training tunables of a job: learning rate, momentum, mini-batch, staleness (MLtuner, Table 3).

The job says which of them are free, and over what range; this module selects them from its space, so that a searcher sees
nothing else. Momentum has two conventions. The servers here use a heavy ball, v <- m v + g and w <- w - r v. MLtuner uses a
moving average, h <- m h + (1 - m) g and w <- w - r h; a heavy ball with the rate r (1 - m) has the same path. A pair (r, m)
has a different meaning under each: `heavy_ball` converts it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from tuners.actions import Job, Scalar, Setting, Space
from tuners.applicability import learns_nothing
from tuners.search.branches import TrainedBranch
from tuners.settings import BOUNDED, Choice, Knob

__all__ = ["Convention", "Tunables", "Which", "heavy_ball", "no_tunable_is_free", "tunables"]

Convention = Literal["heavy_ball", "moving_average"]
Which = Literal["all", "rate"]

_TUNABLES = ("learning_rate", "momentum", "batch_size", "staleness")


@dataclass(frozen=True, slots=True)
class Tunables:
    """The searched space, and how a point of it becomes a setting."""

    space: Space  # the tunables alone, with duplicates
    convention: Convention  # of the searched pairs of rate and momentum
    bounded: str  # the policy that the tuned staleness bounds; "": the staleness is not tuned

    def setting(self, values: dict[str, Scalar], base: Setting) -> Setting:
        """`base` with these values of the tunables; duplicates change nothing."""
        plain: dict[str, Any] = {name: value for name, value in values.items() if name in _TUNABLES}
        rate = self.space.knob("learning_rate")
        if self.convention == "moving_average" and rate is not None and not isinstance(rate, Choice):
            momentum = float(plain.get("momentum", base.momentum))
            converted, _ = heavy_ball(float(plain["learning_rate"]), momentum)
            plain["learning_rate"] = rate.nearest(converted)
        if self.bounded:
            plain["policy"] = self.bounded
        return replace(base, **plain)

    def made(self, values: dict[str, Scalar]) -> Callable[[TrainedBranch], Setting]:
        """A function that returns the setting in force in a branch with these values."""
        return lambda branch: self.setting(values, branch.setting)


def tunables(job: Job, which: Which = "all", *, copies: int = 1, convention: Convention = "heavy_ball") -> Tunables:
    """The free tunables of `job`, or its learning rate alone.

    With `copies` above 1 each exists `copies` times, and only the first has an effect: the paper's "4x2 tunables". The
    staleness is tuned where it bounds the job's own policy, or else one that a tuner may choose: the first of `BOUNDED`.
    """
    names = _TUNABLES if which == "all" else _TUNABLES[:1]
    policy = job.space.knob("policy")
    choices = policy.options if isinstance(policy, Choice) else ()
    own = job.start.policy
    bounded = own if own in BOUNDED else next((name for name in BOUNDED if name in choices), "")
    tuned = [k for k in job.space.knobs if k.name in names and (k.name != "staleness" or bounded)]
    again = [_twin(k, number) for number in range(2, copies + 1) for k in tuned]
    space = replace(job.space, knobs=(*tuned, *again))
    return Tunables(space, convention, bounded if any(k.name == "staleness" for k in tuned) else "")


def no_tunable_is_free(job: Job, tuned: Which = "all") -> str:
    """Why a tuner of tunables, which compares losses, has nothing to tune in `job`, or ""."""
    if said := learns_nothing(job, "it has no losses to compare tunables by"):
        return said
    if tunables(job, tuned).space.knobs:
        return ""
    return f"No tunable is free here: {', '.join(_TUNABLES if tuned == 'all' else _TUNABLES[:1])}."


def _twin(knob: Knob, number: int) -> Knob:
    # A space refuses a knob that sets nothing; a graph option that is never set has the same effect.
    return replace(knob, name=f"option/{knob.name} {number}")


def heavy_ball(rate: float, momentum: float) -> tuple[float, float]:
    """Rate and momentum of the heavy ball with the same path as the moving average with `rate` and `momentum`."""
    return rate * (1.0 - momentum), momentum
