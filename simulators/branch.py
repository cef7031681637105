"""One line of training, under the setting and the policy that rule it; forks make more of them."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
from numpy.typing import NDArray

from simulators import jobs
from simulators.cluster.conditions import Conditions
from simulators.engine import edits, learning, loop, timing
from simulators.engine.inputs import (
    NO_FACTORS,
    NOTHING_UNDER_WAY,
    Factors,
    Plant,
    UnderWay,
    build,
    each_nic_counts,
    loads,
    overlapping,
)
from simulators.engine.learning import Data
from simulators.engine.timing import WAIT
from simulators.reconfiguration.control_plane import Cluster
from simulators.workloads.workload import Workload
from tuners.actions import Cost, Evaluation, Job, Rejected, Setting, Status, SyncPolicy

__all__ = ["NO_RECORDS", "Branch", "Ground", "first_branch"]

NO_RECORDS = np.zeros((0, len(loop.Records._fields)))
_evaluate = jax.jit(learning.evaluate, static_argnames=("model",))


@dataclass(frozen=True, slots=True)
class Ground:
    """What all branches of a job share."""

    cluster: Cluster
    workload: Workload
    conditions: Conditions
    job: Job
    data: Data
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
            model=jobs.model(self.workload, self.job.space, largest),
            decide=policy.decide,
            probes=policy.probes,
            discipline=self.cluster.discipline,
            overlapping=single,
        )

    def plant(
        self,
        setting: Setting,
        policy: SyncPolicy,
        slowdown: NDArray[np.float64],
        under_way: UnderWay = NOTHING_UNDER_WAY,
    ) -> Plant:
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
        ground: Ground,
        setting: Setting,
        policy: SyncPolicy,
        program: loop.Program,
        plant: Plant,
        state: loop.State,
    ) -> None:
        self.ground, self.setting, self.policy = ground, setting, policy
        self.program, self.plant, self.state = program, plant, state
        self.until_seconds = 0.0  # how far it has been trained
        self.unseen = NO_RECORDS  # of what went on while the tuner did not look, [n, 11]
        self.unseen_seconds = 0.0  # how long that was; its next window begins so much earlier
        self.changes: list[Cost] = []  # that its next window tells of

    def snapshot(self, *, testing: bool) -> Branch:
        """A branch that goes on from here; arrays are shared, for they never change."""
        state = self.state._replace(clock=self.state.clock._replace(testing=jnp.asarray(testing)))
        made = Branch(self.ground, self.setting, self.policy, self.program, self.plant, state)
        made.until_seconds = self.until_seconds
        return made

    @property
    def status(self) -> Status:
        return cast(Status, loop.STATUSES[int(self.state.clock.status)])

    @property
    def resting(self) -> frozenset[str]:
        """Nodes that are in no mini-batch."""
        waits = np.asarray(self.state.clock.flight.phase) == WAIT
        return frozenset(n.name for n, rests in zip(self.ground.job.nodes, waits, strict=True) if rests)

    def advance(self, clocks: int, until_seconds: float, rows: int) -> NDArray[np.float64]:
        """Train to so many more pushes, at most `rows`, or to the last event before `until_seconds`; records, [n, 11]."""
        self.state, table, used = loop.advance(
            self.program,
            self.ground.data,
            self.plant,
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
        loss, accuracy = _evaluate(self.program.model, self.ground.data, learned.parameters)
        return Evaluation(now, clocks, float(loss), float(accuracy))

    def coast(self, now: float) -> None:
        """Bring everybody's progress to `now`, before the plant changes."""
        self.state = edits.coast(self.program, self.plant, self.state, np.float64(now))

    def stand(self, until: float, latest: Branch) -> None:
        """Go on at `until` as if no time had passed since `until_seconds`; but buckets are the machines', and hold what
        `latest`, which trained last, has left in them."""
        pause, tokens = until - self.until_seconds, self.state.clock.flight.tokens
        if len(tokens) and latest is not self:
            tokens = latest.tokens(until)
        elif pause > 0:
            tokens = timing.refilled(self.plant, tokens, pause)
        if pause > 0:
            self.state = edits.resumed(self.state, pause)
            self.until_seconds = until
        self.hold(tokens)

    def tokens(self, now: float) -> jax.Array:
        """What buckets hold at `now`, [k], when nobody has sent since `until_seconds`."""
        then = edits.coast(self.program, self.plant, self.state, np.float64(self.until_seconds))
        return timing.refilled(self.plant, then.clock.flight.tokens, now - self.until_seconds)

    def hold(self, tokens: jax.Array) -> None:
        """Put so many tokens into the nodes' buckets, [k]."""
        self.state = edits.with_tokens(self.state, tokens)

    def slow(self, slowdown: NDArray[np.float64]) -> None:
        """Computing takes so many times as long from now on, [k]."""
        self.plant = self.plant._replace(slowdown=cast(Any, slowdown.copy()))

    def give_up(self) -> None:
        """Nobody is left that could push."""
        deadlock = jnp.asarray(loop.STATUSES.index("deadlock"), jnp.int32)
        self.state = self.state._replace(clock=self.state.clock._replace(status=deadlock))

    def halt(self, now: float) -> None:
        """Everybody stops; gradients under way are given up."""
        self.hold(timing.refilled(self.plant, self.state.clock.flight.tokens, now - float(self.state.clock.seconds)))
        self.state = edits.halted(self.state, now)

    def ground_nodes(self, nodes: frozenset[str], now: float) -> None:
        """These nodes are in no mini-batch from now on; a gradient under way there is lost."""
        self.state = edits.grounded_nodes(self.state, self._mask(nodes), now)

    def bring_under(self, setting: Setting, policy: SyncPolicy, slowdown: NDArray[np.float64]) -> None:
        """Put a setting and a policy in force. Raises Rejected, and changes nothing, where they cannot be."""
        program = self.ground.program(setting, policy)
        plant = self.ground.plant(setting, policy, slowdown)
        self.setting, self.policy, self.program, self.plant = setting, policy, program, plant

    def launch_waiting(self) -> None:
        """Put the policy in force anew; workers that wait begin a mini-batch."""
        self.launch(self.plant.active & (self.state.clock.flight.phase == WAIT))

    def launch(self, release: jax.Array, offsets: NDArray[np.float64] | None = None) -> None:
        """Put the policy in force anew, and let the workers in `release` [k] begin, computing `offsets` seconds longer."""
        longer = jnp.zeros(len(self.ground.job.nodes)) if offsets is None else jnp.asarray(offsets)
        begun = self.policy.init(self.plant.active)
        args = (self.program, self.ground.data, self.plant, self.state, begun, release, longer)
        launched: loop.State = edits.launch(*args)
        self.state = launched

    def copy_bytes(self) -> float:
        """What the server that holds most of parameters and optimizer slots copies for a fork."""
        return self.ground.job.branch_bytes * max(self.setting.shares()[1])

    def refill_seconds(self) -> float:
        """How long it takes until all workers together have pulled the whole model, through the busiest link."""
        plant, pulls = self.plant, np.flatnonzero(self.plant.active)
        if not len(pulls):
            return 0.0
        if overlapping(self.setting):
            used = np.sum(np.asarray(plant.usage)[pulls], axis=0) / np.asarray(plant.capacity)
            return float(plant.pull_bytes * np.max(used, initial=0.0))
        slowest = min(float(np.min(np.asarray(plant.nic)[pulls])), float(plant.serve_out) / len(pulls))
        return float(plant.pull_bytes) / slowest

    def _mask(self, nodes: frozenset[str]) -> jax.Array:
        return jnp.asarray([n.name in nodes for n in self.ground.job.nodes])


def first_branch(
    ground: Ground, setting: Setting, policy: SyncPolicy, slowdown: NDArray[np.float64], parameters: Any
) -> Branch:
    """The branch that a job begins with: its workers at random points of their first mini-batch, if conditions say so."""
    program = ground.program(setting, policy)
    plant = ground.plant(setting, policy, slowdown)
    branch = Branch(ground, setting, policy, program, plant, edits.blank(program, plant, parameters))
    first_cycle = np.asarray(plant.compute_seconds + plant.sleep_probability * plant.sleep_mean_seconds)
    spread = np.random.default_rng([ground.seed, 2]).random(len(first_cycle)) * first_cycle
    branch.launch(plant.active, spread if ground.conditions.stagger else None)
    return branch
