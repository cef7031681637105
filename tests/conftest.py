"""Settings for all tests: one thread each, so that pytest's workers share the cores, compiled programs from the cache, and
few collections of garbage.

The threads must be set before NumPy or JAX are imported.
"""

import gc
import os

# Gaussian processes are many small products. With threads, these take seven times as long on a busy machine (measured).
os.environ.update(OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MKL_NUM_THREADS="1")
os.environ.setdefault("JAX_PLATFORMS", "cpu")  # also where JAX finds an accelerator; the benchmarks may be told to use it
os.environ["XLA_FLAGS"] = "--xla_cpu_multi_thread_eigen=false"

import jax
import pytest
from hypothesis import settings

from harness.machines import program_cache
from harness.machines.machine import collect_garbage_rarely

collect_garbage_rarely()
gc.disable()  # until the tests are collected: what is made until then stays
program_cache.use()  # the tests that use the engine directly, too

settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)  # the same examples in every run
settings.register_profile("thorough", deadline=None, max_examples=400)  # `make slow`
settings.load_profile("ci" if os.environ.get("CI") else "here")


_NO_GAIN = ("simplify-while-loops", "while-loop-invariant-code-motion", "while-loop-trip-count-annotator")
"""Passes of XLA that copy each loop's body to look at it: a sixth of the time to compile a program of the engine."""


def pytest_addoption(parser: pytest.Parser) -> None:
    text = "compile programs of test processes without most optimisations, in half of the time"
    parser.addoption("--quick-code", action="store_true", help=text)


def pytest_configure(config: pytest.Config) -> None:
    if config.getoption("--quick-code"):
        jax.config.update("jax_disable_most_optimizations", True)
        os.environ["XLA_FLAGS"] += f" --xla_disable_hlo_passes={','.join(_NO_GAIN)}"


def pytest_collection_finish() -> None:
    """What is in memory now stays until the end, thousands of tests among it: no collection looks at it again."""
    gc.collect()
    gc.freeze()
    gc.enable()
