"""Who is there, and what is done when somebody is not: drops, and views.

A view is how everything that goes wrong is put right: all servers go back to the durable snapshot, blocks of the dead go to
others, workers stage again what they had pushed since, and the log comes again. What a dead worker had pushed since the
snapshot is not there to be staged again: these pushes are withdrawn. So after the loss of a worker a snapshot is taken at
once, and pushes are lost only where a server dies before that is durable.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from msgspec.structs import replace

from harness.live.coordinator.ledger import Ledger
from harness.live.coordinator.moves import Moves
from harness.live.coordinator.snapshots import Snapshots
from harness.live.protocol.blocks import Blocks, members, owners_of, runs_of
from harness.live.protocol.log import Commit, Drop, Fork, Free, Move, Skip, Snapshot
from harness.live.protocol.messages import COORDINATOR, Log, View
from simulators.reconfiguration.plan import block_counts

__all__ = ["Membership", "ModelLost"]

_KEPT = ("released", "gone", "leaving", "homeless", "lost_pushes")


class ModelLost(RuntimeError):
    """No process has a copy of some block any more; `Coordinator.begin_from` gives the job a model again."""


class Membership:
    """Peers that join, leave and die."""

    def __init__(
        self,
        ledger: Ledger,
        snapshots: Snapshots,
        moves: Moves,
        now: Callable[[], float],
        retry_seconds: float,
        gone_back: Callable[[list[int]], None],
    ) -> None:
        """`gone_back` is called when a view begins, with the branches in whose open groups pushes were withdrawn."""
        self._gone_back = gone_back
        self._ledger, self._snapshots, self._moves = ledger, snapshots, moves
        self._now, self._patience_seconds = now, 10 * retry_seconds
        self.released: dict[str, int] = {}  # the last cycle of every worker
        self.gone: dict[str, int] = {}  # and that of its last generation that died
        self.leaving: dict[str, int] = {}  # who is to leave, when the log is durable up to this entry
        self.homeless: set[int] = set()  # blocks of servers that died, though others of their names may be there by now
        self.lost_pushes = 0
        self._told: dict[str, int] = {}  # the table that workers were told, and that they go by
        self._seen: dict[str, int] = {}
        self._view: View | None = None
        self._awaited: set[str] = set()  # servers that are not yet where this view begins
        self._broken = False  # blocks are lost, and nobody has said where they are to go
        self._seconds = 0.0

    def dump(self) -> dict[str, Any]:
        """All of it that a successor needs."""
        return {name: getattr(self, name) for name in _KEPT}

    def load(self, kept: dict[str, Any]) -> None:
        """The way back from `dump`."""
        for name in _KEPT:
            setattr(self, name, kept[name])

    @property
    def recovering(self) -> bool:
        """Whether servers are being brought back, or wait to be."""
        return self._broken or bool(self._awaited)

    # ----------------------------------------------------------------------------------------------------- come and go

    def admit(self, name: str, generation: int) -> bool:
        """A process has said hello; whether it is new."""
        ledger = self._ledger
        new = ledger.members.get(name) != generation
        ledger.members[name] = generation
        if ledger.view > 0 and name not in ledger.table.values():
            view = View(ledger.view, ledger.index, ledger.index, owners_of(ledger.table), self._generations(), ())
            ledger.tell(name, view)
            self._told[name] = self._seen[name] = ledger.table_index
        return new

    def _generations(self) -> dict[str, int]:
        return {**self._ledger.members, COORDINATOR: self._ledger.generation}

    def lose(self, names: Iterable[str]) -> None:
        """These are dead. Without servers that own blocks, or are about to, `recover` has to be called."""
        for name in names:
            generation = self._ledger.members.pop(name)
            self.leaving.pop(name, None)
            if name.startswith("worker/"):
                self._drop(name, generation)
            else:
                busy = {n for pair in self._moves.under_way.values() for n in pair}
                self._broken |= name in busy or name in self._ledger.table.values() or name in self._awaited
                self.homeless.update(b for b, owner in self._ledger.table.items() if owner == name)
                self._snapshots.lose(name)
            self._awaited.discard(name)
        if not self.recovering:
            self._snapshots.take(self.leaving)

    def _drop(self, name: str, generation: int) -> None:
        self.gone[name] = self.released.get(name, 0)
        self._ledger.append(Drop(name, generation, self.gone[name]))
        if self._awaited and not self._broken and self._ledger.commits(name):
            self.recover((), ())  # servers may wait for what it can no longer send

    def table_to(self, name: str) -> None:
        """Tell a worker who owns what, if it does not know."""
        if self._told.get(name) != self._ledger.table_index:
            self._told[name] = self._ledger.table_index
            self._ledger.table_to([name])

    def repeat(self, name: str, after: int) -> None:
        """A server has missed entries of the log after that one."""
        if after < self._ledger.durable:
            if not self._broken:
                self.recover((), ())
        else:
            self._ledger.repeat(name, after)

    def seen(self, name: str, index: int) -> None:
        """A worker goes by that table."""
        self._seen[name] = max(index, self._seen.get(name, 0))

    def stay(self, names: Iterable[str]) -> None:
        """These are wanted again."""
        for name in names:
            self.leaving.pop(name, None)

    def let_go(self, busy: Callable[[str], bool]) -> None:
        """Those who leave go when nothing is lost with them."""
        for name in sorted(self.leaving):
            if name in self._ledger.members and not self._needed(name, busy):
                generation = self._ledger.members.pop(name)
                del self.leaving[name]
                if name.startswith("worker/"):
                    self._drop(name, generation)

    def _needed(self, name: str, busy: Callable[[str], bool]) -> bool:
        ledger = self._ledger
        if name.startswith("worker/"):
            return busy(name) or bool(ledger.commits(name)) or self.recovering
        moving = {n for pair in self._moves.under_way.values() for n in pair}
        holds = ledger.durable < self.leaving[name]
        behind = any(self._seen.get(w, -1) < ledger.table_index for w in ledger.workers)
        return self.recovering or holds or behind or name in moving or name in ledger.table.values()

    # ------------------------------------------------------------------------------------------------------------ views

    def recover(self, servers: tuple[str, ...], shares: tuple[float, ...]) -> None:
        """Begin a view. Raises ModelLost where blocks are gone."""
        ledger, self._broken = self._ledger, True
        sources = self._sources_of(self._place(servers, shares))
        self._gone_back(self._withdraw())
        ledger.entries = {i: Skip() if isinstance(e, Move | Snapshot) else e for i, e in ledger.entries.items()}
        ledger.view, ledger.table_index = ledger.view + 1, ledger.durable
        self._snapshots.restart()
        self._moves.restart()
        self._awaited, self._broken, self._seconds = set(ledger.table.values()), False, self._now()
        self.homeless.clear()
        self._told = self._seen = dict.fromkeys(ledger.workers, ledger.durable)
        owners, by_holder = owners_of(ledger.table), tuple((runs_of(b), h) for h, b in sources.items())
        self._view = View(ledger.view, ledger.durable, ledger.index, owners, self._generations(), by_holder)
        for name in (*ledger.servers, *ledger.workers):
            ledger.tell(name, self._view)
        self._snapshots.hand_out(sources.get(COORDINATOR, ()))
        for name in ledger.servers:
            ledger.repeat(name, ledger.durable)

    def _place(self, servers: tuple[str, ...], shares: tuple[float, ...]) -> dict[int, str]:
        """Where blocks are to be: where they are, if their owner lives, else with who has fewer than it should have."""
        table, alive = dict(self._ledger.table), set(self._ledger.servers)
        wanted = [s for s in servers if s in alive] or sorted(alive & set(table.values())) or sorted(alive)
        if not wanted:
            raise RuntimeError("Cannot go on: no server is there; start one, and recover then.")
        given = dict(zip(servers, shares, strict=False))
        total = sum(given.get(s, 0.0) for s in wanted)
        parts = tuple(given[s] / total if total > 0 else 1 / len(wanted) for s in wanted)
        lack = block_counts(tuple(wanted), parts, len(table))
        homeless = [b for b, owner in sorted(table.items()) if owner not in alive or b in self.homeless]
        for block, owner in table.items():
            if owner in lack and block not in homeless:
                lack[owner] -= 1
        for block in homeless:
            table[block] = next((s for s in wanted if lack[s] > 0), wanted[0])  # so that each gets neighbours
            lack[table[block]] -= 1
        return table

    def _sources_of(self, table: dict[int, str]) -> dict[str, Blocks]:
        """Who gives which blocks: their owner itself, if it can; the coordinator only what nobody else can."""
        ledger, holder = self._ledger, dict[int, str]()
        for block, owner in table.items():
            able = sorted(ledger.holders[block] & set(ledger.servers))
            here = [COORDINATOR] if block in self._snapshots.keeper.blocks(ledger.durable) else []
            if not able + here:
                raise ModelLost(f"Cannot go on: nobody has a copy of block {block}; go back to a checkpoint.")
            holder[block] = owner if owner in able else (able + here)[0]
        ledger.table = table
        return members(holder, holder)

    def _withdraw(self) -> list[int]:
        """Pushes whose gradients nobody has any more do not count."""
        entries, ungrouped = self._ledger.entries, []
        for index in sorted(entries):
            entry = entries[index]  # as those before it have left it
            if isinstance(entry, Commit) and entry.accept and entry.cycle <= self.gone.get(entry.worker, 0):
                entries[index] = replace(entry, accept=False)
                self.lost_pushes += 1
                ungrouped += self._shrink(entry.branch, index)
        return ungrouped

    def _shrink(self, branch: int, index: int) -> list[int]:
        """The group that a push was in is smaller by it, in branches forked meanwhile, too; those where it is still open."""
        entries, still_open = self._ledger.entries, {branch}
        for i in range(index, self._ledger.index + 1):
            entry = entries[i]
            if isinstance(entry, Fork) and entry.parent in still_open:
                still_open.add(entry.branch)
            elif isinstance(entry, Free):
                still_open.discard(entry.branch)
            elif isinstance(entry, Commit) and entry.take and entry.branch in still_open:
                entries[i] = replace(entry, grouped=entry.grouped - 1, take=entry.grouped > 1)
                still_open.discard(entry.branch)
        return sorted(still_open)

    def ready(self, name: str) -> bool:
        """A server is where the view begins; whether all are."""
        if name not in self._awaited:
            return False
        self._awaited.discard(name)
        for block, owner in self._ledger.table.items():
            if owner == name:
                self._ledger.holders[block].add(name)
        return not self.recovering

    def remind(self) -> None:
        """Somebody waits too long: whoever has missed something is to notice."""
        ledger = self._ledger
        late = self._now() - self._patience_seconds
        if self._broken:
            return
        if (self._awaited and self._seconds < late) or (self._moves.under_way and self._moves.seconds < late):
            self.recover((), ())
        if self._view is not None:
            for name in sorted(self._awaited):
                ledger.tell(name, self._view)
        for name in ledger.servers if ledger.entries else ():
            ledger.tell(name, Log(ledger.index, ledger.entries[ledger.index]))
