"""The figure of a tuner's settings over time, one panel per knob that it changed."""

from __future__ import annotations

import math
import tomllib

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.ticker import LogLocator, MaxNLocator

from reports.figures.drawing import BLUE, MUTED, WIDTH, Drawing, canvas, drawn, label_inches
from reports.figures.knobs import Lane, knob_values, lanes
from traces.schema import setting_from
from traces.store import SIMULATED_SECONDS

__all__ = ["SETTINGS_NOTE", "settings_over_time", "typical_seed", "unmoved"]

_FEW = 6  # values of a knob that can be ticks, if their labels do not touch
_LABEL = 0.2  # of a panel's values: the height of a label
_BELOW, _ABOVE = 0.12, 0.15  # of a panel's height, without values: to the line below it, and to the panel above

SETTINGS_NOTE = (
    "Every knob that changed, over time: one line per seed; the thick line is the run with the median completion "
    "time. A line ends when its run reached the target or the budget; where a run ended otherwise, at its last change."
)
"""How to read the drawings of `settings_over_time`."""


def settings_over_time(
    settings: pl.DataFrame, scores: pl.DataFrame, name: str, unit: str = SIMULATED_SECONDS
) -> Drawing | None:
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
        # All panels share one pair of axes: to make and draw a pair for each takes twice as long.
        axes = figure.add_subplot()
        bottom, ticks = sum(heights), []
        for lane, height in zip(found, heights, strict=True):
            bottom -= height
            ticks += _draw_lane(axes, lane, typical, bottom, height)
        axes.set_yticks([at for at, _ in ticks], [text for _, text in ticks])
        axes.set_ylim(0, sum(heights))
        axes.set_xlim(left=0)
        axes.set_xlabel(unit)
        axes.grid(color=MUTED, alpha=0.2, linewidth=0.6)
        caption = (
            f"Thick: seed {typical}. Knobs that changed: {', '.join(lane.label.replace(chr(10), ' ') for lane in found)}."
        )
        return drawn(figure, name, caption, _data(found))


def typical_seed(scores: pl.DataFrame) -> int:
    """The seed of the run with the median completion time."""
    ran = scores.filter(pl.col("status") != "error")
    ordered = (ran if ran.height else scores).sort("completion_seconds", "seed")
    return int(ordered["seed"][(ordered.height - 1) // 2])


def _draw_lane(axes: Axes, lane: Lane, typical: int, bottom: float, height: float) -> list[tuple[float, str]]:
    """One knob over time, from `bottom` to `height` above it; the run of the `typical` seed is bold. Returns the ticks, as
    heights with texts."""
    at = np.log if lane.log else np.asarray
    ticks = _ticks(lane)
    scaled = at([value for value, _ in ticks] + lane.values())
    low, span = scaled.min(), np.ptp(scaled) or 1.0
    step = height * (1 - _BELOW - _ABOVE) / span  # of the height, for each unit of a scaled value
    for seed, (x, y) in sorted(lane.steps.items(), key=lambda item: item[0] == typical):
        bold = seed == typical
        heights = bottom + height * _BELOW + step * (at(y) - low)
        axes.step(x, heights, where="post", color=BLUE, linewidth=2.2 if bold else 0.8, alpha=1 if bold else 0.45)
    axes.axhline(bottom, color=MUTED, linewidth=0.8)
    box = axes.get_position()
    edge = (0.1 / WIDTH - box.x0) / box.width  # a tenth of an inch from the figure's left side
    middle = bottom + height * (1 + _BELOW - _ABOVE) / 2
    axes.text(edge, middle, lane.label, transform=axes.get_yaxis_transform(), ha="left", va="center", fontsize=8)
    return [(bottom + height * _BELOW + step * float(at(value) - low), text) for value, text in ticks]


def _ticks(lane: Lane) -> list[tuple[float, str]]:
    """Values of a knob with their texts, for the vertical axis."""
    if lane.categories:
        return list(enumerate(lane.categories))
    values = lane.values()
    if 1 < len(values) <= _FEW:
        # A knob with few values has just these as ticks: between them there is nothing.
        chosen = _apart(values, lane.log)
    else:
        locator = LogLocator(numticks=5) if lane.log else MaxNLocator(3, integer=lane.whole)
        chosen = [float(v) for v in locator.tick_values(values[0], values[-1]) if values[0] <= v <= values[-1]]
        if len(chosen) < 2:  # of logarithmic ticks, when no two powers of ten are between
            chosen = [values[0], values[-1]] if len(values) > 1 else values
    return [(value, f"{value:.3g}") for value in chosen]


def _apart(values: list[float], log: bool) -> list[float]:
    """Those of the ascending `values` whose labels do not touch: the ends, and between them from below."""
    at = [math.log(v) if log else v for v in values]
    room = _LABEL * (at[-1] - at[0])
    kept = [0]
    for i in range(1, len(at) - 1):
        if at[i] - at[kept[-1]] >= room and at[-1] - at[i] >= room:
            kept.append(i)
    return [values[i] for i in (*kept, len(at) - 1)]


def _data(found: list[Lane]) -> pl.DataFrame:
    """Every step of every lane."""
    rows = []
    for lane in found:
        for seed, (x, y) in sorted(lane.steps.items()):
            shown = [lane.categories[int(v)] if lane.categories else f"{v:g}" for v in y]
            knob = lane.label.replace("\n", " ")
            rows += [{"knob": knob, "seed": seed, "seconds": float(t), "value": v} for t, v in zip(x, shown, strict=True)]
    return pl.DataFrame(
        rows, schema={"knob": pl.String(), "seed": pl.Int64(), "seconds": pl.Float64(), "value": pl.String()}
    )


def unmoved(settings: pl.DataFrame, text: str) -> list[str]:
    """The free knobs of a scenario's text that no run of `settings` moved; [] where the text has no table of free knobs."""
    try:
        free = tomllib.loads(text).get("free")
    except tomllib.TOMLDecodeError:
        return []
    if not isinstance(free, dict) or settings.is_empty():
        return []
    moved: set[str] = set()
    for (_, _), run in settings.group_by(["tuner", "seed"]):
        if run.height > 1:
            values = [knob_values(setting_from(text)) for text in run["setting"].unique()]
            moved |= {name for name in values[0] if len({str(v.get(name)) for v in values}) > 1}
    if "placement" in moved:
        moved |= {"worker_count", "server_count"} | {name for name in free if name.startswith("role")}
    known = {"samples_per_round": "global_batch_size"}
    moved |= {known[name] for name in moved if name in known}
    shown = set(knob_values(setting_from(settings["setting"][0])))
    return [name for name in free if name in shown and name not in moved]
