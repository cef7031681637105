"""The oracle: the best fixed setting that a search finds, chosen after all were run. A reference, not a contestant.

TensorFlowOnline's Table III compares its tuner with the "Best of 100 random settings". Where many knobs are free, a few
random settings are a weak reference, which contestants beat. So the search (`search`) goes on from what they found:

1. the scenario's start, on every seed;
2. random settings, on the first seed; the best few of them on every seed;
3. the settings that contestants ended with, in the same way;
4. twice, the settings next to the best one so far (`neighbours`), in the same way.

Most random settings are hopeless, and a run under one of them lasts for the whole budget. On every seed, they took a third
of the time that all contestants took (measured on `digits`). On the first seed, too, a run need not go on when it has taken
longer than a setting may take to be run on the others: that is its limit.

A job cannot restart, so no tuner can do this: the comparison runs the job once per setting and seed, each time *starting*
under the setting and never changing it, and reports the setting of least mean completion time over all seeds.

Random settings and neighbours depend on the scenario, never on the seed, and one setting is chosen for all seeds together. A
best setting chosen seed by seed would be the minimum of N random draws, which no fixed setting reaches.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from statistics import fmean

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Setting, Space, Tuner, TunerFactory
from tuners.factory_options import Count, Whole
from tuners.settings import Choice, Integer, Knob, Scalar

__all__ = ["best_fixed", "candidates", "choose", "fixed_at", "neighbours", "search"]

_STEP = 0.1  # of a number in a local search, as a share of its range
_MOST_NEIGHBOURS = 32  # of one setting; of more, an even choice
_ROUNDS = 2  # of the local search
_SCREENED = 3  # settings of a stage that are run on every seed
_WORTH = 1.1  # a setting that takes longer than this on the first seed, relative to the best one, is not run on others
_DRAWS_PER_CANDIDATE = 100


def candidates(job: Job, *, count: int = 20, seed: int | None = None, absent: Collection[str] = ()) -> list[Setting]:
    """At most `count` different settings that the job admits: its start, then random ones without the nodes in `absent`.

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
        if setting not in found and _possible(job.space, setting, absent):
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


def search(
    job: Job,
    ended: Sequence[Setting],
    seeds: int,
    seconds: Callable[[Setting, int], float],
    *,
    count: int = 20,
    absent: Collection[str] = (),
) -> Iterator[list[tuple[Setting, int, float]]]:
    """Yields the runs to make next, each as a setting, a seed and a limit in seconds; it goes on when all of these are made.

    `seconds(setting, seed)` is then asked for the completion seconds of each. A run that takes longer than its limit cannot
    be chosen, so it may be stopped there; `seconds` then returns any number above the limit. `ended` are the settings that
    contestants ended with, and `absent` the nodes that join later: a job cannot start with them. Equal answers give equal
    searches, so a search that was interrupted is continued by making it again. The search returns nothing: the best setting
    is that of least mean among those that were run on every seed (`choose`).
    """
    seen: list[Setting] = []
    whole: list[Setting] = []  # run on every seed

    def mean(setting: Setting) -> float:
        return fmean(seconds(setting, seed) for seed in range(seeds))

    def stage(settings: Sequence[Setting]) -> Iterator[list[tuple[Setting, int, float]]]:
        new = [s for s in dict.fromkeys(settings) if s not in seen and _possible(job.space, s, absent)]
        seen.extend(new)
        limit = _WORTH * seconds(min(whole, key=mean), 0)
        yield [(s, 0, limit) for s in new]
        short = sorted((s for s in new if seconds(s, 0) < limit), key=lambda s: seconds(s, 0))[:_SCREENED]
        yield [(s, seed, math.inf) for s in short for seed in range(1, seeds)]
        whole.extend(short)

    start, *drawn = candidates(job, count=count, absent=absent)
    yield [(start, seed, math.inf) for seed in range(seeds)]
    seen.append(start)
    whole.append(start)
    yield from stage(drawn)
    yield from stage(ended)
    for _ in range(_ROUNDS):
        best = min(whole, key=mean)
        yield from stage(neighbours(job.space, best))
        if min(whole, key=mean) == best:
            return


def neighbours(space: Space, setting: Setting, *, most: int = _MOST_NEIGHBOURS) -> list[Setting]:
    """At most `most` settings that `space` admits next to `setting`, each once, in the order of the knobs.

    A number moves by a tenth of its range, down and up, an integer at least by 1; a choice takes each of its other values.
    """
    values = space.values(setting)
    found: list[Setting] = []
    for knob in space.knobs:
        for value in _steps(knob, values[knob.name]):
            with suppress(ValueError):
                near = space.setting(values | {knob.name: value})
                if near != setting and near not in found and _possible(space, near):
                    found.append(near)
    return [found[i * len(found) // most] for i in range(most)] if len(found) > most else found


def _steps(knob: Knob, value: Scalar) -> Iterator[Scalar]:
    """The values of a knob next to `value`."""
    if isinstance(knob, Choice):
        yield from (other for other in knob.options if other != value)
        return
    at = min(max(float(value), float(knob.low)), float(knob.high))
    for sign in (-1, 1):
        moved = at * (knob.high / knob.low) ** (sign * _STEP) if knob.log else at + sign * _STEP * (knob.high - knob.low)
        moved = min(max(moved, float(knob.low)), float(knob.high))
        if isinstance(knob, Integer):
            whole = round(moved) if round(moved) != round(at) else round(at) + sign
            if knob.low <= whole <= knob.high:
                yield whole
        elif not math.isclose(moved, at):
            yield moved


def _possible(space: Space, setting: Setting, absent: Collection[str] = ()) -> bool:
    """Whether a job of that space can start under the setting while some nodes are absent."""
    if not set(absent).isdisjoint(setting.workers + setting.servers):
        return False
    try:
        space.check(setting)
    except Rejected:
        return False
    return True


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
