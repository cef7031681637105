"""The worker processes of a comparison: hand out runs, hear how they go, and survive a worker that does not.

Plain subprocesses rather than an executor: when a process of a `ProcessPoolExecutor` is killed, every run in flight is
lost and nobody knows which of them was at fault. Here each process has one run and one pipe, so the culprit has a name.
"""

from __future__ import annotations

import os
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

__all__ = ["Died", "Hand", "work"]


@dataclass(frozen=True, slots=True)
class Died:
    """The process that made a run is gone, and nothing of the run is left."""

    reason: str


def work(tasks: Iterable[Task], jobs: int) -> Iterator[tuple[Task, Progress | Done | Died]]:
    """Make all runs, `jobs` at a time, yielding what happens as it happens.

    Raises OSError where a worker cannot write (a full disk), RuntimeError where workers cannot even start. However it
    ends, no process is left behind.
    """
    waiting = list(tasks)[::-1]
    crew: list[Hand] = []
    try:
        while waiting or crew:
            while waiting and len(crew) < jobs:
                crew.append(Hand())
                crew[-1].give(waiting.pop())
            ready = wait([h.connection for h in crew])
            for hand in [h for h in crew if h.connection in ready]:
                task, heard = hand.hear()
                if isinstance(heard, Progress):
                    yield task, heard
                    continue
                if isinstance(heard, Died) or not waiting:
                    crew.remove(hand)
                    hand.dismiss()
                else:
                    hand.give(waiting.pop())
                yield task, heard
    finally:
        for hand in crew:
            hand.dismiss()


class Hand:
    """One worker process and the run that it has."""

    def __init__(self) -> None:
        self.connection, theirs = Pipe()
        self._errors: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115 (closed by `dismiss`)
        self._process = subprocess.Popen(  # noqa: S603 (ourselves)
            [sys.executable, "-m", "harness.comparison.run_process", str(theirs.fileno())],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=self._errors,
            pass_fds=[theirs.fileno()],
            env=_environment(),
            start_new_session=True,  # so that Ctrl-C reaches the parent only, which then ends the others
        )
        theirs.close()
        try:
            self.connection.recv()
        except EOFError:
            self._process.wait()
            said = self._said()
            self.dismiss()
            raise RuntimeError(f"Cannot start a worker process: {said or 'it ended at once'}.") from None
        except BaseException:
            self.dismiss()
            raise

    def give(self, task: Task) -> None:
        self._task = task
        with suppress(BrokenPipeError):  # it died since its last run; `hear` will say so
            self.connection.send(task)

    def hear(self) -> tuple[Task, Progress | Done | Died]:
        try:
            heard: Progress | Done | OSError = self.connection.recv()
        except (EOFError, ConnectionResetError):
            return self._task, Died(self._obituary())
        if isinstance(heard, OSError):
            raise heard
        return self._task, heard

    def dismiss(self) -> None:
        """End the process, whatever it is doing."""
        with suppress(ProcessLookupError):
            self._process.kill()
        self._process.wait()
        if self._process.stdin is not None:
            self._process.stdin.close()
        self.connection.close()
        self._errors.close()

    def _obituary(self) -> str:
        code = self._process.wait()
        how = f"exited with status {code}" if code >= 0 else f"was killed by {signal.Signals(-code).name}"
        advice = " It may have run out of memory: try fewer --jobs." if code == -signal.SIGKILL else ""
        said = self._said(Path(self._task.folder) / "output.txt")
        last = f" Its last words: {said[:200]}" if said else ""
        return f"The process that made this run {how}.{advice}{last}"

    def _said(self, output: Path | None = None) -> str:
        """The last line that the process wrote, to `output` or to its standard error."""
        self._errors.seek(0)
        text = self._errors.read() or (output.read_bytes() if output is not None and output.is_file() else b"")
        lines = text.decode(errors="replace").strip().splitlines()
        return lines[-1] if lines else ""


def _environment() -> dict[str, str]:
    """One thread per process: results do not depend on the host's cores, and processes do not fight over them."""
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS", "NUMEXPR_NUM_THREADS")
    return (
        dict(os.environ)
        | dict.fromkeys(threads, "1")
        | {
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "JAX_PLATFORMS": "cpu",
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": path,
        }
    )
