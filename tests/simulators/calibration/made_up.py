"""Rows that were never recorded: of a cluster whose constants are known."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from simulators.calibration.fit import Constants, closed_form_cycles, predicted
from simulators.calibration.output import Provenance
from simulators.calibration.recorded.row import Row

TRUE = Constants(
    cores=8,
    fixed_seconds=0.2,
    sample_seconds=0.02,
    message_seconds=0.01,
    apply_seconds=0.04,
    jitter=0.1,
    nic_bytes_per_second=1e9,
)


ORIGIN = Provenance("made up", "tests", "ours", "0" * 64, "harness calibrate TRACE", "harness")


def row(workers, servers, batch=16, threads=1, policy="asp", **more):
    return Row("run", "toy", workers, servers, 1.0, batch, threads, policy=policy, machines=10, **more)


def timed(rows, constants=TRUE, noise=0.0, seed=0):
    """The rows as the engine times them, off by some noise."""
    off = np.exp(noise * np.random.default_rng(seed).standard_normal(len(rows)))
    return [replace(r, cycle_seconds=float(c)) for r, c in zip(rows, predicted(constants, rows) * off, strict=True)]


GRID = [row(w, s, b, t) for w, s in ((3, 7), (8, 2), (9, 1)) for b, t in ((8, 1), (32, 4), (32, 1), (8, 8))]


def told_by_formula(rows, constants, noise=0.0):
    """The rows as the closed form times them, off by some noise."""
    off = np.exp(noise * np.random.default_rng(1).standard_normal(len(rows)))
    return [replace(r, cycle_seconds=float(c)) for r, c in zip(rows, closed_form_cycles(constants, rows) * off, strict=True)]
