"""A server: blocks of the model, changed by the coordinator's log and by nothing else.

One log orders all changes at all servers, so that a push takes effect everywhere or nowhere without a second round of
messages between servers.

All blocks of a server are at the same entry of the log, but those that have just come: they catch up as a `_Cohort` of their
own. What a server is told by peers who know a later entry than it does waits until the log is there.
"""

from __future__ import annotations

from typing import Any, NamedTuple

from harness.live.protocol.blocks import Blocks, Layout, Runs, blocks_in, members, owners_of, runs_of, table_of
from harness.live.protocol.log import Commit, Drop, Entry, Fork, Free, Move, Snapshot
from harness.live.protocol.messages import (
    COORDINATOR,
    Array,
    Copy,
    Data,
    Durable,
    Fetch,
    Given,
    Head,
    Hello,
    Kept,
    Log,
    Message,
    Missing,
    Moved,
    Pull,
    Pulled,
    Ready,
    Redirect,
    Send,
    Stage,
    Staged,
    View,
)
from harness.live.server.pieces import Keeper, Piece, Staging
from harness.live.server.store import Store

__all__ = ["Server"]


class _Cohort:
    """Blocks that are at the same entry of the log."""

    def __init__(self, blocks: Blocks, position: int) -> None:
        self.blocks, self.position = blocks, position
        self.done: dict[str, int] = {}  # by worker, the last cycle committed

    @property
    def runs(self) -> Runs:
        return runs_of(self.blocks)


class _Parameters(NamedTuple):
    """A copy of blocks' parameters; as of the entries from `since` on, up to `until`."""

    arrays: tuple[Array, ...]
    since: int
    until: int | None = None  # they are still so


class Server:
    """The core of a server process, without sockets, threads or a clock: what it receives makes it send.

    Begins knowing nothing, says `Hello` to the coordinator when `hello` is called, and is told all else by a `View`.
    """

    def __init__(self, name: str, generation: int, layout: Layout, store: Store, send: Send) -> None:
        self.name, self.generation, self.view = name, generation, 0
        self.refused = 0  # messages of the past
        self._layout, self._store, self._send = layout, store, send
        self._staging, self._keeper = Staging(layout), Keeper(layout)
        self._members: dict[str, int] = {}  # the least generation that is listened to
        self._known = 0  # the last entry of the log
        self._end: int | None = None  # the last one from before this view, until all blocks are there
        self._log: dict[int, Entry] = {}  # as far as blocks here are yet to go through it
        self._table: dict[int, str] = {}
        self._table_index = 0
        self._mine: Blocks = frozenset()  # by the table
        self._cohorts: list[_Cohort] = []
        self._pending: dict[int, int] = {}  # blocks that are to come, and the entry as of which they will
        self._origin: dict[int, str] = {}  # for those that come on demand: from whom
        self._frozen: dict[int, tuple[int, tuple[Any, ...]]] = {}
        self._freed: dict[int, int] = {}  # branches, and the entry that freed them
        self._held: list[tuple[str, Message]] = []  # waits for a later entry, or a later view
        self._pulls: list[tuple[str, Pull, Blocks]] = []  # wait for blocks
        self._copies: dict[tuple[Any, ...], _Parameters] = {}  # the last that was pulled
        self._changed: dict[int, int] = {}  # the entry that changed each branch last

    def hello(self) -> None:
        """Ask to be admitted; again as often as one likes."""
        self._tell(COORDINATOR, Hello())

    def receive(self, sender: str, message: Message) -> None:
        """Take a message in."""
        head = message.head
        if isinstance(head, View):
            self._on_view(head)
        elif message.view > self.view or (message.view == self.view and self._ahead(head)):
            self._held.append((sender, message))
        elif message.view < self.view or message.generation < self._members.get(sender, 0):
            self.refused += 1
        else:
            self._handle(sender, head, message.arrays)

    def _handle(self, sender: str, head: Head, arrays: tuple[Array, ...]) -> None:
        match head:
            case Log():
                self._on_log(sender, head)
            case Pull():
                self._on_pull(sender, head)
            case Stage():
                self._on_stage(sender, head, arrays)
            case Data():
                self._on_data(head, arrays)
            case Copy():
                self._keeper.put(head.index, Piece(head.runs, head.branches, arrays))
                self._tell(COORDINATOR, Kept(head.index, head.runs, sender))
            case Fetch():
                self._on_fetch(head)
            case Durable():
                self._keeper.forget(head.index)

    def _tell(self, receiver: str, head: Head, arrays: tuple[Array, ...] = ()) -> None:
        self._send(receiver, Message(head, arrays, self.view, self.generation))

    def _ahead(self, head: Head) -> bool:
        """Whether its sender knew the log further than this server does."""
        needed = head.after if isinstance(head, Pull | Stage) else head.index if isinstance(head, Data | Fetch) else 0
        return needed > self._known

    def _reconsider(self) -> None:
        """What had to wait for the log or the view may have waited enough."""
        if self._held:
            held, self._held = self._held, []
            for sender, message in held:
                self.receive(sender, message)

    # ---------------------------------------------------------------------------------------------------------- the log

    def _on_log(self, sender: str, head: Log) -> None:
        if head.index > self._known + 1:
            self._tell(sender, Missing(self._known))
        if head.index != self._known + 1:
            return
        self._known = head.index
        self._log[head.index] = head.entry
        if isinstance(head.entry, Move):
            self._learn(head.index, head.entry)
        elif isinstance(head.entry, Commit):
            if head.entry.released and self._origin:
                self._fetch(frozenset(self._origin))
        elif isinstance(head.entry, Drop):
            self._members[head.entry.worker] = head.entry.generation + 1
        elif isinstance(head.entry, Free):
            self._freed[head.entry.branch] = head.index
        self._advance()
        self._reconsider()

    def _learn(self, index: int, move: Move) -> None:
        blocks = blocks_in(move.runs)
        self._table.update(dict.fromkeys(blocks, move.target))
        self._table_index = index
        self._mine = self._mine | blocks if move.target == self.name else self._mine - blocks
        if move.target == self.name:
            self._pending.update(dict.fromkeys(blocks, index))
            if move.on_demand:
                self._origin.update(dict.fromkeys(blocks, move.source))

    def _advance(self) -> None:
        """Bring every cohort as far as the log goes; those that meet become one."""
        for cohort in self._cohorts:
            while cohort.position < self._known and self._apply(cohort, self._log[cohort.position + 1]):
                cohort.position += 1
        if len(self._cohorts) > 1 or not all(c.blocks for c in self._cohorts):
            self._merge()
        oldest = min([c.position for c in self._cohorts] + list(self._pending.values()), default=self._known)
        for index in [i for i in self._log if i <= oldest]:
            del self._log[index]
        for branch in [b for b, index in self._freed.items() if index <= oldest]:
            del self._freed[branch]
            self._store.branches.pop(branch, None)
            self._copies = {key: copy for key, copy in self._copies.items() if key[0] != branch}
        if self._end is not None and not self._pending and oldest >= self._end:
            self._end = None
            self._tell(COORDINATOR, Ready(self.view))
        self._answer()

    def _merge(self) -> None:
        kept: dict[int, _Cohort] = {}
        for cohort in sorted(self._cohorts, key=lambda c: -len(c.done)):
            same = kept.setdefault(cohort.position, cohort)
            if same is not cohort:
                same.blocks |= cohort.blocks
                same.done = {w: max(same.done.get(w, 0), cohort.done.get(w, 0)) for w in {**same.done, **cohort.done}}
                self._copies.clear()
        self._cohorts = [c for c in kept.values() if c.blocks]

    def _apply(self, cohort: _Cohort, entry: Entry) -> bool:
        """Take `entry` to a cohort's blocks; False where a push is not all there yet."""
        if isinstance(entry, Commit):
            return self._commit(cohort, entry)
        if isinstance(entry, Fork):
            self._store.fork(entry.branch, entry.parent, cohort.runs)
        elif isinstance(entry, Move) and entry.source == self.name:
            self._depart(cohort, entry)
        elif isinstance(entry, Drop):
            self._staging.take(entry.worker, entry.cycle, cohort.blocks)
        elif isinstance(entry, Snapshot):
            self._copy(cohort, entry)
        return True

    def _commit(self, cohort: _Cohort, commit: Commit) -> bool:
        if commit.accept and not cohort.blocks <= self._staging.blocks(commit.worker, commit.cycle):
            return False
        pieces = self._staging.take(commit.worker, commit.cycle, cohort.blocks)
        self._store.apply(commit, cohort.runs, pieces if commit.accept else [])
        cohort.done[commit.worker] = commit.cycle
        if commit.take:
            index = self._changed[commit.branch] = cohort.position + 1
            for key, copy in self._copies.items():
                if key[0] == commit.branch and copy.until is None:
                    self._copies[key] = copy._replace(until=index)
        if commit.released and self._end is None:
            self._give(cohort, commit)
        return True

    def _give(self, cohort: _Cohort, commit: Commit) -> None:
        """Whom this push has released need not ask."""
        index = cohort.position + 1
        arrays = self._parameters(commit.branch, commit.bits, index, cohort.runs).arrays
        for worker, cycle in commit.released:
            self._tell(worker, Given(cycle, index, cohort.runs), arrays)

    def _living(self, position: int) -> list[int]:
        """The branches that are not freed by then."""
        return [b for b in self._store.branches if self._freed.get(b, position + 1) > position]

    # ------------------------------------------------------------------------------------------------- pulls and pushes

    def _redirect(self, sender: str, number: int, blocks: Blocks, *, push: bool) -> Blocks:
        """Tell `sender` of the blocks that others own; those that this server owns."""
        mine = blocks & self._mine
        if mine != blocks:
            others = runs_of(blocks - mine)
            self._tell(sender, Redirect(number, push, others, self._table_index, owners_of(self._table)))
        return mine

    def _on_pull(self, sender: str, head: Pull) -> None:
        mine = self._redirect(sender, head.number, blocks_in(head.runs), push=False)
        if mine:
            self._pulls.append((sender, head, mine))
            self._fetch(mine)
            self._answer()

    def _fetch(self, blocks: Blocks) -> None:
        """Ask for those of `blocks` that come on demand."""
        wanted = blocks & self._origin.keys()
        for source, those in members(self._origin, wanted).items():
            self._tell(source, Fetch(max(self._pending[b] for b in those), runs_of(those)))
        for block in wanted:
            del self._origin[block]

    def _answer(self) -> None:
        """Answer the pulls that have waited long enough."""
        waiting, self._pulls = self._pulls, []
        for sender, pull, asked in waiting:
            blocks = self._redirect(sender, pull.number, asked, push=False)
            if not blocks:
                continue
            there = [c for c in self._cohorts if c.position >= pull.after and c.blocks & blocks]
            if not blocks <= frozenset[int]().union(*(c.blocks for c in there)):
                self._pulls.append((sender, pull, blocks))
            elif pull.branch in self._store.branches:
                copy = self._parameters(pull.branch, pull.bits, pull.after, runs_of(blocks))
                index = min(c.position for c in there) if copy.until is None else copy.until - 1
                self._tell(sender, Pulled(pull.number, index, runs_of(blocks)), copy.arrays)

    def _parameters(self, branch: int, bits: int, after: int, runs: Runs) -> _Parameters:
        """As of `after`, where somebody else has pulled that: who is late at a barrier is to see what the others saw."""
        dtype = "float16" if bits == 16 else "float32"
        key = (branch, runs, dtype)
        copy = self._copies.get(key)
        if copy is None or not copy.since <= after < (copy.until or after + 1):
            copy = _Parameters(self._store.parameters(branch, runs, dtype), self._changed.get(branch, 0))
            self._copies[key] = copy
        return copy

    def _on_stage(self, sender: str, head: Stage, arrays: tuple[Array, ...]) -> None:
        mine = self._redirect(sender, head.cycle, blocks_in(head.runs), push=True)
        new = mine
        for cohort in self._cohorts:
            if cohort.done.get(sender, 0) >= head.cycle:
                new -= cohort.blocks
        if new:
            self._staging.add(sender, head.cycle, head.runs, arrays, new)
        if mine:
            self._tell(COORDINATOR, Staged(sender, head.cycle, runs_of(mine), head.done))
        if any(c.position < self._known for c in self._cohorts):
            self._advance()

    # ------------------------------------------------------------------------------------------- blocks come and leave

    def _depart(self, cohort: _Cohort, move: Move) -> None:
        leaving = cohort.blocks & blocks_in(move.runs)
        if not leaving:
            return
        index = cohort.position + 1
        cohort.blocks -= leaving
        self._copies.clear()
        if move.on_demand:
            for block in leaving:
                alone = frozenset([block])
                piece = self._store.copied(runs_of(alone), self._living(index))
                self._frozen[block] = index, (piece, self._staging.depart(alone))
        else:
            piece = self._store.copied(runs_of(leaving), self._living(index))
            self._ship(index, piece, self._staging.depart(leaving), move.target)
        self._store.drop(leaving)

    def _ship(self, index: int, piece: Piece, staged: tuple[Any, Any], target: str) -> None:
        self._tell(target, Data(index, piece.runs, piece.held, staged[0]), piece.arrays + staged[1])

    def _on_fetch(self, head: Fetch) -> None:
        for block in blocks_in(head.runs):
            if block in self._frozen:
                index, (piece, staged) = self._frozen.pop(block)
                self._ship(index, piece, staged, self._table[block])

    def _on_data(self, head: Data, arrays: tuple[Array, ...]) -> None:
        count = sum(len(h.vectors) for h in head.branches) * len(head.runs)
        expected = frozenset(b for b in blocks_in(head.runs) if self._pending.get(b) == head.index)
        piece = Piece(head.runs, head.branches, arrays[:count]).of(self._layout, expected)
        self._store.install(piece)
        restored = self._end is not None
        if restored:  # from now on this server keeps the snapshot that the block came from, too
            self._keeper.put(head.index, piece)
        at = count
        for part in head.parts:
            of_part = blocks_in(part.runs) & expected
            self._staging.add(part.worker, part.cycle, part.runs, arrays[at : at + len(part.runs)], of_part)
            at += len(part.runs)
        for block in expected:
            del self._pending[block]
            self._origin.pop(block, None)
        self._cohorts.append(_Cohort(expected, head.index))
        self._advance()
        if expected and not restored:
            self._tell(COORDINATOR, Moved(runs_of(expected)))

    # --------------------------------------------------------------------------------------------- snapshots and views

    def _copy(self, cohort: _Cohort, entry: Snapshot) -> None:
        index = cohort.position + 1
        piece = self._store.copied(cohort.runs, self._living(index))
        self._keeper.put(index, piece)
        self._fetch(frozenset(self._origin))
        for receiver in {entry.buddies[self.name], *([COORDINATOR] if entry.save else [])}:
            self._tell(receiver, Copy(index, piece.runs, piece.held), piece.arrays)

    def _on_view(self, head: View) -> None:
        """Begin anew from the snapshot that this view goes back to."""
        if head.number <= self.view:
            if head.number == self.view:
                self._tell(COORDINATOR, Ready(self.view) if self._end is None else Missing(self._known))
            return
        self.view, self._members, self._known, self._end = head.number, dict(head.members), head.index, head.end
        self._table, self._table_index = table_of(head.owners), head.index
        for kept in (self._log, self._pending, self._origin, self._frozen, self._freed, self._copies, self._changed):
            kept.clear()
        self._store.branches.clear()
        self._staging.clear()
        self._cohorts, self._pulls = [], []
        self._keeper.forget_after(head.index)
        mine = self._mine = frozenset(b for b, owner in self._table.items() if owner == self.name)
        for runs, holder in head.sources:
            blocks = blocks_in(runs)
            if holder == self.name:
                self._restore(head.index, blocks & mine)
                for owner, those in members(self._table, blocks - mine).items():
                    for piece in self._keeper.pick(head.index, those):
                        self._ship(head.index, piece, ((), ()), owner)
            else:
                self._pending.update(dict.fromkeys(blocks & mine, head.index))
        self._advance()
        self._reconsider()

    def _restore(self, index: int, blocks: Blocks) -> None:
        if blocks:
            for piece in self._keeper.pick(index, blocks):
                self._store.install(piece)
            self._cohorts.append(_Cohort(blocks, index))
