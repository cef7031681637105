"""Whole jobs on threads of this process, over real sockets: what the loops add to coordinator, servers and workers."""

import inspect
import os
import threading
import time
from contextlib import closing

import numpy as np
import pytest

from harness.live.coordinator.job_reports import JobReports
from harness.live.coordinator.process_requests import ProcessRequests
from harness.live.coordinator.state_requests import StateRequests
from harness.live.coordinator.training_requests import TrainingRequests
from harness.live.processes import coordinator_process
from harness.live.processes.client import (
    CoordinatorClient,
    ProcessQuestions,
    RemoteCoordinator,
    ReportQuestions,
    StateQuestions,
    TrainingQuestions,
)
from harness.live.processes.coordinator_process import CoordinatorProcess
from harness.live.processes.host import Cores
from harness.live.transport.zeromq import ZmqTransport
from tests.live.support.counting_job import HERE, MEMBERS, SETTING, SIZE, minus_one, threads
from tests.live.support.pretend import PretendCoordinator
from tuners import policies


def questions_of(kind):
    return {name: method for name, method in vars(kind).items() if not name.startswith("_")}


ANSWERED_BY = {
    StateRequests: questions_of(StateQuestions),
    TrainingRequests: questions_of(TrainingQuestions),
    ProcessRequests: questions_of(ProcessQuestions),
    JobReports: questions_of(ReportQuestions),
    CoordinatorProcess: questions_of(CoordinatorClient),
}
QUESTIONS = {name: method for questions in ANSWERED_BY.values() for name, method in questions.items()}


@pytest.mark.parametrize("owner", [*ANSWERED_BY, RemoteCoordinator], ids=lambda owner: owner.__name__)
def test_questions_are_found_by_their_names(owner):
    questions = ANSWERED_BY.get(owner, QUESTIONS)
    assert {"begin", "put", "place", "poll", "address"} & questions.keys()
    assert [name for name in questions if not hasattr(owner, name)] == []


def test_no_two_owners_answer_the_same_question():
    assert len(QUESTIONS) == sum(map(len, ANSWERED_BY.values()))


@pytest.mark.parametrize("name", ["receive", "ledger", "_record", "__init__"])
def test_nothing_else_can_be_asked(name, tmp_path):
    with threads(tmp_path) as job, pytest.raises(AttributeError, match=f"Cannot ask the coordinator for '{name}'"):
        job.coordinator.ask(name)


def test_a_pretended_coordinator_answers_as_a_real_one():
    for name, method in vars(PretendCoordinator).items():
        if not name.startswith("_"):
            assert arguments(method) == arguments(QUESTIONS[name]), name


def arguments(function):
    return [(p.name, p.kind) for p in inspect.signature(function).parameters.values()]


def test_questions_are_forwarded_by_name_with_their_arguments():
    asked = []
    client = RemoteCoordinator(lambda *given, **named: asked.append((given, named)))
    client.lose(["server/c"])
    client.snapshot(save=True)
    client.transfers()
    assert client.members is None
    assert asked == [(("lose", ["server/c"]), {}), (("snapshot",), {"save": True}), (("transfers",), {}), (("members",), {})]


def test_every_push_counts_once(tmp_path):
    with threads(tmp_path) as job:
        job.train()
        pushes = job.pushes(60)
        model, more = job.model()
        assert model.tolist() == [pushes + more] * SIZE


def test_only_a_process_that_is_expected_is_registered_and_only_once(tmp_path):
    with threads(tmp_path) as job, closing(ZmqTransport(HERE)) as one, closing(ZmqTransport(HERE)) as other:
        refused = pytest.raises(ValueError, match=r"Cannot register server/c, generation \d: it is not expected, or is here")
        with refused:
            job.coordinator.register("server/c", 1, one.address)
        job.coordinator.expect("server/c", 2)
        assert job.coordinator.register("server/c", 2, one.address) == job.coordinator.address
        assert job.coordinator.register("server/c", 2, one.address) == job.coordinator.address  # the answer was lost
        for generation, address in ((1, one.address), (2, other.address), (3, one.address)):
            with refused:
                job.coordinator.register("server/c", generation, address)
        job.coordinator.expect("server/d", 1)
        with pytest.raises(ValueError, match="Cannot reach a process at 'garbage'"):
            job.coordinator.register("server/d", 1, "garbage")
        assert set(job.process._mailbox.peers) == {"server/c"}


def test_a_silent_process_is_noticed_and_replaced(tmp_path):
    with threads(tmp_path, silent_seconds=1.0) as job:
        job.train()
        counted = job.pushes(30)
        assert job.coordinator.silent() == {}
        job.stop("server/c")
        job.until(lambda: job.coordinator.silent() == {"server/c": 1})
        job.coordinator.lose(["server/c"])
        job.coordinator.forget(["server/c"])
        assert job.coordinator.silent() == {}
        job.start(["server/c"])
        job.joined(MEMBERS)
        job.coordinator.recover(("server/c", "server/d"), (0.5, 0.5))
        counted += job.pushes(30)
        model, more = job.model()
        assert model.tolist() == [counted + more] * SIZE


def test_who_was_not_heard_while_the_coordinator_was_held_up_is_not_silent(tmp_path, monkeypatch):
    """A question that waits for it comes before the heartbeats that do."""
    held_up, goes_on, seen = threading.Event(), threading.Event(), []
    take = CoordinatorProcess._take

    def late(process, *message):
        take(process, *message)
        held_up.set()
        goes_on.wait(20.0)

    with threads(tmp_path, silent_seconds=0.6) as job:
        job.train()
        job.pushes(30)
        monkeypatch.setattr(CoordinatorProcess, "_take", late)
        assert held_up.wait(20.0)
        asks = threading.Thread(target=lambda: seen.append(job.coordinator.silent()))
        asks.start()
        time.sleep(0.9)
        goes_on.set()
        asks.join()
        assert seen == [{}]
        assert job.pushes(30) >= 30
        assert job.coordinator.silent() == {}


def test_a_coordinator_that_comes_back_finds_its_peers(tmp_path):
    with threads(tmp_path) as job:
        job.train()
        counted = job.pushes(30)
        address = job.coordinator.address
        job.process.stop()
        job.coordinate()
        assert job.coordinator.address != address
        counted += job.pushes(30)
        model, more = job.model()
        assert job.coordinator.members == dict.fromkeys(MEMBERS, 1)
        assert model.tolist() == [model[0]] * SIZE
        assert model[0] >= counted + more  # rows that were not read before it died may be lost, pushes are not


def test_a_process_that_starts_while_the_coordinator_restarts_finds_it(tmp_path):
    with threads(tmp_path) as job:
        assert coordinator_process.last_port(tmp_path / "no such folder") == 0
        job.train()
        job.stop("worker/b")
        job.coordinator.lose(["worker/b"])
        job.coordinator.forget(["worker/b"])
        job.process.stop()
        job.coordinate(coordinator_process.last_port(job.folder))
        job.start(["worker/b"])
        job.joined(MEMBERS)
        assert job.coordinator.members["worker/b"] == 2
        job.pushes(10)


def test_frames_that_are_no_message_are_dropped(tmp_path):
    with threads(tmp_path) as job, closing(ZmqTransport(HERE)) as one:
        job.coordinator.expect("server/x", 1)
        one.connect("coordinator", job.coordinator.register("server/x", 1, one.address))
        for frames in ([b"garbage"], [b"PSLV\2\0"], [b"", b""], [b"PSLV\1\0\x90"]):
            one.send("coordinator", frames)
        job.train()
        assert job.pushes(10) >= 10


def test_what_training_waits_for_is_told(tmp_path):
    go_on = threading.Event()

    def hangs(task):
        go_on.wait(20.0)
        return minus_one(task)

    with threads(tmp_path) as job:
        job.coordinator.begin(SETTING, policies.bsp(), np.zeros(SIZE, np.float32))
        job.coordinator.expect("worker/b", 1)
        job.start([m for m in MEMBERS if m != "worker/b"])
        job.start(["worker/b"], compute=hangs)
        job.joined(MEMBERS)
        job.coordinator.recover(("server/c", "server/d"), (0.5, 0.5))
        job.coordinator.run(0)
        job.until(lambda: job.coordinator.held_up_by() == {"worker/b": "has not computed mini-batch 0"})
        assert job.coordinator.silent() == {}
        assert job.coordinator.starting() == {}
        go_on.set()
        job.pushes(10)


def test_a_process_is_heard_while_it_compiles(tmp_path):
    go_on = threading.Event()
    with threads(tmp_path, silent_seconds=0.5) as job:
        job.start(["worker/b"], prepare=lambda: go_on.wait(20.0) and minus_one)
        job.until(lambda: job.coordinator.starting().get("worker/b", 0) > 1.5)
        assert job.coordinator.silent() == {}
        assert job.coordinator.members == {}
        go_on.set()
        job.joined(["worker/b"])
        assert job.coordinator.starting() == {}


def test_an_error_of_the_coordinator_is_raised_where_it_was_asked(tmp_path):
    with threads(tmp_path) as job:
        with pytest.raises(KeyError):
            job.coordinator.saved(17)
        assert job.coordinator.members == {}
    with pytest.raises(RuntimeError, match="it has ended"):
        job.coordinator.poll()


def test_a_cancelled_mini_batch_is_not_computed(tmp_path):
    """While one is computed, others are released and given up: only the last of them is computed."""
    computed, begun, go_on = [], threading.Event(), threading.Event()

    def slow(task):
        computed.append(task.work.clock)
        begun.set()
        go_on.wait(10.0)
        return minus_one(task)

    with threads(tmp_path) as job:
        job.coordinator.begin(SETTING, policies.asp(), np.zeros(SIZE, np.float32))
        job.start(MEMBERS, compute=slow)
        job.joined(MEMBERS)
        job.coordinator.recover(("server/c", "server/d"), (0.5, 0.5))
        job.coordinator.run(0)
        assert begun.wait(10.0)
        for _ in range(5):
            job.coordinator.rest()
            job.coordinator.run(0)
        go_on.set()
        job.pushes(20)
        assert computed.count(0) <= 2 * 3  # of six each: the one under way, the last, and one that came just in between
        go_on.set()


def test_cores_are_shared_out():
    given = os.sched_getaffinity(0)
    first, second = Cores(0), Cores(1)
    try:
        first.use(1)
        mine = os.sched_getaffinity(0)
        second.use(1)
        assert len(mine) == 1
        assert len(given) == 1 or os.sched_getaffinity(0) != mine
        second.use(10_000)
        assert os.sched_getaffinity(0) == given
    finally:
        first.use(0)
    assert os.sched_getaffinity(0) == given
