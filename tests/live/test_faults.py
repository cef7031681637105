"""Whatever is killed, hung or cut off: a live job trains again within ten seconds, and its model counts every push once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator

import numpy as np
import pytest

from harness.ray_cluster import joined  # noqa: F401 (imports Ray after its settings are made)
from live.faults import Patient, deployed
from live.namespaces import NamespaceCluster
from live.ones import ONES, Ones, counted
from tuners.actions import Reconfigure, Rejected, Run

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

SPEC = Ones("ones", "ones.toml", ONES, 0)


@pytest.fixture(scope="module")
def patient(namespace_cluster: NamespaceCluster) -> Iterator[Patient]:
    with namespace_cluster.inside(0), deployed(SPEC, namespace_cluster) as made:
        yield made


def kill(name: str) -> Callable[[Patient], None]:
    return lambda patient: os.kill(patient.find(name)[0], signal.SIGKILL)


def hang(name: str) -> Callable[[Patient], None]:
    return lambda patient: os.kill(patient.find(name)[0], signal.SIGSTOP)


def kill_node(name: str) -> Callable[[Patient], None]:
    return lambda patient: patient.cluster.kill(patient.find(name)[1])


def hang_node(name: str) -> Callable[[Patient], None]:
    return lambda patient: patient.cluster.signal(patient.find(name)[1], signal.SIGSTOP)


def cut_off(name: str) -> Callable[[Patient], None]:
    return lambda patient: patient.cluster.cut_link(patient.find(name)[1])


FAULTS = {
    "worker killed": kill("worker/n0"),
    "server killed": kill("server/n2"),
    "coordinator killed": kill("coordinator"),
    "worker hung": hang("worker/n1"),
    "server hung": hang("server/n3"),
    "worker's node killed": kill_node("worker/n0"),
    "server's node killed": kill_node("server/n2"),
    "worker's node hung": hang_node("worker/n1"),
    "server's node hung": hang_node("server/n3"),
    "worker's node cut off": cut_off("worker/n0"),
    "server's node cut off": cut_off("server/n2"),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_training_resumes_within_ten_seconds_and_no_push_is_lost(patient: Patient, fault: str) -> None:
    cluster = patient.cluster
    patient.live.perform(Run(clocks=50))
    before = patient.live.glimpse().clocks
    since = time.monotonic()
    FAULTS[fault](patient)
    resumed = patient.seconds_to_resume(since)
    for index in range(1, 6):  # what is broken is replaced, and the job is what it was
        repair(cluster, index)
    whole = patient.whole()
    clocks, lost, parameters = counted(patient.live)
    print(json.dumps({fault: round(resumed, 2), "whole again": round(whole, 2)}))  # noqa: T201
    assert resumed < 10
    assert clocks > before
    assert lost == 0
    assert np.array_equal(parameters, np.full_like(parameters, clocks))


def repair(cluster: NamespaceCluster, index: int) -> None:
    """Start a node anew that is gone, or that Ray takes for dead."""
    import ray

    cluster.mend_link(index)
    if index in cluster.nodes and not any(n["Alive"] and n["NodeManagerAddress"] == cluster.ip(index) for n in ray.nodes()):
        cluster.kill(index)
    if index not in cluster.nodes:
        cluster.start([index], cpus=1)


@pytest.mark.timeout(3600)
def test_a_thousand_reconfigurations_and_kills_and_every_push_counts_once(patient: Patient) -> None:
    draw = np.random.default_rng(0)
    space, methods = patient.live.job.space, patient.live.job.methods
    done = killed = 0
    refused: Counter[str] = Counter()
    wanted = int(os.environ.get("LIVE_RECONFIGURATIONS", "1000"))
    while done < wanted:
        setting = space.setting(space.sample(draw))
        if not setting.workers or not setting.servers:
            continue
        try:
            method = methods[int(draw.choice(len(methods), p=[0.02, 0.49, 0.49]))]
            patient.live.perform(Reconfigure(setting, method=method, wait=bool(draw.random() < 0.5)))
            done += 1
        except Rejected as error:
            refused[str(error)[:40]] += 1
        patient.live.perform(Run(clocks=int(draw.integers(1, 20))))
        if draw.random() < 0.05:
            names = [*sorted(patient.live._control.runtime.seen.members), "coordinator"]  # those that are there just now
            kill(names[int(draw.integers(len(names)))])(patient)
            killed += 1
            patient.live.perform(Run(clocks=20))
        if done % min(100, wanted) == 0:
            clocks, parameters = patient.counted()
            print(done, "done", dict(refused), "refused", killed, "killed", clocks, "clocks", flush=True)  # noqa: T201
            assert np.array_equal(parameters, np.full_like(parameters, clocks))
