"""The speed of the live data path: a job of two workers and two servers without compute, compared with bare pyzmq that sends
the same bytes back and forth, and with itself on other transports. All within one run, in turn.

    pytest tests/bench/test_live.py -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from tests.bench.live_jobs import PingPong, live_job

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]

ROUNDS = 11


@pytest.fixture(scope="module")
def offers() -> Iterator[tuple[Any, ...]]:
    from harness.live.processes import launch  # here, because it imports Ray, whose settings must be made before

    before = os.environ.get("PYTHONPATH")
    os.environ["PYTHONPATH"] = str(Path(__file__).parents[2])  # so that Ray's processes can import the job
    try:
        with launch.cluster(None) as found:
            yield found
    finally:
        if before is None:
            del os.environ["PYTHONPATH"]
        else:
            os.environ["PYTHONPATH"] = before


def by_turns(benchmark: Any, measured: Any, against: Any, iterations: int) -> float:
    """The ratio of the best times; with medians, milliseconds, and CPU time, which others on the machine disturb less."""
    for each in (measured, against):
        each.iteration_seconds(iterations)
    used = [-each.cpu_seconds() for each in (measured, against)]
    times = [(measured.iteration_seconds(iterations), against.iteration_seconds(iterations)) for _ in range(ROUNDS)]
    used = [before + each.cpu_seconds() for before, each in zip(used, (measured, against), strict=True)]
    mine, theirs = zip(*times, strict=True)
    benchmark.pedantic(lambda: measured.iteration_seconds(iterations), rounds=1)
    benchmark.extra_info.update(
        ratio_of_medians=statistics.median(mine) / statistics.median(theirs),
        milliseconds=[round(min(mine) * 1e3, 3), round(min(theirs) * 1e3, 3)],
        ratio_of_cpu_seconds=used[0] / used[1],
    )
    return min(mine) / min(theirs)


def assert_every_push_counted(job: Any) -> None:
    model = job.model()
    assert model.min() == model.max() == job.pushes > 0


@pytest.mark.parametrize(("size", "iterations", "reach"), [(10_000, 500, 3.0), (1_000_000, 200, 1.5)])
@pytest.mark.parametrize(
    ("transport", "how", "place", "encrypted"),
    [
        ("zmq", "shared memory / bare pyzmq, TCP", "tcp://127.0.0.1:*", False),
        ("zmq", "shared memory / bare pyzmq, Unix", "ipc://*", False),
        ("tcp", "TCP / bare pyzmq, TCP", "tcp://127.0.0.1:*", False),
        ("tcp", "TCP / bare pyzmq, TCP, both with CURVE", "tcp://127.0.0.1:*", True),
    ],
    ids=["shared", "shared-unix", "tcp", "curve"],
)
def test_iteration_against_bare_ping_pong(
    benchmark: Any,
    offers: Any,
    size: int,
    iterations: int,
    reach: float,
    transport: str,
    how: str,
    place: str,
    encrypted: bool,
) -> None:
    """With few parameters, the number of messages in sequence counts: four in a cycle of the job, two with bare pyzmq.

    The live job on one machine uses shared memory, its default, or only TCP; it encrypts what goes over sockets. Bare pyzmq
    does not, unless both do, and uses TCP, or the transport that is fastest for it on one machine.
    """
    with live_job(offers, size, transport=transport) as job, closing(PingPong(size, place, encrypted=encrypted)) as bare:
        ratio = by_turns(benchmark, job, bare, iterations)
        assert_every_push_counted(job)
    what = f"live iteration, {how}: {size:,} parameters"
    benchmark.extra_info.update(what=what, ratio=ratio, reach=reach)


@pytest.mark.parametrize(("size", "iterations"), [(10_000, 100), (1_000_000, 20)])
def test_ray_calls_against_sockets(benchmark: Any, offers: Any, size: int, iterations: int) -> None:
    with live_job(offers, size, transport="ray") as job, live_job(offers, size, transport="tcp") as sockets:
        ratio = by_turns(benchmark, job, sockets, iterations)
        assert_every_push_counted(job)
        assert_every_push_counted(sockets)
    benchmark.extra_info.update(what=f"Ray calls / pyzmq, TCP: {size:,} parameters", ratio=ratio, reach=1.0)
