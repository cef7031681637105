"""A simulated coordinator and its processes, in real time: it answers the driver, and nothing is computed.

For tests of the driver: actions, windows, losses. Every worker completes a push every few milliseconds. The loss falls with
every push, faster at a higher learning rate, and not at all on a branch that tests.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from harness.live.processes.client import RemoteCoordinator
from harness.live.processes.transfers import Transfer
from harness.live.protocol.driver_reports import Poll, Report
from harness.live.protocol.messages import worker
from tuners.actions import Evaluation

COLUMNS = 11
CHECK_CLOCKS = 20  # pushes between two evaluations


@dataclass
class PretendBranch:
    setting: object
    policy: object
    testing: bool = False
    pushes: int = 0
    learned: float = 0.0
    clocks: dict = field(default_factory=dict)
    rows: list = field(default_factory=list)
    evaluations: list = field(default_factory=list)
    status: str = "running"

    @property
    def loss(self):
        return math.exp(-self.learned)


class PretendProcesses:
    """A `harness.live.processes.runtime.Processes`. Its coordinator is asked by name, as a real one, and `asked` lists the
    names; `answers` has the methods, and tests replace them."""

    def __init__(self, job, *, cycle_seconds=0.004, join_seconds=0.0, move_seconds=0.0, learning=1.0):
        self.answers, self.coordinator = PretendCoordinator(self), RemoteCoordinator(self.ask)
        self.job, self.nodes = job, frozenset(n.name for n in job.nodes)
        self.cycle_seconds, self.join_seconds, self.move_seconds = cycle_seconds, join_seconds, move_seconds
        self.learning = learning
        self.members, self.coming, self.gone = {}, {}, {}
        self.branches, self.running, self.next_branch = {}, None, 1
        self.moving, self.owners, self.dead_owners = 0, (), set()
        self.halted, self.index, self.requests = False, 0, 0
        self.asked, self.closed = [], False
        self.slow, self.spares = set(), 0  # nodes whose links are slow; number of unused machines
        self.transfers = {}
        self.slowdowns = []  # that the driver has asked for
        self.stuck = ()  # processes that are heard, and for which training waits
        self.started = lambda: None  # is called when the driver has asked for new processes
        self.until = self.moved_at = time.monotonic()

    # ------------------------------------------------------------------------------------------------------ as Processes

    def ask(self, name, *given, **named):
        self.advance()
        if name != "poll":
            self.asked.append(name)
        return getattr(self.answers, name)(*given, **named)

    def start(self, names):
        for name in names:
            self.coming[name] = time.monotonic() + self.join_seconds
        self.started()

    def come_up(self, seconds=0.0):
        """Let what is coming join after so long, and at once what starts later."""
        self.join_seconds, self.coming = 0.0, dict.fromkeys(self.coming, time.monotonic() + seconds)

    def stop(self, names):
        for name in names:
            self.members.pop(name, None)

    def lost(self):
        found, self.gone = self.gone, {}
        return found

    def tell(self, hear):
        pass

    def host(self, name):
        return ""

    @property
    def expects_nodes(self):
        return True

    @property
    def has_spare(self):
        return self.spares > 0

    def move_node(self, node):
        if self.spares <= 0:
            return False
        self.spares -= 1
        self.stop([name for name in self.members if name.endswith("/" + node)])
        self.slow.discard(node)
        return True

    def close(self):
        self.closed = True

    def kill(self, *names, why="killed by the test", for_good=False):
        self.advance()
        for name in names:
            self.members.pop(name, None)
            self.gone[name] = why
            if name in self.owners:
                self.dead_owners.add(name)
        if for_good:
            self.nodes -= {n.partition("/")[2] for n in names}

    # -------------------------------------------------------------------------------------------------- the job in real time

    def advance(self):
        now = time.monotonic()
        for name, at in list(self.coming.items()):
            if at <= now:
                del self.coming[name]
                self.members[name] = 1
        if self.moving and now >= self.moved_at:
            self.moving = 0
        branch = self.branches.get(self.running)
        idle = self.halted or self.stuck or self.dead_owners or branch is None or branch.status != "running"
        able = [] if idle else [w for w in branch.setting.workers if worker(w) in self.members]
        while able and self.until + self.cycle_seconds <= now:
            self.until += self.cycle_seconds
            for name in able:
                self.push(branch, name, self.until)
        if not able:
            self.until = now

    def push(self, branch, name, at):
        if branch.status != "running":
            return
        index = [n.name for n in self.job.nodes].index(name)
        clock = branch.clocks[name] = branch.clocks.get(name, -1) + 1
        part = self.cycle_seconds / 4
        branch.rows.append([at, index, clock, part, part, part, part, 0, branch.loss, math.nan, math.nan])
        branch.pushes += 1
        for server in branch.setting.servers:
            count = self.transfers.get((name, server), Transfer(0, 0.0, 0)).pushes
            self.transfers[name, server] = Transfer(count + 1, 0.8 if self.slow & {name, server} else 0.01, 32)
        branch.learned += 0.0 if branch.testing else self.learning * branch.setting.learning_rate
        if branch.pushes % CHECK_CLOCKS == 0:
            branch.evaluations.append((0, self.evaluation(branch, at)))
        if self.job.target.reached(branch.loss, 1 - branch.loss, branch.pushes):
            branch.status = "target"

    def evaluation(self, branch, at):
        return Evaluation(at, branch.pushes, branch.loss, 1 - branch.loss)


class PretendCoordinator:
    """Answers what a driver asks: the methods of `harness.live.processes.client.CoordinatorClient` that drivers use."""

    def __init__(self, job):
        self.of = job

    def poll(self, taken):
        of, reports = self.of, {}
        for number, branch in of.branches.items():
            if branch.rows or branch.evaluations:
                rows = np.array(branch.rows, float).reshape(-1, COLUMNS)
                reports[number] = Report(taken.get(number, 0), rows, tuple(branch.evaluations))
                branch.rows, branch.evaluations = [], []
        return Poll(
            now=time.monotonic(),
            reports=reports,
            statuses={number: b.status for number, b in of.branches.items()},
            moving=of.moving,
            durable=of.index,
            recovering=bool(of.dead_owners),
            members=dict(of.members),
            held_seconds={},
            lost_pushes=0,
        )

    def held_up_by(self):
        return dict.fromkeys(self.of.stuck, "hangs")

    def starting(self):
        return dict.fromkeys(self.of.coming, 1.0)

    def transfers(self):
        found, self.of.transfers = self.of.transfers, {}
        return found

    def begin(self, setting, policy, parameters):
        self.of.branches = {0: PretendBranch(setting, policy)}
        self.of.owners = tuple(f"server/{s}" for s in setting.servers)

    def slow(self, factors):
        self.of.slowdowns.append(dict(factors))

    def run(self, branch):
        self.of.running, self.of.halted = branch, False

    def rest(self):
        self.of.running = None

    def finish(self):
        return True

    def put(self, branch, setting, policy=None):
        made = self.of.branches[branch]
        here = {worker(w) for w in setting.workers} <= self.of.members.keys()
        assert here or branch != self.of.running, "a worker is not there"
        made.setting, made.policy = setting, policy or made.policy

    def halt(self, branch):
        self.of.halted = True

    def launch(self, branch):
        self.of.halted = False

    def place(self, servers, shares, *, owners=(), on_demand=False, at_once=4):
        assert set(servers) <= self.of.members.keys(), "a server is not there"
        self.of.owners, self.of.moving = servers, 8
        self.of.moved_at = time.monotonic() + self.of.move_seconds

    def fork(self, parent, setting, policy=None, *, testing=False, number=0):
        of = self.of
        old, number = of.branches[parent], of.next_branch
        of.branches[number] = PretendBranch(setting, policy, testing, old.pushes, old.learned, dict(old.clocks))
        of.next_branch += 1
        return number

    def free(self, branch):
        del self.of.branches[branch]
        self.of.running = None if self.of.running == branch else self.of.running

    def evaluate(self, branch):
        of = self.of
        of.requests += 1
        made = of.branches[branch]
        made.evaluations.append((of.requests, of.evaluation(made, time.monotonic())))
        return of.requests

    def snapshot(self, *, save=False):
        self.of.index += 1
        return self.of.index

    def checkpoint(self, index):
        return b"as it is"

    def saved(self, index):
        return {number: {"parameters": np.zeros(1, np.float32)} for number in self.of.branches}

    def lose(self, names):
        for name in names:
            self.of.members.pop(name, None)
            if name in self.of.owners:
                self.of.dead_owners.add(name)

    def retire(self, names):
        pass

    def needed(self, name):
        return False

    def recover(self, servers=(), shares=(), owners=()):
        assert set(servers) <= self.of.members.keys(), "a server is not there"
        self.of.owners, self.of.dead_owners = servers, set()


def end_budget(job, at_seconds):
    """Let the budget of a job end at this time, not when the scenario says; for tests, while no `Run` is in progress.
    One that has waited for what it is about then passes on a busy machine, where a budget chosen before could end first."""
    object.__setattr__(job, "budget_seconds", at_seconds)


def events(windows):
    """The nodes and what has happened to them, as windows tell it."""
    return [(e.node, e.event) for w in windows for e in w.events]


def history(live):
    """The events of a live job's status, as one text."""
    return " | ".join(what for _, what in live.job_status().events)
