"""Show the progress of comparisons, trainings and fits: bars on a terminal, one line in a notebook, else plain lines."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol, TextIO

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, SpinnerColumn, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column, Table
from rich.text import Text

from harness.comparison.compare import Event, Finished, Planned, RunKey, Underway
from harness.comparison.forecast import Forecast
from harness.lines import say

if TYPE_CHECKING:
    from harness.training.train import TrainingProgress

__all__ = ["ProgressDisplay", "one_line", "stages", "terminal", "training", "watching"]

_LINE_RUNS = 50  # runs of a training per line of output
_STANDINGS = 5  # tuners in the standings so far
_QUIET_SECONDS = 30.0  # without a line, after which plain lines say that a run is in progress


class ProgressDisplay(Protocol):
    """Is called with every event, and counts the runs that ended in an error."""

    errors: int

    def __call__(self, event: Event) -> None: ...


def terminal() -> Console:
    """Standard output. If it is no terminal, its width is COLUMNS, but at least 80; without COLUMNS, 100."""
    if sys.stdout.isatty():
        return Console()
    said = os.environ.get("COLUMNS", "")
    return Console(width=max(80, int(said)) if said.isdecimal() else 100)


@contextmanager
def watching(console: Console) -> Iterator[ProgressDisplay]:
    """The display for a comparison: bars if the console is a terminal, else lines."""
    if not console.is_terminal:
        yield _Lines(console)
        return
    bar = 24 if console.width >= 100 else 10
    longest = max(20, console.width - bar - 33)  # the width for names of runs, beside the bar, count, clock and a short note
    columns = (
        TextColumn("{task.description}", table_column=Column(no_wrap=True, max_width=longest)),
        BarColumn(bar_width=bar, table_column=Column(no_wrap=True, min_width=bar)),
        TextColumn("{task.fields[count]}", table_column=Column(no_wrap=True, min_width=5, justify="right")),
        TimeElapsedColumn(table_column=Column(no_wrap=True, min_width=7)),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, ratio=1)),
    )
    with _ProgressAndStandings(*columns, console=console, transient=True, expand=True) as bars:
        yield _Bars(bars)


@contextmanager
def one_line(stream: TextIO) -> Iterator[ProgressDisplay]:
    """The display for a comparison in a notebook: one line, which every finished run replaces."""
    shown = _OneLine(stream)
    try:
        yield shown
    finally:
        shown.clear()


@contextmanager
def stages(what: str) -> Iterator[Callable[[str], None]]:
    """A function that shows on standard error what is being done now, and for how long: if that is no terminal, by a line
    now and then."""
    console = Console(stderr=True)
    if not console.is_terminal:
        began = last = time.monotonic()

        def line(stage: str) -> None:
            nonlocal last
            if (now := time.monotonic()) - last >= _QUIET_SECONDS:
                last = now
                print(f"{what}: {stage} ({now - began:.0f} s so far)", file=sys.stderr, flush=True)

        yield line
        return
    columns = (SpinnerColumn(), TextColumn("{task.description}", table_column=Column(no_wrap=True)), TimeElapsedColumn())
    with Progress(*columns, console=console, transient=True) as shown:
        task = shown.add_task(escape(what), total=None)
        yield lambda stage: shown.update(task, description=escape(f"{what}: {stage}"))


@contextmanager
def training(console: Console, runs: int) -> Iterator[Callable[[TrainingProgress], None]]:
    """The display for a training, called after every run: a bar if the console is a terminal, else a line now and then."""
    if not console.is_terminal:
        yield lambda progress: _line(console, progress)
        return
    columns = (
        TextColumn("{task.description}"),
        BarColumn(bar_width=24),
        TextColumn("{task.completed:.0f}/{task.total:.0f}"),
        TimeElapsedColumn(),
        TextColumn("{task.fields[note]}", table_column=Column(no_wrap=True, ratio=1)),
    )
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        task = bars.add_task("[bold]runs", total=runs, note="starting")
        yield lambda progress: bars.update(task, completed=progress.run, note=escape(_outcome(progress)))


def _line(console: Console, progress: TrainingProgress) -> None:
    if progress.run % _LINE_RUNS == 0 or progress.run == progress.runs:
        say(console, f"{progress.run}/{progress.runs}  {_outcome(progress)}")


def _outcome(progress: TrainingProgress) -> str:
    return f"{progress.policy}: {progress.status} after {progress.pushes} pushes, {progress.seconds:.0f} s"


class _Lines:
    """One line per run that is over; while none is, one now and then of a run in progress."""

    def __init__(self, console: Console) -> None:
        self.errors = 0
        self._console = console
        self._forecast = Forecast()
        self._finished = self._all = 0
        self._last_line = time.monotonic()

    def __call__(self, event: Event) -> None:
        now = time.monotonic()
        self._forecast.add(event, now)
        if isinstance(event, Planned):
            self._finished, self._all = event.made_before, event.runs
            before = f", {event.made_before} of them made before" if event.made_before else ""
            self._print(f"{event.runs} run{'' if event.runs == 1 else 's'}{before}.")
        elif isinstance(event, Underway):
            if now - self._last_line >= _QUIET_SECONDS:
                share = self._forecast.share(event)
                left = _left(self._forecast)
                silent = f"; {words}" if (words := _silence(event)) else ""
                self._print(f"{self._finished}/{self._all}  {_name(event.run)} is running: {share:.0%}{left}{silent}")
        elif isinstance(event, Finished):
            self._finished += 1
            self.errors += event.done.status == "error"
            if event.done.status == "not applicable":
                return  # nothing was run: with all tuners that is most lines, and the answer names these with the reason
            self._print(f"{self._finished}/{self._all}  {_name(event.run)}: {_ending(event)}")

    def _print(self, text: str) -> None:
        self._last_line = time.monotonic()
        say(self._console, text)


def _silence(event: Underway) -> str:
    """How long nothing has been heard of the run, where that is long; else ""."""
    seconds = event.progress.silent_seconds
    return f"its tuner has been thinking, or one action has taken, {seconds:.0f} s" if seconds else ""


class _OneLine:
    """One line of text with what is finished, what is left, and the tuner that leads."""

    def __init__(self, stream: TextIO) -> None:
        self.errors = 0
        self._stream = stream
        self._forecast = Forecast()
        self._finished = self._all = self._width = 0

    def __call__(self, event: Event) -> None:
        self._forecast.add(event, time.monotonic())
        if isinstance(event, Planned):
            self._finished, self._all = event.made_before, event.runs
            self._write(f"{event.runs} runs, {event.made_before} of them made before")
        elif isinstance(event, Finished):
            self._finished += 1
            self.errors += event.done.status == "error"
            first = self._forecast.standings(event.run.scenario)[:1]
            leads = "".join(f"; {event.run.scenario} so far: {s.tuner}, {s.seconds:.0f} s" for s in first)
            self._write(f"{self._finished}/{self._all} runs{_left(self._forecast)}{leads}")

    def clear(self) -> None:
        """Remove the line."""
        self._write("")
        self._stream.write("\r")
        self._stream.flush()

    def _write(self, text: str) -> None:
        # A notebook, like a terminal, overwrites a line after a carriage return.
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)


class _ProgressAndStandings(Progress):
    """Bars, and below them the standings so far."""

    standings: Table | None = None

    def get_renderables(self) -> Iterable[RenderableType]:
        yield from super().get_renderables()
        if self.standings is not None:
            yield self.standings


class _Bars:
    """A bar for all runs, one for each run in progress, the standings, and a line for each run that failed."""

    def __init__(self, bars: _ProgressAndStandings) -> None:
        self.errors = 0
        self._bars = bars
        self._forecast = Forecast()
        self._all_bar = bars.add_task("[bold]all runs", total=None, count="", note="starting processes")
        self._finished = self._all = 0
        self._runs: dict[RunKey, TaskID] = {}

    def __call__(self, event: Event) -> None:
        self._forecast.add(event, time.monotonic())
        if isinstance(event, Planned):
            self._finished, self._all = event.made_before, event.runs
            self._count()
        elif isinstance(event, Underway):
            self._show(event)
        else:
            self._finished += 1
            notes = [left] if (left := _left(self._forecast)[2:]) else []
            self._count(note=escape("; ".join([*notes, f"last: {_name(event.run)}: {_ending(event)}"])))
            self._bars.standings = self._standings(event.run.scenario)
            if event.run in self._runs:
                self._bars.remove_task(self._runs.pop(event.run))
            if event.done.status == "error":
                self.errors += 1
                say(self._bars.console, f"{_name(event.run)}: {event.done.reason}", wraps=True)

    def __rich__(self) -> RenderableType:
        """The bars as they are now."""
        return self._bars.get_renderable()

    def _count(self, note: str = "starting processes") -> None:
        count = f"{self._finished}/{self._all}"
        self._bars.update(self._all_bar, total=self._all, completed=self._finished, count=count, note=note)

    def _show(self, event: Underway) -> None:
        at = event.progress
        if event.run not in self._runs:
            self._runs[event.run] = self._bars.add_task(escape(_name(event.run)), total=1.0, count="", note="")
        note = "of what is expected"
        if math.isfinite(at.accuracy):
            note = f"accuracy {at.accuracy:.3f}"
        elif math.isfinite(at.loss):
            note = f"loss {at.loss:.4g}"
        note = _silence(event) or note
        share = self._forecast.share(event)
        self._bars.update(self._runs[event.run], completed=share, count=f"{share:.0%}", note=note)

    def _standings(self, scenario: str) -> Table | None:
        found = self._forecast.standings(scenario)
        if not found:
            return None
        table = Table.grid(padding=(0, 2))
        table.add_row(Text(f"{scenario} so far", style="bold"), Text("median, s", style="dim"), Text("runs", style="dim"))
        for one in found[:_STANDINGS]:
            missed = f", {one.missed} without target" if one.missed else ""
            table.add_row(Text(one.tuner), Text(f"{one.seconds:.0f}", justify="right"), Text(f"{one.finished}{missed}"))
        if len(found) > _STANDINGS:
            table.add_row(Text(f"... and {len(found) - _STANDINGS} more", style="dim"))
        return table


def _left(forecast: Forecast) -> str:
    """The time that is left, as "; about 12 s left", or "" while nothing is known of it."""
    seconds = forecast.left_seconds(time.monotonic())
    if seconds is None:
        return ""
    return f"; about {seconds:.0f} s left" if seconds < 90 else f"; about {seconds / 60:.0f} min left"


def _name(run: RunKey) -> str:
    return f"{run.scenario} {run.tuner} seed {run.seed}"


def _ending(event: Finished) -> str:
    done = event.done
    if done.status == "target":
        return f"target in {done.completion_seconds:.0f} s"
    return done.reason if done.status == "error" else done.status
