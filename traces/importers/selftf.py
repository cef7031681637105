"""Asynchronous TensorFlow parameter-server runs over splits of 36 machines and thread pools (MLSysTune, "SelfTF").

Source format: ``<model>_testing_data_for_bo_with_progress.csv``, one run a row: N_iterations (global steps), N_workers (the
other nodes of 36 are servers), N_intra (threads; inter-op gets the other of 16), Optimizer, Learning_rate, Batch_size,
current_loss (final), time_cost (seconds, *less* the time until the loss first fell 0.005 below the run before's first loss),
model_name, job_id, first_loss (at that moment). A time of 0 means that there is none. For a fourth model, INCEPTION, the
number of machines is not recorded, so its number of servers is unknown. And ``<model>_testing_result.csv``, the same columns
with times and first losses that are not trimmed. Also reads measurements.csv, the same runs in one table.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from traces.foreign.text import read_csv
from traces.importers.source import Imported, RemoteFile, Source, find_files, nothing_to_import, table
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "read"]

_NODES, _CORES = 36, 16
_LONGEST_STEP_SECONDS = 200.0  # one real run takes 74 s
_WORKLOADS = {"CNN": "cifar_cnn", "LR": "kdd12_lr", "SVM": "criteo_svm"}
_TEXT, _WHOLE, _FLOAT = pl.String(), pl.Int64(), pl.Float64()
_SECONDS = Column(_FLOAT, low=1e-3, high=3.2e7)
_RAW = TableRules(
    {
        "N_iterations": Column(_WHOLE, low=1),
        "N_workers": Column(_WHOLE, low=1, high=_NODES - 1),
        "N_intra": Column(_WHOLE, low=1, high=_CORES - 1),
        "Optimizer": Column(_TEXT),
        "Learning_rate": Column(_FLOAT, low=0),
        "Batch_size": Column(_WHOLE, low=1),
        "current_loss": Column(_FLOAT),
        "time_cost": _SECONDS._replace(low=0),
        "model_name": Column(_TEXT),
        "job_id": Column(_TEXT),
        "first_loss": Column(_FLOAT),
    },
    key=("job_id",),
)
_TABLED = TableRules(
    {
        "workload": Column(_TEXT),
        "run": Column(_WHOLE, low=0),
        "n_workers": Column(_WHOLE, low=1),
        "n_ps": Column(_WHOLE, low=1),
        "intra_op": Column(_WHOLE, low=1),
        "inter_op": Column(_WHOLE, low=1),
        "batch_size": Column(_WHOLE, low=1),
        "learning_rate": Column(_FLOAT, low=0),
        "optimizer": Column(_TEXT),
        "iterations": Column(_WHOLE, low=1),
        "seconds": _SECONDS._replace(required=False),
        "seconds_trimmed": _SECONDS,
        "final_loss": Column(_FLOAT),
        "first_loss": Column(_FLOAT, required=False),
        "first_loss_trimmed": Column(_FLOAT),
    },
    key=("workload", "run"),
)
_TRIMMED, _WHOLE_RUNS = "*_testing_data_for_bo_with_progress.csv", "_testing_result.csv"


def read(path: Path) -> Imported:
    """`path` is a file of the kinds above, or a folder of them."""
    paths = find_files(path, _TRIMMED, "measurements.csv")
    if not paths:
        raise nothing_to_import(path, _TRIMMED, "measurements.csv")
    inputs, frames = list(paths), []
    for one in paths:
        if one.name == "measurements.csv":
            frames.append(_checked(read_csv(one, _TABLED), one, "iterations"))
            continue
        beside = one.with_name(one.name.removesuffix(_TRIMMED[1:]) + _WHOLE_RUNS)
        frames.append(_raw(one, beside if beside.is_file() else None))
        inputs += [beside] if beside.is_file() else []
    frame = pl.concat(frames).with_columns(number="run", run=pl.format("{}/{}", "workload", "run"))
    runs = frame.select(
        "run", "workload", "seconds", "first_loss",
        trimmed_seconds="seconds_trimmed", trimmed_loss="first_loss_trimmed", steps="iterations", loss="final_loss",
    )  # fmt: skip
    settings = frame.select(
        "run", "batch_size", "learning_rate",
        seconds=0.0, workers="n_workers", servers="n_ps", policy=pl.lit("asp"),
        intra_threads="intra_op", inter_threads="inter_op",
        options=pl.struct("optimizer").struct.json_encode(),
    )  # fmt: skip
    return Imported({"runs": table("runs", runs), "settings": table("settings", settings)}, tuple(inputs))


def _raw(path: Path, whole: Path | None) -> pl.DataFrame:
    """One model's file, in the columns of `_TABLED`; end-to-end times come from the other file, if it exists."""
    frame = _checked(read_csv(path, _RAW), path, "N_iterations")
    if whole is not None:
        ends = _checked(read_csv(whole, _RAW), whole, "N_iterations")
        frame = frame.join(ends.select("job_id", seconds="time_cost", first="first_loss"), on="job_id", how="left")
    else:
        frame = frame.with_columns(seconds=pl.lit(None, _FLOAT), first=pl.lit(None, _FLOAT))
    return frame.select(
        workload=pl.col("model_name").replace(_WORKLOADS),
        run=pl.int_range(pl.len()),
        n_workers="N_workers",
        n_ps=pl.when(pl.col("model_name").is_in(list(_WORKLOADS))).then(_NODES - pl.col("N_workers")),
        intra_op="N_intra",
        inter_op=_CORES - pl.col("N_intra"),
        batch_size="Batch_size",
        learning_rate="Learning_rate",
        optimizer="Optimizer",
        iterations="N_iterations",
        seconds="seconds",
        seconds_trimmed=pl.when(pl.col("time_cost") > 0).then("time_cost"),
        final_loss="current_loss",
        first_loss="first",
        first_loss_trimmed="first_loss",
    )


def _checked(frame: pl.DataFrame, path: Path, steps: str) -> pl.DataFrame:
    """Raise TraceError if a worker's step takes so long that the times cannot be seconds."""
    workers, times = ("n_workers", ["seconds_trimmed", "seconds"]) if steps == "iterations" else ("N_workers", ["time_cost"])
    for name in times:
        each = frame[workers] * frame[name] / frame[steps]
        rows = (each > _LONGEST_STEP_SECONDS).fill_null(value=False).arg_true()
        if len(rows):
            why = (
                f"a worker's step would take {each[rows[0]]:g} s, above {_LONGEST_STEP_SECONDS:g} (are these milliseconds?)."
            )
            raise fault(path, why, row=int(rows[0]), column=name)
    return frame


SOURCE = Source(
    summary="TensorFlow PS runs over splits of 36 machines and thread pools: steps, seconds, losses",
    repository="MLSysTune/MLSysTune",
    commit="82fbeadb64a476a6d37afc7f34bd29ca2627740e",
    folder="test/bo_test",
    licence="none stated: do not pass the data on",
    cite="MLSysTune/MLSysTune (test/bo_test)",
    read=read,
    files=(
        RemoteFile("cnn_testing_data_for_bo_with_progress.csv"),
        RemoteFile("cnn_testing_result.csv"),
        RemoteFile("inception_testing_data_for_bo_with_progress.csv"),
        RemoteFile("lr_testing_data_for_bo_with_progress.csv"),
        RemoteFile("svm_testing_data_for_bo_with_progress.csv"),
    ),
)
