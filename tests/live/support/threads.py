"""The processes of a live job as threads of this one, over real sockets: the job's own mathematics without Ray."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from harness.live.processes import loops
from harness.live.processes.coordinator_process import CoordinatorProcess
from harness.live.processes.host import Cores
from harness.live.transport.zeromq import ZmqTransport

HERE = "127.0.0.1"


class ThreadProcesses:
    """A `harness.live.processes.runtime.Processes`. A test kills from its own thread while the driver's asks who is lost:
    `_changing` guards what both use."""

    def __init__(self, spec, folder):
        self.spec, self.nodes = spec, frozenset(n.name for n in spec.job.nodes)
        folder.mkdir(exist_ok=True)
        self.process = CoordinatorProcess(spec.live_job, ZmqTransport(HERE), folder)
        self.process.start()
        self.coordinator = self.process.client
        self.running, self.generations, self.gone = {}, {}, {}
        self._changing = threading.RLock()

    def start(self, names):
        for name in names:
            generation = self.generations[name] = self.generations.get(name, 0) + 1
            self.coordinator.expect(name, generation)
            over = threading.Event()
            transport = ZmqTransport(HERE)
            coordinator = self.coordinator.register(name, generation, transport.address)
            member = loops.Member(name, generation, transport, coordinator, over)
            job, layout = self.spec.workload, self.spec.layout
            if name.startswith("server/"):
                given = (loops.run_server, member, layout, job.optimizer, job.aggregation)
            else:
                rows_of = None if layout.tables is None else self.spec.rows_of
                given = (loops.run_worker, member, layout, lambda: self.spec.compute, Cores(), rows_of)
            thread = threading.Thread(target=given[0], args=given[1:], name=name, daemon=True)
            thread.start()
            with self._changing:
                self.running[name] = over, thread

    def stop(self, names):
        self._end(names)
        self.coordinator.forget(list(names))

    def lost(self):
        with self._changing:
            dead = [name for name, (_, thread) in self.running.items() if not thread.is_alive()]
            found, self.gone = self.gone | dict.fromkeys(dead, "it failed"), {}
        if dead:
            self.stop(dead)
        return found

    def kill(self, *names):
        """End processes as if they had died."""
        self._end(names)
        self.coordinator.forget(list(names))
        with self._changing:
            self.gone |= dict.fromkeys(names, "killed by the test")

    def tell(self, hear):
        pass

    def host(self, name):
        return ""

    @property
    def expects_nodes(self):
        return True

    @property
    def has_spare(self):
        return False

    def move_node(self, node):
        return False

    def close(self):
        self.process.stop()
        self._end(list(self.running))

    def _end(self, names):
        with self._changing:
            ended = [self.running.pop(name) for name in names if name in self.running]
        for over, _ in ended:
            over.set()
        for _, thread in ended:
            thread.join()


@contextmanager
def thread_processes(spec, folder):
    made = ThreadProcesses(spec, folder)
    try:
        yield made
    finally:
        made.close()
