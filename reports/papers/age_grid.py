"""Which bound on the age of gradients is best in an arena, and how many seeds it takes to tell the bounds apart.

    python -m reports.papers.age_grid [bounded-age] [--seeds 8] [--kept runs.jsonl]

plays every bound of the arena's free `staleness` under every policy that it bounds, with paired seeds and no tuner. It
prints, for each policy, the seconds to the target, the age of gradients, told apart by where it arises, and how many pairs
of bounds differ (p < .05 after Holm's correction over the pairs):

* with paired seeds, as `harness compare` tests them: Student's paired t test of log seconds;
* with unpaired seeds, as grids are often run, each setting with seeds of its own: Welch's t test of log seconds. Settings
  draw their few seeds from all runs, independently, again and again; the number of pairs is the mean of these draws. With
  all seeds it is the same runs, and that they are paired is ignored.

Users of asynchronous reinforcement learning tune this bound over 0, 1, 2, 4, 8, 16. Eight seeds take about 15 CPU seconds.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import combinations
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray
from scipy.stats import ttest_ind

import harness.scenario as scenario
from harness.drive import play
from reports.verdicts.statistics import LEVEL, holm, paired_t
from tuners.actions import Pushes, Setting, Window
from tuners.ages import Ages, ages
from tuners.baselines.fixed import fixed
from tuners.settings import BOUNDED, Choice

__all__ = ["AgeRun", "main", "pairs_told_apart", "played", "settings", "unpaired_pairs"]

_DRAWS = 200
_FEW = 3  # seeds of a setting, in the grids that users run


class AgeRun(msgspec.Struct, frozen=True):
    """A run under one bound, without a tuner."""

    policy: str
    bound: int
    seed: int
    seconds: float  # to the target, at most the budget
    reached: bool
    pushes: int
    publishing: float  # means over pushes, in updates
    generation: float
    queueing: float


# ------------------------------------------------------------------------------------------------------------------ runs


def settings(arena: scenario.Scenario) -> list[Setting]:
    """The start under every policy that `staleness` bounds, with every bound. Raises ValueError where these are not free."""
    space = scenario.job(arena).space
    policy, bound = space.knob("policy"), space.knob("staleness")
    names = [p for p in BOUNDED if isinstance(policy, Choice) and p in policy.options]
    if not names or not isinstance(bound, Choice):
        raise ValueError(
            f"Cannot compare bounds in {arena.name}: it has to free `policy` and `staleness`, both as a choice."
        )
    return [replace(space.base, policy=name, staleness=int(age)) for name in names for age in bound.options]


def played(arena: scenario.Scenario, setting: Setting, seed: int) -> AgeRun:
    """One run under `setting` to the target or the end of the budget."""
    run = play(fixed, scenario.system(arena, seed, setting))
    windows = [e.answer.pushes for e in run.exchanges if isinstance(e.answer, Window)]
    found = ages(Pushes(*(np.concatenate(column) for column in zip(*windows, strict=True))))
    reached, parts = run.outcome.status == "target", [float(np.mean(part)) for part in found]
    return AgeRun(setting.policy, setting.staleness, seed, run.outcome.seconds, reached, len(found.queueing), *parts)


def _runs(arena: scenario.Scenario, seeds: int, kept: Path | None) -> Iterator[AgeRun]:
    """All runs; those in the file `kept` are not made again, and new ones are added to it."""
    lines = kept.read_bytes().splitlines() if kept is not None and kept.exists() else []
    found = {(r.policy, r.bound, r.seed): r for r in (msgspec.json.decode(line, type=AgeRun) for line in lines)}
    for seed in range(seeds):
        for setting in settings(arena):
            run = found.get((setting.policy, setting.staleness, seed))
            if run is None:
                run = played(arena, setting, seed)
                if kept is not None:
                    with kept.open("ab") as file:
                        file.write(msgspec.json.encode(run) + b"\n")
            yield run


# ------------------------------------------------------------------------------------------------------------ statistics


def pairs_told_apart(logs: NDArray[np.float64], *, paired: bool) -> int:
    """How many pairs of columns of `logs` [seeds, settings] differ, corrected by Holm over all pairs."""
    pairs = combinations(range(logs.shape[1]), 2)
    return sum(p < 1 - LEVEL for p in holm([_p_value(logs[:, a], logs[:, b], paired=paired) for a, b in pairs]))


def _p_value(a: NDArray[np.float64], b: NDArray[np.float64], *, paired: bool) -> float:
    if paired:
        return float(paired_t(a - b))
    if np.ptp(a) == 0 and np.ptp(b) == 0:
        return float(a[0] == b[0])
    return float(ttest_ind(a, b, equal_var=False).pvalue)


def unpaired_pairs(logs: NDArray[np.float64], seeds: int) -> tuple[float, float]:
    """Pairs told apart by `seeds` unpaired seeds per setting, and how often the least mean is that of all seeds; means of
    `_DRAWS` draws in which each setting takes seeds of its own from the rows of `logs` [seeds, settings]."""
    rng, best = np.random.default_rng(0), int(np.argmin(logs.mean(axis=0)))
    told = right = 0
    for _ in range(_DRAWS):
        own = np.stack([rng.choice(column, seeds, replace=False) for column in logs.T], axis=1)
        told += pairs_told_apart(own, paired=False)
        right += int(np.argmin(own.mean(axis=0))) == best
    return told / _DRAWS, right / _DRAWS


# ----------------------------------------------------------------------------------------------------------------- tables


class _Column(NamedTuple):
    bound: int
    runs: list[AgeRun]


def _table(policy: str, columns: Sequence[_Column]) -> Iterator[str]:
    """The table of one policy, and how many pairs of its bounds are told apart."""
    yield f"{policy}, {len(columns[0].runs)} seeds"
    yield "| bound | seconds, median (least to most) | reached | pushes | age | publishing | generation | queueing |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for bound, runs in columns:
        times = [r.seconds for r in runs]
        parts = [float(np.mean([getattr(r, part) for r in runs])) for part in Ages._fields]
        words = f"{np.median(times):.0f} ({min(times):.0f} to {max(times):.0f}) | {sum(r.reached for r in runs)}/{len(runs)}"
        ages_told = " | ".join(f"{x:.1f}" for x in (sum(parts), *parts))
        yield f"| {bound} | {words} | {np.median([r.pushes for r in runs]):.0f} | {ages_told} |"
    logs = np.log([[r.seconds for r in column.runs] for column in columns]).T
    pairs = len(columns) * (len(columns) - 1) // 2
    few, right = unpaired_pairs(logs, _FEW)
    paired = " ".join(f"{pairs_told_apart(logs[:n], paired=True)} by {n}," for n in (_FEW, len(logs)))
    whole = pairs_told_apart(logs, paired=False)
    yield f"pairs told apart, of {pairs}: paired seeds {paired} unpaired seeds {few:.1f} by {_FEW}, {whole} by {len(logs)}"
    yield f"{_FEW} unpaired seeds name the bound that is best over all seeds in {right:.0%} of draws"


def main(arguments: Sequence[str] | None = None) -> None:
    """Print a table for each policy."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("arena", nargs="?", default="bounded-age", help="a scenario that frees `policy` and `staleness`")
    parser.add_argument("--seeds", type=int, default=8, help=f"at least {_FEW}")
    parser.add_argument("--kept", type=Path, help="a file of runs, which is read and added to")
    given = parser.parse_args(arguments)
    if given.seeds < _FEW:
        parser.error(f"--seeds {given.seeds} are too few to tell anything; give at least {_FEW}.")
    runs = list(_runs(scenario.load(given.arena), given.seeds, given.kept))
    for policy in dict.fromkeys(r.policy for r in runs):
        bounds = dict.fromkeys(r.bound for r in runs if r.policy == policy)
        columns = [_Column(b, [r for r in runs if (r.policy, r.bound) == (policy, b)]) for b in bounds]
        print("\n".join(_table(policy, columns)), end="\n\n")  # noqa: T201  # a script


if __name__ == "__main__":
    main()
