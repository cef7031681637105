"""Number of spot instances that were up, recorded for SkyPilot (Wu et al., Can't Be Late, NSDI'24).

Source format: ``{availability,preemption}/<n>-node/<cloud>-<date>/<zone>_<type>_<k>.json``, each an object with
``metadata.gap_seconds`` and ``data``, the number of instances up at every tick, 0..n. Instances have no names in the source:
node ``i0`` is up here when at least one instance is up, ``i1`` when at least two are up, and so on.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import polars as pl

from traces.foreign.text import json_of
from traces.importers.source import Imported, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import fault

__all__ = ["SOURCE", "read"]

_MOST_NODES = 10_000
_MOST_TICKS = 10_000_000
_LONGEST_GAP_SECONDS = 3600


class _Metadata(msgspec.Struct):
    gap_seconds: int


class _File(msgspec.Struct):
    metadata: _Metadata
    data: list[int]


def read(path: Path) -> Imported:
    """`path` is one JSON file, or a folder of them at any depth."""
    paths = find_files(path, "**/*.json")
    if not paths:
        raise nothing_to_import(path, "*.json")
    runs: list[dict[str, Any]] = []
    events: list[pl.DataFrame] = []
    for one in paths:
        name = one.relative_to(path).with_suffix("").as_posix() if path.is_dir() else one.stem
        file = _checked(json_of(one, _File), one)
        gap = file.metadata.gap_seconds
        extras = json_text({"gap_seconds": gap, "ticks": len(file.data), "most_nodes": max(file.data)})
        cluster = one.stem.rsplit("_", 2)[1] if one.stem.count("_") >= 2 else None
        runs.append({"run": name, "cluster": cluster, "seconds": float(gap * (len(file.data) - 1)), "extras": extras})
        events.append(table("node_events", _events(name, file.data, gap)))
    return Imported({"runs": table("runs", runs), "node_events": pl.concat(events)}, tuple(paths))


def _checked(file: _File, path: Path) -> _File:
    gap, ticks = file.metadata.gap_seconds, len(file.data)
    if not 1 <= gap <= _LONGEST_GAP_SECONDS:
        why = f"{gap} s between ticks is not plausible; 1 to {_LONGEST_GAP_SECONDS} is (are these milliseconds?)."
        raise fault(path, why, column="gap_seconds")
    if not 1 <= ticks <= _MOST_TICKS:
        raise fault(path, f"it has {ticks} ticks; 1 to {_MOST_TICKS} are read.", column="data")
    nodes = re.fullmatch(r"(\d{1,4})-node", path.parent.parent.name)
    most = int(nodes[1]) if nodes else _MOST_NODES
    for row, count in enumerate(file.data):
        if not 0 <= count <= most:
            raise fault(path, f"the value is {count}, and 0 to {most} nodes can be up.", row=row, column="data")
    return file


def _events(run: str, counts: list[int], gap: int) -> Iterator[dict[str, Any]]:
    before = 0
    for tick, count in enumerate(counts):
        for node in range(before, count):
            yield {"run": run, "seconds": float(tick * gap), "node": f"i{node}", "event": "joined"}
        for node in range(before - 1, count - 1, -1):
            yield {"run": run, "seconds": float(tick * gap), "node": f"i{node}", "event": "left"}
        before = count


SOURCE = Source(
    summary="how many spot instances were up in zones of AWS and GCP, 2 to 45 days",
    repository="skypilot-org/spot-traces",
    commit="221da1ab9bdfe7966da296265d7694d52dc0c5a6",
    licence="none stated: fetch the data yourself, and do not pass it on",
    cite="Wu et al., Can't Be Late, NSDI'24",
    read=read,
)
