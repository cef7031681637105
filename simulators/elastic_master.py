"""The master of the elastic store: the true ownership table, orders to move, removals one at a time, and recovery.

Recovery is a change of view. Survivors stop, report their copies, and drop whatever the old view had under way; the longest
copy of each block wins and its holder becomes the owner, with a new backup; workers ask again for what is not answered.
Only when every block is backed up again does the master say what becomes of the pushes of workers that died. The master
itself does not fail.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from simulators import elastic_messages as say
from simulators.elastic_messages import MASTER, Ask, Entry, State

__all__ = ["Master"]


class Master:
    """`members` may own blocks and hold backups; `present` also counts those about to leave."""

    def __init__(
        self,
        members: Iterable[str],
        table: Mapping[int, Entry],
        send: Callable[[str, Any], None],
        left: Callable[[str], None],
        decided: Callable[[int, bool], None],
    ) -> None:
        self.members = list(members)
        self.present = list(self.members)
        self.table = dict(table)
        self.send, self.left, self.decided = send, left, decided
        self.view = 0
        self.phase = "running"  # then, after a death: "reporting", "settling", "resolving"
        self.moving: dict[int, tuple[str, str]] = {}  # block to (source, destination), until nothing is left to do
        self.on_demand: set[int] = set()  # of those, the blocks that wait for a worker to carry them
        self.leaving: list[str] = []
        self.orphans: dict[int, tuple[str, frozenset[int]]] = {}  # push of a dead worker: (worker, blocks)
        self._syncing: str | None = None  # who has had our last message
        self._departed: list[tuple[str, set[str]]] = []  # who left in this view, and to whom it had written
        self._reports: dict[str, Mapping[int, State]] = {}
        self._best: dict[int, State] = {}
        self._unresolved: set[tuple[int, int]] = set()  # (push, block)

    def receive(self, sender: str, view: int, message: Any) -> None:
        """Take one message of the present view."""
        if view == self.view:
            getattr(self, "_on_" + type(message).__name__.lower())(sender, message)
            self._advance_removal()

    def order(self, source: str, destination: str, blocks: Iterable[int], on_demand: bool) -> None:
        """Have `source` hand `blocks` over."""
        chosen = tuple(blocks)
        for block in chosen:
            if self.table[block].owner != source or block in self.moving:
                raise ValueError(f"Cannot move block {block} from {source}: it is not its owner, or is moving it already.")
        if destination not in self.members or destination == source:
            raise ValueError(f"Cannot move blocks to {destination}: name another member: {', '.join(self.members)}.")
        if self.phase != "running":
            raise ValueError("Cannot move blocks during a recovery: deliver its messages first.")
        self.moving.update(dict.fromkeys(chosen, (source, destination)))
        if on_demand:
            self.on_demand.update(chosen)
        self.send(source, say.Start(destination, chosen, on_demand))

    def sweep(self, blocks: Iterable[int]) -> None:
        """Have the sources send these blocks without waiting for workers."""
        for block in sorted(self.on_demand.intersection(blocks)):
            self.on_demand.remove(block)
            self.send(self.moving[block][0], say.Sweep(block))

    def add(self, node: str) -> None:
        """Let `node` take part."""
        self.members.append(node)
        self.present.append(node)
        self.send(node, say.Install(dict(self.table), tuple(self.members), {}))
        self._tell_members(node)

    def remove(self, node: str) -> None:
        """Let `node` go when it owns nothing, nobody thinks that it does, and its own requests are answered."""
        self.members.remove(node)
        self.leaving.append(node)
        if self.phase != "reporting":
            self._tell_members(MASTER)
        self._advance_removal()

    def fail(self, node: str) -> None:
        """Begin a new view without `node`."""
        for group in (self.members, self.present, self.leaving):
            if node in group:
                group.remove(node)
        self.view += 1
        self.phase, self._syncing = "reporting", None
        self.moving, self._reports = {}, {}
        for of_the_old_view in (self.on_demand, self._unresolved, self._departed):
            of_the_old_view.clear()
        for survivor in self.present:
            self.send(survivor, say.NewView())

    def _tell_members(self, but: str) -> None:
        for node in self.present:
            if node not in (but, self._syncing):
                self.send(node, say.Members(tuple(self.members)))

    # Ownership

    def _on_moved(self, sender: str, message: say.Moved) -> None:
        self._tell(sender, message.block, message.entry)

    def _tell(self, sender: str, block: int, entry: Entry) -> None:
        if entry.epoch <= self.table[block].epoch:
            return
        self.table[block] = entry
        for node in self.present:
            if node not in (sender, entry.owner, self._syncing):
                self.send(node, say.Tell(block, entry))

    def _on_settled(self, sender: str, message: say.Settled) -> None:
        self._tell(sender, message.block, message.entry)  # a relocation's end may reach us here first
        del self.moving[message.block]
        self.on_demand.discard(message.block)
        if self.phase == "settling" and not self.moving:
            self._resolve()

    # Removal

    def _advance_removal(self) -> None:
        if self.phase != "running" or self._syncing or not self.leaving:
            return
        node = self.leaving[0]
        self._drain(node)
        if any(node in (e.owner, e.source) for e in self.table.values()) or any(node in m for m in self.moving.values()):
            return
        self._syncing = node
        others = [n for n in self.present if n != node]
        for other in others:
            self.send(other, say.Sync(node, tuple(self.members), dict(self.table)))
        farewells = len(others) + sum(node in told for _, told in self._departed)
        self.send(node, say.Leave(farewells, frozenset(name for name, _ in self._departed) - set(others)))

    def _drain(self, node: str) -> None:
        """Move what `node` still owns to the members with the fewest blocks, servers first; sweep what it still keeps."""
        self.sweep(b for b, (source, _) in self.moving.items() if source == node)
        counts = Counter(e.owner for e in self.table.values())
        counts.update(destination for _, destination in self.moving.values())
        servers = [m for m in self.members if counts[m]] or self.members
        plan: dict[str, list[int]] = {}
        for block, entry in self.table.items():
            if entry.owner == node and block not in self.moving:
                destination = min(servers, key=lambda m: counts[m])
                counts[destination] += 1
                plan.setdefault(destination, []).append(block)
        for destination, blocks in plan.items():
            self.order(node, destination, blocks, on_demand=False)

    def _on_gone(self, sender: str, message: say.Gone) -> None:
        for _, told in self._departed:
            told.discard(sender)
        self._departed.append((sender, set(message.told)))
        self.leaving.remove(sender)
        self.present.remove(sender)
        self._syncing = None
        self.left(sender)

    # Recovery

    def _on_report(self, sender: str, message: say.Report) -> None:
        self._reports[sender] = message.states
        if set(self._reports) >= set(self.present):
            self._install()

    def _install(self) -> None:
        """Give each block to who has the longest copy; if several do, to its owner before."""
        holders = {b: tuple(n for n in self.present if b in self._reports.get(n, {})) for b in self.table}
        for block, nodes in holders.items():
            before = self.table[block]

            def merit(node: str, block: int = block, before: Entry = before) -> tuple[int, bool, bool, bool]:
                version = self._reports[node][block].version
                return version, node in self.members, node == before.owner, node == before.source

            best = max(nodes, key=merit)
            self._best[block] = self._reports[best][block]
            self.table[block] = Entry(before.epoch + 1, best)
            self.moving[block] = (best, best)
        self.phase = "settling"
        for node in self.present:
            self.send(node, say.Install(dict(self.table), tuple(self.members), holders))

    def _arrived(self, block: int, worker: str, number: int) -> bool:
        """Whether the block has this part of a push, staged or committed."""
        state = self._best[block]
        staged = state.staged.get(worker)
        return state.applied.get(worker, 0) >= number or (staged is not None and staged.number == number)

    def _resolve(self) -> None:
        """Complete the pushes of dead workers that had arrived in whole, have the others forgotten."""
        self.phase = "resolving"
        for block, state in self._best.items():
            for worker, part in state.staged.items():
                if worker not in self.present:
                    whole = all(self._arrived(b, worker, part.number) for b in part.whole)
                    self._unresolved.add((part.number, block))
                    step = "commit" if whole else "forget"
                    ask = Ask(step, MASTER, worker, part.number, {block: None}, part.whole, {})
                    self.send(self.table[block].owner, ask)
        self._end_recovery()

    def _on_answer(self, _sender: str, answer: say.Answer) -> None:
        self._unresolved.discard((answer.number, answer.block))
        self._end_recovery()

    def _end_recovery(self) -> None:
        if self.phase != "resolving" or self._unresolved:
            return
        self.phase = "running"
        for number, (worker, whole) in self.orphans.items():
            self.decided(number, all(self._arrived(b, worker, number) for b in whole))
        self.orphans.clear()
