"""The page of `harness fidelity`: predicted against recorded times, per recording, on fitted rows and on held-out rows."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from scipy.stats import binomtest, kendalltau

from reports.fidelity.repetitions import SAMPLES, Told, exact, once_more, repeated
from reports.figures.drawing import Drawing
from reports.figures.predicted import FORMS, Form, against_recorded, residuals
from reports.templates.rendering import fill
from simulators.calibration.fit import NO_FREEDOM
from simulators.calibration.spread import LEVEL_PERCENT
from simulators.calibration.validation import COMPLETION, HELD_OUT, OTHER, Check, Prediction
from traces.store import write_bytes

__all__ = ["Coverage", "Errors", "best_closed_form", "coverage", "errors", "page", "tables", "tau_interval", "write"]

_MEDIAN, _P95, _TAU = 0.05, 0.15, 0.9  # what is to be reached on rows that were not fitted
_APART = 0.05  # relative difference of recorded times from which a pair of settings counts as different
_RESAMPLES = 500  # of settings, for the interval of tau


class Errors(NamedTuple):
    """Order and relative errors of the predictions of one group."""

    rows: int
    tau: float  # Kendall's, of predicted and recorded; nan with fewer than three settings
    median: float
    p95: float


class Coverage(NamedTuple):
    """How many recorded values are within the intervals of their predictions, and how wide these are."""

    inside: int
    rows: int  # with an interval
    half_width: float = math.nan  # mean of half the intervals' widths over their predictions


def coverage(made: Sequence[Prediction], form: Form = FORMS[0]) -> Coverage:
    """The coverage of the intervals of a form; predictions without an interval do not count."""
    ends = [(form.low(p), form.high(p), p.recorded, form.held_out(p)) for p in made]
    bounded = [each for each in ends if all(map(math.isfinite, each))]
    if not bounded:
        return Coverage(0, 0)
    low, high, recorded, told = np.array(bounded).T
    inside = int(((low <= recorded) & (recorded <= high)).sum())
    return Coverage(inside, len(bounded), float(((high - low) / (2 * told)).mean()))


def errors(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> Errors:
    """Errors of the predictions that `which` picks; predictions that could not be made (nan) do not count."""
    return _errors(_told(made, which), len({p.label for p in made if math.isfinite(which(p))}))


def _told(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> Told:
    """What `which` picks, and what was recorded, of the predictions that could be made."""
    return Told(*np.array([(which(p), p.recorded) for p in made if math.isfinite(which(p))]).reshape(-1, 2).T)


def _errors(told: Told, settings: int) -> Errors:
    if not len(told.recorded):
        return Errors(0, *(math.nan,) * 3)
    off = np.abs(told.predicted / told.recorded - 1)
    tau = float(kendalltau(told.predicted, told.recorded).statistic) if settings >= 3 else math.nan
    return Errors(len(off), tau, float(np.median(off)), float(np.quantile(off, 0.95)))


def tau_interval(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> tuple[float, float]:
    """The 90 % percentile interval of `Errors.tau`, by a bootstrap over settings; nan with fewer than three."""
    settings: dict[str, list[tuple[float, float]]] = {}
    for p in made:
        if math.isfinite(which(p)):
            settings.setdefault(f"{p.group} {p.label}", []).append((which(p), p.recorded))
    groups = list(settings.values())
    if len(groups) < 3:
        return math.nan, math.nan
    rng, found = np.random.default_rng(0), []
    for _ in range(_RESAMPLES):
        # Kendall's tau-b: a setting that is drawn twice is tied with itself, and such pairs do not count.
        drawn = [pair for i in rng.integers(len(groups), size=len(groups)) for pair in groups[i]]
        found.append(float(kendalltau(*zip(*drawn, strict=True)).statistic))
    low, high = np.nanquantile(found, [0.05, 0.95]) if np.isfinite(found).any() else (math.nan, math.nan)
    return float(low), float(high)


def _apart(told: Told) -> float:
    """The share of pairs of rows in the right order, of those that were recorded at least 5 % apart; nan for none."""
    first, second = np.triu_indices(len(told.recorded), 1)
    predicted, recorded = (np.log(values[first] / values[second]) for values in told)
    apart = np.abs(recorded) > _APART
    return float(np.mean(predicted[apart] * recorded[apart] > 0)) if apart.any() else math.nan


class _Ceiling(NamedTuple):
    """What a predictor that uses the recording itself reaches: means over made-up recordings, or over repetitions."""

    name: str
    errors: Errors  # of the rows of repeated settings
    right: float  # share of pairs in the right order


def _ceilings(made: Sequence[Prediction]) -> list[_Ceiling]:
    """What the noise of a recording allows, see `repetitions`; empty where no setting was recorded twice."""
    settings = repeated(made)
    rows = sum(map(len, settings))
    found = []
    for name, several in ((_EXACT, exact(settings)), (_ONCE_MORE, once_more(settings))):
        if several:
            each = np.array([(*_errors(told, len(settings))[1:], _apart(told)) for told in several])
            *of_errors, right = (float(values.mean()) if np.isfinite(values).all() else math.nan for values in each.T)
            found.append(_Ceiling(name, Errors(rows, *of_errors), right))
    return found


def _untold_noise(made: Check) -> list[str]:
    """That nothing tells the noise of a recording without repetitions."""
    rows = [p for _, some in _by_split(made.predictions) for p in some]
    if not rows or repeated(rows):
        return []
    return ["no setting was recorded twice: it cannot be told how much of the errors is the recording's own noise"]


_EXACT, _ONCE_MORE = "an exact prediction", "recording once more"
_HELD_OUT_KIND = "simulator, held out"
_KINDS: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("simulator, fitted", FORMS[0].fitted),
    *((f"{form.name}, held out", form.held_out) for form in FORMS),
)


def best_closed_form(made: Sequence[Prediction]) -> Form:
    """The closed form with the lower median error on these rows. As it is chosen with the recorded times known, this
    comparison favours it."""
    return min(FORMS[1:], key=lambda form: (math.isnan(m := errors(made, form.held_out).median), m))


def tables(checks: Sequence[Check]) -> list[str]:
    """Order and errors as plain text for a terminal, one table per recording."""
    found = []
    for made in checks:
        head = f"{'':34}{'rows':>6}{'tau':>7}{'median':>9}{'95th %':>9}{f'in {LEVEL_PERCENT} %':>17}"
        lines = [f"{made.origin.source} ({made.origin.of})", *_fitted_to(made), head]
        for group, rows in _groups(made):
            lines.append(group)
            for name, which in _KINDS:
                found_errors = errors(rows, which)
                if found_errors.rows or name == _HELD_OUT_KIND:
                    inside = _covered(coverage(rows)) if name == _HELD_OUT_KIND else ""
                    lines.append(f"  {name:32}{_cells(found_errors)}{inside:>17}".rstrip())
            if not rows[0].group.endswith(COMPLETION):
                lines += [f"  {of.name:32}{_cells(of.errors)}" for of in _ceilings(rows)]
        for row in _ablations(made)[1:]:
            lines.append(f"without {row.lacks}: tau {row.tau}, median {row.median}, 95th {row.p95} of all cycles not fitted")
        unsure = [f"{job}, {name}: fitted without an interval, {NO_FREEDOM}" for job, name in _unsure(made)]
        notes = [
            *_fit_errors(made),
            *_simulation_error(made),
            *unsure,
            *_undivided(made),
            *_untold_noise(made),
            *made.caveats,
        ]
        found.append("\n".join([*lines, *(f"note: {why}" for why in notes), ""]))
    return found


def _cells(e: Errors) -> str:
    return f"{e.rows:>6}{_tau(e):>7}{_percent(e.median):>9}{_percent(e.p95):>9}"


def _tau(e: Errors) -> str:
    return "-" if math.isnan(e.tau) else f"{e.tau:.2f}"


def _covered(c: Coverage) -> str:
    return f"{c.inside} of {c.rows}, ±{c.half_width:.0%}" if c.rows else "-"


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


def _fit_errors(made: Check) -> list[str]:
    """How near the constants are to the rows that they were fitted to."""
    several = len(made.fits) > 1
    return [
        f"the constants{f' of {job}' * several} fit their own {fit.rows} rows with a median error of {_percent(fit.error)}"
        for job, fit in made.fits.items()
    ]


def _notes(made: Check) -> list[str]:
    return [*_fitted_to(made), *_fit_errors(made), *_undivided(made), *_simulation_error(made)]


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
    rows = [row for made in checks for row in _verdict_rows(made)]
    return fill(
        "fidelity.html.j2",
        title="How far the simulator is from recorded clusters",
        lead=_lead(checks),
        verdict=_verdict(checks),
        verdict_rows=rows,
        parts=[part for made in checks for part in _ablations(made)],
        limits=[*(" ".join(said) for made in checks if (said := _limits(made))), *_undetermined(checks)],
        findings=[" ".join(paragraph.split()) for paragraph in findings.split("\n\n") if paragraph.strip()],
        recordings=[_section(made, f"r{i}") for i, made in enumerate(checks)],
        folds=" or ".join(sorted({str(made.folds) for made in checks if made.folds})),
        level=LEVEL_PERCENT,
        samples=SAMPLES if any(row.form == _EXACT for row in rows) else 0,
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
    groups = _groups(made)
    kinds = [(kind, which) for kind, which in _KINDS if kind == _HELD_OUT_KIND or errors(made.predictions, which).rows]
    return _RecordingSection(
        title=_title(made),
        finding=_worst(groups),
        notes=[f"{why[0].upper()}{why[1:]}." for why in _notes(made)],
        kinds=[kind for kind, _ in kinds],
        groups=[_group_row(group, rows, kinds) for group, rows in groups],
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


def _by_split(predictions: Sequence[Prediction]) -> list[tuple[str, list[Prediction]]]:
    """Predictions of cycles that the constants were not fitted to, by split."""
    found: dict[str, list[Prediction]] = {}
    for p in predictions:
        if p.workers and not p.group.endswith(COMPLETION):
            found.setdefault(p.split, []).append(p)
    return list(found.items())


def _verdict_rows(made: Check) -> list[_VerdictRow]:
    rows = []
    for split, predictions in _by_split(made.predictions):
        best = best_closed_form(predictions)
        forms = [form for form in FORMS if form == FORMS[0] or errors(predictions, form.held_out).rows]
        ceilings = _ceilings(predictions)
        for form in forms:
            which = form.held_out
            e, ends, right = errors(predictions, which), tau_interval(predictions, which), _apart(_told(predictions, which))
            held = coverage(predictions, form)
            around = "" if math.isnan(ends[0]) else f"{ends[0]:.2f}\u00a0to\u00a0{ends[1]:.2f}"  # on one line
            cells = (
                _tau(e),
                around,
                _percent(right),
                _percent(e.median),
                _percent(e.p95),
                _covered(held),
                _reached(e, held),
            )
            name = f"{form.name} (best closed form)" if form == best else form.name
            span = (len(forms) + len(ceilings)) * (form == FORMS[0])
            rows.append(_VerdictRow(_title(made), split, span, name, e.rows, *cells))
        for name, e, right in ceilings:
            cells = (_tau(e), "", _percent(right), _percent(e.median), _percent(e.p95), "-", _reached(e, Coverage(0, 0)))
            rows.append(_VerdictRow(_title(made), split, 0, name, e.rows, *cells))
    return rows


def _off_level(held: Coverage) -> bool:
    """Whether the intervals hold more or fewer values than their level says, beyond chance (binomial test, 5 %)."""
    return held.rows > 0 and float(binomtest(held.inside, held.rows, LEVEL_PERCENT / 100).pvalue) < 0.05


def _missed(e: Errors, held: Coverage) -> list[str]:
    """What is not reached, in words."""
    missed = []
    if not e.rows:
        return ["nothing could be predicted"]
    if e.tau < _TAU:
        missed.append("tau")
    if e.median > _MEDIAN:
        missed.append("median")
    if e.p95 > _P95:
        missed.append("95th percentile")
    if _off_level(held):
        missed.append("coverage")
    return missed


def _reached(e: Errors, held: Coverage) -> str:
    missed = _missed(e, held)
    return f"not: {', '.join(missed)}" if missed else "yes"


def _verdict(checks: Sequence[Check]) -> list[str]:
    """The overall result, in sentences, worst first; empty without predictions of cycles."""
    every = [(made, split, rows) for made in checks for split, rows in _by_split(made.predictions)]
    if not every:
        return []
    found = [(errors(rows, FORMS[0].held_out), coverage(rows)) for *_, rows in every]
    good = sum(not _missed(e, Coverage(0, 0)) for e, _ in found)
    all_rows = [p for *_, rows in every for p in rows]
    mine = errors(all_rows, FORMS[0].held_out)
    held = coverage(all_rows)
    ranked = [e.tau for e, _ in found if math.isfinite(e.tau)]
    ends = dict.fromkeys(f"{tau(ranked):.2f}" for tau in (min, max) if ranked)
    said = [
        *([f"The order of settings, which a tuner needs: tau is {' to '.join(ends)}."] if ranked else []),
        f"The simulator's order, median and 95th percentile are within reach in {good} of {len(every)} comparisons "
        f"(tau at least {_TAU:g}, median error at most {_MEDIAN:.0%}, 95th percentile at most {_P95:.0%}).",
        f"Over all {mine.rows} cycles that were not fitted, it is off by {_percent(mine.median)} in the median and "
        f"{_percent(mine.p95)} at the 95th percentile. {_against_closed_forms([rows for *_, rows in every])}",
    ]
    exactly = [c.errors for *_, rows in every for c in _ceilings(rows) if c.name == _EXACT]
    if exactly:
        within = sum(not _missed(e, Coverage(0, 0)) for e in exactly)
        said.append(
            f"Recorded times are noisy: even an exact prediction would be within reach in {within} of the {len(exactly)} "
            "comparisons whose settings were recorded more than once."
        )
    if held.rows:
        share = held.inside / held.rows
        far = "beyond chance" if _off_level(held) else "within chance"
        level = f"{LEVEL_PERCENT} %"
        said.append(f"{share:.0%} of {held.rows} recorded cycles are within their {level} intervals, {far} of {level}.")
    return said


def _against_closed_forms(comparisons: Sequence[Sequence[Prediction]]) -> str:
    """How far the best closed form of each comparison is off, and how often the simulator's median error is lower."""
    best = [best_closed_form(rows) for rows in comparisons]
    off = [abs(form.held_out(p) / p.recorded - 1) for form, rows in zip(best, comparisons, strict=True) for p in rows]
    known = [x for x in off if math.isfinite(x)]
    if not known:
        return "No closed form predicts them."
    medians = [
        (errors(rows, FORMS[0].held_out).median, errors(rows, form.held_out).median)
        for form, rows in zip(best, comparisons, strict=True)
    ]
    lower = sum(mine < closed for mine, closed in medians)
    median, p95 = (_percent(float(x)) for x in np.quantile(known, [0.5, 0.95]))
    return (
        f"The best closed form, chosen in each comparison with the recorded times known, is off by {median} and {p95}; "
        f"the simulator's median error is lower in {lower} of {len(medians)} comparisons."
    )


def _limits(made: Check) -> list[str]:
    """What a recording cannot tell, in sentences: what it does not have, and how far its own repetitions are apart."""
    rows = [p for _, some in _by_split(made.predictions) for p in some]
    if not rows:
        return []
    each = (("workers", "workers"), ("servers", "servers"), ("batch_size", "samples in a mini-batch"))
    seen = [f"{_range([getattr(p, name) for p in rows])} {words}" for name, words in each]
    said = [f"{_title(made)} has {seen[0]}, {seen[1]} and {seen[2]}; nothing is said of others."]
    shares = [p.compute_share for p in rows if math.isfinite(p.compute_share)]
    if shares:
        low, high = (f"{end:.0%}" for end in (min(shares), max(shares)))
        part = low if low == high else f"{low} to {high}"
        said.append(f"Computing is {part} of its cycles, {np.median(shares):.0%} in the median.")
    ratios, count = [of.max() / of.min() - 1 for of in repeated(rows)], len({p.setting for p in rows})
    if ratios and len(ratios) < count:
        said.append(f"{count - len(ratios)} of its {count} settings were recorded only once.")
    if ratios:
        said.append(
            f"From the fastest to the slowest repetition of a setting there are {np.median(ratios):.0%} in the median, at "
            f"most {max(ratios):.0%}: no prediction can be nearer than that to all of them."
        )
    return [*said, *(f"{why[0].upper()}{why[1:]}." for why in _untold_noise(made))]


def _undetermined(checks: Sequence[Check]) -> list[str]:
    unknown = sorted({name for made in checks for fit in made.fits.values() for name in fit.refused})
    return (
        [f"No fitted row determines {', '.join(unknown)}: of jobs in which these matter, intervals alone say something."]
        if unknown
        else []
    )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


class _AblationRow(NamedTuple):
    """Errors of the simulator with all its physics, or without a part, as text."""

    recording: str
    span: int  # rows of the table that the recording heads; 0 after the first of them
    lacks: str
    tau: str
    median: str
    p95: str


def _ablations(made: Check) -> list[_AblationRow]:
    if not made.ablations:
        return []
    every = [("nothing", made.predictions), *((a.lacks, a.predictions) for a in made.ablations)]
    rows = list[_AblationRow]()
    for lacks, predictions in every:
        told = [p for _, some in _by_split(predictions) for p in some]
        e = errors(told, FORMS[0].held_out)
        rows.append(_AblationRow(_title(made), len(every) * (not rows), lacks, _tau(e), _percent(e.median), _percent(e.p95)))
    return rows


def _drawings(made: Check, name: str) -> list[Drawing]:
    """Of the cycles; none where the recording has none."""
    rows = [p for _, some in _by_split(made.predictions) for p in some]
    rival = best_closed_form(rows)
    return [against_recorded(rows, rival, name), residuals(rows, rival, f"{name}b")] if rows else []


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


def _group_row(name: str, rows: list[Prediction], kinds: Sequence[tuple[str, Callable[[Prediction], float]]]) -> _GroupRow:
    found = {kind: errors(rows, which) for kind, which in kinds}
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
