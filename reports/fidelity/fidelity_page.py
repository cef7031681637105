"""The page of `harness fidelity`: predicted against recorded times, per recording, on fitted rows and on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import polars as pl

from reports.fidelity.errors import (
    EXACT,
    EXACT_OF_CYCLES,
    HELD_OUT_KIND,
    KINDS,
    Coverage,
    best_closed_form,
    by_split,
    ceilings,
    coverage,
    errors,
    share_in_order,
    tau_interval,
    told,
)
from reports.fidelity.findings import (
    ablations,
    choices,
    covered,
    fit_errors,
    fitted_to,
    groups,
    limits_of,
    misses,
    reached,
    recording_title,
    share_text,
    simulation_error,
    tau_text,
    undetermined,
    undivided,
    verdict_sentences,
    worst_group,
)
from reports.fidelity.repetitions import SAMPLES
from reports.figures.drawing import Drawing
from reports.figures.predicted import FORMS, against_recorded, residuals
from reports.templates.rendering import fill
from simulators.calibration.fit import NO_FREEDOM
from simulators.calibration.predictions import COMPLETION, Prediction
from simulators.calibration.spread import LEVEL_PERCENT
from simulators.calibration.validation import Check
from traces.store import write_bytes

__all__ = ["files", "page", "write"]


def _notes(made: Check) -> list[str]:
    return [*fitted_to(made), *fit_errors(made), *choices(made), *undivided(made), *simulation_error(made)]


def files(folder: Path) -> tuple[Path, Path]:
    """What `write` writes: the table and the page."""
    return folder / "predictions.csv", folder / "fidelity.html"


def write(folder: Path, checks: Sequence[Check], findings: str = "") -> Path:
    """Write `fidelity.html` and every prediction, `predictions.csv`, into a folder; the page's path.

    `findings` explain the differences, in paragraphs with empty lines between them.
    """
    table, path = files(folder)
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"source": c.origin.source} | {name: getattr(p, name) for name in Prediction.__slots__}
        for c in checks
        for p in c.predictions
    ]
    write_bytes(table, pl.DataFrame(rows, infer_schema_length=None).write_csv().encode())
    write_bytes(path, page(checks, findings).encode())
    return path


def page(checks: Sequence[Check], findings: str = "") -> str:
    """The page: what was found, a section per recording, with a table and a drawing, and how it was made."""
    rows = [row for made in checks for row in _verdict_rows(made)]
    return fill(
        "fidelity.html.j2",
        title="How far the simulator is from recorded clusters",
        lead=_lead(checks),
        verdict=verdict_sentences(checks),
        verdict_rows=rows,
        misses=[said for made in checks for said in misses(made)],
        parts=[part for made in checks for part in ablations(made)],
        limits=[*(" ".join(said) for made in checks if (said := limits_of(made))), *undetermined(checks)],
        findings=[" ".join(paragraph.split()) for paragraph in findings.split("\n\n") if paragraph.strip()],
        recordings=[_section(made, f"r{i}") for i, made in enumerate(checks)],
        folds=" or ".join(sorted({str(made.folds) for made in checks if made.folds})),
        level=LEVEL_PERCENT,
        samples=SAMPLES if any(row.form == EXACT for row in rows) else 0,
        steady=any(row.form == EXACT_OF_CYCLES for row in rows),
        has_completions=any(p.group.endswith(COMPLETION) for made in checks for p in made.predictions),
    )


def _lead(checks: Sequence[Check]) -> str:
    rows = sum(len(c.predictions) for c in checks)
    count = f"{len(checks)} recording{'s' * (len(checks) != 1)}, {rows} rows"
    fitted = list(dict.fromkeys(c.fitted_to.partition(",")[0] for c in checks if c.fitted_to))
    by = f", fitted to {' and '.join(fitted)}" if fitted else ""
    return f"{count}; predicted by the simulator and by two closed forms{by}."


@dataclass(frozen=True, slots=True)
class _RecordingSection:
    """What the page shows of one recording, in the order of the template `recording`."""

    title: str
    finding: str  # about the largest error; "" where nothing was predicted
    notes: list[str]  # how the rows were divided, and the error of simulated means
    kinds: list[str]  # of predictions that the groups have errors of
    groups: list[_GroupRow]
    drawings: list[Drawing]
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
    by_group = groups(made)
    kinds = [(kind, which) for kind, which in KINDS if kind == HELD_OUT_KIND or errors(made.predictions, which).rows]
    return _RecordingSection(
        title=recording_title(made),
        finding=worst_group(by_group),
        notes=[f"{why[0].upper()}{why[1:]}." for why in _notes(made)],
        kinds=[kind for kind, _ in kinds],
        groups=[_group_row(group, rows, kinds) for group, rows in by_group],
        drawings=_drawings(made, name),
        constants=_constants(made),
        refused=[f"{job}, {constant}: {why}" for job, fit in made.fits.items() for constant, why in fit.refused.items()],
        caveats=made.caveats,
        origin=f"{made.origin.of}. Licence: {made.origin.licence or 'none stated'}. SHA-256 {made.origin.digest}.",
    )


class _VerdictRow(NamedTuple):
    """What was reached on the cycles of one recording and split, of all policies together, as text."""

    recording: str
    split: str
    span: int  # rows of the table that the recording and split head; 0 after the first of them
    form: str
    rows: int
    tau: str
    ends: str  # of the interval of tau; "" without one
    right: str  # share of pairs in the right order, of those at least 5 % apart
    median: str
    p95: str
    covered: str
    reached: str


def _verdict_rows(made: Check) -> list[_VerdictRow]:
    rows = []
    for split, predictions in by_split(made.predictions):
        best = best_closed_form(predictions)
        forms = [form for form in FORMS if form == FORMS[0] or errors(predictions, form.held_out).rows]
        best_possible = ceilings(predictions)
        for form in forms:
            which = form.held_out
            e, ends, right = (
                errors(predictions, which),
                tau_interval(predictions, which),
                share_in_order(told(predictions, which)),
            )
            held = coverage(predictions, form)
            around = "" if math.isnan(ends[0]) else f"{ends[0]:.2f}\u00a0to\u00a0{ends[1]:.2f}"  # on one line
            shares = map(share_text, (right, e.median, e.p95))
            cells = (tau_text(e), around, *shares, covered(held), reached(e, held))
            name = f"{form.name} (best closed form)" if form == best else form.name
            span = (len(forms) + len(best_possible)) * (form == FORMS[0])
            rows.append(_VerdictRow(recording_title(made), split, span, name, e.rows, *cells))
        for name, e, right in best_possible:
            shares = map(share_text, (right, e.median, e.p95))
            cells = (tau_text(e), "", *shares, "-", reached(e, Coverage(0, 0)))
            rows.append(_VerdictRow(recording_title(made), split, 0, name, e.rows, *cells))
    return rows


def _drawings(made: Check, name: str) -> list[Drawing]:
    """The drawings of predicted cycles; none where the recording has no cycles."""
    rows = [p for _, some in by_split(made.predictions) for p in some]
    rival = best_closed_form(rows)
    return [against_recorded(rows, rival, name), residuals(rows, rival, f"{name}b")] if rows else []


def _group_row(name: str, rows: list[Prediction], kinds: Sequence[tuple[str, Callable[[Prediction], float]]]) -> _GroupRow:
    found = {kind: errors(rows, which) for kind, which in kinds}
    texts = [f"{share_text(e.median)} / {share_text(e.p95)}" for e in found.values()]
    return _GroupRow(name, len(rows), tau_text(found[HELD_OUT_KIND]), covered(coverage(rows)), texts)


def _constants(made: Check) -> list[_ConstantRow]:
    """The constants fitted to all rows of a workload, then those that it takes from other workloads."""
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
