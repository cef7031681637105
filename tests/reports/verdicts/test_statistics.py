"""Intervals and ranks against theory, published tables and simulation."""

import math

import numpy as np
import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from scipy.stats import binom, friedmanchisquare, wilcoxon

from reports.verdicts import statistics
from reports.verdicts.statistics import (
    Bounds,
    censored,
    compare,
    coverage_limit,
    first_chances,
    friedman,
    holm,
    mean_interval,
    median_interval,
    paired_t,
    performance_profile,
    ratios,
    signed_rank,
)
from tests.support.marks import slow


def exact(values):
    return censored(values, np.ones(len(values), dtype=bool))


def test_every_public_name_exists():
    assert len(set(statistics.__all__)) == len(statistics.__all__)
    assert all(hasattr(statistics, name) for name in statistics.__all__)


# ------------------------------------------------------------------------------------------------------------ intervals


def test_interval_is_deterministic():
    x = exact(np.random.default_rng(3).exponential(size=7))
    assert median_interval(x) == median_interval(x)


@pytest.mark.parametrize("n", [5, slow(9), slow(13)])
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
@example([(1.0, True), (955428.5727807629, True), (955428.5727807629, True)])  # the end was one bit below the estimate
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


# ---------------------------------------------------------------------------------------------------------- differences


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


def test_demsars_examples_of_wilcoxon_and_friedman():
    """Section 3.1.3: C4.5 and C4.5+m differ at 5 % (the smaller sum of ranks is 12, and 21 would do). Section 3.2.2: average
    ranks 3.143, 2.000, 2.893, 1.964, Friedman's statistic 9.28 without correction for ties; the tuners differ at 5 %."""
    assert 0.005 < signed_rank(AUC[:, 0] - AUC[:, 1]) < 0.05
    assert friedman(-AUC) == pytest.approx(friedmanchisquare(*AUC.T).pvalue)
    assert friedman(-AUC) < 0.05


def test_holm_multiplies_by_the_tests_that_are_left():
    assert holm([0.01, 0.04, 0.03, math.nan]) == pytest.approx([0.03, 0.06, 0.06, math.nan], nan_ok=True)
    assert holm([0.9, 0.8]) == [1.0, 1.0]
    assert holm([]) == []
    # Weights 2, 1, 1: 0.01 of 4/2, then 0.01 of 2/1; the last alone.
    assert holm([0.01, 0.01, 0.3], [2, 1, 1]) == pytest.approx([0.02, 0.02, 0.3])


@given(st.lists(st.floats(0, 1), max_size=12))
def test_holm_never_lowers_and_keeps_the_order(p_values):
    found = holm(p_values)
    assert all(p <= q <= 1 for p, q in zip(p_values, found, strict=True))
    order = sorted(range(len(found)), key=lambda i: p_values[i])
    assert [found[i] for i in order] == sorted(found)


def test_a_difference_on_all_of_six_seeds_is_told_apart_from_twenty_others():
    """asp takes 0.38 to 0.47 of the time of fixed with every one of six seeds: no number of other tuners hides that."""
    rng = np.random.default_rng(0)
    names = ["fixed", "asp", *(f"other{i}" for i in range(18))]
    values = 8.0 + rng.normal(scale=0.2, size=(6, len(names)))
    values[:, 1] = values[:, 0] + np.log([0.37, 0.48, 0.40, 0.40, 0.38, 0.47])
    found = compare(names, values, paired_t, reference="fixed")
    assert found.leader == "asp"
    assert found.standing("fixed") == "behind"
    assert found.p_reference["asp"] < 0.001


def test_order_leader_and_standing():
    values = np.array([[3.0, 1.0, 2.0], [3.1, 1.2, 2.0], [3.0, 1.1, 2.1], [3.2, 1.0, 2.2]])
    found = compare(["c", "a", "b"], values, paired_t, reference="b")
    assert found.tuners == ("a", "b", "c")
    assert [found.standing(t) for t in found.tuners] == ["leader", "behind", "behind"]
    assert set(found.p_reference) == {"a", "c"}
    assert (found.blocks, found.pairs) == (4, 3)
    slower = compare(["c", "a", "b"], values, paired_t, may_lead=["c"])
    assert [slower.standing(t) for t in slower.tuners] == ["ahead", "ahead", "leader"]
    assert slower.p_reference == {}


@pytest.mark.parametrize("test", [paired_t, signed_rank])
def test_last_digits_neither_lead_nor_tell_apart(test):
    """`a` is less than `fixed` in every block, by what two programs round the same sum to."""
    fixed = np.log(np.linspace(9.0, 11.0, 20))
    found = compare(["a", "fixed"], np.stack([fixed - 4e-16, fixed], axis=1), test, reference="fixed")
    assert found.leader == "fixed"
    assert found.tuners == ("fixed", "a")
    assert found.standing("a") == "not told apart"


def test_a_pair_has_one_p_value_whoever_leads():
    rng = np.random.default_rng(2)
    values = rng.normal(scale=0.2, size=(8, 5)) + np.array([1.0, 0.5, 1.1, 1.2, 1.3])
    names = ["fixed", "x", "a", "b", "c"]
    found = compare(names, values, paired_t, reference="fixed")
    pairs = {(i, j): float(paired_t(values[:, i] - values[:, j])) for i in range(5) for j in range(i + 1, 5)}
    # Six pairs without fixed, and four with it: each half of them together.
    expected = dict(zip(pairs, holm(list(pairs.values()), [6 / 4 if i == 0 else 1 for i, _ in pairs]), strict=True))
    assert found.p_reference == pytest.approx({names[i]: expected[0, i] for i in range(1, 5)})
    assert found.p_leader == pytest.approx({"fixed": expected[0, 1]} | {names[i]: expected[1, i] for i in range(2, 5)})
    slow = compare(names, values, paired_t, reference="fixed", may_lead=["fixed"])
    assert slow.p_leader == slow.p_reference
    assert slow.standing("x") == "ahead"


def test_pairs_are_compared_on_the_blocks_of_both():
    values = np.array([[0.0, 1.0, math.nan], [0.1, 1.1, math.nan], [0.0, 1.2, 5.0], [0.1, 1.0, 5.1]])
    found = compare(["x", "y", "z"], values, paired_t)
    assert found.standing("y") == "behind"
    assert found.standing("z") == "not told apart"  # two blocks in common tell nothing
    assert math.isnan(found.p_leader["z"])
    assert found.pairs == 1


def test_few_blocks_and_equal_values_tell_nothing():
    assert math.isnan(paired_t(np.array([1.0, 2.0])))
    assert math.isnan(signed_rank(np.array([1.0, 2.0])))
    assert paired_t(np.zeros(6)) == signed_rank(np.zeros(6)) == 1.0
    assert paired_t(np.full(4, 0.3)) == 0.0  # the same on every seed: an exact difference
    assert friedman(np.ones((5, 3))) == 1.0
    assert math.isnan(friedman(np.ones((5, 2))))
    assert compare([], np.ones((0, 0)), paired_t).leader == ""
    assert compare(["x"], np.ones((5, 1)), paired_t).tuners == ("x",)


@pytest.mark.parametrize("blocks", [5, 20, 60])
@pytest.mark.parametrize("test", [paired_t, signed_rank])
def test_many_pairs_at_once_have_the_p_values_that_each_has_alone(test, blocks):
    """To the last digit, also beside pairs with ties and zeros, for which SciPy takes other formulas."""
    rng = np.random.default_rng(blocks)
    rows = rng.normal(size=(200, blocks))
    rows[::3] = np.round(rows[::3], 1)
    rows[::10] = 0.0
    assert test(rows).tolist() == [float(test(row)) for row in rows]


@pytest.mark.parametrize("blocks", [3, 7])
def test_rows_with_ties_and_zeros_have_scipys_p_values(blocks):
    rng = np.random.default_rng(blocks)
    rows = np.round(rng.normal(size=(12, blocks)), 1)
    rows[:, 0] = 0.0
    rows[::2, 1] = -rows[::2, 2]
    rows[5] = -np.abs(rows[5])
    expected = [float(wilcoxon(row, zero_method="zsplit").pvalue) for row in rows]
    assert signed_rank(rows).tolist() == pytest.approx(expected, abs=1e-12)


def test_pairs_with_the_same_blocks_are_tested_in_one_call():
    rng = np.random.default_rng(0)
    values, shapes = rng.normal(size=(12, 5)), []
    values[3, 4] = math.nan

    def counted(differences):
        shapes.append(differences.shape)
        return signed_rank(differences)

    found = compare(list("abcde"), values, counted, reference="a")
    assert sorted(shapes) == [(4, 11), (6, 12)]
    alone = [float(signed_rank(d[~np.isnan(d)])) for d in (values[:, [0]] - values[:, 1:]).T]
    assert found.p_reference == dict(zip("bcde", holm(alone), strict=True))


def test_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"Cannot compare 2 tuners by values of shape \(5, 3\)"):
        compare(["x", "y"], np.ones((5, 3)), paired_t)


def test_who_is_first_shares_ties():
    found = first_chances([np.array([[1.0, 1.0, 2.0], [1.0, 3.0, 4.0]]), np.array([[2.0, 1.0, 3.0]])])
    assert found.tolist() == [[0.75, 0.25, 0.0], [0.0, 1.0, 0.0]]
    assert first_chances([np.array([[2.0, 2.0 + 4e-16]])]).tolist() == [[0.5, 0.5]]


def test_seeds_that_some_tuner_has_not_run_yet_do_not_say_who_is_first():
    """The first tuner is the best wherever it has run; the last does not apply."""
    unfinished = np.array([[1.0, 2.0, math.nan], [1.0, 3.0, math.nan], [math.nan, 2.0, math.nan]])
    assert first_chances([unfinished]).tolist() == [[1.0, 0.0, 0.0]]
    no_seed_of_both = np.array([[math.nan, 1.0], [2.0, math.nan]])
    assert first_chances([no_seed_of_both]).tolist() == [[0.5, 0.5]]


def test_a_performance_profile_counts_arenas_within_a_factor():
    """Dolan and More's definition by hand: of three arenas, x is best in two and never solves the third."""
    ratio = np.array([[1.0, 2.0], [1.0, 1.5], [math.inf, 1.0], [math.nan, 1.0]])
    tau, share = performance_profile(ratio)
    assert tau.tolist() == [1.0, 1.5, 2.0]
    assert share[:, 0].tolist() == pytest.approx([2 / 3, 2 / 3, 2 / 3])
    assert share[:, 1].tolist() == [0.5, 0.75, 1.0]


def test_bounds_are_pairs():
    assert Bounds(np.ones(1), np.ones(1)).least == 1
