"""Intervals over paired seeds, and which tuners differ: pair by pair, corrected for the number of pairs.

What is compared. Every tuner meets the same seeds, and so the same random draws: everything is paired. Within one arena a
*block* is a seed; over several arenas it is an arena, whose seeds are repetitions and are averaged. A run that has not
reached its target is *censored*: its completion time is known to be at least the budget, and no more is known (`Bounds`).
Ratios and medians are computed on these bounds by interval arithmetic, so a median is reported as "> budget" as soon as
censored runs decide it. A failed run (status "error") says nothing about the job: it is counted, and left out of times.

Intervals. Percentile bootstrap over blocks (Efron and Tibshirani 1993, chapter 13), 9,999 resamples of one fixed random
stream, so equal input gives equal output, and tuners with equally many blocks are resampled alike. Within an arena the
statistic is the median over seeds: of completion times, and of the ratios to the reference with the same seed. The ratio is
a median and no geometric mean, because a median is defined under censoring and its interval keeps its level with few seeds.
For n seeds no such interval can cover the true median more often than 1 - 2^(1-n), the coverage of (lowest, highest): 75 %
for 3 seeds, 93.8 % for 5, and 95 % from 6 on (`coverage_limit`).

Differences. Tests compare logarithms of *restricted* times, the smaller of completion time and budget, as survival analysis
compares restricted means (Royston and Parmar 2013): a time is then defined for every run, two runs that both missed the
target are equal, and a run that missed it is never better than one that reached it.

* Within an arena: Student's paired t test over seeds. Rank tests cannot do this: with six seeds their smallest p value is
  0.03, so after any correction for twenty tuners nothing would ever differ.
* Over `ARENAS_FOR_RANKS` arenas and more that a pair shares: Wilcoxon's signed-rank test on the arenas' mean logarithms
  (Demsar 2006, Section 3.1.3). Arenas are not draws of one normal distribution; there are enough of them for ranks.
* Over fewer draws of one family (`over_draws`): the paired t test on the arenas' mean logarithms, as over seeds.
* Over fewer other arenas (`over_arenas`): these alone are asked about, so chance is in the seeds. The mean over arenas is
  tested by how it varies from seed to seed within each (Welch 1947). Where an arena has one seed, nothing tells that, and
  arenas are taken as draws.
* Of draws, and of `ARENAS_FOR_RANKS` arenas, also Friedman's test of all tuners at once (Demsar 2006, Section 3.2.2).

The *leader* is chosen from the same data that it is then tested on, so p values are corrected by Holm (1979) over all pairs
of tuners. Over only those with the leader, it would find something false in 12 of 100 comparisons of ten equal tuners over
20 arenas. `fixed` is known beforehand: whoever leads, the question is whether it pays to leave the job as it is. So the few
pairs with it get half of the 5 %, and all others the other half (the weighted form of Holm's method). Every pair has one p
value, wherever it is shown, and the chance of any false verdict, about the leader or about `fixed`, is at most 5 %;
`tests/reports/verdicts/test_verdicts.py` measures it and its limits.

Sources: J. Demsar, "Statistical comparisons of classifiers over multiple data sets", JMLR 7 (2006) 1-30. B. Efron and R.
Tibshirani, "An introduction to the bootstrap", Chapman & Hall (1993). M. Friedman, JASA 32 (1937) 675-701. S. Holm,
Scandinavian Journal of Statistics 6 (1979) 65-70. P. Royston and M. Parmar, BMC Medical Research Methodology 13 (2013) 152.
E. Dolan and J. More, "Benchmarking optimization software with performance profiles", Mathematical Programming 91 (2002)
201-213. B. Welch, Biometrika 34 (1947) 28-35.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "ARENAS_FOR_RANKS",
    "LEAST_BLOCKS",
    "LEVEL",
    "Bounds",
    "Interval",
    "PairedComparison",
    "Test",
    "censored",
    "compare",
    "coverage_limit",
    "first_chances",
    "friedman",
    "holm",
    "mean_interval",
    "mean_of_present",
    "median_interval",
    "over_arenas",
    "over_arenas_interval",
    "over_draws",
    "paired_t",
    "performance_profile",
    "ratios",
    "signed_rank",
]

LEVEL = 0.95
_RESAMPLES = 9_999
_STREAM = 20_240_607
# Quantiles cannot interpolate infinities (inf - inf is nan). An open end is this huge number while resampling, and becomes
# infinite again after it.
_HUGE = 1e100  # its square is finite too
_OPEN = 1e50  # above any time: a larger result was interpolated towards `_HUGE`
LEAST_BLOCKS = 3
"""With fewer blocks nothing is tested: the denominator of a t test would be chance."""

ARENAS_FOR_RANKS = 12
"""With fewer arenas, no rank test tells `fixed` from any of 40 tuners: its smallest p value is 2^-10 with eleven, times 2 x
40 for the correction."""

_SAME = 1e-12
"""Values that differ by less are equal: programs of two policies may round one sum differently, and nothing else tells
their runs apart."""
_ALL_SIGNS = 13  # blocks at most: with more, SciPy's signed-rank test of rows with ties is by a normal distribution

_Floats: TypeAlias = NDArray[np.float64]
Test: TypeAlias = Callable[[_Floats], _Floats]
"""The two-sided p values [...] of paired differences [..., blocks]; NaN where they are too few to tell anything."""


class Bounds(NamedTuple):
    """Bounds of n values: each is at least `least` and at most `most`; the two are equal where it was measured."""

    least: _Floats
    most: _Floats


class Interval(NamedTuple):
    """An estimate with its confidence interval; `low` and `high` are NaN where there are too few values."""

    estimate: float  # NaN where there are no values
    low: float
    high: float  # infinite where censored values leave it open
    bound: Literal["=", ">", "<", "?"] = "="  # the true estimate is `estimate`, more, less, or unknown


def censored(seconds: Sequence[float] | _Floats, reached: Sequence[bool] | NDArray[np.bool_]) -> Bounds:
    """Completion times; of a run that has not `reached` its target, `seconds` is only a lower bound."""
    least = np.asarray(seconds, dtype=np.float64)
    return Bounds(least, np.where(np.asarray(reached, dtype=bool), least, np.inf))


def ratios(ours: Bounds, theirs: Bounds) -> Bounds:
    """`ours` over `theirs`, pair by pair; unbounded where `theirs` may be zero or both are censored."""
    with np.errstate(divide="ignore", invalid="ignore"):
        least, most = ours.least / theirs.most, ours.most / theirs.least
    unknown = theirs.least <= 0
    return Bounds(np.where(unknown, 0.0, least), np.where(unknown, np.inf, most))


def median_interval(values: Bounds, *, resamples: int = _RESAMPLES) -> Interval:
    """The median and its percentile-bootstrap interval; no interval from a single value."""
    if len(values.least) == 0:
        return Interval(math.nan, math.nan, math.nan, "?")
    top = np.minimum(values.most, _HUGE)
    least, most = float(np.median(values.least)), float(np.median(top))
    low = _bootstrap(values.least, np.median, resamples)[0]
    high = _bootstrap(top, np.median, resamples)[1]
    if high > _OPEN:
        high = math.inf
    if least == most:
        return Interval(least, low, high, "=")
    if most <= _OPEN:
        return Interval(most, low, high, "<")
    return Interval(least, low, high, ">") if least > 0 else Interval(math.nan, low, high, "?")


def mean_interval(values: Sequence[float] | _Floats, *, resamples: int = _RESAMPLES) -> Interval:
    """The mean and its percentile-bootstrap interval; no interval from a single value."""
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return Interval(math.nan, math.nan, math.nan, "?")
    mean = float(x[0] if np.all(x == x[0]) else x.mean())  # rounding may give equal values another mean
    return Interval(mean, *_bootstrap(x, np.mean, resamples))


def _bootstrap(x: _Floats, statistic: Any, resamples: int) -> tuple[float, float]:
    if x.size < 2:
        return math.nan, math.nan
    if np.all(x == x[0]):
        return float(x[0]), float(x[0])
    from scipy.stats import bootstrap

    rng = np.random.default_rng(_STREAM)
    found = bootstrap((x,), statistic, confidence_level=LEVEL, n_resamples=resamples, method="percentile", rng=rng)
    low, high = found.confidence_interval
    return _snapped(float(low), found.bootstrap_distribution), _snapped(float(high), found.bootstrap_distribution)


def _snapped(end: float, values: _Floats) -> float:
    """The nearest of `values` where `end` is that but for its last digits: SciPy interpolates with weights that sum to 1, so
    between two equal values it may give one that is less than both."""
    nearest = float(values[np.abs(values - end).argmin()])
    return nearest if math.isclose(nearest, end, rel_tol=1e-12) else end


def coverage_limit(values: int) -> float:
    """The highest possible coverage of the true median by an interval from the order statistics of `values` values."""
    return 1.0 - 2.0 ** (1 - values) if values > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------- differences


@dataclass(frozen=True, slots=True)
class PairedComparison:
    """Tuners in order of their means, best first, and which of them differ."""

    tuners: tuple[str, ...]
    means: tuple[float, ...]  # over the blocks that all possible leaders have; of a tuner without any of these, over its own
    leader: str  # the best of those that may lead (`compare`); "" without any
    to_leader: dict[str, float]  # mean difference to the leader on the blocks of both, by tuner; nan: there is none
    p_leader: dict[str, float]  # corrected p value of the difference to the leader, by tuner; nan where nothing was tested
    p_reference: dict[str, float]  # the same of the difference to the reference; empty where it is not among the tuners
    blocks: int
    pairs: int  # that were tested

    def standing(self, tuner: str) -> str:
        """What is known of `tuner` and the leader: "leader", "not told apart", "behind", or "ahead" of one that may lead."""
        if tuner == self.leader:
            return "leader"
        if not self.p_leader.get(tuner, math.nan) < 1 - LEVEL:
            return "not told apart"
        return "behind" if self.to_leader[tuner] > 0 else "ahead"


def compare(
    tuners: Sequence[str], values: _Floats, test: Test, *, reference: str = "", may_lead: Sequence[str] | None = None
) -> PairedComparison:
    """Compare `tuners` by `values` of shape [blocks, tuners], lower is better; NaN where a tuner has none in a block. Or by
    those of shape [arenas, seeds, tuners]: means over seeds count, and `test` gets the differences of all seeds.

    Two tuners are compared on the blocks of both. The leader is the one of `may_lead` (of all, where it is None) that does
    best against the others of these: the mean difference to that one which it is least good against is the least. Where all
    have all blocks, that is the one of least mean. Of equals the `reference` leads, then the first by name; values that
    differ by `_SAME` at most are equal.

    Raises ValueError where `values` has another shape.
    """
    runs = np.asarray(values, dtype=np.float64)
    if runs.ndim not in (2, 3) or runs.shape[-1] != len(tuners):
        raise ValueError(
            f"Cannot compare {len(tuners)} tuners by values of shape {runs.shape}: give one per block and tuner."
        )
    values = mean_of_present(runs, axis=1) if runs.ndim == 3 else runs
    k = len(tuners)
    leading = [i for i in range(k) if may_lead is None or tuners[i] in may_lead]
    means = _means(values, leading)
    order = sorted(
        range(k), key=lambda i: (math.isnan(means[i]), _rounded(float(means[i])), tuners[i] != reference, tuners[i])
    )
    pairs = [(a, b) for x, a in enumerate(order) for b in order[x + 1 :]]
    differences = np.array([runs[..., a] - runs[..., b] for a, b in pairs]).reshape(len(pairs), *runs.shape[:-1])
    differences[np.abs(differences) <= _SAME] = 0.0
    raw = dict(zip(pairs, _p_values(differences, test), strict=True))
    able = [i for i in order if i in leading and not math.isnan(means[i])]
    apart = np.array([_mean_of_each(values[:, [i]] - values) for i in range(k)]).reshape(k, k)
    leader = min(able, key=lambda i: max(_rounded(float(d)) for d in apart[i, able] if not math.isnan(d)), default=None)
    base = list(tuners).index(reference) if reference in tuners else None
    tested = [pair for pair, p in raw.items() if not math.isnan(p)]
    known_before = sum(base in pair for pair in tested)
    others = len(tested) - known_before
    of_reference = others / known_before if others and known_before else 1.0  # together they weigh as much as all others
    weights = [of_reference if base in pair else 1.0 for pair in raw]
    corrected = dict(zip(raw, holm(list(raw.values()), weights), strict=True))
    p_leader, p_reference = (
        {tuners[a if b == one else b]: p for (a, b), p in corrected.items() if one in (a, b)} for one in (leader, base)
    )
    return PairedComparison(
        tuple(tuners[i] for i in order),
        tuple(float(means[i]) for i in order),
        "" if leader is None else tuners[leader],
        {} if leader is None else {tuners[i]: float(apart[i, leader]) for i in range(k) if i != leader},
        p_leader,
        p_reference,
        values.shape[0],
        len(tested),
    )


def _rounded(value: float) -> float:
    return round(value, 12)  # as `_SAME`


def _means(values: _Floats, leading: Sequence[int]) -> _Floats:
    """The mean of each column, over the blocks that all columns in `leading` have: only these can be compared with each
    other. A column that has none of these blocks is averaged over its own."""
    shared = values[~np.isnan(values[:, list(leading)]).any(axis=1)]
    some, own = _mean_of_each(shared), _mean_of_each(values)
    return np.where(np.isnan(some), own, some)


def _mean_of_each(values: _Floats) -> _Floats:
    if values.size and not np.isnan(values).any():
        # Contiguous, so that each is added up in the same order as a single column below.
        means: _Floats = np.ascontiguousarray(values.T).mean(axis=-1)
        return means
    return np.array([column[~np.isnan(column)].mean() if (~np.isnan(column)).any() else math.nan for column in values.T])


def _p_values(differences: _Floats, test: Test) -> list[float]:
    """The p value of each row of differences [pairs, blocks], or [pairs, arenas, seeds], without the blocks (arenas) in
    which it is NaN. Rows with the same blocks are tested in one call, because a call of SciPy takes longer than what it
    computes."""
    found, some = np.full(len(differences), math.nan), ~np.isnan(differences)
    there = some.any(axis=-1) if some.ndim == 3 else some
    for blocks in np.unique(there, axis=0):
        rows = (there == blocks).all(axis=1)
        if blocks.any():
            found[rows] = test(differences[np.ix_(rows, blocks)])
    return [float(p) for p in found]


def mean_of_present(values: _Floats, axis: int) -> _Floats:
    """Means along `axis` without NaN; NaN where there is nothing else."""
    some = ~np.isnan(values)
    total = np.where(some, values, 0.0).sum(axis=axis)
    means: _Floats = np.where(some.any(axis=axis), total / np.maximum(some.sum(axis=axis), 1), math.nan)
    return means


def paired_t(differences: _Floats) -> _Floats:
    """Student's paired t test. Differences that are all the same are exact: p is 0, or 1 where they are 0."""
    from scipy.stats import ttest_1samp

    x = np.asarray(differences, dtype=np.float64)
    if x.shape[-1] < LEAST_BLOCKS:
        return np.full(x.shape[:-1], math.nan)
    found = np.where(np.abs(x.mean(axis=-1)) <= _SAME, 1.0, 0.0)
    vary = np.ptp(x, axis=-1) > _SAME * np.maximum(1.0, np.abs(x).max(axis=-1))
    if vary.any():
        found[vary] = ttest_1samp(x[vary], 0.0, axis=-1).pvalue
    return found


class _Within(NamedTuple):
    """Means over arenas of means over seeds [...], their standard errors, and degrees of freedom: 0 where nothing tells."""

    mean: _Floats
    error: _Floats
    freedom: _Floats


def _within(values: _Floats) -> _Within:
    """Means over seeds, and then over arenas, of values [..., arenas, seeds], NaN where an arena has fewer seeds than
    others. Every arena varies by itself, so degrees of freedom are those of a sum of unlike variances (Welch 1947). One seed
    does not tell how an arena varies."""
    x = np.asarray(values, dtype=np.float64)
    seeds = (~np.isnan(x)).sum(axis=-1)
    each = mean_of_present(x, axis=-1)
    off = np.where(np.isnan(x), 0.0, x - each[..., None])
    off[np.abs(off) <= _SAME * np.maximum(1.0, np.abs(each))[..., None]] = 0.0
    variance = (off**2).sum(axis=-1) / np.maximum(seeds - 1, 1) / np.maximum(seeds, 1)  # of each mean
    total = variance.sum(axis=-1)
    parts = (variance**2 / np.maximum(seeds - 1, 1)).sum(axis=-1)
    all_of_them = (seeds - 1).sum(axis=-1)  # where nothing varies, or hardly
    freedom = np.where(parts > 0, total**2 / np.where(parts > 0, parts, 1.0), all_of_them)
    told = (seeds > 1).all(axis=-1) & (all_of_them >= LEAST_BLOCKS - 1)
    return _Within(each.mean(axis=-1), np.sqrt(total) / x.shape[-2], np.where(told, freedom, 0.0))


def over_arenas(differences: _Floats) -> _Floats:
    """P values of differences [..., arenas, seeds] between two tuners on arenas of which each is asked about."""
    x = np.asarray(differences, dtype=np.float64)
    if x.shape[-2] >= ARENAS_FOR_RANKS:
        return over_draws(x)
    from scipy.stats import t

    mean, error, freedom = _within(x)
    exact = np.where(np.abs(mean) <= _SAME, 1.0, 0.0)
    varies = error > 0
    by_t = 2 * t.sf(np.abs(mean) / np.where(varies, error, 1.0), np.maximum(freedom, 1.0))
    p: _Floats = np.where(freedom > 0, np.where(varies, by_t, exact), over_draws(x))
    return p


def over_draws(differences: _Floats) -> _Floats:
    """P values of differences [..., arenas, seeds] between two tuners on arenas that are draws of what is asked about."""
    means = mean_of_present(np.asarray(differences, dtype=np.float64), axis=-1)
    return (signed_rank if means.shape[-1] >= ARENAS_FOR_RANKS else paired_t)(means)


def over_arenas_interval(values: _Floats) -> Interval:
    """The mean of `values` [arenas, seeds], and the interval that goes with `over_arenas`: by bootstrap over arenas where
    these are many, or have one seed, else by t."""
    from scipy.stats import t

    mean, error, freedom = _within(values)
    if len(values) >= ARENAS_FOR_RANKS or not freedom > 0:
        return mean_interval(mean_of_present(values, axis=1))
    half = float(t.ppf((1 + LEVEL) / 2, freedom) * error)
    return Interval(float(mean), float(mean) - half, float(mean) + half)


def signed_rank(differences: _Floats) -> _Floats:
    """Wilcoxon's signed-rank test; zero differences are split between both signs (Demsar 2006, Section 3.1.3)."""
    x = np.asarray(differences, dtype=np.float64)
    if x.shape[-1] < LEAST_BLOCKS:
        return np.full(x.shape[:-1], math.nan)
    found, sizes = np.ones(x.shape[:-1]), np.sort(np.abs(x), axis=-1)
    plain = (sizes[..., 0] > 0) & (np.diff(sizes, axis=-1) > 0).all(axis=-1)
    # SciPy computes another p value for all rows of a call where one of them has ties or zeros.
    tied = ~plain & (sizes[..., -1] > 0)
    few = x.shape[-1] <= _ALL_SIGNS
    for rows, test in ((plain, _wilcoxon), (tied, _by_all_signs if few else _wilcoxon)):
        if rows.any():
            found[rows] = test(x[rows])
    return found


def _wilcoxon(rows: _Floats) -> _Floats:
    """SciPy's signed-rank test of every row [rows, blocks]."""
    from scipy.stats import wilcoxon

    p: _Floats = wilcoxon(rows, zero_method="zsplit", axis=-1).pvalue
    return p


def _by_all_signs(rows: _Floats) -> _Floats:
    """The p values of rows [rows, blocks] with ties or zeros, by all signs that the differences may have. SciPy does so sign
    by sign, which takes a hundred times as long."""
    from scipy.stats import rankdata

    ranks = rankdata(np.abs(rows), axis=-1)  # halves, so that their sums are exact
    seen = (ranks * (np.sign(rows) + 1) / 2).sum(axis=-1, keepdims=True)
    signs = (np.arange(2 ** rows.shape[-1])[:, None] >> np.arange(rows.shape[-1])) & 1
    zeros = np.where(rows == 0, ranks, 0.0)
    sums = (ranks - zeros) @ signs.T + zeros.sum(axis=-1, keepdims=True) / 2
    p: _Floats = 2 * np.minimum((sums <= seen).mean(axis=-1), (sums >= seen).mean(axis=-1))
    return np.minimum(p, 1.0)


def friedman(values: _Floats) -> float:
    """Friedman's p value of `values` [blocks, tuners] without NaN; NaN with fewer than three tuners or two blocks."""
    from scipy.stats import friedmanchisquare

    blocks, k = values.shape
    if k < 3 or blocks < 2:
        return math.nan
    if np.all(values == values[:, :1]):
        return 1.0  # all tied in every block: the statistic would be 0 / 0
    return float(friedmanchisquare(*values.T).pvalue)


def holm(p_values: Sequence[float], weights: Sequence[float] | None = None) -> list[float]:
    """Holm's corrected p values, in the same order; NaN, a test that was not made, stays NaN and counts for nothing.

    A test of greater weight gets a greater share of the chance of an error; without `weights` all have the same.
    """
    weight = [1.0] * len(p_values) if weights is None else weights
    found = [math.nan] * len(p_values)
    tested = sorted((i for i, p in enumerate(p_values) if not math.isnan(p)), key=lambda i: p_values[i] / weight[i])
    so_far = 0.0
    for place, i in enumerate(tested):
        so_far = max(so_far, min(1.0, math.fsum(weight[j] for j in tested[place:]) / weight[i] * p_values[i]))
        found[i] = so_far
    return found


# ---------------------------------------------------------------------------------------------------------- over arenas


def first_chances(values: Sequence[_Floats]) -> _Floats:
    """How often each tuner is first in each arena, [arenas, tuners], from `values` [seeds, tuners] of every arena.

    Tuners that are first together share the seed; one without a run, which is NaN, is never first. Seeds that some tuner of
    the arena has not run yet do not count, unless there are no others.
    """
    found = []
    for arena in values:
        there = ~np.isnan(arena)
        whole = there[:, there.any(axis=0)].all(axis=1)
        arena = arena[whole] if whole.any() else arena
        best = np.nanmin(arena, axis=1, keepdims=True, initial=np.inf)
        first = (arena <= best + _SAME) & np.isfinite(arena)
        found.append((first / np.maximum(first.sum(axis=1, keepdims=True), 1)).mean(axis=0))
    return np.array(found)


def performance_profile(ratio: _Floats) -> tuple[_Floats, _Floats]:
    """The steps of a performance profile (Dolan and More 2002, Section 2) from ratios to the best, [arenas, tuners].

    Returns the ratios tau at which any profile rises, [steps], and for each the share of a tuner's arenas with a ratio of at
    most tau, [steps, tuners]. A ratio is infinite where the target was not reached, and NaN where a tuner does not apply:
    such an arena does not count for it.
    """
    finite = ratio[np.isfinite(ratio)]
    tau = np.unique(np.concatenate([[1.0], finite]))
    applies = np.maximum((~np.isnan(ratio)).sum(axis=0), 1)
    share = np.array([(np.nan_to_num(ratio, nan=np.inf) <= t + 1e-12).sum(axis=0) / applies for t in tau])
    return tau, share
