"""Comparisons over a Ray cluster: the bytes of one machine, whatever is killed meanwhile, and nothing left behind."""

from __future__ import annotations

import os
import shutil
import socket
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

import pytest

from harness.comparison import ray_pool
from harness.comparison.compare import Event, Finished, Planned, Underway
from harness.comparison.run_process import Task
from harness.machines import ray_cluster
from harness.machines.machine import versions
from tests.harness.comparison.test_compare import run, without_host
from tests.live.support.clusters import Cluster
from tests.support import arena
from traces import store

TUNERS = ("fixed", "tests.support.arena:slow", "tests.support.arena:dies")


@pytest.fixture
def tiny(tmp_path: Path) -> Path:
    path = tmp_path / "tiny.toml"
    path.write_text(arena.TINY)
    return path


def at_work(cluster: Cluster, index: int) -> list[int]:
    """The processes on a node that make runs."""
    return [pid for pid, command in cluster.processes(index).items() if "harness.comparison.run_process" in command]


def nobody_at_work(cluster: Cluster) -> bool:
    """Once those who were stopped have ended."""
    deadline = time.monotonic() + 60
    while any(at_work(cluster, i) for i in cluster.nodes) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not any(at_work(cluster, i) for i in cluster.nodes)


def left_behind() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("harness-on-ray-*"))


@pytest.mark.timeout(300)
def test_a_cluster_gives_the_bytes_of_one_machine(tiny: Path, tmp_path: Path, loop_cluster: Cluster) -> None:
    before = left_behind()
    run(tiny, tmp_path / "here", "fixed", jobs=1, seeds=2)
    run(tiny, tmp_path / "there", "fixed", address=loop_cluster.address, seeds=2)
    assert without_host(tmp_path / "there") == without_host(tmp_path / "here")
    assert nobody_at_work(loop_cluster)
    assert left_behind() == before


@pytest.mark.live
@pytest.mark.timeout(300)
def test_a_cluster_gives_the_bytes_of_one_machine_though_it_is_interrupted_and_loses_nodes(
    tiny: Path, tmp_path: Path, loop_cluster: Cluster
) -> None:
    cluster, before = loop_cluster, left_behind()
    run(tiny, tmp_path / "here", *TUNERS, jobs=1, seeds=1)

    def interrupt(event: Event) -> None:
        if isinstance(event, Underway):
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run(tiny, tmp_path / "there", *TUNERS, address=cluster.address, seeds=1, watch=interrupt)
    assert nobody_at_work(cluster)
    assert left_behind() == before
    made = store.load_results(tmp_path / "there").scores.height

    told: list[Event] = []
    killed: list[int] = []

    def kill(event: Event) -> None:
        told.append(event)
        if isinstance(event, Underway) and not killed:
            killed.extend(i for i in list(cluster.nodes) if at_work(cluster, i))
            for index in killed[:2]:  # the slow run is on one of them, and goes to what is left
                cluster.kill(index)

    run(tiny, tmp_path / "there", *TUNERS, address=cluster.address, seeds=1, resume=True, watch=kill)
    assert killed
    assert without_host(tmp_path / "there") == without_host(tmp_path / "here")
    assert isinstance(told[0], Planned)
    assert sum(isinstance(e, Finished) for e in told) == told[0].runs - told[0].made_before >= 2 - made
    for folder in left_behind() - before:  # of the nodes that lost power, which are this machine
        shutil.rmtree(folder)
    cluster.start(killed[:2])


def test_a_node_with_other_versions_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.chdir(tmp_path)
    worker = ray_pool.NodeWorker([], str(tmp_path))
    with pytest.raises(ValueError, match=r"Cannot use node .*: it has jax [\d.]+, and this is 0\.0\.1\. Install the same"):
        worker.start({**versions(), "jax": "0.0.1"})


def test_a_run_that_loses_every_node_becomes_a_row(tmp_path: Path) -> None:
    task = Task("tiny", "", "", "fixed", "fixed", 0, str(tmp_path))
    lost, losses = ray_pool.NodeLost("The actor died."), Counter({str(tmp_path): 2, "": 2})
    assert ray_pool.lost_for_good(task, lost, losses) is None
    losses[str(tmp_path)] += 1
    row = ray_pool.lost_for_good(task, lost, losses)
    assert row is not None
    assert row.reason == "The nodes that made this run were lost, 3 in a row. Ray says: The actor died."
    assert ray_pool.lost_for_good(None, lost, losses) is None
    losses[""] += 1
    with pytest.raises(RuntimeError, match=r"Cannot start a worker process .*, tried 3 times: The actor died"):
        ray_pool.lost_for_good(None, lost, losses)


def test_breakpoints_of_a_tuner_stay_pythons_own(monkeypatch: pytest.MonkeyPatch) -> None:
    """Ray sets its own, whose debugger is in another package, when a process joins it."""
    monkeypatch.delenv("PYTHONBREAKPOINT", raising=False)
    with ray_cluster.own_breakpoint():
        os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb._driver_set_trace"
    assert "PYTHONBREAKPOINT" not in os.environ
    monkeypatch.setenv("PYTHONBREAKPOINT", "0")
    with ray_cluster.own_breakpoint():
        os.environ["PYTHONBREAKPOINT"] = "ray.util.rpdb._driver_set_trace"
    assert os.environ["PYTHONBREAKPOINT"] == "0"


def test_addresses_where_no_cluster_is_are_refused_before_anything_is_written(
    tiny: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ray_cluster, "_ANSWER_SECONDS", 0.5)
    with socket.create_server(("127.0.0.1", 0)) as server:
        mute = f"127.0.0.1:{server.getsockname()[1]}"
        for address, message in (
            (mute, "what listens there says nothing"),
            ("127.0.0.1:1", "nobody answers there .Connection refused"),
            ("nowhere", "'nowhere': write HOST:PORT"),
            ("ray://nowhere:99999", "write HOST:PORT"),
        ):
            with pytest.raises(ValueError, match=message):
                run(tiny, tmp_path / "out", "fixed", address=address)
    assert not (tmp_path / "out").exists()
