"""The coordinator: one log for all servers, and the policy that releases workers.

This file makes the owners of what the coordinator knows, and tells them of messages. The log, and where blocks are, is in
`harness.live.coordinator.ledger`; processes are in `harness.live.coordinator.membership`, branches in
`harness.live.coordinator.branches`. The owners do not call the coordinator back: they return what it has to do next.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.complete_pushes import CompletePushes
from harness.live.coordinator.branches.cycles import Cycles
from harness.live.coordinator.branches.evaluations import Evaluations
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.job_reports import JobReports
from harness.live.coordinator.ledger.journal import Journal
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Moves
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.membership.views import Views
from harness.live.coordinator.membership.worker_tables import WorkerTables
from harness.live.coordinator.process_requests import ProcessRequests
from harness.live.coordinator.repairs import Repairs
from harness.live.coordinator.state_record import StateRecord
from harness.live.coordinator.state_requests import StateRequests
from harness.live.coordinator.training_requests import TrainingRequests
from harness.live.protocol.blocks import Layout, blocks_in
from harness.live.protocol.messages import (
    Array,
    BlocksAwaited,
    BlocksMoved,
    CopyKept,
    EntriesMissing,
    EvaluationResult,
    GradientDone,
    Head,
    Hello,
    LossProbed,
    Message,
    PushStaged,
    Send,
    SnapshotCopy,
    TableSeen,
    ViewReady,
)

__all__ = ["Coordinator"]

_SNAPSHOT_COMMITS = 20  # at least, from one snapshot to the next


class Coordinator:
    """The core of the coordinator's process, without sockets, threads or a clock of its own.

    `receive` and `tick` are for the loop around it; the driver asks `states`, `training`, `processes` and `reports`.
    """

    def __init__(self, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> None:
        self._job, self._now = job, now
        self.refused = 0  # messages of an older view or generation
        ledger = self.ledger = Ledger(Layout(job.size, job.blocks, job.tables), send, journal)
        moves, snapshots = self.moves, self._snapshots = Moves(ledger), Snapshots(ledger, now)
        tables = self._tables = WorkerTables(ledger)
        views = self.views = Views(ledger, snapshots, moves, tables, now, job.retry_seconds)
        membership = self._membership = Membership(ledger, moves, tables, views)
        branches, pending = self.branches, self._pending = Branches(job, ledger, now), PendingPushes(job.blocks)
        releases = self._releases = Releases(job, ledger, membership, tables, branches, pending, now)
        pushes = self._pushes = CompletePushes(job, ledger, branches, pending, releases, now)
        cycles = self._cycles = Cycles(job, ledger, branches, pending, releases, pushes, now)
        evaluations = self._evaluations = Evaluations(ledger, job.nodes, now)
        owners = (ledger, moves, views, membership, branches, pending, releases)
        record = self._record = StateRecord(ledger, {type(owner).__name__: owner for owner in owners})
        repairs = self._repairs = Repairs(
            ledger, snapshots, membership, views, branches, pending, releases, record, now, job.retry_seconds
        )
        self.states = StateRequests(job, ledger, snapshots, moves, views, branches, pending, pushes, evaluations, record)
        self.training = TrainingRequests(job, ledger, membership, branches, releases, cycles, evaluations, record, now)
        self.processes = ProcessRequests(ledger, snapshots, moves, membership, views, repairs, branches, cycles, record, now)
        self.reports = JobReports(job, ledger, moves, views, branches, pending, evaluations, now)

    @classmethod
    def restored(cls, job: LiveJob, send: Send, now: Callable[[], float], journal: Journal) -> Coordinator:
        """A coordinator that continues where the journal ends. Let it `recover` once it can reach its processes."""
        made = cls(job, send, now, journal)
        changes: dict[str, Callable[..., Any]] = {
            "entry": made.ledger.append,
            "durable": made.ledger.make_durable,
            "settle": made._pushes.settle,
            "advance": made._pushes.advance,
            "settle_probed": made._pushes.settle_probed,
            "told": made.branches.confirm_rows,
        }
        made._record.replay(journal, changes)
        # The copies that the dead coordinator kept are lost with it, so it counts as no holder any more.
        made.ledger.take_over()
        made._record.write()
        return made

    def receive(self, sender: str, message: Message) -> None:
        """Handle one message."""
        head, ledger = message.head, self.ledger
        if isinstance(head, Hello):
            self._on_hello(sender, message.generation)
        # A process that is taken for dead may still run and send: its generation is no member's any more.
        elif ledger.members.get(sender) == message.generation and message.view == ledger.view:
            self._handle(sender, head, message.arrays)
        else:
            self.refused += 1

    def _on_hello(self, sender: str, generation: int) -> None:
        if self.ledger.expected.get(sender) == generation and self._membership.admit(sender, generation):
            self._evaluations.ask_again()
            # Only the running branch: by the time that another one runs, the same workers may be back.
            if self.branches.current is not None:
                self._cycles.update_workers(self.branches.current)
            self._record.write()

    def _handle(self, sender: str, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case PushStaged():
                self._after_push(self._pushes.staged(head))
            case GradientDone():
                self._after_push(self._pushes.done(sender, head))
            case BlocksAwaited():
                self._pushes.awaited(sender, head)
            case LossProbed():
                self._after_push(self._pushes.probed(sender, head))
            case CopyKept():
                self._after_copy(self._snapshots.kept(sender, head))
            case SnapshotCopy():
                self._after_copy(self._snapshots.copied(sender, head, arrays))
            case BlocksMoved():
                self.moves.arrived(blocks_in(head.runs), self._now())
            case EvaluationResult():
                found = self._evaluations.answered(head)
                if found is not None:
                    self.branches.evaluated(*found)
            case EntriesMissing():
                if self.views.resend(sender, head.index):
                    self._repairs.begin_view()
            case ViewReady():
                if self.views.ready(sender):
                    # At once: until it is durable, some blocks may have one holder only.
                    self._snapshots.take()
                    self.moves.advance()
                self._record.write()
            case TableSeen():
                self._tables.confirmed(sender, head.index)

    def _after_push(self, branch: CoordinatorBranch | None) -> None:
        """Do what is due after every so many pushes. None: no push was completed."""
        if branch is None:
            return
        if self._job.evaluate_clocks and branch.pushes % self._job.evaluate_clocks == 0:
            self._evaluations.request(branch, automatic=True)
        self._snapshots.uncopied += 1
        if self._is_snapshot_due(branch):
            self._snapshots.take()
        self._repairs.dismiss_retired()

    def _is_snapshot_due(self, branch: CoordinatorBranch) -> bool:
        job, snapshots = self._job, self._snapshots
        if snapshots.uncopied < (job.snapshot_commits or _SNAPSHOT_COMMITS):
            return False
        if self._now() - snapshots.taken_seconds < job.snapshot_seconds:
            return False
        often = job.snapshot_commits or max(_SNAPSHOT_COMMITS, 4 * int(np.count_nonzero(branch.active)))
        # Twice as rarely while another snapshot is in progress, which the new one would replace.
        return snapshots.uncopied >= often * (1 + bool(snapshots.under_way)) and not self.views.recovering

    def _after_copy(self, complete: bool) -> None:
        if complete:
            self._record.write_if_long()

    def tick(self) -> None:
        """Call this now and then: it asks again for what has not arrived."""
        branch = self.branches.current
        if branch is not None and branch.status == "running":
            late = self._releases.ask_again(branch)
            if late or self.views.recovering:
                if self.views.overdue:
                    self._repairs.begin_view()
                self.views.retransmit()
        self._evaluations.ask_again(self._job.retry_seconds)
        self._repairs.dismiss_retired()
        self._repairs.ask_again()
