"""The driver's requests about training: which branch trains, with which setting and policy, and how good it is.

All of them return at once; a report shows their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.live.coordinator.branches.branch import LiveJob
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.cycles import Cycles
from harness.live.coordinator.branches.evaluations import Evaluations
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.state_record import StateRecord
from harness.live.protocol.log import ForkEntry, FreeEntry
from harness.live.protocol.messages import worker
from tuners.actions import Setting, SyncPolicy

__all__ = ["TrainingRequests"]


@dataclass(frozen=True, eq=False)
class TrainingRequests:
    """Answers the questions of `TrainingQuestions` in `harness.live.processes.client`."""

    _job: LiveJob
    _ledger: Ledger
    _membership: Membership
    _branches: Branches
    _releases: Releases
    _cycles: Cycles
    _evaluations: Evaluations
    _record: StateRecord
    _now: Callable[[], float]

    def run(self, branch: int) -> None:
        """Train this branch, and pause the one that runs. Workers repeat the mini-batch that they were at when it was
        paused; the policy of a branch that never ran, or was halted, is started."""
        of = self._branches.by_number[branch]
        if branch != self._branches.running or self._branches.finishing:
            self._cycles.rest()
            self._cycles.run(branch)
            self._record.write()
        if of.state is None or of.halted:
            self.launch(branch)

    def finish(self) -> bool:
        """Let workers complete their mini-batches and begin no others until `rest` or `run`. Returns whether all have
        completed. Workers that are released meanwhile begin when the branch runs again."""
        branch = self._branches.current
        if branch is not None and not self._branches.finishing:
            self._branches.finishing = True
            self._record.write()
        return branch is None or branch.status != "running" or not branch.busy

    def rest(self) -> None:
        """Pause the running branch. Workers repeat their mini-batches when it runs again."""
        self._cycles.rest()
        self._record.write()

    def put(self, branch: int, setting: Setting, policy: SyncPolicy | None = None) -> None:
        """Change the setting of a branch, except where blocks are (see `ProcessRequests.place`). Mini-batches in progress go
        on. A new policy, or other workers, start the policy anew and release the workers that wait. None: the policy stays.
        Raises Rejected for a policy that this job cannot have (see `LiveJob.check`)."""
        of = self._branches.by_number[branch]
        self._job.check(policy or of.policy)
        of.setting, of.shards = setting, self._job.shards(setting)
        self._membership.keep(map(worker, setting.workers))
        if of.state is None or of.halted:
            of.policy = policy or of.policy
        else:
            self._cycles.install(of, policy or of.policy)
        self._record.write()

    def halt(self, branch: int) -> None:
        """Stop all workers of a branch and drop their mini-batches, before a restart under another setting."""
        of = self._branches.by_number[branch]
        if branch == self._branches.running:
            self._releases.stop(of.busy)
        of.halt(self._now())
        self._record.write()

    def launch(self, branch: int) -> None:
        """Start the branch's policy and release all workers of its setting."""
        self._cycles.start(self._branches.by_number[branch])
        self._record.write()

    def fork(
        self, parent: int, setting: Setting, policy: SyncPolicy | None = None, *, testing: bool = False, number: int = 0
    ) -> int:
        """Create a branch from the parent's present state; returns its number. It does not run until `run`. `number`
        gives it the number of a branch that was freed."""
        branches = self._branches
        number = number or branches.next_number
        branches.next_number = max(branches.next_number, number + 1)
        branches.by_number[number] = branches.by_number[parent].forked(number, testing=testing)
        self._ledger.append(ForkEntry(number, parent))
        self.put(number, setting, policy)
        return number

    def free(self, branch: int) -> None:
        """Drop a branch."""
        if branch == self._branches.running:
            self.rest()
        del self._branches.by_number[branch]
        self._ledger.append(FreeEntry(branch))
        self._evaluations.drop_branch(branch)
        self._record.write()

    def evaluate(self, branch: int) -> int:
        """Evaluate a branch as it is now. Returns a number: a report gives the result under it, unless the request is among
        `Poll.cancelled_requests`."""
        return self._evaluations.request(self._branches.by_number[branch], automatic=False)

    def slow(self, factors: Mapping[str, float]) -> None:
        """From the next mini-batch on, computing on these nodes takes so many times as long."""
        self._releases.slowdown = dict(factors)
        self._record.write()
