"""A recorded setting, the constants that are to explain it, and the simulator's answer for the two."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Literal

import numpy as np

from simulators.calibration.closed_form import Spans
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, Sleeps
from simulators.cluster.profiles import Device, NodeType
from simulators.engine.inputs import EngineInputs, build
from simulators.jobs import JobSpec
from simulators.system import SimulatedSystem
from simulators.workloads.catalogue import Demand, Workload
from tuners import policies
from tuners.actions import Run, Setting, Target

__all__ = [
    "Constants",
    "Row",
    "cluster",
    "demand",
    "node_type",
    "plant",
    "setting",
    "simulated",
    "simulated_seconds",
    "with_speeds",
]

_ALIKE = 0.05
_WARM_UP, _CYCLES, _PUSHES = 20, 40, 1500  # cycles of every worker, and pushes of all of them at least


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of one run, and the mean times recorded under it. nan: not recorded."""

    run: str
    workload: str
    workers: int
    servers: int
    cycle_seconds: float  # from one push of a worker to its next: workers / pushes per second
    batch_size: int = 1  # of one worker
    intra_threads: int = 0  # 0: as many as there are cores
    inter_threads: int = 0
    transfer_bits: int = 32
    policy: str = "asp"
    staleness: int = 0
    shared: bool = False  # servers are on the workers' machines
    speeds: tuple[float, ...] = ()  # of the workers, relative; () is all alike
    nics: tuple[float, ...] = ()  # of the workers, then of servers on machines of their own, likewise
    worker_seconds: tuple[tuple[int, float], ...] = ()  # number of each worker, and its median seconds of computing
    compute_seconds: float = math.nan
    pull_seconds: float = math.nan
    push_seconds: float = math.nan
    pushes: int = 0  # that the means are of
    all_seconds: float = math.nan  # from the first push under the setting to the last, those of its beginning included
    all_pushes: int = 0  # that these are
    machines: int = 0  # of the cluster, at least: as many for all rows, so that the engine is compiled once

    @property
    def held(self) -> bool:
        """Whether all workers wait for each other."""
        return self.policy == "bsp" or (self.policy == "ssp" and self.staleness == 0)

    @property
    def has_parts(self) -> bool:
        """Whether computing was timed apart from moving parameters."""
        return not math.isnan(self.compute_seconds)

    def measured(self) -> tuple[float, float, float, float]:
        """Compute, pull, push, cycle; nan where not recorded or nothing."""
        parts = (self.compute_seconds, self.pull_seconds, self.push_seconds, self.cycle_seconds)
        compute, pull, push, cycle = (p if p > 0 else math.nan for p in parts)
        return compute, pull, push, cycle

    def shape(self) -> Row:
        """The setting alone, without what was measured: equal for runs that were set alike."""
        return replace(
            self,
            run="",
            cycle_seconds=0.0,
            compute_seconds=0.0,
            pull_seconds=0.0,
            push_seconds=0.0,
            pushes=0,
            all_seconds=0.0,
            all_pushes=0,
            worker_seconds=(),
        )


def with_speeds(rows: Sequence[Row], alike_seconds: float = 0.0) -> tuple[Row, ...]:
    """The rows with the speed of every worker over the median worker's: a mean over a run's rows, by their pushes.

    So many seconds take all alike, whatever their speed. Workers that differ by less than 5 % are alike.
    """
    found: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for row in rows:
        own = {w: max(s - alike_seconds, 0.05 * s) for w, s in row.worker_seconds}
        for worker, seconds in own.items():
            found.setdefault((row.run, worker), []).append((float(np.median(list(own.values()))) / seconds, row.pushes))
    speed = {key: round(sum(r * n for r, n in told) / sum(n for _, n in told), 3) for key, told in found.items()}
    made = []
    for row in rows:
        mine = tuple(speed[row.run, w] for w, _ in row.worker_seconds)
        alike = len(mine) != row.workers or max(mine) < (1 + _ALIKE) * min(mine)
        made.append(replace(row, speeds=() if alike else mine))
    return tuple(made)


@dataclass(frozen=True, slots=True)
class Constants:
    """What the simulator must know of a workload on one type of machine. Named as in `Demand` and `NodeType`."""

    cores: int = 16
    model_bytes: float = 0.0
    fixed_seconds: float = 0.0
    sample_seconds: float = 0.0  # on a core of speed 1
    serial_fraction: float = 0.0
    message_seconds: float = 0.0
    latency_seconds: float = 0.0
    nic_bytes_per_second: float = 1.25e9
    service_bytes_per_second: float = math.inf
    apply_seconds: float = 0.0
    apply_exponent: float = 1.0
    master_seconds: float = 0.0
    master_sample_seconds: float = 0.0
    jitter: float = 0.1
    sleeps: Sleeps | None = None
    discipline: Literal["maxmin", "uneven"] = "maxmin"  # how transfers share NICs, as in `Cluster`
    in_transfers: bool = False  # the recording counts messages and latency with pulls and pushes, not with computing

    def overhead_seconds(self, row: Row) -> float:
        """Per cycle, of messages and latency."""
        return 2 * self.message_seconds * row.servers + 2 * self.latency_seconds


def node_type(constants: Constants, name: str = "calibrated", speed: float = 1.0, nic: float = 1.0) -> NodeType:
    """The machine that the constants describe, its cores `speed` times as fast and its NIC `nic` times."""
    return NodeType(
        name=name,
        cores=constants.cores,
        memory_bytes=1e12,
        nic_bytes_per_second=nic * constants.nic_bytes_per_second,
        devices=(Device("cpu", speed),),
        source="calibrated",
        service_bytes_per_second=constants.service_bytes_per_second,
    )


def demand(constants: Constants) -> Demand:
    """What the job asks, by the constants."""
    names = [n for n in Demand.__struct_fields__ if hasattr(constants, n)]
    return Demand(**{n: getattr(constants, n) for n in names})


def cluster(constants: Constants, row: Row) -> Cluster:
    """The machines of a row: its workers first, then its servers unless they share machines."""
    speeds = row.speeds or (1.0,) * row.workers
    needed = max(row.workers, row.servers) if row.shared else row.workers + row.servers
    spare = max(needed, row.machines) - row.workers
    nics = (*row.nics, *(1.0,) * (row.workers + spare - len(row.nics)))
    kinds = [node_type(constants, speed=s, nic=n) for s, n in zip((*speeds, *(1.0,) * spare), nics, strict=True)]
    nodes = tuple((f"n{i}", kind) for i, kind in enumerate(kinds))
    return Cluster(nodes, constants.discipline, latency_seconds=constants.latency_seconds)


@cache
def setting(row: Row) -> Setting:
    """The setting of a row."""
    names = tuple(f"n{i}" for i in range(row.workers + row.servers))
    servers = names[: row.servers] if row.shared else names[row.workers : row.workers + row.servers]
    return Setting(
        workers=names[: row.workers],
        servers=servers,
        batch_size=row.batch_size,
        policy=row.policy,
        staleness=row.staleness,
        intra_threads=row.intra_threads,
        inter_threads=row.inter_threads,
        transfer_bits=row.transfer_bits,
    )


def plant(constants: Constants, row: Row) -> EngineInputs:
    """The numbers that the simulator runs a row on."""
    made, policy = cluster(constants, row), policies.named(row.policy, row.staleness)
    return build(
        made.nodes,
        made.latency_seconds,
        Workload(name=row.workload, demand=demand(constants), proxy=None),
        setting(row.shape()),
        Conditions(jitter=constants.jitter, sleeps=constants.sleeps),
        Target("clocks", 2**30),
        evaluate_clocks=2**30,
        policy_seconds=policy.seconds,
        slowdown=np.ones(len(made.nodes)),
        seed=0,
    )


def simulated(constants: Constants, row: Row) -> Spans:
    """What the engine simulates for a row, once workers have fallen out of step: parts of a cycle and all of it."""
    system = _system(constants, row)
    system.perform(Run(clocks=_WARM_UP * row.workers))
    cycles = max(_CYCLES, -(-_PUSHES // row.workers))
    window = system.perform(Run(clocks=cycles * row.workers))
    pushes = window.pushes
    if not len(pushes.seconds):
        return Spans(*np.full(4, math.nan))
    parts = (float(p.mean()) for p in (pushes.compute_seconds, pushes.pull_seconds, pushes.push_seconds))
    return Spans(*np.array([*parts, window.seconds * row.workers / len(pushes.seconds)]))


def simulated_seconds(constants: Constants, row: Row, pushes: int) -> float:
    """From the first to the last of so many pushes that the engine simulates for a job that begins as the row was set."""
    seconds = _system(constants, row).perform(Run(clocks=pushes)).pushes.seconds
    return float(seconds[-1] - seconds[0]) if len(seconds) == pushes else math.nan


def _system(constants: Constants, row: Row) -> SimulatedSystem:
    job = Workload(name=row.workload, demand=demand(constants), proxy=None)
    conditions = Conditions(jitter=constants.jitter, sleeps=constants.sleeps)
    spec = JobSpec(
        name="calibration",
        cluster=cluster(constants, row),
        workload=job,
        start=setting(row.shape()),
        target=Target("clocks", 2**30),
        budget_seconds=1e12,
        evaluate_clocks=2**30,
        conditions=conditions,
        seed=0,
    )
    return SimulatedSystem(spec)
