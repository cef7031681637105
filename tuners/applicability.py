"""Whether a tuner has something to tune in a job: a function beside its factory says why it has nothing.

The harness asks before it plays a run. A tuner with nothing to tune would be another copy of `fixed`; such a run is not
played, and its row says why::

    @nothing_to_tune_if(rate_is_held)
    def halving(job: Job) -> Tuner: ...

    def rate_is_held(job: Job) -> str:
        return "" if job.space.frees("learning_rate") else "The learning rate is not free here."

A factory without such a function is always played.
"""

from __future__ import annotations

from collections.abc import Callable
from inspect import signature
from typing import Any, TypeVar

from tuners.actions import Job, TunerFactory

__all__ = ["learns_nothing", "no_knob_is_free", "nothing_to_tune", "nothing_to_tune_if", "policy_cannot_be_installed"]

F = TypeVar("F", bound=Callable[..., Any])


def nothing_to_tune_if(reason: Callable[..., str]) -> Callable[[F], F]:
    """Attach to a tuner's factory a function of the job that returns why there is nothing to tune in it, or "".

    `reason` may have further arguments of the same names as options of the factory: it is given their values.
    """

    def attach(factory: F) -> F:
        vars(factory)["nothing_to_tune"] = reason
        return factory

    return attach


def nothing_to_tune(factory: TunerFactory, job: Job) -> str:
    """A sentence that says why a tuner of `factory` would change nothing in `job`; "" if it would, or does not say.

    The factory's options count: its defaults, and what a `functools.partial` gives it.
    """
    from tuners.factory_options import with_options  # here, because it imports msgspec, which few tuners need

    plain, options = with_options(factory)
    reason = getattr(plain, "nothing_to_tune", None)
    if reason is None:
        return ""
    known = signature(reason).parameters
    return str(reason(job, **{name: value for name, value in options.items() if name in known}))


def learns_nothing(job: Job, so: str) -> str:
    """Why a tuner of what is learned has nothing to tune: a job that only counts learns nothing, `so` ...; "" for others."""
    return f"This job counts {job.target.metric}: {so}." if job.target.counts else ""


def no_knob_is_free(job: Job) -> str:
    """Why a tuner of all knobs has nothing to tune."""
    return "" if job.space.knobs else "No knob is free here."


def policy_cannot_be_installed(job: Job) -> str:
    """Why a tuner that installs a policy of its own has nothing to tune in `job`, or ""."""
    if job.installs_policies:
        return ""
    if job.space.frees("policy"):
        return "A tuner cannot install policies of its own here."
    return f"The policy is held at {job.start.policy!r} here."
