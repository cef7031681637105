"""The cluster of network namespaces does what it says: addresses, links, quotas, faults, and nothing of it left behind."""

from __future__ import annotations

import json
import signal
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from harness.machines.ray_cluster import joined
from tests.live.support.clusters import Cluster, loop_network
from tests.live.support.namespaces import NamespaceCluster

pytestmark = pytest.mark.live


@pytest.fixture
def ray_on_host(namespace_cluster: NamespaceCluster) -> Iterator[Any]:
    import ray

    with namespace_cluster.inside(0), joined(namespace_cluster.address):
        yield ray


def until(wanted: Callable[[], bool], seconds: float = 15.0) -> float:
    """Seconds until it is so."""
    started = time.monotonic()
    while not wanted():
        assert time.monotonic() - started < seconds
        time.sleep(0.02)
    return time.monotonic() - started


def alive(ray: Any, cluster: Cluster, index: int) -> bool:
    return any(n["Alive"] and n["NodeManagerAddress"] == cluster.ip(index) for n in ray.nodes())


def test_each_node_has_an_address_and_a_network_of_its_own(namespace_cluster: NamespaceCluster, ray_on_host: Any) -> None:
    def place() -> tuple[str, bool]:
        return ray_on_host.util.get_node_ip_address(), "eth0" in [name for _, name in socket.if_nameindex()]

    where = ray_on_host.remote(place)
    seen = ray_on_host.get([where.options(resources={f"node_{i}": 1}).remote() for i in range(1, 5)])
    assert seen == [(namespace_cluster.ip(i), True) for i in range(1, 5)]


def send(cluster: NamespaceCluster, source: int, target: int, megabytes: int) -> float:
    """Seconds for so many bytes over TCP from one host to another."""
    with cluster.inside(target):
        server = socket.create_server((cluster.ip(target), 0))

    def serve() -> None:
        line, _ = server.accept()
        with line:
            while line.recv(1 << 20):
                pass
            line.sendall(b"all")

    thread = threading.Thread(target=serve)
    thread.start()
    with server, cluster.inside(source), socket.create_connection(server.getsockname()) as line:
        started = time.monotonic()
        line.sendall(bytes(megabytes * 10**6))
        line.shutdown(socket.SHUT_WR)
        line.recv(3)
        seconds = time.monotonic() - started
    thread.join()
    return seconds


def test_links_carry_what_they_are_set_to(namespace_cluster: NamespaceCluster) -> None:
    cluster = namespace_cluster
    cluster.set_rate(1, 80)
    received = cluster.carried_bytes(2)[0]
    shaped = send(cluster, 1, 2, 10)
    assert cluster.carried_bytes(2)[0] - received >= 10**7
    assert 8 * 9.99 / 80 <= shaped < 1.6  # a bucket lets through at once what it holds, a few packets
    assert send(cluster, 2, 1, 10) >= 8 * 9.99 / 80  # both ways
    assert send(cluster, 2, 3, 10) < 0.8  # the others are as fast as before
    cluster.set_rate(1, None)
    assert send(cluster, 1, 2, 10) < 0.8


def test_quotas_limit_what_a_node_computes(namespace_cluster: NamespaceCluster, ray_on_host: Any) -> None:
    def spin(seconds: float) -> float:
        used, end = time.process_time(), time.monotonic() + seconds
        while time.monotonic() < end:
            pass
        return (time.process_time() - used) / seconds

    spinning = ray_on_host.remote(spin).options(resources={"node_2": 1})
    ray_on_host.get(spinning.remote(0.01))  # the process is there
    namespace_cluster.set_quota(2, 0.2)
    slow = ray_on_host.get(spinning.remote(2.0))
    namespace_cluster.set_quota(2, None)
    assert 0.05 < slow < 0.25


def test_a_node_that_is_killed_stopped_or_cut_off_is_noticed_and_can_come_back(
    namespace_cluster: NamespaceCluster, ray_on_host: Any
) -> None:
    cluster = namespace_cluster
    seconds = {}
    cluster.kill(3)
    seconds["killed"] = until(lambda: not alive(ray_on_host, cluster, 3))
    cluster.start([3], cpus=1)
    seconds["started again"] = until(lambda: alive(ray_on_host, cluster, 3))
    cluster.signal(3, signal.SIGSTOP)
    seconds["stopped"] = until(lambda: not alive(ray_on_host, cluster, 3))
    cluster.kill(3)
    cluster.cut_link(4)
    seconds["cut off"] = until(lambda: not alive(ray_on_host, cluster, 4))
    cluster.mend_link(4)
    cluster.kill(4)  # Ray ends a node that was thought dead
    cluster.start([3, 4], cpus=1)
    until(lambda: alive(ray_on_host, cluster, 3) and alive(ray_on_host, cluster, 4))
    print(json.dumps({k: round(v, 2) for k, v in seconds.items()}))  # noqa: T201
    assert max(seconds.values()) < 10


def test_nothing_is_left_of_a_cluster_started_by_command() -> None:
    cluster = Cluster(loop_network(), how="command")
    try:
        cluster.start(range(2))
        assert len(cluster.processes(1)) > 2
    finally:
        cluster.close()
    assert not cluster.folder.exists()
