"""What this machine is, in words: stands beside times that were measured on the host."""

from __future__ import annotations

import os
import platform
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

__all__ = ["cores", "described"]

_LIBRARIES = ("jax", "numpy")


def cores() -> int:
    """The cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@cache
def described() -> str:
    """Processor, number of cores, system, and versions of Python and of the numerical libraries, in one line."""
    count = cores()
    versions = [f"Python {platform.python_version()}", *(f"{name} {metadata.version(name)}" for name in _LIBRARIES)]
    system = f"{platform.system()} {platform.release()}"
    return f"{_processor()}, {count} core{'' if count == 1 else 's'}; {system}; {', '.join(versions)}"


def _processor() -> str:
    with suppress(OSError), Path("/proc/cpuinfo").open() as lines:
        for line in lines:
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model") and value.strip():
                return " ".join(value.split())
    return platform.processor() or platform.machine() or "unknown processor"
