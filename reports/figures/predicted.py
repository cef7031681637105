"""The figures of a fidelity check: predicted against recorded seconds with intervals, and residuals over the setting."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import FuncFormatter, NullLocator

from reports.figures.drawing import BLUE, COLORS, GREEN, MUTED, ORANGE, Drawing, canvas, drawn
from simulators.calibration.predictions import LARGER, UNLIKE, Prediction
from simulators.calibration.spread import LEVEL_PERCENT

__all__ = ["FORMS", "Form", "against_recorded", "residuals"]


class Form(NamedTuple):
    """One way to predict, and what it says of a recorded value: seconds."""

    name: str
    fitted: Callable[[Prediction], float]  # where it was fitted to all rows
    held_out: Callable[[Prediction], float]
    low: Callable[[Prediction], float]  # ends of the interval around `held_out`
    high: Callable[[Prediction], float]


FORMS = (
    Form("simulator", lambda p: p.fitted, lambda p: p.held_out, lambda p: p.low, lambda p: p.high),
    Form(
        "closed network",
        lambda p: p.network_fitted,
        lambda p: p.network_held_out,
        lambda p: p.network_low,
        lambda p: p.network_high,
    ),
    Form(
        "plain closed form",
        lambda p: p.plain_fitted,
        lambda p: p.plain_held_out,
        lambda p: p.plain_low,
        lambda p: p.plain_high,
    ),
)

_EXTRAPOLATED = (LARGER, UNLIKE)
_PURPLE = COLORS[1]


def against_recorded(predictions: Sequence[Prediction], rival: Form, name: str) -> Drawing:
    """Predicted over recorded seconds, by the simulator and by `rival`, a closed form."""
    forms = (FORMS[0], rival)
    both = [x for p in predictions for x in (p.recorded, *(form.held_out(p) for form in forms)) if 0 < x < math.inf]
    bars = [x for p in predictions for form in forms for x in (form.low(p), form.high(p)) if 0 < x < math.inf]
    least, most = min(both), max(both)
    # Whole intervals, except for the rest of very wide ones, which would press all points into a corner.
    ends = np.array([max(min([*bars, least]), least / 1.5) / 1.1, min(max([*bars, most]), most * 1.5) * 1.1])
    with canvas(4.6, left=0.75, bottom=0.5) as figure:
        figure.subplots_adjust(wspace=0.2)
        for axes, form in zip(figure.subplots(1, 2), forms, strict=True):
            _equal(axes, ends)
            axes.plot(
                [p.recorded for p in predictions], [form.fitted(p) for p in predictions], ".", color=GREEN, markersize=4
            )
            for color, far in ((BLUE, False), (_PURPLE, True)):
                rows = [p for p in predictions if (p.split in _EXTRAPOLATED) == far]
                _intervals(axes, rows, form, color)
                at = [form.held_out(p) for p in rows]
                axes.plot([p.recorded for p in rows], at, "o", color=color, markersize=5, fillstyle="none")
            axes.set_title(form.name, loc="left", fontsize=9, fontweight="bold")
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


def residuals(predictions: Sequence[Prediction], rival: Form, name: str) -> Drawing:
    """Errors of held-out predictions over workers, servers, workers per server, and batch size; also of `rival`."""
    of: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
        ("workers", lambda p: p.workers),
        ("servers", lambda p: p.servers),
        ("workers per server", lambda p: p.workers / max(p.servers, 1)),
        ("batch size of a worker", lambda p: p.batch_size),
    )
    drawn_as = ((rival, 0.2, "x", ORANGE, None), (FORMS[0], 0.0, "o", BLUE, False), (FORMS[0], -0.2, "o", _PURPLE, True))
    off = {form.name: np.array([100 * (form.held_out(p) / p.recorded - 1) for p in predictions]) for form, *_ in drawn_as}
    extrapolated = np.array([p.split in _EXTRAPOLATED for p in predictions])
    seen = [abs(x) for values in off.values() for x in values if math.isfinite(x)]
    # An outlier of the closed form must not flatten the rest: it is drawn at the edge.
    top = min(max([20.0, *seen]), 60.0) * 1.08
    with canvas(2.9, left=0.75, bottom=0.55) as figure:
        for at, (axes, (label, x)) in enumerate(zip(figure.subplots(1, 4, sharey=True), of, strict=True)):
            axes.axhspan(-10, 10, color=MUTED, alpha=0.18, linewidth=0)
            axes.axhline(0, color=MUTED, linewidth=0.8)
            where = np.array([x(p) for p in predictions], float)
            values = sorted(set(where))
            places = {value: i for i, value in enumerate(values)}
            for form, shift, marker, color, far in drawn_as:
                mine = np.full(len(where), True) if far is None else extrapolated == far
                place = [places[value] + shift for value in where[mine]]
                height = np.clip(off[form.name][mine], -top, top)
                axes.plot(place, height, marker, color=color, markersize=4, fillstyle="none")
            axes.set_xticks(range(len(values)), [f"{value:.3g}" for value in values])
            axes.set_xlim(-0.6, len(values) - 0.4)
            axes.set_xlabel(label)
            axes.set_ylim(-top * 1.05, top * 1.05)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:+.0f} %" if value else "0"))
            axes.tick_params(axis="y", length=0 if at else 3)
        kinds = [
            *(["blue rings, held out"] if not extrapolated.all() else []),
            *(["purple rings, extrapolated"] if extrapolated.any() else []),
        ]
        caption = (
            f"Predicted over recorded, minus one, of rows that were not fitted. Simulator: {'; '.join(kinds)}. Orange "
            f"crosses: {rival.name}; grey: 10 %. What is further off than the edge is drawn at the edge."
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


def _intervals(axes: Axes, rows: Sequence[Prediction], form: Form, color: str) -> None:
    known = [
        (p.recorded, low, high) for p in rows if math.isfinite(low := form.low(p)) and math.isfinite(high := form.high(p))
    ]
    if known:
        axes.vlines(*zip(*known, strict=True), color=color, linewidth=1.2, alpha=0.45)
