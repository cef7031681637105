"""Trace-driven simulation: what was recorded elsewhere happens to a run of ours.

What a `Replay` names is turned, for one seed, into plain conditions: episodes, token buckets, nodes that come and go, and a
table of compute times. So it meets every tuner alike, however it cuts its run.

What belongs together stays together: one run of the trace, drawn among those that may be, drives one run of ours (for
bandwidth, where each run is of one machine: as many runs as there are nodes). Its machines are dealt out to our nodes by
lot; where these are more, machines are dealt out again, each time from a later moment of the recording. With
``deal = "order"`` it is the first run, machines go to nodes in order, and everything begins where the recording does.

* compute: a worker's n-th mini-batch takes as many times the time that node and workload say as the recorded worker's n-th
  took of what is usual: of the median of its run (of its stage of a pipeline, where the trace tells stages), or of its own
  (``against = "worker"``). This is in place of `jitter`; after the last one they begin again.
* stragglers: a machine is slower, all the time, by its median over the run's, and, while it is above 1.3 times its own
  median, by the mean of that while. What is below is `jitter`'s. The recording begins at a moment drawn for all machines
  alike, and again when it is over. A machine's speed may be recorded in place of its slowness.
* bandwidth: a bucket that lasts as long, and throttles to the same share of the full rate, as the recorded one: rates are
  the node's NIC's own. A machine that was never throttled has no bucket. Once empty, it is filled at the low rate.
* nodes: a machine that joins a recorded cluster takes the place of the one that left it longest ago. Our nodes are such
  places: all taken at the beginning, a moment drawn from those when so many were (or as many as ever), early enough that
  the recording lasts for the budget if it can. They leave, fail and join again as machines do. Nodes for which there are
  no places stay, and when the recording is over, everybody does.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from fnmatch import fnmatchcase
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from simulators.cluster.compute_factors import NO_FACTORS, Factors
from simulators.cluster.conditions import Bucket, Conditions, Episode, Recording, Replay, check
from simulators.cluster.profiles import NodeType
from simulators.cluster.trace_driven_nodes import Places, places
from traces.parts import scan

__all__ = ["check_replay", "unfolded"]

_SLOW = 1.3
"""Times its own median, above which a machine is in an episode of slowness."""

_FOR_EVER = 1e12  # seconds

_STREAM = 7
"""Of random numbers; the ones before are taken."""

_Floats = NDArray[np.float64]


def check_replay(conditions: Conditions) -> None:
    """Raise ValueError where a trace is none, or has nothing for what it is to drive."""
    for role, recording in (conditions.replay or Replay()).recordings().items():
        try:
            _READ[role](recording)
        except ValueError as error:
            raise ValueError(f"replay.{role}: {error}") from None


def unfolded(
    conditions: Conditions, nodes: tuple[tuple[str, NodeType], ...], budget_seconds: float, seed: int
) -> tuple[Conditions, Factors]:
    """What the run of that seed meets, replayed recordings included, and its compute times.

    Raises ValueError where a trace cannot be read, has nothing for what it is to drive, or does not go with the rest.
    """
    replay = conditions.replay
    if replay is None:
        return conditions, NO_FACTORS
    names, factors = tuple(n for n, _ in nodes), NO_FACTORS
    episodes, buckets, changes = list(conditions.episodes), list(conditions.buckets), list(conditions.nodes)
    for role, recording in replay.recordings().items():
        stream = Replay.__struct_fields__.index(role)
        rng = np.random.default_rng([seed, _STREAM, stream]) if recording.deal == "lot" else None
        driven = tuple(n for n in names if not recording.nodes or n in recording.nodes)
        if role == "compute":
            factors = _factors(recording, names, driven, rng)
        elif role == "stragglers":
            episodes += _episodes(recording, driven, budget_seconds, rng)
        elif role == "bandwidth":
            buckets += _buckets(recording, [(n, kind) for n, kind in nodes if n in driven], rng)
        else:
            found = _one_of(_places(recording), rng)
            changes = sorted([*changes, *found.changes(driven, budget_seconds, rng)], key=lambda c: c.seconds)
    plain = {"episodes": tuple(episodes), "buckets": tuple(buckets), "nodes": tuple(changes), "replay": None}
    made = msgspec.structs.replace(conditions, **plain)
    check(made, names)
    return made, factors


# -------------------------------------------------------------------------------------------------------- who gets what


class _Deal(NamedTuple):
    """What drives one of our nodes."""

    machine: int  # of those recorded
    later: float  # from which share of the recording it begins, beyond where all of them do


def _dealt(recorded: int, ours: int, rng: np.random.Generator | None) -> list[_Deal]:
    order = np.arange(recorded) if rng is None else rng.permutation(recorded)
    rounds = -(-ours // recorded)
    return [_Deal(int(order[i % recorded]), (i // recorded) / rounds) for i in range(ours)]


def _one_of(runs: dict[str, Any], rng: np.random.Generator | None) -> Any:
    """One run of a trace."""
    names = sorted(runs)
    return runs[names[0 if rng is None else int(rng.integers(len(names)))]]


# --------------------------------------------------------------------------------------------------------- compute times


def _factors(recording: Recording, names: Sequence[str], driven: Sequence[str], rng: np.random.Generator | None) -> Factors:
    recorded: tuple[_Floats, ...] = _one_of(_spells(recording), rng)
    most = max(map(len, recorded))
    first = 0.0 if rng is None else rng.random()
    values, counts = np.ones((len(names), most)), np.zeros(len(names), np.int32)
    for node, deal in zip(driven, _dealt(len(recorded), len(driven), rng), strict=True):
        spells, at = recorded[deal.machine], names.index(node)
        counts[at] = len(spells)
        values[at, : len(spells)] = np.roll(spells, -int((first + deal.later) % 1.0 * len(spells)))
    return Factors(jnp.asarray(values), counts)


@cache
def _spells(recording: Recording) -> dict[str, tuple[_Floats, ...]]:
    """By run, the times of every worker's mini-batches in order, over the usual one."""
    timed = _rows(recording, "iterations", "run", "worker", "clock", "seconds", "compute_seconds")
    timed = timed.filter(pl.col("compute_seconds") > 0)
    if not timed.height:
        raise _nothing(recording, "iterations with compute times")
    peers = ["run", "worker"] if recording.against == "worker" else ["run", "stage"]
    timed = timed.join(_stages(recording), on=["run", "worker"], how="left", nulls_equal=True)
    took = pl.col("compute_seconds")
    timed = timed.sort("run", "worker", "seconds", "clock").with_columns(took / took.median().over(peers))
    return {
        str(run): tuple(w["compute_seconds"].to_numpy() for w in one.partition_by("worker", maintain_order=True))
        for (run,), one in timed.group_by("run", maintain_order=True)
    }


def _stages(recording: Recording) -> pl.DataFrame:
    """The stage of every worker whose run tells stages of a pipeline."""
    told: list[tuple[str, int, int]] = []
    for run, text in _rows(recording, "settings", "run", "options").iter_rows():
        stages = json.loads(text or "{}").get("stage_of_worker", {})
        told += [(run, int(worker), int(stage)) for worker, stage in stages.items()]
    schema = {"run": pl.String, "worker": pl.Int32, "stage": pl.Int64}
    return pl.DataFrame(told, schema=schema, orient="row").unique()


# ------------------------------------------------------------------------------------------------------------ stragglers


class _Course(NamedTuple):
    """How slow a recorded machine was."""

    always: float  # over the run
    episodes: tuple[tuple[float, float, float], ...]  # first and last second, since the recording began, and how much slower


class _Courses(NamedTuple):
    seconds: float
    machines: tuple[_Course, ...]


def _episodes(
    recording: Recording, driven: Sequence[str], budget_seconds: float, rng: np.random.Generator | None
) -> list[Episode]:
    run: _Courses = _one_of(_courses(recording), rng)
    first = 0.0 if rng is None else rng.random()
    made: list[Episode] = []
    for node, deal in zip(driven, _dealt(len(run.machines), len(driven), rng), strict=True):
        course, begun = run.machines[deal.machine], (first + deal.later) % 1.0 * run.seconds
        if course.always != 1.0:
            made.append(Episode(node, 0.0, min(budget_seconds, _FOR_EVER), course.always))
        for start, end, factor in course.episodes:
            if start < begun < end:
                made.append(Episode(node, 0.0, end - begun, factor))
            again = (start - begun) % run.seconds
            made.append(Episode(node, again, end - start, factor, run.seconds))
    return [e for e in made if e.start_seconds < budget_seconds]


@cache
def _courses(recording: Recording) -> dict[str, _Courses]:
    """By run, how slow every machine was."""
    columns = ("run", "node", "seconds", "relative_seconds", "relative_speed")
    slowness = pl.coalesce("relative_seconds", 1.0 / pl.col("relative_speed"))
    probes = _rows(recording, "probes", *columns).with_columns(slow=slowness)
    probes = probes.filter(pl.col("slow").is_finite(), pl.col("slow") > 0).sort("run", "node", "seconds")
    if not probes.height:
        raise _nothing(recording, "probes of how slow or fast machines are")
    return {str(run): _course(one, recording.against) for (run,), one in probes.group_by("run", maintain_order=True)}


def _course(probes: pl.DataFrame, against: str) -> _Courses:
    slow, seconds = pl.col("slow"), pl.col("seconds")
    own = slow / slow.median().over("node")
    tick = seconds.diff().median().over("node").fill_null(0.0)
    known = probes.with_columns(
        always=slow.median().over("node") / slow.median() if against == "run" else pl.lit(1.0),
        own=own,
        since=seconds - seconds.min(),
        until=seconds.shift(-1).over("node").fill_null(seconds + tick) - seconds.min(),
    ).with_columns(spell=((pl.col("own") > _SLOW).rle_id()).over("node"))
    machines = []
    for one in known.partition_by("node", maintain_order=True):
        spells = one.filter(pl.col("own") > _SLOW).group_by("spell", maintain_order=True)
        rows = spells.agg(pl.col("since").first(), pl.col("until").last(), pl.col("own").mean()).drop("spell").rows()
        machines.append(_Course(float(one["always"][0]), tuple(rows)))
    return _Courses(float(known["until"].max()), tuple(machines))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- bandwidth, nodes


def _buckets(recording: Recording, driven: Sequence[tuple[str, NodeType]], rng: np.random.Generator | None) -> list[Bucket]:
    recorded = _throttled(recording)
    made = []
    for (node, kind), deal in zip(driven, _dealt(len(recorded), len(driven), rng), strict=True):
        found = recorded[deal.machine]
        if found is not None:
            nic = kind.nic_bytes_per_second
            low = nic * found.low_share
            made.append(Bucket((node,), found.seconds * (nic - low), low))
    return made


class _Throttled(NamedTuple):
    """How a machine was throttled."""

    seconds: float  # at the full rate
    low_share: float  # of the full rate, after that


@cache
def _throttled(recording: Recording) -> tuple[_Throttled | None, ...]:
    """Of every run; None where it was not."""
    said = [json.loads(text or "{}") for text in _rows(recording, "runs", "run", "extras").sort("run")["extras"]]
    found = []
    for told in said:
        high, low, held = (told.get(f"bucket_{n}") for n in ("high_bytes_per_second", "low_bytes_per_second", "bytes"))
        found.append(_Throttled(held / (high - low), low / high) if high else None)
    if not any(found):
        raise _nothing(recording, "runs that were throttled")
    return tuple(found)


@cache
def _places(recording: Recording) -> dict[str, Places]:
    """By run, the places of its machines."""
    events = _rows(recording, "node_events", "run", "seconds", "node", "event").sort("seconds", maintain_order=True)
    if not events.height:
        raise _nothing(recording, "events of nodes")
    return {str(r): places(one.drop("run").rows()) for (r,), one in events.group_by("run", maintain_order=True)}


# ------------------------------------------------------------------------------------------------------------ the traces


def _rows(recording: Recording, table: str, *columns: str) -> pl.DataFrame:
    """These columns of a table, of the runs that may be replayed."""
    rows = scan(Path(recording.trace), table).select(*columns).collect()
    kept = [run for run in rows["run"].unique() if fnmatchcase(run, recording.runs)]
    return rows.filter(pl.col("run").is_in(kept))


def _nothing(recording: Recording, what: str) -> ValueError:
    runs = sorted(set(scan(Path(recording.trace), "runs").select("run").collect()["run"]))
    known = ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")
    return ValueError(f"Cannot replay runs {recording.runs!r} of {recording.trace}: no {what}; it has {known or 'none'}.")


_READ: dict[str, Callable[[Recording], Any]] = {
    "compute": _spells,
    "stragglers": _courses,
    "bandwidth": _throttled,
    "nodes": _places,
}
