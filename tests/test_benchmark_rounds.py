"""The verdict of a benchmark, with pretended clocks: nothing is timed here."""

from __future__ import annotations

import csv
import itertools
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.bench.conftest import write_findings
from tests.bench.reaches import REACHES, Reach
from tests.bench.rounds import LOOKS, finding, interval, judge, measured, timed, verdict


@pytest.fixture(autouse=True)
def reaches(monkeypatch: pytest.MonkeyPatch) -> None:
    """A ratio that should be at most 1, one that should be at least 1, and one that is not reached yet."""
    monkeypatch.setitem(REACHES, "most", Reach("mine / theirs", 1.0))
    monkeypatch.setitem(REACHES, "least", Reach("mine / theirs", 1.0, at_least=True))
    monkeypatch.setitem(REACHES, "later", Reach("mine / theirs", 1.0, limit=1.5))


class Clock:
    """A clock that pretended jobs advance."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds

    def takes(self, seconds: Iterator[float]) -> Any:
        def job() -> None:
            self.seconds += next(seconds)

        return timed(job, self)


class Benchmark:
    """In place of the fixture."""

    def __init__(self) -> None:
        self.extra_info: dict[str, Any] = {}

    def pedantic(self, job: Any, rounds: int) -> None:
        job()


def ratios(name: str, mine: float, noise: float, seed: int) -> Any:
    """The finding of jobs that take `mine` and 1 seconds, times lognormal noise of each round and of each job."""
    rng, clock = np.random.default_rng(seed), Clock()

    def job(seconds: float) -> Any:
        return clock.takes(seconds * math.exp(noise * rng.normal()) for _ in itertools.count())

    first, second = job(mine), job(1.0)
    return measured(name, lambda: first() / second())


def test_a_clear_ratio_is_decided_at_the_first_look() -> None:
    assert ratios("most", 0.8, 0.02, 0).verdict == ratios("least", 1.25, 0.02, 0).verdict == "reached"
    assert ratios("most", 1.25, 0.02, 0).verdict == ratios("least", 0.8, 0.02, 0).verdict == "missed"
    assert ratios("most", 0.8, 0.02, 0).rounds == ratios("least", 0.8, 0.02, 0).rounds == LOOKS[0]


def test_what_is_not_clear_takes_more_rounds() -> None:
    made = ratios("most", 0.9, 0.1, 3)
    assert made.rounds > LOOKS[0]
    assert made.verdict == "reached"


def test_too_noisy_is_said_and_is_no_verdict() -> None:
    made = ratios("most", 0.98, 0.8, 1)
    assert (made.verdict, made.rounds) == ("undecided", LOOKS[-1])
    assert "undecided: the machine is too noisy" in str(made)
    assert made.low < 1.0 < made.high


def test_exactly_at_the_reach_counts_as_reached() -> None:
    assert ratios("most", 1.0, 0.001, 0).verdict == ratios("least", 1.0, 0.001, 0).verdict == "reached"


def test_neighbours_that_slow_down_both_sides_change_nothing() -> None:
    """In the second half of all rounds the machine takes three times as long for everything."""
    clock = Clock()
    slow = [1.0] * 4 + [3.0] * 60
    mine, theirs = (clock.takes(iter([seconds * s for s in slow])) for seconds in (0.9, 1.0))
    made = measured("most", lambda: mine() / theirs())
    assert made.verdict == "reached"
    assert made.low == pytest.approx(0.9)
    assert made.high == pytest.approx(0.9)


@pytest.mark.parametrize(("truth", "wrong"), [(0.94, "missed"), (1.06, "reached")])
def test_at_most_one_of_twenty_verdicts_is_wrong(truth: float, wrong: str) -> None:
    made = [ratios("most", truth, 0.15, seed).verdict for seed in range(400)]
    assert made.count(wrong) <= 400 * 0.05 + 3 * math.sqrt(400 * 0.05 * 0.95)


def test_the_interval_covers_the_median() -> None:
    rng = np.random.default_rng(0)
    for count in LOOKS:
        missed = 0
        for _ in range(2000):
            low, high = interval(list(rng.exponential(size=count)))
            missed += not low <= math.log(2) <= high
        assert missed / 2000 <= 0.0125 + 3 * math.sqrt(0.0125 / 2000)
    assert interval([1.0] * 7) == (-math.inf, math.inf)


def test_verdicts_by_hand() -> None:
    assert verdict(0.9, 1.0, 1.0, at_least=False) == "reached"
    assert verdict(1.01, 2.0, 1.0, at_least=False) == "missed"
    assert verdict(0.9, 1.01, 1.0, at_least=False) == "undecided"
    assert verdict(0.98, 1.02, 1.0, at_least=False) == "reached"
    assert verdict(1.0, 1.1, 1.0, at_least=True) == "reached"
    assert verdict(0.5, 0.99, 1.0, at_least=True) == "missed"


def test_a_miss_fails_and_undecided_is_skipped() -> None:
    benchmark = Benchmark()
    with pytest.raises(pytest.fail.Exception, match=r"missed\. mine / theirs: 2 \(2 to 2, 8 rounds; at most 1\)"):
        judge(benchmark, "most", lambda: 2.0, lambda: 1.0)
    assert benchmark.extra_info["finding"]["verdict"] == "missed"
    noisy = iter([0.1, 10.0] * 50)
    with pytest.raises(pytest.skip.Exception, match="undecided: the machine is too noisy"):
        judge(benchmark, "most", lambda: next(noisy), lambda: 1.0)
    assert judge(benchmark, "most", lambda: 20.0, lambda: 1.0, scale=0.01).value == pytest.approx(0.2)


def test_what_is_not_reached_yet_fails_beyond_its_limit() -> None:
    made = finding("later", 1.2)
    assert made.verdict == "reached"
    assert str(made).startswith("not reached, within the limit. ")
    assert "fails beyond 1.5, should be at most 1" in str(made)
    assert (finding("later", 0.9).said, finding("later", 1.6).said) == ("reached", "missed")


def test_findings_are_written_to_a_file(tmp_path: Path) -> None:
    write_findings([finding("most", 0.5), finding("later", 1.2), finding("later", 1.6)], tmp_path / "new" / "ratios.csv")
    with (tmp_path / "new" / "ratios.csv").open() as file:
        rows = list(csv.DictReader(file))
    assert [(r["name"], float(r["value"]), float(r["fails_beyond"]), r["verdict"]) for r in rows] == [
        ("most", 0.5, 1.0, "reached"),
        ("later", 1.2, 1.5, "not reached, within the limit"),
        ("later", 1.6, 1.5, "missed"),
    ]


def test_every_limit_is_beyond_its_reach() -> None:
    for reach in REACHES.values():
        assert (reach.line - reach.value) * (-1 if reach.at_least else 1) >= 0
