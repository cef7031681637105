"""A reconfiguration of a live job: what is done by each method, and what it cost.

The order of steps is that of the simulated plans (`simulators.reconfiguration.plan`); training data is at every worker
already.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from contextlib import suppress

from harness.live.processes.runtime import EVALUATOR, Procedure, Runtime, node_of, peers
from simulators.reconfiguration.plan import block_counts, moves
from tuners.actions import Cost, Method, Setting, SyncPolicy

__all__ = ["Change"]


class Change:
    """One under way. `procedure` carries it out."""

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
        """`policy` is None where the one in force stays, `kept` are processes that others need; `block_bytes` counts
        parameters and slots of all branches."""
        self.branch, self.old, self.new, self.policy, self.waited = branch, old, new, policy, waited
        self.method = method
        self.begun_seconds = self._last_push_seconds = runtime.now
        self.ended_seconds = self.begun_seconds
        self._stall_seconds = 0.0  # the longest spell so far
        self.steps: list[str] = []
        self.bytes_moved = 0.0
        self.done = False
        self._runtime, self._kept = runtime, kept
        self._block_bytes, self._blocks, self._in_flight = block_bytes, blocks, blocks_in_flight
        self.procedure = {"checkpoint": self._checkpoint, "migrate": self._migrate, "relocate": self._relocate}[method]()

    def pushed(self, seconds: Iterable[float]) -> None:
        """Pushes were completed at these moments."""
        for moment in map(float, seconds):
            if moment > self._last_push_seconds:
                self._stall_seconds = max(self._stall_seconds, moment - self._last_push_seconds)
                self._last_push_seconds = moment

    def cost(self) -> Cost:
        """What it has cost: nobody trained in the longest spell without a completed push."""
        seconds = max(self.ended_seconds - self.begun_seconds, 0.0)
        stall = min(max(self._stall_seconds, self.ended_seconds - self._last_push_seconds), seconds)
        return Cost(
            seconds=seconds,
            stall_seconds=stall,
            slow_seconds=0.0 if self.method == "checkpoint" else seconds - stall,
            bytes_moved=self.bytes_moved,
            steps=tuple(self.steps),
            done=self.done,
        )

    # ----------------------------------------------------------------------------------------------------------- methods

    def _migrate(self) -> Procedure:
        yield from self._add()
        yield from self._move(on_demand=False)
        self._put()
        yield from self._delete()

    def _relocate(self) -> Procedure:
        """The new setting is in force at once; blocks follow when they are asked for, or in the background."""
        yield from self._add()
        self._put()
        yield from self._move(on_demand=True)
        yield from self._delete()

    def _checkpoint(self) -> Procedure:
        """Everybody stops; processes end, and others start from what was saved."""
        runtime = self._runtime
        runtime.call("halt", self.branch)
        saved = False
        while not saved:
            index = runtime.call("snapshot", save=True)
            yield from runtime.durable(index)
            with suppress(KeyError):  # its coordinator has died, and the next one does not have it
                saved = bool(runtime.call("checkpoint", index))
        self.steps.append("checkpoint")
        old = [n for n in runtime.seen.members if n != EVALUATOR]
        runtime.call("lose", old)
        runtime.processes.stop(old)
        yield  # those that were lost are members no more
        new = sorted({*peers(self.new), *self._kept})
        runtime.start(new)
        yield from runtime.joined(new)
        self.steps.append("restart")
        yield from runtime.recover(self.new)
        self.steps.append("restore")
        self.bytes_moved += self._blocks * self._block_bytes
        runtime.call("put", self.branch, self.new, self.policy)
        self.done = True
        runtime.call("launch", self.branch)

    # ------------------------------------------------------------------------------------------------------------- parts

    def _add(self) -> Procedure:
        started = self._runtime.start(peers(self.new))
        yield from self._runtime.joined(peers(self.new))
        served = {*self.old.workers, *self.old.servers}
        self.steps += [f"{'switch' if n in served else 'add'} {n}" for n in dict.fromkeys(map(node_of, started))]

    def _move(self, *, on_demand: bool) -> Procedure:
        before, after = (dict(zip(*where, strict=True)) for where in (self._runtime.placed, self._goal()))
        if before != after:
            counts = [block_counts(tuple(w), tuple(w.values()), self._blocks) for w in (before, after)]
            yield from self._runtime.place(self.new, on_demand=on_demand, at_once=self._in_flight)
            yield from self._runtime.settled()
            for source, target, count in moves(*counts):
                kind = "sweep" if on_demand else "move"
                self.steps.append(f"{kind} {count} model block{'s' * (count != 1)} {source} -> {target}")
                self.bytes_moved += count * self._block_bytes

    def _goal(self) -> tuple[tuple[str, ...], tuple[float, ...]]:
        return self.new.servers, self.new.shares()[1]

    def _put(self) -> None:
        self._runtime.call("put", self.branch, self.new, self.policy)
        old, new = self.old.workers, self.new.workers
        self.steps += [f"stop {w}" for w in old if w not in new] + [f"start {w}" for w in new if w not in old]
        self.done = True

    def _delete(self) -> Procedure:
        gone = {*self.old.workers, *self.old.servers} - {*self.new.workers, *self.new.servers}
        yield from self._runtime.dismiss({*peers(self.new), *self._kept})
        self.steps += [f"delete {n}" for n in sorted(gone)]
