"""One branch of training as the coordinator sees it: who is busy, how far everybody is, and what the policy says.

The arithmetic is that of `simulators.engine.loop` (`_settle`) and `simulators.engine.edits` (`_launch`), in real time.
Nothing is sent from here, and what is done depends on nothing but the arguments: a journal of these brings a line back.
"""

from __future__ import annotations

import math
import pickle
from bisect import bisect_right
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import cloudpickle
import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from harness.live.protocol.log import Commit
from simulators.engine.inputs import Shards
from simulators.engine.loop import Records
from tuners.actions import Decision, Push, Setting, Status, SyncPolicy, Target

__all__ = ["Cycle", "Facts", "Line", "LiveJob", "Shards"]

_VERSIONS = 512  # remembered at least; a gradient that is staler counts as this stale


@dataclass(frozen=True, kw_only=True)
class LiveJob:
    """What does not change while a job runs."""

    nodes: tuple[str, ...]
    size: int  # parameters
    blocks: int = 64
    optimizer: str = "sgd"
    aggregation: str = "each"
    target: Target
    evaluate_clocks: int  # validate after so many pushes; 0: never
    shards: Callable[[Setting], Shards]
    snapshot_commits: int = 0  # take a snapshot after so many; 0: max(20, 4 per worker)
    retry_seconds: float = 2.0  # ask again for what has not come by then, and after twice as long again


class Cycle(NamedTuple):
    """A worker's mini-batch under way."""

    number: int
    clock: int  # mini-batches that the worker had begun before
    released_seconds: float
    wait_seconds: float  # before that
    after: int  # it begins with what the log's entries up to this one have made of the model


class Facts(NamedTuple):
    """What is known of a push when it is completed."""

    worker: int
    seconds: float
    loss: float
    pull_seconds: float
    compute_seconds: float
    pulled: int  # entry of the log, the last that the parameters pulled contain
    loss_before: float = 0.0
    loss_after: float = 0.0


@cache
def _compiled(decide: Callable[[Any, Push], tuple[Any, Decision]]) -> Callable[..., tuple[Any, jax.Array]]:
    """`decide` with few arguments and results, for most of its time goes into handing these over.

    Takes the state, (worker, staleness, clocks) int32 [2 + k], (waiting, active) bool [2, k] and (seconds, loss, loss
    before, loss after) float64 [4]; returns the next state and (accept, step, release) bool [2 + k].
    """

    def packed(state: Any, whole: jax.Array, flags: jax.Array, real: jax.Array) -> tuple[Any, jax.Array]:
        push = Push(whole[0], whole[2:], flags[0], flags[1], real[0], whole[1], *real[1:])
        state, decision = decide(state, push)
        accept_and_step = jnp.stack([jnp.asarray(decision.accept), jnp.asarray(decision.step)])
        return state, jnp.concatenate([accept_and_step, decision.release])

    return jax.jit(packed)


@lru_cache(maxsize=64)
def _pickled(policy: SyncPolicy) -> bytes:
    """Policies are closures, which takes long to write down."""
    dumped: bytes = cloudpickle.dumps(policy)
    return dumped


class Line:
    """A branch. `busy` are its mini-batches under way, by worker; `due` who was released and could not begin yet."""

    def __init__(
        self, number: int, setting: Setting, policy: SyncPolicy, shards: Shards, *, testing: bool, groups: bool
    ) -> None:
        """`groups`: gradients wait until the policy closes their group."""
        nodes = len(shards.samples)
        self.number, self.testing, self.groups = number, testing, groups
        self.setting, self.policy, self.shards = setting, policy, shards
        self.status: Status = "running"
        self.state: Any = None  # the policy's
        self.active = np.zeros(nodes, bool)
        self.clocks = np.zeros(nodes, np.int32)  # pushes since the policy was installed
        self.drawn = np.zeros(nodes, np.int32)  # mini-batches begun
        self.since_seconds = np.zeros(nodes)  # that each worker waits
        self.pushes = self.samples = self.version = self.grouped = self.steps = 0
        self.inherited = 0  # pushes before the fork
        self.busy: dict[int, Cycle] = {}
        self.due: set[int] = set()
        self.halted = True
        self._paused_seconds: float | None = None
        self.rows: list[tuple[float, ...]] = []  # that the driver may not have taken yet
        self.told = 0  # rows that it has
        self._staleness: dict[int, int] = {}  # of pushes that are committed, and on which the policy is still to decide
        self._versions: list[tuple[int, int]] = [(-1, 0)]  # (entry of the log, version since then)

    def forked(self, number: int, *, testing: bool) -> Line:
        """Another branch that goes on from here."""
        made = Line(number, self.setting, self.policy, self.shards, testing=testing, groups=self.groups)
        for name, value in vars(self).items():
            if name not in ("number", "testing", "rows", "told"):
                setattr(made, name, value.copy() if isinstance(value, np.ndarray | dict | set | list) else value)
        made.inherited = self.pushes
        return made

    def __getstate__(self) -> dict[str, Any]:
        return {**vars(self), "policy": _pickled(self.policy)}

    def __setstate__(self, kept: dict[str, Any]) -> None:
        vars(self).update(kept, policy=pickle.loads(kept["policy"]))  # noqa: S301 - from the job's own journal

    # --------------------------------------------------------------------------------------------------------- releases

    def install(self, policy: SyncPolicy, active: NDArray[np.bool_], seconds: float) -> list[int]:
        """Put a policy in force anew, its clocks at zero; who is released: those that wait, or have come just now."""
        since_seconds = seconds if self._paused_seconds is None else self._paused_seconds  # `resume` adds all of a pause
        self.since_seconds[active & ~self.active] = since_seconds
        self.policy, self.active = policy, active
        self.state = jax.tree.map(np.asarray, policy.init(active))
        self.clocks[:] = 0
        return self._waiting()

    def halt(self, seconds: float) -> None:
        """Everybody stops; mini-batches under way are given up."""
        for worker in [*self.busy, *self.due]:
            self.give_up(worker, seconds)
        self.halted, self.active = True, np.zeros_like(self.active)

    def pause(self, seconds: float) -> None:
        """Nobody trains this branch from now on."""
        self._paused_seconds = seconds

    def resume(self, seconds: float) -> None:
        """As if no time had passed."""
        if self._paused_seconds is not None:
            self.since_seconds += seconds - self._paused_seconds
        self._paused_seconds = None

    def start_clock(self, seconds: float) -> None:
        """Time is counted from elsewhere now, and so is the log: nobody has waited, and everybody pulls what there is."""
        self._paused_seconds = seconds
        self.since_seconds[:] = seconds
        self._versions = [(-1, self.version)]

    def give_up(self, worker: int, seconds: float) -> None:
        """A worker is in no mini-batch any more."""
        self.busy.pop(worker, None)
        self.due.discard(worker)
        self._staleness.pop(worker, None)
        self.since_seconds[worker] = seconds

    def begin(self, worker: int, number: int, seconds: float, after: int) -> Cycle:
        """A worker begins a mini-batch: its next, or again the one that it was at when the branch came to rest."""
        again = self.busy.get(worker)
        if again is None:
            self.drawn[worker] += 1
        self.due.discard(worker)
        wait = seconds - self.since_seconds[worker] if again is None else again.wait_seconds
        self.busy[worker] = Cycle(number, int(self.drawn[worker]) - 1, seconds, float(wait), after)
        self._staleness.pop(worker, None)
        return self.busy[worker]

    def _waiting(self) -> list[int]:
        return (
            [] if self.halted else [int(w) for w in np.flatnonzero(self.active) if w not in self.busy and w not in self.due]
        )

    # ----------------------------------------------------------------------------------------------------------- pushes

    def settle(self, facts: Facts, worker: str, index: int) -> tuple[Commit, list[int]]:
        """A push is completed: what to write into the log at `index`, and who is released."""
        staleness, cycle = self._staleness_of(facts.pulled), self.busy[facts.worker]
        decision, released = self._decide(facts, staleness)
        return self._commit(worker, facts.worker, cycle, bool(decision.accept), bool(decision.step), index), released

    def advance(self, facts: Facts, worker: str, index: int) -> Commit:
        """A push of a policy that probes counts before the policy decides, which `settle_probed` lets it do."""
        self._staleness[facts.worker] = self._staleness_of(facts.pulled)
        return self._commit(worker, facts.worker, self.busy[facts.worker], True, True, index)

    def settle_probed(self, facts: Facts) -> list[int]:
        """The losses around a push that `advance` was told of have come: who is released."""
        return self._decide(facts, self._staleness.pop(facts.worker))[1]

    def _commit(self, name: str, worker: int, cycle: Cycle, accept: bool, step: bool, index: int) -> Commit:
        accept = accept and not self.testing
        self.grouped += accept
        take = (step or not self.groups) and self.grouped > 0
        taken = self.grouped
        if take:
            self.version, self.steps, self.grouped = self.version + taken, self.steps + 1, 0
            self._versions.append((index, self.version))
            if len(self._versions) > 2 * _VERSIONS:
                del self._versions[:_VERSIONS]
        return Commit(
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

    def _staleness_of(self, index: int) -> int:
        at = bisect_right(self._versions, (index, 2**62)) - 1
        return self.version - self._versions[max(at, 0)][1]

    def _weight(self, worker: int) -> float:
        """As in `simulators.engine.learning`: all samples count the same in a mean."""
        workers = self.active.copy()
        workers[worker] = True
        samples = self.shards.samples
        return float(np.float32(samples[worker] * workers.sum() / samples[workers].sum()))

    def _decide(self, facts: Facts, staleness: int) -> tuple[Decision, list[int]]:
        worker, cycle = facts.worker, self.busy[facts.worker]
        self.give_up(worker, facts.seconds)
        self.clocks[worker] += 1
        whole = np.empty(2 + len(self.clocks), np.int32)
        whole[0], whole[1], whole[2:] = worker, staleness, self.clocks
        flags = np.array([self.active, self.active])
        flags[0, [*self.busy, *self.due]] = False
        real = np.array([facts.seconds, facts.loss, facts.loss_before, facts.loss_after])
        self.state, packed = _compiled(self.policy.decide)(self.state, whole, flags, real)
        self._count(facts, cycle, staleness)
        accept, step, *release = np.asarray(packed).tolist()
        released = [w for w, yes in enumerate(release) if yes and self.active[w]]
        return Decision(release, accept, step), released if self.status == "running" else []

    def _count(self, facts: Facts, cycle: Cycle, staleness: int) -> None:
        self.pushes += 1
        self.samples += int(self.shards.samples[facts.worker])
        spent = facts.seconds - cycle.released_seconds - facts.pull_seconds - facts.compute_seconds
        row = Records(
            seconds=facts.seconds,
            worker=facts.worker,
            clock=cycle.clock,
            compute_seconds=facts.compute_seconds,
            pull_seconds=facts.pull_seconds,
            push_seconds=max(spent, 0.0),
            wait_seconds=cycle.wait_seconds,
            staleness=staleness,
            loss=facts.loss,
            valid_loss=np.nan,
            valid_accuracy=np.nan,
        )
        self.rows.append(tuple(row))
        if not math.isfinite(facts.loss):
            self.status = "diverged"
