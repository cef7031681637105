"""Reads from a trace what calibration needs: one row per run and setting, the noise of mini-batches, the cost of switches.

There are three kinds of recordings. With *iterations*, each push has its time, or the parts of its cycle; with *progress*,
there are pairs of steps and seconds during the run; otherwise there are only the totals of the run. A step is one
mini-batch of one worker; in a synchronous run without iterations it is one mini-batch of every worker.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median, median_low
from typing import Any

import numpy as np
import polars as pl

from simulators.calibration.recorded.efforts import Effort, efforts
from simulators.calibration.recorded.recorded_settings import (
    batch_sizes_of,
    first_of,
    moments,
    numbers_of,
    row_of,
    settings_of,
    told_of,
)
from simulators.calibration.recorded.row import Row, WorkerTime
from simulators.calibration.recorded.segments import (
    FEW,
    FEWEST,
    RARE,
    SYNCHRONOUS,
    Segment,
    segments_of,
    variance_of,
)
from simulators.calibration.recorded.selection import EVERYTHING, Selection
from simulators.calibration.recorded.speeds import on_machines, with_speeds
from simulators.calibration.recorded.stragglers import ERROR_OF_MEDIAN, Sleeper, sleepers
from simulators.cluster.conditions import Sleeps

__all__ = ["Noise", "Recording", "joined", "read_tables", "with_links_of", "with_snapshots"]

_FEW_SNAPSHOTS = 5  # within a row's pushes, up to which it matters how many they were
_STEADY = 3  # mini-batches of every worker, over which the mean time of a step hardly varies
_LONG = 100.0  # seconds of a cycle from which it is asked whether these are milliseconds; real ones take up to a minute
_OTHER_UNITS = 30.0  # a part of a cycle over the cycle, from which their units must differ
_OVERLAP = 1.1  # parts of a cycle over the cycle, from which they do not fit into it
_FAR = 4.0  # a time beyond so many standard deviations of the logarithm is a sleep, not jitter
_NO_RATES = {"trimtuner-tf-ps": "its counts of iterations are not those that took its seconds"}
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


@dataclass(frozen=True, slots=True)
class Recording:
    """What calibration reads from a trace."""

    rows: tuple[Row, ...]
    noise: Noise | None  # None: single mini-batches were not timed
    switch_seconds: tuple[float, ...]  # stall of each change of the policy
    restart_seconds: tuple[tuple[float, float], ...]  # other reconfigurations by checkpoint: seconds, bytes moved
    efforts: tuple[Effort, ...]  # of runs with one policy, synchronous or asynchronous
    caveats: tuple[str, ...]  # recorded data that is not used, and why; biases
    nic_bytes_per_second: float | None = None  # median over the machines, if the trace has NIC rates


def read_tables(tables: Mapping[str, pl.DataFrame], source: str = "", wanted: Selection = EVERYTHING) -> Recording:
    """The recording in a trace's tables; `source` is the name of its origin. Only `wanted` runs and settings are read.

    Raises ValueError for a source whose counts of iterations do not match its seconds, and where the parts of a cycle have
    other units than the cycle.
    """
    if source in _NO_RATES:
        raise ValueError(f"Cannot calibrate to {source}: {_NO_RATES[source]}; use it as a table of recorded runs.")
    caveats: list[str] = []
    tables = wanted.of_runs(tables)
    settings, left_out = settings_of(tables, caveats)
    iterations, progress = tables.get("iterations"), tables.get("progress")
    noise, slow = None, dict[tuple[str, int], Sleeper]()
    if iterations is not None and iterations.height:
        segments = segments_of(tables, settings, left_out, wanted, caveats)
        made = [s.setting for s in segments]
        slow = sleepers([(s.setting, s.pushes) for s in segments], [*map(batch_sizes_of, made)], [*map(numbers_of, made)])
        told, contradict = on_machines(list(_rows_of_iterations(segments, slow)))
        if links := _slow_links(segments, told):
            caveats.append(
                f"pulls and pushes of some workers take longer than those beside them: {first_of(links)}; if their links "
                "are slower, give the rates of all links in the runs' extras, and the names of nodes in the column setting: "
                "otherwise all count as alike, and predictions do not know which workers are slow"
            )
        rows, noise = list(with_speeds(told)), _noise(segments, slow)
        if contradict:
            caveats.append(
                f"{len(contradict)} runs contradict each other in how fast machines of one name or number are: "
                f"{first_of(contradict)}; each run is taken to have machines of its own, relative to its median one"
            )
    else:
        rates = pl.DataFrame() if progress is None else wanted.among(_rates(progress, settings, left_out, caveats))
        alone = settings.filter(~pl.col("run").is_duplicated(), ~pl.col("run").is_in(left_out["run"].implode()))
        rows = list(_rows_of_progress(rates)) if rates.height else list(_rows_of_runs(tables, wanted.among(alone)))
        if rates.height and (silent := {*wanted.among(settings)["run"]} - {*progress["run"]}):  # type: ignore[index]
            caveats.append(
                f"{len(silent)} runs are left out: they have no progress, and others have; calibrate to them alone: "
                f"{first_of(sorted(silent))}"
            )
        if not rates.height and (several := settings["run"].n_unique() - alone.height):
            caveats.append(f"{several} runs with several settings have totals only, and are left out: record progress")
        runs = tables["runs"].filter(pl.col("seconds").is_null(), pl.col("trimmed_seconds").is_not_null())
        if not rates.height and runs.height:
            names = ", ".join(sorted(set(runs["workload"].drop_nulls())))
            caveats.append(
                f"{runs.height} runs ({names}) have trimmed seconds only, but all their steps: cycle times are too short"
            )
    timed_rows = [row for row in rows if row.cycle_seconds > 0]
    if slow:
        caveats.append(_sleeps_told(slow))
    _check_units(timed_rows)
    if longer := sum(_parts_seconds(row) > _OVERLAP * row.cycle_seconds for row in timed_rows):
        caveats.append(
            f"in {longer} settings the parts of a cycle take longer than the cycle: the simulator's do not overlap; or have "
            "they other units?"
        )
    if untimed := len(rows) - len(timed_rows):
        caveats.append(f"{untimed} settings are left out: they have no seconds, or no steps")
    if timed_rows and (usual_seconds := median(row.cycle_seconds for row in timed_rows)) > _LONG:
        caveats.append(
            f"a cycle takes {usual_seconds:.0f} s in the median; if these are milliseconds, divide all times by 1000"
        )
    switches, restarts = _change_costs(tables, settings)
    usual = next(iter(settings["usual_nic"].to_list()), None)
    return Recording(tuple(timed_rows), noise, switches, restarts, tuple(efforts(tables)), tuple(caveats), usual)


def _sleeps_told(slow: Mapping[tuple[str, int], Sleeper]) -> str:
    """Which workers sleep in every mini-batch, for how long, and how a scenario has them."""
    each = [f"worker {worker} of {run} {s.mean_seconds:.3g} s" for (run, worker), s in slow.items()]
    return (
        f"workers that take longer by a time of their own, not a factor: {first_of(each)}; predictions have them, "
        "and a scenario has them as [conditions.stragglers]"
    )


def _check_units(rows: Sequence[Row]) -> None:
    """Raise ValueError where most cycles have a part that takes many times as long as the cycle that it is a part of."""
    for name in _PARTS[:3]:
        times = [getattr(row, name) / row.cycle_seconds for row in rows if getattr(row, name) > 0]
        if times and median(times) > _OTHER_UNITS:
            raise ValueError(
                f"Cannot read {name}: it is {median(times):.0f} times as long as the cycle that it is a part of, in the "
                "median; give the moments of pushes (seconds) and the parts of cycles in one unit, seconds."
            )


def _parts_seconds(row: Row) -> float:
    """The sum of those parts of a row's cycle that were recorded."""
    return float(np.nansum([row.compute_seconds, row.pull_seconds, row.push_seconds]))


def joined(recordings: Sequence[tuple[str, Recording]]) -> Recording:
    """Recordings and their names as one. A name precedes those of its runs, so that runs of the same name stay apart.

    Links are relative to the usual link of the first. The noise of mini-batches is that of the recording with most of them.
    Rows that are in several selections of one trace count once.
    """
    every = [recording for _, recording in recordings]
    first = every[0]
    rows = [_named(name, row) for name, recording in recordings for row in with_links_of(recording, first).rows]
    timed = [r.noise for r in every if r.noise is not None]
    return Recording(
        tuple({row.identity: row for row in rows}.values()),
        max(timed, key=lambda noise: noise.times) if timed else None,
        tuple(s for r in every for s in r.switch_seconds),
        tuple(s for r in every for s in r.restart_seconds),
        tuple(e._replace(run=f"{name}/{e.run}") for name, r in recordings for e in r.efforts),
        tuple(dict.fromkeys(c for r in every for c in with_links_of(r, first).caveats)),
        first.nic_bytes_per_second,
    )


def _named(name: str, row: Row) -> Row:
    """The row with its run and machines apart from those of the same names in other recordings."""
    usual = f"{name}/{row.usual_machine}" if row.usual_machine else ""
    times = tuple(t._replace(machine=f"{name}/{t.machine}") for t in row.worker_times)
    return replace(row, run=f"{name}/{row.run}", usual_machine=usual, worker_times=times)


def with_links_of(recording: Recording, known: Recording) -> Recording:
    """The recording with its links relative to the usual link of `known`: constants fitted to `known` hold for it."""
    own, usual = recording.nic_bytes_per_second, known.nic_bytes_per_second
    if own == usual:
        return recording
    if own is None or usual is None:
        why = "only some of the recordings have the rates of links: the usual links are assumed to be equally fast"
        return replace(recording, caveats=(*recording.caveats, why))

    def scaled(row: Row) -> Row:
        machines = max(row.workers, row.servers) if row.shared else row.workers + row.servers
        return replace(row, nics=tuple(nic * own / usual for nic in row.nics or (1.0,) * machines))

    return replace(recording, rows=tuple(map(scaled, recording.rows)), nic_bytes_per_second=usual)


def with_snapshots(recording: Recording, clocks: int) -> Recording:
    """The recording as one in which servers took a snapshot after so many `clocks`, counted from the beginning of each
    setting, and at least 4 of each worker; 0: none.

    Few of them fall into the pushes of a short row, or none: then the row has the mean distance of these.
    """

    def told(row: Row) -> Row:
        apart = max(clocks, 4 * row.workers) if clocks else 0
        of_cycles = apart
        if apart and row.pushes <= _FEW_SNAPSHOTS * apart:
            every = max(row.all_pushes, row.pushes)
            # One that begins with the last push is in no cycle that was recorded.
            within = (every - 1) // apart - (every - row.pushes - 1) // apart
            of_cycles = max(round(row.pushes / within), 4 * row.workers) if within else 0
        return replace(row, snapshot_clocks=apart, cycle_snapshot_clocks=of_cycles)

    return replace(recording, rows=tuple(map(told, recording.rows)))


# ---------------------------------------------------------------------------------------------------------- iterations


def _rows_of_iterations(segments: Sequence[Segment], slow: Mapping[tuple[str, int], Sleeper]) -> Iterator[Row]:
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
        sleeps = _in_order(slept, setting["workers"], numbers) if {*slept.values()} - {_AWAKE} else ()
        yield row_of(setting, cycle, pushes=count, error=error, worker_times=own, sleeps=sleeps, **parts, **whole)


def _in_order(slept: Mapping[int, Sleeper], workers: int, numbers: Sequence[int]) -> tuple[Sleeper, ...]:
    """What so many workers sleep, in the setting's order; who was not timed is taken to be awake."""
    if numbers:
        return tuple(slept.get(worker, _AWAKE) for worker in numbers)
    if len(slept) < workers and max(slept) < workers:
        return tuple(slept.get(worker, _AWAKE) for worker in range(workers))
    return (*slept.values(), *(_AWAKE,) * (workers - len(slept)))  # numbers that begin with 1


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


# ---------------------------------------------------------------------------------------------- progress, and whole runs


def _rates(progress: pl.DataFrame, settings: pl.DataFrame, left_out: pl.DataFrame, caveats: list[str]) -> pl.DataFrame:
    """Steps and seconds under each setting, summed over the intervals between two records under the same setting.

    An interval counts as a pause or switch, and is left out, if a step takes over three times the median; in asynchronous
    runs only if the interval is also longer than a minute, or has several mini-batches of every worker: the time of a single
    push varies that much.
    """
    known = moments(settings, left_out, mode="policy", crew="workers")
    steps = progress.filter(pl.col("seconds").is_not_null(), pl.col("steps").is_not_null())
    if steps["training_loss"].null_count() < steps.height:
        # Rows of a validation alone follow a pause.
        steps = steps.filter(pl.col("training_loss").is_not_null())
    joined = steps.sort("seconds", maintain_order=True).join_asof(
        known, on="seconds", by=["run", "branch"], check_sortedness=False
    )
    within = (
        joined.filter(pl.col("segment").is_not_null())
        .with_columns(
            pl.col("seconds").diff().over("segment").alias("took"), pl.col("steps").diff().over("segment").alias("done")
        )
        .filter(pl.col("done") > 0, pl.col("took") > 0)
    )
    each = pl.col("took") / pl.col("done")
    steady = pl.col("mode").is_in(SYNCHRONOUS) | (pl.col("took") > 60) | (pl.col("done") >= _STEADY * pl.col("crew"))
    long = (each > 3 * each.median().over("segment")) & steady
    sums = within.filter(~long).group_by("segment", maintain_order=True).agg(pl.col("done", "took").sum(), pl.len())
    found = settings.join(sums, on="segment", how="inner", maintain_order="left").filter(pl.col("len") >= FEWEST)
    if few := {*progress["run"]} & {*settings["run"]} - {*found["run"]}:
        caveats.append(
            f"{len(few)} runs are left out: of no setting of theirs does progress have {FEWEST} intervals between records "
            f"after its beginning: {first_of(sorted(few))}"
        )
    return found


def _rows_of_progress(rates: pl.DataFrame) -> Iterator[Row]:
    for setting in rates.to_dicts():
        yield row_of(setting, _cycle(setting, setting["took"] / setting["done"]), pushes=setting["done"])


def _rows_of_runs(tables: Mapping[str, pl.DataFrame], settings: pl.DataFrame) -> Iterator[Row]:
    runs = tables["runs"].drop("workload", "extras").rename({"seconds": "run_seconds"})
    joined = settings.join(runs, on="run", how="inner", maintain_order="left")
    for made in joined.to_dicts():
        seconds = made["run_seconds"] or made["trimmed_seconds"]
        row = row_of(made, 0.0, pushes=made["steps"] or 0)
        if made["steps"] and seconds:
            yield replace(row, cycle_seconds=_cycle(made, seconds / made["steps"]))
        elif made["samples_per_second"]:
            total = json.loads(made["extras"] or "{}").get("total_batch_size", sum(row.batches))
            yield replace(row, cycle_seconds=total / made["samples_per_second"])
        else:
            yield row


def _cycle(setting: Mapping[str, Any], step_seconds: float) -> float:
    return step_seconds if setting["policy"] in SYNCHRONOUS else setting["workers"] * step_seconds


# --------------------------------------------------------------------------------------------------------------- changes


def _change_costs(
    tables: Mapping[str, pl.DataFrame], settings: pl.DataFrame
) -> tuple[tuple[float, ...], tuple[tuple[float, float], ...]]:
    """Seconds of changes of the policy, and seconds and bytes of other reconfigurations by checkpoint."""
    made = tables.get("reconfigurations")
    if made is None or not made.height:
        return (), ()
    timed = made.filter(pl.col("total_seconds") > 0, pl.col("method") == "checkpoint", pl.col("done").fill_null(value=True))
    switches, restarts = [], []
    for change in timed.sort("run", "seconds").to_dicts():
        mine = settings.filter(run=change["run"], branch=change["branch"])
        before = mine.filter(pl.col("seconds") < change["seconds"] - 0.5 * change["total_seconds"]).tail(1)
        after = mine.filter(pl.col("seconds") >= change["seconds"] - 0.5 * change["total_seconds"]).head(1)
        if before.height and after.height and before["policy"][0] != after["policy"][0]:
            switches.append(change["total_seconds"])
        elif before.height and after.height:
            restarts.append((change["total_seconds"], change["bytes_moved"] or 0.0))
    return tuple(switches), tuple(restarts)
