"""Operations of every worker in sampled steps of three large training jobs (ByteDance, StragglerAnalysis).

Source format: ``trace-<job>.parquet``, a row per operation: dp_rank, stage, rank, step (sampled, not contiguous), optype,
start_ts (seconds since the start of the step), duration (seconds), seq_id; beside it ``meta-<job>.yaml`` (sizes of the job)
and ``result-<job>.json`` (step_t_base, the recorded time of every step), which must agree with the trace. Times of
communication include waiting for the slowest peer. A pull is params-all-gather here, a push is grads-reduce-scatter. Also
reads these sums as worker_step.parquet.
"""

from __future__ import annotations

import re
from pathlib import Path

import msgspec
import polars as pl

from traces.foreign.parquet import read_parquet
from traces.foreign.text import json_of, lines_of
from traces.importers.source import Imported, RemoteFile, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "read"]

_LONGEST_SECONDS = 600.0
_AGREED_SECONDS = 1e-4
_OPERATIONS = (
    "forward-compute",
    "backward-compute",
    "forward-send",
    "forward-recv",
    "backward-send",
    "backward-recv",
    "grads-reduce-scatter",
    "params-all-gather",
    "layernorm-grads-all-reduce",
    "embedding-grads-all-reduce",
    "optimizer",
    "optimizer-clip-main-grad",
    "gc",
)
_WHOLE = Column(pl.Int64(), low=0, high=2**31 - 1)
_SPELL = Column(pl.Float64(), low=0, high=_LONGEST_SECONDS)
_RAW = TableRules(
    {
        "dp_rank": _WHOLE,
        "stage": _WHOLE,
        "rank": _WHOLE,
        "step": _WHOLE,
        "optype": Column(pl.String(), among=_OPERATIONS),
        "start_ts": Column(pl.Float64(), low=-1.0, high=_LONGEST_SECONDS),
        "duration": _SPELL,
        "seq_id": _WHOLE,
        "mc": Column(pl.Int64(), low=-1),
        "mb_id": Column(pl.Int64(), low=-1),
    },
    key=("rank", "step", "optype", "seq_id", "mc", "mb_id"),
)
_TABLED = TableRules(
    {
        "job": Column(pl.String()),
        "step": _WHOLE,
        "stage": _WHOLE,
        "rank": _WHOLE,
        "fwd_s": _SPELL,
        "bwd_s": _SPELL,
        "grads_reduce_scatter_s": _SPELL,
        "params_all_gather_s": _SPELL,
        "step_time_s": _SPELL,
    },
    key=("job", "step", "rank"),
    time="step",
    by=("job", "rank"),
)


class _Result(msgspec.Struct):
    step_t_base: dict[str, float]


def read(path: Path) -> Imported:
    """`path` is a trace-<job>.parquet, a folder of them, or one with worker_step.parquet."""
    paths = find_files(path, "trace-*.parquet", "worker_step.parquet")
    if not paths:
        raise nothing_to_import(path, "trace-*.parquet", "worker_step.parquet")
    inputs, frames, sizes = list(paths), [], {}
    for one in paths:
        if one.name == "worker_step.parquet":
            frames.append(read_parquet(one, _TABLED))
            continue
        job = re.sub("^trace-", "", one.stem)
        sums = _summed(read_parquet(one, _RAW), job)
        result, meta = one.with_name(f"result-{job}.json"), one.with_name(f"meta-{job}.yaml")
        if result.is_file():
            _check_steps(sums, json_of(result, _Result).step_t_base, one)
            inputs.append(result)
        if meta.is_file():
            sizes[job] = _sizes(meta)
            inputs.append(meta)
        frames.append(sums)
    return Imported(_tables(pl.concat(frames), sizes), tuple(inputs))


def _summed(frame: pl.DataFrame, job: str) -> pl.DataFrame:
    """The columns of `_TABLED`: seconds per step and worker, by kind of operation."""

    def sums(kind: str) -> pl.Expr:
        return pl.col("duration").filter(pl.col("optype") == kind).sum()

    end = pl.col("start_ts") + pl.col("duration")
    took = frame.group_by("step").agg(step_time_s=end.max() - pl.col("start_ts").min())
    by_worker = frame.group_by("step", "stage", "rank").agg(
        fwd_s=sums("forward-compute"),
        bwd_s=sums("backward-compute"),
        grads_reduce_scatter_s=sums("grads-reduce-scatter"),
        params_all_gather_s=sums("params-all-gather"),
    )
    joined = by_worker.join(took, on="step").with_columns(job=pl.lit(job)).select(*_TABLED.columns)
    return joined.sort("step", "rank")


def _check_steps(sums: pl.DataFrame, result: dict[str, float], path: Path) -> None:
    """Raise TraceError unless the job's result has the same steps with the same times."""
    took = dict(sums.select("step", "step_time_s").unique().iter_rows())
    for step, seconds in took.items():
        base = result.get(str(step))
        if base is None or not abs(base - seconds) <= _AGREED_SECONDS:
            why = f"step {step} takes {seconds:g} s here, and {base} in its result (are these milliseconds?)."
            raise fault(path, why, column="duration")


def _sizes(path: Path) -> dict[str, int]:
    """The integers in a file of lines ``name: value``."""
    pairs = [re.fullmatch(r"(\w{1,40}): (\d{1,9})", line.strip()) for line in lines_of(path, ends=False)]
    return {pair[1]: int(pair[2]) for pair in pairs if pair}


def _tables(frame: pl.DataFrame, sizes: dict[str, dict[str, int]]) -> dict[str, pl.DataFrame]:
    runs, settings = [], []
    for (job,), one in frame.group_by("job", maintain_order=True):
        stages = dict(one.select("rank", "stage").unique().sort("rank").iter_rows())
        options = json_text(sizes.get(str(job), {}) | {"stage_of_worker": {str(k): v for k, v in stages.items()}})
        runs.append({"run": job, "steps": one["step"].n_unique()})
        settings.append({"run": job, "seconds": 0.0, "workers": len(stages), "policy": "bsp", "options": options})
    iterations = frame.select(
        run="job",
        worker="rank",
        clock="step",
        step_seconds="step_time_s",
        compute_seconds=pl.col("fwd_s") + pl.col("bwd_s"),
        pull_seconds="params_all_gather_s",
        push_seconds="grads_reduce_scatter_s",
    )
    return {
        "runs": table("runs", runs),
        "settings": table("settings", settings),
        "iterations": table("iterations", iterations),
    }


SOURCE = Source(
    summary="compute and communication times of workers in large training jobs, one with a slow worker",
    repository="ByteDance-Seed/StragglerAnalysis",
    commit="8efcd7f37f158af26ac64d0b6fbf1f22d28a6e83",
    folder="data",
    licence="Apache-2.0, Copyright (c) 2025 Bytedance Ltd.; files are changed by this import",
    cite="Understanding Stragglers in Large Model Training Using What-if Analysis",
    read=read,
    files=(
        RemoteFile("meta-AR.yaml", "bdeaeb23210bd6ea2ad60c931daeee07e37226ce884df83a151d542a49fbf7a3"),
        RemoteFile("meta-SE.yaml", "8e5df3080904c3d664221b4052d704a0af7cac0be4daa97afa4af2a0a0e41d31"),
        RemoteFile("meta-ST.yaml", "438c18cd554d82ec03fe02b0ce4c0d1b67a64aed3d7c558300de8a34cf3a467d"),
        RemoteFile("result-AR.json"),
        RemoteFile("result-SE.json"),
        RemoteFile("result-ST.json", "292fe0ede0dc7746a75eb1b27cd08950c4c66d244e9d6ecd357403f85ba0b632"),
        RemoteFile("trace-AR.parquet"),
        RemoteFile("trace-SE.parquet"),
        RemoteFile("trace-ST.parquet", "85a995b32699992319e19fa2248cf43d2965bbb6b51440e8a6147d9abc511461"),
    ),
)
