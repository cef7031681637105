"""Optimisers and state machines of other shapes, as tuners.

`from_ask_tell` takes what most optimiser libraries offer, an object that is asked for values and told their score; the
trials are made by `tuners.search.online_search`, which knows what a trial on a running job costs. `from_pair` takes a tuner
written as a pure (init, update) pair, for instance to keep its state in a pytree.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from tuners.actions import Action, Job, Rejected, Scalar, Tuner, TunerFactory
from tuners.search.online_search import search

__all__ = ["AskTell", "Step", "from_ask_tell", "from_pair"]

S = TypeVar("S")

Step: TypeAlias = tuple[S, Action[Any] | None]
"""The next state and the next action, or None when the tuner has finished."""


class AskTell(Protocol):
    """An optimiser that maximises."""

    def ask(self) -> Mapping[str, Scalar]:
        """One value for every knob of the job's space."""
        ...

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        """The values last asked, and how fast the job learnt under them: minus infinity if it diverged or was refused."""
        ...


def from_ask_tell(
    make: Callable[[Job], AskTell], *, trials: int = 12, share: float = 0.1, clocks: int | None = None
) -> TunerFactory:
    """A tuner that asks `make(job)` for up to `trials` settings, tries each on a fork, and stays with the best.

    All trials together take `share` of the job's budget, each the same time or so many `clocks`. A space without knobs
    leaves nothing to ask for, and the job runs as it starts.
    """

    def tuner(job: Job) -> Tuner:
        if job.space.knobs:
            optimiser = make(job)
            yield from search(job, optimiser.ask, optimiser.tell, trials=trials, share=share, clocks=clocks)

    return tuner


def from_pair(init: Callable[[Job], Step[S]], update: Callable[[S, Any], Step[S]]) -> TunerFactory:
    """A tuner from `init(job)`, which gives a state and a first action, and `update(state, answer)`, which gives the next.

    A refusal reaches `update` as the answer: the `Rejected` itself. An action of None ends the tuner.
    """

    def tuner(job: Job) -> Tuner:
        state, action = init(job)
        while action is not None:
            try:
                answer: Any = yield action
            except Rejected as refusal:
                answer = refusal
            state, action = update(state, answer)

    return tuner
