"""What the driver is told of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from harness.live.coordinator.branches.branch import LiveJob
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.evaluations import Evaluations
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Moves
from harness.live.coordinator.membership.views import Views
from harness.live.protocol.driver_reports import Poll, Report

__all__ = ["JobReports"]


@dataclass(frozen=True, eq=False)
class JobReports:
    """Answers the questions of `ReportQuestions` in `harness.live.processes.client`."""

    _job: LiveJob
    _ledger: Ledger
    _moves: Moves
    _views: Views
    _branches: Branches
    _pending: PendingPushes
    _evaluations: Evaluations
    _now: Callable[[], float]

    @property
    def members(self) -> Mapping[str, int]:
        """The processes that have joined, with their generations."""
        return self._ledger.members

    @property
    def durable(self) -> int:
        """The entry of the log up to which the death of one process loses nothing."""
        return self._ledger.durable

    def poll(self, taken: Mapping[int, int] | None = None) -> Poll:
        """The state of the job. `taken` confirms the rows of each branch that the driver has; all others are reported again.
        So no rows are lost with a coordinator that dies while it answers. None: the driver takes all with this answer."""
        reports, branches = {}, self._branches.by_number
        for number, branch in branches.items():
            first, rows = self._branches.rows_from(branch, None if taken is None else taken.get(number, 0))
            reports[number] = Report(first, rows, self._evaluations.take(number))
        return Poll(
            now=self._now(),
            reports=reports,
            statuses={number: branch.status for number, branch in branches.items()},
            moving=self._moves.remaining,
            durable=self.durable,
            recovering=self._views.recovering,
            members=dict(self.members),
            held_seconds=self._branches.held_seconds(),
            lost_pushes=self._views.lost_pushes,
            cancelled_requests=self._evaluations.cancelled_requests,
        )

    def held_up_by(self) -> dict[str, str]:
        """What training waits for, by the process that it waits for."""
        branch, found = self._branches.current, dict[str, str]()
        for worker, cycle in {} if branch is None else branch.busy.items():
            name, late, owners = self._job.workers[worker], self._pending.awaited(worker), self._ledger.table.items()
            if self._pending.is_computed(worker) and worker not in self._pending.undecided:
                staged = self._pending.staged(worker)
                found |= {o: f"has not received the gradient of {name}" for block, o in owners if block not in staged}
            elif late:
                found |= {o: f"has not sent the parameters that {name} pulls" for block, o in owners if block in late}
            else:
                found[name] = f"has not computed mini-batch {cycle.clock}"
        return found
