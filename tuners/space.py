"""The space of settings that a scenario allows: the knobs that it leaves free, and the values of all others.

Part of the contract, re-exported by `tuners.actions`. A space turns values of knobs into settings and back, and says which
settings a job cannot run under.
"""

from __future__ import annotations

import numbers
from collections.abc import Mapping
from dataclasses import dataclass, field, fields, replace
from difflib import get_close_matches
from typing import TYPE_CHECKING, Any

import numpy as np

from tuners.knobs import Choice, Integer, Knob, Real, Scalar
from tuners.settings import (
    MOST,
    OF_CACHES,
    OF_LOCAL_STEPS,
    OF_NODES,
    OF_PULLS,
    OF_REPLICAS,
    PLACEMENTS,
    Node,
    Rejected,
    Setting,
    shared_out,
)

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution

__all__ = ["Space", "check_values", "share_batch"]

_FIELDS = tuple(f.name for f in fields(Setting))
_PLAIN = tuple(f for f in _FIELDS[2:] if f != "block_owners")
_BY_NODE = {f: f"{f}/NODE" for f in ("role", "load", "data_share", "model_share")} | {"load": "load/NODE/DEVICE"}


@dataclass(frozen=True, slots=True)
class Space:
    """The knobs that a scenario leaves free, and the base setting, which has the values of all other knobs.

    A knob is named after the field of `Setting` it sets, or is one of

    * ``worker_count``: this number of nodes, the first ones, are workers, the others servers;
    * ``role/NODE``: "worker", "server", "both" or "idle";
    * ``load/NODE/DEVICE``: samples on that device (an index) of the node, used where the node is a worker. `Real` knobs are
      weights: the batch of the base is shared out in proportion to them, and a node without a sample is not a worker;
    * ``data_share/NODE``, ``model_share/NODE``: weights, divided by their sum;
    * ``block/NUMBER``: the server of that block of the embedding tables;
    * ``option/NAME``: a graph option.

    In a job of recorded runs only the settings that were `recorded` exist, as in tabular benchmarks. Raises ValueError for a
    knob that sets nothing, and for two knobs of one name.
    """

    base: Setting
    nodes: tuple[Node, ...]
    knobs: tuple[Knob, ...] = ()
    recorded: Mapping[Setting, None] = field(default_factory=dict)  # as keys, in a fixed order; empty: every setting exists
    blocks: int = 0  # of embedding tables; 0: the model has none

    def __post_init__(self) -> None:
        names = [k.name for k in self.knobs]
        for name in names:
            head, _, rest = name.partition("/")
            by_node = head in _BY_NODE and self._has(rest, devices=head == "load")
            by_block = head == "block" and rest.isdecimal() and int(rest) < self.blocks
            if (head == "block" and not by_block) or (name in ("placement", *OF_CACHES, *OF_REPLICAS) and not self.blocks):
                raise ValueError(
                    f"Knob {name!r} sets nothing: this job has {self.blocks or 'no'} blocks of embedding tables."
                )
            if not (name in _PLAIN or name == "worker_count" or (head == "option" and rest) or by_node or by_block):
                raise ValueError(f"Knob {name!r} sets nothing: {_other_names(name)}")
        if len(set(names)) != len(names):
            raise ValueError(f"Two knobs have one name among {names}: name each once.")

    def _has(self, place: str, *, devices: bool) -> bool:
        """Whether `place` is a node, or with `devices` a node and the number of a device of it, as "n0/1"."""
        name, _, device = place.partition("/") if devices else (place, "", "")
        node = next((n for n in self.nodes if n.name == name), None)
        return node is not None and (not devices or (device.isdecimal() and int(device) < len(node.devices)))

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(k.name for k in self.knobs)

    def knob(self, name: str) -> Knob | None:
        """The knob of that name, or None where it is not free."""
        return next((k for k in self.knobs if k.name == name), None)

    def frees(self, name: str) -> bool:
        """Whether a knob sets `name`; "role", "load", ... mean all knobs of that family."""
        return any(k.name == name or k.name.startswith(name + "/") for k in self.knobs)

    def may_have(self, plain: Mapping[str, Any]) -> bool:
        """Whether a setting may differ from these `plain` values of fields: one is free, or held at another value.

        For instance, workers may skip pulls where it may have `OF_PULLS` of `tuners.settings`, and servers may have
        checkpoints in place of replicas where it may have `OF_CHECKPOINTS`.
        """
        return any(self.frees(name) or getattr(self.base, name) != value for name, value in plain.items())

    @property
    def takes_local_steps(self) -> bool:
        """Whether a push may be what some local steps have changed, and not one gradient: some of this is free, or held at
        another value."""
        return self.may_have(OF_LOCAL_STEPS) or bool(self.base.node_steps)

    @property
    def whole_batch(self) -> int:
        """Samples in the mini-batches of all workers together, where free loads must sum to that; else 0."""
        weights = any(k.name.startswith("load/") and isinstance(k, Real) for k in self.knobs)
        return sum(map(sum, self.base.loads)) if weights else 0

    def holds_role(self, node: str) -> bool:
        """Whether no knob sets the role of that node."""
        return self.knob("worker_count") is None and self.knob(f"role/{node}") is None

    def sample(self, rng: np.random.Generator) -> dict[str, Scalar]:
        """One value per knob, independently and uniformly (in the logarithm where the knob says so); or the values of one of
        the recorded settings."""
        if self.recorded:
            return self.values(list(self.recorded)[int(rng.integers(len(self.recorded)))])
        return {k.name: k.sample(rng) for k in self.knobs}

    def setting(self, values: Mapping[str, Scalar]) -> Setting:
        """The base setting with these values of knobs; `check` says whether a job can run under it.

        Raises ValueError for a name that is no knob of this space, Rejected for a `worker_count` out of its range.
        """
        unknown = sorted(set(values) - set(self.names))
        if unknown:
            raise ValueError(f"No knob {unknown[0]!r} in this space: it has {', '.join(self.names) or 'none'}.")
        plain: dict[str, Any] = {k: v for k, v in values.items() if k in _FIELDS}
        changed = replace(self.base, **plain)
        changed = _with_roles(self, changed, values)
        return _with_shares(self, changed, values)

    def values(self, setting: Setting) -> dict[str, Scalar]:
        """The values of the knobs in `setting`: the inverse of the method `setting`, as far as the knobs determine it."""
        return {k.name: _value(self, k.name, setting) for k in self.knobs}

    def check(self, setting: Setting, in_force: Setting | None = None) -> None:
        """Raise Rejected, with reason and way out, where a job with this space cannot run under `setting`.

        What `setting` has in common with the one `in_force` is not refused: a loss of nodes may have changed what this space
        holds, or bounds.
        """
        _check_whole(setting, {n.name: len(n.devices) for n in self.nodes})
        now = in_force or self.base
        free = _free_fields(self, setting)
        for name in _FIELDS:
            value, base = getattr(setting, name), getattr(self.base, name)
            if value not in (base, getattr(now, name)) and not free[name]:
                raise Rejected(f"Cannot set {name} to {value!r}: this scenario holds it at {base!r}.")
        _check_families(self, setting, now)
        if setting.block_owners and len(setting.block_owners) != self.blocks:
            raise Rejected(
                f"Cannot place {len(setting.block_owners)} blocks: this job has {self.blocks} of embedding tables."
            )
        if setting.hot_blocks > self.blocks:
            raise Rejected(
                f"Cannot replicate {setting.hot_blocks} hot blocks: this job has {self.blocks} of embedding tables."
            )
        given = sum(map(sum, setting.loads))
        if self.whole_batch and given != self.whole_batch and setting.loads != now.loads:
            raise Rejected(
                f"Cannot use loads of {given} samples in all: they have to sum to the batch, {self.whole_batch}. "
                "`share_batch` of `tuners.space` divides it over the workers of a setting."
            )
        for knob in self.knobs:
            if knob.name.partition("/")[0] in ("load", "data_share", "model_share"):
                continue  # the range of a weight limits the search, not the share that results from it
            value = _value(self, knob.name, setting)
            if not knob.contains(value) and (in_force is None or value != _value(self, knob.name, in_force)):
                raise Rejected(f"Cannot set {knob.name} to {value!r}: this scenario allows {_allowed(knob)}.")
            if knob.name == "local_steps" and (outside := [p for p in setting.node_steps if not knob.contains(p[1])]):
                raise Rejected(
                    f"Cannot take {outside[0][1]} local steps on {outside[0][0]!r}: this scenario allows {_allowed(knob)}."
                )
        if self.recorded and setting not in self.recorded:
            wanted = ", ".join(f"{name} {value}" for name, value in self.values(setting).items())
            raise Rejected(f"Cannot run {wanted}: no such run was recorded, and {len(self.recorded)} settings were.")

    def admits(self, setting: Setting) -> bool:
        """Whether a job with this space can run under `setting`."""
        try:
            self.check(setting)
        except Rejected:
            return False
        return True

    def held_as(self, in_force: Setting, setting: Setting) -> Setting:
        """`setting`, with what this space holds as it is in `in_force`, where a loss of nodes has changed it.

        For a setting that has the value of the base there: it was made before the loss, or without knowing of it. Other
        values stay, so that `check` refuses them.
        """
        were, are, wanted = ({n.name: s.role_of(n.name) for n in self.nodes} for s in (self.base, in_force, setting))
        roles = {n: are[n] if self.holds_role(n) and role == were[n] else role for n, role in wanted.items()}
        if roles == wanted:
            return setting
        moved = setting.on(
            *(
                tuple(n for n in dict.fromkeys((*first, *later)) if roles[n] in (role, "both"))
                for role, first, later in (
                    ("worker", in_force.workers, setting.workers),
                    ("server", in_force.servers, setting.servers),
                )
            )
        )
        free = _free_fields(self, setting)
        held = [f for f in OF_NODES[2:] if not free[f] and getattr(setting, f) == getattr(self.base, f)]
        return replace(moved, **{f: getattr(in_force, f) for f in held})

    def among(self, nodes: tuple[Node, ...], in_force: Setting) -> Space:
        """The same space where only these `nodes` are there: without the knobs of others. Where the base names one of those,
        what has no knob is as it is in the setting `in_force`."""
        there = {n.name for n in nodes}
        whole = there.issuperset((*self.base.workers, *self.base.servers))
        knobs = tuple(k for k in self.knobs if _node_of(k) in (None, *there))
        return replace(self, base=self.base if whole else in_force, nodes=nodes, knobs=knobs)

    def to_optuna(self) -> dict[str, BaseDistribution]:
        """The same space as Optuna distributions, by knob name."""
        from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

        made: dict[str, BaseDistribution] = {}
        for k in self.knobs:
            if isinstance(k, Choice):
                made[k.name] = CategoricalDistribution(k.options)
            elif isinstance(k, Integer):
                made[k.name] = IntDistribution(k.low, k.high, log=k.log)
            else:
                made[k.name] = FloatDistribution(k.low, k.high, log=k.log)
        return made


def share_batch(space: Space, setting: Setting, weights: Mapping[str, float] | None = None) -> Setting:
    """`setting` with the batch that all workers of `space` share, if they do, in proportion to their `weights`, or equally.

    On a machine, devices have parts as in the base, or equal ones where the base has no load there.
    """
    if not space.whole_batch:
        return setting
    rows = dict(zip(space.base.workers, space.base.loads, strict=False))
    devices = {n.name: range(len(n.devices)) for n in space.nodes}
    parts = []
    for worker in setting.workers:
        free = [float(space.knob(f"load/{worker}/{d}") is not None) for d in devices.get(worker, ())]
        row = [float(n) for n in rows.get(worker, ())] if sum(rows.get(worker, ())) else free
        weight = 1.0 if weights is None else weights[worker]
        parts.append([weight * part / max(sum(row), 1.0) for part in row])
    if not sum(map(sum, parts)) > 0:
        return setting
    samples = iter(shared_out([part for row in parts for part in row], space.whole_batch))
    return replace(setting, loads=tuple(tuple(next(samples) for _ in row) for row in parts))


def _with_roles(space: Space, setting: Setting, values: Mapping[str, Scalar]) -> Setting:
    """`setting` with the roles of `values`; other workers or servers than those of the base have equal loads and shares."""
    names = [n.name for n in space.nodes]
    if "worker_count" in values:
        count = _worker_count(space, values["worker_count"])
        setting = replace(setting, workers=tuple(names[:count]), servers=tuple(names[count:]))
    roles = {n: values[f"role/{n}"] for n in names if f"role/{n}" in values}
    if roles:
        was = {n: setting.role_of(n) for n in names} | roles
        setting = replace(
            setting,
            workers=tuple(n for n in names if was[n] in ("worker", "both")),
            servers=tuple(n for n in names if was[n] in ("server", "both")),
        )
    if (setting.workers, setting.servers) != (space.base.workers, space.base.servers):
        # Loads and shares of the base belong to its own workers and servers; other ones get equal shares.
        setting = replace(setting, loads=(), data_shares=(), model_shares=(), block_owners=())
    return setting


def _worker_count(space: Space, value: Scalar) -> int:
    """`value` as a count. A setting has names of nodes in its place, so `check` could not tell what was asked."""
    knob = next(k for k in space.knobs if k.name == "worker_count")
    if not (isinstance(value, numbers.Real) and float(value).is_integer() and knob.contains(int(value))):
        raise Rejected(f"Cannot set worker_count to {value!r}: this scenario allows {_allowed(knob)}.")
    return int(value)


def _with_shares(space: Space, setting: Setting, values: Mapping[str, Scalar]) -> Setting:
    """`setting` with the loads, shares, owners of blocks and graph options of `values`."""
    if any(v.startswith("load/") for v in values):
        setting = _with_loads(space, setting, values)
    elif not setting.loads:
        setting = share_batch(space, setting)
    data = _normalised("data_share", setting.workers, values)
    model = _normalised("model_share", setting.servers, values)
    setting = replace(setting, data_shares=data or setting.data_shares, model_shares=model or setting.model_shares)
    owners = {int(k.partition("/")[2]): str(v) for k, v in values.items() if k.startswith("block/")}
    if owners and setting.servers:  # roles without a server are refused later, with the reason
        # A node that is no server under these roles owns no block; that block stays where it is without knobs.
        wanted = {i: owner for i, owner in owners.items() if owner in setting.servers}
        named = tuple(wanted.get(i, owner) for i, owner in enumerate(setting.owners(space.blocks)))
        setting = replace(setting, model_shares=(), block_owners=named)
    options = {k.partition("/")[2]: v for k, v in values.items() if k.startswith("option/")}
    if options:
        setting = replace(setting, options=tuple(sorted((dict(setting.options) | options).items())))
    return setting


def _with_loads(space: Space, setting: Setting, values: Mapping[str, Scalar]) -> Setting:
    names = [[f"load/{n.name}/{d}" for d in range(len(n.devices))] for n in space.nodes if n.name in setting.workers]
    rows = [[int(values.get(name, 0)) for name in row] for row in names]
    if space.whole_batch:
        weights = [float(values.get(name, 0)) for row in names for name in row]
        if not any(weights):
            weights = [float(space.knob(name) is not None) for row in names for name in row]
        samples = iter(shared_out(weights, space.whole_batch) if any(weights) else [0] * len(weights))
        rows = [[next(samples) for _ in row] for row in names]
    loads = dict(zip((n.name for n in space.nodes if n.name in setting.workers), map(tuple, rows), strict=True))
    # A worker that is not among the nodes, because it is about to leave, can be given none.
    workers = tuple(w for w in setting.workers if w in loads and (any(loads[w]) or not space.whole_batch))
    return replace(setting, workers=workers, loads=tuple(loads[w] for w in workers))


def _value(space: Space, name: str, setting: Setting) -> Scalar:
    """The value of the knob `name` in `setting`."""
    if name == "worker_count":
        return len(setting.workers)
    head, _, rest = name.partition("/")
    node, _, device = rest.partition("/")
    if head == "role":
        return setting.role_of(node)
    if head == "block":
        return setting.owners(space.blocks)[int(rest)]
    if head == "option":
        return dict(setting.options).get(rest, "unset")
    if head == "load":
        rows = dict(zip(setting.workers, setting.loads, strict=False))
        first = setting.batch_size if node in setting.workers and device == "0" else 0
        samples = rows[node][int(device)] if node in rows else first
        return samples / space.whole_batch if space.whole_batch else samples
    if head in ("data_share", "model_share"):
        data, model = setting.shares()
        members, shares = (setting.workers, data) if head == "data_share" else (setting.servers, model)
        return dict(zip(members, shares, strict=True)).get(node, 0.0)
    value: Scalar = getattr(setting, name)
    return value


def _free_fields(space: Space, setting: Setting) -> dict[str, bool]:
    """Whether `setting` may have its own value of each field."""
    roles_free = space.frees("role") or space.frees("worker_count")
    return {name: space.knob(name) is not None for name in _FIELDS} | {
        "workers": roles_free,
        "servers": roles_free,
        "loads": space.frees("load") or roles_free,
        "data_shares": space.frees("data_share") or roles_free,
        # Where blocks are placed one by one, they are the shares.
        "model_shares": space.frees("model_share") or roles_free or (space.frees("block") and bool(setting.block_owners)),
        "options": space.frees("option"),
        "node_steps": space.frees("local_steps"),
        "block_owners": space.frees("block"),
    }


def _check_families(space: Space, setting: Setting, in_force: Setting) -> None:
    """Raise Rejected where a role or option differs from the base, and a role also from the one `in_force`, and is not
    free, though others of its family are."""
    if space.frees("role") and space.knob("worker_count") is None:
        for node in space.nodes:
            role, base = setting.role_of(node.name), space.base.role_of(node.name)
            if role not in (base, in_force.role_of(node.name)) and space.holds_role(node.name):
                raise Rejected(f"Cannot make node {node.name!r} a {role}: this scenario holds it as {base}.")
    options, held = dict(setting.options), dict(space.base.options)
    for name in sorted(options.keys() | held.keys()):
        if options.get(name) != held.get(name) and space.knob(f"option/{name}") is None:
            raise Rejected(f"Cannot set option {name!r} to {options.get(name)!r}: this scenario does not free it.")


def _normalised(family: str, members: tuple[str, ...], values: Mapping[str, Scalar]) -> tuple[float, ...]:
    """The weights `family/NODE` of `members`, divided by their sum; () where none is given or all are zero."""
    weights = [float(values.get(f"{family}/{m}", 0.0)) for m in members]
    total = sum(weights)
    return tuple(w / total for w in weights) if total > 0 else ()


def _allowed(knob: Knob) -> str:
    """The values that a knob can have, in words."""
    return str(knob.options) if isinstance(knob, Choice) else f"{knob.low} to {knob.high}"


def _node_of(knob: Knob) -> str | None:
    """The node whose role, load or share a knob sets, if any."""
    head, _, rest = knob.name.partition("/")
    return rest.partition("/")[0] if head in _BY_NODE else None


# -------------------------------------------------------------------------------------------- what no job can have


def _check_whole(setting: Setting, devices: Mapping[str, int]) -> None:
    """Raise Rejected unless `setting` makes sense by itself on nodes that have these numbers of `devices`."""
    _check_roles(setting, devices)
    _check_shares(setting, devices)
    check_values(setting)
    _check_steps(setting, devices)
    _check_blocks(setting)


def _other_names(name: str) -> str:
    """Which names a knob may have in place of `name`, which sets nothing."""
    if form := _BY_NODE.get(name.partition("/")[0]):
        device = ", and with the number of one of its devices, from 0" if form.endswith("DEVICE") else ""
        return f"write {form}, with a node of this job{device}."
    near = get_close_matches(name, [*_FIELDS[2:], "worker_count"], n=2, cutoff=0.7)
    hint = f" Did you mean {' or '.join(near)}?" if near else ""
    by_name = ", ".join([*_BY_NODE.values(), "block/NUMBER", "option/NAME"])
    return f"it is no field of Setting that can be free, and none of worker_count, {by_name}.{hint}"


def check_values(setting: Setting) -> None:
    """Raise Rejected for a number that no job can have, whatever its nodes are."""
    _check_counts(setting)
    _check_rates(setting)


def _check_roles(setting: Setting, devices: Mapping[str, int]) -> None:
    for role, members in (("worker", setting.workers), ("server", setting.servers)):
        if not members:
            raise Rejected(f"Cannot run with no {role}s: name at least one node as a {role}.")
        if len(set(members)) != len(members):
            raise Rejected(f"Cannot run with {role}s {members}: a node is named twice; name each once.")
        missing = [m for m in members if m not in devices]
        if missing:
            raise Rejected(f"Cannot use node {missing[0]!r} as a {role}: this job has {', '.join(devices)}.")


def _check_shares(setting: Setting, devices: Mapping[str, int]) -> None:
    for name, shares, members in (
        ("data_shares", setting.data_shares, setting.workers),
        ("model_shares", setting.model_shares, setting.servers),
    ):
        if shares and (len(shares) != len(members) or min(shares) < 0 or not abs(sum(shares) - 1) <= 1e-6):
            raise Rejected(f"Cannot use {name} {shares}: give {len(members)} shares, none negative, that sum to 1.")
    if setting.loads:
        rows = tuple(len(row) for row in setting.loads)
        possible = all(min(row) >= 0 and 1 <= sum(row) <= MOST for row in setting.loads)
        if rows != tuple(devices[w] for w in setting.workers) or not possible:
            raise Rejected(
                f"Cannot use loads {setting.loads}: give each worker a row, one count per device, at least one sample."
            )


def _check_counts(setting: Setting) -> None:
    least_of = {"batch_size": 1, "staleness": 0, "intra_threads": 0, "inter_threads": 0, "local_steps": 1}
    least_of |= OF_CACHES | OF_PULLS | OF_REPLICAS | {"quorum": 0}
    for name, least in least_of.items():
        value = getattr(setting, name)
        if not least <= value <= MOST:
            raise Rejected(f"Cannot set {name} to {value}: it must be at least {least} and at most {MOST}.")


def _check_steps(setting: Setting, devices: Mapping[str, int]) -> None:
    for name, steps in setting.node_steps:
        if name not in devices or steps < 1:
            raise Rejected(
                f"Cannot take {steps} local steps on {name!r}: give at least 1, on a node of {', '.join(devices)}."
            )


def _check_blocks(setting: Setting) -> None:
    if setting.replicas > len(setting.servers):
        raise Rejected(
            f"Cannot hold each hot block on {setting.replicas} servers: there are {len(setting.servers)}; lower replicas."
        )
    if setting.placement not in PLACEMENTS:
        raise Rejected(f"Cannot place blocks by {setting.placement!r}: choose {' or '.join(PLACEMENTS)}.")
    if setting.block_owners:
        if setting.model_shares:
            raise Rejected("Cannot use model_shares and block_owners at once: the blocks of a server are its share.")
        strangers = [n for n in setting.block_owners if n not in setting.servers]
        if strangers:
            raise Rejected(
                f"Cannot place a block on {strangers[0]!r}: it is no server; there are {', '.join(setting.servers)}."
            )


def _check_rates(setting: Setting) -> None:
    """Raise Rejected for a rate, momentum or interval that no job can have."""
    if setting.transfer_bits not in (16, 32):
        raise Rejected(f"Cannot transfer {setting.transfer_bits} bits: choose 16 or 32.")
    if not (0 <= setting.learning_rate < float("inf") and 0 <= setting.momentum <= 1):
        raise Rejected(
            f"Cannot train with learning_rate {setting.learning_rate}, momentum {setting.momentum}: "
            "the rate must not be negative or infinite, and momentum lies in [0, 1]."
        )
    if not 0 <= setting.checkpoint_seconds < float("inf"):
        raise Rejected(
            f"Cannot make a checkpoint every {setting.checkpoint_seconds} s: give a positive number, or 0 for replicas."
        )
    if not 0 <= setting.grace_seconds < float("inf"):
        raise Rejected(f"Cannot wait {setting.grace_seconds} s after a quorum: give a number of seconds, 0 for no grace.")
    if not (0 < setting.outer_rate < float("inf") and 0 <= setting.outer_momentum < 1):
        raise Rejected(
            f"Cannot apply local steps with outer_rate {setting.outer_rate}, outer_momentum {setting.outer_momentum}: "
            "the rate must be positive and finite, and the momentum lies in [0, 1)."
        )
