"""The rules of `tuners.actions` that `check_tuner` checks, each on one system."""

from __future__ import annotations

import functools
import random
import re
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import numpy as np

from tuners.actions import Action, Rejected, Run, System, TunerFactory
from tuners.applicability import nothing_to_tune
from tuners.entries import entry_of
from tuners.playing.thinking import ThinkingLimitError, next_action
from tuners.testing.exchange_log import Exchanged, exchanges, name_of, started
from tuners.testing.source import actions_in, check_source
from tuners.testing.toys import toys

__all__ = ["CheckedTuner", "check_tuner"]

T = TypeVar("T")


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
    thread; the checks end there). Of several faults, each kind is named once.
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
                if not _thinks_too_long(faults):
                    _checked(faults, rule, log)
        if _thinks_too_long(faults):
            break  # it would take the whole limit on each of the other systems, too
        runs, made, refused = runs + check.runs, made + check.exchanges, refused + check.refused
    if faults:
        raise AssertionError(_in_words(faults)) from faults[0].__cause__
    unasked = tuple(sorted(actions_in(factory) - asked.keys()))
    return CheckedTuner(
        name_of(factory), tuple(used), runs, made, tuple(asked.most_common()), unasked, refused, bool(source)
    )


def _checked(faults: list[AssertionError], check: Callable[..., T], *given: Any) -> T | None:
    """What a check returns; None where it fails, with its error at the end of `faults`."""
    try:
        return check(*given)
    except AssertionError as error:
        faults.append(error)
        return None


def _thinks_too_long(faults: list[AssertionError]) -> bool:
    return bool(faults) and isinstance(getattr(faults[-1].__cause__, "__cause__", None), ThinkingLimitError)


def _in_words(faults: list[AssertionError]) -> str:
    """The faults, a line for each kind: the first of those that differ only in the toy and in numbers."""
    kinds: dict[str, list[str]] = {}
    for fault in map(str, faults):
        kinds.setdefault(re.sub(r"on '[^']*'|\d+", "", fault), []).append(fault)
    lines = [f"{first}{f' (and {len(more)} times more)' if more else ''}" for first, *more in kinds.values()]
    return lines[0] if len(lines) == 1 else "\n".join(f"{i}. {line}" for i, line in enumerate(lines, 1))


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
        asked, tuner, answer = list[Exchanged](), started(self.factory, self.system().job), None
        try:
            for exchange in log:
                action = next_action(tuner, answer)
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
            raise AssertionError(f"{name_of(self.factory)} {self.where}, {when}: {error}") from error
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
        raise AssertionError(f"{name_of(self.factory)} {self.where} {complaint}")


def _may_be_refused(action: Action[Any]) -> bool:
    return not (isinstance(action, Run) and action.branch == 0)


def _is_number(wanted: int, index: int, action: Action[Any]) -> bool:
    del action
    return index == wanted


def _numpy_state() -> tuple[Any, ...]:
    name, keys, *rest = np.random.get_state()  # noqa: NPY002
    return name, bytes(keys), *rest  # type: ignore[arg-type]
