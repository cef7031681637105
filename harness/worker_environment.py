"""The environment variables of processes that play runs."""

from __future__ import annotations

import os
import sys
from pathlib import Path

__all__ = ["single_threaded"]


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
