"""What the live benchmarks time: a job whose workers compute nothing, bare pyzmq with the same bytes, plain Ray actors."""

from __future__ import annotations

import multiprocessing
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from multiprocessing.connection import Connection
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import zmq
from numpy.typing import NDArray

from harness.live.links.emulated_links import EmulatedLinks, in_network
from harness.live.processes.host import keep_memory
from harness.live.protocol.blocks import Layout
from harness.live.protocol.names import peers
from harness.live.server.optimizer import Rates, step
from harness.live.worker.spec import Spec
from harness.live.worker.tasks import Computed, WorkerTask
from tests.live.support.ones import ONES
from tests.live.support.room import descendants
from tuners import policies

if TYPE_CHECKING:
    from harness.live.processes import launch

WORKERS = SERVERS = 2
NODES = ("n0", "n1", "n2", "n3")  # of `ONES`: workers, then servers


@dataclass(frozen=True)
class Idle(Spec):
    """A job named after how many parameters it has; every push adds one to each, at a learning rate of 1."""

    @cached_property
    def layout(self) -> Layout:
        return Layout(int(self.name), 64)

    @property
    def parameters(self) -> NDArray[np.float32]:
        return np.zeros(self.layout.size, np.float32)

    @cached_property
    def gradient(self) -> NDArray[np.float32]:
        return -np.ones(self.layout.size, np.float32)

    def compute(self, task: WorkerTask) -> Computed:
        return Computed(task.number, task.kind, 1.0, gradient=self.gradient)

    def warm_up(self, *, validates: bool = True) -> None:
        """There is nothing to compile."""


class LiveJob:
    """A live job that is idle until it is asked for a number of pushes."""

    def __init__(self, processes: launch.JobProcesses, size: int) -> None:
        self.processes, self.size, self.pushes = processes, size, 0
        self.coordinator = processes.coordinator
        spec = Idle(str(size), "bench.toml", ONES, 0)
        setting = spec.job.start
        self.coordinator.begin(setting, policies.asp(), spec.parameters)
        processes.start(peers(setting))
        self._until(lambda: set(peers(setting)) <= self.coordinator.members.keys())
        self.coordinator.recover(tuple(f"server/{s}" for s in setting.servers), setting.shares()[1])

    def iteration_seconds(self, iterations: int) -> float:
        """Seconds of a worker's cycle, mean over so many cycles of each worker."""
        self.coordinator.run(0)
        rows = np.empty((0, 11))
        while len(rows) < iterations * WORKERS:
            time.sleep(0.1)
            rows = np.concatenate([rows, self._new_rows()])
        self._rest()
        return float((rows[-1, 0] - rows[0, 0]) / (len(rows) - 1) * WORKERS)

    def _new_rows(self) -> NDArray[np.float64]:
        """A row for each push that the job has not been told of, counted now. A row that was in an answer which was lost,
        because a time limit interrupted the benchmark, is in the next one again."""
        report = self.coordinator.poll({0: self.pushes}).reports[0]
        new = report.rows[self.pushes - report.first :]
        self.pushes += len(new)
        return new

    def _rest(self) -> None:
        """Pause. What servers have of pushes that are not complete by then is not counted, and not in the model."""
        self.coordinator.rest()
        self._new_rows()

    def cpu_seconds(self) -> float:
        """CPU time that the job's processes have used so far."""
        return sum(_cpu_seconds(pid) for pid in descendants(os.getpid()) if _command(pid).startswith("ray::"))

    def model(self) -> NDArray[np.float32]:
        """The parameters. The job rests then, also if a time limit has interrupted the benchmark in the middle."""
        self._rest()
        index = self.coordinator.snapshot(save=True)
        self._until(lambda: self.coordinator.durable >= index)
        saved: NDArray[np.float32] = self.coordinator.saved(index)[0]["parameters"]
        return saved

    def _until(self, so: Any) -> None:
        until = time.monotonic() + 120
        while not so():
            assert time.monotonic() < until
            assert self.processes.lost() == {}
            time.sleep(0.02)


@contextmanager
def live_job(offers: tuple[launch.ClusterNode, ...], size: int, **options: Any) -> Iterator[LiveJob]:
    from harness.live.processes import launch  # here, because it imports Ray, whose settings must be made before

    spec = Idle(str(size), "bench.toml", ONES, 0)
    with launch.launch(launch.place_nodes(spec.job.nodes, offers), spec, **options) as processes:
        yield LiveJob(processes, size)


# ----------------------------------------------------------------------------------------------------- bare pyzmq


def _cpu_seconds(pid: int) -> float:
    """Of one process and its threads, user and system; 0 if it is gone."""
    try:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def _command(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_text()
    except OSError:
        return ""


def _serve(told: Connection, place: str, network: str, floats: int, keys: tuple[bytes, bytes] | None, steps: bool) -> None:
    keep_memory()

    def opened() -> zmq.Socket[bytes]:
        router = zmq.Context().socket(zmq.ROUTER)
        if keys is not None:
            router.curve_publickey, router.curve_secretkey = keys
            router.curve_server = True
        router.bind(place)
        return router

    # Without a folder for temporary files, ZeroMQ makes its own for a Unix socket, and leaves it in the present one.
    os.environ.setdefault("TMPDIR", tempfile.gettempdir())
    router = in_network(network, opened)
    told.send(router.getsockopt_string(zmq.LAST_ENDPOINT))
    parameters = np.zeros(floats, np.float32)
    while True:
        caller, gradient = router.recv_multipart(copy=False)
        if steps:
            pushed, made = np.frombuffer(gradient.buffer, np.float32), np.empty(floats, np.float32)
            parameters = step("sgd", parameters, {}, pushed, Rates(1.0, 0.0, 1), made)
        router.send_multipart([caller, parameters], copy=False)


def _work(
    told: Connection, places: list[str], network: str, floats: int, keys: tuple[bytes, bytes] | None, steps: bool
) -> None:
    keep_memory()

    def opened() -> list[zmq.Socket[bytes]]:
        context = zmq.Context()
        made = [context.socket(zmq.DEALER) for _ in places]
        for dealer, place in zip(made, places, strict=True):
            if keys is not None:
                dealer.curve_publickey, dealer.curve_secretkey = keys
                dealer.curve_serverkey = keys[0]
            dealer.connect(place)
        return made

    dealers = in_network(network, opened)
    gradient = np.zeros(floats, np.float32)
    while True:
        iterations = told.recv()
        began = time.perf_counter()
        for _ in range(iterations):
            for dealer in dealers:
                dealer.send(gradient, copy=False)
            model = np.empty(floats * len(dealers), np.float32)
            for number, dealer in enumerate(dealers):
                part = dealer.recv(copy=False)
                assert len(part) == gradient.nbytes
                if steps:
                    model[number * floats : (number + 1) * floats] = np.frombuffer(part.buffer, np.float32)
        told.send((time.perf_counter() - began) / iterations)


class PingPong:
    """Workers send a model's bytes to servers and receive as many, with pyzmq alone; `encrypted` by CURVE. With `links`,
    each process is behind the link of its node, as in a live job. With `steps`, servers step their parameters by what they
    receive, and workers put the model together, which no parameter server can leave out."""

    def __init__(
        self,
        size: int,
        place: str = "tcp://127.0.0.1:*",
        *,
        encrypted: bool = False,
        links: EmulatedLinks | None = None,
        steps: bool = False,
    ) -> None:
        keys = zmq.curve_keypair() if encrypted else None
        spawn = multiprocessing.get_context("spawn")
        self._processes: list[Any] = []

        def started(target: Any, *given: Any) -> Connection:
            mine, theirs = spawn.Pipe()
            process = spawn.Process(target=target, args=(theirs, *given), daemon=True)
            process.start()
            self._processes.append(process)
            return mine

        part, at = size // SERVERS, {node: ("", "") if links is None else links.of(node) for node in NODES}
        servers = [
            started(_serve, f"tcp://{host}:*" if host else place, network, part, keys, steps)
            for host, network in map(at.__getitem__, NODES[WORKERS:])
        ]
        places = [c.recv() for c in servers]
        self._workers = [started(_work, places, at[node][1], part, keys, steps) for node in NODES[:WORKERS]]

    def iteration_seconds(self, iterations: int) -> float:
        for worker in self._workers:
            worker.send(iterations)
        return float(np.mean([worker.recv() for worker in self._workers]))

    def cpu_seconds(self) -> float:
        """CPU time that its processes have used so far."""
        return sum(_cpu_seconds(process.pid) for process in self._processes)

    def close(self) -> None:
        for process in self._processes:
            process.kill()
            process.join()


# ------------------------------------------------------------------------------------------------------ plain Ray actors


class _ActorServer:
    """One server's part of the model, as in Ray's own example of a parameter server."""

    def __init__(self, floats: int) -> None:
        self._parameters = np.zeros(floats, np.float32)

    def push(self, gradient: NDArray[np.float32]) -> NDArray[np.float32]:
        self._parameters -= gradient
        return self._parameters

    def parameters(self) -> NDArray[np.float32]:
        return self._parameters


class _ActorWorker:
    def __init__(self, servers: list[Any], floats: int) -> None:
        self._servers, self._gradient = servers, -np.ones(floats, np.float32)

    def work(self, iterations: int) -> float:
        import ray

        began = time.perf_counter()
        for _ in range(iterations):
            ray.get([server.push.remote(self._gradient) for server in self._servers])
        return (time.perf_counter() - began) / iterations


class RayActors:
    """A parameter server of plain Ray actors with the same model: asynchronous pushes, no log, no copies, no recovery."""

    def __init__(self, size: int) -> None:
        import ray  # here, because its settings must be made before

        self._ray, part, actor = ray, size // SERVERS, ray.remote(num_cpus=0)
        self._servers = [actor(_ActorServer).remote(part) for _ in range(SERVERS)]
        self._workers = [actor(_ActorWorker).remote(self._servers, part) for _ in range(WORKERS)]
        self._under_way: list[Any] = []
        self.pushes = 0

    def iteration_seconds(self, iterations: int) -> float:
        """Seconds of a worker's cycle, mean over so many cycles of each worker."""
        self._under_way = [worker.work.remote(iterations) for worker in self._workers]
        self.pushes += iterations * WORKERS
        return float(np.mean(self._ray.get(self._under_way)))

    def model(self) -> NDArray[np.float32]:
        self._ray.get(self._under_way)  # a time limit may have interrupted the benchmark
        return np.concatenate(self._ray.get([server.parameters.remote() for server in self._servers]))

    def close(self) -> None:
        for one in (*self._workers, *self._servers):
            self._ray.kill(one)
