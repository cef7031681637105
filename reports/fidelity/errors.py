"""How far predictions are from recorded times: order, relative errors, intervals, and what any predictor could reach."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import binomtest, kendalltau

from reports.fidelity.repetitions import Told, exact, exact_of_cycles, once_more, repeated
from reports.figures.predicted import FORMS, Form
from simulators.calibration.predictions import COMPLETION, Prediction
from simulators.calibration.spread import LEVEL_PERCENT

__all__ = [
    "EXACT",
    "EXACT_OF_CYCLES",
    "HELD_OUT_KIND",
    "KINDS",
    "MEDIAN",
    "P95",
    "TAU",
    "Ceiling",
    "Coverage",
    "Errors",
    "best_closed_form",
    "by_split",
    "ceilings",
    "coverage",
    "cycles",
    "errors",
    "missed",
    "missed_by_noise",
    "off_level",
    "pairs_out_of_order",
    "share_in_order",
    "tau_interval",
    "told",
]

_Floats = NDArray[np.float64]

MEDIAN, P95, TAU = 0.05, 0.15, 0.9  # what is to be reached on rows that were not fitted
_APART = 0.05  # relative difference of recorded times from which a pair of settings counts as different
_RESAMPLES = 500  # of settings, for the interval of tau


class Errors(NamedTuple):
    """Order and relative errors of the predictions of one group."""

    rows: int
    tau: float  # Kendall's, of predicted and recorded; nan with fewer than three settings, and where all were recorded alike
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
    return _errors(told(made, which), _settings([p for p in made if math.isfinite(which(p))]))


def _settings(made: Sequence[Prediction]) -> int:
    """How many settings these predictions are of; the policy is told by the group alone."""
    return len({(p.group, p.label) for p in made})


def told(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> Told:
    """What `which` picks, and what was recorded, of the predictions that could be made."""
    return Told(*np.array([(which(p), p.recorded) for p in made if math.isfinite(which(p))]).reshape(-1, 2).T)


def _errors(told: Told, settings: int) -> Errors:
    if not len(told.recorded):
        return Errors(0, *(math.nan,) * 3)
    off = np.abs(told.predicted / told.recorded - 1)
    tau = float(kendalltau(told.predicted, told.recorded).statistic) if settings >= 3 else math.nan
    if settings >= 3 and np.ptp(told.predicted) == 0 < np.ptp(told.recorded):
        tau = 0.0  # SciPy has none of equal predictions, which put no pair in order
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
    rng = np.random.default_rng(0)
    drawn = [np.bincount(rng.integers(len(groups), size=len(groups)), minlength=len(groups)) for _ in range(_RESAMPLES)]
    predicted, recorded = np.array([pair for group in groups for pair in group]).T
    found = _taus(predicted, recorded, np.array(drawn), np.repeat(np.arange(len(groups)), [len(group) for group in groups]))
    low, high = np.nanquantile(found, [0.05, 0.95]) if np.isfinite(found).any() else (math.nan, math.nan)
    return float(low), float(high)


def _taus(predicted: _Floats, recorded: _Floats, drawn: NDArray[np.int_], setting: NDArray[np.int_]) -> _Floats:
    """Kendall's tau-b of samples that have each setting so many times, [samples, settings]; nan where all are tied.

    `setting` is that of each row. A setting that is drawn twice is compared with the others twice, and never with itself:
    repetitions have one prediction, so that pairs of them are ties, and would be far more than in the recording. In the mean
    over samples, pairs of two settings count as often beside them as in the recording. SciPy takes one sample per call.
    """
    signs = [np.sign(values[:, None] - values) for values in (predicted, recorded)]
    counts, apart = drawn[:, setting], setting[:, None] != setting
    often = drawn.shape[1] / (drawn.shape[1] - 1)  # the mean product of the counts of two settings is one over this

    def total(each: _Floats) -> _Floats:
        across = ((counts @ (each * apart)) * counts).sum(axis=1)
        pairs: _Floats = (often * across + counts @ (each * ~apart).sum(axis=1)) / 2
        return pairs

    agree, *untied = map(total, (signs[0] * signs[1], *map(np.abs, signs)))
    with np.errstate(invalid="ignore"):
        tau: _Floats = agree / np.sqrt(untied[0]) / np.sqrt(untied[1])
    return np.clip(tau, -1.0, 1.0)


def share_in_order(told: Told) -> float:
    """The share of pairs of rows in the right order, of those that were recorded at least 5 % apart; nan for none."""
    first, second = np.triu_indices(len(told.recorded), 1)
    predicted, recorded = (np.log(values[first] / values[second]) for values in told)
    apart = np.abs(recorded) > _APART
    return float(np.mean(predicted[apart] * recorded[apart] > 0)) if apart.any() else math.nan


def pairs_out_of_order(told: Told) -> tuple[int, int]:
    """How many pairs of rows are in the wrong order, and how many of these were recorded less than 5 % apart."""
    first, second = np.triu_indices(len(told.recorded), 1)
    predicted, recorded = (np.log(values[first] / values[second]) for values in told)
    wrong = predicted * recorded < 0
    return int(wrong.sum()), int((wrong & (np.abs(recorded) <= _APART)).sum())


EXACT, EXACT_OF_CYCLES, _ONCE_MORE = "an exact prediction", "exact prediction of steady runs", "recording once more"


class Ceiling(NamedTuple):
    """What a predictor that uses the recording itself reaches: means over made-up recordings, or over repetitions."""

    name: str
    errors: Errors  # of the rows of repeated settings
    right: float  # share of pairs in the right order


def ceilings(made: Sequence[Prediction]) -> list[Ceiling]:
    """What the noise of a recording allows, see `repetitions`; empty where nothing tells of it."""
    settings = repeated(made)
    kinds = [(EXACT, exact(settings)), (_ONCE_MORE, once_more(settings))]
    if not settings:
        kinds = [(EXACT_OF_CYCLES, exact_of_cycles(made))]
    found = []
    for name, several in kinds:
        if several:
            count = len(settings) or _settings(made)
            each = np.array([(*_errors(told, count)[1:], share_in_order(told)) for told in several])
            *of_errors, right = (float(values.mean()) if np.isfinite(values).all() else math.nan for values in each.T)
            found.append(Ceiling(name, Errors(len(several[0].recorded), *of_errors), right))
    return found


def missed_by_noise(made: Sequence[Prediction], what: str) -> float:
    """In what share of made-up recordings even an exact prediction misses `what` (as in `missed`), where noise is as large
    as the repetitions may hide; nan where nothing tells of noise."""
    settings = repeated(made)
    several = exact(settings, most=True) if settings else exact_of_cycles(made)
    count = len(settings) or _settings(made)
    also = [what in missed(_errors(told, count), Coverage(0, 0)) for told in several]
    return sum(also) / len(also) if also else math.nan


HELD_OUT_KIND = "simulator, held out"


KINDS: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("simulator, fitted", FORMS[0].fitted),
    *((f"{form.name}, held out", form.held_out) for form in FORMS),
)


def best_closed_form(made: Sequence[Prediction]) -> Form:
    """The closed form with the lower median error on these rows. As it is chosen with the recorded times known, this
    comparison favours it."""
    return min(FORMS[1:], key=lambda form: (math.isnan(m := errors(made, form.held_out).median), m))


def by_split(predictions: Sequence[Prediction]) -> list[tuple[str, list[Prediction]]]:
    """Predictions of cycles that the constants were not fitted to, by split."""
    found: dict[str, list[Prediction]] = {}
    for p in predictions:
        if p.workers and not p.group.endswith(COMPLETION):
            found.setdefault(p.split, []).append(p)
    return list(found.items())


def cycles(predictions: Sequence[Prediction]) -> list[Prediction]:
    """A prediction of each recorded cycle. Several splits may predict the same one: that is no repetition."""
    rows: Counter[tuple[str, int, str, str, float]] = Counter()
    found = []
    for _, split in by_split(predictions):
        left = rows.copy()  # cycles that this split predicts as the ones before did
        for p in split:
            row = p.run, p.setting, p.group, p.label, p.recorded
            if left[row]:
                left[row] -= 1
            else:
                rows[row] += 1
                found.append(p)
    return found


def off_level(held: Coverage) -> bool:
    """Whether the intervals hold more or fewer values than their level says, beyond chance (binomial test, 5 %)."""
    return held.rows > 0 and float(binomtest(held.inside, held.rows, LEVEL_PERCENT / 100).pvalue) < 0.05


def missed(e: Errors, held: Coverage) -> list[str]:
    """What is not reached, in words."""
    missed = []
    if not e.rows:
        return ["nothing could be predicted"]
    if e.tau < TAU:
        missed.append("tau")
    if e.median > MEDIAN:
        missed.append("median")
    if e.p95 > P95:
        missed.append("95th percentile")
    if off_level(held):
        missed.append("coverage")
    return missed
