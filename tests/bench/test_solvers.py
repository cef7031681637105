"""The speed of Cruise's solvers, in CPU milliseconds, each of which proves its optimum, and of a proposal of the bespoke BO.

The paper reports 30 ms for equal machines, and 37.4 s with a commercial solver for machines of two types. Run:

    pytest tests/bench -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import numpy as np
import pytest

from tests.bench.rounds import LOOKS, finding, judge, settled, timed
from tests.support.bespoke_truth import Truth, TruthSystem
from tuners.actions import Action, Reconfigure, Run
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.grouped_cluster import GroupedCluster
from tuners.bespoke_bo.numeric import placements
from tuners.cruise.milp import solve
from tuners.cruise.placement import MachineKind, Problem, best_in_batches, best_split, place, placement_seconds, splits
from tuners.cruise.split import best_worker_count, epoch_seconds

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

T = TypeVar("T")

SLOW = MachineKind(count=32, compute_seconds=6.58e-4, bytes_per_second=156.25e6)
FAST = MachineKind(count=4, compute_seconds=3.29e-4, bytes_per_second=625e6)
ALIKE = Problem(kinds=(SLOW,), samples=1_900_000, batch_size=10_000, model_bytes=568e6)
MIXED = replace(ALIKE, kinds=(replace(SLOW, count=28), FAST))
EVEN = replace(ALIKE, kinds=(replace(SLOW, count=16), replace(FAST, count=16)))
THREE = replace(
    ALIKE,
    kinds=(
        replace(SLOW, count=12),
        replace(FAST, count=10),
        MachineKind(count=10, compute_seconds=5e-4, bytes_per_second=3e8),
    ),
)


def milliseconds(benchmark: Any, name: str, job: Callable[[], T], most: int = LOOKS[-1]) -> T:
    """The answer of `job`, whose CPU milliseconds are judged."""
    answers = []

    def run() -> None:
        answers.append(job())

    judge(benchmark, name, timed(run), most=most, scale=1e3)
    return answers[-1]


def test_alike_machines(benchmark: Any) -> None:
    workers = milliseconds(benchmark, "eq. 5", lambda: best_worker_count(ALIKE))
    assert workers is not None
    assert all(epoch_seconds(workers, 32 - workers, ALIKE) <= epoch_seconds(w, 32 - w, ALIKE) for w in range(1, 32))


@pytest.mark.parametrize("problem", [MIXED, EVEN, THREE], ids=["28 + 4", "16 + 16", "12 + 10 + 10"])
def test_several_types(benchmark: Any, problem: Problem) -> None:
    counts = " + ".join(str(k.count) for k in problem.kinds)
    found = milliseconds(benchmark, f"by kind {counts}", lambda: best_split(problem), most=8)
    assert found is not None
    assert found.seconds == min(s.seconds for s in splits(problem))
    assert placement_seconds(problem, place(problem, found)) == pytest.approx(found.seconds)


@pytest.mark.parametrize("problem", [MIXED, EVEN, THREE], ids=["28 + 4", "16 + 16", "12 + 10 + 10"])
def test_several_types_in_whole_mini_batches(benchmark: Any, problem: Problem) -> None:
    counts = " + ".join(str(k.count) for k in problem.kinds)
    found = milliseconds(benchmark, f"batches {counts}", lambda: best_in_batches(problem), most=8)
    relaxed = best_split(problem)
    assert found is not None
    assert relaxed is not None
    assert sum(found.data) == problem.samples
    assert placement_seconds(problem, found, round_up=True) >= relaxed.seconds


@pytest.mark.parametrize("term", ["paper", "sum"])
def test_the_milp_on_two_types(benchmark: Any, term: Any) -> None:
    problem = replace(MIXED, server_term=term)
    begin = time.process_time()
    found = benchmark.pedantic(lambda: solve(problem), rounds=1)
    spent = finding(f"milp {term}", (time.process_time() - begin) * 1e3)
    by_kind = best_in_batches(problem)
    assert found is not None
    assert by_kind is not None
    assert found.proven
    assert found.seconds == pytest.approx(placement_seconds(problem, by_kind, round_up=True), rel=2e-6)
    settled(benchmark, spent)


# The bespoke optimiser: CPU seconds, because other processes on the machine affect them little. The tenth proposal, after
# nine evaluations, over all 34,731 placements of setting C.

BOAT_COUNTS = {"g2.2xlarge": 2, "c4.2xlarge": 2, "c4.4xlarge": 2, "c4.8xlarge": 4}
BOAT_TRUTH = Truth(BOAT_COUNTS, 65536, saturation=300.0, jitter=0.02, overlap=True)


def test_a_proposal_on_ten_machines(benchmark: Any) -> None:
    """The tuner's own time between the answer to its ninth evaluation and the tenth schedule that it asks for."""
    assert len(placements(GroupedCluster.of(BOAT_TRUTH.job), np.random.default_rng(0))) == 34_731
    system, tuner = TruthSystem(BOAT_TRUTH), bespoke_bo(BOAT_TRUTH.job, stop_early=False)
    action, answer, windows = next(tuner), None, 0
    while windows < 18:  # two for each evaluation
        if answer is not None:
            action = tuner.send(answer)
        answer = system.perform(action)
        windows += isinstance(action, Run)

    def proposal() -> tuple[Action[Any], float]:
        began = time.process_time()
        return tuner.send(answer), time.process_time() - began

    action, seconds = benchmark.pedantic(proposal, rounds=1)
    assert isinstance(action, Reconfigure)
    assert sum(map(sum, action.setting.loads)) == 65536
    settled(benchmark, finding("bespoke proposal", seconds))
