"""Ranks under draws of calibrated constants: which hold, which the calibration does not decide, and how that is told."""

import io

import numpy as np
import polars as pl
import pytest
from rich.console import Console

from reports.output.export import markdown
from reports.output.terminal import show
from reports.pages.page import pages
from reports.verdicts import calibration_ranks
from reports.verdicts.calibration_ranks import NOT_DECIDED, ranks, sentences
from reports.verdicts.summary import summary
from tests.support.made_up import frames, score_row
from traces.store import Results

SEEDS = 6


def played(draws, fitted=None, base="toy"):
    """Results of {tuner: seconds at the fitted constants}, and of {tuner: [seconds under each draw]}."""
    rng = np.random.default_rng(0)
    noise = rng.lognormal(sigma=0.002, size=(SEEDS, 1 + len(next(iter(draws.values())))))
    at = fitted or {"fixed": 100.0, "fast": 50.0, "other": 60.0}
    names = [f"{base}+draw{i + 1}" for i in range(noise.shape[1] - 1)]
    own = [score_row(base, t, s, x * noise[s, 0] * rng.lognormal(sigma=0.002)) for t, x in at.items() for s in range(SEEDS)]
    drawn = [
        score_row(name, t, s, xs[i] * noise[s, i + 1] * rng.lognormal(sigma=0.002))
        for t, xs in draws.items()
        for i, name in enumerate(names)
        for s in range(SEEDS)
    ]
    made = frames(own)
    results = Results(
        {**made.manifest, "scenarios": [base, *names], "draws": {base: names}},
        made.scores,
        made.evaluations,
        made.settings,
        made.host,
        draws=frames(drawn).scores,
    )
    return results, summary(results)


def row(found, tuner):
    return next(r for r in found.rows if r.tuner == tuner)


EVEN = [100.0] * 20


def test_every_public_name_exists():
    assert all(hasattr(calibration_ranks, name) for name in calibration_ranks.__all__)


def test_a_rank_that_most_draws_have_holds_and_one_that_turns_over_is_not_decided():
    faster = [50.0] * 12 + [70.0] * 8
    found = ranks(*played({"fixed": EVEN, "fast": faster, "other": [60.0] * 20}))
    assert (found.leader, found.draws) == ("fast", 20)
    assert row(found, "other").verdict == NOT_DECIDED
    assert row(found, "other").agree == 12
    assert row(found, "fixed").verdict == "holds"
    assert row(found, "fixed").agree == 20
    assert row(found, "fast").side_verdict == row(found, "other").side_verdict == "holds"
    assert row(found, "fast").first == pytest.approx(0.6)
    assert row(found, "other").ratio == pytest.approx((60 / 50) ** 0.6 * (60 / 70) ** 0.4, rel=0.01)
    assert row(found, "other").ratio_low == pytest.approx(60 / 70, rel=0.01)
    assert row(found, "other").ratio_high == pytest.approx(60 / 50, rel=0.01)
    said = " ".join(sentences(found))
    assert "fast is first in 60% of runs" in said
    assert "Not decided by this calibration: fast and other (12 of 20 draws)." in said
    assert "holds in at least 86% of all draws" in said


def test_more_draws_do_not_make_a_rank_that_turns_over_decided():
    """A test over draws would: with 400 of them, 240 against 160 is far beyond chance."""
    faster = [50.0] * 240 + [70.0] * 160
    found = ranks(*played({"fixed": EVEN * 20, "fast": faster, "other": [60.0] * 400}))
    assert row(found, "other").verdict == NOT_DECIDED


def test_better_than_fixed_is_a_rank_too():
    found = ranks(*played({"fixed": EVEN, "fast": [50.0] * 20, "other": [60.0] * 15 + [120.0] * 5}))
    assert row(found, "other").side == "faster"
    assert row(found, "other").side_verdict == NOT_DECIDED
    assert "other faster than fixed (15 of 20 draws)" in " ".join(sentences(found))


def test_runs_that_both_missed_the_target_tie_and_decide_nothing():
    found = ranks(*played({"fixed": [1e9] * 20, "fast": [1e9] * 20, "other": [1e9] * 20}))
    assert row(found, "other").agree == 10
    assert row(found, "other").verdict == NOT_DECIDED


def test_what_seeds_do_not_tell_apart_is_no_rank():
    found = ranks(
        *played({"fixed": EVEN, "fast": [50.0] * 20, "other": [60.0] * 20}, {"fixed": 100.0, "fast": 50, "other": 50})
    )
    close = next(r for r in found.rows if r.standing == "not told apart")
    assert close.verdict == ""
    assert np.isnan(close.agree)


def test_draws_show_on_the_page_of_their_scenario_and_nowhere_else():
    results, table = played({"fixed": EVEN, "fast": [50.0] * 12 + [70.0] * 8, "other": [60.0] * 20})
    assert table["scenario"].unique().to_list() == ["toy"]
    made = pages(results, {})
    assert list(made) == ["report.html"]
    assert "Under the uncertainty of the calibration" in made["report.html"]
    assert f"behind: {NOT_DECIDED}" in made["report.html"]
    assert "12 of 20 draws" in made["report.html"]
    console = Console(file=io.StringIO(), width=120)
    show(results, console)
    assert "Not decided by this calibration: fast and other (12 of 20 draws)." in console.file.getvalue()
    assert "+draw" not in console.file.getvalue()
    assert "Not decided by this calibration" in markdown(results)


def test_a_comparison_without_draws_has_no_such_section():
    results = played({"fixed": EVEN, "fast": EVEN, "other": EVEN})[0]
    plain = Results(results.manifest | {"draws": {}}, results.scores, results.evaluations, results.settings, results.host)
    assert ranks(plain, summary(plain)) is None
    assert "uncertainty of the calibration" not in pages(plain, {})["report.html"]


def test_draws_that_are_not_finished_count_as_far_as_they_are():
    results, table = played({"fixed": EVEN, "fast": [50.0] * 20, "other": [60.0] * 20})
    some = results.draws.filter(pl.col("scenario").is_in(["toy+draw1", "toy+draw2", "toy+draw3"]))
    part = Results(results.manifest, results.scores, results.evaluations, results.settings, results.host, draws=some)
    assert ranks(part, table).draws == 3
