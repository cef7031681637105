"""Mini-batch times of ten workers each, recorded on Alibaba's PAI (cluster-trace-gpu-v2020, Weng et al., NSDI'22).

Source format: ``job_<n>_norm.csv`` with worker, gpu (share requested, in percent of one), time (seconds since the job's
first sample, nominally every 10 s) and batch_time_norm (mini-batch time, scaled per job to a maximum of 1000: only ratios
within a job mean anything); and ``coefficient_variation*.csv``, a row per job and a column per iteration, standard deviation
over mean of the workers' times. Exact duplicates are one sample (job 2 has such a pair). Also reads the same data as
minibatch.parquet and cov.parquet.
"""

from __future__ import annotations

import re
from pathlib import Path

import polars as pl

from traces.foreign.parquet import read_parquet
from traces.foreign.text import bytes_of, read_csv
from traces.importers.source import (
    Imported,
    RemoteFile,
    Source,
    find_files,
    json_text,
    nothing_to_import,
    table,
    without_duplicates,
)
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "read"]

_LONGEST_TICK_SECONDS = 1000
_WHOLE, _FLOAT = pl.Int64(), pl.Float64()
_WORKER = Column(_WHOLE, low=0, high=100_000)
_SHARE = Column(_FLOAT, low=0, high=100_000)
_TIME = Column(_FLOAT, low=0, high=3.2e7)
_NORM = Column(_FLOAT, low=0, high=1000)
_RAW = TableRules({"worker": _WORKER, "gpu": _SHARE, "time": _TIME, "batch_time_norm": _NORM}, time="time", by=("worker",))
_TABLED = TableRules(
    {"job": _WORKER, "worker": _WORKER, "gpu_share_pct": _SHARE, "t_s": _TIME, "batch_time_norm": _NORM},
    key=("job", "worker", "t_s"),
    time="t_s",
    by=("job", "worker"),
)
_VARIATION = Column(_FLOAT, low=0, high=100)
_COV = TableRules(
    {"job": _WORKER, "iteration": _WORKER, "cov": _VARIATION}, key=("job", "iteration"), time="iteration", by=("job",)
)
_KINDS = ("job_*_norm.csv", "minibatch.parquet"), ("coefficient_variation*.csv", "cov.parquet")


def read(path: Path) -> Imported:
    """`path` is a file of the kinds above, or a folder of them."""
    samples, variations = (find_files(path, *kinds) for kinds in _KINDS)
    if path.is_file():
        samples, variations = ([], [path]) if "co" in path.name[:2] else ([path], [])
    if not samples + variations:
        raise nothing_to_import(path, *_KINDS[0], *_KINDS[1])
    tables = [_samples(p) for p in samples] + [_variation(p) for p in variations]
    joined = {
        name: pl.concat([t[name] for t in tables if name in t]) for name in dict.fromkeys(n for t in tables for n in t)
    }
    return Imported(joined, (*samples, *variations))


def _samples(path: Path) -> dict[str, pl.DataFrame]:
    """Mini-batch times: runs, settings and probes."""
    if path.suffix == ".parquet":
        frame = read_parquet(path, _TABLED).with_columns(run=pl.format("minibatch/job_{}", "job"), dropped=0)
        frame = frame.rename({"gpu_share_pct": "gpu", "t_s": "time"})
    else:
        frame = _raw(path)
    _check_ticks(frame, path)
    by_run = frame.group_by("run", maintain_order=True)
    jobs = by_run.agg(
        pl.col("time").max(), pl.col("worker").n_unique(), pl.col("gpu").unique().sort(), pl.col("dropped").max()
    )
    runs, settings = [], []
    for job in jobs.to_dicts():
        extras = json_text({"duplicates_dropped": job["dropped"]})
        runs.append({"run": job["run"], "seconds": job["time"], "extras": extras})
        options = json_text({"gpu_share_percent": job["gpu"]})
        settings.append({"run": job["run"], "seconds": 0.0, "workers": job["worker"], "options": options})
    probes = frame.select("run", node=pl.format("worker{}", "worker"), seconds="time", relative_seconds="batch_time_norm")
    return {"runs": table("runs", runs), "settings": table("settings", settings), "probes": table("probes", probes)}


def _raw(path: Path) -> pl.DataFrame:
    frame = read_csv(path, _RAW)
    kept = without_duplicates(frame, path, "worker", "time")
    named = re.match(r"(job_\w+?)_norm", path.stem)
    name = named[1] if named else path.stem
    return kept.with_columns(run=pl.lit(f"minibatch/{name}"), dropped=pl.lit(frame.height - kept.height))


def _check_ticks(frame: pl.DataFrame, path: Path) -> None:
    """Raise TraceError if samples are so far apart that the times cannot be seconds."""
    gaps = frame.select(pl.col("time").diff().over("run", "worker")).to_series()
    median = gaps.drop_nulls().median()
    if isinstance(median, float) and median > _LONGEST_TICK_SECONDS:
        row = int(gaps.is_not_null().arg_true()[0])
        why = f"samples are {median:g} s apart, and 10 s are nominal (are these milliseconds?)."
        raise fault(path, why, row=row, column="time")


def _variation(path: Path) -> dict[str, pl.DataFrame]:
    """Coefficients of variation: runs and progress."""
    if path.suffix == ".parquet":
        frame = read_parquet(path, _COV).with_columns(job=pl.format("job_{}", pl.col("job").cast(pl.String).str.zfill(2)))
    else:
        frame = _wide(path)
    frame = frame.with_columns(run=pl.format("cov/{}", "job"))
    runs = frame.group_by("run", maintain_order=True).agg(steps=pl.len())
    return {
        "runs": table("runs", runs),
        "progress": table("progress", frame.select("run", steps="iteration", variation="cov")),
    }


def _wide(path: Path) -> pl.DataFrame:
    """The file with a column per iteration, as rows of job, iteration, cov. A short job has blanks at its end."""
    head = bytes_of(path).split(b"\n", 1)[0].decode("utf-8-sig", errors="replace").strip("\r")
    steps = head.split(",")[1:]
    for column, step in enumerate(steps):
        if step != str(column):
            raise fault(path, f"the header has {step[:40]!r} where iteration {column} should be.")
    columns = {"job": Column(pl.String())} | {step: _VARIATION._replace(required=False) for step in steps}
    frame = read_csv(path, TableRules(columns, key=("job",)), ends=False, index="job")
    long = frame.unpivot(index="job", variable_name="iteration", value_name="cov").with_columns(
        pl.col("iteration").cast(_WHOLE)
    )
    gaps = long.filter(pl.col("cov").is_not_null().cum_sum(reverse=True).over("job") > 0, pl.col("cov").is_null())
    if gaps.height:
        raise fault(path, f"job {gaps['job'][0]!r} has a gap.", column=str(gaps["iteration"][0]))
    return long.drop_nulls().sort("job", "iteration")


SOURCE = Source(
    summary="mini-batch times of workers on shared GPUs: straggler episodes, lasting differences",
    repository="alibaba/clusterdata",
    commit="7a6c496e4f4b6ce6150be8f881cb051bf2abff42",
    folder="cluster-trace-gpu-v2020/mini-batch-time/data",
    licence="CC BY 4.0; its README asks for research or study use",
    cite="Alibaba Group, cluster-trace-gpu-v2020; Weng et al., MLaaS in the Wild, NSDI'22",
    read=read,
    files=(
        RemoteFile("job_1_norm.csv", "6f555e44ababa68c25659f911eb28fa7658f7ff0b3c08161a57b3bce0bf0d2dd"),
        RemoteFile("job_2_norm.csv", "c1945786e809ec0c204aa3f0e30d7dd3111234ef873707cb8304bdd290d433b2"),
        RemoteFile("job_3_norm.csv"),
        RemoteFile("job_4_norm.csv"),
    ),
)
