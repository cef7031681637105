"""A branch: one line of training, under a setting and a policy. Forks make more of them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple, cast

import jax
import numpy as np
from jax.typing import ArrayLike
from numpy.typing import NDArray

from simulators.checkpoints import Checkpoints
from simulators.cluster.cluster import Cluster
from simulators.cluster.compute_factors import NO_FACTORS, Factors
from simulators.cluster.conditions import Conditions, Disturbance, link_delays
from simulators.engine import changes, learning, loop
from simulators.engine.inputs import EngineInputs
from simulators.engine.job_state import STATUSES, Program, Records, State, with_work
from simulators.engine.learning import TrainingData
from simulators.engine.limits import check_links
from simulators.engine.preparation import (
    NO_EFFECTS,
    Effects,
    build,
    each_nic_counts,
    late_seconds,
    loads,
    overlapping,
    served,
    served_rows,
)
from simulators.unreported import Unreported
from simulators.workloads.workload import Workload
from tuners.actions import Job, Rejected, Setting, Status, SyncPolicy
from tuners.settings import OF_CHECKPOINTS

__all__ = ["Branch", "JobContext", "PreparedSetting", "first_branch", "stacked"]

_PULL_SECONDS = Records._fields.index("pull_seconds")


@dataclass(frozen=True, slots=True)
class JobContext:
    """What all branches of a job share."""

    cluster: Cluster
    workload: Workload
    conditions: Conditions
    job: Job
    data: TrainingData
    evaluate_clocks: int  # pushes between two validations
    seed: int
    factors: Factors = NO_FACTORS

    def prepare(self, setting: Setting, policy: SyncPolicy, effects: Effects = NO_EFFECTS) -> PreparedSetting:
        """What the engine needs for a setting and a policy. Raises Rejected for what it, or the cluster, cannot run."""
        if policy.probes and policy.timers:
            raise Rejected(f"Cannot install policy {policy.name!r}: it probes and sets timers; leave one of them out.")
        if policy.probes and policy.table:
            raise Rejected(f"Cannot install policy {policy.name!r}: it probes and needs a table; leave one of them out.")
        single = each_nic_counts(self.cluster, setting, self.conditions, self.workload)
        buckets = bool(self.conditions.buckets)
        check_links(self.cluster, overlap=overlapping(setting), tables=self.workload.has_tables, buckets=buckets)
        largest = max(sum(row) for row in loads(self.cluster.nodes, setting).values())
        model = learning.learning_program(self.workload, self.job.space, largest)
        program = Program(
            model=learning.with_table(model, self.job.space) if policy.table else model,
            decide=policy.decide,
            probes=policy.probes,
            discipline=self.cluster.discipline,
            overlapping=single,
            timers=policy.timers,
            server_threads=self.cluster.server_threads,
            idle=model is not None and model.embedding is None and len(setting.workers) < len(self.cluster.nodes),
        )
        inputs = build(
            self.cluster,
            self.workload,
            self.conditions,
            self.job,
            setting,
            policy,
            seed=self.seed,
            factors=self.factors,
            evaluate_clocks=self.evaluate_clocks,
            effects=effects,
        )
        per_push = served(self.cluster.nodes, self.workload.demand, setting, effects)
        return PreparedSetting(setting, policy, program, inputs, per_push, effects)


class PreparedSetting(NamedTuple):
    """A setting and a policy that can run, and what the engine needs for them."""

    setting: Setting
    policy: SyncPolicy
    program: Program
    inputs: EngineInputs  # without disturbances, which a branch sets for itself
    served: NDArray[np.float64]  # [k, 4] per push, see `simulators.engine.preparation.served`
    effects: Effects = NO_EFFECTS


class Branch:
    """A line of training: its state, and the setting and policy that it trains under. It alone writes its engine inputs."""

    def __init__(self, context: JobContext, prepared: PreparedSetting, state: State) -> None:
        self.context, self.state = context, state
        self.setting, self.policy, self.program = prepared.setting, prepared.policy, prepared.program
        self.inputs = prepared.inputs
        self._placed = prepared  # what the engine runs on, as it is without disturbances
        self.until_seconds = 0.0  # how far it has been trained
        self.unreported = Unreported(len(context.job.nodes), context.job.blocks)
        self.checkpoints = Checkpoints(self.inputs, state, makes=context.job.space.may_have(OF_CHECKPOINTS))

    def snapshot(self, *, testing: bool) -> Branch:
        """A branch that continues from here. Arrays are shared: JAX never changes them."""
        state = self.state._replace(clock=self.state.clock._replace(testing=cast(Any, np.asarray(testing))))
        prepared = self._placed._replace(setting=self.setting, policy=self.policy, program=self.program, inputs=self.inputs)
        made = Branch(self.context, prepared, state)
        made.until_seconds = self.until_seconds
        made._placed = self._placed
        made.checkpoints = self.checkpoints.copy()
        return made

    @property
    def status(self) -> Status:
        return cast(Status, STATUSES[int(self.state.clock.status)])

    @property
    def resting(self) -> frozenset[str]:
        """Nodes that are in no mini-batch."""
        nodes = zip(self.context.job.nodes, changes.waiting(self.state), strict=True)
        return frozenset(node.name for node, waits in nodes if waits)

    def advance(self, clocks: int, until_seconds: float, rows: int) -> NDArray[np.float64]:
        """Train for `clocks` more pushes, at most `rows`, or to the last event before `until_seconds`; records, [n, 11]."""
        before = self.state
        self.state, table, used = loop.advance(
            self.program,
            self.context.data,
            self.inputs,
            self.state,
            np.int32(min(clocks, rows)),
            np.float64(until_seconds),
            rows=rows,
        )
        records = np.asarray(table)[: int(used)]
        self.unreported.add_load(*_load_of(self._placed, self.context.cluster, before, self.state, records))
        return records

    def report(self) -> Unreported:
        """What the next window reports besides its own pushes. It is not reported again."""
        found, self.unreported = self.unreported, Unreported(len(self.context.job.nodes), self.context.job.blocks)
        return found

    # --------------------------------------------------------------------------------------------------------------- time

    def catch_up(self, now: float) -> None:
        """Bring the progress of all workers to `now`. Call it before inputs change, which hold for what comes after."""
        if now > float(self.state.clock.seconds):  # not where a push has just ended, or nothing has begun
            self.state = changes.catch_up(self.program, self.inputs, self.state, np.float64(now))

    def resume_at(self, until: float, latest: Branch) -> None:
        """Shift the branch's clock to `until`, as if no time had passed since `until_seconds`. Buckets keep real time: they
        belong to the machines, and hold what `latest`, the branch that trained last, has left in them."""
        pause = until - self.until_seconds
        if pause > 0:
            self.state = changes.resumed(self.inputs, self.state, pause)
            self.until_seconds = until
            self.checkpoints.pause(pause)
        if latest is not self:  # branches share the workers' caches
            self.state = changes.caches_cleared(self.state)
        if len(self.inputs.bucket_bytes) and latest is not self:
            self.state = changes.with_tokens(self.state, _tokens(latest, until))

    # ------------------------------------------------------------------------------------------------- setting and inputs

    def check_group(self, prepared: PreparedSetting) -> None:
        """Raise Rejected where gradients wait in a group that the servers of `prepared` do not keep."""
        waiting, kept = int(self.state.clock.grouped), _aggregation(self.program)
        if waiting and kept in ("sum", "mean") and kept != _aggregation(prepared.program):
            raise Rejected(
                f"Cannot install policy {prepared.policy.name!r}: {waiting} gradients wait for the {kept} of their group; "
                "install it before the first push, or when a group has ended."
            )

    def install(self, prepared: PreparedSetting, disturbance: Disturbance) -> bool:
        """Train under another setting and policy from now on. Returns whether a worker that had none has work again."""
        self.setting, self.policy = prepared.setting, prepared.policy
        has_work = self._run_on(prepared)
        self.disturb(disturbance)
        return has_work

    def change_in_place(self, prepared: PreparedSetting, disturbance: Disturbance, now: float) -> None:
        """Install a setting at `now` while mini-batches in progress continue; a new policy releases workers that wait."""
        self.catch_up(now)
        new_policy = prepared.policy is not self.policy
        has_work = self.install(prepared, disturbance)
        self.until_seconds = now
        if new_policy or has_work:
            self.launch_waiting_workers()

    def apply_effects(self, setting: Setting, effects: Effects) -> bool:
        """Run the engine on a setting between old and new, with what the reconfiguration takes from training.

        The branch's own `setting` and policy stay: they change when the reconfiguration ends. Returns whether a worker that
        had none has work again.
        """
        return self._run_on(self.context.prepare(setting, self.policy, effects))

    def _run_on(self, prepared: PreparedSetting) -> bool:
        """Give the engine other inputs; work that is left for a target by share moves with the data.

        Returns whether a worker that had done its part has work again.
        """
        before, had_work = np.asarray(self.inputs.assigned), np.asarray(self._with_work)
        if _aggregation(self.program) != _aggregation(prepared.program):
            self.state = changes.regrouped(prepared.program, prepared.inputs, self.state)
        self.state = changes.redivided(self.inputs, prepared.inputs, self.state)
        self.program, self.inputs = prepared.program, prepared.inputs
        self.inputs = self.checkpoints.with_work_redone(self.inputs, prepared.inputs)
        self._placed, self.state = prepared, changes.rows_placed(self.inputs, self.state)
        if np.array_equal(before, self.inputs.assigned):
            return False
        self.state = changes.with_data_moved(self.state, before, np.asarray(self.inputs.assigned))
        return bool(np.any(~had_work & np.asarray(self._with_work)))

    def without_workers(self) -> None:
        """No node may begin a mini-batch."""
        self.inputs = self.inputs._replace(active=cast(Any, np.zeros_like(self.inputs.active)))

    def disturb(self, now: Disturbance) -> None:
        """Computing is as slow and links are as delayed from now on; a delay counts in mini-batches that begin later."""
        # A copy: the control plane changes its array in place, and the engine may still read this one.
        self.inputs = self.inputs._replace(slowdown=cast(Any, now.slowdown.copy()))
        if self.context.conditions.delays:
            names, messages = tuple(n.name for n in self.context.job.nodes), self.context.workload.demand.delay_messages
            delays = link_delays(names, self._placed.setting, now.delay_seconds, messages)
            self.inputs = self.inputs._replace(overhead_seconds=cast(Any, self._placed.inputs.overhead_seconds + delays))

    def restore(self, setting: Setting, policy: SyncPolicy) -> None:
        """Count as under this setting and policy again; engine inputs follow when the recovery applies its effects."""
        self.setting, self.policy = setting, policy

    def roll_back(self) -> int:
        """Return to the last checkpoint. Returns how many pushes that has lost; a target that counts them waits for more.

        Raises RuntimeError in a job that makes no checkpoints.
        """
        self.state, lost = self.checkpoints.rolled_back(self.inputs, self.state)
        self.inputs = self.checkpoints.with_work_redone(self.inputs, self._placed.inputs)
        return lost

    # ------------------------------------------------------------------------------------------------------------ workers

    def end(self, status: Literal["target", "deadlock"]) -> None:
        """The branch trains no more: it was evaluated and is at its target, or no worker is left that could push."""
        number: Any = np.int32(STATUSES.index(status))
        self.state = self.state._replace(clock=self.state.clock._replace(status=number))

    def stop_all(self, now: float) -> None:
        """Everybody stops; gradients in progress are lost."""
        self.state = changes.all_stopped(self.inputs, self.state, now)

    def stop_workers(self, nodes: frozenset[str], now: float) -> None:
        """Take these nodes out of their mini-batches, now; a gradient in progress there is lost."""
        stopped = np.asarray([n.name in nodes for n in self.context.job.nodes])
        self.state = changes.workers_stopped(self.state, stopped, now)

    def launch_waiting_workers(self) -> None:
        """Begin the policy anew; workers that wait begin a mini-batch."""
        self.launch(self._with_work & changes.waiting(self.state))

    def launch(self, release: ArrayLike, offsets: NDArray[np.float64] | None = None) -> None:
        """Begin the policy anew; the workers in `release` [k] begin a mini-batch, and compute `offsets` seconds longer."""
        longer = np.zeros(len(self.context.job.nodes)) if offsets is None else offsets
        begun, released = self.policy.init(self._with_work), np.asarray(release) & self._with_work
        launched = changes.launch(self.program, self.context.data, self.inputs, self.state, begun, released, longer)
        # Wait for the gradients: where the job ends here, the process may exit, and a process that still computes crashes.
        self.state = jax.block_until_ready(launched)  # type: ignore[no-untyped-call]

    @property
    def _with_work(self) -> NDArray[np.bool_]:
        """Workers that may begin a mini-batch, bool [k]."""
        return np.asarray(with_work(self.inputs, cast(Any, np.asarray(self.state.clock.left))))


def _aggregation(program: Program) -> str:
    return "" if program.model is None else program.model.aggregation


def _tokens(branch: Branch, now: float) -> jax.Array:
    """What the nodes' buckets hold at `now`, [k], if no node has sent since `branch` trained last."""
    then = changes.catch_up(branch.program, branch.inputs, branch.state, np.float64(branch.until_seconds))
    return changes.resumed(branch.inputs, then, now - branch.until_seconds).clock.flight.tokens


def _load_of(
    placed: PreparedSetting, cluster: Cluster, before: State, after: State, records: NDArray[np.float64]
) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """What the servers did between two states of the engine, in pushes with these `records`: [k, 4] as `served`, and the
    rows of each block of embedding tables in these pushes, [b]."""
    pulled, pushed = changes.touched_rows(after) - changes.touched_rows(before)
    if placed.inputs.placement:
        load = served_rows(cluster.nodes, placed.inputs.placement, pulled, pushed, placed.effects)
    else:
        each: Any = len(records)
        if placed.inputs.copies:  # of these pushes, some had no pull
            pulls = np.count_nonzero(records[:, _PULL_SECONDS] > 0)
            each = np.array([pulls, pulls, len(records), len(records)])
        load = each * placed.served
    late = np.asarray(after.clock.flight.late_bytes) - np.asarray(before.clock.flight.late_bytes)
    if len(late):
        load[:, 1] += late_seconds(placed.inputs, late, load)
    return load, pushed


def first_branch(
    context: JobContext, setting: Setting, policy: SyncPolicy, disturbance: Disturbance, parameters: Any
) -> Branch:
    """The branch that a job begins with. If conditions stagger workers, they begin at random points of a mini-batch."""
    prepared = context.prepare(setting, policy)
    inputs = prepared.inputs
    branch = Branch(context, prepared, changes.blank(prepared.program, inputs, parameters))
    branch.disturb(disturbance)
    first_cycle = np.asarray(inputs.compute_seconds + inputs.sleep_probability * inputs.sleep_mean_seconds)
    spread = np.random.default_rng([context.seed, 2]).random(len(first_cycle)) * first_cycle
    branch.launch(inputs.active, spread if context.conditions.stagger else None)
    return branch


def stacked(branches: Sequence[Branch]) -> tuple[TrainingData, EngineInputs, State]:
    """Stack branches of equal shapes as lanes of one engine: arrays get a leading lane axis; validation data is shared."""
    data = [b.context.data for b in branches]
    train, inputs, states = (
        jax.tree.map(lambda *leaves: np.stack(leaves), *rows)  # NumPy, because JAX would compile each stack
        for rows in ([d.train for d in data], [b.inputs for b in branches], [b.state for b in branches])
    )
    return TrainingData(train, data[0].valid), inputs, states
