"""A link that becomes slow while a job runs: its node moves or is left out, and training is as fast as before."""

from __future__ import annotations

import json
import time
from collections.abc import Iterator

import numpy as np
import pytest

from harness.machines.ray_cluster import joined  # noqa: F401 (imports Ray after its settings are made)
from tests.live.support.faults import FaultyJob, deployed
from tests.live.support.namespaces import NamespaceCluster
from tests.live.support.ones import ONES, ManyOnes, counted
from tuners.actions import Run

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

_SLOW_MEGABITS_PER_SECOND = 10.0
_USUAL_SECONDS = 8.0  # of training, from which it is known what is usual


@pytest.fixture(scope="module")
def job(namespace_cluster: NamespaceCluster) -> Iterator[FaultyJob]:
    with namespace_cluster.inside(0), deployed(ManyOnes("ones", "ones.toml", ONES, 0), namespace_cluster) as made:
        yield made


def clocks_per_second(job: FaultyJob, seconds: float = _USUAL_SECONDS) -> float:
    """Of the next seconds."""
    job.live.perform(Run(clocks=1))
    return job.live.perform(Run(seconds=seconds)).clocks / seconds


def until_event(job: FaultyJob, what: str, within: float = 30.0) -> float:
    """Seconds until an event says so."""
    started = time.monotonic()
    while not any(what in said for _, said in job.live.job_status().events):
        assert time.monotonic() - started < within, job.latest_events()
        job.live.perform(Run(seconds=0.1))
    return time.monotonic() - started


def test_a_server_with_a_slow_link_moves_to_the_spare_machine_and_a_worker_without_one_is_left_out(job: FaultyJob) -> None:
    cluster, live = job.cluster, job.live
    assert isinstance(cluster, NamespaceCluster)
    usual = clocks_per_second(job)
    before = job.find("server/n2")[1]
    cluster.set_rate(before, _SLOW_MEGABITS_PER_SECOND)
    found = until_event(job, "server/n2 is lost: its link is slow")
    whole = job.whole()
    again = clocks_per_second(job)
    clocks, lost, parameters = counted(live)
    assert job.find("server/n2")[1] != before
    assert (lost, set(parameters)) == (0, {clocks})
    assert again > usual / 2

    cluster.set_rate(job.find("worker/n0")[1], _SLOW_MEGABITS_PER_SECOND)
    left_out = until_event(job, "worker/n0 is lost: its link is slow")
    alone = clocks_per_second(job)
    clocks, lost, parameters = counted(live)
    print(  # noqa: T201
        json.dumps({"usual": usual, "found": found, "whole": whole, "again": again, "left out": left_out, "alone": alone})
    )
    assert live.job_status().setting.workers == ("n1",)
    assert (lost, set(parameters)) == (0, {clocks})
    assert alone > usual / 4  # half as many workers
    assert np.isfinite(parameters).all()
