"""The figures of progress to the target: all tuners in one plot, and a panel for each."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from numpy.typing import NDArray

from reports.figures.drawing import BLUE, COLORS, GREEN, INK, MUTED, ORANGE, Drawing, canvas, drawn, logarithmic
from reports.figures.settings_over_time import typical_seed
from reports.verdicts.summary import ORACLE, REFERENCE
from traces.store import SIMULATED_SECONDS

__all__ = ["learning_curves", "median_curve", "progress"]

_POINTS = 50  # of a run's line, at the most; more would only make the page larger
_MARKS = 40  # changes that are marked on a line; more would cover it
_Floats = NDArray[np.float64]
_Curve = tuple[_Floats, _Floats]
_SCHEMA = {"tuner": pl.String(), "seconds": pl.Float64(), "median": pl.Float64(), "low": pl.Float64(), "high": pl.Float64()}


class _Line(NamedTuple):
    """How a tuner is drawn in the plot of all."""

    tuner: str
    color: str
    width: float
    style: str = "-"
    band: bool = False


def progress(
    evaluations: pl.DataFrame,
    settings: pl.DataFrame,
    scores: pl.DataFrame,
    rows: pl.DataFrame,
    metric: str,
    name: str,
    target: float | None = None,
    unit: str = SIMULATED_SECONDS,
) -> Drawing | None:
    """All tuners of one scenario in one plot of `metric` over time, zoomed to where the target is reached.

    `rows` are those of `summary.summary`. None where no tuner has a finite value.
    """
    finite = evaluations.filter(pl.col(metric).is_finite())
    lines = _lines(rows)
    curves = {line.tuner: found for line in lines if (found := _curves(finite, line.tuner, metric))}
    if not curves:
        return None
    bands = {tuner: _band(found) for tuner, found in curves.items()}
    with canvas(4.6, left=0.75, top=0.15) as figure:
        axes = figure.add_subplot()
        axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
        for line in lines:
            if line.tuner in bands:
                _draw_line(axes, line, bands[line.tuner], line.tuner != lines[0].tuner or line.color != MUTED)
                if line.color not in (MUTED, GREEN):
                    _mark_changes(axes, line, bands[line.tuner], settings, scores)
        if target is not None:
            axes.axhline(target, color=INK, linewidth=0.9, linestyle=":")
        _zoom(axes, bands, lines, metric, target)
        axes.set_xlabel(unit)
        axes.set_ylabel(f"validation {metric}")
        if axes.get_legend_handles_labels()[0]:  # where no bold line was validated, all are thin and grey
            axes.legend(loc="lower right" if metric == "accuracy" else "upper right", frameon=False, fontsize=8.5)
        caption = (
            f"Validation {metric} over time: medians over seeds, for as long as half of the runs go on (a run "
            "that has ended keeps its last value). Colours: the leader, with the next three that are not told apart from "
            f"it, {REFERENCE} (orange, dashed) and the oracle (green, dash-dotted); thin grey lines: all others. Bands hold "
            "the middle half of the runs. Ticks on a line: changes of the setting in the run of median time."
            + ("" if target is None else " Dotted: the target.")
        )
        data = [
            {"tuner": t, "seconds": float(a), "median": float(m), "low": float(b), "high": float(c)}
            for t, (x, y, low, high) in bands.items()
            for a, m, b, c in zip(x, y, low, high, strict=True)
        ]
        return drawn(figure, name, caption, pl.DataFrame(data, schema=_SCHEMA))


def _lines(rows: pl.DataFrame) -> list[_Line]:
    """How each tuner is drawn, the most important last; tuners with identical runs are left out."""
    order = [(str(t), str(s)) for t, s in rows.filter(pl.col("role") != "same").select("tuner", "standing").iter_rows()]
    lead = [t for t, s in order if s == "leader"]
    close = [t for t, s in order if s == "not told apart" and t != REFERENCE][: len(COLORS) - 2]
    bold = [t for t in [*lead, *close] if t != REFERENCE]
    lines = [_Line(t, MUTED, 0.7) for t, _ in order if t not in (REFERENCE, ORACLE) and t not in bold]
    lines += [_Line(t, color, 1.6) for t, color in reversed(list(zip(bold[1:], COLORS[1:], strict=False)))]
    present = {t for t, _ in order}
    lines += [_Line(ORACLE, GREEN, 1.4, "-.")] * (ORACLE in present)
    lines += [_Line(REFERENCE, ORANGE, 1.6, "--", band=True)] * (REFERENCE in present)
    return lines + [_Line(t, BLUE, 2.6, band=True) for t in bold[:1]]


def _draw_line(axes: Axes, line: _Line, band: tuple[_Floats, _Floats, _Floats, _Floats], labelled: bool) -> None:
    x, y, low, high = band
    if line.band:
        axes.fill_between(x, low, high, color=line.color, alpha=0.18, linewidth=0)
    plain = line.color == MUTED
    axes.plot(
        x, y, color=line.color, linewidth=line.width, linestyle=line.style, alpha=0.6 if plain else 1.0,
        label=line.tuner if labelled and not plain else None,
    )  # fmt: skip


def _mark_changes(
    axes: Axes, line: _Line, band: tuple[_Floats, _Floats, _Floats, _Floats], settings: pl.DataFrame, scores: pl.DataFrame
) -> None:
    mine = scores.filter(pl.col("tuner") == line.tuner)
    if mine.is_empty():
        return
    seed = typical_seed(mine)
    at = settings.filter((pl.col("tuner") == line.tuner) & (pl.col("seed") == seed))["seconds"].to_numpy()
    x, y = band[0], band[1]
    at = at[(at > 0) & (at <= x[-1])]
    if 0 < at.size <= _MARKS:
        axes.plot(at, np.interp(at, x, y), "|", color=line.color, markersize=11, markeredgewidth=1.6)


def _zoom(
    axes: Axes,
    bands: dict[str, tuple[_Floats, _Floats, _Floats, _Floats]],
    lines: Sequence[_Line],
    metric: str,
    target: float | None,
) -> None:
    """Limit the axes to where the target is reached: from the leader's first part to the end of the slowest bold line."""
    bold = [line.tuner for line in lines if line.color != MUTED and line.tuner in bands] or list(bands)
    end = max(float(bands[t][0][-1]) for t in bold)
    axes.set_xlim(0, 1.03 * end or 1.0)  # 0: every run was at its target before it trained
    if target is None:
        if metric == "loss" and all(bands[t][1].min() > 0 for t in bold):
            logarithmic(axes)
        return
    x, y = bands[bold[-1]][:2]
    early = float(np.interp(0.15 * x[-1], x, y))
    past = 0.25 * (target - early)
    if early == target:
        return
    if metric == "loss" and min(early, target) > 0 and max(early, target) / min(early, target) > 20:
        logarithmic(axes)
        axes.set_ylim(target**1.1 / early**0.1, early)
    else:
        low, high = sorted((early, target + past))
        axes.set_ylim(low, min(high, 1.0) if metric == "accuracy" and target < 1 else high)


def learning_curves(
    evaluations: pl.DataFrame,
    tuners: Sequence[str],
    metric: str,
    name: str,
    target: float | None = None,
    unit: str = SIMULATED_SECONDS,
) -> Drawing | None:
    """`metric` ("accuracy" or "loss") over time, one panel per tuner; None where no tuner has a finite value.

    `tuners` are best first: the axes are limited to where the first of them and `fixed` approach the target.
    """
    finite = evaluations.filter(pl.col(metric).is_finite())
    curves = {t: _curves(finite, t, metric) for t in tuners}
    if not any(curves.values()):
        return None
    medians = {tuner: median_curve(lines) for tuner, lines in curves.items() if lines}
    columns = min(4, len(tuners))
    rows = -(-len(tuners) // columns)
    with canvas(0.75 + 1.3 * rows, left=0.8, gaps=0.35) as figure:
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
        _zoom_panels(grid[0, 0], medians, metric, target)
        figure.supxlabel(unit, fontsize=9)
        figure.supylabel(f"validation {metric}", fontsize=9, x=0.02)
        caption = (
            f"Validation {metric} over time, one panel per tuner, all with the same axes. Thin blue lines are "
            "single runs. The thick line is their median for as long as at least half of them go on (a run that has ended "
            f"keeps its last value). Later and lower parts are cut off; the CSV has them. Orange, dashed: {REFERENCE}."
            + ("" if target is None else " Dotted: the target.")
        )
        kept = finite.filter(pl.col("tuner").is_in(list(tuners))).select("tuner", "seed", "seconds", "clocks", metric)
        return drawn(figure, name, caption, kept.sort("tuner", "seed", "seconds"))


def _zoom_panels(axes: Axes, medians: dict[str, _Curve], metric: str, target: float | None) -> None:
    """Limit the shared axes: to twice what the best tuner and the reference take, from the best tuner's early values on."""
    first = next(iter(medians))
    ends = [float(medians[t][0][-1]) for t in (first, REFERENCE) if t in medians]
    axes.set_xlim(0, min(2 * max(ends), 1.03 * max(float(x[-1]) for x, _ in medians.values())) or 1.0)
    if target is None:
        return
    x, y = medians[first]
    early = float(np.interp(0.05 * x[-1], x, y))
    if metric == "accuracy" and early < target:
        axes.set_ylim(early, min(1.0, target + 0.25 * (target - early)) if target < 1 else target + 0.25 * (target - early))


def _draw_panel(axes: Axes, tuner: str, lines: list[_Curve], medians: dict[str, _Curve]) -> None:
    axes.set_title(tuner, loc="left", fontsize=8.5, fontweight="bold", pad=3)
    axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
    if tuner != REFERENCE and REFERENCE in medians:
        axes.plot(*medians[REFERENCE], color=ORANGE, linewidth=1, linestyle="--")
    for x, y in lines:
        axes.plot(x, y, color=BLUE, linewidth=0.6, alpha=0.45)
    if tuner in medians:
        axes.plot(*medians[tuner], color=BLUE, linewidth=2)
    else:
        axes.text(0.5, 0.5, "no evaluations", transform=axes.transAxes, ha="center", color=MUTED)


def _curves(finite: pl.DataFrame, tuner: str, metric: str) -> list[_Curve]:
    """A curve per seed of a tuner, thinned to `_POINTS`."""
    lines = []
    mine = finite.filter(pl.col("tuner") == tuner).sort("seed", "seconds")
    for _, run in mine.group_by(["seed"], maintain_order=True):
        x, y = run["seconds"].to_numpy(), run[metric].to_numpy()
        keep = np.unique(np.linspace(0, x.size - 1, min(x.size, _POINTS)).astype(int))
        lines.append((x[keep], y[keep]))
    return lines


def median_curve(curves: Sequence[_Curve]) -> _Curve:
    """The median of curves (seconds, values), from when all have a value until half of them have ended."""
    x, y, _, _ = _band(curves)
    return x, y


def _band(curves: Sequence[_Curve]) -> tuple[_Floats, _Floats, _Floats, _Floats]:
    """Seconds, median and quartiles of curves, from when all have a value until half of them have ended."""
    start = max(float(x[0]) for x, _ in curves)
    end = max(start, float(np.median([x[-1] for x, _ in curves])))
    at = np.linspace(start, end, _POINTS)
    low, middle, high = np.quantile([np.interp(at, x, y) for x, y in curves], [0.25, 0.5, 0.75], axis=0)
    return at, middle, low, high
