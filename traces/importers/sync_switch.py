"""TensorFlow parameter-server runs that are synchronous, asynchronous, or switch between the two (Li et al., Sync-Switch).

Source format: a folder per run with ``loss.csv`` and ``acc.csv``, TensorBoard's export: Wall time (Unix seconds), Step
(global step), Value (loss of one mini-batch; accuracy). A step is one mini-batch on every worker in BSP, and one mini-batch
of one worker in ASP. Folders are named after the schedule, ``b10-a90-run1``, ``12_88_1``, ``asp_1``: percent of the samples
in the first mode, then in the second. Also reads loss.parquet, accuracy.parquet, runs.csv and job_phases.csv, the same runs
in tables, with the mode of every record and the duration of switches. Seconds count from a run's first record of loss.
Servers share the workers' machines. Batch sizes are from the source's notes, 128 per worker for CIFAR-10 and, by its counts
of steps, 64 for CIFAR-100; notes on single runs say up to which step all workers together had which batch size in BSP, and
which one after it. The option ``bsp_percent`` of a setting is the share of the samples that a run trains in BSP before it
switches to ASP for the rest; runs with another schedule do not have it.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from traces.foreign.parquet import read_parquet
from traces.foreign.text import read_csv
from traces.importers.source import Imported, Source, find_files, json_text, nothing_to_import, table
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "read"]

_TEXT, _WHOLE, _FLOAT = pl.String(), pl.Int64(), pl.Float64()
_NAME, _WORD, _NUMBER = Column(_TEXT), Column(_TEXT, required=False), Column(_FLOAT, required=False)
_STEP = Column(_WHOLE, low=0, high=10_000_000)
_WALL = Column(_FLOAT, low=-3600, high=3.2e6)
_RUN = ("run_id",)
_EXPORT = {"Wall time": Column(_FLOAT, required=False, low=1.2e9, high=4.1e9), "Step": _STEP._replace(required=False)}
_LOSS_EXPORT = TableRules(_EXPORT | {"Value": _NUMBER}, time="Wall time")
_ACCURACY_EXPORT = TableRules(_EXPORT | {"Value": _NUMBER._replace(low=0, high=1)}, time="Wall time")
_LOSS = TableRules(
    {"run_id": _NAME, "wall_s": _WALL, "step": _STEP, "phase": _NAME._replace(among=("BSP", "ASP")), "loss": Column(_FLOAT)},
    key=("run_id", "wall_s", "step"),
    time="wall_s",
    by=_RUN,
)
_ACCURACY = TableRules(
    {"run_id": _NAME, "wall_s": _WALL, "step": _STEP, "accuracy": Column(_FLOAT, low=0, high=1)},
    key=("run_id", "wall_s", "step"),
    time="wall_s",
    by=_RUN,
)
_RUNS = TableRules(
    {
        "run_id": _NAME,
        "dataset": _NAME,
        "model": _WORD,
        "n_workers": Column(_WHOLE, required=False, low=1, high=10_000),
        "schedule": _WORD,
        "straggler": _WORD,
        "n_stragglers": Column(_WHOLE, required=False, low=0),
        "straggler_delay_ms": Column(_FLOAT, required=False, low=0),
        "straggler_freq": _WORD,
        "series": _WORD,
        "variant": _WORD,
        "start_epoch_s": Column(_FLOAT, low=1.2e9, high=4.1e9),
        "best_acc": Column(_FLOAT, required=False, low=0, high=1),
        "switch_cost_est_s": _NUMBER,
        "switch_gap_joblog_s": Column(_FLOAT, required=False, low=0, high=3.2e6),
        "n_holes_over_1000s": Column(_WHOLE, required=False, low=0),
        "hole_flag": _WORD,
        "total_less_holes_s": Column(_FLOAT, required=False, low=0, high=3.2e6),
        "note": _WORD,
    },
    key=_RUN,
)
_PHASES = TableRules(
    {
        "run_id": _NAME,
        "phase_index": Column(_WHOLE, low=0),
        "mode": _NAME._replace(among=("BSP", "ASP")),
        "end_wall_s": _WALL,
        "gap_to_next_s": Column(_FLOAT, required=False, low=0, high=3.2e6),
    },
    key=("run_id", "phase_index"),
)
_KEPT = tuple(name for name in _RUNS.columns if name not in ("run_id", "dataset", "n_workers"))
_BSP_STEPS = {"cifar10": 8_000, "cifar100": 16_000}
"""Steps of a whole job in BSP, with eight workers; in ASP it has eight times as many."""

_BATCH = {"cifar10": 128, "cifar100": 64}
"""Batch size of one worker."""

_OTHER_BATCH = (
    r"BSP (?:total batch )?(?<first>\d+)(?: \([^)]*\))? to step (?<step>\d+), then (?:(?:total batch )?(?<batch>\d+)|ASP)"
)
"""In the note on a run: the batch size of all workers together up to a step, and after it; in ASP the usual one follows."""

_BSP_FIRST = r"^BSP(?:(?<share>\d+(?:\.\d+)?)-ASP\d+(?:\.\d+)?)?$"
"""A schedule that trains this percentage of the samples in BSP and the rest in ASP; without a number, all of them."""

_SCHEDULE = re.compile(
    r"(?:(?P<only>asp|bsp)|(?P<first>[ab]?)(?P<share>\d{1,2}?)(?:[-_](?P<second>[ab]?)|(?=\d\d(?:[-_]|$)))(?P<rest>\d{1,2}))"
    r"(?:[-_].*)?"
)
"""The schedule in a folder's name; the two shares may be written without a separator, as in 1288_1."""


def read(path: Path) -> Imported:
    """`path` is a run's folder, a folder with such folders below, or one with loss.parquet and the tables beside it."""
    paths = find_files(path, "loss.parquet", "**/loss.csv")
    if not paths:
        raise nothing_to_import(path, "**/loss.csv", "loss.parquet")
    if paths[0].suffix == ".csv":
        return _from_exports(paths, path)
    tables = {"accuracy.parquet": _ACCURACY, "runs.csv": _RUNS, "job_phases.csv": _PHASES}
    beside = {name: paths[0].with_name(name) for name in tables}
    for one in beside.values():
        if not one.is_file():
            raise fault(one, "there is no such file, and it is needed beside loss.parquet.")
    loss, accuracy = read_parquet(paths[0], _LOSS), read_parquet(beside["accuracy.parquet"], _ACCURACY)
    runs, phases = read_csv(beside["runs.csv"], _RUNS), read_csv(beside["job_phases.csv"], _PHASES)
    unknown = loss.join(runs, on="run_id", how="anti")
    if unknown.height:
        raise fault(paths[0], f"run {unknown['run_id'][0]!r} is not in runs.csv.", column="run_id")
    loss = loss.with_columns(policy=pl.col("phase").str.to_lowercase())
    return Imported(_tables(loss, accuracy, runs, phases), (*paths, *beside.values()))


# -------------------------------------------------------------------------------------------------------------- exports


def _from_exports(paths: list[Path], root: Path) -> Imported:
    """The recording from a folder of exported CSV files per run."""
    losses, runs, inputs = [], [], list(paths)
    accuracies = [pl.DataFrame(schema=_ACCURACY.schema)]
    for one in paths:
        folder = one.parent
        name = folder.relative_to(root).as_posix() if root.is_dir() and folder != root else folder.name
        loss = _export(one, _LOSS_EXPORT, "loss")
        if not loss.height:
            raise fault(one, "it is empty.")
        start = float(loss["wall_s"][0])
        beside = folder / "acc.csv"
        if beside.is_file():
            inputs.append(beside)
            accuracies.append(_since(_export(beside, _ACCURACY_EXPORT, "accuracy"), name, start))
        dataset = "cifar100" if "cifar100" in folder.as_posix() else "cifar10"
        schedule, policy = _schedule(folder.name, dataset)
        losses.append(_since(loss, name, start).with_columns(policy=policy))
        runs.append({"run_id": name, "dataset": dataset, "schedule": schedule, "start_epoch_s": start})
    described = pl.DataFrame(runs, schema_overrides=_RUNS.schema)
    missing = [pl.lit(None, kind).alias(n) for n, kind in _RUNS.schema.items() if n not in described.columns]
    phases = pl.DataFrame(schema=_PHASES.schema)
    return Imported(
        _tables(pl.concat(losses), pl.concat(accuracies), described.with_columns(missing), phases), tuple(inputs)
    )


def _export(path: Path, rule: TableRules, name: str) -> pl.DataFrame:
    """The records of one file, without the blank lines that some files have."""
    columns = pl.col(list(rule.columns))
    filled = read_csv(path, rule, ends=False).with_row_index("row").filter(pl.any_horizontal(columns.is_not_null()))
    partly = filled.filter(pl.any_horizontal(columns.is_null()))
    if partly.height:
        raise fault(path, "a value is missing.", row=int(partly["row"][0]))
    return filled.select(wall_s="Wall time", step="Step", **{name: "Value"})


def _since(frame: pl.DataFrame, run: str, start: float) -> pl.DataFrame:
    return frame.select(pl.lit(run).alias("run_id"), pl.col("wall_s") - start, pl.all().exclude("wall_s"))


def _schedule(folder: str, dataset: str) -> tuple[str | None, pl.Expr]:
    """The schedule in a folder's name, in percent, and the mode of a record as an expression of its step."""
    parts = _SCHEDULE.fullmatch(folder)
    if parts is None or not (parts["only"] or int(parts["share"]) + int(parts["rest"]) == 100):
        return None, pl.lit(None, _TEXT)
    if parts["only"]:
        return parts["only"].upper(), pl.lit(parts["only"])
    # Folder names round eighths and sixteenths to whole percents: 12 is 12.5 and 6 is 6.25.
    share = {12.0: 12.5, 6.0: 6.25}.get(float(parts["share"]), float(parts["share"]))
    asp_first = parts["first"] == "a"
    steps = _BSP_STEPS[dataset] * (8 if asp_first else 1) * share / 100
    first, second = ("asp", "bsp") if asp_first else ("bsp", "asp")
    name = f"{first.upper()}{share:g}-{second.upper()}{100 - share:g}"
    return name, pl.when(pl.col("step") <= steps).then(pl.lit(first)).otherwise(pl.lit(second))


# --------------------------------------------------------------------------------------------------------------- tables


def _tables(loss: pl.DataFrame, accuracy: pl.DataFrame, runs: pl.DataFrame, phases: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """The tables of a trace from losses, accuracies, runs and phases."""
    progress = pl.concat(
        [
            loss.select(run="run_id", seconds="wall_s", steps="step", policy="policy", training_loss="loss"),
            accuracy.select(run="run_id", seconds="wall_s", steps="step", accuracy="accuracy"),
        ],
        how="diagonal",
    ).sort("run", "seconds", maintain_order=True)
    begun = loss.group_by("run_id", pl.col("policy").rle_id().over("run_id").alias("phase_index"), maintain_order=True).agg(
        pl.col("policy", "wall_s").first()
    )
    ends = loss.group_by("run_id", maintain_order=True).agg(
        seconds=pl.col("wall_s").last(),
        steps=pl.col("step").max(),
        loss=pl.col("loss").last(),
        first_loss=pl.col("loss").first(),
    )
    reached = accuracy.group_by("run_id").agg(accuracy=pl.col("accuracy").last())
    rows = runs.join(ends, on="run_id", maintain_order="left").join(reached, on="run_id", how="left", maintain_order="left")
    return {
        "runs": table("runs", [_run(row) for row in rows.to_dicts()]),
        "settings": table("settings", _settings(loss, runs)),
        "progress": table("progress", progress),
        "reconfigurations": table("reconfigurations", _switches(begun, phases)),
    }


def _run(row: dict[str, Any]) -> dict[str, Any]:
    extras = json_text({k: row[k] for k in _KEPT if row[k] is not None})
    ours = {k: row[k] for k in ("seconds", "steps", "first_loss", "loss", "accuracy")}
    return {"run": row["run_id"], "workload": row["dataset"], "extras": extras} | ours


def _settings(loss: pl.DataFrame, runs: pl.DataFrame) -> pl.DataFrame:
    """The settings of each run: a row at its start, and where the mode or the batch size changes."""
    other = pl.col("variant").str.extract_groups(_OTHER_BATCH)
    usual = pl.col("dataset").replace_strict(_BATCH, default=None, return_dtype=_WHOLE)
    first, then = (_each(other.struct.field(name)) for name in ("first", "batch"))
    share = pl.col("schedule").str.extract_groups(_BSP_FIRST).struct.field("share").cast(_FLOAT)
    percent = pl.when(schedule="BSP").then(100.0).when(schedule="ASP").then(0.0).otherwise(share)
    noted = runs.select(
        "run_id", "n_workers", usual=usual,
        from_step=other.struct.field("step").cast(_WHOLE),
        first=first, then=pl.when(other.struct.field("batch").is_null()).then(usual).otherwise(then),
        bsp_percent=percent,
    )  # fmt: skip
    later = pl.col("step") > pl.col("from_step")
    known = loss.join(noted, on="run_id", how="left", maintain_order="left").with_columns(
        batch_size=pl.when(later).then("then").when(pl.col("from_step").is_not_null()).then("first").otherwise("usual")
    )
    changed = pl.struct("policy", "batch_size").rle_id().over("run_id")
    begun = known.group_by("run_id", changed.alias("index"), maintain_order=True).first()
    percent = pl.concat_str(pl.lit('{"bsp_percent": '), pl.col("bsp_percent"), pl.lit(', "servers_share_nodes": true}'))
    return begun.select(
        "policy", "batch_size", run="run_id", seconds="wall_s", workers="n_workers", servers="n_workers",
        options=pl.coalesce(percent, pl.lit(json_text({"servers_share_nodes": True}))),
    )  # fmt: skip


def _each(total: pl.Expr) -> pl.Expr:
    """The batch size of one worker; null where the total cannot be divided among them."""
    whole = total.cast(_WHOLE)
    return pl.when(whole % pl.col("n_workers") == 0).then(whole // pl.col("n_workers"))


def _switches(begun: pl.DataFrame, phases: pl.DataFrame) -> list[dict[str, Any]]:
    """Every change of mode: when the new mode starts, and the stall, if the job's log has it."""
    logged = {(r["run_id"], r["phase_index"] + 1): r for r in phases.to_dicts() if r["gap_to_next_s"] is not None}
    rows = []
    for row in begun.filter(pl.col("phase_index") > 0).to_dicts():
        log = logged.get((row["run_id"], row["phase_index"]))
        seconds, gap = (
            (row["wall_s"], None) if log is None else (log["end_wall_s"] + log["gap_to_next_s"], log["gap_to_next_s"])
        )
        spent = {"total_seconds": gap, "stall_seconds": gap}
        rows.append({"run": row["run_id"], "seconds": seconds, "method": "checkpoint", "done": True} | spent)
    return rows


SOURCE = Source(
    summary="TensorFlow PS runs in BSP, in ASP, and switching: steps, losses, accuracies, switches",
    repository="cake-lab/Sync-Switch",
    commit="09af0864c3d8745803a4b9c88ccf333eec4101b7",
    folder="data",
    licence="Apache-2.0; files are changed by this import",
    cite="Li, Mangoubi, Xu, Guo, Sync-Switch, ICDCS'21",
    read=read,
)
