"""The figures of cost: what the time of each tuner was spent on, and time against what tuning cost."""

from __future__ import annotations

import math
from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.transforms import Transform, offset_copy
from numpy.typing import NDArray

from reports.figures.drawing import BLUE, GREEN, INK, MUTED, ORANGE, WIDTH, Drawing, canvas, drawn, label_inches
from reports.verdicts.numbers import quantity
from reports.verdicts.summary import ORACLE, REFERENCE
from traces.store import SIMULATED_SECONDS

__all__ = ["pareto", "split_of", "time_split"]

_TIME_SPLIT: dict[str, pl.DataType] = {
    "tuner": pl.String(),
    "training_seconds": pl.Float64(),
    "trial_seconds": pl.Float64(),
    "stall_seconds": pl.Float64(),
    "thinking_seconds": pl.Float64(),
}
"""Columns of `split_of`; the first three sum to the time, thinking is measured on the host."""

_HEIGHT, _BOTTOM, _TOP = 4.6, 0.45, 0.15  # inches of time against overhead, and its margins
_NAMES = 20  # above each other in that height; where there are more, the drawing is higher
_NAME_PIXELS = 130.0  # width of a name beside its point, at 100 per inch
_PURPLE = "#7a5cc4"
_PARTS = (("training", BLUE), ("trial", _PURPLE), ("stall", ORANGE), ("thinking", MUTED))


def split_of(rows: pl.DataFrame, scores: pl.DataFrame) -> pl.DataFrame:
    """What the time of each tuner was spent on: means over the runs that did not fail, from rows of `summary.summary`.

    A run that did not reach its target counts its budget. Columns: `_TIME_SPLIT`.
    """
    ran = scores.filter(pl.col("status") != "error")
    found = []
    for row in rows.filter(pl.col("role") != "same").iter_rows(named=True):
        mine = ran.filter(pl.col("tuner") == row["tuner"])
        if mine.height:
            whole = float(mine["completion_seconds"].to_numpy().mean())
            trial, stall = row["trial_seconds"], row["overhead_seconds"]
            thinking = 0.0 if math.isnan(row["thinking_seconds"]) else row["thinking_seconds"]
            training = max(whole - trial - stall, 0.0)
            found.append(dict(zip(_TIME_SPLIT, (row["tuner"], training, trial, stall, thinking), strict=True)))
    return pl.DataFrame(found, schema=_TIME_SPLIT)


def time_split(rows: pl.DataFrame, scores: pl.DataFrame, name: str) -> Drawing | None:
    """Training, trials, stall and thinking of each tuner as stacked bars; None where every run failed."""
    split = split_of(rows, scores)
    if split.is_empty():
        return None
    tuners = split["tuner"].to_list()
    with canvas(0.75 + 0.3 * len(tuners), left=label_inches(tuners), top=0.28) as figure:
        axes = figure.add_subplot()
        start = np.zeros(len(tuners))
        for part, color in _PARTS:
            seconds = split[f"{part}_seconds"].to_numpy()
            axes.barh(range(len(tuners)), seconds, left=start, height=0.62, color=color, linewidth=0)
            start = start + seconds
        most = float(start.max())
        texts = []
        for _, _, trial, stall, thinking in split.iter_rows():
            said = [(trial, "trials"), (stall, "stall"), (thinking if thinking >= 0.0005 * most else 0.0, "thinking")]
            texts.append(", ".join(f"{quantity(v)} s {what}" for v, what in said if v > 0))
        for y, text in enumerate(texts):
            axes.text(start[y] + 0.008 * most, y, text, va="center", color=MUTED, fontsize=8)
        for i, (part, color) in enumerate(_PARTS):
            shown = {"trial": "trials"}.get(part, part)
            axes.text(0.14 * i, 1.015, f"■ {shown}", transform=axes.transAxes, color=color, va="bottom", fontsize=8.5)
        axes.set_yticks(range(len(tuners)), tuners)
        axes.set_ylim(len(tuners) - 0.4, -0.6)
        axes.set_xlim(0, _width(start, texts, WIDTH - label_inches(tuners)))
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel("seconds, mean over runs")
        caption = (
            "What the time was spent on: training that is part of the final model, trials (training that is not), stall "
            "(nobody trained because of what the tuner asked, or of machines that were lost), and the tuner's own thinking, "
            "which is measured on the host and is not part of the time. A run that did not reach its target counts its "
            "budget."
        )
        return drawn(figure, name, caption, split)


def _width(ends: NDArray[np.float64], texts: list[str], inches: float) -> float:
    """Seconds that an axis of so many inches shows, so that the text behind the end of each bar fits."""
    room = [max(1 - (0.2 + 0.068 * len(text)) / inches, 0.2) for text in texts]  # 8 points
    return float(np.max(ends / np.minimum(room, 1 / 1.05)))


class _Point(NamedTuple):
    tuner: str
    overhead: float
    seconds: float
    role: str
    standing: str


def pareto(rows: pl.DataFrame, name: str, unit: str = SIMULATED_SECONDS) -> Drawing | None:
    """Median time against overhead and trials, with the tuners that no other beats in both; None without two of them."""
    shown = rows.filter((pl.col("role") != "same") & pl.col("completion_seconds").is_not_nan() & (pl.col("tuner") != ORACLE))
    points = [
        _Point(r["tuner"], r["overhead_seconds"] + r["trial_seconds"], r["completion_seconds"], r["role"], r["standing"])
        for r in shown.iter_rows(named=True)
    ]
    if len(points) < 2 or max(p.overhead for p in points) <= 0:
        return None
    front = sorted((p for p in points if not any(_beats(q, p) for q in points)), key=lambda p: p.overhead)
    with canvas(_HEIGHT, left=0.75, bottom=_BOTTOM, top=_TOP) as figure:
        axes = figure.add_subplot()
        axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
        axes.set_xscale("symlog", linthresh=1.0, linscale=0.4)
        axes.set_yscale("log")
        axes.step(
            [p.overhead for p in front], [p.seconds for p in front], where="post", color=BLUE, linewidth=1.2, alpha=0.6
        )
        for p in sorted(points, key=lambda p: p.role == "reference"):  # the reference on top of points at the same place
            color = ORANGE if p.role == "reference" else BLUE if p in front else MUTED
            axes.plot([p.overhead], [p.seconds], "o", color=color, markersize=6, zorder=3)
        low, high = min(p.seconds for p in points), max(p.seconds for p in points)
        low, high = (low / 1.15, high * 1.15) if high > low else (low / 2, high * 2)
        oracle = rows.filter((pl.col("tuner") == ORACLE) & (pl.col("completion_bound") == "="))["completion_seconds"]
        if len(oracle):
            low = min(low, float(oracle[0]) / 1.2)
            axes.axhline(float(oracle[0]), color=GREEN, linewidth=1.1, linestyle="-.")
            axes.text(
                1,
                float(oracle[0]) / 1.04,
                "oracle ",
                transform=axes.get_yaxis_transform(),
                color=GREEN,
                fontsize=8,
                ha="right",
                va="top",
            )
        axes.set_ylim(low, high)
        axes.set_xlim(-0.12, 6 * max(p.overhead for p in points))
        columns = _columns(axes, points)
        names = max(map(len, columns))
        if names > _NAMES:
            height = _HEIGHT * (names + 1) / (_NAMES + 1)
            figure.set_figheight(height)
            figure.subplots_adjust(bottom=_BOTTOM / height, top=1 - _TOP / height)
        _label(axes, columns, front[:-1], math.log(high / low) / (max(names, _NAMES) + 1), low, high)
        _plain_seconds(axes, low, high)
        axes.set_xlabel(f"overhead and trials, {unit} (mean; logarithmic above 1)")
        axes.set_ylabel("time, s (median)")
        caption = (
            "Median time to the target against what tuning cost: seconds of overhead and trials. Down and left is better. "
            f"Blue, with the line: tuners that no other beats in both. Orange: {REFERENCE}."
        )
        data = shown.select("tuner", "completion_seconds", "overhead_seconds", "trial_seconds")
        return drawn(figure, name, caption, data.with_columns(front=pl.col("tuner").is_in([p.tuner for p in front])))


def _beats(a: _Point, b: _Point) -> bool:
    """Whether `a` is as good as `b` in both respects and better in one."""
    return a.overhead <= b.overhead and a.seconds <= b.seconds and (a.overhead, a.seconds) != (b.overhead, b.seconds)


def _columns(axes: Axes, points: list[_Point]) -> list[list[_Point]]:
    """Points whose names would be beside or above each other, from left to right."""
    pixels = {p.tuner: float(axes.transData.transform((p.overhead, p.seconds))[0]) for p in points}
    columns: list[list[_Point]] = []
    for p in sorted(points, key=lambda p: pixels[p.tuner]):
        if columns and pixels[p.tuner] - pixels[columns[-1][-1].tuner] < _NAME_PIXELS:
            columns[-1].append(p)
        else:
            columns.append([p])
    return columns


def _label(axes: Axes, columns: list[list[_Point]], lined: list[_Point], step: float, low: float, high: float) -> None:
    """Names beside the points, above the line where a point is `lined`; names that would cover each other move apart as
    little as possible. A name is as high as `step` on the logarithmic axis."""
    from scipy.optimize import isotonic_regression

    for column in columns:
        column.sort(key=lambda p: (p.seconds, p.tuner))
        steps = step * np.arange(len(column))
        # The nearest heights that ascend by a step: an isotonic regression of what is left when the steps are taken off.
        # Clipped, so that the lowest and the highest name stay inside the axes.
        lowest, highest = math.log(low) + step / 2, math.log(high) - step / 2 - steps[-1]
        wanted = np.array([math.log(p.seconds) + (0.6 * step if p in lined else 0) for p in column])
        nearest = isotonic_regression(wanted - steps).x
        heights = np.clip(nearest, min(lowest, highest), highest) + steps
        at = max(p.overhead for p in column)
        for p, height in zip(column, heights, strict=True):
            color = INK if p.standing in ("leader", "not told apart") or p.role == "reference" else MUTED
            weight = "bold" if p.standing == "leader" else "normal"
            line = (
                {"arrowstyle": "-", "color": MUTED, "linewidth": 0.5, "shrinkB": 2, "relpos": (0, 0.5)}
                if len(column) > 1
                else None
            )
            axes.annotate(p.tuner, (p.overhead, p.seconds), xytext=(at, math.exp(height)), textcoords=_beside(axes),
                          va="center", fontsize=8, color=color, fontweight=weight, arrowprops=line)  # fmt: skip


def _beside(axes: Axes) -> Transform:
    """Data coordinates, some points to the right."""
    return offset_copy(axes.transData, axes.get_figure(root=True), x=14, units="points")


def _plain_seconds(axes: Axes, low: float, high: float) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

    nice = [m * 10.0**e for e in range(-3, 9) for m in (1, 2, 3, 5, 7)]
    axes.yaxis.set_major_locator(FixedLocator([v for v in nice if low <= v <= high]))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axes.yaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_minor_formatter(NullFormatter())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
