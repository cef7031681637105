"""The constants to fit (`Constants`), and cluster, setting and closed form (`Plant`) that they and a recorded `Row` make."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.calibration.closed_form import Plant, Stations
from simulators.calibration.recorded.row import Row
from simulators.cluster.cluster import Cluster, Discipline
from simulators.cluster.conditions import Sleeps, link_delays
from simulators.cluster.profiles import Device, NodeType
from simulators.engine.preparation import CostBasis, cost_basis, cycle_costs
from simulators.workloads.workload import Demand
from tuners import policies
from tuners.actions import Setting

__all__ = [
    "Constants",
    "Switch",
    "cluster",
    "demand",
    "plant",
    "plants",
    "setting",
]


Switch = Literal["none", "each way", "both ways"]
"""Whether all transfers pass a switch, and what its rate is for: pulls and pushes each, or together."""


@dataclass(frozen=True, slots=True)
class Constants:
    """The constants of a workload on one type of machine, named as in `Demand` and `NodeType`."""

    cores: int = 16
    model_bytes: float = 0.0
    fixed_seconds: float = 0.0
    sample_seconds: float = 0.0  # on a core of speed 1
    saturation_samples: float = 0.0  # as in `Device`: slow machines take longer for that part of what no sample adds to
    serial_fraction: float = 0.0
    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    nic_bytes_per_second: float = 1.25e9
    service_bytes_per_second: float = math.inf
    apply_seconds: float = 0.0
    apply_exponent: float = 1.0
    apply_growth: float = 0.0
    commit_seconds: float = 0.0
    step_seconds: float = 0.0
    master_sample_seconds: float = 0.0
    delay_messages: float = 2.0
    jitter: float = 0.1
    sleeps: Sleeps | None = None
    discipline: Discipline = "maxmin"  # how transfers share NICs, as in `Cluster`
    control_queue: float = 0.0  # as in `Cluster`
    independent_flows: bool = False  # as in `Cluster`
    uneven_bytes: float = 0.0  # as in `Cluster`
    switch: Switch = "none"
    switch_bytes_per_second: float = math.inf  # as in `Cluster`, where there is a switch
    server_threads: int = 1  # as in `Cluster`
    updates_grow: bool = False  # with the number of workers, by `apply_growth`
    sleeps_vary: bool = True  # stragglers' sleeps, as recorded; otherwise each sleeps as long as its mean every time
    snapshots: bool = True  # servers send them, as recorded; otherwise none is taken
    in_transfers: bool = False  # recorded pulls and pushes include messages, latency and delays; or computing does

    def overhead_seconds(self, row: Row) -> float:
        """Seconds of messages and latency per cycle."""
        return 2 * self.message_seconds * row.servers + 2 * self.latency_seconds

    def between_seconds(self, row: Row) -> float:
        """Seconds of messages, latency and delays of links per cycle, the mean over workers: what recorded transfers
        include, or recorded computing (`in_transfers`)."""
        delayed = float(_delays(self, row)[: row.workers].mean()) if row.delays else 0.0
        return self.overhead_seconds(row) + delayed


class _Machine(NamedTuple):
    """What machines of all speeds and links have in common."""

    cores: int
    nic_bytes_per_second: float
    service_bytes_per_second: float
    saturation_samples: float


def _machine(constants: Constants) -> _Machine:
    return _Machine(*(getattr(constants, name) for name in _Machine._fields))


def _node_type(machine: _Machine, speed: float, nic: float) -> NodeType:
    """The machine with `speed` times the speed of its cores and `nic` times the rate of its NIC."""
    return NodeType(
        name="calibrated",
        cores=machine.cores,
        memory_bytes=1e12,
        nic_bytes_per_second=nic * machine.nic_bytes_per_second,
        devices=(Device("cpu", speed, machine.saturation_samples),),
        source="calibrated",
        service_bytes_per_second=machine.service_bytes_per_second,
    )


@cache
def demand(constants: Constants) -> Demand:
    """The demand of the constants."""
    names = [n for n in Demand.__struct_fields__ if hasattr(constants, n)]
    return Demand(**{n: getattr(constants, n) for n in names})


class _Network(NamedTuple):
    """Fields of `Cluster` that all rows have in common."""

    discipline: Discipline
    latency_seconds: float
    control_queue: float
    independent_flows: bool
    uneven_bytes: float
    switch_bytes_per_second: float
    switch_both_ways: bool
    server_threads: int


def _network(constants: Constants) -> _Network:
    switch = constants.switch != "none" and math.isfinite(constants.switch_bytes_per_second)
    return _Network(
        constants.discipline,
        constants.latency_seconds,
        constants.control_queue,
        constants.independent_flows,
        constants.uneven_bytes,
        constants.switch_bytes_per_second if switch else 0.0,
        switch and constants.switch == "both ways",
        constants.server_threads,
    )


def cluster(constants: Constants, row: Row) -> Cluster:
    """The machines of a row: its workers, then its servers unless they run on the workers' machines."""
    return _cluster(*_nodes(constants, row), _machine(constants), _network(constants))


def _nodes(constants: Constants, row: Row) -> tuple[int, tuple[float, ...], tuple[float, ...], int]:
    """The number of machines of a row, the relative speeds of these and of their NICs, and pushes between two snapshots."""
    needed = max(row.workers, row.servers) if row.shared else row.workers + row.servers
    return max(needed, row.machines), row.speeds, row.nics, row.snapshot_clocks if constants.snapshots else 0


def _delays(constants: Constants, row: Row) -> NDArray[np.float64]:
    """Seconds that delays of links add to a mini-batch of each machine of a row, [n]; 0 for those that do not work."""
    return constants.delay_messages * _paths(row.delays, setting(row), _nodes(constants, row)[0])


@cache
def _paths(delays: tuple[float, ...], kept: Setting, machines: int) -> NDArray[np.float64]:
    """Seconds that a message takes over each worker's most delayed path, [machines]."""
    names = tuple(f"n{i}" for i in range(machines))
    return link_delays(names, kept, np.array([*delays, *(0.0,) * (machines - len(delays))]), 1.0)


# A fit asks for them ten thousands of times, and mostly changes constants that are not of the machines.
@lru_cache(maxsize=4096)
def _cluster(
    machines: int,
    speeds: tuple[float, ...],
    nics: tuple[float, ...],
    snapshot_clocks: int,
    machine: _Machine,
    network: _Network,
) -> Cluster:
    speeds, nics = (of + (1.0,) * (machines - len(of)) for of in (speeds, nics))
    each = list(zip(speeds, nics, strict=True))
    kinds = {(s, n): _node_type(machine, s, n) for s, n in dict.fromkeys(each)}
    nodes = tuple((f"n{i}", kinds[pair]) for i, pair in enumerate(each))
    return Cluster(nodes, snapshot_clocks=snapshot_clocks, **network._asdict())


@lru_cache(maxsize=4096)
def _cluster_with_basis(
    of: tuple[int, tuple[float, ...], tuple[float, ...], int], machine: _Machine, network: _Network, kept: Setting
) -> tuple[Cluster, CostBasis]:
    made = _cluster(*of, machine, network)
    return made, cost_basis(made, kept)


def setting(row: Row) -> Setting:
    """The setting of a row."""
    # By what a setting has: to look a whole row up takes longer than to make it.
    threads = (row.intra_threads, row.inter_threads)
    policy = (row.policy, row.staleness)
    batch = (row.batch_size, row.batch_sizes)
    return _setting(row.workers, row.servers, row.shared, batch, policy, threads, row.transfer_bits, row.model_shares)


@cache
def _setting(
    workers: int,
    servers: int,
    shared: bool,
    batch: tuple[int, tuple[int, ...]],
    policy: tuple[str, int],
    threads: tuple[int, int],
    transfer_bits: int,
    model_shares: tuple[float, ...],
) -> Setting:
    names = tuple(f"n{i}" for i in range(workers + servers))
    return Setting(
        workers=names[:workers],
        servers=names[:servers] if shared else names[workers:],
        batch_size=batch[0],
        loads=tuple((size,) for size in batch[1]),
        policy=policy[0],
        staleness=policy[1],
        intra_threads=threads[0],
        inter_threads=threads[1],
        transfer_bits=transfer_bits,
        model_shares=model_shares,
    )


_policy = cache(policies.named)


def plant(constants: Constants, row: Row) -> Plant:
    """What the closed form needs of a row."""
    return plants(constants, (row,))[0]


def plants(constants: Constants, rows: Sequence[Row]) -> list[Plant]:
    """What the closed form needs of each of `rows`."""
    machine, network, needed = _machine(constants), _network(constants), demand(constants)
    return [_plant(constants, row, machine, network, needed) for row in rows]


def _plant(constants: Constants, row: Row, machine: _Machine, network: _Network, needed: Demand) -> Plant:
    kept = setting(row)
    made, known = _cluster_with_basis(_nodes(constants, row), machine, network, kept)
    costs = cycle_costs(made, needed, kept, _policy(row.policy, row.staleness), known=known)
    if row.delays:
        costs = costs._replace(overhead_seconds=costs.overhead_seconds + _delays(constants, row))
    if row.sleeps:
        asleep = np.zeros(len(made.nodes))
        asleep[: row.workers] = [s.mean_seconds for s in row.sleeps]
        costs = costs._replace(compute_seconds=costs.compute_seconds + asleep)
    sleeps = constants.sleeps
    asleep_seconds = sleeps.probability * sleeps.mean_seconds if sleeps else 0.0
    return Plant(
        costs,
        constants.jitter,
        asleep_seconds,
        _stations(constants, row, made, kept),
        constants.discipline,
        one_way=made.switch_both_ways and made.switch_bytes_per_second <= min(costs.serve_out, costs.serve_in),
        threads=constants.server_threads,
    )


def _stations(constants: Constants, row: Row, made: Cluster, kept: Setting) -> Stations | None:
    """The servers, where each is a station of its own; None where one stands for all of them."""
    if not (row.shared or (constants.independent_flows and row.unlike_servers)):
        return None
    kinds = dict(made.nodes)
    names = list(kinds)
    return Stations(
        kept.shares()[1],
        tuple(min(kinds[n].nic_bytes_per_second, kinds[n].service_bytes_per_second) for n in kept.servers),
        tuple(names.index(n) for n in kept.servers),
        constants.independent_flows,
    )
