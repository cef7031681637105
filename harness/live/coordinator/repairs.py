"""The owner of what follows from a loss beyond the processes: branches and pushes go with the new view."""

from __future__ import annotations

from collections.abc import Callable

from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.membership.views import Views
from harness.live.coordinator.state_record import StateRecord

__all__ = ["Repairs"]


class Repairs:
    """Begins views, and dismisses processes that nobody needs any more."""

    def __init__(
        self,
        ledger: Ledger,
        snapshots: Snapshots,
        membership: Membership,
        views: Views,
        branches: Branches,
        pending: PendingPushes,
        releases: Releases,
        record: StateRecord,
        now: Callable[[], float],
        retry_seconds: float,
    ) -> None:
        self._ledger, self._snapshots, self._membership, self._views = ledger, snapshots, membership, views
        self._branches, self._pending, self._releases = branches, pending, releases
        self._record, self._now, self._patience_seconds = record, now, 10 * retry_seconds
        self._asked_seconds, self._wait_seconds = now(), self._patience_seconds

    def begin_view(
        self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()
    ) -> None:
        """Begin a view, as `Views.begin`; groups that were open lose the pushes that are withdrawn.

        It is in the record at once: cycles are numbered by views, and a successor must not give a number again.
        """
        for number in self._views.begin(servers, shares, owners):
            if number in self._branches.by_number:
                self._branches.by_number[number].grouped -= 1
        self._pending.forget_staged()
        if self._branches.current is not None:
            self._releases.repeat(self._branches.current)
        self._record.write()

    def ask_to_leave(self) -> None:
        """Make the retiring processes dispensable: others get what they keep, and nobody addresses them any more."""
        self._snapshots.take()
        self._ledger.send_table(self._ledger.workers)

    def dismiss_retired(self) -> None:
        """Remove the retiring processes with which nothing would be lost.

        It is in the record at once: they are stopped then, and a successor must not take them for members.
        """
        if not self._ledger.retiring:
            return
        busy = self._branches.busy
        if self._membership.dismiss_retired(busy):
            self._record.write()
        # The last push of a worker that leaves is mostly later than the snapshot of `ask_to_leave`, and the next regular one
        # may come late or, if training ends, never. One snapshot for all workers: so when none is in a mini-batch.
        if busy.isdisjoint(self._ledger.retiring) and not self._views.recovering:
            last = max(map(self._ledger.last_commit, self._ledger.retiring), default=0)
            if last > self._snapshots.latest:
                self._snapshots.take()

    def ask_again(self) -> None:
        """Repeat what those that wait for a snapshot, or to leave, have asked for too long ago; the next time, wait twice as
        long. A copy, or its acknowledgement, may be lost."""
        now, waiting = self._now(), bool(self._ledger.retiring or self._snapshots.under_way)
        if not waiting:
            self._asked_seconds, self._wait_seconds = now, self._patience_seconds
        elif now - self._asked_seconds > self._wait_seconds and not self._views.recovering:
            self._asked_seconds, self._wait_seconds = now, 2 * self._wait_seconds
            self.ask_to_leave()
