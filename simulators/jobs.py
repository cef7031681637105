"""How a job begins: its specification, what tuners are told of it, the data in this seed's order, the first parameters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import jax
import numpy as np
from numpy.typing import NDArray

from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.cluster.profiles import node_rate
from simulators.engine.embedding import hottest_blocks, popularity, seen_before
from simulators.engine.learning import TrainingData
from simulators.engine.optimizers import OUTER, slots
from simulators.reconfiguration.costs import METHODS, METHODS_OF_TABLES, Costs
from simulators.workloads.workload import Workload
from tuners.actions import Job, Rejected, Setting, Space, Target
from tuners.settings import OF_REPLICAS, Knob

__all__ = ["JobSpec", "check_memory", "drawn", "evaluate_seconds", "job"]

_FORWARD = 1 / 3  # of the work of a gradient is the forward pass; the backward pass takes about twice as much


@dataclass(frozen=True, slots=True, kw_only=True)
class JobSpec:
    """What a scenario and a seed say of a job: everything that a system needs to begin it."""

    name: str
    cluster: Cluster
    workload: Workload
    start: Setting
    knobs: tuple[Knob, ...] = ()
    target: Target
    budget_seconds: float
    evaluate_clocks: int  # pushes between two validations
    conditions: Conditions = field(default_factory=Conditions)
    costs: Costs = field(default_factory=Costs)
    installs_policies: bool = False  # also where `policy` is not free
    budget_usd: float = math.inf  # a target that cost more does not count as reached
    seed: int


def job(spec: JobSpec) -> Job:
    """What tuners are told: public facts only."""
    workload = spec.workload
    nodes = spec.cluster.public_nodes
    blocks = spec.costs.model_blocks if workload.has_tables else 0
    space = Space(spec.start, nodes, spec.knobs, blocks=blocks)
    return Job(
        name=spec.name,
        nodes=nodes,
        start=spec.start,
        space=space,
        target=spec.target,
        budget_seconds=spec.budget_seconds,
        model_bytes=workload.demand.model_bytes,
        push_bytes=workload.demand.whole_push_bytes,
        samples=workload.samples,
        seed=spec.seed,
        methods=METHODS_OF_TABLES if workload.has_tables else METHODS,
        blocks=blocks,
        hottest=_hottest(workload, blocks) if space.may_have(OF_REPLICAS) else (),
        branch_bytes=workload.demand.model_bytes * (1 + slots(OUTER if space.takes_local_steps else workload.optimizer)),
        installs_policies=spec.installs_policies or space.frees("policy"),
        evaluate_seconds=evaluate_seconds(spec),
        prices=spec.cluster.prices,
        budget_usd=spec.budget_usd,
    )


def _hottest(workload: Workload, blocks: int) -> tuple[int, ...]:
    proxy = workload.proxy
    if proxy is None or proxy.embedding is None:
        return ()
    return hottest_blocks(np.asarray(proxy.train[0]), proxy.embedding.rows, blocks)


def evaluate_seconds(spec: JobSpec) -> float:
    """Simulated seconds of one `Evaluate`, the same under every setting: [costs] `evaluate_seconds`, or else a pass over the
    validation data.

    In a pass every node of the cluster gets the model through its NIC, and then computes the losses of its part of the data;
    parts are in proportion to speeds. Zero for a timing-only workload, which has nothing to evaluate.
    """
    if spec.costs.evaluate_seconds is not None:
        return spec.costs.evaluate_seconds
    workload = spec.workload
    if workload.proxy is None:
        return 0.0
    kinds = [kind for _, kind in spec.cluster.nodes]
    transfer = workload.demand.model_bytes / min(kind.nic_bytes_per_second for kind in kinds)
    work = _FORWARD * workload.demand.sample_seconds * len(workload.proxy.valid[0])  # on one reference core
    rate = sum(node_rate(kind, workload.demand) for kind in kinds)
    return transfer + (work / rate if work else 0.0)


def check_memory(job: Job, settings: Iterable[Setting]) -> None:
    """Raise Rejected where a server cannot hold its share of all branches under these settings (MLtuner, Section 4.6). Only
    parameters and optimizer slots count."""
    held = {node.name: 0.0 for node in job.nodes}
    for setting in settings:
        for server, share in setting.held(job.blocks, job.hottest).items():
            held[server] += share * job.branch_bytes
    for node in job.nodes:
        if held[node.name] > node.memory_bytes:
            raise Rejected(
                f"Cannot hold one branch more: {node.name} would keep {held[node.name]:.3g} bytes of parameters and slots, "
                f"and has {node.memory_bytes:.3g}; free a branch."
            )


def drawn(workload: Workload, seed: int, parts: int = 1) -> tuple[TrainingData, Any]:
    """The data in this seed's order, and this seed's first parameters.

    Workers take consecutive parts of it. A share `Workload.skew` of the samples is divided into `parts` of equal size by
    class, so that each part holds few classes, drawn at random; the rest is mixed. Raises ValueError if the data has no
    classes and `skew` is not 0.
    """
    if workload.proxy is None:
        return TrainingData((), ()), ()
    train = workload.proxy.train
    rng = np.random.default_rng([seed, 3])
    order = rng.permutation(len(train[0]))
    if workload.skew:
        order = _by_class(order, np.asarray(train[-1]), workload.skew, parts, rng)
    shuffled = tuple(np.asarray(column)[order] for column in train)
    if workload.proxy.embedding is not None:
        rows = shuffled[0]
        shuffled = (*shuffled, seen_before(rows), popularity(rows, workload.proxy.embedding.rows))
    # Not `jnp.asarray`, which compiles a program for each shape.
    return TrainingData(jax.device_put(shuffled), workload.proxy.valid), workload.proxy.init(seed)


def _by_class(
    order: NDArray[np.int64], labels: NDArray[np.generic], skew: float, parts: int, rng: np.random.Generator
) -> NDArray[np.int64]:
    """`order`, of which a share `skew` is sorted by class, divided into `parts`, and mixed within each of them."""
    if labels.dtype.kind not in "iu" or labels.ndim != 1:
        raise ValueError(f"Cannot deal out a share {skew:g} of the data by class: it has no classes; set skew to 0.")
    dealt = rng.random(len(order)) < skew
    ranks = rng.permutation(int(labels.max()) + 1)
    by_class = order[dealt][np.argsort(ranks[labels[order[dealt]]], kind="stable")]
    pairs = zip(np.array_split(by_class, parts), np.array_split(order[~dealt], parts), strict=True)
    return np.concatenate([rng.permutation(np.concatenate(pair)) for pair in pairs])
