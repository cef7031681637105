"""Recordings of made-up clusters, whose constants are known here only, are predicted with intervals that hold.

Each truth is drawn, and its recording has other settings than those that are predicted: more workers, other numbers of
servers. Runs have noise of 3 % beside that of single mini-batches. Another test counts for many truths that the closed form
makes, and fits: of the model's own form, and of another one. Parts of the intervals: test_validation.py, test_fit.py.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from scipy.stats import binom

from simulators.calibration import closed_form, simulations
from simulators.calibration import least_squares as search
from simulators.calibration.fit import closed_form_cycles, cycles, fit_all
from simulators.calibration.model import Constants, plant
from simulators.calibration.recorded.recordings import read_tables
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.speeds import with_speeds
from simulators.calibration.simulations import system_of
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
        monkeypatch.setattr(simulations, name, value)


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


@pytest.mark.slow
@pytest.mark.timeout(600)
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


def wave(rng):
    """What the model lacks: a smooth error over the numbers of workers and servers, of about 12 %."""
    high, shift = rng.normal(0, 0.1, 2), rng.uniform(0, 2 * np.pi, 2)
    return lambda w, s: math.exp(float(high @ np.sin(1.5 * np.log([w, s]) + shift)))


def by_formula(true, settings, rng, repetitions, lacks):
    """Rows of runs whose noise is 3 %, in all parts of a cycle, and 2 % in each of them."""
    bare = [Row("", "job", w, s, 1.0, b, policy=p) for p, w, s, b in settings]
    spans = np.stack(closed_form.spans([plant(true, r) for r in bare], [r.barrier for r in bare]), axis=1)
    rows = []
    for row, (*parts, cycle) in zip(bare, spans, strict=True):
        for i in range(repetitions):
            slower = math.exp(NOISE * rng.standard_normal()) * lacks(row.workers, row.servers)
            compute, pull, push = slower * np.array(parts) * np.exp(0.02 * rng.standard_normal(3))
            whole = compute + pull + push + slower * max(cycle - sum(parts), 0.0)
            times = {"cycle_seconds": whole, "compute_seconds": compute, "pull_seconds": pull, "push_seconds": push}
            rows.append(replace(row, run=f"{len(rows)}-{i}", pushes=60 * row.workers, **times))
    return rows


@pytest.mark.slow
@pytest.mark.timeout(600)
@pytest.mark.parametrize("repetitions", [1, 3])
@pytest.mark.parametrize("lacks", [lambda rng: lambda w, s: 1.0, wave], ids=["right", "wrong"])
def test_intervals_hold_for_a_right_and_for_a_wrong_form(repetitions, lacks):
    """Ten truths of each kind, ten rows each. Rows of one truth are not independent, so the bounds are wider than chance."""
    inside = []
    for seed in range(10):
        rng = np.random.default_rng(100 + seed)
        true, off_by = truth(rng), lacks(rng)
        known, new = (
            by_formula(true, [grid[i] for i in sorted(rng.choice(len(grid), count, replace=False))], rng, times, off_by)
            for grid, count, times in ((FIT, FITTED, repetitions), (NEW, 10, 1))
        )
        fit = fit_all(known, {"job": Constants(cores=1, jitter=true.jitter)}, engine=False)["job"]
        off = np.log([row.cycle_seconds for row in new] / closed_form_cycles(fit.constants, new))
        below, above = log_half_widths(fit, new, np.zeros(len(new)))[:, 0].T
        inside += list(((-below <= off) & (off <= above))[np.isfinite(below)])
    assert len(inside) > 50
    assert 0.82 < np.mean(inside) < 0.97
