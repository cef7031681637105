"""The oracle's search in a comparison: which runs it wants next, from the runs that are in place, and what became of it.

The search itself is `tuners.baselines.best_fixed.search`. It is made again from the finished runs whenever more are wanted,
so an interrupted comparison goes on where it was, with the same bytes. A setting's runs have a name made from the setting
(``best_fixed+3f0a91c2``), so folders of several comparisons can be merged.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

from harness.comparison.results import candidate_name, is_known, read_score, run_folder
from harness.scenario import Scenario, job
from simulators.cluster.conditions import absent_at_start
from simulators.cluster.trace_driven import expand_replay
from traces.schema import minimised, setting_from, setting_text
from tuners.actions import Setting
from tuners.baselines.best_fixed import search

__all__ = ["ended", "first", "name_of", "wanted"]


def name_of(oracle: str, setting: Setting) -> str:
    """The tuner's name for runs under one of the oracle's settings."""
    return candidate_name(oracle, hashlib.sha256(setting_text(setting).encode()).hexdigest()[:8])


def first(scenario: Scenario, oracle: str, seeds: int) -> list[tuple[str, Setting, int]]:
    """The runs (name, setting, seed) that the search begins with, whatever the contestants do. All others are limited by
    their times."""
    start = job(scenario).start
    return [(name_of(oracle, start), start, seed) for seed in range(seeds)]


def wanted(
    out: Path, scenario: Scenario, oracle: str, contestants: Sequence[str], seeds: int
) -> list[tuple[str, Setting, int, float]]:
    """The runs (name, setting, seed, limit in seconds) that the search wants next; none where it has ended. The runs of the
    contestants must be in place.

    Only a run that is held against others by its seconds has a limit. One that was stopped at a lower limit than that of now
    (the comparison has got more seeds since) is wanted again.
    """
    timed = scenario.target.minimise == "seconds"

    def folder(setting: Setting, seed: int) -> Path:
        return run_folder(out, scenario.name, name_of(oracle, setting), seed)

    def taken(setting: Setting, seed: int) -> float:
        run = folder(setting, seed)
        return minimised(read_score(run)) if run.is_dir() else math.inf

    contested = ended(out, scenario.name, contestants, seeds)
    for batch in search(job(scenario), contested, seeds, taken, absent=_absent(scenario, seeds)):
        limited = [(setting, seed, limit if timed else math.inf) for setting, seed, limit in batch]
        missing = [run for run in limited if not is_known(folder(run[0], run[1]), run[2])]
        if missing:
            return [(name_of(oracle, setting), setting, seed, limit) for setting, seed, limit in missing]
    return []


def ended(out: Path, scenario: str, contestants: Sequence[str], seeds: int) -> list[Setting]:
    """The different settings that the contestants ended with, in order of tuners and seeds."""
    return list(dict.fromkeys(_final_settings(out, scenario, contestants, seeds)))


def _absent(scenario: Scenario, seeds: int) -> frozenset[str]:
    """The nodes that join after the start, under any seed."""
    given = (scenario.cluster.nodes, scenario.budget.seconds)
    return frozenset().union(*(absent_at_start(expand_replay(scenario.conditions, *given, s)[0]) for s in range(seeds)))


def _final_settings(out: Path, scenario: str, contestants: Sequence[str], seeds: int) -> Iterator[Setting]:
    for tuner in contestants:
        for seed in range(seeds):
            if text := read_score(run_folder(out, scenario, tuner, seed))["final_setting"]:
                yield setting_from(text)
