"""From runs to rows to the terminal: what is counted, what is compared, what is shown."""

import io
import math

import polars as pl
import pytest
from rich.console import Console

from reports.output import terminal
from reports.verdicts import tables
from reports.verdicts.tables import SUMMARY, interval_text, quantity, relative, render, same_runs, summary, winner
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


@pytest.mark.parametrize("width", [80, 100, 120])
@pytest.mark.parametrize("tuner", ["fast", "random_search"])
def test_no_number_and_no_word_of_a_table_with_costs_and_regrets_is_divided(width, tuner):
    rows = [score_row("s", tuner, i, 30.25 + 5 * i, usd=0.0405 + i / 1000, overhead_seconds=1346.0) for i in range(6)]
    rows += [score_row("s", "fixed", i, 1201.0 + i, budget=2e4, usd=2.5, overhead_seconds=1346.0) for i in range(6)]
    rows += [score_row("s", "slow", i, INF, budget=2e4, usd=25.5) for i in range(6)]
    rows += [score_row("s", "best_fixed", i, 2.5 + i / 8, usd=0.0315) for i in range(6)]
    text = shown(summary(frames(rows)), width)
    assert max(map(len, text.splitlines())) <= width
    for whole in (
        "(0.027\u20130.044)",
        "(0.0021\u20130.0025)",
        "leads",
        "no",
        "0.043",
        "2.50",
        "1346",
        "regret",
        ">\u00a020000",
    ):
        assert whole in text, whole


def test_the_terminal_says_why_no_run_reached_the_target():
    rows = []
    for clocks, tuner in enumerate(("fixed", "x")):
        ended = enumerate(("Out.", "Over.", "Over."))
        rows += [score_row("s", tuner, seed, INF, reason=why, clocks=clocks) for seed, why in ended]
        rows.append(score_row("t", tuner, 0, 5.0, clocks=clocks))
    out = Console(width=100, color_system=None, file=io.StringIO())
    terminal.show(frames(rows), out)
    assert "in any run.\n4 of 6 runs: Over.\n" in out.file.getvalue()
    assert out.file.getvalue().count(" runs: ") == 1


def test_a_comparison_has_a_row_per_scenario_and_tuner_in_order_of_time():
    found = summary(contest(scenarios=("away", "home"), seeds=4))
    assert found.schema == pl.Schema(SUMMARY)
    assert found.height == 2 * 9
    for _, rows in found.group_by("scenario", maintain_order=True):
        assert rows["tuner"][-1] == "best_fixed"
        contestants = rows.filter(pl.col("role") != "oracle")
        assert contestants["standing"].to_list().count("leader") == 1
        whole = contestants.filter(pl.col("failed") == 0)
        assert whole["standing"][0] == "leader"
        assert whole["completion_seconds"][0] == whole["completion_seconds"].min()


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


def test_the_oracle_is_not_compared():
    times = {"best_fixed": [1, 1.1, 1] * 3, "x": [2, 2.1, 2] * 3, "y": [3] * 9, "fixed": [4] * 9}
    found = summary(from_times(times))
    assert row(found, "best_fixed")["standing"] == ""
    assert math.isnan(row(found, "best_fixed")["p_leader"])
    assert row(found, "x")["standing"] == "leader"
    assert row(found, "y")["standing"] == "behind"


def test_censored_runs_are_at_least_the_budget():
    found = summary(from_times({"fixed": [100] * 5, "x": [INF, INF, INF, 200, 50]}))
    x = row(found, "x")
    assert (x["reached"], x["runs"], x["failed"]) == (2, 5, 0)
    assert (x["completion_seconds"], x["completion_bound"], x["completion_high"]) == (600, ">", INF)
    assert (x["ratio"], x["ratio_bound"]) == (6.0, ">")
    assert interval_text(x, "completion_seconds", "completion") == (">\u00a0600", "≥\u00a050.0")


def test_failed_runs_are_counted_and_left_out_of_times_and_their_tuner_cannot_lead():
    found = summary(from_times({"fixed": [100, 100, 100], "x": [NAN, 10, 10], "y": [INF, INF, 90], "z": [NAN] * 3}))
    x, z = row(found, "x"), row(found, "z")
    assert (x["completion_seconds"], x["failed"], x["reached"]) == (10, 1, 2)
    assert row(found, "fixed")["standing"] == "leader"
    assert math.isnan(z["completion_seconds"])
    assert math.isnan(z["reconfigurations"])
    assert "x (1 of 3), z (3 of 3)" in shown(found)


@pytest.mark.parametrize("seeds", [1, 2, 5])
def test_who_has_failed_in_every_run_could_not_lead_however_few_they_are(seeds):
    found = summary(from_times({"fixed": [100.0, 101.0, 99.0, 98.0, 97.0][:seeds], "x": [NAN] * seeds}))
    assert [row(found, tuner)["standing"] for tuner in ("fixed", "x")] == ["leader", "behind"]


def test_tuners_with_identical_runs_count_once():
    times = {"fixed": [10, 20, 30], "idle": [10, 20, 30], "asp": [5, 6, 7], "same_as_asp": [5, 6, 7], "near": [5, 6, 7.5]}
    found = summary(from_times(times))
    assert [(t, one) for t, one in found.select("tuner", "same_as").iter_rows() if one] == [
        ("idle", "fixed"),
        ("same_as_asp", "asp"),
    ]
    assert row(found, "idle")["role"] == "same"
    assert row(found, "idle")["standing"] == ""
    text = shown(found)
    assert "Same runs as fixed, which changes nothing: idle." in text
    assert "Same runs as asp: same_as_asp." in text


def test_failed_runs_are_like_no_others():
    assert same_runs(from_times({"fixed": [10, 20], "x": [NAN, NAN], "y": [NAN, NAN]}).scores) == {}


def test_a_tuner_that_does_nothing_changes_nothing_that_is_said_of_others():
    times = {"fixed": [100, 120, 90, 110, 105, 95], "x": [50, 61, 44, 56, 50, 47], "y": [80, 130, 91, 100, 99, 97]}
    before = summary(from_times(times))
    after = summary(from_times(times | {"idle": times["fixed"], "lazy": times["fixed"]}))
    assert after.filter(~pl.col("tuner").is_in(["idle", "lazy"])).equals(before)


def test_seeds_that_one_tuner_lacks_still_count_for_the_others():
    rows = [score_row("s", "x", i, 10 + i) for i in range(4)] + [score_row("s", "y", i, 20 + 2.2 * i) for i in range(1, 4)]
    found = summary(frames(rows))
    assert row(found, "x")["runs"] == 4
    assert row(found, "y")["p_leader"] < 0.05


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
    assert "fewer than three seeds" in text


def test_few_seeds_say_what_their_intervals_are_worth():
    text = " ".join(shown(summary(from_times({"fixed": [5.0, 4, 6], "x": [3.0, 2, 4]}))).split())
    assert "intervals cover the true median 75 % of the time at best" in text
    assert "95 %" not in text


@pytest.mark.parametrize("width", [50, 60, 80, 100, 140])
def test_a_table_fits_the_terminal_and_loses_nothing(width, plausible):
    text = shown(plausible, width)
    assert max(map(len, text.splitlines())) <= width
    assert "…" not in text
    for tuner in ("cruise", "best_fixed", "0.64"):
        assert tuner in text
    if width >= 100:
        line = next(line for line in text.splitlines() if line.strip().startswith("cruise"))
        assert line.split()[-1] == "leads"
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


def test_the_winner_has_the_least_mean_time_and_is_no_oracle():
    found = summary(from_times({"fixed": [100, 200, 300], "x": [50, 120, 240], "best_fixed": [10, 10, 10]}))
    assert winner(found, found["scenario"][0]) == "x"


def test_a_tuner_that_never_reached_the_target_does_not_win():
    found = summary(from_times({"fixed": [100, 200], "x": [50, 220]}))
    scenario = found["scenario"][0]
    with pytest.raises(ValueError, match=r"no finished run of it; scenarios: " + scenario):
        winner(found, "elsewhere")
    censored = summary(from_times({"fixed": [INF, INF], "x": [INF, INF]}))
    with pytest.raises(ValueError, match=r"Cannot name the winner on .*no tuner reached the target without a failed run"):
        winner(censored, scenario)
    assert winner(summary(from_times({"fixed": [100, 200], "x": [NAN, 20]})), scenario) == "fixed"


@pytest.mark.parametrize(
    ("estimate", "low", "high", "text"),
    [(-0.14, -0.19, -0.15, "-0.19 to -0.15"), (0.1, -0.2, 0.3, "-0.20 to 0.30"), (0.4, 0.38, 0.47, "0.38\u20130.47")],
)
def test_an_interval_with_a_negative_end_is_written_with_a_word(estimate, low, high, text):
    values = {"regret": estimate, "regret_low": low, "regret_high": high, "regret_bound": "="}
    assert interval_text(values, "regret", "regret")[1] == text


def test_the_notes_say_what_the_tests_compare():
    rows = tables.summary(contest(tuners=("fixed", "tpe", "cruise"), seeds=6))
    tested = "Could lead: not told apart from the leader (paired t tests of log times, Holm over pairs, 5 %)."
    assert tested in tables.notes(rows)
