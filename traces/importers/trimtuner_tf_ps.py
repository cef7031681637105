"""TensorFlow parameter-server runs on AWS over machines, synchronism and training parameters (Mendes et al., TrimTuner).

Source format: ``cnn.csv`` and ``rnn.csv``, a row per setting, each the mean of three runs on MNIST: training_time (seconds),
acc, total_iterations with their standard deviations, n_workers, n_ps (always 1), vm_flavor, learning_rate, batch_size,
synchronism, training_set_size. The lists of intermediate accuracies have no times and are not read. The stopping rule is
unknown, so the speed of a worker cannot be computed from this data. Also reads tf_ps_runs.parquet.
"""

from __future__ import annotations

from pathlib import Path

import polars as pl

from traces.foreign.parquet import read_parquet
from traces.foreign.text import read_csv
from traces.importers.source import Imported, RemoteFile, Source, find_files, nothing_to_import, table
from traces.plausible import Column, TableRules

__all__ = ["SOURCE", "read"]

_PRICES = {"t2.small": 0.023, "t2.medium": 0.0464, "t2.xlarge": 0.1856, "t2.2xlarge": 0.3712}
"""USD per hour of a worker or server; a run also pays for a master of the largest type (source: tests/run_trimtuner.py)."""

_TEXT, _WHOLE, _FLOAT = pl.String(), pl.Int64(), pl.Float64()
_COUNT = Column(_WHOLE, low=1, high=10_000_000)
_SECONDS = Column(_FLOAT, low=1e-3, high=7200)  # the longest takes eleven minutes
_SHARE = Column(_FLOAT, low=0, high=1)
_SETTING = {
    "n_ps": Column(_WHOLE, low=1, high=1000),
    "n_workers": Column(_WHOLE, low=1, high=1000),
    "vm_flavor": Column(_TEXT, among=tuple(_PRICES)),
    "synchronism": Column(_TEXT, among=("sync", "async")),
    "batch_size": _COUNT,
    "learning_rate": Column(_FLOAT, low=0, high=1e3),
    "training_set_size": _COUNT,
}
_RAW = TableRules(
    _SETTING
    | {
        "training_time": _SECONDS,
        "standard deviation time": _SECONDS._replace(low=0),
        "acc": _SHARE,
        "standard deviation accuarcy": _SHARE,
        "total_iterations": _COUNT,
        "standard deviation iteration": Column(_FLOAT, low=0),
        "iterations_counted": Column(_WHOLE, low=0),
    },
    key=tuple(_SETTING),
)
_OURS = {
    "training_time": "training_time_s",
    "standard deviation time": "training_time_std_s",
    "standard deviation accuarcy": "acc_std",
    "standard deviation iteration": "total_iterations_std",
}
_TABLED = TableRules({"job": Column(_TEXT)} | {_OURS.get(n, n): c for n, c in _RAW.columns.items()}, key=("job", *_SETTING))


def read(path: Path) -> Imported:
    """`path` is one of these files, or a folder of them."""
    paths = find_files(path, "tf_ps_runs.parquet", "[cr]nn*.csv")
    if not paths:
        raise nothing_to_import(path, "cnn.csv", "rnn.csv", "tf_ps_runs.parquet")
    frames = [_raw(p) if p.suffix == ".csv" else read_parquet(p, _TABLED) for p in paths]
    frame = pl.concat(frames)
    names = ["job", "vm_flavor", "n_workers", "synchronism", "batch_size", "learning_rate", "training_set_size"]
    frame = frame.with_columns(run=pl.format("{}/{}/{}/{}/{}/{}/{}", *names))
    hourly = (pl.col("n_workers") + pl.col("n_ps")) * pl.col("vm_flavor").replace_strict(_PRICES) + _PRICES["t2.2xlarge"]
    runs = frame.select(
        "run",
        workload="job",
        cluster="vm_flavor",
        seconds="training_time_s",
        seconds_sd="training_time_std_s",
        steps="total_iterations",
        steps_sd="total_iterations_std",
        accuracy="acc",
        accuracy_sd="acc_std",
        cost_usd=hourly * pl.col("training_time_s") / 3600,
        extras=pl.struct("iterations_counted").struct.json_encode(),
    )
    settings = frame.select(
        "run",
        "batch_size",
        "learning_rate",
        seconds=0.0,
        workers="n_workers",
        servers="n_ps",
        policy=pl.col("synchronism").replace_strict({"sync": "bsp", "async": "asp"}),
        options=pl.struct("training_set_size", "vm_flavor").struct.json_encode(),
    )
    return Imported({"runs": table("runs", runs), "settings": table("settings", settings)}, tuple(paths))


def _raw(path: Path) -> pl.DataFrame:
    frame = read_csv(path, _RAW, ends=False).rename(_OURS)
    return frame.select(pl.lit(path.name.split(".")[0]).alias("job"), pl.all()).select(*_TABLED.columns)


SOURCE = Source(
    summary="2,880 settings of TensorFlow PS runs on AWS: seconds, accuracy, cost",
    repository="pedrogbmendes/TrimTuner",
    commit="a9dec1f1ac610e6ec6d54cfaf5f9c93bc4f80f97",
    folder="dataset_NN_Tensorflow",
    licence="MIT, Copyright (c) 2020 TrimTuner",
    cite="Mendes et al., TrimTuner",
    read=read,
    files=(
        RemoteFile("cnn.csv"),
        RemoteFile("rnn.csv"),
    ),
)
