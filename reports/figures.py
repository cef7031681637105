"""The figures of a page: completion times, learning curves, settings over time, and mean ranks with their differences.

Where colours differ, shapes or labels differ too. A caption says in words what the figure shows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from reports.drawing import BLUE, GREEN, INK, MUTED, ORANGE, WIDTH, Drawing, canvas, drawn, label_inches, logarithmic
from reports.knobs import Lane, lanes
from reports.statistics import Ranking, spans
from reports.tables import ORACLE, REFERENCE, quantity

__all__ = [
    "SETTINGS_NOTE",
    "completion_times",
    "critical_differences",
    "learning_curves",
    "median_curve",
    "settings_over_time",
    "typical_seed",
]

_POINTS = 120  # of a line, at the most; more would only make the page larger
_Floats = NDArray[np.float64]


# ----------------------------------------------------------------------------------------------------- completion times


def completion_times(rows: pl.DataFrame, scores: pl.DataFrame, name: str) -> Drawing:
    """Median and interval per tuner, with every run, from one scenario's rows of `tables.summary` and `scores`."""
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
        axes.set_xlabel("completion time, simulated seconds")
        caption = (
            "Completion time to the target. The large dot and the bar are the median and its 95 % interval over seeds; "
            "small dots are single runs. A triangle at the budget is a run that did not reach the target. A bar with an "
            "arrow is open at its end. Vertical lines: medians of "
            f"{REFERENCE} (dashed, orange) and of the oracle {ORACLE} (green)."
        )
        return drawn(figure, name, caption)


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


# ------------------------------------------------------------------------------------------------------ learning curves


def learning_curves(
    evaluations: pl.DataFrame, tuners: Sequence[str], metric: str, name: str, target: float | None = None
) -> Drawing | None:
    """`metric` ("accuracy" or "loss") over time, one panel per tuner; None where no tuner has a finite value."""
    finite = evaluations.filter(pl.col(metric).is_finite())
    curves = {t: _curves(finite.filter(pl.col("tuner") == t), metric) for t in tuners}
    if not any(curves.values()):
        return None
    medians = {tuner: median_curve(lines) for tuner, lines in curves.items() if lines}
    columns = min(3, len(tuners))
    rows = -(-len(tuners) // columns)
    with canvas(0.75 + 1.6 * rows, left=0.8, gaps=0.3) as figure:
        grid = figure.subplots(rows, columns, sharex=True, sharey=True, squeeze=False)
        for axes, tuner in zip(grid.flat, tuners, strict=False):
            _draw_panel(axes, tuner, curves[tuner], medians)
            if target is not None:
                axes.axhline(target, color=INK, linewidth=0.8, linestyle=":")
        for axes in grid.flat[len(tuners) :]:
            axes.set_visible(False)
        # The lowest visible panel of a column carries the numbers of the shared axis, also where a hidden one is below it.
        for column in range(columns):
            grid[(len(tuners) - 1 - column) // columns, column].tick_params(labelbottom=True)
        values = finite[metric].to_numpy()
        if metric == "loss" and values.min() > 0 and values.max() / values.min() > 20:
            logarithmic(grid[0, 0])
        grid[0, 0].set_xlim(left=0)
        figure.supxlabel("simulated seconds", fontsize=9)
        figure.supylabel(f"validation {metric}", fontsize=9, x=0.02)
        caption = (
            f"Validation {metric} over simulated time, one panel per tuner. Thin blue lines are single runs. The thick line "
            "is their median for as long as at least half of them go on (a run that has ended keeps its last value). "
            f"Grey: the medians of all other tuners. Orange, dashed: {REFERENCE}."
            + ("" if target is None else " Dotted: the target.")
        )
        return drawn(figure, name, caption)


def _draw_panel(
    axes: Axes, tuner: str, lines: list[tuple[_Floats, _Floats]], medians: dict[str, tuple[_Floats, _Floats]]
) -> None:
    axes.set_title(tuner, loc="left", fontsize=9, fontweight="bold")
    axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
    for other, (x, y) in medians.items():
        if other != tuner:
            reference = other == REFERENCE
            axes.plot(x, y, color=ORANGE if reference else MUTED, linewidth=1 if reference else 0.6,
                      alpha=1 if reference else 0.45, linestyle="--" if reference else "-")  # fmt: skip
    for x, y in lines:
        axes.plot(x, y, color=BLUE, linewidth=0.7, alpha=0.5)
    if tuner in medians:
        axes.plot(*medians[tuner], color=BLUE, linewidth=2.2)
    else:
        axes.text(0.5, 0.5, "no evaluations", transform=axes.transAxes, ha="center", color=MUTED)


def _curves(mine: pl.DataFrame, metric: str) -> list[tuple[_Floats, _Floats]]:
    """A curve per seed, thinned to `_POINTS`."""
    lines = []
    for _, run in mine.sort("seed", "seconds").group_by(["seed"], maintain_order=True):
        x, y = run["seconds"].to_numpy(), run[metric].to_numpy()
        keep = np.unique(np.linspace(0, x.size - 1, min(x.size, _POINTS)).astype(int))
        lines.append((x[keep], y[keep]))
    return lines


def median_curve(curves: Sequence[tuple[_Floats, _Floats]]) -> tuple[_Floats, _Floats]:
    """The median of curves (seconds, values), from when all have a value until half of them have ended."""
    start = max(float(x[0]) for x, _ in curves)
    end = max(start, float(np.median([x[-1] for x, _ in curves])))
    at = np.linspace(start, end, _POINTS // 2)
    return at, np.median([np.interp(at, x, y) for x, y in curves], axis=0)


# --------------------------------------------------------------------------------------------------- settings over time


SETTINGS_NOTE = (
    "Every knob that changed, over simulated time: one line per seed; the thick line is the run with the median completion "
    "time. A line ends when its run reached the target or the budget; where a run ended otherwise, at its last change."
)
"""How to read the drawings of `settings_over_time`."""


def settings_over_time(settings: pl.DataFrame, scores: pl.DataFrame, name: str) -> Drawing | None:
    """The settings of one tuner on one scenario, one panel per knob that changed; None where none changed."""
    ended = scores.filter(pl.col("status").is_in(["target", "budget"]))  # the end of other runs is not in the table
    until = dict(ended.select("seed", "completion_seconds").iter_rows())
    found = lanes(settings, until)
    if not found:
        return None
    typical = typical_seed(scores)
    heights = [max(0.9, 0.3 * len(lane.categories)) for lane in found]
    left = label_inches([lane.label for lane in found]) + label_inches([word for lane in found for word in lane.categories])
    with canvas(0.7 + sum(heights), left=left, top=0.1) as figure:
        grid = figure.subplots(len(found), 1, sharex=True, squeeze=False, height_ratios=heights)[:, 0]
        for axes, lane in zip(grid, found, strict=True):
            _draw_lane(axes, lane, typical)
        grid[-1].set_xlim(left=0)
        grid[-1].set_xlabel("simulated seconds")
        caption = (
            f"Thick: seed {typical}. Knobs that changed: {', '.join(lane.label.replace(chr(10), ' ') for lane in found)}."
        )
        return drawn(figure, name, caption)


def typical_seed(scores: pl.DataFrame) -> int:
    """The seed of the run with the median completion time."""
    ran = scores.filter(pl.col("status") != "error")
    ordered = (ran if ran.height else scores).sort("completion_seconds", "seed")
    return int(ordered["seed"][(ordered.height - 1) // 2])


def _draw_lane(axes: Axes, lane: Lane, typical: int) -> None:
    for seed, (x, y) in sorted(lane.steps.items(), key=lambda item: item[0] == typical):
        bold = seed == typical
        axes.step(x, y, where="post", color=BLUE, linewidth=2.2 if bold else 0.8, alpha=1 if bold else 0.45)
    box = axes.get_position()
    edge = (0.1 / WIDTH - box.x0) / box.width  # a tenth of an inch from the figure's left side
    axes.text(edge, 0.5, lane.label, transform=axes.transAxes, ha="left", va="center", fontsize=8)
    axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
    axes.margins(y=0.15)
    if lane.categories:
        axes.set_yticks(range(len(lane.categories)), lane.categories)
        axes.set_ylim(-0.5, len(lane.categories) - 0.5)
    elif lane.log:
        logarithmic(axes)
    elif lane.whole:
        axes.yaxis.set_major_locator(MaxNLocator(4, integer=True))


# ------------------------------------------------------------------------------------------------------------ mean ranks


def critical_differences(ranking: Ranking, name: str) -> Drawing | None:
    """Demsar's diagram of mean ranks (2006, Figure 1); None where nothing was tested."""
    k = len(ranking.tuners)
    if k < 3 or not all(ranking.groups):
        return None
    means = [i.estimate for i in ranking.ranks]
    bars = spans(ranking.groups) if ranking.p_value < 0.05 else [(0, k - 1)]
    half = -(-k // 2)
    first = 0.5 + 0.36 * len(bars)  # depth of the first label, below the axis at 0
    with canvas(0.3 * (1.9 + first + half), left=0.15, bottom=0, top=0) as figure:
        axes = figure.add_subplot()
        axes.set_axis_off()
        label = min(3.3, 0.3 + label_inches(ranking.tuners))  # with the mean rank beside it
        margin = 0.2 + label * (k - 1) / (WIDTH - 0.3 - 2 * label)
        axes.set_xlim(1 - margin, k + margin)
        axes.set_ylim(first + half, -1.9)
        _draw_scale(axes, k, ranking.critical_difference)
        for i, (tuner, mean) in enumerate(zip(ranking.tuners, means, strict=True)):
            left = i < half
            depth, edge = first + (i if left else k - 1 - i), 0.9 if left else k + 0.1
            axes.plot([mean, mean, edge], [0, depth, depth], color=MUTED, linewidth=0.9)
            text = f"{tuner}  {mean:.2f}" if left else f"{mean:.2f}  {tuner}"
            axes.text(edge + (-0.08 if left else 0.08), depth, text, ha="right" if left else "left", va="center")
        for level, (a, b) in enumerate(bars):
            y = 0.36 + 0.36 * level
            axes.plot([means[a] - 0.04, means[b] + 0.04], [y, y], color=BLUE, linewidth=4, solid_capstyle="butt")
        caption = (
            "Mean ranks; 1 is best. Tuners joined by a blue bar are not ranked against each other: their mean ranks differ "
            f"by less than the critical difference CD = {quantity(ranking.critical_difference)} (Nemenyi, 5 %, "
            f"{ranking.blocks} paired runs){'' if ranking.p_value < 0.05 else ', or the Friedman test found no difference'}."
        )
        return drawn(figure, name, caption)


def _draw_scale(axes: Axes, k: int, difference: float) -> None:
    axes.plot([1, k], [0, 0], color=INK, linewidth=1.2)
    for tick in range(1, k + 1):
        axes.plot([tick, tick], [0, -0.18], color=INK, linewidth=1)
        axes.text(tick, -0.28, str(tick), ha="center", va="bottom", fontsize=8)
    axes.plot([1, 1 + difference], [-1.15, -1.15], color=INK, linewidth=1.2, marker="|")
    axes.text(1 + difference / 2, -1.3, f"CD = {quantity(difference)}", ha="center", va="bottom", fontsize=8)
