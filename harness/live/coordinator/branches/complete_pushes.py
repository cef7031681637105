"""The owner of commits: when a push is complete, it asks the policy, appends the commit, and releases workers.

Methods that a worker's or a server's message calls return the branch whose push that completes; the coordinator does what
follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from msgspec.structs import replace

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob, PushFacts
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.protocol.blocks import blocks_in
from harness.live.protocol.messages import BlocksAwaited, GradientDone, LossProbed, ProbeLoss, PushStaged

__all__ = ["CompletePushes"]


@dataclass(frozen=True, eq=False)
class CompletePushes:
    """Decides which pushes are complete. `settle`, `advance` and `settle_probed` are what a journal replays."""

    _job: LiveJob
    _ledger: Ledger
    _branches: Branches
    _pending: PendingPushes
    _releases: Releases
    _now: Callable[[], float]

    # ------------------------------------------------------------------------------------------------- messages that arrive

    def done(self, sender: str, head: GradientDone) -> CoordinatorBranch | None:
        """A worker has computed a gradient. Returns its branch if that completes its push."""
        worker = self._branches.in_cycle(sender, head.cycle)
        if worker is None or not self._pending.computed(worker, head):
            return None
        self._releases.answered(worker)
        return self._try_to_settle(worker, sender)

    def awaited(self, sender: str, head: BlocksAwaited) -> None:
        """Note that blocks of a worker's pull are late, or have arrived after all."""
        worker = self._branches.in_cycle(sender, head.cycle)
        if worker is not None:
            self._pending.await_blocks(worker, blocks_in(head.runs))

    def staged(self, head: PushStaged) -> CoordinatorBranch | None:
        """A server has parts of a push. Returns the branch if that completes the push."""
        worker = self._branches.in_cycle(head.worker, head.cycle)
        if worker is None or worker in self._pending.undecided:
            return None
        if head.done is not None and self._pending.computed(worker, head.done):
            self._releases.answered(worker)
        return self._try_to_settle(worker, head.worker) if self._pending.stage(worker, blocks_in(head.runs)) else None

    def _try_to_settle(self, worker: int, name: str) -> CoordinatorBranch | None:
        done, branch = self._pending.to_commit(worker), self._branches.current
        if done is None or branch is None or branch.status != "running":
            return None
        facts = PushFacts(
            worker, self._now(), done.loss, done.pull_seconds, done.compute_seconds, done.index, done.loss_before
        )
        if branch.policy.probes:
            index = self.advance(branch.number, name, facts)
            self._ledger.tell(name, ProbeLoss(done.cycle, index))
            return None
        self.settle(branch.number, name, facts)
        return branch

    def probed(self, sender: str, head: LossProbed) -> CoordinatorBranch | None:
        """A worker has computed the loss after its push. Returns its branch if that completes the push."""
        worker, branch = self._branches.in_cycle(sender, head.cycle), self._branches.current
        if worker is None or branch is None or worker not in self._pending.undecided:
            return None
        facts = self._pending.undecided[worker]
        self.settle_probed(branch.number, facts._replace(seconds=self._now(), loss_after=head.loss))
        return branch

    # --------------------------------------------------------------------------------------- changes that a journal replays

    def settle(self, branch: int, name: str, facts: PushFacts) -> None:
        """A push is complete: ask the policy, append the commit, release workers."""
        of, facts = self._branches.by_number[branch], PushFacts._make(facts)
        commit, released = of.settle(facts, name, self._ledger.index + 1)
        # Servers do not know which rows of embedding tables a mini-batch looks up: workers ask for them.
        if self._job.tables is None and of is self._branches.current and not self._branches.finishing:
            # The commit names the next cycles before they begin, so that servers can send parameters along with it.
            announced = self._releases.announced(of, released, commit, facts.seconds)
            commit = replace(commit, released=announced, bits=of.setting.transfer_bits)
        # The journal keeps the facts, not the commit: to replay them brings back the policy's state as well.
        self._ledger.append(commit, "settle", branch, name, tuple(facts))
        self._releases.release(of, released, facts.seconds, commit.released)
        self._branches.update_status(of)

    def advance(self, branch: int, name: str, facts: PushFacts) -> int:
        """Append the commit of a push under a policy that probes; the policy decides later. Returns the entry's index."""
        self._pending.undecided[facts.worker] = facts
        commit = self._branches.by_number[branch].advance(facts, name, self._ledger.index + 1)
        return self._ledger.append(commit, "advance", branch, name, facts)

    def settle_probed(self, branch: int, facts: PushFacts) -> None:
        """Ask the policy about a push of `advance`, and release workers."""
        self._ledger.write("settle_probed", branch, facts)
        self._settle_probed(branch, facts)

    def _settle_probed(self, branch: int, facts: PushFacts) -> None:
        of = self._branches.by_number[branch]
        self._pending.undecided.pop(facts.worker, None)
        self._releases.release(of, of.settle_probed(facts), facts.seconds)
        self._branches.update_status(of)

    # ------------------------------------------------------------------------------------------ without the loss afterwards

    def decide_all(self, branch: CoordinatorBranch) -> None:
        """Ask the policy about all undecided pushes now, as if they had not changed the loss."""
        for facts in list(self._pending.undecided.values()):
            self.settle_probed(branch.number, facts._replace(loss_after=facts.loss_before))

    def decide_restored(self, undecided: Iterable[tuple[int, PushFacts]]) -> None:
        """Replace the undecided pushes by those of a checkpoint, by branch, and ask the policy about them as `decide_all`
        does."""
        self._pending.undecided.clear()
        for number, facts in undecided:
            # Not `settle_probed`: the journal still has the former branches, until the coordinator restarts it.
            self._settle_probed(number, facts._replace(loss_after=facts.loss_before))
