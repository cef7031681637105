"""Random histories of a live job: events and messages in any order, after which every push must count exactly once."""

import numpy as np

from harness.live.protocol import messages
from harness.live.protocol.log import CommitEntry
from tests.live.support.memory import COORDINATOR, NODES, start
from tuners import policies
from tuners.actions import Setting

__all__ = ["ACTIONS", "Audit", "play"]

ACTIONS = (
    *("move", "move", "relocate", "worker dies", "server dies", "coordinator dies", "worker comes", "server comes"),
    *("snapshot", "put", "retire", "tick", "fork", "free", "switch", "finish"),
)


POLICIES = (
    *(lambda n: policies.asp(), lambda n: policies.bsp(), lambda n: policies.bsp(), policies.ssp, policies.k_sync),
    *(policies.k_batch_sync, policies.k_async, policies.backup_workers, policies.discard, policies.admit),
)


class Audit:
    """A job in which every update is +1, random events, and checks."""

    def __init__(self, rng, **job):
        self.rng = rng
        optimizer = rng.choice(["sgd", "sgd" if "tables" in job else "momentum"])
        job = {
            "policy": rng.choice(POLICIES)(rng.randint(1, 3)),
            "aggregation": rng.choice(["each", "each", "sum", "mean"]) if optimizer == "sgd" else "each",
            "snapshot_commits": rng.choice([0, 3, 1000]),
            "momentum": 1.0,
        } | job
        workers, servers = rng.randint(1, 4), rng.randint(1, 3)
        self.memory = start(rng, workers, servers, optimizer=optimizer, checks=True, **job)
        self.changes = self.losses = 0
        self.leaving = {}  # generations of the processes that were asked to leave

    def act(self, action):
        self._stop_dismissed()
        getattr(self, "_" + action.replace(" ", "_"))()

    def servers(self):
        return sorted(
            n for n in self.memory.cores if n.startswith("server/") and n in self.memory.coordinator.ledger.members
        )

    def workers(self):
        return sorted(n for n in self.memory.cores if n.startswith("worker/"))

    def _place(self, on_demand):
        chosen = self.rng.sample(self.servers(), self.rng.randint(1, len(self.servers())))
        weights = [self.rng.random() + 0.01 for _ in chosen]
        shares = tuple(w / sum(weights) for w in weights)
        owners = ()
        if self.memory.job.tables is not None:
            owners = tuple(self.rng.choice(chosen) for _ in range(self.memory.layout.count))
        self.memory.coordinator.processes.place(
            tuple(chosen), shares, owners=owners, on_demand=on_demand, at_once=self.rng.randint(1, 4)
        )
        self.changes += 1

    def _move(self):
        self._place(False)

    def _relocate(self):
        self._place(True)

    def _worker_dies(self):
        if len(self.workers()) > 1:
            self._die(self.rng.choice(self.workers()))

    def _server_dies(self):
        # One that retires may have left before the loss of the other is known.
        staying = set(self.servers()) - set(self.memory.coordinator.ledger.retiring)
        if len(staying) > 1 and not self.memory.coordinator.views.recovering:
            self._die(self.rng.choice(self.servers()))

    def _die(self, name):
        alive = {*self.servers(), COORDINATOR} - {name}
        if not all(h & alive for h in self.memory.coordinator.ledger.holders.values()):
            return  # the last copy
        if self.rng.random() < 0.3:  # it is only treated as dead
            self.memory.zombies.append(self.memory.cores[name])
        self.memory.kill(name, lost=self.rng.random())
        self.memory.steps(self.rng.choice([0, 0, 5, 30]))
        self.memory.lose([name])
        self.changes += 1

    def _coordinator_dies(self):
        alive = set(self.servers())
        if not all(h & alive for h in self.memory.coordinator.ledger.holders.values()):
            return
        self.memory.restart_coordinator()
        self.changes += 1

    def _snapshot(self):
        self.memory.coordinator.states.snapshot(save=self.rng.random() < 0.3)

    def _worker_comes(self):
        self._come("worker", self.memory.coordinator.branches.by_number[0].setting.workers)

    def _server_comes(self):
        self._come("server", NODES)

    def _come(self, role, nodes):
        lacking = [f"{role}/{n}" for n in nodes if f"{role}/{n}" not in self.memory.cores]
        if lacking:
            self.memory.start(self.rng.choice(lacking))

    def _put(self):
        old = self.memory.coordinator.branches.by_number[0].setting
        workers = tuple(self.rng.sample(NODES[:4], self.rng.randint(1, 4)))
        for worker in workers:
            if messages.worker(worker) not in self.memory.cores:
                self.memory.start(messages.worker(worker))
        same = {"servers": old.servers, "policy": old.policy, "learning_rate": -1.0, "momentum": 1.0}
        setting = Setting(workers=workers, intra_threads=self.rng.randint(0, 2), **same)
        self.memory.coordinator.training.put(0, setting)
        self.changes += 1

    def _retire(self):
        coordinator = self.memory.coordinator
        owning = set(coordinator.ledger.table.values())
        idle = [s for s in self.servers() if s not in owning]
        goal = coordinator.moves.goal
        if idle and not (goal and set(goal.servers) & set(idle)):
            self._leave(idle[:1])
        settings = [branch.setting for branch in coordinator.branches.by_number.values()]
        needed = {messages.worker(node) for setting in settings for node in setting.workers}
        self._leave([w for w in self.workers() if w not in needed and w in coordinator.ledger.members])

    def _leave(self, names):
        names = [n for n in names if n not in self.memory.coordinator.ledger.retiring]  # the driver asks once
        if names:
            self.leaving |= {name: self.memory.generations[name] for name in names}
            self.memory.coordinator.processes.retire(names)

    def _stop_dismissed(self):
        """End the processes that the coordinator has let go, as the driver does."""
        for name, generation in list(self.leaving.items()):
            if generation != self.memory.generations[name] or name not in self.memory.cores:
                del self.leaving[name]
            elif name not in self.memory.coordinator.ledger.members:
                self.memory.kill(name)
                del self.leaving[name]

    def _tick(self):
        self.memory.seconds += 1e7
        self.memory.coordinator.tick()
        for name in self.workers():
            self.memory.cores[name].tick()

    def _message_lost(self):
        if self.memory.pending():
            self.memory.channels[self.rng.choice(self.memory.pending())].popleft()
            self.losses += 1

    def _fork(self):
        branches = self.memory.coordinator.branches.by_number
        if len(branches) < 3:
            parent = self.rng.choice(sorted(branches))
            self.memory.coordinator.training.fork(parent, branches[parent].setting, testing=self.rng.random() < 0.3)

    def _free(self):
        others = sorted(set(self.memory.coordinator.branches.by_number) - {0})
        if others:
            self.memory.coordinator.training.free(self.rng.choice(others))
            self._switch()

    def _finish(self):
        self.memory.coordinator.training.finish()
        self.memory.steps(self.rng.choice([0, 20, 200]))
        self._switch()

    def _switch(self):
        coordinator = self.memory.coordinator
        coordinator.training.run(self.rng.choice(sorted(coordinator.branches.by_number)))

    def check_always(self):
        """No worker is beyond the bound of SSP, and no block has two owners."""
        for branch in self.memory.coordinator.branches.by_number.values():
            clocks = branch.clocks[branch.active]
            if branch.policy.name.startswith(("ssp", "bsp")) and len(clocks):
                bound = int(branch.state.bound)
                assert max(clocks) - min(clocks) <= bound + 1, "beyond the bound"
        owned = [b for n in self.servers() for blocks in self.memory.cores[n].blocks for b in blocks if self.same_view(n)]
        assert len(owned) == len(set(owned)), "two owners"

    def same_view(self, name):
        return self.memory.cores[name].view == self.memory.coordinator.ledger.view

    def check_at_rest(self):
        memory = self.memory
        for _ in range(12 if self.losses else 1):
            self._tick()
            memory.steps(400 if self.losses else 0)
        memory.settle()
        self._tick()
        memory.drain()
        leaving = list(memory.coordinator.ledger.retiring)
        assert not any(map(memory.coordinator.processes.needed, leaving)), "processes that shall leave are still needed"
        expected = memory.expected()
        assert expected.keys() == memory.pushes.keys()
        for branch, model in expected.items():
            np.testing.assert_array_equal(memory.model(branch), model)
        lost = memory.coordinator.reports.poll({}).lost_pushes
        in_force = sum(e.accept for e in memory.history.values() if isinstance(e, CommitEntry))
        assert in_force + lost == memory.acknowledged


def play(rng, steps=25, actions=ACTIONS, check=True, **job):
    """A random history."""
    audit = Audit(rng, **job)
    for _ in range(steps):
        audit.act(rng.choice(actions))
        for _ in range(rng.choice([0, 5, 20, 80])):
            if not audit.memory.step():
                break
            if check:
                audit.check_always()
    audit.check_at_rest()
    return audit
