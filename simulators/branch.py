"""One line of training, under the setting and the policy that rule it; forks make more of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simulators.cluster.cluster import Cluster
from simulators.cluster.compute_factors import NO_FACTORS, Factors
from simulators.cluster.conditions import Conditions
from simulators.engine import edits, learning, loop, timing
from simulators.engine.inputs import (
    NOTHING_UNDER_WAY,
    EngineInputs,
    UnderWay,
    build,
    each_nic_counts,
    loads,
    overlapping,
)
from simulators.engine.learning import TrainingData
from simulators.engine.timing import WAIT
from simulators.workloads.catalogue import Workload
from tuners.actions import Cost, Evaluation, Job, Rejected, Setting, Status, SyncPolicy

__all__ = ["NO_RECORDS", "Branch", "JobContext", "first_branch"]

NO_RECORDS = np.zeros((0, len(loop.Records._fields)))
_evaluate = jax.jit(learning.evaluate, static_argnames=("model",))


@dataclass(frozen=True, slots=True)
class JobContext:
    """What all branches of a job share."""

    cluster: Cluster
    workload: Workload
    conditions: Conditions
    job: Job
    data: TrainingData
    evaluate_clocks: int
    seed: int
    factors: Factors = NO_FACTORS

    def program(self, setting: Setting, policy: SyncPolicy) -> loop.Program:
        """What the engine must be compiled for. Raises Rejected for what it cannot run."""
        fifo, single = self.cluster.discipline == "fifo", each_nic_counts(setting, self.conditions)
        if fifo and single:
            where = "a node is worker and server" if overlapping(setting) else "a node has a token bucket"
            raise Rejected(f"Cannot queue transfers first come first served where {where}: use maxmin.")
        largest = max(sum(row) for row in loads(self.cluster.nodes, setting).values())
        return loop.Program(
            model=learning.learning_program(self.workload, self.job.space, largest),
            decide=policy.decide,
            probes=policy.probes,
            discipline=self.cluster.discipline,
            overlapping=single,
        )

    def inputs(
        self,
        setting: Setting,
        policy: SyncPolicy,
        slowdown: NDArray[np.float64],
        under_way: UnderWay = NOTHING_UNDER_WAY,
    ) -> EngineInputs:
        """The numbers that the engine runs a setting on. Raises Rejected where the cluster cannot."""
        return build(
            self.cluster.nodes,
            self.cluster.latency_seconds,
            self.workload,
            setting,
            self.conditions,
            self.job.target,
            evaluate_clocks=self.evaluate_clocks,
            policy_seconds=policy.seconds,
            slowdown=slowdown.copy(),
            seed=self.seed,
            under_way=under_way,
            factors=self.factors,
        )


class Branch:
    """A line of training: its state, and what rules it."""

    def __init__(
        self,
        context: JobContext,
        setting: Setting,
        policy: SyncPolicy,
        program: loop.Program,
        inputs: EngineInputs,
        state: loop.State,
    ) -> None:
        self.context, self.setting, self.policy = context, setting, policy
        self.program, self.inputs, self.state = program, inputs, state
        self.until_seconds = 0.0  # how far it has been trained
        self.unreported = NO_RECORDS  # of what went on while the tuner did not look, [n, 11]
        self.unreported_seconds = 0.0  # how long that was; its next window begins so much earlier
        self.changes: list[Cost] = []  # that its next window tells of

    def snapshot(self, *, testing: bool) -> Branch:
        """A branch that goes on from here; arrays are shared, for they never change."""
        state = self.state._replace(clock=self.state.clock._replace(testing=jnp.asarray(testing)))
        made = Branch(self.context, self.setting, self.policy, self.program, self.inputs, state)
        made.until_seconds = self.until_seconds
        return made

    @property
    def status(self) -> Status:
        return cast(Status, loop.STATUSES[int(self.state.clock.status)])

    @property
    def resting(self) -> frozenset[str]:
        """Nodes that are in no mini-batch."""
        waits = np.asarray(self.state.clock.flight.phase) == WAIT
        return frozenset(n.name for n, rests in zip(self.context.job.nodes, waits, strict=True) if rests)

    def advance(self, clocks: int, until_seconds: float, rows: int) -> NDArray[np.float64]:
        """Train to so many more pushes, at most `rows`, or to the last event before `until_seconds`; records, [n, 11]."""
        self.state, table, used = loop.advance(
            self.program,
            self.context.data,
            self.inputs,
            self.state,
            np.int32(min(clocks, rows)),
            np.float64(until_seconds),
            rows=rows,
        )
        return np.asarray(table)[: int(used)]

    def evaluation(self, now: float) -> Evaluation:
        """The model as it is, on the validation set."""
        clocks, learned = int(self.state.clock.pushes), self.state.learned
        if self.program.model is None or learned is None:
            return Evaluation(now, clocks, float("nan"), float("nan"))
        loss, accuracy = _evaluate(self.program.model, self.context.data, learned.parameters)
        return Evaluation(now, clocks, float(loss), float(accuracy))

    def catch_up(self, now: float) -> None:
        """Bring everybody's progress to `now`, before the inputs changes."""
        self.state = edits.catch_up(self.program, self.inputs, self.state, np.float64(now))

    def resume_at(self, until: float, latest: Branch) -> None:
        """Go on at `until` as if no time had passed since `until_seconds`; but buckets are the machines', and hold what
        `latest`, which trained last, has left in them."""
        pause, tokens = until - self.until_seconds, self.state.clock.flight.tokens
        if len(tokens) and latest is not self:
            tokens = latest.tokens(until)
        elif pause > 0:
            tokens = timing.refilled(self.inputs, tokens, pause)
        if pause > 0:
            self.state = edits.resumed(self.state, pause)
            self.until_seconds = until
        self.set_tokens(tokens)

    def tokens(self, now: float) -> jax.Array:
        """What buckets hold at `now`, [k], when nobody has sent since `until_seconds`."""
        then = edits.catch_up(self.program, self.inputs, self.state, np.float64(self.until_seconds))
        return timing.refilled(self.inputs, then.clock.flight.tokens, now - self.until_seconds)

    def set_tokens(self, tokens: jax.Array) -> None:
        """Put so many tokens into the nodes' buckets, [k]."""
        self.state = edits.with_tokens(self.state, tokens)

    def set_slowdown(self, slowdown: NDArray[np.float64]) -> None:
        """Computing takes so many times as long from now on, [k]."""
        self.inputs = self.inputs._replace(slowdown=cast(Any, slowdown.copy()))

    def mark_deadlocked(self) -> None:
        """Nobody is left that could push."""
        deadlock = jnp.asarray(loop.STATUSES.index("deadlock"), jnp.int32)
        self.state = self.state._replace(clock=self.state.clock._replace(status=deadlock))

    def stop_all(self, now: float) -> None:
        """Everybody stops; gradients under way are given up."""
        self.set_tokens(timing.refilled(self.inputs, self.state.clock.flight.tokens, now - float(self.state.clock.seconds)))
        self.state = edits.all_stopped(self.state, now)

    def stop_workers(self, nodes: frozenset[str], now: float) -> None:
        """These nodes are in no mini-batch from now on; a gradient under way there is lost."""
        self.state = edits.workers_stopped(self.state, self._mask(nodes), now)

    def put_in_force(self, setting: Setting, policy: SyncPolicy, slowdown: NDArray[np.float64]) -> None:
        """Put a setting and a policy in force. Raises Rejected, and changes nothing, where they cannot be."""
        program = self.context.program(setting, policy)
        inputs = self.context.inputs(setting, policy, slowdown)
        self.setting, self.policy, self.program, self.inputs = setting, policy, program, inputs

    def launch_waiting_workers(self) -> None:
        """Put the policy in force anew; workers that wait begin a mini-batch."""
        self.launch(self.inputs.active & (self.state.clock.flight.phase == WAIT))

    def launch(self, release: jax.Array, offsets: NDArray[np.float64] | None = None) -> None:
        """Put the policy in force anew, and let the workers in `release` [k] begin, computing `offsets` seconds longer."""
        longer = jnp.zeros(len(self.context.job.nodes)) if offsets is None else jnp.asarray(offsets)
        begun = self.policy.init(self.inputs.active)
        args = (self.program, self.context.data, self.inputs, self.state, begun, release, longer)
        launched: loop.State = edits.launch(*args)
        self.state = launched

    def copy_bytes(self) -> float:
        """What the server that holds most of parameters and optimizer slots copies for a fork."""
        return self.context.job.branch_bytes * max(self.setting.shares()[1])

    def refill_seconds(self) -> float:
        """How long it takes until all workers together have pulled the whole model, through the busiest link."""
        inputs, pulls = self.inputs, np.flatnonzero(self.inputs.active)
        if not len(pulls):
            return 0.0
        if overlapping(self.setting):
            used = np.sum(np.asarray(inputs.usage)[pulls], axis=0) / np.asarray(inputs.capacity)
            return float(inputs.pull_bytes * np.max(used, initial=0.0))
        slowest = min(float(np.min(np.asarray(inputs.nic)[pulls])), float(inputs.serve_out) / len(pulls))
        return float(inputs.pull_bytes) / slowest

    def _mask(self, nodes: frozenset[str]) -> jax.Array:
        return jnp.asarray([n.name in nodes for n in self.context.job.nodes])


def first_branch(
    context: JobContext, setting: Setting, policy: SyncPolicy, slowdown: NDArray[np.float64], parameters: Any
) -> Branch:
    """The branch that a job begins with: its workers at random points of their first mini-batch, if conditions say so."""
    program = context.program(setting, policy)
    inputs = context.inputs(setting, policy, slowdown)
    branch = Branch(context, setting, policy, program, inputs, edits.blank(program, inputs, parameters))
    first_cycle = np.asarray(inputs.compute_seconds + inputs.sleep_probability * inputs.sleep_mean_seconds)
    spread = np.random.default_rng([context.seed, 2]).random(len(first_cycle)) * first_cycle
    branch.launch(inputs.active, spread if context.conditions.stagger else None)
    return branch
