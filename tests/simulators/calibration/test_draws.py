"""Draws of calibrated constants: written by a calibration, read back together, and refused where there are none."""

import os

import numpy as np
import pytest

from simulators.calibration.draws import draw_of
from simulators.calibration.fit import fit
from simulators.calibration.model import Constants
from simulators.calibration.output import Provenance, to_toml
from simulators.calibration.recorded.recordings import Recording
from simulators.calibration.recorded.row import Row
from simulators.cluster.profiles import load_profiles
from simulators.workloads.catalogue import load_workloads
from tests.support.made_up import calibrated_toml

ORIGIN = Provenance("made up", "tests", "ours", "0" * 64, "harness calibrate TRACE", "harness")


def test_a_draw_has_other_rates_and_demands_and_leaves_the_rest(tmp_path):
    path = tmp_path / "made.toml"
    path.write_text(
        calibrated_toml(nic_bytes_per_second=(2e6, 3e6), sample_seconds=(0.01, 0.03), latency_seconds=(1e-3, 4e-3))
    )
    before, tables = load_profiles(path)["toy"], load_workloads(path)
    first, second = draw_of(path, 1), draw_of(path, 2)
    assert [d.node_types({"toy": before})["toy"].nic_bytes_per_second for d in (first, second)] == [2e6, 3e6]
    assert second.node_types({"toy": before, "other": before})["other"] == before
    assert [d.workloads(tables)["toy"]["demand"]["sample_seconds"] for d in (first, second)] == [0.01, 0.03]
    changed = second.workloads(tables)["toy"]["demand"]
    assert {n: v for n, v in changed.items() if n != "sample_seconds"} == {
        n: v for n, v in tables["toy"]["demand"].items() if n != "sample_seconds"
    }
    assert load_workloads(path) == tables
    assert [d.ratio("toy", "latency_seconds") for d in (first, second)] == pytest.approx([0.5, 2.0])
    assert second.ratio("elsewhere", "latency_seconds") == 1.0


def test_what_cannot_be_drawn_is_said(tmp_path):
    path = tmp_path / "made.toml"
    path.write_text(calibrated_toml(sample_seconds=(0.01, 0.03)))
    with pytest.raises(ValueError, match=r"made.toml has 2 draws of its constants, not 3\."):
        draw_of(path, 3)
    path.write_text(calibrated_toml())
    with pytest.raises(ValueError, match="has no draws of its constants; write it again with harness calibrate"):
        draw_of(path, 1)
    path.write_text("[mine]\ncores = 4\n")
    assert draw_of(path, 1) is None


def test_a_file_that_was_written_again_gives_its_new_draws(tmp_path):
    """Also where the file system's clock has not ticked in between, or where a copy kept the time of modification."""
    path = tmp_path / "made.toml"
    path.write_text(calibrated_toml(sample_seconds=(0.01, 0.03)))
    before = path.stat()
    assert draw_of(path, 2).constants["toy"]["sample_seconds"] == 0.03
    path.write_text(calibrated_toml(sample_seconds=(0.01, 0.04)))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    assert draw_of(path, 2).constants["toy"]["sample_seconds"] == 0.04


@pytest.mark.slow
def test_draws_are_of_the_bootstrap_that_the_intervals_are_of(tmp_path):
    rows = [
        Row("run", "toy", w, 8 - w, (0.2 + 0.02 * b) * float(off), b, 1)
        for (w, b), off in zip(
            [(w, b) for w in (2, 4, 6) for b in (8, 16, 32)],
            np.exp(0.03 * np.random.default_rng(0).standard_normal(9)),
            strict=True,
        )
    ]
    found = fit(rows, Constants(cores=8, jitter=0.0, model_bytes=1.0))
    low, high = found.intervals["sample_seconds"]
    drawn = np.array(found.draws["sample_seconds"])
    assert len(drawn) == 100
    assert 0.85 < np.mean((low <= drawn) & (drawn <= high)) <= 1.0
    path = tmp_path / "made.toml"
    path.write_text(to_toml({"toy": found}, Recording(tuple(rows), None, (), (), (), ()), ORIGIN))
    read = draw_of(path, 7)
    assert read.constants["toy"] == pytest.approx({name: values[6] for name, values in found.draws.items()}, rel=1e-4)
    assert read.workload_of == {"toy": "toy"}
