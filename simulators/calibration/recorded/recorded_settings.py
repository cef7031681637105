"""What a trace says of its settings: in its table of settings, and in the options and extras of runs."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import polars as pl

from simulators.calibration.recorded.row import Row
from traces.extras import read_extras
from traces.schema import NODE_ORDER, setting_from, worker_numbers
from tuners.actions import Setting
from tuners.settings import BY_STALENESS, OF_CACHES, OF_CHECKPOINTS, OF_PULLS, OF_QUORUM, OF_REPLICAS, POLICIES

__all__ = ["batch_sizes_of", "first_of", "moments", "numbers_of", "row_of", "settings_of", "told_of"]

_NAMED = 4  # workers, runs or settings that a note names, at most
_ROUNDING = 1e-6  # a smaller difference of shares is none
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


def settings_of(tables: Mapping[str, pl.DataFrame], caveats: list[str]) -> tuple[pl.DataFrame, pl.DataFrame]:
    """The settings of the runs, with each run's workload and extras, by time; and those that are left out, because the
    simulator cannot represent them. These end the settings before them, too."""
    extras = pl.col("extras").fill_null("{}")
    runs = tables["runs"].select("run", "workload", "extras").with_columns(extras)
    for run, text in runs.select("run", "extras").iter_rows():
        read_extras(run, text)  # before any of them is used
    slowed = [r["run"] for r in runs.to_dicts() if _unknown_stragglers(json.loads(r["extras"]))]
    if slowed:
        caveats.append(
            f"{len(slowed)} runs with stragglers are left out: the trace does not say by how much their links were delayed, "
            "or when"
        )
    given = tables["settings"].unique(maintain_order=True).with_row_index("given")
    if given.height and (unset := _timed_runs(tables) - {*given["run"]}):
        caveats.append(f"{len(unset)} runs with times have no row in settings, and are left out: {first_of(sorted(unset))}")
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
    # A bound that is not told is not 0: with that, all workers wait for each other.
    boundless = pl.col("policy").is_in(BY_STALENESS) & pl.col("staleness").is_null()
    if len(unbounded := made.filter(boundless)["policy"]):
        caveats.append(
            f"{len(unbounded)} settings of the policy {', '.join(sorted(set(unbounded)))} are left out: they do not tell "
            "its bound; write it in the column staleness"
        )
        made = made.filter(~boundless.fill_null(value=False))
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


def _timed_runs(tables: Mapping[str, pl.DataFrame]) -> set[str]:
    """The names of runs with times that would make a row."""
    runs = tables["runs"]
    whole = [pl.col(c) > 0 for c in ("seconds", "samples_per_second") if c in runs.columns]
    timed = set(runs.filter(pl.any_horizontal(whole))["run"]) if whole else set[str]()
    return timed | {run for name in ("iterations", "progress") if name in tables for run in tables[name]["run"].unique()}


def first_of(told: Sequence[str]) -> str:
    """The first of what a note names, and how many more there are."""
    more = f", and {len(told) - _NAMED} more" if len(told) > _NAMED else ""
    return ", ".join(told[:_NAMED]) + more


def moments(settings: pl.DataFrame, left_out: pl.DataFrame, **more: str) -> pl.DataFrame:
    """When settings began, and those that are `left_out`, whose segment is null; `more` are columns by their new names."""
    names = ("run", "branch", "seconds", "given")
    both = [
        settings.select(*names, "segment", **more),
        left_out.select(*names, pl.lit(None, pl.UInt32).alias("segment"), **more),
    ]
    return pl.concat(both).sort("seconds", "given").drop("given")


def row_of(setting: Mapping[str, Any], cycle_seconds: float, **measured: Any) -> Row:
    """The row of one of the settings of `settings_of`, with what was `measured` under it, by names of fields."""
    extras = _read(setting, "extras")
    whole = _read(setting, "setting")
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
        batch_sizes=sizes if len({*(sizes := batch_sizes_of(setting))}) > 1 else (),
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


def _modelled(settings: pl.DataFrame, caveats: list[str]) -> pl.DataFrame:
    """The settings in which nothing takes time that a `Row` does not tell; and notes of what is not used of the others."""
    told = [told_of(s) for s in settings.to_dicts()]
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


def _read(setting: Mapping[str, Any], column: str) -> dict[str, Any]:
    """The JSON object in a column of a setting; {} where the column is empty."""
    found: dict[str, Any] = json.loads(setting[column] or "{}")
    return found


def told_of(setting: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a setting and the fields of its column `setting`, which may have options, too."""
    whole = _read(setting, "setting")
    return {**_read(setting, "options"), **dict(whole.get("options", ())), **whole}


def numbers_of(setting: Mapping[str, Any]) -> tuple[int, ...]:
    """The numbers of a setting's workers in its own order, which links, loads and delays have, too; () if the run's extras
    do not tell them: then numbers follow this order."""
    return worker_numbers(_read(setting, "setting").get("workers", ()), _read(setting, "extras").get(NODE_ORDER, ()))


def _batch_size(setting: Mapping[str, Any]) -> int:
    """Samples in a mini-batch of one worker, the mean where these differ; 0: not recorded."""
    if sizes := batch_sizes_of(setting):
        return max(round(sum(sizes) / len(sizes)), 1)
    total = int(_read(setting, "extras").get("total_batch_size", 0))
    return int(setting["batch_size"] or max(round(total / setting["workers"]), min(total, 1)))


def batch_sizes_of(setting: Mapping[str, Any]) -> tuple[int, ...]:
    """Samples in a mini-batch of each worker, in the setting's order; () if the setting does not tell them.

    They are the loads of a whole setting, or in its options: {"batch_sizes": [48, 16]}. Raises ValueError for others.
    """
    given: Any = _read(setting, "options").get("batch_sizes")
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
    whole = _read(setting, "setting")
    options = _read(setting, "options")
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
    given: Any = _read(setting, "options").get("model_shares")
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
    used: Any = _read(setting, "extras").get("server_cpus")
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
    whole = _read(setting, "setting")
    names = {*whole.get("workers", ()), *whole.get("servers", ())}
    nodes = _read(setting, "extras").get("nodes", {})
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
    nodes = _read(setting, "extras").get("nodes", {})
    return {name: float(node["nic_bytes_per_second"]) for name, node in nodes.items() if "nic_bytes_per_second" in node}
