"""Where a job's nodes live, and what becomes of its processes on a Ray cluster."""

import json
import math
import os
import queue
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import jax.numpy as jnp
import numpy as np
import pytest
import ray

from harness.live.processes import launch, node_rooms
from harness.live.processes.client import RemoteCoordinator
from harness.live.processes.node_rooms import NodeRooms
from harness.live.processes.placement import ClusterNode, place_nodes
from harness.live.processes.runtime import starting_words
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


def test_workers_of_nodes_with_a_gpu_get_one_each():
    """Where none is left, a node computes on its CPU; nodes without leave machines with GPUs to the others."""
    mixed = [Node(f"n{i}", "x", 1, ("cpu", "gpu") if i % 2 else ("cpu",), 1e9, 1e9) for i in range(6)]
    offers = [
        ClusterNode("1", "plain", 4),
        ClusterNode("2", "two", 2, gpus=2),
        ClusterNode("3", "named", 1, frozenset({"n0"})),
    ]
    placement = place_nodes(mixed, offers)
    assert hosts(placement) == {"n0": "named", "n1": "two", "n2": "plain", "n3": "two", "n4": "plain", "n5": "plain"}
    assert placement.accelerated == {"n1", "n3"}
    assert "\nn1      on two, 1 CPU, 1 GPU\n" in str(placement)
    assert str(placement).endswith("\nn4, n5  on plain, 1 CPU each")


PRETENDED = """
import json, sys
import ray
from harness.live.processes import launch, node_rooms
from harness.live.processes.client import RemoteCoordinator
from harness.live.processes.node_rooms import NodeRooms
from harness.live.protocol.names import peers
from tests.live.support.ones import ONES, Ones

init = ray.init
ray.init = lambda **given: init(**given, num_gpus=2)  # so many, whatever this machine has
spec = Ones("ones", "ones.toml", sys.argv[1], 0)
with launch.cluster(None) as offers:
    placement = launch.place_nodes(spec.job.nodes, offers)
    with launch.launch(placement, spec) as processes:
        names = peers(spec.job.start)
        processes.start(names)
        seen = {n: ray.get(processes._actors[n].devices.remote(), timeout=60) for n in names}
        print(json.dumps(seen))
"""


@pytest.mark.live
@pytest.mark.timeout(200)
def test_each_worker_sees_a_device_of_its_own():
    """With two devices that are only pretended."""
    text = ONES.replace('type = "process", count = 4', 'type = "g2.2xlarge", count = 4')
    made = subprocess.run(  # noqa: S603
        [sys.executable, "-c", PRETENDED, text], capture_output=True, text=True, timeout=180, check=False
    )
    assert made.returncode == 0, made.stderr
    seen = json.loads(made.stdout.splitlines()[-1])
    assert sorted([seen["worker/n0"], seen["worker/n1"]]) == ["0", "1"]
    assert seen["server/n2"] == seen["server/n3"] == ""


MEMORY = """
import os
import ray
from harness.live.processes import launch, node_rooms
from harness.live.processes.client import RemoteCoordinator
from harness.live.processes.node_rooms import NodeRooms

def chosen():
    return [os.environ.get(name) for name in ("PYTHONMALLOC", "GLIBC_TUNABLES")]

before = dict(os.environ)
with launch.cluster(None):
    print(*ray.get(ray.remote(num_cpus=0)(chosen).remote(), timeout=60))
assert os.environ == before
"""


@pytest.mark.live
@pytest.mark.timeout(200)
def test_processes_have_large_pages_and_what_the_user_has_chosen_stays():
    env = {name: value for name, value in os.environ.items() if name != "GLIBC_TUNABLES"} | {"PYTHONMALLOC": "pymalloc"}
    made = subprocess.run(  # noqa: S603
        [sys.executable, "-c", MEMORY], env=env, capture_output=True, text=True, timeout=180, check=False
    )
    assert made.returncode == 0, made.stderr
    assert made.stdout.split()[-2:] == ["pymalloc", "glibc.malloc.hugetlb=1"]


@pytest.mark.parametrize("count", [1, 2])
def test_a_lost_process_is_told_with_its_machine_where_there_are_several(monkeypatch, tmp_path, count):
    """An operator of several machines has to know at which one to look."""
    offers = [ClusterNode(str(i), f"10.0.0.{i}", 2) for i in range(count)]
    placement = place_nodes(nodes(2), offers)
    options = {"insecure": True, "emulates": False, "links": None, "join_seconds": 1.0, "silent_seconds": 3.0}
    processes = launch.JobProcesses(placement, Ones("ones", "ones.toml", ONES, 0), "zmq", tmp_path, **options)
    processes.coordinator = RemoteCoordinator(lambda name, *given: {"worker/n1": 0} if name == "silent" else None)
    processes._actors = dict.fromkeys(("worker/n0", "worker/n1", "evaluator"))
    monkeypatch.setattr(processes._rooms, "take_gone", lambda: {"n0"})
    processes._note_gone()
    where = {name: f" (on {hosts(placement)[name[-2:]]})" if count > 1 else "" for name in ("worker/n0", "worker/n1")}
    assert processes.lost() == {
        "worker/n0": f"the machine has left the Ray cluster{where['worker/n0']}",
        "worker/n1": f"nothing was heard for 3 s: hanging, or cut off{where['worker/n1']}",
    }


def test_processes_that_are_not_up_yet_are_named_with_their_machines():
    hosts_of = {
        "server/n2": "10.0.0.2",
        "worker/n0": "10.0.0.1",
        "worker/n1": "10.0.0.2",
        "worker/evaluator": "",
        "worker/n3": "x",
    }
    words = starting_words(hosts_of, {"worker/n3": 4.0}, hosts_of.__getitem__)
    assert words == (
        "compiling, 4 s: worker/n3; "
        "not up yet: server/n2, worker/n1 (on 10.0.0.2), worker/n0 (on 10.0.0.1), worker/evaluator"
    )


def test_why_a_process_could_not_begin_is_told(monkeypatch):
    """Ray's text has tracebacks, and ends with what happened: a machine lacks the package, or a library."""
    text = "\n  File x\n\nModuleNotFoundError: No module named 'harness.live'\n"
    cause = ray.exceptions.RayTaskError("__init__", text, ImportError("x"), actor_repr="a", actor_id="1")

    def ended(_):
        raise ray.exceptions.ActorDiedError(cause)

    monkeypatch.setattr(launch.ray, "get", ended)
    assert launch._reason(None) == "it could not begin: ModuleNotFoundError: No module named 'harness.live'"


def test_a_node_s_machine_is_the_latest_one(monkeypatch):
    rooms = NodeRooms(place_nodes(nodes(1), [ClusterNode("1", "a", 1)]))
    group = SimpleNamespace(id=b"1")
    monkeypatch.setattr(rooms, "_groups", {"n0": group})
    monkeypatch.setattr(node_rooms, "ray_nodes", lambda: [{"NodeID": "2", "NodeManagerAddress": "b", "Alive": True}])
    table = {group.id.hex(): {"state": "CREATED", "bundles_to_node_id": {0: "2"}}}
    monkeypatch.setattr(node_rooms, "placement_group_table", lambda: table)
    assert rooms.host("n0") == "a"
    assert rooms.machines == {"n0": "2"}
    assert rooms.host("n0") == "b"
    table[group.id.hex()] = {"state": "PENDING", "bundles_to_node_id": {}}
    rooms._look()
    assert (rooms.machines, rooms.host("n0")) == ({}, "b")


CHOSEN = """
from harness.live.processes.host import choose_device
choose_device(accelerated=False)
import os, jax
print(jax.default_backend(), os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"])
"""


def test_a_process_without_a_device_computes_on_its_cpu_and_memory_is_taken_when_it_is_needed():
    made = subprocess.run([sys.executable, "-c", CHOSEN], capture_output=True, text=True, timeout=100, check=True)  # noqa: S603
    assert made.stdout.split() == ["cpu", "false"]


def test_cpus_of_a_private_cluster_are_not_counted():
    placement = place_nodes(nodes(2), [ClusterNode("1", "127.0.0.2", math.inf)])
    assert str(placement) == "n0, n1  on 127.0.0.2"


def test_a_placement_as_text_names_the_cpus():
    assert str(place_nodes(nodes(2), [ClusterNode("1", "a", 4)], cpus_per_node=2)) == "n0, n1  on a, 2 CPU each"


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
            assert all("crashed" in why or "nothing was heard" in why for why in lost.values())
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
    breakpoints = os.environ.get("PYTHONBREAKPOINT")
    with launch.cluster(loop_cluster.address):
        assert os.environ.get("PYTHONBREAKPOINT") == breakpoints  # those of a tuner are not Ray's
        echo = ray.remote(num_cpus=0, concurrency_groups={"inbox": 1})(Echo)
        one, other = (echo.options(name=name).remote(name) for name in ("one", "other"))
        ray.get(other.received.remote(0))
        ray.get(one.send.remote("other", 100, 1000))
        assert ray.get(other.received.remote(100)) == [(b"%d" % i, 499500.0) for i in range(100)]


@pytest.mark.live
def test_a_cluster_of_ones_own_starts_without_a_warning_after_jax_has_computed():
    """JAX warned that a deadlock is likely: it warns of every fork, and Ray forks to begin its services."""
    jnp.ones(1).block_until_ready()
    with launch.cluster(None) as offers:
        assert offers
