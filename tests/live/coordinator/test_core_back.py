"""The cores of a live job in memory: a coordinator that restores a checkpoint or its journal; and evaluations that overlap,
or whose branch is freed."""

from dataclasses import replace

import numpy as np
import pytest

from harness.live.protocol import messages
from tests.live.support.memory import COORDINATOR, EVALUATOR, NODES, start
from tuners import policies


def lose_servers(memory, *others):
    """All servers and these other processes die, and one new server joins."""
    dead = [*(n for n in memory.cores if n.startswith("server/")), *others]
    for name in dead:
        memory.kill(name)
    memory.coordinator.processes.lose(dead)
    memory.start(messages.server(NODES[0]))
    memory.drain()


@pytest.mark.parametrize("was", ["busy", "due"])
def test_a_restored_branch_drops_workers_that_are_gone(was):
    memory = start()
    coordinator = memory.coordinator
    memory.steps(300)
    if was == "due":
        coordinator.training.finish()
        memory.drain()
    begun = memory.saved()
    lose_servers(memory, messages.worker(NODES[0]))
    coordinator.states.begin_from(*begun)
    branch = coordinator.branches.by_number[0]
    assert 0 in getattr(branch, was)
    coordinator.training.put(0, replace(memory.setting, workers=NODES[1:3]))
    memory.recover()
    coordinator.training.run(0)
    assert (sorted(branch.busy), branch.due) == ([1, 2], set())
    memory.steps(100)
    memory.start(messages.worker(NODES[0]))
    memory.drain_until_idle(COORDINATOR)
    coordinator.training.put(0, memory.setting)
    assert sorted(branch.busy) == [0, 1, 2]
    memory.steps(200)
    assert branch.clocks[0] > 0
    coordinator.training.finish()
    memory.drain()
    assert coordinator.training.finish()
    memory.settle()
    np.testing.assert_array_equal(memory.model(), np.full(12, memory.pushes[0], np.float32))


class Killed(Exception):
    """The coordinator dies here."""


def test_a_coordinator_killed_while_it_restores_a_checkpoint_leaves_a_readable_journal(monkeypatch):
    memory = start(policy=policies.asp()._replace(probes=True), workers=2)
    while not memory.coordinator.branches.by_number[0].undecided:
        memory.step()
    begun = memory.saved()
    while memory.coordinator.branches.by_number[0].undecided:
        memory.step()
    lose_servers(memory)
    pushes = memory.pushes

    def killed(record):
        raise Killed

    monkeypatch.setattr(memory.journal, "restart", killed)
    with pytest.raises(Killed):
        memory.coordinator.states.begin_from(*begun)
    monkeypatch.undo()
    restored = memory.restored()
    assert {n: branch.pushes for n, branch in restored.branches.by_number.items()} == pushes
    restored.states.begin_from(*begun)
    assert restored.branches.by_number[0].pushes < pushes[0]


# --------------------------------------------------------------------------------------------------------- evaluations


def evaluations(memory):
    """All evaluations that are reported once no message is left."""
    memory.seconds += 1e7
    memory.coordinator.tick()
    memory.steps(400)
    memory.settle()
    return memory.coordinator.reports.poll().reports[0].evaluations


def test_evaluations_from_before_a_restore_are_not_reported():
    memory = start(evaluate_clocks=5)
    memory.start(EVALUATOR)
    memory.steps(200)
    begun = memory.saved()
    memory.steps(800)
    memory.coordinator.training.evaluate(0)
    while not memory.answered:
        memory.step()
    early = memory.coordinator.training.evaluate(0)
    before = memory.pushes[0]
    lose_servers(memory)
    assert memory.coordinator.reports.poll().cancelled_requests < early
    assert memory.coordinator.training.evaluate(0) > early
    late = memory.coordinator.training.evaluate(0)
    memory.coordinator.states.begin_from(*begun)
    assert memory.coordinator.reports.poll().cancelled_requests == late
    again = memory.coordinator.training.evaluate(0)
    memory.recover()
    memory.coordinator.training.run(0)
    told = evaluations(memory)
    assert {number for number, _ in told} == {0, again}
    assert again > late
    assert all(e.clocks <= e.accuracy <= memory.pushes[0] < before for _, e in told)  # which says how often was pushed


def test_a_coordinator_from_a_journal_cancels_earlier_requests():
    memory = start()
    memory.start(EVALUATOR)
    memory.steps(300)
    numbers = []
    for _ in range(3):
        numbers.append(memory.coordinator.training.evaluate(0))
        assert memory.coordinator.reports.poll().cancelled_requests < numbers[-1]
        memory.coordinator = memory.restored()
        assert memory.coordinator.reports.poll().cancelled_requests >= numbers[-1]
    assert sorted(set(numbers)) == numbers
    memory.restart_coordinator()
    numbers.append(memory.coordinator.training.evaluate(0))
    assert [number for number, _ in evaluations(memory)] == numbers[-1:]


def told(memory):
    """The numbers of the requested evaluations of branch 0 that are reported, after many retries."""
    found = []
    for _ in range(10):
        memory.steps(200)
        memory.seconds += 1e7
        memory.coordinator.tick()
        for name in [n for n in memory.cores if n.startswith("worker/")]:
            memory.cores[name].tick()
        found += [number for number, _ in memory.coordinator.reports.poll().reports[0].evaluations]
    return found


def test_an_evaluation_waits_for_the_one_in_progress():
    memory = start()
    memory.start(EVALUATOR)
    memory.hold(EVALUATOR)
    memory.drain_until_idle(COORDINATOR)
    first = memory.coordinator.training.evaluate(0)
    memory.steps(400)
    second = memory.coordinator.training.evaluate(0)
    memory.drain_until_idle(EVALUATOR)
    assert len(memory.compute_held(EVALUATOR)) == 1
    assert told(memory) == [first, second]


def test_an_evaluator_does_not_wait_for_a_branch_that_was_freed():
    memory = start()
    memory.start(EVALUATOR)
    memory.drain_until_idle(COORDINATOR)
    child = memory.coordinator.training.fork(0, memory.setting)
    memory.coordinator.training.run(child)
    memory.steps(100)
    memory.coordinator.training.evaluate(child)
    memory.coordinator.training.free(child)
    memory.coordinator.training.run(0)
    for name in [n for n in memory.cores if n.startswith("server/")]:
        memory.drain_until_idle(name)
    memory.steps(300)
    asked = memory.coordinator.training.evaluate(0)
    assert told(memory) == [asked]
