"""A reconfiguration of a live job: the steps of each method, and the measured cost.

The order of the steps is that of the simulated plans (`simulators.reconfiguration.reconfiguration`). Training data needs no
step: every worker has all of it.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import suppress

from harness.live.driver.view.cost_meter import CostMeter
from harness.live.processes.runtime import BlockPlaces, Procedure, Runtime
from harness.live.protocol.names import EVALUATOR, node_of, peers
from simulators.reconfiguration.shares import block_counts, moves, moves_of_blocks
from tuners.actions import Cost, Method, Setting, SyncPolicy

__all__ = ["LiveReconfiguration"]


class LiveReconfiguration:
    """A reconfiguration in progress; `procedure` carries it out."""

    def __init__(
        self,
        runtime: Runtime,
        branch: int,
        old: Setting,
        new: Setting,
        policy: SyncPolicy | None,
        method: Method,
        *,
        kept: Collection[str],
        block_bytes: float,
        blocks: int,
        blocks_in_flight: int,
        waited: bool,
    ) -> None:
        """`policy` is None if the present one stays. `kept` are processes that other branches need. `block_bytes` are
        those of parameters and slots of all branches. `waited` says that the tuner waits for the end."""
        self.branch, self.old, self.new, self.policy, self.waited = branch, old, new, policy, waited
        self.method = method
        self.meter = CostMeter(runtime.now)
        self.ended_seconds = self.meter.begun_seconds
        self._runtime, self._kept = runtime, kept
        self._block_bytes, self._blocks, self._in_flight = block_bytes, blocks, blocks_in_flight
        self.procedure = {"checkpoint": self._checkpoint, "migrate": self._migrate, "relocate": self._relocate}[method]()

    def cost(self) -> Cost:
        """The cost of the reconfiguration, up to its end."""
        return self.meter.cost(self.ended_seconds, quiescent=self.method == "checkpoint")

    # ----------------------------------------------------------------------------------------------------------- methods

    def _migrate(self) -> Procedure:
        """Blocks move while training continues under the old setting; then the new one takes effect."""
        yield from self._start_processes()
        yield from self._move_blocks(on_demand=False)
        self._put()
        yield from self._end_processes()

    def _relocate(self) -> Procedure:
        """The new setting takes effect at once; blocks follow when they are requested, or in the background."""
        yield from self._start_processes()
        self._put()
        yield from self._move_blocks(on_demand=True)
        yield from self._end_processes()

    def _checkpoint(self) -> Procedure:
        """All workers stop and all processes end; new ones start from a snapshot."""
        runtime, coordinator = self._runtime, self._runtime.coordinator
        coordinator.halt(self.branch)
        saved = False
        while not saved:
            index = coordinator.snapshot(save=True)
            yield from runtime.wait_durable(index)
            with suppress(KeyError):  # the coordinator has died, and its successor does not have the snapshot
                saved = bool(coordinator.checkpoint(index))
        self.meter.steps.append("checkpoint")
        old = [n for n in runtime.latest.members if n != EVALUATOR]
        coordinator.lose(old)
        runtime.processes.stop(old)
        yield  # the next report no longer has the stopped processes among the members
        new = sorted({*peers(self.new), *self._kept})
        runtime.start(new)
        yield from runtime.wait_joined(new)
        self.meter.steps.append("restart")
        yield from runtime.recover(self.new)
        self.meter.steps.append("restore")
        self.meter.bytes_moved += self._blocks * self._block_bytes
        coordinator.put(self.branch, self.new, self.policy)
        # From here on the new setting is in force, even if a loss ends the reconfiguration.
        self.meter.done = True
        coordinator.launch(self.branch)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _start_processes(self) -> Procedure:
        started = self._runtime.start(peers(self.new))
        yield from self._runtime.wait_joined(peers(self.new))
        served = {*self.old.workers, *self.old.servers}
        self.meter.steps += [f"{'switch' if n in served else 'add'} {n}" for n in dict.fromkeys(map(node_of, started))]

    def _move_blocks(self, *, on_demand: bool) -> Procedure:
        before, after = self._runtime.placed, self._runtime.placement(self.new)
        if not before.same_as(after):
            yield from self._runtime.place(self.new, on_demand=on_demand, at_once=self._in_flight)
            yield from self._runtime.wait_placed()
            for source, target, count in self._moves(before, after):
                kind = "sweep" if on_demand else "move"
                self.meter.steps.append(f"{kind} {count} model block{'s' * (count != 1)} {source} -> {target}")
                self.meter.bytes_moved += count * self._block_bytes

    def _moves(self, before: BlockPlaces, after: BlockPlaces) -> list[tuple[str, str, int]]:
        """(source, target, blocks), without the block of dense parameters beside embedding tables."""
        if after.owners:
            return [(s, t, len(blocks)) for s, t, blocks in moves_of_blocks(before.owners, after.owners)]
        counts = [block_counts(where.servers, where.shares, self._blocks) for where in (before, after)]
        return moves(*counts)

    def _put(self) -> None:
        self._runtime.coordinator.put(self.branch, self.new, self.policy)
        old, new = self.old.workers, self.new.workers
        self.meter.steps += [f"stop {w}" for w in old if w not in new] + [f"start {w}" for w in new if w not in old]
        self.meter.done = True

    def _end_processes(self) -> Procedure:
        gone = {*self.old.workers, *self.old.servers} - {*self.new.workers, *self.new.servers}
        yield from self._runtime.end_all_but({*peers(self.new), *self._kept})
        self.meter.steps += [f"delete {n}" for n in sorted(gone)]
