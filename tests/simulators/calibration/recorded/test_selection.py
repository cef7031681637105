"""Selections of a recording: `TRACE[key=value, ...]`."""

from __future__ import annotations

import tomllib
from pathlib import Path

import polars as pl
import pytest

from harness.cli import main
from simulators.calibration import least_squares as search
from simulators.calibration import simulations
from simulators.calibration.recorded.recordings import read_tables
from simulators.calibration.recorded.selection import EVERYTHING, Selection, parse
from traces.foreign.own_tables import from_tables
from traces.importers.source import table
from traces.parts import Origin, TraceWriter, is_like


def recorded():
    """Three runs of two workloads, the first with two settings; a step takes a second, at batch 32 two."""
    runs = [{"run": r, "workload": w} for r, w in (("a1", "x"), ("a2", "x"), ("b1", "y"))]
    settings = [
        {"run": run, "seconds": at, "workers": workers, "servers": 1, "policy": policy, "batch_size": batch}
        for run, at, workers, policy, batch in (
            ("a1", 0.0, 2, "bsp", 8),
            ("a1", 100.0, 2, "bsp", 32),
            ("a2", 0.0, 4, "asp", 8),
            ("b1", 0.0, 3, "bsp", 8),
        )
    ]
    progress = [
        {"run": run, "seconds": start + step * i, "steps": 10 + i, "training_loss": 1.0}
        for run, start, step in (("a1", 0.0, 1.0), ("a1", 100.0, 2.0), ("a2", 0.0, 1.0), ("b1", 0.0, 1.0))
        for i in range(6)
    ]
    return {"runs": table("runs", runs), "settings": table("settings", settings), "progress": table("progress", progress)}


def test_a_selection_is_behind_the_name_of_a_trace():
    assert parse("shipped:homogeneous") == ("shipped:homogeneous", EVERYTHING)
    assert parse("a/b[workers=1..2, policy=asp,runs=c*]") == ("a/b", Selection("c*", policy="asp", workers=(1, 2)))
    assert parse("a[servers=2]")[1].servers == (2, 2)


@pytest.mark.parametrize("text", ["", "[workers=1..2, policy=asp]", "[runs=c*, servers=2]", "[batch_size=8]"])
def test_a_selection_is_written_as_it_is_read(text):
    wanted = parse(f"a{text}")[1]
    assert parse(f"a{wanted}")[1] == wanted
    assert len(str(wanted)) == len(text)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a[workers=2..1]", "workers=2..1: write a number, or a range such as 1..4"),
        ("a[workers=two]", "write a number"),
        ("a[speed=3]", "'speed=3' in .*write one of runs, workload, policy, workers, servers, batch_size"),
        ("a[runs]", "then = and a value"),
        ("a[runs=b", r"write TRACE or TRACE\[key=value"),
    ],
)
def test_mistakes_in_a_selection_are_explained(text, message):
    with pytest.raises(ValueError, match=message):
        parse(text)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("t", [("a1", 8), ("a1", 32), ("a2", 8), ("b1", 8)]),
        ("t[runs=a*]", [("a1", 8), ("a1", 32), ("a2", 8)]),
        ("t[workload=y]", [("b1", 8)]),
        ("t[policy=asp]", [("a2", 8)]),
        ("t[workers=3..4]", [("a2", 8), ("b1", 8)]),
        ("t[batch_size=32]", [("a1", 32)]),
        ("t[servers=2]", []),
    ],
)
def test_only_what_is_selected_is_read(text, rows):
    """A setting that is left out does not lend its steps to the one before."""
    found = read_tables(recorded(), "", parse(text)[1]).rows
    assert [(r.run, r.batch_size) for r in found] == rows
    assert all(
        r.cycle_seconds == pytest.approx({8: 1.0, 32: 2.0}[r.batch_size] * (4 if r.run == "a2" else 1)) for r in found
    )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--fit", "a"], "--fit and --predict need each other"),
        (["c", "--predict", "b"], "--fit and --predict need each other"),
    ],
)
def test_fit_and_predict_need_each_other(arguments, message, tmp_path, capsys):
    assert main.main(["fidelity", *arguments, "--out", str(tmp_path / "x")]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.slow
def test_a_calibration_to_some_settings_is_that_of_a_trace_of_these(tmp_path, capsys, monkeypatch):
    """Of a recording of whole runs. The file says what was selected, and its constants are those of the selected runs."""
    for name, value in (("_PUSHES", 120), ("_CYCLES", 10), ("_WARM_UP", 5), ("_LEAST_SEEDS", 2), ("_PRECISE", 1.0)):
        monkeypatch.setattr(simulations, name, value)
    monkeypatch.setattr(search, "_ROUNDS", 1)
    seconds = {(w, b): 10.0 * (0.2 + 0.03 * w + 0.02 * b) for w in (1, 2, 3, 4) for b in (8, 16, 32)}
    whole, small = tmp_path / "whole", tmp_path / "small"
    for folder, most in ((whole, 4), (small, 2)):
        _write(folder, {key: s for key, s in seconds.items() if key[0] <= most})
    made = {}
    for name in (f"{whole}[workers=1..2]", str(small), str(whole)):
        out = tmp_path / f"{len(made)}.toml"
        assert main.main(["calibrate", name, "--out", str(out)]) == 0
        made[name] = tomllib.loads(out.read_text())
    selected, alone, every = made.values()
    assert selected["workloads"]["toy"]["demand"] == alone["workloads"]["toy"]["demand"]
    assert selected["calibration"]["workloads"]["toy"]["rows"] == 6
    assert every["calibration"]["workloads"]["toy"]["rows"] == 12
    assert selected["calibration"]["command"] == "harness calibrate 'TRACE[workers=1..2]'"
    assert every["calibration"]["command"] == "harness calibrate TRACE"
    assert main.main(["calibrate", f"{whole}[workers=5..9]", "--out", str(tmp_path / "none.toml")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Cannot select whole[workers=5..9]: none of its 12 settings is so." in said
    assert "It has workload toy, policy asp, workers 1..4, servers 1..1, batch_size 8..32" in said
    assert "runs w1-b16, w1-b32, w1-b8, w2-b16, w2-b32, ..." in said
    assert not (tmp_path / "none.toml").exists()


def _write(folder: Path, seconds: dict[tuple[int, int], float]) -> None:
    """A trace of runs of ten steps per worker; `seconds` of each run by workers and batch size."""
    runs = [{"run": f"w{w}-b{b}", "workload": "toy", "seconds": s, "steps": 10 * w} for (w, b), s in seconds.items()]
    settings = [
        {"run": f"w{w}-b{b}", "branch": 0, "seconds": 0.0, "workers": w, "servers": 1, "policy": "asp", "batch_size": b}
        for w, b in seconds
    ]
    with TraceWriter(folder, Origin("made up", "tests")) as writer:
        writer.add("runs", table("runs", runs))
        writer.add("settings", table("settings", settings))


def test_a_selection_that_cannot_be_used_says_why(tmp_path, capsys):
    """Its settings were said not to be there."""
    pushes = [(clock, worker) for clock in range(20) for worker in (0, 1)]
    lines = [f"a,{worker},{clock},{clock + 1},0.5" for clock, worker in pushes]
    lines += [f"b,{worker},{clock},,0.5" for clock, worker in pushes]
    settings = ["run,seconds,workers,servers,policy,batch_size", "a,0,2,1,asp,8", "b,0,2,1,asp,8"]
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "settings.csv").write_text("\n".join(settings))
    (tmp_path / "in" / "iterations.csv").write_text("\n".join(["run,worker,clock,seconds,compute_seconds", *lines]))
    from_tables(tmp_path / "in", tmp_path / "t", made_by="test")
    assert main.main(["calibrate", f"{tmp_path / 't'}[runs=b]", "--out", str(tmp_path / "none.toml")]) == 2
    said = " ".join(capsys.readouterr().err.split())
    assert "Cannot calibrate to t[runs=b]: no row is left: 1 runs are left out: their iterations have no seconds" in said


@pytest.mark.parametrize(("pattern", "fits"), [("job[3]", True), ("job[*", True), ("job?", False), ("job3", False)])
def test_a_name_with_brackets_is_its_own_pattern(pattern, fits):
    assert is_like("job[3]", pattern) == fits
    kept = Selection(runs=pattern).of_runs({"runs": pl.DataFrame({"run": ["job[3]"], "workload": [None]})})
    assert kept["runs"].height == fits
