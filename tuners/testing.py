"""A test of the contract: `check_tuner(factory)` raises an error where a tuner breaks the rules of `tuners.actions`.

Call it from your own test::

    def test_my_tuner_keeps_the_contract():
        check_tuner(my_tuner)

It runs the tuner on every toy system of `tuners.toys` and raises AssertionError with what it found: a yield that is no
action, too many actions without time passing, a log that differs between two runs of one seed or that does not replay, a
`Rejected` that ends the tuner, the use of a global random generator, an action that is made and not yielded, or a tuner that
says it has nothing to tune and then changes something. It returns what it checked; ``print(check_tuner(my_tuner))`` says it.
"""

from __future__ import annotations

import ast
import functools
import inspect
import random
import re
import signal
import sys
import textwrap
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine, Generator, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, fields
from typing import Any, NoReturn, TypeVar

import numpy as np

from tuners.actions import Action, Install, Job, Rejected, Run, System, Tuner, TunerFactory
from tuners.applicability import nothing_to_tune
from tuners.entries import entry_of
from tuners.settings import Setting
from tuners.toys import toys

__all__ = [
    "CheckedTuner",
    "Exchanged",
    "ThinkingLimitError",
    "check_source",
    "check_tuner",
    "exchanges",
    "thinking_limit",
]

T = TypeVar("T")

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


@dataclass(frozen=True, slots=True)
class CheckedTuner:
    """What `check_tuner` has checked of a tuner that keeps the contract."""

    name: str
    systems: tuple[str, ...]
    runs: int  # also those with refusals
    exchanges: int  # of all runs
    asked: tuple[tuple[str, int], ...]  # actions by name, and how often, in the plain runs
    unasked: tuple[str, ...]  # actions that the source names and no toy made the tuner ask: they are not tested
    refused: int  # exchanges of all runs that were refused on purpose
    source: bool  # whether the source was there to be read

    def __str__(self) -> str:
        """The same in sentences."""
        asked = ", ".join(f"{name} {count}" for name, count in self.asked) or "nothing"
        untested = ""
        if self.unasked:
            untested = (
                f" Not tested, because no system made it ask: {', '.join(self.unasked)}. Give `systems` on which it "
                "does, or options of the tuner by which it asks sooner."
            )
        source = "no action is made and dropped" if self.source else "the source was not there to be read"
        systems = f"{len(self.systems)} toy systems ({', '.join(self.systems)})"
        return (
            f"{self.name} keeps the contract: {systems}, {self.runs} runs, {self.exchanges} exchanges, "
            f"{self.refused} of them refused on purpose.\n"
            f"It asked: {asked}.{untested}\n"
            "Checked: every yield is an action; time passes; a second run of the same seed is the same, and a replayed log; "
            f"it survives refusals; no global random numbers; {source}."
        )


def check_tuner(
    factory: TunerFactory,
    *,
    systems: Mapping[str, Callable[[int], System]] | None = None,
    seed: int = 7,
    most: int = 400,
    thinking_limit_seconds: float = 60.0,
) -> CheckedTuner:
    """Raise AssertionError, saying where and what, unless tuners of `factory` keep the contract; return what was checked.

    `systems` has, by name, functions that make a new system from a seed; the default is the toys. The tuner makes at most
    `most` exchanges on each, and thinks about one for `thinking_limit_seconds` of the host at most (checked only in the main
    thread). Of several faults, each kind is named once.
    """
    try:
        entry_of(factory)
    except ValueError as error:
        raise AssertionError(str(error)) from None
    faults: list[AssertionError] = []
    source = _checked(faults, check_source, factory)
    asked: Counter[str] = Counter()
    used = toys() if systems is None else systems
    runs = made = refused = 0
    for name, make in used.items():
        check = _Check(factory, functools.partial(make, seed), f"on {name!r}", most, thinking_limit_seconds)
        log = _checked(faults, check.one_run)
        if log is not None:
            asked.update(type(e.action).__name__ for e in log)
            for rule in (check.does_what_it_says, check.is_deterministic, check.replays, check.survives_refusals):
                _checked(faults, rule, log)
        runs, made, refused = runs + check.runs, made + check.exchanges, refused + check.refused
    if faults:
        raise AssertionError(_in_words(faults)) from faults[0].__cause__
    unasked = tuple(sorted(_actions_in(factory) - asked.keys()))
    return CheckedTuner(_name(factory), tuple(used), runs, made, tuple(asked.most_common()), unasked, refused, bool(source))


def _checked(faults: list[AssertionError], check: Callable[..., T], *given: Any) -> T | None:
    """What a check returns; None where it fails, with its error at the end of `faults`."""
    try:
        return check(*given)
    except AssertionError as error:
        faults.append(error)
        return None


def _in_words(faults: list[AssertionError]) -> str:
    """The faults, a line for each kind: the first of those that differ only in the toy and in numbers."""
    kinds: dict[str, list[str]] = {}
    for fault in map(str, faults):
        kinds.setdefault(re.sub(r"on '[^']*'|\d+", "", fault), []).append(fault)
    lines = [f"{first}{f' (and {len(more)} times more)' if more else ''}" for first, *more in kinds.values()]
    return lines[0] if len(lines) == 1 else "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


def _actions_in(factory: TunerFactory) -> set[str]:
    """The actions that the factory's own source names; none if there is no source."""
    plain = inspect.unwrap(factory.func if isinstance(factory, functools.partial) else factory)
    try:
        tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    except (OSError, TypeError, SyntaxError):
        return set()
    return {n.id for n in ast.walk(tree) if isinstance(n, ast.Name)} & {kind.__name__ for kind in Action.__subclasses__()}


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
    return list(_exchanges(_started(factory, system.job), system, most, refuses, thinking_limit_seconds))


def check_source(factory: TunerFactory) -> bool:
    """Raise AssertionError where ``yield from`` is missing before an action or a generator: Python itself says nothing then.

    Reads, of the factory's module, the factory and what it calls there; the whole module where the factory is none of its
    functions. Returns False for a factory without source, which passes.
    """
    plain = inspect.unwrap(factory.func if isinstance(factory, functools.partial) else factory)
    module = sys.modules.get(getattr(plain, "__module__", ""), None)
    try:
        source = textwrap.dedent(inspect.getsource(module if module is not None else plain))
    except (OSError, TypeError):
        return False
    known = vars(module) if module is not None else {}
    for node in _used_nodes(ast.parse(source), getattr(plain, "__name__", "")):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
            called = _named(node.value.func, known)
            lazy = isinstance(called, type) and issubclass(called, Action)
            if lazy or inspect.isgeneratorfunction(called):
                text = ast.unparse(node.value)
                _fail(f"Line {node.lineno} of {plain.__module__} makes {text} and drops it: write `yield from {text}`.")
    return True


def _used_nodes(module: ast.Module, name: str) -> Iterator[ast.AST]:
    """The nodes of the function or class `name` at the top of a module, and of those there that it names, and so on; all
    nodes where there is no such function."""
    parts = {n.name: n for n in module.body if isinstance(n, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)}
    if name not in parts:
        yield from ast.walk(module)
        return
    todo, seen = [name], {name}
    while todo:
        for node in ast.walk(parts[todo.pop()]):
            yield node
            if isinstance(node, ast.Name) and node.id in parts.keys() - seen:
                seen.add(node.id)
                todo.append(node.id)


class _Check:
    """The checks of one tuner on one system."""

    def __init__(
        self, factory: TunerFactory, system: Callable[[], System], where: str, most: int, thinking_limit_seconds: float
    ) -> None:
        self.factory = factory
        self.system = system
        self.where = where
        self.most = most
        self.thinking_limit_seconds = thinking_limit_seconds
        self.runs = self.exchanges = self.refused = 0

    def one_run(self) -> list[Exchanged]:
        before = random.getstate(), _numpy_state()
        log = self._log("as it is")
        if (random.getstate(), _numpy_state()) != before:
            self._fail("draws from a global random generator: make one from job.seed.")
        return log

    def does_what_it_says(self, log: list[Exchanged]) -> None:
        """A tuner that says it has nothing to tune changes nothing."""
        said = nothing_to_tune(self.factory, self.system().job)
        done = next((e for e in log if not isinstance(e.action, Run) and not isinstance(e.answer, Rejected)), None)
        if said and done is not None:
            short = self._short(done)
            self._fail(f'says that it has nothing to tune ("{said}"), and does {short}: correct its `nothing_to_tune`.')

    def is_deterministic(self, log: list[Exchanged]) -> None:
        again = self._log("a second time")
        self._same(log, again, "asks differently in a second run of the same seed")

    def replays(self, log: list[Exchanged]) -> None:
        """Answer a new tuner from the log: it must ask the same again, as for a run that is resumed."""
        asked, tuner, answer = list[Exchanged](), _started(self.factory, self.system().job), None
        try:
            for exchange in log:
                action = tuner.throw(answer) if isinstance(answer, Rejected) else tuner.send(answer)
                asked.append(Exchanged(action, None))
                answer = exchange.answer
        except StopIteration:
            pass
        tuner.close()
        self._same(log, asked, "asks differently when its log is replayed")

    def survives_refusals(self, log: list[Exchanged]) -> None:
        """Refuse the first and the last action of each type, then all actions.

        Only `Run(branch=0)` is never refused: a system always trains the job's own branch while the job lasts.
        """
        kinds: dict[type[Any], list[int]] = {}
        for index, exchange in enumerate(log):
            if _may_be_refused(exchange.action):
                kinds.setdefault(type(exchange.action), []).append(index)
        for index in sorted({i for found in kinds.values() for i in (found[0], found[-1])}):
            self._log(f"with exchange {index} ({self._short(log[index])}) refused", functools.partial(_is_number, index))
        self._log("with all but Run(branch=0) refused", lambda _index, action: _may_be_refused(action))

    def _log(
        self, when: str, refuses: Callable[[int, Action[Any]], bool] = lambda _index, _action: False
    ) -> list[Exchanged]:
        try:
            log = exchanges(
                self.factory,
                self.system(),
                most=self.most,
                refuses=refuses,
                thinking_limit_seconds=self.thinking_limit_seconds,
            )
        except AssertionError as error:
            raise AssertionError(f"{_name(self.factory)} {self.where}, {when}: {error}") from error
        self.runs += 1
        self.exchanges += len(log)
        self.refused += sum(refuses(index, exchange.action) for index, exchange in enumerate(log))
        return log

    def _same(self, log: list[Exchanged], again: list[Exchanged], complaint: str) -> None:
        first, second = ([str(e) for e in each] for each in (log, again))
        if first != second:
            pairs = enumerate(zip(first, second, strict=False))
            at = next((i for i, (a, b) in pairs if a != b), min(len(first), len(second)))
            was, now = (self._short(each[at]) if at < len(each) else "nothing" for each in (log, again))
            self._fail(f"{complaint}: exchange {at} was {was}, is {now}.")

    def _short(self, exchange: Exchanged) -> str:
        return exchange.in_short(self.system().job.start)

    def _fail(self, complaint: str) -> NoReturn:
        _fail(f"{_name(self.factory)} {self.where} {complaint}")


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
            _fail(f"It made {index - moved_at} exchanges in a row in which no time passed: yield a Run, or return.")
    _close(tuner)


def _shown(name: str, value: Any, start: Setting) -> str:
    """A field of an action as text; of a setting, what differs from the `start`."""
    if not isinstance(value, Setting):
        return f"{name}={value!r}"
    changed = [f"{f.name}={v!r}" for f in fields(value) if (v := getattr(value, f.name)) != getattr(start, f.name)]
    return f"the start with {', '.join(changed)}" if changed else "the start"


def _may_be_refused(action: Action[Any]) -> bool:
    return not (isinstance(action, Run) and action.branch == 0)


def _is_number(wanted: int, index: int, action: Action[Any]) -> bool:
    del action
    return index == wanted


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
            action = tuner.throw(answer) if isinstance(answer, Rejected) else tuner.send(answer)
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
        _fail(f"It yields {action!r}, which is no action: yield one of those in tuners.actions.")
    return action


def _started(factory: TunerFactory, job: Job) -> Tuner:
    from tuners.adapters import advice  # here, because it imports the search, which few runs need

    tuner = factory(job)
    if not isinstance(tuner, Generator):
        if isinstance(tuner, Coroutine):
            tuner.close()  # Python warns of a coroutine that was not awaited
        _fail(f"{_name(factory)} returns {type(tuner).__name__}, not a generator: {advice(tuner)}.")
    return tuner


def _close(tuner: Tuner) -> None:
    try:
        tuner.close()
    except RuntimeError as error:
        raise AssertionError(f"It goes on when it is closed ({error}): let GeneratorExit pass.") from error


def _named(expression: ast.expr, known: Mapping[str, Any]) -> Any:
    """The object that a dotted name has in a module, or None."""
    if isinstance(expression, ast.Name):
        return known.get(expression.id)
    if isinstance(expression, ast.Attribute):
        return getattr(_named(expression.value, known), expression.attr, None)
    return None


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return name, bytes(keys), *rest  # type: ignore[arg-type]


def _name(factory: TunerFactory) -> str:
    return getattr(factory, "__name__", None) or repr(factory)


def _fail(message: str) -> NoReturn:
    raise AssertionError(message)


class ThinkingLimitError(BaseException):
    """Raised inside a tuner that thinks too long. A BaseException, so that the tuner's `except Exception` lets it pass."""


@contextmanager
def thinking_limit(seconds: float) -> Iterator[None]:
    """Raise ThinkingLimitError in the body after `seconds` of the host, and again every second until the body ends.

    Does nothing outside the main thread, because Python delivers signals only there. Restores a timer that was running.
    """
    if threading.current_thread() is not threading.main_thread() or not hasattr(signal, "setitimer"):
        yield
        return
    armed = True  # a signal that arrives while the timer is being removed must not raise outside of the body

    def ring(*_: object) -> None:
        if armed:
            raise ThinkingLimitError

    started = time.monotonic()
    handler = signal.signal(signal.SIGALRM, ring)
    left, interval = signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)
    try:
        yield
    finally:
        armed = False
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        signal.signal(signal.SIGALRM, handler)
        if left:
            signal.setitimer(signal.ITIMER_REAL, max(left - (time.monotonic() - started), 1e-3), interval)
