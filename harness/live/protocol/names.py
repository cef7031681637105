"""Names of the processes of a live job: which ones a setting needs, and the node of each."""

from __future__ import annotations

from harness.live.protocol import messages
from tuners.actions import Setting

__all__ = ["EVALUATOR", "node_of", "peers", "process_count"]

EVALUATOR = messages.worker("evaluator")
"""The process that validates the model, so that no worker has to stop for it."""


def peers(setting: Setting) -> tuple[str, ...]:
    """The processes that a setting needs, servers first."""
    return (*map(messages.server, setting.servers), *map(messages.worker, setting.workers))


def process_count(setting: Setting) -> int:
    """How many processes a job has under a setting, the coordinator and the evaluator included."""
    return len(peers(setting)) + 2


def node_of(name: str) -> str:
    """The node that a process runs on."""
    return name.partition("/")[2]
