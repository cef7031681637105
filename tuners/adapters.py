"""Make tuners of optimisers and of state machines.

`from_ask_tell` takes an object with the methods `ask` and `tell`, as most optimiser libraries offer it;
`tuners.search.online_search` makes the trials on the running job. `from_pair` takes a pair of pure functions (init, update),
for instance for a tuner that keeps its state in a pytree. `advice` tells an author what to write in place of something else.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Callable, Coroutine, Mapping
from typing import Any, Protocol, TypeAlias, TypeVar

from tuners.actions import Action, Job, Rejected, Scalar, Tuner, TunerFactory
from tuners.search.online_search import search

__all__ = ["AskTell", "Step", "advice", "from_ask_tell", "from_pair"]

S = TypeVar("S")

Step: TypeAlias = tuple[S, Action[Any] | None]
"""The next state and the next action, or None when the tuner has finished."""


class AskTell(Protocol):
    """An optimiser that maximises."""

    def ask(self) -> Mapping[str, Scalar]:
        """A value for each knob of the job's space."""
        ...

    def tell(self, values: Mapping[str, Scalar], score: float) -> None:
        """The values of the last `ask`, and how fast the job learnt: minus infinity where it diverged or was refused."""
        ...


def from_ask_tell(
    make: Callable[[Job], AskTell], *, trials: int = 12, share: float = 0.1, clocks: int | None = None
) -> TunerFactory:
    """A tuner that asks `make(job)` for up to `trials` settings, tries each on a fork, and keeps the best.

    All trials together take `share` of the job's budget; each takes the same time, or `clocks`. A job without knobs
    keeps its start setting.
    """

    def tuner(job: Job) -> Tuner:
        if job.space.knobs:
            optimiser = make(job)
            yield from search(job, optimiser.ask, optimiser.tell, trials=trials, share=share, clocks=clocks)

    return tuner


def from_pair(init: Callable[[Job], Step[S]], update: Callable[[S, Any], Step[S]]) -> TunerFactory:
    """A tuner of `init(job)`, which returns the first state and action, and `update(state, answer)`, which returns the next.

    After a refusal the answer is the `Rejected` itself. An action of None ends the tuner.
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


def advice(given: Any) -> str:
    """What to write in place of `given`, which is no generator, but was returned by a factory or given in place of one. The
    text is the end of a sentence."""
    kind = given if isinstance(given, type) else type(given)
    if all(callable(getattr(kind, method, None)) for method in ("ask", "tell")):
        return f"it has ask and tell; give tuners.adapters.from_ask_tell(make), and make(job) returns a {kind.__name__}"
    if isinstance(given, AsyncGenerator | Coroutine):
        return "write def, without async"
    if isinstance(given, tuple) and len(given) == 2 and isinstance(given[1], Action):
        return "it is a state and an action; give tuners.adapters.from_pair(init, update)"
    if "__call__" in vars(kind) and kind.__module__ not in ("builtins", "functools"):
        return f"it is a {kind.__name__}, which can be called; give an object, {kind.__name__}(...), and not the class"
    return "write a function of a Job that yields actions"
