"""What processes that play runs are given: environment variables, and fewer collections of garbage."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

__all__ = ["collect_garbage_rarely", "single_threaded"]


def single_threaded(device: str = "cpu") -> dict[str, str]:
    """One thread per process: results do not depend on the host's cores, and processes do not compete for them.

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
