"""The family `preempted`: machines that are taken back, several together, and come back after a repair.

Two kinds. In the first, the job rents spot instances at a fraction of the price, of which several of a zone are lost at a
time, and machines on demand, which stay; roles are free, and the cheapest run wins, or the fastest. In the second, servers
have no replicas, and the interval of checkpoints is free.
"""

from __future__ import annotations

import math
from typing import Any

from harness.families.draft import Draft
from harness.families.ingredients import Machines, fitted, jitter
from harness.families.learners import PUSHES, LearningJob, drawn_job, drawn_workload, span_seconds
from harness.families.lot import Lot, rounded
from simulators.cluster.profiles import profile
from tuners.actions import Scalar

__all__ = ["preempted"]

_PRICED = ("m4.large", "m4.xlarge", "r4.xlarge", "c4.2xlarge")
_JOBS = ("logistic", "mlp", "mlp", "clouds", "cnn")


def preempted(lot: Lot) -> Draft:
    """One member of `preempted`."""
    return lot.among((_rented, _checkpointed))(lot)


def _losses(lot: Lot, every_seconds: float, span: float, **which: Any) -> dict[str, Any]:
    """Losses at which each machine is lost this often, in a job that takes about `span` seconds."""
    return which | {
        "every_seconds": rounded(every_seconds),
        "together": lot.among((1.0, fitted()["nodes_per_loss"], 2.5)),
        "repair_seconds": rounded(span * lot.log(0.03, 0.4)),
        "repair_spread": lot.among((0.3, 0.9)),
    }


def _rented(lot: Lot) -> Draft:
    """Spot instances that are lost, and machines on demand: which of them are workers or servers is free."""
    job = drawn_job(lot, _JOBS)
    kind, spot, steady = lot.among(_PRICED), lot.among((6, 9, 12)), lot.among((3, 4, 6))
    usd = profile(kind).usd_per_hour or 0.0
    workload = drawn_workload(lot, job, Machines((kind,) * spot), spot, job.batch, skew=0.2)
    span = span_seconds(workload, Machines((kind,) * spot), spot, job.batch)
    spots, steadies = [f"s{i}" for i in range(spot)], [f"d{i}" for i in range(steady)]
    cheapest = lot.chance(0.6)
    if cheapest or lot.chance(0.5):
        workers, servers = (spots, steadies) if lot.chance(0.5) else (spots + steadies[1:], steadies[:1])
    else:
        workers, servers = steadies[: lot.whole(1, 2)], steadies[-1:]
    free: dict[str, Any] = {"role/*": {"choice": ["worker", "server", "both", "idle"]}}
    rate = job.rate
    if lot.chance(0.5):
        rate = rounded(job.rate * lot.log(0.03, 0.3))
        free["learning_rate"] = {"real": [rounded(job.rate / 100), rounded(job.rate * 10)], "log": True}
    price = rounded(usd * lot.share(0.2, 0.5))
    groups = [
        {"type": kind, "count": spot, "prefix": "s", "spot": True, "usd_per_hour": price},
        {"type": kind, "count": steady, "prefix": "d", "usd_per_hour": usd},
    ]
    every = span * lot.log(0.5, 5.0)
    return Draft(
        about=(),
        summary=f"{job.words}, {spot} spot instances that are lost together and {steady} machines on demand: "
        f"the {'cheapest' if cheapest else 'fastest'} run; roles are free.",
        cluster={"nodes": groups, "discipline": "maxmin", "latency_seconds": 0.002},
        workload=workload,
        start={
            "workers": workers,
            "servers": servers,
            "policy": lot.among(("asp", "asp", "bsp")),
            "batch_size": job.batch,
            "learning_rate": rate,
        },
        free=free,
        conditions={"jitter": jitter(lot), "losses": [_losses(lot, every, span, spot=True, rack=spot // 3)]},
        metric=job.metric,
        minimise="usd" if cheapest else "seconds",
        good=_roles(job, spots, steadies, free),
        pushes=lot.whole(300, 900),
        longest_seconds=rounded(20 * span),
        seeds=3,  # who is lost, and when, depends on the seed
        slack=lot.among((4.0, 6.0)),
        margin=1.3,
    )


def _roles(job: LearningJob, spots: list[str], steadies: list[str], free: dict[str, Any]) -> tuple[dict[str, Scalar], ...]:
    """Some or all spot instances as workers of one or two servers on demand, the rest given back; or none of them."""
    few, half = spots[:: max(1, len(spots) // 3)], spots[::2]
    rented = [(few, 1), (half, 1), (spots, 1), (spots, 2), (spots + steadies[1:], 1), (steadies[1:], 1)]
    found: list[dict[str, Scalar]] = []
    for workers, servers in rented:
        roles: dict[str, Scalar] = {f"role/{n}": "idle" for n in (*spots, *steadies)}
        roles |= {f"role/{n}": "server" for n in steadies[:servers]} | {f"role/{n}": "worker" for n in workers}
        rates = (job.rate, rounded(0.3 * job.rate)) if "learning_rate" in free else (None,)
        found += [roles | ({} if rate is None else {"learning_rate": rate}) for rate in rates]
    return tuple(found)


def _checkpointed(lot: Lot) -> Draft:
    """Servers without replicas that fail: the interval of checkpoints is free."""
    job = drawn_job(lot, _JOBS)
    workers, servers, kind = lot.among((6, 8, 12)), lot.among((2, 4, 6)), lot.among(_PRICED)
    machines = Machines((kind,) * (workers + servers))
    workload = drawn_workload(lot, job, machines, workers, job.batch, skew=0.2)
    span = span_seconds(workload, machines, workers, job.batch)
    # A checkpoint takes `pause` seconds, and an event takes a server every `failure` seconds.
    pause, failure = span * lot.log(0.003, 0.02), span * lot.log(0.05, 0.25)
    best = math.sqrt(2 * pause * failure)  # Young's interval
    together = lot.among((1.0, fitted()["nodes_per_loss"]))
    losses = _losses(lot, failure * servers / together, span) | {"together": together, "rack": max(2, servers // 2)}
    losses["nodes"] = list(machines.names[workers:])
    early = lot.chance(0.5)
    start = pause * lot.log(0.5, 2.0) if early else span * lot.log(0.7, 3.0)
    return Draft(
        about=(),
        summary=f"{job.words} on {servers} servers without replicas that fail: the interval of checkpoints is free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin", "latency_seconds": 0.002},
        workload=workload,
        start={
            "worker_count": workers,
            "policy": "asp",
            "batch_size": job.batch,
            "learning_rate": rounded(0.3 * job.rate),
            "checkpoint_seconds": rounded(start),
        },
        free={"checkpoint_seconds": {"real": [rounded(pause / 2), rounded(5 * span)], "log": True}},
        costs={
            "checkpoint_bytes_per_second": rounded(workload["overrides"]["model_bytes"] / pause),
            "detection_seconds": rounded(pause / 2),
        },
        conditions={"jitter": jitter(lot), "losses": [losses]},
        metric=job.metric,
        good=tuple({"checkpoint_seconds": rounded(best * factor)} for factor in (0.5, 1.0, 2.0)),
        pushes=PUSHES,
        longest_seconds=rounded(20 * span),
        seeds=3,
        slack=4.0,
        margin=1.3,
    )
