"""A summary of a trace in a few numbers. It uses lazy scans, so that traces of ten million rows fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from traces.parts import Origin, manifest, origin, scan
from traces.schema import TRACE

__all__ = ["TraceSummary", "summarise"]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The summary of one trace."""

    origin: Origin
    whole: bool  # false: the recording was not finished, and ends with the last batch
    rows: dict[str, int]  # by table, for tables that exist
    runs: dict[str, int]  # number of runs, by table
    iterations: pl.DataFrame  # a row per run: workers, iterations, seconds, per_second, means in seconds, staleness


def summarise(folder: Path) -> TraceSummary:
    """The summary of the trace in `folder`. Raises as `traces.parts.scan` does."""
    rows, runs = {}, {}
    for table in TRACE:
        if (folder / table).is_dir() and table != "iterations":
            counted = scan(folder, table).select(pl.len(), pl.col("run").n_unique().alias("runs")).collect()
            rows[table], runs[table] = counted.row(0)
    iterations = _iterations(folder)
    if iterations.height:
        rows["iterations"], runs["iterations"] = int(iterations["iterations"].sum()), iterations.height
    return TraceSummary(origin(folder), manifest(folder) is not None, rows, runs, iterations)


def _iterations(folder: Path) -> pl.DataFrame:
    spells = [name for name in TRACE["iterations"].columns if name.endswith("_seconds")]
    span = pl.col("seconds").max() - pl.col("seconds").min()
    one = scan(folder, "iterations").group_by("run").agg(
        pl.col("worker").n_unique().alias("workers"),
        pl.len().alias("iterations"),
        span.alias("seconds"),
        pl.when(span > 0).then(pl.len() / span).alias("per_second"),
        pl.col(*spells, "staleness").mean().name.prefix("mean_"),
    )  # fmt: skip
    return one.collect().sort("run")
