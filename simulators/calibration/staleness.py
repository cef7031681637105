"""What staleness costs: mini-batches to an accuracy, asynchronous over synchronous, recorded and at proxy scale.

How many more mini-batches asynchronous training takes depends on how near the learning rate is to where it becomes unstable,
and that is the one constant fitted here: the rate of a proxy that really learns, a perceptron on digits in place of the
recorded network. Momentum is 0.9, and a synchronous step averages gradients at a rate as many times as large as there are
workers, as the recorded runs had it. The recorded accuracy is a share of the lesser of the best of the two modes, low enough
to be reached before schedules lower the rate, which the proxy's does not.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import cache
from statistics import median
from typing import NamedTuple

import numpy as np
import polars as pl

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.cluster.profiles import profile
from simulators.jobs import JobSpec
from simulators.system import SimulatedSystem
from simulators.workloads.catalogue import workload
from tuners.actions import Run, Setting, Target

__all__ = ["LEVEL", "PROXY", "Effort", "efforts", "fitted_rate", "proxy_ratio", "ratio"]

LEVEL = 0.7  # of the best accuracy
_RATES = (0.05, 0.1, 0.15, 0.18, 0.2, 0.21, 0.22, 0.225, 0.228, 0.231, 0.234, 0.236, 0.238, 0.24, 0.242)
PROXY = "digits-mlp"
_MOMENTUM, _BATCH = 0.9, 16
_ACCURACY = 0.87  # of the proxy
_SEEDS = (0, 1, 2, 3, 4)
_MOST = 3000  # mini-batches


class Effort(NamedTuple):
    """Mini-batches that one run took to the accuracy."""

    workload: str
    run: str
    policy: str  # of the whole run
    workers: int
    minibatches: int


def efforts(tables: Mapping[str, pl.DataFrame]) -> list[Effort]:
    """Of every run that was synchronous, or asynchronous, all the time, is no variant, and did reach the accuracy."""
    progress = tables.get("progress")
    if progress is None or "accuracy" not in progress.columns:
        return []
    each = (
        tables["settings"]
        .group_by("run")
        .agg(pl.col("policy").unique(), pl.col("workers").first(), pl.col("batch_size").n_unique().alias("batches"))
    )
    pure = each.filter(pl.col("policy").list.len() == 1, pl.col("batches") == 1, pl.col("workers").is_not_null())
    runs = pure.with_columns(pl.col("policy").list.first()).filter(pl.col("policy").is_in(["asp", "bsp"]))
    plain = ~pl.col("extras").fill_null("{}").str.contains('"variant": "[^"]')  # one-off experiments are not alike
    named = runs.join(tables["runs"].filter(plain).select("run", "workload"), on="run").drop_nulls("workload")
    seen = progress.drop("policy").filter(pl.col("accuracy").is_not_null()).join(named, on="run").sort("run", "steps")
    many = seen.filter(pl.len().over("run") > 5)
    found = []
    for (job,), mine in many.group_by("workload", maintain_order=True):
        best = mine.group_by("policy").agg(pl.col("accuracy").max())["accuracy"]
        reached = mine.filter(pl.col("accuracy") >= LEVEL * best.min()).group_by("run", maintain_order=True).first()  # type: ignore[operator]
        for r in reached.sort("run").to_dicts():
            steps = r["steps"] * (r["workers"] if r["policy"] == "bsp" else 1)
            found.append(Effort(str(job), r["run"], r["policy"], r["workers"], steps))
    return found


def ratio(found: Sequence[Effort]) -> float:
    """Median of the asynchronous over median of the synchronous."""
    asp, bsp = ([e.minibatches for e in found if e.policy == policy] for policy in ("asp", "bsp"))
    return median(asp) / median(bsp) if asp and bsp else float("nan")


def fitted_rate(wanted: float, workers: int) -> float:
    """The proxy's rate at which its ratio is nearest to the `wanted` one; the least of equals."""
    return min(_RATES, key=lambda rate: abs(np.log(proxy_ratio(rate, workers) / wanted)))


@cache
def proxy_ratio(rate: float, workers: int) -> float:
    """Mini-batches of the proxy to its accuracy, asynchronous over synchronous: medians over seeds."""
    asp, bsp = (
        median(_minibatches(policy, rate * k, workers, seed) for seed in _SEEDS)
        for policy, k in (("asp", 1), ("bsp", workers))
    )
    return asp / bsp


def _minibatches(policy: str, rate: float, workers: int, seed: int) -> int:
    names = tuple(f"n{i}" for i in range(workers))
    cluster = Cluster(tuple((name, profile("server-16core")) for name in names))
    job = workload(PROXY, {"aggregation": "mean"})
    setting = Setting(workers=names, servers=names, batch_size=_BATCH, policy=policy, learning_rate=rate, momentum=_MOMENTUM)
    target = Target("accuracy", _ACCURACY)
    spec = JobSpec(
        name="proxy",
        cluster=cluster,
        workload=job,
        start=setting,
        target=target,
        budget_seconds=1e9,
        evaluate_clocks=workers,
        conditions=Conditions(jitter=0.1),
        seed=seed,
    )
    system = SimulatedSystem(spec)
    return max(system.perform(Run(clocks=_MOST)).clocks, 1)
