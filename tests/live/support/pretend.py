"""A simulated coordinator and its processes, in real time: it answers the driver, and nothing is computed.

For tests of the driver: actions, windows, losses. Every worker completes a push every few milliseconds. The loss falls with
every push, faster at a higher learning rate, and not at all on a branch that tests.
"""

from __future__ import annotations

import math
import time
from dataclasses import dataclass, field

import numpy as np

from harness.live.coordinator.coordinator import Poll, Report
from harness.live.driver.links import Transfer
from harness.live.protocol.messages import worker
from tuners.actions import Evaluation

COLUMNS = 11


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


class Pretend:
    """`harness.live.processes.runtime.Processes` and the coordinator in one."""

    def __init__(self, job, *, cycle_seconds=0.004, join_seconds=0.0, move_seconds=0.0, check_clocks=20, learning=1.0):
        self.job, self.nodes = job, frozenset(n.name for n in job.nodes)
        self.cycle_seconds, self.join_seconds, self.move_seconds = cycle_seconds, join_seconds, move_seconds
        self.check_clocks, self.learning = check_clocks, learning
        self.members, self.coming, self.gone = {}, {}, {}
        self.branches, self.running, self.next_branch = {}, None, 1
        self.moving, self.owners, self.dead_owners = 0, (), set()
        self.halted, self.index, self.requests = False, 0, 0
        self.asked, self.closed = [], False
        self.slow, self.spares = set(), 0  # nodes whose links are slow; places that others could move to
        self.transfers = {}
        self.until = self.moved_at = time.monotonic()

    # ------------------------------------------------------------------------------------------------------ as Processes

    def call(self, name, *given, **named):
        self.advance()
        if name != "poll":
            self.asked.append(name)
        return getattr(self, "do_" + name)(*given, **named)

    def start(self, names):
        for name in names:
            self.coming[name] = time.monotonic() + self.join_seconds

    def stop(self, names):
        for name in names:
            self.members.pop(name, None)

    def lost(self):
        told, self.gone = self.gone, {}
        return told

    @property
    def spare(self):
        return self.spares > 0

    def elsewhere(self, node):
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

    # ------------------------------------------------------------------------------------------------------ as coordinator

    def advance(self):
        now = time.monotonic()
        for name, at in list(self.coming.items()):
            if at <= now:
                del self.coming[name]
                self.members[name] = 1
        if self.moving and now >= self.moved_at:
            self.moving = 0
        branch = self.branches.get(self.running)
        idle = self.halted or self.dead_owners or branch is None or branch.status != "running"
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
        if branch.pushes % self.check_clocks == 0:
            branch.evaluations.append((0, self.evaluation(branch, at)))
        if self.job.target.reached(branch.loss, 1 - branch.loss, branch.pushes):
            branch.status = "target"

    def evaluation(self, branch, at):
        return Evaluation(at, branch.pushes, branch.loss, 1 - branch.loss)

    def do_poll(self, taken):
        reports = {}
        for number, branch in self.branches.items():
            if branch.rows or branch.evaluations:
                rows = np.array(branch.rows, float).reshape(-1, COLUMNS)
                reports[number] = Report(taken.get(number, 0), rows, tuple(branch.evaluations))
                branch.rows, branch.evaluations = [], []
        statuses = {number: b.status for number, b in self.branches.items()}
        return Poll(
            now=time.monotonic(),
            reports=reports,
            statuses=statuses,
            moving=self.moving,
            durable=self.index,
            recovering=bool(self.dead_owners),
            members=dict(self.members),
            lost_pushes=0,
        )

    def do_transfers(self):
        told, self.transfers = self.transfers, {}
        return told

    def do_begin(self, setting, policy, parameters):
        self.branches = {0: PretendBranch(setting, policy)}
        self.owners = tuple(f"server/{s}" for s in setting.servers)

    def do_run(self, branch):
        self.running, self.halted = branch, False

    def do_rest(self):
        self.running = None

    def do_finish(self):
        return True

    def do_put(self, branch, setting, policy=None):
        made = self.branches[branch]
        assert {worker(w) for w in setting.workers} <= self.members.keys() or branch != self.running, "a worker is not there"
        made.setting, made.policy = setting, policy or made.policy

    def do_halt(self, branch):
        self.halted = True

    def do_launch(self, branch):
        self.halted = False

    def do_place(self, servers, shares, *, on_demand=False, at_once=4):
        assert set(servers) <= self.members.keys(), "a server is not there"
        self.owners, self.moving = servers, 8
        self.moved_at = time.monotonic() + self.move_seconds

    def do_fork(self, parent, setting, policy, *, testing):
        old = self.branches[parent]
        made = PretendBranch(setting, policy, testing, old.pushes, old.learned, dict(old.clocks))
        self.branches[self.next_branch] = made
        self.next_branch += 1
        return self.next_branch - 1

    def do_free(self, branch):
        del self.branches[branch]
        self.running = None if self.running == branch else self.running

    def do_evaluate(self, branch):
        self.requests += 1
        made = self.branches[branch]
        made.evaluations.append((self.requests, self.evaluation(made, time.monotonic())))
        return self.requests

    def do_snapshot(self, *, save=False):
        self.index += 1
        return self.index

    def do_checkpoint(self, index):
        return b"as it is"

    def do_saved(self, index):
        return {}

    def do_lose(self, names):
        for name in names:
            self.members.pop(name, None)
            if name in self.owners:
                self.dead_owners.add(name)

    def do_retire(self, names):
        pass

    def do_needed(self, name):
        return False

    def do_recover(self, servers, shares):
        assert set(servers) <= self.members.keys(), "a server is not there"
        self.owners, self.dead_owners = servers, set()
