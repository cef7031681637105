"""What no run computes: combinations of cluster, workload and knobs that the engine has no rule for.

Without JAX, so that a scenario with such a combination is refused when its file is read, and not by each of its runs.
"""

from __future__ import annotations

from simulators.cluster.cluster import Cluster
from simulators.workloads.workload import Demand
from tuners.actions import Rejected, Space
from tuners.settings import OF_PULLS, Choice

__all__ = ["REVISING", "check_learning", "check_links", "check_time"]

REVISING = ("adarevision",)
"""Optimizers that need the sum of the gradients applied since a pull, `missed`, and keep a `total`."""


def check_links(cluster: Cluster, *, overlap: bool, tables: bool, buckets: bool) -> None:
    """Raise Rejected where transfers cannot share the links of a cluster: mini-batches touch rows of embedding `tables`,
    nodes have token `buckets`, roles of machines `overlap`, or what two of its keys ask for excludes each other."""
    discipline, control_queue = cluster.discipline, cluster.control_queue
    snapshots, independent = cluster.snapshot_clocks > 0, cluster.independent_flows
    if discipline in ("fifo", "serial") and (tables or snapshots):
        where = "mini-batches touch rows of embedding tables" if tables else "servers send snapshots"
        raise Rejected(f"Cannot queue transfers first come first served where {where}: use maxmin.")
    if control_queue and tables:
        raise Rejected("Cannot queue requests where mini-batches touch rows of embedding tables: set control_queue to 0.")
    if snapshots and tables:
        raise Rejected("Cannot send snapshots where mini-batches touch rows of embedding tables: set snapshot_clocks to 0.")
    if independent and tables:
        raise Rejected(
            "Cannot move flows by themselves where mini-batches touch rows of embedding tables: leave independent_flows out."
        )
    if (cluster.switch_bytes_per_second or cluster.server_threads > 1) and (tables or snapshots):
        what = "pass a switch" if cluster.switch_bytes_per_second else "give servers threads"
        where = "mini-batches touch rows of embedding tables" if tables else "servers send snapshots"
        raise Rejected(f"Cannot {what} where {where}: leave switch_bytes_per_second at 0, and server_threads at 1.")
    if cluster.server_threads > 1:
        for is_so, where in (
            (buckets, "nodes have token buckets"),
            (cluster.switch_both_ways, "pulls and pushes share a switch"),
            (overlap, "machines work and serve"),
        ):
            if is_so:
                raise Rejected(f"Cannot give servers threads where {where}: leave server_threads at 1.")


def check_time(demand: Demand, latency_seconds: float, space: Space) -> None:
    """Raise Rejected for a job whose mini-batches take no time under some setting: it would push for ever, and its budget
    would never end. Transfers take none where a worker is the only server."""
    times = (
        demand.sample_seconds,
        demand.fixed_seconds,
        demand.message_seconds,
        demand.apply_seconds,
        demand.commit_seconds,
    )
    roles = (k.options for k in space.knobs if k.name.startswith("role/") and isinstance(k, Choice))
    alone = not set(space.base.workers).isdisjoint(space.base.servers) or any("both" in options for options in roles)
    sent = demand.model_bytes + demand.whole_push_bytes
    if not (any(times) or latency_seconds or (sent and not alone)):
        raise Rejected(
            "Cannot train a job whose mini-batches take no time: give its demand sample_seconds or fixed_seconds."
        )


def check_learning(optimizer: str, aggregation: str, space: Space, *, tables: bool) -> None:
    """Raise Rejected for an optimizer that does not go with the aggregation of gradients, or with the knobs of `space`; with
    embedding `tables`, gradients are sparse."""
    if optimizer in REVISING and aggregation != "each":
        raise Rejected(
            f"Cannot apply the {aggregation} of gradients by {optimizer!r}: each has a delay of its own; "
            'use aggregation = "each".'
        )
    if optimizer in REVISING and space.takes_local_steps:
        raise Rejected(f"Cannot take local steps with {optimizer!r}, which revises at the servers: use another.")
    if space.may_have(OF_PULLS) and (space.takes_local_steps or optimizer in REVISING):
        what = "local steps" if space.takes_local_steps else f"{optimizer!r}, which revises what it knows of a pull"
        raise Rejected(f"Cannot skip pulls with {what}: hold pull_clocks at 1.")
    if tables:
        _check_sparse(optimizer, aggregation, space)


def _check_sparse(optimizer: str, aggregation: str, space: Space) -> None:
    if optimizer != "sgd":
        raise Rejected(
            f"Cannot apply the sparse gradients of embedding tables by {optimizer!r}, whose slots are dense: "
            'use optimizer = "sgd".'
        )
    if aggregation != "each":
        raise Rejected(
            f"Cannot apply the {aggregation} of the sparse gradients of embedding tables, which touch different "
            'rows: use aggregation = "each".'
        )
    if space.takes_local_steps:
        raise Rejected(
            "Cannot take local steps on embedding tables, of which a worker has no copy: hold local_steps and outer_rate at "
            "1 and outer_momentum at 0."
        )
    if space.may_have(OF_PULLS):
        raise Rejected("Cannot skip pulls of embedding tables: hold pull_clocks at 1, and keep copies by cache_clocks.")
