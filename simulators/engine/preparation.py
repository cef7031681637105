"""From a setting on a cluster to the engine's inputs: what cycles cost, who trains on which data, what links carry.

Pure functions of cluster, workload, setting and conditions. Nothing here is compiled: the result is arrays of NumPy.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
from jax import Array
from numpy.typing import NDArray

from simulators.cluster.cluster import Cluster
from simulators.cluster.compute_factors import NO_FACTORS, Factors
from simulators.cluster.conditions import Conditions, straggling
from simulators.cluster.profiles import NodeType, node_seconds
from simulators.engine.inputs import Copies, EngineInputs, RowPlacement, SnapshotCosts
from simulators.engine.links import connections, network, usage
from simulators.engine.optimizers import slots
from simulators.workloads.workload import Demand, Workload
from tuners.actions import Job, Rejected, Setting, SyncPolicy, Target
from tuners.settings import OF_PULLS, OF_REPLICAS

__all__ = [
    "NO_EFFECTS",
    "CostBasis",
    "CycleCosts",
    "Effects",
    "Shards",
    "build",
    "clocks_of_snapshots",
    "compute_times",
    "cost_basis",
    "cycle_costs",
    "each_nic_counts",
    "late_seconds",
    "loads",
    "overlapping",
    "served",
    "served_rows",
    "shards",
]


_MOST_UNEVEN = 4.0  # deviation of logarithms: one of two transfers has nearly all of the link, whichever comes first


class CycleCosts(NamedTuple):
    """Fields of `EngineInputs`: what machines, job and setting cost in a cycle, without noise, data and conditions."""

    active: NDArray[np.bool_]  # [k]
    compute_seconds: NDArray[np.float64]  # [k]
    overhead_seconds: NDArray[np.float64]  # [k]
    pull_bytes: float
    push_bytes: float
    nic: NDArray[np.float64]  # [k]
    serve_out: float
    serve_in: float
    apply_seconds: float


class Effects(NamedTuple):
    """What a reconfiguration in progress takes from training at present; by node, bytes per second."""

    workers: frozenset[str] | None = None  # may begin a mini-batch; None: all workers of the setting
    out: Mapping[str, float] = {}  # taken off its NIC, outgoing
    into: Mapping[str, float] = {}  # and incoming
    pull_shares: Mapping[str, float] | None = None  # share of the model that is pulled from each; None: as pushed
    push_factor: float = 1.0  # factor on the bytes of pushes, because parameters move with them
    redirects: int = 0  # servers that forward requests to others
    blocked_until_seconds: float = -np.inf
    holders: tuple[
        tuple[str, ...], ...
    ] = ()  # of each block of embedding tables, while blocks move; (): as the setting says


NO_EFFECTS = Effects()


def loads(nodes: tuple[tuple[str, NodeType], ...], setting: Setting) -> dict[str, tuple[int, ...]]:
    """Samples per device of every worker's mini-batch; without `Setting.loads`, all on the first device."""
    if setting.loads:
        return dict(zip(setting.workers, setting.loads, strict=True))
    devices = {name: len(kind.devices) for name, kind in nodes}
    return {w: (setting.batch_size, *([0] * (devices[w] - 1))) for w in setting.workers}


class Shards(NamedTuple):
    """What each node trains on, [k]: its share of the training data, as consecutive rows. Of idle nodes, one row."""

    samples: NDArray[np.int32]  # in a mini-batch
    start: NDArray[np.int32]  # of its part of the training data
    length: NDArray[np.int32]


def shards(
    nodes: tuple[tuple[str, NodeType], ...], workload: Workload, setting: Setting, *, reconfiguring: bool = False
) -> Shards:
    """How `setting` divides the training data. A part has at least one row, if need be one of its neighbour's.

    Raises Rejected for a share without a row, but not while `reconfiguring`: on the way to another setting, shares pass
    through any value.
    """
    names = tuple(name for name, _ in nodes)
    samples, start, length = (np.full(len(names), first, np.int32) for first in (1, 0, 1))
    for worker, row in loads(nodes, setting).items():
        samples[names.index(worker)] = sum(row)
    if workload.proxy is None:
        return Shards(samples, start, length)
    rows, shares = len(workload.proxy.train[0]), setting.shares()[0]
    ends = np.round(np.cumsum(shares) * rows).astype(int)
    for worker, share, begin, end in zip(setting.workers, shares, (0, *ends[:-1]), ends, strict=True):
        if not reconfiguring and share * rows < 0.5:
            raise Rejected(f"Cannot train on {worker!r}: its share holds none of the {rows} samples; give it a larger one.")
        first = min(begin, rows - 1)
        start[names.index(worker)], length[names.index(worker)] = first, max(end - first, 1)
    return Shards(samples, start, length)


def overlapping(setting: Setting) -> bool:
    """Whether some node is worker and server at once."""
    return bool(set(setting.workers) & set(setting.servers))


def each_nic_counts(cluster: Cluster, setting: Setting, conditions: Conditions, workload: Workload) -> bool:
    """Whether each NIC is a resource of its own (roles overlap, there are token buckets, servers send snapshots, both ways
    share a switch, or each mini-batch touches other rows of embedding tables), or all servers are one."""
    several = bool(conditions.buckets or cluster.snapshot_clocks or cluster.switch_both_ways)
    return overlapping(setting) or several or workload.has_tables


def clocks_of_snapshots(cluster: Cluster, setting: Setting) -> int:
    """Pushes from one snapshot to the next; 0: none is taken. More workers push more often, so it is at least 4 of each, as
    in live jobs."""
    return max(cluster.snapshot_clocks, 4 * len(setting.workers)) if cluster.snapshot_clocks else 0


def compute_times(
    nodes: tuple[tuple[str, NodeType], ...], demand: Demand, setting: Setting
) -> dict[str, tuple[float, tuple[float, ...]]]:
    """Mean seconds of each worker's mini-batch, in all and per device. Raises Rejected for a device that cannot compute."""
    each = _mini_batches(nodes, setting)
    seconds = _seconds_of(each.kinds, demand, setting)
    return {worker: seconds[i] for worker, i in each.workers.items()}


class _MiniBatches(NamedTuple):
    """What workers compute. Most workers are equal, and their times are computed once."""

    kinds: tuple[tuple[NodeType, tuple[int, ...]], ...]  # each machine that differs, with the samples of each of its devices
    workers: Mapping[str, int]  # which of these each worker is
    samples: int  # of all workers


def _mini_batches(nodes: tuple[tuple[str, NodeType], ...], setting: Setting) -> _MiniBatches:
    kinds, each = dict(nodes), loads(nodes, setting)
    # By identity, because to compare types takes as long as to compute.
    keys = {w: (id(kinds[w]), row) for w, row in each.items()}
    known = {key: (kinds[w], key[1]) for w, key in keys.items()}
    number = {key: i for i, key in enumerate(known)}
    workers = {w: number[key] for w, key in keys.items()}
    return _MiniBatches(tuple(known.values()), workers, sum(map(sum, each.values())))


def _seconds_of(
    kinds: tuple[tuple[NodeType, tuple[int, ...]], ...], demand: Demand, setting: Setting
) -> list[tuple[float, tuple[float, ...]]]:
    """Mean seconds of a mini-batch on each of `kinds`, in all and per device. Raises Rejected as `compute_times` does."""
    try:
        knobs = (setting.intra_threads, setting.inter_threads, setting.options)
        return [node_seconds(kind, demand, row, *knobs) for kind, row in kinds]
    except ValueError as error:
        raise Rejected(str(error)) from error


class CostBasis(NamedTuple):
    """What a cycle's costs need of cluster and setting, whatever the demand is."""

    mini_batches: _MiniBatches
    active: NDArray[np.bool_]  # as in `CycleCosts`, [k]
    kinds: NDArray[np.intp]  # of each worker, in the order of nodes, its number in `mini_batches.kinds`
    largest: float  # part of the model that the server with most of it has
    nic: NDArray[np.float64]  # as in `CycleCosts`, [k], and so are the others
    serve_out: float
    serve_in: float


def cost_basis(cluster: Cluster, setting: Setting, *, effects: Effects = NO_EFFECTS) -> CostBasis:
    """The `CostBasis` of a cluster under `setting`."""
    nodes = cluster.nodes
    each = _mini_batches(nodes, setting)
    out = _left(nodes, effects.out)
    into = _left(nodes, effects.into) if effects.out or effects.into else out
    pulled, pushed = _shares_of_servers(setting, effects)
    # Of dedicated servers all bytes cross the switch, like a server that all share; otherwise `_each_nic` tells which.
    switch = cluster.switch_bytes_per_second or np.inf
    serve_out = _serve(nodes, pulled, out)
    serve_in = serve_out if pulled is pushed and out is into else _serve(nodes, pushed, into)
    return CostBasis(
        each,
        np.array([n in each.workers for n, _ in nodes]),
        np.array([each.workers[n] for n, _ in nodes if n in each.workers], dtype=np.intp),
        max(pushed.values()),
        np.minimum([min(out[n], into[n]) for n, _ in nodes], _of_threads(cluster, setting)),
        min(serve_out, switch),
        min(serve_in, switch),
    )


def cycle_costs(
    cluster: Cluster,
    demand: Demand,
    setting: Setting,
    policy: SyncPolicy,
    *,
    effects: Effects = NO_EFFECTS,
    known: CostBasis | None = None,
) -> CycleCosts:
    """What a cycle under `setting` and `policy` costs; all workers of the setting are active.

    `known` is the basis of the same cluster, setting and effects, for a caller with many demands. Raises Rejected as
    `compute_times` does.
    """
    of = known or cost_basis(cluster, setting, effects=effects)
    timed = _seconds_of(of.mini_batches.kinds, demand, setting)
    compute_seconds = np.zeros(len(of.active))
    compute_seconds[of.active] = np.array([seconds for seconds, _ in timed])[of.kinds]
    messages = 2 * demand.message_seconds * (len(setting.servers) + effects.redirects)
    hops = 2 * cluster.latency_seconds * (1 + (effects.redirects > 0))
    transfer = setting.transfer_bits / 32
    largest = of.largest**demand.apply_exponent
    # In synchronous rounds no worker begins before servers and master have ended the step, so it adds to every cycle.
    samples = of.mini_batches.samples
    step = demand.step_seconds * largest + demand.master_sample_seconds * samples if policy.rounds else 0.0
    return CycleCosts(
        active=of.active,
        compute_seconds=compute_seconds,
        overhead_seconds=np.full(len(of.active), messages + hops + step + policy.seconds),
        pull_bytes=demand.model_bytes * transfer,
        push_bytes=demand.whole_push_bytes * transfer * effects.push_factor,
        nic=of.nic,
        serve_out=of.serve_out,
        serve_in=of.serve_in,
        apply_seconds=_apply_seconds(demand, setting, largest) + demand.commit_seconds * len(setting.servers),
    )


def _of_threads(cluster: Cluster, setting: Setting) -> float:
    """What a transfer can have of the servers, bytes per second: one thread of each, if these are limited."""
    if cluster.server_threads == 1:
        return np.inf
    kinds, parts = dict(cluster.nodes), setting.model_by_server()
    return min(kinds[n].service_bytes_per_second / (cluster.server_threads * part) for n, part in parts.items() if part)


def _apply_seconds(demand: Demand, setting: Setting, part: float) -> float:
    """Seconds that a server needs to apply `part` of a push, which each further worker makes longer."""
    return demand.apply_seconds * part * (1 + demand.apply_growth * (len(setting.workers) - 1))


def build(
    cluster: Cluster,
    workload: Workload,
    conditions: Conditions,
    job: Job,
    setting: Setting,
    policy: SyncPolicy,
    *,
    seed: int,
    factors: Factors = NO_FACTORS,
    evaluate_clocks: int = 0,
    effects: Effects = NO_EFFECTS,
) -> EngineInputs:
    """The numbers of a job on a cluster under `setting` and `policy`, without disturbances. What the job's space may have
    (local steps, skipped pulls, replicas) decides which arrays are empty, so all its settings have the same shapes.

    Raises Rejected where the setting cannot run on the cluster.
    """
    nodes, space = cluster.nodes, job.space
    names = tuple(name for name, _ in nodes)
    costs = cycle_costs(cluster, workload.demand, setting, policy, effects=effects)
    parts = shards(nodes, workload, setting, reconfiguring=effects.workers is not None)
    rng = np.random.default_rng([seed, 1])
    numbers: dict[str, Any] = dict(
        key=np.uint64(np.random.default_rng([seed, 0]).integers(2**63)),
        active=costs.active if effects.workers is None else costs.active & np.array([n in effects.workers for n in names]),
        compute_seconds=costs.compute_seconds,
        overhead_seconds=costs.overhead_seconds,
        slowdown=np.ones(len(nodes)),
        jitter=np.float64(conditions.jitter),
        factors=factors.values,
        factor_counts=factors.counts,
        **_sleeps(conditions, names, straggling(conditions, names, rng), rng),
        **_transfers(cluster, workload, setting, conditions, costs, effects),
        control_queue=np.full(int(cluster.control_queue > 0), cluster.control_queue),
        samples=parts.samples,
        shard_start=parts.start,
        shard_length=parts.length,
        **_updates(setting, names, local_steps=space.takes_local_steps),
        **_goal(job.target, names, setting, parts),
        evaluate_clocks=np.int32(evaluate_clocks),
    )
    # Plain numpy: passing it to compiled code is faster than making JAX arrays first, one by one.
    optional = {name: numbers.pop(name) for name in ("usage", "snapshots", "connections", "unevenness")}
    arrays: dict[str, Any] = {n: v if isinstance(v, Array) else np.asarray(v) for n, v in numbers.items()} | optional
    if workload.has_tables:
        holders = effects.holders or setting.holders(job.blocks, job.hottest)
        arrays["placement"] = _placement(names, workload, setting, effects, holders, replicates=space.may_have(OF_REPLICAS))
    if space.may_have(OF_PULLS):
        # Of the messages of a cycle, half are of its pull.
        messages = workload.demand.message_seconds * (len(setting.servers) + effects.redirects)
        silent = np.full(len(names), messages + cluster.latency_seconds * (1 + (effects.redirects > 0)))
        arrays["copies"] = Copies(np.int32(setting.pull_clocks), silent)
    return EngineInputs(**arrays)


def _transfers(
    cluster: Cluster,
    workload: Workload,
    setting: Setting,
    conditions: Conditions,
    costs: CycleCosts,
    effects: Effects,
) -> dict[str, Any]:
    """What pulls and pushes move, over which links, and how long servers apply a push."""
    names, servers = tuple(name for name, _ in cluster.nodes), _servers(cluster.nodes, setting, effects)
    net = _connections(cluster, setting, conditions, servers) if cluster.independent_flows else ()
    if net and cluster.switch_bytes_per_second:
        raise Rejected("Cannot pass a switch where flows to unlike servers end by themselves: leave independent_flows out.")
    if cluster.server_threads > 1 and net:
        raise Rejected(
            f"Cannot give servers {cluster.server_threads} threads where flows to unlike servers end by themselves: leave "
            "server_threads at 1."
        )
    shared = _SharedLinks(np.zeros((2 * len(names), 0)), np.zeros(0))
    if each_nic_counts(cluster, setting, conditions, workload):
        shared = _each_nic(cluster, workload, setting.servers, servers)
    snapshots: Any = ()
    if cluster.snapshot_clocks:
        size = workload.demand.model_bytes * (1 + slots(workload.optimizer) + (workload.aggregation != "each"))
        part = np.array([servers.pushed.get(name, 0.0) for name in names])
        # As a flow of a pull: to each server it is as large, and as fast, as the server's part of the model.
        weights = np.where(part > 0, part, 1.0)
        of_snapshots = connections.usage_with_copies(net) if net else shared.of_snapshots
        snapshots = SnapshotCosts(np.int32(clocks_of_snapshots(cluster, setting)), part * size, of_snapshots, weights)
    return {
        "pull_bytes": np.float64(costs.pull_bytes),
        "push_bytes": np.float64(costs.push_bytes),
        "nic": costs.nic,
        # During a reconfiguration every NIC may be left with another rate, and the shape must not change with each transfer.
        "nic_levels": costs.nic if effects.out or effects.into or net else _levels(costs.nic),
        "serve_out": np.float64(costs.serve_out),
        "serve_in": np.float64(costs.serve_in),
        "usage": shared.usage,
        "capacity": shared.capacity,
        **_buckets(conditions, names, effects.out),
        "apply_seconds": np.float64(costs.apply_seconds),
        "blocked_until_seconds": np.float64(effects.blocked_until_seconds),
        "snapshots": snapshots,
        "connections": net,
        "unevenness": _unevenness(cluster, costs, servers),
    }


class _SharedLinks(NamedTuple):
    """What transfers put on the links, where each NIC counts; see `links.usage`."""

    usage: Any  # [2k, r], of pulls and pushes, or `Proportions`
    capacity: NDArray[np.float64]  # [r]
    of_snapshots: Any = ()  # [k, r]; (): none is taken, or `usage` tells it, too


def _each_nic(cluster: Cluster, workload: Workload, ring: Sequence[str], servers: connections.Servers) -> _SharedLinks:
    """What transfers put on every NIC; the servers send their snapshots along the `ring`."""
    names, switch = tuple(name for name, _ in cluster.nodes), cluster.switch_bytes_per_second
    if cluster.discipline == "serial":
        found = _SharedLinks(*usage.of_queues(names, servers))
    elif len(names) >= network.MANY_NICS and not (workload.has_tables or switch):
        found = _SharedLinks(*usage.proportions(names, servers, ring if cluster.snapshot_clocks else ()))
    else:
        rows, capacity = usage.of_nics(names, servers, ring, whole=workload.has_tables)
        found = _SharedLinks(rows[: 2 * len(names)], capacity, rows[2 * len(names) :])
    if switch:
        both_ways = cluster.switch_both_ways
        more = usage.with_switch(names, servers, found.usage, found.capacity, switch=switch, both_ways=both_ways)
        found = _SharedLinks(*more, found.of_snapshots)
    return found


def _unevenness(cluster: Cluster, costs: CycleCosts, servers: connections.Servers) -> Any:
    """The deviation of the logarithms of pulls' weights, by the size of their largest flow; () where it is 1 at any size."""
    if not cluster.uneven_bytes:
        return ()
    flow_bytes = costs.pull_bytes * max(servers.pulled.values())
    return np.float64(min(cluster.uneven_bytes / max(flow_bytes, 1e-300), _MOST_UNEVEN))


def _connections(cluster: Cluster, setting: Setting, conditions: Conditions, servers: connections.Servers) -> Any:
    """The connections of workers and servers; () where the flows of a transfer may move as one.

    They may where all servers are alike, and none of them works or has a token bucket: then the flows of a transfer end
    together, and to move them one by one would take longer and change nothing but the last bits.
    """
    return connections.between(
        [n for n, _ in cluster.nodes],
        setting.servers,
        servers,
        shared={*setting.workers} | {n for bucket in conditions.buckets for n in bucket.nodes},
        apart=cluster.discipline in ("fifo", "serial"),
        snapshots=cluster.snapshot_clocks > 0,
    )


def _updates(setting: Setting, names: tuple[str, ...], *, local_steps: bool) -> dict[str, Any]:
    """What optimizers are told: of the servers, or of workers and servers where workers take local steps."""
    return {
        "learning_rate": np.float32(setting.learning_rate),
        "momentum": np.float32(setting.momentum),
        "local_steps": np.array([setting.steps_of(n) for n in names] if local_steps else [], np.int32),
        "outer_rate": np.full(int(local_steps), setting.outer_rate, np.float32),
        "outer_momentum": np.full(int(local_steps), setting.outer_momentum, np.float32),
    }


def _goal(target: Target, names: tuple[str, ...], setting: Setting, parts: Shards) -> dict[str, Any]:
    """When the job is done. What is no target has a value that is never reached."""
    counts = {"clocks": 2**31 - 1, "samples": 2**63 - 1}
    if target.counts and not target.by_share:
        counts[target.metric] = int(target.value)
    return {
        "target_loss": np.float64(target.value if target.metric == "loss" else -np.inf),
        "target_accuracy": np.float64(target.value if target.metric == "accuracy" else np.inf),
        "target_clocks": np.int32(counts["clocks"]),
        "target_samples": np.int64(counts["samples"]),
        **_by_share(target, names, setting, parts),
    }


def _sleeps(
    conditions: Conditions, names: Sequence[str], straggles: NDArray[np.bool_], rng: np.random.Generator
) -> dict[str, Any]:
    """Stragglers sleep in every mini-batch; other nodes sleep as `conditions.sleeps` says, if given."""
    sleeps, slow = conditions.sleeps, conditions.stragglers
    usual = (sleeps.probability, sleeps.mean_seconds, sleeps.sd_seconds) if sleeps else (0.0, 0.0, 0.0)
    always: tuple[Any, ...] = usual
    if slow:
        given = dict(zip(slow.nodes, slow.node_seconds, strict=False))  # a name may be without a mean of its own
        means = np.array([given.get(name, slow.mean_seconds) for name in names])
        own = means + slow.spread_seconds * rng.standard_normal(len(straggles))
        always = (1.0, own, slow.sd_seconds)
    names = ("sleep_probability", "sleep_mean_seconds", "sleep_sd_seconds")
    return {name: np.where(straggles, a, u) for name, a, u in zip(names, always, usual, strict=True)}


def _levels(nic: NDArray[np.float64]) -> NDArray[np.float64]:
    """The values that occur in `nic` [k]. The largest is repeated until they are as many as a power of two, at least 8, but
    at most k; one value stays one.

    Fewer levels make water-filling cheaper, but each number of them is a program of its own.
    """
    different = np.unique(nic)
    if len(different) == 1:
        return different
    most = min(len(nic), max(8, 1 << (len(different) - 1).bit_length()))
    return np.pad(different, (0, most - len(different)), mode="edge")


def _buckets(conditions: Conditions, names: tuple[str, ...], taken: Mapping[str, float]) -> dict[str, Any]:
    """Every node's token bucket; a node without one gets one that is never empty."""
    if not conditions.buckets:
        return {"bucket_bytes": np.zeros(0), "bucket_refill": np.zeros(0), "bucket_taken": np.zeros(0)}
    held = {n: bucket for bucket in conditions.buckets for n in bucket.nodes}
    return {
        "bucket_bytes": np.array([held[n].capacity_bytes if n in held else np.inf for n in names]),
        "bucket_refill": np.array([held[n].refill_bytes_per_second if n in held else np.inf for n in names]),
        "bucket_taken": np.array([taken.get(n, 0.0) for n in names]),
    }


def served(
    nodes: tuple[tuple[str, NodeType], ...], demand: Demand, setting: Setting, effects: Effects = NO_EFFECTS
) -> NDArray[np.float64]:
    """What a push and the pull before it cost every server, [k, 4]: pull bytes and seconds, push bytes and seconds."""
    of, transfer, rows = _servers(nodes, setting, effects), setting.transfer_bits / 32, []
    for name, _ in nodes:
        pull = of.pulled.get(name, 0.0) * demand.model_bytes * transfer
        push = of.pushed.get(name, 0.0) * demand.whole_push_bytes * transfer * effects.push_factor
        part = of.pushed.get(name, 0.0) ** demand.apply_exponent if name in of.pushed else 0.0
        apply = _apply_seconds(demand, setting, part)
        sending, receiving = (min(left[name], of.service[name]) for left in (of.out, of.into))
        rows.append((pull, pull / sending, push, push / receiving + apply))
    return np.array(rows)


def _placement(
    names: tuple[str, ...],
    workload: Workload,
    setting: Setting,
    effects: Effects,
    holders: Sequence[tuple[str, ...]],
    *,
    replicates: bool,
) -> RowPlacement:
    """Where the blocks of embedding tables are under `setting`, on these `holders` each.

    The holders of a block send equal parts of its pulls. A push goes to the first one, which sends it on to the next, as in
    chain replication (van Renesse and Schneider, OSDI 2004). Raises Rejected for a demand that knows no rows.
    """
    demand, proxy = workload.demand, workload.proxy
    if proxy is None or proxy.embedding is None:
        raise ValueError(f"Cannot place rows of {workload.name!r}: it has no embedding tables.")
    if demand.apply_exponent != 1:
        raise Rejected(
            f"Cannot apply rows with apply_exponent {demand.apply_exponent:g}: each row takes its time; set it to 1."
        )
    if demand.commit_seconds:
        raise Rejected(f"Cannot apply rows with commit_seconds {demand.commit_seconds:g}: set it to 0.")
    rows, transfer = proxy.embedding.rows, setting.transfer_bits / 32
    pulled, pushed, forwarded, copied = np.zeros((4, len(holders), len(names)))
    for block, chain in enumerate(holders):
        at = [names.index(server) for server in chain]
        pulled[block, at], pushed[block, at[0]] = 1.0 / len(at), 1.0
        forwarded[block, at[:-1]] = copied[block, at[1:]] = 1.0
    return RowPlacement(
        pulled=pulled,  # type: ignore[arg-type]  # numpy, as all of `EngineInputs`
        pushed=pushed,  # type: ignore[arg-type]
        pull_row_bytes=np.asarray(demand.model_bytes * transfer / rows),  # type: ignore[arg-type]
        push_row_bytes=np.asarray(demand.whole_push_bytes * transfer / rows * effects.push_factor),  # type: ignore[arg-type]
        apply_row_seconds=np.asarray(demand.apply_seconds / rows),  # type: ignore[arg-type]
        cache_rows=np.int32(setting.cache_rows),
        cache_clocks=np.int32(setting.cache_clocks),
        forwarded=forwarded if replicates else (),
        copied=copied if replicates else (),
    )


def served_rows(
    nodes: tuple[tuple[str, NodeType], ...],
    place: RowPlacement,
    pulls: NDArray[np.float64],
    pushes: NDArray[np.float64],
    effects: Effects = NO_EFFECTS,
) -> NDArray[np.float64]:
    """What completed `pushes` of rows of each block, [b], and the `pulls` before them cost every server, [k, 4]: the
    columns of `served`."""
    out, into = _left(nodes, effects.out), _left(nodes, effects.into)
    pulled, pushed = pulls @ np.asarray(place.pulled), pushes @ np.asarray(place.pushed)
    sending, receiving = (
        np.array([min(left[name], kind.service_bytes_per_second) for name, kind in nodes]) for left in (out, into)
    )
    pull = pulled * float(place.pull_row_bytes)
    if len(place.copied):
        pull = pull + pushes @ np.asarray(place.forwarded) * float(place.push_row_bytes)
        pushed = pushed + pushes @ np.asarray(place.copied)
    push = pushed * float(place.push_row_bytes)
    return np.stack([pull, pull / sending, push, push / receiving + pushed * float(place.apply_row_seconds)], axis=1)


def late_seconds(inputs: EngineInputs, late: NDArray[np.float64], served: NDArray[np.float64]) -> NDArray[np.float64]:
    """Seconds, [k], that servers were busy longer with what they have `served`, because `late` bytes, [k], had to wait for
    the refill of an empty token bucket."""
    sent, seconds = served[:, 0], served[:, 1]
    rate = np.divide(sent, seconds, out=np.full_like(sent, np.inf), where=seconds > 0)
    refill = np.maximum(np.asarray(inputs.bucket_refill) - np.asarray(inputs.bucket_taken), 1.0)
    found: NDArray[np.float64] = np.minimum(late, sent) * np.maximum(1 / refill - 1 / rate, 0.0)
    return found


def _by_share(target: Target, names: tuple[str, ...], setting: Setting, parts: Shards) -> dict[str, Any]:
    """What each worker has to do for a target by share, and what a push of it completes."""
    if not target.by_share:
        return {"assigned": np.zeros(0), "push_work": np.zeros(0)}
    share = setting.data_by_worker()
    return {
        "assigned": np.array([share.get(n, 0.0) * target.value for n in names]),
        "push_work": parts.samples.astype(float) if target.metric == "samples" else np.ones(len(names)),
    }


def _shares_of_servers(setting: Setting, effects: Effects) -> tuple[Mapping[str, float], Mapping[str, float]]:
    """The part of the model that each server sends in a pull, and the part that it receives in a push."""
    pushed = setting.model_by_server()
    return pushed if effects.pull_shares is None else effects.pull_shares, pushed


def _servers(nodes: tuple[tuple[str, NodeType], ...], setting: Setting, effects: Effects) -> connections.Servers:
    """What servers do and can do at present."""
    service = {n: kind.service_bytes_per_second for n, kind in nodes}
    shares = _shares_of_servers(setting, effects)
    return connections.Servers(*shares, _left(nodes, effects.out), _left(nodes, effects.into), service)


def _left(nodes: tuple[tuple[str, NodeType], ...], taken: Mapping[str, float]) -> dict[str, float]:
    """What is left of every NIC, one direction, bytes per second; at least 1, because rates divide."""
    return {n: max(kind.nic_bytes_per_second - taken.get(n, 0.0), 1.0) for n, kind in nodes}


def _serve(nodes: tuple[tuple[str, NodeType], ...], share: Mapping[str, float], left: Mapping[str, float]) -> float:
    """What all servers together can move, bytes per second: the server with the least capacity per share is the limit."""
    return min(min(left[n], kind.service_bytes_per_second) / share[n] for n, kind in nodes if share.get(n))
