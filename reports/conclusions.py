"""The conclusions of a comparison, in sentences: no more than its intervals and ranks support, and what they cannot show."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import polars as pl

from reports.statistics import LEVEL, coverage_limit
from reports.tables import REFERENCE, faster_or_slower, interval_text

__all__ = ["against_reference", "headline", "limits", "tally"]


def headline(rows: pl.DataFrame) -> str:
    """The one sentence for a scenario's rows of `tables.summary`."""
    contestants = rows.filter(pl.col("role") != "oracle")
    if contestants.height < 2:
        return "Only one tuner was run, so nothing is compared."
    groups = [(str(t), str(g)) for t, g in contestants.select("tuner", "group").iter_rows()]
    if len({g for _, g in groups}) < 2:
        return f"These runs do not show which tuner is faster. {contestants['verdict'][0]}"
    first = [t for t, g in groups if g.startswith("a")]
    behind = [t for t, g in groups if not g.startswith("a")]
    p_value = float(contestants["p_value"][0])
    shown = "p < 0.001" if p_value < 0.001 else f"p = {p_value:.3f}"
    lead = f"{first[0]} ranks first" if len(first) == 1 else f"{_listed(first)} lead and are not ranked against each other"
    return f"{lead}; {_listed(behind)} {'ranks' if len(behind) == 1 else 'rank'} behind {first[0]} ({shown})."


def against_reference(rows: pl.DataFrame) -> list[str]:
    """Which tuners are faster or slower than the reference with their whole interval, and which are neither."""
    if REFERENCE not in rows["tuner"]:
        return [f"The reference {REFERENCE} was not run, so there are no ratios."]
    others = [r for r in rows.iter_rows(named=True) if r["role"] == "contestant"]
    faster = [r for r in others if faster_or_slower(r) == "faster"]
    slower = [r for r in others if faster_or_slower(r) == "slower"]
    untimed = [r for r in others if r["failed"] == r["runs"]]
    unclear = [r for r in others if r not in faster and r not in slower and r not in untimed]
    sentences = []
    for found, word, side in ((faster, "Faster", "below"), (slower, "Slower", "above")):
        if found:
            sentences.append(f"{word} than {REFERENCE} (whole interval {side} 1): {_listed(map(_with_ratio, found))}.")
    if unclear:
        few = " (fewer than five seeds cannot show one)" if all(r["runs"] - r["failed"] < 5 for r in unclear) else ""
        sentences.append(f"No clear difference from {REFERENCE}{few}: {_listed(r['tuner'] for r in unclear)}.")
    if untimed:
        sentences.append(f"Every run failed: {_listed(r['tuner'] for r in untimed)}.")
    return sentences


def tally(rows: pl.DataFrame) -> str:
    """How many runs there were and how they ended."""
    runs, reached, failed = (int(rows[c].sum()) for c in ("runs", "reached", "failed"))
    rest = runs - reached - failed
    sentences = [f"{reached} of {runs} runs reached the target"]
    if rest:
        sentences.append(f"{rest} ended without reaching it")
    if failed:
        sentences.append(f"{failed} failed")
    return f"{_listed(sentences)}."


def limits(rows: pl.DataFrame) -> list[str]:
    """Sentences on what these runs cannot show."""
    runs = int(rows["runs"].to_numpy().max())
    sentences = []
    if runs == 1:
        sentences.append("With one seed there are no intervals, and a difference may be due to random draws alone.")
    elif coverage_limit(runs) < LEVEL:
        best = 100 * coverage_limit(runs)
        sentences.append(
            f"With {runs} seeds, the range from the lowest to the highest run covers the true median only {best:.3g} % of "
            "the time; a 95 % interval needs at least six seeds."
        )
    if rows["ratio_high"].is_not_nan().any() and rows["role"].to_list().count("contestant") > 1:
        sentences.append(
            f"Each interval against {REFERENCE} holds by itself; ranks limit the error over all pairs of tuners, so they "
            "need more seeds. Where intervals and ranks seem to disagree, there are too few seeds for the ranks."
        )
    blocks = int(rows["blocks"].to_numpy().max())
    if 0 < blocks < runs:
        sentences.append(f"Only {blocks} of {runs} seeds were run with every tuner; ranks use only those.")
    sentences.append(
        "Seeds vary the random draws within this scenario: these runs say nothing about other clusters, jobs or targets."
    )
    return sentences


def _with_ratio(row: dict[str, Any]) -> str:
    shown, interval = interval_text(row, "ratio", "ratio")
    if math.isnan(row["ratio"]):
        return str(row["tuner"])
    return f"{row['tuner']} (ratio {shown}{', ' + interval if interval else ''})"


def _listed(words: Iterable[str]) -> str:
    found = list(words)
    return found[0] if len(found) == 1 else f"{', '.join(found[:-1])} and {found[-1]}" if found else "none"
