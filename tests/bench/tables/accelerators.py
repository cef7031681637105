"""Prints when an accelerator pays: simulated seconds per wall second of single jobs and of lanes, on what JAX computes on.

JAX_PLATFORMS=cuda python -m tests.bench.tables.accelerators; and once more with JAX_PLATFORMS=cpu, to compare.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from functools import partial

import jax
import jax.numpy as jnp

from tests.bench.jobs import EngineJob, engine_job, side_by_side, timing_job, underway
from tests.bench.rounds import timed
from tuners import policies

WORKERS, ROUNDS = 10, 3
JOBS: dict[str, Callable[[], EngineJob]] = {
    "timing only": lambda: timing_job(WORKERS),
    "64-10": lambda: engine_job(64, (), WORKERS, policies.asp()),
    "64-256-10": lambda: engine_job(64, (256,), WORKERS, policies.asp()),
    "784-256-10": lambda: engine_job(784, (256,), WORKERS, policies.asp()),
    "784-256-10, BSP": lambda: engine_job(784, (256,), WORKERS, policies.bsp()),
    "784-2048-2048-10": lambda: engine_job(784, (2048, 2048), WORKERS, policies.asp()),
}


def line(name: str, lanes: int, pushes: int) -> str:
    """A row of the table, for `lanes` jobs of that name; 0: a single job, not in lanes."""
    job = underway(JOBS[name]())
    run = side_by_side(job, lanes, pushes) if lanes else partial(job.advance, pushes)
    seconds = timed(run, time.perf_counter)
    first = seconds()
    state, _, used = run()
    if jnp.min(used) != pushes or not jnp.all(jnp.isfinite(state.clock.seconds)):
        raise RuntimeError(f"Cannot time {name} in {lanes} lanes: {int(jnp.min(used))} of {pushes} pushes were made.")
    simulated = float(jnp.sum(state.clock.seconds - job.state.clock.seconds))
    least = min(seconds() for _ in range(ROUNDS))
    each = least / pushes / max(lanes, 1)
    return f"| {name} | {lanes or 'single job'} | {each * 1e6:.3g} | {simulated / least:.3g} | {first - least:.2g} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--jobs", nargs="+", default=list(JOBS), choices=JOBS, metavar="NAME")
    parser.add_argument("--lanes", nargs="+", type=int, default=[0, 1, 16, 256, 1024, 4096], metavar="N")
    parser.add_argument("--pushes", type=int, default=100, metavar="N", help="of each job (default: 100)")
    given = parser.parse_args()
    device = jax.devices()[0]
    print(f"{device.platform}, {device.device_kind}")  # noqa: T201
    print("| job | lanes | us per push | simulated s per wall s | compiling, s |\n| --- | --- | --- | --- | --- |")  # noqa: T201
    for name in given.jobs:
        for lanes in given.lanes:
            try:
                row = line(name, lanes, given.pushes)
            except (jax.errors.JaxRuntimeError, MemoryError) as error:
                row = f"| {name} | {lanes} | {str(error).splitlines()[0][:80]} | | |"
            print(row, flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
