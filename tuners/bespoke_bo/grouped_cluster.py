"""The machines of a job, grouped: machines of one group are of one type, with the same devices and the same possible roles.

The model, the communication part and the numeric search (Dalibard et al., Section 3) count machines per group and role
instead of naming each. Everything here is public knowledge: what the job says, and nothing that was measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Job
from tuners.bespoke_bo.schedules import batch, devices
from tuners.settings import Choice

__all__ = ["BOTH", "IDLE", "ROLES", "SERVER", "WORKER", "GroupedCluster", "RoleGroup", "Traffic"]

_Floats = NDArray[np.float64]
_Ints = NDArray[np.int64]

ROLES = ("idle", "worker", "server", "both")
IDLE, WORKER, SERVER, BOTH = range(4)


@dataclass(frozen=True, slots=True)
class RoleGroup:
    """Machines of one type, with the same usable devices and the same possible roles."""

    type: str
    members: tuple[int, ...]  # indices into `Job.nodes`
    devices: tuple[int, ...]  # indices of the devices that may be given samples
    device_kinds: tuple[str, ...]  # of these devices: cpu, gpu
    roles: tuple[int, ...]  # those of IDLE, WORKER, SERVER, BOTH that the job leaves free


class Traffic(NamedTuple):
    """What communication depends on, by name. The roles are WORKER, SERVER and BOTH, in this order."""

    workers: _Floats  # [..]
    servers: _Floats  # [..]
    early_seconds: _Floats  # [.., types, roles]: before the slowest machine, the last such machine has computed; -1: none
    machines: _Floats  # [.., types, roles]: their number

    @classmethod
    def of(cls, inputs: _Floats) -> Traffic:
        """The traffic in the inputs of the communication part, [.., 2 + 6 types]."""
        each = inputs[..., 2:].reshape(*inputs.shape[:-1], -1, 3, 2)
        return cls(inputs[..., 0], inputs[..., 1], each[..., 0], each[..., 1])

    @property
    def inputs(self) -> _Floats:
        """One row of numbers per placement, [.., 2 + 6 types], as a part takes them."""
        each = np.stack([self.early_seconds, self.machines], axis=-1)
        counts = np.stack([self.workers, self.servers], axis=-1)
        return np.concatenate([counts, each.reshape(*counts.shape[:-1], -1)], axis=-1)

    @property
    def early_workers(self) -> _Floats:
        """`early_seconds` of pure workers and of machines that are both, [.., types, 2]."""
        return self.early_seconds[..., [WORKER - 1, BOTH - 1]]

    @property
    def worker_machines(self) -> _Floats:
        """The number of pure workers and of machines that are both, [.., types, 2]."""
        return self.machines[..., [WORKER - 1, BOTH - 1]]

    def present(self, role: int) -> NDArray[np.bool_]:
        """Whether there are machines of each type in that role, [.., types]."""
        found: NDArray[np.bool_] = self.early_seconds[..., role - 1] >= 0
        return found


@dataclass(frozen=True)
class GroupedCluster:
    """The machines of a job by groups, its batch size and the bytes of its model."""

    groups: tuple[RoleGroup, ...]
    types: tuple[str, ...]  # of machines
    speeds: tuple[float, ...]  # bytes per second of each type's network interface, as the vendor states it
    cores: tuple[int, ...]  # of each type
    machines: int  # all machines of the job, lost ones included
    most_devices: int  # of one machine
    batch: int  # samples per iteration
    model_bytes: float

    @classmethod
    def of(cls, job: Job, available: Sequence[str] | None = None) -> GroupedCluster:
        """The cluster of a job; with `available`, only of these nodes."""
        names = {n.name for n in job.nodes} if available is None else set(available)
        usable = devices(job)
        found = dict[tuple[str, tuple[int, ...], tuple[int, ...]], list[int]]()
        for index, node in enumerate(job.nodes):
            mine = tuple(d for i, d in usable if i == index)
            if node.name in names:
                found.setdefault((node.type, mine, _roles(job, node.name)), []).append(index)
        groups = tuple(
            RoleGroup(name, tuple(members), mine, tuple(job.nodes[members[0]].devices[d] for d in mine), roles)
            for (name, mine, roles), members in found.items()
        )
        nodes = {n.type: n for n in job.nodes}
        return cls(
            groups=groups,
            types=tuple(nodes),
            speeds=tuple(n.nic_bytes_per_second for n in nodes.values()),
            cores=tuple(n.cores for n in nodes.values()),
            machines=len(job.nodes),
            most_devices=max(len(n.devices) for n in job.nodes),
            batch=batch(job),
            model_bytes=job.model_bytes * job.start.transfer_bits / 32,
        )

    @cached_property
    def type_of_group(self) -> _Ints:
        """The type of each group, an index into `types`."""
        return np.array([self.types.index(g.type) for g in self.groups])

    def placement(self, loads: _Ints, serves: NDArray[np.bool_]) -> _Ints:
        """The number of machines per group and role, [groups, 4], from loads [machines, devices]."""
        roles = (loads.sum(1) > 0) * 1 + serves * 2
        counted = [np.bincount(roles[list(g.members)], minlength=4) for g in self.groups]
        return np.array(counted, np.int64)

    def traffic(self, placements: _Ints, seconds: _Floats | None = None) -> _Floats:
        """The inputs of the communication part, [.., 2 + 6 types], of placements [.., groups, 4]; see `Traffic`.

        How many seconds before the slowest machine others have computed follows from `seconds` [.., groups, 4], the compute
        time of the slowest machine of each group and role (None: all machines are equally slow). It is 0 for pure servers.
        """
        workers = placements[..., [WORKER, BOTH]].sum((-2, -1))
        servers = placements[..., [SERVER, BOTH]].sum((-2, -1))
        slowest = np.zeros(placements.shape) if seconds is None else seconds
        slowest = np.where(placements[..., [WORKER, BOTH]] > 0, slowest[..., [WORKER, BOTH]], 0.0)
        early = slowest.max((-2, -1), keepdims=True) - slowest
        shape = np.broadcast_shapes(workers.shape, slowest.shape[:-2])
        early_seconds, machines = np.empty((2, *shape, len(self.types), 3))
        for at in range(len(self.types)):
            mine = self.type_of_group == at
            for role in (WORKER, SERVER, BOTH):
                present = placements[..., mine, role]
                slack = np.zeros(present.shape) if role == SERVER else early[..., mine, int(role == BOTH)]
                least = np.where(present > 0, slack, np.inf).min(-1, initial=np.inf)
                early_seconds[..., at, role - 1] = np.where(np.isfinite(least), least, -1.0)
                machines[..., at, role - 1] = present.sum(-1)
        working, serving = (np.broadcast_to(count, shape).astype(float) for count in (workers, servers))
        return Traffic(working, serving, early_seconds, machines).inputs

    def slowest_seconds(self, loads: _Ints, serves: NDArray[np.bool_], seconds: _Floats) -> _Floats:
        """The seconds of the slowest machine per group and role, [I, groups, 4], from `seconds` [I, machines]."""
        roles = (loads.sum(1) > 0) * 1 + serves * 2
        found = np.zeros((len(seconds), len(self.groups), 4))
        for index, group in enumerate(self.groups):
            for machine in group.members:
                mine = found[:, index, roles[machine]]
                found[:, index, roles[machine]] = np.fmax(mine, seconds[:, machine])
        return found


def _roles(job: Job, node: str) -> tuple[int, ...]:
    """The roles that a node may take: those of its knob, or the role that it has at the start."""
    knob = job.space.knob(f"role/{node}")
    if isinstance(knob, Choice):
        return tuple(role for role, name in enumerate(ROLES) if name in knob.options)
    return ((node in job.start.workers) + 2 * (node in job.start.servers),)
