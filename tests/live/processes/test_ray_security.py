"""Who can reach Ray's services, and which clusters are refused."""

import os
import subprocess
import sys
import threading
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from queue import SimpleQueue

import pytest
import ray

from harness.live.processes import launch
from harness.live.processes.actors import Endpoint, ProcessSpec
from harness.live.protocol.blocks import Layout
from harness.machines.machine import versions
from harness.machines.ray_cluster import protected
from tests.live.support.clusters import alone


@pytest.mark.parametrize(
    ("settings", "is_protected"),
    [
        ({}, False),
        ({"RAY_AUTH_MODE": "disabled"}, False),
        ({"RAY_AUTH_MODE": "token"}, True),
        ({"RAY_USE_TLS": "1"}, True),
        ({"RAY_USE_TLS": "true"}, True),
        ({"RAY_USE_TLS": "0"}, False),
    ],
)
def test_a_cluster_of_several_machines_needs_a_token_or_tls(monkeypatch, settings, is_protected):
    for name in ("RAY_AUTH_MODE", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    for name, value in settings.items():
        monkeypatch.setenv(name, value)
    assert protected() == is_protected
    launch._check_protected("h:1", {"10.0.0.1"})
    if is_protected:
        launch._check_protected("h:1", {"10.0.0.1", "10.0.0.2"})
    else:
        with pytest.raises(ValueError, match=r"at h:1: it has 2 machines and neither .*ray get-auth-token.*--insecure"):
            launch._check_protected("h:1", {"10.0.0.1", "10.0.0.2"})


def test_a_process_does_not_start_on_a_machine_without_either(monkeypatch):
    for name in ("RAY_AUTH_MODE", "RAY_USE_TLS"):
        monkeypatch.delenv(name, raising=False)
    process = ProcessSpec("server/n0", 1, "c", Endpoint("zmq", "a"), False, True, Layout(8, 4), "sgd", "each")
    with pytest.raises(RuntimeError, match="Ray has neither a token nor TLS on this machine"):
        process.run(SimpleQueue(), threading.Event())


def test_a_process_does_not_start_on_a_machine_with_another_version_or_other_code():
    process = ProcessSpec("server/n0", 1, "c", Endpoint("zmq", "a"), False, False, Layout(8, 4), "sgd", "each")
    other = replace(process, versions={**versions(), "code of ps-harness": "12345678"})
    words = r"This machine has code of ps-harness [\da-f]{8}, and the driver's has 12345678: install the same"
    with pytest.raises(RuntimeError, match=words):
        other.run(SimpleQueue(), threading.Event())


PRIVATE = """
import sys
import ray
from harness.live.processes import launch
with launch.cluster(None) as offers:
    print(offers[0].host, ray.get_runtime_context().gcs_address, flush=True)
    sys.stdin.read()
"""


@contextmanager
def private_cluster(**settings):
    """A process that has a cluster of its own; yields its number, the node's address, and where it is joined."""
    process = subprocess.Popen(  # noqa: S603
        [sys.executable, "-c", PRIVATE], env=os.environ | settings, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    with process:
        yield process.pid, *process.stdout.readline().split()
        process.stdin.close()
    assert process.returncode == 0


@pytest.mark.parametrize("address", [None, "h:1"], ids=["private", "joined"])
def test_services_of_a_job_s_cluster_do_not_talk_to_the_user(monkeypatch, address):
    """For each machine that is lost, Ray prints a stack trace of twenty lines."""
    own, seen = ray._private.worker.listen_error_messages, []

    @contextmanager
    def begin(_):
        seen.append(ray._private.worker.listen_error_messages)
        raise ValueError("seen")
        yield

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setattr(launch, "joined", begin)
    monkeypatch.setattr(launch, "private_cluster", begin)
    with pytest.raises(ValueError, match="seen"), launch.cluster(address):
        pass
    assert seen != [own]
    assert ray._private.worker.listen_error_messages is own


@pytest.mark.timeout(300)
def test_a_private_cluster_is_reached_from_this_machine_only():
    with alone(), private_cluster() as (process, host, _):
        ours = set(_descendants(process))
        found = [place for owner, place in _listening() if owner in ours]
        assert len(found) >= 4  # GCS, raylet and its agents, the process itself
        assert {host, *found} == {"127.0.0.1"}


@pytest.mark.live
@pytest.mark.timeout(300)
def test_a_private_cluster_is_joined_with_its_token_only():
    disabled = {"RAY_AUTH_MODE": "disabled"}  # for another cluster
    told = "import sys; from ray._raylet import GcsClient; GcsClient(address=sys.argv[1]); print('joined')"
    stranger = os.environ | {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": "0" * 64}
    with alone(), private_cluster(**disabled) as (_, _, address):
        joined = subprocess.run(  # noqa: S603
            [sys.executable, "-c", told, address], env=stranger, capture_output=True, text=True, timeout=90, check=False
        )
        assert "joined" not in joined.stdout
        assert "InvalidAuthToken" in joined.stderr


SILENT = """
import os, signal, subprocess, sys, time
import ray
from harness.live.processes import launch
with launch.cluster(None):
    raylet = int(subprocess.check_output(["pgrep", "-P", str(os.getpid()), "-f", "raylet/raylet"]))
    for what in (signal.SIGSTOP, signal.SIGCONT):
        os.kill(raylet, what)
        time.sleep(8.0)
    print([node["Alive"] for node in ray.nodes()])
"""


@pytest.mark.live
@pytest.mark.timeout(300)
def test_a_private_cluster_outlives_seconds_in_which_its_machine_does_not_answer():
    with alone():
        seen = subprocess.run([sys.executable, "-c", SILENT], capture_output=True, text=True, timeout=250, check=False)  # noqa: S603
    assert seen.stdout == "[True]\n", seen.stderr[-1000:]


def _descendants(process):
    found = [process]
    for pid in found:
        for task in Path(f"/proc/{pid}/task").glob("*/children"):
            found += map(int, task.read_text().split())
    return found


def _listening():
    """(process, address) of every TCP socket that listens."""
    inodes = {}
    for table in ("tcp", "tcp6"):
        for row in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            fields = row.split()
            if fields[3] == "0A":
                inodes[fields[9]] = _address(fields[1].partition(":")[0])
    found = []
    for link in Path("/proc").glob("[0-9]*/fd/*"):
        try:
            name = str(link.readlink())
        except OSError:
            continue
        if name.startswith("socket:[") and name[8:-1] in inodes:
            found.append((int(link.parts[2]), inodes[name[8:-1]]))
    return found


def _address(text):
    words = [bytes.fromhex(text[i : i + 8])[::-1] for i in range(0, len(text), 8)]
    if len(words) == 4 and words[:2] == [bytes(4)] * 2 and words[2] == b"\0\0\xff\xff":
        words = words[3:]
    return ".".join(map(str, words[0])) if len(words) == 1 else b"".join(words).hex()
