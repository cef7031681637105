"""Every tuner that ships on one arena, in simulated seconds, against a stored reference: a round per seed.

`make bench` compares with the newest file below `tests/bench/reference` and fails if a median is 5 % worse. Simulated
seconds depend on nothing but the program, so a failure is a change of behaviour. Where it is meant, store a new reference,
and say why in the commit::

    pytest tests/bench/test_tuners.py -m benchmark --benchmark-enable -n 0 \\
        --benchmark-storage=tests/bench/reference --benchmark-save=digits
    mv tests/bench/reference/*/*_digits.json tests/bench/reference/

The margin is there because another type of processor may round a gradient's last digit differently.
"""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from harness.pytest_plugin import Contest
from tuners import registry

SEEDS = 3
TUNERS = [name for name, entry in registry().items() if entry.embedded and entry.contestant]
REFERENCE = sorted((Path(__file__).parent / "reference").rglob("*.json"))[-1:]


@pytest.mark.benchmark(group="digits, simulated seconds")
@pytest.mark.timeout(600)
@pytest.mark.parametrize("tuner", TUNERS)
def test_a_tuner(contest: Contest, tuner: str) -> None:
    result = contest(tuner, "digits", seeds=SEEDS)
    assert [s.status in ("target", "budget") for s in result.scores] == [True] * SEEDS


def test_the_reference_has_every_tuner_and_names_no_machine() -> None:
    (stored,) = (json.loads(path.read_text()) for path in REFERENCE)
    assert {b["param"] for b in stored["benchmarks"]} == set(TUNERS)
    assert all(b["stats"]["rounds"] == SEEDS for b in stored["benchmarks"])
    assert all(b["options"]["timer"] == "simulated_seconds" for b in stored["benchmarks"])
    assert stored["machine_info"] == stored["commit_info"] == {}
