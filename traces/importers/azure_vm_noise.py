"""Speed of virtual machines of one type, over machines and 483 days (Azure; Freischuetz et al., TUNA, EuroSys'25).

Source format: a tree ``test_suite=<s>/test_name=<t>/vm_lifespan=<long|short>/vm_region=<r>/vm_sku=<k>/unit=<u>.csv`` with
value (in the unit), runtime (seconds of the test), starttime (``YYYY-MM-DD HH:MM:SS.mmm``, time zone unknown) and VM_id,
which is unique only within its file. Only the tests of Sysbench are imported; their values are rates: larger is faster.
Also reads vm_noise.parquet.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import polars as pl

from traces.foreign.parquet import read_parquet
from traces.foreign.text import read_csv
from traces.importers.source import Imported, Source, find_files, json_text, nothing_to_import, table, without_duplicates
from traces.plausible import Column, TableRules, fault

__all__ = ["SOURCE", "read"]

_FIRST, _LAST = 1.2e9, 4.1e9  # Unix seconds, 2008 to 2099
_VALUE = Column(pl.Float64(), low=0, high=1e12)
_ID = Column(pl.Int64(), low=0)
_RAW = TableRules(
    {
        "value": _VALUE,
        "runtime": Column(pl.Float64(), low=0, high=10_000),  # a test takes a minute or two
        "starttime": Column(pl.String()),
        "VM_id": _ID,
    }
)
_WORD = Column(pl.String())
_TABLED = TableRules(
    {
        "metric": _WORD,
        "vm_sku": _WORD,
        "vm_region": _WORD,
        "vm_lifespan": _WORD._replace(among=("long", "short")),
        "vm_id": _ID,
        "start_epoch_s": Column(pl.Float64(), low=_FIRST, high=_LAST),
        "value": _VALUE,
    },
    key=("metric", "vm_sku", "vm_region", "vm_lifespan", "vm_id", "start_epoch_s"),
)
_LEVELS = ("test_suite", "test_name", "vm_lifespan", "vm_region", "vm_sku", "unit")
_BY = ("metric", "vm_sku", "vm_region", "vm_lifespan")


def read(path: Path) -> Imported:
    """`path` is the tree or a folder above it, one of its files, or a folder with vm_noise.parquet."""
    paths = find_files(path, "vm_noise.parquet", "**/unit=*.csv")
    if not paths:
        raise nothing_to_import(path, "**/unit=*.csv", "vm_noise.parquet")
    if paths[0].suffix == ".csv":
        paths = [p for p in paths if _level(p, "test_suite") == "Sysbench"]
        if not paths:
            raise fault(path, "it holds no test of Sysbench, and only these are read.")
        frames = [_raw(p) for p in paths]
    else:
        frames = [read_parquet(p, _TABLED) for p in paths]
    return Imported(_tables(pl.concat(frames)), tuple(paths))


def _level(path: Path, name: str) -> str:
    """The value of one of `_LEVELS` in the path of a file."""
    for part in path.parts[-len(_LEVELS) :]:
        if part.startswith(f"{name}="):
            return part.removeprefix(f"{name}=").removesuffix(".csv")
    raise fault(path, f"no folder of its path is called {name}=...")


def _raw(path: Path) -> pl.DataFrame:
    levels = {name: _level(path, name) for name in _LEVELS}
    if levels["vm_lifespan"] not in ("long", "short"):
        raise fault(path, f"vm_lifespan={levels['vm_lifespan']} is neither long nor short.")
    frame = read_csv(path, _RAW)
    moments = frame["starttime"].str.strptime(pl.Datetime("ms"), "%Y-%m-%d %H:%M:%S%.f", strict=False)
    if moments.null_count():
        row = int(moments.is_null().arg_true()[0])
        raise fault(path, f"{frame['starttime'][row][:40]!r} is no time.", row=row, column="starttime")
    named = re.sub(r"\W+", "_", f"{levels['test_suite']} {levels['test_name']} {levels['unit']}".replace(":", "")).lower()
    made = frame.select(
        "value",
        metric=pl.lit(named),
        vm_sku=pl.lit(levels["vm_sku"]),
        vm_region=pl.lit(levels["vm_region"]),
        vm_lifespan=pl.lit(levels["vm_lifespan"]),
        vm_id="VM_id",
        start_epoch_s=moments.dt.epoch("ms") / 1000.0,
    ).select(*_TABLED.columns)
    return without_duplicates(made, path, "vm_id", "start_epoch_s")


def _tables(frame: pl.DataFrame) -> dict[str, pl.DataFrame]:
    """Runs, one per file of the tree, and probes."""
    frame = frame.with_columns(run=pl.concat_str(_BY, separator="/"))
    runs: list[dict[str, Any]] = []
    spans = frame.group_by("run", "vm_sku", "metric", maintain_order=True).agg(
        first=pl.col("start_epoch_s").min(), last=pl.col("start_epoch_s").max(), machines=pl.col("vm_id").n_unique()
    )
    for one in spans.to_dicts():
        extras = {"start_unix_seconds": one["first"], "machines": one["machines"], "relative_speed_is": one["metric"]}
        taken = one["last"] - one["first"]
        runs.append({"run": one["run"], "cluster": one["vm_sku"], "seconds": taken, "extras": json_text(extras)})
    probes = frame.select(
        "run",
        node=pl.format("vm{}", "vm_id"),
        seconds=pl.col("start_epoch_s") - pl.col("start_epoch_s").min().over("run"),
        relative_speed="value",
    )
    return {"runs": table("runs", runs), "probes": table("probes", probes.sort("run", "node", "seconds"))}


SOURCE = Source(
    summary="speed of CPUs and memory over many virtual machines of two types, over 483 days",
    repository="Azure/AzurePublicDataset",
    commit="b469a113cedca53ddc3bdea71a143dc4b7d8700c",
    folder="vm-noise-data",
    licence="CC BY 4.0",
    cite="Freischuetz et al., TUNA, EuroSys'25",
    read=read,
    size="284 MB in 776 files",
)
