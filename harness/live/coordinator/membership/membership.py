"""The owner of membership: processes that join, leave and die, and the views that repair a loss.

A view repairs everything in one way. All servers go back to the last durable snapshot, blocks of dead servers get new
owners, workers stage again what they pushed since, and the coordinator sends the log since the snapshot again. A dead worker
cannot stage again, so its pushes since the snapshot would have to be withdrawn. Therefore a snapshot is taken as soon as a
worker dies, and pushes are lost only if a server dies before that snapshot is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable

from msgspec.structs import replace

from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Moves
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.protocol.blocks import Blocks, members, owners_of, runs_of
from harness.live.protocol.log import CommitEntry, DropEntry, ForkEntry, FreeEntry, MoveEntry, SkipEntry, SnapshotEntry
from harness.live.protocol.messages import COORDINATOR, LogAppend, View
from simulators.reconfiguration.shares import block_counts

__all__ = ["Membership", "ModelLost"]


class ModelLost(RuntimeError):
    """No process has a copy of some block any more; `Coordinator.begin_from` gives the job a model again."""


class Membership:
    """Decides who is a member. It never begins a view by itself: its methods return whether the coordinator must."""

    kept = ("released", "dead_cycles", "retiring", "orphaned", "lost_pushes")

    def __init__(
        self, ledger: Ledger, snapshots: Snapshots, moves: Moves, now: Callable[[], float], retry_seconds: float
    ) -> None:
        self._ledger, self._snapshots, self._moves = ledger, snapshots, moves
        self._now, self._patience_seconds = now, 10 * retry_seconds
        self.released: dict[str, int] = {}  # the last cycle of every worker
        self.dead_cycles: dict[str, int] = {}  # the last cycle of every worker's last generation that died
        self.retiring: dict[str, int] = {}  # processes that leave once the log is durable up to this entry
        # Blocks of servers that died. A server of the same name may have joined since, and does not have them.
        self.orphaned: set[int] = set()
        self.lost_pushes = 0
        self._table_sent: dict[str, int] = {}  # index of the table that each worker was sent,
        self._table_used: dict[str, int] = {}  # and that it has confirmed
        self._view: View | None = None
        self._restoring: set[str] = set()  # servers that have not restored this view yet
        self._waits_for_recover = False  # blocks are lost, and the driver has not said where they go
        self._view_seconds = 0.0  # when the view began

    @property
    def recovering(self) -> bool:
        """Whether servers restore a view, or wait for `recover`."""
        return self._waits_for_recover or bool(self._restoring)

    # ------------------------------------------------------------------------------------------------------ join and leave

    def admit(self, name: str, generation: int) -> bool:
        """A process has said hello. Returns whether it is new."""
        ledger = self._ledger
        new = ledger.members.get(name) != generation
        ledger.members[name] = generation
        # An owner of blocks gets its view from `recover`: this one, with nothing to restore, would lose them.
        if ledger.view > 0 and name not in ledger.table.values():
            view = View(ledger.view, ledger.index, ledger.index, owners_of(ledger.table), self._generations(), ())
            ledger.tell(name, view)
            self._table_sent[name] = self._table_used[name] = ledger.table_index
        return new

    def _generations(self) -> dict[str, int]:
        return {**self._ledger.members, COORDINATOR: self._ledger.generation}

    def lose(self, name: str) -> bool:
        """A process is dead. Returns whether a view must begin at once. After the death of a server that owns blocks, or is
        about to, the driver has to call `recover`."""
        generation = self._ledger.members.pop(name)
        self.retiring.pop(name, None)
        if name.startswith("worker/"):
            self._drop(name, generation)
            # Servers that restore the view may wait for a push that this worker can no longer stage again.
            return bool(self._restoring) and not self._waits_for_recover and self._ledger.oldest_commit(name) is not None
        moving = {n for pair in self._moves.under_way.values() for n in pair}
        self._waits_for_recover |= name in moving or name in self._ledger.table.values() or name in self._restoring
        self.orphaned.update(b for b, owner in self._ledger.table.items() if owner == name)
        self._snapshots.lose(name)
        self._restoring.discard(name)
        return False

    def _drop(self, name: str, generation: int) -> None:
        self.dead_cycles[name] = self.released.get(name, 0)
        self._ledger.append(DropEntry(name, generation, self.dead_cycles[name]))

    def update_table(self, name: str) -> None:
        """Tell a worker the owners of all blocks, unless it was told since they changed."""
        if self._table_sent.get(name) != self._ledger.table_index:
            self._table_sent[name] = self._ledger.table_index
            self._ledger.send_table([name])

    def table_used(self, name: str, index: int) -> None:
        """A worker confirms that it uses the table as of `index`."""
        self._table_used[name] = max(index, self._table_used.get(name, 0))

    def resend(self, name: str, after: int) -> bool:
        """A server misses the entries of the log after that one. Returns whether a view must begin, because they are no
        longer kept."""
        if after < self._ledger.durable:
            return not self._waits_for_recover
        self._ledger.resend(name, after)
        return False

    def keep(self, names: Iterable[str]) -> None:
        """These processes are needed again: they do not retire."""
        for name in names:
            self.retiring.pop(name, None)

    def dismiss_retired(self, busy: Collection[str]) -> None:
        """Remove the retiring processes with which nothing would be lost. `busy`: workers that are in a mini-batch."""
        for name in sorted(self.retiring):
            if name in self._ledger.members and not self._needed(name, busy):
                generation = self._ledger.members.pop(name)
                del self.retiring[name]
                if name.startswith("worker/"):
                    self._drop(name, generation)

    def _needed(self, name: str, busy: Collection[str]) -> bool:
        ledger = self._ledger
        if name.startswith("worker/"):
            return name in busy or ledger.oldest_commit(name) is not None or self.recovering
        moving = {n for pair in self._moves.under_way.values() for n in pair}
        holds = ledger.durable < self.retiring[name]
        # A worker with an older table may still send a push or a pull there.
        behind = any(self._table_used.get(w, -1) < ledger.table_index for w in ledger.workers)
        return self.recovering or holds or behind or name in moving or name in ledger.table.values()

    # ------------------------------------------------------------------------------------------------------------ views

    def recover(self, servers: tuple[str, ...], shares: tuple[float, ...], owners: tuple[str, ...] = ()) -> list[int]:
        """Begin a view. Returns the branches in whose open group a push was withdrawn, once for each such push. Raises
        ModelLost where blocks are lost, RuntimeError without servers."""
        ledger, self._waits_for_recover = self._ledger, True  # stays so if this raises
        sources = self._sources_of(self._assign_blocks(servers, shares, owners))
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
        self._table_sent = dict.fromkeys(ledger.workers, ledger.durable)  # in the view
        self._table_used = dict(self._table_sent)
        table, by_holder = owners_of(ledger.table), tuple((runs_of(b), h) for h, b in sources.items())
        self._view = View(ledger.view, ledger.durable, ledger.index, table, self._generations(), by_holder)
        # The view goes first: servers defer messages of a view that they do not know, and workers refuse them.
        for name in (*ledger.servers, *ledger.workers):
            ledger.tell(name, self._view)
        self._snapshots.send_durable(sources.get(COORDINATOR, ()))
        for name in ledger.servers:
            ledger.resend(name, ledger.durable)
        return withdrawn

    def _assign_blocks(self, servers: tuple[str, ...], shares: tuple[float, ...], owners: tuple[str, ...]) -> dict[int, str]:
        """The new table: blocks stay with an owner that is alive; the others go to their own one of `owners`, or else to
        servers that have less than their share."""
        table, alive = dict(self._ledger.table), set(self._ledger.servers)
        wanted = [s for s in servers if s in alive] or sorted(alive & set(table.values())) or sorted(alive)
        if not wanted:
            raise RuntimeError("Cannot recover: the job has no server; start one, then recover again.")
        given = dict(zip(servers, shares, strict=False))
        total = sum(given.get(s, 0.0) for s in wanted)
        parts = tuple(given[s] / total if total > 0 else 1 / len(wanted) for s in wanted)
        lack = block_counts(tuple(wanted), parts, len(table))
        orphaned = [b for b, owner in sorted(table.items()) if owner not in alive or b in self.orphaned]
        for block, owner in table.items():
            if owner in lack and block not in orphaned:
                lack[owner] -= 1
        for block in orphaned:  # in order, so that each server gets adjacent blocks
            own = owners[block] if owners and owners[block] in alive else None
            table[block] = own or next((s for s in wanted if lack[s] > 0), wanted[0])
            lack[table[block]] = lack.get(table[block], 0) - 1
        return table

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

    def ready(self, name: str) -> bool:
        """A server has restored the view. Returns whether all have."""
        if name not in self._restoring:
            return False
        self._restoring.discard(name)
        for block, owner in self._ledger.table.items():
            if owner == name:
                self._ledger.holders[block].add(name)
        return not self.recovering

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
