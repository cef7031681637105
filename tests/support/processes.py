"""Worker processes that stay from comparison to comparison, because they take longer to start than most tests' runs.

A test with the fixture `kept_processes` gets processes that have made runs of other tests before. Where it compares bytes,
it also says that results do not depend on what a process did before.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import pytest

from harness.comparison import pool
from harness.comparison.run_process import Done, Progress, Task

__all__ = ["Lender", "LentPool", "kept_processes", "lender", "one_process"]

_WorkerPool, _environment = pool.WorkerPool, pool.single_threaded

_OURS = {"PYTEST_CURRENT_TEST", "_RJEM_MALLOC_CONF"}
"""Variables that pytest sets for each test, and Polars for its allocator when it is imported."""


class LentPool:
    """In place of a `WorkerPool`: makes runs in the processes of one that is not closed with this."""

    def __init__(self, kept: pool.WorkerPool) -> None:
        self._kept = kept

    def work(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Progress | Done | pool.Died]]:
        return self._kept.work(tasks)

    def close(self) -> None:
        """The processes stay."""


class Lender:
    """Lends the same processes, at most `most` to each, to all who work in its folder and environment; others get processes
    of their own."""

    def __init__(self, most: int = 64) -> None:
        self._most = most
        self._surroundings = _surroundings()
        self._pools: dict[tuple[int, str], pool.WorkerPool] = {}

    def __call__(self, jobs: int, device: str = "cpu") -> LentPool | pool.WorkerPool:
        if _surroundings() != self._surroundings:
            return _WorkerPool(jobs, device)
        jobs = min(jobs, self._most)
        if (jobs, device) not in self._pools:
            self._pools[jobs, device] = _WorkerPool(jobs, device)
        return LentPool(self._pools[jobs, device])

    def close(self) -> None:
        while self._pools:
            self._pools.popitem()[1].close()


def _surroundings() -> Any:
    """What a new process takes over."""
    return Path.cwd(), sys.executable, {k: v for k, v in os.environ.items() if k not in _OURS}


def _compiles_as_tests(device: str = "cpu") -> dict[str, str]:
    """As of `single_threaded`, and programs are compiled as this process compiles its own (`--quick-code`)."""
    quick = jax.config.read("jax_disable_most_optimizations")
    return _environment(device) | {"XLA_FLAGS": os.environ["XLA_FLAGS"], "JAX_DISABLE_MOST_OPTIMIZATIONS": str(int(quick))}


@contextmanager
def one_process() -> Iterator[None]:
    """All comparisons that begin in the folder and environment of now share one process."""
    lender = Lender(most=1)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "WorkerPool", lender)
        try:
            yield
        finally:
            lender.close()


@pytest.fixture(scope="session")
def lender() -> Iterator[Lender]:
    made = Lender()
    yield made
    made.close()


@pytest.fixture(scope="module")
def kept_processes(lender: Lender) -> Iterator[None]:
    """Comparisons of a module share processes, also with those of other modules."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(pool, "WorkerPool", lender)
        patch.setattr(pool, "single_threaded", _compiles_as_tests)
        yield
