"""The stall of a live job while half of its model moves to another server: by migration, by relocation on demand, and by
checkpoint and restart.

    pytest tests/bench/test_live_moves.py -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest

from harness.live.worker.tasks import Computed, WorkerTask
from tests.bench.live_jobs import Idle
from tests.bench.rounds import finding, settled
from tests.bench.test_live import offers
from tests.live.support.ones import ONES
from tuners.actions import Cost, Method, Reconfigure, Run

__all__ = ["offers"]  # the fixture

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

PARAMETERS = 1_000_000
COMPUTE_SECONDS = 0.1
TIMES = 4  # moves of all blocks of a server to the other, and back


@dataclass(frozen=True)
class Steady(Idle):
    """Like `Idle`, with mini-batches that take some time."""

    def compute(self, task: WorkerTask) -> Computed:
        time.sleep(COMPUTE_SECONDS)
        return super().compute(task)._replace(seconds=COMPUTE_SECONDS)


@pytest.fixture(scope="module")
def live(offers: tuple[Any, ...]) -> Iterator[Any]:
    from harness.live.driver.system import LiveSystem
    from harness.live.processes import launch

    spec = Steady(str(PARAMETERS), "bench.toml", ONES, 0)
    placement = launch.place_nodes(spec.job.nodes, offers)
    with launch.launch(placement, spec) as processes, LiveSystem(spec, processes) as made:
        yield made


def moves(live: Any, method: Method) -> list[Cost]:
    """The stall of moving all blocks of a server to the other, and back."""
    both = live.job.start
    made = []
    for setting in (replace(both, servers=both.servers[:1]), both):
        live.perform(Run(clocks=20))
        made.append(live.perform(Reconfigure(setting, method)))
        assert made[-1].done
        assert made[-1].bytes_moved > 0
    return made


@pytest.fixture(scope="module")
def found(live: Any) -> dict[str, list[float]]:
    """Stall seconds of each move by each method, in turn; and the seconds of a clock."""
    methods: tuple[Method, ...] = ("migrate", "relocate", "checkpoint")
    made: dict[str, list[float]] = {name: [] for name in methods}
    for _ in range(TIMES):
        for method in methods:
            made[method] += [cost.stall_seconds for cost in moves(live, method)]
    pushes = live.perform(Run(clocks=100)).pushes
    return {**made, "clock": list(np.diff(pushes.seconds[pushes.worker == 0]))}


@pytest.mark.parametrize("method", ["migrate", "relocate"])
def test_stall_against_checkpoint(benchmark: Any, live: Any, found: dict[str, list[float]], method: Method) -> None:
    """The longest interval without a push; without a move it is about one clock."""
    benchmark.pedantic(lambda: moves(live, method), rounds=1)
    benchmark.extra_info.update(
        seconds={name: [round(s, 3) for s in sorted(mine)] for name, mine in found.items() if name != "clock"}
    )
    ratios = [a / b for a, b in zip(found["checkpoint"], found[method], strict=True)]
    settled(benchmark, finding(f"stall {method}", *ratios))


@pytest.mark.parametrize("method", ["migrate", "relocate"])
def test_stall_against_a_clock(benchmark: Any, live: Any, found: dict[str, list[float]], method: Method) -> None:
    """Without a reconfiguration, the longest interval without a push is one clock; what exceeds it is the stall."""
    benchmark.pedantic(lambda: moves(live, method), rounds=1)
    clock = statistics.median(found["clock"])
    beyond = [max(stall - clock, 0.0) / clock for stall in found[method]]
    benchmark.extra_info.update(clocks=[round(b, 2) for b in sorted(beyond)], clock_seconds=round(clock, 3))
    settled(benchmark, finding(f"clocks {method}", max(beyond)))
