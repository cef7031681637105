"""Whatever is killed, hung or cut off: a live job trains again within ten seconds, and its model counts every push once."""

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

from harness.ray_cluster import joined  # noqa: F401 (imports Ray after its settings are made)
from tests.live.support.faults import Patient, deployed
from tests.live.support.namespaces import NamespaceCluster
from tests.live.support.ones import ONES, Ones, counted
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
    before, lost_before, _ = counted(patient.live)
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
    assert lost == lost_before
    assert set(parameters) == {clocks - lost}


def test_servers_killed_at_once_take_the_job_back_to_its_last_checkpoint(patient: Patient) -> None:
    before, lost_before, _ = counted(patient.live)
    patient.live.perform(Run(clocks=100))  # or the coordinator would still have what was counted
    since = time.monotonic()
    for name in ("server/n2", "server/n3"):
        kill(name)(patient)
    resumed = patient.seconds_to_resume(since)
    whole = patient.whole()
    clocks, lost, parameters = counted(patient.live)
    print(json.dumps({"both servers killed": round(resumed, 2), "whole again": round(whole, 2), "lost": lost - lost_before}))  # noqa: T201
    assert resumed < 10
    assert clocks > before
    assert lost > lost_before
    assert set(parameters) == {clocks - lost}
    assert any("back to what there was at" in what for _, what in patient.live.glimpse().happenings)


@pytest.mark.parametrize("moment", ["snapshot", "lose", "recover", "put"])
def test_a_coordinator_that_dies_while_everybody_restarts_takes_no_more_than_the_last_checkpoint(
    patient: Patient, moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    control, struck = patient.live._control, list[int]()  # clocks, then
    processes = control.runtime.processes
    call = processes.call

    def watched(asked: str, *given: Any, **named: Any) -> Any:
        answer = call(asked, *given, **named)
        if asked == moment and not struck:
            struck.append(patient.live.glimpse().clocks)
            kill("coordinator")(patient)
        return answer

    patient.live.perform(Run(clocks=100))  # or it would not show if the job went back to its beginning
    before, lost_before, _ = counted(patient.live)
    with control.news:
        control.do(control._saved)
    monkeypatch.setattr(processes, "call", watched)
    since = time.monotonic()
    start = patient.live.job.start
    cost = patient.live.perform(Reconfigure(replace(start, workers=("n0", "n2")), method="checkpoint"))
    resumed = patient.seconds_to_resume(since)
    clocks, lost, parameters = counted(patient.live)
    said = {"coordinator killed after": moment, "resumed": round(resumed, 2), "done": cost.done, "lost": lost - lost_before}
    print(json.dumps(said))  # noqa: T201
    patient.live.perform(Reconfigure(start, method="migrate"))
    assert struck
    assert clocks > before
    assert lost - lost_before <= struck[0] - before
    assert set(parameters) == {clocks - lost}


def repair(cluster: NamespaceCluster, index: int) -> None:
    """Start a node anew that is gone, or that Ray takes for dead."""
    import ray

    cluster.mend_link(index)
    if index in cluster.nodes and not any(n["Alive"] and n["NodeManagerAddress"] == cluster.ip(index) for n in ray.nodes()):
        cluster.kill(index)
    if index not in cluster.nodes:
        cluster.start([index], cpus=1)


@pytest.mark.timeout(3600)
def test_a_thousand_reconfigurations_and_kills_and_every_push_counts_once(
    patient: Patient, capsys: pytest.CaptureFixture[str]
) -> None:
    draw, wanted = np.random.default_rng(0), int(os.environ.get("LIVE_RECONFIGURATIONS", "1000"))
    done = killed = refused = 0
    started = time.monotonic()
    with patient.told_on_failure():
        while done < wanted:
            if not reconfigure(patient, draw):
                refused += 1
                patient.live.perform(Run(clocks=10))
                continue
            done += 1
            patient.live.perform(Run(clocks=int(draw.integers(1, 20))))
            if draw.random() < 0.1:
                killed += kill_somebody(patient, draw)
                patient.live.perform(Run(clocks=20))
            if done % 20 == 0 or done == wanted:
                clocks, lost, parameters = counted(patient.live)
                said = f"{done} done, {refused} refused, {killed} killed, {clocks} clocks, {lost} lost"
                with capsys.disabled():
                    print(f"{time.monotonic() - started:.0f} s: {said}", flush=True)  # noqa: T201
                assert set(parameters) == {clocks - lost}


def reconfigure(patient: Patient, draw: np.random.Generator) -> bool:
    """To a setting drawn at random, by a method drawn at random; whether that could be."""
    space, methods = patient.live.job.space, patient.live.job.methods
    setting = space.setting(space.sample(draw))
    method, wait = methods[int(draw.choice(len(methods), p=[0.02, 0.49, 0.49]))], bool(draw.random() < 0.5)
    if not (setting.workers and setting.servers):
        return False
    patient.note(f"{method}{' and wait' * wait}: {setting.workers} {setting.servers} {setting.policy}")
    try:
        patient.live.perform(Reconfigure(setting, method=method, wait=wait))
    except Rejected as error:
        patient.note(f"refused: {error}")
        return False
    return True


def kill_somebody(patient: Patient, draw: np.random.Generator) -> bool:
    """One of those that are there just now; whether it was still there to be killed."""
    names = [*sorted(patient.live._control.runtime.seen.members), "coordinator"]
    name = names[int(draw.integers(len(names)))]
    patient.note(f"kill {name}")
    try:
        kill(name)(patient)
    except (LookupError, ProcessLookupError):  # the change under way has just ended it
        return False
    return True
