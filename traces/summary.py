"""A summary of a trace in a few numbers. It uses lazy scans, so that traces of ten million rows fit in memory."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import polars as pl

from traces.parts import Origin, manifest, origin, scan
from traces.schema import TRACE
from tuners.settings import BY_STALENESS, POLICIES

__all__ = ["TraceSummary", "summarise"]


@dataclass(frozen=True, slots=True)
class TraceSummary:
    """The summary of one trace."""

    origin: Origin
    whole: bool  # false: the recording was not finished, and ends with the last batch
    rows: dict[str, int]  # by table, for tables that exist
    runs: dict[str, int]  # number of runs, by table
    iterations: pl.DataFrame  # a row per run: workers, iterations, seconds, per_second, mean_*, idle_share
    impossible: pl.DataFrame  # iterations (run, worker, clock, compute_seconds, since) that computed longer than they took
    strange: dict[str, int]  # number of settings by policy, for policies that neither calibration nor the simulator knows
    unbounded: dict[str, int]  # the same, for policies with a bound (`staleness`) that the settings do not tell


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
    policies = scan(folder, "settings").select("policy", "staleness").drop_nulls("policy").collect()
    strange = policies.filter(~pl.col("policy").is_in(POLICIES))
    unbounded = policies.filter(pl.col("policy").is_in(BY_STALENESS), pl.col("staleness").is_null())
    return TraceSummary(
        origin(folder),
        manifest(folder) is not None,
        rows,
        runs,
        iterations,
        _impossible(folder),
        *(
            {str(name): count for name, count in found["policy"].value_counts().sort("policy").iter_rows()}
            for found in (strange, unbounded)
        ),
    )


def _impossible(folder: Path) -> pl.DataFrame:
    """Iterations whose computing was more than twice the time since their worker's push before, `since`.

    Nothing says so of an iteration without such a push. Times may be rounded: to their least difference within the run.
    """
    by = ("run", "branch", "worker")
    pushes = scan(folder, "iterations").select(*by, "clock", "seconds", "compute_seconds").filter(
        pl.col("seconds").is_not_null()
    )  # fmt: skip
    steps = pushes.select("run", "seconds").unique().sort("run", "seconds")
    rounding = steps.group_by("run").agg(pl.col("seconds").diff().min().fill_null(0.0).alias("rounding"))
    timed = pushes.sort(*by, "seconds", maintain_order=True).with_columns(pl.col("seconds").diff().over(by).alias("since"))
    longer = pl.col("compute_seconds") > 2 * (pl.col("since") + pl.col("rounding"))
    found = timed.join(rounding, on="run").filter(longer).sort("run", "seconds")
    return found.select("run", "worker", "clock", "compute_seconds", "since").collect()


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
    return one.collect().join(_idle(folder), on="run", how="left").sort("run")


def _idle(folder: Path) -> pl.DataFrame:
    """The share of its workers' time in which the policy held them back, from the start to the end of each run.

    A worker that is silent at the end for longer than its longest mini-batch has waited since its last push. The share is
    null where waiting or the end of the run was not recorded; where a run has several branches, whose times overlap; and
    where the number of workers changes, because a worker that was released from the job does not wait.
    """
    cycle = pl.sum_horizontal("compute_seconds", "pull_seconds", "push_seconds", ignore_nulls=False)
    each = scan(folder, "iterations").group_by("run", "worker").agg(
        pl.when(pl.col("wait_seconds").is_not_null().all()).then(pl.col("wait_seconds").sum()).alias("waited"),
        pl.col("seconds").max().alias("last"),
        cycle.max().alias("longest"),
        pl.col("branch").n_unique().alias("branches"),
    )  # fmt: skip
    ends = scan(folder, "runs").select("run", pl.col("seconds").alias("end"))
    teams = scan(folder, "settings").group_by("run").agg(pl.col("workers").n_unique().alias("teams"))
    silent = pl.col("end") - pl.col("last")
    held = pl.col("waited") + pl.when(silent > pl.col("longest")).then(silent).otherwise(0.0)
    same = (pl.col("branches").max() == 1) & (pl.col("teams").first().fill_null(1) == 1)
    known = same & (pl.col("end").first() > 0) & held.is_not_null().all()
    share = pl.when(known).then(held.sum() / (pl.len() * pl.col("end").first()))
    joined = each.join(ends, on="run").join(teams, on="run", how="left")
    return joined.group_by("run").agg(share.alias("idle_share")).collect()
