"""A reconfiguration under way: the steps of its plan, concurrently in simulated time, while training goes on.

The data plane is told what the change does to it just now (`Change.setting`, `Change.under_way`), and tells the change who
has pushed (`Change.pushed`) and who is at rest (`Change.at_rest`): a worker stops after the mini-batch it is at, and with
relocation on demand a parameter moves with the push of a worker that has pulled it since the graph was switched.
"""

from __future__ import annotations

from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import simpy

from simulators.engine.inputs import UnderWay
from simulators.reconfiguration.plan import Costs, Load, Plan, Step
from simulators.reconfiguration.transfers import Streams
from tuners.actions import Setting

__all__ = ["Change", "Ends"]


@dataclass(frozen=True, slots=True)
class Ends:
    """Where a change begins and where it is to end."""

    old: Setting
    new: Setting
    rows: Mapping[str, tuple[int, ...]]  # samples per device of every worker in the change: the old ones where it has both
    lost: frozenset[str] = frozenset()  # nodes whose loss is the reason


class Change:
    """Carries out a plan from the moment it is made."""

    def __init__(
        self,
        env: simpy.Environment,
        streams: Streams,
        plan: Plan,
        ends: Ends,
        load: Load,
        costs: Costs,
        touched_fraction: float,
    ) -> None:
        self._env, self._streams, self._plan, self._load, self._costs = env, streams, plan, load, costs
        self._ends, self._touched = ends, touched_fraction
        self.begun_seconds = float(env.now)
        self.completed: list[str] = []  # names of steps, in order of completion
        self.bytes_moved = 0.0
        self.switched = False  # relocation: the new setting is in force already
        self._stopping: dict[str, simpy.Event] = {}  # workers at their last mini-batch
        self._stopped: set[str] = set()
        self._started: list[str] = []
        self._moved: dict[tuple[str, str], int] = {}  # blocks that each node has received less those it gave: (of, node)
        self._to_move = {(of, n): c for of in ("model", "data") for n, c in self._balance(of).items()}
        self._sweeps: set[int] = set()  # steps whose parameters have not all got to their new owner
        self._left = 1.0  # of those parameters, the part that no push has carried there
        self._fresh: set[str] = set()  # workers whose mini-batch began after the graph was switched
        self._ended = [env.event() for _ in plan.steps]
        self._processes = [env.process(self._step(i)) for i in range(len(plan.steps))]

    # ------------------------------------------------------------------------------------------------- seen from outside

    @property
    def quiescent(self) -> bool:
        """Whether nobody trains meanwhile."""
        return self._plan.quiescent

    @property
    def finished(self) -> bool:
        return all(e.triggered for e in self._ended)

    @property
    def new(self) -> Setting:
        return self._ends.new

    @property
    def old(self) -> Setting:
        return self._ends.old

    @property
    def lost(self) -> frozenset[str]:
        return self._ends.lost

    @property
    def workers(self) -> frozenset[str]:
        """Who may begin a mini-batch just now."""
        at_work = self._ends.new.workers if self.switched else self._at_work()
        return frozenset(at_work) - self._stopping.keys() - self._ends.lost

    @property
    def listens(self) -> bool:
        """Whether it matters to the change, just now, who pushes."""
        carried = self.switched and bool(self._sweeps) and self._touched > 0
        return carried or bool(self._stopping) or bool(self._ends.lost)

    @property
    def setting(self) -> Setting:
        """What the cluster is like just now; the new setting's policy and the rest come last, or with the switched graph."""
        if self.switched:
            return self._ends.new
        old, new = self._ends.old, self._ends.new
        workers, rows = self._at_work(), self._ends.rows
        shared = self._shares("model", old.servers, old.shares()[1], new.servers, new.shares()[1])
        data: tuple[float, ...] = ()
        if old.data_shares or new.data_shares:
            held = self._shares("data", old.workers, old.shares()[0], new.workers, new.shares()[0])
            total = sum(held.get(w, 0.0) for w in workers)
            data = tuple(held.get(w, 0.0) / total for w in workers)
        return replace(
            old,
            workers=workers,
            servers=tuple(shared),
            model_shares=tuple(shared.values()),
            data_shares=data,
            loads=tuple(rows[w] for w in workers) if old.loads or new.loads else (),
        )

    @property
    def under_way(self) -> UnderWay:
        """What the change takes from training just now."""
        sweeping = [self._plan.steps[i] for i in sorted(self._sweeps)] if self.switched else []
        unmoved = self._left * sum(s.blocks for s in sweeping) / self._costs.model_blocks
        pulled = None
        if unmoved > 0:
            new = self._ends.new
            shares = dict(zip(new.servers, new.shares()[1], strict=True))
            for step in sweeping:
                part = self._left * step.blocks / self._costs.model_blocks
                shares[step.node] = shares.get(step.node, 0.0) + part
                shares[step.to] = max(shares[step.to] - part, 0.0)
            pulled = {n: s for n, s in shares.items() if s > 0}
        moving = {s.node for i, s in enumerate(self._plan.steps) if s.of == "model" and not self._ended[i].triggered}
        return UnderWay(
            active=self.workers,
            out=self._streams.out,
            into=self._streams.into,
            pull_shares=pulled,
            push_factor=1.0 + unmoved,
            redirects=len(moving),
            blocked_until_seconds=self._streams.busy_until_seconds("model"),
        )

    def pushed(self, worker: str) -> None:
        """`worker` has completed a push, now."""
        if not self._sweeps or not self.switched:
            return
        if worker not in self._fresh:
            self._fresh.add(worker)  # the parameters it pushed were pulled before the switch
            return
        self._left *= 1.0 - self._touched
        self._streams.scale(1.0 - self._touched)

    def at_rest(self, nodes: Collection[str]) -> None:
        """These nodes are in no mini-batch, now."""
        for node in [n for n in self._stopping if n in nodes]:
            self._stopping.pop(node).succeed()
            self._stopped.add(node)

    def cancel(self) -> None:
        """Give up what has not been completed."""
        for process in self._processes:
            if process.is_alive:
                process.defused = True
                process.interrupt()
        self._streams.stop()

    # ------------------------------------------------------------------------------------------------------------- steps

    def _step(self, index: int) -> Generator[simpy.Event, Any, None]:
        step = self._plan.steps[index]
        try:
            yield self._env.all_of([self._ended[i] for i in step.after])
            yield from self._carry_out(index, step)
        except simpy.Interrupt:
            return
        self.completed.append(step.name)
        self._ended[index].succeed()

    def _carry_out(self, index: int, step: Step) -> Generator[simpy.Event, Any, None]:
        if step.kind == "stop":
            self._stopping[step.node] = self._env.event()
            yield self._stopping[step.node]
        elif step.kind == "start":
            yield self._env.timeout(step.seconds)
            self._started.append(step.node)
            self._fresh.add(step.node)
        elif step.kind == "move":
            yield from self._move(step)
        elif step.kind == "sweep":
            self._sweeps.add(index)
            yield self._send(step, step.bytes_moved, self._costs.sweep_bytes_per_second, "sweep")
            self._sweeps.discard(index)
        else:
            yield self._env.timeout(step.seconds)
            self.bytes_moved += step.bytes_moved
            self.switched = self.switched or (self._plan.on_demand and step.kind == "graph")

    def _move(self, step: Step) -> Generator[simpy.Event, Any, None]:
        """So many blocks at a time: their ownership is settled, then their bytes follow (Cruise, Section IV-B)."""
        rate = self._costs.model_bytes_per_second if step.of == "model" else self._costs.data_bytes_per_second
        left = step.blocks
        while left > 0:
            wave = min(left, self._costs.blocks_in_flight)
            yield self._env.timeout(self._costs.handshake_seconds)
            yield self._send(step, step.bytes_moved * wave / step.blocks, rate, f"{step.of} {step.node}")
            left -= wave
            for node, change in ((step.node, -wave), (step.to, wave)):
                self._moved[(step.of, node)] = self._moved.get((step.of, node), 0) + change

    def _send(self, step: Step, size_bytes: float, rate: float, group: str) -> simpy.Event:
        self.bytes_moved += size_bytes
        return self._streams.send(step.node, step.to, size_bytes, group=group, group_bytes_per_second=rate)

    # ----------------------------------------------------------------------------------------------------- just now

    def _at_work(self) -> tuple[str, ...]:
        old, new = self._ends.old, self._ends.new
        kept = tuple(w for w in old.workers if w not in self._stopped)
        return kept + tuple(w for w in new.workers if w in self._started)

    def _balance(self, of: str) -> dict[str, int]:
        """Blocks that each node is to receive less those it is to give."""
        total: dict[str, int] = {}
        for step in self._plan.steps:
            if step.kind == "move" and step.of == of:
                total[step.node] = total.get(step.node, 0) - step.blocks
                total[step.to] = total.get(step.to, 0) + step.blocks
        return total

    def _shares(
        self,
        of: str,
        old: tuple[str, ...],
        was: tuple[float, ...],
        new: tuple[str, ...],
        will: tuple[float, ...],
    ) -> dict[str, float]:
        """Each node's share, as far from the old one to the new one as its blocks have come; only those that hold some."""
        before, after = dict(zip(old, was, strict=True)), dict(zip(new, will, strict=True))
        found = {}
        for node in dict.fromkeys((*old, *new)):
            to_move = self._to_move.get((of, node), 0)
            done = self._moved.get((of, node), 0) / to_move if to_move else 0.0
            found[node] = before.get(node, 0.0) + done * (after.get(node, 0.0) - before.get(node, 0.0))
        total = sum(found.values())
        return {n: s / total for n, s in found.items() if s > 1e-12}
