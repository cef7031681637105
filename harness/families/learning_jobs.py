"""Jobs that learn, and the four families of them: `learning`, `policies`, `replayed` and `mixed`.

* `learning`, the whole of training: a start whose rate is far too low or too high, or whose workers, batch or policy are
  poor; rate, momentum, batch, policy and mostly the number of workers are free.
* `policies`, who waits for whom: the rate is held, from far below the best to the edge of stability; machines straggle,
  data is distributed by class; policy and bound are free, and policies may be installed.
* `replayed`: as `learning`, but stragglers, noise, throttled networks and lost nodes are replayed from recordings that come
  with the harness.
* `mixed`: as `learning` on unequal machines, whose roles are free one by one, with episodes and nodes that leave or fail.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from harness.families.draft import Draft
from harness.families.ingredients import (
    Machines,
    drawn_machines,
    episodes,
    jitter,
    losses,
    recorded,
    stragglers,
)
from harness.families.learners import (
    SMALL,
    LearningJob,
    compute_seconds,
    drawn_job,
    drawn_workload,
    good_rates,
    poor_rate,
    rate_free,
    span_seconds,
)
from harness.families.lot import Lot, rounded
from tuners.actions import Scalar

__all__ = ["learning", "mixed", "policies", "replayed"]


# ------------------------------------------------------------------------------------------------------------- learning


def learning(lot: Lot) -> Draft:
    """One member of `learning`."""
    job = drawn_job(lot, ("logistic", "svm", "mlp", "mlp", "clouds", "cnn", "ratings"))
    machines = drawn_machines(lot, (6, 8, 10, 12, 16), SMALL, mixed=0.3)
    k, overlap = len(machines.types), lot.chance(0.25)
    count = k if overlap else lot.whole(max(2, k // 3), k - max(1, k // 5))
    batch = lot.among((job.batch // 4, job.batch, job.batch * 2))
    policy = lot.among(("bsp", "asp", "ssp"))
    start: dict[str, Any] = {"worker_count": count}
    if overlap:
        start = {"workers": list(machines.names), "servers": list(machines.names)}
    start |= {"policy": policy, "staleness": lot.whole(0, 3) if policy == "ssp" else 0}
    start |= {"batch_size": batch, "learning_rate": poor_rate(lot, job)}
    momentum = lot.among((0.0, 0.0, 0.5, 0.9))
    start["momentum"] = momentum
    free: dict[str, Any] = {
        "learning_rate": rate_free(job),
        "momentum": {"real": [0.0, 0.95]},
        "batch_size": {"choice": sorted({job.batch // 4, job.batch // 2, job.batch, job.batch * 2, job.batch * 4})},
        "policy": {"choice": ["bsp", "asp", "ssp"]},
        "staleness": {"integer": [0, 8]},
    }
    if not overlap and lot.chance(0.8):
        free["worker_count"] = {"integer": [2, k - 1]}
    if lot.chance(0.3):
        free["transfer_bits"] = {"choice": [16, 32]}
    for name in ("momentum", "batch_size", "staleness"):
        if lot.chance(0.2):
            del free[name]
    workers, workload = machines.names[:count], drawn_workload(lot, job, machines, count, batch, skew=0.2)
    conditions: dict[str, Any] = {"jitter": jitter(lot)}
    if lot.chance(0.5):
        conditions["stragglers"] = stragglers(lot, workers, compute_seconds(workload, machines, batch))
    if lot.chance(0.3):
        conditions["episodes"] = episodes(lot, workers, span_seconds(workload, machines, count, batch))
    counts = {count, max(2, round(0.7 * k))} if "worker_count" in free else {count}
    return Draft(
        about=(),
        summary=f"{job.words} on {k} machines: the whole of training is free, and the start is poor.",
        cluster={
            "nodes": machines.groups,
            "discipline": lot.among(("maxmin", "maxmin", "uneven")),
            "latency_seconds": 0.002,
        },
        workload=workload,
        start=start,
        free=free,
        conditions=conditions,
        metric=job.metric,
        good=_good_values(job, sorted(counts), free),
        pushes=lot.whole(300, 900),
        slack=lot.among((5.0, 7.0, 10.0)),
        margin=2.0,
    )


def _good_values(job: LearningJob, counts: Sequence[int], free: Mapping[str, Any]) -> tuple[dict[str, Scalar], ...]:
    """Values of the free knobs under which the job is expected to train well: one per number of workers and rate."""
    found = []
    for number in counts:
        for rate in good_rates(job):
            values: dict[str, Scalar] = {"policy": "asp", "learning_rate": rate}
            plain = {"momentum": 0.0, "batch_size": job.batch, "worker_count": number}
            found.append(values | {name: value for name, value in plain.items() if name in free})
    return tuple(found)


# ------------------------------------------------------------------------------------------------------------- policies


def policies(lot: Lot) -> Draft:
    """One member of `policies`."""
    job = drawn_job(lot, ("logistic", "mlp", "mlp", "mlp", "clouds", "cnn"))
    count, servers = lot.among((4, 6, 8, 10, 12, 16)), lot.among((1, 2, 3))
    machines = drawn_machines(lot, (count,), SMALL, mixed=0.3)
    machines = Machines(machines.types + ("server-16core",) * servers)
    rate = rounded(job.rate * (lot.log(0.05, 1.0) if lot.chance(0.5) else lot.log(1.0, 6.0)))
    momentum = lot.among((0.0, 0.0, 0.0, 0.5, 0.9))
    policy = lot.among(("bsp", "asp", "ssp"))
    workload = drawn_workload(lot, job, machines, count, job.batch, skew=0.5)
    conditions: dict[str, Any] = {"jitter": jitter(lot)}
    if lot.chance(0.85):
        compute = compute_seconds(workload, machines, job.batch)
        conditions["stragglers"] = stragglers(lot, machines.names[:count], compute, most=0.5)
    if lot.chance(0.4):
        span = span_seconds(workload, machines, count, job.batch)
        conditions["episodes"] = episodes(lot, machines.names[:count], span)
    good: list[dict[str, Scalar]] = [
        {"policy": p, "staleness": s} for p, s in (("bsp", 0), ("asp", 0), ("ssp", 2), ("ssp", 6))
    ]
    return Draft(
        about=(),
        summary=f"{job.words} with {count} workers, of which some are slow: who waits for whom is free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin", "latency_seconds": 0.002},
        workload=workload,
        start={
            "worker_count": count,
            "policy": policy,
            "staleness": lot.whole(1, 8) if policy == "ssp" else 0,
            "batch_size": job.batch,
            "learning_rate": rate if momentum == 0 else rounded(rate * (1 - momentum)),
            "momentum": momentum,
        },
        free={"policy": {"choice": ["bsp", "asp", "ssp", "dssp"]}, "staleness": {"integer": [0, 16]}},
        conditions=conditions,
        rules={"install_policies": True},
        metric=job.metric,
        good=tuple(good),
        pushes=lot.whole(300, 900),
        seeds=3,  # at a rate that is held, how far training comes depends on the seed
        slack=lot.among((4.0, 6.0)),
        margin=1.2,
    )


# ------------------------------------------------------------------------------------------------------------- replayed


def replayed(lot: Lot) -> Draft:
    """One member of `replayed`: a draft of `learning` whose conditions are one or two recordings."""
    draft = learning(lot)
    conditions = {"jitter": draft.conditions["jitter"], "replay": recorded(lot)}
    words = draft.summary.partition(":")[0]
    return replace(
        draft,
        summary=f"{words}: the whole of training is free, the start is poor, and the conditions were recorded.",
        conditions=conditions,
    )


# ---------------------------------------------------------------------------------------------------------------- mixed


def mixed(lot: Lot) -> Draft:
    """One member of `mixed`."""
    job = drawn_job(lot, ("logistic", "mlp", "clouds", "ratings"))
    machines = drawn_machines(lot, (6, 8, 10), (*SMALL, "server-16core"), mixed=1.0)
    k, names = len(machines.types), machines.names
    count = lot.whole(2, k - 2)
    workers = lot.some(range(k), count)
    servers = tuple(i for i in range(k) if i not in workers)
    batch = lot.among((job.batch // 4, job.batch, job.batch * 2))
    workload = drawn_workload(lot, job, machines, count, batch, skew=0.2)
    span = span_seconds(workload, machines, count, batch)
    conditions: dict[str, Any] = {"jitter": jitter(lot), "episodes": episodes(lot, names, span)}
    if lot.chance(0.5):
        conditions["nodes"] = losses(lot, names, 3 * span, most=lot.whole(1, max(1, k // 3)))
    by_speed = sorted(range(k), key=lambda i: (-machines.speed(i), i))
    good: list[dict[str, Scalar]] = []
    for number in sorted({count, max(2, round(0.7 * k))}):
        roles: dict[str, Scalar] = {f"role/{names[i]}": "worker" if i in by_speed[:number] else "server" for i in range(k)}
        good += [
            roles | {"policy": "asp", "learning_rate": rate, "momentum": 0.0, "batch_size": job.batch}
            for rate in good_rates(job)
        ]
    return Draft(
        about=(),
        summary=f"{job.words} on {k} unequal machines that may leave or fail: everything is free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin", "latency_seconds": 0.002},
        workload=workload,
        start={
            "workers": [names[i] for i in workers],
            "servers": [names[i] for i in servers],
            "policy": lot.among(("bsp", "asp", "ssp")),
            "batch_size": batch,
            "learning_rate": poor_rate(lot, job),
            "momentum": lot.among((0.0, 0.0, 0.5)),
        },
        free={
            "role/*": {"choice": ["worker", "server", "both", "idle"]},
            "learning_rate": rate_free(job),
            "momentum": {"real": [0.0, 0.95]},
            "batch_size": {"choice": sorted({job.batch // 4, job.batch // 2, job.batch, job.batch * 2, job.batch * 4})},
            "policy": {"choice": ["bsp", "asp", "ssp", "dssp"]},
            "staleness": {"integer": [0, 8]},
            "transfer_bits": {"choice": [16, 32]},
        },
        conditions=conditions,
        metric=job.metric,
        good=tuple(good),
        pushes=lot.whole(300, 900),
        slack=lot.among((7.0, 10.0)),
        margin=2.0,
    )
