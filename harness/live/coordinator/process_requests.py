"""The driver's requests about processes that come and go, and about the servers that blocks are on.

All of them return at once; a report shows their effects. Processes are named as in `harness.live.protocol.messages`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.cycles import Cycles
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Goal, Moves
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.coordinator.membership.membership import Membership
from harness.live.coordinator.membership.views import Views
from harness.live.coordinator.repairs import Repairs
from harness.live.coordinator.state_record import StateRecord

__all__ = ["ProcessRequests"]


@dataclass(frozen=True, eq=False)
class ProcessRequests:
    """Answers the questions of `ProcessQuestions` in `harness.live.processes.client`."""

    _ledger: Ledger
    _snapshots: Snapshots
    _moves: Moves
    _membership: Membership
    _views: Views
    _repairs: Repairs
    _branches: Branches
    _cycles: Cycles
    _record: StateRecord
    _now: Callable[[], float]

    def expect(self, name: str, generation: int) -> None:
        """Let a process of this name and generation join. Messages of its older generations are refused from now on."""
        if self._ledger.members.get(name, generation) < generation:
            self.lose([name])
        self._ledger.expected[name] = generation
        self._record.write()

    def lose(self, names: Iterable[str]) -> None:
        """Treat these processes as dead. The policy continues without the workers among them; after the loss of a server
        that owns blocks, servers apply nothing until `recover`."""
        lost = [n for n in names if n in self._ledger.members]
        for name in lost:
            self._cycles.lose(name)
        for name in lost:
            if self._membership.lose(name):
                self._repairs.begin_view()
        if not self._views.recovering:
            # A dead worker cannot stage its pushes again, so make them durable at once.
            self._snapshots.take()
        for branch in self._branches.by_number.values():
            self._cycles.update_workers(branch)
        self._record.write()

    def recover(self, servers: tuple[str, ...] = (), shares: tuple[float, ...] = (), owners: tuple[str, ...] = ()) -> None:
        """Go back to the last durable snapshot and replay the log, on the processes that are alive. Blocks of dead servers
        go to `servers`, by these shares if possible, or to their own one of `owners`, which cancels `place`; without
        `servers`, to those that are left. Raises RuntimeError where a block has no copy."""
        if servers:
            self._moves.goal = None
            self._membership.keep(servers)
        self._repairs.begin_view(servers, shares, owners)

    def retire(self, names: Iterable[str]) -> None:
        """Ask processes to leave: servers without blocks, workers of no setting. Stop each when it is no longer `needed`."""
        # The entry after the present one is the snapshot below.
        self._ledger.retiring.update(dict.fromkeys(names, self._ledger.index + 1))
        self._repairs.ask_to_leave()
        self._record.write()

    def needed(self, name: str) -> bool:
        """Whether stopping this process now would lose anything."""
        self._repairs.dismiss_retired()
        return name in self._ledger.members

    def place(
        self,
        servers: tuple[str, ...],
        shares: tuple[float, ...],
        *,
        owners: tuple[str, ...] = (),
        on_demand: bool = False,
        at_once: int = 4,
    ) -> None:
        """Begin to move blocks until these servers have these shares or, with `owners`, until each block is at its own;
        `Poll.moving` counts down to 0. With `on_demand`, all blocks change owners at once and are sent when asked for.
        Raises ValueError for a server that has not joined."""
        missing = [s for s in servers if s not in self._ledger.members]
        if missing:
            raise ValueError(f"Cannot move blocks to {missing[0]!r}: it has not joined; start it, and place when it has.")
        self._membership.keep(servers)
        # Also while recovering: the moves begin when all servers have restored the view.
        self._moves.goal = Goal(servers, shares, on_demand, at_once, owners)
        self._moves.seconds = self._now()
        if not self._views.recovering:
            self._moves.advance()
        self._record.write()
