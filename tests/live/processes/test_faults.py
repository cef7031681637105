"""After any kill, hang or cut, a live job trains again within ten seconds, and its model counts every push once."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from harness.live.processes.client import RemoteCoordinator
from harness.machines.ray_cluster import joined  # noqa: F401 (imports Ray after its settings are made)
from tests.live.support.faults import FaultyJob, deployed
from tests.live.support.namespaces import NamespaceCluster
from tests.live.support.ones import ONES, Ones, counted
from tuners.actions import Reconfigure, Rejected, Run

pytestmark = [pytest.mark.live, pytest.mark.timeout(240)]

SPEC = Ones("ones", "ones.toml", ONES, 0)


@pytest.fixture(scope="module")
def job(namespace_cluster: NamespaceCluster) -> Iterator[FaultyJob]:
    with namespace_cluster.inside(0), deployed(SPEC, namespace_cluster) as made:
        yield made


def kill(name: str) -> Callable[[FaultyJob], None]:
    return lambda job: os.kill(job.find(name)[0], signal.SIGKILL)


def hang(name: str) -> Callable[[FaultyJob], None]:
    return lambda job: os.kill(job.find(name)[0], signal.SIGSTOP)


def kill_node(name: str) -> Callable[[FaultyJob], None]:
    return lambda job: job.cluster.kill(job.find(name)[1])


def hang_node(name: str) -> Callable[[FaultyJob], None]:
    return lambda job: job.cluster.signal(job.find(name)[1], signal.SIGSTOP)


def cut_off(name: str) -> Callable[[FaultyJob], None]:
    return lambda job: job.cluster.cut_link(job.find(name)[1])


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
def test_training_resumes_within_ten_seconds_and_no_push_is_lost(job: FaultyJob, fault: str) -> None:
    cluster = job.cluster
    job.live.perform(Run(clocks=50))
    before, lost_before, _ = counted(job.live)
    since = time.monotonic()
    FAULTS[fault](job)
    resumed = job.seconds_to_resume(since)
    for index in range(1, 6):  # what is broken is replaced, and the job is what it was
        repair(cluster, index)
    whole = job.whole()
    clocks, lost, parameters = counted(job.live)
    print(json.dumps({fault: round(resumed, 2), "whole again": round(whole, 2)}))  # noqa: T201
    assert resumed < 10
    assert clocks > before
    assert lost == lost_before
    assert set(parameters) == {clocks - lost}


def test_servers_killed_at_once_roll_the_job_back_to_its_last_checkpoint(job: FaultyJob) -> None:
    before, lost_before, _ = counted(job.live)
    job.live.perform(Run(clocks=100))  # or the coordinator would still have what was counted
    since = time.monotonic()
    for name in ("server/n2", "server/n3"):
        kill(name)(job)
    resumed = job.seconds_to_resume(since)
    whole = job.whole()
    clocks, lost, parameters = counted(job.live)
    print(json.dumps({"both servers killed": round(resumed, 2), "whole again": round(whole, 2), "lost": lost - lost_before}))  # noqa: T201
    assert resumed < 10
    assert clocks > before
    assert lost > lost_before
    assert set(parameters) == {clocks - lost}
    assert any("back to the checkpoint of" in what for _, what in job.live.job_status().events)


@pytest.mark.parametrize("moment", ["snapshot", "lose", "recover", "put"])
def test_a_coordinator_that_dies_during_a_restart_costs_no_more_than_the_last_checkpoint(
    job: FaultyJob, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, struck = job.live.control, list[int]()  # the clocks at that moment
    processes = control.runtime.processes
    coordinator = processes.coordinator
    assert isinstance(coordinator, RemoteCoordinator)

    def watched(asked: str, *given: Any, **named: Any) -> Any:
        answer = coordinator.ask(asked, *given, **named)
        if asked == moment and not struck:
            struck.append(job.live.job_status().clocks)
            kill("coordinator")(job)
        return answer

    job.live.perform(Run(clocks=100))  # or it would not show if the job went back to its beginning
    before, lost_before, _ = counted(job.live)
    with control.news:
        control.save()
    monkeypatch.setattr(processes, "coordinator", RemoteCoordinator(watched))
    since = time.monotonic()
    start = job.live.job.start
    cost = job.live.perform(Reconfigure(replace(start, workers=("n0", "n2")), method="checkpoint"))
    resumed = job.seconds_to_resume(since)
    clocks, lost, parameters = counted(job.live)
    said = {"coordinator killed after": moment, "resumed": round(resumed, 2), "done": cost.done, "lost": lost - lost_before}
    print(json.dumps(said))  # noqa: T201
    job.live.perform(Reconfigure(start, method="migrate"))
    assert struck
    assert clocks > before
    assert lost - lost_before <= struck[0] - before
    assert set(parameters) == {clocks - lost}


def repair(cluster: NamespaceCluster, index: int) -> None:
    """Start a node again that is gone, or that Ray takes for dead."""
    import ray

    cluster.mend_link(index)
    if index in cluster.nodes and not any(n["Alive"] and n["NodeManagerAddress"] == cluster.ip(index) for n in ray.nodes()):
        cluster.kill(index)
    if index not in cluster.nodes:
        cluster.start([index], cpus=1)


@pytest.mark.timeout(3600)
def test_a_thousand_reconfigurations_and_kills_and_every_push_counts_once(
    job: FaultyJob, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, wanted = np.random.default_rng(0), int(os.environ.get("LIVE_RECONFIGURATIONS", "1000"))
    done = killed = refused = 0
    started = time.monotonic()
    with job.history_on_failure():
        while done < wanted:
            if not reconfigure(job, draw):
                refused += 1
                job.live.perform(Run(clocks=10))
                continue
            done += 1
            job.live.perform(Run(clocks=int(draw.integers(1, 20))))
            if draw.random() < 0.1:
                killed += kill_somebody(job, draw)
                job.live.perform(Run(clocks=20))
            if done % 20 == 0 or done == wanted:
                clocks, lost, parameters = counted(job.live)
                said = f"{done} done, {refused} refused, {killed} killed, {clocks} clocks, {lost} lost"
                with capsys.disabled():
                    print(f"{time.monotonic() - started:.0f} s: {said}", flush=True)  # noqa: T201
                assert set(parameters) == {clocks - lost}


def reconfigure(job: FaultyJob, draw: np.random.Generator) -> bool:
    """Reconfigure to a random setting by a random method; returns whether that was accepted."""
    space, methods = job.live.job.space, job.live.job.methods
    setting = space.setting(space.sample(draw))
    method, wait = methods[int(draw.choice(len(methods), p=[0.02, 0.49, 0.49]))], bool(draw.random() < 0.5)
    if not (setting.workers and setting.servers):
        return False
    job.note(f"{method}{' and wait' * wait}: {setting.workers} {setting.servers} {setting.policy}")
    try:
        job.live.perform(Reconfigure(setting, method=method, wait=wait))
    except Rejected as error:
        job.note(f"refused: {error}")
        return False
    return True


def kill_somebody(job: FaultyJob, draw: np.random.Generator) -> bool:
    """Kill a process at random; returns whether it still ran."""
    names = [*sorted(job.live.control.runtime.latest.members), "coordinator"]
    name = names[int(draw.integers(len(names)))]
    job.note(f"kill {name}")
    try:
        kill(name)(job)
    except (LookupError, ProcessLookupError):  # the change under way has just ended it
        return False
    return True
