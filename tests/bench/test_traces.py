"""The cost of traces: summarising ten million rows, and recording a run while it is simulated.

pytest tests/bench/test_traces.py -m benchmark --benchmark-enable -n 0
"""

from __future__ import annotations

import itertools
import json
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
import pytest

from harness import scenario
from harness.drive import Played, play
from tests.bench.rounds import finding, settled
from traces.parts import Origin, TraceWriter, check_trace
from traces.record import Recorder
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
    """Ten million pushes of 32 workers, with random times, which do not compress."""
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
    """In its own process, to measure memory; it should take at most 5 s and 2 GiB."""
    rounds = []

    def one() -> None:
        done = subprocess.run([sys.executable, "-c", SUMMARISE, str(large)], check=True, capture_output=True, text=True)  # noqa: S603
        rounds.append(json.loads(done.stdout))

    benchmark.pedantic(one, rounds=3)
    assert {(rows, workers) for *_, rows, workers in rounds} == {(ROWS, 32)}
    took, cpu, peak, *_ = min(rounds)
    benchmark.extra_info.update(cpu_seconds=cpu, peak_gib=peak / 2**30)
    assert peak < 2 * 2**30
    settled(benchmark, finding("summary", took))


def test_check(benchmark: Any, large: Path) -> None:
    found = benchmark.pedantic(lambda: check_trace(large), rounds=1)
    assert found == {"iterations": ROWS}
    settled(benchmark, finding("check", benchmark.stats.stats.min))


def in_large_windows(job: Job) -> Tuner:
    yield from Run(seconds=job.budget_seconds)


def in_small_windows(job: Job) -> Tuner:
    while True:
        yield from Run(clocks=5)


@pytest.mark.parametrize("accuracy", [0.95, 2.0], ids=["to the target", "to the end of the budget"])
@pytest.mark.parametrize("tuner", [in_large_windows, in_small_windows], ids=["large windows", "small windows"])
def test_recording_against_the_run(benchmark: Any, tuner: Any, accuracy: float, tmp_path: Path) -> None:
    """The CPU time of a recorder that gets the exchanges of a run, relative to the run alone.

    Compilation and other preparation is not counted; it takes many times as long as these runs.
    """
    found = scenario.load("digits")
    found = replace(found, target=replace(found.target, value=accuracy))
    folders = (tmp_path / str(number) for number in itertools.count())

    def run() -> tuple[float, Played]:
        system = scenario.system(found, seed=0)
        begin = time.process_time()
        made = play(tuner, system)
        return time.process_time() - begin, made

    def record() -> float:
        begin = time.process_time()
        with TraceWriter(next(folders), Origin("bench", "bench")) as writer:
            recorder = Recorder(writer, "r", start=played.job.start)
            for exchange in played.exchanges:
                recorder(exchange)
            recorder.end(status="target", seconds=played.outcome.seconds, workload="digits")
        return time.process_time() - begin

    played = run()[1]
    takes, adds = min(run()[0] for _ in range(9)), min(record() for _ in range(30))
    benchmark.pedantic(record, rounds=3)
    pushes = sum(e.answer.clocks for e in played.exchanges)
    assert check_trace(tmp_path / "0")["iterations"] == pushes > 1000
    benchmark.extra_info.update(pushes=pushes)
    settled(benchmark, finding("recording", 1 + adds / takes))
