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
from itertools import accumulate, pairwise
from statistics import median, median_low
from typing import Annotated, Any, NamedTuple

import msgspec
import numpy as np
import polars as pl
from scipy.stats import t

from simulators.calibration.model import Row, WorkerTime, named, on_machines, with_speeds
from simulators.calibration.selection import EVERYTHING, Selection
from simulators.calibration.staleness import Effort, efforts
from simulators.calibration.stragglers import ERROR_OF_MEDIAN, Sleeper, sleepers
from simulators.cluster.conditions import Sleeps
from traces.schema import setting_from
from tuners.actions import Setting
from tuners.settings import OF_CACHES, OF_CHECKPOINTS, OF_PULLS, OF_QUORUM, OF_REPLICAS, POLICIES

__all__ = ["Noise", "Recording", "joined", "read_tables", "with_links_of", "with_snapshots"]

_SYNCHRONOUS = ("bsp",)
_WARM_UP = 0.2  # share at the start of a segment that is left out, while workers fall out of step
_FEW_SNAPSHOTS = 5  # within a row's pushes, up to which it matters how many they were
_FEWEST = 3  # a segment with fewer cycles per worker gives no row
_STEADY = 3  # mini-batches of every worker, over which the mean time of a step hardly varies
_LONG = 100.0  # seconds of a cycle from which it is asked whether these are milliseconds; real ones take up to a minute
_OTHER_UNITS = 30.0  # a part of a cycle over the cycle, from which their units must differ
_OVERLAP = 1.1  # parts of a cycle over the cycle, from which they do not fit into it
_FAR = 4.0  # a time beyond so many standard deviations of the logarithm is a sleep, not jitter
_RARE = 0.002  # a smaller share of such times is ignored
_NO_RATES = {"trimtuner-tf-ps": "its counts of iterations are not those that took its seconds"}
_AWAKE = Sleeper(0.0, 0.0)
_NAMED = 4  # workers or settings that a note names, at most
_ROUNDING = 1e-6  # a smaller difference of shares is none
_SILENT = 3.0  # times its longest time between two pushes, for which a worker is silent before its first or after its last
_ENDED = 0.05  # share of a segment in which not all workers push, in its middle or at its end, that is left out
_FEW = 5  # events of which a rate is told: of fewer, its standard error is half of it or more (Poisson)
_UNSTEADY = 0.1  # difference of the logarithms of early and late cycles, from which it is told
_SLOW_LINK = 1.6  # times as long as usual: transfers of a worker on alike links took up to 1.5 times as long (`traces/data`)
_BY_CHANCE = 0.01  # chance that any setting of a recording is told to be so although its cycles are steady
_NOT_IN_ROWS: dict[str, Any] = {
    "local_steps": 1,
    "node_steps": [],
    **OF_PULLS,
    **OF_QUORUM,
    **OF_CHECKPOINTS,
    **OF_CACHES,
    **OF_REPLICAS,
}
"""Fields of a setting that change its times, yet not a row's; and their values without such a change."""
_KNOWN = {*Setting.__dataclass_fields__, "batch_sizes", "servers_share_nodes"}  # fields, and options that are read
_PARTS = ("compute_seconds", "pull_seconds", "push_seconds", "wait_seconds")


class _Node(msgspec.Struct):
    """What calibration reads of a node in a run's extras."""

    nic_bytes_per_second: Annotated[float, msgspec.Meta(gt=0)] = 1.0
    link_delay_seconds: Annotated[float, msgspec.Meta(ge=0)] = 0.0


class _Extras(msgspec.Struct):
    """What calibration reads of a run's extras, and of which type; other keys may hold anything."""

    nodes: dict[str, _Node] = {}
    total_batch_size: Annotated[float, msgspec.Meta(ge=0)] = 0.0
    n_stragglers: float | None = None
    straggler_delay_ms: float | None = None


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
        raise ValueError(f"Cannot calibrate to {source}: {_NO_RATES[source]}.")
    caveats: list[str] = []
    tables = wanted.of_runs(tables)
    settings, left_out = _settings(tables, caveats)
    iterations, progress = tables.get("iterations"), tables.get("progress")
    noise, slow = None, dict[tuple[str, int], Sleeper]()
    if iterations is not None and iterations.height:
        timed = _outside_changes(_with_moments(iterations, caveats), tables.get("reconfigurations"))
        segments = _segments(timed, settings, left_out, wanted, caveats, {*iterations["run"]})
        slow = sleepers(segments, [_batch_sizes(setting) for setting, _ in segments])
        told, contradict = on_machines(list(_rows_of_iterations(segments, slow)))
        if links := _slow_links(segments, told):
            caveats.append(
                f"pulls and pushes of some workers take longer than those beside them: {_first_of(links)}; if their links "
                "are slower, give the rates of all links in the runs' extras, and the names of nodes in the column setting: "
                "otherwise all count as alike, and predictions do not know which workers are slow"
            )
        rows, noise = list(with_speeds(told)), _noise(segments, slow)
        if contradict:
            caveats.append(
                f"{len(contradict)} runs contradict each other in how fast machines of one name or number are: "
                f"{_first_of(contradict)}; each run is taken to have machines of its own, relative to its median one"
            )
    else:
        rates = pl.DataFrame() if progress is None else wanted.among(_rates(progress, settings, left_out))
        alone = settings.filter(~pl.col("run").is_duplicated(), ~pl.col("run").is_in(left_out["run"].implode()))
        rows = list(_rows_of_progress(rates)) if rates.height else list(_rows_of_runs(tables, wanted.among(alone)))
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
        f"workers that take longer by a time of their own, not a factor: {_first_of(each)}; predictions have them, "
        "and a scenario has them as [conditions.stragglers]"
    )


def _first_of(told: Sequence[str]) -> str:
    """The first of what a note names, and how many more there are."""
    more = f", and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return ", ".join(told[:_NAMED]) + more


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
    """Of the parts of a row's cycle that were recorded."""
    return float(np.nansum([row.compute_seconds, row.pull_seconds, row.push_seconds]))


def joined(recordings: Sequence[tuple[str, Recording]]) -> Recording:
    """Recordings and their names as one. A name precedes those of its runs, so that runs of the same name stay apart.

    Links are relative to the usual link of the first. The noise of mini-batches is that of the recording with most of them.
    Rows that are in several selections of one trace count once.
    """
    every = [recording for _, recording in recordings]
    first = every[0]
    rows = [named(name, row) for name, recording in recordings for row in with_links_of(recording, first).rows]
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


def _settings(tables: Mapping[str, pl.DataFrame], caveats: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The settings of the runs, with each run's workload, without settings that the simulator cannot represent; and these,
    which end the settings before them."""
    extras = pl.col("extras").fill_null("{}")
    runs = tables["runs"].select("run", "workload", "extras").with_columns(extras)
    _check_extras(runs)
    slowed = [r["run"] for r in runs.to_dicts() if _unknown_stragglers(json.loads(r["extras"]))]
    if slowed:
        caveats.append(
            f"{len(slowed)} runs with stragglers are left out: the trace does not say by how much their links were delayed, "
            "or when"
        )
    given = tables["settings"].unique(maintain_order=True).with_row_index("given")
    made = given.filter(pl.col("workers") >= 1, pl.col("servers") >= 1)
    if made.height < given.height:
        missing = given.height - made.height
        caveats.append(f"{missing} settings without workers and servers, or without their numbers, are left out")
    strange = made.filter(~pl.col("policy").is_in(POLICIES))["policy"]
    if len(strange):
        caveats.append(
            f"{len(strange)} settings of the policy {', '.join(sorted(set(strange)))} are left out: it cannot be simulated; "
            f"write bsp where all workers wait for each other, asp where none waits, or {', '.join(POLICIES[2:])}, "
            "if it is one of these"
        )
        made = made.filter(~pl.col("policy").fill_null("asp").is_in(strange.implode()))
    made = _modelled(made, caveats)
    made = made.filter(~pl.col("run").is_in(slowed)).join(runs, on="run", how="left", maintain_order="left")
    settings = made.to_dicts()
    nominal = [_nics(setting) for setting in settings]
    rates = [rate for nics in nominal for rate in nics.values()]
    usual = median(rates) if rates else None
    differ = sum(_shared(s) and not {*nics.values()} <= {usual} for s, nics in zip(settings, nominal, strict=True))
    if differ:
        caveats.append(
            f"{differ} settings have servers on workers' machines: all links are assumed to be the usual one there"
        )
    if unused := sum(_links_unused(s, nics, usual) for s, nics in zip(settings, nominal, strict=True)):
        caveats.append(
            f"in {unused} settings the links of nodes in the run's extras are not used, and all count as alike: the column "
            'setting does not name nodes that extras has; write {"workers": ["n0", "n1"], "servers": ["n2"]}'
        )
    if unnamed := made["policy"].null_count():
        caveats.append(f"{unnamed} settings have no policy: they are taken for asp")
    if unsized := sum(not _batch_size(s) for s in settings):
        caveats.append(f"{unsized} settings have no batch size: a mini-batch counts as one sample there")
    if inferred := sum(_told_shares(s) is None and bool(_server_cpus(s)) for s in settings):
        caveats.append(
            f"{inferred} settings do not tell shares of the model: servers are taken to have them as they use processors"
        )
    left_out = given.filter(~pl.col("given").is_in(made["given"].implode()))
    made = made.sort("run", "branch", "seconds", maintain_order=True).with_row_index("segment")
    return made.with_columns(usual_nic=pl.lit(usual, pl.Float64)), left_out


def _moments(settings: pl.DataFrame, left_out: pl.DataFrame, **more: str) -> pl.DataFrame:
    """When settings began, and those that are `left_out`, whose segment is null; `more` are columns by their new names."""
    names = ("run", "branch", "seconds", "given")
    both = [
        settings.select(*names, "segment", **more),
        left_out.select(*names, pl.lit(None, pl.UInt32).alias("segment"), **more),
    ]
    return pl.concat(both).sort("seconds", "given").drop("given")


def _modelled(settings: pl.DataFrame, caveats: list[str]) -> pl.DataFrame:
    """The settings in which nothing takes time that a `Row` does not tell; and notes of what is not used of the others."""
    told = [_told(s) for s in settings.to_dicts()]
    strange = [{name for name, plain in _NOT_IN_ROWS.items() if s.get(name, plain) != plain} for s in told]
    for name in _NOT_IN_ROWS:
        if count := sum(name in found for found in strange):
            caveats.append(f"{count} settings with {name} are left out: calibration does not know what it costs")
    kept = [s for s, found in zip(told, strange, strict=True) if not found]
    unknown = sorted({name for s in kept for name in s if name not in _KNOWN})
    vary = [name for name in unknown if len({json.dumps(s.get(name)) for s in kept}) > 1]
    if vary:
        caveats.append(f"options that differ between settings are not used: {', '.join(vary)}")
    return settings.filter(pl.Series([not found for found in strange], dtype=pl.Boolean))


def _told(setting: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a setting, its own ones and those of its whole setting, with the fields of the latter."""
    whole = json.loads(setting["setting"]) if setting["setting"] else {}
    return {**json.loads(setting["options"] or "{}"), **dict(whole.get("options", ())), **whole}


def _check_extras(runs: pl.DataFrame) -> None:
    """Raise ValueError, naming run and key, for extras that calibration cannot read."""
    for run, text in runs.select("run", "extras").iter_rows():
        try:
            msgspec.json.decode(text, type=_Extras)
        except msgspec.MsgspecError as error:
            raise ValueError(f"Cannot read the extras of run {run!r}: {error}; correct it, or leave it out.") from None


def _row(setting: Mapping[str, Any], cycle_seconds: float, **measured: Any) -> Row:
    extras = json.loads(setting["extras"] or "{}")
    whole = json.loads(setting["setting"]) if setting["setting"] else {}
    shared, nics = _shared(setting), _nics(setting)
    names = [*whole.get("workers", ()), *whole.get("servers", ())]
    delays = _delays(extras, names, setting["workers"])
    nics_differ = not shared and nics.keys() >= set(names) and not set(nics.values()) <= {setting["usual_nic"]}
    return Row(
        run=setting["run"],
        workload=setting["workload"] or "unnamed",
        workers=setting["workers"],
        servers=setting["servers"],
        cycle_seconds=cycle_seconds,
        batch_size=max(_batch_size(setting), 1),
        batch_sizes=sizes if len({*(sizes := _batch_sizes(setting))}) > 1 else (),
        intra_threads=setting["intra_threads"] or 0,
        inter_threads=setting["inter_threads"] or 0,
        transfer_bits=setting["transfer_bits"] or 32,
        policy=setting["policy"] or "asp",
        staleness=setting["staleness"] or 0,
        shared=shared,
        nics=tuple(nics[n] / setting["usual_nic"] for n in names) if nics_differ else (),
        delays=delays if any(delays) else (),
        model_shares=_model_shares(setting),
        **measured,
    )


def _batch_size(setting: Mapping[str, Any]) -> int:
    """Samples in a mini-batch of one worker, the mean where these differ; 0: not recorded."""
    if sizes := _batch_sizes(setting):
        return max(round(sum(sizes) / len(sizes)), 1)
    total = int(json.loads(setting["extras"] or "{}").get("total_batch_size", 0))
    return int(setting["batch_size"] or max(round(total / setting["workers"]), min(total, 1)))


def _batch_sizes(setting: Mapping[str, Any]) -> tuple[int, ...]:
    """Samples in a mini-batch of each worker, in the order of their numbers; () if the setting does not tell them.

    They are the loads of a whole setting, or in its options: {"batch_sizes": [48, 16]}. Raises ValueError for others.
    """
    given: Any = json.loads(setting["options"] or "{}").get("batch_sizes")
    if setting["setting"]:
        given = [sum(load) for load in setting_from(setting["setting"]).loads] or given
    if given is None:
        return ()
    whole = isinstance(given, list) and all(isinstance(x, int) and not isinstance(x, bool) and x > 0 for x in given)
    if not whole or len(given) != setting["workers"]:
        raise ValueError(
            f"Cannot read the batch sizes {given!r} of run {setting['run']!r}: give {setting['workers']} whole numbers, one "
            "per worker, each 1 or more."
        )
    return tuple(given)


def _shared(setting: Mapping[str, Any]) -> bool:
    """Whether servers run on the workers' machines."""
    whole = json.loads(setting["setting"]) if setting["setting"] else {}
    options = json.loads(setting["options"] or "{}")
    return bool(options.get("servers_share_nodes") or set(whole.get("workers", ())) & set(whole.get("servers", ())))


def _model_shares(setting: Mapping[str, Any]) -> tuple[float, ...]:
    """The part of the model that each server has; () if these are equal, or not known.

    What is not told is taken to be as the servers use their processors. Raises ValueError for shares that are none.
    """
    given = _told_shares(setting)
    given = _server_cpus(setting) if given is None else given
    shares = tuple(x / sum(given) for x in given)
    return shares if shares and max(shares) - min(shares) > _ROUNDING else ()


def _told_shares(setting: Mapping[str, Any]) -> Sequence[float] | None:
    """Shares of the model in a setting, or in its options: {"model_shares": [0.6, 0.4]}; None: it tells none."""
    given: Any = json.loads(setting["options"] or "{}").get("model_shares")
    if setting["setting"]:
        known = setting_from(setting["setting"])
        given = known.shares()[1] if known.model_shares or known.block_owners else None
    if given is not None and not _are_shares(given, setting["servers"]):
        raise ValueError(
            f"Cannot read the model shares {given!r} of run {setting['run']!r}: give {setting['servers']} numbers, one per "
            "server, none negative."
        )
    told: Sequence[float] | None = given
    return told


def _server_cpus(setting: Mapping[str, Any]) -> list[float]:
    """How many processors each server used, if the run's extras say so: {"server_cpus": [1.9, 1.3]}; [] otherwise."""
    used = json.loads(setting["extras"] or "{}").get("server_cpus")
    return used if _are_shares(used, setting["servers"]) else []


def _are_shares(values: Any, count: int) -> bool:
    """Whether `values` are `count` numbers, none negative, not all of them 0."""
    numbers = isinstance(values, list | tuple) and all(isinstance(x, int | float) and 0 <= x < math.inf for x in values)
    return numbers and len(values) == count and sum(values) > 0


def _unknown_stragglers(extras: Mapping[str, Any]) -> bool:
    """Whether a run had stragglers whose delay is not known, or that came and went at unknown times."""
    return bool(extras.get("n_stragglers")) and (not extras.get("straggler_delay_ms") or bool(extras.get("straggler_freq")))


def _links_unused(setting: Mapping[str, Any], nics: Mapping[str, float], usual: float | None) -> bool:
    """Whether a run's extras tell unlike links of nodes, and the setting does not say whose they are."""
    if _shared(setting):
        return False
    whole = json.loads(setting["setting"]) if setting["setting"] else {}
    names = {*whole.get("workers", ()), *whole.get("servers", ())}
    nodes = json.loads(setting["extras"] or "{}").get("nodes", {})
    delayed = {name for name, node in nodes.items() if node.get("link_delay_seconds")}
    unlike = not {*nics.values()} <= {usual} and not (names and names <= nics.keys())
    return unlike or bool(delayed and not names & nodes.keys())


def _delays(extras: Mapping[str, Any], names: Sequence[str], workers: int) -> tuple[float, ...]:
    """Seconds that each machine's link was delayed, one way, if the run's extras say so.

    By node, {"nodes": {"n0": {"link_delay_seconds": 0.01}}}; or of the first `n_stragglers` workers, which are all alike.
    """
    nodes = extras.get("nodes", {})
    if names:
        return tuple(float(nodes.get(name, {}).get("link_delay_seconds", 0.0)) for name in dict.fromkeys(names))
    if not extras.get("n_stragglers"):
        return ()
    slow = min(int(extras["n_stragglers"]), workers)
    return (extras["straggler_delay_ms"] / 1000,) * slow + (0.0,) * (workers - slow)


def _nics(setting: Mapping[str, Any]) -> dict[str, float]:
    """Bytes per second of each node's NIC, if in the run's extras: {"nodes": {"n0": {"nic_bytes_per_second": 1e6}}}."""
    nodes = json.loads(setting["extras"] or "{}").get("nodes", {})
    return {name: float(node["nic_bytes_per_second"]) for name, node in nodes.items() if "nic_bytes_per_second" in node}


# ---------------------------------------------------------------------------------------------------------- iterations


def _with_moments(iterations: pl.DataFrame, caveats: list[str]) -> pl.DataFrame:
    """The iterations with the second of each push; where only durations were recorded, each worker's are added up."""
    timed = iterations.filter(pl.col("seconds").is_not_null())
    whole = iterations.filter(pl.col("seconds").is_null(), pl.col("step_seconds") > 0)
    if timed.height or not whole.height:
        if untimed := {*iterations["run"]} - {*timed["run"]}:
            caveats.append(
                f"{len(untimed)} runs are left out: their iterations have no seconds, so that cycles are not known; write "
                "for all runs seconds, or step_seconds, how long each iteration took"
            )
        return timed
    caveats.append(
        "pushes have no times, only durations: a worker's iterations are taken to follow each other from second 0 on"
    )
    whole = whole.sort("run", "branch", "worker", "clock", maintain_order=True)
    whole = whole.with_columns(pl.col("step_seconds").cum_sum().over("run", "branch", "worker").alias("seconds"))
    return whole.sort("run", "branch", "seconds", maintain_order=True)


def _outside_changes(iterations: pl.DataFrame, changes: pl.DataFrame | None) -> pl.DataFrame:
    """The pushes that were completed while no reconfiguration was in progress; `after` is the number of the one before."""
    # A push during a reconfiguration belongs to neither setting.
    if changes is None or not changes.height:
        return iterations.with_columns(after=pl.lit(None, pl.UInt32))
    made = changes.sort("seconds").select("run", "branch", "seconds").with_row_index("after")
    last_change = {"on": "seconds", "by": ["run", "branch"], "check_sortedness": False}
    iterations = iterations.sort("seconds", maintain_order=True).join_asof(made, **last_change)  # type: ignore[arg-type]
    timed = changes.filter(pl.col("total_seconds") > 0).sort("seconds")
    over = timed.select("run", "branch", "seconds", over="seconds", begun=pl.col("seconds") - pl.col("total_seconds"))
    next_change = {"on": "seconds", "by": ["run", "branch"], "strategy": "forward", "check_sortedness": False}
    joined = iterations.join_asof(over, **next_change)  # type: ignore[arg-type]
    kept = pl.col("begun").is_null() | (pl.col("seconds") <= pl.col("begun"))
    return joined.filter(kept).select(iterations.columns)


def _segments(
    iterations: pl.DataFrame,
    settings: pl.DataFrame,
    left_out: pl.DataFrame,
    wanted: Selection,
    caveats: list[str],
    pushing_runs: set[str],
) -> list[tuple[dict[str, Any], pl.DataFrame]]:
    """The pushes split into segments at every reconfiguration, failed ones too: whole cycles of all workers, without the
    warm-up. Each segment comes with its setting, which is `wanted`. Those with more workers than their setting are left
    out. `pushing_runs` are those that have iterations, also without times."""
    known = _moments(settings, left_out).with_columns(begun=True)
    joined = iterations.sort("seconds", maintain_order=True).join_asof(
        known, on="seconds", by=["run", "branch"], check_sortedness=False
    )
    described = {s["segment"]: s for s in settings.to_dicts()}
    chosen = [s["run"] for s in described.values() if wanted.has(s)]
    if early := joined.filter(pl.col("begun").is_null(), pl.col("run").is_in(chosen)).height:
        caveats.append(
            f"{early} iterations before the first setting of their run are left out: give the first setting second 0, and "
            "times of both tables from the same moment"
        )
    branches = dict(iterations.group_by("run").agg(pl.col("branch").n_unique()).iter_rows())
    found, seen, more, fewer, gaps, partly = [], set[int](), set[int](), 0, list[float](), list[str]()
    still = list[str]()
    # By `after` as well: a reconfiguration that failed has no row in `settings`, but its stall is between two segments.
    apart = joined.filter(pl.col("segment").is_not_null()).group_by("segment", "after", maintain_order=True)
    each_apart = [
        (segment, _without_late(pushes, described[segment]["workers"]))
        for (segment, _), pushes in apart
        if wanted.has(described[segment])
    ]
    stops = [_stops(pushes) if branches[described[segment]["run"]] == 1 else [] for segment, pushes in each_apart]
    # One within the warm-up, which is left out, does not count; but a time without stops must not have it inside.
    counted = [sum(high > _warm(pushes) for _, high in of) for of, (_, pushes) in zip(stops, each_apart, strict=True)]
    stops = [of if count else [] for of, count in zip(stops, counted, strict=True)]
    if not 0 < sum(counted) < max(_FEW, _RARE * sum(pushes.height for _, pushes in each_apart)):
        stops = [[]] * len(stops)  # there are none, or so many that they are a part of what a cycle takes
    for (segment, pushes), stopped in zip(each_apart, stops, strict=True):
        setting = described[segment]
        seen.add(segment)
        alone = branches[setting["run"]] == 1
        if stopped:
            still += [f"{setting['run']} for {max(high - low for low, high in stopped):.3g} s"]
            pushes = _between(pushes, stopped)
        if alone:
            pushes, told = _while_all_push(setting["run"], pushes)
            partly += [told] if told else []
        each = max(setting["workers"], 1)
        cycles = pushes.height // each
        pushing = pushes["worker"].n_unique()
        fewer += pushing < each and cycles >= _FEWEST
        more |= {segment} if pushing > each else set()
        if cycles >= _FEWEST and pushing <= each:
            first = max(1, int(_WARM_UP * cycles)) * each
            kept = pushes.slice(first - 1, (cycles * each) - first + 1)  # with the push before, whose time is the start
            absent, lacking = (_not_recorded(part) if alone else 0 for part in (pushes, kept.slice(1)))
            gaps += [absent / (pushes.height + absent)] if absent else []
            whole = {"all_pushes": pushes.height + absent, "lacking": lacking, "branches": branches[setting["run"]]}
            whole["all_seconds"] = float(pushes["seconds"][-1] - pushes["seconds"][0])
            found.append((setting | whole, kept))
    if more:
        caveats.append(
            f"{len(more)} settings are left out: more workers pushed than they have; record the change of the setting"
        )
    if gaps:
        caveats.append(
            f"in {len(gaps)} settings some iterations have no row, {median(gaps):.1%} in the median, by the numbers of the "
            "others: cycles are counted with them"
        )
    if partly:
        caveats.append(
            f"in {len(partly)} settings some workers begin to push late or end early: only the time is used in which all "
            f"push: {_first_of(partly)}; were workers lost, or do the clocks of machines differ?"
        )
    if still:
        caveats.append(
            f"in {len(still)} settings a worker stood still by itself: {_first_of(still)}; only the longest time without "
            "such a stop is used, and predictions have none: how often they occur is not told by so few"
        )
    if drifting := _drifting(found):
        caveats.append(
            f"in {len(drifting)} of {len(found)} settings cycles are not steady: {_first_of(drifting)}; "
            "record for longer, or leave out what is not like the rest, such as a slow start"
        )
    if short := len(seen - more - {setting["segment"] for setting, _ in found}):
        caveats.append(f"{short} settings are left out: they have less than {_FEWEST} iterations of each worker")
    if silent := len({s["run"] for s in described.values() if wanted.has(s)} - pushing_runs):
        caveats.append(f"{silent} runs are left out: they have no iterations, and others have; calibrate to them alone")
    if fewer:
        caveats.append(f"in {fewer} settings fewer workers pushed than they have: was one lost, or is it not recorded?")
    return found


class _Drift(NamedTuple):
    """How a segment's cycles, without the warm-up, go on."""

    run: str
    early: float  # mean of the first third, seconds
    late: float  # of the second half
    varies: float  # relative variance of the latter, of a cycle, by means of batches
    counts: tuple[int, int]  # cycles of both
    batches: int
    barrier: bool


def _drifting(segments: Sequence[tuple[dict[str, Any], pl.DataFrame]]) -> list[str]:
    """The segments whose early cycles differ from late ones by more than how the late ones vary explains (Geweke 1992,
    Evaluating the accuracy of sampling-based approaches): a t-test of each, by Bonferroni's correction.

    Few batches may be alike by chance: they count as varying as those of the usual segment, at least.
    """
    seen = [drift for drift in map(_drift, segments) if drift is not None]
    usual = {kind: median([d.varies for d in seen if d.barrier == kind] or [0.0]) for kind in (False, True)}
    found = []
    for drift in seen:
        error = math.sqrt(max(drift.varies, usual[drift.barrier]) * sum(1 / n for n in drift.counts))
        by_chance = error * float(t.ppf(1 - _BY_CHANCE / 2 / len(seen), drift.batches - 1))
        if abs(math.log(drift.early / drift.late)) > max(_UNSTEADY, by_chance):
            found.append(f"{drift.run} from {drift.early:.3g} to {drift.late:.3g} s")
    return found


def _drift(segment: tuple[dict[str, Any], pl.DataFrame]) -> _Drift | None:
    setting, pushes = segment
    cycles = np.diff(pushes["seconds"].to_numpy()[:: setting["workers"]])
    early, late = cycles[: len(cycles) // 3], cycles[len(cycles) // 2 :]
    size = math.isqrt(len(late))
    batches = late[: len(late) // size * size].reshape(-1, size).mean(axis=1) if size else late
    if setting["branches"] > 1 or len(batches) < _FEWEST or not min(early.mean(), late.mean()) > 0:
        return None
    means = float(early.mean()), float(late.mean())
    varies = size * float(batches.var(ddof=1)) / means[1] ** 2
    counts = len(early), len(late)
    return _Drift(setting["run"], *means, varies, counts, len(batches), setting["policy"] in _SYNCHRONOUS)


def _not_recorded(pushes: pl.DataFrame) -> int:
    """How many pushes between the first and the last of each worker have no row, by the gaps in a worker's clocks.

    0 of a worker whose clocks mostly do not follow each other: they are numbers of the job's steps, then.
    """
    apart = pl.col("clock").diff().drop_nulls()
    each = pushes.group_by("worker").agg(missing=(apart - 1).sum(), usual=apart.median(), least=apart.min())
    return int(each.filter(pl.col("usual") == 1, pl.col("least") >= 1)["missing"].sum())


def _without_late(pushes: pl.DataFrame, workers: int) -> pl.DataFrame:
    """The pushes without those of workers that end in the warm-up, where more pushed than there are: these belong to the
    setting before. They were in flight when it ended, or a machine's clock is late."""
    if pushes["worker"].n_unique() <= workers:
        return pushes
    later = pushes.slice(max(1, int(_WARM_UP * pushes.height)))["worker"].unique()
    return pushes.filter(pl.col("worker").is_in(later.implode())) if len(later) == workers else pushes


def _stops(pushes: pl.DataFrame) -> list[tuple[float, float]]:
    """From when to when a worker of a segment stood still: a few times between two of its pushes that are far longer than
    all others of it, and a good part of the segment. Those that begin within a cycle are one, as all wait at a barrier or
    for a server, unless each has computed for that long."""
    least = _ENDED * float(pushes["seconds"][-1] - pushes["seconds"][0])
    found, usual = list[tuple[float, float, bool]](), 0.0
    for _, own in pushes.group_by("worker", maintain_order=True):
        seconds, clocks = own["seconds"].to_numpy(), np.diff(own["clock"].to_numpy())
        # Where rows are missing, a time is that of several mini-batches.
        each = np.diff(seconds) / (np.maximum(clocks, 1) if len(clocks) and np.median(clocks) == 1 else 1)
        longest = np.argsort(-each, kind="stable")[: _FEW + 1]
        count = max(
            (k for k, (i, j) in enumerate(pairwise(longest), 1) if each[i] > max(_SILENT * each[j], least)), default=0
        )
        usual = max([usual, *each[longest[count : count + 1]]])
        computed = own["compute_seconds"].fill_null(0.0).to_numpy()[1:] > each / 2
        found += [(seconds[i], seconds[i + 1], bool(computed[i])) for i in longest[:count]]
    apart, alone = list[tuple[float, float]](), True
    for low, high, computing in sorted(found):
        if apart and low - apart[-1][0] <= usual and not (alone and computing):
            apart[-1] = (apart[-1][0], max(high, apart[-1][1]))
            alone |= computing
        else:
            apart.append((low, high))
            alone = computing
    return apart


def _warm(pushes: pl.DataFrame) -> float:
    """When a segment's warm-up is over."""
    return float(pushes["seconds"][int(_WARM_UP * pushes.height)])


def _between(pushes: pl.DataFrame, stops: Sequence[tuple[float, float]]) -> pl.DataFrame:
    """The pushes of the longest time without `stops`, which are in the order of their beginnings."""
    begins = [pushes["seconds"][0], *accumulate((high for _, high in stops), max)]
    ends = [*(low for low, _ in stops), pushes["seconds"][-1]]
    low, high = max(zip(begins, ends, strict=True), key=lambda part: part[1] - part[0])
    return pushes.filter(pl.col("seconds").is_between(low, high))


def _while_all_push(run: str, pushes: pl.DataFrame) -> tuple[pl.DataFrame, str]:
    """The pushes from when all workers have begun to push until the first one ends; and of which run and seconds these are,
    in words, or "" where all push in the whole time.

    A worker has ended, or not begun, where it is silent for far longer than between any two of its pushes: it was lost, or
    has done as many mini-batches as each was to do. What begins late is left out with the warm-up.
    """
    begin, end = pushes["seconds"][0], pushes["seconds"][-1]
    each = pushes.group_by("worker", maintain_order=True).agg(
        pl.col("seconds").first().alias("first"),
        pl.col("seconds").last().alias("last"),
        apart=_SILENT * pl.col("seconds").diff().max(),
    )
    late = each.filter(pl.col("first") - begin > pl.max_horizontal("apart", _WARM_UP * (end - begin)))
    ended = each.filter(end - pl.col("last") > pl.max_horizontal("apart", _ENDED * (end - begin)))
    if not late.height and not ended.height:
        return pushes, ""
    low, high = max([begin, *late["first"]]), min([end, *ended["last"]])
    kept = pushes.filter(pl.col("seconds").is_between(low, high))
    if low > high:
        return kept, f"{run}, in which they never do"
    return kept, f"{run} from {low - begin:.3g} to {high - begin:.3g} of {end - begin:.3g} s"


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


def _rows_of_iterations(
    segments: list[tuple[dict[str, Any], pl.DataFrame]], slow: Mapping[tuple[str, int], Sleeper]
) -> Iterator[Row]:
    for (setting, with_first), error in zip(segments, _cycle_errors(segments), strict=True):
        pushes = with_first.slice(1)
        times = {name: float(pushes[name].mean()) for name in _PARTS if pushes[name].null_count() < pushes.height}  # type: ignore[arg-type]
        seconds = float(with_first["seconds"][-1] - with_first["seconds"][0])
        count = pushes.height + setting["lacking"]
        cycle = setting["workers"] * seconds / count
        if setting["lacking"] and pushes["worker"].n_unique() == setting["workers"]:
            cycle = _cycle_by_clocks(with_first) or cycle
        if setting["branches"] > 1 and len(times) == len(_PARTS):  # the segment's seconds include other branches
            by_worker = pushes.group_by("worker").agg(pl.sum_horizontal(_PARTS).mean().alias("cycle"))["cycle"].to_numpy()
            cycle = len(by_worker) / float((1 / by_worker).sum())
        parts = {name: times[name] for name in _PARTS[:3] if name in times}
        if setting["branches"] == 1:
            parts |= {name: setting[name] for name in ("all_seconds", "all_pushes")}
        # A straggler's sleep is not a matter of its speed.
        each = _worker_times(pushes, _told(setting).get("workers", ()))
        slept = {t.worker: slow.get((setting["run"], t.worker), _AWAKE) for t in each}
        own = tuple(t._replace(seconds=max(t.seconds - slept[t.worker].mean_seconds, 0.05 * t.seconds)) for t in each)
        sleeps = tuple(slept.values()) if set(slept.values()) != {_AWAKE} else ()
        yield _row(setting, cycle, pushes=count, error=error, worker_times=own, sleeps=sleeps, **parts)


def _slow_links(segments: Sequence[tuple[dict[str, Any], pl.DataFrame]], rows: Sequence[Row]) -> list[str]:
    """The workers whose pulls and pushes take far longer than the usual ones beside them, in the mean over the settings of
    their run, where nothing is known that makes them so."""
    longer: dict[tuple[str, int], list[float]] = {}
    for (setting, pushes), row in zip(segments, rows, strict=True):
        if row.nics or row.delays or row.shared:
            continue
        took = pushes.group_by("worker", maintain_order=True).agg(pl.sum_horizontal(_PARTS[1:3]).median().alias("seconds"))
        timed = dict(took.filter(pl.col("seconds") > 0).iter_rows())
        for worker, seconds in timed.items():
            longer.setdefault((setting["run"], worker), []).append(math.log(seconds / median_low(timed.values())))
    times = {who: math.exp(float(np.mean(logs))) for who, logs in sorted(longer.items())}
    return [f"worker {worker} of {run} {of:.2g} times" for (run, worker), of in times.items() if of > _SLOW_LINK]


def _cycle_errors(segments: list[tuple[dict[str, Any], pl.DataFrame]]) -> list[float]:
    """The relative standard error of each segment's mean cycle: by how cycles vary in the usual segment, with and without a
    barrier; 0 where that is not known.

    Successive cycles are not independent, so means of batches are compared (Law, Simulation Modeling and Analysis, Section
    9.5.3). A segment has few batches: the median over segments also is not moved by one with a pause in it.
    """
    counts, varies = [], dict[bool, list[float]]()
    for setting, pushes in segments:
        cycles = np.diff(pushes["seconds"].to_numpy()[:: setting["workers"]])
        counts.append(len(cycles) if setting["branches"] == 1 else 0)
        size = math.isqrt(len(cycles))
        batches = cycles[: len(cycles) // size * size].reshape(-1, size).mean(axis=1)
        if counts[-1] and len(batches) > 1 and cycles.mean() > 0:
            found = size * float(batches.var(ddof=1)) / float(cycles.mean()) ** 2
            varies.setdefault(setting["policy"] in _SYNCHRONOUS, []).append(found)
    usual = {kind: float(np.median(found)) for kind, found in varies.items()}
    kinds = [setting["policy"] in _SYNCHRONOUS for setting, _ in segments]
    return [math.sqrt(usual.get(kind, 0.0) / n) if n else 0.0 for kind, n in zip(kinds, counts, strict=True)]


def _worker_times(pushes: pl.DataFrame, machines: Sequence[str]) -> list[WorkerTime]:
    """The median of each worker, with a standard error by the distance of quantiles at one standard deviation; and with its
    machine, where those of all are known.

    A worker of few mini-batches may look steady by chance: it is taken to vary at least as much as the usual worker.
    """
    timed = pushes.filter(pl.col("compute_seconds") > 0).group_by("worker").agg("compute_seconds").sort("worker")
    seen = {worker: np.quantile(times, [0.16, 0.5, 0.84]).tolist() for worker, times in timed.iter_rows()}
    counts = dict(timed.select("worker", pl.col("compute_seconds").list.len()).iter_rows())
    varies = {worker: (high - low) / 2 / middle for worker, (low, middle, high) in seen.items()}
    usual = float(np.median(list(varies.values()))) if varies else 0.0
    names = machines if len(machines) == len(seen) else [str(worker) for worker in seen]
    return [
        WorkerTime(worker, middle, ERROR_OF_MEDIAN * middle * max(varies[worker], usual) / math.sqrt(counts[worker]), name)
        for (worker, (_, middle, _)), name in zip(seen.items(), names, strict=True)
    ]


def _noise(segments: list[tuple[dict[str, Any], pl.DataFrame]], slow: Mapping[tuple[str, int], Sleeper]) -> Noise | None:
    """The distribution of compute times of mini-batches around the median of worker and segment, without stragglers."""
    ratios, seconds = [], []
    for setting, pushes in segments:
        asleep = [worker for run, worker in slow if run == setting["run"]]
        timed = pushes.filter(pl.col("compute_seconds") > 0, ~pl.col("worker").is_in(asleep))
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
    if far.mean() > _RARE and far.sum() >= _FEW:
        slept = Sleeps(float(far.mean()), float(excess[far].mean()), float(excess[far].std()))
    p99 = float(np.quantile(ratio, 0.99))
    return Noise(math.sqrt(math.expm1(sigma**2)), slept, len(ratio), p99, math.exp(2.3263 * sigma))


# ---------------------------------------------------------------------------------------------- progress, and whole runs


def _rates(progress: pl.DataFrame, settings: pl.DataFrame, left_out: pl.DataFrame) -> pl.DataFrame:
    """Steps and seconds under each setting, summed over the intervals between two records under the same setting.

    An interval counts as a pause or switch, and is left out, if a step takes over three times the median; in asynchronous
    runs only if the interval is also longer than a minute, or has several mini-batches of every worker: the time of a single
    push varies that much.
    """
    known = _moments(settings, left_out, mode="policy", crew="workers")
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
    steady = pl.col("mode").is_in(_SYNCHRONOUS) | (pl.col("took") > 60) | (pl.col("done") >= _STEADY * pl.col("crew"))
    long = (each > 3 * each.median().over("segment")) & steady
    sums = within.filter(~long).group_by("segment", maintain_order=True).agg(pl.col("done", "took").sum(), pl.len())
    return settings.join(sums, on="segment", how="inner", maintain_order="left").filter(pl.col("len") >= _FEWEST)


def _rows_of_progress(rates: pl.DataFrame) -> Iterator[Row]:
    for setting in rates.to_dicts():
        yield _row(setting, _cycle(setting, setting["took"] / setting["done"]), pushes=setting["done"])


def _rows_of_runs(tables: Mapping[str, pl.DataFrame], settings: pl.DataFrame) -> Iterator[Row]:
    runs = tables["runs"].drop("workload", "extras").rename({"seconds": "run_seconds"})
    joined = settings.join(runs, on="run", how="inner", maintain_order="left")
    for made in joined.to_dicts():
        seconds = made["run_seconds"] or made["trimmed_seconds"]
        row = _row(made, 0.0, pushes=made["steps"] or 0)
        if made["steps"] and seconds:
            yield replace(row, cycle_seconds=_cycle(made, seconds / made["steps"]))
        elif made["samples_per_second"]:
            total = json.loads(made["extras"] or "{}").get("total_batch_size", sum(row.batches))
            yield replace(row, cycle_seconds=total / made["samples_per_second"])
        else:
            yield row


def _cycle(setting: Mapping[str, Any], step_seconds: float) -> float:
    return step_seconds if setting["policy"] in _SYNCHRONOUS else setting["workers"] * step_seconds


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
