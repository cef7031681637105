"""The structured model of an iteration of synchronous SGD (Dalibard et al., "Tuning the Scheduling of Distributed Stochastic
Gradient Descent with Bayesian Optimization", Section 3).

An iteration takes as long as the slowest machine, and its communication. The parts are observed separately, each by itself
(conditional independence), and composed only in forward draws:

* per device type, the rate in samples per second as a function of the load: r / (1 + s / n), which is constant or saturates,
  times exp of a Gaussian process of log n. Rates are modelled as logarithms, so none is ever negative;
* per type of machine with several devices, what summing their gradients takes on top of the slowest device, where more than
  one has a load: log seconds, a constant with a Gaussian process of the loads;
* communication (`tuners.bespoke_bo.communication`), one part for the cluster: what an iteration takes beyond its slowest
  machine.

Priors are ours, and so is the whole model as far as the paper leaves it open: it is not in the public framework.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Job
from tuners.bespoke_bo.communication import communication
from tuners.bespoke_bo.parts import Evidence, Part, Prior
from tuners.bespoke_bo.schedules import batch, devices
from tuners.bespoke_bo.smc import Inference, Posterior
from tuners.settings import Choice

__all__ = [
    "BOTH",
    "IDLE",
    "ROLES",
    "SERVER",
    "WORKER",
    "Cluster",
    "Group",
    "IterationModel",
    "Observed",
    "aggregation",
    "device_rate",
]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

ROLES = ("idle", "worker", "server", "both")
IDLE, WORKER, SERVER, BOTH = range(4)


# ---------------------------------------------------------------------------------------------------------------- cluster


@dataclass(frozen=True, slots=True)
class Group:
    """Machines that are alike: of one type, with the same devices to use and the same roles to take."""

    type: str
    members: tuple[int, ...]  # indices into `Job.nodes`
    devices: tuple[int, ...]  # indices of the devices that can be given samples
    kinds: tuple[str, ...]  # of these devices
    roles: tuple[int, ...]  # IDLE, WORKER, SERVER, BOTH, as far as the job leaves them free


@dataclass(frozen=True)
class Cluster:
    """What is publicly known of the job: machines by groups, batch size, bytes of the model."""

    groups: tuple[Group, ...]
    types: tuple[str, ...]  # of machines
    speeds: tuple[float, ...]  # bytes per second that the vendor states, a type each
    cores: tuple[int, ...]  # a type each
    machines: int  # all of the job's, those that are gone included
    width: int  # most devices of a machine
    batch: int  # samples per iteration
    model_bytes: float

    @classmethod
    def of(cls, job: Job, available: Sequence[str] | None = None) -> Cluster:
        """The cluster of a job, or of those of its nodes that are `available`."""
        names = {n.name for n in job.nodes} if available is None else set(available)
        usable = devices(job)
        found = dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]]()
        for index, node in enumerate(job.nodes):
            mine = tuple(d for i, d in usable if i == index)
            if node.name in names:
                found.setdefault((node.type, mine, _roles(job, node.name)), []).append(index)
        groups = tuple(
            Group(kind, tuple(members), mine, tuple(job.nodes[members[0]].devices[d] for d in mine), roles)
            for (kind, mine, roles), members in found.items()
        )
        nodes = {n.type: n for n in job.nodes}
        return cls(
            groups=groups,
            types=tuple(nodes),
            speeds=tuple(n.nic_bytes_per_second for n in nodes.values()),
            cores=tuple(n.cores for n in nodes.values()),
            machines=len(job.nodes),
            width=max(len(n.devices) for n in job.nodes),
            batch=batch(job),
            model_bytes=job.model_bytes * job.start.transfer_bits / 32,
        )

    @cached_property
    def kind(self) -> _Ints:
        """The type of each group, an index into `types`."""
        return np.array([self.types.index(g.type) for g in self.groups])

    def placement(self, loads: _Ints, serves: NDArray[np.bool_]) -> _Ints:
        """How many machines of each group take each role, [groups, 4], from loads [machines, devices]."""
        roles = (loads.sum(1) > 0) * 1 + serves * 2
        counted = [np.bincount(roles[list(g.members)], minlength=4) for g in self.groups]
        return np.array(counted, np.int64)

    def traffic(self, placements: _Ints, seconds: _Floats | None = None) -> _Floats:
        """What communication depends on, [.., 2 + 6 types], of placements [.., groups, 4].

        Numbers of workers and of servers; and, type by type, for workers, servers and machines that are both: by how much
        the last of them has computed before the slowest machine, and how many there are. The former comes from `seconds`
        [.., groups, 4] of the slowest of each group and role (None: all are as slow); it is 0 for who only serves and -1
        where there is none.
        """
        workers = placements[..., [WORKER, BOTH]].sum((-2, -1))
        servers = placements[..., [SERVER, BOTH]].sum((-2, -1))
        late = np.zeros(placements.shape) if seconds is None else seconds
        late = np.where(placements[..., [WORKER, BOTH]] > 0, late[..., [WORKER, BOTH]], 0.0)
        early = late.max((-2, -1), keepdims=True) - late
        shape, columns = np.broadcast_shapes(workers.shape, late.shape[:-2]), [workers, servers]
        for kind in range(len(self.types)):
            mine = self.kind == kind
            for role in (WORKER, SERVER, BOTH):
                present = placements[..., mine, role]
                slack = np.zeros(present.shape) if role == SERVER else early[..., mine, int(role == BOTH)]
                least = np.where(present > 0, slack, np.inf).min(-1, initial=np.inf)
                columns += [np.where(np.isfinite(least), least, -1.0), present.sum(-1)]
        return np.stack([np.broadcast_to(c, shape).astype(float) for c in columns], axis=-1)

    def slowest(self, loads: _Ints, serves: NDArray[np.bool_], seconds: _Floats) -> _Floats:
        """The slowest machine's seconds of each group and role, [I, groups, 4], from `seconds` [I, machines]."""
        roles = (loads.sum(1) > 0) * 1 + serves * 2
        found = np.zeros((len(seconds), len(self.groups), 4))
        for index, group in enumerate(self.groups):
            for machine in group.members:
                mine = found[:, index, roles[machine]]
                found[:, index, roles[machine]] = np.fmax(mine, seconds[:, machine])
        return found


def _roles(job: Job, node: str) -> tuple[int, ...]:
    """The roles that a node may take: those of its knob, or the one that it has."""
    knob = job.space.knob(f"role/{node}")
    if isinstance(knob, Choice):
        return tuple(role for role, name in enumerate(ROLES) if name in knob.options)
    return ((node in job.start.workers) + 2 * (node in job.start.servers),)


class Observed(NamedTuple):
    """One evaluation: a schedule and what was measured of it, nan where nothing was. M machines, D devices, I iterations."""

    loads: _Ints  # [M, D]
    serves: NDArray[np.bool_]  # [M]
    device_seconds: _Floats  # [M, D]
    machine_seconds: _Floats  # [I, M]
    iteration_seconds: _Floats  # [I]
    seconds: float  # of an iteration: the objective


# ------------------------------------------------------------------------------------------------------------------ parts


def device_rate(name: str, reference: float, batch_size: int) -> Part:
    """The log rate (samples per second) of a device type, from its load; `reference` is about what to expect."""

    def mean(parameters: _Floats, inputs: _Floats) -> _Floats:
        rate, saturation = parameters[:, 0, None], parameters[:, 1, None]
        found: _Floats = np.log(rate) - np.log1p(saturation / inputs[..., 0])
        return found

    return Part(
        name=name,
        parameters=(
            Prior("rate", reference / 50, reference * 50),
            Prior("saturation", 1e-3, max(2.0, batch_size / 4)),  # samples at which half of the rate is reached
        ),
        mean=mean,
        features=lambda inputs, _mean: _per_particle(np.log(inputs)),
        width=1,
        amplitude=Prior("amplitude", 0.003, 0.3),
        length=Prior("length", 0.5, 5.0),
        noise=Prior("noise", 5e-4, 0.1),
    )


def aggregation(name: str, reference: float, count: int) -> Part:
    """The log seconds that a type of machine with `count` devices takes to sum their gradients, from their loads."""
    return Part(
        name=name,
        parameters=(Prior("seconds", reference / 1000, reference * 100),),
        mean=lambda parameters, inputs: np.log(parameters[:, :1]) * np.ones(inputs.shape[-2]),
        features=lambda inputs, _mean: _per_particle(np.log1p(inputs)),
        width=count,
        amplitude=Prior("amplitude", 0.01, 0.5),
        length=Prior("length", 0.5, 5.0),
        noise=Prior("noise", 0.01, 0.5),
    )


def _per_particle(features: _Floats) -> _Floats:
    """With a leading axis for particles, where they all share these features."""
    return features if features.ndim == 3 else features[None]


# ------------------------------------------------------------------------------------------------------------------ model


class IterationModel:
    """All parts and what is known of them: inference on each by itself."""

    def __init__(
        self, cluster: Cluster, seed: int, *, inference: Inference = "smc", particles: int = 256, overlap: bool = True
    ) -> None:
        self.cluster = cluster
        self.posteriors = dict[str, Posterior]()
        self._overlap = overlap
        self._made = (seed, inference, particles)

    def observe(self, seen: Sequence[Observed]) -> None:
        """Learn from all evaluations so far, those already known included."""
        if not seen:
            return
        if not self.posteriors:
            self._declare(seen)
        for name, evidence in self._evidence(seen).items():
            known = self.posteriors[name]
            if len(evidence) > len(known.evidence):
                known.observe(evidence)

    def _declare(self, seen: Sequence[Observed]) -> None:
        """The parts. What rates to expect is known up to a factor once some device was seen: they go with the cores."""
        cluster, parts = self.cluster, dict[str, Part]()
        per_core = _samples_per_core_second(cluster, seen)
        for group in cluster.groups:
            cores = cluster.cores[cluster.types.index(group.type)]
            for kind in group.kinds:
                name = f"rate {group.type} {kind}"
                parts[name] = device_rate(name, per_core * cores, cluster.batch)
            if len(group.kinds) > 1:
                name = f"aggregation {group.type}"
                parts[name] = aggregation(name, cluster.model_bytes / 5e9, len(group.kinds))
        parts["communication"] = communication(cluster, overlap=self._overlap)
        seed, inference, particles = self._made
        seeds = np.random.SeedSequence(seed).spawn(len(parts))
        self.posteriors = {
            name: Posterior(part, np.random.default_rng(s), particles, inference)
            for (name, part), s in zip(parts.items(), seeds, strict=True)
        }

    def _evidence(self, seen: Sequence[Observed]) -> dict[str, Evidence]:
        """What was observed, part by part."""
        rows = {name: list[tuple[list[float], float, float]]() for name in self.posteriors}
        for one in seen:
            for group in self.cluster.groups:
                for machine in group.members:
                    _add_machine(rows, group, one, machine)
            slowest = np.nanmax(one.machine_seconds, axis=1)
            late = self.cluster.slowest(one.loads, one.serves, one.machine_seconds)
            traffic = self.cluster.traffic(self.cluster.placement(one.loads, one.serves), late)
            # Iteration by iteration: whoever happens to be the slowest is not taken for communication.
            rest = float(np.median(one.iteration_seconds - slowest))
            rows["communication"].append((list(np.median(traffic, axis=0)), rest, float(np.median(slowest))))
        return {name: _as_evidence(found) for name, found in rows.items() if found}


def _samples_per_core_second(cluster: Cluster, seen: Sequence[Observed]) -> float:
    """The median over machines of what a core achieved."""
    found = [
        one.loads[m, d] / one.device_seconds[m, d] / cluster.cores[cluster.types.index(g.type)]
        for one in seen
        for g in cluster.groups
        for m in g.members
        for d in g.devices
        if one.loads[m, d] > 0 and one.device_seconds[m, d] > 0
    ]
    return float(np.median(found)) if found else 1.0


def _add_machine(rows: dict[str, list[tuple[list[float], float, float]]], group: Group, one: Observed, machine: int) -> None:
    """One machine's devices and, where several had a load, what summing their gradients took."""
    loads, seconds = one.loads[machine, list(group.devices)], one.device_seconds[machine, list(group.devices)]
    for kind, load, took in zip(group.kinds, loads, seconds, strict=True):
        if load > 0 and np.isfinite(took) and took > 0:
            rows[f"rate {group.type} {kind}"].append(([float(load)], float(np.log(load / took)), 1.0))
    whole = float(np.median(one.machine_seconds[:, machine]))
    if (loads > 0).sum() > 1 and np.isfinite(whole):
        # A sum that takes no time at all is beyond what a clock tells.
        least = 1e-4 * whole
        rows[f"aggregation {group.type}"].append(
            ([float(n) for n in loads], float(np.log(max(whole - np.nanmax(seconds), least))), 1.0)
        )


def _as_evidence(rows: list[tuple[list[float], float, float]]) -> Evidence:
    inputs, values, spread = zip(*rows, strict=True)
    return Evidence(np.array(inputs), np.array(values), np.array(spread))
