"""What the rivals with local steps share: synchronous rounds, within what the job leaves free."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from tuners.actions import Job, Scalar, Setting
from tuners.settings import Choice

__all__ = ["steps_are_held", "synchronous"]


def steps_are_held(job: Job) -> str:
    """Why a tuner of local steps has nothing to tune in `job`, or ""."""
    return "" if job.space.frees("local_steps") else f"The number of local steps is held at {job.start.local_steps} here."


def synchronous(job: Job, wanted: Mapping[str, float]) -> Setting:
    """The start with the `wanted` values of free knobs, each the nearest that its knob has; under BSP where that is free."""
    made: dict[str, Any] = {name: near for name, value in wanted.items() if (near := _nearest(job, name, value)) is not None}
    policy = job.space.knob("policy")
    if isinstance(policy, Choice) and "bsp" in policy.options:
        made["policy"] = "bsp"
    return replace(job.start, **made)


def _nearest(job: Job, name: str, value: float) -> Scalar | None:
    knob = job.space.knob(name)
    if knob is None:
        return None
    if isinstance(knob, Choice):
        return min(knob.options, key=lambda o: abs(float(o) - value))
    near = min(max(value, knob.low), knob.high)
    return round(near) if isinstance(knob.low, int) else float(near)
