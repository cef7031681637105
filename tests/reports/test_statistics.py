"""Intervals and ranks against theory, published tables and simulation."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import binom, friedmanchisquare

from reports import statistics
from reports.statistics import (
    Bounds,
    censored,
    coverage_limit,
    critical_difference,
    least_blocks,
    letters,
    mean_interval,
    median_interval,
    rank,
    rank_keys,
    ratios,
    spans,
)


def exact(values):
    return censored(values, np.ones(len(values), dtype=bool))


def test_every_public_name_exists():
    assert len(set(statistics.__all__)) == len(statistics.__all__)
    assert all(hasattr(statistics, name) for name in statistics.__all__)


# ------------------------------------------------------------------------------------------------------------ intervals


def test_interval_is_deterministic():
    x = exact(np.random.default_rng(3).exponential(size=7))
    assert median_interval(x) == median_interval(x)


@pytest.mark.parametrize("n", [5, 9, 13])
def test_interval_covers_the_median_as_often_as_its_order_statistics_say(n):
    """The percentile bootstrap of a median picks order statistics k and n + 1 - k, which cover with a binomial chance."""
    rng = np.random.default_rng(n)
    runs = 300
    covered, expected = 0, []
    for _ in range(runs):
        x = rng.lognormal(size=n)
        found = median_interval(exact(x), resamples=999)
        covered += found.low <= 1.0 <= found.high
        below = int(np.sum(np.sort(x) < found.low - 1e-12))  # so many values lie under the interval
        above = int(np.sum(np.sort(x) > found.high + 1e-12))
        expected.append(1 - binom.cdf(below, n, 0.5) - binom.cdf(above, n, 0.5))
    chance = float(np.mean(expected))
    assert abs(covered / runs - chance) < 3.5 * math.sqrt(chance * (1 - chance) / runs)
    assert chance > 0.9


@pytest.mark.parametrize("n", [2, 3, 5])
def test_few_seeds_give_the_whole_range_and_its_stated_coverage(n):
    x = np.random.default_rng(1).normal(size=n)
    found = median_interval(exact(x))
    assert (found.low, found.high) == (x.min(), x.max())
    assert coverage_limit(n) == pytest.approx(1 - 2 * 0.5**n)


def test_coverage_limit_passes_95_percent_from_six_seeds_on():
    assert coverage_limit(5) < 0.95 < coverage_limit(6)
    assert coverage_limit(0) == coverage_limit(1) == 0.0


def test_mean_interval_covers_as_the_bootstrap_does_for_a_normal_mean():
    """With n values the percentile interval reaches z s sqrt((n-1)/n) / sqrt(n) to each side: a t interval."""
    from scipy.stats import t

    n, runs = 20, 300
    rng = np.random.default_rng(0)
    hits = 0
    for _ in range(runs):
        found = mean_interval(rng.normal(size=n), resamples=999)
        hits += found.low <= 0 <= found.high
    chance = 1 - 2 * t.sf(1.96 * math.sqrt((n - 1) / n), n - 1)
    assert abs(hits / runs - chance) < 3.5 * math.sqrt(chance * (1 - chance) / runs)


def test_one_value_has_no_interval_and_none_has_no_estimate():
    found = median_interval(exact([7.0]))
    assert found.estimate == 7.0
    assert math.isnan(found.low)
    assert math.isnan(found.high)
    assert math.isnan(median_interval(exact([])).estimate)
    assert math.isnan(mean_interval([]).estimate)


def test_constant_values_have_an_interval_of_no_width():
    assert median_interval(exact([0.1] * 6)) == (0.1, 0.1, 0.1, "=")
    assert mean_interval([0.1] * 6) == (0.1, 0.1, 0.1, "=")


def test_median_is_open_exactly_when_censored_runs_decide_it():
    few = median_interval(censored([10, 20, 30, 100, 100], [True, True, True, False, False]))
    assert (few.estimate, few.bound, few.high) == (30, "=", math.inf)
    most = median_interval(censored([10, 20, 100, 100, 100], [True, True, False, False, False]))
    assert (most.estimate, most.bound, most.high) == (100, ">", math.inf)
    assert most.low == 10


def test_all_censored_is_more_than_the_budget():
    assert median_interval(censored([100.0] * 5, [False] * 5)) == (100, 100, math.inf, ">")


def test_ratios_carry_what_is_known():
    ours = censored([50, 100, 50, 100], [True, False, True, False])
    theirs = censored([100, 50, 100, 100], [True, True, False, False])
    found = ratios(ours, theirs)
    assert found.least.tolist() == [0.5, 2.0, 0.0, 0.0]
    assert found.most.tolist() == [0.5, math.inf, 0.5, math.inf]


def test_a_ratio_to_a_censored_reference_is_less_than_stated():
    found = median_interval(ratios(exact([50.0, 40.0, 60.0]), censored([100.0] * 3, [False] * 3)))
    assert (found.estimate, found.bound) == (0.5, "<")
    assert found.low == 0.0


def test_two_censored_sides_say_nothing():
    both = censored([100.0] * 3, [False] * 3)
    found = median_interval(ratios(both, both))
    assert found.bound == "?"
    assert math.isnan(found.estimate)


def test_a_ratio_to_zero_says_nothing():
    found = ratios(exact([0.0, 3.0]), exact([0.0, 0.0]))
    assert found.least.tolist() == [0, 0]
    assert found.most.tolist() == [math.inf, math.inf]


@given(st.lists(st.tuples(st.floats(1, 1e6), st.booleans()), min_size=1, max_size=9))
@settings(max_examples=30, deadline=None)
def test_an_estimate_lies_in_its_interval(rows):
    budget = 1e6
    seconds = [value if reached else budget for value, reached in rows]
    found = median_interval(censored(seconds, [reached for _, reached in rows]), resamples=99)
    if len(rows) > 1:
        assert found.low <= found.estimate <= found.high
    assert found.bound in "=>"


def test_pairing_narrows_the_ratio():
    """Luck that all tuners share cancels in paired ratios, and does not in unpaired ones."""
    rng = np.random.default_rng(5)
    shared = rng.lognormal(sigma=1.0, size=12)
    ours, theirs = 0.5 * shared * rng.lognormal(sigma=0.01, size=12), shared * rng.lognormal(sigma=0.01, size=12)
    paired = median_interval(ratios(exact(ours), exact(theirs)))
    shuffled = median_interval(ratios(exact(ours), exact(np.roll(theirs, 1))))
    assert paired.high - paired.low < 0.1 * (shuffled.high - shuffled.low)
    assert paired.low <= 0.5 * 1.02
    assert paired.high >= 0.5 * 0.98


# ---------------------------------------------------------------------------------------------------------------- ranks


@pytest.mark.parametrize(
    ("tuners", "q"),
    [(2, 1.960), (3, 2.343), (4, 2.569), (5, 2.728), (6, 2.850), (7, 2.949), (8, 3.031), (9, 3.102), (10, 3.164)],
)
def test_critical_difference_is_demsars_table_5a(tuners, q):
    assert critical_difference(tuners, 10) == pytest.approx(q * math.sqrt(tuners * (tuners + 1) / 60), rel=5e-4)


def test_demsars_example_has_the_printed_critical_difference():
    """Section 3.2.2: four classifiers on 14 data sets, "the critical difference is 2.569 sqrt(4 5 / 6 14) = 1.25"."""
    assert critical_difference(4, 14) == pytest.approx(1.25, abs=0.005)


# Demsar 2006, Table 6: AUC of C4.5, C4.5+m, C4.5+cf, C4.5+m+cf on 14 data sets.
AUC = np.array(
    [
        [0.763, 0.768, 0.771, 0.798],
        [0.599, 0.591, 0.590, 0.569],
        [0.954, 0.971, 0.968, 0.967],
        [0.628, 0.661, 0.654, 0.657],
        [0.882, 0.888, 0.886, 0.898],
        [0.936, 0.931, 0.916, 0.931],
        [0.661, 0.668, 0.609, 0.685],
        [0.583, 0.583, 0.563, 0.625],
        [0.775, 0.838, 0.866, 0.875],
        [1.000, 1.000, 1.000, 1.000],
        [0.940, 0.962, 0.965, 0.962],
        [0.619, 0.666, 0.614, 0.669],
        [0.972, 0.981, 0.9751, 0.975],
        [0.957, 0.978, 0.946, 0.970],
    ]
)


def test_demsars_example_gives_the_printed_ranks_test_and_groups():
    """Average ranks 3.143, 2.000, 2.893, 1.964; Friedman 9.28 without ties corrected; C4.5+m+cf and C4.5+m beat nobody
    but, at 0.05, C4.5 and C4.5+cf stay within 1.25 of C4.5+m."""
    found = rank(["plain", "m", "cf", "both"], -AUC)
    assert found.tuners == ("both", "m", "cf", "plain")
    assert [i.estimate for i in found.ranks] == pytest.approx([1.964, 2.000, 2.893, 3.143], abs=5e-4)
    assert found.p_value == pytest.approx(friedmanchisquare(*AUC.T).pvalue)
    assert found.p_value < 0.05
    assert found.blocks == 14
    assert found.groups == ("a", "a", "a", "a")
    assert not found.separates
    assert found.verdict.startswith("Not ranked")


def test_clear_differences_are_ranked():
    keys = np.tile([1.0, 2.0, 3.0], (12, 1))
    found = rank(["x", "y", "z"], keys)
    assert found.groups == ("a", "b", "c") or found.groups == ("a", "ab", "b")
    assert found.separates
    assert found.ranks[0] == (1, 1, 1, "=")
    assert "p < 0.001" in found.verdict


def test_no_difference_is_found_as_rarely_as_the_level_says():
    rng = np.random.default_rng(11)
    runs = 150
    false = sum(rank("abcd", rng.normal(size=(12, 4)), resamples=9).separates for _ in range(runs))
    assert false / runs < 0.05 + 3 * math.sqrt(0.05 * 0.95 / runs)


def test_letters_are_maximal_stretches():
    assert letters([1.0, 1.5, 2.2, 4.0], 1.0) == ("a", "ab", "b", "c")
    assert letters([1.0, 1.1, 1.2], 1.0) == ("a", "a", "a")
    assert letters([1.0, 3.0], 1.0) == ("a", "b")
    assert letters([2.0], 1.0) == ("a",)


@given(st.lists(st.floats(1, 40), min_size=1, max_size=40), st.floats(0, 20))
def test_a_letter_is_shared_exactly_within_the_difference(means, difference):
    means = sorted(means)
    groups = letters(means, difference)
    names = [set(g.replace("]", "] ").split()) if "[" in g else set(g) for g in groups]
    for i, a in enumerate(names):
        for j, b in enumerate(names):
            if all("[" not in g for g in groups):
                assert bool(a & b) == (abs(means[i] - means[j]) <= difference + 1e-12)


def test_spans_join_exactly_what_shares_a_letter():
    assert spans(("a", "ab", "b", "c")) == [(0, 1), (1, 2)]
    assert spans(("a", "b")) == []
    assert spans(("[27]", "[27][28]", "[28]")) == [(0, 1), (1, 2)]


@pytest.mark.parametrize("tuners", range(2, 11))
def test_least_blocks_is_where_the_largest_difference_first_shows(tuners):
    n = least_blocks(tuners)
    names = [f"t{i}" for i in range(tuners)]
    first_to_last = np.tile(np.arange(tuners, dtype=float), (n, 1))
    assert rank(names, first_to_last).separates
    fewer = rank(names, first_to_last[:-1])
    assert not fewer.separates
    assert set(fewer.groups) == {""}
    assert f"at least {n} are needed" in fewer.verdict


def test_two_tuners_take_the_sign_test():
    keys = np.array([[1.0, 2.0]] * 9 + [[2.0, 1.0]])
    found = rank(["x", "y"], keys)
    assert found.p_value == pytest.approx(2 * 11 / 1024)  # 0 or 1 of 10, either way
    assert found.groups == ("a", "b")


def test_one_tuner_no_tuner_and_no_block_are_not_ranked():
    assert rank(["x"], np.ones((5, 1))).verdict.startswith("Not ranked: there is only one tuner")
    assert rank(["x", "y"], np.ones((0, 2))).groups == ("", "")
    assert rank([], np.ones((0, 0))).tuners == ()


@pytest.mark.parametrize("tuners", [2, 3])
def test_all_tied_is_no_difference(tuners):
    found = rank("xyz"[:tuners], np.ones((20, tuners)))
    assert found.p_value == 1.0
    assert set(found.groups) == {"a"}


def test_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"Cannot rank 2 tuners by keys of shape \(5, 3\)"):
        rank(["x", "y"], np.ones((5, 3)))


def test_reached_before_censored_before_failed():
    key = rank_keys([600.0, 600.0, 10.0, 600.0], [True, False, True, False], [False, False, False, True])
    assert np.argsort(key).tolist() == [2, 0, 1, 3]
    assert rank_keys([600.0, 300.0], [False, False], [False, False]).tolist() == [1e100, 1e100]


def test_bounds_are_pairs():
    assert Bounds(np.ones(1), np.ones(1)).least == 1
