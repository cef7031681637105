"""Importers on the public recordings themselves, compared with figures that were computed independently of them.

The recordings do not come with this project. HARNESS_RECORDINGS names a folder with one folder per source. Each has files in
the source's own format, in `raw`, or the tables that the importer's docstring names; tests without their files are skipped.
"""

from __future__ import annotations

import json
import os
from functools import cache
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from tests.support.recordings import phase_rates
from traces.importers import SOURCES, Imported, read

FOLDER = os.environ.get("HARNESS_RECORDINGS", "")


@cache
def imported(folder: str, source: str = "") -> Imported:
    return read(SOURCES[source or folder.split("/")[0]], Path(FOLDER) / folder)


def recorded(folder: str, source: str = "") -> dict[str, pl.DataFrame]:
    if not FOLDER:
        pytest.skip("HARNESS_RECORDINGS names no folder of recordings")
    if not (Path(FOLDER) / folder).exists():
        pytest.skip(f"HARNESS_RECORDINGS has no {folder}")
    return dict(imported(folder, source).tables)


def table(name: str) -> pl.DataFrame:
    """A table next to the recordings, derived from them independently."""
    return pl.read_csv(Path(FOLDER) / name)


# ------------------------------------------------------------------------------------------------------------- alibaba


def episodes(probes: pl.DataFrame) -> tuple[int, float]:
    """The number of episodes in which a worker was slower than 1.3 times its own median, and the longest in seconds."""
    count, longest = 0, 0.0
    for one in probes.partition_by("node"):
        slow = (one["relative_seconds"] > 1.3 * one["relative_seconds"].median()).to_numpy()
        seconds = np.append(one["seconds"].to_numpy(), one["seconds"][-1] + 10)
        edges = np.flatnonzero(np.diff(np.concatenate([[0], slow.astype(int), [0]])))
        for first, end in zip(edges[::2], edges[1::2], strict=True):
            count, longest = count + 1, max(longest, float(seconds[end] - seconds[first]))
    return count, longest


@pytest.mark.parametrize(("job", "count", "longest"), [(1, 5, 40), (2, 0, 0), (3, 21, 20), (4, 270, 3120)])
def test_alibaba_has_its_straggler_episodes(job, count, longest):
    probes = recorded("alibaba-pai-minibatch")["probes"].filter(run=f"minibatch/job_{job}")
    found, seconds = episodes(probes)
    assert found == count
    assert seconds == pytest.approx(longest, abs=2)  # ticks drift


def test_alibaba_has_its_rows_speeds_and_variation():
    tables = recorded("alibaba-pai-minibatch")
    counts = tables["probes"].group_by("run").len().sort("run")["len"].to_list()
    assert counts == [3000, 2401, 2489, 21829]
    medians = tables["probes"].filter(run="minibatch/job_4").group_by("node").agg(pl.col("relative_seconds").median())
    assert (medians["relative_seconds"].min(), medians["relative_seconds"].max()) == (57, 262)
    said = {0.05: 0.024, 0.5: 0.093, 0.95: 1.432, 0.99: 3.014}
    for quantile, value in said.items():
        assert tables["progress"]["variation"].quantile(quantile) == pytest.approx(value, abs=5e-4)


def test_alibaba_in_its_own_format_gives_the_same():
    raw, tabled = recorded("alibaba-pai-minibatch/raw", "alibaba-pai-minibatch"), recorded("alibaba-pai-minibatch")
    assert json.loads(raw["runs"].filter(run="minibatch/job_2")["extras"][0]) == {"duplicates_dropped": 1}
    for run in ("minibatch/job_1", "minibatch/job_2"):
        by = ["node", "seconds"]
        assert raw["probes"].filter(run=run).sort(by).equals(tabled["probes"].filter(run=run).sort(by))
    mine = raw["progress"].sort("run", "steps")
    theirs = tabled["progress"].join(mine.select("run").unique(), on="run", how="semi").sort("run", "steps")
    assert mine["steps"].equals(theirs["steps"])
    assert mine["variation"].to_numpy() == pytest.approx(theirs["variation"].to_numpy(), rel=1e-6)  # stored as 32 bits


# ------------------------------------------------------------------------------------------------------------- bytedance


def relative(tables: dict[str, pl.DataFrame], job: str) -> pl.Series:
    """Compute time over the median of the same step and stage."""
    stages = json.loads(tables["settings"].filter(run=job)["options"][0])["stage_of_worker"]
    one = tables["iterations"].filter(run=job)
    stage = pl.col("worker").cast(pl.String).replace_strict(stages)
    ratio = pl.col("compute_seconds") / pl.col("compute_seconds").median().over("clock", stage)
    return one.select(ratio).to_series()


@pytest.mark.parametrize(
    ("job", "p95", "p99", "most", "step_seconds"),
    [("SE", 1.243, 1.387, 1.990, 9.11), ("AR", 2.336, 2.361, 2.383, 46.65), ("ST", 1.007, 1.012, 1.017, 2.21)],
)
def test_bytedance_has_its_stragglers(job, p95, p99, most, step_seconds):
    tables = recorded("bytedance-straggler")
    ratios = relative(tables, job)
    assert [ratios.quantile(0.95), ratios.quantile(0.99), ratios.max()] == pytest.approx([p95, p99, most], abs=2e-3)
    steps = tables["iterations"].filter(run=job).unique("clock")["step_seconds"]
    assert steps.mean() == pytest.approx(step_seconds, abs=5e-3)


def test_bytedance_in_its_own_format_gives_the_same():
    raw, tabled = recorded("bytedance-straggler/raw", "bytedance-straggler"), recorded("bytedance-straggler")
    mine, theirs = (t["iterations"].filter(run="ST").sort("clock", "worker") for t in (raw, tabled))
    assert mine.height == theirs.height == 256
    for column in ("compute_seconds", "pull_seconds", "push_seconds", "step_seconds"):
        assert mine[column].to_numpy() == pytest.approx(theirs[column].to_numpy(), rel=1e-5)


# ------------------------------------------------------------------------------------------------------------- networks


def test_uta_has_its_buckets():
    runs = recorded("uta-ec2-token-bucket", "uta-ec2-tokenbucket")["runs"]
    assert runs.height == 40
    said = {r["run_id"]: r for r in table("uta-ec2-token-bucket/runs.csv").to_dicts()}
    sizes: dict[str, list[float]] = {}
    for run in runs.to_dicts():
        extras, theirs = json.loads(run["extras"]), said[run["run"]]
        assert extras.get("bucket_at_seconds") == theirs["throttle_at_s"]
        if theirs["throttle_observed"]:
            sizes.setdefault(run["cluster"], []).append(extras["bucket_bytes"] * 8e-9)
            assert sizes[run["cluster"]][-1] == pytest.approx(theirs["bucket_gbit"], rel=1e-3)
            assert extras["bucket_low_bytes_per_second"] * 8e-9 == pytest.approx(
                theirs["low_gbps_median"], rel=5e-3
            )  # 0.750, 0.754
    assert sum(map(len, sizes.values())) == 37
    medians = {kind: float(np.median(found)) for kind, found in sizes.items()}
    published = {"c5.large": 2489, "c5.xlarge": 4444, "c5.2xlarge": 7565, "c5.4xlarge": 10717}
    assert medians == pytest.approx(published, rel=1e-3)
    assert all(abs(size / medians[kind] - 1) < 0.07 for kind, found in sizes.items() for size in found)


def test_uta_in_its_own_format():
    tables = recorded("uta-ec2-token-bucket/raw", "uta-ec2-tokenbucket")
    run = tables["runs"].filter(run="c5.xlarge-us-east-1-1568031119").row(0, named=True)
    assert run["seconds"] == 1201
    assert json.loads(run["extras"])["bucket_at_seconds"] == 1191


@pytest.mark.parametrize("folder", ["bamboo-spot", "bamboo-spot/raw"])
@pytest.mark.parametrize(
    ("run", "adds", "removes", "batches", "most", "hours", "last"),
    [("p3", 177, 167, 79, 6, 0.983, 40_920), ("g4dn", 79, 74, 48, 5, 1.017, 38_760)],
)
def test_bamboo_has_its_node_events(folder, run, adds, removes, batches, most, hours, last):
    events = recorded(folder, "bamboo-spot")["node_events"].filter(run=run)
    joined, left = events.filter(event="joined"), events.filter(event="left")
    assert (joined.height, left.height) == (adds, removes)
    together = left.group_by("seconds").len()["len"]
    assert (together.len(), together.max()) == (batches, most)
    lives = left.join(joined, on="node", suffix="_joined").select(pl.col("seconds") - pl.col("seconds_joined")).to_series()
    assert lives.median() / 3600 == pytest.approx(hours, abs=5e-4)
    assert events["seconds"].max() == last


# ------------------------------------------------------------------------------------------------------------- machines


@pytest.mark.parametrize(
    ("metric", "sku", "region", "low", "high"),
    [
        ("sysbench_cpu_events_per_s", "D8s_v5", "eastus", 0.00155, 0.00175),
        ("sysbench_cpu_events_per_s", "D8s_v5", "westus2", 0.00155, 0.00175),
        ("sysbench_cpu_events_per_s", "B8ms", "westus2", 0.0835, 0.0845),
        ("sysbench_cpu_events_per_s", "B8ms", "eastus", 0.2845, 0.2855),
        ("sysbench_ram_mib_per_s", "D8s_v5", "eastus", 0.0255, 0.0275),
        ("sysbench_ram_mib_per_s", "D8s_v5", "westus2", 0.0255, 0.0275),
    ],
)
def test_azure_machines_differ_as_published(metric, sku, region, low, high):
    speeds = recorded("azure-vm-noise")["probes"].filter(run=f"{metric}/{sku}/{region}/short")["relative_speed"]
    assert low <= float(speeds.std() / speeds.mean()) <= high


def test_azure_in_its_own_format():
    tables = recorded("azure-vm-noise/raw", "azure-vm-noise")
    assert tables["probes"].height == 800
    assert tables["probes"]["relative_speed"].median() == pytest.approx(8300, rel=0.05)


# ------------------------------------------------------------------------------------------------------- parameter servers


def test_trimtuner_is_a_full_factorial_with_its_costs():
    tables = recorded("trimtuner-tf-ps")
    assert tables["runs"].height == tables["settings"].height == 2880
    assert tables["runs"].group_by("workload").len()["len"].to_list() == [1440, 1440]
    assert tables["settings"]["servers"].unique().to_list() == [1]
    theirs = pl.read_parquet(Path(FOLDER) / "trimtuner-tf-ps/tf_ps_runs.parquet")
    assert tables["runs"]["cost_usd"].to_numpy() == pytest.approx(theirs["cost_usd"].to_numpy(), rel=1e-9)


def test_trimtuner_in_its_own_format_gives_the_same():
    raw, tabled = recorded("trimtuner-tf-ps/raw", "trimtuner-tf-ps"), recorded("trimtuner-tf-ps")
    both = raw["runs"].join(tabled["runs"], on="run", how="inner", suffix="_tabled")
    assert both.height == raw["runs"].height == 200
    for column in ("seconds", "seconds_sd", "accuracy", "accuracy_sd", "steps", "cost_usd"):
        assert both[column].to_numpy() == pytest.approx(both[f"{column}_tabled"].to_numpy(), rel=1e-9)


def test_selftf_has_its_rows():
    tables = recorded("selftf")
    theirs = table("selftf/measurements.csv")
    assert dict(tables["runs"].group_by("workload").len().iter_rows()) == dict(theirs.group_by("workload").len().iter_rows())
    assert tables["runs"]["seconds"].to_list() == theirs["seconds"].to_list()
    assert (tables["settings"]["workers"] + tables["settings"]["servers"]).unique().to_list() == [36]


def test_sync_switch_has_its_rates_and_switches():
    tables = recorded("sync-switch")
    theirs = {r["run_id"]: r for r in table("sync-switch/runs.csv").to_dicts()}
    assert set(tables["runs"]["run"]) == set(theirs)
    ratios = []
    for rate in phase_rates(tables["progress"]).to_dicts():
        said = theirs[rate["run"]][f"{rate['policy']}_steps_per_s"]
        if said is not None:
            ratios.append(rate["steps_per_second"] / said)
    assert len(ratios) > 100
    assert ratios == pytest.approx([1.0] * len(ratios), rel=0.005)
    logged = tables["reconfigurations"].filter(pl.col("stall_seconds").is_not_null())
    gaps = {run: r["switch_gap_joblog_s"] for run, r in theirs.items() if r["switch_gap_joblog_s"] is not None}
    assert dict(logged.select("run", "stall_seconds").iter_rows()) == pytest.approx(gaps, abs=1e-3)
