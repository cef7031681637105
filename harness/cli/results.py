"""What commands that write a results folder have in common: names of tuners, and what is printed at the end."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from importlib import import_module
from pathlib import Path
from threading import Timer
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["any_failed", "conclude", "export", "importing_reports", "interrupted", "tuner_names"]

_IMPORT_AFTER_SECONDS = 3.0
"""When workers have started, which nothing should delay."""


def tuner_names(text: str, *, oracle: bool = True) -> list[str]:
    """The names in "all,NAME,...". The registry refuses an empty name. Without `oracle`, "all" means contestants only."""
    from tuners import embedded, resolve, split_names

    every = [name for name in embedded() if oracle or resolve(name).contestant]
    names: list[str] = []
    for name in split_names(text):
        names += every if name == "all" else [name]
    return names


@contextmanager
def importing_reports() -> Iterator[None]:
    """Import what `conclude` needs while workers play runs: it takes more than a second, in which nothing else runs."""
    timer = Timer(_IMPORT_AFTER_SECONDS, _import_reports)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()


def _import_reports() -> None:
    for name in ("reports.pages.page", "reports.output.terminal", "scipy.stats"):
        with suppress(Exception):  # `conclude` imports it again, and says what is wrong
            import_module(name)


def conclude(out: Path, console: Console, *, simulated: Path | None = None) -> None:
    """Print the answers and the tables, and write the pages. Live runs are put beside those in `simulated`, or in the
    folder of that name in `out`."""
    from harness.cli.terminal.display import stages
    from harness.lines import say
    from reports.fidelity import live
    from reports.output import terminal
    from reports.pages import page
    from reports.verdicts.conclusions import missing_runs
    from reports.verdicts.summary import summary
    from traces.store import load_results

    results = load_results(out)
    summed = summary(results)
    terminal.show(results, console, summed)
    if (beside := live.simulated_of(out, simulated)) is not None:
        for table in live.beside_tables(results, beside):
            console.print(table)
        for sentence in missing_runs(beside):
            say(console, f"In simulation, {sentence}", wraps=True)
    if results.missing or (beside is not None and beside.missing):
        say(console, "The command that began them goes on with --resume.", wraps=True)
    with stages("Writing the page"):  # of fifty scenarios, some minutes
        written = page.write(out, simulated, table=summed)
    say(console, f"The page: {written}")


def export(out: Path, console: Console, *, csv: bool, markdown: bool, figures: str | None) -> None:
    """Write the files that `harness report` was asked for beside the page."""
    from harness.lines import say
    from reports.output import export as files

    written = []
    if csv:
        written.append(("Tables and numbers of figures", files.write_csv(out)))
    if markdown:
        written.append(("Answers and tables", files.write_markdown(out)))
    if figures:
        written.append(("Figures", files.write_figures(out, figures)))
    for what, path in written:
        say(console, f"{what}: {path}")


def interrupted(out: Path) -> int:
    """Say, after Ctrl-C, what is in `out` and how the comparison goes on; return the exit status."""
    from harness.comparison.results import finished_runs

    print("\nharness: interrupted.", file=sys.stderr)
    if (out / "manifest.json").is_file():
        count = finished_runs(out)
        runs = "No run is finished yet" if not count else f"{count} run{' is' if count == 1 else 's are'} finished, in {out}"
        print(f"{runs}; the same command with --resume goes on.", file=sys.stderr)
    return 130


def any_failed(out: Path) -> bool:
    """Whether any run in a results folder ended in an error."""
    from traces import schema, store

    return "error" in store.read(out / "scores.parquet", schema.SCORES)["status"]
