"""What is left of a comparison, by arithmetic on made-up events."""

from __future__ import annotations

import pytest

from harness.comparison.compare import Finished, Planned, RunKey, Underway
from harness.comparison.forecast import Forecast, Standing
from harness.comparison.run_process import Done, Progress


def key(tuner: str, seed: int) -> RunKey:
    return RunKey("digits", tuner, seed)


def done(seconds: float, wall: float, status: str = "target") -> Done:
    return Done(status, "", seconds, 0.0, wall)


def underway(tuner: str, seed: int, seconds: float) -> Underway:
    return Underway(key(tuner, seed), Progress(seconds, 10_000.0, float("nan"), float("nan")))


@pytest.fixture
def forecast() -> Forecast:
    """Two tuners on three seeds, and an oracle's two candidates on one."""
    runs = [key(t, s) for s in range(3) for t in ("quick", "slow")] + [key("best_fixed+00", 0), key("best_fixed+01", 0)]
    made = Forecast()
    made.add(Planned(len(runs), 0, tuple(runs), ("quick", "slow")), 0.0)
    return made


def test_nothing_is_known_at_first(forecast: Forecast) -> None:
    assert forecast.left_seconds(0.0) is None
    assert forecast.standings("digits") == []
    assert forecast.share(underway("quick", 0, 2_500.0)) == 0.25  # of the budget, for want of better


def test_the_rest_takes_what_such_runs_took(forecast: Forecast) -> None:
    forecast.add(Finished(key("quick", 0), done(100.0, 2.0)), 2.0)
    forecast.add(Finished(key("slow", 0), done(900.0, 10.0)), 12.0)
    # quick: 2 runs of 2 s; slow: 2 of 10 s; candidates: 2 of the usual 6 s. Nothing is in progress.
    assert forecast.left_seconds(12.0) == pytest.approx(2 * 2 + 2 * 10 + 2 * 6)
    forecast.add(underway("quick", 1, 1.0), 12.0)
    forecast.add(underway("slow", 1, 1.0), 12.0)
    assert forecast.left_seconds(13.0) == pytest.approx((36 - 2) / 2)  # two processes, one second each
    for run in (key("slow", 1), key("slow", 2), key("best_fixed+00", 0), key("best_fixed+01", 0), key("quick", 2)):
        forecast.add(Finished(run, done(500.0, 5.0)), 14.0)
    assert forecast.left_seconds(14.0) == pytest.approx(3.5 - 2)  # quick took 2 and 5 s, and seed 1 has run for 2 s
    forecast.add(Finished(key("quick", 1), done(1.0, 2.0)), 14.0)
    assert forecast.left_seconds(14.0) == 0.0


def test_a_bar_counts_expected_work_and_not_the_budget(forecast: Forecast) -> None:
    forecast.add(Finished(key("quick", 0), done(100.0, 2.0)), 2.0)
    assert forecast.share(underway("quick", 1, 50.0)) == 0.5
    assert forecast.share(underway("slow", 0, 50.0)) == 0.5  # nothing of its own: as the others on this scenario
    forecast.add(Finished(key("slow", 0), done(900.0, 2.0)), 2.0)
    assert forecast.share(underway("slow", 1, 90.0)) == 0.1
    assert forecast.share(underway("slow", 1, 90_000.0)) == 0.99


def test_a_tuner_that_has_nothing_to_tune_has_no_standing(forecast: Forecast) -> None:
    """Its run has no time: it would stand first, with nan."""
    forecast.add(Finished(key("slow", 0), done(float("nan"), 0.1, "not applicable")), 1.0)
    forecast.add(Finished(key("quick", 0), done(100.0, 2.0)), 2.0)
    assert [one.tuner for one in forecast.standings("digits")] == ["quick"]
    assert forecast.share(underway("slow", 1, 50.0)) == 0.5  # of what others took


def test_standings_are_of_contestants_that_finished(forecast: Forecast) -> None:
    for run, how in (
        (key("slow", 0), done(900.0, 1.0)),
        (key("slow", 1), done(10_000.0, 1.0, "budget")),
        (key("quick", 0), done(100.0, 1.0)),
        (key("quick", 1), done(10_000.0, 1.0, "error")),
        (key("best_fixed+00", 0), done(1.0, 1.0)),
    ):
        forecast.add(Finished(run, how), 1.0)
    assert forecast.standings("digits") == [Standing("quick", 100.0, 1, 0), Standing("slow", 5450.0, 2, 1)]
    assert forecast.standings("elsewhere") == []
