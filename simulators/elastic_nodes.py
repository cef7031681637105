"""An executor of the elastic store: blocks that it owns, is given, gives away or backs up, and its own requests.

What it does with a block is a phase. Blocks that are in no phase belong to somebody else, and requests for them go on to
whom the table names.

    live      owner: serves everything
    closing   source of a move: running operations end, new requests wait; then moved or frozen
    moved     source of a move: the destination is the owner; keeps a copy until that is installed and backed up
    frozen    source of a relocation: pulls are served the original, pushes go on to the destination with the original
    awaited   destination of a move: requests wait for the block
    absent    destination of a relocation: what brings the original creates the block, all else goes back to the source
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from simulators import elastic_messages as say
from simulators.elastic_messages import MASTER, Ask, Copy, Entry, Operation, Origin, Part, State, Tally, operate
from simulators.elastic_requests import Requests, target

__all__ = ["IN_FLIGHT", "Executor"]

IN_FLIGHT = 4
"""Blocks under way at once from one source to one destination."""


@dataclass
class _Role:
    """What an executor does with one block."""

    phase: str
    epoch: int  # when this executor became the owner, or will
    entry: Entry  # the line that the block's last change leads to
    source: str | None = None  # whom to release once this is backed up
    report: bool = False  # tell the master once it is
    swept: bool = True  # closing, frozen: send the block without waiting for a worker
    origin: Origin | None = None
    backup: str | None = None
    acked: int = -1  # version that the backup has
    settled: bool = False  # the backup has had the whole block
    strays: set[str] = field(default_factory=set)  # other holders of older copies
    queue: list[Ask] = field(default_factory=list)
    replies: deque[tuple[int, Ask, int]] = field(default_factory=deque)


class Executor:
    """One node: `receive` is its only way in, `send` its only way out."""

    def __init__(
        self,
        name: str,
        send: Callable[[str, Any], None],
        finish: Callable[[int, dict[int, Any]], None],
        apply: say.Apply,
        immutable: frozenset[int],
        tally: Tally,
    ) -> None:
        self.name, self.apply, self.immutable, self.tally = name, apply, immutable, tally
        self._post = send
        self.view = 0
        self.table: dict[int, Entry] = {}
        self.copies: dict[int, Copy] = {}
        self.roles: dict[int, _Role] = {}
        self.queues: dict[str, deque[int]] = {}  # blocks yet to move, by destination
        self.flying: dict[str, set[int]] = {}  # blocks moving, by destination
        self.members: tuple[str, ...] = ()
        self.requests = Requests(name, self.table, self.send, finish)
        self.held: list[tuple[str, Any]] = []  # came before the table of this view
        self.leaver: str | None = None  # who waits for a farewell
        self.told: set[str] = set()  # who has been written to
        self.farewells = 0  # had
        self.awaited: int | None = None  # farewells to have before leaving
        self.left: frozenset[str] = frozenset()
        self.unacknowledged = 0  # copies and updates sent to backups

    def send(self, receiver: str, message: Any) -> None:
        """Put a message on its way."""
        self.told.add(receiver)
        self.unacknowledged += isinstance(message, Copy | say.Update)
        self._post(receiver, message)

    def receive(self, sender: str, view: int, message: Any) -> None:
        """Take one message. What belongs to an older view is lost; its sender will ask again."""
        if view < self.view:
            return
        if isinstance(message, say.NewView):
            self._stop(view)
        elif isinstance(message, say.Install):
            self._install_view(message)
        elif not self.requests.running:
            self.held.append((sender, message))
        else:
            getattr(self, "_on_" + type(message).__name__.lower())(sender, message)
            self._try_to_part()

    # Requests

    def _on_answer(self, _sender: str, answer: say.Answer) -> None:
        self._learn(answer.block, answer.entry)
        self.requests.answer(answer)

    def _on_ask(self, _sender: str, ask: Ask) -> None:
        for block in ask.parts:
            origin = ask.origins.get(block)
            origins = {block: origin} if origin else {}
            self._serve(block, ask._replace(parts={block: ask.parts[block]}, origins=origins))

    def _serve(self, block: int, ask: Ask) -> None:
        role, origin = self.roles.get(block), ask.origins.get(block)
        if role and role.phase in ("awaited", "closing"):
            self.tally.waited[0] += 1
            role.queue.append(ask)
            return
        if role and role.phase == "absent" and origin and origin.epoch == role.entry.epoch:
            self._create(block, role, origin.state)
        if role and role.phase == "live":
            self._operate(block, role, ask)
        elif role and role.phase == "frozen" and ask.step == "pull":
            self._reply(block, ask, role.origin)
        else:
            self._redirect(block, ask, role)

    def _redirect(self, block: int, ask: Ask, role: _Role | None) -> None:
        if role and role.phase == "frozen" and role.origin:
            ask = ask._replace(origins={block: role.origin})
        node = target(self.table[block], ask.step, ask.origins.get(block))
        if node == self.name:
            raise RuntimeError(
                f"Cannot serve block {block} at {self.name}: its own table names it, but it has no part in it."
            )
        self.tally.redirected[0] += 1
        self.send(node, ask)

    def _operate(self, block: int, role: _Role, ask: Ask) -> None:
        if ask.step == "pull":
            self._reply(block, ask, None)
            return
        part = Part(ask.number, ask.parts[block], ask.whole) if ask.step == "stage" else None
        operation = Operation(ask.step, ask.worker, ask.number, part)
        copy = self.copies[block]
        state = operate(copy.state, operation, self.apply)
        if state is not copy.state:
            self.copies[block] = copy._replace(state=state)
            if role.backup:
                self.send(role.backup, say.Update(block, state.version, operation))
        role.replies.append((state.version, ask, block))
        self._progress(block, role)

    def _reply(self, block: int, ask: Ask, origin: Origin | None) -> None:
        value = None
        if ask.step == "pull":
            value = origin.state.value if origin else self.copies[block].state.value
        self.send(ask.reply_to, say.Answer(ask.step, ask.number, block, value, self.table[block], origin))

    def _progress(self, block: int, role: _Role) -> None:
        """Answer what is backed up; when all is, end what waited for that."""
        version = self.copies[block].state.version if role.phase in ("live", "closing") else role.acked
        if role.backup is None:
            role.acked = version
        if role.phase not in ("live", "closing") or role.acked < 0:
            return
        self.tally.promised[block] = max(self.tally.promised.get(block, 0), role.acked)
        while role.replies and role.replies[0][0] <= role.acked:
            _, ask, _ = role.replies.popleft()
            self._reply(block, ask, None)
        if role.acked == version and role.phase == "closing":
            self._flip(block, role)

    # Moves and relocations

    def _on_start(self, _sender: str, start: say.Start) -> None:
        if start.on_demand:
            for block in start.blocks:
                self._hand_over(block, start.destination, on_demand=True)
        else:
            self.queues.setdefault(start.destination, deque()).extend(start.blocks)
            self._next_moves(start.destination)

    def _next_moves(self, destination: str) -> None:
        queue, flying = self.queues.get(destination, deque()), self.flying.setdefault(destination, set())
        while queue and len(flying) < IN_FLIGHT:
            flying.add(queue[0])
            self._hand_over(queue.popleft(), destination, on_demand=False)

    def _hand_over(self, block: int, destination: str, on_demand: bool) -> None:
        role, epoch = self.roles[block], self.table[block].epoch
        role.swept = not on_demand
        if block in self.immutable:  # nothing can change meanwhile: the block goes first, ownership with it
            role.phase, role.entry = "frozen", Entry(epoch + 1, destination, self.name)
            role.origin = Origin(epoch + 1, self.copies[block].state)
            self.send(destination, say.Data(block, role.origin))
            return
        role.entry = Entry(epoch + 1, destination, self.name if on_demand else None)
        self.send(destination, say.Ownership(block, role.entry))

    def _on_ownership(self, sender: str, message: say.Ownership) -> None:
        self._learn(message.block, message.entry)
        phase = "absent" if message.entry.source else "awaited"
        self.roles[message.block] = _Role(phase, message.entry.epoch, message.entry, source=sender)
        self.send(sender, say.Ack(message.block))

    def _on_ack(self, _sender: str, message: say.Ack) -> None:
        role = self.roles[message.block]
        role.phase = "closing"
        self._progress(message.block, role)

    def _flip(self, block: int, role: _Role) -> None:
        """No operation is running: the destination is the owner from here on, and the block no longer changes here."""
        self._learn(block, role.entry)
        role.phase = "frozen" if role.entry.source else "moved"
        role.origin = Origin(role.entry.epoch, self.copies[block].state)
        self.send(MASTER, say.Moved(block, role.entry))
        if role.swept:
            self.send(role.entry.owner, say.Data(block, role.origin))
        queue, role.queue = role.queue, []
        for ask in queue:
            self._serve(block, ask)

    def _on_sweep(self, _sender: str, message: say.Sweep) -> None:
        role = self.roles.get(message.block)
        if role and not role.swept:
            role.swept = True
            if role.phase == "frozen" and role.origin:
                self.send(role.entry.owner, say.Data(message.block, role.origin))

    def _on_data(self, sender: str, message: say.Data) -> None:
        block, origin = message
        if block in self.immutable:
            self.roles[block] = _Role("absent", origin.epoch, Entry(origin.epoch, self.name, sender), source=sender)
        role = self.roles.get(block)
        if role and role.phase in ("awaited", "absent") and role.entry.epoch == origin.epoch:
            self._create(block, role, origin.state)

    def _create(self, block: int, role: _Role, state: State) -> None:
        """Become the owner in deed, once per change of owner."""
        if role.entry.source:
            role.epoch += 1
            role.entry = Entry(role.epoch, self.name)
            self.send(MASTER, say.Moved(block, role.entry))
        self._learn(block, role.entry)
        self.copies[block] = Copy(block, self.name, role.entry.epoch, state)
        role.phase = "live"
        self._back_up(block, role)
        queue, role.queue = role.queue, []
        for ask in queue:
            self._serve(block, ask)

    def _on_release(self, _sender: str, message: say.Release) -> None:
        block = message.block
        self._learn(block, message.entry)
        role = self.roles.pop(block)
        if block in self.copies and self.copies[block].owner == self.name:
            del self.copies[block]
        for node in sorted(role.strays | ({role.backup} if role.backup else set())):
            self.send(node, say.Drop(block))
        self.send(MASTER, say.Settled(block, self.table[block]))
        flying = self.flying.get(message.entry.owner, set())
        flying.discard(block)
        self._next_moves(message.entry.owner)

    def _on_tell(self, _sender: str, message: say.Tell) -> None:
        self._learn(message.block, message.entry)

    def _learn(self, block: int, entry: Entry) -> None:
        if block not in self.table or entry.epoch > self.table[block].epoch:
            self.table[block] = entry
            self.requests.origins.pop(block, None)

    # Backups

    def _back_up(self, block: int, role: _Role) -> None:
        """Send the whole block to the next member in the ring; what it had elsewhere is dropped when it has arrived."""
        if role.backup:
            role.strays.add(role.backup)
        after = self.members.index(self.name) + 1 if self.name in self.members else 0
        ring = [m for m in self.members[after:] + self.members[:after] if m != self.name]
        role.backup, role.acked, role.settled = ring[0] if ring else None, -1, False
        if role.backup:
            role.strays.discard(role.backup)
            state = role.origin.state if role.origin else self.copies[block].state
            self.send(role.backup, Copy(block, self.name, role.epoch, state))
        else:
            self._progress(block, role)
            self._settle(block, role)

    def _on_copy(self, sender: str, copy: Copy) -> None:
        mine = self.copies.get(copy.block)
        if mine is None or (mine.epoch, mine.state.version) <= (copy.epoch, copy.state.version):
            self.copies[copy.block] = copy
        self.send(sender, say.Backed(copy.block, copy.state.version))

    def _on_update(self, sender: str, message: say.Update) -> None:
        copy = self.copies.get(message.block)
        if copy and copy.owner == sender and copy.state.version == message.version - 1:
            state = operate(copy.state, message.operation, self.apply)
            self.copies[message.block] = copy._replace(state=state)
            self.send(sender, say.Backed(message.block, message.version))
        else:
            self.send(sender, say.Backed(message.block, -1))

    def _on_backed(self, sender: str, message: say.Backed) -> None:
        self.unacknowledged -= 1
        role = self.roles.get(message.block)
        if role and role.backup == sender and message.version >= 0:
            role.acked = max(role.acked, message.version)
            self._settle(message.block, role)
            self._progress(message.block, role)

    def _settle(self, block: int, role: _Role) -> None:
        """The block is safe where it is: let go of older copies, once."""
        if role.settled:
            return
        role.settled = True
        for node in sorted(role.strays):
            self.send(node, say.Drop(block))
        role.strays.clear()
        if role.source:
            self.send(role.source, say.Release(block, self.table[block]))
            role.source = None
        if role.report:
            self.send(MASTER, say.Settled(block, role.entry))
            role.report = False

    def _on_drop(self, sender: str, message: say.Drop) -> None:
        copy = self.copies.get(message.block)
        if copy and copy.owner == sender:
            del self.copies[message.block]

    # Members that come, leave or die

    def _on_members(self, _sender: str, message: say.Members) -> None:
        self.members = message.members
        for block, role in self.roles.items():
            if (
                role.backup is None
                and role.phase != "awaited"
                and role.phase != "absent"
                and set(self.members) - {self.name}
            ):
                self._back_up(block, role)

    def _on_sync(self, _sender: str, message: say.Sync) -> None:
        self.members, self.leaver = message.members, message.node
        for block, entry in message.table.items():
            self._learn(block, entry)
        for block, role in self.roles.items():
            if role.backup == message.node:
                self._back_up(block, role)

    def _on_leave(self, _sender: str, message: say.Leave) -> None:
        self.awaited, self.left = message.farewells, message.left

    def _on_farewell(self, _sender: str, _message: say.Farewell) -> None:
        self.farewells += 1

    def _try_to_part(self) -> None:
        """Say farewell to who leaves, or leave."""
        leaver = self.leaver
        if leaver and not any(r.backup == leaver or leaver in r.strays for r in self.roles.values()):
            self.leaver = None
            self.send(leaver, say.Farewell())
        busy = self.requests.numbers or self.roles or self.unacknowledged
        if self.awaited == self.farewells and not busy:
            self.awaited = None
            told = frozenset(self.told - {self.name, MASTER} - self.left)
            for node in sorted(told):
                self.send(node, say.Farewell())
            self.send(MASTER, say.Gone(told))

    def _stop(self, view: int) -> None:
        self.view = view
        self.requests.stop()
        for unfinished in (self.roles, self.queues, self.flying, self.held, self.told):
            unfinished.clear()
        self.leaver = self.awaited = None
        self.farewells = self.unacknowledged = 0
        self.send(MASTER, say.Report({b: say.summary(c.state) for b, c in self.copies.items()}))

    def _install_view(self, message: say.Install) -> None:
        self.table.clear()
        self.table.update(message.table)
        self.members = message.members
        for block, copy in list(self.copies.items()):
            entry = message.table[block]
            self.copies[block] = copy._replace(owner=entry.owner, epoch=entry.epoch)
            if entry.owner == self.name:
                strays = set(message.holders[block]) - {self.name}
                self.roles[block] = _Role("live", entry.epoch, entry, report=True, strays=strays)
                self._back_up(block, self.roles[block])
        self.requests.resume()
        held, self.held = self.held, []
        for sender, kept in held:
            self.receive(sender, self.view, kept)
