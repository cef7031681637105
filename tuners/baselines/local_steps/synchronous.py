"""What the rivals with local steps share: synchronous rounds, within what the job leaves free."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

from tuners.actions import Job, Reconfigure, Rejected, Setting, Tuner
from tuners.applicability import policy_cannot_be_installed
from tuners.settings import Choice

__all__ = ["once", "steps_are_held", "steps_or_policy_are_held", "synchronous", "with_nearest"]


def steps_are_held(job: Job) -> str:
    """Why a tuner of local steps has nothing to tune in `job`, or ""."""
    return "" if job.space.frees("local_steps") else f"The number of local steps is held at {job.start.local_steps} here."


def steps_or_policy_are_held(job: Job) -> str:
    """Why a tuner of local steps under a policy of its own has nothing to tune in `job`, or ""."""
    return steps_are_held(job) or policy_cannot_be_installed(job)


def synchronous(job: Job, wanted: Mapping[str, float]) -> Setting:
    """`with_nearest` of `wanted`, under BSP where that is free."""
    policy = job.space.knob("policy")
    made = with_nearest(job, wanted)
    return replace(made, policy="bsp") if isinstance(policy, Choice) and "bsp" in policy.options else made


def with_nearest(job: Job, wanted: Mapping[str, float]) -> Setting:
    """The start with the `wanted` values of free knobs, each the nearest that its knob has."""
    knobs = {name: job.space.knob(name) for name in wanted}
    made: dict[str, Any] = {name: knob.nearest(wanted[name]) for name, knob in knobs.items() if knob is not None}
    return replace(job.start, **made)


def once(job: Job, wanted: Mapping[str, float], reason: str) -> Tuner:
    """Train in synchronous rounds with these values from now on, where that is a change and the system carries it out.

    In `reason`, "{steps}" stands for the number of local steps.
    """
    setting = synchronous(job, wanted)
    if setting != job.start:
        with suppress(Rejected):
            yield from Reconfigure(setting, reason=reason.format(steps=setting.local_steps))
