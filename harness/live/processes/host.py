"""What a process takes of the machine it is on: cores, and memory that it keeps.

Limits are set from within, before JAX computes for the first time: it then makes as many threads as it finds cores, and
heeds no flag. Later limits hold, too, but leave it more threads than cores.
"""

from __future__ import annotations

import ctypes
import os
from contextlib import suppress
from pathlib import Path

__all__ = ["Cores", "keep_memory"]

_TRIM_THRESHOLD, _MMAP_THRESHOLD = -1, -3  # numbers of malloc.h
_TRIM_BYTES, _MMAP_BYTES = 512 * 2**20, 32 * 2**20  # the latter is the most that it takes


def keep_memory() -> None:
    """Have malloc keep what is freed: arrays as large as a model would else come as new pages each time, at a page fault
    per 4 KiB, which makes a step up to three times as long. Does nothing where malloc is another than glibc's."""
    with suppress(AttributeError):
        mallopt = ctypes.CDLL(None).mallopt
        mallopt(_TRIM_THRESHOLD, _TRIM_BYTES)
        mallopt(_MMAP_THRESHOLD, _MMAP_BYTES)


class Cores:
    """The cores that this process was given, of which it uses some; processes of different `slot` use different ones."""

    def __init__(self, slot: int = 0) -> None:
        self._slot = slot
        self._given = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        self._used = len(self._given)

    def use(self, count: int) -> None:
        """Run on `count` cores from now on, 0 for all; on as many as there are where there are fewer."""
        count = min(count or len(self._given), len(self._given))
        if count == self._used:
            return
        first = self._slot * count
        chosen = {self._given[(first + i) % len(self._given)] for i in range(count)}
        for thread in Path("/proc/self/task").iterdir():  # a thread that starts meanwhile has the cores of its parent
            with suppress(ProcessLookupError):
                os.sched_setaffinity(int(thread.name), chosen)
        self._used = count
