"""The worker processes of a comparison on this machine: send them runs, receive progress, and survive the death of one.

Plain subprocesses rather than an executor: when a process of a `ProcessPoolExecutor` is killed, all runs in progress are
lost and the cause cannot be told. Here each process has one run and one pipe, so the run at fault is known.
"""

from __future__ import annotations

import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Pipe, wait
from pathlib import Path
from typing import IO

from harness.comparison.run_process import Done, Progress, Task
from harness.worker_environment import single_threaded

__all__ = ["Died", "WorkerProcess", "work"]


@dataclass(frozen=True, slots=True)
class Died:
    """The process that made a run has died; the run has no results."""

    reason: str


def work(tasks: Iterable[Task], jobs: int) -> Iterator[tuple[Task, Progress | Done | Died]]:
    """Make all runs, `jobs` at a time; yield each message as it arrives.

    Raises OSError if a worker cannot write (a full disk), RuntimeError if a worker cannot start. Ends all processes in every
    case.
    """
    waiting = list(tasks)[::-1]
    workers: list[WorkerProcess] = []
    try:
        while waiting or workers:
            while waiting and len(workers) < jobs:
                workers.append(WorkerProcess())
                workers[-1].send(waiting.pop())
            ready = wait([w.connection for w in workers])
            for worker in [w for w in workers if w.connection in ready]:
                task, message = worker.receive()
                if isinstance(message, Progress):
                    yield task, message
                    continue
                # The worker gets its next run before the caller writes the results of this one, so that it does not wait.
                if isinstance(message, Died) or not waiting:
                    workers.remove(worker)
                    worker.stop()
                else:
                    worker.send(waiting.pop())
                yield task, message
    finally:
        for worker in workers:
            worker.stop()


class WorkerProcess:
    """One worker process and the run that it makes."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `stop`)
        self._process = subprocess.Popen(  # noqa: S603 (ourselves)
            # -P: without it, files of the working folder would hide installed packages in the new process.
            [sys.executable, "-P", "-m", "harness.comparison.run_process", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            env=single_threaded(),
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
