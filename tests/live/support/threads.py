"""The processes of a live job as threads of this one, over real sockets: a job's own mathematics without Ray."""

from __future__ import annotations

import threading
from contextlib import contextmanager

from harness.live.processes import loops
from harness.live.processes.coordinator_process import Coordination
from harness.live.processes.host import Cores
from harness.live.transport.zeromq import ZmqTransport

HERE = "127.0.0.1"


class Crew:
    """`harness.live.processes.runtime.Processes`."""

    def __init__(self, spec, folder):
        self.spec, self.nodes = spec, frozenset(n.name for n in spec.job.nodes)
        folder.mkdir(exist_ok=True)
        self.coordination = Coordination(spec.live_job, ZmqTransport(HERE), folder)
        self.coordination.start()
        self.call = self.coordination.call
        self.running, self.generations, self.gone = {}, {}, {}

    def start(self, names):
        for name in names:
            generation = self.generations[name] = self.generations.get(name, 0) + 1
            self.call("expect", name, generation)
            over = threading.Event()
            member = loops.Member(name, generation, ZmqTransport(HERE), self.call("address"), over)
            job, layout = self.spec.workload, self.spec.layout
            if name.startswith("server/"):
                given = (loops.run_server, member, layout, job.optimizer, job.aggregation)
            else:
                given = (loops.run_worker, member, layout, lambda: self.spec.compute, Cores())
            thread = threading.Thread(target=given[0], args=given[1:], name=name, daemon=True)
            thread.start()
            self.running[name] = over, thread

    def stop(self, names):
        self._end(names)
        self.call("forget", list(names))

    def lost(self):
        dead = [name for name, (_, thread) in self.running.items() if not thread.is_alive()]
        if dead:
            self.stop(dead)
        told, self.gone = self.gone | dict.fromkeys(dead, "it failed"), {}
        return told

    def kill(self, *names):
        """As if those processes had died."""
        self._end(names)
        self.call("forget", list(names))
        self.gone |= dict.fromkeys(names, "killed by the test")

    @property
    def spare(self):
        return False

    def elsewhere(self, node):
        return False

    def close(self):
        self.coordination.stop()
        self._end(list(self.running))

    def _end(self, names):
        ended = [self.running.pop(name) for name in names if name in self.running]
        for over, _ in ended:
            over.set()
        for _, thread in ended:
            thread.join()


@contextmanager
def crew(spec, folder):
    made = Crew(spec, folder)
    try:
        yield made
    finally:
        made.close()
