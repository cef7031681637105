"""This machine: what it is, in words, beside times that were measured on it, what is installed on it, and what our processes
take of it."""

from __future__ import annotations

import gc
import os
import platform
import re
import sys
from collections.abc import Iterable, Mapping
from contextlib import suppress
from functools import cache
from importlib import metadata
from pathlib import Path

from harness.version import HARNESS_VERSION
from simulators.programs.own_code import digest_of

__all__ = ["code_of", "collect_garbage_rarely", "cores", "described", "other_version", "single_threaded", "versions"]

_LIBRARIES = ("jax", "numpy")

_CODE = "code of ps-harness"
_PACKAGES = ("harness", "simulators", "traces", "tuners")  # those that run on other machines, too
_KINDS = (".py", ".toml")


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


def single_threaded(device: str = "cpu") -> dict[str, str]:
    """The environment of a process that plays runs. It has one thread: results do not depend on the host's cores, and
    processes do not compete for them.

    `device` is what JAX computes on, by JAX's name of the platform: cpu, cuda, rocm, tpu.
    """
    path = os.pathsep.join(p or str(Path.cwd()) for p in sys.path)
    threads = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS", "POLARS_MAX_THREADS", "NUMEXPR_NUM_THREADS")
    return (
        dict(os.environ)
        | dict.fromkeys(threads, "1")
        | {
            "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false",
            "JAX_PLATFORMS": device,
            "XLA_PYTHON_CLIENT_PREALLOCATE": "false",  # several processes share an accelerator's memory
            "PYTHONHASHSEED": "0",
            "PYTHONPATH": path,
        }
    )


def collect_garbage_rarely() -> None:
    """From now on, this process looks for circles among its objects after 50,000 new ones, and not after 700.

    To import JAX and to trace a program makes a million objects that stay. To look at them again and again takes a seventh
    of the CPU time of `harness play` (measured). An object that is in no circle is freed at once, as ever.
    """
    gc.set_threshold(50_000, 5, 5)


def versions() -> dict[str, str]:
    """Versions on which results may depend: ours and those of our dependencies; and the code, because two checkouts may have
    the same version."""
    try:
        needed = [r for r in metadata.requires("ps-harness") or () if "extra ==" not in r]
    except metadata.PackageNotFoundError:
        needed = []
    names = sorted(re.match(r"[\w.-]+", r).group() for r in needed)  # type: ignore[union-attr]
    root = Path(__file__).parents[2]
    return (
        {"harness": HARNESS_VERSION}
        | {n: metadata.version(n) for n in names}
        | {_CODE: code_of(root / n for n in _PACKAGES)}
    )


def code_of(folders: Iterable[Path]) -> str:
    """A digest of the code in packages, and of the tables beside it."""
    files = (path for folder in folders for path in sorted(folder.rglob("*")) if path.suffix in _KINDS)
    return digest_of(files)[:8]


def other_version(expected: Mapping[str, str]) -> tuple[str, str, str] | None:
    """The first difference from the `versions` of another machine: what, which is here, which is there."""
    found = ((name, ours, expected[name]) for name, ours in versions().items() if ours != expected.get(name, ours))
    return next(found, None)
