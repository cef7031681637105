"""A recorded setting (`Row`), the constants to fit (`Constants`), and what the engine simulates for both."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import chi2

from simulators.branch import stacked
from simulators.calibration.closed_form import Plant, Spans, Stations
from simulators.calibration.stragglers import Sleeper
from simulators.cluster.cluster import Cluster, Discipline
from simulators.cluster.conditions import Conditions, LinkDelay, Sleeps, Stragglers, link_delays
from simulators.cluster.profiles import Device, NodeType
from simulators.engine.inputs import CostBasis, cost_basis, cycle_costs
from simulators.engine.job_state import Records
from simulators.engine.loop import advance_lanes
from simulators.jobs import JobSpec
from simulators.system import SimulatedSystem
from simulators.workloads.workload import Demand, Workload
from tuners import policies
from tuners.actions import Setting, Target

__all__ = [
    "ALIKE",
    "SEEDS",
    "Constants",
    "Estimate",
    "Row",
    "Switch",
    "WorkerTime",
    "cluster",
    "comparable",
    "demand",
    "named",
    "on_machines",
    "over_seeds",
    "plant",
    "plants",
    "pushes_of",
    "relative_error",
    "setting",
    "simulated",
    "simulated_seconds",
    "stragglers",
    "system_of",
    "with_speeds",
]

ALIKE = 0.05
"""Relative difference below which workers count as equally fast."""
_CHANCE = 0.99  # probability below which a difference between workers counts as chance
_WARM_UP, _CYCLES, _PUSHES = 20, 40, 1600  # of one seed: cycles per worker before and while measuring, and the least pushes
_LEAST_SEEDS = 4  # that a simulated mean is taken over
SEEDS = 64  # at most
_FEWEST_ROWS = 64  # of the engine's table
_PRECISE = 0.005  # relative standard error at which no further seed is simulated


Switch = Literal["none", "each way", "both ways"]
"""Whether all transfers pass a switch, and what its rate is for: pulls and pushes each, or together."""


class WorkerTime(NamedTuple):
    """How long a worker computes a mini-batch under a setting."""

    worker: int  # its number
    seconds: float  # median, awake
    error: float = 0.0  # standard error of the median, seconds
    machine: str = ""  # its name, or the number of the worker where it has none


@dataclass(frozen=True, slots=True)
class Row:
    """One setting of one run, and the mean times that were recorded under it; nan: not recorded."""

    run: str
    workload: str
    workers: int
    servers: int
    cycle_seconds: float  # from one push of a worker to its next: workers / pushes per second
    batch_size: int = 1  # of one worker; the mean, where these differ
    intra_threads: int = 0  # 0: one per core
    inter_threads: int = 0
    transfer_bits: int = 32
    policy: str = "asp"
    staleness: int = 0
    shared: bool = False  # servers run on the workers' machines
    speeds: tuple[float, ...] = ()  # of the workers, relative; (): all equal
    nics: tuple[float, ...] = ()  # of the workers, then of servers on their own machines, relative; (): all equal
    delays: tuple[float, ...] = ()  # seconds, one way, of the links of the same machines as `nics`; (): none
    sleeps: tuple[Sleeper, ...] = ()  # of the workers, in every mini-batch; (): none has any
    model_shares: tuple[float, ...] = ()  # of the model, per server, sum 1; (): equal shares
    batch_sizes: tuple[int, ...] = ()  # of each worker; (): all have `batch_size`
    worker_times: tuple[WorkerTime, ...] = ()
    compute_seconds: float = math.nan
    pull_seconds: float = math.nan
    push_seconds: float = math.nan
    pushes: int = 0  # number of pushes in the means
    error: float = 0.0  # relative standard error of `cycle_seconds`, by how cycles vary within runs; 0: not known
    all_seconds: float = math.nan  # from the first to the last push under the setting, warm-up included
    all_pushes: int = 0  # number of pushes in `all_seconds`
    snapshot_clocks: int = 0  # pushes from one snapshot of the servers to the next, as in `Cluster`; 0: none was taken
    cycle_snapshot_clocks: int = 0  # the same, of the pushes that `cycle_seconds` is a mean over, which may be few
    usual_machine: str = ""  # whose speed is 1, where runs tell speeds together (`on_machines`); "": the run's median
    machines: int = 0  # least size of the cluster; equal for all rows, so that the engine is compiled once

    @property
    def combination(self) -> tuple[str, int, int]:
        """Policy, workers and servers: the unit that held-out rows are chosen by."""
        return self.policy, self.workers, self.servers

    @property
    def identity(self) -> tuple[Row, str, float, int]:
        """Equal for the same row of the same run, read twice. (Missing times are nan, and nan does not equal itself.)"""
        return self.setting_only(), self.run, self.cycle_seconds, self.pushes

    @property
    def unlike(self) -> frozenset[str]:
        """In what the machines differ: "nics" or "delays" of their links, or "speeds" of their processors.

        Speeds count where the difference takes 5 % of a cycle or more: those of short mini-batches differ by chance. So do
        workers that sleep.
        """
        found = {name for name in ("nics", "delays") if len({*getattr(self, name)}) > 1}
        if self.speeds and self.compute_seconds * (max(self.speeds) / min(self.speeds) - 1) >= ALIKE * self.cycle_seconds:
            found.add("speeds")
        if any(s.mean_seconds >= ALIKE * self.cycle_seconds for s in self.sleeps):
            found.add("speeds")
        return frozenset(found)

    @property
    def unlike_servers(self) -> bool:
        """Whether servers differ in their links or shares of the model, or also work: flows to them may end one by one."""
        first = 0 if self.shared else self.workers
        links, shares = self.nics[first : first + self.servers], self.model_shares
        return self.servers > 1 and (self.shared or len({*links}) > 1 or len({*shares}) > 1)

    @property
    def largest_share(self) -> float:
        """The part of the model that the server with most of it has."""
        return max(self.model_shares, default=1.0 / self.servers)

    @property
    def batches(self) -> tuple[int, ...]:
        """Samples in a mini-batch of each worker."""
        return self.batch_sizes or (self.batch_size,) * self.workers

    @property
    def barrier(self) -> bool:
        """Whether all workers wait for each other."""
        return self.policy == "bsp" or (self.policy == "ssp" and self.staleness == 0)

    @property
    def has_parts(self) -> bool:
        """Whether compute time was recorded separately, and is any."""
        return self.compute_seconds > 0

    def measured(self) -> tuple[float, float, float, float]:
        """Seconds of compute, pull, push and cycle; nan where not recorded, or 0."""
        parts = (self.compute_seconds, self.pull_seconds, self.push_seconds, self.cycle_seconds)
        compute, pull, push, cycle = (p if p > 0 else math.nan for p in parts)
        return compute, pull, push, cycle

    def setting_only(self) -> Row:
        """The row without its measurements: equal for runs under equal settings."""
        return replace(
            self,
            run="",
            cycle_seconds=0.0,
            compute_seconds=0.0,
            pull_seconds=0.0,
            push_seconds=0.0,
            pushes=0,
            error=0.0,
            all_seconds=0.0,
            all_pushes=0,
            worker_times=(),
            usual_machine="",
        )


def with_speeds(rows: Sequence[Row], common_seconds: float = 0.0, scaled: float = 0.0) -> tuple[Row, ...]:
    """The rows with each worker's speed over that of the median worker of its run, or of the usual machine of several.

    A run's machines keep their speeds, so all its rows tell them together: the logarithm of a time is that of the row plus
    that of the worker, by least squares, weighted by pushes (analysis of two-way layouts). A row of few workers has another
    median worker, and would tell other speeds by itself. `common_seconds` of the compute time depend neither on speed nor on
    the samples in a mini-batch; `scaled` samples are added to those of every mini-batch (see `scaled_samples`). The workers
    of a row count as equal if they and the median worker differ by less than 5 %, or by what chance does to machines that
    are equal (chi-squared test of homogeneity): of ten equal workers with few mini-batches each, two are almost always 5 %
    apart.
    """
    speed = {group: _speeds(mine, common_seconds, scaled) for group, mine in _by(_told_with, rows).items()}
    made = []
    for row in rows:
        mine = [speed[_told_with(row)][_who(row, t)] for t in row.worker_times]
        made.append(replace(row, speeds=() if len(mine) != row.workers or _equal(mine) else tuple(s for s, _ in mine)))
    return tuple(made)


def on_machines(rows: Sequence[Row]) -> tuple[tuple[Row, ...], tuple[str, ...]]:
    """The rows with the usual machine of runs that have some machines in common, not all; and the runs of which that would
    be said, but that contradict each other in how fast these machines are.

    Which machine is the median one of a run depends on the others in it: two quick and two slow ones, beside a run of the
    quick ones alone, had 1.5 and 0.75 times the speed of these. So such runs tell speeds together, relative to the machine
    of most rows. Where all machines are alike, nothing changes.
    """
    runs = _by(lambda row: row.run, rows)
    unlike = {row.run for row in with_speeds(rows) if row.speeds}
    usual, contradict = dict[str, str](), list[str]()
    for group in _in_common({run: (mine[0].workload, {*_machines(mine)}) for run, mine in runs.items()}):
        counts = Counter(_machines([row for run in group for row in runs[run]]))
        most = min(counts, key=lambda machine: (-counts[machine], machine), default="")
        if not unlike & {*group} or len({frozenset(_machines(runs[run])) for run in group}) == 1:
            continue
        if _agree([runs[run] for run in group], most):
            usual |= dict.fromkeys(group, most)
        else:
            contradict += group
    return tuple(replace(row, usual_machine=usual.get(row.run, "")) for row in rows), tuple(contradict)


def named(name: str, row: Row) -> Row:
    """The row with its run and machines apart from those of the same names in other recordings."""
    usual = f"{name}/{row.usual_machine}" if row.usual_machine else ""
    times = tuple(t._replace(machine=f"{name}/{t.machine}") for t in row.worker_times)
    return replace(row, run=f"{name}/{row.run}", usual_machine=usual, worker_times=times)


def _in_common(crews: Mapping[str, tuple[str, set[str]]]) -> list[list[str]]:
    """Runs by whether they have a machine in common, with each other or with a third; by run, its workload and machines."""
    found: list[tuple[str, set[str], list[str]]] = []
    for run, (workload, machines) in crews.items():
        mine = [group for group in found if group[0] == workload and group[1] & machines]
        whole = (workload, machines.union(*(of for _, of, _ in mine)), [*(r for _, _, some in mine for r in some), run])
        found = [*(group for group in found if group not in mine), whole]
    return [some for _, _, some in found]


def _agree(runs: Sequence[Sequence[Row]], usual: str) -> bool:
    """Whether the runs tell the same of their machines, each by itself and together: up to a factor of each run, by 5 % or
    by chance."""
    together = _speeds([replace(row, usual_machine=usual) for mine in runs for row in mine], 0.0, 0.0)
    for mine in runs:
        names = {t.worker: t.machine for row in mine for t in row.worker_times}
        alone = _speeds([replace(row, usual_machine="") for row in mine], 0.0, 0.0)
        times = {worker: speed / together[names[worker]][0] for worker, (speed, _) in alone.items()}
        middle = float(np.median(list(times.values()))) if times else 1.0
        if times and not _equal([(times[w] / middle, alone[w][1] / alone[w][0]) for w in times]):
            return False
    return True


def _machines(rows: Sequence[Row]) -> list[str]:
    return [t.machine for row in rows for t in row.worker_times]


def _by(key: Callable[[Row], str], rows: Iterable[Row]) -> dict[str, list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(key(row), []).append(row)
    return found


def _told_with(row: Row) -> str:
    """Equal for rows that tell speeds together."""
    return f"machine {row.usual_machine}" if row.usual_machine else f"run {row.run}"


def _who(row: Row, time: WorkerTime) -> str | int:
    return time.machine if row.usual_machine else time.worker


def _speeds(rows: Sequence[Row], common_seconds: float, scaled: float) -> dict[Any, tuple[float, float]]:
    """The speed of each timed worker of rows that tell speeds together, relative to their usual machine or to the median
    worker, and its standard error; by machine, or by number."""
    workers = sorted({_who(row, t) for row in rows for t in row.worker_times})
    if not workers:
        return {}
    count = len(workers)
    normal, told, noise = np.zeros((count, count)), np.zeros(count), np.zeros((count, count))
    for row in rows:
        own = _own_seconds(row, common_seconds, scaled)
        at = [workers.index(_who(row, t)) for t in row.worker_times]
        seconds, errors = np.array(list(own.values())).reshape(-1, 2).T
        # Without the row's mean; of a lone worker, nothing is left.
        away = max(row.pushes, 1) * (np.eye(len(at)) - 1 / max(len(at), 1))
        normal[np.ix_(at, at)] += away
        told[at] += away @ np.log(seconds)
        noise[np.ix_(at, at)] += away @ np.diag((errors / seconds) ** 2) @ away
    solve = np.linalg.pinv(normal, rcond=1e-9, hermitian=True)
    own_times = np.exp(solve @ told)  # up to a common factor
    deviations = np.sqrt(np.maximum(np.diag(solve @ noise @ solve), 0.0))
    usual = rows[0].usual_machine
    speeds = (own_times[workers.index(usual)] if usual in workers else np.median(own_times)) / own_times
    return {w: (round(float(s), 3), float(s * e)) for w, s, e in zip(workers, speeds, deviations, strict=True)}


def comparable(rows: Sequence[Row]) -> list[Row]:
    """The rows of one workload as a fit begins with them: on clusters of one size, with speeds where batches differ."""
    machines = max(r.workers + r.servers for r in rows)
    rows = [replace(r, machines=machines) for r in rows]
    if any(r.batch_sizes for r in rows):
        # Without a guess of what does not grow with the batch, workers with small batches look slow in the first fit.
        return list(with_speeds(rows, _common_guess(rows)))
    return rows


def _common_guess(rows: Sequence[Row]) -> float:
    """Seconds of computing that do not grow with the batch: those without which a sample takes the median worker of every
    row about as long. 0 if no worker was timed."""
    timed = [row for row in rows if row.worker_times]
    if not timed:
        return 0.0

    def differs(common_seconds: float) -> float:
        each: dict[int, list[float]] = {}  # by threads, which decide how long a sample takes
        for row in timed:
            own = [(t.seconds - common_seconds) / size for t, size in _timed(row)]
            each.setdefault(row.intra_threads, []).append(math.log(float(np.median(own))))
        return sum(float(np.var(logs)) * len(logs) for logs in each.values())

    shortest = min(t.seconds for row in timed for t in row.worker_times)
    return float(min(np.linspace(0.0, 0.95, 96) * shortest, key=differs))


def _own_seconds(row: Row, common_seconds: float, scaled: float) -> dict[int, tuple[float, float]]:
    """What each worker computes a mini-batch of the mean size in, without `common_seconds`, and its standard error."""
    timed = _timed(row)
    usual = float(np.mean([size for _, size in timed] or [1]))
    times = {t.worker: (usual + scaled) / (size + scaled) for t, size in timed}
    return {
        t.worker: (max(t.seconds - common_seconds, 0.05 * t.seconds) * times[t.worker], t.error * times[t.worker])
        for t, _ in timed
    }


def _timed(row: Row) -> list[tuple[WorkerTime, int]]:
    """The workers that were timed, with the samples in a mini-batch of each: equal ones where not all workers were timed."""
    sizes = row.batches if len(row.worker_times) == row.workers else (row.batch_size,) * len(row.worker_times)
    return list(zip(row.worker_times, sizes, strict=True))


def _equal(speeds: Sequence[tuple[float, float]]) -> bool:
    """Whether speeds, each with its standard error, may be those of workers that are as fast as the median one, 1."""
    values, errors = np.array(speeds).T
    if max(values.max(), 1.0) < (1 + ALIKE) * min(values.min(), 1.0):
        return True
    apart = float((((values - 1.0) / np.maximum(errors, 1e-9)) ** 2).sum())
    return apart < float(chi2.ppf(_CHANCE, len(values)))


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
    in_transfers: bool = False  # recorded pull and push times include messages and latency; otherwise compute time does

    def overhead_seconds(self, row: Row) -> float:
        """Seconds of messages and latency per cycle."""
        return 2 * self.message_seconds * row.servers + 2 * self.latency_seconds


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
        names = tuple(name for name, _ in made.nodes)
        delay_seconds = np.array([*row.delays, *(0.0,) * (len(names) - len(row.delays))])
        delays = link_delays(names, kept, delay_seconds, constants.delay_messages)
        costs = costs._replace(overhead_seconds=costs.overhead_seconds + delays)
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


class Estimate(NamedTuple):
    """A mean over independent seeds of the engine."""

    spans: Spans  # of the whole setting: scalars
    error: float  # relative standard error of the cycle's mean


def simulated(constants: Constants, row: Row, seeds: int = SEEDS) -> Estimate:
    """The mean parts of a cycle that the engine simulates for a row, after a warm-up in which workers fall out of step.

    A mean over seeds (independent replications; Law, Simulation Modeling and Analysis, Section 9.5.2): as many as it takes
    to bring its standard error to `_PRECISE`, at most `seeds`. nan if the engine completes no push.
    """

    row = replace(row, snapshot_clocks=row.cycle_snapshot_clocks)
    warm_up = _WARM_UP * row.workers
    clocks = max(_CYCLES, -(-_PUSHES // row.workers)) * row.workers

    def several(seeds: Sequence[int]) -> NDArray[np.float64]:
        pushes = pushes_of(constants, row, seeds, warm_up + clocks)
        cycle = (pushes[:, -1, 0] - pushes[:, warm_up - 1, 0]) * row.workers / clocks
        return np.column_stack([pushes[:, warm_up:, 1:].mean(axis=1), cycle])

    found = over_seeds(several, seeds)
    return Estimate(Spans(*found.mean(axis=0)), relative_error(found[:, 3]))


def simulated_seconds(constants: Constants, row: Row, pushes: int) -> tuple[float, float]:
    """Simulated seconds from the first to the last of so many `pushes`, for a job that starts under the row's setting.

    A mean over seeds as in `simulated`, and its relative standard error.
    """

    def several(seeds: Sequence[int]) -> NDArray[np.float64]:
        seconds = pushes_of(constants, row, seeds, pushes)[:, :, 0]
        return seconds[:, -1:] - seconds[:, :1]

    found = over_seeds(several)[:, 0]
    return float(found.mean()), relative_error(found)


def relative_error(values: NDArray[np.float64]) -> float:
    """Standard error of the mean of independent values, relative to the mean."""
    return float(values.std(ddof=1) / math.sqrt(len(values)) / max(abs(values.mean()), 1e-300))


def over_seeds(several: Callable[[Sequence[int]], NDArray[np.float64]], most: int = SEEDS) -> NDArray[np.float64]:
    """The results of `several` seeds, 0, 1, ... until the mean of the last column is precise, [seeds, k]."""
    found = several(range(_LEAST_SEEDS))
    while len(found) < most and relative_error(found[:, -1]) > _PRECISE:
        # Twice as many: a stop after every seed would favour means whose error is small by chance.
        upcoming = range(len(found), min(2 * len(found), most))
        # So many at a time, always: the engine is compiled once for a number of lanes.
        parts = [upcoming[at : at + _LEAST_SEEDS] for at in range(0, len(upcoming), _LEAST_SEEDS)]
        found = np.concatenate([found, *map(several, parts)])
    return found


def pushes_of(constants: Constants, row: Row, seeds: Sequence[int], clocks: int) -> NDArray[np.float64]:
    """Of the first `clocks` pushes with each seed: when, and seconds of compute, pull and push, [seeds, clocks, 4].

    nan where fewer are completed. Seeds are lanes of one engine: alone, each would cost more in calls than in computing.
    """
    systems = [system_of(constants, row, seed) for seed in seeds]
    for system in systems:
        system.begin()
    found = np.full((len(seeds), clocks, 4), np.nan)
    branches = [system.branches[0] for system in systems]
    rows = 1 << max(clocks - 1, _FEWEST_ROWS - 1).bit_length()  # a static size: few of them, for few programs
    _, table, used = advance_lanes(
        branches[0].program, *stacked(branches), np.int32(clocks), np.float64(np.inf), rows=rows, own_data=True
    )
    columns = [Records._fields.index(name) for name in ("seconds", "compute_seconds", "pull_seconds", "push_seconds")]
    for made, rest, count in zip(found, np.asarray(table)[:, :, columns], np.asarray(used), strict=True):
        made[:count] = rest[:count]
    return found


def stragglers(row: Row, *, vary: bool = True) -> Stragglers | None:
    """The workers of a row that sleep, each with its mean and all with the mean of their deviations; None if none does."""
    asleep = [(f"n{i}", s) for i, s in enumerate(row.sleeps) if s.mean_seconds]
    if not asleep:
        return None
    mean, sd = (float(np.mean([s[k] for _, s in asleep])) for k in (0, 1))
    names, each = tuple(name for name, _ in asleep), tuple(s.mean_seconds for _, s in asleep)
    return Stragglers(mean, sd * vary, nodes=names, node_seconds=each)


def system_of(constants: Constants, row: Row, seed: int) -> SimulatedSystem:
    """A job of these constants under the row's setting, on nodes as the row has them."""
    job = Workload(name=row.workload, demand=demand(constants), proxy=None)
    delays = tuple(LinkDelay((f"n{i}",), seconds) for i, seconds in enumerate(row.delays) if seconds)
    slow = stragglers(row, vary=constants.sleeps_vary)
    conditions = Conditions(jitter=constants.jitter, sleeps=constants.sleeps, stragglers=slow, delays=delays)
    spec = JobSpec(
        name="calibration",
        cluster=cluster(constants, row),
        workload=job,
        start=setting(row),
        target=Target("clocks", 2**30),
        budget_seconds=1e12,
        evaluate_clocks=2**30,
        conditions=conditions,
        seed=seed,
    )
    return SimulatedSystem(spec)
