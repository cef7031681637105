"""Whole jobs on threads of this process, over real sockets: what the loops add to coordinator, servers and workers."""

import inspect
import os
import threading
import time
from contextlib import contextmanager

import numpy as np
import pytest

from harness.live.coordinator.branch import LiveJob, Shards
from harness.live.coordinator.coordinator import Coordinator
from harness.live.processes import coordinator_process, loops
from harness.live.processes.client import CoordinatorClient, RemoteCoordinator, TrainingControl
from harness.live.processes.coordinator_process import CoordinatorProcess
from harness.live.processes.host import Cores
from harness.live.protocol.blocks import Layout
from harness.live.transport.zeromq import Keys, ZmqTransport
from harness.live.worker.worker import Computed
from tests.live.support.pretend import PretendCoordinator
from tuners import policies
from tuners.actions import Setting, Target

HERE = "127.0.0.1"
NODES = ("a", "b", "c", "d")
SETTING = Setting(workers=("a", "b"), servers=("c", "d"), learning_rate=1.0)
MEMBERS = ("worker/a", "worker/b", "server/c", "server/d")
SIZE = 1000


def shards(setting):
    each = np.ones(len(NODES), np.int32)
    return Shards(each, 0 * each, each)


JOB = LiveJob(
    nodes=NODES,
    size=SIZE,
    blocks=8,
    target=Target("clocks", 1_000_000),
    evaluate_clocks=0,
    shards=shards,
    snapshot_commits=20,
)


def minus_one(task):
    """Every push adds one to every parameter."""
    return Computed(task.number, task.kind, 1.0, gradient=-np.ones(SIZE, np.float32))


class JobThreads:
    """The processes of a job as threads. Unlike those of `tests.live.support.threads` no driver repairs anything."""

    def __init__(self, folder, keys=None):
        self.folder, self.keys = folder, keys
        self.running = {}
        self.generations = {}
        self.coordinate()

    def coordinate(self, port=0):
        self.process = CoordinatorProcess(JOB, ZmqTransport(HERE, port, keys=self.keys), self.folder)
        self.process.start()
        self.coordinator = self.process.client

    def start(self, names, compute=minus_one, address=None):
        for name in names:
            generation = self.generations[name] = self.generations.get(name, 0) + 1
            self.coordinator.expect(name, generation)
            over = threading.Event()
            transport = ZmqTransport(HERE, keys=self.keys)
            member = loops.Member(name, generation, transport, address or self.coordinator.address, over)
            layout = Layout(JOB.size, JOB.blocks)
            if name.startswith("server/"):
                given = (loops.run_server, member, layout, JOB.optimizer, JOB.aggregation)
            else:
                given = (loops.run_worker, member, layout, lambda: compute, Cores())
            thread = threading.Thread(target=given[0], args=given[1:], name=name, daemon=True)
            thread.start()
            self.running[name] = over, thread

    def stop(self, *names):
        for name in names:
            self.running[name][0].set()
        for name in names:
            self.running.pop(name)[1].join()

    def train(self):
        self.coordinator.begin(SETTING, policies.bsp(), np.zeros(SIZE, np.float32))
        self.start(MEMBERS)
        self.joined(MEMBERS)
        self.coordinator.recover(("server/c", "server/d"), (0.5, 0.5))
        self.coordinator.run(0)

    def joined(self, names):
        self.until(lambda: set(names) <= self.coordinator.members.keys())

    def pushes(self, least):
        """Wait for so many more; returns how many there were."""
        counted = 0

        def enough():
            nonlocal counted
            counted += len(self.coordinator.poll().reports[0].rows)
            return counted >= least

        self.until(enough)
        return counted

    def until(self, so, seconds=20.0):
        end = time.monotonic() + seconds
        while not so():
            assert time.monotonic() < end, f"not within {seconds} s"
            time.sleep(0.01)

    def model(self):
        """Stop training; returns the model, and how many pushes have come meanwhile."""
        self.coordinator.rest()
        index = self.coordinator.snapshot(save=True)
        self.until(lambda: self.coordinator.durable >= index)
        return self.coordinator.saved(index)[0]["parameters"], len(self.coordinator.poll().reports[0].rows)

    def close(self):
        self.process.stop()
        self.stop(*self.running)


@contextmanager
def threads(folder, **options):
    before = threading.active_count()
    job = JobThreads(folder, **options)
    try:
        yield job
    finally:
        job.close()
    assert threading.active_count() == before


TRAINING = {name: m for name, m in vars(TrainingControl).items() if not name.startswith("_")}
OF_PROCESS = {name: m for name, m in vars(CoordinatorClient).items() if not name.startswith("_")}
OWNERS = [(Coordinator, TRAINING), (CoordinatorProcess, OF_PROCESS), (RemoteCoordinator, TRAINING | OF_PROCESS)]


@pytest.mark.parametrize(("owner", "questions"), OWNERS, ids=[owner.__name__ for owner, _ in OWNERS])
def test_questions_are_found_by_their_names(owner, questions):
    assert {"put", "address"} & questions.keys()
    assert [name for name in questions if not hasattr(owner, name)] == []


def test_a_pretended_coordinator_answers_as_a_real_one():
    for name, method in vars(PretendCoordinator).items():
        if not name.startswith("_"):
            assert arguments(method) == arguments((TRAINING | OF_PROCESS)[name]), name


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


@pytest.mark.parametrize("keys", [None, Keys.fresh()], ids=["plain", "encrypted"])
def test_every_push_counts_once(tmp_path, keys):
    with threads(tmp_path, keys=keys) as job:
        job.train()
        pushes = job.pushes(60)
        model, more = job.model()
        assert model.tolist() == [pushes + more] * SIZE


def test_no_process_joins_without_the_keys(tmp_path):
    with threads(tmp_path, keys=Keys.fresh()) as job:
        job.keys = None
        job.start(["server/c"])
        time.sleep(3 * loops.TICK_SECONDS)
        assert job.coordinator.members == {}


def test_a_silent_process_is_noticed_and_replaced(tmp_path, monkeypatch):
    monkeypatch.setattr(coordinator_process, "SILENT_SECONDS", 1.0)
    with threads(tmp_path) as job:
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
        told = job.coordinator.address
        job.stop("worker/b")
        job.coordinator.lose(["worker/b"])
        job.coordinator.forget(["worker/b"])
        job.process.stop()
        job.coordinate(coordinator_process.last_port(job.folder))
        job.start(["worker/b"], address=told)
        job.joined(MEMBERS)
        assert job.coordinator.members["worker/b"] == 2
        job.pushes(10)


def test_frames_that_are_no_message_are_dropped(tmp_path):
    with threads(tmp_path) as job:
        stranger = ZmqTransport(HERE)
        stranger.connect("coordinator", job.coordinator.address)
        for frames in ([b"garbage"], [b"PSLV\2\0"], [b"", b""], [b"PSLV\1\0\x90"]):
            stranger.send("coordinator", frames)
        job.train()
        assert job.pushes(10) >= 10
        stranger.close()


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
