"""The speed of the engine, as ratios within one run: on a shared, noisy machine only ratios can be compared.

Each benchmark checks that both sides did the work; `rounds` runs them in turn and judges, by the table in `reaches`. Run:

    pytest tests/bench -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import subprocess
import sys
import time
from functools import partial
from typing import Any

import jax.numpy as jnp
import pytest

from harness import scenario
from tests.bench.jobs import (
    bare_scan,
    bare_sparse_scan,
    engine_job,
    plain_simpy,
    side_by_side,
    sparse_job,
    timing_job,
    underway,
)
from tests.bench.rounds import judge, timed
from tuners import policies
from tuners.actions import Run

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]


@pytest.mark.parametrize(
    ("name", "features", "hidden", "policy", "pushes"),
    [
        ("engine 19k asp", 64, (256,), policies.asp(), 1000),
        ("engine 204k asp", 784, (256,), policies.asp(), 320),
        ("engine 650 asp", 64, (), policies.asp(), 1000),
        ("engine 204k bsp", 784, (256,), policies.bsp(), 320),
    ],
)
def test_push_against_bare_scan(
    benchmark: Any, name: str, features: int, hidden: tuple[int, ...], policy: Any, pushes: int
) -> None:
    workers = 32
    job = engine_job(features, hidden, workers, policy)
    state, table, used = job.advance(pushes)
    assert int(used) == pushes == int(state.clock.pushes) == int(state.clock.version)
    assert float(jnp.min(jnp.diff(table[:, 0]))) >= 0
    bare = bare_scan(job, workers, pushes)
    assert bare()[1].shape == (pushes,)
    judge(benchmark, name, timed(partial(job.advance, pushes)), timed(bare))


@pytest.mark.parametrize(("name", "largest"), [("engine 261k rows", 131_072), ("engine 2.1M rows", 1_048_576)])
def test_sparse_push_against_bare_sparse_scan(benchmark: Any, name: str, largest: int) -> None:
    """With the larger tables, a single operation on all rows would make a push cost hundreds of bare ones."""
    workers, pushes = 16, 1000
    job = underway(sparse_job(largest, workers, policies.asp()))
    state, table, used = job.advance(pushes)
    assert int(used) == pushes
    assert float(jnp.min(jnp.diff(table[:, 0]))) >= 0
    assert float(state.learned.touched.pushed.sum()) > 300 * pushes
    bare = bare_sparse_scan(job, workers, pushes)
    assert bare()[1].shape == (pushes,)
    judge(benchmark, name, timed(partial(job.advance, pushes)), timed(bare))


@pytest.mark.parametrize("workers", [32, 2048])
def test_push_without_a_model(benchmark: Any, workers: int) -> None:
    job, pushes = underway(timing_job(workers)), 1000
    state, table, used = job.advance(pushes)
    assert int(used) == pushes == int(state.clock.pushes) - 2 * workers
    assert float(jnp.min(jnp.diff(table[:, 0]))) >= 0
    judge(benchmark, f"timing-only {workers}", timed(partial(job.advance, pushes)), scale=1e6 / pushes)


def test_plain_simpy_against_engine(benchmark: Any) -> None:
    workers, pushes = 10, 1000
    job = engine_job(64, (), workers, policies.asp())
    plain = plain_simpy(job, workers, pushes)
    _, table, used = job.advance(pushes)
    records = plain()
    assert len(records) == int(used) == pushes
    # Both simulate the same cluster: pushes per second and staleness differ only as two draws of the noise do.
    assert records[-1][0] == pytest.approx(float(table[-1, 0]), rel=0.05)
    assert sum(r[2] for r in records) / pushes == pytest.approx(float(table[:, 7].mean()), rel=0.05)
    judge(benchmark, "simpy", timed(plain), timed(partial(job.advance, pushes)), most=16)


def test_lanes_against_bare_scans(benchmark: Any) -> None:
    """Of a model as small as this, one job after another takes less: its step is one function, which lanes cannot be."""
    workers, pushes, lanes = 10, 300, 64
    job = engine_job(64, (), workers, policies.asp())
    all_lanes = side_by_side(job, lanes, pushes)
    assert all_lanes()[2].tolist() == [pushes] * lanes
    bare = bare_scan(job, workers, pushes, lanes)
    assert bare()[1].shape == (lanes, pushes)
    judge(benchmark, "lanes", timed(all_lanes), timed(bare), most=16)


def test_simulated_seconds_per_wall_second(benchmark: Any) -> None:
    found = scenario.load("digits")
    windows = []

    def run() -> None:
        system = scenario.system(found, seed=0)
        windows.append(system.perform(Run(seconds=found.budget.seconds)))

    run()
    seconds = timed(run)
    judge(benchmark, "digits", lambda: windows[0].seconds / seconds())
    assert windows[-1].clocks == windows[0].clocks > 0
    assert windows[-1].seconds == windows[0].seconds > 1000  # until the target, as a run stops there


def test_help_against_bare_python(benchmark: Any) -> None:
    def whole(*words: str) -> None:
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # our own words only

    help_, bare = partial(whole, "-m", "harness", "--help"), partial(whole, "-c", "pass")
    judge(benchmark, "help", timed(help_, time.perf_counter), timed(bare, time.perf_counter), most=16)
