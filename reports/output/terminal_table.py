"""The table of one scenario for a terminal: as many columns as fit, and below it what a reader must know."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, TypeAlias

import polars as pl

from reports.verdicts.conclusions import coverage, identical
from reports.verdicts.numbers import count, host_seconds, interval_text, quantity
from reports.verdicts.statistics import LEAST_BLOCKS
from reports.verdicts.summary import ORACLE, REFERENCE, shows_accuracy, shows_usd, side_of_reference

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

__all__ = ["notes", "render"]


def render(summary: pl.DataFrame, *, columns: int = 100) -> list[Table]:
    """A table per scenario for a terminal with `columns` characters per line, 50 or more."""
    return [_table(rows, columns) for _, rows in summary.group_by(["scenario"], maintain_order=True)]


def _table(rows: pl.DataFrame, columns: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    shown = list(rows.filter(pl.col("role") != "same").iter_rows(named=True))
    plain, gap, widths = _fitting(rows, shown, columns)
    table = Table(box=box.SIMPLE_HEAD, padding=(0, gap, 0, 0), pad_edge=False, title_justify="left", caption_justify="left")
    table.title = Text(str(rows["scenario"][0]), style="bold")
    table.add_column("tuner", overflow="fold", width=widths["tuner"])
    for head in _WITH_INTERVALS:
        table.add_column(head, justify="right", width=widths[head], overflow="fold")
    for head in plain:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("could\nlead", no_wrap=True)
    for row in shown:
        cells = [*_cells(row), *(Text(cell(row)) for cell in plain.values()), Text(_leads(row))]
        if row["role"] == "oracle":
            table.add_section()
        table.add_row(*cells, style="dim" if row["role"] == "oracle" else None)
    table.caption = Text("\n".join(notes(rows)))
    return table


_WITH_INTERVALS = ("time, s", f"ratio to {REFERENCE}")
"""Heads of the columns with intervals. In a narrow column, the interval is on a line of its own."""


_LEAST_NEEDED = ("accu", "loss", "mach", "over", "re-", "USD", "done")
"""How the heads begin of the columns that a narrow terminal does without, in this order."""


_Cell: TypeAlias = "Callable[[dict[str, Any]], str]"


def _fitting(
    rows: pl.DataFrame, shown: Sequence[dict[str, Any]], columns: int
) -> tuple[dict[str, _Cell], int, dict[str, int]]:
    """The columns without intervals that fit beside the others, the blanks between columns, and the widths of the others by
    head. Blanks go first, then intervals get lines of their own, then columns are left out, as `_LEAST_NEEDED` says."""
    texts = [[str(cell) for cell in _cells(row)] for row in shown]
    whole = {"tuner": max((len(cells[0]) for cells in texts), default=0)}
    least = {"tuner": min(max(whole["tuner"], 8), 20 if columns >= 100 else 8)}
    for place, head in enumerate(_WITH_INTERVALS, 1):
        whole[head] = max([11, *(len(cells[place]) for cells in texts)])
        # Estimate, and interval in brackets: neither is divided.
        least[head] = max([11, *(len(part) for cells in texts for part in re.split(r" (?=\()", cells[place]))])
    plain = _plain_columns(rows, columns)
    least_needed = [h for start in _LEAST_NEEDED for h in plain if h.startswith(start)]
    on_one_line = {**whole, "tuner": least["tuner"]}
    for widths, gap, dropped in (
        (on_one_line, 1, 0),
        (on_one_line, 0, 0),
        (least, 1, 0),
        *((least, 0, dropped) for dropped in range(len(least_needed) + 1)),
    ):
        kept = {head: cell for head, cell in plain.items() if head not in least_needed[:dropped]}
        numbers = [max(*map(len, head.split("\n")), *(len(cell(row)) for row in shown)) for head, cell in kept.items()]
        # With the last column, a blank before and after each column, and `gap` more of them.
        left = columns - (sum(widths.values()) + sum(numbers) + 5 + (4 + len(kept)) * (1 + gap) + 1)
        if left >= 0 and (not gap or columns >= 100):
            break
    more = min(max(whole["tuner"] - widths["tuner"], 0), max(left, 0))
    return kept, gap, {**widths, "tuner": widths["tuner"] + more}


def _leads(row: dict[str, Any]) -> str:
    """Whether a tuner leads, or could: the leader reached its target, and failed in no run."""
    if row["standing"] in ("", "leader"):
        return "leads" if row["standing"] else "-"
    return "could" if row["standing"] == "not told apart" and row["reached"] and not row["failed"] else "no"


def _plain_columns(rows: pl.DataFrame, columns: int) -> dict[str, Callable[[dict[str, Any]], str]]:
    """The columns without intervals: by head, the text of a row's cell. A narrow terminal has not all of them."""
    accuracy, usd = shows_accuracy(rows), shows_usd(rows)
    found: dict[str, Callable[[dict[str, Any]], str]] = {}
    if ORACLE in rows["tuner"]:
        found["regret"] = lambda row: "-" if row["role"] == "oracle" else interval_text(row, "regret", "regret")[0]
    found["done"] = lambda row: f"{row['reached']}/{row['runs']}"
    found["re-\nconf"] = lambda row: count(row["reconfigurations"])
    found["over-\nhead s"] = lambda row: quantity(row["overhead_seconds"])
    if columns >= 110:
        found["think-\ning s"] = lambda row: host_seconds(row["thinking_seconds"])
    found["machine\ns" if columns >= 100 else "mach.\ns"] = lambda row: quantity(row["machine_seconds"])
    if usd:
        found["USD"] = lambda row: interval_text(row, "usd", "usd")[0]
    if not usd or columns >= 100:
        final = "final_accuracy" if accuracy else "final_loss"
        found["accu-\nracy" if accuracy else "loss"] = lambda row: quantity(row[final])
    return found


def _cells(row: dict[str, Any]) -> list[Text]:
    """The tuner, and the columns with intervals."""
    from rich.text import Text

    def ends(name: str, kind: str, style: str = "") -> Text:
        shown, interval = interval_text(row, name, kind)
        return Text.assemble((shown, style), (f" ({interval})" if interval else "", "dim"))

    style = {"faster": "green", "slower": "red"}.get(side_of_reference(row), "")
    return [
        Text(row["tuner"], style="bold" if row["standing"] == "leader" else ""),
        ends("completion_seconds", "completion"),
        ends("ratio", "ratio", style) if row["role"] != "reference" or row["failed"] == row["runs"] else Text("1"),
    ]


def notes(rows: pl.DataFrame) -> list[str]:
    """What a reader of one scenario's rows must know: seeds, censoring, reference, oracle, failed runs, who is compared."""
    present = set(rows["tuner"])
    runs = int(rows["runs"].to_numpy().max())
    if runs == 1:
        sentences = ["One seed: no intervals; a difference may be due to random draws alone. Run more seeds."]
    else:
        sentences = [
            f"Times, ratios: medians over {runs} paired seeds ({coverage(rows)}); else means. Done: target reached."
        ]
    if rows.select(pl.any_horizontal(pl.col("completion_bound", "ratio_bound").is_in([">", "<"])).any()).item():
        sentences.append("> and <: at least and at most that, as runs that missed their target would have taken longer.")
    what, better = ("cost", "cheaper") if "usd" in rows["minimise"] else ("time", "faster")
    if REFERENCE in present:
        sentences.append(
            f"Ratio: {what} over that of {REFERENCE}, which keeps the start setting, by seed; below 1 is {better}."
        )
    if ORACLE in present:
        sentences.append(f"Regret: time over that of {ORACLE} (best fixed setting in hindsight, no contestant), minus 1.")
    failed = [f"{n} ({f} of {r})" for n, f, r in rows.select("tuner", "failed", "runs").iter_rows() if f]
    if failed:
        sentences.append(f"Failed runs, left out of times: {', '.join(failed)}.")
    for column, event in (("diverged", "Diverged"), ("deadlocked", "No worker was left that could push")):
        if ended := [
            f"{n} ({e} of {r})" for n, e, r in rows.filter(pl.col(column) > 0).select("tuner", column, "runs").iter_rows()
        ]:
            sentences.append(f"{event}: {', '.join(ended)}.")
    sentences += identical(rows)
    if runs >= LEAST_BLOCKS:
        sentences.append(
            f"Could lead: not told apart from the leader (paired t tests of log {what}s, Holm over pairs, 5 %)."
        )
    else:
        sentences.append("Nothing is told apart with fewer than three seeds.")
    return sentences
