"""A whole job as threads of this process, over real sockets. Every push adds one to every parameter: the model says how many
have been applied."""

import threading
import time
from contextlib import contextmanager

import numpy as np

from harness.live.coordinator.branches.branch import LiveJob, Shards
from harness.live.processes import loops
from harness.live.processes.coordinator_process import CoordinatorProcess
from harness.live.processes.host import Cores
from harness.live.protocol.blocks import Layout
from harness.live.transport.zeromq import KeyPair, ZmqTransport
from harness.live.worker.tasks import Computed
from tuners import policies
from tuners.actions import Setting, Target

__all__ = ["HERE", "JOB", "MEMBERS", "SETTING", "SIZE", "JobThreads", "minus_one", "threads"]

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
    target=Target("clocks", 10_000_000),  # below 2**24, up to which float32 counts
    evaluate_clocks=0,
    shards=shards,
    snapshot_commits=20,
)


def minus_one(task):
    """Every push adds one to every parameter."""
    return Computed(task.number, task.kind, 1.0, gradient=-np.ones(SIZE, np.float32))


class JobThreads:
    """The processes of a job as threads. Unlike those of `tests.live.support.threads` no driver repairs anything."""

    def __init__(self, folder, job=JOB, **options):
        self.job, self.options = job, options
        self.folder, self.keys = folder, KeyPair.fresh()  # the keys of the coordinator
        self.running = {}
        self.generations = {}
        self.transports = {}
        self.counted = 0  # pushes that a test has seen so far
        self.coordinate()

    def coordinate(self, port=0):
        transport = ZmqTransport(HERE, port, keys=self.keys)
        self.process = CoordinatorProcess(self.job, transport, self.folder, **self.options)
        self.process.start()
        self.coordinator = self.process.client

    def start(self, names, compute=minus_one, prepare=None):
        for name in names:
            generation = self.generations[name] = self.generations.get(name, 0) + 1
            self.coordinator.expect(name, generation)
            over = threading.Event()
            transport = self.transports[name] = ZmqTransport(HERE)
            coordinator = self.coordinator.register(name, generation, transport.address)
            member = loops.Member(name, generation, transport, coordinator, over)
            layout = Layout(JOB.size, JOB.blocks)
            if name.startswith("server/"):
                given = (loops.run_server, member, layout, JOB.optimizer, JOB.aggregation)
            else:
                given = (loops.run_worker, member, layout, prepare or (lambda: compute), Cores())
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
    before = set(threading.enumerate())
    job = JobThreads(folder, **options)
    try:
        yield job
    finally:
        job.close()
    # Those of other tests in this process may end meanwhile, so they are not counted.
    left = [thread.name for thread in threading.enumerate() if thread not in before]
    assert left == [], left
