"""A server: it holds blocks of the model, which only the coordinator's log changes.

One log orders the changes of all servers. So a push takes effect on all servers or on none, without messages between
servers.

All blocks of a server are at the same entry of the log, except those that have just arrived: these catch up as a `_Cohort`
of their own. A message whose sender knows a later entry of the log, or a later view, waits until this server has it as well.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in, members, owners_of, runs_of, table_of
from harness.live.protocol.log import CommitEntry, DropEntry, ForkEntry, FreeEntry, LogEntry, MoveEntry, SnapshotEntry
from harness.live.protocol.messages import (
    COORDINATOR,
    Array,
    BlockData,
    BlocksMoved,
    CopyKept,
    EntriesMissing,
    FetchBlocks,
    Head,
    Hello,
    LogAppend,
    Message,
    Pull,
    Pulled,
    PushStaged,
    Redirect,
    Send,
    SnapshotCopy,
    SnapshotDurable,
    StagePush,
    UnaskedBlocks,
    View,
    ViewReady,
)
from harness.live.server.pieces import Keeper, Piece, Staging, cut_rows
from harness.live.server.store import Store

__all__ = ["Server"]


class _Cohort:
    """Blocks to which the log is applied up to the same entry, `position`."""

    def __init__(self, blocks: Blocks, position: int) -> None:
        self.blocks, self.position = blocks, position
        self.done: dict[str, int] = {}  # the last committed cycle, by worker

    @property
    def runs(self) -> Runs:
        return runs_of(self.blocks)


class _Parameters(NamedTuple):
    """A copy of the parameters of some blocks. No entry from `since` up to, but without, `until` changes them."""

    arrays: tuple[Array, ...]
    since: int
    until: int | None = None  # None: they have not changed yet


class _Waiting(NamedTuple):
    """A pull that waits for blocks or entries."""

    sender: str
    pull: Pull
    rows: tuple[Array, ...]  # their numbers, where there are embedding tables
    blocks: Blocks


class Server:
    """The core of a server process, without sockets, threads or a clock: it sends only in response to what it receives.

    It starts without state. `hello` asks the coordinator to let it join, and the first `View` gives it everything else.
    """

    def __init__(self, name: str, generation: int, layout: Layout, store: Store, send: Send) -> None:
        self.name, self.generation, self.view = name, generation, 0
        self.refused = 0  # messages of an older view or generation
        self._layout, self._store, self._send = layout, store, send
        self._staging, self._keeper = Staging(layout), Keeper(layout)
        self._members: dict[str, int] = {}  # the lowest accepted generation, by process
        self._log_end = 0  # index of the last entry that has arrived
        self._restore_end: int | None = None  # while a view is restored: the last entry from before it
        self._log: dict[int, LogEntry] = {}  # the entries that some block has not passed yet
        self._table: dict[int, str] = {}
        self._table_index = 0
        self._owned: Blocks = frozenset()  # according to the table
        self._cohorts: list[_Cohort] = []
        self._pending: dict[int, int] = {}  # blocks that have not arrived yet, and the entry as of which they will
        self._on_demand: dict[int, str] = {}  # those of them that were not asked for yet, and their old owner
        self._departed: dict[int, tuple[int, tuple[Any, ...]]] = {}  # blocks that move on demand, until the new owner asks
        self._freed: dict[int, int] = {}  # freed branches, and the entry that freed them
        self._deferred: list[tuple[str, Message]] = []  # messages that wait for a later entry or view
        self._pulls: list[_Waiting] = []
        self._copies: dict[tuple[Any, ...], _Parameters] = {}  # parameters pulled last, by branch, runs and type
        self._changed: dict[int, int] = {}  # the last entry that changed each branch's parameters

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """The blocks that are here; those at the same entry of the log together."""
        return tuple(cohort.blocks for cohort in self._cohorts)

    @property
    def backlog(self) -> int:
        """Entries of the log that some block has not passed yet."""
        return len(self._log)

    def hello(self) -> None:
        """Ask to join; may be repeated."""
        self._tell(COORDINATOR, Hello())

    def receive(self, sender: str, message: Message) -> None:
        """Handle one message."""
        head = message.head
        if isinstance(head, View):
            self._on_view(head)
        elif message.view > self.view or (message.view == self.view and self._is_ahead(head)):
            self._deferred.append((sender, message))
        elif message.view < self.view or message.generation < self._members.get(sender, 0):
            self.refused += 1
        else:
            self._handle(sender, head, message.arrays)

    def _handle(self, sender: str, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case LogAppend():
                self._on_log(sender, head)
            case Pull():
                self._on_pull(sender, head, arrays)
            case StagePush():
                self._on_stage(sender, head, arrays)
            case BlockData():
                self._on_data(head, arrays)
            case SnapshotCopy():
                self._keeper.put(head.index, Piece(head.runs, head.branches, arrays))
                self._tell(COORDINATOR, CopyKept(head.index, head.runs, sender))
            case FetchBlocks():
                self._on_fetch(head)
            case SnapshotDurable():
                self._keeper.forget(head.index)

    def _tell(self, receiver: str, head: Head, arrays: tuple[Array, ...] = ()) -> None:
        self._send(receiver, Message(head, arrays, self.view, self.generation))

    def _is_ahead(self, head: Head) -> bool:
        """Whether the sender knew a later entry of the log than this server does."""
        if isinstance(head, Pull | StagePush):
            return head.after > self._log_end
        return isinstance(head, BlockData | FetchBlocks) and head.index > self._log_end

    def _receive_deferred(self) -> None:
        """The log or the view has advanced: handle the messages that waited for it."""
        if self._deferred:
            held, self._deferred = self._deferred, []
            for sender, message in held:
                self.receive(sender, message)

    # ---------------------------------------------------------------------------------------------------------- the log

    def _on_log(self, sender: str, head: LogAppend) -> None:
        # Messages were lost, for example because this server was connected late. A repeated entry is ignored.
        if head.index > self._log_end + 1:
            self._tell(sender, EntriesMissing(self._log_end))
        if head.index != self._log_end + 1:
            return
        self._log_end = head.index
        self._log[head.index] = head.entry
        if isinstance(head.entry, MoveEntry):
            self._update_table(head.index, head.entry)
        elif isinstance(head.entry, CommitEntry):
            # The workers that it releases get all blocks of this server, so fetch those that are still elsewhere.
            if head.entry.released and self._on_demand:
                self._fetch(frozenset(self._on_demand))
        elif isinstance(head.entry, DropEntry):
            # At once, before any block gets to this entry: the worker may still send.
            self._members[head.entry.worker] = head.entry.generation + 1
        elif isinstance(head.entry, FreeEntry):
            self._freed[head.entry.branch] = head.index
        self._advance()
        self._receive_deferred()

    def _update_table(self, index: int, move: MoveEntry) -> None:
        blocks = blocks_in(move.runs)
        self._table.update(dict.fromkeys(blocks, move.target))
        self._table_index = index
        self._owned = self._owned | blocks if move.target == self.name else self._owned - blocks
        if move.target == self.name:
            self._pending.update(dict.fromkeys(blocks, index))
            if move.on_demand:
                self._on_demand.update(dict.fromkeys(blocks, move.source))

    def _advance(self) -> None:
        """Apply the log to every cohort as far as possible; cohorts at the same entry become one."""
        for cohort in self._cohorts:
            while cohort.position < self._log_end and self._apply(cohort, self._log[cohort.position + 1]):
                cohort.position += 1
        if len(self._cohorts) > 1 or not all(c.blocks for c in self._cohorts):
            self._merge()
        # Blocks that have not arrived yet will need the log from their move on.
        oldest = min([c.position for c in self._cohorts] + list(self._pending.values()), default=self._log_end)
        for index in [i for i in self._log if i <= oldest]:
            del self._log[index]
        # A freed branch stays until the last cohort has passed that entry: cohorts behind it still apply its commits.
        for branch in [b for b, index in self._freed.items() if index <= oldest]:
            del self._freed[branch]
            self._store.branches.pop(branch, None)
            self._copies = {key: copy for key, copy in self._copies.items() if key[0] != branch}
        if self._restore_end is not None and not self._pending and oldest >= self._restore_end:
            self._restore_end = None
            self._tell(COORDINATOR, ViewReady(self.view))
        if self._pulls:
            self._answer_pulls()

    def _merge(self) -> None:
        kept: dict[int, _Cohort] = {}
        for cohort in sorted(self._cohorts, key=lambda c: -len(c.done)):
            same = kept.setdefault(cohort.position, cohort)
            if same is not cohort:
                same.blocks |= cohort.blocks
                same.done = {w: max(same.done.get(w, 0), cohort.done.get(w, 0)) for w in {**same.done, **cohort.done}}
                # Copies were taken while one of the two was behind.
                self._copies.clear()
        self._cohorts = [c for c in kept.values() if c.blocks]

    def _apply(self, cohort: _Cohort, entry: LogEntry) -> bool:
        """Apply an entry to a cohort's blocks. Returns False if it is a push whose gradients have not all arrived."""
        if isinstance(entry, CommitEntry):
            return self._commit(cohort, entry)
        if isinstance(entry, ForkEntry):
            self._store.fork(entry.branch, entry.parent, cohort.runs)
        elif isinstance(entry, MoveEntry) and entry.source == self.name:
            self._hand_over(cohort, entry)
        elif isinstance(entry, DropEntry):
            self._staging.take(entry.worker, entry.cycle, cohort.blocks)
        elif isinstance(entry, SnapshotEntry):
            self._copy_to_backup(cohort, entry)
        return True

    def _commit(self, cohort: _Cohort, commit: CommitEntry) -> bool:
        if commit.accept and not cohort.blocks <= self._staging.blocks(commit.worker, commit.cycle):
            return False
        # Also if it is not accepted: what is staged of it is no longer needed.
        pieces = self._staging.take(commit.worker, commit.cycle, cohort.blocks)
        self._store.apply(commit, cohort.runs, pieces if commit.accept else [])
        cohort.done[commit.worker] = commit.cycle
        if commit.take:
            index = self._changed[commit.branch] = cohort.position + 1
            for key, copy in self._copies.items():
                if key[0] == commit.branch and copy.until is None:
                    self._copies[key] = copy._replace(until=index)
        # Not while a view replays the log: those cycles began long ago.
        if commit.released and self._restore_end is None:
            self._send_unasked(cohort, commit)
        return True

    def _send_unasked(self, cohort: _Cohort, commit: CommitEntry) -> None:
        """Send parameters to the workers that this push releases, without being asked."""
        index = cohort.position + 1
        arrays = self._parameters(commit.branch, commit.bits, index, cohort.runs).arrays
        for worker, cycle in commit.released:
            self._tell(worker, UnaskedBlocks(cycle, index, cohort.runs), arrays)

    def _live_branches(self, position: int) -> list[int]:
        """The branches that are not freed at that entry."""
        return [b for b in self._store.branches if self._freed.get(b, position + 1) > position]

    # ------------------------------------------------------------------------------------------------- pulls and pushes

    def _redirect(self, sender: str, number: int, blocks: Blocks, *, push: bool) -> Blocks:
        """Tell `sender` the owners of the blocks that are not here. Returns those that this server owns."""
        mine = blocks & self._owned
        if mine != blocks:
            others = runs_of(blocks - mine)
            self._tell(sender, Redirect(number, push, others, self._table_index, owners_of(self._table)))
        return mine

    def _on_pull(self, sender: str, head: Pull, rows: tuple[Array, ...]) -> None:
        mine = self._redirect(sender, head.number, blocks_in(head.runs), push=False)
        if mine:
            self._pulls.append(_Waiting(sender, head, rows, mine))
            self._fetch(mine)
            self._answer_pulls()

    def _fetch(self, blocks: Blocks) -> None:
        """Ask the old owners for those of `blocks` that move on demand."""
        wanted = blocks & self._on_demand.keys()
        for source, those in members(self._on_demand, wanted).items():
            self._tell(source, FetchBlocks(max(self._pending[b] for b in those), runs_of(those)))
        for block in wanted:
            del self._on_demand[block]

    def _answer_pulls(self) -> None:
        """Answer the pulls whose blocks are all here and recent enough."""
        waiting, self._pulls = self._pulls, []
        for wait in waiting:
            sender, pull = wait.sender, wait.pull
            # Blocks may have moved away while the pull waited.
            blocks = self._redirect(sender, pull.number, wait.blocks, push=False)
            if not blocks:
                continue
            there = [c for c in self._cohorts if c.position >= pull.after and c.blocks & blocks]
            if not blocks <= frozenset[int]().union(*(c.blocks for c in there)):
                self._pulls.append(wait._replace(blocks=blocks))
            elif pull.branch in self._store.branches and self._layout.tables is not None:
                (rows,) = cut_rows(self._layout, pull.runs, wait.rows, blocks)
                made = self._store.rows(pull.branch, rows, _dtype(pull.bits))
                # Rows that another worker has pulled are not kept, so a worker that is late may see a later entry.
                self._tell(sender, Pulled(pull.number, min(c.position for c in there), runs_of(blocks)), (made,))
            elif pull.branch in self._store.branches:
                copy = self._parameters(pull.branch, pull.bits, pull.after, runs_of(blocks))
                index = min(c.position for c in there) if copy.until is None else copy.until - 1
                self._tell(sender, Pulled(pull.number, index, runs_of(blocks)), copy.arrays)

    def _parameters(self, branch: int, bits: int, after: int, runs: Runs) -> _Parameters:
        """The parameters of some blocks. If another worker pulled them as of `after`, the same copy: a worker that is late
        at a barrier must see what the others saw."""
        dtype = _dtype(bits)
        key = (branch, runs, dtype)
        copy = self._copies.get(key)
        if copy is None or not copy.since <= after < (copy.until or after + 1):
            copy = _Parameters(self._store.parameters(branch, runs, dtype), self._changed.get(branch, 0))
            self._copies[key] = copy
        return copy

    def _on_stage(self, sender: str, head: StagePush, arrays: tuple[Array, ...]) -> None:
        mine = self._redirect(sender, head.cycle, blocks_in(head.runs), push=True)
        new = mine
        # A cohort that has passed the commit must not stage the push again: nothing would ever take it.
        for cohort in self._cohorts:
            if cohort.done.get(sender, 0) >= head.cycle:
                new -= cohort.blocks
        if new:
            self._staging.add(sender, head.cycle, head.runs, arrays, new)
        # Also for blocks that were staged before: the first acknowledgement may be lost.
        if mine:
            self._tell(COORDINATOR, PushStaged(sender, head.cycle, runs_of(mine), head.done))
        if any(c.position < self._log_end for c in self._cohorts):
            self._advance()

    # ------------------------------------------------------------------------------------------- blocks arrive and leave

    def _hand_over(self, cohort: _Cohort, move: MoveEntry) -> None:
        leaving = cohort.blocks & blocks_in(move.runs)
        if not leaving:
            return
        index = cohort.position + 1
        cohort.blocks -= leaving
        self._copies.clear()
        # Staged pushes leave with their blocks: workers send them again only if they hear of the new table.
        if move.on_demand:
            for block in leaving:
                alone = frozenset([block])
                piece = self._store.copied(runs_of(alone), self._live_branches(index))
                self._departed[block] = index, (piece, self._staging.depart(alone))
        else:
            piece = self._store.copied(runs_of(leaving), self._live_branches(index))
            self._send_blocks(index, piece, self._staging.depart(leaving), move.target)
        self._store.drop(leaving)

    def _send_blocks(self, index: int, piece: Piece, staged: tuple[Any, Any], target: str) -> None:
        self._tell(target, BlockData(index, piece.runs, piece.held, staged[0]), piece.arrays + staged[1])

    def _on_fetch(self, head: FetchBlocks) -> None:
        for block in blocks_in(head.runs):
            if block in self._departed:  # otherwise it is sent already: several may ask
                index, (piece, staged) = self._departed.pop(block)
                self._send_blocks(index, piece, staged, self._table[block])

    def _on_data(self, head: BlockData, arrays: tuple[Array, ...]) -> None:
        # Anything else is a repetition: those blocks are here already, and have moved on.
        expected = frozenset(b for b in blocks_in(head.runs) if self._pending.get(b) == head.index)
        if not expected:  # entries that these blocks would need next may be dropped already
            return
        count = sum(len(h.vectors) for h in head.branches) * len(head.runs)
        piece = Piece(head.runs, head.branches, arrays[:count]).of(self._layout, expected)
        self._store.install(piece)
        restored = self._restore_end is not None
        if restored:  # the block is as of the durable snapshot, so this server becomes a holder of that, too
            self._keeper.put(head.index, piece)
        at = count
        for part in head.parts:
            of_part = blocks_in(part.runs) & expected
            end = at + self._staging.arrays_of(part)
            self._staging.add(part.worker, part.cycle, part.runs, arrays[at:end], of_part)
            at = end
        for block in expected:
            del self._pending[block]
            self._on_demand.pop(block, None)
        self._cohorts.append(_Cohort(expected, head.index))
        self._advance()
        if not restored:
            self._tell(COORDINATOR, BlocksMoved(runs_of(expected)))

    # --------------------------------------------------------------------------------------------- snapshots and views

    def _copy_to_backup(self, cohort: _Cohort, entry: SnapshotEntry) -> None:
        index = cohort.position + 1
        piece = self._store.copied(cohort.runs, self._live_branches(index))
        self._keeper.put(index, piece)
        # A snapshot is complete only with all blocks, so do not leave any at their old owner.
        self._fetch(frozenset(self._on_demand))
        for receiver in {entry.backups[self.name], *([COORDINATOR] if entry.save else [])}:
            self._tell(receiver, SnapshotCopy(index, piece.runs, piece.held), piece.arrays)

    def _on_view(self, head: View) -> None:
        """Drop all state and restore the snapshot that the view goes back to."""
        if head.number <= self.view:
            if head.number == self.view:  # repeated by the coordinator, which waits for something
                self._tell(COORDINATOR, ViewReady(self.view) if self._restore_end is None else EntriesMissing(self._log_end))
            return
        self.view, self._members, self._log_end, self._restore_end = head.number, dict(head.members), head.index, head.end
        self._table, self._table_index = table_of(head.owners), head.index
        for kept in (self._log, self._pending, self._on_demand, self._departed, self._freed, self._copies, self._changed):
            kept.clear()
        self._store.branches.clear()
        self._staging.clear()
        self._cohorts, self._pulls = [], []
        # Later snapshots are cancelled, and the log after `head.index` may come again with other entries.
        self._keeper.forget_after(head.index)
        mine = self._owned = frozenset(b for b, owner in self._table.items() if owner == self.name)
        for runs, holder in head.sources:
            blocks = blocks_in(runs)
            if holder == self.name:
                self._restore(head.index, blocks & mine)
                for owner, those in members(self._table, blocks - mine).items():
                    for piece in self._keeper.pick(head.index, those):
                        self._send_blocks(head.index, piece, ((), ()), owner)
            else:
                self._pending.update(dict.fromkeys(blocks & mine, head.index))
        self._advance()
        self._receive_deferred()

    def _restore(self, index: int, blocks: Blocks) -> None:
        if blocks:
            for piece in self._keeper.pick(index, blocks):
                self._store.install(piece)
            self._cohorts.append(_Cohort(blocks, index))


def _dtype(bits: int) -> str:
    return "float16" if bits == 16 else "float32"
