"""Draws of calibrated constants: what a scenario would be if the recording had come out a little differently.

`harness calibrate` keeps the first resamples of its bootstrap in its file. A draw is one of them: all constants together, so
that constants that depend on each other stay together. In turn, no refused constant or one of them is as large as the
recording allows, and the others are fitted to that. Constants without either (those of other workloads, noise) stay as they
are. In all draws, a constant that was fitted without an interval moves too little.
"""

from __future__ import annotations

import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec

from simulators.cluster.profiles import NodeType
from simulators.workloads.workload import Demand

__all__ = ["DRAWN", "Draw", "draw_of"]

_OF_MACHINES = ("nic_bytes_per_second", "service_bytes_per_second")
_OF_CLUSTER = ("latency_seconds", "switch_bytes_per_second")
DRAWN = frozenset(Demand.__struct_fields__)
"""The refused constants that draws have, those of workloads: a latency that is 0 in a scenario has no ratio to the fitted
one, and `saturation_samples` are of single machines."""


@dataclass(frozen=True, slots=True)
class Draw:
    """One draw of the constants of the workloads in a file."""

    constants: Mapping[str, Mapping[str, float]]  # by workload
    ratios: Mapping[str, Mapping[str, float]]  # of the cluster's keys, drawn over fitted values, by workload
    workload_of: Mapping[str, str]  # by node type

    def node_types(self, kinds: Mapping[str, NodeType]) -> dict[str, NodeType]:
        """The file's node types with the drawn rates."""
        return {name: self._node_type(name, kind) for name, kind in kinds.items()}

    def _node_type(self, name: str, kind: NodeType) -> NodeType:
        mine = self.constants.get(self.workload_of.get(name, ""), {})
        return msgspec.structs.replace(kind, **{n: mine[n] for n in _OF_MACHINES if n in mine})

    def workloads(self, tables: Mapping[str, Any]) -> dict[str, Any]:
        """The tables of the file's workloads with the drawn demands."""
        made = {}
        for name, table in tables.items():
            drawn = {n: v for n, v in self.constants.get(name, {}).items() if n not in (*_OF_MACHINES, *_OF_CLUSTER)}
            made[name] = {**table, "demand": {**table["demand"], **drawn}}
        return made

    def ratio(self, workload: str, key: str) -> float:
        """The drawn over the fitted value of a key of a workload's cluster; 1 where none was fitted."""
        return self.ratios.get(workload, {}).get(key, 1.0)


def draw_of(path: Path, number: int) -> Draw | None:
    """Draw `number`, from 1 on, of the constants in a file; None for a file that `harness calibrate` has not written.

    Raises ValueError where the file has no such draw; OSError where it cannot be read.
    """
    tables = _read(path.read_bytes())
    if tables is None:
        return None
    fitted = tables["calibration"].get("workloads", {})
    counts = [len(values) for one in fitted.values() for values in one.get("draws", {}).values()]
    if not counts:
        raise ValueError(f"draw: {path} has no draws of its constants; write it again with harness calibrate.")
    if number > min(counts):
        raise ValueError(f"draw: {path} has {min(counts)} draws of its constants, not {number}.")
    constants = {name: {n: v[number - 1] for n, v in one.get("draws", {}).items()} for name, one in fitted.items()}
    clusters = {name: one.get("cluster", {}) for name, one in tables.get("scenario", {}).items()}
    ratios = {
        name: {key: drawn[key] / at for key in _OF_CLUSTER if key in drawn and (at := clusters.get(name, {}).get(key, 0.0))}
        for name, drawn in constants.items()
    }
    return Draw(constants, ratios, {kind: name for name, one in fitted.items() for kind in one.get("node_types", ())})


@lru_cache(maxsize=4)
def _read(content: bytes) -> dict[str, Any] | None:
    """The tables of a file with this content; kept, because all draws are read one after the other.

    By content: a file that is written twice within a tick of the file system's clock has the same time of modification.
    """
    tables = tomllib.loads(content.decode("utf-8-sig"))
    return tables if "calibration" in tables else None
