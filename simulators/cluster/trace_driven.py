"""Trace-driven simulation: a recorded trace drives the conditions of a simulated run.

For one seed, a `Replay` becomes plain conditions: episodes, token buckets, changes of nodes, and a table of compute times.
So the conditions are the same for every tuner, however it divides the run into windows.

One run of the trace, drawn among those that match, drives one simulated run. (Bandwidth is the exception: a recorded run
has one machine there, so every node gets a run of its own.) The machines of the run are assigned to our nodes at random. If
there are more nodes than machines, machines are assigned again, and start at a later time of the recording. With
``deal = "order"`` the first run is used, machines are assigned in order, and the replay starts where the recording starts.

* compute: the n-th mini-batch of a worker takes r times the modelled time of node and workload. r is the recorded time of
  the machine's n-th mini-batch over the median of its run (of its pipeline stage, where the trace has stages), or over its
  own median (``against = "worker"``); only mini-batches of one size are compared. This replaces `jitter`. After the last
  recorded mini-batch the sequence repeats.
* stragglers: a machine is always slower by its own median over the run's median. While it is slower than 1.3 times its own
  median, it is in an episode, slower by the mean of that episode; `jitter` covers smaller variations. An episode lasts from
  a probe to the next, but not through a gap in the recording: then it ends after a usual interval. The replay starts at a
  time drawn for all machines together, and repeats. A trace may record speed instead of slowness.
* bandwidth: the bucket lasts as long at full rate as the recorded one, and throttles to the same share of the full rate.
  The full rate is that of the node's own NIC, the refill rate is the throttled rate. The extras of a run have both rates
  (`bucket_high_bytes_per_second`, `bucket_low_bytes_per_second`), and the bytes above the low rate that were sent at the
  high one (`bucket_bytes`). A machine that was never throttled has none of the three, and no bucket.
* nodes: a machine that joins the recorded cluster takes the place that has been free for the longest time; one that comes
  back takes its own. Our nodes are such places. The replay starts at a time drawn from those at which enough places were
  taken for all nodes (or as many as there ever were), early enough that the recording lasts for the budget, if possible.
  Then nodes leave, fail and join as the machines did. Nodes without a place stay in the cluster; when the recording is over,
  all nodes stay as they are. Machines without events are known by their number (`nodes_watched` in the run's extras). A run
  without events counts as one in which nobody came or went, beside runs with events that have rows in the same other tables.

``all`` is one trace for every role that it has data for. As ``all = "live-run/"``, a recording of the same cluster replays
in order, from its beginning: worker i drives our node i, relative to its own median, and the nodes' events come to our nodes
of the same names.

In order, where a recording names any of our nodes, each of ours gets what was recorded of its name, for every role: workers
that the settings of a run name, machines that were probed, and nodes with events. Machines of other names drive none then,
and a node that was not probed has no episodes. Where all names are others, machines are assigned in their order, in which
n2 is before n10. Workers have the names of nodes that `node_order` in the run's extras gives to their numbers; without it,
those of the setting, in the order of numbers. Where settings have as many workers as were recorded, and name none, and no
number is 0, the lowest drives our first node.

With ``fitted = true`` nothing is replayed: the conditions are draws from distributions that are fitted to the same run of
the trace (`simulators.cluster.fitted_conditions`), to see what the replay is worth.

With ``faster = 60``, a minute of the recording passes in a second: episodes, buckets and changes of nodes come and go sixty
times as fast. So recordings of months fit jobs of minutes, with the same number of events for each machine and recorded
hour. Compute times are ratios and stay.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import jax.numpy as jnp
import msgspec
import numpy as np
import polars as pl
from numpy.typing import NDArray

from simulators.cluster import fitted_conditions
from simulators.cluster.compute_factors import NO_FACTORS, Factors
from simulators.cluster.conditions import Bucket, Conditions, Episode, NodeChange, Replay, ReplayedTrace, check
from simulators.cluster.drawn_losses import drawn_losses
from simulators.cluster.profiles import NodeType
from simulators.cluster.trace_driven_nodes import Places, named_changes, places
from traces.extras import Extras, read_extras
from traces.parts import is_like, scan
from traces.schema import TRACE, assumed_numbers, setting_from, worker_numbers

__all__ = [
    "NoDataError",
    "check_replay",
    "expand_replay",
    "places_of",
    "relative_times",
    "roles",
    "slowness_of",
    "throttles",
]

_SLOW = 1.3
"""A machine whose time is above this multiple of its own median is in an episode of slowness."""

_GAP = 10.0  # times as long as a machine's median interval between two probes, from which nothing was recorded between them

_FOR_EVER = 1e12  # seconds

_STREAM = 7
"""Number of this module's stream of random numbers; other modules use the streams before it."""

_Floats = NDArray[np.float64]


def check_replay(conditions: Conditions) -> None:
    """Raise ValueError where a trace cannot be read, or has no data for its role."""
    for role, recording in roles(conditions.replay or Replay()).items():
        try:
            _READERS[role](recording)
        except ValueError as error:
            raise ValueError(f"replay.{role}: {error}") from None


def roles(replay: Replay) -> dict[str, ReplayedTrace]:
    """The trace of each role. Raises ValueError where `all` has no data for any role."""
    given = replay.traces()
    if (everything := given.pop("all", None)) is None:
        return given
    found: dict[str, ReplayedTrace] = {}
    for role in _READERS:
        # Compute times have the slowness of machines in them already.
        if role in given or (role == "stragglers" and "compute" in given | found):
            continue
        try:
            _READERS[role](everything)
        except NoDataError:
            continue
        found[role] = everything
    if not found:
        raise ValueError(f"replay.all: Cannot replay {everything.trace}: it has no data for any of {', '.join(_READERS)}.")
    return {role: (given | found)[role] for role in _READERS if role in given | found}


class NoDataError(ValueError):
    """A trace has no data for a role."""


def expand_replay(
    conditions: Conditions, nodes: tuple[tuple[str, NodeType], ...], budget_seconds: float, seed: int
) -> tuple[Conditions, Factors]:
    """The conditions of the run of that seed with its losses drawn and its replay expanded, and the factors of its compute
    times.

    Raises ValueError where a trace cannot be read, has no data for its role, or contradicts the other conditions.
    """
    if conditions.losses:
        changes = drawn_losses(conditions.losses, nodes, budget_seconds, seed)
        conditions = msgspec.structs.replace(conditions, losses=(), nodes=tuple(changes))
        check(conditions, tuple(n for n, _ in nodes))
    replay = conditions.replay
    if replay is None:
        return conditions, NO_FACTORS
    names, factors = tuple(n for n, _ in nodes), NO_FACTORS
    episodes, buckets, moves = list(conditions.episodes), list(conditions.buckets), list(conditions.nodes)
    for role, recording in roles(replay).items():
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
            moved = _changes(recording, driven, budget_seconds, rng)
            moves = sorted([*moves, *moved], key=lambda c: c.seconds)
    plain = {"episodes": tuple(episodes), "buckets": tuple(buckets), "nodes": tuple(moves), "replay": None}
    made = msgspec.structs.replace(conditions, **plain)
    check(made, names)
    return made, factors


# ---------------------------------------------------------------------------------------------------------- assignment


class _Assignment(NamedTuple):
    """The recorded machine that drives one of our nodes."""

    machine: int  # number of the recorded machine
    offset: float  # how much later its replay starts than that of the others, as a share of the recording


def _assign(recorded: int, ours: int, rng: np.random.Generator | None) -> list[_Assignment]:
    """A recorded machine for each of our nodes."""
    order = np.arange(recorded) if rng is None else rng.permutation(recorded)
    rounds = -(-ours // recorded)
    return [_Assignment(int(order[i % recorded]), (i // recorded) / rounds) for i in range(ours)]


def _pick_run(runs: dict[str, Any], rng: np.random.Generator | None) -> Any:
    """One run of a trace: drawn, or the first without `rng`."""
    return runs[_pick_name(runs, rng)]


def _pick_name(runs: Iterable[str], rng: np.random.Generator | None) -> str:
    names = sorted(runs)
    return names[0 if rng is None else int(rng.integers(len(names)))]


def _in_order(recorded: Sequence[str], ours: Sequence[str]) -> list[_Assignment | None]:
    """For each of our nodes the recorded machine of its name; or, where others were recorded, machines as their names go."""
    if not set(recorded).isdisjoint(ours):
        return [_Assignment(recorded.index(name), 0.0) if name in recorded else None for name in ours]
    order = sorted(range(len(recorded)), key=lambda i: _natural(recorded[i]))
    return [_Assignment(order[machine], offset) for machine, offset in _assign(len(recorded), len(ours), None)]


def _natural(name: str) -> list[tuple[int, str]]:
    """A key for the order in which n2 is before n10."""
    parts = re.split(r"([0-9]+)", name)
    return [(int(part), "") if i % 2 else (0, part) for i, part in enumerate(parts)]


# --------------------------------------------------------------------------------------------------------- compute times


def _factors(
    recording: ReplayedTrace, names: Sequence[str], driven: Sequence[str], rng: np.random.Generator | None
) -> Factors:
    """The factors of the compute times of `driven`; a node with count 0 is not driven."""
    recorded: tuple[_WorkerTimes, ...] = _pick_run(relative_times(recording), rng)
    if recording.fitted and rng is not None:
        drawn = fitted_conditions.fitted_factors([one.factors for one in recorded], len(driven), rng)
        table = np.ones((len(names), len(drawn[0])))
        table[[names.index(node) for node in driven]] = drawn
        return Factors(jnp.asarray(table), np.isin(names, driven).astype(np.int32) * np.int32(len(drawn[0])))
    most = max(len(one.factors) for one in recorded)
    start = 0.0 if rng is None else rng.random()
    values, counts = np.ones((len(names), most)), np.zeros(len(names), np.int32)
    assignments = _assign_by_number(recorded, driven) if rng is None else _assign(len(recorded), len(driven), rng)
    for node, assigned in zip(driven, assignments, strict=True):
        times, at = recorded[assigned.machine].factors, names.index(node)
        counts[at] = len(times)
        values[at, : len(times)] = np.roll(times, -int((start + assigned.offset) % 1.0 * len(times)))
    return Factors(jnp.asarray(values), counts)


class _WorkerTimes(NamedTuple):
    """The compute times of a recorded worker's mini-batches in order, over the usual one."""

    number: int  # of the worker in the recording
    factors: _Floats
    node: str = ""  # its machine, where the recording names the machines of all workers


def _assign_by_number(recorded: Sequence[_WorkerTimes], ours: Sequence[str]) -> list[_Assignment]:
    """In order: our node gets the worker of its name, where the recording names any of ours; else our i-th node gets worker
    i where the recording's numbers are those of a cluster like ours, else the i-th worker. Nodes that are left get workers
    again, at a later time of the recording."""
    numbers = [one.number for one in recorded]
    if not {one.node for one in recorded}.isdisjoint(ours):
        numbers = [ours.index(one.node) if one.node in ours else -1 for one in recorded]
    elif max(numbers) >= len(ours):
        numbers = list(range(len(recorded)))
    left = [i for i in range(len(ours)) if i not in numbers]
    rounds = 1 + -(-len(left) // len(recorded))
    again = {i: _Assignment(k % len(recorded), (1 + k // len(recorded)) / rounds) for k, i in enumerate(left)}
    return [again[i] if i in again else _Assignment(numbers.index(i), 0.0) for i in range(len(ours))]


@cache
def relative_times(recording: ReplayedTrace) -> dict[str, tuple[_WorkerTimes, ...]]:
    """By run, the times of its workers. The usual time of a run that changes its batch size is that of the same size."""
    timed = _replayed_rows(recording, "iterations", "run", "worker", "clock", "seconds", "compute_seconds")
    timed = timed.filter(pl.col("compute_seconds") > 0)
    if not timed.height:
        raise _no_data(recording, "iterations with compute times")
    peers = ["run", "batch_size", "worker"] if recording.against == "worker" else ["run", "batch_size", "stage"]
    timed = timed.join(_stages(recording), on=["run", "worker"], how="left", nulls_equal=True)
    timed = _with_batch_size(timed, recording)
    took = pl.col("compute_seconds")
    timed = timed.sort("run", "worker", "seconds", "clock").with_columns(took / took.median().over(peers))
    found, named, orders = {}, _machines_of_workers(recording), _node_orders(recording)
    nameless = _workers_without_names(recording)
    for (run,), one in timed.group_by("run", maintain_order=True):
        workers = one.partition_by("worker", maintain_order=True)
        numbers = [int(w["worker"][0]) for w in workers]
        if order := orders.get(str(run)):
            names = [order[number] if number < len(order) else "" for number in numbers]
        else:
            told = named.get(str(run), ())
            names = [*told] if len(told) == len(workers) else [""] * len(workers)
            if nameless.get(str(run)) == len(workers) and numbers[0]:  # of workers, from 1 on: not of nodes
                numbers = [*range(len(workers))]
        found[str(run)] = tuple(
            _WorkerTimes(number, w["compute_seconds"].to_numpy(), name)
            for number, w, name in zip(numbers, workers, names, strict=True)
        )
    return found


def _machines_of_workers(recording: ReplayedTrace) -> dict[str, tuple[str, ...]]:
    """By run, the machines of its workers in the order of their numbers, where the settings of the run name the same ones,
    or some of them in the same order."""
    named: dict[str, set[tuple[str, ...]]] = {}
    for run, text in _replayed_rows(recording, "settings", "run", "setting").unique().iter_rows():
        named.setdefault(str(run), set()).add(setting_from(text).workers if text else ())
    most = {run: max(found, key=len) for run, found in named.items()}
    return {run: most[run] for run, found in named.items() if all(_in_its_order(part, most[run]) for part in found)}


def _in_its_order(part: Sequence[str], whole: Sequence[str]) -> bool:
    """Whether `part` is some of `whole`, in the same order; an empty one, which names none, is not."""
    return bool(part) and [name for name in whole if name in part] == [*part]


def _workers_without_names(recording: ReplayedTrace) -> dict[str, int]:
    """By run, the most workers of its settings, where none of these names its nodes."""
    settings = _replayed_rows(recording, "settings", "run", "workers", "setting")
    each = settings.group_by("run").agg(pl.col("workers").max(), named=pl.col("setting").is_not_null().any())
    return dict(each.filter(~pl.col("named")).drop_nulls("workers").select("run", "workers").iter_rows())


def _with_batch_size(timed: pl.DataFrame, recording: ReplayedTrace) -> pl.DataFrame:
    """The iterations with the size of their mini-batches by the setting in force, which may be a worker's own; null where
    the time of an iteration is not recorded."""
    columns = ("run", "seconds", "batch_size", "options", "setting")
    settings = _replayed_rows(recording, "settings", *columns).sort("seconds", maintain_order=True).with_row_index("given")
    sizes = {int(row["given"]): found for row in settings.to_dicts() if (found := _sizes_of_workers(row))}
    numbers = _numbers_of_workers(recording, settings)
    settings = settings.select("run", "seconds", "batch_size", "given")
    known = timed.filter(pl.col("seconds").is_not_null()).sort("seconds", maintain_order=True)
    if not known.height:
        return timed.with_columns(batch_size=pl.lit(None, pl.Int64))
    unknown = timed.filter(pl.col("seconds").is_null()).with_columns(batch_size=pl.lit(None, pl.Int64))
    known = known.join_asof(settings, on="seconds", by="run", check_sortedness=False)
    own = []
    for (given,), one in known.filter(pl.col("given").is_in(list(sizes))).group_by("given"):
        told = sizes[int(given)]
        workers = numbers.get(int(given)) or assumed_numbers(one["worker"].unique(), len(told))
        own += [(given, worker, size) for worker, size in zip(workers, told, strict=False)]
    schema = {"given": pl.UInt32, "worker": pl.Int32, "own": pl.Int64}
    known = known.join(pl.DataFrame(own, schema, orient="row"), on=["given", "worker"], how="left", maintain_order="left")
    known = known.with_columns(pl.coalesce("own", "batch_size").alias("batch_size")).drop("given", "own")
    return pl.concat([known, unknown])


def _sizes_of_workers(setting: Mapping[str, Any]) -> tuple[int, ...]:
    """Samples in a mini-batch of each worker, where a row of `settings` tells them; else ()."""
    if setting["setting"] and (loads := setting_from(setting["setting"]).loads):
        return tuple(sum(load) for load in loads)
    given = json.loads(setting["options"] or "{}").get("batch_sizes")
    told = isinstance(given, list) and all(isinstance(size, int) for size in given)
    return tuple(given) if told else ()


def _numbers_of_workers(recording: ReplayedTrace, settings: pl.DataFrame) -> dict[int, tuple[int, ...]]:
    """By number of a setting, those of its workers in its own order, where the extras of its run tell them."""
    orders = _node_orders(recording)
    known = [row for row in settings.to_dicts() if row["setting"] and orders.get(row["run"])]
    return {row["given"]: worker_numbers(setting_from(row["setting"]).workers, orders[row["run"]]) for row in known}


def _stages(recording: ReplayedTrace) -> pl.DataFrame:
    """The pipeline stage of each worker, for runs that have stages."""
    rows: list[tuple[str, int, int]] = []
    for run, text in _replayed_rows(recording, "settings", "run", "options").iter_rows():
        stages = json.loads(text or "{}").get("stage_of_worker", {})
        rows += [(run, int(worker), int(stage)) for worker, stage in stages.items()]
    schema = {"run": pl.String, "worker": pl.Int32, "stage": pl.Int64}
    return pl.DataFrame(rows, schema=schema, orient="row").unique()


# ------------------------------------------------------------------------------------------------------------ stragglers


class _MachineSlowness(NamedTuple):
    """How slow a recorded machine was."""

    node: str  # its name
    always: float  # its median over the run's median
    episodes: tuple[tuple[float, float, float], ...]  # start and end, seconds since the recording began, and factor


class _RunSlowness(NamedTuple):
    """How slow the machines of a recorded run were."""

    seconds: float  # length of the recording
    machines: tuple[_MachineSlowness, ...]


def _episodes(
    recording: ReplayedTrace, driven: Sequence[str], budget_seconds: float, rng: np.random.Generator | None
) -> list[Episode]:
    """Slow-downs of the `driven` nodes, each as a recorded machine had them, in a run of `budget_seconds`."""
    run: _RunSlowness = _pick_run(slowness_of(recording), rng)
    if recording.fitted and rng is not None:
        always = [machine.always for machine in run.machines]
        spells = [episode for machine in run.machines for episode in machine.episodes]
        return fitted_conditions.fitted_episodes(always, spells, run.seconds, driven, budget_seconds, rng, recording.faster)
    first, faster = 0.0 if rng is None else rng.random(), recording.faster
    made: list[Episode] = []
    recorded = [machine.node for machine in run.machines]
    dealt = _in_order(recorded, driven) if rng is None else _assign(len(recorded), len(driven), rng)
    for node, assigned in zip(driven, dealt, strict=True):
        if assigned is None:
            continue
        machine, begin = run.machines[assigned.machine], (first + assigned.offset) % 1.0 * run.seconds
        if machine.always != 1.0:
            made.append(Episode(node, 0.0, min(budget_seconds, _FOR_EVER), machine.always))
        for start, end, factor in machine.episodes:
            # The replay starts inside this episode: the rest of it comes once, in addition to the repeated ones.
            if start < begin < end:
                made.append(Episode(node, 0.0, (end - begin) / faster, factor))
            again = (start - begin) % run.seconds
            made.append(Episode(node, again / faster, (end - start) / faster, factor, run.seconds / faster))
    return [e for e in made if e.start_seconds < budget_seconds]


@cache
def slowness_of(recording: ReplayedTrace) -> dict[str, _RunSlowness]:
    """By run, how slow each machine was."""
    columns = ("run", "node", "seconds", "relative_seconds", "relative_speed")
    slowness = pl.coalesce("relative_seconds", 1.0 / pl.col("relative_speed"))
    probes = _replayed_rows(recording, "probes", *columns).with_columns(slow=slowness)
    probes = probes.filter(pl.col("slow").is_finite(), pl.col("slow") > 0).sort("run", "node", "seconds")
    if not probes.height:
        raise _no_data(recording, "probes of how slow or fast machines are")
    by_run = probes.group_by("run", maintain_order=True)
    return {str(run): _run_slowness(one, recording.against) for (run,), one in by_run}


def _run_slowness(probes: pl.DataFrame, against: str) -> _RunSlowness:
    slow, seconds = pl.col("slow"), pl.col("seconds")
    own = slow / slow.median().over("node")
    tick = seconds.diff().median().over("node").fill_null(0.0)
    # The last interval of a machine that was probed far more rarely than others must not make the whole recording longer.
    usual = seconds.diff().over("node").median().fill_null(0.0)
    last = pl.when(tick > _GAP * usual).then(usual).otherwise(tick)
    apart = (seconds.shift(-1) - seconds).over("node").fill_null(last)
    known = probes.with_columns(
        always=slow.median().over("node") / slow.median() if against == "run" else pl.lit(1.0),
        own=own,
        since=seconds - seconds.min(),
        until=pl.when(apart > _GAP * tick).then(seconds + tick).otherwise(seconds + apart) - seconds.min(),
    ).with_columns(spell=((pl.col("own") > _SLOW).rle_id()).over("node"))
    machines = []
    for one in known.partition_by("node", maintain_order=True):
        spells = one.filter(pl.col("own") > _SLOW).group_by("spell", maintain_order=True)
        rows = spells.agg(pl.col("since").first(), pl.col("until").last(), pl.col("own").mean()).drop("spell").rows()
        machines.append(_MachineSlowness(str(one["node"][0]), float(one["always"][0]), tuple(rows)))
    return _RunSlowness(float(known["until"].max()), tuple(machines))  # type: ignore[arg-type]


# ------------------------------------------------------------------------------------------------------- bandwidth, nodes


def _buckets(
    recording: ReplayedTrace, driven: Sequence[tuple[str, NodeType]], rng: np.random.Generator | None
) -> list[Bucket]:
    recorded = throttles(recording)
    dealt = [recorded[assigned.machine] for assigned in _assign(len(recorded), len(driven), rng)]
    if recording.fitted and rng is not None:
        dealt = _fitted_throttles(recorded, len(driven), rng)
    made = []
    for (node, kind), found in zip(driven, dealt, strict=True):
        if found is not None:
            nic = kind.nic_bytes_per_second
            low = nic * found.low_share
            made.append(Bucket((node,), found.seconds / recording.faster * (nic - low), low))
    return made


class _Throttle(NamedTuple):
    """How a machine was throttled."""

    seconds: float  # at the full rate
    low_share: float  # the rate after that, as a share of the full rate


def _fitted_throttles(recorded: Sequence[_Throttle | None], count: int, rng: np.random.Generator) -> list[_Throttle | None]:
    """Each node is throttled with the recorded share, after a time and to a rate of its own."""
    known = [one for one in recorded if one is not None]
    throttled = rng.random(count) < len(known) / len(recorded)
    seconds = fitted_conditions.lognormal([one.seconds for one in known], count, rng)
    low = np.minimum(fitted_conditions.lognormal([one.low_share for one in known], count, rng), 1.0)
    return [_Throttle(float(s), float(x)) if hit else None for hit, s, x in zip(throttled, seconds, low, strict=True)]


@cache
def throttles(recording: ReplayedTrace) -> tuple[_Throttle | None, ...]:
    """The throttling of each run; None for a run that was not throttled."""
    found = [_throttle(run, known) for run, known in sorted(_extras(recording).items())]
    if not any(found):
        raise _no_data(recording, f"runs that were throttled, whose extras have {', '.join(_BUCKET)}")
    return tuple(found)


def _throttle(run: str, known: Extras) -> _Throttle | None:
    high, low, held = (getattr(known, name) for name in _BUCKET)
    if high is None and low is None and held is None:
        return None
    if high is None or low is None or held is None or not (0 < low < high and held >= 0):
        said = ", ".join(f"{name} {getattr(known, name)}" for name in _BUCKET)
        raise ValueError(
            f"Cannot use the token bucket of run {run!r}, with {said}: give all three, the low rate above 0 and below the "
            "high one, and the bytes above the low rate that were sent at the high one; or none, where it was not throttled."
        )
    return _Throttle(held / (high - low), low / high)


def _changes(
    recording: ReplayedTrace, driven: Sequence[str], budget_seconds: float, rng: np.random.Generator | None
) -> list[NodeChange]:
    found: Places = _pick_run(by_run := places_of(recording), rng)
    if rng is None and (named := _as_named(recording, _pick_name(by_run, None), driven)) is not None:
        return named
    if recording.fitted and rng is not None:
        return fitted_conditions.fitted_changes(found.losses(), driven, budget_seconds, rng, recording.faster)
    return found.changes(driven, budget_seconds, rng, recording.faster)


@cache
def places_of(recording: ReplayedTrace) -> dict[str, Places]:
    """By run, the places of its machines."""
    events = _node_events(recording)
    if not events.height:
        raise _no_data(recording, "events of nodes")
    extras = _extras(recording)
    seen = {str(run): one.drop("run").rows() for (run,), one in events.group_by("run", maintain_order=True)}
    calm: dict[str, list[Any]] = {run: [] for run in _runs_like(recording, set(seen))}
    return {
        run: places(rows, known.nodes_watched if (known := extras.get(run)) else 0) for run, rows in (seen | calm).items()
    }


def _runs_like(recording: ReplayedTrace, some: set[str]) -> list[str]:
    """The other runs that may be replayed, and were recorded like any of `some`: with rows in the same other tables."""
    tables: dict[str, set[str]] = {run: set() for run in _replayed_rows(recording, "runs", "run")["run"]}
    for table in TRACE.keys() - {"runs", "node_events", "reconfigurations"}:
        for run in scan(Path(recording.trace), table).select(pl.col("run").unique()).collect()["run"]:
            tables.get(run, set()).add(table)
    like = {frozenset(tables.get(run, ())) for run in some}
    return [run for run, found in tables.items() if run not in some and found in like]


def _as_named(recording: ReplayedTrace, run: str, driven: Sequence[str]) -> list[NodeChange] | None:
    """The changes of our nodes in a recorded run that names any of them; None for any other."""
    rows = _node_events(recording).filter(run=run).select("seconds", "node", "event").rows()
    ours = [row for row in rows if row[1] in driven]
    return named_changes(ours, recording.faster) if ours or not rows else None


def _node_events(recording: ReplayedTrace) -> pl.DataFrame:
    return _replayed_rows(recording, "node_events", "run", "seconds", "node", "event").sort("seconds", maintain_order=True)


# ------------------------------------------------------------------------------------------------------------ the traces


def _replayed_rows(recording: ReplayedTrace, table: str, *columns: str) -> pl.DataFrame:
    """These columns of a table, for the runs that may be replayed."""
    rows = scan(Path(recording.trace), table).select(*columns).collect()
    kept = [run for run in rows["run"].unique() if is_like(run, recording.runs)]
    return rows.filter(pl.col("run").is_in(kept))


_BUCKET = tuple(name for name in Extras.__struct_fields__ if name.startswith("bucket_"))


def _node_orders(recording: ReplayedTrace) -> dict[str, list[str]]:
    """By run, the names of the nodes that workers are numbered by; [] where it is not known."""
    return {run: told.node_order for run, told in _extras(recording).items()}


def _extras(recording: ReplayedTrace) -> dict[str, Extras]:
    """The extras of the runs that may be replayed. Raises ValueError, naming run and key, for what they cannot be."""
    rows = _replayed_rows(recording, "runs", "run", "extras").iter_rows()
    return {str(run): read_extras(str(run), text) for run, text in rows}


def _no_data(recording: ReplayedTrace, what: str) -> NoDataError:
    """The error for runs without the data that a role needs."""
    runs = sorted(set(scan(Path(recording.trace), "runs").select("run").collect()["run"]))
    known = ", ".join(runs[:8]) + (", ..." if len(runs) > 8 else "")
    return NoDataError(f"Cannot replay runs {recording.runs!r} of {recording.trace}: no {what}; it has {known or 'none'}.")


_READERS: dict[str, Callable[[ReplayedTrace], Any]] = {
    "compute": relative_times,
    "stragglers": slowness_of,
    "bandwidth": throttles,
    "nodes": places_of,
}
