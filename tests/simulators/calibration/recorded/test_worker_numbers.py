"""Our own recorder numbers workers by the job's nodes: they find their place in settings of any order."""

from __future__ import annotations

import json
from pathlib import Path

import polars as pl
import pytest

from harness.record import play_recorded
from simulators.calibration.recorded.recordings import Recording, read_tables
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions, Stragglers
from tests.support.small_jobs import NAMES, SMALL, job, machine, start, system
from traces.parts import scan
from traces.schema import NODE_ORDER, TRACE, assumed_numbers
from tuners.actions import Job, Run, Setting, Target, Tuner

SPEEDS = dict(zip(NAMES, (1.0, 2.0, 4.0, 0.5, 1.0), strict=True))
NOISY = {"jitter": 0.1, "stagger": False}
CLOCKS = 600


def run_on(_: Job) -> Tuner:
    yield from Run(clocks=CLOCKS)


def recorded(folder: Path, setting: Setting, speeds: dict[str, float], **conditions: object) -> dict[str, pl.DataFrame]:
    """The tables of a simulated run on nodes of these speeds, as our own recorder writes them."""
    machines = Cluster(tuple((name, machine(nic=1e6, speed=speed)) for name, speed in speeds.items()))
    played = system(machines, job(SMALL), setting, Conditions(**(NOISY | conditions)), target=Target("clocks", CLOCKS))
    play_recorded(run_on, played, folder, scenario="s", tuner="t", seed=0)
    return {name: scan(folder, name).collect() for name in TRACE}


def without_order(tables: dict[str, pl.DataFrame]) -> Recording:
    return read_tables(tables | {"runs": tables["runs"].with_columns(extras=pl.lit("{}"))})


@pytest.mark.parametrize("crew", ["ba", "cab", "dbc", "bd"])
def test_speeds_and_names_of_reordered_workers_belong_to_their_machines(crew, tmp_path):
    tables = recorded(tmp_path / "t", start(workers=tuple(crew), servers=("e",), policy="asp"), SPEEDS)
    (row,) = read_tables(tables).rows
    assert [t.machine for t in row.worker_times] == [*crew]
    assert [t.worker for t in row.worker_times] == [NAMES.index(name) for name in crew]
    usual = row.speeds[0] / SPEEDS[crew[0]]
    assert row.speeds == pytest.approx([usual * SPEEDS[name] for name in crew], rel=0.05)
    (untold,) = without_order(tables).rows
    assert [t.worker for t in untold.worker_times] == sorted(t.worker for t in row.worker_times)


def test_the_batches_of_reordered_workers_are_their_own(tmp_path):
    """Equal machines: c computes three times as many samples as a, and takes three times as long."""
    setting = start(workers=("c", "a", "b"), servers=("e",), policy="asp", loads=((12,), (4,), (8,)))
    (row,) = read_tables(recorded(tmp_path / "t", setting, dict.fromkeys(NAMES, 1.0))).rows
    assert row.batch_sizes == (12, 4, 8)
    assert [t.seconds for t in row.worker_times] == pytest.approx([3.0, 1.0, 2.0], rel=0.05)
    assert not row.speeds


@pytest.mark.parametrize("crew", ["cabd", "dcab", "badc"])
def test_the_sleep_of_a_reordered_worker_is_its_own(crew, tmp_path):
    setting = start(workers=tuple(crew), servers=("e",), policy="asp")
    slow = Stragglers(mean_seconds=3.0, sd_seconds=0.1, nodes=("c",))
    found = read_tables(recorded(tmp_path / "t", setting, dict.fromkeys(NAMES, 1.0), stragglers=slow))
    (row,) = found.rows
    assert [sleep.mean_seconds for sleep in row.sleeps] == pytest.approx([3.0 * (n == "c") for n in crew], rel=0.1)
    assert not row.speeds
    assert any(f"worker {NAMES.index('c')} of s/t/0" in caveat for caveat in found.caveats)


def test_a_worker_that_was_not_timed_does_not_move_the_others(tmp_path):
    setting = start(workers=("d", "c", "b"), servers=("e",), policy="asp")
    slow = Stragglers(mean_seconds=3.0, sd_seconds=0.1, nodes=("b",))
    tables = recorded(tmp_path / "t", setting, dict.fromkeys(NAMES, 1.0), stragglers=slow)
    untimed = pl.when(pl.col("worker") == NAMES.index("c")).then(None).otherwise(pl.col("compute_seconds"))
    (row,) = read_tables(tables | {"iterations": tables["iterations"].with_columns(compute_seconds=untimed)}).rows
    assert [t.machine for t in row.worker_times] == ["d", "b"]
    assert [sleep.mean_seconds > 0 for sleep in row.sleeps] == [False, False, True]


def test_an_order_that_lacks_a_worker_is_not_used(tmp_path):
    tables = recorded(tmp_path / "t", start(workers=("b", "a"), servers=("e",), policy="asp"), SPEEDS)
    partly = tables["runs"].with_columns(extras=pl.lit(json.dumps({NODE_ORDER: ["a", "e"]})))
    (row,) = read_tables(tables | {"runs": partly}).rows
    assert row == without_order(tables).rows[0]


@pytest.mark.parametrize(
    ("seen", "count", "numbers"),
    [
        ({0, 1, 2}, 3, (0, 1, 2)),
        ({1, 2, 3}, 3, (1, 2, 3)),
        ({7, 4}, 2, (4, 7)),
        ({1, 2}, 3, (0, 1, 2)),  # it cannot be told from numbers that begin with 1
        ({1, 3}, 3, (1, 2, 3)),
        ({5, 9}, 3, (5, 9, -1)),
        ({0, 1, 2, 3}, 2, (0, 1)),  # the last pushes under the setting before are of more workers
        ({1, 2, 3}, 2, (1, 2)),
        (set(), 2, (0, 1)),
        ({0}, 0, ()),
    ],
)
def test_numbers_that_nothing_tells_are_those_of_the_rows(seen, count, numbers):
    assert assumed_numbers(seen, count) == numbers


def test_where_numbers_begin_with_1_a_worker_without_rows_does_not_move_the_others(tmp_path):
    """Of three workers 1, 2 and 3, the second was not timed. The third one's sleep came to the second, and the batch of
    the first to nobody."""
    setting = start(workers=("a", "b", "c"), servers=("e",), policy="asp", loads=((4,), (8,), (4,)))
    slow = Stragglers(mean_seconds=3.0, sd_seconds=0.1, nodes=("c",))
    tables = recorded(tmp_path / "t", setting, dict.fromkeys(NAMES, 1.0), stragglers=slow)
    untimed = pl.when(pl.col("worker") == 1).then(None).otherwise(pl.col("compute_seconds"))
    shifted = tables["iterations"].with_columns(pl.col("worker") + 1, compute_seconds=untimed)
    (row,) = without_order(tables | {"iterations": shifted}).rows
    assert [sleep.mean_seconds > 0 for sleep in row.sleeps] == [False, False, True]
