"""Ray on this machine for one job, which nobody else reaches; it ends with the job's driver."""

from __future__ import annotations

import logging
import os
import secrets
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import ray
from ray._private import ray_constants
from ray._private.node import Node
from ray._raylet import AuthenticationTokenLoader  # type: ignore[attr-defined]

from harness.live.processes.host import check_limits, check_loopback
from harness.live.processes.private_folder import private_folder
from harness.machines.ray_cluster import check_names, own_breakpoint, protected

__all__ = ["private_cluster"]

_SHARED_MEMORY = "/dev/shm"  # noqa: S108 - it is Ray that writes there
_STORE_BYTES = 80 * 2**20  # the smallest that Ray accepts; nothing large passes through it

_SETTINGS = {
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    # The only node is this machine. Where that is very busy, Ray would take it for dead after some seconds, and end.
    "RAY_health_check_failure_threshold": "1000",
    "RAY_max_direct_call_object_size": str(32 * 2**20),
    "RAY_task_rpc_inlined_bytes_limit": str(64 * 2**20),
    # A job's processes compute with JAX, and NumPy would have a thread for each core in each of them.
    "OPENBLAS_NUM_THREADS": "1",
}

_LARGE_PAGES = {"PYTHONMALLOC": "malloc", "GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
"""A job's processes take turns on the cores, and none finds its memory in the processor's tables when it is its turn again.
Pages of 2 MiB need fewer entries there: a push takes 8 % less CPU time. Python's own allocator asks for small ones."""


@contextmanager
def private_cluster(processes: int) -> Iterator[None]:
    """Ray on this machine, for a job of so many processes that this process drives: it is not reached from other machines,
    and other users of this machine have no token. It ends with us. Raises ValueError if this machine cannot do that, and
    RuntimeError if Ray does not ask for the token."""
    check_names()
    check_loopback()
    check_limits(processes)
    with private_folder() as folder:
        yield from _ray_in(folder)


def _ray_in(folder: Path) -> Iterator[None]:
    before = dict(os.environ)
    os.environ.pop("RAY_AUTH_MODE", None)  # then Ray turns the token on by itself for a new cluster
    os.environ.update(_SETTINGS | {"RAY_AUTH_TOKEN": secrets.token_hex(32), ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR: "0"})
    for name, value in _LARGE_PAGES.items():
        os.environ.setdefault(name, value)
    # With this, Ray uses the address 127.0.0.1, and its services listen nowhere else. On Linux it would replace that address
    # by one that other machines can reach, and listen on all of them.
    clusters, ray_constants.ENABLE_RAY_CLUSTER = ray_constants.ENABLE_RAY_CLUSTER, False  # this process has read it already
    AuthenticationTokenLoader.instance().reset_cache()  # it may have read the token of another cluster
    try:
        with _few_services(), own_breakpoint():
            _start(folder)
        _kill_services_at_the_end()
        if not protected():
            raise RuntimeError("Cannot start Ray for this job: this version of it does not ask for its token by default.")
        yield
    finally:
        ray.shutdown()
        ray_constants.ENABLE_RAY_CLUSTER = clusters
        for name in os.environ.keys() - before.keys():
            del os.environ[name]
        os.environ.update(before)
        AuthenticationTokenLoader.instance().reset_cache()


@contextmanager
def _few_services() -> Iterator[None]:
    """Start Ray without its autoscaler, its log monitor and the server of its dashboard, for which it has no option. Nobody
    asks them here, and each is a Python process that imports Ray while the job's processes do."""
    instead: dict[tuple[Any, str], Callable[..., None]] = {
        (Node, "start_monitor"): lambda _: None,
        (Node, "start_log_monitor"): lambda _: None,
        (Node, "start_api_server"): lambda node, **_: setattr(node, "_webui_url", ""),
    }
    before = {at: getattr(*at) for at in instead if hasattr(*at)}  # other versions of Ray may have others
    for (of, name), other in instead.items():
        if (of, name) in before:
            setattr(of, name, other)
    try:
        yield
    finally:
        for (of, name), own in before.items():
            setattr(of, name, own)


def _kill_services_at_the_end() -> None:
    """Otherwise Ray would send each of its services SIGTERM, which they have blocked, and wait for a second. What the killed
    ones leave behind ends with the private folder."""
    node: Any = ray._private.worker._global_node
    kill = node.kill_all_processes
    node.kill_all_processes = lambda **_: kill(check_alive=False, wait=True)


def _start(folder: Path) -> None:
    try:
        with warnings.catch_warnings():
            # JAX warns of each fork once it has computed anything. Ray's forks only begin other programs.
            warnings.filterwarnings("ignore", r"os\.fork\(\) was called", RuntimeWarning)
            _init(folder)
    except Exception as error:  # Ray raises nothing more special
        if "timed out during startup" not in str(error):
            raise
        raise RuntimeError(
            "Cannot start Ray on this machine: it was not up within 30 s. The machine is very busy; try again, "
            "or join a cluster with --address."
        ) from error


def _init(folder: Path) -> None:
    ray.init(
        address="local",
        num_cpus=1,
        include_dashboard=False,
        object_store_memory=_STORE_BYTES,
        log_to_driver=False,
        logging_level=logging.ERROR,
        _temp_dir=str(folder),
        # Ray's store of objects, which a job hardly uses, is a file in memory where there is a place for it.
        _plasma_directory=None if os.access(_SHARED_MEMORY, os.W_OK) else str(folder),
    )
