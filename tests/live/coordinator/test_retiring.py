"""Processes that shall leave do so soon, however rarely the job takes snapshots, and nothing is lost with them."""

import random
from dataclasses import replace

import numpy as np
import pytest

from harness.live.protocol import messages
from harness.live.protocol.messages import CopyKept, TableSeen
from tests.live.support.memory import COORDINATOR, NODES, start
from tuners import policies

NEVER = 1_000_000_000  # pushes between two snapshots

POLICIES = [policies.asp(), policies.bsp(), policies.ssp(2), policies.k_sync(2), policies.backup_workers(1)]


def until_left(memory, names, *, steps=4000):
    """Train until these processes may be stopped; the driver asks again and again."""
    memory.coordinator.processes.retire(names)
    for _ in range(steps):
        memory.step()
        if not any(map(memory.coordinator.processes.needed, names)):
            break
    else:
        pytest.fail(f"{names} are still needed after {steps} messages.")
    for name in names:
        memory.kill(name)


def check(memory):
    memory.steps(100)
    memory.settle()
    np.testing.assert_array_equal(memory.model(), memory.expected()[0])


@pytest.mark.parametrize("policy", POLICIES, ids=lambda policy: policy.name)
@pytest.mark.parametrize("seed", range(5))
def test_fewer_workers_without_periodic_snapshots(policy, seed):
    memory = start(random.Random(seed), workers=4, servers=2, policy=policy, snapshot_commits=NEVER)
    memory.steps(300)
    memory.coordinator.training.put(0, replace(memory.setting, workers=NODES[:2]))
    until_left(memory, [messages.worker(n) for n in NODES[2:4]])
    check(memory)


@pytest.mark.parametrize("seed", range(5))
def test_fewer_servers_and_workers_without_periodic_snapshots(seed):
    memory = start(random.Random(seed), workers=3, servers=3, policy="bsp", snapshot_commits=NEVER)
    memory.steps(300)
    stays, *leave = map(messages.server, memory.setting.servers)
    memory.coordinator.processes.place((stays,), (1.0,))
    while memory.coordinator.moves.remaining:
        memory.step()
    memory.coordinator.training.put(0, replace(memory.setting, workers=NODES[:1], servers=memory.setting.servers[:1]))
    until_left(memory, [*leave, *map(messages.worker, NODES[1:3])])
    check(memory)


@pytest.mark.parametrize("kind", ["worker", "server"])
def test_a_successor_knows_which_processes_have_left(kind):
    """They are stopped as soon as nobody needs them. Where they were members again, nobody started them when they were."""
    memory = start(workers=2, servers=2, snapshot_commits=NEVER)
    memory.steps(300)
    leaving = messages.server(memory.setting.servers[1]) if kind == "server" else messages.worker(NODES[1])
    if kind == "server":
        memory.coordinator.processes.place((messages.server(memory.setting.servers[0]),), (1.0,), on_demand=True)
    else:
        memory.coordinator.training.put(0, replace(memory.setting, workers=NODES[:1]))
    until_left(memory, [leaving])
    assert leaving not in memory.restored().ledger.members
    memory.restart_coordinator()
    check(memory)


def test_a_worker_that_computes_for_long_leaves_with_its_last_push():
    memory = start(workers=3, servers=2, snapshot_commits=NEVER)
    memory.steps(300)
    late = messages.worker(NODES[2])
    memory.hold(late)
    memory.steps(300)
    memory.coordinator.training.put(0, replace(memory.setting, workers=NODES[:2]))
    memory.coordinator.processes.retire([late])
    memory.steps(300)
    before = memory.coordinator.ledger.durable  # that of `retire`, which lacks the push in progress
    assert memory.coordinator.processes.needed(late)
    memory.compute_held(late)
    until_left(memory, [late])
    assert memory.coordinator.ledger.durable > before
    check(memory)


@pytest.mark.parametrize("lost", [CopyKept, TableSeen])
def test_what_is_lost_delays_those_that_leave_and_no_more(lost):
    memory = start(workers=2, servers=2, snapshot_commits=NEVER, retry_seconds=1.0)
    memory.steps(300)
    stays, leaving = map(messages.server, memory.setting.servers)
    memory.coordinator.processes.place((stays,), (1.0,), on_demand=True)
    memory.coordinator.processes.retire([leaving])
    for _ in range(1000):
        for (_, receiver), queue in memory.channels.items():
            if receiver == COORDINATOR and queue and isinstance(queue[0].head, lost):
                queue.popleft()
        memory.step()
    for _ in range(100):
        memory.seconds += 1.0
        memory.coordinator.tick()
        memory.steps(20)
    assert not memory.coordinator.processes.needed(leaving)
    memory.kill(leaving)
    check(memory)
