"""The cost of staleness: mini-batches until an accuracy, asynchronous over synchronous, recorded and with a proxy.

This ratio depends on how close the learning rate is to the limit of stability. So one constant is fitted: the learning rate
of the proxy, a perceptron on digits in place of the recorded network. As in the recorded runs, momentum is 0.9, and a
synchronous step averages the gradients of w workers and uses w times the learning rate. The accuracy to reach is a share of
the best accuracy of the worse mode. It is low enough to be reached before the recorded runs lower their learning rate; the
proxy's rate is constant.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from statistics import median

import numpy as np

from simulators.calibration.recorded.efforts import Effort
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.cluster.profiles import profile
from simulators.jobs import JobSpec
from simulators.system import SimulatedSystem
from simulators.workloads.catalogue import workload
from tuners.actions import Run, Setting, Target

__all__ = ["PROXY", "fitted_rate", "proxy_ratio", "ratio"]

_RATES = (0.05, 0.1, 0.15, 0.18, 0.2, 0.21, 0.22, 0.225, 0.228, 0.231, 0.234, 0.236, 0.238, 0.24, 0.242)
PROXY = "digits-mlp"
_MOMENTUM, _BATCH = 0.9, 16
_ACCURACY = 0.87  # that the proxy must reach
_SEEDS = (0, 1, 2, 3, 4)
_MOST = 3000  # mini-batches after which a run of the proxy stops


def ratio(found: Sequence[Effort]) -> float:
    """Median of the asynchronous runs over median of the synchronous ones; nan where one kind is missing."""
    asp, bsp = ([e.minibatches for e in found if e.policy == policy] for policy in ("asp", "bsp"))
    return median(asp) / median(bsp) if asp and bsp else float("nan")


def fitted_rate(wanted: float, workers: int) -> float:
    """The learning rate at which the proxy's ratio is nearest to `wanted`; the lowest of several."""
    return min(_RATES, key=lambda rate: abs(np.log(proxy_ratio(rate, workers) / wanted)))


@cache
def proxy_ratio(rate: float, workers: int) -> float:
    """Mini-batches until the proxy reaches its accuracy, asynchronous over synchronous: medians over seeds."""
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
