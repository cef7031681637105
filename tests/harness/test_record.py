"""A trace has all that a tuner was sent, whether it was streamed, made from a log, or written by a comparison."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import polars as pl
import pytest

from harness.comparison.compare import compare
from harness.drive import Played
from harness.record import play_recorded
from tests.support import arena
from tests.support.toy import job, toys, window
from traces.convert import from_log
from traces.exchanges import Exchange, read_log, write_log
from traces.parts import Origin, TraceWriter, check_trace, manifest, scan
from traces.plausible import TraceError
from traces.record import Recorder
from traces.schema import NODE_ORDER, TRACE, setting_from
from tuners.actions import Cost, Evaluate, Evaluation, Fork, Job, NodeEvent, Reconfigure, Rejected, Run, Tuner, Window

SEVERAL = {"scenario": "toy", "tuner": "busy", "seed": 3}


def busy(job: Job) -> Tuner:
    """Forks, reconfigures (also what is refused), evaluates, and runs in small and in large windows."""
    for _ in range(5):
        yield from Run(clocks=3)
    yield from Evaluate()
    yield from Evaluate()
    try:
        yield from Reconfigure(replace(job.start, learning_rate=-1.0))
    except Rejected:
        branch = yield from Fork(setting=replace(job.start, learning_rate=0.4))
        yield from Run(clocks=10, branch=branch)
    yield from Reconfigure(replace(job.start, learning_rate=0.5))
    yield from Run(clocks=40)


def read(folder: Path) -> dict[str, pl.DataFrame]:
    return {name: scan(folder, name).collect() for name in TRACE}


@pytest.fixture
def recorded(tmp_path: Path) -> tuple[Played, Path]:
    folder = tmp_path / "trace"
    return play_recorded(busy, toys()["every knob"](3), folder, **SEVERAL), folder  # type: ignore[arg-type]


def test_every_push_of_the_windows_is_in_the_trace(recorded):
    played, folder = recorded
    check_trace(folder)
    told = [(e.action.branch, e.answer.pushes) for e in played.exchanges if isinstance(e.answer, Window)]
    kept = scan(folder, "iterations").collect()
    assert kept["branch"].to_list() == [branch for branch, p in told for _ in p.seconds]
    for name in ("seconds", "worker", "clock", "compute_seconds", "pull_seconds", "push_seconds", "wait_seconds", "loss"):
        assert kept[name].to_numpy().tolist() == np.concatenate([getattr(p, name) for _, p in told]).tolist()


def test_settings_and_the_end_are_in_the_trace(recorded):
    played, folder = recorded
    tables = read(folder)
    rates = tables["settings"].select("branch", "learning_rate").rows()
    assert rates[0] == (0, played.job.start.learning_rate)
    assert (1, 0.4) in rates
    assert rates[-1] == (0, 0.5)
    assert setting_from(tables["settings"]["setting"][0]) == played.job.start
    run = tables["runs"].row(0, named=True)
    assert (run["run"], run["seed"], run["status"]) == ("toy/busy/3", 3, played.outcome.status)
    assert run["seconds"] == played.outcome.seconds
    assert run["steps"] == tables["iterations"].height
    assert tables["reconfigurations"].height == 1
    assert manifest(folder) is not None


def test_a_log_gives_the_same_rows(recorded, tmp_path):
    played, folder = recorded
    log = tmp_path / "runs" / "toy" / "busy" / "3" / "exchanges.jsonl.gz"
    log.parent.mkdir(parents=True)
    write_log(log, played.exchanges)
    from_log(log, tmp_path / "converted", made_by="test")
    check_trace(tmp_path / "converted")
    mine, theirs = read(tmp_path / "converted"), read(folder)
    for table in ("iterations", "progress", "node_events", "settings"):
        assert mine[table].equals(theirs[table]), table
    order = [node.name for node in played.job.nodes]
    assert [json.loads(tables["runs"]["extras"][0])[NODE_ORDER] for tables in (mine, theirs)] == [order] * 2


@pytest.mark.parametrize("absent", ["n0", "n4"])
def test_a_log_without_a_node_that_shifts_numbers_tells_no_order_of_nodes(absent, tmp_path):
    """No window lists the node. If it is the last one, all others have the numbers that the windows' order gives them."""
    of = job()
    assert [node.name for node in of.nodes] == ["n0", "n1", "n2", "n3", "n4"]
    seen = window(of, [1.0] * 6, workers=("n2", "n1"))
    seen = replace(seen, nodes=tuple(node for node in of.nodes if node.name != absent))
    log = tmp_path / "runs" / "toy" / "busy" / "3" / "exchanges.jsonl.gz"
    log.parent.mkdir(parents=True)
    write_log(log, [Exchange(6.0, Run(clocks=6), seen)])
    from_log(log, tmp_path / "converted", made_by="test")
    told = json.loads(read(tmp_path / "converted")["runs"]["extras"][0])
    assert told == ({} if absent == "n0" else {NODE_ORDER: ["n0", "n1", "n2", "n3"]})


def test_a_comparison_records_when_asked(kept_processes, tmp_path):
    scenario = tmp_path / "tiny.toml"
    scenario.write_text(arena.TINY)
    compare([scenario], ["tests.support.arena:faster"], out=tmp_path / "out", record=True, seeds=1, system=arena.SYSTEM)
    folder = tmp_path / "out" / "runs" / "tiny" / "tests.support.arena%3Afaster" / "0"
    check_trace(folder / "trace")
    assert manifest(folder / "trace") is not None
    pushes = sum(e.answer.clocks for e in read_log(folder / "exchanges.jsonl.gz") if isinstance(e.answer, Window))
    assert scan(folder / "trace", "iterations").collect().height == pushes > 20


# ------------------------------------------------------------------------------------------------- answers made by hand


def made_by_hand(folder: Path, *exchanges: Exchange) -> dict[str, pl.DataFrame]:
    with TraceWriter(folder, Origin("test", "test")) as writer:
        recorder = Recorder(writer, "r", method="migrate")
        for exchange in exchanges:
            recorder(exchange)
        recorder.end(status="target", seconds=exchanges[-1].seconds, workload="w")
    check_trace(folder)
    return read(folder)


def test_nan_becomes_null(tmp_path):
    seen = window(job(), [1.0, float("nan"), float("inf")])
    seen = replace(seen, evaluations=(Evaluation(2.0, 2, float("nan"), float("nan")),))
    tables = made_by_hand(tmp_path / "t", Exchange(3.0, Run(clocks=3), seen))
    assert tables["iterations"]["loss"].to_list() == [1.0, None, None]
    assert tables["progress"].select("seconds", "steps", "validation_loss", "accuracy").row(0) == (2.0, 2, None, None)


def test_nodes_and_reconfigurations_without_wait(tmp_path):
    cost = Cost(seconds=4.0, stall_seconds=0.0, slow_seconds=4.0, bytes_moved=1e6, steps=("delete n1", "move"), done=False)
    seen = replace(
        window(job(), [1.0]), changes=(cost,), events=(NodeEvent(0.5, "n1", "leaving"), NodeEvent(0.9, "n1", "left"))
    )
    asked = Exchange(0.0, Reconfigure(job().start, wait=False), Cost(seconds=0.0, stall_seconds=0.0))
    tables = made_by_hand(tmp_path / "t", asked, Exchange(1.0, Run(clocks=1), seen))
    assert tables["node_events"].select("seconds", "event").rows() == [(0.5, "leaving"), (0.9, "left")]
    row = tables["reconfigurations"].row(0, named=True)
    assert (row["method"], row["slow_seconds"], row["bytes_moved"], row["done"]) == ("migrate", 4.0, 1e6, False)
    assert row["steps"] == "delete n1; move"
    assert tables["reconfigurations"].height == 1


def test_an_interrupted_recording_keeps_whole_windows(tmp_path):
    writer = TraceWriter(tmp_path / "t", Origin("test", "test"))
    recorder = Recorder(writer, "r", start=job().start)
    many = window(job(), np.linspace(1, 2, 9000))
    recorder(Exchange(9000.0, Run(clocks=9000), many))
    recorder(Exchange(9001.0, Run(clocks=1), window(job(), [1.0], start=9000.0)))
    tables = read(tmp_path / "t")
    assert tables["iterations"].height == 9000
    assert tables["settings"].height == 1
    assert tables["runs"].height == 0
    assert check_trace(tmp_path / "t") == {"settings": 1, "iterations": 9000}


def test_windows_in_milliseconds_are_refused(tmp_path):
    seen = window(job(), np.ones(50), compute=900.0, pull=100.0)
    with pytest.raises(TraceError, match="milliseconds"):
        made_by_hand(tmp_path / "t", Exchange(50.0, Run(clocks=50), seen))
