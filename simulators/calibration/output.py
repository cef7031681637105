"""Writes a calibration as TOML: node types, workloads and costs that scenarios load, and the origin of every figure.

The same recording gives the same bytes.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median, median_low
from typing import Any

from simulators.calibration.fit import NO_FREEDOM, Fit
from simulators.calibration.links import Sharing
from simulators.calibration.model import demand
from simulators.calibration.recorded.efforts import LEVEL, Effort
from simulators.calibration.recorded.recordings import Recording
from simulators.calibration.recorded.row import ALIKE, Row
from simulators.calibration.recorded.speeds import with_speeds
from simulators.calibration.staleness import PROXY, fitted_rate, proxy_ratio, ratio
from simulators.workloads.workload import Demand

__all__ = ["Provenance", "digest", "misfits", "to_toml"]


@dataclass(frozen=True, slots=True)
class Provenance:
    """The origin of a calibration. Its fields are keys of the file."""

    source: str
    of: str
    licence: str
    digest: str  # SHA-256 of the recording, see `digest`
    command: str
    made_by: str


def digest(paths: Sequence[Path], root: Path) -> str:
    """SHA-256 of the names (relative to `root`) and the bytes of all `paths`."""
    found = hashlib.sha256()
    for path in sorted(paths):
        name = path.relative_to(root).as_posix() if root.is_dir() else path.name
        found.update(f"{name} {hashlib.sha256(path.read_bytes()).hexdigest()}\n".encode())
    return found.hexdigest()


def to_toml(fits: Mapping[str, Fit], recording: Recording, origin: Provenance) -> str:
    """The text of the file."""
    lines = [
        "# Written by `harness calibrate`. Node types: cluster.profiles = this file; workloads: workload.file = this file.",
        "# Copy the keys of scenario.WORKLOAD.cluster, scenario.WORKLOAD.conditions and costs to a scenario's tables",
        "# cluster, conditions and costs.",
        "",
        *_table("calibration", {name: getattr(origin, name) for name in Provenance.__slots__}),
        *_table("calibration.caveats", {str(i): why for i, why in enumerate((*recording.caveats, *misfits(fits)))}),
    ]
    costs = {}
    if recording.switch_seconds:
        costs["policy_restart_seconds"] = median(recording.switch_seconds)
    if recording.restart_seconds:
        costs |= _restarts(recording.restart_seconds)
    # Constants are valid only for the network discipline under which they were fitted, so the file has exactly one.
    (shared,) = {Sharing.of(fit.constants) for fit in fits.values()}
    clocks = min((row.snapshot_clocks for row in recording.rows), default=0)
    flows = shared.independent_flows
    (uneven_bytes,) = {fit.constants.uneven_bytes for fit in fits.values()}
    optional = {"control_queue": shared.control_queue, "snapshot_clocks": clocks, "independent_flows": flows}
    optional["uneven_bytes"] = uneven_bytes
    optional["switch_both_ways"] = shared.switch == "both ways"
    optional["server_threads"] = shared.server_threads if shared.server_threads > 1 else 0
    cluster = {"discipline": shared.discipline} | {name: value for name, value in optional.items() if value}
    choices = dict.fromkeys(fit.choice for fit in fits.values() if fit.choice)
    lines += _table("calibration.links", {"chosen": "; ".join(map(str, choices))} if choices else {})
    lines += _table("costs", costs)
    for name, fit in fits.items():
        mine = [r for r in recording.rows if r.workload == name]
        rows = with_speeds(mine, fit.common_seconds, fit.constants.saturation_samples)
        lines += _workload(name, fit, rows, origin, cluster)
    for name in dict.fromkeys(e.workload for e in recording.efforts):
        lines += _staleness(name, [e for e in recording.efforts if e.workload == name])
    if recording.noise is not None:
        noise = {n: getattr(recording.noise, n) for n in ("times", "recorded_p99", "fitted_p99")}
        lines += _table("calibration.noise", noise)
    return "\n".join(lines).rstrip() + "\n"


def misfits(fits: Mapping[str, Fit]) -> list[str]:
    """Warnings of the workloads whose constants do not describe their own rows."""
    return [f"{name}: {fit.misfit}" for name, fit in fits.items() if fit.misfit]


def _staleness(name: str, found: Sequence[Effort]) -> list[str]:
    """The recorded staleness ratio, and the proxy with about the same ratio."""
    wanted = ratio(found)
    if not math.isfinite(wanted):
        return []
    rate = fitted_rate(wanted, found[0].workers)
    values = {"recorded_ratio": wanted, "level": LEVEL, "proxy": PROXY, "learning_rate": rate}
    return _table(f"calibration.staleness.{_key(name)}", values | {"proxy_ratio": proxy_ratio(rate, found[0].workers)})


def _restarts(timed: Sequence[tuple[float, float]]) -> dict[str, float]:
    """Seconds of a restart; if the bytes moved differ enough, also the rate at which they move."""
    sizes = [size for _, size in timed]
    if max(sizes) < 2 * max(min(sizes), 1.0):
        return {"restart_seconds": median(seconds for seconds, _ in timed)}
    low, high = (median(s for s, size in timed if (size > median(sizes)) == large) for large in (False, True))
    moved = median(b for b in sizes if b > median(sizes)) - median(b for b in sizes if b <= median(sizes))
    rate = moved / max(high - low, 1e-9)
    rest = median(seconds - size / rate for seconds, size in timed)
    # The recorded bytes are half written and half read, so one rate is used for both directions.
    return {"restart_seconds": max(rest, 0.0), "checkpoint_bytes_per_second": rate, "restore_bytes_per_second": rate}


def _workload(name: str, fit: Fit, rows: Sequence[Row], origin: Provenance, cluster: Mapping[str, Any]) -> list[str]:
    """The tables of one workload; `cluster` are the keys of a scenario's cluster that all workloads have alike."""
    constants, source = fit.constants, f"calibrated to {origin.source}, {fit.rows} rows, SHA-256 {origin.digest[:12]}"
    defaults = dict(zip(Demand.__struct_fields__[2:], Demand.__struct_defaults__, strict=True))
    asked = demand(constants)
    shown = {f: getattr(asked, f) for f in Demand.__struct_fields__ if f not in defaults or getattr(asked, f) != defaults[f]}
    speeds = _types({s for r in rows for s in r.speeds} | {1.0})
    batches = sorted(r.batch_size for r in rows)
    lines = []
    for speed in speeds:
        machine: dict[str, Any] = {"cores": constants.cores, "memory_bytes": 64e9}
        machine["nic_bytes_per_second"] = constants.nic_bytes_per_second
        if math.isfinite(constants.service_bytes_per_second):
            machine["service_bytes_per_second"] = constants.service_bytes_per_second
        device = {"kind": "cpu", "speed": speed}
        if constants.saturation_samples:
            device["saturation_samples"] = constants.saturation_samples
        machine |= {"devices": [device], "source": f"{source}; memory is an assumption"}
        lines += _table(f"profiles.{_key(_node_type_name(name, speed))}", machine)
    least, most = min(r.workers for r in rows), max(r.workers for r in rows)
    count = f"{least} to {most}" if least < most else f"{most}"
    summary = f"{name}, as recorded: {count} worker{'s' * (most > 1)}"
    job = {"summary": summary, "source": source, "batch_size": batches[len(batches) // 2]}
    lines += _table(f"workloads.{_key(name)}", job)
    lines += _table(f"workloads.{_key(name)}.demand", shown)
    conditions: dict[str, Any] = {"jitter": constants.jitter}
    if constants.sleeps is not None:
        conditions["sleeps"] = {f: getattr(constants.sleeps, f) for f in constants.sleeps.__struct_fields__}
    there = f"scenario.{_key(name)}"
    rates = {"latency_seconds": constants.latency_seconds}
    if constants.switch != "none":
        rates["switch_bytes_per_second"] = constants.switch_bytes_per_second
    lines += _table(f"{there}.cluster", {**cluster, **rates})
    lines += _table(f"{there}.conditions", conditions)
    at = f"calibration.workloads.{_key(name)}"
    lines += _table(
        at,
        {"rows": fit.rows, "median_relative_error": fit.error, "messages_in_transfers": constants.in_transfers}
        | {"node_types": [_node_type_name(name, speed) for speed in speeds]},
    )
    lines += _table(f"{at}.intervals", {n: list(ends) for n, ends in fit.intervals.items() if ends is not None})
    lines += _table(f"{at}.without_interval", dict.fromkeys(fit.unsure, NO_FREEDOM))
    lines += _table(f"{at}.draws", {n: list(values) for n, values in fit.draws.items() if values})
    lines += _table(f"{at}.from_other_workloads", dict(fit.borrowed))
    return lines + _table(f"{at}.refused", dict(fit.refused))


def _types(speeds: Iterable[float]) -> list[float]:
    """Speeds of node types: one for all that are so near to the slowest of them that they count as equal."""
    alike = list[list[float]]()
    for speed in sorted(speeds):
        if alike and speed < (1 + ALIKE) * alike[-1][0]:
            alike[-1].append(speed)
        else:
            alike.append([speed])
    return [1.0 if 1.0 in some else median_low(some) for some in alike]


def _node_type_name(workload: str, speed: float) -> str:
    return workload if speed == 1.0 else f"{workload}-{speed:g}"


def _table(name: str, values: Mapping[str, Any]) -> list[str]:
    return [f"[{name}]", *(f"{_key(key)} = {_value(value)}" for key, value in values.items()), ""] if values else []


def _key(name: str) -> str:
    return name if name.replace("-", "").replace("_", "").isalnum() and name.isascii() else json.dumps(name)


def _value(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return f"{value:.6g}" if value != int(value) or abs(value) >= 1e15 else f"{value:.1f}"
    if isinstance(value, list):
        return f"[{', '.join(map(_value, value))}]"
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{_key(k)} = {_value(v)}" for k, v in value.items()) + " }"
    return json.dumps(value)
