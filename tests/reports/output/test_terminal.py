"""What is printed: the answers, and tables that fit."""

import io
import math
from dataclasses import replace

import polars as pl
import pytest
from rich.console import Console

from reports.output import terminal
from reports.output.terminal_table import notes, render
from reports.verdicts.conclusions import missing_runs
from reports.verdicts.summary import summary
from tests.support.made_up import contest, frames, from_times, score_row
from traces.schema import NOT_APPLICABLE, SCORES

NAN, INF = math.nan, math.inf


@pytest.fixture(scope="module")
def plausible():
    return summary(contest())


def shown(frame, width=100):
    console = Console(width=width, color_system=None, file=io.StringIO())
    for table in render(frame, columns=width):
        console.print(table)
    return console.file.getvalue()


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


def test_no_runs_give_no_table():
    found = summary(frames([]))
    assert found.height == 0
    assert render(found) == []
    out = Console(width=100, color_system=None, file=io.StringIO())
    terminal.show(frames([]), out)
    assert out.file.getvalue() == "No run is in this folder yet.\n"


def of_part(rows, **manifest):
    """Results of a comparison that has only these rows yet."""
    made = frames(rows)
    return replace(made, manifest=made.manifest | manifest)


def test_runs_that_are_missing_are_named():
    rows = [score_row("s", "fixed", seed, 5.0) for seed in range(6)] + [score_row("s", "a", seed, 4.0) for seed in (1, 4)]
    half = of_part(rows, scenarios=["s", "t"], tuners=["fixed", "a", "b", "c"], seeds_of={"s": 6, "t": 1})
    assert half.missing["s"] == {"a": (0, 2, 3, 5), "b": (0, 1, 2, 3, 4, 5), "c": (0, 1, 2, 3, 4, 5)}
    out = Console(width=100, color_system=None, file=io.StringIO())
    terminal.show(half, out)
    said = " ".join(out.file.getvalue().split())
    assert "s: 16 of 24 runs are missing: a (seeds 0, 2, 3 and 5), b and c (seeds 0 to 5)." in said
    assert "t: 4 of 4 runs are missing: fixed, a, b and c (seed 0)." in said


def test_what_was_not_run_on_purpose_is_not_missing():
    """Tuners that do not apply, oracles on draws of constants, and a deployed job, whose only run has any seed."""
    idle = pl.DataFrame([score_row("s", "a", 0, 1.0, status=NOT_APPLICABLE)], schema=SCORES)
    drawn = pl.DataFrame([score_row("s+draw1", "fixed", 0, 1.0), score_row("s+draw1", "a", 0, 1.0)], schema=SCORES)
    every = {"tuners": ["fixed", "a", "best_fixed"], "oracles": ["best_fixed"], "draws": {"s": ["s+draw1"]}}
    rows = [score_row("s", tuner, 0, 1.0) for tuner in ("fixed", "best_fixed")]
    whole = of_part(rows, scenarios=["s", "s+draw1"], seeds_of={"s": 1, "s+draw1": 1}, **every)
    assert replace(whole, not_applicable=idle, draws=drawn).missing == {}
    assert replace(whole, draws=drawn[:1]).missing == {"s": {"a": (0,)}, "s+draw1": {"a": (0,)}}
    assert missing_runs(replace(whole, draws=drawn[:1])) == [
        "s: 1 of 3 runs is missing: a (seed 0).",
        "s+draw1: 1 of 2 runs is missing: a (seed 0).",
    ]
    assert of_part([score_row("s", "fixed", 7, 1.0)], seeds_of={"s": 1}).missing == {}


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


def test_the_notes_say_what_the_tests_compare():
    rows = summary(contest(tuners=("fixed", "tpe", "cruise"), seeds=6))
    tested = "Could lead: not told apart from the leader (paired t tests of log times, Holm over pairs, 5 %)."
    assert tested in notes(rows)


def test_failed_runs_and_runs_that_lack_accuracies_are_told():
    assert "x (1 of 3), z (3 of 3)" in shown(summary(from_times({"fixed": [100] * 3, "x": [NAN, 10, 10], "z": [NAN] * 3})))
    lossy = [score_row("s", "x", i, 10, final_loss=1.0, final_accuracy=NAN) for i in range(2)]
    assert "loss" in shown(summary(frames(lossy)))
