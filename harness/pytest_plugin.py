"""A pytest fixture that scores a tuner on a scenario inside a pytest-benchmark run::

    def test_my_tuner_beats_the_default(contest):
        mine = contest("my_package.my_module:my_tuner", "digits", seeds=3)
        default = contest("fixed", "digits", seeds=3)
        assert mine.completion_seconds < default.completion_seconds

pytest-benchmark times the host's work for the runs. The tuner's result, in simulated time, is in ``benchmark.extra_info``
of its report, keyed by tuner and scenario. Every pytest run of an environment with the harness loads this module, so it
imports nothing else until a test asks for the fixture.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from harness.score import Score
    from tuners.actions import TunerFactory

__all__ = ["Contest", "Result", "contest"]


@dataclass(frozen=True, slots=True)
class Result:
    """The scores of one tuner on one scenario, over paired seeds."""

    scores: tuple[Score, ...]  # one per seed

    @property
    def completion_seconds(self) -> float:
        """Median over seeds; a run that did not reach its target counts with its whole budget."""
        return median(s.completion_seconds for s in self.scores)

    @property
    def overhead_seconds(self) -> float:
        """Mean stall per run, caused by reconfigurations, forks and switches between branches."""
        return fmean(s.overhead_seconds for s in self.scores)

    @property
    def reconfigurations(self) -> float:
        """Mean number of changes per run."""
        return fmean(s.reconfigurations for s in self.scores)

    @property
    def reached(self) -> int:
        """How many runs reached their target."""
        return sum(s.reached for s in self.scores)


class Contest:
    """The value of the fixture: a callable that takes a tuner and a scenario."""

    def __init__(self, benchmark: Any) -> None:
        self._benchmark = benchmark
        self._timed = False

    def __call__(self, tuner: str | TunerFactory, scenario: str | Path, *, seeds: int | Iterable[int] = 1) -> Result:
        """Run the job of `scenario` under `tuner` once per seed (0, 1, ... for a number) and score it.

        Tuner and scenario are named as on the command line; a tuner may also be a factory. pytest-benchmark times the
        first call of a test. Raises ValueError if a name is unknown, RuntimeError if a run fails.
        """
        name, factory = _named(tuner)
        which = range(seeds) if isinstance(seeds, int) else tuple(seeds)
        if not which:
            raise ValueError(f"Cannot run {name} on {scenario} with no seeds: give at least one.")
        result = self._time(lambda: _play(name, factory, scenario, which))
        self._benchmark.extra_info[f"{name} on {scenario}"] = {
            "completion_seconds": result.completion_seconds,
            "overhead_seconds": result.overhead_seconds,
            "reconfigurations": result.reconfigurations,
            "reached": f"{result.reached}/{len(result.scores)}",
        }
        return result

    def _time(self, work: Callable[[], Result]) -> Result:
        if self._timed:  # pytest-benchmark refuses to time twice in one test
            return work()
        self._timed = True
        result: Result = self._benchmark.pedantic(work, rounds=1, iterations=1)
        return result


@pytest.fixture
def contest(request: pytest.FixtureRequest) -> Contest:
    """Scores a tuner on a scenario: ``contest(tuner, scenario, seeds=3)``."""
    return Contest(request.getfixturevalue("benchmark"))


def _named(tuner: str | TunerFactory) -> tuple[str, TunerFactory]:
    if not isinstance(tuner, str):
        return getattr(tuner, "__name__", repr(tuner)), tuner
    from tuners import resolve

    entry = resolve(tuner)
    return entry.name, entry.factory


def _play(name: str, factory: TunerFactory, where: str | Path, seeds: Iterable[int]) -> Result:
    from harness.drive import play
    from harness.scenario import load, system
    from harness.score import score

    scenario, scores = load(where), list[Any]()
    for seed in seeds:
        played = play(factory, system(scenario, seed))
        if played.outcome.status == "error":
            raise RuntimeError(f"Cannot score {name} on {scenario.name}, seed {seed}: {played.outcome.reason}")
        scores.append(score(played, scenario=scenario.name, tuner=name, seed=seed).score)
    return Result(tuple(scores))
