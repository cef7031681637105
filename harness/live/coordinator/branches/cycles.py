"""The owner of the change of what trains: another branch, another policy, other workers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.complete_pushes import CompletePushes
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.ledger.ledger import Ledger
from tuners.actions import SyncPolicy

__all__ = ["Cycles"]


@dataclass(frozen=True, eq=False)
class Cycles:
    """Begins, pauses and drops the mini-batches of a branch's workers, and starts its policy."""

    _job: LiveJob
    _ledger: Ledger
    _branches: Branches
    _pending: PendingPushes
    _releases: Releases
    _pushes: CompletePushes
    _now: Callable[[], float]

    def run(self, branch: int) -> None:
        """Continue a paused branch."""
        of, now = self._branches.by_number[branch], self._now()
        of.resume(now)
        # A restored branch may list workers that are gone; drop them.
        for worker in {*of.busy, *of.due}:
            if self._job.workers[worker] not in self._ledger.members:
                of.give_up(worker, now)
        self.update_workers(of)
        self._branches.running = branch
        for worker in sorted({*of.busy, *of.due}):
            self._releases.begin(of, worker, now)

    def rest(self) -> None:
        """Pause the running branch."""
        branch = self._branches.current
        if branch is not None:
            # Another branch must not answer the probes of this one.
            self._pushes.decide_all(branch)
            branch.pause(self._now())
            self._releases.stop(branch.busy)
        self._branches.running, self._branches.finishing = None, False

    def lose(self, name: str) -> None:
        """A process is dead: if it is a worker, drop its mini-batch in all branches."""
        worker = self._job.worker_numbers.get(name)
        if worker is not None:
            self._pending.forget(worker)
            for branch in self._branches.by_number.values():
                branch.give_up(worker, self._now())

    # ------------------------------------------------------------------------------------------------- policies and workers

    def start(self, branch: CoordinatorBranch) -> None:
        """Start the branch's policy and release all workers of its setting."""
        now, branch.halted = self._now(), False
        self._releases.release(branch, branch.install(branch.policy, self._active(branch), now), now)

    def install(self, branch: CoordinatorBranch, policy: SyncPolicy) -> None:
        """Start a policy anew if it, or the set of active workers, has changed."""
        active, now, unprobed = self._active(branch), self._now(), list[int]()
        if policy.probes != branch.policy.probes and branch is self._branches.current:
            self._pushes.decide_all(branch)
            # Their cycles began without probes, so they must begin again.
            unprobed = list(branch.busy) if policy.probes else []
        if policy is not branch.policy or not np.array_equal(active, branch.active):
            released = branch.install(policy, active, now)
            for worker in unprobed:
                self._releases.begin(branch, worker, now)
            self._releases.release(branch, released, now)

    def update_workers(self, branch: CoordinatorBranch) -> None:
        """Start the branch's policy anew if workers have joined or left since it was started."""
        if branch.state is not None and not branch.halted:
            self.install(branch, branch.policy)

    def _active(self, branch: CoordinatorBranch) -> NDArray[np.bool_]:
        """The workers of a branch's setting that have joined, [k]."""
        members, nodes = self._ledger.members, branch.setting.workers
        return np.array([n in nodes and name in members for n, name in zip(self._job.nodes, self._job.workers, strict=True)])
