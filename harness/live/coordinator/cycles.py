"""The owner of the branches, and of the cycles of their workers: released, computed, staged, committed.

One branch trains at a time. Methods return what they bring about (a complete push, a wait that is too long), and the
coordinator does what follows from it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
from msgspec.structs import replace
from numpy.typing import NDArray

from harness.live.coordinator.branch import CoordinatorBranch, LiveJob, PushFacts
from harness.live.coordinator.ledger import Ledger
from harness.live.coordinator.membership import Membership
from harness.live.protocol.blocks import Blocks, blocks_in
from harness.live.protocol.messages import GradientDone, LossProbed, ProbeLoss, PushStaged, Release, ResendPush, Rest
from harness.live.protocol.messages import worker as worker_name
from simulators.engine.loop import Records
from tuners.actions import Evaluation, SyncPolicy

__all__ = ["Cycles"]

_KEPT = ("branches", "running", "finishing", "last", "undecided", "slowdown")


class Cycles:
    """All branches, and what the workers of the running one are at."""

    def __init__(self, job: LiveJob, ledger: Ledger, membership: Membership, now: Callable[[], float]) -> None:
        self._job, self._ledger, self._membership, self._now = job, ledger, membership, now
        self._workers = {worker_name(node): w for w, node in enumerate(job.nodes)}
        self.branches: dict[int, CoordinatorBranch] = {}
        self.running: int | None = None
        self.finishing = False  # workers complete their mini-batches, and begin no others
        self.last = 0  # the number of the last cycle
        self.undecided: dict[int, PushFacts] = {}  # committed pushes that wait for the loss after them, by worker
        self.slowdown: dict[str, float] = {}  # by node, of those that are emulated
        self._done: dict[int, GradientDone] = {}
        self._staged: dict[int, Blocks] = {}
        self._asked: dict[int, tuple[float, float]] = {}  # by worker: time of the last message, and how long to wait

    def dump(self) -> dict[str, Any]:
        """The state that a successor needs."""
        return {name: getattr(self, name) for name in _KEPT}

    def load(self, kept: dict[str, Any]) -> None:
        """The inverse of `dump`."""
        for name in _KEPT:
            setattr(self, name, kept[name])

    def reset(self, branches: dict[int, CoordinatorBranch], undecided: Iterable[tuple[int, PushFacts]]) -> int:
        """Replace all branches; none of them runs. Returns how many pushes of the former ones are lost."""
        before, self.branches, self.running = self.branches, branches, None
        # The driver is told of lost pushes, too: it has seen some of them, and counts rows.
        for number in before.keys() & branches.keys():
            branches[number].rows, branches[number].rows_taken = before[number].rows, before[number].rows_taken
        self.undecided.clear()
        for number, facts in undecided:
            # Not `settle_probed`: the journal still has the former branches, until the coordinator restarts it.
            self._settle_probed(number, facts._replace(loss_after=facts.loss_before))
        for branch in branches.values():
            branch.restart_clock(self._now())
        return sum(b.pushes - (branches[n].pushes if n in branches else b.inherited) for n, b in before.items())

    @property
    def current(self) -> CoordinatorBranch | None:
        """The branch that runs."""
        return None if self.running is None else self.branches.get(self.running)

    @property
    def busy(self) -> frozenset[str]:
        """The names of the workers that are in a mini-batch."""
        branch = self.current
        return frozenset() if branch is None else frozenset(worker_name(self._job.nodes[w]) for w in branch.busy)

    def held_seconds(self) -> dict[str, float]:
        """How long the running branch's policy has held back each worker that waits now, by node."""
        branch = self.current
        return {} if branch is None else {self._job.nodes[w]: s for w, s in branch.held_seconds(self._now()).items()}

    # -------------------------------------------------------------------------------------------------- messages of workers

    def _worker_in(self, name: str, cycle: int) -> int | None:
        """The worker that is in this cycle now; None if the cycle is over, or was dropped."""
        worker, branch = self._index(name), self.current
        if branch is None or worker is None or worker not in branch.busy or branch.busy[worker].number != cycle:
            return None
        return worker

    def _index(self, name: str) -> int | None:
        return self._workers.get(name)

    def done(self, sender: str, head: GradientDone) -> CoordinatorBranch | None:
        """A worker has computed a gradient. Returns its branch if that completes its push."""
        worker = self._worker_in(sender, head.cycle)
        if worker is None or worker in self._done:
            return None
        self._done[worker] = head
        self._asked[worker] = self._now(), self._job.retry_seconds
        return self._try_to_settle(worker, sender)

    def staged(self, head: PushStaged) -> CoordinatorBranch | None:
        """A server has parts of a push. Returns the branch if that completes the push."""
        worker = self._worker_in(head.worker, head.cycle)
        if worker is None or worker in self.undecided:
            return None
        self._staged[worker] = self._staged.get(worker, frozenset()) | blocks_in(head.runs)
        if head.done is None or worker in self._done:
            return self._try_to_settle(worker, head.worker)
        return self.done(head.worker, head.done)

    def _try_to_settle(self, worker: int, name: str) -> CoordinatorBranch | None:
        done, branch = self._done.get(worker), self.current
        if done is None or branch is None or branch.status != "running" or worker in self.undecided:
            return None
        # Only when every block is staged: the commit must be applicable at every server.
        if len(self._staged.get(worker, ())) < self._job.blocks:
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
        worker, branch = self._worker_in(sender, head.cycle), self.current
        if worker is None or branch is None or worker not in self.undecided:
            return None
        self.settle_probed(branch.number, self.undecided[worker]._replace(seconds=self._now(), loss_after=head.loss))
        return branch

    def ask_again(self) -> bool:
        """Repeat messages that workers have not answered for too long; the next time, wait twice as long. Returns whether
        the running branch waits for something."""
        branch, now, late = self.current, self._now(), False
        if branch is None or branch.status != "running":
            return False
        for worker, cycle in branch.busy.items():
            since, wait = self._asked.get(worker, (0.0, self._job.retry_seconds))
            if now - since > wait:
                late, self._asked[worker] = True, (now, 2 * wait)
                name = worker_name(self._job.nodes[worker])
                if worker in self.undecided:
                    self._ledger.tell(name, ProbeLoss(cycle.number, self._ledger.index))
                else:  # the release, the push, or both are lost; a worker ignores what it has already
                    self._ledger.tell(name, self._release_of(branch, worker))
                    self._ledger.tell(name, ResendPush(cycle.number))
        return late or self._membership.recovering

    def held_up_by(self) -> dict[str, str]:
        """What the running branch waits for, by the process that it waits for."""
        branch, found = self.current, dict[str, str]()
        for worker, cycle in {} if branch is None else branch.busy.items():
            name = worker_name(self._job.nodes[worker])
            done = self._done.get(worker)
            if done is None or worker in self.undecided:
                found[name] = f"has not computed mini-batch {cycle.clock}"
                continue
            for block, owner in self._ledger.table.items():
                if block not in self._staged.get(worker, ()):
                    found[owner] = f"has not received the gradient of {name}"
        return found

    def forget_staged(self) -> None:
        """A view begins: servers have dropped all staged pushes."""
        self._staged.clear()

    # --------------------------------------------------------------------------------------- changes that a journal replays

    def settle(self, branch: int, name: str, facts: PushFacts) -> None:
        """A push is complete: ask the policy, append the commit, release workers."""
        of, facts = self.branches[branch], PushFacts(*facts)
        commit, released = of.settle(facts, name, self._ledger.index + 1)
        # Servers do not know which rows of embedding tables a mini-batch looks up: workers ask for them.
        unasked = self._job.tables is None
        if unasked and of is self.current and not self.finishing:
            # The commit names the next cycles before they begin, so that servers can send parameters along with it.
            first = self._next_cycle()
            cycles = tuple((worker_name(self._job.nodes[w]), first + i) for i, w in enumerate(released))
            commit = replace(commit, released=cycles, bits=of.setting.transfer_bits)
        # The journal keeps the facts, not the commit: to replay them brings back the policy's state as well.
        self._ledger.append(commit, "settle", branch, name, tuple(facts))
        self.release(of, released, facts.seconds, unasked=unasked)
        self._update_status(of)

    def _next_cycle(self) -> int:
        # Above those of earlier views: a coordinator that died may have released cycles that its journal does not have.
        return max(self.last, self._ledger.view << 32) + 1

    def advance(self, branch: int, name: str, facts: PushFacts) -> int:
        """Append the commit of a push under a policy that probes; the policy decides later. Returns the entry's index."""
        self.undecided[facts.worker] = facts
        commit = self.branches[branch].advance(facts, name, self._ledger.index + 1)
        return self._ledger.append(commit, "advance", branch, name, facts)

    def settle_probed(self, branch: int, facts: PushFacts) -> None:
        """Ask the policy about a push of `advance`, and release workers."""
        self._ledger.write("settle_probed", branch, facts)
        self._settle_probed(branch, facts)

    def _settle_probed(self, branch: int, facts: PushFacts) -> None:
        of = self.branches[branch]
        self.undecided.pop(facts.worker, None)
        self.release(of, of.settle_probed(facts), facts.seconds)
        self._update_status(of)

    def _decide_all(self, branch: CoordinatorBranch) -> None:
        """Ask the policy about all undecided pushes now, as if they had not changed the loss."""
        for facts in list(self.undecided.values()):
            self.settle_probed(branch.number, facts._replace(loss_after=facts.loss_before))

    def confirm_rows(self, branch: int, rows: int) -> None:
        """The driver has taken so many more rows."""
        self._ledger.write("told", branch, rows)
        of = self.branches[branch]
        del of.rows[:rows]
        of.rows_taken += rows

    def rows_from(self, branch: CoordinatorBranch, taken: int | None) -> tuple[int, NDArray[np.float64]]:
        """The index of the first row that the driver has not confirmed, and the rows from there on. `taken` confirms the
        rows before it; None confirms all that are returned."""
        if taken is not None and taken > branch.rows_taken:
            self.confirm_rows(branch.number, taken - branch.rows_taken)
        first, rows = branch.rows_taken, np.array(branch.rows).reshape(-1, len(Records._fields))
        if taken is None and len(rows):
            self.confirm_rows(branch.number, len(rows))
        return first, rows

    def _update_status(self, branch: CoordinatorBranch) -> None:
        target = self._job.target
        if branch.status != "running":
            return
        if target.counts and target.reached(np.nan, np.nan, branch.pushes, branch.samples):
            branch.status = "target"
        elif not branch.busy and not branch.due:
            branch.status = "deadlock"

    def evaluated(self, branch: int, evaluation: Evaluation) -> None:
        """A branch has been evaluated: it may have reached the target."""
        of, target = self.branches[branch], self._job.target
        if of.status == "running" and not target.counts and target.reached(evaluation.loss, evaluation.accuracy):
            of.status = "target"

    # ------------------------------------------------------------------------------------------------------- releases

    def release(self, branch: CoordinatorBranch, released: Iterable[int], seconds: float, *, unasked: bool = False) -> None:
        """Let workers begin their next mini-batch; a worker that is in one drops it. `unasked`: servers send parameters."""
        for worker in released:
            if worker in branch.busy:
                branch.give_up(worker, seconds)
            if branch.number == self.running and not self.finishing:
                self._start_cycle(branch, worker, seconds, unasked=unasked)
            else:
                branch.due.add(worker)

    def _start_cycle(self, branch: CoordinatorBranch, worker: int, seconds: float, *, unasked: bool = False) -> None:
        """Let a worker begin its next mini-batch, or repeat the one that it was at when the branch was paused."""
        self.last = self._next_cycle()
        branch.begin(worker, self.last, seconds, self._ledger.index)
        self._forget_cycle(worker)
        self._asked[worker] = self._now(), self._job.retry_seconds
        name = worker_name(self._job.nodes[worker])
        self._membership.released[name] = self.last
        # Before the release, so that the worker addresses its pulls by the new table.
        self._membership.update_table(name)
        self._ledger.tell(name, self._release_of(branch, worker, unasked=unasked))

    def _forget_cycle(self, worker: int) -> None:
        made: tuple[dict[int, Any], ...] = (self._done, self._staged, self.undecided)
        for kept in made:
            kept.pop(worker, None)

    def _release_of(self, branch: CoordinatorBranch, worker: int, *, unasked: bool = False) -> Release:
        cycle, name, setting = branch.busy[worker], worker_name(self._job.nodes[worker]), branch.setting
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
            slowdown=self.slowdown.get(self._job.nodes[worker], 1.0),
        )

    def run(self, branch: int) -> None:
        """Continue a paused branch."""
        of, now = self.branches[branch], self._now()
        of.resume(now)
        # A restored branch may list workers that are gone; drop them.
        for worker in {*of.busy, *of.due}:
            if worker_name(self._job.nodes[worker]) not in self._ledger.members:
                of.give_up(worker, now)
        self.update_workers(of)
        self.running = branch
        for worker in sorted({*of.busy, *of.due}):
            self._start_cycle(of, worker, now)

    def rest(self) -> None:
        """Pause the running branch."""
        if self.current is not None:
            # Another branch must not answer the probes of this one.
            self._decide_all(self.current)
            self.current.pause(self._now())
            self.stop(self.current.busy)
        self.running, self.finishing = None, False

    def stop(self, workers: Iterable[int]) -> None:
        """Tell workers to drop their mini-batches."""
        for worker in workers:
            self._forget_cycle(worker)
            self._ledger.tell(worker_name(self._job.nodes[worker]), Rest())

    def lose(self, name: str) -> None:
        """A worker is dead."""
        worker = self._index(name)
        if worker is not None:
            self._forget_cycle(worker)
            for branch in self.branches.values():
                branch.give_up(worker, self._now())

    # ------------------------------------------------------------------------------------------------- policies and workers

    def active(self, branch: CoordinatorBranch) -> NDArray[np.bool_]:
        """The workers of a branch's setting that have joined, [k]."""
        members, workers = self._ledger.members, branch.setting.workers
        return np.array([n in workers and worker_name(n) in members for n in self._job.nodes])

    def install(self, branch: CoordinatorBranch, policy: SyncPolicy) -> None:
        """Start a policy anew if it, or the set of active workers, has changed."""
        active, now, unprobed = self.active(branch), self._now(), list[int]()
        if policy.probes != branch.policy.probes and branch is self.current:
            self._decide_all(branch)
            # Their cycles began without probes, so they must begin again.
            unprobed = list(branch.busy) if policy.probes else []
        if policy is not branch.policy or not np.array_equal(active, branch.active):
            released = branch.install(policy, active, now)
            for worker in unprobed:
                self._start_cycle(branch, worker, now)
            self.release(branch, released, now)

    def update_workers(self, branch: CoordinatorBranch) -> None:
        """Start the branch's policy anew if workers have joined or left since it was started."""
        if branch.state is not None and not branch.halted:
            self.install(branch, branch.policy)
