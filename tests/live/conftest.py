"""Set Ray up before anything imports it: quiet, quick to notice that a node is gone, and closed without the token."""

import atexit
import os
import secrets
import shutil
import sys
import tempfile
from pathlib import Path

import pytest

from harness.live.transport import shared_memory
from tests.live.support.clusters import loop_cluster
from tests.live.support.frames import ends, few_objects, nothing_is_left
from tests.live.support.namespaces import namespace_cluster

__all__ = ["ends", "few_objects", "loop_cluster", "namespace_cluster", "nothing_is_left"]

_KEYS = Path(tempfile.mkdtemp(prefix="ray-token-"))
atexit.register(shutil.rmtree, _KEYS, ignore_errors=True)
(_KEYS / "token").touch(mode=0o600)
(_KEYS / "token").write_text(secrets.token_hex(32))

assert "ray" not in sys.modules, "a test module imports Ray at its top; let its tests import it"
for name in [n for n in os.environ if n.startswith("RAY_")]:
    del os.environ[name]
os.environ |= {
    "PYTHONPATH": os.pathsep.join(filter(None, [str(Path(__file__).parents[2]), os.environ.get("PYTHONPATH")])),  # our jobs
    "RAY_AUTH_MODE": "token",
    "RAY_AUTH_TOKEN_PATH": str(_KEYS / "token"),
    "RAY_USAGE_STATS_ENABLED": "0",
    "RAY_enable_metrics_collection": "0",
    "RAY_event_stats": "0",
    "RAY_task_events_report_interval_ms": "0",
    "RAY_enable_timeline": "0",
    "RAY_enable_worker_prestart": "0",
    "RAY_prestart_worker_first_driver": "0",
    "RAY_memory_monitor_refresh_ms": "0",
    "RAY_ENABLE_UV_RUN_RUNTIME_ENV": "0",
    # A node that is killed is noticed within a second, one that is cut off or stopped within four.
    "RAY_health_check_initial_delay_ms": "1000",
    "RAY_health_check_period_ms": "300",
    "RAY_health_check_timeout_ms": "1000",
    "RAY_health_check_failure_threshold": "3",
}


@pytest.fixture(autouse=True)
def much_is_lent(monkeypatch):
    """Send even the small models of tests through shared memory, as large ones are.

    This holds for what this process sends. Processes that a test starts, Ray's included, keep the real limit; frames of
    `test_shared_memory_between` and of the benchmark of a live job are larger than that."""
    monkeypatch.setattr(shared_memory, "LARGE_BYTES", 100)
