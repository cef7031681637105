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
from simulators.calibration.fit import NO_FREEDOM
from simulators.calibration.spread import LEVEL_PERCENT
from simulators.calibration.validation import COMPLETION, HELD_OUT, OTHER, Check, Prediction
from traces.store import write_bytes

__all__ = ["Coverage", "Errors", "coverage", "errors", "page", "tables", "write"]


class Errors(NamedTuple):
    """Order and relative errors of the predictions of one group."""

    rows: int
    tau: float  # Kendall's, of predicted and recorded; nan with fewer than three settings
    median: float
    p95: float


class Coverage(NamedTuple):
    """How many recorded values are within the intervals of their predictions."""

    inside: int
    rows: int  # with an interval


def coverage(made: Sequence[Prediction]) -> Coverage:
    """The coverage of the intervals; predictions without an interval do not count."""
    bounded = [p for p in made if math.isfinite(p.low) and math.isfinite(p.high)]
    return Coverage(sum(p.low <= p.recorded <= p.high for p in bounded), len(bounded))


def errors(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> Errors:
    """Errors of the predictions that `which` picks; predictions that could not be made (nan) do not count."""
    pairs = [(which(p), p.recorded, p.label) for p in made if math.isfinite(which(p))]
    if not pairs:
        return Errors(0, *(math.nan,) * 3)
    off = np.array([abs(a / b - 1) for a, b, _ in pairs])
    ranked = len({label for *_, label in pairs}) >= 3
    tau = float(kendalltau([a for a, *_ in pairs], [b for _, b, _ in pairs]).statistic) if ranked else math.nan
    return Errors(len(pairs), tau, float(np.median(off)), float(np.quantile(off, 0.95)))


_HELD_OUT_KIND = "simulator, held out"
_KINDS: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("simulator, fitted", lambda p: p.fitted),
    (_HELD_OUT_KIND, lambda p: p.held_out),
    ("plain closed form, fitted", lambda p: p.plain_fitted),
    ("plain closed form, held out", lambda p: p.plain_held_out),
)


def tables(checks: Sequence[Check]) -> list[str]:
    """Order and errors as plain text for a terminal, one table per recording."""
    found = []
    for made in checks:
        head = f"{'':34}{'rows':>6}{'tau':>7}{'median':>9}{'95th %':>9}{f'in {LEVEL_PERCENT} %':>12}"
        lines = [f"{made.origin.source} ({made.origin.of})", *_fitted_to(made), head]
        for group, rows in _groups(made):
            lines.append(group)
            for name, which in _KINDS:
                found_errors = errors(rows, which)
                if found_errors.rows or name == _HELD_OUT_KIND:
                    inside = _covered(coverage(rows)) if name == _HELD_OUT_KIND else ""
                    lines.append(f"  {name:32}{_cells(found_errors)}{inside:>12}".rstrip())
        unsure = [f"{job}, {name}: fitted without an interval, {NO_FREEDOM}" for job, name in _unsure(made)]
        notes = [*_simulation_error(made), *unsure, *_undivided(made), *made.caveats]
        found.append("\n".join([*lines, *(f"note: {why}" for why in notes), ""]))
    return found


def _cells(e: Errors) -> str:
    return f"{e.rows:>6}{_tau(e):>7}{_percent(e.median):>9}{_percent(e.p95):>9}"


def _tau(e: Errors) -> str:
    return "-" if math.isnan(e.tau) else f"{e.tau:.2f}"


def _covered(c: Coverage) -> str:
    return f"{c.inside} of {c.rows}" if c.rows else "-"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _groups(made: Check) -> list[tuple[str, list[Prediction]]]:
    """Predictions by group and split; the name of a split follows that of the group, except that of cross-validation."""
    found: dict[str, list[Prediction]] = {}
    for p in made.predictions:
        found.setdefault(p.group if p.split in (HELD_OUT, OTHER) else f"{p.group}, {p.split}", []).append(p)
    return list(found.items())


def _unsure(made: Check) -> list[tuple[str, str]]:
    return [(job, name) for job, fit in made.fits.items() for name in fit.unsure]


def _undivided(made: Check) -> list[str]:
    """Why some rows were not held out."""
    if not made.undivided:
        return []
    names = ", ".join(made.undivided)
    return [f"nothing is held out of {names}: only one combination of policy, workers and servers was recorded"]


def _fitted_to(made: Check) -> list[str]:
    return [f"predicted by a fit to: {made.fitted_to}"] if made.fitted_to else []


def _simulation_error(made: Check) -> list[str]:
    known = [p.error for p in made.predictions if math.isfinite(p.error)]
    if not known:
        return []
    return [f"standard error of the simulated means: median {np.median(known):.2%}, at most {max(known):.2%}"]


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
        folds=" or ".join(sorted({str(made.folds) for made in checks if made.folds})),
        level=LEVEL_PERCENT,
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
    notes: list[str]  # how the rows were divided, and the error of simulated means
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
    tau: str
    covered: str  # rows within the interval, of those that have one
    errors: list[str]  # median and 95th percentile, a text per kind of prediction


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
        notes=[f"{why[0].upper()}{why[1:]}." for why in (*_fitted_to(made), *_undivided(made), *_simulation_error(made))],
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
    """Sentences about the worst order and the largest error of a group, and about groups that could not be predicted."""
    found = [errors(rows, lambda p: p.held_out) for _, rows in groups]
    known = [e for e in found if e.rows]
    if not known:
        return ""
    lost = len(found) - len(known)
    but = f", except in {lost} that the other rows could not predict" if lost else ""
    ranked = [e.tau for e in known if math.isfinite(e.tau)]
    order = f"tau is at least {min(ranked):.2f} and " if ranked else ""
    counts = [coverage(rows) for _, rows in groups]
    bounded = sum(c.rows for c in counts)
    inside = sum(c.inside for c in counts)
    worst = f"Held out, {order}the median error is at most {_percent(max(e.median for e in known))} in every group{but}."
    if not bounded:
        return worst
    return f"{worst} {inside / bounded:.0%} of {bounded} recorded values are within their {LEVEL_PERCENT} % intervals."


def _group_row(name: str, rows: list[Prediction]) -> _GroupRow:
    found = {kind: errors(rows, which) for kind, which in _KINDS}
    texts = [f"{_percent(e.median)} / {_percent(e.p95)}" for e in found.values()]
    return _GroupRow(name, len(rows), _tau(found[_HELD_OUT_KIND]), _covered(coverage(rows)), texts)


def _constants(made: Check) -> list[_ConstantRow]:
    """Those fitted to all rows of a workload, then those it takes from other workloads."""
    rows = []
    for workload, fit in made.fits.items():
        for name, ends in fit.intervals.items():
            value = f"{getattr(fit.constants, name):.4g}"
            interval = f"{ends[0]:.3g} to {ends[1]:.3g}" if ends else f"none: {NO_FREEDOM}"
            rows.append(_ConstantRow(workload, name, value, interval))
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
