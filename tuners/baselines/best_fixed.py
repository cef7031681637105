"""The oracle: the best of N fixed settings, chosen after all of them have been run. A reference, not a contestant.

It is the "Best of 100 random settings" with which TensorFlowOnline's Table III compares its tuner; here the scenario's start
is one of the N. A job cannot restart, so no tuner can do this: the comparison runs the job once per candidate and seed, each
time *starting* under the candidate and never changing it, and reports the candidate of least mean completion time.

The candidates depend on the scenario, never on the seed, and one is chosen for all seeds together. A best setting chosen
seed by seed would be the minimum of N random draws, which no fixed setting reaches.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Setting, Tuner, TunerFactory
from tuners.factory_options import Count, Whole

__all__ = ["best_fixed", "candidates", "choose", "fixed_at"]

_DRAWS_PER_CANDIDATE = 100


def candidates(job: Job, *, count: int = 20, seed: int | None = None) -> list[Setting]:
    """At most `count` different settings that the job admits: its start, then random ones.

    Without `seed` the draws depend on the job's name alone. There are fewer where the space has fewer settings, or where
    nearly all of them are refused. Raises ValueError unless `count` is positive.
    """
    if count < 1:
        raise ValueError(f"Cannot choose the best of {count} settings: give at least 1.")
    rng = np.random.default_rng(zlib.crc32(job.name.encode()) if seed is None else seed)
    found = [job.start]
    for _ in range(_DRAWS_PER_CANDIDATE * count):
        if len(found) == count or not job.space.knobs:
            break
        setting = job.space.setting(job.space.sample(rng))
        with suppress(Rejected):
            job.space.check(setting)
            if setting not in found:
                found.append(setting)
    return found


def choose(completions: Mapping[int, Sequence[float]]) -> int:
    """The candidate of least mean completion, from its completion seconds on every seed; the first of equals.

    For a run that did not reach its target give its budget or infinity. Raises ValueError without candidates, and where
    candidates have different numbers of runs.
    """
    counts = {index: len(seconds) for index, seconds in completions.items()}
    if not counts or 0 in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(f"Cannot choose among candidates with {counts} runs: run each on the same seeds, at least one.")
    return min(sorted(completions), key=lambda index: fmean(completions[index]))


def fixed_at(setting: Setting) -> TunerFactory:
    """A tuner that reconfigures any job to `setting` once; where that is refused, the job keeps its start setting."""

    def tuner(job: Job) -> Tuner:
        if setting != job.start:
            with suppress(Rejected):
                yield from Reconfigure(setting)

    return tuner


def best_fixed(job: Job, *, index: Whole = 0, count: Count = 20) -> Tuner:
    """Candidate number `index` as a tuner that reconfigures to it, for systems that cannot start under it.

    Raises ValueError for an index beyond the candidates.

    Args:
        job: what is tuned.
        index: number of the candidate.
        count: number of candidates, the start setting among them.
    """
    settings = candidates(job, count=count)
    if not 0 <= index < len(settings):
        raise ValueError(f"Cannot run candidate {index}: this job has {len(settings)}, numbered from 0.")
    return fixed_at(settings[index])(job)
