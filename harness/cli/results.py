"""What commands that write a results folder have in common: names of tuners, and what is printed at the end."""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.console import Console

__all__ = ["any_failed", "conclude", "cores", "export", "tuner_names"]


def tuner_names(text: str, *, oracle: bool = True) -> list[str]:
    """The names in "all,NAME,...". The registry refuses an empty name. Without `oracle`, "all" means contestants only."""
    from tuners import embedded, resolve

    every = [name for name in embedded() if oracle or resolve(name).contestant]
    names: list[str] = []
    for name in (part.strip() for part in re.split(r",(?![^\[]*\])", text)):  # not at commas within brackets
        names += every if name == "all" else [name]
    return names


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def conclude(out: Path, console: Console, *, simulated: Path | None = None) -> None:
    """Print the answers and the tables, and write the pages. Live runs are put beside those in `simulated`, or in the
    folder of that name in `out`."""
    from reports import live, page, terminal
    from traces.store import load_results

    results = load_results(out)
    terminal.show(results, console)
    if (beside := live.simulated_of(out, simulated)) is not None:
        for table in live.beside_tables(results, beside):
            console.print(table)
    console.print(f"The page: {page.write(out, simulated)}", highlight=False, soft_wrap=True)


def export(out: Path, console: Console, *, csv: bool, markdown: bool, figures: str | None) -> None:
    """Write the files that `harness report` was asked for beside the page."""
    from reports import export as files

    written = []
    if csv:
        written.append(("Tables and numbers of figures", files.write_csv(out)))
    if markdown:
        written.append(("Answers and tables", files.write_markdown(out)))
    if figures:
        written.append(("Figures", files.write_figures(out, figures)))
    for what, path in written:
        console.print(f"{what}: {path}", highlight=False, soft_wrap=True)


def any_failed(out: Path) -> bool:
    """Whether any run in a results folder ended in an error."""
    from traces import schema, store

    return "error" in store.read(out / "scores.parquet", schema.SCORES)["status"]
