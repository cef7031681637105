"""A comparison's runs on a Ray cluster: one worker process per core, the same process that `harness.comparison.pool` starts.

Ray finds the cores and reports lost nodes. An actor on each core starts our worker process, with the same environment as on
one machine, so the rows are the same bytes; the files of a run are sent back. A run whose worker process dies is a row with
a reason. A run whose node is lost is repeated on another node, and becomes such a row after several losses.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import RayError, RayTaskError

from harness.comparison.pool import Died, WorkerProcess
from harness.comparison.run_process import Done, Progress, Task
from harness.machines.machine import other_version, versions
from harness.machines.ray_cluster import cores
from traces import store

__all__ = ["NodeLost", "NodeWorker", "lost_for_good", "work"]

_LOSSES = 3
"""A run that loses its node so often is not repeated again: the run itself may be the cause."""

_LOOK_SECONDS = 1.0
"""How often we look for new nodes."""

_PATIENCE_SECONDS = 60.0
"""How long a cluster may be without cores before the comparison ends."""

_CLOSE_SECONDS = 5.0


def work(tasks: Iterable[Task]) -> Iterator[tuple[Task, Progress | Done | Died]]:
    """Make all runs, one on each core of the joined cluster; yield each message, as `pool.WorkerPool.work` does.

    Raises ValueError if a node has other versions than we, OSError if files cannot be written, RuntimeError if workers
    cannot start or no node is left. Ends all processes in every case.
    """
    waiting = list(tasks)[::-1]
    losses: Counter[str] = Counter()  # lost nodes by the folder of the run, "" for workers that were starting
    workers: list[_RemoteWorker] = []
    try:
        while waiting or any(w.task for w in workers):
            starting = sum(w.task is None for w in workers)
            workers += [_RemoteWorker() for _ in range(min(len(waiting) - starting, cores() - len(workers)))]
            if not workers:
                _await_cores()
                continue
            ready = ray.wait([w.awaited for w in workers], timeout=_LOOK_SECONDS)[0]
            for worker in [w for w in workers if w.awaited in ready]:
                task, message = worker.receive()
                if isinstance(message, NodeLost):
                    losses[task.folder if task else ""] += 1
                    message = lost_for_good(task, message, losses)
                    waiting += [task] if task and not message else []
                elif not task:
                    losses[""] = 0
                if task and message:
                    yield task, message
                if isinstance(message, Progress):
                    worker.listen()
                elif worker.alive and waiting:
                    worker.send(waiting.pop())
                else:
                    workers.remove(worker)
                    worker.stop()
    finally:
        closing = [worker.stop() for worker in workers]
        with suppress(RayError):
            ray.wait(closing, num_returns=len(closing), timeout=_CLOSE_SECONDS) if closing else None


@dataclass(frozen=True, slots=True)
class NodeLost:
    """The node of a worker, or the worker's Ray actor, is lost."""

    reason: str


def lost_for_good(task: Task | None, lost: NodeLost, losses: Counter[str]) -> Died | None:
    """None while a lost run is to be repeated; the run's end after `_LOSSES` losses. Raises RuntimeError without a run."""
    times = losses[task.folder if task else ""]
    if times < _LOSSES:
        return None
    if task is None:
        raise RuntimeError(f"Cannot start a worker process on the Ray cluster, tried {times} times: {lost.reason}")
    return Died(f"The nodes that made this run were lost, {times} in a row. Ray says: {lost.reason[:200]}")


def _await_cores() -> None:
    deadline = time.monotonic() + _PATIENCE_SECONDS
    while not cores():
        if time.monotonic() > deadline:
            raise RuntimeError(f"Cannot go on: the Ray cluster has been without CPUs for {_PATIENCE_SECONDS:g} seconds.")
        time.sleep(_LOOK_SECONDS)


# ---------------------------------------------------------------------------------------------------- in this process


class _RemoteWorker:
    """One worker process on the cluster, and the run that it makes."""

    def __init__(self) -> None:
        self.task: Task | None = None
        self.alive = True
        here = str(Path.cwd())
        remote: Any = ray.remote
        actor = remote(num_cpus=1, max_concurrency=2)(NodeWorker)  # two calls at once, so that `close` interrupts a run
        self._actor = actor.remote([p or here for p in sys.path], here)
        self.awaited: Any = self._actor.start.remote(versions())

    def send(self, task: Task) -> None:
        """Start a run."""
        self.task = task
        self.awaited = self._actor.make.remote(task)

    def listen(self) -> None:
        """Ask for the next message about the run."""
        self.awaited = self._actor.listen.remote()

    def receive(self) -> tuple[Task | None, Progress | Done | Died | NodeLost | None]:
        """The message that `awaited` brought, None if the worker has started. Writes the files of a finished run."""
        try:
            message = ray.get(self.awaited)
        except RayTaskError as error:
            raise error.cause from None
        except RayError as error:
            self.alive = False
            return self.task, NodeLost(" ".join(str(error).split()))
        if isinstance(message, _FinishedRun):
            folder = Path(self.task.folder) if self.task else Path()
            for name, data in message.files.items():
                (folder / name).parent.mkdir(parents=True, exist_ok=True)
                store.write_bytes(folder / name, data)
            message = message.done
        self.alive = not isinstance(message, Died)
        return self.task, message

    def stop(self) -> Any:
        """Kill the process, also during a run; Ray ends the actor when its last handle is gone. Returns what to wait for."""
        return self._actor.close.remote()


# -------------------------------------------------------------------------------------------------------- on the node


@dataclass(frozen=True, slots=True)
class _FinishedRun:
    """A run is over; its files by their paths within its folder."""

    done: Done
    files: dict[str, bytes]


class NodeWorker:
    """The actor on a node of the cluster: has a worker process, as on one machine, and a temporary folder for its run."""

    def __init__(self, path: list[str], folder: str) -> None:
        if Path(folder).is_dir():  # on a shared file system, relative paths then mean the same
            os.chdir(folder)
        own = str(Path(ray.__file__).parent)  # Ray puts its bundled packages on the path, before those that are installed
        there = [p for p in sys.path if not p.startswith(own)]
        sys.path[:] = [*there, *(p for p in path if p not in there and Path(p).exists())]
        self._folder: Path | None = None  # of the current run
        self._started = False

    def start(self, expected: dict[str, str]) -> None:
        """Start the process. Raises ValueError if the node has other versions, RuntimeError if the start fails."""
        where = ray.util.get_node_ip_address()  # type: ignore[no-untyped-call]
        if other := other_version(expected):
            name, ours, theirs = other
            raise ValueError(
                f"Cannot use node {where} of the Ray cluster: it has {name} {ours}, and this is {theirs}. "
                "Install the same there, or results would differ."
            )
        self._process = WorkerProcess()
        self._started = True

    def make(self, task: Task) -> Progress | Died | _FinishedRun:
        self._folder = Path(tempfile.mkdtemp(prefix="harness-on-ray-"))
        self._process.send(replace(task, folder=str(self._folder)))
        return self.listen()

    def listen(self) -> Progress | Died | _FinishedRun:
        try:
            task, message = self._process.receive()
            if isinstance(message, Progress):
                return message
            folder = Path(task.folder)
            files = {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}
        except OSError:
            self.close()
            raise
        self._clear()
        return _FinishedRun(message, files) if isinstance(message, Done) else message

    def close(self) -> None:
        if self._started:
            self._process.stop()
        self._clear()

    def _clear(self) -> None:
        if self._folder is not None:
            shutil.rmtree(self._folder, ignore_errors=True)
            self._folder = None
