"""Numbers and intervals as text."""

import math

import pytest

from reports.verdicts.numbers import interval_text, percent, quantity, relative

NAN, INF = math.nan, math.inf


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (1234.5, "1234"),
        (99.96, "100"),
        (12.34, "12.3"),
        (1.2345, "1.23"),
        (0.1234, "0.123"),
        (0.000123, "0.00012"),
        (NAN, "-"),
        (INF, "∞"),
        (-INF, "-∞"),
        (-42.0, "-42.0"),
    ],
)
def test_quantities_have_three_digits(value, text):
    assert quantity(value) == text


@pytest.mark.parametrize(("value", "text"), [(1.0, "1.00"), (0.5, "0.50"), (12.34, "12.3"), (-0.5, "-0.50")])
def test_ratios_have_two_digits_after_the_point(value, text):
    assert relative(value) == text


@pytest.mark.parametrize(
    ("value", "text"), [(0.0, "0%"), (1 / 786, "<1%"), (0.25, "25%"), (0.994, "99%"), (785 / 786, ">99%"), (1.0, "100%")]
)
def test_a_share_is_none_or_all_only_where_it_is(value, text):
    assert percent(value) == text


@pytest.mark.parametrize(
    ("estimate", "low", "high", "text"),
    [(-0.14, -0.19, -0.15, "-0.19 to -0.15"), (0.1, -0.2, 0.3, "-0.20 to 0.30"), (0.4, 0.38, 0.47, "0.38\u20130.47")],
)
def test_an_interval_with_a_negative_end_is_written_with_a_word(estimate, low, high, text):
    values = {"regret": estimate, "regret_low": low, "regret_high": high, "regret_bound": "="}
    assert interval_text(values, "regret", "regret")[1] == text
