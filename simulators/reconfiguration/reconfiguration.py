"""One reconfiguration of one branch: its plan, its progress in simulated time, its effects on training, and its cost.

A plan is a DAG of steps from one setting to another, by each of three methods:

* ``checkpoint``, the papers' baseline: all workers stop; save, restart under the new setting, restore.
* ``migrate``, Cruise's (Section IV): blocks of model and training data move while training goes on; machines
  are added, deleted, or switch roles (`_migration` has the edges of its DAG).
* ``relocate``, TensorFlowOnline's (Section V): the graph is switched in place, and parameters move when they are pulled from
  their old owner and pushed to the new one; training data comes from shared storage and need not move.

A `Reconfiguration` makes the plan and carries it out while the branch trains. The steps of the plan are SimPy processes,
which run concurrently (`PlanSteps`). Two things flow between steps and training:

* Steps tell the branch what the cluster is like at present: which workers may begin a mini-batch, how the model is divided,
  what bandwidth is left (`Reconfiguration.apply_effects`).
* The branch tells the steps which worker has pushed and which nodes are at rest (`Reconfiguration.progress`): a worker
  stops after the mini-batch that it is at, and with relocation on demand a parameter moves with the push of a worker that
  has pulled it since the graph was switched.

Where nodes are lost meanwhile, the same reconfiguration continues with a recovery plan (`Reconfiguration.recover`), and its
cost includes what was done before.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from simulators.branch import Branch, PreparedSetting
from simulators.engine.preparation import Effects, loads
from simulators.reconfiguration.control_plane import ControlPlane
from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.plan import Load, ReconfigurationPlan, Step
from simulators.reconfiguration.shares import block_counts, copies_of_blocks, moves, moves_of_blocks, survivors
from simulators.reconfiguration.steps import PlanEnds, PlanSteps
from simulators.reconfiguration.transfers import Transfers
from tuners.actions import Cost, Method, Setting, SyncPolicy
from tuners.playing.system import CHANGED_IN_PLACE, in_place
from tuners.settings import OF_REPLICAS, OF_TABLES

__all__ = ["Load", "Reconfiguration", "plan_of"]

_ROLES = ("workers", "servers", "model_shares", "data_shares", *OF_TABLES, *OF_REPLICAS)

_NO_STEPS = ReconfigurationPlan((), quiescent=False)
_WAIT = ReconfigurationPlan((Step("wait"),), quiescent=True)
"""Too few nodes are left for any setting, and others will join: the job waits for the next of them."""


def plan_of(old: Setting, new: Setting, method: Method, load: Load, costs: Costs) -> ReconfigurationPlan:
    """The steps from `old` to `new`. Where a change of policy takes a restart, the whole setting changes by that restart."""
    restarts = costs.policy_restart_seconds > 0 and old.policy != new.policy
    if in_place(old, new, method) and not restarts:
        return _NO_STEPS
    if method == "checkpoint" or restarts:
        return ReconfigurationPlan(_checkpoint(old, new, load, costs), quiescent=True)
    steps = _migration(old, new, load, costs) if method == "migrate" else _relocation(old, new, load, costs)
    return ReconfigurationPlan(steps, quiescent=False, on_demand=method == "relocate")


def _recovery(old: Setting, lost: frozenset[str], half_way: bool, load: Load, costs: Costs) -> ReconfigurationPlan:
    """What the runtime does about `lost` nodes: detect the loss, then restore from replicas what they served.

    A node that was only a worker is dropped while the others train on. Where a reconfiguration was `half_way`, all
    workers stop, and the whole model is placed anew.
    """
    share = sum(part for server, part in old.model_by_server().items() if server in lost)
    moved = load.model_bytes * (1.0 if half_way else share)
    detect = Step("detect", seconds=costs.detection_seconds)
    if moved == 0:
        return ReconfigurationPlan((detect,), quiescent=False)
    restore = Step("restore", seconds=moved / costs.restore_bytes_per_second, bytes_moved=moved, after=(0,))
    return ReconfigurationPlan((detect, restore), quiescent=True)


def _checkpoint(old: Setting, new: Setting, load: Load, costs: Costs) -> tuple[Step, ...]:
    """CKP, SSR, MDR and TDR in TensorFlowOnline's terms. A model whose placement stays is neither written nor read."""
    same = old.policy == new.policy or costs.policy_restart_seconds == 0
    restart = Step("restart", seconds=costs.restart_seconds if same else costs.policy_restart_seconds)
    if all(getattr(old, f) == getattr(new, f) for f in _ROLES if f != "data_shares"):
        return (restart,)
    moved = load.model_bytes
    placed = moved  # copies of hot blocks are read once more each
    if load.has_tables:
        placed *= sum(map(len, new.holders(costs.model_blocks, load.hottest))) / costs.model_blocks
    return (
        Step("checkpoint", seconds=moved / costs.checkpoint_bytes_per_second, bytes_moved=moved),
        restart._replace(after=(0,)),
        Step("restore", seconds=placed / costs.restore_bytes_per_second, bytes_moved=placed, after=(1,)),
    )


class _Draft:
    """The steps so far of a plan being made, found by kind and node."""

    def __init__(self) -> None:
        self.steps: list[Step] = []

    def add(self, step: Step, after: Iterable[int] = ()) -> None:
        self.steps.append(step._replace(after=tuple(sorted(set(after)))))

    def find(self, *kinds: str, node: str | None = None, to: str | None = None, of: str | None = None) -> list[int]:
        return [
            i
            for i, s in enumerate(self.steps)
            if s.kind in kinds and node in (None, s.node) and to in (None, s.to) and of in (None, s.of)
        ]


def _migration(old: Setting, new: Setting, load: Load, costs: Costs) -> tuple[Step, ...]:
    """The DAG of Cruise's plans (Section IV-A.3; edges as in its public plan compiler).

    A machine is added, or switched to its new role, before anything moves to it. A worker finishes its mini-batch and stops
    before its training data leaves. A new worker starts when its data has arrived and, if it was a server, its part of the
    model has left. A machine is deleted when nothing is left on it. The rest of the setting changes at the end.
    """
    draft = _Draft()
    # Sets of names iterate in another order in every process, so every loop sorts: plans must be the same for a seed.
    before, after = set(old.workers + old.servers), set(new.workers + new.servers)
    for node in sorted(after - before):
        draft.add(Step("add", node, seconds=costs.add_seconds))
    for node in sorted(set(old.workers) - set(new.workers)):
        draft.add(Step("stop", node))
    for node in sorted(after & before):
        if (node in old.workers, node in old.servers) != (node in new.workers, node in new.servers):
            draft.add(Step("switch", node, seconds=costs.switch_seconds), draft.find("stop", node=node))
    for of, was, now, blocks in (
        ("model", (old.servers, old.shares()[1]), (new.servers, new.shares()[1]), costs.model_blocks),
        ("data", (old.workers, old.shares()[0]), (new.workers, new.shares()[0]), load.data_blocks),
    ):
        if of == "model" and load.has_tables:
            continue  # below: it matters which blocks move
        size = load.model_bytes / blocks if of == "model" else load.data_block_bytes
        for source, to, count in moves(block_counts(*was, blocks), block_counts(*now, blocks)):
            needs = draft.find("add", "switch", node=to) + (draft.find("stop", node=source) if of == "data" else [])
            draft.add(Step("move", source, to, count, "model" if of == "model" else "data", bytes_moved=count * size), needs)
    if load.has_tables:
        size = load.model_bytes / costs.model_blocks
        held, wanted = (setting.holders(costs.model_blocks, load.hottest) for setting in (old, new))
        moved = [Step("move", a, b, len(n), "model", n) for a, b, n in moves_of_blocks(*_owners(held, wanted))]
        copied = [Step("copy", a, b, len(n), "model", n) for a, b, n in copies_of_blocks(held, wanted)]
        for step in moved + copied:
            draft.add(step._replace(bytes_moved=step.blocks * size), draft.find("add", "switch", node=step.to))
    for node in sorted(set(new.workers) - set(old.workers)):
        needs = draft.find("add", "switch", node=node) + draft.find("move", to=node, of="data")
        needs += draft.find("move", "copy", node=node, of="model")
        draft.add(Step("start", node, seconds=costs.start_seconds), needs)
    for node in sorted(before - after):
        draft.add(Step("delete", node, seconds=costs.delete_seconds), draft.find("stop", "move", "copy", node=node))
    if _graph(old, new):
        draft.add(Step("graph", seconds=costs.graph_seconds), range(len(draft.steps)))
    return tuple(draft.steps)


def _owners(old: Sequence[tuple[str, ...]], new: Sequence[tuple[str, ...]]) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """The owner of each block before and after the blocks move, by their holders: a server that has a copy of a block can
    own it at once."""
    pairs = [(now[0] if now[0] in was else was[0], now[0]) for was, now in zip(old, new, strict=True)]
    return tuple(was for was, _ in pairs), tuple(now for _, now in pairs)


def _relocation(old: Setting, new: Setting, load: Load, costs: Costs) -> tuple[Step, ...]:
    """The graph is switched in place. From then on the new setting is in force, and parameters move on demand.

    A worker that becomes a server serves at once, during its last mini-batch. A machine is deleted when nothing is left on
    it: the background sweep moves parameters that no worker pulls.
    """
    draft = _Draft()
    before, after = set(old.workers + old.servers), set(new.workers + new.servers)
    for node in sorted(after - before):
        draft.add(Step("add", node, seconds=costs.add_seconds))
    draft.add(Step("graph", seconds=costs.graph_seconds), draft.find("add"))
    switched = draft.find("graph")
    for node in sorted(set(old.workers) - after):
        draft.add(Step("stop", node), switched)
    for node in sorted(set(new.workers) - set(old.workers)):
        draft.add(Step("start", node), switched)
    was, now = (old.servers, old.shares()[1]), (new.servers, new.shares()[1])
    for source, to, count in moves(block_counts(*was, costs.model_blocks), block_counts(*now, costs.model_blocks)):
        moved = count * load.model_bytes / costs.model_blocks
        draft.add(Step("sweep", source, to, count, "model", bytes_moved=moved), switched)
    for node in sorted(before - after):
        draft.add(Step("delete", node, seconds=costs.delete_seconds), draft.find("stop", "sweep", node=node))
    return tuple(draft.steps)


def _graph(old: Setting, new: Setting) -> bool:
    """Whether more changes than roles, shares and what changes in place: threads, transfer, graph options."""
    return any(getattr(old, f) != getattr(new, f) for f in Setting.__slots__ if f not in (*CHANGED_IN_PLACE, *_ROLES))


# ----------------------------------------------------------------------------------------------------- from begin to end


class Reconfiguration:
    """A reconfiguration that a tuner has requested (`target` is given), or a recovery that the runtime begins by itself.

    `begin` or `recover` starts it; from then on call `progress` after every push and every event of the control plane, and
    `apply_effects` before training goes on, until it is `over`.
    """

    def __init__(
        self,
        branch: Branch,
        control: ControlPlane,
        load: Load,
        costs: Costs,
        *,
        target: PreparedSetting | None = None,
        method: Method = "checkpoint",
        waited: bool = False,
    ) -> None:
        self.branch, self.waited = branch, waited  # waited: a tuner waits for its end, and gets the cost as an answer
        self.over = False
        self._control, self._load, self._costs = control, load, costs
        self._target, self._requested = target, target is not None
        self.plan = _NO_STEPS  # the one requested; steps in progress may be those of a recovery
        if target is not None:
            self.plan = plan_of(branch.setting, target.setting, method, load, costs)
        self._steps: PlanSteps | None = None  # of the plan in progress
        self._policy = self._old_policy = branch.policy
        self._workers: frozenset[str] = frozenset()  # that may begin a mini-batch, as of the last `_joined`
        self._applied: tuple[Setting, Effects] | None = None
        self._begun_seconds = 0.0
        # While all old workers have stopped and no new one has started, no worker trains, whatever the method:
        self._idle_seconds, self._idle_from = 0.0, math.inf  # in the plan in progress; since when, inf: some worker trains
        # Of plans that losses have interrupted:
        self._earlier_stall_seconds = self._earlier_bytes = 0.0
        self._earlier_steps: tuple[str, ...] = ()
        self._rolled_back = False
        self._waits = False  # no node is left that the job could continue on
        self._lost: frozenset[str] = frozenset()  # before and during the wait; a node that comes back has lost its part

    @property
    def in_place(self) -> bool:
        """Whether the change takes no steps, so that `Branch.change_in_place` is all there is to do."""
        return not self.plan.steps

    @property
    def quiescent(self) -> bool:
        """Whether no worker trains until it is over."""
        return self._steps is not None and self._steps.plan.quiescent

    @property
    def trains(self) -> bool:
        """Whether any worker is in a mini-batch."""
        return not self.quiescent and len(self.branch.resting) < len(self.branch.context.job.nodes)

    @property
    def follows_pushes(self) -> bool:
        """Whether a single push can change something at present, so that it must be told of each."""
        return self._steps is not None and self._steps.follows_pushes

    @property
    def lost_nodes(self) -> frozenset[str]:
        """Nodes to `recover` from, which it needs and which are gone: of the new setting, and of the old one until they are
        deleted. While it waits for nodes there are none."""
        if self._steps is None:
            return frozenset()
        if self._waits:
            return self._lost if self._steps.finished else frozenset()
        return self._steps.needed_nodes - self._control.present

    # ---------------------------------------------------------------------------------------------- from begin to end

    def begin(self, now: float) -> None:
        """Begin to bring the branch to the target, at `now`."""
        if self._target is None:
            raise ValueError("Cannot begin a reconfiguration without a target: give one, or call recover.")
        self._begun_seconds = now
        self._start(self.plan, self._target.setting, self._target.policy, frozenset(), now)

    def recover(self, lost: frozenset[str], now: float) -> bool:
        """Begin what the runtime does when the branch has lost nodes; False where those left cannot continue, and no other
        will join.

        A requested reconfiguration is completed where its new setting does without the lost nodes, and rolled back
        otherwise. Either way all workers stop and the model is placed anew, so that no block is left between two servers.
        Where those left cannot continue, the recovery begins anew with each node that joins.
        """
        branch, steps = self.branch, self._steps
        wanted, policy, completes = branch.setting, branch.policy, True
        if steps is not None:
            steps.cancel()
            completes = not self._requested or not lost & {*steps.ends.new.workers, *steps.ends.new.servers}
            wanted = steps.ends.new if self._requested and completes else steps.ends.old
            policy = self._policy if completes else self._old_policy
            branch.restore(steps.ends.old, self._old_policy)
        # Nodes that a step had already deleted are lost as well: a roll-back would need them.
        lost |= frozenset((*branch.setting.workers, *branch.setting.servers)) - self._control.present
        lost |= self._lost
        # A node under notice may stay where it is used, but is not chosen anew.
        usable = self._control.available | (self._control.present & set(wanted.workers + wanted.servers))
        nodes = branch.context.cluster.nodes
        able = frozenset(name for name, kind in nodes if kind.devices[0].speed > 0)  # it gets the first device's load
        left = survivors(wanted, usable, tuple(name for name, _ in nodes), able)
        if left is None and not self._control.expects_nodes:
            return False
        if steps is None:
            self._begun_seconds = now
        else:
            so_far = self.cost(now)
            self._earlier_stall_seconds, self._earlier_bytes = so_far.stall_seconds, so_far.bytes_moved
            outcome = ("complete" if completes else "roll back",) if self._requested and not self._waits else ()
            self._earlier_steps = so_far.steps + outcome
            self._rolled_back = self._rolled_back or not completes
        self._waits, self._lost = left is None, lost
        if left is None:
            self._start(_WAIT, wanted, policy, lost, now)
            return True
        half_way = steps is not None and self._requested
        servers = {*branch.setting.servers, *(steps.ends.new.servers if steps is not None else ())}
        if branch.setting.checkpoint_seconds and lost & servers:
            # No replicas: the whole model is as the last checkpoint has it.
            half_way = True
            self._earlier_steps += (f"lose {branch.roll_back()} clocks",)
        plan = _recovery(branch.setting, lost, half_way, self._load, self._costs)
        branch.stop_workers(lost, now)
        self._target = None  # the survivors' setting is prepared at the end
        self._start(plan, left, policy, lost, now)
        return True

    def progress(self, pushed: str | None, now: float) -> None:
        """`pushed` (None: no worker) has completed a push at `now`; steps continue as far as that lets them."""
        steps = self._started
        # Steps see the time of the push, even where the control plane has no event of its own.
        self._control.be_at(now)
        if pushed is not None:
            steps.pushed(pushed)
        steps.at_rest(self.branch.resting)
        # What the push has ended may end further steps at this instant; they must, before training goes on.
        self._control.settle()
        if steps.finished and not self._waits:
            self._finish(now)

    def apply_effects(self, now: float) -> None:
        """Let the branch train on the cluster as the steps have it at present; workers that may begin, begin."""
        steps, branch, disturbance = self._started, self.branch, self._control.disturbance
        switched = steps.switched and branch.setting != steps.ends.new
        has_work = switched and branch.install(self._prepared(), disturbance)
        setting, effects = steps.setting, steps.effects
        self._idle_seconds = self._idle_until(now)
        self._idle_from = math.inf if setting.workers else now
        if self._waits or not setting.workers:  # all have stopped, and no other has begun
            branch.without_workers()
        elif (setting, effects) != self._applied:
            # Building inputs takes milliseconds, and most pushes change nothing.
            self._applied = setting, effects
            has_work = branch.apply_effects(setting, effects) or has_work
        branch.disturb(disturbance)
        joined = self._joined(steps.workers, now)
        if (joined or switched or has_work) and not steps.plan.quiescent:
            branch.launch_waiting_workers()

    def cost(self, now: float) -> Cost:
        """What it has cost until `now`."""
        steps = self._started
        # A quiescent plan stalls training for all its time; others slow it down, and stall it while there is no worker.
        stalled = self._earlier_stall_seconds
        stalled += now - steps.begun_seconds if steps.plan.quiescent else self._idle_until(now)
        return Cost(
            seconds=now - self._begun_seconds,
            stall_seconds=stalled,
            slow_seconds=max(now - self._begun_seconds - stalled, 0.0),
            bytes_moved=math.fsum((self._earlier_bytes, steps.bytes_moved)),
            steps=(*self._earlier_steps, *steps.completed),
            done=not self._rolled_back and steps.finished,
        )

    def _idle_until(self, now: float) -> float:
        """Seconds of the plan in progress in which it had no worker."""
        return self._idle_seconds + max(now - self._idle_from, 0.0)

    def cancel(self) -> None:
        """Give up the steps that are not completed; the branch stays what it is."""
        self._started.cancel()

    def _start(self, plan: ReconfigurationPlan, new: Setting, policy: SyncPolicy, lost: frozenset[str], now: float) -> None:
        branch = self.branch
        nodes = branch.context.cluster.nodes
        ends = PlanEnds(branch.setting, new, {**loads(nodes, new), **loads(nodes, branch.setting)}, lost)
        touched = branch.context.workload.demand.touched_fraction
        nics = {name: kind.nic_bytes_per_second for name, kind in nodes}
        self._control.be_at(now)  # before any process is made: a process begins at the control plane's present time
        transfers = Transfers(self._control.env, nics)
        self._steps = PlanSteps(self._control, transfers, plan, ends, self._costs, touched, self._load)
        self._control.settle()
        self._policy, self._old_policy = policy, branch.policy
        self._workers, self._applied = frozenset(branch.setting.workers), None
        self._idle_seconds, self._idle_from = 0.0, math.inf
        if plan.quiescent:
            branch.stop_all(now)

    def _finish(self, now: float) -> None:
        steps, branch, new_policy = self._started, self.branch, self._policy is not self.branch.policy
        has_work = branch.install(self._prepared(), self._control.disturbance)
        if steps.plan.quiescent:
            branch.stop_all(now)
            branch.launch(branch.inputs.active)
        elif new_policy or has_work or self._lost or frozenset(branch.setting.workers) != frozenset(steps.ends.old.workers):
            self._joined(frozenset(branch.setting.workers), now)
            branch.launch_waiting_workers()
        self.over = True

    def _joined(self, workers: frozenset[str], now: float) -> frozenset[str]:
        """The nodes that have become workers, where `workers` may begin a mini-batch from `now` on."""
        joined, self._workers = workers - self._workers, workers
        if joined:
            # A node that joins has no mini-batch yet; its waiting is counted from now.
            self.branch.stop_workers(joined, now)
        return joined

    def _prepared(self) -> PreparedSetting:
        return self._target or self.branch.context.prepare(self._started.ends.new, self._policy)

    @property
    def _started(self) -> PlanSteps:
        if self._steps is None:
            raise ValueError("Cannot carry on a reconfiguration that has not begun: call begin or recover first.")
        return self._steps
