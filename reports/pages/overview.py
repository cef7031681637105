"""The first page of a comparison of several scenarios: what all of them and every family say, and each one's answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import polars as pl

from harness.families import FAMILIES
from reports.figures.across import heat_map, mean_ratios, performance
from reports.figures.drawing import Drawing
from reports.pages.cells import Cell, NumberedDrawing, numbered, p_text
from reports.templates.rendering import fill
from reports.verdicts import arenas
from reports.verdicts.conclusions import NOTHING_TO_TUNE, Answer, answer, not_applicable
from reports.verdicts.numbers import host_seconds, percent, relative
from reports.verdicts.summary import REFERENCE
from traces.store import Results

__all__ = ["OverviewFigures", "overview", "overview_figures"]


@dataclass(frozen=True, slots=True)
class OverviewFigures:
    """The figures of one family."""

    means: Drawing
    regret: Drawing
    profile: Drawing

    def all(self) -> list[Drawing]:
        return [self.means, self.regret, self.profile]


def overview_figures(found: arenas.Arenas, name: str) -> OverviewFigures:
    """The figures over the arenas of `found`."""
    return OverviewFigures(
        mean_ratios(found, f"{name}-means"), heat_map(found, f"{name}-regret"), performance(found, f"{name}-profile")
    )


@dataclass(frozen=True, slots=True)
class _FamilySection:
    """What the overview shows of one family, or of all arenas together."""

    title: str
    anchor: str
    about: str  # what the family is; "" where nothing is known of it
    answer: Answer
    sentences: list[str]
    base: str
    rows: list[tuple[str, str, list[Cell]]]  # tuner, class of the row, cells
    figures: list[NumberedDrawing | None]


def overview(
    results: Results,
    table: pl.DataFrame,
    addresses: Mapping[str, str],
    common: dict[str, Any],
    over: Sequence[arenas.Arenas] | None = None,
) -> str:
    """The overview of the scenarios in `addresses`: by name, where the overview links to; "" for no link. `over` are the
    tuners by family, where the caller has them already."""
    names = list(addresses)
    sections = []
    for i, found in enumerate(arenas.by_family(results, names) if over is None else over):
        family = found.family
        rows = [_family_row(row, len(found.arenas)) for row in found.rows.iter_rows(named=True)]
        figures = [numbered(d) for d in overview_figures(found, f"over{i}").all()] if found.rows.height else []
        title, anchor = (f"Family {family}", f"family-{family}") if family else ("All scenarios", "all")
        said, why = arenas.answer(found), arenas.sentences(found)
        sections.append(_FamilySection(title, anchor, _about(family), said, why, found.base, rows, figures))
    each = [(name, address, answer(table.filter(pl.col("scenario") == name))) for name, address in addresses.items()]
    idle = [] if names else not_applicable(results)
    title = f"{len(names)} scenarios" if names else NOTHING_TO_TUNE if idle else "No run yet"
    return fill("overview.html.j2", title=title, sections=sections, scenarios=each, idle=idle, **common)


def _about(family: str) -> str:
    """What a family is whose members are drawn: its line of `harness list families`."""
    return FAMILIES[family].summary if family in FAMILIES else ""


def _family_row(row: dict[str, Any], arenas_in_all: int) -> tuple[str, str, list[Cell]]:
    def ends(name: str, text: Callable[[float], str]) -> Cell:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return Cell(text(row[name]), "" if math.isnan(low) else f"{text(low)}\u2013{text(high)}", row[name])

    def against(ratio: float, p: float) -> Cell:
        return Cell("-") if math.isnan(ratio) else Cell(f"{relative(ratio)}x", p_text(p), ratio)

    cells = [
        Cell(f"{row['arenas']}/{arenas_in_all}", "", row["arenas"]),
        ends("ratio", relative),
        ends("first", percent),
        Cell(relative(row["mean_rank"]), "", row["mean_rank"]),
        Cell("leader") if row["standing"] == "leader" else against(row["to_leader"], row["p_leader"]),
        against(math.nan if row["tuner"] == REFERENCE else row["to_reference"], row["p_reference"]),
        Cell(percent(row["reached"]), f"{row['failed']} failed" if row["failed"] else "", row["reached"]),
        *(Cell(percent(row[n]) if row[n] == row[n] else "-", "", row[n]) for n in ("overhead_share", "trial_share")),
        Cell(host_seconds(row["thinking_seconds"]), "", row["thinking_seconds"]),
    ]
    return row["tuner"], "close" if row["standing"] == "not told apart" else row["standing"], cells
