"""What of computing slow machines take longer for, told by how they differ from fast ones."""

from __future__ import annotations

import tomllib
from dataclasses import replace

import numpy as np
import pytest

from simulators.calibration import closed_form
from simulators.calibration import least_squares as search
from simulators.calibration.closed_form import spans
from simulators.calibration.determined import scaled_samples
from simulators.calibration.fit import NO_FREEDOM, fit
from simulators.calibration.model import Constants, cluster, plant
from simulators.calibration.output import Provenance, to_toml
from simulators.calibration.recorded.recordings import Recording
from simulators.calibration.recorded.row import Row, WorkerTime
from simulators.calibration.recorded.speeds import with_speeds
from simulators.cluster.profiles import node_seconds
from simulators.workloads.workload import Demand

SPEEDS = (1.0, 1.0, 0.5, 1.0, 0.7)
SAMPLE = 4e-4
WHOLE = Constants(cores=1, model_bytes=1e5, nic_bytes_per_second=1e8, sample_seconds=SAMPLE, jitter=0.05, in_transfers=True)


def recorded(alone, samples, *, sizes=(8, 32), speeds=SPEEDS, noise=0.01, seed=0, disturbed=0.0):
    """Rows of machines that take `alone` seconds for a mini-batch and its samples, and so many `samples` more, by speed."""
    rng = np.random.default_rng(seed)
    true = replace(WHOLE, fixed_seconds=alone, saturation_samples=samples)
    rows = []
    for policy in ("asp", "bsp"):
        for workers in (3, 5):
            for size in sizes:
                row = Row("run", "job", workers, 1, 1.0, size, policy=policy, speeds=speeds[:workers])
                slower = np.exp(disturbed * rng.standard_normal())
                each = np.array([alone + SAMPLE * (size + samples) / v for v in speeds[:workers]]) * slower
                seen = each * (1 + noise * rng.standard_normal(workers))
                times = tuple(WorkerTime(w, float(t), float(t) * noise) for w, t in enumerate(seen))
                made = spans([plant(true, row)], [row.barrier])
                parts = {f"{name}_seconds": float(getattr(made, name)[0]) for name in made._fields}
                rows.append(replace(row, worker_times=times, pushes=100 * workers, **parts))
    return rows


@pytest.mark.parametrize("samples", [0.0, 7.5, 20.0])
def test_slow_machines_tell_what_of_a_mini_batch_depends_on_speed(samples):
    found = [scaled_samples(recorded(3e-3, samples, seed=seed)) for seed in range(10)]
    assert all(told for _, told in found)
    assert np.median([s for s, _ in found]) == pytest.approx(samples, rel=0.15)
    assert sum(s > 0 for s, _ in found) == 10 * (samples > 0)


@pytest.mark.parametrize(("machine", "told"), [("logs/host {}", True), ("logs/{}", False), ("{}", False)])
def test_runs_of_one_size_each_tell_it_where_they_name_their_machines(machine, told):
    """Logs often have a run for each setting; the numbers of workers may be of other machines in each."""
    found = []
    for seed in range(10):
        rows = recorded(3e-3, 7.5, seed=seed)
        times = [tuple(t._replace(machine=machine.format(t.worker)) for t in row.worker_times) for row in rows]
        found.append(
            scaled_samples(
                [replace(r, run=f"run {i}", worker_times=t) for i, (r, t) in enumerate(zip(rows, times, strict=True))]
            )
        )
    assert {known for _, known in found} == {told}
    assert np.median([s for s, _ in found]) == pytest.approx(7.5 if told else 0.0, rel=0.15)


@pytest.mark.parametrize(
    ("changed", "told"),
    [
        ({"sizes": (8,)}, False),  # one size of mini-batches
        ({"noise": 0.2}, False),
        ({"speeds": ()}, True),  # nothing to tell
    ],
)
def test_what_is_not_told_counts_as_independent_of_speed(changed, told):
    speeds = changed.pop("speeds", SPEEDS)
    rows = recorded(3e-3, 7.5, **changed)
    rows = rows if speeds else [replace(r, speeds=()) for r in rows]
    assert scaled_samples(rows) == (0.0, told)


def test_rows_that_are_slower_as_a_whole_are_no_sign_of_speed():
    """A disturbance is in the times of all workers of a row: by itself, it makes none of them look like a slow machine."""
    found = [scaled_samples(recorded(3e-3, 0.0, seed=seed, disturbed=0.05))[0] for seed in range(40)]
    assert sum(s > 0 for s in found) <= 2


def fitted(rows):
    given = Constants(cores=1, nic_bytes_per_second=1e8, jitter=0.05, in_transfers=True)
    return fit(with_speeds(rows), given, engine=False, resamples=20)


@pytest.mark.slow
def test_a_slow_machine_is_predicted_for_another_mini_batch(monkeypatch):
    """Where all of a mini-batch takes a slow machine longer, each size was told another speed: 14 % off."""
    for module, name, value in ((search, "_ROUNDS", 1), (search, "_EVALUATIONS", 20), (closed_form, "_ROUNDS", 20)):
        monkeypatch.setattr(module, name, value)  # search for a shorter time
    rows = recorded(0.0, 7.5)
    found = fitted(rows)
    speed = with_speeds(rows, found.common_seconds, found.constants.saturation_samples)[-1].speeds[2]
    assert speed == pytest.approx(0.5, rel=0.02)
    job, slow = found.constants, Row("r", "job", workers=1, servers=1, cycle_seconds=1.0, speeds=(speed,))
    made = dict(cluster(job, slow).nodes)["n0"]
    demand = Demand(1e5, job.sample_seconds, fixed_seconds=job.fixed_seconds)
    for size in (8, 128):
        told = node_seconds(made, demand, (size,))[0]
        assert told == pytest.approx(SAMPLE * (size + 7.5) / 0.5, rel=0.05)


@pytest.mark.slow
def test_a_calibrated_file_says_what_slow_machines_take_longer_for():
    rows = recorded(1e-3, 7.5)
    found = fitted(rows)
    origin = Provenance("made up", "", "", "0" * 64, "", "")
    text = to_toml({"job": found}, Recording(tuple(rows), None, (), (), (), ()), origin)
    made = tomllib.loads(text)
    told = {d["saturation_samples"] for p in made["profiles"].values() for d in p["devices"]}
    assert list(told) == pytest.approx([found.constants.saturation_samples], rel=1e-5)
    unknown = fitted(recorded(3e-3, 7.5, sizes=(8,)))
    assert "unlike speeds" in unknown.refused["saturation_samples"]
    assert NO_FREEDOM not in unknown.refused.values()
