"""Show the progress of a comparison or a training: bars on a terminal, plain lines elsewhere."""

from __future__ import annotations

import math
import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Protocol

from rich.console import Console, RenderableType
from rich.markup import escape
from rich.progress import BarColumn, Progress, TaskID, TextColumn, TimeElapsedColumn
from rich.table import Column

from harness.comparison.compare import Event, Finished, Planned, RunKey, Underway

if TYPE_CHECKING:
    from harness.training.train import TrainingProgress

__all__ = ["ProgressDisplay", "terminal", "training", "watching"]

_LINE_RUNS = 50  # runs of a training per line of output


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
    with Progress(*columns, console=console, transient=True, expand=True) as bars:
        yield _Bars(bars)


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
        console.print(escape(f"{progress.run}/{progress.runs}  {_outcome(progress)}"), highlight=False, soft_wrap=True)


def _outcome(progress: TrainingProgress) -> str:
    return f"{progress.policy}: {progress.status} after {progress.pushes} pushes, {progress.seconds:.0f} s"


class _Lines:
    """One line per run that is over."""

    def __init__(self, console: Console) -> None:
        self.errors = 0
        self._console = console
        self._finished = self._all = 0

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._finished, self._all = event.made_before, event.runs
            before = f", {event.made_before} of them made before" if event.made_before else ""
            self._console.print(f"{event.runs} runs{before}.", highlight=False)
        elif isinstance(event, Finished):
            self._finished += 1
            self.errors += event.done.status == "error"
            text = f"{self._finished}/{self._all}  {_name(event.run)}: {_ending(event)}"
            self._console.print(escape(text), highlight=False, soft_wrap=True)


class _Bars:
    """A bar for all runs, one for each run in progress, and a line for each run that failed."""

    def __init__(self, bars: Progress) -> None:
        self.errors = 0
        self._bars = bars
        self._all_bar = bars.add_task("[bold]all runs", total=None, count="", note="starting")
        self._finished = self._all = 0
        self._runs: dict[RunKey, TaskID] = {}

    def __call__(self, event: Event) -> None:
        if isinstance(event, Planned):
            self._finished, self._all = event.made_before, event.runs
            self._count()
        elif isinstance(event, Underway):
            self._show(event)
        else:
            self._finished += 1
            self._count(note=escape(f"last: {_name(event.run)}: {_ending(event)}"))
            if event.run in self._runs:
                self._bars.remove_task(self._runs.pop(event.run))
            if event.done.status == "error":
                self.errors += 1
                self._bars.console.print(escape(f"{_name(event.run)}: {event.done.reason}"), highlight=False)

    def __rich__(self) -> RenderableType:
        """The bars as they are now."""
        return self._bars.get_renderable()

    def _count(self, note: str = "starting") -> None:
        count = f"{self._finished}/{self._all}"
        self._bars.update(self._all_bar, total=self._all, completed=self._finished, count=count, note=note)

    def _show(self, event: Underway) -> None:
        at = event.progress
        if event.run not in self._runs:
            self._runs[event.run] = self._bars.add_task(escape(_name(event.run)), total=at.budget_seconds, count="", note="")
        note = "of its budget"
        if math.isfinite(at.accuracy):
            note = f"accuracy {at.accuracy:.3f}"
        elif math.isfinite(at.loss):
            note = f"loss {at.loss:.4g}"
        share = f"{at.seconds / at.budget_seconds:.0%}"
        self._bars.update(self._runs[event.run], completed=at.seconds, count=share, note=note)


def _name(run: RunKey) -> str:
    return f"{run.scenario} {run.tuner} seed {run.seed}"


def _ending(event: Finished) -> str:
    done = event.done
    if done.status == "target":
        return f"target in {done.completion_seconds:.0f} s"
    return done.reason if done.status == "error" else done.status
