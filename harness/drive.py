"""The driver's loop: carry out what a tuner asks, and end the job when it is over.

A fault of the tuner (it raises, yields something that is no action, thinks too long, spends no simulated time) ends its job
with an `Outcome` of status "error" and a reason, never with an exception: one bad tuner does not stop a comparison.
The tuner's thinking time is measured on the host and kept apart from simulated time.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Coroutine, Generator, Iterable
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeAlias

from harness.faults import described, short, trace_of
from traces.exchanges import Exchange, action_text
from tuners.actions import (
    Action,
    Evaluate,
    Fork,
    Free,
    Install,
    Job,
    MeasureNoise,
    Reconfigure,
    Rejected,
    Run,
    Status,
    System,
    Tuner,
    TunerFactory,
    Window,
)
from tuners.playing.thinking import ThinkingLimitError, next_action, thinking_limit

__all__ = ["Ending", "Outcome", "Played", "drive", "play", "replay"]

Ending: TypeAlias = Literal["target", "budget", "diverged", "deadlock", "error"]
"""How a job can end: a final `tuners.actions.Status`, the end of its budget, or a fault of its tuner."""

_ACTIONS = (Run, Reconfigure, Fork, Free, Install, Evaluate, MeasureNoise)
_LEAST_PROGRESS = 1e-9
"""Share of the budget. A `Run` without a push that takes less trains nothing: a tuner cannot run for ever in tiny steps."""

_PIECES = 50
"""After the tuner has returned, the job continues in windows of a fiftieth of the budget; their size changes no result."""


@dataclass(frozen=True, slots=True)
class Outcome:
    """How a job ended."""

    status: Ending
    reason: str  # a sentence where the tuner or the system failed, else ""
    seconds: float  # job time at the end
    thinking_seconds: float  # host seconds that the tuner took in total
    trace: str = ""  # traceback of the fault, for the author of the tuner


@dataclass(frozen=True, slots=True)
class Played:
    """One run from beginning to end."""

    job: Job
    exchanges: tuple[Exchange, ...] = field(repr=False)  # thousands, each with its measurements
    outcome: Outcome


class _RunFailedError(Exception):
    """A fault ends the run. Takes the finished reason."""


def drive(
    tuner: Tuner, system: System, *, thinking_limit_seconds: float = 600.0, idle_exchanges: int = 1000
) -> Generator[Exchange, None, Outcome]:
    """Let `tuner` run the job of `system`. Yields every exchange; the generator's return value is the job's outcome.

    A `Run` is clipped to the rest of the budget. The job ends at its target, at the end of its budget, when it diverges or
    deadlocks, and by a fault of the tuner: it trains nothing in `idle_exchanges` exchanges, thinks about one
    action for longer than `thinking_limit_seconds` (checked only in the main thread), raises, or yields something that is
    no action. Where it ends during another action than a `Run`, the harness asks for a last `Run` itself, which tells what
    was trained meanwhile. If the tuner returns, or does not catch that a `Run` was refused, the job continues under its
    last setting.
    """
    timed = _TimedTuner(tuner, thinking_limit_seconds)
    try:
        status = yield from _until_over(timed, system, idle_exchanges)
    except _RunFailedError as error:
        trace = "" if error.__cause__ is None else trace_of(error.__cause__)
        return Outcome("error", str(error), system.now, timed.seconds, trace)
    finally:
        timed.close()
    return Outcome(status, "", system.now, timed.seconds)


def play(
    factory: TunerFactory,
    system: System,
    *,
    watch: Callable[[Exchange], None] | None = None,
    keeps: bool = True,
    thinking_limit_seconds: float = 600.0,
) -> Played:
    """Make a tuner for the job of `system` and drive it to the end; `watch` gets every exchange as it happens. Without
    `keeps`, the result has no exchanges: a live job can be longer than the memory of its driver.

    A factory that raises, or that returns no generator, is a fault like any other.
    """
    exchanges: list[Exchange] = []
    running = drive(_made(factory, system.job), system, thinking_limit_seconds=thinking_limit_seconds)
    while True:
        try:
            exchange = next(running)
        except StopIteration as end:
            return Played(system.job, tuple(exchanges), end.value)
        if keeps:
            exchanges.append(exchange)
        if watch is not None:
            watch(exchange)


def replay(
    tuner: Tuner, exchanges: Iterable[Exchange], *, watch: Callable[[int, Action[Any]], None] | None = None
) -> Action[Any] | None:
    """Feed a recorded log to a fresh tuner, so that it has the state of the recorded one. `watch` gets the number of every
    exchange, and the action as this tuner asks it: an `Install` in a log has no code, and this one has.

    Returns the tuner's next action, or None if it has returned. Raises ValueError at the first action that differs from the
    recorded one: it is a different tuner, it has another seed, or it depends on something outside of the exchanges.
    """
    action = _next_or_none(tuner, None)
    for number, exchange in enumerate(exchanges):
        if exchange.after_end:  # the tuner may not have returned by then
            continue
        recorded = action_text(exchange.action) if exchange.asked else "nothing"
        asked = "nothing" if action is None else action_text(action)
        if asked != recorded:
            raise ValueError(f"Cannot replay exchange {number}: the tuner asks {asked}, the log has {recorded}.")
        if exchange.asked:
            if watch is not None and action is not None:
                watch(number, action)
            action = _next_or_none(tuner, exchange.answer)
    return action


# ------------------------------------------------------------------------------------------------------------ exchanges


class _TimedTuner:
    """A tuner whose thinking time is measured and limited."""

    def __init__(self, tuner: Tuner, limit_seconds: float) -> None:
        self.seconds = 0.0
        self._tuner = tuner
        self._limit_seconds = limit_seconds

    def next(self, answer: Any) -> Action[Any] | None:
        """The tuner's next action after `answer`; None if it has returned. Raises _RunFailedError for every fault, and
        Rejected where the tuner does not catch that `answer` is a refusal."""
        if not isinstance(self._tuner, Generator):
            raise _RunFailedError(_no_generator(self._tuner))
        started = time.perf_counter()
        try:
            with thinking_limit(self._limit_seconds):
                action = next_action(self._tuner, answer)
        except StopIteration:
            return None
        except _RunFailedError:
            raise
        except ThinkingLimitError as error:
            raise _RunFailedError(
                f"The tuner thought for more than {self._limit_seconds:g} s without asking anything: "
                "it must yield an action, or return."
            ) from error
        except (Exception, SystemExit) as error:
            if isinstance(error, Rejected) and isinstance(answer, Rejected):
                raise
            # Also Rejected, of a setting that the tuner has made or checked by itself: nothing was asked of the system.
            raise _RunFailedError(f"The tuner raised {described(error)}") from error
        finally:
            self.seconds += time.perf_counter() - started
        if not isinstance(action, _ACTIONS):
            raise _RunFailedError(
                f"The tuner yielded {short(repr(action))}, which is no action: `yield from` a Run, Reconfigure, Fork, "
                "Free, Install, Evaluate or MeasureNoise."
            )
        return action

    def close(self) -> None:
        """Tell the tuner that its job is over; ignore what it does about it."""
        if isinstance(self._tuner, Generator):
            with suppress(Exception, SystemExit, ThinkingLimitError), thinking_limit(self._limit_seconds):
                self._tuner.close()


def _until_over(timed: _TimedTuner, system: System, idle_exchanges: int) -> Generator[Exchange, None, Ending]:
    """Carry out what the tuner asks until the job has ended; yields every exchange, and returns how the job ended."""
    branches = [0]  # the branches alive; the one that trained last is the last element
    idle, spent_at = 0, system.now
    action = timed.next(None)
    exchange: Exchange | None = None
    while action is not None:
        ended = yield from _over(system, exchange)
        if ended is not None:
            return ended
        exchange = _exchange(system, action)
        _update_branches(branches, exchange)
        yield exchange
        ended = yield from _over(system, exchange)
        if ended is not None:
            return ended
        spent = system.now - spent_at > _LEAST_PROGRESS * system.job.budget_seconds
        if isinstance(exchange.answer, Window) and (exchange.answer.clocks or spent):
            idle, spent_at = 0, system.now
        else:
            idle += 1
        if idle >= idle_exchanges:
            raise _RunFailedError(f"The tuner trained nothing in {idle} exchanges: it must Run, or return.")
        try:
            action = timed.next(exchange.answer)
        except Rejected as error:
            if not isinstance(action, Run) or action.branch not in branches:
                raise _RunFailedError(f"The tuner did not catch that an action was refused: {error}") from error
            break  # a tuner cannot know every reason why a branch cannot run now, and the job does not depend on the tuner
    return (yield from _run_to_end(system, branches, exchange))


def _over(system: System, last: Exchange | None) -> Generator[Exchange, None, Ending | None]:
    """How the job has ended; None while it runs. First what the last exchange has not told: the last pushes, the evaluation
    that reached the target, and what a reconfiguration in progress has cost. No time passes.

    In simulation that is what happened during an action other than a `Run`. A live job trains on between actions, too.
    """
    ended = _ended(system)
    if ended is not None and not _tells_end(last, system.job):
        with suppress(_RunFailedError):  # the job is over, whatever happens now
            rest = _exchange(
                system, Run(clocks=1, branch=0 if last is None else getattr(last.action, "branch", 0)), asked=False
            )
            yield rest  # also where it tells nothing: a live system counts its exchanges, and resumes by the log of them
    return ended


def _tells_end(exchange: Exchange | None, job: Job) -> bool:
    """Whether an exchange reports the job up to its end."""
    if exchange is None or not isinstance(exchange.answer, Window):
        return False
    return exchange.answer.status != "running" or exchange.answer.end_seconds >= job.budget_seconds


def _run_to_end(system: System, branches: list[int], exchange: Exchange | None) -> Generator[Exchange, None, Ending]:
    """Let the branch that trained last run to the end of the job under its current setting; where it is refused, the one
    that trained before it."""
    while True:
        ended = yield from _over(system, exchange)
        if ended is not None:
            return ended
        if not branches:
            raise _RunFailedError("The tuner freed every branch and returned: there is nothing left that could train.")
        before = system.now
        exchange = _exchange(system, Run(seconds=system.job.budget_seconds / _PIECES, branch=branches[-1]), asked=False)
        yield exchange
        if isinstance(exchange.answer, Rejected):
            if _ended(system) is not None:
                continue  # it has ended before this action, while a tuner would think about it
            if len(branches) == 1:
                raise _RunFailedError(f"The tuner returned, and its job cannot go on: {exchange.answer}")
            branches.pop()
            continue
        stuck: Status = exchange.answer.status
        if stuck != "running" and _ended(system) is None and system.now == before:
            # This branch has diverged or is deadlocked, but the system could still run others: it has no final status.
            return stuck


def _exchange(system: System, action: Action[Any], *, asked: bool = True) -> Exchange:
    try:
        answer = system.perform(_clipped(action, system.job.budget_seconds - system.now))
    except Rejected as error:
        # A copy without traceback: the log keeps every answer, and a traceback would keep the system's frames alive.
        answer = Rejected(str(error))
    except Exception as error:
        raise _RunFailedError(
            f"The system could not carry out {short(repr(action))}: {described(error, of_author=False)}"
        ) from error
    return Exchange(system.now, action, answer, asked)


def _clipped(action: Action[Any], left_seconds: float) -> Action[Any]:
    if isinstance(action, Run) and action.seconds is not None and action.seconds > left_seconds:
        return replace(action, seconds=left_seconds)
    return action


def _ended(system: System) -> Ending | None:
    over = system.now - system.job.budget_seconds
    if over > 0 or (over == 0 and system.status == "running"):
        return "budget"  # even if the target was reached: it was too late
    return None if system.status == "running" else system.status


def _update_branches(branches: list[int], exchange: Exchange) -> None:
    action = exchange.action
    if isinstance(exchange.answer, Rejected):
        return
    if isinstance(action, Fork):
        branches.insert(0, exchange.answer)
    elif isinstance(action, Free) and action.branch in branches:
        branches.remove(action.branch)
    elif isinstance(action, Run) and action.branch in branches:
        branches.remove(action.branch)
        branches.append(action.branch)


# ---------------------------------------------------------------------------------------------------------------- tuner


def _made(factory: TunerFactory, job: Job) -> Tuner:
    """Call the factory at the first `next`, so that its faults and its time count as the tuner's."""
    tuner = factory(job)
    if not isinstance(tuner, Generator):
        raise _RunFailedError(_no_generator(tuner))
    yield from tuner


def _no_generator(made: Any) -> str:
    from tuners.adapters import advice  # here, because it imports the search, which few runs need

    if isinstance(made, Coroutine):
        made.close()  # Python warns of a coroutine that was not awaited
    return f"The tuner is no generator but {short(repr(made))}: {advice(made)}."


def _next_or_none(tuner: Tuner, answer: Any) -> Action[Any] | None:
    with suppress(StopIteration):
        return next_action(tuner, answer)
    return None
