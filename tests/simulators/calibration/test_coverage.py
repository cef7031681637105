"""Recordings of made-up clusters, whose constants are known here only, are predicted with intervals that hold.

Each truth is drawn, and its recording has other settings than those that are predicted: more workers, other numbers of
servers. Runs have noise of 3 % beside that of single mini-batches.
"""

from __future__ import annotations

import math

import numpy as np
import pytest
from scipy.stats import binom

from simulators.calibration import closed_form, model
from simulators.calibration import least_squares as search
from simulators.calibration.fit import cycles, fit_all
from simulators.calibration.model import Constants, Row, system_of, with_speeds
from simulators.calibration.recordings import read_tables
from simulators.calibration.spread import log_half_widths
from traces.importers.source import table
from tuners.actions import Run

TRUTHS, FITTED, PREDICTED = 3, 12, 8
MACHINES = 12  # of every cluster, so that the engine is compiled once for each policy
NOISE = 0.03
FIT = [(p, w, s, b) for p in ("bsp", "asp") for w in (1, 2, 4, 6) for s in (1, 2, 3) for b in (16, 64)]
NEW = [(p, w, s, 32) for p in ("bsp", "asp") for w in (3, 5, 8) for s in (1, 2, 4)]


@pytest.fixture(autouse=True)
def short(monkeypatch):
    """Simulate fewer pushes and fewer rounds; the error that remains is in the intervals."""
    monkeypatch.setattr(search, "_ROUNDS", 2)
    monkeypatch.setattr(search, "_EVALUATIONS", 12)
    monkeypatch.setattr(closed_form, "_ROUNDS", 20)
    for name, value in (
        ("_PUSHES", 400),
        ("_CYCLES", 20),
        ("_WARM_UP", 10),
        ("_LEAST_SEEDS", 2),
        ("_PRECISE", 0.01),
        ("SEEDS", 4),
    ):
        monkeypatch.setattr(model, name, value)


def truth(rng):
    """A cluster: what a worker computes, and what links and servers take beside it."""
    compute, fixed = math.exp(rng.uniform(math.log(0.03), math.log(0.6))), rng.uniform(0.1, 0.5)
    return Constants(
        cores=1,
        fixed_seconds=fixed * compute,
        sample_seconds=(1 - fixed) * compute / 32,
        nic_bytes_per_second=1.25e9,
        model_bytes=1.25e9 * compute * rng.uniform(0.03, 0.5),
        apply_seconds=compute * rng.uniform(0.01, 0.2),
        message_seconds=compute * rng.uniform(0.0, 0.02),
        step_seconds=compute * rng.uniform(0.0, 0.2),
        jitter=rng.uniform(0.03, 0.25),
    )


def recorded(true, settings, kind, rng):
    """What calibration reads of runs of 60 cycles under these settings: single iterations, or totals."""
    told: dict[str, list[dict[str, object]]] = {"runs": [], "settings": [], "iterations": []}
    for k, (policy, workers, servers, batch) in enumerate(settings):
        row = Row("", "job", workers, servers, 1.0, batch, policy=policy, machines=MACHINES)
        made = system_of(true, row, int(rng.integers(2**31))).perform(Run(clocks=60 * workers)).pushes
        slower, run = math.exp(NOISE * rng.standard_normal()), f"r{k}"
        total = {"seconds": slower * made.seconds[-1], "steps": 60 if policy == "bsp" else 60 * workers}
        told["runs"].append({"run": run, "workload": "job"} | (total if kind == "totals" else {}))
        told["settings"].append(
            {"run": run, "seconds": 0.0, "workers": workers, "servers": servers, "policy": policy, "batch_size": batch}
        )
        names = ("seconds", "compute_seconds", "pull_seconds", "push_seconds")
        times = {name: (slower * np.array(getattr(made, name))).tolist() for name in names}
        each = zip(*times.values(), strict=True)
        told["iterations"] += [
            {"run": run, "worker": int(made.worker[i]), "clock": int(made.clock[i])} | dict(zip(names, values, strict=True))
            for i, values in enumerate(each)
            if kind == "iterations"
        ]
    return read_tables({name: table(name, rows) for name, rows in told.items() if rows})


@pytest.mark.parametrize("kind", ["iterations", "totals"])
def test_ninety_percent_intervals_hold_nine_of_ten_unseen_settings(kind):
    inside, errors = [], []
    for seed in range(TRUTHS):
        rng = np.random.default_rng(seed)
        true = truth(rng)
        known, new = (
            recorded(true, [grid[i] for i in sorted(rng.choice(len(grid), count, replace=False))], kind, rng)
            for grid, count in ((FIT, FITTED), (NEW, PREDICTED))
        )
        given = Constants(cores=1, jitter=known.noise.jitter if known.noise else 0.1)
        fit = fit_all(known.rows, {"job": given})["job"]
        rows = with_speeds(new.rows, fit.common_seconds)
        told = cycles(fit.constants, rows)
        off = np.log([row.cycle_seconds for row in rows] / told.seconds)
        below, above = log_half_widths(fit, rows, told.errors)[:, 0].T
        inside += list(((-below <= off) & (off <= above))[np.isfinite(below)])
        errors += list(np.abs(np.expm1(off)))
    assert len(inside) > TRUTHS * PREDICTED / 2  # the others depend on constants without an interval
    least, most = binom.ppf([0.005, 0.995], len(inside), 0.9)
    assert least <= sum(inside) <= most
    assert np.median(errors) < (0.05 if kind == "iterations" else 0.1)
