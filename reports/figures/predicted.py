"""The figures of a fidelity check: predicted against recorded seconds with intervals, and residuals over the setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.figures.drawing import BLUE, COLORS, GREEN, MUTED, ORANGE, Drawing, canvas, drawn
from simulators.calibration.spread import LEVEL_PERCENT
from simulators.calibration.validation import LARGER, UNLIKE, Prediction

__all__ = ["against_recorded", "residuals"]

_EXTRAPOLATED = (LARGER, UNLIKE)
_PURPLE = COLORS[1]


def against_recorded(predictions: Sequence[Prediction], name: str) -> Drawing:
    """Predicted over recorded seconds, by the simulator and by the plain closed form."""
    forms: tuple[tuple[str, Callable[[Prediction], float], Callable[[Prediction], float], bool], ...] = (
        ("simulator", lambda p: p.fitted, lambda p: p.held_out, True),
        ("plain closed form", lambda p: p.plain_fitted, lambda p: p.plain_held_out, False),
    )
    both = [x for p in predictions for x in (p.recorded, p.held_out, p.plain_held_out) if 0 < x < math.inf]
    ends = np.array([min(both) / 1.1, max(both) * 1.1])
    with canvas(4.6, left=0.75, bottom=0.5) as figure:
        figure.subplots_adjust(wspace=0.2)
        for axes, (title, fitted, held, bounded) in zip(figure.subplots(1, 2), forms, strict=True):
            _equal(axes, ends)
            axes.plot([p.recorded for p in predictions], [fitted(p) for p in predictions], ".", color=GREEN, markersize=4)
            for color, far in ((BLUE, False), (_PURPLE, True)):
                rows = [p for p in predictions if (p.split in _EXTRAPOLATED) == far]
                if bounded:
                    _intervals(axes, rows, color)
                axes.plot(
                    [p.recorded for p in rows], [held(p) for p in rows], "o", color=color, markersize=5, fillstyle="none"
                )
            axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
        figure.supxlabel("recorded, seconds", fontsize=9)
        figure.supylabel("predicted, seconds", fontsize=9, x=0.01)
        shown = {
            "green dots: fitted": any(math.isfinite(p.fitted) for p in predictions),
            "blue rings: held out": any(p.split not in _EXTRAPOLATED for p in predictions),
            "purple rings: extrapolated": any(p.split in _EXTRAPOLATED for p in predictions),
        }
        caption = (
            f"Predicted against recorded seconds of a cycle; {', '.join(k for k, yes in shown.items() if yes)}. Bars are "
            f"{LEVEL_PERCENT} % intervals. On the line both are equal; in the grey band they differ by at most 10 %."
        )
        return drawn(figure, name, caption)


def residuals(predictions: Sequence[Prediction], name: str) -> Drawing:
    """Errors of held-out predictions over workers, servers, workers per server, and batch size."""
    of: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
        ("workers", lambda p: p.workers),
        ("servers", lambda p: p.servers),
        ("workers per server", lambda p: p.workers / max(p.servers, 1)),
        ("batch size of a worker", lambda p: p.batch_size),
    )
    off = {
        which: [100 * (getattr(p, which) / p.recorded - 1) for p in predictions] for which in ("held_out", "plain_held_out")
    }
    seen = [abs(x) for values in off.values() for x in values if math.isfinite(x)]
    # An outlier of the plain form must not flatten the rest: it is drawn at the edge.
    top = min(max([20.0, *seen]), 60.0) * 1.08
    with canvas(2.9, left=0.75, bottom=0.55) as figure:
        for at, (axes, (label, x)) in enumerate(zip(figure.subplots(1, 4, sharey=True), of, strict=True)):
            axes.axhspan(-10, 10, color=MUTED, alpha=0.18, linewidth=0)
            axes.axhline(0, color=MUTED, linewidth=0.8)
            where = np.array([x(p) for p in predictions], float)
            values = sorted(set(where))
            places = {value: i for i, value in enumerate(values)}
            for shift, marker, color, which in ((0.12, "x", ORANGE, "plain_held_out"), (-0.12, "o", BLUE, "held_out")):
                place = [places[value] + shift for value in where]
                axes.plot(place, np.clip(off[which], -top, top), marker, color=color, markersize=4, fillstyle="none")
            axes.set_xticks(range(len(values)), [f"{value:.3g}" for value in values])
            axes.set_xlim(-0.6, len(values) - 0.4)
            axes.set_xlabel(label)
            axes.set_ylim(-top * 1.05, top * 1.05)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.0f} %" if value else "0"))
            axes.tick_params(axis="y", length=0 if at else 3)
        caption = (
            "Predicted over recorded, minus one, of rows that were not fitted. Blue rings: simulator; orange crosses: plain "
            "closed form; grey: 10 %. What is further off than the edge is drawn at the edge."
        )
        return drawn(figure, name, caption)


def _equal(axes: Axes, ends: np.ndarray) -> None:
    axes.fill_between(ends, ends / 1.1, ends * 1.1, color=MUTED, alpha=0.18, linewidth=0)
    axes.plot(ends, ends, color=MUTED, linewidth=0.8)
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    if ends[1] > 2.5 * ends[0]:
        axes.set_xscale("log")
        axes.set_yscale("log")
        rounded = [float(f"{x:.1g}") for x in np.geomspace(ends[0] * 1.15, ends[1] / 1.15, 4)]
        # Rounding may bring two so near to each other that their labels would overlap.
        ticks = [x for x, before in zip(rounded, [0.0, *rounded], strict=False) if x > 1.3 * before]
        for axis in (axes.xaxis, axes.yaxis):
            axis.set_ticks(ticks, [f"{x:g}" for x in ticks])
            axis.set_minor_locator(NullLocator())


def _intervals(axes: Axes, rows: Sequence[Prediction], color: str) -> None:
    known = [p for p in rows if math.isfinite(p.low) and math.isfinite(p.high)]
    lines = ([p.recorded for p in known], [p.low for p in known], [p.high for p in known])
    axes.vlines(*lines, color=color, linewidth=1.2, alpha=0.45)
