"""Tables on disk: equal frames give equal bytes, no file is half-written, and every read is checked."""

from __future__ import annotations

import errno
import json
import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import polars as pl
import pytest

from traces import store
from traces.schema import EVALUATIONS, HOST, SCORES, SETTINGS, UNPRICED, VERSION, setting_from, setting_text
from tuners.actions import Setting

EVALUATED = pl.DataFrame(
    {
        "scenario": ["digits"] * 3,
        "tuner": ["fixed"] * 3,
        "seed": [0, 0, 1],
        "seconds": [0.0, 1.5, 0.1],
        "clocks": [0, 10, 0],
        "loss": [2.3, float("nan"), float("inf")],
        "accuracy": [0.1, 0.9, float("nan")],
    },
    schema=EVALUATIONS,
)

WRITER = """
import sys
from pathlib import Path
import polars as pl
from traces import store
from traces.schema import EVALUATIONS
n = 5000
frame = pl.DataFrame({"scenario": ["s"] * n, "tuner": [f"t{i % 7}" for i in range(n)], "seed": [i % 5 for i in range(n)],
    "seconds": [i * 0.1 for i in range(n)], "clocks": list(range(n)), "loss": [1 / (i + 1) for i in range(n)],
    "accuracy": [float("nan")] * n}, schema=EVALUATIONS)
store.write(frame, Path(sys.argv[1]), EVALUATIONS)
"""


def test_reads_what_it_wrote(tmp_path: Path) -> None:
    store.write(EVALUATED, tmp_path / "e.parquet", EVALUATIONS)
    assert store.read(tmp_path / "e.parquet", EVALUATIONS).equals(EVALUATED)
    assert [p.name for p in tmp_path.iterdir()] == ["e.parquet"]


def test_two_processes_write_the_same_bytes(tmp_path: Path) -> None:
    for name in ("a", "b"):
        subprocess.run([sys.executable, "-c", WRITER, str(tmp_path / name)], check=True)  # noqa: S603 (our own script)
    assert (tmp_path / "a").read_bytes() == (tmp_path / "b").read_bytes()


def test_a_missing_column_and_a_wrong_type_are_named(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    with pytest.raises(ValueError, match=r"e\.parquet: column 'loss' is missing"):
        store.write(EVALUATED.drop("loss"), path, EVALUATIONS)
    with pytest.raises(ValueError, match="column 'seed' holds String, not Int64"):
        store.write(EVALUATED.with_columns(seed=pl.lit("x")), path, EVALUATIONS)
    assert not path.exists()
    store.write(EVALUATED, path, EVALUATIONS)
    with pytest.raises(ValueError, match=r"e\.parquet: column 'setting' is missing"):
        store.read(path, SETTINGS)


def test_a_table_cut_short_is_named(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    store.write(EVALUATED, path, EVALUATIONS)
    whole = path.read_bytes()
    for size in (0, 3, 100, len(whole) - 5):
        path.write_bytes(whole[:size])
        with pytest.raises(ValueError, match=r"e\.parquet: it is damaged or cut short"):
            store.read(path, EVALUATIONS)


def test_a_table_of_another_version_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "e.parquet"
    EVALUATED.write_parquet(path, metadata={"harness_schema": "99"})
    with pytest.raises(ValueError, match=f"format 99, and this harness reads formats 2 to {VERSION}"):
        store.read(path, EVALUATIONS)
    EVALUATED.write_parquet(path)
    with pytest.raises(ValueError, match="format None"):
        store.read(path, EVALUATIONS)


def test_numbers_of_workers_of_version_2_come_from_its_settings(tmp_path: Path) -> None:
    """Also of a run that failed before it had a setting, and of a table of recorded runs, where one node stands for all."""
    three = Setting(workers=("a", "b", "c"), servers=("d",))
    forty = Setting(workers=("workers",), servers=("servers",), options=(("workers", 40),))
    run = {"scenario": "s", "tuner": "x", "seed": 0, "seconds": 0.0}
    rows = [run | {"setting": setting_text(setting), "workers": count} for setting, count in ((three, 3), (forty, 40))]
    settings = pl.DataFrame(rows, schema=SETTINGS)
    old = settings.drop("workers")
    old.write_parquet(tmp_path / "settings.parquet", metadata={"harness_schema": "2"})
    assert store.read(tmp_path / "settings.parquet", SETTINGS).equals(settings)
    scores = pl.DataFrame({name: [None, None] for name in SCORES}, schema=SCORES)
    scores = scores.with_columns(final_setting=pl.Series([setting_text(three), ""]))
    scores.drop("final_workers").write_parquet(tmp_path / "scores.parquet", metadata={"harness_schema": "2"})
    assert store.read(tmp_path / "scores.parquet", SCORES)["final_workers"].to_list() == [3, None]
    old.with_columns(setting=pl.lit("{")).write_parquet(tmp_path / "x.parquet", metadata={"harness_schema": "2"})
    with pytest.raises(ValueError, match=r"x\.parquet: column 'setting' holds no setting"):
        store.read(tmp_path / "x.parquet", SETTINGS)
    old.write_parquet(tmp_path / "y.parquet", metadata={"harness_schema": "3"})
    with pytest.raises(ValueError, match="column 'workers' is missing"):
        store.read(tmp_path / "y.parquet", SETTINGS)


def test_scores_of_version_3_have_no_costs(tmp_path: Path) -> None:
    scores = pl.DataFrame({name: [None] for name in SCORES}, schema=SCORES)
    scores.drop(UNPRICED).write_parquet(tmp_path / "scores.parquet", metadata={"harness_schema": "3"})
    read = store.read(tmp_path / "scores.parquet", SCORES)
    assert read["minimise"].to_list() == ["seconds"]
    assert read.select("machine_seconds", "usd", "budget_usd").row(0) == pytest.approx((math.nan,) * 3, nan_ok=True)
    scores.drop(UNPRICED).write_parquet(tmp_path / "scores.parquet", metadata={"harness_schema": "4"})
    with pytest.raises(ValueError, match="column 'machine_seconds' is missing"):
        store.read(tmp_path / "scores.parquet", SCORES)


def test_a_missing_table_says_how_to_get_it(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="--resume"):
        store.read(tmp_path / "scores.parquet", SCORES)


def test_a_full_disk_leaves_what_was_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "e.parquet"
    store.write(EVALUATED, path, EVALUATIONS)
    before = path.read_bytes()

    def full(self: Path, target: Any) -> Path:
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(Path, "replace", full)
    with pytest.raises(OSError, match=r"e\.parquet: the disk is full.*--resume"):
        store.write(EVALUATED.head(1), path, EVALUATIONS)
    assert path.read_bytes() == before
    assert [p.name for p in tmp_path.iterdir()] == ["e.parquet"]


def test_other_errors_of_the_disk_are_raised_unchanged(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        store.write_bytes(tmp_path / "no" / "folder", b"")


def test_host_seconds_keep_the_last_row_of_a_repeated_run(tmp_path: Path) -> None:
    path = tmp_path / "host.csv"
    frame = pl.DataFrame(
        {
            "scenario": ["s", "s", "s"],
            "tuner": ["a:b", "a:b", "a,c"],
            "seed": [0, 0, 0],
            "thinking_seconds": [1.0, 2.0, 0.1],
            "wall_seconds": [3.0, 4.0, 0.2],
            "machine": ["m", "m", "n"],
        },
        schema=HOST,
    )
    store.write_host(frame, path)
    again = store.read_host(path)
    assert again["tuner"].to_list() == ["a,c", "a:b"]
    assert again["thinking_seconds"].to_list() == [0.1, 2.0]
    path.write_text("no,table\n1,2\n")
    with pytest.raises(ValueError, match=r"host\.csv"):
        store.read_host(path)


def test_a_folder_that_holds_no_results_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match=r"no manifest\.json"):
        store.load_results(tmp_path)
    manifest = tmp_path / "manifest.json"
    manifest.write_text("{")
    with pytest.raises(ValueError, match="damaged"):
        store.load_results(tmp_path)
    manifest.write_text(json.dumps({"schema": 99}))
    with pytest.raises(ValueError, match="format 99"):
        store.load_results(tmp_path)
    for key in ("scenarios", "tuners", "oracles", "seeds_of", "draws"):
        manifest.write_text(json.dumps({"schema": VERSION, key: None}))
        with pytest.raises(ValueError, match=rf"manifest\.json: it is damaged \({key} is None\)"):
            store.load_results(tmp_path)
    manifest.write_text(json.dumps({"schema": VERSION}))
    with pytest.raises(ValueError, match=r"scores\.parquet: there is no such file"):
        store.load_results(tmp_path)


def test_a_setting_is_one_line_of_json() -> None:
    setting = Setting(workers=("a", "b"), servers=("c",), options=(("xla", True),), learning_rate=0.1 + 0.2)
    text = setting_text(setting)
    assert "\n" not in text
    assert setting_from(text) == setting


def test_host_seconds_without_machines_are_read(tmp_path: Path) -> None:
    (tmp_path / "host.csv").write_text("scenario,tuner,seed,thinking_seconds,wall_seconds\ns,x,0,0.5,1.5\n")
    assert store.read_host(tmp_path / "host.csv").rows() == [("s", "x", 0, 0.5, 1.5, "")]
