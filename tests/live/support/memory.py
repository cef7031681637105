"""A live job in memory: real cores, channels from which a test delivers in any order, and deaths."""

import random
from collections import deque

import numpy as np

from harness.live.coordinator.branches.branch import LiveJob, Shards
from harness.live.coordinator.coordinator import Coordinator
from harness.live.protocol import messages
from harness.live.protocol.blocks import Layout
from harness.live.protocol.log import CommitEntry, ForkEntry, FreeEntry
from harness.live.protocol.messages import COORDINATOR
from harness.live.server.server import Server
from harness.live.server.store import Store
from harness.live.worker.tasks import Computed
from harness.live.worker.worker import Worker
from tuners import policies
from tuners.actions import Setting, Target

NODES = ("n0", "n1", "n2", "n3", "n4", "n5")
EVALUATOR = messages.worker("evaluator")
_ENDLESS = 50_000  # messages, of a job that rests


def everybody(setting):
    """The same shard for every worker, as `LiveJob.shards`."""
    k = len(NODES)
    return Shards(np.full(k, 4, np.int32), np.zeros(k, np.int32), np.full(k, 1000, np.int32))


class Journal:
    """A journal in memory; it outlives its coordinator."""

    def __init__(self):
        self.records = []

    def append(self, record):
        self.records.append(record)

    def restart(self, record):
        self.records = [record]

    def __iter__(self):
        return iter(list(self.records))


def ones(task):
    """A gradient of ones, which a learning rate of -1 adds to every parameter; the loss is a parameter that was pulled."""
    gradient = np.ones_like(task.parameters) if task.kind == "gradient" else None
    return Computed(task.number, task.kind, float(task.parameters[0]), gradient, float(task.parameters[-1]), 0.0)


class Memory:
    """Coordinator, servers and workers, and the messages in transfer between any two of them."""

    def __init__(
        self,
        rng,
        setting,
        policy=None,
        *,
        size=12,
        blocks=6,
        compute=ones,
        parameters=None,
        checks=False,
        begun=None,
        rows_of=None,
        **job,
    ):
        """With `tables` in the job, `rows_of` says which rows a mini-batch looks up; None: some that depend on its cycle."""
        self.rng, self.compute, self.checks, self.seconds = rng, compute, checks, 0.0
        given = {"target": Target("clocks", 1e9), "evaluate_clocks": 0, "shards": everybody, "retry_seconds": 1e6} | job
        self.job = LiveJob(**{"nodes": NODES, "size": size, "blocks": blocks} | given)
        self.layout = Layout(size, blocks, self.job.tables)
        self.drawn = {}  # the rows of each cycle
        self.rows_of = rows_of or self.rows_of_cycle
        self.channels = {}  # (sender, receiver): messages
        self.cores = {}
        self.stores = {}  # of servers
        self.held = {}  # by worker: tasks that wait for `compute_held`
        self.generations = {}
        self.setting = setting
        self.journal = Journal()
        self.history = {}  # the log: entries by index, as the coordinator has sent them last
        self.results = 0  # of evaluations that were delivered
        self.lost = []  # entries that were withdrawn
        self.due = {}  # by cycle that begins with a commit: its mini-batch, and the threads that it is to have
        self.acknowledged = 0  # pushes that were accepted
        self.zombies = []  # cores that are treated as dead, and may still send
        self.coordinator = Coordinator(self.job, self.sender(COORDINATOR, None), self.now, self.journal)
        self.policy = policy or policies.named(setting.policy, setting.staleness)
        if begun is None:
            self.coordinator.states.begin(
                setting, self.policy, np.zeros(size, np.float32) if parameters is None else parameters
            )
        else:
            self.coordinator.states.begin_from(*begun)
        for name in (*map(messages.server, setting.servers), *map(messages.worker, setting.workers)):
            self.start(name)
        self.drain()
        self.recover()
        self.coordinator.training.run(0)

    # ------------------------------------------------------------------------------------------------------- processes

    def now(self):
        self.seconds += 1e-3
        return self.seconds

    def sender(self, name, core):
        def send(receiver, message):
            if isinstance(message.head, messages.LogAppend):
                self.write(message.head.index, message.head.entry)
            if core is None or self.cores.get(name) is core[0] or core[0] in self.zombies:
                self.channels.setdefault((name, receiver), deque()).append(message)

        return send

    def start(self, name):
        """Start a process under its next generation."""
        self.generations[name] = self.generations.get(name, 0) + 1
        self.channels = {pair: queue for pair, queue in self.channels.items() if name not in pair}
        core = []
        send = self.sender(name, core)
        if name.startswith("server/"):
            store = self.stores[name] = Store(self.layout, self.job.optimizer, self.job.aggregation)
            core.append(Server(name, self.generations[name], self.layout, store, send))
        else:
            rows_of = None if self.job.tables is None else self.rows_of
            core.append(
                Worker(name, self.generations[name], self.layout, send, self.now, self.computer(name, core), rows_of=rows_of)
            )
        self.cores[name] = core[0]
        self.coordinator.processes.expect(name, self.generations[name])
        core[0].hello()

    def computer(self, name, core):
        def start(task):
            if name in self.held:
                self.held[name].append(task)
                return
            if task.kind == "gradient" and self.checks:
                self.check_pulled(task)
            core[0].computed(self.compute(task))

        return start

    def hold(self, name):
        """Compute the tasks of a worker only when `compute_held` is called."""
        self.held[name] = []

    def compute_held(self, name):
        """Compute the tasks that were held, and all later ones at once."""
        tasks = self.held.pop(name)
        for task in tasks:
            self.cores[name].computed(self.compute(task))
        return tasks

    def kill(self, name, *, lost=1.0):
        """A process dies; a share of its messages in transfer is lost with it, the last of each channel first."""
        del self.cores[name]
        for (sender, receiver), queue in self.channels.items():
            if receiver == name:
                queue.clear()
            elif sender == name:
                for _ in range(sum(self.rng.random() < lost for _ in queue)):
                    queue.pop()

    def lose(self, names):
        """Tell the coordinator of deaths; it recovers if it must."""
        self.coordinator.processes.lose(names)
        if self.coordinator.views.recovering:
            self.recover()

    def recover(self):
        there = [n for n in self.cores if n.startswith("server/") and n in self.coordinator.ledger.members]
        self.coordinator.processes.recover(tuple(sorted(there)), (1 / len(there),) * len(there))

    def restart_coordinator(self):
        """The coordinator dies, and another continues from its journal."""
        for pair in self.channels:
            if COORDINATOR in pair:
                self.channels[pair].clear()
        self.coordinator = self.restored()
        dead = [n for n in self.coordinator.ledger.members if n not in self.cores]
        if dead:
            self.coordinator.processes.lose(dead)
        self.recover()

    def restored(self):
        """A coordinator from the journal."""
        return Coordinator.restored(self.job, self.sender(COORDINATOR, None), self.now, self.journal)

    # -------------------------------------------------------------------------------------------------------- messages

    @property
    def answered(self):
        """Whether the coordinator has been told the result of an evaluation."""
        return self.results > 0

    def pending(self):
        return [pair for pair, queue in self.channels.items() if queue]

    def deliver(self, pair):
        """Deliver the oldest message of a channel."""
        sender, receiver = pair
        message = self.channels[pair].popleft()
        self.results += isinstance(message.head, messages.EvaluationResult)
        core = self.coordinator if receiver == COORDINATOR else self.cores.get(receiver)
        if core is not None:
            core.receive(sender, message)

    def step(self):
        """Deliver one message of any channel; False if there is none."""
        pending = self.pending()
        if pending:
            self.deliver(self.rng.choice(pending))
        return bool(pending)

    def steps(self, count):
        for _ in range(count):
            if not self.step():
                break

    def drain(self):
        """Deliver until no message is left."""
        for _ in range(_ENDLESS):
            if not self.step():
                return
        raise AssertionError("Two processes answer each other without an end.")

    def write(self, index, entry):
        """The coordinator has sent an entry of the log, for the first time or again."""
        for begun in getattr(entry, "released", ()) if index not in self.history else ():
            of = self.coordinator.branches.by_number[entry.branch]
            self.due.setdefault(begun.cycle, (begun.clock, of.setting.intra_threads))
        if isinstance(entry, CommitEntry):
            if index not in self.history:
                self.acknowledged += entry.accept
            elif entry.accept != self.history[index].accept:
                self.lost.append(index)
        self.history[index] = entry

    def counted(self, until=None):
        """The optimizer steps of every branch in the log, up to an entry; one is a gradient of 1, or a mean of some."""
        steps, open_group = {0: 0}, {0: 0}
        for index, entry in self.history.items():  # in order
            if until is not None and index > until:
                break
            if isinstance(entry, CommitEntry):
                open_group[entry.branch] += entry.accept
                if entry.take:
                    assert entry.grouped == open_group[entry.branch]
                    steps[entry.branch] += 1 if self.job.aggregation == "mean" else entry.grouped
                    open_group[entry.branch] = 0
            elif isinstance(entry, ForkEntry):
                steps[entry.branch], open_group[entry.branch] = steps[entry.parent], open_group[entry.parent]
            elif isinstance(entry, FreeEntry):
                del steps[entry.branch], open_group[entry.branch]
        return steps

    def value(self, steps):
        """A parameter after so many steps at a learning rate of -1; with momentum 1, each step is larger by 1."""
        return steps * (steps + 1) // 2 if self.job.optimizer == "momentum" else steps

    def rows_of_cycle(self, work):
        """Some rows of the tables, and the dense ones."""
        if work is None:
            return np.arange(self.layout.row_bounds[-1], dtype=np.int32)
        cycle = work if isinstance(work, int) else work.cycle
        if cycle not in self.drawn:
            rows = self.layout.row_bounds[-1] - np.arange(self.layout.row_bounds[-1] - self.job.tables.rows, 0, -1)
            drawn = random.Random(cycle).choices(range(self.job.tables.rows), k=5)
            self.drawn[cycle] = np.concatenate([np.unique(drawn), rows]).astype(np.int32)
        return self.drawn[cycle]

    def expected(self, until=None):
        """The model of every branch by the log up to an entry: every push adds 1 to the rows that it looks up, or to all."""
        if self.job.tables is None:
            return {b: np.full(self.layout.size, self.value(c), np.float32) for b, c in self.counted(until).items()}
        made = {0: np.zeros(self.layout.row_bounds[-1], np.float32)}
        for index, entry in self.history.items():  # in order
            if until is not None and index > until:
                break
            if isinstance(entry, CommitEntry):
                if entry.accept:
                    made[entry.branch][self.rows_of_cycle(entry.cycle)] += 1
            elif isinstance(entry, ForkEntry):
                made[entry.branch] = made[entry.parent].copy()
            elif isinstance(entry, FreeEntry):
                del made[entry.branch]
        return {branch: rows.repeat(self.job.tables.width) for branch, rows in made.items()}

    def check_pulled(self, task):
        """A worker pulls at least the log up to its release, and nothing that is not in the log; it computes what the
        coordinator meant when it committed the push that released the worker."""
        if task.number in self.due:
            clock, threads = self.due[task.number]
            of = self.coordinator.branches.by_number.get(task.work.branch)
            # A release that is sent again says what the setting is by then.
            now = threads if of is None else of.setting.intra_threads
            assert task.work.clock == clock, "computes another mini-batch"
            assert task.work.intra_threads in (threads, now), "goes by an old release"
        if task.rows is not None:
            pulled = task.parameters.reshape(len(task.rows), -1)
            low, high = (self.expected(until).get(task.work.branch) for until in (task.work.after, None))
            assert (pulled >= low.reshape(-1, self.job.tables.width)[task.rows]).all(), "pulled too early"
            if high is not None:  # else it is freed meanwhile
                most = high.reshape(-1, self.job.tables.width)[task.rows] + len(self.lost)
                assert (pulled <= most).all(), "pulled what was never pushed"
            return
        low = self.counted(task.work.after)[task.work.branch]
        high = self.counted().get(task.work.branch, 10**6)  # if it is freed meanwhile
        assert self.value(low) <= min(task.parameters), "pulled too early"
        assert max(task.parameters) <= self.value(high + len(self.lost)), "pulled what was never pushed"

    def push(self, name):
        """All workers compute; then the push of one of them is completed."""
        self.compute_all()
        pushes = self.pushes[self.coordinator.branches.running]
        while self.pushes[self.coordinator.branches.running] == pushes:
            self.deliver(self.rng.choice([p for p in self.pending() if p[0] == name or not self.is_push(p)]))
        self.compute_all()

    def compute_all(self):
        """Deliver everything that is not for the coordinator and is no push."""
        while waiting := [p for p in self.pending() if p[1] != COORDINATOR and not self.is_push(p)]:
            self.deliver(waiting[0])

    def is_push(self, pair):
        """Whether the next message of a channel is a push, or reports one."""
        return isinstance(self.channels[pair][0].head, messages.StagePush | messages.GradientDone)

    def drain_until_idle(self, name):
        """Deliver all messages to a process."""
        while waiting := [p for p in self.pending() if p[1] == name]:
            self.deliver(waiting[0])

    def settle(self):
        """Pause training and deliver all messages until recovery and moves are over."""
        self.coordinator.training.rest()
        self.drain()
        for _ in range(100):
            if not (self.coordinator.views.recovering or self.coordinator.moves.remaining):
                return
            self.drain()
        raise AssertionError("The job does not settle.")

    # ----------------------------------------------------------------------------------------------------- the state

    def model(self, branch=0, vector="parameters"):
        """A vector of a branch, put together from the owners of its blocks."""
        made = np.full(self.layout.size, np.nan, np.float32)
        for block, owner in self.coordinator.ledger.table.items():
            span = self.layout.span((block, block + 1))
            store = self.stores[owner]
            assert any(block in blocks for blocks in self.cores[owner].blocks), f"{owner} does not have block {block}"
            piece = store.copied(((block, block + 1),), [branch])
            made[span] = piece.arrays[store.vectors.index(vector)]
        return made

    def saved(self):
        """The arguments of `begin_from` for another job, or for this one; training goes on meanwhile."""
        index = self.coordinator.states.snapshot(save=True)
        while self.coordinator.ledger.durable < index:
            self.step()
        return self.coordinator.states.checkpoint(index), self.coordinator.states.saved(index), self.policies

    @property
    def policies(self):
        return {n: branch.policy for n, branch in self.coordinator.branches.by_number.items()}

    @property
    def pushes(self):
        return {n: branch.pushes for n, branch in self.coordinator.branches.by_number.items()}


def start(rng=None, workers=3, servers=2, policy="asp", **changes):
    """A job with workers on the first nodes and servers on the last."""
    job = {k: changes.pop(k) for k in list(changes) if k not in Setting.__slots__}
    policy, job["policy"] = (policy, None) if isinstance(policy, str) else ("asp", policy)
    setting = Setting(
        workers=NODES[:workers], servers=NODES[-servers:], policy=policy, **({"learning_rate": -1.0} | changes)
    )
    return Memory(rng or random.Random(0), setting, **job)


__all__ = ["COORDINATOR", "EVALUATOR", "NODES", "Journal", "Memory", "everybody", "ones", "start"]
