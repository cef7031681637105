"""The owner of views: each repairs a loss, whatever it was.

All servers go back to the last durable snapshot, blocks of dead servers get new owners, workers stage again what they pushed
since, and the coordinator sends the log since the snapshot again. A dead worker cannot stage again, so its pushes since the
snapshot would have to be withdrawn. Therefore a snapshot is taken as soon as a worker dies, and pushes are lost only if a
server dies before that snapshot is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

from msgspec.structs import replace

from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Moves
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.coordinator.membership.worker_tables import WorkerTables
from harness.live.protocol.blocks import Blocks, members, owners_of, runs_of
from harness.live.protocol.log import CommitEntry, DropEntry, ForkEntry, FreeEntry, MoveEntry, SkipEntry, SnapshotEntry
from harness.live.protocol.messages import COORDINATOR, LogAppend, View
from simulators.reconfiguration.shares import block_counts

__all__ = ["ModelLost", "Views"]


class ModelLost(RuntimeError):
    """No process has a copy of some block any more; `JobStates.begin_from` gives the job a model again."""


class Views:
    """The present view, and whether servers still restore it."""

    journaled = ("dead_cycles", "orphaned", "lost_pushes")

    def __init__(
        self,
        ledger: Ledger,
        snapshots: Snapshots,
        moves: Moves,
        tables: WorkerTables,
        now: Callable[[], float],
        retry_seconds: float,
    ) -> None:
        self._ledger, self._snapshots, self._moves, self._tables = ledger, snapshots, moves, tables
        self._now, self._patience_seconds = now, 10 * retry_seconds
        self.dead_cycles: dict[str, int] = {}  # the last cycle of every worker's last generation that died
        # Blocks of servers that died. A server of the same name may have joined since, and does not have them.
        self.orphaned: set[int] = set()
        self.lost_pushes = 0
        self._view: View | None = None
        self._restoring: set[str] = set()  # servers that have not restored this view yet
        self._waits_for_recover = False  # blocks are lost, and the driver has not said where they go
        self._view_seconds = 0.0  # when the view began

    @property
    def recovering(self) -> bool:
        """Whether servers restore a view, or wait for `recover`."""
        return self._waits_for_recover or bool(self._restoring)

    # -------------------------------------------------------------------------------------------- processes that come and go

    def welcome(self, name: str) -> None:
        """Send a process that has joined its first view, with nothing to restore."""
        ledger = self._ledger
        # An owner of blocks gets its view from `recover`: this one, with nothing to restore, would lose them.
        if ledger.view > 0 and name not in ledger.table.values():
            table = owners_of(ledger.table)
            ledger.tell(name, View(ledger.view, ledger.index, ledger.index, table, ledger.generations, ()))
            self._tables.in_view(name)

    def worker_left(self, name: str, generation: int, cycle: int) -> None:
        """A worker is dead, or dismissed; `cycle` was its last one."""
        self.dead_cycles[name] = cycle
        self._ledger.append(DropEntry(name, generation, cycle))

    def waits_for_pushes_of(self, name: str) -> bool:
        """Whether servers that restore the view may wait for a push that this worker can no longer stage again."""
        return bool(self._restoring) and not self._waits_for_recover and self._ledger.oldest_commit(name) is not None

    def server_died(self, name: str) -> None:
        """A server is dead. If it owned blocks, or was about to, the job waits for `recover`."""
        table = self._ledger.table
        self._waits_for_recover |= name in self._moves.ends or name in table.values() or name in self._restoring
        self.orphaned.update(b for b, owner in table.items() if owner == name)
        self._snapshots.lose(name)
        self._restoring.discard(name)

    def ready(self, name: str) -> bool:
        """A server has restored the view. Returns whether all have."""
        if name not in self._restoring:
            return False
        self._restoring.discard(name)
        for block, owner in self._ledger.table.items():
            if owner == name:
                self._ledger.holders[block].add(name)
        return not self.recovering

    # --------------------------------------------------------------------------------------------------------- a new view

    def begin(self, servers: tuple[str, ...], shares: tuple[float, ...], owners: tuple[str, ...] = ()) -> list[int]:
        """Begin a view. Returns the branches in whose open group a push was withdrawn, once for each such push. Raises
        ModelLost where blocks are lost, RuntimeError without servers."""
        ledger, self._waits_for_recover = self._ledger, True  # stays so if this raises
        given = dict.fromkeys(servers, 0.0) | dict(zip(servers, shares, strict=False))
        sources = self._sources_of(_new_table(ledger.table, set(ledger.servers), self.orphaned, given, owners))
        withdrawn = self._withdraw()
        # The table of the view includes all moves already, and snapshots in progress are cancelled.
        ledger.entries = {
            i: SkipEntry() if isinstance(e, MoveEntry | SnapshotEntry) else e for i, e in ledger.entries.items()
        }
        ledger.view, ledger.table_index = ledger.view + 1, ledger.durable
        self._snapshots.reset()
        self._moves.reset()
        self._restoring, self._waits_for_recover, self._view_seconds = set(ledger.table.values()), False, self._now()
        self.orphaned.clear()
        self._tables.all_in_view()
        table, by_holder = owners_of(ledger.table), tuple((runs_of(b), h) for h, b in sources.items())
        self._view = View(ledger.view, ledger.durable, ledger.index, table, ledger.generations, by_holder)
        # The view goes first: servers defer messages of a view that they do not know, and workers refuse them.
        for name in (*ledger.servers, *ledger.workers):
            ledger.tell(name, self._view)
        self._snapshots.send_durable(sources.get(COORDINATOR, ()))
        for name in ledger.servers:
            ledger.resend(name, ledger.durable)
        return withdrawn

    def _sources_of(self, table: dict[int, str]) -> dict[str, Blocks]:
        """Puts a table in force. Returns who restores which blocks: the owner from its own copy if it has one, else another
        server, and the coordinator only if no server can. Raises ModelLost."""
        ledger, holder = self._ledger, dict[int, str]()
        for block, owner in table.items():
            able = sorted(ledger.holders[block] & set(ledger.servers))
            here = [COORDINATOR] if block in self._snapshots.keeper.blocks(ledger.durable) else []
            if not able + here:
                raise ModelLost(f"Cannot recover: no process has a copy of block {block}; go back to a checkpoint.")
            holder[block] = owner if owner in able else (able + here)[0]
        ledger.table = table
        return members(holder, holder)

    def _withdraw(self) -> list[int]:
        """Do not accept pushes of dead workers, whose gradients cannot be staged again. Returns the branches, each as often
        as a push left its open group."""
        entries, ungrouped = self._ledger.entries, []
        for index in sorted(entries):
            entry = entries[index]  # read here, because `_shrink_group` may have replaced it
            if isinstance(entry, CommitEntry) and entry.accept and entry.cycle <= self.dead_cycles.get(entry.worker, 0):
                entries[index] = replace(entry, accept=False)
                self.lost_pushes += 1
                ungrouped += self._shrink_group(entry.branch, index)
        return ungrouped

    def _shrink_group(self, branch: int, index: int) -> list[int]:
        """Take one push out of its group, also in branches forked since. Returns the branches in which the group is still
        open."""
        entries, still_open = self._ledger.entries, {branch}
        for i in range(index, self._ledger.index + 1):
            entry = entries[i]
            if isinstance(entry, ForkEntry) and entry.parent in still_open:
                still_open.add(entry.branch)
            elif isinstance(entry, FreeEntry):
                still_open.discard(entry.branch)
            elif isinstance(entry, CommitEntry) and entry.take and entry.branch in still_open:
                entries[i] = replace(entry, grouped=entry.grouped - 1, take=entry.grouped > 1)
                still_open.discard(entry.branch)
        return sorted(still_open)

    # ------------------------------------------------------------------------------------------------------- what is missing

    def resend(self, name: str, after: int) -> bool:
        """A server misses the entries of the log after that one. Returns whether a view must begin, because they are no
        longer kept."""
        if after < self._ledger.durable:
            return not self._waits_for_recover
        self._ledger.resend(name, after)
        return False

    @property
    def overdue(self) -> bool:
        """Whether a view or a move has not come to its end for so long that a new view must begin."""
        late = self._now() - self._patience_seconds
        restores = bool(self._restoring) and self._view_seconds < late
        moves = bool(self._moves.under_way) and self._moves.seconds < late
        return not self._waits_for_recover and (restores or moves)

    def retransmit(self) -> None:
        """Send the view and the log's last entry again: a server that missed an earlier message asks for what it lacks."""
        ledger = self._ledger
        if self._waits_for_recover:
            return
        if self._view is not None:
            for name in sorted(self._restoring):
                ledger.tell(name, self._view)
        for name in ledger.servers if ledger.entries else ():
            ledger.tell(name, LogAppend(ledger.index, ledger.entries[ledger.index]))


def _new_table(
    before: Mapping[int, str], alive: set[str], orphaned: set[int], shares: Mapping[str, float], owners: tuple[str, ...]
) -> dict[int, str]:
    """The owners of all blocks: they stay with an owner that is alive; others, and those in `orphaned`, go to their own one
    of `owners`, or else to servers that have less than their share. Raises RuntimeError without servers."""
    table = dict(before)
    wanted = [s for s in shares if s in alive] or sorted(alive & set(table.values())) or sorted(alive)
    if not wanted:
        raise RuntimeError("Cannot recover: the job has no server; start one, then recover again.")
    total = sum(shares.get(s, 0.0) for s in wanted)
    parts = tuple(shares[s] / total if total > 0 else 1 / len(wanted) for s in wanted)
    lack = block_counts(tuple(wanted), parts, len(table))
    lost = [b for b, owner in sorted(table.items()) if owner not in alive or b in orphaned]
    for block, owner in table.items():
        if owner in lack and block not in lost:
            lack[owner] -= 1
    for block in lost:  # in order, so that each server gets adjacent blocks
        own = owners[block] if owners and owners[block] in alive else None
        table[block] = own or next((s for s in wanted if lack[s] > 0), wanted[0])
        lack[table[block]] = lack.get(table[block], 0) - 1
    return table
