"""Steps: actions of a part of a tuner, which end with a result. All actions of a tuner can be carried out by steps, too."""

from __future__ import annotations

from collections.abc import Callable, Generator
from dataclasses import replace
from typing import Any, TypeAlias, TypeVar

from tuners.actions import Action, Cost, Job, Method, Reconfigure, Rejected, Tuner

__all__ = ["JobOver", "Steps", "by_the_cheapest", "changed_cheaply", "relayed"]

T = TypeVar("T")

Steps: TypeAlias = Generator[Action[Any], Any, T]
"""Actions, and in the end a result."""

_CHEAPEST_FIRST: tuple[Method, ...] = ("relocate", "migrate", "checkpoint")


class JobOver(Exception):
    """The job has reached its target or the end of its budget."""


def changed_cheaply(job: Job, tuner: Tuner) -> Tuner:
    """`tuner`, whose changes are made by the cheapest method that `job` offers, whichever it asks for."""
    return relayed(tuner, lambda action: by_the_cheapest(job, action) if isinstance(action, Reconfigure) else iter(action))


def relayed(tuner: Tuner, carry_out: Callable[[Action[Any]], Steps[Any]]) -> Tuner:
    """`tuner`, each action of which is carried out by the steps of `carry_out`; it gets their result, or their Rejected."""
    answer: Any = None
    refusal: Rejected | None = None
    while True:
        try:
            action = tuner.send(answer) if refusal is None else tuner.throw(refusal)
        except StopIteration:
            return
        answer, refusal = None, None
        try:
            answer = yield from carry_out(action)
        except Rejected as refused:
            refusal = refused


def by_the_cheapest(job: Job, change: Reconfigure) -> Steps[Cost]:
    """Make `change` by the first method that is not refused, the cheapest first. Raises Rejected where all of them are."""
    refusal = Rejected("Cannot reconfigure this job: it offers no method.")
    for method in _CHEAPEST_FIRST:
        if method in job.methods:
            try:
                return (yield from replace(change, method=method))
            except Rejected as refused:
                refusal = refused
    raise refusal
