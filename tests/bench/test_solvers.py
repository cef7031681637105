"""The speed of Cruise's solvers, in milliseconds on this machine, beside what they should reach; each proves its optimum.

The paper reports 30 ms for equal machines, and 37.4 s with a commercial solver for machines of two types. Run:

    pytest tests/bench -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any, TypeVar

import pytest

from tuners.cruise.milp import solve
from tuners.cruise.placement import Kind, Problem, best_in_batches, best_split, place, placement_seconds, splits
from tuners.cruise.split import best_worker_count, epoch_seconds

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

T = TypeVar("T")

SLOW = Kind(count=32, compute_seconds=6.58e-4, bytes_per_second=156.25e6)
FAST = Kind(count=4, compute_seconds=3.29e-4, bytes_per_second=625e6)
ALIKE = Problem(kinds=(SLOW,), samples=1_900_000, batch_size=10_000, model_bytes=568e6)
MIXED = replace(ALIKE, kinds=(replace(SLOW, count=28), FAST))
EVEN = replace(ALIKE, kinds=(replace(SLOW, count=16), replace(FAST, count=16)))
THREE = replace(
    ALIKE,
    kinds=(replace(SLOW, count=12), replace(FAST, count=10), Kind(count=10, compute_seconds=5e-4, bytes_per_second=3e8)),
)


def milliseconds(benchmark: Any, what: str, job: Callable[[], T], reach: float, rounds: int) -> T:
    answer: T = benchmark.pedantic(job, rounds=rounds, warmup_rounds=1 if rounds > 1 else 0)
    benchmark.extra_info.update(what=f"{what}, ms", ratio=benchmark.stats.stats.min * 1e3, reach=reach)
    return answer


def test_alike_machines(benchmark: Any) -> None:
    workers = milliseconds(benchmark, "Eq. 5, 32 machines", lambda: best_worker_count(ALIKE), 5.0, 50)
    assert workers is not None
    assert all(epoch_seconds(workers, 32 - workers, ALIKE) <= epoch_seconds(w, 32 - w, ALIKE) for w in range(1, 32))


@pytest.mark.parametrize("problem", [MIXED, EVEN, THREE], ids=["28 + 4", "16 + 16", "12 + 10 + 10"])
def test_several_types(benchmark: Any, problem: Problem) -> None:
    counts = " + ".join(str(k.count) for k in problem.kinds)
    found = milliseconds(benchmark, f"by kind, {counts} machines", lambda: best_split(problem), 1000.0, 5)
    assert found is not None
    assert found.seconds == min(s.seconds for s in splits(problem))
    assert placement_seconds(problem, place(problem, found)) == pytest.approx(found.seconds)


@pytest.mark.parametrize("problem", [MIXED, EVEN, THREE], ids=["28 + 4", "16 + 16", "12 + 10 + 10"])
def test_several_types_in_whole_mini_batches(benchmark: Any, problem: Problem) -> None:
    counts = " + ".join(str(k.count) for k in problem.kinds)
    what = f"by kind in whole mini-batches, {counts} machines"
    found = milliseconds(benchmark, what, lambda: best_in_batches(problem), 1000.0, 3)
    relaxed = best_split(problem)
    assert found is not None
    assert relaxed is not None
    assert sum(found.data) == problem.samples
    assert placement_seconds(problem, found, round_up=True) >= relaxed.seconds


@pytest.mark.parametrize("term", ["paper", "sum"])
def test_the_milp_on_two_types(benchmark: Any, term: Any) -> None:
    problem = replace(MIXED, server_term=term)
    found = milliseconds(benchmark, f"MILP, 28 + 4 machines, server term {term}", lambda: solve(problem), 37_400.0, 1)
    by_kind = best_in_batches(problem)
    assert found is not None
    assert by_kind is not None
    assert found.proven
    assert found.seconds == pytest.approx(placement_seconds(problem, by_kind, round_up=True), rel=2e-6)
