"""What traces cost: looking through ten million rows, and recording a run while it is simulated.

pytest tests/bench/test_traces.py -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from harness import scenario
from harness.drive import play
from harness.record import play_recorded
from traces.parts import Origin, TraceWriter, check_trace
from tuners.actions import Job, Run, Tuner

pytestmark = [pytest.mark.benchmark, pytest.mark.timeout(1800)]

ROWS = 10_000_000
SUMMARISE = """
import json, resource, sys, time
from pathlib import Path
from traces.summary import summarise
begin = time.perf_counter()
made = summarise(Path(sys.argv[1]))
took = time.perf_counter() - begin
peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
print(json.dumps([took, time.process_time(), peak, made.rows["iterations"], made.iterations["workers"][0]]))
"""


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Ten million pushes of 32 workers, whose times do not compress."""
    folder = tmp_path_factory.mktemp("traces") / "large"
    rng, step = np.random.default_rng(0), 1_000_000
    with TraceWriter(folder, Origin("bench", "bench"), part_rows=1 << 20) as writer:
        for start in range(0, ROWS, step):
            number = np.arange(start, start + step)
            spells = {f"{what}_seconds": rng.lognormal(-2, 0.3, step) for what in ("compute", "pull", "push", "wait")}
            columns = {"seconds": number * 0.01, "worker": number % 32, "clock": number // 32, "staleness": number % 31}
            frame = pl.DataFrame(columns | spells | {"loss": rng.random(step)})
            writer.add("iterations", frame.with_columns(run=pl.lit("large"), branch=0))
    return folder


def test_scan_and_summarise(benchmark: Any, large: Path) -> None:
    """In a process of its own, for the memory; the reach is 5 s and 2 GiB."""
    rounds = []

    def one() -> None:
        done = subprocess.run([sys.executable, "-c", SUMMARISE, str(large)], check=True, capture_output=True, text=True)  # noqa: S603
        rounds.append(json.loads(done.stdout))

    benchmark.pedantic(one, rounds=3)
    assert {(rows, workers) for *_, rows, workers in rounds} == {(ROWS, 32)}
    took, cpu, peak, *_ = min(rounds)
    benchmark.extra_info.update(what=f"summary of {ROWS:.0e} rows, s (CPU {cpu:.1f} s)", ratio=took, reach=5.0)
    benchmark.extra_info["peak_gib"] = peak / 2**30
    assert peak < 2 * 2**30


def test_check(benchmark: Any, large: Path) -> None:
    found = benchmark.pedantic(lambda: check_trace(large), rounds=1)
    assert found == {"iterations": ROWS}
    benchmark.extra_info.update(what=f"check of {ROWS:.0e} rows, s", ratio=benchmark.stats.stats.min, reach=60.0)


def in_large_windows(job: Job) -> Tuner:
    yield from Run(seconds=job.budget_seconds)


def in_small_windows(job: Job) -> Tuner:
    while True:
        yield from Run(clocks=5)


@pytest.mark.parametrize("tuner", [in_large_windows, in_small_windows], ids=["large windows", "small windows"])
def test_recording_against_not_recording(benchmark: Any, tuner: Any) -> None:
    """By turns, in seconds of the processor: a machine that is busy with other things is no reason."""
    found = scenario.load("digits")
    folder = Path(tempfile.mkdtemp())
    pushes = set()

    def plain() -> float:
        system = scenario.system(found, seed=0)
        begin = time.process_time()
        played = play(tuner, system)
        pushes.add(sum(e.answer.clocks for e in played.exchanges))
        return time.process_time() - begin

    def recorded() -> float:
        system = scenario.system(found, seed=0)
        begin = time.process_time()
        where = folder / str(time.perf_counter_ns())
        played = play_recorded(tuner, system, where, scenario="digits", tuner="t", seed=0)
        pushes.add(sum(e.answer.clocks for e in played.exchanges))
        return time.process_time() - begin

    plain(), recorded()
    times = [(plain(), recorded()) for _ in range(9)]
    benchmark.pedantic(recorded, rounds=1)
    assert len(pushes) == 1
    ratio = min(r for _, r in times) / min(p for p, _ in times)
    medians = [float(np.median([t[i] for t in times])) for i in (0, 1)]
    what = f"recorded / not recorded, {tuner.__name__.replace('_', ' ')}, {pushes.pop()} pushes"
    benchmark.extra_info.update(what=what, ratio=ratio, reach=1.05, ratio_of_medians=medians[1] / medians[0])
