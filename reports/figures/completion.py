"""The figure of completion times: median and interval per tuner, with every run."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes

from reports.figures.drawing import BLUE, GREEN, MUTED, ORANGE, Drawing, canvas, drawn, label_inches
from reports.verdicts.conclusions import coverage
from reports.verdicts.summary import ORACLE, REFERENCE
from traces.store import SIMULATED_SECONDS

__all__ = ["completion_times"]


def completion_times(rows: pl.DataFrame, scores: pl.DataFrame, name: str, unit: str = SIMULATED_SECONDS) -> Drawing:
    """Median and interval per tuner, with every run, from one scenario's rows of `summary.summary` and `scores`."""
    budget = float(rows["budget_seconds"].to_numpy().max())
    tuners = rows["tuner"].to_list()
    with canvas(0.8 + 0.36 * len(tuners), left=label_inches(tuners)) as figure:
        axes = figure.add_subplot()
        for y, row in enumerate(rows.iter_rows(named=True)):
            _draw_runs(axes, y, scores.filter(pl.col("tuner") == row["tuner"]))
            _draw_interval(axes, y, row, budget)
        _draw_medians(axes, rows)
        if not bool((rows["reached"] == rows["runs"]).all()):
            axes.axvline(budget, color=MUTED, linewidth=1, linestyle=":")
            axes.text(budget, -0.75, "budget", color=MUTED, ha="center", va="bottom", fontsize=8)
        axes.set_yticks(range(len(tuners)), tuners)
        axes.set_ylim(len(tuners) - 0.4, -0.75)
        # Room beyond the budget for the arrows of open intervals.
        axes.set_xlim(0, 1.1 * budget if bool(rows["completion_high"].is_infinite().any()) else None)
        axes.tick_params(axis="y", length=0)
        axes.grid(axis="x", color=MUTED, alpha=0.25, linewidth=0.6)
        axes.set_xlabel(f"completion time, {unit}")
        caption = (
            "Completion time to the target. The large dot and the bar are the median and its interval over seeds "
            f"({coverage(rows)}); small dots are single runs. A triangle at the budget is a run that did not reach the "
            "target. A bar with an arrow is open at its end. Vertical lines: medians of "
            f"{REFERENCE} (dashed, orange) and of the oracle {ORACLE} (green)."
        )
        columns = ("tuner", "seed", "status", "completion_seconds", "budget_seconds")
        return drawn(
            figure, name, caption, scores.filter(pl.col("tuner").is_in(tuners)).select(columns).sort("tuner", "seed")
        )


def _draw_runs(axes: Axes, y: int, scores: pl.DataFrame) -> None:
    ran = scores.filter(pl.col("status") != "error")
    for reached, marker, size in ((True, "o", 9), (False, ">", 22)):
        x = ran.filter(pl.col("reached") == reached)["completion_seconds"].to_numpy()
        face = MUTED if reached else "none"
        axes.scatter(x, np.full(x.size, y + 0.25), s=size, marker=marker, facecolor=face, edgecolor=MUTED, linewidth=0.9)


def _draw_interval(axes: Axes, y: int, row: dict[str, Any], budget: float) -> None:
    color = {"reference": ORANGE, "oracle": GREEN}.get(row["role"], BLUE)
    low, high, middle = row["completion_low"], row["completion_high"], row["completion_seconds"]
    if math.isnan(middle):
        axes.text(0, y, "  every run failed", va="center", color=MUTED, fontsize=8)
        return
    if not math.isnan(low):
        axes.plot([low, min(high, budget)], [y, y], color=color, linewidth=3, alpha=0.55, solid_capstyle="butt")
    if math.isinf(high):
        axes.annotate("", (budget * 1.06, y), (budget, y), arrowprops={"arrowstyle": "->", "color": color, "linewidth": 1.5})
    open_median = row["completion_bound"] != "="
    axes.plot([middle], [y], "o", color=color, markersize=7, fillstyle="none" if open_median else "full", zorder=3)


def _draw_medians(axes: Axes, rows: pl.DataFrame) -> None:
    """Lines at the medians of reference and oracle; the earlier has its label to the left, the later to the right."""
    lines = []
    for tuner, color, style in ((REFERENCE, ORANGE, "--"), (ORACLE, GREEN, "-")):
        medians = rows.filter((pl.col("tuner") == tuner) & (pl.col("completion_bound") == "="))["completion_seconds"]
        lines += [(float(x), tuner, color, style) for x in medians if math.isfinite(x)]
    for i, (x, tuner, color, style) in enumerate(sorted(lines)):
        axes.axvline(x, color=color, linewidth=1, linestyle=style, zorder=0)
        side = "right" if i == 0 and len(lines) == 2 else "left"
        axes.text(x, -0.78, tuner, color=color, ha=side, va="bottom", fontsize=8)
