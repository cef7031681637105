"""What a comparison says over several arenas: how far each tuner is from the oracle, how often it is first, which differ.

One arena is a block; its seeds are repetitions, and are averaged. The value of a tuner in an arena is the mean over seeds of
the logarithm of its restricted time (its cost, where the arena minimises that) over that of the base with the same seed. The
base is `best_fixed`, or `fixed` where an arena lacks the oracle. The method is in `reports.verdicts.statistics`.

A tuner does not apply to an arena where it has nothing to tune, or where all its runs are those of `fixed`: such an arena
does not count for it. Two tuners are compared on the arenas that both apply to; the leader is the best of those that apply
to nearly as many arenas as any (`statistics.compare`), or one that is told to be better than that one (`_compared`).
"""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray

from harness.scenario import embedded
from reports.verdicts.conclusions import WORDS, Answer, few, undecided_opening
from reports.verdicts.numbers import percent, quantity, relative
from reports.verdicts.statistics import (
    ARENAS_FOR_RANKS,
    LEVEL,
    Interval,
    PairedComparison,
    compare,
    first_chances,
    friedman,
    mean_interval,
    mean_of_present,
    over_arenas,
    over_arenas_interval,
    over_draws,
    performance_profile,
)
from reports.verdicts.summary import ORACLE, REFERENCE, log_minimised, same_runs, standing
from traces.schema import KEYS
from traces.store import Results

__all__ = [
    "ARENAS",
    "Arenas",
    "Method",
    "answer",
    "arenas_of",
    "by_family",
    "families",
    "family_of",
    "method",
    "profile",
    "sentences",
]

_Floats = NDArray[np.float64]

_LEADS_FROM = 0.9  # share of the arenas to which a tuner applies that may lead: elsewhere it leaves the job as it is

ARENAS: dict[str, pl.DataType] = {
    "family": pl.String(),  # "" over all
    "tuner": pl.String(),
    "arenas": pl.Int64(),  # to which the tuner applies
    "ratio": pl.Float64(),  # geometric mean over arenas of the time over the base's; *_low, *_high: 95 % interval
    "ratio_low": pl.Float64(),
    "ratio_high": pl.Float64(),
    # geometric mean of the time over the leader's, and over that of `fixed`, on the arenas that both apply to; nan: none
    "to_leader": pl.Float64(),
    "to_reference": pl.Float64(),
    "first": pl.Float64(),  # probability of being first in an arena; *_low, *_high: 95 % interval
    "first_low": pl.Float64(),
    "first_high": pl.Float64(),
    "mean_rank": pl.Float64(),  # over the arenas that it applies to, among the tuners that apply there, too
    "reached": pl.Float64(),  # share of its runs that reached the target
    "failed": pl.Int64(),  # runs with status "error"
    # What it spends, means over all its runs that did not fail: stall and trials as shares of the run's time, and thinking.
    "overhead_share": pl.Float64(),
    "trial_share": pl.Float64(),
    "thinking_seconds": pl.Float64(),  # measured on the host
    "standing": pl.String(),  # leader; not told apart, behind or ahead of it
    "p_leader": pl.Float64(),  # corrected by Holm (`reports.verdicts.statistics`)
    "p_reference": pl.Float64(),  # the same of the difference to `fixed`
}
"""Columns of `Arenas.rows`."""


@dataclass(frozen=True, slots=True)
class Arenas:
    """The tuners over the arenas of one family."""

    family: str  # "" over all
    arenas: tuple[str, ...]
    base: str  # of the ratios: `best_fixed`, or `fixed`
    rows: pl.DataFrame  # ARENAS, best first
    comparison: PairedComparison
    drawn: bool  # whether all arenas are draws of one family
    seeds: int  # of the arena that has fewest
    friedman_p: float  # nan where it was not tested
    log_ratio: _Floats  # [arenas, tuners] in the order of `rows`; nan where a tuner does not apply
    to_best: _Floats  # time over the best contestant's, [arenas, tuners]; infinite where no run reached the target
    absent: dict[str, str]  # tuners that are not ranked, and why: their runs are another's, or they apply to no arena
    of_cost: tuple[str, ...] = ()  # arenas that minimise USD: their cost is what is compared
    lost: tuple[str, ...] = ()  # arenas that are not counted, as every run of every tuner failed there

    @property
    def minimise(self) -> str:
        """What words are of: "usd" where all arenas minimise it, else "seconds"."""
        return "usd" if self.of_cost == self.arenas else "seconds"


_DRAWN = re.compile(r"(.+)-v\d+-\d+")


def _are_draws(scenarios: Sequence[str]) -> bool:
    """Whether all `scenarios` are draws of one family."""
    found = {match[1] if (match := _DRAWN.fullmatch(name)) else "" for name in scenarios}
    return len(found) == 1 and "" not in found


def family_of(scenario: str) -> str:
    """The family of an arena: of a drawn one by its name ("learning-v1-0007"); of one that ships the first word of its name,
    which those of one paper or one source share ("boat-a-alexnet"); "" for any other scenario."""
    if found := _DRAWN.fullmatch(scenario):
        return found[1]
    name = scenario.partition("[")[0]
    return name.partition("-")[0] if name in embedded() else ""


def families(scenarios: Sequence[str]) -> dict[str, list[str]]:
    """Scenarios by family, where there are at least two of one; all of them together under ""."""
    found: dict[str, list[str]] = {"": list(scenarios)}
    for name in scenarios:
        if family := family_of(name):
            found.setdefault(family, []).append(name)
    several = {family: names for family, names in found.items() if len(names) > 1}
    return {f: n for f, n in several.items() if f == "" or n != list(scenarios)}


def arenas_of(results: Results, scenarios: Sequence[str], family: str = "") -> Arenas:
    """The tuners of `results` over `scenarios`. Raises ValueError without a run of them."""
    scores = results.scores.filter(pl.col("scenario").is_in(list(scenarios)))
    by_arena = {str(name): runs for (name,), runs in scores.group_by(["scenario"], maintain_order=True)}
    arenas = tuple(name for name in scenarios if name in by_arena)
    if not arenas:
        raise ValueError(f"Cannot compare over arenas: there is no run of {', '.join(scenarios) or 'any scenario'}.")
    # Where all fail, the arena is at fault: no tuner loses the lead for that. Without any other arena, these are shown.
    counted = tuple(a for a in arenas if (by_arena[a]["status"] != "error").any()) or arenas
    lost, arenas = tuple(a for a in arenas if a not in counted), counted
    scores = scores.filter(pl.col("scenario").is_in(list(arenas)))
    base = next((b for b in (ORACLE, REFERENCE) if all(b in by_arena[a]["tuner"] for a in arenas)), "")
    same = {a: same_runs(by_arena[a]) for a in arenas}
    idle = {a: {t for t, one in same[a].items() if one == REFERENCE} for a in arenas}
    everybody = [t for t in sorted(scores["tuner"].unique()) if t != ORACLE]
    applies = {t: [a for a in arenas if t in by_arena[a]["tuner"] and t not in idle[a]] for t in everybody}
    tuners = _distinct([t for t in everybody if applies[t]], applies, same)
    seconds = {a: _masked(log_minimised(by_arena[a], tuners), tuners, idle[a]) for a in arenas}
    bases = {a: log_minimised(by_arena[a], [base]) if base else np.zeros((len(seconds[a]), 1)) for a in arenas}
    runs = _stacked([seconds[a] - bases[a] for a in arenas])
    log_ratio = mean_of_present(runs, axis=1)
    most = max(len(applies[t]) for t in tuners) if tuners else 0
    able = [t for t in tuners if _able(scores, t)]
    drawn = _are_draws(arenas)
    found = _compared(tuners, runs, drawn, [t for t in able if len(applies[t]) >= _LEADS_FROM * most], able)
    # By the means that the table shows. `found` has them in the order of means over arenas that all possible leaders share.
    own = [_interval(runs[:, :, i], drawn) for i in range(len(tuners))]
    order = sorted(range(len(tuners)), key=lambda i: (own[i].estimate, tuners[i]))
    first = first_chances([seconds[a] for a in arenas])
    first[np.isnan(log_ratio)] = math.nan
    whole = log_ratio[~np.isnan(log_ratio).any(axis=1)]
    ranks = _mean_ranks(log_ratio)
    fixed = _over(log_ratio, tuners.index(REFERENCE)) if REFERENCE in tuners else {}
    spent = _spent(scores, results.host)
    rows = [
        _row(family, tuners[i], found, own[i], first[:, i], float(ranks[i]), scores)
        | {"to_leader": math.exp(found.to_leader.get(tuners[i], math.nan)), "to_reference": fixed.get(i, math.nan)}
        | spent.get(tuners[i], {})
        for i in order
    ]
    return Arenas(
        family=family,
        arenas=arenas,
        base=base,
        # A tuner whose runs all failed has spent nothing that can be said.
        rows=pl.DataFrame(rows, schema=ARENAS).with_columns(pl.col(pl.Float64).fill_null(math.nan)),
        comparison=found,
        drawn=drawn,
        seeds=min((~np.isnan(runs)).sum(axis=1).max(axis=1)),
        friedman_p=friedman(whole) if len(whole) >= ARENAS_FOR_RANKS or (drawn and len(whole) > 1) else math.nan,
        log_ratio=log_ratio[:, order],
        to_best=_to_best(log_ratio, tuners, by_arena, arenas)[:, order],
        absent=_absent(results, tuners, everybody, applies),
        of_cost=tuple(a for a in arenas if by_arena[a]["minimise"][0] == "usd"),
        lost=lost,
    )


def by_family(results: Results, scenarios: Sequence[str]) -> list[Arenas]:
    """The tuners over all `scenarios`, then over those of each family; [] for a single scenario."""
    return [arenas_of(results, members, family) for family, members in families(scenarios).items()]


def _distinct(tuners: list[str], applies: dict[str, list[str]], same: dict[str, dict[str, str]]) -> list[str]:
    """`tuners` without those whose runs are another's in every arena; `same` has the `same_runs` of each."""

    def double(tuner: str) -> bool:
        stands = {same[a].get(tuner, "") for a in applies[tuner]}
        return len(stands) == 1 and "" not in stands and all(applies[tuner] == applies.get(one, []) for one in stands)

    return [t for t in tuners if not double(t)]


def _compared(tuners: list[str], runs: _Floats, drawn: bool, wide: list[str], able: list[str]) -> PairedComparison:
    """`tuners` compared by `runs` [arenas, seeds, tuners]; `wide` are those that may lead, `able` all that do not fail.

    Where a tuner does not apply, it leaves the job as `fixed` does, so that it has the times of `fixed` there. If a tuner is
    told to be better than the leader of `wide`, and has a lower mean over all arenas, the tuner of the lowest such mean
    leads instead.
    """
    test = over_draws if drawn else over_arenas
    found = compare(tuners, runs, test, reference=REFERENCE, may_lead=wide)
    if REFERENCE not in tuners or not found.leader:
        return found
    values = mean_of_present(runs, axis=1)
    everywhere = np.where(np.isnan(values), values[:, [tuners.index(REFERENCE)]], values).mean(axis=0)
    means = dict(zip(tuners, everywhere, strict=True))
    if any(found.standing(t) == "ahead" and means[t] < means[found.leader] for t in able):
        best = min(able, key=lambda t: (means[t], t))
        found = compare(tuners, runs, test, reference=REFERENCE, may_lead=[best])
    return found


def _masked(values: _Floats, tuners: list[str], idle: set[str]) -> _Floats:
    values[:, [i for i, t in enumerate(tuners) if t in idle]] = math.nan
    return values


def _stacked(runs: Sequence[_Floats]) -> _Floats:
    """[arenas, seeds, tuners] of each arena's [seeds, tuners]; NaN where an arena has fewer seeds than others."""
    most = max(len(one) for one in runs)
    return np.stack([np.pad(one, ((0, most - len(one)), (0, 0)), constant_values=math.nan) for one in runs])


def _interval(runs: _Floats, drawn: bool) -> Interval:
    """The interval of one tuner's mean over the arenas that it applies to, from `runs` [arenas, seeds]."""
    mine = runs[~np.isnan(runs).all(axis=1)]
    return mean_interval(mean_of_present(mine, axis=1)) if drawn else over_arenas_interval(mine)


def _able(scores: pl.DataFrame, tuner: str) -> bool:
    mine = scores.filter(pl.col("tuner") == tuner)
    return bool(mine["reached"].any()) and "error" not in mine["status"]


def _mean_ranks(log_ratio: _Floats) -> _Floats:
    """The mean rank of every tuner over the arenas that it applies to, among the tuners that apply there, 1 for the best."""
    from scipy.stats import rankdata

    ranks = rankdata(log_ratio, axis=1, nan_policy="omit") if len(log_ratio) else log_ratio
    return np.array([column[~np.isnan(column)].mean() for column in ranks.T])


def _over(log_ratio: _Floats, one: int) -> dict[int, float]:
    """Geometric mean of every tuner's time over that of tuner `one`, by column, on the arenas that both apply to."""
    found = {}
    for i, column in enumerate(log_ratio.T):
        differences = column - log_ratio[:, one]
        if (both := ~np.isnan(differences)).any():
            found[i] = math.exp(differences[both].mean())
    return found


def _spent(scores: pl.DataFrame, host: pl.DataFrame) -> dict[str, dict[str, float]]:
    """What every tuner spends, by the columns of `ARENAS`."""
    seconds = pl.col("completion_seconds")
    ran = scores.filter((pl.col("status") != "error") & (seconds > 0)).join(
        host.select(*KEYS, "thinking_seconds"), on=KEYS, how="left"
    )
    means = (
        (pl.col("overhead_seconds") / seconds).mean().alias("overhead_share"),
        (pl.col("trial_seconds") / seconds).mean().alias("trial_share"),
        pl.col("thinking_seconds").fill_nan(None).mean(),
    )
    # Tuner by tuner and in one order, because Polars adds up the groups of `agg` in parts, whose order differs.
    by_tuner = ran.sort(KEYS).partition_by("tuner", as_dict=True)
    return {str(tuner): runs.select(means).row(0, named=True) for (tuner,), runs in by_tuner.items()}


def _to_best(log_ratio: _Floats, tuners: list[str], by_arena: dict[str, pl.DataFrame], arenas: Sequence[str]) -> _Floats:
    """Ratios to the best contestant of every arena; infinite where none of a tuner's runs reached the target."""
    reached = np.array([[bool(by_arena[a].filter(pl.col("tuner") == t)["reached"].any()) for t in tuners] for a in arenas])
    able = np.where(reached, log_ratio, math.inf)
    best = np.nanmin(np.where(np.isnan(log_ratio), math.inf, able), axis=1, keepdims=True, initial=math.inf)
    with np.errstate(invalid="ignore"):
        ratio = np.exp(able - np.where(np.isfinite(best), best, 0.0))
    return np.where(np.isnan(log_ratio), math.nan, ratio)


def _row(
    family: str,
    tuner: str,
    found: PairedComparison,
    mean: Interval,
    first: _Floats,
    rank: float,
    scores: pl.DataFrame,
) -> dict[str, Any]:
    """The row of one tuner over all arenas of a family."""
    mine = scores.filter(pl.col("tuner") == tuner)
    ratio = Interval(math.exp(mean.estimate), math.exp(mean.low), math.exp(mean.high))
    chance = mean_interval(first[~np.isnan(first)])
    return {
        "family": family,
        "tuner": tuner,
        "arenas": int((~np.isnan(first)).sum()),
        "ratio": ratio.estimate,
        "ratio_low": ratio.low,
        "ratio_high": ratio.high,
        "first": chance.estimate,
        "first_low": chance.low,
        "first_high": chance.high,
        "mean_rank": rank,
        "reached": float(mine["reached"].cast(pl.Float64).to_numpy().mean()),
        "failed": int((mine["status"] == "error").sum()),
        "standing": standing(found, tuner, mine) if found.leader else "",
        "p_leader": found.p_leader.get(tuner, math.nan),
        "p_reference": found.p_reference.get(tuner, math.nan),
    }


_SAME = "its runs are "
"""How the reason begins that a tuner is left out though it applies somewhere."""


def _absent(results: Results, tuners: list[str], everybody: list[str], applies: dict[str, list[str]]) -> dict[str, str]:
    found = {t: f"{_SAME}those of fixed" for t in everybody if not applies[t]}
    found |= {t: f"{_SAME}another tuner's" for t in everybody if applies[t] and t not in tuners}
    idle = results.not_applicable.filter(~pl.col("tuner").is_in(everybody))
    idle = idle.unique(["scenario", "tuner"], maintain_order=True)
    for (tuner,), mine in idle.group_by(["tuner"], maintain_order=True):
        (reason, most), *others = Counter(mine["reason"].to_list()).most_common()
        elsewhere = f"; in {mine.height - most} of {mine.height} arenas another reason" if others else ""
        found[str(tuner)] = str(reason).rstrip(".") + elsewhere
    return found


def answer(found: Arenas) -> Answer:
    """The first line over several arenas: which tuner to use, and how sure that is."""
    leader = found.comparison.leader
    where = f"{len(found.arenas)} {f'arenas of the family {found.family}' if found.family else 'arenas'}"
    if not leader or found.rows.height < 2:
        return Answer(f"Over {where} there is nothing to compare.", "", "")
    row = found.rows.row(by_predicate=pl.col("tuner") == leader, named=True)
    undecided = found.rows.filter(standing="not told apart")
    close, strangers = (
        undecided.filter(pl.col("to_leader").is_nan() == never)["tuner"].to_list() for never in (False, True)
    )
    most, mine = int(found.rows["arenas"].max() or 0), int(row["arenas"])  # type: ignore[arg-type]
    narrow_leader = mine < _LEADS_FROM * most  # `_compared` says why
    enough = _LEADS_FROM * (mine if narrow_leader else most)
    counts = dict(found.rows.select("tuner", "arenas").iter_rows())
    ahead = [str(t) for t, s in found.rows.select("tuner", "standing").iter_rows() if s == "ahead"]
    interval = "" if math.isnan(row["ratio_low"]) else f" ({relative(row['ratio_low'])}\u2013{relative(row['ratio_high'])})"
    if leader == found.base:  # fixed itself, where the oracle was not run
        after = f": no tuner is {WORDS[found.minimise].better} over {where}; it is"
    else:
        over = f"over the {mine} of {where} that it applies to" if narrow_leader else f"over {where}"
        after = f": {relative(row['ratio'])}x of {found.base}{interval} {over}" if found.base else f" {over}"
        after += ","
    after += f" first in {percent(row['first'])} of them"
    if narrow_leader:
        after += " (elsewhere it leaves the job as it is)"
    elif mine < len(found.arenas):
        after += f" (it applies to {mine})"
    if leader == REFERENCE:
        before = "Keep "
    elif REFERENCE in close:
        better, worse = _apart_from_reference(found.rows)
        sides = ["faster" if t in better else "slower" if t in worse else "" for t in found.rows["tuner"]]
        before = undecided_opening(found.rows["tuner"], sides, found.minimise)
    else:
        before = "Use "
    others = [t for t in close if t != REFERENCE] if before.startswith("No") else close
    wide = [t for t in others if counts[t] >= enough]
    but = f" but {REFERENCE}" if others != close else ""
    after += "."
    if wide:
        after += f" Not told apart from it: {few(wide)}."
    elif others:
        after += f" All others{but} that apply to nearly as many arenas are told apart from it."
    elif found.rows.height > 1 + len(close) + len(strangers):
        after += f" All others{but} are told apart from it."
    if narrow := [f"{t} ({counts[t]})" for t in others if t not in wide]:
        after += f" Not told apart where they apply, which is in fewer arenas: {few(narrow)}."
    if strangers:
        after += f" Not compared with it, as they share no arena with it: {few(strangers)}."
    if ahead:
        after += f" Better where they apply: {', '.join(ahead)}."
    return Answer(before, leader, after)


class Method(NamedTuple):
    """How the figures of `Arenas` were found, in words."""

    intervals: str
    test: str


def method(found: Arenas) -> Method:
    """What the intervals are by, and which test decides."""
    blocks = found.drawn or found.seeds < 2  # `statistics.over_draws`; else `over_arenas`
    test = "a paired t test over arenas" if blocks else "a t test of the mean over arenas with the variance within them"
    if len(found.arenas) < ARENAS_FOR_RANKS:
        return Method("by bootstrap over arenas" if blocks else "over the seeds of these arenas", test)
    ranks = "Wilcoxon's signed-rank test over arenas"
    if found.rows["arenas"].min() < ARENAS_FOR_RANKS:  # type: ignore[operator]
        ranks += f" (where both apply to fewer than {ARENAS_FOR_RANKS}, {test})"
    return Method("by bootstrap over arenas", ranks)


def sentences(found: Arenas) -> list[str]:
    """How the first line was found, and which tuners are left out."""
    words = WORDS[found.minimise]
    intervals, test = method(found)
    said = [
        f"Each arena counts once, by the mean over its seeds. {words.what.capitalize()}s are {_relative_to(found)}; means "
        f"are of logarithms, with 95 % intervals {intervals}. Two tuners differ where {test} says so at 5 %, corrected "
        f"by Holm over all pairs of tuners (half of the 5 % is for pairs with {REFERENCE})."
    ]
    if not found.comparison.pairs:
        said.append("So few arenas and seeds show no difference: with three seeds and more, or three arenas, they may.")
    if not math.isnan(found.friedman_p):
        p = "< 0.001" if found.friedman_p < 0.001 else f"= {quantity(found.friedman_p)}"
        said.append(f"Friedman's test over the arenas that all of them apply to: p {p}.")
    if found.of_cost:
        which = (
            found.of_cost[0] if len(found.of_cost) == 1 else "all" if found.of_cost == found.arenas else len(found.of_cost)
        )
        said.append(
            f"In {which}{' of them' * (len(found.of_cost) > 1)} USD count in place of time: that is to be least there."
        )
    if hopeless := [a for a, ratios in zip(found.arenas, found.to_best, strict=True) if not np.isfinite(ratios).any()]:
        which = hopeless[0] if len(hopeless) == 1 else f"{len(hopeless)} of them"
        said.append(f"In {which} no run reached the target; all tuners count the budget there, and are equal.")
    if found.lost:
        which = found.lost[0] if len(found.lost) == 1 else f"{len(found.lost)} arenas"
        said.append(f"In {which} every run failed, so that {'it is' if len(found.lost) == 1 else 'they are'} not counted.")
    if each := [f"{row['failed']} of {row['tuner']}" for row in found.rows.iter_rows(named=True) if row["failed"]]:
        said.append(f"Failed runs count with the budget: {', '.join(each)}.")
    for word, mine in zip((words.better, words.worse), _apart_from_reference(found.rows), strict=True):
        if mine:
            said.append(f"{word.capitalize()} than {REFERENCE} in the arenas that both apply to: {', '.join(mine)}.")
    why: dict[str, list[str]] = {}
    for tuner, reason in found.absent.items():
        why.setdefault(reason, []).append(tuner)
    for left, same in (("Left out", True), ("Not applicable in any arena", False)):
        each = [f"{', '.join(tuners)} ({reason})" for reason, tuners in why.items() if reason.startswith(_SAME) == same]
        if each:
            said.append(f"{left}: {'; '.join(each)}.")
    said.append(
        "These arenas are draws of one family: for other arenas of it the same is expected, for other families nothing."
        if found.drawn
        else "Nothing is said of scenarios that were not run, unless these are draws of one family."
    )
    return said


def _apart_from_reference(rows: pl.DataFrame) -> tuple[list[str], list[str]]:
    """The tuners that are told to be faster, and slower, than the reference, on the arenas that both apply to: ratios to the
    base over different arenas cannot be compared. Of a tuner whose runs all failed, no speed is known."""
    ran = (pl.col("failed") == 0) | pl.col("overhead_share").is_not_nan()
    differ = rows.filter((pl.col("p_reference") < 1 - LEVEL) & (pl.col("tuner") != REFERENCE) & ran)
    faster = pl.col("to_reference") < 1
    return differ.filter(faster)["tuner"].to_list(), differ.filter(~faster)["tuner"].to_list()


def _relative_to(found: Arenas) -> str:
    return f"relative to those of {found.base} with the same seed" if found.base else "in seconds"


def profile(found: Arenas) -> tuple[_Floats, _Floats]:
    """The performance profile of `found`: ratios to the best, [steps], and shares of arenas, [steps, tuners]."""
    return performance_profile(found.to_best)
