"""From runs to rows: what is counted, what is compared, who leads."""

import math

import polars as pl
import pytest

from reports.verdicts.conclusions import identical
from reports.verdicts.numbers import interval_text
from reports.verdicts.summary import SUMMARY, same_runs, shows_accuracy, summary, winner
from tests.support.made_up import contest, frames, from_times, score_row

NAN, INF = math.nan, math.inf


def row(frame, tuner):
    return frame.row(by_predicate=pl.col("tuner") == tuner, named=True)


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
    last = 50 * (1 - 2e-16)  # the double below 50
    less = row(summary(from_times({"best_fixed": [50, 50], "x": [last, last]})), "x")
    assert str(less["regret"]) == "0.0"  # neither -2e-16 nor -0.0
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


def test_an_interval_that_leaves_all_open_does_not_look_like_a_bound():
    open_ended = {"ratio": 1.0, "ratio_low": 0.0, "ratio_high": INF, "ratio_bound": ">"}
    assert interval_text(open_ended, "ratio", "ratio") == (">\u00a01.00", "0\u2013∞")
    regret = {f"regret{end}": value for end, value in (("", 0.5), ("_low", 0.0), ("_high", INF), ("_bound", ">"))}
    assert interval_text(regret, "regret", "regret")[1] == "≥\u00a00"  # a regret may be negative


def test_failed_runs_are_counted_and_left_out_of_times_and_their_tuner_cannot_lead():
    found = summary(from_times({"fixed": [100, 100, 100], "x": [NAN, 10, 10], "y": [INF, INF, 90], "z": [NAN] * 3}))
    x, z = row(found, "x"), row(found, "z")
    assert (x["completion_seconds"], x["failed"], x["reached"]) == (10, 1, 2)
    assert row(found, "fixed")["standing"] == "leader"
    assert math.isnan(z["completion_seconds"])
    assert math.isnan(z["reconfigurations"])


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
    assert identical(found) == [
        "Same runs as fixed, which changes nothing: idle.",
        "Same runs as asp: same_as_asp.",
    ]


def test_failed_runs_are_like_no_others():
    assert same_runs(from_times({"fixed": [10, 20], "x": [NAN, NAN], "y": [NAN, NAN]}).scores) == {}


def test_runs_are_the_same_but_for_last_digits_and_for_how_a_loss_that_is_none_is_told():
    """Runs of a release are of several processors. Of a model that has diverged, one version told nan, one infinity."""
    made = from_times({"fixed": [10, 20], "idle": [10, 20], "x": [10, 20]}).scores
    seconds, tuner = pl.col("completion_seconds"), pl.col("tuner")
    digits = made.with_columns(seconds * (1 + 1e-9 * (tuner == "idle") + 1e-4 * (tuner == "x")))
    assert same_runs(digits) == {"idle": "fixed"}
    told = tuner.replace_strict({"fixed": math.nan, "idle": math.inf, "x": 1.0})
    assert same_runs(made.with_columns(final_loss=told)) == {"idle": "fixed"}


def test_a_tuner_with_fewer_seeds_than_another_has_its_runs_where_all_that_it_has_are_the_same():
    """As where a comparison is going on, or has been merged with one of more seeds."""
    scores = from_times({"fixed": [10, 20, 30], "idle": [10, 20, 0], "a": [5, 0, 0], "b": [5, 6, 0], "c": [10, 6, 7]}).scores
    assert same_runs(scores.filter(pl.col("completion_seconds") > 0)) == {"idle": "fixed", "a": "b"}


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
    assert not shows_accuracy(found)


def test_host_seconds_that_are_missing_are_shown_as_none():
    found = summary(frames([score_row("s", "x", 0, 10)], host=[]))
    assert math.isnan(found["thinking_seconds"][0])


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
