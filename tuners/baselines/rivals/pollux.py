"""Pollux: batch and learning rate by goodput, throughput times statistical efficiency.

Qiao et al., "Pollux: Co-adaptive Cluster Scheduling for Goodput-Optimized Deep Learning", OSDI 2021. In steps of M samples
each sample makes (phi + M0) / (phi + M) of the progress that it makes in steps of M0, where phi is the gradient noise scale
and M0 the batch at the start. Goodput is that times the throughput M / T_iter(M). The batch of the highest goodput is used,
with AdaScale's learning rate: that of the start times (phi / M0 + 1) / (phi / M + 1).

Efficiency and rate are those of the authors' public code (petuum/adaptdl: `goodput.py`, where both come from the gradients'
squared mean and variance). Where we differ: their batch is never below M0, ours any that is free; the paper also chooses
the number of workers, in a cluster of many jobs; here it is the job's. T_iter is what a cycle takes besides computing, and
a line in the samples of a worker, fitted without negative coefficients to what computing took; the paper's also says how
both overlap, which in a worker's cycle here they do not. The paper reads phi off gradients while they train; here
`MeasureNoise` takes time. M is the batch of all workers where they wait for each other (BSP), and else that of one, whose
gradient is an update of its own.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace

import numpy as np
from scipy.optimize import nnls

from tuners.actions import Job, MeasureNoise, Reconfigure, Rejected, Run, Setting, Tuner
from tuners.applicability import learns_nothing, nothing_to_tune_if
from tuners.baselines.rivals.speed_model import seconds_of_a_push
from tuners.factory_options import Count, NonNegative, Share
from tuners.settings import Choice

__all__ = ["adascale", "cycle_seconds", "efficiency", "pollux"]


def _no_batch(job: Job) -> str:
    if said := learns_nothing(job, "it has no gradients that could be noisy"):
        return said
    free = job.space.frees("batch_size") and job.space.frees("learning_rate") and not job.start.loads
    return "" if free else "Batch and learning rate are not both free here."


@nothing_to_tune_if(_no_batch)
def pollux(job: Job, *, clocks: Count = 10, batches: Count = 4, weight: Share = 0.5, gain: NonNegative = 0.05) -> Tuner:
    """Measure the gradient noise scale and the time of a mini-batch, and use the batch and rate of the highest goodput.

    Args:
        job: what is tuned.
        clocks: pushes per worker between two decisions.
        batches: mini-batches of a worker from which noise is measured; at least 2.
        weight: of the newest measurement in the moving averages of both parts of the noise scale.
        gain: the least expected gain in goodput for which the batch is changed, and the least change of the rate, as shares.
    """
    if _no_batch(job):
        return
    current, measured, square, variance = job.start, dict[int, tuple[float, float]](), math.nan, math.nan
    while True:
        try:
            seen = yield from Run(clocks=clocks * len(current.workers))
            if seen.status != "running":
                return
            noise = yield from MeasureNoise(batches=max(batches, 2))
        except Rejected:
            return  # only the simulator measures noise
        current = seen.setting or current
        seconds = seconds_of_a_push(seen)
        if np.isfinite(seconds):
            measured[current.batch_size] = seconds, float(np.mean(seen.pushes.compute_seconds))
        square = noise.square if math.isnan(square) else (1 - weight) * square + weight * noise.square
        variance = noise.variance if math.isnan(variance) else (1 - weight) * variance + weight * noise.variance
        if not (measured and square > 0 and variance >= 0):
            continue
        scale, together = variance / square, len(current.workers) if current.waits_for_all else 1
        first, cycle = job.start.batch_size * together, cycle_seconds(measured)
        goodput = {b: b / cycle(b) * efficiency(scale, first, b * together) for b in _batches(job)}
        best = max(goodput, key=goodput.__getitem__)
        if goodput[best] <= (1 + gain) * goodput.get(current.batch_size, 0.0):
            best = current.batch_size
        wanted = _with_batch(job, current, best, adascale(scale, first, best * together))
        if best == current.batch_size and math.isclose(wanted.learning_rate, current.learning_rate, rel_tol=gain):
            continue
        why = f"noise scale {scale:.3g} samples: batches of {best}, rate {wanted.learning_rate:.3g}"
        try:
            yield from Reconfigure(wanted, reason=why)
        except Rejected:
            continue
        current = wanted


def efficiency(scale: float, first: float, batch: float) -> float:
    """Progress of a sample in steps of `batch` samples, over that in steps of `first`, at a noise `scale` in samples."""
    return (scale + first) / (scale + batch)


def adascale(scale: float, first: float, batch: float) -> float:
    """The factor on the learning rate in steps of `batch` samples, not `first`: AdaScale's r, at most batch / first."""
    return (scale / first + 1) / (scale / batch + 1)


def cycle_seconds(measured: Mapping[int, tuple[float, float]]) -> Callable[[int], float]:
    """The seconds of a worker's cycle by its batch, from (seconds, seconds of computing) under some batches.

    With one batch measured, computing is in proportion to it, so that larger ones are tried where transfers take long.
    """
    batches, (seconds, computing) = list(measured), np.array(list(measured.values())).T
    rows = np.array([(0.0 if len(batches) == 1 else 1.0, batch) for batch in batches])
    # Relative errors; where a job only transfers, computing takes no time under any batch.
    whole = np.where(computing > 0, computing, max(computing.max(), 1.0))
    (fixed, each), _ = nnls(rows / whole[:, None], computing / whole)
    beside = float(np.mean(seconds - computing))
    return lambda batch: float(max(beside, 0.0) + fixed + each * batch)


def _with_batch(job: Job, setting: Setting, batch: int, factor: float) -> Setting:
    knob = job.space.knob("learning_rate")
    rate = factor * job.start.learning_rate
    return replace(setting, batch_size=batch, learning_rate=rate if knob is None else float(knob.nearest(rate)))


def _batches(job: Job) -> list[int]:
    """The batches to choose from: the options of the knob, or its ends and the powers of two between them."""
    knob = job.space.knob("batch_size")
    if isinstance(knob, Choice):
        return sorted(int(o) for o in knob.options)
    if knob is None:
        return [job.start.batch_size]
    low, high = int(knob.low), int(knob.high)
    return sorted({low, high} | {2**n for n in range(high.bit_length()) if low <= 2**n <= high})
