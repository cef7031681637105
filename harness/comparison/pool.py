"""The worker processes of a comparison on this machine: send them runs, receive progress, and survive the death of one.

Plain subprocesses rather than an executor: when a process of a `ProcessPoolExecutor` is killed, all runs in progress are
lost and the cause cannot be told. Here each process has one run and one pipe, so the run at fault is known.
"""

from __future__ import annotations

import os
import resource
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import IO, TypeAlias

from harness.comparison.run_process import Done, Progress, Task
from harness.machines.machine import single_threaded

__all__ = ["Died", "ProgramKey", "WorkerPool", "WorkerProcess", "next_task"]

_LEAST_BYTES = 2 << 30  # that a process may use for its runs, however little memory the machine has
_SHARE = 0.5  # of the machine's memory, for all processes

ProgramKey: TypeAlias = tuple[str, str, str, int]
"""Scenario, tuner, and the start's policy and batch size where the run has a start of its own."""


@dataclass(frozen=True, slots=True)
class Died:
    """The process that made a run has died; the run has no results."""

    reason: str


class WorkerPool:
    """At most `jobs` worker processes. They start when there are runs for them, and live until the pool is closed.

    An oracle's search makes runs in several batches. Processes that stay have the libraries and the programs in memory,
    which a new process needs seconds for. But a process never releases its programs, a fifth of a gigabyte per scenario: a
    process that uses more than `most_bytes` after a run is replaced by a new one.
    """

    def __init__(self, jobs: int, device: str = "cpu") -> None:
        self._jobs = jobs
        self._device = device
        memory = os.sysconf("SC_PHYS_PAGES") * resource.getpagesize()
        self.most_bytes = max(_LEAST_BYTES, _SHARE * memory / jobs)
        self._idle: list[WorkerProcess] = []
        self._begun: set[ProgramKey] = set()

    def work(self, tasks: Iterable[Task]) -> Iterator[tuple[Task, Progress | Done | Died]]:
        """Make all runs; yield each message as it arrives.

        Raises OSError if a worker cannot write (a full disk), RuntimeError if a worker cannot start. No run is in progress
        afterwards, however it ends.
        """
        waiting = list(tasks)
        busy: list[WorkerProcess] = []
        try:
            while waiting or busy:
                while waiting and len(busy) < self._jobs:
                    busy.append(self._free_worker())
                    busy[-1].send(next_task(waiting, busy[-1].programs, self._begun))
                ready = wait([w.connection for w in busy])
                for worker in [w for w in busy if w.connection in ready]:
                    task, message = worker.receive()
                    if isinstance(message, Progress):
                        yield task, message
                        continue
                    # The worker gets its next run before the caller writes the results of this one, so it does not wait.
                    if isinstance(message, Died) or worker.resident_bytes > self.most_bytes:
                        busy.remove(worker)
                        worker.stop()
                    elif waiting:
                        worker.send(next_task(waiting, worker.programs, self._begun))
                    else:
                        busy.remove(worker)
                        self._idle.append(worker)
                    yield task, message
        finally:
            for worker in busy:
                worker.stop()

    def close(self) -> None:
        """End all processes."""
        while self._idle:
            self._idle.pop().stop()

    def _free_worker(self) -> WorkerProcess:
        while self._idle:
            worker = self._idle.pop()
            if worker.alive:
                return worker
            worker.stop()
        return WorkerProcess(self._device)


def next_task(waiting: list[Task], mine: set[ProgramKey], begun: set[ProgramKey]) -> Task:
    """Remove from `waiting`, which is in order of seeds, the run that a worker makes next, and return it.

    A worker that has made a run like it, as `mine` tells, has its programs in memory; any other worker compiles them, or
    reads them from the cache and traces them again, which takes as long as a run. So of the lowest seed a worker takes what
    it has the programs of, then what no worker has `begun`; then, of the next seed, what it has the programs of; else the
    first. Seeds do not drift apart further, because an interrupted comparison is compared by its complete seeds.
    """
    lowest = waiting[0].seed
    best, at = 4, 0
    for index, task in enumerate(waiting):
        key = _program_key(task)
        rank = (0 if key in mine else 1 if key not in begun else 4) if task.seed == lowest else (2 if key in mine else 4)
        if rank < best and task.seed <= lowest + 1:
            best, at = rank, index
            if rank == 0:
                break
    task = waiting.pop(at)
    key = _program_key(task)
    mine.add(key)
    begun.add(key)
    return task


def _program_key(task: Task) -> ProgramKey:
    """Equal for runs that need the same compiled programs: runs of a tuner on a scenario, or from starts of one kind."""
    start = task.start
    return task.scenario, task.plays, "" if start is None else start.policy, 0 if start is None else start.batch_size


class WorkerProcess:
    """One worker process and the run that it makes. JAX computes on `device`, the name of one of its platforms."""

    def __init__(self, device: str = "cpu") -> None:
        self.programs: set[ProgramKey] = set()  # of the runs that it was sent
        self.connection, theirs = Pipe()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(  # noqa: S603 (ourselves)
            # -P: without it, files of the working folder would hide installed packages in the new process.
            [sys.executable, "-P", "-m", "harness.comparison.run_process", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            env=single_threaded(device),
            start_new_session=True,  # so that Ctrl-C reaches only the parent, which then ends the workers
        )
        theirs.close()
        try:
            self.connection.recv()
        except EOFError:
            self._process.wait()
            last = self._last_line()
            self.stop()
            raise RuntimeError(f"Cannot start a worker process: {last or 'it ended at once'}.") from None
        except BaseException:
            self.stop()
            raise

    @property
    def pid(self) -> int:
        """The process id."""
        return self._process.pid

    @property
    def alive(self) -> bool:
        """Whether the process runs."""
        return self._process.poll() is None

    @property
    def resident_bytes(self) -> int:
        """The memory that the process uses; 0 where the system does not tell, or the process has died."""
        try:
            pages = Path(f"/proc/{self.pid}/statm").read_text().split()[1]
        except (OSError, IndexError):
            return 0
        return int(pages) * resource.getpagesize()

    def send(self, task: Task) -> None:
        """Start a run. If the process has died since its last run, `receive` reports it."""
        self._task = task
        with suppress(BrokenPipeError):
            self.connection.send(task)

    def receive(self) -> tuple[Task, Progress | Done | Died]:
        """Wait for the next message about the current run. Raises OSError if the worker could not write its files."""
        try:
            message: Progress | Done | OSError = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._task, Died(self._exit_reason())
        if isinstance(message, OSError):
            raise message
        return self._task, message

    def stop(self) -> None:
        """Kill the process, also during a run."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.connection.close()
        self._errors.close()

    def _exit_reason(self) -> str:
        code = self._process.wait()
        how = f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        advice = " It may have run out of memory: try fewer --jobs." if code == -signal.SIGKILL else ""
        last = self._last_line(Path(self._task.folder) / "output.txt")
        printed = f" Its last line of output: {last[:200]}" if last else ""
        return f"The process that made this run {how}.{advice}{printed}"

    def _last_line(self, output: Path | None = None) -> str:
        """The last line that the process wrote to its standard error, or else to `output`."""
        self._errors.seek(0)
        text = self._errors.read() or (output.read_bytes() if output is not None and output.is_file() else b"")
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""
