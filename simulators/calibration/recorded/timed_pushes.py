"""Rows of recordings in which each push has its time, or the parts of its cycle; and the noise of mini-batches."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import median_low
from typing import Any

import numpy as np
import polars as pl

from simulators.calibration.recorded.recorded_settings import batch_sizes_of, first_of, numbers_of, row_of, told_of
from simulators.calibration.recorded.row import Row, WorkerTime
from simulators.calibration.recorded.segments import FEW, RARE, Segment, segments_of, variance_of
from simulators.calibration.recorded.selection import Selection
from simulators.calibration.recorded.speeds import on_machines, with_speeds
from simulators.calibration.recorded.stragglers import ERROR_OF_MEDIAN, Sleeper, sleepers
from simulators.cluster.conditions import Sleeps
from traces.schema import assumed_numbers

__all__ = ["Noise", "rows_of_pushes"]

_FAR = 4.0  # a time beyond so many standard deviations of the logarithm is a sleep, not jitter
_AWAKE = Sleeper(0.0, 0.0)
_SLOW_LINK = 1.6  # times as long as usual: transfers of a worker on alike links took up to 1.5 times as long (`traces/data`)
_PARTS = ("compute_seconds", "pull_seconds", "push_seconds", "wait_seconds")


@dataclass(frozen=True, slots=True)
class Noise:
    """The noise of compute times of mini-batches: lognormal, with occasional sleeps."""

    jitter: float  # coefficient of variation
    sleeps: Sleeps | None
    times: int  # number of mini-batches
    recorded_p99: float  # 99th percentile over the median
    fitted_p99: float  # the same, of the lognormal distribution


def rows_of_pushes(
    tables: Mapping[str, pl.DataFrame],
    settings: pl.DataFrame,
    left_out: pl.DataFrame,
    wanted: Selection,
    caveats: list[str],
) -> tuple[list[Row], Noise | None]:
    """A row for each of the `wanted` settings with enough pushes, and the noise of their mini-batches.

    `settings` and `left_out` are as `settings_of` returns them; notes are added to `caveats`.
    """
    segments = segments_of(tables, settings, left_out, wanted, caveats)
    made = [s.setting for s in segments]
    slow = sleepers([(s.setting, s.pushes) for s in segments], [*map(batch_sizes_of, made)], [*map(numbers_of, made)])
    rows, contradict = on_machines(list(_rows(segments, slow)))
    if links := _slow_links(segments, rows):
        caveats.append(
            f"pulls and pushes of some workers take longer than those beside them: {first_of(links)}; if their links "
            "are slower, give the rates of all links in the runs' extras, and the names of nodes in the column setting: "
            "otherwise all count as alike, and predictions do not know which workers are slow"
        )
    if contradict:
        caveats.append(
            f"{len(contradict)} runs contradict each other in how fast machines of one name or number are: "
            f"{first_of(contradict)}; each run is taken to have machines of its own, relative to its median one"
        )
    if slow:
        caveats.append(_sleeps_told(slow))
    return list(with_speeds(rows)), _noise(segments, slow)


def _sleeps_told(slow: Mapping[tuple[str, int], Sleeper]) -> str:
    """Which workers sleep in every mini-batch, for how long, and how a scenario has them."""
    each = [f"worker {worker} of {run} {s.mean_seconds:.3g} s" for (run, worker), s in slow.items()]
    return (
        f"workers that take longer by a time of their own, not a factor: {first_of(each)}; predictions have them, "
        "and a scenario has them as [conditions.stragglers]"
    )


def _rows(segments: Sequence[Segment], slow: Mapping[tuple[str, int], Sleeper]) -> Iterator[Row]:
    for segment, error in zip(segments, _cycle_errors(segments), strict=True):
        setting, pushes = segment.setting, segment.pushes.slice(1)
        times = {name: float(pushes[name].mean()) for name in _PARTS if pushes[name].null_count() < pushes.height}  # type: ignore[arg-type]
        seconds = float(segment.pushes["seconds"][-1] - segment.pushes["seconds"][0])
        count = pushes.height + segment.lacking
        cycle = segment.pushing * seconds / count  # other workers were lost, or are not recorded
        if segment.lacking and pushes["worker"].n_unique() == setting["workers"]:
            cycle = _cycle_by_clocks(segment.pushes) or cycle
        if segment.branches > 1 and len(times) == len(_PARTS):  # the segment's seconds include other branches
            by_worker = pushes.group_by("worker").agg(pl.sum_horizontal(_PARTS).mean().alias("cycle"))["cycle"].to_numpy()
            cycle = len(by_worker) / float((1 / by_worker).sum())
        parts = {name: times[name] for name in _PARTS[:3] if name in times}
        whole: dict[str, Any] = {}
        if segment.branches == 1 and segment.pushing == setting["workers"]:
            whole = {"all_seconds": segment.all_seconds, "all_pushes": segment.all_pushes}
        # A straggler's sleep is not a matter of its speed.
        numbers = numbers_of(setting)
        each = _worker_times(pushes, told_of(setting).get("workers", ()), numbers)
        slept = {t.worker: slow.get((setting["run"], t.worker), _AWAKE) for t in each}
        own = tuple(t._replace(seconds=max(t.seconds - slept[t.worker].mean_seconds, 0.05 * t.seconds)) for t in each)
        sleeps: tuple[Sleeper, ...] = ()
        if {*slept.values()} - {_AWAKE}:
            # In the setting's order; who was not timed is taken to be awake.
            sleeps = tuple(slept.get(w, _AWAKE) for w in numbers or assumed_numbers(slept, setting["workers"]))
        yield row_of(setting, cycle, pushes=count, error=error, worker_times=own, sleeps=sleeps, **parts, **whole)


def _cycle_by_clocks(pushes: pl.DataFrame) -> float | None:
    """The mean cycle of workers some of whose pushes have no row: by the time from the first to the last push of each, and
    the clocks between them. None where a worker has less than two.

    Rows may also be missing before the first and after the last: a count of all pushes would lack these.
    """
    each = pushes.group_by("worker", maintain_order=True).agg(
        took=pl.col("seconds").last() - pl.col("seconds").first(), done=pl.col("clock").last() - pl.col("clock").first()
    )
    if (each["took"] <= 0).any() or (each["done"] <= 0).any():
        return None
    return each.height / float((each["done"] / each["took"]).sum())


def _slow_links(segments: Sequence[Segment], rows: Sequence[Row]) -> list[str]:
    """The workers whose pulls and pushes take far longer than the usual ones beside them, in the mean over the settings of
    their run, where nothing is known that makes them so."""
    longer: dict[tuple[str, int], list[float]] = {}
    for segment, row in zip(segments, rows, strict=True):
        if row.nics or row.delays or row.shared:
            continue
        took = segment.pushes.group_by("worker", maintain_order=True).agg(
            pl.sum_horizontal(_PARTS[1:3]).median().alias("seconds")
        )
        timed = dict(took.filter(pl.col("seconds") > 0).iter_rows())
        for worker, seconds in timed.items():
            longer.setdefault((row.run, worker), []).append(math.log(seconds / median_low(timed.values())))
    times = {who: math.exp(float(np.mean(logs))) for who, logs in sorted(longer.items())}
    return [f"worker {worker} of {run} {of:.2g} times" for (run, worker), of in times.items() if of > _SLOW_LINK]


def _cycle_errors(segments: Sequence[Segment]) -> list[float]:
    """The relative standard error of each segment's mean cycle: by how cycles vary in the usual segment, with and without a
    barrier; 0 where that is not known.

    A segment has few batches, and one with a pause in it would move a mean over segments: so the median is taken.
    """
    counts = [len(s.cycles) if s.branches == 1 else 0 for s in segments]
    varies: dict[bool, list[float]] = {}  # by whether there is a barrier
    for segment, count in zip(segments, counts, strict=True):
        found, _ = variance_of(segment.cycles)
        if count and not math.isnan(found):
            varies.setdefault(segment.barrier, []).append(found)
    usual = {barrier: float(np.median(found)) for barrier, found in varies.items()}
    return [math.sqrt(usual.get(s.barrier, 0.0) / n) if n else 0.0 for s, n in zip(segments, counts, strict=True)]


def _worker_times(pushes: pl.DataFrame, machines: Sequence[str], numbers: Sequence[int]) -> list[WorkerTime]:
    """The median of each worker, with a standard error by the distance of quantiles at one standard deviation; and with its
    machine, where those of all are known. Workers are in the setting's order, as `machines` are: of `numbers`, if known.

    A worker of few mini-batches may look steady by chance: it is taken to vary at least as much as the usual worker.
    """
    timed = pushes.filter(pl.col("compute_seconds") > 0).group_by("worker").agg("compute_seconds").sort("worker")
    seen = {worker: np.quantile(times, [0.16, 0.5, 0.84]).tolist() for worker, times in timed.iter_rows()}
    counts = dict(timed.select("worker", pl.col("compute_seconds").list.len()).iter_rows())
    varies = {worker: (high - low) / 2 / middle for worker, (low, middle, high) in seen.items()}
    usual = float(np.median(list(varies.values()))) if varies else 0.0
    numbers = numbers or [*seen]
    names = machines if len(machines) == len(numbers) else [str(worker) for worker in numbers]
    found = []
    for worker, name in zip(numbers, names, strict=True):
        if worker in seen:
            _, middle, _ = seen[worker]
            error = ERROR_OF_MEDIAN * middle * max(varies[worker], usual) / math.sqrt(counts[worker])
            found.append(WorkerTime(worker, middle, error, name))
    return found


def _noise(segments: Sequence[Segment], slow: Mapping[tuple[str, int], Sleeper]) -> Noise | None:
    """The distribution of compute times of mini-batches around the median of worker and segment, without stragglers."""
    ratios, seconds = [], []
    for segment in segments:
        asleep = [worker for run, worker in slow if run == segment.setting["run"]]
        timed = segment.pushes.filter(pl.col("compute_seconds") > 0, ~pl.col("worker").is_in(asleep))
        middle = pl.col("compute_seconds").median().over("worker")
        ratios.append(timed.select(pl.col("compute_seconds") / middle).to_series().to_numpy())
        seconds.append(timed.select(pl.col("compute_seconds") - middle).to_series().to_numpy())
    ratio, excess = (np.concatenate(x) if x else np.zeros(0) for x in (ratios, seconds))
    if len(ratio) < 20:
        return None
    # Quantiles at one standard deviation instead of the deviation itself, so that sleeps do not count as jitter.
    low, high = np.quantile(np.log(ratio), [0.16, 0.84])
    sigma = max(float(high - low) / 2, 1e-4)
    far = ratio > max(math.exp(_FAR * sigma), 1.2)
    slept = None
    if far.mean() > RARE and far.sum() >= FEW:
        slept = Sleeps(float(far.mean()), float(excess[far].mean()), float(excess[far].std()))
    p99 = float(np.quantile(ratio, 0.99))
    return Noise(math.sqrt(math.expm1(sigma**2)), slept, len(ratio), p99, math.exp(2.3263 * sigma))
