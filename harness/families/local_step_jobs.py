"""The family `localsteps`: links so slow that workers should take several local steps before they push.

A push and a pull take two to twenty times as long as a mini-batch. How many local steps pay depends on that, on how the data
is distributed, and on the machines, of which some may be slow. The start mostly takes one step per push, else many. Local
steps and the servers' outer optimizer are free, mostly the rate, and policies may be installed, so that rounds of a quorum
can be played.
"""

from __future__ import annotations

from typing import Any

from harness.families.draft import Draft
from harness.families.ingredients import Machines, drawn_machines, jitter, stragglers
from harness.families.learners import SMALL, compute_seconds, drawn_job, drawn_workload
from harness.families.lot import Lot, rounded
from tuners.actions import Scalar

__all__ = ["localsteps"]


def localsteps(lot: Lot) -> Draft:
    """One member of `localsteps`."""
    job = drawn_job(lot, ("logistic", "mlp", "mlp", "clouds", "cnn", "curves"))
    count, servers = lot.among((4, 6, 8, 12)), lot.among((1, 2))
    machines = drawn_machines(lot, (count,), SMALL, mixed=0.3)
    machines = Machines(machines.types + ("server-16core",) * servers)
    workload = drawn_workload(lot, job, machines, count, job.batch, skew=0.5, ratio=(0.05, 0.5))
    workload["overrides"]["aggregation"] = "mean"
    conditions: dict[str, Any] = {"jitter": jitter(lot)}
    if lot.chance(0.5):
        # Slow enough to be slow also compared with transfers.
        compute = 4 * compute_seconds(workload, machines, job.batch)
        conditions["stragglers"] = stragglers(lot, machines.names[:count], compute, most=0.4)
    start: dict[str, Any] = {
        "worker_count": count,
        "policy": "bsp",
        "batch_size": job.batch,
        "learning_rate": rounded(job.rate * lot.log(0.5, 2.0)),
        "local_steps": lot.among((1, 1, 1, 2, 64)),
    }
    free: dict[str, Any] = {
        "local_steps": {"integer": [1, 64], "log": True},
        "outer_rate": {"real": [0.3, 1.5]},
        "outer_momentum": {"real": [0.0, 0.9]},
    }
    if lot.chance(0.7):
        free["learning_rate"] = {"real": [rounded(job.rate / 10), rounded(job.rate * 10)], "log": True}
    good: list[dict[str, Scalar]] = [
        {"local_steps": steps, "outer_rate": rate, "outer_momentum": momentum}
        for steps in (4, 12, 32)
        for rate, momentum in ((1.0, 0.0), (0.7, 0.9))
    ]
    if "learning_rate" in free:
        good += [values | {"learning_rate": rounded(3 * job.rate)} for values in good if values["outer_momentum"] == 0]
    return Draft(
        about=(),
        summary=f"{job.words}, {count} workers behind slow links: local steps and what the servers make of them are free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin", "latency_seconds": 0.02},
        workload=workload,
        start=start,
        free=free,
        conditions=conditions,
        rules={"install_policies": True},
        metric=job.metric,
        good=tuple(good),
        pushes=lot.whole(200, 500),
        check_clocks=count,
        slack=lot.among((4.0, 6.0)),
        margin=1.5,
    )
