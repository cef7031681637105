"""When a worker is sent a release of its own, and when it goes on by the one that it has; and when snapshots are taken."""

from dataclasses import replace

import numpy as np
import pytest

from harness.live.protocol.log import CommitEntry, SnapshotEntry
from harness.live.protocol.messages import LogAppend, Release, UnaskedBlocks
from tests.live.support.memory import COORDINATOR, NODES, ones, start

WORKERS = tuple(f"worker/{n}" for n in NODES[:3])


class Listened:
    """A job, the releases that its coordinator sends, and the mini-batches that its workers compute."""

    def __init__(self, **changes):
        self.sent, self.computed = [], []
        self.memory = start(snapshot_commits=1000, compute=self.compute, retry_seconds=1000.0, **changes)
        self.memory.coordinator.ledger.send = self.hear(self.memory.coordinator.ledger.send)

    def hear(self, send):
        def heard(receiver, message):
            if isinstance(message.head, Release):
                self.sent.append(receiver)
            send(receiver, message)

        return heard

    def compute(self, task):
        self.computed.append(task.work)
        return ones(task)

    def push(self, pushes):
        """Train until there are so many more pushes."""
        until = self.memory.pushes[0] + pushes
        while self.memory.pushes[0] < until:
            assert self.memory.step(), "the job stands still"

    def until_given(self, name):
        """Train until parameters of both servers are on their way to a worker. Returns the two channels."""
        while True:
            to_it = {pair: queue for pair, queue in self.memory.channels.items() if pair[1] == name}
            found = [pair for pair, queue in to_it.items() if any(isinstance(m.head, UnaskedBlocks) for m in queue)]
            if len(found) == 2:
                return found
            self.memory.step()


def test_a_release_holds_until_something_changes():
    job = Listened()
    job.push(60)
    job.sent.clear()
    job.computed.clear()
    job.push(60)
    assert job.sent == []
    assert len(job.computed) > 50
    setting = job.memory.coordinator.branches.by_number[0].setting
    job.memory.coordinator.training.put(0, replace(setting, intra_threads=2))
    job.push(60)
    assert sorted(job.sent) == sorted(WORKERS)
    job.computed.clear()
    job.push(30)
    assert {w.intra_threads for w in job.computed} == {2}


def test_what_may_be_forgotten_changes_the_release():
    """A snapshot becomes durable: workers hear which pushes they need not keep."""
    job = Listened()
    job.push(60)
    index = job.memory.coordinator.states.snapshot()
    while job.memory.coordinator.ledger.durable < index:
        job.memory.step()
    job.sent.clear()
    job.push(60)
    assert sorted(job.sent) == sorted(WORKERS)
    assert all(job.memory.cores[name].kept < 60 for name in WORKERS)


def test_a_worker_that_goes_by_a_release_that_was_sent_again_goes_on():
    """It may differ from the first one of that number, and the worker has one of the two."""
    job = Listened(workers=1)
    job.push(20)
    memory, (name, *_) = job.memory, WORKERS
    for pair in job.until_given(name):
        memory.channels[pair].clear()  # the parameters are lost, and with them the news of the next cycle
    memory.drain()
    memory.seconds += 1e7
    memory.coordinator.tick()
    job.sent.clear()
    job.push(20)
    assert job.sent == [name]
    job.push(20)
    assert job.sent == [name]


def test_a_worker_that_rests_does_not_go_on():
    job = Listened()
    job.push(60)
    memory, (name, *_) = job.memory, WORKERS
    job.until_given(name)
    memory.coordinator.training.rest()
    while memory.channels.get((COORDINATOR, name)):
        memory.deliver((COORDINATOR, name))
    job.computed.clear()
    memory.drain_until_idle(name)
    assert job.computed == []
    memory.settle()
    memory.coordinator.training.run(0)
    job.push(30)
    assert len(job.computed) > 20


def test_a_view_begins_without_news_of_the_next_cycle():
    """What servers were to tell a worker is lost with them, or refused: it goes on without waiting for a timeout."""
    job = Listened(workers=1)
    job.push(20)
    memory, (name, *_) = job.memory, WORKERS
    for pair in job.until_given(name):
        memory.channels[pair].clear()
    server = sorted(memory.stores)[0]
    memory.kill(server)
    memory.lose([server])
    job.push(20)


@pytest.mark.parametrize("apart", [0.0, 0.5])
def test_snapshots_are_apart_by_pushes_and_by_time(apart):
    memory, taken, commits = start(workers=2, servers=2, snapshot_commits=4, snapshot_seconds=apart), [], 0
    send = memory.coordinator.ledger.send

    def heard(receiver, message):
        nonlocal commits
        if isinstance(message.head, LogAppend) and receiver == "server/" + memory.setting.servers[0]:
            commits += isinstance(message.head.entry, CommitEntry)
            if isinstance(message.head.entry, SnapshotEntry):
                taken.append((commits, memory.seconds))
        send(receiver, message)

    memory.coordinator.ledger.send = heard
    while len(taken) < 5:
        assert memory.step(), "the job stands still"
    gaps = np.diff(taken, axis=0).round(6)
    assert gaps[:, 0].min() >= 4
    assert gaps[:, 1].min() >= apart
    assert (gaps[:, 0].max() > 12) == (apart > 0)
