"""Draw RLP's training instances: from one seed a cluster with stragglers, a network of some depth, and half of the data.

Zhu et al. 2020, Section 4, "Instance Generation Method": each of k workers sleeps with probability 0.3, for a normally
distributed time; the network has h in {0, 1, 2, 3} hidden layers of 256; half of the data is drawn; batches of 16. Table 1's
step times complete the text: workers that do not sleep take 4.8 s, and the four that do take 4.4, 5.3, 10.6 and 17.4 s
longer *on average over a run*, so each straggler has its own mean, drawn once (mean 9.4 s, deviation 6.0 s).

Instances of equal depth and equally many workers have equal shapes: they share one compiled engine and can be its lanes.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from simulators import jobs
from simulators.branch import Branch, JobContext, first_branch
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, Disturbance, Stragglers, straggling
from simulators.cluster.profiles import profile
from simulators.workloads.catalogue import workload
from simulators.workloads.workload import Workload
from tuners.actions import Setting, SyncPolicy, Target

__all__ = ["STRAGGLERS", "Instance", "InstanceKind", "draw"]

STRAGGLERS = Stragglers(mean_seconds=9.4, spread_seconds=6.0, sd_seconds=1.0, probability=0.3)
_CONDITIONS = Conditions(jitter=0.1, stragglers=STRAGGLERS)
_TARGET = Target("accuracy", 0.88)


@dataclass(frozen=True, slots=True, kw_only=True)
class InstanceKind:
    """The distribution that instances are drawn from. The defaults are the paper's if it gives a figure."""

    workload: str = "rlp-digits"
    overrides: Mapping[str, Any] = field(
        default_factory=lambda: MappingProxyType({})
    )  # as `simulators.workloads.catalogue.workload`
    data: Path | None = None  # folder of a workload that reads files
    depths: tuple[int, ...] = (0, 1, 2, 3)  # hidden layers, drawn uniformly; () keeps the workload's own model
    units: int = 256  # per hidden layer
    workers: int = 10
    fraction: float = 0.5  # of the workload's training data that an instance draws
    conditions: Conditions = _CONDITIONS
    target: Target = _TARGET
    evaluate_clocks: int = 10  # pushes between two validations


@dataclass(frozen=True, slots=True)
class Instance:
    """One instance, without a policy; `begin` makes a run of it under a policy."""

    seed: int
    depth: int  # -1: the workload's own model
    straggles: tuple[bool, ...]  # per worker
    context: JobContext
    parameters: Any  # at time 0

    def begin(self, policy: SyncPolicy) -> Branch:
        """The instance at time 0: `loop.advance` takes its `.program`, `.inputs` and `.state`, with `context.data`."""
        nodes = len(self.context.cluster.nodes)
        undisturbed = Disturbance(np.ones(nodes), np.zeros(nodes))
        return first_branch(self.context, self.context.job.start, policy, undisturbed, self.parameters)


def draw(kind: InstanceKind, seed: int, *, depth: int | None = None) -> Instance:
    """The instance of a seed. With `depth`, its network has that depth, and the rest is the same.

    Raises ValueError if the workload cannot be made.
    """
    if kind.workers < 1:
        raise ValueError(f"Cannot draw an instance of {kind.workers} workers: give at least 1.")
    if kind.depths:
        drawn = int(np.random.default_rng([seed, 4]).choice(kind.depths))
        depth = drawn if depth is None else depth
    made = _half(_workload(kind, depth), kind.fraction, seed)
    workers = tuple(f"w{i}" for i in range(kind.workers))
    server = profile("rlp-node")
    cluster = Cluster(tuple((name, server) for name in (*workers, "server")))
    start = Setting(
        workers=workers, servers=("server",), policy="bsp", batch_size=made.batch_size, learning_rate=made.learning_rate
    )
    spec = jobs.JobSpec(
        name=f"{kind.workload}/{seed}",
        cluster=cluster,
        workload=made,
        start=start,
        target=kind.target,
        budget_seconds=float("inf"),
        evaluate_clocks=kind.evaluate_clocks,
        conditions=kind.conditions,
        seed=seed,
    )
    data, parameters = jobs.drawn(made, seed, kind.workers)
    context = JobContext(cluster, made, kind.conditions, jobs.job(spec), data, kind.evaluate_clocks, seed)
    slow = straggling(kind.conditions, (*workers, "server"), np.random.default_rng([seed, 1]))[:-1]
    return Instance(seed, -1 if depth is None else depth, tuple(bool(s) for s in slow), context, parameters)


def _workload(kind: InstanceKind, depth: int | None) -> Workload:
    hidden = {} if depth is None else {"model.hidden": (kind.units,) * depth}
    return workload(kind.workload, {**hidden, **kind.overrides}, kind.data)


def _half(made: Workload, fraction: float, seed: int) -> Workload:
    """The workload with a random share of its training data."""
    if made.proxy is None:
        raise ValueError(f"Cannot draw instances of workload {made.name!r}: it is timing-only; name one that learns.")
    rows = len(made.proxy.train[0])
    kept = np.random.default_rng([seed, 5]).permutation(rows)[: max(1, round(fraction * rows))]
    train = tuple(column[kept] for column in made.proxy.train)
    return replace(made, proxy=made.proxy._replace(train=train), samples=len(kept))
