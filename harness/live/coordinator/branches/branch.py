"""The coordinator's state of one branch: its workers, their clocks, the policy's state and the measurements of its pushes.

The arithmetic is that of `simulators.engine.loop`, in real time.
Nothing here sends messages or reads a clock: the state depends on the arguments alone, so that the next
coordinator gets the same state when it replays the journal.
"""

from __future__ import annotations

import math
import pickle
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property, lru_cache
from typing import Any, NamedTuple

import cloudpickle
import jax
import numpy as np
from numpy.typing import NDArray

from harness.live.coordinator.branches.decisions import Decided, Decider
from harness.live.protocol.blocks import TableShape
from harness.live.protocol.log import CommitEntry
from harness.live.protocol.messages import worker as worker_name
from simulators.engine.preparation import Shards
from tuners.actions import Push, Rejected, Setting, Status, SyncPolicy, Target
from tuners.playing.system import check_no_table, check_no_timers

__all__ = ["CoordinatorBranch", "Cycle", "LiveJob", "ModelVersions", "PushFacts", "Shards"]

_VERSIONS = 512  # remembered at least: the staleness of an older gradient is cut off there


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """The constants of a job."""

    nodes: tuple[str, ...]
    size: int  # number of parameters
    blocks: int = 64
    tables: TableShape | None = None  # the embedding tables, of whose rows workers pull and push those that they touch
    optimizer: str = "sgd"
    aggregation: str = "each"
    target: Target
    evaluate_clocks: int  # evaluate the running branch every so many pushes; 0: never
    shards: Callable[[Setting], Shards]
    snapshot_commits: int = 0  # take a snapshot every so many; 0: max(20, 4 per worker)
    snapshot_seconds: float = 0.0  # and so long after the one before, at the earliest
    retry_seconds: float = 2.0  # retransmit after this time; the wait doubles each time

    def check(self, policy: SyncPolicy) -> None:
        """Raise Rejected for a policy that probes, where gradients are grouped, and for one that sets timers or needs a
        table."""
        check_no_timers(policy)
        check_no_table(policy)
        if policy.probes and self.aggregation != "each":
            raise Rejected(
                f"Cannot install {policy.name}, which asks for losses before and after every push: here the servers apply "
                f'the {self.aggregation} of a group; use aggregation = "each".'
            )

    @cached_property
    def workers(self) -> tuple[str, ...]:
        """The name of each node's worker process."""
        return tuple(map(worker_name, self.nodes))

    @cached_property
    def worker_numbers(self) -> dict[str, int]:
        """The number of each worker, by its name."""
        return {name: number for number, name in enumerate(self.workers)}


class Cycle(NamedTuple):
    """The mini-batch that a worker is at."""

    number: int
    clock: int  # mini-batches that the worker began before this one
    released_seconds: float
    wait_seconds: float  # between its previous push and its release
    after: int  # it pulls the model as of this entry of the log, or later


class PushFacts(NamedTuple):
    """The measurements of a push that is complete."""

    worker: int
    seconds: float
    loss: float
    pull_seconds: float
    compute_seconds: float
    pulled: int  # the pulled parameters contain the log up to this entry
    loss_before: float = 0.0
    loss_after: float = 0.0


class ModelVersions:
    """How many gradients a branch's model has, as of each entry of the log."""

    def __init__(self, gradients: int = 0) -> None:
        self.latest = gradients
        self._from, self._gradients = [-1], [gradients]  # entries of the log, and how many gradients from each on

    def copy(self) -> ModelVersions:
        made = ModelVersions(self.latest)
        made._from, made._gradients = self._from.copy(), self._gradients.copy()
        return made

    def add(self, gradients: int, index: int) -> None:
        """Note that entry `index` applies so many gradients."""
        self.latest += gradients
        self._from.append(index)
        self._gradients.append(self.latest)
        # Cut off in large pieces, so that the cost per push is constant.
        if len(self._from) > 2 * _VERSIONS:
            del self._from[:_VERSIONS], self._gradients[:_VERSIONS]

    def applied_since(self, index: int) -> int:
        """Gradients that were applied after entry `index`."""
        at = bisect_right(self._from, index) - 1
        return self.latest - self._gradients[at if at > 0 else 0]


@lru_cache(maxsize=64)
def _pickled(policy: SyncPolicy) -> bytes:
    """A policy as bytes. Cached, because it is a closure, which takes cloudpickle long."""
    dumped: bytes = cloudpickle.dumps(policy)
    return dumped


_COPIED = (np.ndarray, dict, set, list, ModelVersions)


class CoordinatorBranch:
    """One branch. `busy`: mini-batches in progress, by worker. `due`: workers that are released and cannot begin yet."""

    def __init__(
        self, number: int, setting: Setting, policy: SyncPolicy, shards: Shards, *, testing: bool, groups: bool
    ) -> None:
        """`testing`: pushes are measured, not applied. `groups`: gradients wait until the policy closes their group."""
        nodes = len(shards.samples)
        self.number, self.testing, self.groups = number, testing, groups
        self.setting, self.policy, self.shards = setting, policy, shards
        self.status: Status = "running"
        self.state: Any = None  # of the policy
        self._decider: Decider | None = None  # by that policy, for states of that form
        self.active = np.zeros(nodes, bool)
        self.clocks = np.zeros(nodes, np.int32)  # pushes since the policy was installed
        self.begun = np.zeros(nodes, np.int32)  # mini-batches, by worker
        self.waiting_since_seconds = np.zeros(nodes)
        self.pushes = self.samples = self.grouped = self.steps = 0
        self.versions = ModelVersions()
        self.inherited = 0  # pushes before the fork
        self.busy: dict[int, Cycle] = {}
        self.due: set[int] = set()
        self.halted = True
        self._paused_seconds: float | None = None
        self.rows: list[tuple[float, ...]] = []  # as `Records`, of pushes that the driver has not confirmed yet
        self.rows_taken = 0  # rows that it has confirmed
        self.staleness: dict[int, int] = {}  # by worker, of committed pushes that the policy has not decided on

    def forked(self, number: int, *, testing: bool) -> CoordinatorBranch:
        """A new branch that continues from this one."""
        made = CoordinatorBranch(number, self.setting, self.policy, self.shards, testing=testing, groups=self.groups)
        for name, value in vars(self).items():
            if name not in ("number", "testing", "rows", "rows_taken"):
                setattr(made, name, value.copy() if isinstance(value, _COPIED) else value)
        made.inherited = self.pushes
        return made

    @property
    def undecided(self) -> frozenset[int]:
        """Workers whose push is committed, while the policy waits for the loss after it."""
        return frozenset(self.staleness)

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "policy": _pickled(self.policy), "_decider": None}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept, policy=pickle.loads(kept["policy"]))  # noqa: S301 - from the journal, which has checked it

    # --------------------------------------------------------------------------------------------------------- releases

    def install(self, policy: SyncPolicy, active: NDArray[np.bool_], seconds: float) -> list[int]:
        """Start a policy with its clocks at zero. Returns the workers that it releases: those that wait or are new."""
        # `resume` adds the whole pause to every worker, so a worker that joins during a pause must wait since its start.
        since_seconds = seconds if self._paused_seconds is None else self._paused_seconds
        self.waiting_since_seconds[active & ~self.active] = since_seconds
        self.policy, self.active = policy, active
        self.state, self._decider = jax.tree.map(np.asarray, policy.init(active)), None
        self.clocks[:] = 0
        return self.waiting_workers()

    def halt(self, seconds: float) -> None:
        """Stop all workers and drop their mini-batches."""
        for worker in [*self.busy, *self.due]:
            self.give_up(worker, seconds)
        self.halted, self.active = True, np.zeros_like(self.active)

    def pause(self, seconds: float) -> None:
        """The branch stops training now."""
        self._paused_seconds = seconds

    def resume(self, seconds: float) -> None:
        """The branch trains again: shift the start of all waits by the length of the pause."""
        if self._paused_seconds is not None:
            self.waiting_since_seconds += seconds - self._paused_seconds
        self._paused_seconds = None

    def restart_clock(self, seconds: float) -> None:
        """Forget times and log indices of another coordinator: no worker has waited, and all versions before are one."""
        self._paused_seconds = seconds
        self.waiting_since_seconds[:] = seconds
        self.versions = ModelVersions(self.versions.latest)

    def give_up(self, worker: int, seconds: float) -> None:
        """Drop a worker's mini-batch; from now on it waits."""
        self.busy.pop(worker, None)
        self.due.discard(worker)
        self.staleness.pop(worker, None)
        self.waiting_since_seconds[worker] = seconds

    def begin(self, worker: int, number: int, seconds: float, after: int) -> Cycle:
        """A worker begins its next mini-batch, or repeats the one that it was at when the branch was paused."""
        again = self.busy.get(worker)
        begun: int = self.begun.item(worker)
        if again is None:
            begun += 1
            self.begun[worker] = begun
        self.due.discard(worker)
        wait = seconds - self.waiting_since_seconds.item(worker) if again is None else again.wait_seconds
        self.busy[worker] = Cycle(number, begun - 1, seconds, wait, after)
        self.staleness.pop(worker, None)
        return self.busy[worker]

    def waiting_workers(self) -> list[int]:
        """Workers that the policy holds back."""
        return (
            [] if self.halted else [int(w) for w in np.flatnonzero(self.active) if w not in self.busy and w not in self.due]
        )

    # ----------------------------------------------------------------------------------------------------------- pushes

    def settle(self, facts: PushFacts, worker: str, index: int) -> tuple[CommitEntry, list[int]]:
        """A push is complete. Returns the log's entry at `index`, and the workers that the policy releases."""
        staleness, cycle = self.versions.applied_since(facts.pulled), self.busy[facts.worker]
        decision, released = self._decide(facts, staleness)
        return self._commit(worker, facts.worker, cycle, decision.accept, decision.step, index), released

    def advance(self, facts: PushFacts, worker: str, index: int) -> CommitEntry:
        """A push is complete under a policy that probes: it is applied now, and `settle_probed` asks the policy later."""
        self.staleness[facts.worker] = self.versions.applied_since(facts.pulled)
        return self._commit(worker, facts.worker, self.busy[facts.worker], True, True, index)

    def settle_probed(self, facts: PushFacts) -> list[int]:
        """The losses before and after a push of `advance` are known. Returns the workers that the policy releases."""
        return self._decide(facts, self.staleness.pop(facts.worker))[1]

    def _commit(self, name: str, worker: int, cycle: Cycle, accept: bool, step: bool, index: int) -> CommitEntry:
        accept = accept and not self.testing
        self.grouped += accept
        take = (step or not self.groups) and self.grouped > 0
        taken = self.grouped
        if take:
            self.versions.add(taken, index)
            self.steps, self.grouped = self.steps + 1, 0
        return CommitEntry(
            branch=self.number,
            worker=name,
            cycle=cycle.number,
            accept=accept,
            take=take,
            grouped=taken,
            weight=self._weight(worker) if self.groups else 1.0,
            steps=self.steps,
            learning_rate=self.setting.learning_rate,
            momentum=self.setting.momentum,
        )

    def _weight(self, worker: int) -> float:
        """The weight of a gradient in a mean over samples, as in `simulators.engine.learning`."""
        workers = self.active.copy()
        workers[worker] = True
        samples = self.shards.samples
        return float(np.float32(samples[worker] * workers.sum() / samples[workers].sum()))

    def _decide(self, facts: PushFacts, staleness: int) -> tuple[Decided, list[int]]:
        worker, cycle = facts.worker, self.busy[facts.worker]
        self.give_up(worker, facts.seconds)  # first: the policy sees this worker among those that wait
        clocks: list[int] = self.clocks.tolist()
        clocks[worker] += 1
        self.clocks[worker] = clocks[worker]
        active: list[bool] = self.active.tolist()
        waiting = active.copy()
        for other in self.busy:
            waiting[other] = False
        for other in self.due:
            waiting[other] = False
        push = Push(
            worker=worker,
            clocks=clocks,
            waiting=waiting,
            active=active,
            seconds=facts.seconds,
            staleness=staleness,
            loss=facts.loss,
            loss_before=facts.loss_before,
            loss_after=facts.loss_after,
        )
        if self._decider is None:
            self._decider = Decider(self.policy.decide, self.state, len(active), groups=self.groups)
        decision = self._decider(self.state, push)
        self.state = decision.state
        self._count(facts, cycle, staleness)
        if self.status != "running":
            return decision, []
        return decision, [node for node, goes in enumerate(decision.release) if goes and active[node]]

    def _count(self, facts: PushFacts, cycle: Cycle, staleness: int) -> None:
        self.pushes += 1
        self.samples += self.shards.samples.item(facts.worker)
        spent = facts.seconds - cycle.released_seconds - facts.pull_seconds - facts.compute_seconds
        self.rows.append(
            (
                facts.seconds,
                facts.worker,
                cycle.clock,
                facts.compute_seconds,
                facts.pull_seconds,
                # The remainder of the cycle. Clocks of two processes can make it slightly negative.
                spent if spent > 0.0 else 0.0,
                cycle.wait_seconds,
                staleness,
                facts.loss,
                math.nan,
                math.nan,
            )
        )
        if not math.isfinite(facts.loss):
            self.status = "diverged"
