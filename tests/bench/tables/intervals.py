"""Prints how many recorded cycles of made-up clusters are within the 90 % intervals of predictions, and how wide these are.

python -m tests.bench.tables.intervals 6 7 8 9 10: two CPU-minutes each, or less.

Each cluster is a drawn queueing network of another simulation (`tests/support/queueing.py`): servers have queues, or one
queue, or serve all at once, and some clusters have one thing more. 8 to 22 settings of one to five workers are fitted, and
three recordings are predicted: *like* ones are of other combinations of policy, workers and servers, *larger* ones of 7 and
10 workers, and in *unlike* ones one or two workers compute 1.3 to 2.5 times as long. The form of the links is given to the
fit, so that intervals are counted, not choices; delays of requests and paused mini-batches have no form. The engine
simulates briefly.
"""

from __future__ import annotations

import argparse
import math
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np

from harness.calibrating import GivenConstants
from simulators.calibration import closed_form, simulations
from simulators.calibration import least_squares as search
from simulators.calibration.fit import cycles, fit_all
from simulators.calibration.links import Sharing
from simulators.calibration.recorded.speeds import with_speeds
from simulators.calibration.spread import log_half_widths
from simulators.cluster.cluster import Discipline
from tests.support.queueing import Network, recording

Settings = list[tuple[str, int, int, int]]
KINDS = ("like", "larger", "unlike")
MOST_WORKERS = 5  # of fitted rows
SHORT = (
    *(
        (simulations, name, value)
        for name, value in (("_PUSHES", 400), ("_CYCLES", 20), ("_WARM_UP", 10), ("_LEAST_SEEDS", 2))
    ),
    *((simulations, name, value) for name, value in (("_PRECISE", 0.01), ("SEEDS", 8))),
    *((search, name, value) for name, value in (("_EVALUATIONS", 20), ("_ROUNDS", 2))),
    (closed_form, "_ROUNDS", 20),
)
"""What the engine and the search take less of."""
DISCIPLINES: dict[str, Discipline] = {"queues": "fifo", "one queue": "serial", "shared": "maxmin"}


class Interrupted(Network):
    """A recording that ends as soon as one asynchronous worker does: then not all of them work any more."""

    def run(self, policy: str, workers: int, servers: int, batch: int, cycles: int, seed: int) -> list[dict[str, Any]]:
        pushes = super().run(policy, workers, servers, batch, cycles, seed)
        end = min(max(p["seconds"] for p in pushes if p["worker"] == w) for w in range(workers))
        return [p for p in pushes if p["seconds"] <= end] if policy == "asp" else pushes


class Drawn(NamedTuple):
    """A cluster, and how it is recorded."""

    network: Interrupted
    kind: str
    more: str  # what else it has
    fitted: Settings
    predicted: dict[str, Settings]  # by kind
    slow: tuple[float, ...]  # of workers in the unlike recording
    how: dict[str, Any]  # cycles, noise and disturbed runs of every recording
    repetitions: int  # of fitted settings


def drawn(seed: int) -> Drawn:
    """The cluster of that number."""
    rng = np.random.default_rng([seed, 99])

    def between(low: float, high: float) -> float:
        return math.exp(rng.uniform(math.log(low), math.log(high)))

    compute, fixed = between(0.03, 0.3), rng.uniform(0.1, 0.6)
    kind = ("queues", "one queue", "shared")[int(rng.integers(3))]
    things = ("none", "none", "none", "switch", "threads", "growth", "delay", "pauses")
    more = things[int(rng.integers(len(things)))]
    transfer = compute * between(0.15, 1.2)
    network = Interrupted(
        fixed_seconds=fixed * compute,
        sample_seconds=(1 - fixed) * compute / 32,
        jitter=rng.uniform(0.05, 0.3),
        transfer_seconds=transfer,
        apply_seconds=transfer * between(0.05, 0.5),
        first_come=kind != "shared",
        one_queue=kind == "one queue",
        switch=("each way", "both ways")[int(rng.integers(2))] if more == "switch" else "",
        threads=2 if more == "threads" and kind != "shared" else 1,
        apply_growth=0.5 if more == "growth" else 0.0,
        delay_seconds=0.2 * transfer if more == "delay" else 0.0,
        paused=0.2 if more == "pauses" else 0.0,
    )
    count, repetitions = int(rng.integers(8, 22)), (1, 1, 3)[int(rng.integers(3))]
    how = {"cycles": (40, 80, 150)[int(rng.integers(3))], "noise": between(0.005, 0.05), "disturbed": 0.1 * (seed % 3 == 2)}
    grid = [
        (p, w, s, b) for p in ("asp", "bsp") for w in range(1, MOST_WORKERS + 1) for s in (1, 2, 3) for b in (16, 32, 64)
    ]
    mixed = [grid[i] for i in rng.permutation(len(grid))]
    fitted = sorted({*mixed[:count], ("asp", MOST_WORKERS, 3, 32)})  # with it, the engine has one size of cluster
    large = [(p, w, s, b) for p in ("asp", "bsp") for w in (7, 10) for s in (1, 2, 3) for b in (16, 64)]
    several = [g for g in grid if g[1] >= 3]
    predicted = {
        "like": [g for g in mixed[count:] if g[:3] not in {f[:3] for f in fitted}][:8],
        "larger": [large[i] for i in rng.choice(len(large), 6, replace=False)],
        "unlike": [several[i] for i in rng.choice(len(several), 6, replace=False)],
    }
    one, other = rng.uniform(1.3, 2.5, 2)
    return Drawn(network, kind, more, fitted, predicted, (one, 1.0, 1.0, 1.0, other), how, repetitions)


def form(of: Drawn) -> Sharing:
    """How its links are shared, in the words of the simulator."""
    network = of.network
    discipline = "fifo" if network.switch and network.one_queue else DISCIPLINES[of.kind]
    switch = {"": "none"}.get(network.switch, network.switch)
    return Sharing(discipline, 0.0, True, switch, network.threads, network.apply_growth > 0)


class Held(NamedTuple):
    """What intervals hold of a recording."""

    inside: int
    rows: int
    width: float  # mean half-width, logarithm
    error: float  # median relative error


def told(seed: int) -> dict[str, Held]:
    """Of the cluster of that number, each kind of recording."""
    of = drawn(seed)
    known = recording(of.network, of.fitted, seed=seed, repetitions=of.repetitions, **of.how)
    fit = fit_all(known.rows, GivenConstants().constants(known), links=[form(of)])["job"]
    found = {}
    for number, kind in enumerate(KINDS, 1):
        network = replace(of.network, slow=of.slow) if kind == "unlike" else of.network
        new = recording(network, of.predicted[kind], seed=seed + 1000 * number, **of.how)
        rows = with_speeds(new.rows, fit.common_seconds, fit.constants.saturation_samples)
        at = cycles(fit.constants, rows)
        off = np.log([row.cycle_seconds for row in rows] / at.seconds)
        below, above = log_half_widths(fit, rows, at.errors)[:, 0].T
        with_one = np.isfinite(below)
        inside = ((-below <= off) & (off <= above))[with_one]
        width = float(np.mean([below[with_one], above[with_one]])) if with_one.any() else math.nan
        found[kind] = Held(int(inside.sum()), len(inside), width, float(np.median(np.abs(np.expm1(off)))))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("clusters", nargs="+", type=int, metavar="NUMBER", help="of a cluster: another one for each")
    numbers = parser.parse_args().clusters
    for module, name, value in SHORT:
        setattr(module, name, value)
    print(f"| cluster | has | fitted | {' | '.join(KINDS)} |\n| {' | '.join(['---'] * 6)} |")  # noqa: T201
    every: dict[str, list[Held]] = {kind: [] for kind in KINDS}
    for number in numbers:
        of, found = drawn(number), told(number)
        cells = [f"{h.inside} of {h.rows}, ±{h.width:.1%}, off by {h.error:.1%}" for h in found.values()]
        rows = f"{len(of.fitted)} x {of.repetitions}"
        print(f"| {number} | {of.kind}, {of.more} | {rows} | {' | '.join(cells)} |", flush=True)  # noqa: T201
        for kind, held in found.items():
            every[kind].append(held)
    for kind, each in every.items():
        inside, rows = sum(h.inside for h in each), sum(h.rows for h in each)
        print(f"{kind}: {inside} of {rows}, {inside / rows:.0%}, ±{np.nanmean([h.width for h in each]):.1%}")  # noqa: T201


if __name__ == "__main__":
    main()
