"""What a fidelity check found, in words, for its page and for the terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np
from scipy.stats import f

from reports.fidelity.errors import (
    EXACT,
    EXACT_OF_CYCLES,
    MEDIAN,
    P95,
    TAU,
    Coverage,
    Errors,
    best_closed_form,
    by_split,
    ceilings,
    coverage,
    cycles,
    errors,
    missed,
    missed_by_noise,
    off_level,
    pairs_out_of_order,
    told,
)
from reports.fidelity.repetitions import repeated
from reports.figures.predicted import FORMS
from reports.verdicts.conclusions import listed
from simulators.calibration.output import misfits
from simulators.calibration.predictions import HELD_OUT, OTHER, Prediction
from simulators.calibration.spread import LEVEL_PERCENT
from simulators.calibration.validation import Check

__all__ = [
    "AblationRow",
    "ablations",
    "choices",
    "covered",
    "fit_errors",
    "fitted_to",
    "groups",
    "limits_of",
    "misses",
    "reached",
    "recording_title",
    "share_text",
    "simulation_error",
    "tau_text",
    "undetermined",
    "undivided",
    "untold_noise",
    "verdict_sentences",
    "worst_group",
]


_BY_CHANCE = 0.05  # of recordings in which noise is the cause
_KINDS = 3  # of settings that are named as those furthest off
_FACTORS: Mapping[str, Callable[[Prediction], str | int]] = {
    "the number of workers": lambda p: p.workers,
    "the number of servers": lambda p: p.servers,
    "the samples in a mini-batch": lambda p: p.batch_size,
    "the policy": lambda p: p.group.rpartition(", ")[2],
}
"""What errors may depend on; of the same clearness, the first one is named."""


def tau_text(e: Errors) -> str:
    """Kendall's tau as text; a dash where there is none. One that misses the reach is not rounded up to it."""
    text = f"{e.tau:.2f}"
    if e.tau < TAU <= float(text):
        text = f"{math.floor(1000 * e.tau) / 1000:.3f}"
    return "-" if math.isnan(e.tau) else text


def share_text(value: float) -> str:
    """A share as text; a dash for nan."""
    return "-" if math.isnan(value) else f"{value:.1%}"


def covered(c: Coverage) -> str:
    """How many values are within their intervals, and half the intervals' mean width."""
    return f"{c.inside} of {c.rows}, ±{c.half_width:.0%}" if c.rows else "-"


def reached(e: Errors, held: Coverage) -> str:
    """ "yes", or what is not within reach; a dash for one row, which has no order."""
    short = missed(e, held)
    if short:
        return f"not: {', '.join(short)}"
    return "-" if e.rows == 1 else "yes"


def groups(made: Check) -> list[tuple[str, list[Prediction]]]:
    """Predictions by group and split; the name of a split follows that of the group, except that of cross-validation."""
    found: dict[str, list[Prediction]] = {}
    for p in made.predictions:
        found.setdefault(p.group if p.split in (HELD_OUT, OTHER) else f"{p.group}, {p.split}", []).append(p)
    return list(found.items())


def recording_title(made: Check) -> str:
    """The recorded job for one of our own recordings, the folder of a user's tables, else the source."""
    if made.origin.source == "own tables":
        return made.origin.of
    return made.origin.of.partition(",")[0] if made.origin.source == "harness" else made.origin.source


def fitted_to(made: Check) -> list[str]:
    """What the constants were fitted to, where that was another recording."""
    return [f"predicted by a fit to: {made.fitted_to}"] if made.fitted_to else []


def fit_errors(made: Check) -> list[str]:
    """How near the constants are to the rows that they were fitted to."""
    several = len(made.fits) > 1
    return [
        f"the constants{f' of {job}' * several} fit their own {fit.rows} rows with a median error of {share_text(fit.error)}"
        for job, fit in made.fits.items()
    ] + misfits(made.fits)


def choices(made: Check) -> list[str]:
    """What the fits to all rows chose from the recording itself, and how clearly."""
    return [str(choice) for choice in dict.fromkeys(fit.choice for fit in made.fits.values()) if choice]


def undivided(made: Check) -> list[str]:
    """Why some rows were not held out."""
    if not made.undivided:
        return []
    names = ", ".join(made.undivided)
    return [f"nothing is held out of {names}: only one combination of policy, workers and servers was recorded"]


def simulation_error(made: Check) -> list[str]:
    """How exact the simulated means are, where that is known."""
    known = [p.error for p in made.predictions if math.isfinite(p.error)]
    if not known:
        return []
    return [f"standard error of the simulated means: median {np.median(known):.2%}, at most {max(known):.2%}"]


def untold_noise(made: Check) -> list[str]:
    """What cannot be told of the noise of a recording without repetitions."""
    rows = cycles(made.predictions)
    if not rows or repeated(rows):
        return []
    if any(p.recorded_error > 0 for p in rows):
        return [
            "no setting was recorded twice: what differs between runs cannot be told from errors, only noise within a run"
        ]
    return ["no setting was recorded twice: it cannot be told how much of the errors is the recording's own noise"]


def verdict_sentences(checks: Sequence[Check]) -> list[str]:
    """The overall result, in sentences, worst first; empty without predictions of cycles."""
    every = [(made, split, rows) for made in checks for split, rows in by_split(made.predictions)]
    if not every:
        return []
    found = [(errors(rows, FORMS[0].held_out), coverage(rows)) for *_, rows in every]
    # One row has no order.
    judged = [e for e, _ in found if e.rows != 1]
    good = sum(not missed(e, Coverage(0, 0)) for e in judged)
    single = len(found) - len(judged)
    all_rows = [p for *_, rows in every for p in rows]
    mine = errors(all_rows, FORMS[0].held_out)
    if not mine.rows:
        return [
            "No cycle was predicted that was not fitted, so nothing is said of the simulator's errors: record several "
            "combinations of policy, workers and servers, or predict another recording with --fit and --predict."
        ]
    held = coverage(all_rows)
    recorded = sum(len(cycles(made.predictions)) for made in checks)
    twice = f" (of {recorded} that were recorded; some are predicted in more than one way)" * (recorded < len(all_rows))
    ranked = [e.tau for e, _ in found if math.isfinite(e.tau)]
    ends = dict.fromkeys(f"{tau(ranked):.2f}" for tau in (min, max) if ranked)
    said = [
        *([f"The order of settings, which a tuner needs: tau is {' to '.join(ends)}."] if ranked else []),
        f"The simulator's order, median and 95th percentile are within reach in {good} of {len(judged)} comparisons "
        f"(tau at least {TAU:g}, median error at most {MEDIAN:.0%}, 95th percentile at most {P95:.0%})."
        + f" Not counted: {single} of a single cycle, which has no order."
        * bool(single),
        f"Over all {mine.rows} cycles that were not fitted{twice}, it is off by {share_text(mine.median)} in the median "
        f"and {share_text(mine.p95)} at the 95th percentile. {_against_closed_forms([rows for *_, rows in every])}",
    ]
    exactly = [c.errors for *_, rows in every for c in ceilings(rows) if c.name == EXACT]
    if exactly:
        within, count = sum(not missed(e, Coverage(0, 0)) for e in exactly), len(exactly)
        said.append(
            ("Recorded times are noisy: even an exact" if within < count else "The recordings are precise enough: an exact")
            + f" prediction would be within reach in {within} of the {count} comparisons whose settings were recorded more "
            "than once."
        )
    level, without = f"{LEVEL_PERCENT} %", mine.rows - held.rows
    if held.rows:
        share = held.inside / held.rows
        far = "beyond chance" if off_level(held) else "within chance"
        rest = f"; {without} {'other has' if without == 1 else 'others have'} no interval" * bool(without)
        said.append(
            f"{share:.0%} of {held.rows} recorded cycles are within their {level} intervals, {far} of {level}{rest}."
        )
    else:
        said.append(
            f"None of these {mine.rows} cycles has a {level} interval: the fits leave no degree of freedom. "
            "Record more settings."
        )
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
    median, p95 = (share_text(float(x)) for x in np.quantile(known, [0.5, 0.95]))
    return (
        f"The best closed form, chosen in each comparison with the recorded times known, is off by {median} and {p95}; "
        f"the simulator's median error is lower in {lower} of {len(medians)} comparisons."
    )


def misses(made: Check) -> list[str]:
    """Where the simulator misses the reach, and what is known of the cause, a text per split."""
    found = []
    for split, rows in by_split(made.predictions):
        e = errors(rows, FORMS[0].held_out)
        short = missed(e, Coverage(0, 0))
        if not e.rows or not short:
            continue
        wrong, near = pairs_out_of_order(told(rows, FORMS[0].held_out))
        said = [f"{recording_title(made)}, {split}, misses: {', '.join(short)}."]
        if "tau" in short and wrong:  # else pairs are tied
            said.append(f"Of {wrong} pairs in the wrong order, {near} were recorded less than 5 % apart.")
        said += _noise_as_cause(rows, short)
        if set(short) - {"tau"}:
            said += [*_furthest_off(rows), *_trend(rows)]
        found.append(" ".join(said))
    return found


def _noise_as_cause(rows: Sequence[Prediction], short: Sequence[str]) -> list[str]:
    """Whether an exact prediction would miss the same: on the whole, or by chance in more than one recording of twenty."""
    for of in ceilings(rows):
        if of.name in (EXACT, EXACT_OF_CYCLES):
            also = [what for what in short if what in missed(of.errors, Coverage(0, 0))]
            noise = "the recording" if of.name == EXACT else "a run"
            if also:
                return [f"{EXACT.capitalize()} would miss {listed(also)} as well: that is the noise of the recording."]
            chances = {what: missed_by_noise(rows, what) for what in short}
            if may := [f"{what} in {chance:.0%}" for what, chance in chances.items() if chance > _BY_CHANCE]:
                return [
                    f"The noise within {noise} may be the cause: where it is as large as it may be by these cycles, {EXACT} "
                    f"misses {listed(may)} of such recordings."
                ]
            return [f"The noise within {noise} is not the cause: {EXACT} would miss none of this."]
    return []


def _furthest_off(rows: Sequence[Prediction]) -> list[str]:
    """The settings of the rows that are off by more than the 95th percentile may be."""
    off = [(p, p.held_out / p.recorded - 1) for p in rows if math.isfinite(p.held_out)]
    far = [(p, x) for p, x in off if abs(x) > P95]
    kinds = Counter(
        (p.group.rpartition(", ")[2], p.workers, p.servers, "slow" if x > 0 else "fast") for p, x in far
    ).most_common(_KINDS)
    each = [
        f"{policy} with {workers} worker{'s' * (workers > 1)} and {servers} server{'s' * (servers > 1)} ({count} too {how})"
        for (policy, workers, servers, how), count in kinds
    ]
    if not far:
        return []
    named = sum(count for _, count in kinds)
    # The few kinds that are named may be all rows, most of them, or the first ones of many.
    which = "" if named == len(far) else "most are of " if 2 * named > len(far) else "among them "
    return [f"{len(far)} of {len(off)} rows {_is(len(far))} more than {P95:.0%} off: {which}{listed(each)}."]


def _trend(rows: Sequence[Prediction]) -> list[str]:
    """What errors depend on most clearly, of policy and numbers; nothing where chance may do that.

    A one-way analysis of variance of the settings' mean errors for each of them, by Bonferroni's correction.
    """
    of_settings: dict[tuple[str, str], list[Prediction]] = {}
    for p in rows:
        if math.isfinite(p.held_out):
            of_settings.setdefault((p.group, p.label), []).append(p)
    off = np.array([np.mean([math.log(p.held_out / p.recorded) for p in of]) for of in of_settings.values()])
    found = []
    for name, value in _FACTORS.items():
        at = [value(of[0]) for of in of_settings.values()]
        groups = {v: off[[x == v for x in at]] for v in sorted({*at})}
        medians = {v: float(np.median(of)) for v, of in groups.items()}
        between, within = len(groups) - 1, len(off) - len(groups)
        if between < 1 or within < 1 or max(medians.values()) - min(medians.values()) < MEDIAN:
            continue
        left = sum(float(((of - of.mean()) ** 2).sum()) for of in groups.values())
        taken = float(((off - off.mean()) ** 2).sum()) - left
        by_chance = float(f.sf(taken / between / max(left / within, 1e-12), between, within))
        found.append((by_chance, name, medians))
    if not found or (least := min(found, key=lambda each: each[0]))[0] * len(_FACTORS) > _BY_CHANCE:
        return []
    _, name, medians = least
    ends = sorted({min(medians, key=medians.__getitem__), max(medians, key=medians.__getitem__)})
    each = [f"{_off_by(medians[v])} with {v}" for v in ends]
    return [f"Errors depend on {name}: in the median {listed(each)}."]


def _off_by(log: float) -> str:
    """How far predictions are off, by the logarithm of predicted over recorded times."""
    percent = f"{abs(math.expm1(log)):.0%}"
    return "not off" if percent == "0%" else f"{percent} too {'slow' if log > 0 else 'fast'}"


def _is(count: int) -> str:
    return "is" if count == 1 else "are"


def limits_of(made: Check) -> list[str]:
    """What a recording cannot tell, in sentences: what it does not have, and how far its own repetitions are apart."""
    rows = cycles(made.predictions)
    if not rows:
        return []
    each = (("workers", "workers"), ("servers", "servers"), ("batch_size", "samples in a mini-batch"))
    seen = [f"{_range([getattr(p, name) for p in rows])} {words}" for name, words in each]
    said = [f"{recording_title(made)} has {seen[0]}, {seen[1]} and {seen[2]}; nothing is said of others."]
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
    return [*said, *(f"{why[0].upper()}{why[1:]}." for why in untold_noise(made))]


def undetermined(checks: Sequence[Check]) -> list[str]:
    """The constants that no fitted row determines."""
    unknown = sorted({name for made in checks for fit in made.fits.values() for name in fit.refused})
    return (
        [f"No fitted row determines {', '.join(unknown)}: of jobs in which these matter, intervals alone say something."]
        if unknown
        else []
    )


def _range(values: Sequence[int]) -> str:
    low, high = min(values), max(values)
    return f"{low}" if low == high else f"{low} to {high}"


def worst_group(groups: Sequence[tuple[str, list[Prediction]]]) -> str:
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
    worst = f"Held out, {order}the median error is at most {share_text(max(e.median for e in known))} in every group{but}."
    if not bounded:
        return worst
    return f"{worst} {inside / bounded:.0%} of {bounded} recorded values are within their {LEVEL_PERCENT} % intervals."


class AblationRow(NamedTuple):
    """Errors of the simulator with all its physics, or without a part, as text."""

    recording: str
    span: int  # rows of the table that the recording heads; 0 after the first of them
    lacks: str
    tau: str
    median: str
    p95: str


def ablations(made: Check) -> list[AblationRow]:
    """The errors with all physics, then without each part; empty where no part was left out."""
    if not made.ablations:
        return []
    every = [("nothing", made.predictions), *((a.lacks, a.predictions) for a in made.ablations)]
    rows = list[AblationRow]()
    for lacks, predictions in every:
        told = [p for _, some in by_split(predictions) for p in some]
        e = errors(told, FORMS[0].held_out)
        rows.append(
            AblationRow(
                recording_title(made), len(every) * (not rows), lacks, tau_text(e), share_text(e.median), share_text(e.p95)
            )
        )
    return rows
