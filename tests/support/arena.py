"""A tiny arena for comparisons: a scenario of five nodes on a toy system, and tuners that fail in different ways."""

from __future__ import annotations

import errno
import os
import signal
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.scenario import Scenario, job
from tuners.actions import Job, Reconfigure, Run, Setting, Tuner
from tuners.testing.toys import Toy

SYSTEM = "tests.support.arena:system"

TINY = """
summary = "Five machines and a quadratic."
[cluster]
nodes = [{ type = "edge-4core", count = 5 }]
[workload]
name = "cruise-nmf"
overrides = { demand = { model_bytes = 2e4 } }
[start]
worker_count = 3
batch_size = 4
learning_rate = 0.05
[free]
learning_rate = { real = [0.01, 1.0], log = true }
batch_size = { choice = [2, 4] }
[target]
metric = "loss"
value = 0.1
[budget]
seconds = 20
[seeds]
count = 2
"""

TIMING = TINY.replace('metric = "loss"\nvalue = 0.1', 'metric = "clocks"\nvalue = 60\ncheck_clocks = 10').replace(
    "seconds = 20", "seconds = 2000"
)
"""The same job until 60 pushes are counted, for the real simulator: its workload has no model and no losses."""


def system(scenario: Scenario, seed: int, start: Setting | None) -> Toy:
    seen = job(scenario, seed)
    return Toy(replace(seen, start=start or seen.start))


def full_system(scenario: Scenario, seed: int, start: Setting | None) -> Toy:
    """Make every later write of this process fail: the disk is full."""

    def no_space(self: Path, target: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    Path.replace = no_space  # type: ignore[method-assign, assignment]
    return system(scenario, seed, start)


def no_system(scenario: Scenario, seed: int, start: Setting | None) -> Toy:
    raise FileNotFoundError(f"Cannot read mnist/train: there is no such file (scenario {scenario.name}).")


def faster(job: Job) -> Tuner:
    yield from Run(clocks=20)
    yield from Reconfigure(replace(job.start, learning_rate=0.5))


def slow(job: Job) -> Tuner:
    """Sleeps for a second on the host, which simulated time does not see."""
    for _ in range(10):
        time.sleep(0.1)
        yield from Run(seconds=0.1)


def held(job: Job) -> Tuner:
    """Waits for ever where HELD is set in the environment."""
    while "HELD" in os.environ:
        time.sleep(0.1)
    yield from Run(clocks=20)


def raises(job: Job) -> Tuner:
    yield from Run(clocks=20)
    raise ZeroDivisionError("so it goes")


def chatty(job: Job) -> Tuner:
    print("hello from", job.name)  # noqa: T201
    yield from Run(clocks=20)


def dies(job: Job) -> Tuner:
    """Kills its process, unless LIVE is set in the environment."""
    yield from Run(clocks=20)
    if "LIVE" not in os.environ:
        print("goodbye", flush=True)  # noqa: T201
        os.kill(os.getpid(), signal.SIGKILL)


def no_generator(job: Job) -> Any:
    return 7


def made(job: Job) -> Any:
    return object()
