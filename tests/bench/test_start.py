"""How long a process takes to its first push, and the default comparison from start to end, in CPU seconds of all processes.

CPU seconds, because neighbours change them little; with two free cores the wall time of a first push is less. Run:

    pytest tests/bench/test_start.py -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import json
import resource
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from harness.machines.machine import single_threaded
from tests.bench.rounds import finding, settled

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

FIRST_PUSH = """
from harness.machines import program_cache
program_cache.use()
from harness.scenario import load, system
from tuners.actions import Run
print(system(load("digits"), 0).perform(Run(clocks=1)).clocks)
"""


def cpu_seconds(command: list[str], cache: Path) -> tuple[float, str]:
    """CPU seconds of a command and all its processes, and what it prints. Its cache is in `cache`."""

    def so_far() -> float:
        used = resource.getrusage(resource.RUSAGE_CHILDREN)
        return used.ru_utime + used.ru_stime

    before = so_far()
    environment = single_threaded() | {"HARNESS_CACHE": str(cache), "COLUMNS": "200"}
    done = subprocess.run(command, env=environment, check=True, capture_output=True, text=True)  # noqa: S603 (ourselves)
    return so_far() - before, done.stdout


@pytest.fixture(scope="module")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("cache") / "programs"


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_first_push(benchmark: Any, cache: Path, state: str) -> None:
    assert cache.exists() == (state == "warm")
    seconds, said = benchmark.pedantic(cpu_seconds, ([sys.executable, "-c", FIRST_PUSH], cache), rounds=1)
    assert int(said) == 1
    settled(benchmark, finding(f"first push {state}", seconds))


@pytest.fixture(scope="module")
def other_cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("contest") / "programs"


@pytest.mark.parametrize("state", ["cold", "warm"])
def test_the_default_comparison(benchmark: Any, other_cache: Path, tmp_path: Path, state: str) -> None:
    assert other_cache.exists() == (state == "warm")
    command = [sys.executable, "-m", "harness", "compare", "--tuners", "all", "--jobs", "2", "--out", str(tmp_path / "out")]
    seconds, _ = benchmark.pedantic(cpu_seconds, (command, other_cache), rounds=1)
    manifest = json.loads((tmp_path / "out" / "manifest.json").read_text())
    assert manifest["seeds"] >= 6
    assert len(manifest["tuners"]) >= 24
    assert "best_fixed" in manifest["tuners"]
    assert (tmp_path / "out" / "report.html").stat().st_size > 100_000
    settled(benchmark, finding(f"contest {state}", seconds))


def test_a_decision_of_bo_online(benchmark: Any) -> None:
    """The tuner's own CPU seconds between an answer and its next action, in a run on digits; the median over actions."""
    import statistics
    import time

    from harness import scenario
    from tuners.actions import Rejected
    from tuners.bo_online import bo_online

    system, spent = scenario.system(scenario.load("digits"), seed=0), []

    def play() -> None:
        tuner = bo_online(system.job)
        action = next(tuner)
        while system.now < 0.5 * system.job.budget_seconds and len(spent) < 40:
            try:
                answer = system.perform(action)
            except Rejected as error:
                action = tuner.throw(error)
                continue
            begin = time.process_time()
            try:
                action = tuner.send(answer)
            except StopIteration:
                return
            spent.append(time.process_time() - begin)

    benchmark.pedantic(play, rounds=1)
    assert len(spent) >= 8
    settled(benchmark, finding("bo_online decision", statistics.median(spent)))
