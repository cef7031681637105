"""A parameter server's blocks change owner while workers go on pulling and pushing: the protocol, without time.

The store is a set of executors and a master that exchange messages through mailboxes, one per sender and receiver, first in
first out. Nothing happens but by `deliver`, so that whoever calls it chooses the interleaving. Ways of changing owners:

- `move`, as Cruise's Elastic Store does (Section IV-B): ownership first, then the block; at most four under way per pair
  of nodes. Immutable (training) blocks go the other way round: the block, and ownership with it.
- `relocate`, as TensorFlowOnline's On-Demand Model Relocation does (Section V): a block stays at its source, frozen, and is
  carried over by the first worker that pushes to it after having pulled it, as <o, u>; `sweep` sends what nobody pulls.
- `save`, and a new store from what was saved: the quiescent way.

Invariants, for any interleaving and for the death of any node whose copies exist elsewhere (`only_copies` is empty):

- One executor at a time serves a block's updates; the copies of a block are beginnings of one history of operations.
- A push is applied exactly once to each of its blocks, and answered when it is, at the owner and at one backup.
- A pull sees every push of its own worker that was answered before, and nothing that is not in the model in the end. Only
  while a block is being relocated may it miss what another worker's answered push wrote.
- A push whose worker dies is applied to all of its blocks if all its parts had arrived, and to none otherwise.
- The original of a relocated block never changes: whoever carries it carries the same, and it takes effect once.
- A change under way when a node dies ends, block by block, at the destination if that had the block, else at the source.
- A node that was removed has no block, no copy, no open request, and no message on its way to it.

The master does not fail, and a death is noticed at once.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import partial
from itertools import count
from typing import Any, NamedTuple, TypeAlias

from simulators.elastic_master import Master
from simulators.elastic_messages import MASTER, Apply, Copy, Drop, Entry, Install, State, Tally
from simulators.elastic_nodes import IN_FLIGHT, Executor

__all__ = ["IN_FLIGHT", "MASTER", "Channel", "Outcome", "Saved", "Store", "add"]

Channel: TypeAlias = tuple[str, str]
"""(sender, receiver)."""


class Outcome(NamedTuple):
    """How a request ended."""

    done: bool  # False: its worker died, and it has no effect
    values: Mapping[int, Any]  # block to what was pulled


class Saved(NamedTuple):
    """A model at rest."""

    values: Mapping[int, Any]
    slots: Mapping[int, Any]


def add(value: Any, slots: Any, update: Any) -> tuple[Any, Any]:
    """Plain addition; the slots stay as they are."""
    return value + update, slots


class Store:
    """Blocks of a model on executors.

    `apply` makes (value, slots) from (value, slots, update) without changing them in place. What an aggregating (bulk
    synchronous) server has collected so far belongs in the slots: they travel with the value.
    """

    def __init__(
        self,
        executors: Sequence[str],
        assignment: Mapping[int, str],
        saved: Saved,
        *,
        apply: Apply = add,
        immutable: Collection[int] = (),
    ) -> None:
        missing = {b for b, node in assignment.items() if node not in executors} | (set(assignment) ^ set(saved.values))
        if missing or not assignment:
            raise ValueError(
                f"Cannot place blocks {sorted(missing)}: each needs a value and an owner among {list(executors)}."
            )
        if MASTER in executors or len(set(executors)) < len(executors):
            raise ValueError(f"Cannot name executors {list(executors)}: names must differ, also from {MASTER!r}.")
        self._apply, self._immutable = apply, frozenset(immutable)
        self._channels: dict[Channel, deque[tuple[int, Any]]] = {}
        self._numbers = count(1)
        self._outcomes: dict[int, Outcome] = {}
        self._tally = Tally(promised=dict.fromkeys(assignment, 0))
        table = {block: Entry(0, owner) for block, owner in assignment.items()}
        self.executors: dict[str, Executor] = {}
        self._master = Master(executors, table, self._send_as_master, self._forget_executor, self._decide)
        for node in executors:
            self.executors[node] = self._new_executor(node)
        self._place(table, saved)

    def _place(self, table: Mapping[int, Entry], saved: Saved) -> None:
        """Begin with every table known and every block backed up."""
        for block, entry in table.items():
            state = State(saved.values[block], saved.slots.get(block))
            self.executors[entry.owner].copies[block] = Copy(block, entry.owner, entry.epoch, state)
        for executor in self.executors.values():
            executor.receive(MASTER, 0, Install(dict(table), tuple(self.executors), dict.fromkeys(table, ())))
        self._master.moving = {block: (e.owner, e.owner) for block, e in table.items()}
        self.settle()

    # Requests

    def push(self, worker: str, updates: Mapping[int, Any]) -> int:
        """Have `worker` push one update per block. Returns the request's number."""
        refused = set(updates) - set(self._master.table) | set(updates) & self._immutable
        if refused or not updates:
            raise ValueError(f"Cannot push to blocks {sorted(refused)}: name blocks of the store that may change.")
        number = next(self._numbers)
        self._worker(worker).requests.push(number, updates)
        return number

    def pull(self, worker: str, blocks: Collection[int] | None = None) -> int:
        """Have `worker` pull `blocks`, or all. Returns the request's number."""
        wanted = set(self._master.table) if blocks is None else set(blocks)
        if not wanted or wanted - set(self._master.table):
            raise ValueError(f"Cannot pull blocks {sorted(wanted - set(self._master.table))}: name blocks of the store.")
        number = next(self._numbers)
        self._worker(worker).requests.pull(number, wanted)
        return number

    def outcome(self, number: int) -> Outcome | None:
        """How request `number` ended; None while it is open."""
        return self._outcomes.get(number)

    @property
    def unanswered(self) -> list[int]:
        """Open requests."""
        return sorted([n for e in self.executors.values() for n in e.requests.numbers] + list(self._master.orphans))

    def _worker(self, node: str) -> Executor:
        if node not in self._master.members:
            raise ValueError(f"Cannot work on {node}: it is not a member. Members are {', '.join(self.members)}.")
        return self.executors[node]

    # Changes

    def move(self, source: str, destination: str, blocks: Iterable[int]) -> None:
        """Migrate `blocks`. `moving` counts down as they arrive."""
        self._master.order(source, destination, blocks, on_demand=False)

    def relocate(self, assignment: Mapping[int, str]) -> None:
        """Let blocks whose owner is to be another be carried there by workers; a block that is moving stays out of it."""
        plan: dict[Channel, list[int]] = {}
        for block, node in assignment.items():
            owner = self._master.table[block].owner
            if owner != node and block not in self._master.moving:
                plan.setdefault((owner, node), []).append(block)
        for (owner, node), blocks in plan.items():
            self._master.order(owner, node, blocks, on_demand=True)

    def sweep(self, most: int | None = None) -> None:
        """Send the blocks of relocations that no worker has carried yet, at most `most`."""
        self._master.sweep(sorted(self._master.on_demand)[:most])

    def add(self, node: str) -> None:
        """Let `node` take part from now on: as a worker, a backup, and an owner of what is moved to it."""
        former = [c for c in self.pending() if node in c]
        if node in self.executors or node == MASTER or former or not self._master.phase == "running":
            raise ValueError(
                f"Cannot add {node}: it is present, or messages of its former life or a recovery are under way."
            )
        self.executors[node] = self._new_executor(node)
        self._master.add(node)

    def remove(self, node: str) -> None:
        """Let `node` leave: it begins no more requests, its blocks move to the others, and then it is gone."""
        if node not in self._master.members or len(self._master.members) == 1:
            raise ValueError(f"Cannot remove {node}: name one of the members, and not the last: {', '.join(self.members)}.")
        self._master.remove(node)

    def fail(self, node: str) -> None:
        """Let `node` die now, with all messages from and to it."""
        lost = self.only_copies(node)
        if node not in self.executors or lost or self.members == (node,):
            raise ValueError(
                f"Cannot lose {node}: absent, the last, or alone with blocks {sorted(lost)}; restore what was saved."
            )
        requests = self.executors.pop(node).requests
        pushing = requests.pushing
        for number in requests.numbers:
            if pushing and number == pushing[0]:
                self._master.orphans[number] = (node, pushing[1])
            else:
                self._decide(number, False)
        self._channels = {channel: queue for channel, queue in self._channels.items() if node not in channel}
        self._master.fail(node)

    def only_copies(self, node: str) -> frozenset[int]:
        """Blocks that would be lost with `node`: no other has, and will keep, a copy with all that was answered."""
        waiting = ((c, m) for c, queue in self._channels.items() if c[0] != node for _, m in queue)
        doomed = {(receiver, m.block) for (_, receiver), m in waiting if isinstance(m, Drop)}
        kept = [
            c
            for e in self.executors.values()
            for c in e.copies.values()
            if node != e.name and (e.name, c.block) not in doomed
        ]
        promised = self._tally.promised
        return frozenset(promised) - {c.block for c in kept if c.state.version >= promised[c.block]}

    def save(self) -> Saved:
        """Drain and save: everything under way ends first, nothing begins meanwhile."""
        self.sweep()
        self.settle()
        states = {b: self.executors[e.owner].copies[b].state for b, e in sorted(self._master.table.items())}
        return Saved({b: s.value for b, s in states.items()}, {b: s.slots for b, s in states.items()})

    # Messages

    def pending(self) -> list[Channel]:
        """Channels with a message to deliver."""
        return sorted(channel for channel, queue in self._channels.items() if queue)

    def deliver(self, channel: Channel) -> None:
        """Deliver the oldest message of `channel`."""
        sender, receiver = channel
        view, message = self._channels[channel].popleft()
        if receiver == MASTER:
            self._master.receive(sender, view, message)
        elif receiver in self.executors:
            self.executors[receiver].receive(sender, view, message)
        elif view == self._master.view:  # an older view's would have been discarded
            raise RuntimeError(f"Cannot deliver {message} to {receiver}: it has left.")

    def settle(self, most: int = 10_000_000) -> None:
        """Deliver all messages, channel by channel in turn; RuntimeError if more than `most` come up."""
        while channels := self.pending():
            for channel in channels:
                if self._channels.get(channel):
                    self.deliver(channel)
                    most -= 1
            if most < 0:
                raise RuntimeError("Cannot settle: messages beget messages without end.")

    def _send(self, sender: str, receiver: str, message: Any) -> None:
        view = self._master.view if sender == MASTER else self.executors[sender].view
        if receiver in self.executors or view == self._master.view:  # else: an old view's message to one who is dead
            self._channels.setdefault((sender, receiver), deque()).append((view, message))

    def _send_as_master(self, receiver: str, message: Any) -> None:
        self._send(MASTER, receiver, message)

    def _new_executor(self, node: str) -> Executor:
        executor = Executor(node, partial(self._send, node), self._finish, self._apply, self._immutable, self._tally)
        executor.view = self._master.view
        return executor

    def _finish(self, number: int, values: dict[int, Any]) -> None:
        self._outcomes[number] = Outcome(True, values)

    def _decide(self, number: int, done: bool) -> None:
        self._outcomes[number] = Outcome(done, {})

    def _forget_executor(self, node: str) -> None:
        del self.executors[node]

    # What can be seen

    @property
    def members(self) -> tuple[str, ...]:
        """Nodes that take part and are not about to leave."""
        return tuple(self._master.members)

    @property
    def moving(self) -> tuple[int, ...]:
        """Blocks whose change of owner, or renewed backup after a death, is not yet complete."""
        return tuple(sorted(self._master.moving))

    @property
    def recovering(self) -> bool:
        """Whether a death is still being dealt with; blocks cannot be ordered to move meanwhile."""
        return self._master.phase != "running"

    @property
    def redirected(self) -> int:
        """Requests sent on to another node so far, block by block."""
        return self._tally.redirected[0]

    @property
    def waited(self) -> int:
        """Requests that had to wait for a block so far."""
        return self._tally.waited[0]

    def owners(self) -> Counter[str]:
        """Blocks per node by the master's table."""
        return Counter(entry.owner for entry in self._master.table.values())

    def in_flight(self) -> dict[Channel, int]:
        """Blocks under way by `move`, by (source, destination)."""
        flying = {(e.name, to): len(blocks) for e in self.executors.values() for to, blocks in e.flying.items()}
        return {pair: blocks for pair, blocks in flying.items() if blocks}
