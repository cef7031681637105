"""What windows tell of the servers: bytes, and seconds that they were busy."""

from dataclasses import replace

import pytest

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.workloads.workload import Demand
from tests.support.small_jobs import CHEAP, KNOBS, NAMES, job, machine, start, system
from tuners.actions import Reconfigure, Run

DEMAND = Demand(model_bytes=100.0, push_bytes=40.0, sample_seconds=0.25, apply_seconds=0.5)


def simulated(**changed):
    """Three workers with a NIC of 10; d serves 50 per second behind a NIC of 200, e is as fast as its NIC of 80."""
    kinds = (*(machine(10.0),) * 3, machine(200.0, service=50.0), machine(80.0))
    rules = {"knobs": KNOBS, "costs": CHEAP} | changed
    return system(Cluster(tuple(zip(NAMES, kinds, strict=True))), job(DEMAND), start(), Conditions(jitter=0.0), **rules)


def test_a_server_tells_its_own_rate_however_little_it_was_asked_for():
    seen = simulated().perform(Run(clocks=30))
    d, e = seen.servers
    assert (d.node, e.node) == ("d", "e")
    assert d.pull_bytes == e.pull_bytes == pytest.approx(30 * 50.0)
    assert (d.pull_bytes / d.pull_seconds, e.pull_bytes / e.pull_seconds) == pytest.approx((50.0, 80.0))
    assert d.pull_seconds < seen.seconds / 2


def test_pushes_count_their_bytes_and_their_apply():
    d, e = simulated().perform(Run(clocks=30)).servers
    assert d.push_bytes == e.push_bytes == pytest.approx(30 * 20.0)
    assert (d.push_seconds, e.push_seconds) == pytest.approx((30 * (20.0 / 50.0 + 0.25), 30 * (20.0 / 80.0 + 0.25)))


def test_windows_add_up():
    whole = simulated().perform(Run(clocks=40)).servers
    run = simulated()
    parts = [run.perform(Run(clocks=10)).servers for _ in range(4)]
    for j, server in enumerate(whole):
        for i in range(1, 5):
            assert sum(p[j][i] for p in parts) == pytest.approx(server[i])


@pytest.mark.parametrize("method", ["checkpoint", "migrate"])
def test_after_a_change_it_is_the_servers_of_the_new_setting(method):
    run = simulated()
    run.perform(Run(clocks=10))
    run.perform(Reconfigure(replace(start(), servers=("e",)), method=method))
    (e,) = run.perform(Run(clocks=20)).servers
    (later,) = run.perform(Run(clocks=20)).servers
    assert e.node == "e"
    assert later.pull_bytes == pytest.approx(20 * 100.0)
    assert later.pull_bytes / later.pull_seconds == pytest.approx(80.0)
