"""A pytest fixture that scores a tuner on a scenario, and lets pytest-benchmark report it in simulated seconds::

    def test_my_tuner_beats_the_default(contest):
        mine = contest("my_package.my_module:my_tuner", "digits", seeds=3)
        default = contest("fixed", "digits", seeds=3)
        assert mine.completion_seconds < default.completion_seconds

In pytest-benchmark's table, JSON file and comparisons, the test is then a benchmark with one round per seed, whose time is
the completion time of the run in *simulated* seconds: a timer of our own counts them. They do not depend on the machine's
load, so ``--benchmark-compare-fail=median:5%`` fails when the tuner has become slower, and only then. The report's
``extra_info`` has the tuner's other results and the host's seconds. Of several calls in one test, the first is reported.

Every pytest run of an environment with the harness loads this module, so it imports nothing else until a test asks for the
fixture.
"""

from __future__ import annotations

import time
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from numbers import Integral
from statistics import fmean, median
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from pathlib import Path

    from harness.scenario import Scenario
    from harness.score import Score
    from tuners.actions import TunerFactory

__all__ = ["Contest", "Result", "SimulatedClock", "contest"]


@dataclass(frozen=True, slots=True)
class Result:
    """The scores of one tuner on one scenario, over paired seeds."""

    scores: tuple[Score, ...]  # one per seed
    host_seconds: float = 0.0  # that this machine took for all of them

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

    def __init__(self, benchmark: Any, clock: SimulatedClock | None = None) -> None:
        self._benchmark = benchmark
        self._clock = clock or SimulatedClock()
        self._reported = False

    def __call__(
        self, tuner: str | TunerFactory, scenario: str | Path | Scenario, *, seeds: int | Iterable[int] = 1
    ) -> Result:
        """Run the job of `scenario` under `tuner` once per seed (0, 1, ... for a number) and score it.

        Tuner and scenario are named as on the command line, or are a factory and a `Scenario`. pytest-benchmark reports the
        first call of a test. Raises ValueError if a name is unknown, or `best_fixed`, which is chosen after many runs;
        RuntimeError if a run fails.
        """
        name, factory = _named(tuner)
        which = tuple(range(seeds)) if isinstance(seeds, int) else tuple(seeds)
        if not which:
            raise ValueError(f"Cannot run {name} on {scenario} with no seeds: give at least one.")
        if wrong := [seed for seed in which if not (isinstance(seed, Integral) and seed >= 0)]:
            raise ValueError(f"Cannot run {name} on {scenario} with seed {wrong[0]!r}: give whole numbers from 0 on.")
        started = time.perf_counter()
        scores = self._play(_runs(name, factory, scenario, which), len(which))
        result = Result(tuple(scores), time.perf_counter() - started)
        self._benchmark.extra_info[f"{name} on {scenario if isinstance(scenario, str) else _name_of(scenario)}"] = {
            "completion_seconds": result.completion_seconds,
            "overhead_seconds": result.overhead_seconds,
            "reconfigurations": result.reconfigurations,
            "reached": f"{result.reached}/{len(result.scores)}",
            "host_seconds": result.host_seconds,
        }
        return result

    def _play(self, runs: Iterator[Score], count: int) -> list[Score]:
        scores: list[Score] = []

        def play_one() -> None:
            scores.append(next(runs))
            self._clock.seconds += scores[-1].completion_seconds

        if not self._reported:  # pytest-benchmark refuses to measure twice in one test
            self._reported = True
            self._benchmark.pedantic(play_one, rounds=count, iterations=1)
        while len(scores) < count:  # with --benchmark-disable, there is only one round
            play_one()
        return scores


class SimulatedClock:
    """A timer for pytest-benchmark: the completion times of all runs so far, in simulated seconds."""

    __name__ = "simulated_seconds"  # as pytest-benchmark names it in its files

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


@pytest.fixture
def contest(request: pytest.FixtureRequest) -> Contest:
    """Scores a tuner on a scenario: ``contest(tuner, scenario, seeds=3)``; pytest-benchmark reports simulated seconds."""
    clock = SimulatedClock()
    own = request.node.get_closest_marker("benchmark")
    options = dict(own.kwargs) if own else {}
    # The fixture `benchmark` reads the closest marker when it is made, which is now.
    request.node.add_marker(pytest.mark.benchmark(**{"timer": clock} | options), append=False)
    return Contest(request.getfixturevalue("benchmark"), clock)


def _name_of(scenario: Any) -> str:
    return str(getattr(scenario, "name", scenario))


def _named(tuner: str | TunerFactory) -> tuple[str, TunerFactory]:
    from tuners import resolve_contestant
    from tuners.entries import entry_of

    entry = resolve_contestant(tuner) if isinstance(tuner, str) else entry_of(tuner)
    return entry.name, entry.factory


def _runs(name: str, factory: TunerFactory, where: Any, seeds: Iterable[int]) -> Iterator[Score]:
    from harness.drive import play
    from harness.scenario import Scenario, load, system
    from harness.score import score
    from tuners.applicability import nothing_to_tune

    scenario = where if isinstance(where, Scenario) else load(where)
    for seed in seeds:
        made = system(scenario, seed)
        if idle := nothing_to_tune(factory, made.job):
            words = f"{name} is not applicable on {scenario.name}, and `harness compare` does not run it there: {idle}"
            warnings.warn(words, stacklevel=1)
        played = play(factory, made)
        if played.outcome.status == "error":
            raise RuntimeError(f"Cannot score {name} on {scenario.name}, seed {seed}: {played.outcome.reason}")
        yield score(played, scenario=scenario.name, tuner=name, seed=seed).score
