"""The owner of releases: lets workers begin mini-batches, numbers these, and repeats what was not answered."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

import msgspec

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob, Shards
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.membership.worker_tables import WorkerTables
from harness.live.protocol.log import CommitEntry, NextCycle
from harness.live.protocol.messages import ProbeLoss, Release, ResendPush, Rest
from tuners.actions import Setting, SyncPolicy

__all__ = ["Releases"]


class _Sent(msgspec.Struct, frozen=True):
    """A release, and what it was made of; these values are replaced, and never changed in place."""

    release: Release
    setting: Setting
    shards: Shards
    policy: SyncPolicy

    def holds(self, branch: CoordinatorBranch, durable: int, slowdown: float) -> bool:
        """Whether a release of another cycle would say the same."""
        made_of = self.setting is branch.setting and self.shards is branch.shards and self.policy is branch.policy
        now = branch.number, durable, slowdown
        return made_of and (self.release.branch, self.release.durable, self.release.slowdown) == now


class Releases:
    """Releases of the running branch's workers; those of another branch are due when it runs."""

    journaled = ("last", "slowdown")

    def __init__(
        self,
        job: LiveJob,
        ledger: Ledger,
        membership: Membership,
        tables: WorkerTables,
        branches: Branches,
        pending: PendingPushes,
        now: Callable[[], float],
    ) -> None:
        self._job, self._ledger, self._now = job, ledger, now
        self._membership, self._tables = membership, tables
        self._branches, self._pending = branches, pending
        self.last = 0  # the number of the last cycle
        self.slowdown: dict[str, float] = {}  # by node, of those that are emulated
        self._asked: dict[int, tuple[float, float]] = {}  # by worker: time of the last message, and how long to wait
        self._sent: dict[int, _Sent] = {}  # by worker: the last release, unless it was sent again

    @property
    def next_cycle(self) -> int:
        """The number of the next cycle."""
        # Above those of earlier views: a coordinator that died may have released cycles that its journal does not have.
        return max(self.last, self._ledger.view << 32) + 1

    def announced(
        self, branch: CoordinatorBranch, released: Sequence[int], commit: CommitEntry, seconds: float
    ) -> tuple[NextCycle, ...]:
        """What workers begin with the commit of a push, before it is appended: servers tell them, with the parameters."""
        made = []
        for number, worker in enumerate(released, self.next_cycle):
            name, sent = self._job.workers[worker], self._sent.get(worker)
            # This commit may be the first one of its worker that is not durable.
            oldest = self._ledger.oldest_commit(name) or (commit.cycle if name == commit.worker else number)
            # Who goes by the release that it has needs no other one: that saves a message in most cycles.
            holds = sent is not None and sent.holds(branch, oldest - 1, self._slowdown(worker))
            terms = sent.release.cycle if sent is not None and holds else number
            made.append(NextCycle(name, number, branch.begun.item(worker), terms, seconds))
        return tuple(made)

    def release(
        self, branch: CoordinatorBranch, released: Iterable[int], seconds: float, announced: Sequence[NextCycle] = ()
    ) -> None:
        """Let workers begin their next mini-batch; a worker that is in one drops it. `announced`: what servers tell them."""
        by_name = {cycle.worker: cycle for cycle in announced}
        for worker in released:
            if worker in branch.busy:
                branch.give_up(worker, seconds)
            if branch.number == self._branches.running and not self._branches.finishing:
                self.begin(branch, worker, seconds, by_name.get(self._job.workers[worker]))
            else:
                branch.due.add(worker)

    def begin(self, branch: CoordinatorBranch, worker: int, seconds: float, announced: NextCycle | None = None) -> None:
        """Let a worker begin its next mini-batch, or repeat the one that it was at when the branch was paused."""
        self.last = self.next_cycle
        branch.begin(worker, self.last, seconds, self._ledger.index)
        self._pending.forget(worker)
        self.answered(worker)
        name = self._job.workers[worker]
        self._membership.released[name] = self.last
        # Before the release, so that the worker addresses its pulls by the new table.
        self._tables.update(name)
        if (announced is None or announced.terms == self.last) and not self._ledger.replaying:
            release = self._present(branch, worker, unasked=announced is not None)
            self._sent[worker] = _Sent(release, branch.setting, branch.shards, branch.policy)
            self._ledger.tell(name, release)

    def _present(self, branch: CoordinatorBranch, worker: int, *, unasked: bool = False) -> Release:
        """The release of the cycle that a worker is in."""
        cycle, name, setting = branch.busy[worker], self._job.workers[worker], branch.setting
        return Release(
            cycle=cycle.number,
            branch=branch.number,
            clock=cycle.clock,
            after=cycle.after,
            durable=(self._ledger.oldest_commit(name) or cycle.number) - 1,
            unasked=unasked,
            samples=int(branch.shards.samples[worker]),
            shard_start=int(branch.shards.start[worker]),
            shard_length=int(branch.shards.length[worker]),
            bits=setting.transfer_bits,
            probes=branch.policy.probes,
            intra_threads=setting.intra_threads,
            inter_threads=setting.inter_threads,
            slowdown=self._slowdown(worker),
            seconds=cycle.released_seconds,
        )

    def _slowdown(self, worker: int) -> float:
        return self.slowdown.get(self._job.nodes[worker], 1.0)

    def stop(self, workers: Iterable[int]) -> None:
        """Tell workers to drop their mini-batches."""
        for worker in workers:
            self._pending.forget(worker)
            self._ledger.tell(self._job.workers[worker], Rest())

    def answered(self, worker: int) -> None:
        """A worker was heard, or told something new: wait anew before it is asked again."""
        self._asked[worker] = self._now(), self._job.retry_seconds

    def ask_again(self, branch: CoordinatorBranch) -> bool:
        """Repeat messages that workers of the running branch have not answered for too long; the next time, wait twice as
        long. Returns whether there were any."""
        now, late = self._now(), False
        for worker, cycle in branch.busy.items():
            since, wait = self._asked.get(worker, (0.0, self._job.retry_seconds))
            if now - since > wait:
                late, self._asked[worker] = True, (now, 2 * wait)
                name = self._job.workers[worker]
                if worker in self._pending.undecided:
                    self._ledger.tell(name, ProbeLoss(cycle.number, self._ledger.index))
                else:  # the release, the push, or both are lost; a worker ignores what it has already
                    self._repeat(branch, worker)
                    self._ledger.tell(name, ResendPush(cycle.number))
        return late

    def repeat(self, branch: CoordinatorBranch) -> None:
        """A view begins: workers refuse what was sent before, also by servers that were to tell them of their next cycle."""
        for worker in sorted(branch.busy.keys() - self._pending.undecided.keys()):
            self._repeat(branch, worker)

    def _repeat(self, branch: CoordinatorBranch, worker: int) -> None:
        self._ledger.tell(self._job.workers[worker], self._present(branch, worker))
        # It may differ from the first one of the same number, and the worker has one of the two: nobody goes on by it.
        self._sent.pop(worker, None)
