"""What may be said of a comparison, in sentences: as much as its intervals and ranks carry, and where they stop."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import polars as pl

from reports.statistics import LEVEL, coverage_limit
from reports.tables import REFERENCE, against, interval_text

__all__ = ["against_reference", "headline", "limits", "tally"]


def headline(rows: pl.DataFrame) -> str:
    """The one sentence for a scenario's rows of `tables.summary`."""
    contestants = rows.filter(pl.col("role") != "oracle")
    if contestants.height < 2:
        return "One tuner was run, so nothing is compared."
    groups = [(str(t), str(g)) for t, g in contestants.select("tuner", "group").iter_rows()]
    if len({g for _, g in groups}) < 2:
        return f"These runs do not tell the tuners apart. {contestants['verdict'][0]}"
    first = [t for t, g in groups if g.startswith("a")]
    behind = [t for t, g in groups if not g.startswith("a")]
    p_value = float(contestants["p_value"][0])
    shown = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
    lead = f"{first[0]} ranks first" if len(first) == 1 else f"By ranks nothing separates {_listed(first)}, which lead"
    return f"{lead}; {_listed(behind)} {'ranks' if len(behind) == 1 else 'rank'} behind {first[0]} ({shown})."


def against_reference(rows: pl.DataFrame) -> list[str]:
    """Who is faster or slower than the reference with the whole interval on one side, and who is neither."""
    if REFERENCE not in rows["tuner"]:
        return [f"The reference {REFERENCE} was not run, so there are no ratios."]
    others = [r for r in rows.iter_rows(named=True) if r["role"] == "contestant"]
    faster = [r for r in others if against(r) == "faster"]
    slower = [r for r in others if against(r) == "slower"]
    untimed = [r for r in others if r["failed"] == r["runs"]]
    unclear = [r for r in others if r not in faster and r not in slower and r not in untimed]
    said = []
    for found, word in ((faster, "Faster"), (slower, "Slower")):
        if found:
            said.append(
                f"{word} than {REFERENCE}, with the whole interval on that side: {_listed(map(_with_ratio, found))}."
            )
    if unclear:
        few = " (with fewer than five seeds nobody is)" if all(r["runs"] - r["failed"] < 5 for r in unclear) else ""
        said.append(f"Not separable from {REFERENCE}{few}: {_listed(r['tuner'] for r in unclear)}.")
    if untimed:
        said.append(f"Every run failed: {_listed(r['tuner'] for r in untimed)}.")
    return said


def tally(rows: pl.DataFrame) -> str:
    """How many runs there were and how they ended."""
    runs, reached, failed = (int(rows[c].sum()) for c in ("runs", "reached", "failed"))
    rest = runs - reached - failed
    said = [f"{reached} of {runs} runs reached the target"]
    if rest:
        said.append(f"{rest} did not within the budget")
    if failed:
        said.append(f"{failed} failed")
    return f"{_listed(said)}."


def limits(rows: pl.DataFrame) -> list[str]:
    """What these runs cannot show."""
    runs = int(rows["runs"].to_numpy().max())
    said = []
    if runs == 1:
        said.append("With one seed there are no intervals, and a difference may be luck.")
    elif coverage_limit(runs) < LEVEL:
        best = 100 * coverage_limit(runs)
        said.append(
            f"With {runs} seeds even the range from the lowest to the highest run covers the true median only {best:.3g} % "
            "of the time; six seeds are the fewest for a 95 % interval."
        )
    if rows["ratio_high"].is_not_nan().any() and rows["role"].to_list().count("contestant") > 1:
        said.append(
            f"Each interval against {REFERENCE} stands by itself; ranks guard against error among all pairs, so they need "
            "more seeds. Where the two seem to disagree, the seeds are too few for the stricter one."
        )
    blocks = int(rows["blocks"].to_numpy().max())
    if 0 < blocks < runs:
        said.append(f"Only {blocks} of {runs} seeds were run with every tuner; ranks rest on those.")
    said.append("Seeds vary the luck within this scenario: nothing here speaks of other clusters, jobs or targets.")
    return said


def _with_ratio(row: dict[str, Any]) -> str:
    shown, interval = interval_text(row, "ratio", "ratio")
    if math.isnan(row["ratio"]):
        return str(row["tuner"])
    return f"{row['tuner']} ({shown} of its time{'; ' + interval if interval else ''})"


def _listed(words: Iterable[str]) -> str:
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else "none"
