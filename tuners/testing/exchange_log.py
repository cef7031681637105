"""Drive a tuner on a system, and keep the log of what it asked and was answered."""

from __future__ import annotations

from collections.abc import Callable, Coroutine, Generator
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

from tuners.actions import Action, Install, Job, Rejected, System, Tuner, TunerFactory
from tuners.playing.thinking import ThinkingLimitError, next_action, thinking_limit
from tuners.settings import Setting

__all__ = ["Exchanged", "exchanges", "name_of", "started"]

_STANDSTILL = 1000
"""Exchanges in a row without any time passing that are an error."""


@dataclass(frozen=True, slots=True)
class Exchanged:
    """One action and its answer; the answer is a `Rejected` where the system refused."""

    action: Action[Any]
    answer: Any

    def __str__(self) -> str:
        """The action as text that is the same in every run."""
        return f"Install({self.action.policy.name})" if isinstance(self.action, Install) else repr(self.action)

    def in_short(self, start: Setting) -> str:
        """The action for people: what differs from its defaults and, of a setting, from the `start`."""
        if isinstance(self.action, Install):
            return str(self)
        action: Any = self.action
        given = {f.name: getattr(action, f.name) for f in fields(action) if getattr(action, f.name) != f.default}
        return f"{type(action).__name__}({', '.join(_shown(name, value, start) for name, value in given.items())})"


def exchanges(
    factory: TunerFactory,
    system: System,
    *,
    most: int = 400,
    refuses: Callable[[int, Action[Any]], bool] = lambda _index, _action: False,
    thinking_limit_seconds: float = 60.0,
) -> list[Exchanged]:
    """The log of a tuner on `system`: at most `most` exchanges; `refuses(index, action)` says which ones are refused.

    Raises AssertionError where the tuner yields something else than an action, lets no time pass, thinks for longer than the
    limit, or raises.
    """
    return list(_exchanges(started(factory, system.job), system, most, refuses, thinking_limit_seconds))


def _exchanges(
    tuner: Tuner,
    system: System,
    most: int,
    refuses: Callable[[int, Action[Any]], bool],
    limit_seconds: float,
) -> Generator[Exchanged, None, None]:
    """The exchanges of a tuner that has begun, see `exchanges`."""
    answer: Any = None
    moved_at, moment = 0, system.now
    for index in range(most):
        action = _next(tuner, answer, limit_seconds)
        if action is None:
            return
        answer = _answer(system, action, refused=refuses(index, action))
        yield Exchanged(action, answer)
        if system.status != "running":
            break
        if system.now > moment:
            moved_at, moment = index, system.now
        if index - moved_at >= min(_STANDSTILL, most - 1):
            raise AssertionError(
                f"It made {index - moved_at} exchanges in a row in which no time passed: yield a Run, or return."
            )
    _close(tuner)


def _answer(system: System, action: Action[Any], *, refused: bool) -> Any:
    if refused:
        return Rejected(f"Cannot do {type(action).__name__} now: the test refuses it.")
    try:
        return system.perform(action)
    except Rejected as refusal:
        return refusal


def _next(tuner: Tuner, answer: Any, limit_seconds: float) -> Action[Any] | None:
    """The next action of the tuner, or None when it has finished."""
    try:
        with thinking_limit(limit_seconds):
            action = next_action(tuner, answer)
    except StopIteration:
        return None
    except ThinkingLimitError as error:
        raise AssertionError(
            f"It thinks for more than {limit_seconds:g} s without asking anything: yield an action, or return."
        ) from error
    except Rejected as refusal:
        raise AssertionError(f"It does not survive a refusal ({refusal}): catch Rejected and go on.") from refusal
    except (Exception, SystemExit) as error:
        raise AssertionError(f"It raises {type(error).__name__}: {error}") from error
    if not isinstance(action, Action):
        raise AssertionError(  # noqa: TRY004
            f"It yields {action!r}, which is no action: yield one of those in tuners.actions."
        )
    return action


def started(factory: TunerFactory, job: Job) -> Tuner:
    """A tuner of `factory` that has not begun. Raises AssertionError where the factory returns no generator."""
    from tuners.adapters import advice  # here, because it imports the search, which few runs need

    tuner = factory(job)
    if not isinstance(tuner, Generator):
        if isinstance(tuner, Coroutine):
            tuner.close()  # Python warns of a coroutine that was not awaited
        returned = type(tuner).__name__
        raise AssertionError(f"{name_of(factory)} returns {returned}, not a generator: {advice(tuner)}.")  # noqa: TRY004
    return tuner


def _close(tuner: Tuner) -> None:
    try:
        tuner.close()
    except (Exception, SystemExit) as error:
        if "ignored GeneratorExit" in str(error):
            raise AssertionError(
                f"It goes on when it is closed ({error}): catch Rejected only, or let GeneratorExit pass."
            ) from error
        raise AssertionError(f"It raises {type(error).__name__} when it is closed: {error}") from error


def _shown(name: str, value: Any, start: Setting) -> str:
    """A field of an action as text; of a setting, what differs from the `start`."""
    if not isinstance(value, Setting):
        return f"{name}={value!r}"
    changed = [f"{f.name}={v!r}" for f in fields(value) if (v := getattr(value, f.name)) != getattr(start, f.name)]
    return f"the start with {', '.join(changed)}" if changed else "the start"


def name_of(factory: TunerFactory) -> str:
    """What messages call a factory."""
    if isinstance(factory, partial):  # its text has an address of memory
        options = ", ".join([*map(repr, factory.args), *(f"{name}={value!r}" for name, value in factory.keywords.items())])
        return f"{name_of(factory.func)}[{options}]"
    return getattr(factory, "__name__", None) or repr(factory)
