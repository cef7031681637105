"""The plan of a reconfiguration: a DAG of steps from one setting to another, by each of three methods.

* ``checkpoint``, the papers' baseline: all workers stop; save, restart under the new setting, restore.
* ``migrate``, Cruise's (Section IV): blocks of model and training data move while training goes on; machines
  are added, deleted, or switch roles (`_migration` has the edges of its DAG).
* ``relocate``, TensorFlowOnline's (Section V): the graph is switched in place, and parameters move when they are pulled from
  their old owner and pushed to the new one; training data comes from shared storage and need not move.

What servers read at every push or pull (learning rate, momentum, policy, batch size, loads) changes in place, without a
step. `simulators.reconfiguration.reconfiguration` carries plans out; `costs.toml` has the constants of what steps cost.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import replace
from heapq import heapify, heapreplace
from importlib.resources import files
from typing import Literal, NamedTuple

import msgspec

from tuners.actions import Method, Setting

__all__ = [
    "IN_PLACE",
    "METHODS",
    "Costs",
    "Load",
    "ReconfigurationPlan",
    "Step",
    "block_counts",
    "check",
    "in_place",
    "moves",
    "plan",
    "recovery",
    "survivors",
]

METHODS: tuple[Method, ...] = ("checkpoint", "migrate", "relocate")  # that a simulated system can reconfigure by
_FITTED = tomllib.loads((files("simulators.reconfiguration") / "costs.toml").read_text("utf-8"))

_IN_PLACE = ("learning_rate", "momentum", "policy", "staleness", "batch_size", "loads")
_ROLES = ("workers", "servers", "model_shares", "data_shares")


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What reconfigurations, forks and evaluations cost. The defaults are in `costs.toml`, with what they are fitted to."""

    restart_seconds: float = _FITTED["restart_seconds"]  # checkpoint: stop all processes and start them again
    policy_restart_seconds: float = _FITTED["policy_restart_seconds"]  # the same for a change of policy; 0: that is in place
    checkpoint_bytes_per_second: float = _FITTED["checkpoint_bytes_per_second"]  # writing the model
    restore_bytes_per_second: float = _FITTED["restore_bytes_per_second"]  # and reading it back, placed anew
    add_seconds: float = _FITTED["add_seconds"]  # a machine's container until it takes part
    delete_seconds: float = _FITTED["delete_seconds"]
    switch_seconds: float = _FITTED["switch_seconds"]  # a server becomes a worker, or the other way, in its container
    start_seconds: float = _FITTED["start_seconds"]  # migrate: a worker begins when its training data is there
    handshake_seconds: float = _FITTED["handshake_seconds"]  # of a move, before its first bytes: a block changes its owner
    data_bytes_per_second: float = _FITTED["data_bytes_per_second"]  # what one worker can send of its training data
    model_bytes_per_second: float = _FITTED["model_bytes_per_second"]  # what one server can send of the model
    model_blocks: int = _FITTED["model_blocks"]  # that the model is divided into
    blocks_in_flight: int = _FITTED["blocks_in_flight"]  # of one move at a time
    graph_seconds: float = _FITTED["graph_seconds"]  # relocate: the graph is switched in place
    sweep_bytes_per_second: float = _FITTED["sweep_bytes_per_second"]  # in the background, all old owners together
    detection_seconds: float = _FITTED["detection_seconds"]  # until the runtime acts on the loss of a node
    fork_bytes_per_second: float = _FITTED["fork_bytes_per_second"]  # what one server copies in its memory
    evaluate_seconds: float | None = (
        None  # of one `Evaluate`; None: a pass over the validation data, `jobs.evaluate_seconds`
    )


class Load(NamedTuple):
    """How much there is to move."""

    model_bytes: float
    data_blocks: int
    data_block_bytes: float


class Step(NamedTuple):
    """One step of a plan, begun when those before it have ended."""

    kind: Literal[
        "checkpoint", "restart", "restore", "add", "delete", "switch", "stop", "start", "move", "sweep", "graph", "detect"
    ]
    node: str = ""  # the node that it changes; the source of a move or sweep
    to: str = ""  # the target of a move or sweep
    blocks: int = 0
    of: Literal["", "model", "data"] = ""  # what a move moves
    seconds: float = 0.0  # that it takes, apart from moving
    bytes_moved: float = 0.0
    after: tuple[int, ...] = ()  # indices of steps in the plan

    @property
    def name(self) -> str:
        if self.kind in ("move", "sweep"):
            return f"{self.kind} {self.blocks} {self.of} block{'s' * (self.blocks != 1)} {self.node} -> {self.to}"
        return f"{self.kind} {self.node}".rstrip()


class ReconfigurationPlan(NamedTuple):
    """The steps of a reconfiguration; none if it happens in place."""

    steps: tuple[Step, ...]
    quiescent: bool  # no worker trains until its end
    on_demand: bool = False  # the new setting is in force as soon as the graph is switched


IN_PLACE = ReconfigurationPlan((), quiescent=False)


def check(costs: Costs) -> None:
    """Raise ValueError for costs that cannot be."""
    for name in costs.__struct_fields__:
        value = getattr(costs, name)
        if value is None:
            continue
        if name.endswith("per_second") and not value > 0:
            raise ValueError(f"Cannot use {name} = {value}: it must be positive.")
        if name.endswith("_seconds") and not 0 <= value < math.inf:
            raise ValueError(f"Cannot use {name} = {value}: it must be finite and not negative.")
        if "blocks" in name and value < 1:
            raise ValueError(f"Cannot use {name} = {value}: it must be at least 1.")


def in_place(old: Setting, new: Setting, method: Method = "checkpoint") -> bool:
    """Whether a reconfiguration takes no steps. Training data is stored with the workers under ``migrate`` only."""
    free = _IN_PLACE if method == "migrate" else (*_IN_PLACE, "data_shares")
    return all(getattr(old, f) == getattr(new, f) for f in Setting.__slots__ if f not in free)


def plan(old: Setting, new: Setting, method: Method, load: Load, costs: Costs) -> ReconfigurationPlan:
    """The steps from `old` to `new`. Where a change of policy takes a restart, the whole setting changes by that restart."""
    restarts = costs.policy_restart_seconds > 0 and old.policy != new.policy
    if in_place(old, new, method) and not restarts:
        return IN_PLACE
    if method == "checkpoint" or restarts:
        return ReconfigurationPlan(_checkpoint(old, new, load, costs), quiescent=True)
    steps = _migration(old, new, load, costs) if method == "migrate" else _relocation(old, new, load, costs)
    return ReconfigurationPlan(steps, quiescent=False, on_demand=method == "relocate")


# ----------------------------------------------------------------------------------------------------------------- losses


def survivors(
    setting: Setting, present: frozenset[str], nodes: tuple[str, ...], able: frozenset[str] | None = None
) -> Setting | None:
    """`setting` without the nodes that are not `present`, shares in proportion; None where too few are left to go on.

    A role without survivors goes to the first of `nodes` that is present and idle, or else to a node of the other role, if
    that has two. Only nodes that are `able` to compute (None: all) become workers.
    """
    workers = tuple(w for w in setting.workers if w in present)
    servers = tuple(s for s in setting.servers if s in present)
    idle = [n for n in nodes if n in present and n not in (*workers, *servers)]
    if not (workers and servers) and len(idle) + len({*workers, *servers}) < 2:
        return None
    if not workers:
        computing = [n for n in (*idle, *servers[1:], *servers[:1]) if able is None or n in able]
        if not computing:
            return None
        workers = (computing[0],)
        servers = tuple(s for s in servers if s not in workers)
        idle = [n for n in idle if n not in workers]
    if not servers:
        servers = (idle.pop(0) if idle else workers[1],)
        workers = tuple(w for w in workers if w not in servers)
    rows = dict(zip(setting.workers, setting.loads, strict=False))
    return replace(
        setting,
        workers=workers,
        servers=servers,
        loads=tuple(rows[w] for w in workers) if all(w in rows for w in workers) else (),
        data_shares=_rescaled(setting.workers, setting.data_shares, workers),
        model_shares=_rescaled(setting.servers, setting.model_shares, servers),
    )


def recovery(old: Setting, lost: frozenset[str], half_way: bool, load: Load, costs: Costs) -> ReconfigurationPlan:
    """What the runtime does about `lost` nodes: detect the loss, then restore from replicas what they served.

    A node that was only a worker is dropped while the others train on. Where a reconfiguration was `half_way`, all
    workers stop, and the whole model is placed anew.
    """
    share = sum(part for server, part in zip(old.servers, old.shares()[1], strict=True) if server in lost)
    moved = load.model_bytes * (1.0 if half_way else share)
    detect = Step("detect", seconds=costs.detection_seconds)
    if moved == 0:
        return ReconfigurationPlan((detect,), quiescent=False)
    restore = Step("restore", seconds=moved / costs.restore_bytes_per_second, bytes_moved=moved, after=(0,))
    return ReconfigurationPlan((detect, restore), quiescent=True)


def _rescaled(members: tuple[str, ...], shares: tuple[float, ...], left: tuple[str, ...]) -> tuple[float, ...]:
    kept = dict(zip(members, shares, strict=False))
    total = sum(kept.get(n, 0.0) for n in left)
    return tuple(kept[n] / total for n in left) if total > 0 and all(n in kept for n in left) else ()


# ---------------------------------------------------------------------------------------------------------------- blocks


def block_counts(members: tuple[str, ...], shares: tuple[float, ...], blocks: int) -> dict[str, int]:
    """So many blocks divided by largest remainder; of equal remainders the first member gets more."""
    exact = [share * blocks for share in shares]
    counts = [math.floor(x + 1e-9) for x in exact]  # 0.29 * 100 is 28.999999999999996
    order = sorted(range(len(members)), key=lambda i: (counts[i] - exact[i], i))
    for i in order[: blocks - sum(counts)]:
        counts[i] += 1
    return dict(zip(members, counts, strict=True))


def moves(old: Mapping[str, int], new: Mapping[str, int]) -> list[tuple[str, str, int]]:
    """(source, target, blocks) that turn the counts `old` into `new`: from the largest surplus to the largest deficit, with
    two heaps, until no surplus is left (Cruise, Section IV-A.3)."""
    names = sorted(old.keys() | new.keys())
    difference = {n: old.get(n, 0) - new.get(n, 0) for n in names}
    surplus = [(-d, n) for n, d in difference.items() if d > 0]
    deficit = [(d, n) for n, d in difference.items() if d < 0]
    heapify(surplus)
    heapify(deficit)
    found = []
    while surplus and surplus[0][0] and deficit and deficit[0][0]:
        (have, source), (lack, target) = surplus[0], deficit[0]
        count = min(-have, -lack)
        found.append((source, target, count))
        heapreplace(surplus, (have + count, source))
        heapreplace(deficit, (lack + count, target))
    return found


# --------------------------------------------------------------------------------------------------------------- methods


def _checkpoint(old: Setting, new: Setting, load: Load, costs: Costs) -> tuple[Step, ...]:
    """CKP, SSR, MDR and TDR in TensorFlowOnline's terms. A model whose placement stays is neither written nor read."""
    same = old.policy == new.policy or costs.policy_restart_seconds == 0
    restart = Step("restart", seconds=costs.restart_seconds if same else costs.policy_restart_seconds)
    if all(getattr(old, f) == getattr(new, f) for f in _ROLES if f != "data_shares"):
        return (restart,)
    moved = load.model_bytes
    return (
        Step("checkpoint", seconds=moved / costs.checkpoint_bytes_per_second, bytes_moved=moved),
        restart._replace(after=(0,)),
        Step("restore", seconds=moved / costs.restore_bytes_per_second, bytes_moved=moved, after=(1,)),
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
        size = load.model_bytes / blocks if of == "model" else load.data_block_bytes
        for source, to, count in moves(block_counts(*was, blocks), block_counts(*now, blocks)):
            needs = draft.find("add", "switch", node=to) + (draft.find("stop", node=source) if of == "data" else [])
            draft.add(Step("move", source, to, count, "model" if of == "model" else "data", 0.0, count * size), needs)
    for node in sorted(set(new.workers) - set(old.workers)):
        needs = draft.find("add", "switch", node=node) + draft.find("move", to=node, of="data")
        needs += draft.find("move", node=node, of="model")
        draft.add(Step("start", node, seconds=costs.start_seconds), needs)
    for node in sorted(before - after):
        draft.add(Step("delete", node, seconds=costs.delete_seconds), draft.find("stop", "move", node=node))
    if _graph(old, new):
        draft.add(Step("graph", seconds=costs.graph_seconds), range(len(draft.steps)))
    return tuple(draft.steps)


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
    return any(getattr(old, f) != getattr(new, f) for f in Setting.__slots__ if f not in (*_IN_PLACE, *_ROLES))
