"""The steps of a plan, carried out in simulated time: one SimPy process per step.

They say what the cluster is like at present: which workers may begin a mini-batch, how the model is divided, what bandwidth
is left. They are told which worker has pushed and which nodes are at rest. `Reconfiguration` begins them, and stands between
them and the branch.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Generator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import simpy

from simulators.engine.preparation import Effects
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.plan import Load, ReconfigurationPlan, Step
from simulators.reconfiguration.transfers import Transfers
from tuners.actions import Setting

__all__ = ["PlanEnds", "PlanSteps"]


@dataclass(frozen=True, slots=True)
class PlanEnds:
    """Where a plan begins and where it is to end."""

    old: Setting
    new: Setting
    rows: Mapping[str, tuple[int, ...]]  # samples per device of every worker in either; of one in both, the old ones
    lost: frozenset[str] = frozenset()  # nodes whose loss is the reason


class _Placement:
    """Where the blocks of model and training data are while the steps of a plan move them."""

    def __init__(self, plan: ReconfigurationPlan, ends: PlanEnds, costs: Costs, load: Load) -> None:
        self._ends = ends
        self._holders: tuple[tuple[tuple[str, ...], ...], ...] = ()  # of the blocks of embedding tables, before and after
        if load.has_tables:
            self._holders = tuple(s.holders(costs.model_blocks, load.hottest) for s in (ends.old, ends.new))
        self.replicated = any(len(chain) > 1 for of_setting in self._holders for chain in of_setting)
        # Blocks of embedding tables that have got to their new owner, or were there as copies.
        self._moved_numbers = {i for i, (was, now) in enumerate(zip(*self._holders, strict=True)) if now[0] in was}
        # Blocks that each node has received less those it gave, by (of, node), and what these will be at the end.
        self._moved: Counter[tuple[str, str]] = Counter()
        self._to_move: Counter[tuple[str, str]] = Counter()
        for step in plan.steps:
            if step.kind == "move":
                self._to_move[step.of, step.node] -= step.blocks
                self._to_move[step.of, step.to] += step.blocks

    def move(self, step: Step, done: int, count: int) -> None:
        """`count` more blocks of `step` have changed their owner, now that `done` of them have before."""
        self._moved_numbers |= set(step.numbers[done : done + count])
        self._moved[step.of, step.node] -= count
        self._moved[step.of, step.to] += count

    def data_shares(self, workers: tuple[str, ...]) -> tuple[float, ...]:
        """The shares of training data of the nodes that work; none where both settings divide the data evenly."""
        old, new = self._ends.old, self._ends.new
        if not (old.data_shares or new.data_shares):
            return ()
        held = self._shares("data", old.data_by_worker(), new.data_by_worker())
        total = sum(held.get(w, 0.0) for w in workers)
        return tuple(held.get(w, 0.0) / total for w in workers)

    def servers(self) -> tuple[dict[str, float], tuple[str, ...]]:
        """The share of each server that holds some of the model, and the owner of each block where the model is tables."""
        old, new = self._ends.old, self._ends.new
        if not self._holders:
            return self._shares("model", old.model_by_server(), new.model_by_server()), ()
        owners = tuple(holders[0] for holders in self.holders())
        held = {n: owners.count(n) / len(owners) for n in dict.fromkeys((*old.servers, *new.servers))}
        return {n: share for n, share in held.items() if share > 0}, owners

    def holders(self) -> tuple[tuple[str, ...], ...]:
        """The servers of each block of embedding tables, its owner first; a copy that is new counts from the end."""
        both = enumerate(zip(*self._holders, strict=True))
        owned = ((now[0] if i in self._moved_numbers else was[0], was, now) for i, (was, now) in both)
        return tuple((owner, *(s for s in now if s in was and s != owner)) for owner, was, now in owned)

    def _shares(self, of: str, before: Mapping[str, float], after: Mapping[str, float]) -> dict[str, float]:
        """Each node's share, as far from the old to the new one as its blocks have moved; only of nodes that hold some."""
        found = {}
        for node in dict.fromkeys((*before, *after)):
            to_move = self._to_move[of, node]
            done = self._moved[of, node] / to_move if to_move else 0.0
            found[node] = before.get(node, 0.0) + done * (after.get(node, 0.0) - before.get(node, 0.0))
        total = sum(found.values())
        return {n: s / total for n, s in found.items() if s > 1e-12}


class _OnDemand:
    """The parameters that relocation has not moved yet: pushes carry them to their new owner, or else a sweep does."""

    def __init__(self, model_blocks: int, touched_fraction: float) -> None:
        self._model_blocks, self._touched = model_blocks, touched_fraction
        self._sweeps: dict[int, Step] = {}  # in progress, by their index in the plan
        self._left = 1.0  # of their parameters, the part that no push has carried
        self._fresh: set[str] = set()  # workers whose mini-batch began after the graph was switched

    def begin(self, index: int, sweep: Step) -> None:
        """The sweep in the background begins."""
        self._sweeps[index] = sweep

    def end(self, index: int) -> None:
        """All parameters of that sweep are with their new owner."""
        del self._sweeps[index]

    def started(self, worker: str) -> None:
        """`worker` has begun to work after the switch, so its first push carries parameters, too."""
        self._fresh.add(worker)

    @property
    def move_with_pushes(self) -> bool:
        """Whether the next push can carry parameters."""
        return bool(self._sweeps) and self._touched > 0

    def pushed(self, worker: str) -> float | None:
        """`worker` has completed a push. Returns the part of the unmoved parameters that it leaves; None: it moves none."""
        if not self._sweeps:
            return None
        if worker not in self._fresh:
            # This push belongs to a pull from before the switch, and carries nothing to a new owner; the next one does.
            self._fresh.add(worker)
            return None
        self._left *= 1.0 - self._touched
        return 1.0 - self._touched

    @property
    def unmoved(self) -> float:
        """The part of the whole model that is still with its old owners."""
        return self._left * sum(s.blocks for s in self._sweeps.values()) / self._model_blocks

    def pull_shares(self, model_shares: Mapping[str, float]) -> dict[str, float] | None:
        """The share of each server in a pull, where the new setting has these model shares; None: the same.

        Parameters that have not moved yet are pulled from their old owner.
        """
        if not self.unmoved > 0:
            return None
        shares = dict(model_shares)
        for _, step in sorted(self._sweeps.items()):
            part = self._left * step.blocks / self._model_blocks
            shares[step.node] = shares.get(step.node, 0.0) + part
            shares[step.to] = max(shares[step.to] - part, 0.0)
        return {n: s for n, s in shares.items() if s > 0}


class PlanSteps:
    """Carries out a plan from the moment it is made: one SimPy process per step."""

    def __init__(
        self,
        control: ControlPlane,
        transfers: Transfers,
        plan: ReconfigurationPlan,
        ends: PlanEnds,
        costs: Costs,
        touched_fraction: float,
        load: Load,
    ) -> None:
        self.plan, self.ends = plan, ends
        self._control, self._transfers, self._costs = control, transfers, costs
        env = self._env = control.env
        self._placement = _Placement(plan, ends, costs, load)
        self._on_demand = _OnDemand(costs.model_blocks, touched_fraction)
        self.begun_seconds = float(env.now)
        self.completed: list[str] = []  # names of steps, in order of completion
        self.bytes_moved = 0.0
        self.switched = False  # relocation: the new setting is in force already
        self._stopping: dict[str, simpy.Event] = {}  # workers at their last mini-batch
        self._stopped: set[str] = set()
        self._started: list[str] = []
        self._ended = [env.event() for _ in plan.steps]
        self._processes = [env.process(self._step(i)) for i in range(len(plan.steps))]

    # ---------------------------------------------------------------------------------------------- the cluster at present

    @property
    def finished(self) -> bool:
        return all(e.triggered for e in self._ended)

    @property
    def needed_nodes(self) -> frozenset[str]:
        """Nodes of the new setting, and those of the old one that are not deleted yet."""
        old, new = self.ends.old, self.ends.new
        gone = {n for n in (*old.workers, *old.servers) if f"delete {n}" in self.completed}
        return frozenset((*new.workers, *new.servers, *old.workers, *old.servers)) - gone - self.ends.lost

    @property
    def workers(self) -> frozenset[str]:
        """Workers that may begin a mini-batch."""
        working = self.ends.new.workers if self.switched else self._working()
        return frozenset(working) - self._stopping.keys() - self.ends.lost

    @property
    def follows_pushes(self) -> bool:
        """Whether a push can change anything: parameters move with it, or a worker stops after it."""
        return self._on_demand.move_with_pushes or bool(self._stopping) or bool(self.ends.lost)

    @property
    def setting(self) -> Setting:
        """The setting between old and new that holds at present.

        Roles and shares follow the steps; the policy and the rest change last, or at once when the graph is switched.
        """
        if self.switched:
            return self.ends.new
        old, new = self.ends.old, self.ends.new
        workers, rows = self._working(), self.ends.rows
        shared, owners = self._placement.servers()
        return replace(
            old,
            workers=workers,
            servers=tuple(shared),
            model_shares=() if owners else tuple(shared.values()),
            block_owners=owners,
            data_shares=self._placement.data_shares(workers),
            loads=tuple(rows[w] for w in workers) if old.loads or new.loads else (),
        )

    @property
    def effects(self) -> Effects:
        """What the steps take from training at present."""
        new = self.ends.new
        steps = (s for i, s in enumerate(self.plan.steps) if not self._ended[i].triggered)
        moving = {s.node for s in steps if s.of == "model" and s.kind != "copy"}
        return Effects(
            workers=self.workers,
            out=self._transfers.out,
            into=self._transfers.into,
            pull_shares=self._on_demand.pull_shares(new.model_by_server()),
            push_factor=1.0 + self._on_demand.unmoved,
            redirects=len(moving),
            blocked_until_seconds=self._transfers.busy_until_seconds("model"),
            holders=self._placement.holders() if self._placement.replicated else (),
        )

    def pushed(self, worker: str) -> None:
        """`worker` has completed a push, now."""
        left = self._on_demand.pushed(worker)
        if left is not None:
            self._transfers.scale(left)

    def at_rest(self, nodes: Collection[str]) -> None:
        """Note that these nodes are in no mini-batch, now."""
        for node in [n for n in self._stopping if n in nodes]:
            self._stopping.pop(node).succeed()
            self._stopped.add(node)

    def cancel(self) -> None:
        """Give up what is not completed."""
        for process in self._processes:
            if process.is_alive:
                # SimPy raises what a process did not handle out of `step`; an interrupted step is no error.
                process.defused = True
                process.interrupt()
        self._transfers.stop()

    # ------------------------------------------------------------------------------------------------------- one step each

    def _step(self, index: int) -> Generator[simpy.Event, Any, None]:
        step = self.plan.steps[index]
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
        elif step.kind == "wait":
            yield self._control.joining
        elif step.kind == "start":
            yield self._env.timeout(step.seconds)
            self._started.append(step.node)
            self._on_demand.started(step.node)
        elif step.kind in ("move", "copy"):
            yield from self._move(step)
        elif step.kind == "sweep":
            self._on_demand.begin(index, step)
            yield self._send(step, step.bytes_moved, self._costs.sweep_bytes_per_second, "sweep")
            self._on_demand.end(index)
        else:
            yield self._env.timeout(step.seconds)
            self.bytes_moved += step.bytes_moved
            self.switched = self.switched or (self.plan.on_demand and step.kind == "graph")

    def _move(self, step: Step) -> Generator[simpy.Event, Any, None]:
        """A handshake, then some blocks at a time: their owner changes, and their bytes follow (Cruise, Section IV-B).

        The handshakes of later blocks overlap with the bytes of earlier ones, so a move of many small blocks has one to wait
        for, as any other.
        """
        rate = self._costs.model_bytes_per_second if step.of == "model" else self._costs.data_bytes_per_second
        yield self._env.timeout(self._costs.handshake_seconds)
        done = 0
        while done < step.blocks:
            wave = min(step.blocks - done, self._costs.blocks_in_flight)
            yield self._send(step, step.bytes_moved * wave / step.blocks, rate, f"{step.of} {step.node}")
            if step.kind == "move":
                self._placement.move(step, done, wave)
            done += wave

    def _send(self, step: Step, size_bytes: float, rate: float, group: str) -> simpy.Event:
        self.bytes_moved += size_bytes
        return self._transfers.send(step.node, step.to, size_bytes, group=group, group_bytes_per_second=rate)

    def _working(self) -> tuple[str, ...]:
        """Workers that have not stopped yet, and those that have started."""
        old, new = self.ends.old, self.ends.new
        kept = tuple(w for w in old.workers if w not in self._stopped)
        return kept + tuple(w for w in new.workers if w in self._started)
