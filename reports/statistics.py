"""Intervals and ranks over paired seeds, and when to refuse to rank.

What is compared. Every tuner meets the same seeds, and so the same random draws: everything is paired. A *block* is one
(scenario, seed); a run is one tuner in one block. A run that has not reached its target is *censored*: its completion
time is known to be at least the budget, and no more is known (`Bounds`). Ratios and medians are computed on these bounds
by interval arithmetic, so a median is reported as "> budget" as soon as censored runs decide it. A failed run (status
"error") says nothing about the job: it is counted, left out of times, and ranks last in its block.

Intervals. Percentile bootstrap over seeds (Efron and Tibshirani 1993, chapter 13), 9,999 resamples of one fixed random
stream, so equal input gives equal output, and tuners with equally many seeds are resampled alike. The statistic is the
median: of completion times, and of the ratios to the reference with the same seed. The ratio is a median and no geometric
mean, because a median is defined under censoring and its interval keeps its level with few seeds. For n seeds no such
interval can cover the true median more often than 1 - 2^(1-n), the coverage of (lowest, highest): 75 % for 3 seeds, 93.8 %
for 5, and 95 % from 6 on (`coverage_limit`).

Ranks. Friedman's test on ranks within blocks, ties averaged; then Nemenyi's: two tuners differ when their mean
ranks are more than the critical difference q sqrt(k (k + 1) / (6 N)) apart, with q the studentised range at infinite
degrees of freedom over sqrt(2), which bounds the chance of any false difference among all pairs (Demsar 2006, Section
3.2.2). Friedman's test needs three tuners; two are compared by the exact sign test, which asks the same without an
approximation. Tuners within the critical difference share a letter and are not ranked among each other. Nothing is ranked
where Friedman's test finds no difference, or where the critical difference exceeds the largest possible difference of mean
ranks (k - 1). Blocks of one scenario differ in random draws only: no result holds for scenarios that were not run.

Sources: M. Friedman, JASA 32 (1937) 675-701. P. Nemenyi, PhD thesis, Princeton (1963). J. Demsar, "Statistical
comparisons of classifiers over multiple data sets", JMLR 7 (2006) 1-30. B. Efron and R. Tibshirani, "An introduction to
the bootstrap", Chapman & Hall (1993).
"""

from __future__ import annotations

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = [
    "LEVEL",
    "Bounds",
    "Interval",
    "Ranking",
    "censored",
    "coverage_limit",
    "critical_difference",
    "least_blocks",
    "letters",
    "mean_interval",
    "median_interval",
    "rank",
    "rank_keys",
    "ratios",
    "spans",
]

LEVEL = 0.95
_RESAMPLES = 9_999
_STREAM = 20_240_607
# Quantiles cannot interpolate infinities (inf - inf is nan). An open end is this huge number while resampling, and becomes
# infinite again after it.
_HUGE = 1e100  # its square is finite too
_OPEN = 1e50  # above any time: a larger result was interpolated towards `_HUGE`

_Floats: TypeAlias = NDArray[np.float64]


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


def median_interval(values: Bounds, *, level: float = LEVEL, resamples: int = _RESAMPLES) -> Interval:
    """The median and its percentile-bootstrap interval; no interval from a single value."""
    if len(values.least) == 0:
        return Interval(math.nan, math.nan, math.nan, "?")
    top = np.minimum(values.most, _HUGE)
    least, most = float(np.median(values.least)), float(np.median(top))
    low = _bootstrap(values.least, np.median, level, resamples)[0]
    high = _bootstrap(top, np.median, level, resamples)[1]
    if high > _OPEN:
        high = math.inf
    if least == most:
        return Interval(least, low, high, "=")
    if most <= _OPEN:
        return Interval(most, low, high, "<")
    return Interval(least, low, high, ">") if least > 0 else Interval(math.nan, low, high, "?")


def mean_interval(values: Sequence[float] | _Floats, *, level: float = LEVEL, resamples: int = _RESAMPLES) -> Interval:
    """The mean and its percentile-bootstrap interval; no interval from a single value."""
    x = np.asarray(values, dtype=np.float64)
    if x.size == 0:
        return Interval(math.nan, math.nan, math.nan, "?")
    mean = float(x[0] if np.all(x == x[0]) else x.mean())  # rounding may give equal values another mean
    return Interval(mean, *_bootstrap(x, np.mean, level, resamples))


def _bootstrap(x: _Floats, statistic: Any, level: float, resamples: int) -> tuple[float, float]:
    if x.size < 2:
        return math.nan, math.nan
    if np.all(x == x[0]):
        return float(x[0]), float(x[0])
    from scipy.stats import bootstrap

    rng = np.random.default_rng(_STREAM)
    found = bootstrap((x,), statistic, confidence_level=level, n_resamples=resamples, method="percentile", rng=rng)
    return float(found.confidence_interval.low), float(found.confidence_interval.high)


def coverage_limit(values: int) -> float:
    """The highest possible coverage of the true median by an interval from order statistics of so many values."""
    return 1.0 - 2.0 ** (1 - values) if values > 0 else 0.0


# ---------------------------------------------------------------------------------------------------------------- ranks


@dataclass(frozen=True, slots=True)
class Ranking:
    """Mean ranks of tuners, best first, and what they show."""

    tuners: tuple[str, ...]
    ranks: tuple[Interval, ...]  # mean rank over blocks, 1 is best
    groups: tuple[str, ...]  # letters; tuners that share one are not ranked against each other; "" where nothing was tested
    blocks: int
    p_value: float  # of Friedman's test (two tuners: sign test); NaN where it was not run
    critical_difference: float  # NaN with fewer than two tuners or no blocks
    separates: bool  # whether any two tuners differ
    verdict: str  # one sentence for the reader


def rank_keys(seconds: Sequence[float], reached: Sequence[bool], failed: Sequence[bool]) -> _Floats:
    """Keys to rank runs by: reached runs by time, then all censored runs as equal, then all failed runs as equal."""
    key = np.where(np.asarray(reached, dtype=bool), np.asarray(seconds, dtype=np.float64), _HUGE)
    return np.where(np.asarray(failed, dtype=bool), np.inf, key)


def critical_difference(tuners: int, blocks: int, *, level: float = LEVEL) -> float:
    """Nemenyi's critical difference: two tuners differ if their mean ranks differ by more (Demsar 2006, Section 3.2.2)."""
    return _nemenyi_q(tuners, level) * math.sqrt(tuners * (tuners + 1) / (6.0 * blocks))


def least_blocks(tuners: int, *, level: float = LEVEL) -> int:
    """The fewest blocks with which a ranking of so many tuners can separate any two."""
    if tuners == 2:
        return math.ceil(1 - math.log2(1 - level))  # the same tuner first in all blocks: 2^(1-N) must not exceed 1 - level
    most = tuners - 1  # the difference between always first and always last
    return math.floor(_nemenyi_q(tuners, level) ** 2 * tuners * (tuners + 1) / (6.0 * most**2)) + 1


def _nemenyi_q(tuners: int, level: float) -> float:
    from scipy.stats import studentized_range

    return float(studentized_range.ppf(level, tuners, np.inf)) / math.sqrt(2.0)


def letters(mean_ranks: Sequence[float], difference: float) -> tuple[str, ...]:
    """Group letters for ascending `mean_ranks`: a letter for each longest series of ranks within `difference`."""
    series: list[tuple[int, int]] = []
    for i, first in enumerate(mean_ranks):
        # The tolerance keeps tuners together whose difference equals the critical one but for rounding.
        last = max(j for j, other in enumerate(mean_ranks) if other - first <= difference + 1e-12)
        if not series or last > series[-1][1]:
            series.append((i, last))
    return tuple("".join(_letter(g) for g, (a, b) in enumerate(series) if a <= i <= b) for i in range(len(mean_ranks)))


def spans(groups: Sequence[str]) -> list[tuple[int, int]]:
    """First and last place of every letter of `letters` that at least two tuners share."""
    names = [re.findall(r"\[\d+\]|.", group) for group in groups]
    places = {x: [i for i, mine in enumerate(names) if x in mine] for x in sorted({x for mine in names for x in mine})}
    return [(p[0], p[-1]) for p in places.values() if len(p) > 1]


def _letter(index: int) -> str:
    return chr(ord("a") + index) if index < 26 else f"[{index + 1}]"


def rank(tuners: Sequence[str], keys: _Floats, *, level: float = LEVEL, resamples: int = _RESAMPLES) -> Ranking:
    """Rank `tuners` by `keys` of shape [blocks, tuners], lower is better; every block must hold every tuner.

    Raises ValueError where `keys` has another shape or holds NaN.
    """
    from scipy.stats import rankdata

    keys = np.asarray(keys, dtype=np.float64)
    if keys.ndim != 2 or keys.shape[1] != len(tuners) or np.isnan(keys).any():
        raise ValueError(
            f"Cannot rank {len(tuners)} tuners by keys of shape {keys.shape}: give a number per block and tuner."
        )
    blocks, k = keys.shape
    if blocks == 0 or k == 0:
        none = Interval(math.nan, math.nan, math.nan, "?")
        verdict = "Not ranked: no seed was run with every tuner."
        return Ranking(tuple(tuners), (none,) * k, ("",) * k, blocks, math.nan, math.nan, False, verdict)
    ranks = rankdata(keys, axis=1)
    means = ranks.mean(axis=0)
    order = sorted(range(k), key=lambda i: (means[i], tuners[i]))
    cd = critical_difference(k, blocks, level=level) if k > 1 else math.nan
    groups, p_value, verdict = _judge(ranks[:, order], cd, level)
    intervals = tuple(mean_interval(ranks[:, i], level=level, resamples=resamples) for i in order)
    separates = len(set(groups)) > 1
    return Ranking(tuple(tuners[i] for i in order), intervals, groups, blocks, p_value, cd, separates, verdict)


def _judge(ranks: _Floats, cd: float, level: float) -> tuple[tuple[str, ...], float, str]:
    """Groups, p-value and verdict for `ranks` [blocks, tuners] whose columns are in order of their means."""
    blocks, k = ranks.shape
    if k < 2:
        return ("",) * k, math.nan, "Not ranked: there is only one tuner."
    seen = f"{blocks} paired run{'s' if blocks > 1 else ''}"
    needed = least_blocks(k, level=level)
    if blocks < needed:
        return ("",) * k, math.nan, f"Not ranked: {seen} cannot separate {k} tuners; at least {needed} are needed."
    test, p_value = _test(ranks)
    found = f"{test}, p {_p_text(p_value)}, {seen}"
    if p_value >= 1 - level:
        return ("a",) * k, p_value, f"Not ranked: no difference was found ({found})."
    if k == 2:
        return ("a", "b"), p_value, f"The two tuners differ ({found})."
    groups = letters(ranks.mean(axis=0).tolist(), cd)
    if len(set(groups)) == 1:
        verdict = f"Not ranked: the tuners differ ({found}), but no two by more than the critical difference {cd:.2f}."
    else:
        verdict = f"The tuners differ ({found}). Those that share a letter are not ranked (critical difference {cd:.2f})."
    return groups, p_value, verdict


def _test(ranks: _Floats) -> tuple[str, float]:
    """The test's name and p-value."""
    from scipy.stats import binomtest, friedmanchisquare

    if ranks.shape[1] == 2:
        wins, losses = int((ranks[:, 0] < ranks[:, 1]).sum()), int((ranks[:, 0] > ranks[:, 1]).sum())
        return "sign test", float(binomtest(wins, wins + losses).pvalue) if wins + losses else 1.0
    if np.all(ranks == ranks[:, :1]):
        return "Friedman", 1.0  # all tied in every block: the statistic would be 0 / 0
    return "Friedman", float(friedmanchisquare(*ranks.T).pvalue)


def _p_text(p_value: float) -> str:
    return "< 0.001" if p_value < 0.001 else f"= {p_value:.3f}" if p_value < 0.1 else f"= {p_value:.2f}"
