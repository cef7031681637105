"""The family `ages`: asynchronous training in which only the bound on the age of gradients matters.

Samples are generated more slowly than they are learned from, at a rate that is held, from a low one to beyond the edge of
stability without a bound. What is too old is discarded, or few gradients are in progress and what is older all the same is
admitted; the bound is that of users' grids: 0, 1, 2, 4, 8, 16. The start's bound is too tight or too loose.
"""

from __future__ import annotations

from typing import Any

from harness.families.draft import Draft
from harness.families.ingredients import Machines, drawn_machines, jitter
from harness.families.learners import SMALL, compute_seconds, drawn_job, drawn_workload
from harness.families.lot import Lot, rounded
from tuners.actions import Scalar

__all__ = ["ages"]

_GRID = (0, 1, 2, 4, 8, 16)


def ages(lot: Lot) -> Draft:
    """One member of `ages`."""
    job = drawn_job(lot, ("logistic", "mlp", "mlp", "clouds", "cnn"))
    count, servers = lot.among((8, 12, 16, 24)), lot.among((1, 2))
    machines = drawn_machines(lot, (count,), SMALL, mixed=0.3)
    machines = Machines(machines.types + ("server-16core",) * servers)
    workload = drawn_workload(lot, job, machines, count, job.batch, skew=0.3, ratio=(1.0, 20.0))
    conditions: dict[str, Any] = {"jitter": jitter(lot)}
    if lot.chance(0.7):
        # Long answers take several times as long as short ones: who is slow, and how often, is drawn for each seed.
        mean = rounded(compute_seconds(workload, machines, job.batch) * lot.log(1.0, 6.0))
        conditions["stragglers"] = {
            "mean_seconds": mean,
            "sd_seconds": rounded(mean / 3),
            "probability": lot.share(0.1, 0.5),
            "spread_seconds": rounded(mean / 3),
        }
    bound = lot.among((0, 0, 1, 16))
    free: dict[str, Any] = {"policy": {"choice": ["discard", "admit"]}, "staleness": {"choice": list(_GRID)}}
    good: list[dict[str, Scalar]] = [
        {"policy": policy, "staleness": age} for policy in ("discard", "admit") for age in (1, 4, 8, 16)
    ]
    return Draft(
        about=(),
        summary=f"{job.words} with {count} asynchronous workers: the bound on the age of gradients is free.",
        cluster={"nodes": machines.groups, "discipline": "maxmin", "latency_seconds": 0.002},
        workload=workload,
        start={
            "worker_count": count,
            "policy": lot.among(("discard", "admit")),
            "staleness": bound,
            "batch_size": job.batch,
            "learning_rate": rounded(job.rate * lot.log(0.3, 6.0)),
        },
        free=free,
        conditions=conditions,
        metric=job.metric,
        good=tuple(good),
        pushes=lot.whole(400, 1000),
        seeds=3,  # at a rate that is held, how far training comes depends on the seed
        slack=lot.among((4.0, 6.0)),
        margin=1.3,
    )
