"""The plan of a reconfiguration: a DAG of steps from one setting to another, by each of three methods, or after a loss.

* ``checkpoint``, the papers' baseline: all workers stop; save, restart under the new setting, restore.
* ``migrate``, Cruise's (Section IV): blocks of model and training data move while training goes on; machines
  are added, deleted, or switch roles (`_migration` has the edges of its DAG).
* ``relocate``, TensorFlowOnline's (Section V): the graph is switched in place, and parameters move when they are pulled from
  their old owner and pushed to the new one; training data comes from shared storage and need not move.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

from simulators.reconfiguration.costs import Costs
from simulators.reconfiguration.shares import block_counts, copies_of_blocks, moves, moves_of_blocks
from tuners.actions import Method, Setting
from tuners.playing.system import CHANGED_IN_PLACE, in_place
from tuners.settings import OF_REPLICAS, OF_TABLES

__all__ = ["NO_STEPS", "WAIT", "Load", "ReconfigurationPlan", "Step", "plan_of", "recovery_plan"]

_ROLES = ("workers", "servers", "model_shares", "data_shares", *OF_TABLES, *OF_REPLICAS)


class Load(NamedTuple):
    """How much there is to move."""

    model_bytes: float
    data_blocks: int
    data_block_bytes: float
    has_tables: bool = False  # the model is embedding tables, whose blocks are placed one by one
    hottest: tuple[int, ...] = ()  # see `Job.hottest`


class Step(NamedTuple):
    """One step of a plan, begun when those before it have ended."""

    kind: Literal[
        "checkpoint",
        "restart",
        "restore",
        "add",
        "delete",
        "switch",
        "stop",
        "start",
        "move",
        "copy",
        "sweep",
        "graph",
        "detect",
        "wait",
    ]
    node: str = ""  # the node that it changes; the source of a move, copy or sweep
    to: str = ""  # the target of a move, copy or sweep
    blocks: int = 0
    of: Literal["", "model", "data"] = ""  # what a move or copy moves
    numbers: tuple[int, ...] = ()  # of the blocks, where these are of embedding tables
    seconds: float = 0.0  # that it takes, apart from moving
    bytes_moved: float = 0.0
    after: tuple[int, ...] = ()  # indices of steps in the plan

    @property
    def name(self) -> str:
        if self.kind in ("move", "copy", "sweep"):
            return f"{self.kind} {self.blocks} {self.of} block{'s' * (self.blocks != 1)} {self.node} -> {self.to}"
        return f"{self.kind} {self.node}".rstrip()


class ReconfigurationPlan(NamedTuple):
    """The steps of a reconfiguration; none if it happens in place."""

    steps: tuple[Step, ...]
    quiescent: bool  # no worker trains until its end
    on_demand: bool = False  # the new setting is in force as soon as the graph is switched


NO_STEPS = ReconfigurationPlan((), quiescent=False)
WAIT = ReconfigurationPlan((Step("wait"),), quiescent=True)
"""Too few nodes are left for any setting, and others will join: the job waits for the next of them."""


def plan_of(old: Setting, new: Setting, method: Method, load: Load, costs: Costs) -> ReconfigurationPlan:
    """The steps from `old` to `new`. Where a change of policy takes a restart, the whole setting changes by that restart."""
    restarts = costs.policy_restart_seconds > 0 and old.policy != new.policy
    if in_place(old, new, method) and not restarts:
        return NO_STEPS
    if method == "checkpoint" or restarts:
        return ReconfigurationPlan(_checkpoint(old, new, load, costs), quiescent=True)
    steps = _migration(old, new, load, costs) if method == "migrate" else _relocation(old, new, load, costs)
    return ReconfigurationPlan(steps, quiescent=False, on_demand=method == "relocate")


def recovery_plan(old: Setting, lost: frozenset[str], half_way: bool, load: Load, costs: Costs) -> ReconfigurationPlan:
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
    size = load.model_bytes / costs.model_blocks
    if not load.has_tables:  # else it matters which blocks move: below
        for source, to, count in _moves(old.model_by_server(), new.model_by_server(), costs.model_blocks):
            needs = draft.find("add", "switch", node=to)
            draft.add(Step("move", source, to, count, "model", bytes_moved=count * size), needs)
    for source, to, count in _moves(old.data_by_worker(), new.data_by_worker(), load.data_blocks):
        needs = draft.find("add", "switch", node=to) + draft.find("stop", node=source)
        draft.add(Step("move", source, to, count, "data", bytes_moved=count * load.data_block_bytes), needs)
    if load.has_tables:
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
    if _graph_changes(old, new):
        draft.add(Step("graph", seconds=costs.graph_seconds), range(len(draft.steps)))
    return tuple(draft.steps)


def _moves(old: Mapping[str, float], new: Mapping[str, float], blocks: int) -> list[tuple[str, str, int]]:
    """(source, target, blocks) that turn the shares `old` of all blocks into `new`."""
    return moves(*(block_counts(tuple(held), tuple(held.values()), blocks) for held in (old, new)))


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
    for source, to, count in _moves(old.model_by_server(), new.model_by_server(), costs.model_blocks):
        moved = count * load.model_bytes / costs.model_blocks
        draft.add(Step("sweep", source, to, count, "model", bytes_moved=moved), switched)
    for node in sorted(before - after):
        draft.add(Step("delete", node, seconds=costs.delete_seconds), draft.find("stop", "sweep", node=node))
    return tuple(draft.steps)


def _graph_changes(old: Setting, new: Setting) -> bool:
    """Whether more changes than roles, shares and what changes in place: threads, transfer, graph options."""
    return any(getattr(old, f) != getattr(new, f) for f in Setting.__slots__ if f not in (*CHANGED_IN_PLACE, *_ROLES))
