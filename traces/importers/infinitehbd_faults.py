"""Faults and repairs of the servers of a GPU cluster over 349 days (InfiniteHBD, SIGCOMM'25).

Source format: ``fault_trace.json``, a list of events in the order of time: node_id, event_time (*days* since the trace
began), event_type (``fault_start`` or ``fault_end``) and fault_type (Level, Class, Desc). A fault begins and ends with the
same node and Desc. Faults of one node may overlap: it has failed from the start of the first to the end of the last. A fault
without an end lasts beyond the trace. The source watched 400 servers; a server that never had a fault is not in the file.
fault_statistics.json, beside it, counts faults by kind and is not read.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from itertools import groupby
from pathlib import Path
from typing import Any, Literal

import msgspec

from traces.foreign.text import json_of
from traces.importers.source import Imported, RemoteFile, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import fault

__all__ = ["SOURCE", "read"]

_DAY_SECONDS = 86_400.0
_MOST_DAYS = 3650.0
_WATCHED = 400
"""Servers watched, by the source's description; the file does not say it."""


class _Fault(msgspec.Struct, frozen=True):
    Level: str
    Class: str
    Desc: str


class _FaultEvent(msgspec.Struct, frozen=True):
    node_id: str
    event_time: float
    event_type: Literal["fault_start", "fault_end"]
    fault_type: _Fault


def read(path: Path) -> Imported:
    """`path` is a fault_trace.json, or a folder of such files."""
    paths = find_files(path, "fault_trace*.json")
    if not paths:
        raise nothing_to_import(path, "fault_trace.json")
    runs: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    for one in paths:
        found = json_of(one, list[_FaultEvent])
        if not found:
            raise fault(one, "it is empty.")
        faults = _faults(found, one)
        run = one.stem.removeprefix("fault_trace").strip("-_") or "faults"
        named = {e.node_id for e in found}
        extras = {
            "nodes_watched": max(_WATCHED, len(named)),
            "nodes_with_faults": len(named),
            "faults": sum(faults.values()),
            "faults_by_level": dict(sorted(faults.items())),
        }
        runs.append({"run": run, "seconds": found[-1].event_time * _DAY_SECONDS, "extras": json_text(extras)})
        events += _node_events(found, run)
    return Imported({"runs": table("runs", runs), "node_events": table("node_events", events)}, tuple(paths))


def _faults(events: list[_FaultEvent], path: Path) -> Counter[str]:
    """The number of faults by level. Raises TraceError for events out of order, and for an end without a start."""
    counts: Counter[str] = Counter()
    open_faults: Counter[tuple[str, str]] = Counter()
    before = 0.0
    for row, event in enumerate(events):
        if not 0 <= event.event_time <= _MOST_DAYS:
            why = f"the value is {event.event_time:g}, and 0 to {_MOST_DAYS:g} days are plausible (are these seconds?)."
            raise fault(path, why, row=row, column="event_time")
        if event.event_time < before:
            raise fault(path, f"time runs backwards: {event.event_time} follows {before}.", row=row, column="event_time")
        if not event.node_id:
            raise fault(path, "the value is missing.", row=row, column="node_id")
        before, key = event.event_time, (event.node_id, event.fault_type.Desc)
        if event.event_type == "fault_start":
            open_faults[key] += 1
            counts[event.fault_type.Level] += 1
        elif open_faults[key]:
            open_faults[key] -= 1
        else:
            raise fault(path, f"{key[1][:80]!r} of node {key[0][:80]!r} ends, and did not start.", row=row)
    return counts


def _node_events(events: list[_FaultEvent], run: str) -> Iterator[dict[str, Any]]:
    """When nodes fail and come back. Faults that start and end at one instant change nothing."""
    active: Counter[str] = Counter()
    for days, at_once in groupby(events, key=lambda e: e.event_time):
        was = dict(active)
        touched: dict[str, None] = {}
        for event in at_once:
            touched[event.node_id] = None
            active[event.node_id] += 1 if event.event_type == "fault_start" else -1
        for node in touched:
            if bool(active[node]) != bool(was.get(node)):
                event_name = "failed" if active[node] else "joined"
                yield {"run": run, "seconds": days * _DAY_SECONDS, "node": node, "event": event_name}


SOURCE = Source(
    summary="faults and repairs of 400 GPU servers over 349 days",
    repository="stepfun-ai/InfiniteHBD-Trace",
    commit="7aacdc8c3d2352c5b784bc0ea31756e1620daed1",
    licence="Apache-2.0; files are changed by this import",
    cite="InfiniteHBD, SIGCOMM'25",
    read=read,
    files=(RemoteFile("fault_trace.json", "5871b881b341c9526223c025eda3a9bd2f0f875cf8d53441688ccd953e11b80d"),),
    size="339 kB",
)
