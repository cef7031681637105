"""Verdicts over several arenas: blocks, families, tuners that do not apply, and the sentences about them."""

import math

import numpy as np
import polars as pl
import pytest

from reports.verdicts import arenas
from reports.verdicts.arenas import ARENAS, answer, arenas_of, families, family_of, profile, sentences
from reports.verdicts.statistics import compare, signed_rank
from tests.support.made_up import contest, frames, score_row
from traces.schema import NOT_APPLICABLE, SCORES
from traces.store import Results

NAMES = tuple(f"learning-v1-{i:04}" for i in range(12))


def played(times, scenarios=NAMES, seeds=2, noise=0.02):
    """Results of {tuner: seconds}, where `seconds` may be a function of the arena's number; None: the tuner did not play."""
    rng = np.random.default_rng(3)
    rows = []
    for i, scenario in enumerate(scenarios):
        for tuner, seconds in times.items():
            at = seconds(i) if callable(seconds) else seconds
            rows += [
                score_row(scenario, tuner, seed, at * (1 + 0.1 * i) * rng.lognormal(sigma=noise))
                for seed in range(seeds)
                if at is not None
            ]
    return frames(rows)


def row(found, tuner):
    return found.rows.row(by_predicate=pl.col("tuner") == tuner, named=True)


def test_every_public_name_exists():
    assert all(hasattr(arenas, name) for name in arenas.__all__)


def test_a_tuner_that_applies_to_one_arena_does_not_decide_who_leads_the_others():
    values = np.log([[0.5, 0.9, np.nan]] * 7 + [[1.0, 0.8, 0.7]])
    found = compare(("steady", "lucky", "rare"), values, signed_rank, may_lead=("steady", "lucky"))
    assert found.leader == "steady"
    assert found.means[found.tuners.index("steady")] == pytest.approx(values[:, 0].mean())


def test_only_of_drawn_arenas_is_the_same_expected_of_others():
    for names, family, drawn in ((NAMES[:2], "learning", True), (("boat-a-alexnet", "boat-b-alexnet"), "boat", False)):
        said = sentences(arenas_of(played({"fixed": 5.0, "x": 3.0}, names), names, family))
        assert ("are draws of one family: for other arenas" in said[-1]) == drawn


def test_the_name_of_an_arena_says_its_family():
    assert family_of("learning-v1-0007") == "learning"
    assert family_of("boat-c-speechnet[global_batch_size=8192]") == family_of("boat-digits") == "boat"
    assert family_of("my-own") == ""
    names = ["placement-v1-0001", "learning-v1-0001", "learning-v1-0000", "digits"]
    assert families(names) == {"": names, "learning": ["learning-v1-0001", "learning-v1-0000"]}
    assert families(list(NAMES)) == {"": list(NAMES)}
    assert families(["digits"]) == {}


def test_the_ratio_is_the_geometric_mean_over_arenas_of_times_over_the_oracles():
    found = arenas_of(played({"fixed": 100, "x": lambda i: 20 if i % 2 else 80, "best_fixed": 20}, noise=0.0), NAMES)
    assert found.base == "best_fixed"
    assert found.rows.schema == pl.Schema(ARENAS)
    assert row(found, "x")["ratio"] == pytest.approx(2.0)  # of 1 and 4
    assert row(found, "fixed")["ratio"] == pytest.approx(5.0)
    assert row(found, "x")["ratio_low"] < 2.0 < row(found, "x")["ratio_high"]
    assert "best_fixed" not in found.rows["tuner"]


UNLIKE = {"fixed": 100, "x": lambda i: 150 if i % 2 else 50, "y": 120}  # x is better in three of five arenas
OWN = ("one", "two", "three", "four", "five")


def test_draws_are_blocks_however_many_seeds_there_are():
    few, many = (arenas_of(played(UNLIKE, NAMES[:5], seeds=n), NAMES[:5]) for n in (1, 20))
    for found in (few, many):
        assert found.comparison.blocks == 5
        assert row(found, "x")["p_reference"] > 0.3  # of the next draw, nothing is known
        assert row(found, "x")["ratio_high"] > 1.0
        assert "where a paired t test over arenas says so" in sentences(found)[0]


def test_of_a_few_arenas_that_nobody_drew_seeds_tell():
    """Each is asked about, so that how unlike they are is no chance. By their ranks, five could tell nothing."""
    found = arenas_of(played(UNLIKE, OWN, seeds=5), OWN)
    assert found.comparison.blocks == 5
    assert row(found, "x")["p_reference"] < 1e-6
    assert row(found, "x")["ratio"] == pytest.approx((0.5**3 * 1.5**2) ** 0.2, rel=0.02)
    assert row(found, "x")["ratio_high"] / row(found, "x")["ratio_low"] == pytest.approx(1.02, abs=0.02)
    assert answer(found).before == "Use "
    assert "intervals over the seeds of these arenas. Two tuners differ where a t test of the mean" in sentences(found)[0]
    assert not any("Friedman" in said for said in sentences(found))  # it would take arenas for draws
    alone = arenas_of(played(UNLIKE, OWN, seeds=1), OWN)  # one seed does not tell how an arena varies
    assert row(alone, "x")["p_reference"] > 0.3
    assert "where a paired t test over arenas says so" in sentences(alone)[0]


def test_arenas_that_have_more_seeds_than_others_count_once():
    rows = pl.concat([played(UNLIKE, OWN[:4], seeds=2).scores, played(UNLIKE, OWN, seeds=9).scores.filter(scenario="five")])
    found = arenas_of(Results({}, rows, *_rest(played(UNLIKE))), OWN)
    assert row(found, "x")["ratio"] == pytest.approx((0.5**3 * 1.5**2) ** 0.2, rel=0.03)
    assert row(found, "x")["p_reference"] < 0.01


def test_of_a_dozen_arenas_ranks_tell_whatever_they_are():
    found = arenas_of(played({"fixed": 100, "x": 50}, names := [f"own {i}" for i in range(12)], seeds=3), names)
    assert row(found, "x")["p_reference"] == pytest.approx(2 / 2**12)
    assert "where Wilcoxon's signed-rank test over arenas says so" in sentences(found)[0]


def test_a_clear_leader_is_the_answer():
    found = arenas_of(played({"fixed": 100, "x": 50, "y": 90, "best_fixed": 40}), NAMES)
    said = answer(found)
    assert (said.before, said.tuner) == ("Use ", "x")
    assert str(said).endswith("over 12 arenas, first in 100% of them. All others are told apart from it.")
    assert row(found, "x")["first"] == 1.0
    assert row(found, "x")["mean_rank"] == 1.0
    assert found.friedman_p < 0.001
    assert "Faster than fixed in the arenas that both apply to: x, y." in sentences(found)
    assert row(found, "y")["to_leader"] == pytest.approx(90 / 50, rel=0.05)
    assert row(found, "y")["to_reference"] == pytest.approx(0.9, rel=0.05)


def test_a_tuner_whose_runs_all_failed_is_behind_however_few_arenas_there_are():
    rows = [score_row(name, tuner, 0, at) for name in NAMES[:3] for tuner, at in (("fixed", 9.0), ("x", 5.0))]
    rows += [score_row(name, "broken", 0, 600.0, status="error", reason="it broke") for name in NAMES[:3]]
    found = arenas_of(frames(rows), NAMES[:3])
    assert (row(found, "broken")["standing"], row(found, "broken")["failed"]) == ("behind", 3)
    assert math.isnan(row(found, "broken")["overhead_share"])
    assert "Failed runs count with the budget: 3 of broken." in sentences(found)
    assert not any("Slower" in sentence for sentence in sentences(found))
    assert str(answer(found)).endswith(" All others are told apart from it.")


def test_an_arena_in_which_every_run_failed_takes_the_lead_from_nobody():
    times = (("fixed", 100.0), ("x", 50.0))
    rows = [score_row(name, tuner, 0, at + i) for i, name in enumerate(NAMES[:4]) for tuner, at in times]
    rows += [score_row(NAMES[4], tuner, 0, 600.0, status="error", reason="it broke") for tuner, _ in times]
    found = arenas_of(frames(rows), NAMES[:5])
    assert (answer(found).before, answer(found).tuner) == ("Use ", "x")
    assert (found.arenas, found.lost) == (NAMES[:4], (NAMES[4],))
    assert f"In {NAMES[4]} every run failed, so that it is not counted." in sentences(found)
    assert row(found, "x")["failed"] == 0
    only = arenas_of(frames(rows), NAMES[4:5])
    assert (only.arenas, only.lost) == (NAMES[4:5], ())
    assert answer(only).after == ""


def test_all_others_are_told_apart_only_where_there_are_some():
    found = arenas_of(played({"fixed": 100, "x": 50}, NAMES[:2]), NAMES[:2])
    few = answer(found)
    assert "So few arenas and seeds show no difference" in sentences(found)[1]
    assert (few.before, few.tuner) == ("No tuner is told apart from fixed. The least mean time has ", "x")
    assert "told apart from it" not in few.after


def test_faster_than_fixed_is_said_of_the_arenas_that_both_apply_to():
    """`rare` takes six times as long as the oracle, fixed three times over all arenas, eight in those of `rare`."""
    hard = {"fixed": lambda i: 80 if i < 6 else 12, "x": 11, "rare": lambda i: 60 if i < 6 else None, "best_fixed": 10}
    found = arenas_of(played(hard), NAMES)
    assert row(found, "rare")["ratio"] > row(found, "fixed")["ratio"]
    assert row(found, "rare")["to_reference"] == pytest.approx(0.75, rel=0.05)
    assert "Faster than fixed in the arenas that both apply to: x, rare." in sentences(found)
    assert not any(said.startswith("Slower") for said in sentences(found))


def test_a_tuner_of_few_arenas_is_named_apart_from_those_that_could_lead():
    rare = {"rare": lambda i: (45, 56, 44, 58)[i] if i < 4 else None}
    found = arenas_of(played({"fixed": 100, "x": 50, "y": 51} | rare), NAMES)
    said = str(answer(found))
    assert "Not told apart from it: y." in said
    assert said.endswith("Not told apart where they apply, which is in fewer arenas: rare (4).")
    assert "(where both apply to fewer than 12, a paired t test over arenas) says so" in sentences(found)[0]
    alone = str(answer(arenas_of(played({"fixed": 100, "x": 50} | rare), NAMES)))
    assert ". All others that apply to nearly as many arenas are told apart from it. Not told apart where" in alone


def test_the_first_line_and_the_sentences_agree_on_fixed():
    """With twelve arenas and 24 tuners, Wilcoxon's smallest p value is 0.02 where pairs with fixed get half of the chance of
    an error, and 0.13 where all pairs get the same: were both in use, one line would deny what the other says."""
    rng = np.random.default_rng(0)
    speeds = {f"t{i}": lambda _, i=i: (60 + i) * rng.lognormal(sigma=0.4) for i in range(22)}
    found = arenas_of(played({"fixed": 300, "x": 20} | speeds, NAMES[:12]), NAMES[:12])
    assert found.comparison.leader == "x"
    assert row(found, "fixed")["p_leader"] == row(found, "x")["p_reference"] == pytest.approx(2 / 2**12 * 23 * 2)
    assert row(found, "t20")["p_leader"] > 0.05
    assert answer(found).before == "Use "
    assert any(s.startswith("Faster than fixed") and "x" in s for s in sentences(found))
    assert "and 16 others." in str(answer(found))


def test_the_first_line_denies_no_difference_to_fixed_that_a_sentence_tells():
    found = arenas_of(played({"fixed": 100, "x": lambda i: 30 if i % 2 else 120, "slow": 300}), NAMES)
    assert answer(found).before == "No tuner is told to be faster than fixed. The least mean time has "
    assert any(said.startswith("Slower than fixed") and "slow" in said for said in sentences(found))
    found = arenas_of(played({"fixed": 100, "x": lambda i: 30 if i % 2 else 120, "steady": 90}), NAMES)
    assert answer(found).before == "Faster than fixed: steady. The least mean time has "
    assert "Not told apart from it: steady, fixed." in str(answer(found))


@pytest.mark.parametrize(
    ("count", "said"), [(0, ""), (1, f"In {NAMES[0]} USD"), (3, "In 3 of them USD"), (12, "In all of them USD")]
)
def test_arenas_that_minimise_cost_are_said_to(count, said):
    rows = [
        score_row(name, tuner, 0, seconds, usd=usd, minimise="usd" if i < count else "seconds")
        for i, name in enumerate(NAMES)
        for tuner, seconds, usd in (("fixed", 9.0, 2.0), ("x", 8.0, 1.0))
    ]
    found = arenas_of(frames(rows), NAMES)
    assert len(found.of_cost) == count
    assert sum(" USD count in place of time" in s for s in sentences(found)) == bool(count)
    assert any(s.startswith(said) for s in sentences(found))
    said_better, what = ("Cheaper than fixed", "Costs are") if count == 12 else ("Faster than fixed", "Times are")
    assert f"{said_better} in the arenas that both apply to: x." in sentences(found)
    assert what in sentences(found)[0]


def test_the_leader_is_best_against_each_of_the_others_that_may_lead():
    """`mostly` and `often` each leave one arena alone, in which `always` is best: other pairs count that arena as ever."""
    times = {
        "fixed": 100,
        "always": lambda i: 10 if i in (0, 1) else 50,
        "mostly": lambda i: None if i == 0 else 48,
        "often": lambda i: None if i == 1 else 49,
    }
    found = arenas_of(played(times, noise=0.0), NAMES)
    assert found.comparison.leader == "always"
    assert row(found, "mostly")["to_leader"] > 1


def test_where_a_tuner_does_nothing_it_does_not_apply():
    results = played({"fixed": 100, "x": 50})
    # half plays in every arena, but has the runs of fixed in every second one; idle has them in all.
    fixed = results.scores.filter(pl.col("tuner") == "fixed")
    half = fixed.with_columns(
        tuner=pl.lit("half"),
        completion_seconds=pl.when(pl.col("scenario").is_in(NAMES[::2])).then(pl.col("completion_seconds") * 0.7).otherwise(
            pl.col("completion_seconds")
        ),
    )  # fmt: skip
    more = [half, fixed.with_columns(tuner=pl.lit("idle"))]
    found = arenas_of(Results(results.manifest, pl.concat([results.scores, *more]), *_rest(results)), NAMES)
    assert row(found, "half")["arenas"] == 6
    assert np.isnan(found.log_ratio[:, found.rows["tuner"].to_list().index("half")]).sum() == 6
    assert found.absent == {"idle": "its runs are those of fixed"}
    assert found.comparison.leader == "x"  # of those that apply to nearly all


def test_rows_are_in_the_order_of_the_ratios_shown_and_every_tuner_has_a_rank():
    """Where `often` does not apply, which is in arenas that are hard for all, it would have been slower than `always`."""
    hard = {"fixed": 100, "always": lambda i: 90 if i < 4 else 40, "often": lambda i: None if i < 4 else 42}
    found = arenas_of(played(hard | {"best_fixed": 30}, noise=0.0), NAMES)
    assert found.rows["tuner"].to_list() == ["often", "always", "fixed"]
    assert found.rows["ratio"].is_sorted()
    assert row(found, "always")["mean_rank"] == 1.0
    assert row(found, "often")["mean_rank"] == 2.0
    assert row(found, "fixed")["mean_rank"] == pytest.approx((4 * 2 + 8 * 3) / 12)
    assert np.allclose(np.exp(np.nanmean(found.log_ratio, axis=0)), found.rows["ratio"])


def test_a_tuner_that_leaves_one_arena_in_ten_alone_may_lead():
    results = played({"fixed": 100, "x": 50})
    fixed = results.scores.filter(pl.col("tuner") == "fixed")
    mostly = fixed.with_columns(
        tuner=pl.lit("mostly"),
        completion_seconds=pl.col("completion_seconds") * pl.when(pl.col("scenario") == NAMES[0]).then(1.0).otherwise(0.2),
    )
    found = arenas_of(Results(results.manifest, pl.concat([results.scores, mostly]), *_rest(results)), NAMES)
    assert row(found, "mostly")["arenas"] == 11
    assert found.comparison.leader == "mostly"
    said = answer(found)
    assert (said.before, said.tuner) == ("Use ", "mostly")
    assert "(it applies to 11)" in said.after


def test_what_tuners_spend_is_the_same_to_the_last_digit_in_any_order_of_the_runs():
    """Polars adds up groups in parts, whose order differs from time to time where there are many rows."""
    results = played({"fixed": 100, "x": 50, "y": 70})
    spent = np.random.default_rng(1).uniform(0.0, 9.0, results.scores.height)
    scores = results.scores.with_columns(overhead_seconds=pl.Series(spent), trial_seconds=pl.Series(spent[::-1]))
    once, again = (
        arenas_of(Results({}, frame, *_rest(results)), NAMES).rows
        for frame in (scores, scores.sample(fraction=1.0, shuffle=True, seed=5))
    )
    assert once["overhead_share"].sum() > 0
    assert again.equals(once)


def _with_leavers(results, left, **ratios):
    """`results`, and tuners that have the runs of fixed in the scenario `left`, and elsewhere such ratios to their times."""
    fixed = results.scores.filter(pl.col("tuner") == "fixed")
    at = {t: pl.when(scenario=left).then(1.0).otherwise(ratio + 0.002 * pl.col("seed")) for t, ratio in ratios.items()}
    more = [fixed.with_columns(tuner=pl.lit(t), completion_seconds=pl.col("completion_seconds") * at[t]) for t in at]
    return Results(results.manifest, pl.concat([results.scores, *more]), *_rest(results))


@pytest.mark.parametrize("wide", [(60, 90, 400), (60, 90, 95)])
def test_the_leader_is_no_worse_than_a_tuner_that_leaves_one_of_a_few_arenas_as_it_is(wide):
    """`wide`, which applies to all three, is worse than `fixed` over them, or better than it."""
    results = played({"fixed": 100, "wide": lambda i: wide[i]}, OWN[:3], seeds=5)
    found = arenas_of(_with_leavers(results, OWN[2], often=0.2, hasty=0.5), OWN[:3])
    assert {t: row(found, t)["arenas"] for t in found.rows["tuner"]} == {"fixed": 3, "wide": 3, "often": 2, "hasty": 2}
    assert row(found, "often")["p_reference"] < 0.001
    assert (row(found, "wide")["to_reference"] < 1) == (wide[2] == 95)
    said = answer(found)
    assert (said.before, said.tuner) == ("Use ", "often")
    assert "over the 2 of 3 arenas that it applies to, first in 100% of them (elsewhere it leaves the job" in said.after
    assert said.after.endswith(" All others are told apart from it.")
    assert row(found, "hasty")["standing"] == row(found, "fixed")["standing"] == "behind"
    assert row(found, "hasty")["to_leader"] == pytest.approx(0.5 / 0.2, rel=0.05)


def test_of_those_that_leave_an_arena_as_it_is_the_one_of_least_time_leads_though_another_is_surer():
    results = played({"fixed": 100, "wide": lambda i: (150, 190, 400)[i]}, OWN[:3], seeds=3)
    results = _with_leavers(results, OWN[2], steady=0.8, wild=0.4)
    rough = pl.when((pl.col("tuner") == "wild") & (pl.col("scenario") != OWN[2])).then(3.0 - pl.col("seed")).otherwise(1.0)
    scores = results.scores.with_columns(completion_seconds=pl.col("completion_seconds") * rough)
    found = arenas_of(Results(results.manifest, scores, *_rest(results)), OWN[:3])
    assert row(found, "wild")["p_reference"] > 0.05 > row(found, "steady")["p_reference"]
    said = answer(found)
    assert (said.before, said.tuner) == ("Faster than fixed: steady. The least mean time has ", "wild")
    assert "Not told apart from it: steady, fixed, wide." in said.after


def test_a_tuner_that_shares_no_arena_with_the_leader_is_not_said_to_be_close_to_it():
    rare = {"rare": lambda i: 99 if i == 2 else None}
    results = played({"fixed": 100, "wide": lambda i: (60, 90, 400)[i]} | rare, OWN[:3], seeds=5)
    said = answer(arenas_of(_with_leavers(results, OWN[2], often=0.2), OWN[:3]))
    assert said.tuner == "often"
    assert said.after.endswith(
        " All others are told apart from it. Not compared with it, as they share no arena with it: rare."
    )


def test_a_tuner_that_is_better_where_it_applies_does_not_lead_one_that_gains_more_elsewhere():
    results = played({"fixed": 100, "wide": lambda i: (60, 60, 5)[i]}, OWN[:3], seeds=5)
    found = arenas_of(_with_leavers(results, OWN[2], often=0.5), OWN[:3])
    assert row(found, "often")["standing"] == "ahead"
    assert (answer(found).before, answer(found).tuner) == ("Use ", "wide")
    assert answer(found).after.endswith(" Better where they apply: often.")


def test_a_tuner_that_does_nothing_changes_nothing_over_arenas():
    results = played({"fixed": 100, "x": 50, "y": 80})
    idle = results.scores.filter(pl.col("tuner") == "fixed").with_columns(tuner=pl.lit("idle"))
    more = Results(results.manifest, pl.concat([results.scores, idle]), *_rest(results))
    before, after = arenas_of(results, NAMES), arenas_of(more, NAMES)
    assert after.rows.equals(before.rows)
    assert answer(after) == answer(before)
    assert [s for s in sentences(after) if "idle" not in s] == sentences(before)


def _rest(results):
    return results.evaluations, results.settings, results.host


def test_fixed_is_not_compared_with_itself_and_idle_tuners_are_left_out():
    results = played({"fixed": 50, "x": 100})
    idle = results.scores.filter(pl.col("tuner") == "fixed").with_columns(tuner=pl.lit("idle"))
    found = arenas_of(Results(results.manifest, pl.concat([results.scores, idle]), *_rest(results)), NAMES)
    assert str(answer(found)).startswith("Keep fixed: no tuner is faster over 12 arenas; it is first in 100% of them.")
    assert "Left out: idle (its runs are those of fixed)." in sentences(found)


def test_arenas_in_which_nobody_reached_the_target_are_named():
    results = played({"fixed": 100, "x": 50})
    lost = pl.col("scenario") == NAMES[3]
    scores = results.scores.with_columns(
        reached=pl.col("reached") & ~lost, status=pl.when(lost).then(pl.lit("budget")).otherwise(pl.col("status"))
    )
    said = sentences(arenas_of(Results(results.manifest, scores, *_rest(results)), NAMES))
    assert f"In {NAMES[3]} no run reached the target; all tuners count the budget there, and are equal." in said


def test_tuners_with_nothing_to_tune_are_named_with_the_reason():
    results = played({"fixed": 100, "x": 50})
    rows = [score_row(n, "asp", 0, 1.0, status=NOT_APPLICABLE, reason="The policy is held.") for n in NAMES]
    absent = pl.DataFrame(rows, schema=SCORES)
    found = arenas_of(Results(results.manifest, results.scores, *_rest(results), absent), NAMES)
    assert "Not applicable in any arena: asp (The policy is held)." in sentences(found)


def test_a_tuner_that_applies_nowhere_has_the_reason_of_most_arenas():
    results = played({"fixed": 100, "x": 50})
    held, same = "The policy is held.", "The job starts with it."
    rows = [
        score_row(name, "asp", seed, 1.0, status=NOT_APPLICABLE, reason=same if i < 2 else held)
        for i, name in enumerate(NAMES)
        for seed in range(2)
    ]
    absent = pl.DataFrame(rows, schema=SCORES)
    found = arenas_of(Results(results.manifest, results.scores, *_rest(results), absent), NAMES)
    said = "Not applicable in any arena: asp (The policy is held; in 2 of 12 arenas another reason)."
    assert said in sentences(found)


def test_a_profile_counts_arenas_without_a_reached_target_as_never():
    found = arenas_of(played({"fixed": 100, "x": lambda i: 50 if i < 6 else 1e9}), NAMES)
    tau, share = profile(found)
    x = found.rows["tuner"].to_list().index("x")
    assert share[0, x] == share[-1, x] == 0.5
    assert tau[0] == 1.0


def test_without_the_oracle_the_base_is_fixed_and_without_both_there_is_none():
    assert arenas_of(played({"fixed": 100, "x": 50}), NAMES).base == "fixed"
    lone = arenas_of(played({"x": 50, "y": 70}), NAMES)
    assert lone.base == ""
    assert answer(lone).tuner == "x"
    assert math.isnan(row(lone, "x")["p_reference"])


def test_no_run_is_refused():
    with pytest.raises(ValueError, match="there is no run of elsewhere"):
        arenas_of(contest(seeds=1), ["elsewhere"])
