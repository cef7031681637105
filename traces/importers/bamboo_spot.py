"""Nodes that join and leave on spot markets, recorded for Bamboo (Thorpe et al., NSDI'23).

Source format: CSV without a header, ``<milliseconds since the start>,<add|remove>,<node>``, sorted, polled once a minute;
names of nodes are never reused. The autoscaler decides when nodes join, not the market; why a node left is not recorded.
Also reads a table with the columns trace, t_s, event, node.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from traces.foreign.text import read_csv
from traces.importers.source import Imported, RemoteFile, Source, find_files, nothing_to_import, table
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "read"]

_POLLED_MS = 60_000
_RAW = TableRules(
    {
        "ms": Column(pl.Int64(), low=0, high=3.2e10),
        "event": Column(pl.String(), among=("add", "remove")),
        "node": Column(pl.String()),
    },
    key=("event", "node"),
    time="ms",
)
_TABLED = TableRules(
    {
        "trace": Column(pl.String()),
        "t_s": Column(pl.Float64(), low=0, high=3.2e7),
        "event": Column(pl.String(), among=("add", "remove")),
        "node": Column(pl.String()),
    },
    key=("trace", "event", "node"),
    time="t_s",
    by=("trace",),
)
_EVENTS = {"add": "joined", "remove": "left"}


def read(path: Path) -> Imported:
    """`path` is a trace, a folder of `*-trace.csv`, or one with node_events.csv."""
    paths = find_files(path, "*-trace.csv", "node_events.csv")
    if not paths:
        raise nothing_to_import(path, "*-trace.csv", "node_events.csv")
    frame = pl.concat([_tabled(p) if p.name == "node_events.csv" else _raw(p) for p in paths])
    named = frame.rename({"trace": "run", "t_s": "seconds"}).with_columns(event=pl.col("event").replace_strict(_EVENTS))
    runs = named.group_by("run", maintain_order=True).agg(seconds=pl.col("seconds").max())
    return Imported(
        {"runs": table("runs", runs.with_columns(cluster="run")), "node_events": table("node_events", named)}, tuple(paths)
    )


def _raw(path: Path) -> pl.DataFrame:
    frame = read_csv(path, _RAW, header=False)
    off = (frame["ms"] % _POLLED_MS != 0).arg_true()
    if len(off):
        why = f"{frame['ms'][off[0]]} is no multiple of {_POLLED_MS}, and times are milliseconds, polled once a minute."
        raise fault(path, why, row=int(off[0]), column="ms")
    _check_alive(frame, path)
    name = path.name.removesuffix(".csv").removesuffix("-trace")
    return frame.select(trace=pl.lit(name), t_s=pl.col("ms") / 1000.0, event="event", node="node")


def _tabled(path: Path) -> pl.DataFrame:
    frame = read_csv(path, _TABLED)
    for (_,), one in frame.with_row_index("row").group_by("trace", maintain_order=True):
        _check_alive(one, path)
    return frame.select("trace", "t_s", "event", "node")


def _check_alive(frame: pl.DataFrame, path: Path) -> None:
    """Raise TraceError if a node leaves that has not joined."""
    rows = frame["row"].to_list() if "row" in frame.columns else range(frame.height)
    alive: set[str] = set()
    for row, event, node in zip(rows, frame["event"], frame["node"], strict=True):
        if event == "add":
            alive.add(node)
        elif node not in alive:
            raise fault(path, f"{node!r} is removed, and was never added.", row=row, column="node")


SOURCE = Source(
    summary="nodes joining and leaving on spot markets, 11 h on two instance types",
    repository="uclasystem/bamboo",
    commit="80809293289419d40a870b4a9ccb8df0082ce3fb",
    folder="traces",
    licence="MIT, Copyright (c) 2022 UCLASystem",
    cite="Thorpe et al., Bamboo, NSDI'23",
    read=read,
    files=(
        RemoteFile("g4dn-trace.csv", "6a21d2003cfa16acfb65fb87b5521dd995c72f49a37900979eea177e853592eb"),
        RemoteFile("p3-trace.csv", "0b7828fcd4637799590578287415d4d4bbb5e3cfef5fbaf23ca8e5b3ef6bdd68"),
    ),
    size="11 kB",
)
