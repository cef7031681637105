"""The owner of what follows from a loss beyond the processes: branches and pushes go with the new view."""

from __future__ import annotations

from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.branches.releases import Releases
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.membership.views import Views

__all__ = ["Repairs"]


class Repairs:
    """Begins views, and dismisses processes that nobody needs any more."""

    def __init__(
        self,
        ledger: Ledger,
        membership: Membership,
        views: Views,
        branches: Branches,
        pending: PendingPushes,
        releases: Releases,
    ) -> None:
        self._ledger, self._membership, self._views = ledger, membership, views
        self._branches, self._pending, self._releases = branches, pending, releases

    def begin_view(
        self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()
    ) -> None:
        """Begin a view, as `Views.begin`; groups that were open lose the pushes that are withdrawn."""
        for number in self._views.begin(servers, shares, owners):
            if number in self._branches.by_number:
                self._branches.by_number[number].grouped -= 1
        self._pending.forget_staged()
        if self._branches.current is not None:
            self._releases.repeat(self._branches.current)

    def dismiss_retired(self) -> None:
        """Remove the retiring processes with which nothing would be lost."""
        if self._ledger.retiring:
            self._membership.dismiss_retired(self._branches.busy)
