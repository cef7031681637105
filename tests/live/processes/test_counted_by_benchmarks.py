"""The jobs that the benchmarks time count every push, also if a benchmark is interrupted, or an answer comes late."""

import time
from contextlib import closing

import pytest

from harness.live.processes import coordinator_process
from tests.bench.live_jobs import Idle, LiveJob
from tests.bench.test_live import assert_every_push_counted
from tests.live.support.ones import ONES
from tests.live.support.threads import ThreadProcesses

SIZE = 1000


class Interrupted(Exception):
    """What a time limit raises, wherever the benchmark is."""


@pytest.fixture
def job(tmp_path):
    with closing(ThreadProcesses(Idle(str(SIZE), "bench.toml", ONES, 0), tmp_path / "job")) as processes:
        yield LiveJob(processes, SIZE)


def test_every_push_is_counted(job):
    for _ in range(3):
        assert job.iteration_seconds(20) > 0
    assert_every_push_counted(job)


@pytest.mark.parametrize("after", [1, 2])
def test_a_benchmark_that_is_interrupted_has_counted_every_push(job, monkeypatch, after):
    """It ends while the job trains, when the coordinator has answered and before the benchmark has the answer."""
    job.iteration_seconds(20)
    ask, answers = job.coordinator.poll, []

    def poll(*given):
        answers.append(ask(*given))
        if len(answers) == after:
            raise Interrupted
        return answers[-1]

    monkeypatch.setattr(job.coordinator, "poll", poll)
    with pytest.raises(Interrupted):
        job.iteration_seconds(10**6)
    assert_every_push_counted(job)


def test_a_coordinator_that_is_late_with_its_answers_has_counted_every_push(job, monkeypatch):
    """As on a machine that is very busy: between the order to rest and the next look, all other processes go on."""
    answer = coordinator_process.CoordinatorProcess._answer

    def late(self, name, *given):
        time.sleep(0.05 if name in ("rest", "poll") else 0.0)
        answer(self, name, *given)
        time.sleep(0.05 if name in ("rest", "poll") else 0.0)

    monkeypatch.setattr(coordinator_process.CoordinatorProcess, "_answer", late)
    for _ in range(3):
        job.iteration_seconds(20)
    assert_every_push_counted(job)
