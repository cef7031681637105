"""The results of a comparison for other programs: tables and the numbers of figures as CSV, tables as Markdown, figures."""

from __future__ import annotations

import math
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from reports.figures.drawing import Drawing, pdf
from reports.figures.settings_over_time import typical_seed
from reports.figures.workers import workers_of_run
from reports.pages.overview import overview_figures
from reports.pages.page import texts
from reports.pages.scenario_section import scenario_figures
from reports.verdicts import arenas, calibration_ranks
from reports.verdicts.conclusions import answer, identical, missing_runs, not_applicable
from reports.verdicts.numbers import count, interval_text, percent, quantity, relative
from reports.verdicts.summary import shows_usd, summary
from traces.store import Results, load_results, write_bytes

__all__ = ["FIGURES", "markdown", "write_csv", "write_figures", "write_markdown"]

FIGURES = ("svg", "pdf")
"""The kinds of files that `write_figures` writes."""


def write_csv(folder: Path) -> Path:
    """Write the tables and the numbers of every figure of a results folder as CSV; return the folder they are in, `csv`.

    Raises ValueError where `folder` holds no results.
    """
    results, out = load_results(folder), folder / "csv"
    table = summary(results)
    _write(out / "summary.csv", table.write_csv().encode())
    frames = {"scores": results.scores, "not-applicable": results.not_applicable}
    frames |= {"draws": results.draws} if results.draws.height else {}
    for name, frame in frames.items():
        _write(out / f"{name}.csv", frame.write_csv().encode())
    over = [found.rows for found in _families(results, table)]
    if over:
        _write(out / "arenas.csv", pl.concat(over).write_csv().encode())
    for place, drawing in _drawings(folder, results, table, workers=False):
        _write(out / place / f"{drawing.name}.csv", drawing.data.write_csv().encode())
    return out


def write_figures(folder: Path, kind: str) -> Path:
    """Write every figure of a results folder as files of this kind; return the folder they are in, `figures`.

    Raises ValueError for another kind than `FIGURES`, and where `folder` holds no results.
    """
    if kind not in FIGURES:
        raise ValueError(f"Cannot write figures as {kind!r}: there are {', '.join(FIGURES)}.")
    results, out = load_results(folder), folder / "figures"
    for place, drawing in _drawings(folder, results, summary(results), workers=True):
        data = pdf(drawing) if kind == "pdf" else drawing.svg.replace("currentColor", "#1b1f24").encode()
        _write(out / place / f"{drawing.name}.{kind}", data)
    return out


def write_markdown(folder: Path) -> Path:
    """Write the answers and tables of a results folder as `report.md`, and return its path.

    Raises ValueError where `folder` holds no results.
    """
    path = folder / "report.md"
    write_bytes(path, markdown(load_results(folder)).encode())
    return path


def markdown(results: Results, table: pl.DataFrame | None = None, over: Sequence[arenas.Arenas] | None = None) -> str:
    """The answers and tables of `results` as Markdown; `table` is their summary, and `over` are the tuners by family, where
    the caller has these already."""
    table = summary(results) if table is None else table
    parts: list[str] = []
    for found in _families(results, table) if over is None else over:
        parts += [f"## {f'Family {found.family}' if found.family else 'All scenarios'}", _bold(arenas.answer(found))]
        heads = ("tuner", "arenas", f"ratio to {found.base}", "first", "against the leader")
        parts.append(_grid(heads, [_arena_cells(row) for row in found.rows.iter_rows(named=True)]))
        parts += arenas.sentences(found)
    for (name,), rows in table.group_by(["scenario"], maintain_order=True):
        parts += [f"## {_plain(str(name))}", _bold(answer(rows))]
        columns = ["tuner", "time, s", "ratio to fixed", "regret", "reached", "changes", "overhead, s", "machine s"]
        usd = shows_usd(rows)
        columns += [*(["USD", "regret in USD"] if usd else []), "against the leader"]
        shown = rows.filter(pl.col("role") != "same")
        parts.append(_grid(columns, [_cells(row, usd) for row in shown.iter_rows(named=True)]))
        parts += map(_plain, identical(rows))
        if (under := calibration_ranks.ranks(results, rows)) is not None:
            parts += map(_plain, calibration_ranks.sentences(under))
    parts += map(_plain, missing_runs(results))
    parts += map(_plain, not_applicable(results))
    return "\n\n".join(parts) + "\n"


def _bold(said: Any) -> str:
    return _plain(said.before) + (f"**{_plain(said.tuner)}**" if said.tuner else "") + _plain(said.after)


def _cells(row: dict[str, Any], usd: bool) -> list[str]:
    """The cells of one row, in the order of the columns."""

    def ends(name: str, kind: str) -> str:
        shown, interval = interval_text(row, name, kind)
        return f"{shown} ({interval})" if interval else shown

    return [
        row["tuner"],
        ends("completion_seconds", "completion"),
        ends("ratio", "ratio"),
        "-" if row["role"] == "oracle" else ends("regret", "regret"),
        f"{row['reached']}/{row['runs']}",
        count(row["reconfigurations"]),
        quantity(row["overhead_seconds"]),
        quantity(row["machine_seconds"]),
        *([ends("usd", "usd"), "-" if row["role"] == "oracle" else ends("usd_regret", "usd_regret")] if usd else []),
        row["role"] if row["role"] == "oracle" else row["standing"],
    ]


def _arena_cells(row: dict[str, Any]) -> list[str]:
    low, high = row["ratio_low"], row["ratio_high"]
    interval = "" if math.isnan(low) else f" ({relative(low)}\u2013{relative(high)})"
    return [row["tuner"], str(row["arenas"]), relative(row["ratio"]) + interval, percent(row["first"]), row["standing"]]


def _grid(heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table; numbers to the right."""
    lines = [heads, ["---", *("---:" for _ in heads[1:])], *rows]
    return "\n".join(f"| {' | '.join(map(_plain, line))} |" for line in lines)


def _plain(text: str) -> str:
    """Text that Markdown shows as it is: on one line, without marks or tags."""
    shown = re.sub(r"\s+", " ", text)
    for mark in ("\\", "|", "*", "_", "`", "<", "["):
        shown = shown.replace(mark, f"\\{mark}")
    return shown


def _families(results: Results, table: pl.DataFrame) -> list[arenas.Arenas]:
    names = list(dict.fromkeys(table["scenario"].to_list()))
    return arenas.by_family(results, names)


def _drawings(folder: Path, results: Results, table: pl.DataFrame, *, workers: bool) -> Iterator[tuple[str, Drawing]]:
    """Every figure with the folder of its file: "" of one scenario, else the scenario's name."""
    for found in _families(results, table):
        for drawing in overview_figures(found, found.family or "all").all():
            yield "", drawing
    known, several = texts(folder), table["scenario"].n_unique() > 1
    for (name,), rows in table.group_by(["scenario"], maintain_order=True):
        place = quote(str(name), safe="+=,()") if several else ""
        for drawing in scenario_figures(rows, results, known.get(str(name), "")).all():
            yield place, drawing
        if workers:
            for tuner in rows.filter(pl.col("role") != "same")["tuner"]:
                seed = typical_seed(results.scores.filter((pl.col("scenario") == name) & (pl.col("tuner") == tuner)))
                title = f"workers-{quote(tuner, safe='')}".replace("%", "_")
                if (drawn := workers_of_run(folder, str(name), tuner, seed, title, results.unit)) is not None:
                    yield place, drawn


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
