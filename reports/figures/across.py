"""The figures over several arenas: mean ratios with intervals, regret by arena as a heat map, and performance profiles."""

from __future__ import annotations

import math
from itertools import groupby, pairwise

import numpy as np
import polars as pl
from matplotlib.axis import Axis
from matplotlib.colors import LinearSegmentedColormap, Normalize
from matplotlib.ticker import FuncFormatter, NullFormatter, NullLocator

from reports.figures.drawing import BLUE, COLORS, MUTED, ORANGE, WIDTH, Drawing, canvas, drawn, label_inches
from reports.verdicts.arenas import Arenas, family_of, method, profile
from reports.verdicts.numbers import percent, relative
from reports.verdicts.summary import REFERENCE

__all__ = ["heat_map", "mean_ratios", "performance"]

_CELLS_WITH_TEXT = 24  # arenas; with more, a number no longer fits into its cell
_NAMED = 60  # arenas; of more, only the groups that they form are named
_COLORS = LinearSegmentedColormap.from_list("regret", ["#159f7a", "#e8e4da", "#d9700b", "#8c2d04"])


def mean_ratios(found: Arenas, name: str) -> Drawing:
    """Geometric mean ratio and interval per tuner, with the probability of being first."""
    tuners = found.rows["tuner"].to_list()
    with canvas(0.8 + 0.32 * len(tuners), left=label_inches(tuners), top=0.3) as figure:
        axes = figure.add_subplot()
        axes.set_xscale("log")
        ends = [v for c in ("ratio", "ratio_low", "ratio_high") for v in found.rows[c].to_list() if v == v]
        low, high = min([*ends, 1.0]) / 1.1, max([*ends, 1.0]) * 1.1
        axes.axvline(1.0, color=MUTED, linewidth=1, linestyle=":")
        for y, row in enumerate(found.rows.iter_rows(named=True)):
            color = (
                ORANGE if row["tuner"] == REFERENCE else BLUE if row["standing"] in ("leader", "not told apart") else MUTED
            )
            if row["ratio_low"] == row["ratio_low"]:
                axes.plot([row["ratio_low"], row["ratio_high"]], [y, y], color=color, linewidth=3, alpha=0.5)
            axes.plot([row["ratio"]], [y], "o", color=color, markersize=7)
            text = f"first in {percent(row['first'])}" + (
                f", applies to {row['arenas']} of {len(found.arenas)}" if row["arenas"] < len(found.arenas) else ""
            )
            axes.text(1.0, y, text, transform=axes.get_yaxis_transform(), ha="right", va="center", color=MUTED, fontsize=7.5)
        axes.set_xlim(low, high * (high / low) ** 0.25)
        axes.set_yticks(range(len(tuners)), tuners)
        axes.set_ylim(len(tuners) - 0.4, -0.7)
        axes.tick_params(axis="y", length=0)
        _ratio_ticks(axes.xaxis, low, high)
        axes.grid(axis="x", color=MUTED, alpha=0.25, linewidth=0.6)
        axes.set_xlabel(f"time{f' over that of {found.base}' if found.base else ', s'}, geometric mean over arenas")
        caption = (
            f"Geometric mean over {len(found.arenas)} arenas of the time{_relative_to(found)}, with its 95 % interval "
            f"{method(found).intervals}. Blue: the leader and those that are not told apart from it; grey: told apart; "
            f"orange: {REFERENCE}. Beside it: the probability of being first in an arena."
        )
        return drawn(figure, name, caption, found.rows)


def heat_map(found: Arenas, name: str) -> Drawing:
    """Ratio to the base by tuner and arena."""
    tuners, arenas = found.rows["tuner"].to_list(), list(found.arenas)
    values = found.log_ratio.T / math.log(2)  # [tuners, arenas], in doublings
    short, places = _labels(arenas)
    bottom = 0.25 + 0.075 * max(len(a) for a in short)
    with canvas(0.3 + bottom + 0.27 * len(tuners), left=label_inches(tuners), bottom=bottom, top=0.1) as figure:
        axes = figure.add_subplot()
        masked = np.ma.masked_invalid(values)
        axes.pcolormesh(masked, cmap=_COLORS, norm=Normalize(-1, 2), edgecolors="none")
        if len(arenas) <= _CELLS_WITH_TEXT:
            for (y, x), value in np.ndenumerate(values):
                missed = math.isinf(found.to_best[x, y])  # no run reached the target: the ratio is a lower bound
                shown = "n/a" if math.isnan(value) else ("> " if missed else "") + relative(2.0**value)
                color = MUTED if math.isnan(value) else "#ffffff" if value > 0.9 or value < -0.6 else "#1b1f24"
                axes.text(x + 0.5, y + 0.5, shown, ha="center", va="center", fontsize=7, color=color)
        axes.set_yticks(np.arange(len(tuners)) + 0.5, tuners)
        axes.set_xticks(places, short, rotation=90, fontsize=7.5)
        if len(short) < len(arenas):
            ends = [i for i, (a, b) in enumerate(pairwise(arenas), 1) if _group(a) != _group(b)]
            axes.vlines(ends, 0, len(tuners), color=MUTED, linewidth=0.6)
        axes.set_ylim(len(tuners), 0)
        axes.tick_params(length=0)
        for side in axes.spines.values():
            side.set_visible(False)
        caption = (
            f"Time{_relative_to(found)}, by tuner and arena: mean of logarithms over seeds. Green: faster than the "
            "base; pale: up to twice its time; brown: four times and more; >: no run reached the target. Empty or n/a: the "
            "tuner does not apply, or did nothing." + (" A column is an arena." if len(short) < len(arenas) else "")
        )
        rows = [
            {"tuner": t, "arena": a, "ratio": float(2.0 ** values[i, j])}
            for i, t in enumerate(tuners)
            for j, a in enumerate(arenas)
        ]
        return drawn(
            figure,
            name,
            caption,
            pl.DataFrame(rows, schema={"tuner": pl.String(), "arena": pl.String(), "ratio": pl.Float64()}),
        )


def _relative_to(found: Arenas) -> str:
    return f" relative to {found.base}" if found.base else ""


def _labels(arenas: list[str]) -> tuple[list[str], list[float]]:
    """What stands below the columns, and where: the names of the arenas; of many, those of the groups that follow each
    other."""
    if len(arenas) <= _NAMED:
        return _short(arenas), [i + 0.5 for i in range(len(arenas))]
    groups = [(group, len(list(members))) for group, members in groupby(arenas, key=_group)]
    ends = np.cumsum([count for _, count in groups])
    return [group for group, _ in groups], [float(end - count / 2) for end, (_, count) in zip(ends, groups, strict=True)]


def _group(arena: str) -> str:
    """The family of an arena, or the first word of its name."""
    return family_of(arena) or arena.partition("-")[0]


def _short(arenas: list[str]) -> list[str]:
    """Names without what all of them begin with, if the rest still tells them apart."""
    head = arenas[0][: max(arenas[0].rfind("-") + 1, 0)]
    if len(arenas) > 1 and head and all(a.startswith(head) for a in arenas):
        return [a[len(head) :] for a in arenas]
    return arenas


def performance(found: Arenas, name: str) -> Drawing:
    """Performance profiles (Dolan and More 2002): the share of arenas in which a tuner is within a factor of the best."""
    tau, share = profile(found)
    end = max(2.0, float(tau[-1]) * 1.05)
    tuners = found.rows["tuner"].to_list()
    standing = dict(found.rows.select("tuner", "standing").iter_rows())
    bold = [t for t in tuners if standing[t] in ("leader", "not told apart") and t != REFERENCE][: len(COLORS)]
    named = [*bold, *([REFERENCE] if REFERENCE in tuners else [])]
    beside = max(1, int((WIDTH - 0.9) / (0.45 + label_inches(named))))  # names in a row of the legend
    legend = 0.2 * -(-len(named) // beside)  # inches
    with canvas(3.7 + legend, left=0.75, top=0.15 + legend) as figure:
        axes = figure.add_subplot()
        axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
        axes.set_xscale("log", base=2)
        for i, tuner in sorted(enumerate(tuners), key=lambda item: item[1] in bold):
            color = ORANGE if tuner == REFERENCE else COLORS[bold.index(tuner)] if tuner in bold else MUTED
            plain = color == MUTED
            x, y = np.append(tau, end), np.append(share[:, i], share[-1, i])
            axes.step(x, y, where="post", color=color, linewidth=0.8 if plain else 2.0, alpha=0.6 if plain else 1.0,
                      linestyle="--" if tuner == REFERENCE else "-", label=None if plain else tuner)  # fmt: skip
        axes.set_xlim(1, end)
        axes.set_ylim(0, 1.02)
        _ratio_ticks(axes.xaxis, 1.0, end)
        axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:.0%}"))
        axes.set_xlabel("factor of the best tuner's time")
        axes.set_ylabel("share of arenas")
        if axes.get_legend_handles_labels()[0]:  # there are none where no arena has a leader
            # Above the drawing: curves can be anywhere in it.
            axes.legend(loc="lower left", bbox_to_anchor=(0, 1), ncols=beside, frameon=False, fontsize=8.5, borderaxespad=0)
        caption = (
            "Performance profiles: the share of arenas in which a tuner's time is within a factor of the best tuner's "
            "there. At 1: how often it is the best. A tuner that does not reach the target in an arena never counts there."
        )
        rows = [
            {"tuner": t, "factor": float(x), "share": float(share[k, i])}
            for i, t in enumerate(tuners)
            for k, x in enumerate(tau)
        ]
        schema = {"tuner": pl.String(), "factor": pl.Float64(), "share": pl.Float64()}
        return drawn(figure, name, caption, pl.DataFrame(rows, schema=schema))


def _ratio_ticks(axis: Axis, low: float, high: float) -> None:
    """Few, plain ratios as ticks of a logarithmic axis."""
    from matplotlib.ticker import FixedLocator

    nice = (0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 0.7, 1, 1.2, 1.5, 2, 3, 5, 7, 10, 20, 50, 100, 200, 500, 1000)
    axis.set_major_locator(FixedLocator([v for v in nice if low <= v <= high]))
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_locator(NullLocator())
    axis.set_minor_formatter(NullFormatter())
