"""What `harness compare` and `harness report` print: the answer first, then the tables."""

from __future__ import annotations

from typing import TYPE_CHECKING

import polars as pl

from reports.output.terminal_table import render
from reports.verdicts import arenas, calibration_ranks
from reports.verdicts.conclusions import NOTHING_TO_TUNE, Answer, answer, missing_runs, not_applicable
from reports.verdicts.summary import summary

if TYPE_CHECKING:
    from rich.console import Console
    from rich.text import Text

    from traces.store import Results

__all__ = ["show"]

_TABLES = 8  # scenarios, at the most, whose tables are printed; of more there are only the answers


def show(results: Results, console: Console, table: pl.DataFrame | None = None) -> None:
    """Print the answer over all scenarios and over each family, then each scenario's answer and its table. `table` is the
    summary of `results`, where the caller has it already."""
    from rich.text import Text

    from harness.lines import say

    table = summary(results) if table is None else table
    names = list(dict.fromkeys(table["scenario"].to_list()))
    if len(names) > 1:
        for found in arenas.by_family(results, names):
            console.print(_text(arenas.answer(found)), soft_wrap=True)
            for sentence in arenas.sentences(found):
                say(console, sentence, style="dim", wraps=True)
            console.print()
    for name in names:
        rows = table.filter(pl.col("scenario") == name)
        said = _text(answer(rows))
        console.print(said if len(names) == 1 else Text.assemble(f"{name}: ", said), soft_wrap=True)
        for sentence in _causes(results, name):
            say(console, sentence)
        if (under := calibration_ranks.ranks(results, rows)) is not None:
            for sentence in calibration_ranks.sentences(under):
                say(console, sentence)
        if len(names) <= _TABLES:
            for one in render(rows, columns=max(50, console.width)):
                console.print(one)
        for oracle, seen in results.oracles.get(name, {}).items():
            if len(names) <= _TABLES:
                settings = seen["settings"]
                say(console, f"{oracle} is the best of {settings} fixed setting{'s' * (settings != 1)}.", wraps=True)
    for sentence in missing_runs(results):
        say(console, sentence, wraps=True)
    if len(names) > _TABLES:
        where = f"The tables of the {len(names)} scenarios, and who does not apply to them, are on their pages."
        say(console, where, wraps=True)
        return
    idle = not_applicable(results)
    if not names:
        say(console, f"{NOTHING_TO_TUNE}; nothing was run." if idle else "No run is in this folder yet.", wraps=True)
    for sentence in idle:
        say(console, sentence, wraps=True)


def _causes(results: Results, scenario: str) -> list[str]:
    """Why no run of a scenario reached its target: what is said of most of them; nothing where one did, or all failed."""
    runs = results.scores.filter(pl.col("scenario") == scenario)
    ended = runs.filter(pl.col("status") != "error")
    if runs["reached"].any() or ended.is_empty():
        return []
    causes = ended["reason"].value_counts(sort=True)
    # Equal counts in the order of the text, so that the same results print the same line.
    top = causes.filter(pl.col("count") == causes["count"].max()).sort("reason")
    return [f"{top['count'][0]} of {runs.height} runs: {top['reason'][0]}"]


def _text(said: Answer) -> Text:
    from rich.text import Text

    return Text.assemble(said.before, (said.tuner, "bold"), said.after)
