"""Workers of a recording that sleep in every mini-batch, told from those that are only slower.

A slower machine takes longer by a factor, and so does the noise of its mini-batches. A worker that waits for something else
(the stragglers of RLP, Section 4.1) takes longer by a time with a distribution of its own: its mini-batches vary more. At a
barrier that decides: all wait for the longest sleep of several workers, not for their mean.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import polars as pl

__all__ = ["Sleeper", "sleepers"]

_VARIES = 2.0  # a straggler's mini-batches vary so many times as much as those of the steadiest worker, relatively
_LONGER = 0.05  # and take longer than others' by at least this share
_FEWEST = 20  # mini-batches


class Sleeper(NamedTuple):
    """What a worker sleeps in every mini-batch: max(0, N(mean, sd)) seconds."""

    mean_seconds: float
    sd_seconds: float


class _Seen(NamedTuple):
    """Compute times of one worker in one segment: median, and the distance of quantiles at one standard deviation."""

    segment: int
    median: float
    deviation: float
    times: int


def sleepers(segments: Sequence[tuple[Mapping[str, Any], pl.DataFrame]]) -> dict[tuple[str, int], Sleeper]:
    """The stragglers among the workers of each run, by run and number of the worker.

    `segments` are settings, each with its pushes. Quantiles leave out what rarely happens, such as a busy machine.
    """
    seen: dict[tuple[str, int], list[_Seen]] = {}
    for at, (setting, pushes) in enumerate(segments):
        timed = pushes.filter(pl.col("compute_seconds") > 0)
        for (worker,), own in timed.group_by("worker", maintain_order=True):
            low, middle, high = np.quantile(own["compute_seconds"].to_numpy(), [0.16, 0.5, 0.84])
            seen.setdefault((setting["run"], worker), []).append(_Seen(at, middle, (high - low) / 2, own.height))
    known = {key: of for key, of in seen.items() if sum(s.times for s in of) >= _FEWEST}
    found = {}
    for run in dict.fromkeys(run for run, _ in known):
        mine = {worker: of for (name, worker), of in known.items() if name == run}
        varies = {worker: _mean([s.deviation / s.median for s in of], of) for worker, of in mine.items()}
        steady = {worker for worker, value in varies.items() if value <= _VARIES * min(varies.values())}
        for worker in mine.keys() - steady:
            sleeper = _against(mine[worker], [s for other in steady for s in mine[other]])
            if sleeper is not None:
                found[run, worker] = sleeper
    return dict(sorted(found.items()))


def _against(mine: Sequence[_Seen], steady: Sequence[_Seen]) -> Sleeper | None:
    """What a worker takes longer than steady ones in the same segments; None if that is little, or they share none."""
    usual: dict[int, list[_Seen]] = {}
    for s in steady:
        usual.setdefault(s.segment, []).append(s)
    common = [s for s in mine if s.segment in usual]
    if not common:
        return None
    others = [float(np.median([o.median for o in usual[s.segment]])) for s in common]
    noise = [float(np.median([o.deviation for o in usual[s.segment]])) for s in common]
    longer = _mean([s.median - other for s, other in zip(common, others, strict=True)], common)
    variance = _mean([s.deviation**2 - n**2 for s, n in zip(common, noise, strict=True)], common)
    deviation = float(np.sqrt(max(variance, 0.0)))
    # One that varies by more than it takes longer is held up now and then, not in every mini-batch.
    if longer < max(_LONGER * _mean(others, common), deviation):
        return None
    return Sleeper(longer, deviation)


def _mean(values: Sequence[float], of: Sequence[_Seen]) -> float:
    return float(np.average(values, weights=[s.times for s in of]))
