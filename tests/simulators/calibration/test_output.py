"""A calibration as a file, and the command that makes it."""

from __future__ import annotations

import math
import tomllib
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.cli import main
from simulators.calibration.fit import Constants, fit_all
from simulators.calibration.output import to_toml
from simulators.calibration.recorded.recordings import Recording, with_snapshots
from simulators.cluster.profiles import load_profiles
from simulators.workloads.catalogue import load_workloads, workload
from tests.simulators.calibration.made_up import ORIGIN, row, timed

pytestmark = pytest.mark.usefixtures("short")


def test_a_calibration_can_be_loaded_and_has_always_the_same_bytes(tmp_path):
    rows = timed([row(w, 10 - w, b) for w in (2, 4, 8) for b in (8, 32)])
    made = Recording(tuple(rows), None, (180.0, 190.0), (), (), ("some were left out",))
    fits = fit_all(rows, {"toy": Constants(cores=8, model_bytes=100.0)}, resamples=20)
    path = tmp_path / "made.toml"
    path.write_text(to_toml(fits, made, ORIGIN))
    again = fit_all(rows, {"toy": Constants(cores=8, model_bytes=100.0)}, resamples=20)
    assert path.read_text() == to_toml(again, made, ORIGIN)
    assert load_profiles(path)["toy"].cores == 8
    demand = workload("toy", tables=load_workloads(path)).demand
    assert demand.sample_seconds == pytest.approx(fits["toy"].constants.sample_seconds, rel=1e-4)
    said = tomllib.loads(path.read_text())
    assert said["calibration"]["digest"] == "0" * 64
    assert said["costs"]["policy_restart_seconds"] == 185.0
    assert "serial_fraction" in said["calibration"]["workloads"]["toy"]["refused"]
    latency = {"latency_seconds": fits["toy"].constants.latency_seconds}
    assert said["scenario"]["toy"]["cluster"] == pytest.approx({"discipline": "maxmin"} | latency)
    uneven = {"toy": replace(fits["toy"], constants=replace(fits["toy"].constants, discipline="uneven"))}
    assert '[scenario.toy.cluster]\ndiscipline = "uneven"' in to_toml(uneven, made, ORIGIN)
    apart = {"toy": replace(fits["toy"], constants=replace(fits["toy"].constants, independent_flows=True))}
    assert "independent_flows = true" in to_toml(apart, made, ORIGIN)
    said = tomllib.loads(to_toml(fits, with_snapshots(made, 20), ORIGIN))
    assert said["scenario"]["toy"]["cluster"]["snapshot_clocks"] == 20


def dl2_file(path: Path, noise=0.02) -> None:
    """Speeds in the source's format by a known law: a mini-batch computes, then waits for the servers to apply."""
    rng = np.random.default_rng(1)
    lines = []
    for servers in (1, 2, 4):
        for workers in (1, 2, 4, 6):
            step = 0.3 + 0.004 * (64 // workers) + 0.1 * workers / servers + 0.01 * servers
            speed = 64 / workers / (step * math.exp(noise * rng.standard_normal()))
            lines.append(
                f"('resnet-50', 'dist_sync', 64, {servers}, {workers}, {[round(speed, 3)] * workers}, [0.5], [0.5])"
            )
    path.write_text("\n".join(lines) + "\n")


def test_the_command_calibrates_to_speeds_of_dl2(tmp_path, capsys):
    dl2_file(tmp_path / "config_speed.txt")
    out = tmp_path / "new folder" / "made.toml"
    command = ["calibrate", "--from", "dl2-config-speed", str(tmp_path / "config_speed.txt"), "--out", str(out)]
    assert main.main(command) == 0
    said = tomllib.loads(out.read_text())
    assert said["calibration"]["workloads"]["resnet-50"]["median_relative_error"] < 0.08
    printed = capsys.readouterr().out
    assert "resnet-50: 12 settings, median error" in printed
    determined, refused = printed.split("  Not determined, so that the default holds:\n")
    assert "sample_seconds" in determined
    assert "step_seconds" in determined
    assert "serial_fraction" in refused
    (kind,) = said["profiles"]
    assert f'[cluster] has profiles = "{out}" and nodes of type {kind};' in printed
    assert f'[workload] has file = "{out}" and name = "resnet-50".' in printed


def test_the_command_wants_one_recording(tmp_path, capsys):
    assert main.main(["calibrate", "--out", str(tmp_path / "x.toml")]) == 2
    assert main.main(["calibrate", "--from", "nobody", ".", "--out", str(tmp_path / "x.toml")]) == 2
    assert "No importer is called 'nobody'" in capsys.readouterr().err
