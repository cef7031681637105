"""Runs of RLP's instances under synchronisation policies, kept as they end, and what they say: for `published_rlp.py`."""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.training.instances import Instance, InstanceKind, draw
from simulators.cluster.conditions import Stragglers, straggling
from simulators.engine import loop
from tuners import policies
from tuners.actions import SyncPolicy, Target

__all__ = [
    "BOUNDS",
    "CLASSES",
    "CLOUDS",
    "CLOUDS_EDGE",
    "EDGE_RATES",
    "MOST_PUSHES",
    "USUAL_MOST",
    "Ratio",
    "Run",
    "baselines",
    "best_of",
    "by_seed",
    "drawn",
    "idle_seconds",
    "kind",
    "oracle",
    "read",
    "run",
    "runs",
    "speed_up",
    "stability_edge",
    "staleness_of",
    "table_of",
    "with_stragglers",
]

MOST_PUSHES = {0: 6_000}  # of a run, by depth; one that takes more is counted as not having got there
USUAL_MOST = 2_000
BOUNDS = (1, 2, 4, 7, 11, 16)  # of SSP, in Ho et al.'s sense; the paper's s is one more
EDGE_RATES = {0: 0.4, 1: 0.2, 2: 0.14, 3: 0.1, 6: 0.05}  # by depth: where BSP just fails to converge on digits
CLOUDS_EDGE = {1: 0.6, 6: 0.05}  # the same on Gaussian clouds
CLOUDS = {"data.label_noise": 0.0, "data.margin": 4.0, "data.samples": 4000, "demand.sample_seconds": 0.2996}
CLOUDS |= {
    "demand.fixed_seconds": 0.0,
    "demand.model_bytes": 1e4,
    "demand.message_seconds": 0.0,
    "demand.apply_seconds": 0.0,
}
_EVEN = msgspec.structs.replace(InstanceKind().conditions, stragglers=None)
_MILD = msgspec.structs.replace(_EVEN, stragglers=Stragglers(1.5, 0.5, probability=0.3, spread_seconds=0.5))
CLASSES = ("edge", "mild", "even", "skewed", "paper")


@dataclass(frozen=True)
class Run:
    """One run. An unfinished one took infinitely long."""

    kind: str
    policy: str
    seed: int
    depth: int
    stragglers: int
    status: str
    seconds: float
    pushes: int
    steps: tuple[int, ...]  # of each worker
    idle: float  # share of the workers' time held back by the policy
    inference: float  # share of the run's time that its decisions took, one after another


class Ratio(NamedTuple):
    """Of seconds, base over policy: over instances on which both got there, with a 95 % bootstrap interval."""

    mean: float  # geometric
    low: float
    high: float
    median: float  # of all instances, one that never got there taking for ever
    both: int
    base_failed: int
    failed: int


def kind(name: str, depth: int, *, workers: int = 10, data: str = "rlp-digits") -> InstanceKind:
    """`paper`: as the paper says, with mixed data and rate 0.01. `edge`: the rate at which BSP just fails to converge.
    `mild`: 0.85 of that, and stragglers that sleep for a third of a step; `even`: the same, and none. `skewed`: the paper's
    rate, and data dealt out by class."""
    clouds = data == "clouds-mlp"
    edge = (CLOUDS_EDGE if clouds else EDGE_RATES)[depth]
    rate = {"edge": 1.0, "mild": 0.85, "even": 0.85}.get(name, 0.0) * edge or (0.03 if clouds else 0.01)
    overrides: dict[str, Any] = {"learning_rate": rate, "skew": float(name == "skewed")}
    if clouds:
        overrides |= CLOUDS
    made = InstanceKind(workload=data, overrides=overrides, workers=workers)
    return replace(made, conditions={"even": _EVEN, "mild": _MILD}.get(name, made.conditions))


def drawn(name: str, seeds: Iterable[int], depth: int | None = None, **options: Any) -> list[Instance]:
    """One instance per seed, of a depth that the seed draws, or of `depth`."""
    depths = {seed: int(np.random.default_rng([seed, 4]).choice((0, 1, 2, 3))) if depth is None else depth for seed in seeds}
    return [draw(kind(name, h, **options), seed, depth=h) for seed, h in depths.items()]


def with_stragglers(wanted: int, count: int, first: int) -> list[int]:
    """The first so many seeds from `first` on whose ten workers have so many stragglers; `even` apart, in every class."""

    def stragglers(seed: int) -> int:
        nodes = (*(f"w{i}" for i in range(10)), "server")
        return int(straggling(InstanceKind().conditions, nodes, np.random.default_rng([seed, 1]))[:-1].sum())

    return list(islice((seed for seed in itertools.count(first) if stragglers(seed) == wanted), count))


def baselines(workers: int = 10) -> dict[str, SyncPolicy]:
    """By name, everything that RLP is held against."""
    seven = max(1, round(0.7 * workers))
    made = [policies.bsp(), policies.asp(), *map(policies.ssp, BOUNDS), policies.dssp(3, 15)]
    made += [policies.k_sync(seven), policies.k_batch_sync(seven), policies.backup_workers(seven)]
    made += [policies.k_async(size) for size in sorted({max(1, round(workers * s)) for s in (0.2, 0.4, 0.7)})]
    made += [policies.sync_switch(5 * workers), policies.sync_switch(10 * workers)]
    return {p.name: p for p in made}


def table_of(instance: Instance, policy: SyncPolicy) -> tuple[str, NDArray[np.float64]]:
    """The instance under the policy to its end: how it ended, and its records, [n, 11]."""
    b, most = instance.begin(policy), MOST_PUSHES.get(instance.depth, USUAL_MOST)
    args = (b.program, instance.ground.data, b.plant, b.state, jnp.int32(most), jnp.asarray(jnp.inf))
    state, table, used = loop.advance(*args, rows=most)
    return loop.STATUSES[int(state.clock.status)], np.asarray(table)[: int(used)]


def run(name: str, label: str, instance: Instance, policy: SyncPolicy) -> Run:
    status, table = table_of(instance, policy)
    workers = len(instance.straggles)
    end = float(table[-1, 0])
    steps = np.bincount(table[:, 1].astype(int), minlength=workers)
    idle = idle_seconds(table, workers).sum() / (workers * end)
    inference = policy.seconds * len(table) / end
    seconds = end if status == "target" else float("inf")
    found = (name, label, instance.seed, instance.depth, sum(instance.straggles), status, seconds, len(table))
    return Run(*found, tuple(map(int, steps)), float(idle), float(inference))


def idle_seconds(table: NDArray[np.float64], workers: int) -> NDArray[np.float64]:
    """Seconds that the policy held each worker back before the mini-batches that it pushed."""
    worker, waited = table[:, 1].astype(int), table[:, 6]
    return np.bincount(worker, weights=waited, minlength=workers).astype(np.float64)


def runs(
    name: str,
    instances: Sequence[Instance],
    under: Mapping[str, SyncPolicy],
    kept: Path,
    say: Callable[[str], None] = lambda _: None,
) -> list[Run]:
    """Every instance under every policy; what `kept` holds already is not run again. Keys of `under` are the names."""
    known = {(r.kind, r.policy, r.seed, r.depth): r for r in read(kept)}
    found = []
    for label, policy in under.items():
        for instance in instances:
            key = (name, label, instance.seed, instance.depth)
            if key not in known:
                known[key] = run(name, label, instance, policy)
                with kept.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(known[key])) + "\n")
            found.append(known[key])
        mine = [r for r in found if r.policy == label]
        say(f"{name:28} {label:22} {np.median([r.seconds for r in mine]):8.0f} s {len(mine)} runs")
    return found


def read(kept: Path) -> list[Run]:
    if not kept.exists():
        return []
    lines = (json.loads(line) for line in kept.read_text("utf-8").splitlines())
    return [Run(**{**line, "steps": tuple(line["steps"])}) for line in lines]


# ------------------------------------------------------------------------------------------------------------ statistics


def by_seed(found: Sequence[Run], policy: str) -> dict[tuple[int, int], float]:
    """Seconds of each instance."""
    return {(r.seed, r.depth): r.seconds for r in found if r.policy == policy}


def speed_up(found: Sequence[Run], base: Mapping[tuple[int, int], float], policy: str) -> Ratio:
    """Of `policy` over `base`, paired by instance."""
    mine = by_seed(found, policy)
    pairs = np.array([(base[key], mine[key]) for key in sorted(base.keys() & mine.keys())]).reshape(-1, 2)
    ended = np.isfinite(pairs)
    both = pairs[ended.all(1)]
    with np.errstate(invalid="ignore"):
        every = np.where(ended.any(1), pairs[:, 0] / pairs[:, 1], np.nan)
    logs = np.log(both[:, 0] / both[:, 1])
    nothing = float("nan")
    low, high = (nothing, nothing)
    if len(logs):
        resampled = np.random.default_rng(0).choice(logs, (2000, len(logs))).mean(1)
        low, high = np.exp(np.quantile(resampled, [0.025, 0.975]))
    return Ratio(
        mean=float(np.exp(logs.mean())) if len(logs) else nothing,
        low=float(low),
        high=float(high),
        median=float(np.nanmedian(every)) if np.isfinite(every).any() else nothing,
        both=len(both),
        base_failed=int((~ended[:, 0]).sum()),
        failed=int((~ended[:, 1]).sum()),
    )


def best_of(found: Sequence[Run], names: Sequence[str]) -> str:
    """The policy of least median seconds: one for all instances."""
    return min(names, key=lambda name: float(np.median(list(by_seed(found, name).values()))))


def oracle(found: Sequence[Run], names: Sequence[str]) -> dict[tuple[int, int], float]:
    """The least seconds among `names`, instance by instance: what nobody could choose beforehand."""
    each = [by_seed(found, name) for name in names]
    return {key: min(seconds[key] for seconds in each) for key in each[0]}


# -------------------------------------------------------------------------------------------------------------- stability


def staleness_of(seed: int, policy: SyncPolicy, *, stragglers: bool, pushes: int = 1500) -> NDArray[np.int64]:
    """Of every push on one instance's cluster, whatever is learned there."""
    around = InstanceKind().conditions if stragglers else _EVEN
    idle = InstanceKind(depths=(0,), units=4, target=Target("clocks", pushes), evaluate_clocks=2**30, conditions=around)
    _, table = table_of(draw(idle, seed), policy)
    return table[:, 7].astype(np.int64)


def stability_edge(staleness: NDArray[np.int64], workers: int) -> float:
    """workers x rate x curvature beyond which x <- x - rate curvature x_stale grows on a quadratic; by bisection."""
    low, high = 0.0, 20.0
    for _ in range(24):
        middle = (low + high) / 2
        low, high = (low, middle) if _growth(staleness, middle / workers) > 0 else (middle, high)
    return low


def _growth(staleness: NDArray[np.int64], step: float) -> float:
    """Growth of log |x| over the second half of the pushes."""
    x, halfway = [1.0], -np.inf
    for n, s in enumerate(staleness):
        x.append(x[n] - step * x[max(n - int(s), 0)])
        if abs(x[-1]) > 1e200:
            return np.inf
        if n == len(staleness) // 2:
            halfway = np.log(max(map(abs, x[-50:])) + 1e-300)
    return float(np.log(max(map(abs, x[-50:])) + 1e-300) - halfway)
