"""Traces on disk: they read back as written, damaged parts are refused by name, and a crash loses one batch at most."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from traces import parts
from traces.convert import to_csv, to_few_parts
from traces.parts import Origin, TraceWriter, check_trace, manifest, origin, scan
from traces.plausible import TraceError
from traces.schema import TRACE
from traces.summary import summarise

ORIGIN = Origin("test", "nobody", "of nothing", "CC0", "nobody", (("a.csv", "0" * 64),))


def iterations(rows: int = 10, start: int = 0) -> pl.DataFrame:
    """Two workers in turn: a push every second, so each worker pushes every 2 s."""
    number = np.arange(start, start + rows)
    return pl.DataFrame(
        {
            "run": ["r"] * rows,
            "branch": np.zeros(rows, np.int32),
            "seconds": number + 1.0,
            "worker": (number % 2).astype(np.int32),
            "clock": (number // 2).astype(np.int32),
            "compute_seconds": np.full(rows, 1.5),
            "pull_seconds": np.full(rows, 0.25),
            "push_seconds": np.full(rows, 0.25),
            "staleness": np.ones(rows, np.int32),
            "loss": 1.0 / (1 + number),
        }
    )


def trace(folder: Path, frame: pl.DataFrame | None = None, part_rows: int = 4) -> Path:
    with TraceWriter(folder, ORIGIN, part_rows=part_rows) as writer:
        writer.add("runs", pl.DataFrame({"run": ["r"], "seconds": [10.0]}))
        for one in (iterations() if frame is None else frame).iter_slices(3):
            writer.add("iterations", one)
    return folder


def test_a_folder_with_brackets_is_not_a_pattern(tmp_path):
    """Of "run[1]", nothing was read, or what was in "run1"; CSV files of it were empty."""
    other = trace(tmp_path / "run1", iterations(4))
    folder = trace(tmp_path / "run[1]")
    assert scan(folder, "iterations").collect().height == 10
    assert check_trace(folder) == {"runs": 1, "iterations": 10}
    assert check_trace(other) == {"runs": 1, "iterations": 4}
    to_few_parts(folder, tmp_path / "few")
    assert check_trace(tmp_path / "few") == {"runs": 1, "iterations": 10}
    to_csv(folder, tmp_path / "csv")
    assert (tmp_path / "csv" / "iterations.csv").read_text().count("\n") == 11


def test_a_trace_reads_back_as_written(tmp_path):
    folder = trace(tmp_path / "t")
    back = scan(folder, "iterations").collect()
    assert back.select(iterations().columns).equals(iterations())
    assert back.schema == TRACE["iterations"].schema
    assert back["wait_seconds"].null_count() == 10
    assert scan(folder, "probes").collect().height == 0
    assert check_trace(folder) == {"runs": 1, "iterations": 10}
    assert origin(folder) == ORIGIN
    assert len(list((folder / "iterations").iterdir())) == 2  # of six and of four


def test_the_same_rows_give_the_same_bytes(tmp_path):
    one, two = trace(tmp_path / "1"), trace(tmp_path / "2")
    files = sorted(p.relative_to(one) for p in one.rglob("*") if p.is_file())
    assert all((one / f).read_bytes() == (two / f).read_bytes() for f in files)


def test_every_part_names_its_table_and_origin(tmp_path):
    path = trace(tmp_path / "t") / "iterations" / "000001.parquet"
    said = pl.read_parquet_metadata(path)
    assert (said["harness_trace"], said["table"]) == ("1", "iterations")
    assert '"licence":"CC0"' in said["origin"]
    assert said["harness_digest"] != "0" * 64


def test_an_existing_folder_is_not_overwritten(tmp_path):
    folder = trace(tmp_path / "t")
    with pytest.raises(ValueError, match="it is there already"):
        TraceWriter(folder, ORIGIN)
    writer = TraceWriter(tmp_path / "u", ORIGIN)
    with pytest.raises(ValueError, match="Cannot add column 'colour' to runs"):
        writer.add("runs", pl.DataFrame({"run": ["r"], "colour": ["red"]}))


class FullDisk:
    """`write_bytes` on a disk that is full at some calls."""

    def __init__(self, monkeypatch, *calls):
        self.calls, self.count, self.write = calls, 0, parts.write_bytes
        monkeypatch.setattr(parts, "write_bytes", self)

    def __call__(self, path, data):
        self.count += 1
        if self.count in self.calls:
            raise OSError(errno.ENOSPC, "No space left on device")
        self.write(path, data)


def test_rows_wait_while_the_disk_is_full(tmp_path, monkeypatch):
    """Also where it is full after the first of two tables: no row is written twice, and all are in order."""
    FullDisk(monkeypatch, 2, 3)
    with TraceWriter(tmp_path / "t", ORIGIN, part_rows=4, waits=True) as writer:
        writer.add("runs", pl.DataFrame({"run": ["r"], "seconds": [20.0]}))
        for one in iterations(20).iter_slices(3):
            writer.add("iterations", one)
    assert check_trace(tmp_path / "t") == {"runs": 1, "iterations": 20}
    assert scan(tmp_path / "t", "iterations").collect().select(iterations().columns).equals(iterations(20))


def test_a_full_disk_is_an_error_where_nobody_waits_for_room(tmp_path, monkeypatch):
    FullDisk(monkeypatch, 1)
    with pytest.raises(OSError, match="No space left"):
        trace(tmp_path / "t")


def test_what_was_recorded_before_a_crash_can_be_read(tmp_path):
    script = (
        "import os, sys, pathlib\n"
        "from tests.traces import test_trace_parts as t\n"
        "writer = t.TraceWriter(pathlib.Path(sys.argv[1]), t.ORIGIN, part_rows=4)\n"
        "for k in range(5):\n"
        "    writer.add('iterations', t.iterations(2, 2 * k))\n"
        "os._exit(9)\n"
    )
    folder = tmp_path / "t"
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2])}
    done = subprocess.run([sys.executable, "-c", script, str(folder)], check=False, env=environment)  # noqa: S603
    assert done.returncode == 9
    assert scan(folder, "iterations").select("seconds").collect()["seconds"].to_list() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert check_trace(folder) == {"iterations": 8}
    assert manifest(folder) is None
    assert origin(folder) == ORIGIN
    assert not summarise(folder).whole


# ------------------------------------------------------------------------------------------------------------ damage


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-200])


def flip(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[len(data) // 3] ^= 1
    path.write_bytes(data)


def replace_by_foreign(path: Path) -> None:
    iterations().write_parquet(path)


def replace_by_other_table(path: Path) -> None:
    path.write_bytes((path.parents[1] / "runs" / "000000.parquet").read_bytes())


@pytest.mark.parametrize(
    ("damage", "said"),
    [
        (cut, "no part of a trace, or cut short"),
        (flip, "its digest is another"),
        (replace_by_foreign, "no part of a trace"),
        (replace_by_other_table, "a part of table 'runs', not of 'iterations'"),
        (Path.unlink, "this part is missing"),
    ],
    ids=["cut short", "a bit flipped", "foreign Parquet", "another table", "missing"],
)
def test_a_damaged_part_is_refused_by_name(damage: Callable[[Path], None], said: str, tmp_path):
    folder = trace(tmp_path / "t")
    damage(folder / "iterations" / "000001.parquet")
    for look in (lambda: scan(folder, "iterations"), lambda: check_trace(folder), lambda: summarise(folder)):
        with pytest.raises(TraceError, match=f"000001.parquet: .*{said}"):
            look()


def test_an_extra_part_and_a_recording_without_parts(tmp_path):
    folder = trace(tmp_path / "t")
    (folder / "iterations" / "000002.parquet").write_bytes((folder / "iterations" / "000001.parquet").read_bytes())
    with pytest.raises(TraceError, match=r"000002\.parquet: this part is not among those"):
        scan(folder, "iterations")
    (tmp_path / "u" / "settings").mkdir(parents=True)
    with pytest.raises(ValueError, match="broke off before anything was written"):
        summarise(tmp_path / "u")


def test_another_version_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr("traces.parts.TRACE_VERSION", 2)
    folder = trace(tmp_path / "t")
    monkeypatch.undo()
    with pytest.raises(TraceError, match="it has format 2, and this harness reads format 1"):
        check_trace(folder)
    (folder / "trace.json").unlink()
    with pytest.raises(TraceError, match=r"000000\.parquet: it has format 2"):
        scan(folder, "iterations")


@pytest.mark.parametrize("text", ["", "{", '{"trace": 1}', "[1]"])
def test_a_damaged_manifest_is_refused(text, tmp_path):
    folder = trace(tmp_path / "t")
    (folder / "trace.json").write_text(text)
    with pytest.raises(TraceError, match=r"trace\.json"):
        check_trace(folder)


def test_a_folder_that_is_no_trace(tmp_path):
    with pytest.raises(ValueError, match="and no tables"):
        check_trace(tmp_path)


# ------------------------------------------------------------------------------------------------ implausible values

WRONG: dict[str, tuple[pl.Expr, str]] = {
    "nan": (pl.when(clock=4).then(float("nan")).otherwise("loss").alias("loss"), r"000001.*row 3, column 'loss'"),
    "infinite": (pl.when(clock=0).then(float("inf")).otherwise("loss").alias("loss"), r"000000.*row 1, column 'loss'"),
    "negative": (pl.col("pull_seconds") - 1, r"row 1, column 'pull_seconds': the value is -0.75, which is below 0"),
    "missing": (pl.when(clock=1).then(None).otherwise("worker").cast(pl.Int32).alias("worker"), r"row 3, column 'worker'"),
    "backwards": (
        pl.when(clock=4).then(1.5).otherwise("seconds").alias("seconds"),
        r"000001.*row 3, column 'seconds'.*back",
    ),
    "milliseconds": (pl.col("compute_seconds") * 1000, r"column 'compute_seconds'.*milliseconds"),
    "a day in milliseconds": (pl.col("compute_seconds") * 1e8, r"000000.*row 1, column 'compute_seconds'.*milliseconds"),
    "Unix time": (pl.col("seconds") + 1.7e9, r"row 1, column 'seconds'.*milliseconds"),
}


@pytest.mark.parametrize("what", WRONG)
def test_an_implausible_value_gives_an_error_with_file_row_and_column(what, tmp_path):
    wrong, said = WRONG[what]
    folder = trace(tmp_path / "t", iterations().with_columns(wrong))
    with pytest.raises(TraceError, match=said):
        check_trace(folder)


def test_duplicate_rows(tmp_path):
    folder = trace(tmp_path / "t", pl.concat([iterations(), iterations().tail(1)]))
    with pytest.raises(TraceError, match=r"000001.parquet, row 5: there is a row with run 'r', .* already"):
        check_trace(folder)


# ------------------------------------------------------------------------------------------------------- other forms


def test_few_parts_and_csv_hold_the_same(tmp_path):
    folder = trace(tmp_path / "t")
    to_few_parts(folder, tmp_path / "few")
    assert [p.name for p in (tmp_path / "few" / "iterations").iterdir()] == ["000000.parquet"]
    assert scan(tmp_path / "few", "iterations").collect().equals(scan(folder, "iterations").collect())
    assert origin(tmp_path / "few") == ORIGIN
    to_csv(folder, tmp_path / "csv")
    back = pl.read_csv(tmp_path / "csv" / "iterations.csv", schema=TRACE["iterations"].schema)
    assert back.equals(scan(folder, "iterations").collect())


def test_a_conversion_that_fails_leaves_nothing(tmp_path):
    folder = trace(tmp_path / "t")
    flip(folder / "iterations" / "000001.parquet")
    for convert in (to_few_parts, to_csv):
        with pytest.raises(TraceError):
            convert(folder, tmp_path / "out")
    assert [p.name for p in tmp_path.iterdir()] == ["t"]


def test_a_summary(tmp_path):
    made = summarise(trace(tmp_path / "t"))
    assert made.whole
    assert made.rows == {"runs": 1, "iterations": 10}
    row = made.iterations.row(0, named=True)
    assert (row["workers"], row["iterations"], row["seconds"], row["mean_compute_seconds"]) == (2, 10, 9.0, 1.5)
    assert row["mean_wait_seconds"] is None
    assert row["idle_share"] is None  # waiting was not recorded


def test_a_worker_that_is_never_released_is_idle_to_the_end(tmp_path):
    """Worker 0 pushes at 1 s and is not released; worker 1 pushes every second until the end, at 10 s."""
    worker = [0] + [1] * 10
    seconds = [1.0, *np.arange(1.0, 11.0)]
    frame = pl.DataFrame(
        {
            "run": ["r"] * 11,
            "branch": pl.Series([0] * 11, dtype=pl.Int32),
            "seconds": seconds,
            "worker": pl.Series(worker, dtype=pl.Int32),
            "clock": pl.Series([0, *range(10)], dtype=pl.Int32),
            "compute_seconds": [0.8] * 11,
            "pull_seconds": [0.1] * 11,
            "push_seconds": [0.1] * 11,
            "wait_seconds": [0.0] * 11,
        }
    )
    row = summarise(trace(tmp_path / "t", frame)).iterations.row(0, named=True)
    assert row["mean_wait_seconds"] == 0.0
    assert row["idle_share"] == pytest.approx(9.0 / 20.0)
