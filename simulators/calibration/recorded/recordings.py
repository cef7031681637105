"""Reads from a trace what calibration needs: one row per run and setting, the noise of mini-batches, the cost of switches.

There are three kinds of recordings. With *iterations*, each push has its time, or the parts of its cycle; with *progress*,
there are pairs of steps and seconds during the run; otherwise there are only the totals of the run. A step is one
mini-batch of one worker; in a synchronous run without iterations it is one mini-batch of every worker.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
import polars as pl

from simulators.calibration.recorded.efforts import Effort, efforts
from simulators.calibration.recorded.recorded_settings import settings_of
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.selection import EVERYTHING, Selection
from simulators.calibration.recorded.timed_pushes import Noise, rows_of_pushes
from simulators.calibration.recorded.timed_totals import rows_of_totals

__all__ = ["Recording", "joined", "read_tables", "with_links_of", "with_snapshots"]

_FEW_SNAPSHOTS = 5  # within a row's pushes, up to which it matters how many they were
_LONG = 100.0  # seconds of a cycle from which it is asked whether these are milliseconds; real ones take up to a minute
_OTHER_UNITS = 30.0  # a part of a cycle over the cycle, from which their units must differ
_OVERLAP = 1.1  # parts of a cycle over the cycle, from which they do not fit into it
_NO_RATES = {"trimtuner-tf-ps": "its counts of iterations are not those that took its seconds"}
_PARTS = ("compute_seconds", "pull_seconds", "push_seconds")  # of a cycle that a row has


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
    iterations = tables.get("iterations")
    if iterations is not None and iterations.height:
        rows, noise = rows_of_pushes(tables, settings, left_out, wanted, caveats)
    else:
        rows, noise = rows_of_totals(tables, settings, left_out, wanted, caveats), None
    timed_rows = [row for row in rows if row.cycle_seconds > 0]
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


def _check_units(rows: Sequence[Row]) -> None:
    """Raise ValueError where most cycles have a part that takes many times as long as the cycle that it is a part of."""
    for name in _PARTS:
        times = [getattr(row, name) / row.cycle_seconds for row in rows if getattr(row, name) > 0]
        if times and median(times) > _OTHER_UNITS:
            raise ValueError(
                f"Cannot read {name}: it is {median(times):.0f} times as long as the cycle that it is a part of, in the "
                "median; give the moments of pushes (seconds) and the parts of cycles in one unit, seconds."
            )


def _parts_seconds(row: Row) -> float:
    """The sum of those parts of a row's cycle that were recorded."""
    return float(np.nansum([getattr(row, name) for name in _PARTS]))


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
