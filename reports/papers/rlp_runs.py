"""Runs of RLP's instances under synchronisation policies, stored as they end, and statistics of them: for the program
`reports.papers.rlp`.
"""

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
from simulators.engine import loop, timing
from simulators.engine.job_state import STATUSES
from tuners import policies
from tuners.actions import SyncPolicy, Target

__all__ = [
    "BOUNDS",
    "CLASSES",
    "USUAL_MOST",
    "FinishedRun",
    "InstanceRun",
    "Ratio",
    "baselines",
    "best_of",
    "by_seed",
    "drawn",
    "kind",
    "oracle",
    "runs",
    "speed_up",
    "stability_edge",
    "staleness_of",
    "table_of",
    "with_stragglers",
]

_MOST_PUSHES = {0: 6_000}  # of a run, by depth; a run that takes more counts as one that did not reach the target
USUAL_MOST = 2_000  # at all other depths
BOUNDS = (1, 2, 4, 7, 11, 16)  # of SSP, in Ho et al.'s sense; the paper's s is one more
_EDGE_RATES = {0: 0.4, 1: 0.2, 2: 0.14, 3: 0.1, 6: 0.05}  # by depth: the rate at which BSP just fails to converge on digits
_CLOUDS_EDGE = {1: 0.6, 6: 0.05}  # the same on Gaussian clouds
_CLOUDS = {"data.label_noise": 0.0, "data.margin": 4.0, "data.samples": 4000, "demand.sample_seconds": 0.2996}
_CLOUDS |= {
    "demand.fixed_seconds": 0.0,
    "demand.model_bytes": 1e4,
    "demand.message_seconds": 0.0,
    "demand.apply_seconds": 0.0,
}
_EVEN = msgspec.structs.replace(InstanceKind().conditions, stragglers=None)
_MILD = msgspec.structs.replace(_EVEN, stragglers=Stragglers(1.5, 0.5, probability=0.3, spread_seconds=0.5))
CLASSES = ("edge", "mild", "even", "skewed", "paper")


@dataclass(frozen=True)
class InstanceRun:
    """One run of one instance under one policy. Its seconds are infinite if it did not reach the target."""

    kind: str
    policy: str
    seed: int
    depth: int
    stragglers: int
    status: str
    seconds: float
    pushes: int
    steps: tuple[int, ...]  # of each worker
    idle_to_end: float  # share of the workers' time in which the policy held them back, until the end of the run
    inference: float  # share of the run's time that its decisions took, in sequence


class Ratio(NamedTuple):
    """Speed-up, base seconds over policy seconds, on instances where both reach the target; 95 % bootstrap interval."""

    mean: float  # geometric
    low: float
    high: float
    median: float  # over all instances; infinite seconds for a run that did not reach the target
    both: int
    base_failed: int
    failed: int


def kind(name: str, depth: int, *, workers: int = 10, data: str = "rlp-digits") -> InstanceKind:
    """A class of instances by name.

    `paper`: as the paper says, with mixed data and rate 0.01. `edge`: the rate at which BSP just fails to converge. `mild`:
    0.85 of that, with stragglers that sleep for a third of a step. `even`: the same rate without stragglers. `skewed`: the
    paper's rate, with data distributed to workers by class.
    """
    clouds = data == "clouds-mlp"
    edge = (_CLOUDS_EDGE if clouds else _EDGE_RATES)[depth]
    rate = {"edge": 1.0, "mild": 0.85, "even": 0.85}.get(name, 0.0) * edge or (0.03 if clouds else 0.01)
    overrides: dict[str, Any] = {"learning_rate": rate, "skew": float(name == "skewed")}
    if clouds:
        overrides |= _CLOUDS
    made = InstanceKind(workload=data, overrides=overrides, workers=workers)
    return replace(made, conditions={"even": _EVEN, "mild": _MILD}.get(name, made.conditions))


def drawn(name: str, seeds: Iterable[int], depth: int | None = None, **options: Any) -> list[Instance]:
    """One instance per seed, of `depth` or, if None, of a depth drawn by the seed."""
    depths = {seed: int(np.random.default_rng([seed, 4]).choice((0, 1, 2, 3))) if depth is None else depth for seed in seeds}
    return [draw(kind(name, h, **options), seed, depth=h) for seed, h in depths.items()]


def with_stragglers(wanted: int, count: int, first: int) -> list[int]:
    """The first `count` seeds from `first` on whose ten workers have `wanted` stragglers; in every class but `even`."""

    def stragglers(seed: int) -> int:
        nodes = (*(f"w{i}" for i in range(10)), "server")
        return int(straggling(InstanceKind().conditions, nodes, np.random.default_rng([seed, 1]))[:-1].sum())

    return list(islice((seed for seed in itertools.count(first) if stragglers(seed) == wanted), count))


def baselines() -> dict[str, SyncPolicy]:
    """All policies that RLP is compared with on ten workers, by name."""
    made = [policies.bsp(), policies.asp(), *map(policies.ssp, BOUNDS), policies.dssp(3, 15)]
    made += [policies.k_sync(7), policies.k_batch_sync(7), policies.backup_workers(7)]
    made += [policies.k_async(size) for size in (2, 4, 7)]
    made += [policies.sync_switch(50), policies.sync_switch(100)]
    return {p.name: p for p in made}


class FinishedRun(NamedTuple):
    """One run to its end."""

    status: str
    table: NDArray[np.float64]  # records, [n, 11]
    last_wait_seconds: NDArray[np.float64]  # [workers]: held back after the last push, also before an unfinished mini-batch

    def idle_seconds(self) -> NDArray[np.float64]:
        """Seconds that the policy held each worker back, from the start to the end of the run, [workers]."""
        worker, waited = self.table[:, 1].astype(int), self.table[:, 6]
        workers = len(self.last_wait_seconds)
        return np.bincount(worker, weights=waited, minlength=workers) + self.last_wait_seconds

    @property
    def idle(self) -> float:
        """The share of the workers' time in which the policy held them back."""
        return float(self.idle_seconds().sum() / (len(self.last_wait_seconds) * self.table[-1, 0]))


def table_of(instance: Instance, policy: SyncPolicy) -> FinishedRun:
    """Run the instance under the policy to its end."""
    b, most = instance.begin(policy), _MOST_PUSHES.get(instance.depth, USUAL_MOST)
    args = (b.program, instance.context.data, b.inputs, b.state, jnp.int32(most), jnp.asarray(jnp.inf))
    state, table, used = loop.advance(*args, rows=most)
    rows, flight, workers = np.asarray(table)[: int(used)], state.clock.flight, len(instance.straggles)
    since = rows[-1, 0] - np.asarray(flight.since[timing.WAIT])
    last = np.where(np.asarray(flight.phase) == timing.WAIT, since, np.asarray(flight.waited))
    return FinishedRun(STATUSES[int(state.clock.status)], rows, last[:workers])


def _run(name: str, label: str, instance: Instance, policy: SyncPolicy) -> InstanceRun:
    """Run the instance under the policy to its end."""
    run = table_of(instance, policy)
    status, table, workers = run.status, run.table, len(instance.straggles)
    end = float(table[-1, 0])
    steps = np.bincount(table[:, 1].astype(int), minlength=workers)
    inference = policy.seconds * len(table) / end
    seconds = end if status == "target" else float("inf")
    found = (name, label, instance.seed, instance.depth, sum(instance.straggles), status, seconds, len(table))
    return InstanceRun(*found, tuple(map(int, steps)), run.idle, float(inference))


def runs(
    name: str,
    instances: Sequence[Instance],
    under: Mapping[str, SyncPolicy],
    kept: Path,
    say: Callable[[str], None] = lambda _: None,
) -> list[InstanceRun]:
    """Every instance under every policy of `under`, by name; runs that the file `kept` holds are not repeated."""
    known = {(r.kind, r.policy, r.seed, r.depth): r for r in _read(kept)}
    found = []
    for label, policy in under.items():
        for instance in instances:
            key = (name, label, instance.seed, instance.depth)
            if key not in known:
                known[key] = _run(name, label, instance, policy)
                with kept.open("a", encoding="utf-8") as out:
                    out.write(json.dumps(asdict(known[key])) + "\n")
            found.append(known[key])
        mine = [r for r in found if r.policy == label]
        say(f"{name:28} {label:22} {np.median([r.seconds for r in mine]):8.0f} s {len(mine)} runs")
    return found


def _read(kept: Path) -> list[InstanceRun]:
    """The runs in the file `kept`; none if it does not exist."""
    if not kept.exists():
        return []
    lines = (json.loads(line) for line in kept.read_text("utf-8").splitlines())
    try:
        return [InstanceRun(**{**line, "steps": tuple(line["steps"])}) for line in lines]
    except TypeError as error:
        raise ValueError(f"Cannot use the runs in {kept}: {error}. Move the file away, or give another --out.") from None


# ------------------------------------------------------------------------------------------------------------ statistics


def by_seed(found: Sequence[InstanceRun], policy: str) -> dict[tuple[int, int], float]:
    """Seconds of each run of `policy`, by (seed, depth)."""
    return {(r.seed, r.depth): r.seconds for r in found if r.policy == policy}


def speed_up(found: Sequence[InstanceRun], base: Mapping[tuple[int, int], float], policy: str) -> Ratio:
    """The speed-up of `policy` over `base`, paired by instance."""
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


def best_of(found: Sequence[InstanceRun], names: Sequence[str]) -> str:
    """The policy with the least median seconds over all instances."""
    return min(names, key=lambda name: float(np.median(list(by_seed(found, name).values()))))


def oracle(found: Sequence[InstanceRun], names: Sequence[str]) -> dict[tuple[int, int], float]:
    """The least seconds among `names` for each instance: a choice in hindsight, which no tuner can make."""
    each = [by_seed(found, name) for name in names]
    return {key: min(seconds[key] for seconds in each) for key in each[0]}


# -------------------------------------------------------------------------------------------------------------- stability


def staleness_of(seed: int, policy: SyncPolicy, *, stragglers: bool) -> NDArray[np.int64]:
    """The staleness of every push on the cluster of one instance; it does not depend on the model."""
    around = InstanceKind().conditions if stragglers else _EVEN
    idle = InstanceKind(depths=(0,), units=4, target=Target("clocks", 1500), evaluate_clocks=2**30, conditions=around)
    return table_of(draw(idle, seed), policy).table[:, 7].astype(np.int64)


def stability_edge(staleness: NDArray[np.int64], workers: int) -> float:
    """The workers x rate x curvature beyond which x <- x - rate curvature x_stale grows on a quadratic; by bisection."""
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
