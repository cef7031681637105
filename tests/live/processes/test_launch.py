"""Where a job's nodes live, and what becomes of its processes on a Ray cluster."""

import math
import queue
import time
from collections import Counter

import numpy as np
import pytest
import ray

from harness.live.processes import launch
from harness.live.processes.placement import ClusterNode, place_nodes
from harness.live.transport.ray_calls import RayTransport
from tests.live.support.ones import ONES, Ones
from tuners import policies
from tuners.settings import Node


def nodes(count):
    return [Node(f"n{i}", "process", 1, ("cpu",), 1e9, 1e9) for i in range(count)]


def hosts(placement):
    return {name: offer.host for name, offer in placement.places}


def test_nodes_spread_to_where_cpus_are_free():
    offers = [ClusterNode("1", "a", 4), ClusterNode("2", "b", 2), ClusterNode("3", "head", 0)]
    assert hosts(place_nodes(nodes(5), offers)) == {"n0": "a", "n1": "a", "n2": "a", "n3": "b", "n4": "a"}


def test_a_node_is_placed_where_a_resource_has_its_name():
    offers = [ClusterNode("1", "a", 4), ClusterNode("2", "b", 1, frozenset({"n3", "memory"}))]
    assert hosts(place_nodes(nodes(4), offers)) == {"n0": "a", "n1": "a", "n2": "a", "n3": "b"}


def test_cpus_of_a_private_cluster_are_not_counted():
    placement = place_nodes(nodes(2), [ClusterNode("1", "127.0.0.2", math.inf)])
    assert str(placement) == "n0  on 127.0.0.2\nn1  on 127.0.0.2"


def test_a_placement_as_text_names_the_cpus():
    assert str(place_nodes(nodes(2), [ClusterNode("1", "a", 4)], cpus_per_node=2)) == "n0  on a, 2 CPU\nn1  on a, 2 CPU"


@pytest.mark.parametrize(
    ("offers", "words"),
    [
        ([], "it has 0 nodes, with these CPUs: none. Add nodes to it, or deploy a smaller scenario."),
        (
            [ClusterNode("1", "a", 2), ClusterNode("2", "b", 1)],
            "Cannot place 4 nodes of 1 CPU each on .* 2 nodes, .* CPUs: a: 2, b: 1",
        ),
        (
            [ClusterNode("1", "a", 9), ClusterNode("2", "b", 0, frozenset({"n2"}))],
            r"each \(n2 only where a resource has its name\)",
        ),
    ],
    ids=["none", "too few", "too few where it must be"],
)
def test_too_few_nodes_or_cpus(offers, words):
    with pytest.raises(ValueError, match=words):
        place_nodes(nodes(4), offers)


# ------------------------------------------------------------------------------------------------------------------- Ray


def until(so, seconds=30.0):
    began = time.monotonic()
    while not (found := so()):
        assert time.monotonic() - began < seconds, f"not within {seconds} s"
        time.sleep(0.05)
    return found


@pytest.mark.live
@pytest.mark.timeout(300)
def test_processes_on_nodes_that_die_are_noticed_and_replaced(loop_cluster):
    spec = Ones("ones", "ones.toml", ONES, 0)
    servers = ["server/n2", "server/n3"]
    with launch.cluster(loop_cluster.address) as offers:
        placement = launch.place_nodes(spec.job.nodes, offers)
        with launch.launch(placement, spec) as processes:
            assert processes.nodes == {"n0", "n1", "n2", "n3"}
            with pytest.raises(KeyError):
                processes.coordinator.saved(17)
            processes.coordinator.begin(spec.job.start, policies.bsp(), spec.parameters)
            processes.start(servers)
            until(lambda: processes.coordinator.members == dict.fromkeys(servers, 1))
            assert processes.lost() == {}

            home = hosts(placement)["n3"]
            gone = {name for name, host in hosts(placement).items() if host == home}
            loop_cluster.kill(next(i for i in loop_cluster.nodes if loop_cluster.ip(i) == home))
            lost = until(processes.lost)
            assert lost.keys() == {s for s in servers if s.partition("/")[2] in gone}
            assert all("died" in why or "nothing was heard" in why for why in lost.values())
            until(lambda: processes.nodes.isdisjoint(gone))
            until(lambda: processes.nodes == {"n0", "n1", "n2", "n3"})
            assert sorted(Counter(processes.machines.values()).values()) == [2, 2]  # not all on one machine
            processes.start(lost)
            until(lambda: processes.coordinator.members == {s: 1 + (s in lost) for s in servers})
    left = [line for i in loop_cluster.nodes for line in loop_cluster.processes(i).values() if "ray::_" in line]
    assert left == []


class Echo:
    """An actor that has the other transport's end."""

    def __init__(self, name):
        self.inbox = queue.SimpleQueue()
        self.transport = RayTransport(name, self.inbox)

    @ray.method(concurrency_group="inbox")
    def deliver(self, frames):
        self.inbox.put(frames)

    def send(self, address, count, size):
        array = np.arange(size, dtype=np.float32)
        self.transport.send("other", [b"lost"])
        self.transport.connect("other", address)
        for i in range(count):
            self.transport.send("other", [b"%d" % i, array.data])
        self.transport.connect("other", "nobody/0")
        self.transport.send("other", [b"lost"])

    def received(self, count):
        found = [self.transport.receive(10.0).frames for _ in range(count)]
        assert self.transport.receive(0.1) is None
        assert self.transport.receive(0.0) is None
        return [(bytes(first), np.frombuffer(array, np.float32).sum()) for first, array in found]


@pytest.mark.live
@pytest.mark.timeout(300)
def test_ray_calls_carry_frames_in_order(loop_cluster):
    with launch.cluster(loop_cluster.address):
        echo = ray.remote(num_cpus=0, concurrency_groups={"inbox": 1})(Echo)
        one, other = (echo.options(name=name).remote(name) for name in ("one", "other"))
        ray.get(other.received.remote(0))
        ray.get(one.send.remote("other", 100, 1000))
        assert ray.get(other.received.remote(100)) == [(b"%d" % i, 499500.0) for i in range(100)]
