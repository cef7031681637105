"""What a process uses of its machine: cores, memory that it keeps, and the loopback interface.

The process sets its limits itself, before JAX computes for the first time: JAX then makes as many threads as it finds cores,
and obeys no flag. A limit that is set later holds too, but leaves JAX more threads than cores.
"""

from __future__ import annotations

import ctypes
import os
import socket
from contextlib import suppress
from pathlib import Path

__all__ = ["Cores", "check_loopback", "choose_device", "keep_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_TRIM_BYTES, _MMAP_BYTES = 512 * 2**20, 32 * 2**20  # 32 MiB is the largest value that glibc accepts


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
