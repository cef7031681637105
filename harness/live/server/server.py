"""A server: it holds blocks of the model, which only the coordinator's log changes.

One log orders the changes of all servers. So a push takes effect on all servers or on none, without messages between
servers. A message whose sender knows a later entry of the log, or a later view, waits until this server has it as well.
"""

from __future__ import annotations

from harness.live.protocol.blocks import Blocks, Layout, blocks_in, members, runs_of
from harness.live.protocol.log import CommitEntry, DropEntry, ForkEntry, LogEntry, MoveEntry, SnapshotEntry
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
    PushStaged,
    Send,
    SnapshotCopy,
    SnapshotDurable,
    StagePush,
    View,
    ViewReady,
)
from harness.live.protocol.outbox import Outbox
from harness.live.server.cohorts import Cohort, Cohorts
from harness.live.server.handover import Handover
from harness.live.server.pieces import Keeper, Piece, Staging
from harness.live.server.pulls import Pulls
from harness.live.server.server_log import ServerLog
from harness.live.server.server_table import ServerTable
from harness.live.server.store import Store

__all__ = ["Server"]

_AFTER = (StagePush, Pull)  # messages whose sender knew the log up to `after`
_AS_OF = (BlockData, FetchBlocks)  # up to `index`


class Server:
    """The core of a server process, without sockets, threads or a clock: it sends only in response to what it receives.

    It starts without state. `hello` asks the coordinator to let it join, and the first `View` gives it everything else.
    """

    def __init__(self, name: str, generation: int, layout: Layout, store: Store, send: Send) -> None:
        self.name, self.generation, self._outbox = name, generation, Outbox(send, generation)
        self.refused = 0  # messages of an older view or generation
        self._store, self._staging, self._keeper = store, Staging(layout), Keeper(layout)
        self._cohorts, self._table = Cohorts(), ServerTable(name, self._outbox)
        self._pulls = Pulls(layout, store, self._table, self._cohorts, self._outbox)
        self._handover = Handover(layout, store, self._staging, self._table, self._outbox)
        self._members: dict[str, int] = {}  # the lowest accepted generation, by process
        self._log = ServerLog()
        self._restore_end: int | None = None  # while a view is restored: the last entry from before it
        self._deferred: list[tuple[str, Message]] = []  # messages that wait for a later entry or view

    @property
    def view(self) -> int:
        """The number of the present view."""
        return self._outbox.view

    @property
    def blocks(self) -> tuple[Blocks, ...]:
        """The blocks that are here; those at the same entry of the log together."""
        return tuple(cohort.blocks for cohort in self._cohorts.all)

    @property
    def backlog(self) -> int:
        """Entries of the log that some block has not passed yet."""
        return len(self._log)

    def hello(self) -> None:
        """Ask to join; may be repeated."""
        self._outbox.tell(COORDINATOR, Hello())

    def receive(self, sender: str, message: Message) -> None:
        """Handle one message."""
        head, view = message.head, self._outbox.view
        if isinstance(head, View):
            self._on_view(head)
        elif message.view == view and message.generation >= self._members.get(sender, 0) and not self._is_ahead(head):
            self._handle(sender, head, message.arrays)
        elif message.view > view or (message.view == view and self._is_ahead(head)):
            self._deferred.append((sender, message))
        else:
            self.refused += 1

    def _handle(self, sender: str, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case LogAppend():
                self._on_log(sender, head)
            case StagePush():
                self._on_stage(sender, head, arrays)
            case Pull():
                self._on_pull(sender, head, arrays)
            case BlockData():
                self._on_data(head, arrays)
            case SnapshotCopy():
                self._keeper.put(head.index, Piece(head.runs, head.branches, arrays))
                self._outbox.tell(COORDINATOR, CopyKept(head.index, head.runs, sender))
            case FetchBlocks():
                self._handover.asked_for(head)
            case SnapshotDurable():
                self._keeper.forget(head.index)

    def _is_ahead(self, head: Head) -> bool:
        """Whether the sender knew a later entry of the log than this server does."""
        if isinstance(head, _AFTER):
            return head.after > self._log.end
        return isinstance(head, _AS_OF) and head.index > self._log.end

    def _receive_deferred(self) -> None:
        """The log or the view has advanced: handle the messages that waited for it."""
        if self._deferred:
            held, self._deferred = self._deferred, []
            for sender, message in held:
                self.receive(sender, message)

    # ---------------------------------------------------------------------------------------------------------- the log

    def _on_log(self, sender: str, head: LogAppend) -> None:
        # Messages were lost, for example because this server was connected late. A repeated entry is ignored.
        if head.index > self._log.end + 1:
            self._outbox.tell(sender, EntriesMissing(self._log.end))
        if head.index != self._log.end + 1:
            return
        self._log.append(head.entry)
        if isinstance(head.entry, CommitEntry):
            # The workers that it releases get all blocks of this server, so fetch those that are still elsewhere.
            if head.entry.released:
                self._handover.fetch_all()
        elif isinstance(head.entry, MoveEntry):
            self._table.move(head.index, head.entry)
            if head.entry.target == self.name:
                source = head.entry.source if head.entry.on_demand else None
                self._handover.expect(blocks_in(head.entry.runs), head.index, source)
        elif isinstance(head.entry, DropEntry):
            # At once, before any block gets to this entry: the worker may still send.
            self._members[head.entry.worker] = head.entry.generation + 1
        self._advance()
        self._receive_deferred()

    def _advance(self) -> None:
        """Apply the log to every cohort as far as possible; cohorts at the same entry become one."""
        for cohort in self._cohorts.all:
            while cohort.position < self._log.end and self._apply(cohort, self._log[cohort.position + 1]):
                cohort.position += 1
        if self._cohorts.merge():
            # Copies were taken while one of the two was behind.
            self._pulls.forget_copies()
        self._forget_passed()
        self._pulls.answer()

    def _forget_passed(self) -> None:
        """Drop what no block needs any more, because all have passed its entry of the log."""
        # Blocks that have not arrived yet will need the log from their move on.
        oldest = self._log.end
        for cohort in self._cohorts.all:
            oldest = min(oldest, cohort.position)
        if self._handover.awaited:
            oldest = min(oldest, *self._handover.awaited.values())
        for branch in self._log.forget(oldest):
            self._store.branches.pop(branch, None)
            self._pulls.forget_branch(branch)
        if self._restore_end is not None and not self._handover.awaited and oldest >= self._restore_end:
            self._restore_end = None
            self._outbox.tell(COORDINATOR, ViewReady(self.view))

    def _apply(self, cohort: Cohort, entry: LogEntry) -> bool:
        """Apply an entry to a cohort's blocks. Returns False if it is a push whose gradients have not all arrived."""
        if isinstance(entry, CommitEntry):
            return self._commit(cohort, entry)
        if isinstance(entry, ForkEntry):
            self._store.fork(entry.branch, entry.parent, cohort.runs)
        elif isinstance(entry, MoveEntry) and entry.source == self.name:
            index = cohort.position + 1
            if self._handover.leave(cohort, entry, index, self._log.live(self._store.branches, index)):
                self._pulls.forget_copies()
        elif isinstance(entry, DropEntry):
            self._staging.take(entry.worker, entry.cycle, cohort.blocks)
        elif isinstance(entry, SnapshotEntry):
            self._copy_to_backup(cohort, entry)
        return True

    def _commit(self, cohort: Cohort, commit: CommitEntry) -> bool:
        if commit.accept:
            staged = self._staging.blocks(commit.worker, commit.cycle)
            if staged is not cohort.blocks and not cohort.blocks <= staged:
                return False
        # Also if it is not accepted: what is staged of it is no longer needed.
        pieces = self._staging.take(commit.worker, commit.cycle, cohort.blocks)
        self._store.apply(commit, cohort.runs, pieces if commit.accept else [])
        cohort.done[commit.worker] = commit.cycle
        index = cohort.position + 1
        if commit.take:
            self._pulls.stepped(commit.branch, index)
        # Not while a view replays the log: those cycles began long ago.
        if commit.released and self._restore_end is None:
            self._pulls.send_unasked(cohort, commit, index)
        return True

    # ------------------------------------------------------------------------------------------------- pulls and pushes

    def _on_pull(self, sender: str, head: Pull, rows: tuple[Array, ...]) -> None:
        mine = self._table.redirect(sender, head.number, blocks_in(head.runs), push=False)
        if mine:
            self._pulls.add(sender, head, rows, mine)
            self._handover.fetch(mine)
            self._pulls.answer()

    def _on_stage(self, sender: str, head: StagePush, arrays: tuple[Array, ...]) -> None:
        mine = self._table.redirect(sender, head.cycle, blocks_in(head.runs), push=True)
        # A cohort that has passed the commit must not stage the push again: nothing would ever take it.
        if new := self._cohorts.not_past(sender, head.cycle, mine):
            self._staging.add(sender, head.cycle, head.runs, arrays, new)
        # Also for blocks that were staged before: the first acknowledgement may be lost.
        if mine:
            self._outbox.tell(COORDINATOR, PushStaged(sender, head.cycle, runs_of(mine), head.done))
        for cohort in self._cohorts.all:
            if cohort.position < self._log.end:
                self._advance()
                return

    def _on_data(self, head: BlockData, arrays: tuple[Array, ...]) -> None:
        piece = self._handover.arrived(head, arrays)
        if piece is None:
            return
        restored = self._restore_end is not None
        if restored:  # the blocks are as of the durable snapshot, so this server becomes a holder of that, too
            self._keeper.put(head.index, piece)
        self._cohorts.add(blocks_in(piece.runs), head.index)
        self._advance()
        if not restored:
            self._outbox.tell(COORDINATOR, BlocksMoved(piece.runs))

    # --------------------------------------------------------------------------------------------- snapshots and views

    def _copy_to_backup(self, cohort: Cohort, entry: SnapshotEntry) -> None:
        index = cohort.position + 1
        piece = self._store.copied(cohort.runs, self._log.live(self._store.branches, index))
        self._keeper.put(index, piece)
        # A snapshot is complete only with all blocks, so do not leave any at their old owner.
        self._handover.fetch_all()
        for receiver in {entry.backups[self.name], *([COORDINATOR] if entry.save else [])}:
            self._outbox.tell(receiver, SnapshotCopy(index, piece.runs, piece.held), piece.arrays)

    def _on_view(self, head: View) -> None:
        """Drop all state and restore the snapshot that the view goes back to."""
        if head.number <= self.view:
            if head.number == self.view:  # repeated by the coordinator, which waits for something
                restored = self._restore_end is None
                self._outbox.tell(COORDINATOR, ViewReady(self.view) if restored else EntriesMissing(self._log.end))
            return
        self._outbox.view, self._members = head.number, dict(head.members)
        self._log.begin_again(head.index)
        self._restore_end = head.end
        self._store.branches.clear()
        for part in (self._staging, self._cohorts, self._pulls, self._handover):
            part.clear()
        # Later snapshots are cancelled, and the log after `head.index` may come again with other entries.
        self._keeper.forget_after(head.index)
        self._table.reset(head.owners, head.index)
        for runs, holder in head.sources:
            self._restore(head.index, blocks_in(runs), holder)
        self._advance()
        self._receive_deferred()

    def _restore(self, index: int, blocks: Blocks, holder: str) -> None:
        """Restore the blocks of this server among those whose copies `holder` has. If that is this server, send the others
        theirs."""
        mine = blocks & self._table.mine
        if holder != self.name:
            self._handover.expect(mine, index)
            return
        if mine:
            for piece in self._keeper.pick(index, mine):
                self._store.install(piece)
            self._cohorts.add(mine, index)
        for owner, those in members(self._table.owners, blocks - mine).items():
            for piece in self._keeper.pick(index, those):
                self._handover.send(owner, index, piece)
