"""The oracle: the best of N fixed settings, chosen in hindsight. A yardstick, not a contestant.

This is the "Best of 100 random settings" against which TensorFlowOnline's Table III holds its tuner, with the scenario's
own start among the N. A job has no restart, so no tuner can be this: the contest runs the job once per candidate and seed,
each time *starting* under the candidate and never changing it, and reports the candidate of least mean completion time.

The candidates depend on the scenario, never on the seed, and one is chosen on all seeds together. A best picked seed by
seed would be the least of N draws of luck, which no fixed setting attains.
"""

from __future__ import annotations

import zlib
from collections.abc import Mapping, Sequence
from contextlib import suppress
from statistics import fmean

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Setting, Tuner, TunerFactory

__all__ = ["best_fixed", "candidates", "choose", "fixed_at"]

_DRAWS_PER_CANDIDATE = 100


def candidates(job: Job, *, count: int = 20, seed: int | None = None) -> list[Setting]:
    """At most `count` different settings that the job admits: its start, then random ones.

    Without `seed` the draw follows from the job's name alone. There are fewer where the space holds fewer, or where nearly
    everything in it is refused. Raises ValueError unless `count` is positive.
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
    """Which candidate has the least mean completion, given its completion seconds on every seed; the first of equals.

    A run that did not reach its target counts with what it is given, its budget or infinity. Raises ValueError where there
    is nothing to choose from or where candidates were not run on equally many seeds.
    """
    counts = {index: len(seconds) for index, seconds in completions.items()}
    if not counts or 0 in counts.values() or len(set(counts.values())) > 1:
        raise ValueError(f"Cannot choose among candidates with {counts} runs: run each on the same seeds, at least one.")
    return min(sorted(completions), key=lambda index: fmean(completions[index]))


def fixed_at(setting: Setting) -> TunerFactory:
    """A tuner that brings any job to `setting` at once and leaves it there (where refused, as it starts)."""

    def tuner(job: Job) -> Tuner:
        if setting != job.start:
            with suppress(Rejected):
                yield from Reconfigure(setting)

    return tuner


def best_fixed(job: Job, *, index: int = 0, count: int = 20) -> Tuner:
    """One candidate as a tuner: number `index`, reached by a reconfiguration, for systems that cannot start under it.

    Raises ValueError for an index beyond the candidates.
    """
    settings = candidates(job, count=count)
    if not 0 <= index < len(settings):
        raise ValueError(f"Cannot run candidate {index}: this job has {len(settings)}, numbered from 0.")
    return fixed_at(settings[index])(job)
