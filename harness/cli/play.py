"""The command `harness play`: one run in this process, with every exchange on the screen, for authors of tuners."""

from __future__ import annotations

import argparse
import math
import sys
import threading
from collections.abc import Callable, Generator
from typing import TYPE_CHECKING, Any

from harness.cli.terminal.parsing import whole
from harness.cli.terminal.standard_output import end_quietly

if TYPE_CHECKING:
    from traces.exchanges import Exchange
    from tuners.actions import Evaluation, Job, Setting, TunerFactory

__all__ = ["ExchangePrinter", "add_play"]

_ABOUT = """\
Play one run of a tuner on a scenario, in this process, and print every action and its answer
with its simulated second. breakpoint() in the tuner stops there; with --pdb, the debugger
starts where the tuner fails. Nothing is written."""

_MORE = """\
  harness play digits cruise --seed 0
  harness play my.toml my_tuners:halving --pdb"""

_LONGEST = 4  # entries of a list that are printed
_BRIEF_SECONDS = 100.0  # the budget of a job below which times are printed in milliseconds
_DAY_SECONDS = 86_400.0  # for thinking about one action: a person may sit in the debugger
_LONG_SECONDS = 10.0  # of thinking about one action, after which the screen says so


def add_play(add_parser: Callable[..., argparse.ArgumentParser]) -> None:
    """Add `harness play` to a parser's commands."""
    command = add_parser("play", help="play one run and print every exchange", description=_ABOUT, epilog=_MORE)
    command.add_argument("scenario", metavar="SCENARIO", help="name or TOML file")
    command.add_argument("tuner", metavar="TUNER", help="name, or package.module:factory")
    command.add_argument("--seed", type=whole(0), default=0, metavar="N", help="seed of all random draws (default: 0)")
    command.add_argument("--pdb", action="store_true", help="start the debugger where the tuner fails")
    command.set_defaults(run=_play, when_unread=end_quietly)


def _play(options: argparse.Namespace) -> int:
    from harness.drive import play
    from harness.scenario import load, system
    from harness.score import ending, score
    from tuners import resolve_contestant
    from tuners.applicability import nothing_to_tune
    from tuners.testing import check_source

    scenario, entry = load(options.scenario), resolve_contestant(options.tuner)
    factory = entry.factory
    try:
        check_source(factory)
    except AssertionError as error:
        print(f"Probably a mistake: {error}", file=sys.stderr)
    made = system(scenario, options.seed)
    if idle := nothing_to_tune(factory, made.job):
        print(f"{entry.name} is not applicable here, and `harness compare` does not run it: {idle}", file=sys.stderr)
    played = play(
        _announced(_debugged(factory) if options.pdb else factory),
        made,
        watch=ExchangePrinter(made.job),
        thinking_limit_seconds=_DAY_SECONDS,
    )
    row = score(played, scenario=scenario.name, tuner=entry.name, seed=options.seed).score
    if played.outcome.trace:
        print(played.outcome.trace, file=sys.stderr)
    _say(ending(row, played.outcome.seconds))
    return 1 if row.status == "error" else 0


def _announced(factory: TunerFactory) -> TunerFactory:
    """The same tuner; the screen says so where it thinks for long."""
    from tuners.actions import Rejected
    from tuners.playing.thinking import next_action

    words = f"(the tuner has not asked anything for {_LONG_SECONDS:g} s; Ctrl-C ends this)"

    def announced(job: Job) -> Any:
        tuner = factory(job)
        return _thinking(tuner) if isinstance(tuner, Generator) else tuner

    def _thinking(tuner: Any) -> Any:
        answer: Any = None
        try:
            while True:
                timer = threading.Timer(_LONG_SECONDS, _say, [words])
                timer.daemon = True
                timer.start()
                try:
                    action = next_action(tuner, answer)
                except StopIteration:
                    return
                finally:
                    timer.cancel()
                try:
                    answer = yield action
                except Rejected as refusal:
                    answer = refusal
        finally:
            tuner.close()

    return announced


def _debugged(factory: TunerFactory) -> TunerFactory:
    """The same tuner; the debugger starts in the frame that raised."""
    import pdb

    def debugged(job: Job) -> Any:
        try:
            tuner = factory(job)
        except Exception as error:
            pdb.post_mortem(error.__traceback__)
            raise
        return _stopping(tuner) if isinstance(tuner, Generator) else tuner

    def _stopping(tuner: Any) -> Any:
        try:
            yield from tuner
        except Exception as error:
            print(f"{type(error).__name__}: {error}")
            pdb.post_mortem(error.__traceback__)
            raise

    return debugged


class ExchangePrinter:
    """Prints each exchange: the second at which it was asked, the action, and below it the tuner's reason and the answer."""

    def __init__(self, job: Job, say: Callable[[str], None] | None = None) -> None:
        self._job = job
        self._say = say or _say
        self._digits = 3 if job.budget_seconds < _BRIEF_SECONDS else 1  # after the point, of seconds
        self._seconds = 0.0
        self._settings = {0: job.start}  # of each branch
        self._has_returned = False  # the tuner, and that was shown

    def __call__(self, exchange: Exchange) -> None:
        returned = not exchange.asked and not exchange.after_end
        if not (returned and self._has_returned and _is_uneventful(exchange.answer)):
            self._show(exchange)
        self._has_returned = self._has_returned or returned
        self._seconds = exchange.seconds

    def _show(self, exchange: Exchange) -> None:
        branch = getattr(exchange.action, "branch", 0)
        before = self._settings.get(branch, self._job.start)
        self._say(
            f"{self._seconds:10.{self._digits}f} s  {_action_words(exchange.action, before)}{_unasked_words(exchange)}"
        )
        if reason := getattr(exchange.action, "reason", ""):
            self._say(f"{'':12}  # {reason}")
        self._say(f"{'':12}  -> {_answer_words(exchange.answer, before, self._digits)}")
        self._note(exchange, branch, before)

    def _note(self, exchange: Exchange, branch: int, before: Setting) -> None:
        from tuners.actions import Cost, Fork, Reconfigure, Rejected, Window

        if isinstance(exchange.answer, Rejected):
            return
        if isinstance(exchange.action, Fork):
            self._settings[exchange.answer] = exchange.action.setting or before
        elif isinstance(exchange.action, Reconfigure) and isinstance(exchange.answer, Cost) and exchange.answer.done:
            self._settings[branch] = exchange.action.setting
        elif isinstance(exchange.answer, Window) and exchange.answer.setting is not None:
            self._settings[branch] = exchange.answer.setting


def _is_uneventful(answer: Any) -> bool:
    """Whether a window tells of nothing but training."""
    from tuners.actions import Window

    return isinstance(answer, Window) and answer.status == "running" and not answer.events


def _unasked_words(exchange: Exchange) -> str:
    """Why the harness asked, and not the tuner; "" where the tuner did."""
    if exchange.asked:
        return ""
    if exchange.after_end:
        return " (the job has ended; its last pushes)"
    return " (the tuner has returned; the job goes on, and only events are shown)"


def _action_words(action: Any, before: Setting) -> str:
    from tuners.actions import Evaluate, Fork, Free, Install, MeasureNoise, Reconfigure, Run

    on = f"branch {action.branch}" if getattr(action, "branch", 0) else ""
    if isinstance(action, Run):
        length = f"clocks={action.clocks}" if action.clocks is not None else f"seconds={action.seconds:g}"
        return f"Run({length}{', ' + on if on else ''})"
    if isinstance(action, Reconfigure):
        how = [w for w in (action.method, "" if action.wait else "wait=False", on) if w]
        return f"Reconfigure({_changes(before, action.setting)}{''.join(', ' + w for w in how)})"
    if isinstance(action, Fork):
        return f"Fork({', '.join(w for w in (on, _changes(before, action.setting or before)) if w)})"
    if isinstance(action, Install):
        return f"Install({action.policy.name}{', ' + on if on else ''})"
    if isinstance(action, MeasureNoise):
        return f"MeasureNoise({on or 'branch 0'}, {action.batches} mini-batches per worker)"
    if isinstance(action, Free | Evaluate):
        return f"{type(action).__name__}({on or 'branch 0'})"
    return repr(action)


def _changes(before: Setting, after: Setting) -> str:
    """The fields that differ."""
    from dataclasses import fields

    pairs = ((f.name, getattr(before, f.name), getattr(after, f.name)) for f in fields(before))
    return ", ".join(f"{name} {_change(a, b)}" for name, a, b in pairs if a != b) or "the same setting"


def _change(before: Any, after: Any) -> str:
    """One field before and after; of long lists, their lengths and what has come and gone."""
    if not isinstance(after, tuple) or max(len(before), len(after)) <= _LONGEST:
        return f"{_short(before)} -> {_short(after)}"
    moved = [f"+{_short(x)}" for x in after if x not in before] + [f"-{_short(x)}" for x in before if x not in after]
    shown = moved[:_LONGEST] + [f"and {len(moved) - _LONGEST} more"] * (len(moved) > _LONGEST)
    return f"{len(before)} -> {len(after)} ({' '.join(shown) or 'in another order'})"


def _short(value: Any) -> str:
    if isinstance(value, tuple):
        return ", ".join(map(_short, value)) or "none"
    return f"{value:.4g}" if isinstance(value, float) else str(value)


def _answer_words(answer: Any, before: Setting, digits: int) -> str:
    """The answer, with `digits` digits of its seconds after the point."""
    from tuners.actions import Cost, Evaluation, GradientNoise, Rejected, Window

    if isinstance(answer, Rejected):
        return f"Rejected: {answer}"
    if isinstance(answer, Cost):
        what, moved = "done" if answer.done else "rolled back", answer.bytes_moved / 1e6
        took, stalled = (f"{seconds:.{digits}f} s" for seconds in (answer.seconds, answer.stall_seconds))
        return f"{what} in {took}, stall {stalled}, {moved:.1f} MB moved"
    if isinstance(answer, Evaluation):
        return _evaluation_words(answer)
    if isinstance(answer, GradientNoise):
        parts = f"squared gradient {answer.square:.4g}, variance {answer.variance:.4g}"
        return f"{parts}, noise scale {answer.samples:.4g}"
    if isinstance(answer, int):
        return f"branch {answer}"
    if not isinstance(answer, Window):
        return "done"
    words = [f"{answer.clocks} pushes in {answer.seconds:.{digits}f} s"]
    if len(answer.pushes.loss) and not math.isnan(answer.pushes.loss[0]):  # a job of which only times are simulated has none
        words.append(f"training loss {answer.pushes.loss[0]:.4g} to {answer.pushes.loss[-1]:.4g}")
    if answer.evaluations:
        words.append(f"validation {_evaluation_words(answer.evaluations[-1])}")
    words += [f"{e.node} {e.event}" for e in answer.events]
    if answer.setting is not None and answer.setting != before:
        words.append(f"now {_changes(before, answer.setting)}")
    return "; ".join(words if answer.status == "running" else [*words, f"ended: {answer.status}"])


def _evaluation_words(found: Evaluation) -> str:
    return f"loss {found.loss:.4g}" + ("" if math.isnan(found.accuracy) else f", accuracy {found.accuracy:.3f}")


def _say(text: str) -> None:
    print(text, flush=True)
