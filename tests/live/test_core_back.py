"""The cores of a live job in memory: a coordinator that goes back to what was saved, or goes on from its journal."""

from dataclasses import replace

import numpy as np
import pytest

from harness.live import messages
from harness.live.coordinator import Coordinator
from live.memory import COORDINATOR, NODES, start
from tuners import policies


def saved(memory):
    """What `begin_from` is given; training goes on."""
    index = memory.coordinator.snapshot(save=True)
    while memory.coordinator.durable < index:
        memory.step()
    return memory.coordinator.checkpoint(index), memory.coordinator.saved(index)


def lose_servers(memory, *others):
    """All of them die, with these others, and a new one comes."""
    dead = [*(n for n in memory.cores if n.startswith("server/")), *others]
    for name in dead:
        memory.kill(name)
    memory.coordinator.lose(dead)
    memory.start(messages.server(NODES[0]))
    memory.drain()


@pytest.mark.parametrize("was", ["busy", "due"])
def test_who_is_gone_has_no_mini_batch_after_a_job_went_back(was):
    memory = start()
    coordinator = memory.coordinator
    memory.steps(300)
    if was == "due":
        coordinator.finish()
        memory.drain()
    begun = saved(memory)
    lose_servers(memory, messages.worker(NODES[0]))
    coordinator.begin_from(*begun)
    line = coordinator._cycles.lines[0]
    assert 0 in getattr(line, was)
    coordinator.put(0, replace(memory.setting, workers=NODES[1:3]))
    memory.recover()
    coordinator.run(0)
    assert (sorted(line.busy), line.due) == ([1, 2], set())
    memory.steps(100)
    memory.start(messages.worker(NODES[0]))
    memory.drain_until_idle(COORDINATOR)
    coordinator.put(0, memory.setting)
    assert sorted(line.busy) == [0, 1, 2]
    memory.steps(200)
    assert line.clocks[0] > 0
    coordinator.finish()
    memory.drain()
    assert coordinator.finish()
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


class Killed(Exception):
    """Here the coordinator dies."""


def test_a_coordinator_killed_while_it_goes_back_leaves_a_journal_that_can_be_read(monkeypatch):
    memory = start(policy=policies.asp()._replace(probes=True), workers=2)
    while not memory.coordinator._cycles.probing:
        memory.step()
    begun = saved(memory)
    while memory.coordinator._cycles.probing:
        memory.step()
    lose_servers(memory)
    pushes = memory.pushes

    def killed(record):
        raise Killed

    monkeypatch.setattr(memory.journal, "restart", killed)
    with pytest.raises(Killed):
        memory.coordinator.begin_from(*begun)
    monkeypatch.undo()
    restored = Coordinator.restored(memory.job, memory.sender(COORDINATOR, None), memory.now, memory.journal)
    assert {n: line.pushes for n, line in restored._cycles.lines.items()} == pushes
    restored.begin_from(*begun)
    assert restored._cycles.lines[0].pushes < pushes[0]
