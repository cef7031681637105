"""A live job in memory: real cores, channels that a test delivers from in any order it likes, and deaths."""

import random
from collections import deque

import numpy as np

from harness.live.coordinator.branch import LiveJob, Shards
from harness.live.coordinator.coordinator import Coordinator
from harness.live.protocol import messages
from harness.live.protocol.blocks import Layout
from harness.live.protocol.log import Commit, Fork, Free
from harness.live.protocol.messages import COORDINATOR
from harness.live.server.server import Server
from harness.live.server.store import Store
from harness.live.worker.worker import Computed, Worker
from tuners import policies
from tuners.actions import Setting, Target

NODES = ("n0", "n1", "n2", "n3", "n4", "n5")
EVALUATOR = messages.worker("evaluator")


def everybody(setting):
    """Every worker the same part, as `LiveJob.shards`."""
    k = len(NODES)
    return Shards(np.full(k, 4, np.int32), np.zeros(k, np.int32), np.full(k, 1000, np.int32))


class Journal:
    """In memory; survives its coordinator."""

    def __init__(self):
        self.records = []

    def append(self, record):
        self.records.append(record)

    def restart(self, record):
        self.records = [record]

    def __iter__(self):
        return iter(list(self.records))


def ones(task):
    """Gradients of one, which a rate of -1 adds to every parameter; the loss says what was pulled."""
    gradient = np.ones_like(task.parameters) if task.kind == "gradient" else None
    return Computed(task.number, task.kind, float(task.parameters[0]), gradient, float(task.parameters[-1]), 0.0)


class Memory:
    """Coordinator, servers and workers, and what is under way between any two of them."""

    def __init__(
        self, rng, setting, policy=None, *, size=12, blocks=6, compute=ones, parameters=None, checks=False, begun=None, **job
    ):
        self.rng, self.compute, self.checks, self.seconds = rng, compute, checks, 0.0
        given = {"target": Target("clocks", 1e9), "evaluate_clocks": 0, "shards": everybody, "retry_seconds": 1e6} | job
        self.job = LiveJob(**{"nodes": NODES, "size": size, "blocks": blocks} | given)
        self.layout = Layout(size, blocks)
        self.channels = {}  # (sender, receiver): messages
        self.cores = {}
        self.generations = {}
        self.setting = setting
        self.journal = Journal()
        self.history = {}  # the log: entries by index
        self.lost = []  # entries that were withdrawn
        self.acknowledged = 0  # pushes that count
        self.zombies = []  # cores that are taken for dead, and may go on sending
        self.coordinator = self.watched(Coordinator(self.job, self.sender(COORDINATOR, None), self.now, self.journal))
        self.policy = policy or policies.named(setting.policy, setting.staleness)
        if begun is None:
            self.coordinator.begin(setting, self.policy, np.zeros(size, np.float32) if parameters is None else parameters)
        else:
            self.coordinator.begin_from(*begun)
        for name in (*map(messages.server, setting.servers), *map(messages.worker, setting.workers)):
            self.start(name)
        self.drain()
        self.recover()
        self.coordinator.run(0)

    # ------------------------------------------------------------------------------------------------------- processes

    def now(self):
        self.seconds += 1e-3
        return self.seconds

    def sender(self, name, core):
        def send(receiver, message):
            if core is None or self.cores.get(name) is core[0] or core[0] in self.zombies:
                self.channels.setdefault((name, receiver), deque()).append(message)

        return send

    def start(self, name):
        """A process, under its next generation."""
        self.generations[name] = self.generations.get(name, 0) + 1
        self.channels = {pair: queue for pair, queue in self.channels.items() if name not in pair}
        core = []
        send = self.sender(name, core)
        if name.startswith("server/"):
            store = Store(self.layout, self.job.optimizer, self.job.aggregation)
            core.append(Server(name, self.generations[name], self.layout, store, send))
        else:
            core.append(Worker(name, self.generations[name], self.layout, send, self.now, self.computer(core)))
        self.cores[name] = core[0]
        self.coordinator.expect(name, self.generations[name])
        core[0].hello()

    def computer(self, core):
        def start(task):
            if task.kind == "gradient" and self.checks:
                self.check_pulled(task)
            core[0].computed(self.compute(task))

        return start

    def kill(self, name, *, lost=1.0):
        """It dies; of what it had sent, a share is lost with it, the last of each channel first."""
        del self.cores[name]
        for (sender, receiver), queue in self.channels.items():
            if receiver == name:
                queue.clear()
            elif sender == name:
                for _ in range(sum(self.rng.random() < lost for _ in queue)):
                    queue.pop()

    def lose(self, names):
        """The coordinator learns of deaths, and recovers where it has to."""
        self.coordinator.lose(names)
        if self.coordinator.recovering:
            self.recover()

    def recover(self):
        there = [n for n in self.cores if n.startswith("server/") and n in self.coordinator.members]
        self.coordinator.recover(tuple(sorted(there)), (1 / len(there),) * len(there))

    def restart_coordinator(self):
        """It dies, and another goes on from its journal."""
        for pair in self.channels:
            if COORDINATOR in pair:
                self.channels[pair].clear()
        restored = Coordinator.restored(self.job, self.sender(COORDINATOR, None), self.now, self.journal)
        self.coordinator = self.watched(restored)
        dead = [n for n in self.coordinator.members if n not in self.cores]
        if dead:
            self.coordinator.lose(dead)
        self.recover()

    # -------------------------------------------------------------------------------------------------------- messages

    def pending(self):
        return [pair for pair, queue in self.channels.items() if queue]

    def deliver(self, pair):
        """The oldest message of a channel; True if there was one."""
        sender, receiver = pair
        message = self.channels[pair].popleft()
        core = self.coordinator if receiver == COORDINATOR else self.cores.get(receiver)
        if core is not None:
            core.receive(sender, message)

    def step(self):
        """Deliver anything; False where nothing is under way."""
        pending = self.pending()
        if pending:
            self.deliver(self.rng.choice(pending))
        return bool(pending)

    def steps(self, count):
        for _ in range(count):
            if not self.step():
                break

    def drain(self):
        """Deliver all there is, as long as there is something that goes on by itself."""
        while self.step():
            pass

    def watched(self, coordinator):
        """With the log written down."""
        ledger, membership = coordinator._ledger, coordinator._membership
        append, recover = ledger.append, membership.recover

        def writing(entry, *record):
            index = append(entry, *record)
            self.history[index] = entry
            self.acknowledged += isinstance(entry, Commit) and entry.accept
            return index

        def rewriting(*given):
            recover(*given)
            for index, entry in ledger.entries.items():
                if isinstance(entry, Commit) and entry.accept != self.history[index].accept:
                    self.lost.append(index)
            self.history.update(ledger.entries)

        ledger.append, membership.recover = writing, rewriting
        return coordinator

    def counted(self, until=None):
        """Steps that the log has made of every branch, up to an entry; one is a gradient of 1, or the mean of some."""
        steps, open_group = {0: 0}, {0: 0}
        for index, entry in self.history.items():  # in order
            if until is not None and index > until:
                break
            if isinstance(entry, Commit):
                open_group[entry.branch] += entry.accept
                if entry.take:
                    assert entry.grouped == open_group[entry.branch]
                    steps[entry.branch] += 1 if self.job.aggregation == "mean" else entry.grouped
                    open_group[entry.branch] = 0
            elif isinstance(entry, Fork):
                steps[entry.branch], open_group[entry.branch] = steps[entry.parent], open_group[entry.parent]
            elif isinstance(entry, Free):
                del steps[entry.branch], open_group[entry.branch]
        return steps

    def value(self, steps):
        """What a parameter is after so many steps, by a rate of -1; with momentum 1, the steps grow by 1."""
        return steps * (steps + 1) // 2 if self.job.optimizer == "momentum" else steps

    def check_pulled(self, task):
        """A worker sees at least what was in the log when it was released, and nothing that is not in it at all."""
        low = self.counted(task.work.after)[task.work.branch]
        high = self.counted().get(task.work.branch, 10**6)  # freed meanwhile
        assert self.value(low) <= min(task.parameters), "pulled too early"
        assert max(task.parameters) <= self.value(high + len(self.lost)), "pulled what was never pushed"

    def push(self, name):
        """All who can compute do; then one worker's push counts."""
        self.compute_all()
        pushes = self.pushes[self.coordinator._cycles.running]
        while self.pushes[self.coordinator._cycles.running] == pushes:
            self.deliver(self.rng.choice([p for p in self.pending() if p[0] == name or not self.is_push(p)]))
        self.compute_all()

    def compute_all(self):
        """Deliver all that is not for the coordinator, and is no push."""
        while waiting := [p for p in self.pending() if p[1] != COORDINATOR and not self.is_push(p)]:
            self.deliver(waiting[0])

    def is_push(self, pair):
        """Whether what comes next in a channel is one, or tells of one."""
        return isinstance(self.channels[pair][0].head, messages.Stage | messages.Done)

    def drain_until_idle(self, name):
        """Deliver all that goes to a worker."""
        while waiting := [p for p in self.pending() if p[1] == name]:
            self.deliver(waiting[0])

    def settle(self):
        """Nobody begins anything; all that is under way comes to its end."""
        self.coordinator.rest()
        self.drain()
        for _ in range(100):
            if not (self.coordinator.recovering or self.coordinator.moving):
                return
            self.drain()
        raise AssertionError("It does not come to rest.")

    # ----------------------------------------------------------------------------------------------------- what there is

    def model(self, branch=0, vector="parameters"):
        """The whole of a branch, from those who own it."""
        made = np.full(self.layout.size, np.nan, np.float32)
        for block, owner in self.coordinator._ledger.table.items():
            span = self.layout.span((block, block + 1))
            core = self.cores[owner]
            assert any(block in c.blocks for c in core._cohorts), f"{owner} does not have block {block}"
            piece = core._store.copied(((block, block + 1),), [branch])
            made[span] = piece.arrays[core._store.vectors.index(vector)]
        return made

    @property
    def pushes(self):
        return {n: line.pushes for n, line in self.coordinator._cycles.lines.items()}


def start(rng=None, workers=3, servers=2, policy="asp", **changes):
    """A job with workers on the first nodes and servers on the last."""
    job = {k: changes.pop(k) for k in list(changes) if k not in Setting.__slots__}
    policy, job["policy"] = (policy, None) if isinstance(policy, str) else ("asp", policy)
    setting = Setting(
        workers=NODES[:workers], servers=NODES[-servers:], policy=policy, **({"learning_rate": -1.0} | changes)
    )
    return Memory(rng or random.Random(0), setting, **job)


__all__ = ["COORDINATOR", "EVALUATOR", "NODES", "Journal", "Memory", "everybody", "ones", "start"]
