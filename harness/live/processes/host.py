"""What a process uses of its machine: cores, memory that it keeps, threads, files, and the loopback interface.

The process sets its limits itself, before JAX computes for the first time: JAX then makes as many threads as it finds cores,
and obeys no flag. A limit that is set later holds too, but leaves JAX more threads than cores.
"""

from __future__ import annotations

import ctypes
import os
import resource
import socket
import threading
from contextlib import suppress
from pathlib import Path

__all__ = ["Cores", "check_limits", "check_loopback", "choose_device", "keep_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_TRIM_BYTES, _MMAP_BYTES = 512 * 2**20, 32 * 2**20  # 32 MiB is the largest value that glibc accepts

_THREADS, _THREADS_EACH = 100, 30
"""Of Ray's services, and of each process of a job, at the least: on two cores a server had 26 and a worker 40."""

_FILES, _FILES_EACH = 60, 5
"""That the coordinator's process has open, which has most, and for each process of the job more: 96 with seven."""

_STACK_BYTES = 64 * 1024  # of a thread that only waits


def keep_memory() -> None:
    """Make malloc keep freed memory. Otherwise every array as large as a model is made of new pages, with a page fault per
    4 KiB, and a step takes up to three times as long. Does nothing unless malloc is glibc's."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


def check_loopback() -> None:
    """Raise ValueError if this machine cannot reach itself: Ray would try for minutes."""
    try:
        with (
            socket.create_server(("127.0.0.1", 0)) as listener,
            socket.create_connection(listener.getsockname(), timeout=5.0),
        ):
            pass
    except OSError as error:
        raise ValueError(
            f"Cannot run a job on this machine: it cannot reach itself at 127.0.0.1 ({error.strerror or error}). Turn the "
            "loopback interface on, as `ip link set lo up` does, or join a cluster with --address."
        ) from None


def check_limits(processes: int) -> None:
    """Raise ValueError if this user may not start as many threads, or open as many files, as Ray and a job of so many
    processes need: Ray would try for minutes, and name another reason."""
    wanted = _FILES + processes * _FILES_EACH
    _, files = resource.getrlimit(resource.RLIMIT_NOFILE)  # Ray raises the soft limit to the hard one
    if files != resource.RLIM_INFINITY and files < wanted:
        raise ValueError(
            f"Cannot run a job of {processes} processes on this machine: a process may open {files} files, and "
            f"needs at least {wanted}. Raise the limit (`ulimit -Hn`), or join a cluster with --address."
        )
    wanted = _THREADS + processes * _THREADS_EACH
    if (found := _startable(wanted)) < wanted:
        raise ValueError(
            f"Cannot run a job of {processes} processes on this machine: they need at least {wanted} threads, and only "
            f"{found} more can be started. Raise the limit (`ulimit -u`, or that of the container or batch system), end "
            "other processes, or join a cluster with --address."
        )


def _startable(most: int) -> int:
    """How many threads can be started now, up to `most`. It is tried, because limits are in several places: of the user, of
    control groups, of the kernel; and some users are exempt."""
    over, started = threading.Event(), []
    before = threading.stack_size(_STACK_BYTES)
    try:
        for _ in range(most):
            thread = threading.Thread(target=over.wait, name="try", daemon=True)
            thread.start()
            started.append(thread)
    except RuntimeError:  # "can't start new thread"
        pass
    finally:
        threading.stack_size(before)
        over.set()
        for thread in started:
            thread.join()
    return len(started)


def choose_device(*, accelerated: bool) -> None:
    """Let JAX compute on the accelerator that this process sees, or on its CPU; before JAX computes for the first time.

    Memory of an accelerator is taken when it is needed: JAX would take three quarters of it at once, and a server or another
    job may be on the same device.
    """
    import jax

    os.environ["XLA_PYTHON_CLIENT_PREALLOCATE"] = "false"
    jax.config.update("jax_platforms", None if accelerated else "cpu")  # type: ignore[no-untyped-call]


class Cores:
    """The cores that this process may use. It uses some of them; processes with different `slot` use different ones."""

    def __init__(self, slot: int = 0) -> None:
        self._slot = slot
        self._given = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._used = len(self._given)

    def use(self, count: int) -> None:
        """Run on `count` cores from now on; 0, or more than this process may use, means all."""
        count = min(count or len(self._given), len(self._given))
        if count == self._used:
            return
        first = self._slot * count
        chosen = {self._given[(first + i) % len(self._given)] for i in range(count)}
        for thread in Path("/proc/self/task").iterdir():  # a thread that starts meanwhile inherits its parent's cores
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), chosen)
        self._used = count
