"""Makes traces/data/public from recordings of others: ``python -m tests.support.ship_recordings FOLDER``.

FOLDER has one folder per source, as HARNESS_RECORDINGS of the importers' tests. Only sources whose licence lets us pass the
data on are listed here. The same input gives the same bytes. The licences are copied as they are.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path

import polars as pl

from harness.record import MADE_BY
from traces.importers import import_trace
from traces.parts import check_trace, digest_of
from traces.shipped import PUBLIC

SHIPPED = {
    "azure-vm-noise": "azure-vm-noise/vm_noise.parquet",
    "bamboo-spot": "bamboo-spot/raw",
    "bytedance-straggler": "bytedance-straggler/worker_step.parquet",
    "dlrm-locality": "dlrm-locality",
    "infinitehbd-faults": "infinitehbd-faults",
    "sync-switch": "sync-switch",
    "trimtuner-tf-ps": "trimtuner-tf-ps/tf_ps_runs.parquet",
    "uta-ec2-tokenbucket": "uta-ec2-token-bucket/bandwidth.parquet",
}
"""Where each source's input lies in FOLDER."""

_SHORT_MACHINES = 500  # of each test, machine type and region
_LONG_DAYS = 7
_DAY_SECONDS = 86_400


def thinned(frame: pl.DataFrame) -> pl.DataFrame:
    """Azure: of machines that were measured once, 500 spread evenly over time; of the others, one sample in seven days."""
    by = ["metric", "vm_sku", "vm_region", "vm_lifespan"]
    short = frame.filter(vm_lifespan="short").sort(*by, "start_epoch_s", "vm_id")
    place, count = pl.int_range(pl.len()).over(by), pl.len().over(by)
    # One of each of 500 equal parts: where a part begins, the whole number of parts before it grows.
    short = short.filter((place * _SHORT_MACHINES // count) != ((place - 1) * _SHORT_MACHINES // count))
    long = frame.filter(vm_lifespan="long").sort(*by, "vm_id", "start_epoch_s")
    week = (pl.col("start_epoch_s") // (_LONG_DAYS * _DAY_SECONDS)).cast(pl.Int64)
    long = long.filter(pl.struct(*by, "vm_id", week.alias("week")).is_first_distinct())
    return pl.concat([short, long])


def ship(recordings: Path, out: Path = PUBLIC) -> None:
    """Write every source of `SHIPPED` to `out`, and its SHA256SUMS."""
    for source, where in SHIPPED.items():
        folder = where.split("/")[0]
        with tempfile.TemporaryDirectory() as spare:
            path = recordings / where
            if source == "azure-vm-noise":
                path = Path(spare) / "vm_noise.parquet"
                thinned(pl.read_parquet(recordings / where)).write_parquet(path)
            shutil.rmtree(out / source, ignore_errors=True)
            import_trace(source, path, out / source, made_by=MADE_BY)
        shutil.copyfile(recordings / folder / "LICENSE", out / source / "LICENSE")
        check_trace(out / source)
    files = sorted(p for p in out.glob("*/**/*") if p.is_file())
    lines = [f"{digest_of(p.read_bytes())}  {p.relative_to(out).as_posix()}\n" for p in files]
    (out / "SHA256SUMS").write_text("".join(lines))


if __name__ == "__main__":
    ship(Path(sys.argv[1]))
