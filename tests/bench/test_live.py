"""The speed of the live data path: a job of two workers and two servers without compute, compared with bare pyzmq that sends
the same bytes back and forth, with plain Ray actors, and with itself on other transports. All within one run, in turn.

    pytest tests/bench/test_live.py -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from harness.live.links.emulated_links import emulated_links, why_not
from tests.bench.live_jobs import NODES, PingPong, RayActors, live_job
from tests.bench.rounds import judge

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(600), pytest.mark.filterwarnings("default")]


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


def by_turns(benchmark: Any, name: str, mine: Any, theirs: Any, iterations: int) -> None:
    """Judge the ratio of a cycle's seconds."""
    both = (partial(job.iteration_seconds, iterations) for job in (mine, theirs))
    judge(benchmark, name, *both, most=32)


def assert_every_push_counted(job: Any) -> None:
    model = job.model()
    assert model.min() == model.max() == job.pushes > 0


@pytest.mark.parametrize(("size", "iterations"), [(10_000, 500), (1_000_000, 200)])
@pytest.mark.parametrize(
    ("name", "transport", "place", "encrypted"),
    [
        ("live shared", "zmq", "tcp://127.0.0.1:*", False),
        ("live shared-unix", "zmq", "ipc://*", False),
        ("live curve", "tcp", "tcp://127.0.0.1:*", True),
    ],
)
def test_iteration_against_bare_ping_pong(
    benchmark: Any, offers: Any, size: int, iterations: int, name: str, transport: str, place: str, encrypted: bool
) -> None:
    """With few parameters, the number of messages in sequence counts: four in a cycle of the job, two with bare pyzmq.

    The live job on one machine uses shared memory, its default, or TCP, which it encrypts, as between machines. Bare pyzmq
    encrypts if the job does, and uses TCP, or the transport that is fastest for it on one machine.
    """
    with live_job(offers, size, transport=transport) as job, closing(PingPong(size, place, encrypted=encrypted)) as bare:
        try:
            by_turns(benchmark, f"{name} {size}", job, bare, iterations)
        finally:
            assert_every_push_counted(job)


@pytest.mark.skipif(bool(why_not()), reason=why_not())
@pytest.mark.parametrize(("size", "iterations"), [(10_000, 500), (1_000_000, 200)])
@pytest.mark.parametrize(("name", "steps"), [("live tcp", False), ("live steps", True)])
def test_iteration_in_networks_of_the_jobs_own(
    benchmark: Any, offers: Any, size: int, iterations: int, name: str, steps: bool
) -> None:
    """As with `--emulate`, but behind links that are not limited: TCP, and neither side encrypts. Beside the bare exchange
    of bytes, one in which servers step the model and workers put it together."""
    rates = dict.fromkeys(NODES, float("inf"))
    with (
        live_job(offers, size, rates=rates) as job,
        emulated_links(rates) as links,
        closing(PingPong(size, links=links, steps=steps)) as bare,
    ):
        try:
            by_turns(benchmark, f"{name} {size}", job, bare, iterations)
        finally:
            assert_every_push_counted(job)


@pytest.mark.parametrize(("size", "iterations"), [(10_000, 100), (1_000_000, 20)])
def test_ray_calls_against_sockets(benchmark: Any, offers: Any, size: int, iterations: int) -> None:
    with live_job(offers, size, transport="ray") as job, live_job(offers, size, transport="tcp") as sockets:
        try:
            by_turns(benchmark, f"live ray {size}", job, sockets, iterations)
        finally:
            assert_every_push_counted(job)
            assert_every_push_counted(sockets)


@pytest.mark.parametrize(("size", "iterations"), [(10_000, 100), (1_000_000, 20)])
def test_a_job_against_plain_ray_actors(benchmark: Any, offers: Any, size: int, iterations: int) -> None:
    """A parameter server that is written in an hour: it survives no loss, and counts a push before anybody else has it."""
    with live_job(offers, size) as job, closing(RayActors(size)) as actors:
        try:
            by_turns(benchmark, f"live actors {size}", job, actors, iterations)
        finally:
            assert_every_push_counted(job)
            assert_every_push_counted(actors)
