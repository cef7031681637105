"""Shorter simulations and searches, where they are asked for."""

from __future__ import annotations

from functools import partial

import pytest

from simulators.calibration import closed_form, simulations
from simulators.calibration import least_squares as search


@pytest.fixture
def short(monkeypatch):
    """Simulate fewer pushes and search for a shorter time: a little less exact, and much faster."""
    for name, value in (("_PUSHES", 120), ("_CYCLES", 10), ("_WARM_UP", 5), ("_LEAST_SEEDS", 2), ("_PRECISE", 1.0)):
        monkeypatch.setattr(simulations, name, value)
    monkeypatch.setattr(search, "_ROUNDS", 1)
    monkeypatch.setattr(closed_form, "_ROUNDS", 20)
    monkeypatch.setattr(search, "least_squares", partial(_roughly, search.least_squares))


def _roughly(least_squares, *given, **named):
    return least_squares(*given, **named | {"max_nfev": 15, "ftol": 1e-4, "xtol": 1e-4})
