"""Worker processes: they stay from batch to batch, and a program is needed by as few of them as possible."""

from __future__ import annotations

import os
import signal
from collections import Counter
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from harness.comparison.pool import ProgramKey, WorkerPool, next_task
from harness.comparison.run_process import Done, Progress, Task
from tests.support import arena
from tuners.actions import Job, Run, Setting, Tuner

TUNERS = ("fixed", "asp", "dssp", "joint", "rlp")
START = Setting(workers=("n0",), servers=("n1",))


def task(tuner: str, seed: int, start: Setting | None = None) -> Task:
    return Task("digits", "", "", tuner, tuner if start is None else "fixed", seed, "", start)


def played(tasks: Sequence[Task], seconds: dict[str, float], jobs: int) -> list[list[Task]]:
    """What each of `jobs` workers makes, in order, if a tuner's run takes `seconds`."""
    waiting, free = list(tasks), [0.0] * jobs
    made: list[list[Task]] = [[] for _ in range(jobs)]
    programs: list[set[ProgramKey]] = [set() for _ in range(jobs)]
    begun: set[ProgramKey] = set()
    while waiting:
        worker = free.index(min(free))
        made[worker].append(next_task(waiting, programs[worker], begun))
        free[worker] += seconds[made[worker][-1].tuner]
    return made


def by_seed(seeds: int) -> list[Task]:
    return [task(tuner, seed) for seed in range(seeds) for tuner in TUNERS]


def test_one_worker_makes_runs_in_their_order() -> None:
    tasks = by_seed(3)
    assert played(tasks, dict.fromkeys(TUNERS, 1.0), 1) == [tasks]


def test_every_run_is_made_once() -> None:
    tasks = by_seed(4)
    made = played(tasks, dict(zip(TUNERS, (1.0, 2.0, 3.0, 4.0, 5.0), strict=True)), 3)
    assert Counter(t for each in made for t in each) == Counter(tasks)


def test_a_tuner_stays_with_the_worker_that_has_its_programs() -> None:
    made = played(by_seed(6), dict.fromkeys(TUNERS, 1.0), 2)
    both = [{t.tuner for t in each} for each in made]
    # Five tuners do not divide among two workers, so one may have to help with a tuner of the other.
    assert len(both[0] & both[1]) <= 1
    in_turn = [{t.tuner for t in by_seed(6)[offset::2]} for offset in (0, 1)]
    assert in_turn[0] == in_turn[1] == set(TUNERS)


@pytest.mark.parametrize("jobs", [2, 3, 8])
def test_seeds_do_not_drift_apart(jobs: int) -> None:
    waiting, begun = by_seed(6), set[ProgramKey]()
    programs: list[set[ProgramKey]] = [set() for _ in range(jobs)]
    for turn in range(len(waiting)):
        lowest = min(t.seed for t in waiting)
        # The second worker is slow: it takes one run of ten.
        worker = 1 if turn % 10 == 9 else 0
        assert next_task(waiting, programs[worker], begun).seed <= lowest + 1


def test_all_tuners_begin_before_any_plays_its_second_seed() -> None:
    made = played(by_seed(3), dict(zip(TUNERS, (1.0, 50.0, 1.0, 1.0, 1.0), strict=True)), 2)
    assert [t.seed for t in made[0][:4]] == [0, 0, 0, 0]
    assert [t.seed for t in made[1][:1]] == [0]


def test_starts_of_one_kind_share_programs() -> None:
    starts = [replace(START, policy=policy, learning_rate=rate) for rate in (0.1, 0.2) for policy in ("asp", "dssp")]
    waiting = [task(f"best_fixed+{i}", 0, start) for i, start in enumerate(starts)]
    mine: set[ProgramKey] = set()
    theirs: set[ProgramKey] = set()
    begun: set[ProgramKey] = set()
    order = [next_task(waiting, keys, begun).start for keys in (mine, theirs, mine, theirs)]
    assert [start.policy for start in order if start is not None] == ["asp", "dssp", "asp", "dssp"]


def tells_pid(job: Job) -> Tuner:
    print(os.getpid())  # noqa: T201
    yield from Run(clocks=1)


def pids(folder: Path, runs: int, pool: WorkerPool) -> list[int]:
    """The process of each of so many runs, which write their files to `folder`."""
    name = "tests.harness.comparison.test_pool:tells_pid"
    places = [folder / str(i) for i in range(runs)]
    tasks = [Task("tiny", "tiny.toml", arena.TINY, name, name, 0, str(place), system=arena.SYSTEM) for place in places]
    ended = [message for _, message in pool.work(tasks) if not isinstance(message, Progress)]
    assert [type(message) for message in ended] == [Done] * runs
    return [int((place / "output.txt").read_text()) for place in places]


@pytest.mark.slow
def test_processes_stay_from_batch_to_batch_until_the_pool_is_closed(tmp_path: Path) -> None:
    with closing(WorkerPool(1)) as pool:
        before = pids(tmp_path / "a", 2, pool) + pids(tmp_path / "b", 1, pool)
        assert len(set(before)) == 1
        os.kill(before[0], signal.SIGKILL)
        os.waitid(os.P_PID, before[0], os.WEXITED | os.WNOWAIT)
        after = pids(tmp_path / "c", 1, pool)
        assert after[0] != before[0]
    with pytest.raises(ProcessLookupError):
        os.kill(after[0], 0)


@pytest.mark.slow
def test_a_process_that_uses_much_memory_makes_no_further_run(tmp_path: Path) -> None:
    with closing(WorkerPool(1)) as limited:
        (first,) = pids(tmp_path / "a", 1, limited)
        limited.most_bytes = 1 << 20  # less than Python itself takes
        second, third = pids(tmp_path / "b", 2, limited)
        assert len({first, second, third}) == 2
        assert first == second
        limited.most_bytes = 1 << 40
        assert len(set(pids(tmp_path / "c", 2, limited))) == 1


def test_no_run_goes_on_when_the_caller_stops_listening(tmp_path: Path) -> None:
    name = "tests.support.arena:slow"
    slow = Task("tiny", "tiny.toml", arena.TINY, name, name, 0, str(tmp_path / "slow"), system=arena.SYSTEM)
    with closing(WorkerPool(1)) as pool:
        process = pids(tmp_path / "a", 1, pool)[0]
        messages = pool.work([slow])
        assert isinstance(next(messages)[1], Progress)
        messages.close()
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
