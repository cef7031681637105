"""From runs to rows to the terminal: what is counted, what is compared, what is shown."""

import io
import math

import polars as pl
import pytest
from rich.console import Console

from reports import tables
from reports.tables import SUMMARY, interval_text, quantity, ranking_of, relative, render, summary, winner
from tests.support.made_up import contest, frames, from_times, score_row

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def plausible():
    return summary(contest())


def row(frame, tuner):
    return frame.row(by_predicate=pl.col("tuner") == tuner, named=True)


def shown(frame, width=100):
    console = Console(width=width, color_system=None, file=io.StringIO())
    for table in render(frame, columns=width):
        console.print(table)
    return console.file.getvalue()


def test_every_public_name_exists():
    assert len(set(tables.__all__)) == len(tables.__all__)
    assert all(hasattr(tables, name) for name in tables.__all__)


def test_a_comparison_has_a_row_per_scenario_and_tuner_in_order_of_rank():
    found = summary(contest(scenarios=("away", "home"), seeds=4))
    assert found.schema == pl.Schema(SUMMARY)
    assert found.height == 2 * 9
    for _, rows in found.group_by("scenario", maintain_order=True):
        assert rows["tuner"][-1] == "best_fixed"
        contestants = rows.filter(pl.col("role") != "oracle")
        assert contestants["mean_rank"].is_sorted()
        assert contestants["mean_rank"].sum() == pytest.approx(8 * 9 / 2)


def test_same_results_same_summary():
    results = contest(tuners=("fixed", "rlp"), seeds=3)
    assert summary(results).equals(summary(results))


def test_medians_and_ratios_are_those_of_paired_seeds():
    found = summary(from_times({"fixed": [100, 200, 300], "x": [50, 220, 240]}))
    x = row(found, "x")
    assert x["completion_seconds"] == 220
    assert x["ratio"] == pytest.approx(0.8)  # of 0.5, 1.1, 0.8: no ratio of medians, which is 1.1
    assert (x["ratio_low"], x["ratio_high"]) == pytest.approx((0.5, 1.1))
    assert (x["completion_low"], x["completion_high"]) == (50, 240)
    assert row(found, "fixed")["ratio"] == 1.0


def test_regret_is_time_over_the_oracles_less_one():
    found = summary(from_times({"best_fixed": [50, 100], "x": [75, 150]}))
    assert row(found, "x")["regret"] == pytest.approx(0.5)
    assert row(found, "best_fixed")["regret"] == 0.0
    assert math.isnan(row(found, "x")["ratio"])


def test_the_oracle_is_not_ranked():
    times = {"best_fixed": [1] * 9, "x": [2] * 9, "y": [3] * 9, "fixed": [4] * 9}
    found = summary(from_times(times))
    assert row(found, "best_fixed")["group"] == ""
    assert math.isnan(row(found, "best_fixed")["mean_rank"])
    assert row(found, "x")["mean_rank"] == 1.0


def test_censored_runs_are_at_least_the_budget():
    found = summary(from_times({"fixed": [100] * 5, "x": [INF, INF, INF, 200, 50]}))
    x = row(found, "x")
    assert (x["reached"], x["runs"], x["failed"]) == (2, 5, 0)
    assert (x["completion_seconds"], x["completion_bound"], x["completion_high"]) == (600, ">", INF)
    assert (x["ratio"], x["ratio_bound"]) == (6.0, ">")
    assert interval_text(x, "completion_seconds", "completion") == (">\u00a0600", "≥\u00a050.0")


def test_failed_runs_are_counted_left_out_of_times_and_last_in_ranks():
    found = summary(from_times({"fixed": [100, 100, 100], "x": [NAN, 10, 10], "y": [INF, INF, 90], "z": [NAN] * 3}))
    x, z = row(found, "x"), row(found, "z")
    assert (x["completion_seconds"], x["failed"], x["reached"]) == (10, 1, 2)
    assert x["mean_rank"] == pytest.approx((3.5 + 1 + 1) / 3)
    assert math.isnan(z["completion_seconds"])
    assert math.isnan(z["reconfigurations"])
    assert "x (1 of 3), z (3 of 3)" in shown(found)


def test_a_seed_that_not_all_ran_is_no_block():
    rows = [score_row("s", "x", i, 10) for i in range(4)] + [score_row("s", "y", i, 20) for i in range(1, 4)]
    assert ranking_of(frames(rows).scores).blocks == 3


def test_across_scenarios_only_those_are_ranked_that_played_everywhere():
    rows = [score_row(s, t, i, 10) for s in ("p", "q") for t in "xyz" for i in range(3) if (s, t) != ("q", "z")]
    found = ranking_of(frames(rows).scores)
    assert found.tuners == ("x", "y")
    assert found.blocks == 6


def test_infinite_losses_do_not_reach_the_means():
    rows = [score_row("s", "x", i, 10, final_loss=v, final_accuracy=NAN) for i, v in enumerate([1.0, INF, NAN, 3.0])]
    found = summary(frames(rows))
    assert found["final_loss"][0] == 2.0
    assert math.isnan(found["final_accuracy"][0])
    assert not tables.shows_accuracy(found)
    assert "loss" in shown(found)


def test_host_seconds_that_are_missing_are_shown_as_none():
    found = summary(frames([score_row("s", "x", 0, 10)], host=[]))
    assert math.isnan(found["thinking_seconds"][0])


def test_no_runs_give_no_table():
    found = summary(frames([]))
    assert found.height == 0
    assert render(found) == []


def test_one_seed_says_so():
    text = shown(summary(from_times({"fixed": [5.0], "lone": [3.0]})))
    assert "no intervals" in text
    assert "at least 6 are needed" in text


def test_few_seeds_say_what_their_intervals_are_worth():
    assert "75 % of the time at best" in shown(summary(from_times({"fixed": [5.0, 4, 6], "x": [3.0, 2, 4]})))


@pytest.mark.parametrize("width", [80, 100, 140])
def test_a_table_fits_the_terminal_and_loses_nothing(width, plausible):
    text = shown(plausible, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for tuner in ("cruise", "best_fixed", "0.64"):
        assert tuner in text
    if width >= 100:
        line = next(line for line in text.splitlines() if line.strip().startswith("cruise"))
        assert line.split()[-1] == "a"
        assert "(146\u2013191)" in line


def test_names_are_text_not_markup():
    text = shown(summary(from_times({"fixed": [5.0], "[red]x[/red]": [3.0]})), 140)
    assert "[red]x[/red]" in text


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


# --------------------------------------------------------------------------------------------------------------- winner


def test_the_winner_has_the_lowest_mean_rank_and_is_no_oracle():
    found = summary(from_times({"fixed": [100, 200, 300], "x": [50, 120, 240], "best_fixed": [10, 10, 10]}))
    assert winner(found, found["scenario"][0]) == "x"


def test_a_tuner_that_never_reached_the_target_does_not_win():
    found = summary(from_times({"fixed": [100, 200], "x": [50, 220]}))
    scenario = found["scenario"][0]
    with pytest.raises(ValueError, match=r"no finished run of it; scenarios: " + scenario):
        winner(found, "elsewhere")
    missed = found.with_columns(reached=pl.lit(0, pl.Int64))
    with pytest.raises(ValueError, match=r"Cannot name the winner on .*no tuner reached the target without a failed run"):
        winner(missed, scenario)
    failed = found.with_columns(failed=pl.when(pl.col("tuner") == "x").then(1).otherwise(0).cast(pl.Int64))
    assert winner(failed, scenario) == "fixed"
