"""Workers of a recording that sleep in every mini-batch, told from those that are only slower.

A slower machine takes longer by a factor, whatever it computes, and so does the noise of its mini-batches. A worker that
waits for something else (the stragglers of RLP, Section 4.1; a constant delay) takes longer by a time of its own: as much in
large mini-batches as in small ones, and with a noise that has nothing to do with that of computing. It decides what other
batches take, and at a barrier all wait for the longest sleep of several workers, not for their mean.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from typing import Any, NamedTuple

import numpy as np
import polars as pl

from traces.schema import assumed_numbers

__all__ = ["ERROR_OF_MEDIAN", "Sleeper", "sleepers"]

ERROR_OF_MEDIAN = 1.2533
"""Standard error of the median over that of the mean, of normal values."""

_VARIES = 2.0  # mini-batches that vary so many times as much as a slower machine's do not come from one
_LONGER = 0.05  # a sleep is at least this share of the time that others take
_APART = 1.5  # times of mini-batches of several sizes differ by this factor at least
_CLEARLY = 4.0  # ratio of squared errors from which mini-batches of several sizes tell a sleep from a slower machine
_FEWEST = 20  # mini-batches
_CHANCE = 4.0  # standard errors, by which the slowest of many equal workers hardly ever takes longer than the usual one


class Sleeper(NamedTuple):
    """What a worker sleeps in every mini-batch: max(0, N(mean, sd)) seconds."""

    mean_seconds: float
    sd_seconds: float


class _Seen(NamedTuple):
    """Compute times of one worker in one segment: median, and the distance of quantiles at one standard deviation."""

    median: float
    deviation: float
    times: int


class _Segment(NamedTuple):
    """What was seen under a setting."""

    seen: Mapping[int, _Seen]  # by number of the worker
    sizes: Mapping[int, int]  # samples in a mini-batch, by number of the worker; {}: equal


class _Pair(NamedTuple):
    """A worker and the usual one beside it, in one segment."""

    own: _Seen
    usual: _Seen


def sleepers(
    segments: Sequence[tuple[Mapping[str, Any], pl.DataFrame]],
    batches: Sequence[Sequence[int]] = (),
    numbers: Sequence[Sequence[int]] = (),
) -> dict[tuple[str, int], Sleeper]:
    """The stragglers among the workers of each run, by run and number of the worker.

    `segments` are settings, each with its pushes. `batches` has, for each of them, the samples in a mini-batch of every
    worker; () where these are equal. `numbers` are those of these workers, for each of them; () where they are in order.
    Quantiles leave out what rarely happens, such as a busy machine.
    """
    seen: dict[str, list[_Segment]] = {}  # by run
    unknown = [()] * len(segments)
    for (setting, pushes), sizes, own_numbers in zip(segments, batches or unknown, numbers or unknown, strict=True):
        timed = pushes.filter(pl.col("compute_seconds") > 0)
        of_workers = {}
        for (worker,), own in timed.group_by("worker", maintain_order=True):
            low, middle, high = np.quantile(own["compute_seconds"].to_numpy(), [0.16, 0.5, 0.84])
            of_workers[worker] = _Seen(float(middle), float(high - low) / 2, own.height)
        numbered = own_numbers or assumed_numbers(of_workers, len(sizes))
        seen.setdefault(setting["run"], []).append(_Segment(of_workers, dict(zip(numbered, sizes, strict=False))))
    found = {}
    for run, each in seen.items():
        workers = {worker for segment in each for worker in segment.seen}
        # Neither other stragglers nor a single quick machine decide who sleeps. For how long is told by all that do not.
        awake = {
            worker for worker in workers if _sleep(quick := _pairs(worker, each, workers, 0.5)) is None or not _sleeps(quick)
        }
        for worker in workers - awake:
            sleep = _sleep(_pairs(worker, each, awake) or _pairs(worker, each, workers, 0.5))
            if sleep is not None:
                found[run, worker] = sleep
    return dict(sorted(found.items()))


def _pairs(worker: int, segments: Sequence[_Segment], among: AbstractSet[int], quickest: float = 1.0) -> list[_Pair]:
    """The worker beside the usual one, in every segment: the median of those `among` others that have mini-batches of its
    size, or of this share of them, the quickest."""
    pairs = []
    for seen, sizes in segments:
        if worker not in seen:
            continue
        others = [s for w, s in seen.items() if w in among - {worker} and sizes.get(w) == sizes.get(worker)]
        kept = sorted(others, key=lambda s: s.median)[: math.ceil(quickest * len(others))]
        if kept:
            median, deviation = (float(np.median([s[k] for s in kept])) for k in (0, 1))
            pairs.append(_Pair(seen[worker], _Seen(median, deviation, sum(s.times for s in kept))))
    return pairs


def _sleep(pairs: Sequence[_Pair]) -> Sleeper | None:
    """What a worker takes longer than the usual one, as a sleep; None if that is little, or may be chance."""
    times = [own.times for own, _ in pairs]
    if sum(times) < _FEWEST:
        return None
    errors = [own.deviation**2 / own.times + usual.deviation**2 / usual.times for own, usual in pairs]
    by_chance = _CHANCE * ERROR_OF_MEDIAN * math.sqrt(np.square(times) @ errors) / sum(times)
    longer = float(np.average([own.median - usual.median for own, usual in pairs], weights=times))
    variance = float(np.average([own.deviation**2 - usual.deviation**2 for own, usual in pairs], weights=times))
    deviation = math.sqrt(max(variance, 0.0))
    # One that varies by more than it takes longer is held up now and then, not in every mini-batch.
    least = max(_LONGER * float(np.average([usual.median for _, usual in pairs], weights=times)), deviation)
    return Sleeper(longer, deviation) if longer >= max(least, by_chance) else None


def _sleeps(pairs: Sequence[_Pair]) -> bool:
    """Whether a worker that takes longer sleeps. Mini-batches of several sizes tell it best; else their noise does.

    A slower machine's noise is longer by the factor of its time. A sleep leaves that of computing as it is, and may have
    noise of its own. A sleep whose own noise happens to be that of a slower machine is taken for one.
    """
    own, usual = (np.array([pair[k].median for pair in pairs]) for k in (0, 1))
    times = np.array([pair.own.times for pair in pairs], dtype=np.float64)
    sleep = float(((own - usual) * times / own**2).sum() / (times / own**2).sum())  # least squares of relative errors
    factor = float(np.average(np.log(own / usual), weights=times))
    as_sleep = float(times @ np.log(own / (usual + sleep)) ** 2)
    as_slower = float(times @ (np.log(own / usual) - factor) ** 2)
    if usual.max() > _APART * usual.min() and max(as_sleep, as_slower) > _CLEARLY * min(as_sleep, as_slower):
        return as_sleep < as_slower
    noisy = [(s.own, s.usual) for s in pairs if s.own.deviation > 0 and s.usual.deviation > 0]
    if not noisy:
        return False
    counts = [s.times for s, _ in noisy]
    noisier = float(np.average([math.log(s.deviation / u.deviation) for s, u in noisy], weights=counts))
    # The relative standard error of a distance of quantiles is about that of a standard deviation, and 1.4 times as large.
    error = math.sqrt(1 / sum(counts) + 1 / sum(u.times for _, u in noisy))
    constant = noisier < factor / 2 and noisier + 2 * error < factor
    return constant or noisier > factor + math.log(_VARIES)
