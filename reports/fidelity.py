"""The page of `harness fidelity`: predicted against recorded times, per recording, on fitted rows and on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from scipy.stats import kendalltau

from reports.figures.drawing import BLUE, GREEN, MUTED, ORANGE, Drawing, canvas, drawn
from reports.rendering import fill
from simulators.calibration.validation import COMPLETION, Check, Prediction
from traces.store import write_bytes

__all__ = ["Errors", "errors", "page", "tables", "write"]


class Errors(NamedTuple):
    """Relative errors of the predictions of one group."""

    rows: int
    median: float
    p95: float
    tau: float  # Kendall's, of predicted and recorded; nan with fewer than three settings


def errors(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> Errors:
    """Errors of the predictions that `which` picks; predictions that could not be made (nan) do not count."""
    pairs = [(which(p), p.recorded, p.label) for p in made if math.isfinite(which(p))]
    if not pairs:
        return Errors(0, math.nan, math.nan, math.nan)
    off = np.array([abs(a / b - 1) for a, b, _ in pairs])
    ranked = len({label for *_, label in pairs}) >= 3
    tau = float(kendalltau([a for a, *_ in pairs], [b for _, b, _ in pairs]).statistic) if ranked else math.nan
    return Errors(len(pairs), float(np.median(off)), float(np.quantile(off, 0.95)), tau)


_HELD_OUT = "simulator, held out"
_KINDS: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("simulator, fitted", lambda p: p.fitted),
    (_HELD_OUT, lambda p: p.held_out),
    ("plain closed form, fitted", lambda p: p.plain_fitted),
    ("plain closed form, held out", lambda p: p.plain_held_out),
)


def tables(checks: Sequence[Check]) -> list[str]:
    """The errors as plain text for a terminal, one table per recording."""
    found = []
    for made in checks:
        lines = [f"{made.origin.source} ({made.origin.of})", f"{'':34}{'rows':>6}{'median':>9}{'95th %':>9}{'tau':>7}"]
        for group, rows in _groups(made):
            lines.append(group)
            lines += [f"  {name:32}{_cells(errors(rows, which))}" for name, which in _KINDS]
        found.append("\n".join([*lines, *(f"note: {why}" for why in made.caveats), ""]))
    return found


def _cells(e: Errors) -> str:
    return f"{e.rows:>6}{_percent(e.median):>9}{_percent(e.p95):>9}{_tau(e):>7}"


def _tau(e: Errors) -> str:
    return "-" if math.isnan(e.tau) else f"{e.tau:.2f}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _groups(made: Check) -> list[tuple[str, list[Prediction]]]:
    names = dict.fromkeys(p.group for p in made.predictions)
    return [(name, [p for p in made.predictions if p.group == name]) for name in names]


# ----------------------------------------------------------------------------------------------------------------- page


def write(folder: Path, checks: Sequence[Check], findings: str = "") -> Path:
    """Write `fidelity.html` and every prediction, `predictions.csv`, into a folder; the page's path.

    `findings` explain the differences, in paragraphs with empty lines between them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"source": c.origin.source} | {name: getattr(p, name) for name in Prediction.__slots__}
        for c in checks
        for p in c.predictions
    ]
    write_bytes(folder / "predictions.csv", pl.DataFrame(rows, infer_schema_length=None).write_csv().encode())
    path = folder / "fidelity.html"
    write_bytes(path, page(checks, findings).encode())
    return path


def page(checks: Sequence[Check], findings: str = "") -> str:
    """The page: what was found, a section per recording, with a table and a drawing, and how it was made."""
    return fill(
        "fidelity.html.j2",
        title="How far the simulator is from recorded clusters",
        lead=_lead(checks),
        findings=[" ".join(paragraph.split()) for paragraph in findings.split("\n\n") if paragraph.strip()],
        recordings=[_section(made, f"r{i}") for i, made in enumerate(checks)],
        kinds=[kind for kind, _ in _KINDS],
        folds=" or ".join(sorted({str(made.folds) for made in checks})),
        has_completions=any(p.group.endswith(COMPLETION) for made in checks for p in made.predictions),
    )


def _lead(checks: Sequence[Check]) -> str:
    rows = sum(len(c.predictions) for c in checks)
    count = f"{len(checks)} recording{'s' * (len(checks) != 1)}, {rows} rows"
    return f"{count}; predicted by the simulator and by a plain closed form."


@dataclass(frozen=True, slots=True)
class _RecordingSection:
    """What the page shows of one recording, in the order of the template `recording`."""

    title: str
    finding: str  # about the largest error; "" where nothing was predicted
    divided: str
    groups: list[_GroupRow]
    drawing: Drawing
    constants: list[_ConstantRow]
    refused: list[str]  # constants that this recording cannot determine, and why
    caveats: tuple[str, ...]
    origin: str


class _GroupRow(NamedTuple):
    """Errors of one group of predictions, as text."""

    name: str
    rows: int
    errors: list[str]  # median and 95th percentile, a text per kind of prediction
    tau: str


class _ConstantRow(NamedTuple):
    """A fitted constant of a workload, as text."""

    workload: str
    name: str
    value: str
    interval: str


def _section(made: Check, name: str) -> _RecordingSection:
    """`name` starts the ids of the drawing."""
    groups = _groups(made)
    return _RecordingSection(
        title=_title(made),
        finding=_worst(groups),
        divided=f"Divided by settings: {', '.join(made.by_settings) or 'none'}; the others by rows.",
        groups=[_group_row(group, rows) for group, rows in groups],
        drawing=_drawn(groups, name),
        constants=_constants(made),
        refused=[f"{job}, {constant}: {why}" for job, fit in made.fits.items() for constant, why in fit.refused.items()],
        caveats=made.caveats,
        origin=f"{made.origin.of}. Licence: {made.origin.licence or 'none stated'}. SHA-256 {made.origin.digest}.",
    )


def _title(made: Check) -> str:
    """The recorded job for one of our own recordings, else the source."""
    return made.origin.of.partition(",")[0] if made.origin.source == "harness" else made.origin.source


def _worst(groups: Sequence[tuple[str, list[Prediction]]]) -> str:
    """A sentence about the largest error of a group, and about groups that the other folds could not predict."""
    medians = [errors(rows, lambda p: p.held_out).median for _, rows in groups]
    known = [median for median in medians if math.isfinite(median)]
    if not known:
        return ""
    lost = len(medians) - len(known)
    but = f", except in {lost} that the other folds could not predict" if lost else ""
    return f"Held out, the median error is at most {_percent(max(known))} in every group{but}."


def _group_row(name: str, rows: list[Prediction]) -> _GroupRow:
    found = {kind: errors(rows, which) for kind, which in _KINDS}
    texts = [f"{_percent(e.median)} / {_percent(e.p95)}" for e in found.values()]
    return _GroupRow(name, len(rows), texts, _tau(found[_HELD_OUT]))


def _constants(made: Check) -> list[_ConstantRow]:
    """Those fitted to all rows of a workload, then those it takes from other workloads."""
    rows = []
    for workload, fit in made.fits.items():
        for name, (low, high) in fit.intervals.items():
            value = f"{getattr(fit.constants, name):.4g}"
            rows.append(_ConstantRow(workload, name, value, f"{low:.3g} to {high:.3g}"))
        rows += [
            _ConstantRow(workload, name, f"{value:.4g}", "from other workloads") for name, value in fit.borrowed.items()
        ]
    return rows


def _panel(axes: Axes, title: str, rows: Sequence[Prediction]) -> None:
    recorded = np.array([p.recorded for p in rows])
    both = [p.recorded for p in rows] + [p.held_out for p in rows if math.isfinite(p.held_out)]
    ends = np.array([min(both) / 1.1, max(both) * 1.1])
    axes.fill_between(ends, ends / 1.1, ends * 1.1, color=MUTED, alpha=0.18, linewidth=0)
    axes.plot(ends, ends, color=MUTED, linewidth=0.8)
    for marker, color, which in (("x", ORANGE, "plain_held_out"), ("o", BLUE, "held_out"), (".", GREEN, "fitted")):
        predicted = np.array([getattr(p, which) for p in rows])
        style = "none" if marker == "o" else "full"
        axes.plot(recorded, predicted, marker, color=color, markersize=4, fillstyle=style, markeredgewidth=0.9)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    if ends[1] > 2.5 * ends[0]:
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [float(f"{x:.1g}") for x in np.geomspace(ends[0] * 1.15, ends[1] / 1.15, 4)]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())


def _drawn(groups: Sequence[tuple[str, list[Prediction]]], name: str) -> Drawing:
    """Predicted against recorded seconds, one panel per group."""
    jobs = {group.partition(", ")[0] for group, _ in groups if ", " in group}
    common = f"{jobs.pop()}, " if len(jobs) == 1 else ""  # the job that the section is about, so panels need not name it
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    with canvas(0.7 + 2.3 * lines, left=0.75, gaps=0.42, bottom=0.5) as figure:
        figure.subplots_adjust(wspace=0.3)
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, (group, rows) in zip(grid.flat, groups, strict=False):
            _panel(axes, group.removeprefix(common), rows)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        figure.supxlabel("recorded, seconds", fontsize=9)
        figure.supylabel("predicted, seconds", fontsize=9, x=0.01)
        caption = (
            "Predicted against recorded seconds, one panel per group. Blue rings: simulator, held out; green dots: "
            "simulator, fitted to all rows; orange crosses: plain closed form, held out. On the line both are equal; in "
            "the grey band they differ by at most 10 %."
        )
        return drawn(figure, name, caption)
