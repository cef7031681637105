"""The speed of the engine, as ratios within one run: on a shared, noisy machine only ratios can be compared.

Each benchmark runs the two things that it compares in turn, checks that both did the work, and takes the best of each. The
ratio is in `extra_info`, beside the ratio that it should reach. No benchmark fails for being slow. Run:

    pytest tests/bench -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from harness import scenario
from simulators.engine import loop
from tests.bench.jobs import bare_scan, engine_job, plain_simpy
from tuners import policies
from tuners.actions import Run

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600)]

ROUNDS = 9


def seconds(job: Callable[[], Any]) -> float:
    begin = time.perf_counter()
    jax.block_until_ready(job())
    return time.perf_counter() - begin


def in_turn(benchmark: Any, measured: Callable[[], Any], against: Callable[[], Any], rounds: int = ROUNDS) -> float:
    """Time both in turn; the ratio of the best times. The benchmark's own table has the first."""
    for warm_up in (measured, against):
        jax.block_until_ready(warm_up())
    mine, theirs = [], []

    def round_of_both() -> None:
        mine.append(seconds(measured))
        theirs.append(seconds(against))

    for _ in range(rounds):
        round_of_both()
    benchmark.pedantic(lambda: jax.block_until_ready(measured()), rounds=3)
    benchmark.extra_info["ratio_of_medians"] = statistics.median(mine) / statistics.median(theirs)
    return min(mine) / min(theirs)


@pytest.mark.parametrize(
    ("name", "features", "hidden", "policy", "pushes", "reach"),
    [
        ("MLP 64-256-10, ASP", 64, (256,), policies.asp(), 1000, 1.5),
        ("MLP 784-256-10, ASP", 784, (256,), policies.asp(), 320, 1.5),
        ("logistic regression 64-10, ASP", 64, (), policies.asp(), 1000, 3.0),
        ("MLP 784-256-10, BSP", 784, (256,), policies.bsp(), 320, 1.0),
    ],
)
def test_push_against_bare_scan(
    benchmark: Any, name: str, features: int, hidden: tuple[int, ...], policy: Any, pushes: int, reach: float
) -> None:
    workers = 32
    job = engine_job(features, hidden, workers, policy)
    state, table, used = job.advance(pushes)
    assert int(used) == pushes == int(state.clock.pushes) == int(state.clock.version)
    assert float(jnp.min(jnp.diff(table[:, 0]))) >= 0
    bare = bare_scan(job, workers, pushes)
    assert bare()[1].shape == (pushes,)
    ratio = in_turn(benchmark, partial(job.advance, pushes), bare)
    benchmark.extra_info.update(what=f"engine / bare scan: {name}", ratio=ratio, reach=reach)


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
    ratio = in_turn(benchmark, plain, partial(job.advance, pushes), rounds=5)
    benchmark.extra_info.update(what="plain SimPy / engine: logistic regression", ratio=ratio, reach=8.0)


def test_lanes_against_single(benchmark: Any) -> None:
    workers, pushes, lanes = 10, 300, 64
    job = engine_job(64, (), workers, policies.asp())
    plants, states = (
        jax.tree.map(lambda x: jnp.broadcast_to(x, (lanes, *x.shape)), tree) for tree in (job.plant, job.state)
    )
    plants = plants._replace(key=jnp.arange(lanes, dtype=jnp.uint64))
    many, forever = jnp.asarray(pushes, jnp.int32), jnp.asarray(jnp.inf)

    def all_lanes() -> Any:
        return loop.advance_lanes(job.program, job.data, plants, states, many, forever, rows=pushes)

    assert all_lanes()[2].tolist() == [pushes] * lanes
    ratio = in_turn(benchmark, all_lanes, partial(job.advance, pushes), rounds=5) / lanes
    benchmark.extra_info["ratio_of_medians"] /= lanes
    benchmark.extra_info.update(what="per lane of 64 / single lane: logistic regression", ratio=ratio, reach=0.6)


def test_simulated_seconds_per_wall_second(benchmark: Any) -> None:
    found = scenario.load("digits")
    windows = []

    def run() -> None:
        system = scenario.system(found, seed=0)
        windows.append(system.perform(Run(seconds=found.budget.seconds)))

    run()
    benchmark.pedantic(run, rounds=3)
    assert windows[-1].clocks == windows[0].clocks > 0
    rate = windows[-1].seconds / benchmark.stats.stats.min
    benchmark.extra_info.update(what="simulated seconds per wall second: digits", ratio=rate, reach=1500.0)


def test_help_against_bare_python(benchmark: Any) -> None:
    def whole(*words: str) -> None:
        subprocess.run([sys.executable, *words], check=True, stdout=subprocess.DEVNULL)  # noqa: S603  # our own words only

    ratio = in_turn(benchmark, partial(whole, "-m", "harness", "--help"), partial(whole, "-c", "pass"), rounds=5)
    benchmark.extra_info.update(what="harness --help / python -c pass", ratio=ratio, reach=15.0)
