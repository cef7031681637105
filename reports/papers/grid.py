"""The calibrated scenarios beside the figures that Cruise and TensorFlowOnline publish about settings, without any tuner.

    python -m reports.papers.grid [cruise] [tensorflowonline] [random]

prints them. `cruise` and `tensorflowonline` take seconds; `random` runs 100 random settings of each tf36 scenario to the
target and takes minutes. Everything is simulated from the scenario files: no constant of a cluster is repeated here.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np

import harness.scenario as scenario
from simulators.jobs import JobSpec
from simulators.system import SimulatedSystem
from simulators.workloads.catalogue import workload
from tuners.actions import Job, Pushes, Rejected, Run, Setting, Target
from tuners.baselines.best_fixed import candidates

__all__ = [
    "CRUISE",
    "FIGURE_8",
    "TABLE_III",
    "TENSORFLOWONLINE",
    "Row",
    "Split",
    "epoch_seconds",
    "grid",
    "iteration_seconds",
    "loaded",
    "main",
    "mixed_epoch_seconds",
    "played",
    "published_setting",
    "relative_performance",
    "run_to_target",
    "split",
]

Split = tuple[int, int]  # numbers of workers and servers

# Epoch time over the best split's: Tables Ia, Ib and Ic, and Table III's relative performance of (22, 10), (24, 8), (26, 6).
CRUISE: dict[str, dict[Split, float]] = {
    "cruise-nmf-32": {(18, 14): 1.30, (22, 10): 1 / 0.939, (23, 9): 1.0, (24, 8): 1 / 0.988, (27, 5): 1.66},
    "cruise-mlr-32": {(18, 14): 2.29, (23, 9): 1.12, (26, 6): 1 / 0.978, (27, 5): 1.0},
    "cruise-lda-32": {(18, 14): 1.0, (23, 9): 1.21, (27, 5): 1.60},
    "cruise-lda-4k-32": {(18, 14): 1.44, (23, 9): 1.0, (27, 5): 1.20},
    "cruise-nmf-52-m4-large": {(34, 18): 1.0, (38, 14): 1.08, (42, 10): 1.48},
    "cruise-nmf-52-m4-xlarge": {(34, 18): 1.10, (38, 14): 1.05, (42, 10): 1.0},
}
# Per scenario: constants that were fitted, and published values that they were fitted to, the 1 of the best not counted.
_FITTED: dict[str, tuple[int, int]] = {
    "cruise-nmf-32": (1, 4),
    "cruise-mlr-32": (1, 3),
    "cruise-lda-32": (1, 2),
    "cruise-lda-4k-32": (1, 2),
    "cruise-nmf-52-m4-large": (1, 2),
    "cruise-nmf-52-m4-xlarge": (1, 2),
}
# Table III: scenario, start, Cruise's choice, the best of the grid, relative performance, and the drop of the epoch time
# (Sec. V-C). NMF's drops, from Fig. 6, contradict Tables Ia and III, from which 39.0 and 18.1 % follow.
TABLE_III: tuple[tuple[str, Split, Split, Split, float, float], ...] = (
    ("cruise-nmf-32", (27, 5), (24, 8), (23, 9), 0.988, 0.358),
    ("cruise-nmf-32", (18, 14), (22, 10), (23, 9), 0.939, 0.223),
    ("cruise-mlr-32", (18, 14), (26, 6), (27, 5), 0.978, 0.553),
    ("cruise-mlr-32", (23, 9), (26, 6), (27, 5), 0.978, 0.087),
    ("cruise-lda-32", (27, 5), (18, 14), (18, 14), 1.0, 0.375),
    ("cruise-lda-32", (23, 9), (18, 14), (18, 14), 1.0, 0.174),
)
# Fig. 8: (slow workers, fast workers, slow servers, fast servers), even shares or in proportion to speed, epoch seconds.
FIGURE_8: dict[str, tuple[tuple[int, int, int, int], bool, float]] = {
    "start": ((25, 2, 3, 2), True, 162.0),
    "static": ((21, 2, 7, 2), True, 118.0),
    "choice": ((20, 4, 8, 0), False, 105.0),
}

# Table III (iterations, seconds per iteration) under the settings of Tables IV and IX to XI: (workers, intra threads,
# inter threads, JIT level, transfer bits, iterations, seconds).
Row = tuple[int, int, int, str, int, int, float]
TENSORFLOWONLINE: dict[str, dict[str, Row]] = {
    "tf36-logr": {
        "worst": (2, 12, 11, "ON_2", 32, 14899, 0.846),
        "average": (8, 10, 6, "OFF", 32, 14795, 0.217),
        "tfonline": (16, 6, 10, "ON_1", 16, 22592, 0.093),
        "best": (18, 11, 5, "ON_2", 16, 21834, 0.060),
    },
    "tf36-svm": {
        "worst": (1, 3, 13, "ON_1", 16, 106323, 0.691),
        "average": (11, 9, 7, "ON_1", 16, 227125, 0.034),
        "tfonline": (31, 1, 15, "ON_1", 32, 223519, 0.013),
        "best": (34, 6, 10, "OFF", 32, 225085, 0.010),
    },
    "tf36-cifar": {
        "worst": (3, 2, 14, "ON_2", 16, 35426, 0.157),
        "average": (20, 2, 14, "OFF", 32, 37520, 0.023),
        "tfonline": (30, 3, 13, "ON_1", 16, 44827, 0.011),
        "best": (31, 12, 4, "OFF", 32, 43601, 0.005),
    },
    "tf36-imagenet8": {
        "worst": (5, 12, 4, "ON_2", 32, 3975, 24.921),
        "average": (11, 1, 15, "OFF", 32, 1163, 6.132),
        "tfonline": (9, 1, 15, "ON_2", 32, 1555, 3.463),
        "best": (23, 12, 4, "OFF", 32, 691, 3.747),
    },
}

# ------------------------------------------------------------------------------------------------------------- simulated


@cache
def loaded(name: str) -> tuple[scenario.Scenario, Job]:
    """The scenario, and its job as a tuner sees it."""
    found = scenario.load(name)
    return found, scenario.job(found)


def played(name: str, setting: Setting, seed: int = 0, *, learns: bool = True) -> SimulatedSystem:
    """The scenario under `setting`, with practically no budget; without `learns` it is timing-only and has no target."""
    found, _ = loaded(name)
    made = workload(found.workload.name, found.workload.overrides)
    if not learns:
        made = replace(made, proxy=None)
    target = found.target if learns else Target("clocks", 2**30)
    spec = JobSpec(
        name=name,
        cluster=found.cluster,
        workload=made,
        start=setting,
        knobs=found.knobs,
        target=target,
        budget_seconds=1e12,
        evaluate_clocks=found.check_clocks,
        conditions=found.conditions,
        costs=found.costs,
        seed=seed,
    )
    return SimulatedSystem(spec)


def _steady(name: str, setting: Setting, cycles: int = 60) -> tuple[float, Pushes]:
    """Seconds of `cycles` pushes per worker, and these pushes, after a warm-up in which workers fall out of step."""
    system, w = played(name, setting, seed=0, learns=False), len(setting.workers)
    system.perform(Run(clocks=25 * w))
    window = system.perform(Run(clocks=cycles * w))
    return window.seconds, window.pushes


def split(name: str, workers: int) -> Setting:
    """The start setting with the first `workers` nodes as workers and the others as servers."""
    return loaded(name)[1].space.setting({"worker_count": workers})


def epoch_seconds(name: str, workers: int) -> float:
    """Seconds of one pass over the data with that number of workers."""
    setting = split(name, workers)
    samples = loaded(name)[1].samples
    seconds, pushes = _steady(name, setting)
    return samples / setting.batch_size * seconds / len(pushes.seconds)


@cache
def grid(name: str) -> dict[Split, float]:
    """Seconds of an epoch for every split, from half of the nodes as workers to all but three."""
    nodes = len(loaded(name)[1].nodes)
    return {(w, nodes - w): epoch_seconds(name, w) for w in range(nodes // 2, nodes - 2)}


def relative_performance(name: str, chosen: Split) -> float:
    """The epoch time of the best split over that of the chosen one, as in Table III."""
    found = grid(name)
    return min(found.values()) / found[chosen]


def mixed_epoch_seconds(roles: tuple[int, int, int, int], *, even: bool) -> float:
    """Seconds of an epoch of NMF on Cruise's two kinds of machine. With `even` shares, the slowest worker ends the epoch."""
    _, start = loaded("cruise-nmf-mixed")
    slow, fast = ([n.name for n in start.nodes if n.name.startswith(p)] for p in ("n", "big"))
    a, b, c, d = roles
    workers, servers = (*slow[:a], *fast[:b]), (*slow[a : a + c], *fast[b : b + d])
    seconds, pushes = _steady("cruise-nmf-mixed", replace(start.start, workers=workers, servers=servers))
    counts = np.bincount(pushes.worker, minlength=len(start.nodes))
    rates = np.array([counts[i] for i, n in enumerate(start.nodes) if n.name in workers]) / seconds
    batches = start.samples / start.start.batch_size
    return float(batches / len(rates) / rates.min() if even else batches / rates.sum())


def published_setting(name: str, row: Row) -> Setting:
    """A setting of Tables IV and IX to XI, as far as the simulator models it."""
    workers, intra, inter, jit, bits = row[:5]
    space = loaded(name)[1].space
    knobs: Mapping[str, Any] = {
        "worker_count": workers,
        "intra_threads": intra,
        "inter_threads": inter,
        "option/global_jit_level": jit,
        "transfer_bits": bits,
    }
    return space.setting({**space.values(space.base), **knobs})


def iteration_seconds(name: str, row: Row) -> float:
    """Seconds per iteration as the paper counts it: one push of an asynchronous job, one round of a synchronous job."""
    setting = published_setting(name, row)
    seconds, pushes = _steady(name, setting)
    return seconds / len(pushes.seconds) * (len(setting.workers) if setting.waits_for_all else 1)


_MOST_PUSHES = 60_000  # of a run to the target


def run_to_target(name: str, setting: Setting, seed: int) -> tuple[int, float]:
    """Pushes and seconds to the target; infinite seconds if it takes more than `_MOST_PUSHES`."""
    window = played(name, setting, seed).perform(Run(clocks=_MOST_PUSHES))
    return window.clocks, window.end_seconds if window.status == "target" else float("inf")


# --------------------------------------------------------------------------------------------------------------- printed


def _cruise_lines() -> Iterator[str]:
    """Tables Ia to Ic, III and Fig. 8, simulated [published]."""
    for name, cells in CRUISE.items():
        found = grid(name)
        best = min(found, key=found.__getitem__)
        fitted, values = _FITTED[name]
        yield f"{name}: best {best}, {found[best]:.1f} s; {fitted} constant fitted to {values} values"
        yield "   " + "  ".join(f"{s} {found[s] / found[best]:.3f} [{ratio:.3f}]" for s, ratio in cells.items())
        near = sorted(found, key=found.__getitem__)[:6]
        yield "   relative performance of the best six: " + "  ".join(f"{s} {found[best] / found[s]:.1%}" for s in near)
    for name, start, choice, best, performance, drop in TABLE_III:
        found = grid(name)
        share, fallen = relative_performance(name, choice), 1 - found[choice] / found[start]
        yield f"{name} {start} -> {choice}, best {min(found, key=found.__getitem__)} [{best}]"
        yield f"   of the best {share:.1%} [{performance:.1%}], fell by {fallen:.1%} [{drop:.1%}]"
    yield "cruise-nmf-mixed: 2 constants (pull, z) fitted to 3 values"
    for label, (roles, even, seconds) in FIGURE_8.items():
        yield f"   {label} {roles}: {mixed_epoch_seconds(roles, even=even):.0f} s [{seconds:.0f}]"
    tried = {(a, 4, 28 - a, 0): mixed_epoch_seconds((a, 4, 28 - a, 0), even=False) for a in range(15, 24)}
    best_roles = min(tried, key=tried.__getitem__)
    yield f"   best of the splits with all fast machines as workers: {best_roles} {tried[best_roles]:.0f} s [(19, 4, 9, 0)]"


def _tensorflowonline_lines() -> Iterator[str]:
    """Table III, simulated [published]: seconds per iteration, and iterations of the proxy against the paper's."""
    for name, rows in TENSORFLOWONLINE.items():
        yield name
        for label, row in rows.items():
            pushes, _ = run_to_target(name, published_setting(name, row), 0)
            rounds = pushes / (row[0] if name == "tf36-imagenet8" else 1)
            yield f"   {label:9} {iteration_seconds(name, row):8.4f} s [{row[6]}]  {rounds:8.0f} iterations [{row[5]}]"


def _random_lines(count: int = 100, names: Sequence[str] = tuple(TENSORFLOWONLINE)) -> Iterator[str]:
    """The worst, average and best of random settings that reach the target: the paper's baselines."""
    for name in names:
        _, job = loaded(name)
        seconds = []
        for setting in candidates(job, count=count + 1, seed=1)[1:]:
            try:
                seconds.append(run_to_target(name, setting, 0)[1])
            except Rejected:
                seconds.append(float("inf"))
        ended = sorted(s for s in seconds if np.isfinite(s))
        start = run_to_target(name, job.start, 0)[1]
        yield f"{name}: {len(ended)} of {count} reach the target; the start, the paper's Average, takes {start:.0f} s"
        yield f"   worst {ended[-1]:.0f} s, average {statistics.fmean(ended):.0f} s, best {ended[0]:.0f} s"


def main(words: Sequence[str]) -> None:
    """Print the parts named in `words`."""
    parts = {"cruise": _cruise_lines, "tensorflowonline": _tensorflowonline_lines, "random": _random_lines}
    for word in words or ("cruise", "tensorflowonline"):
        for line in parts[word]():
            print(line, flush=True)  # noqa: T201  # a script


if __name__ == "__main__":
    main(sys.argv[1:])
