"""A live job at one moment, for whoever shows it to a person."""

from __future__ import annotations

from dataclasses import dataclass

from tuners.actions import Setting
from tuners.settings import BY_STALENESS

__all__ = ["JobStatus", "NodeStatus", "setting_words"]


@dataclass(frozen=True, slots=True)
class NodeStatus:
    """One node; shares are of the last seconds, and sum to 1 at most."""

    name: str
    role: str  # worker | server | both | idle | lost
    pushes_per_second: float = 0.0
    compute_share: float = 0.0
    transfer_share: float = 0.0  # pulling and pushing
    wait_share: float = 0.0  # held back by the policy


@dataclass(frozen=True, slots=True)
class JobStatus:
    """A job: time, learning, setting, nodes, and what has happened."""

    seconds: float
    budget_seconds: float
    status: str
    clocks: int
    clocks_per_second: float
    loss: float  # mean training loss of the last pushes
    accuracy: float  # of the last validation, nan before
    setting: Setting
    nodes: tuple[NodeStatus, ...]
    events: tuple[tuple[float, str], ...]  # (seconds, sentence): changes of setting, a tuner's reasons, lost nodes


def setting_words(setting: Setting) -> str:
    """The setting in half a line, for people."""
    policy = f"{setting.policy}({setting.staleness})" if setting.policy in BY_STALENESS else setting.policy
    words = [
        *(f"{len(m)} {role}{'s' * (len(m) != 1)}" for m, role in ((setting.workers, "worker"), (setting.servers, "server"))),
        policy,
        f"batch {setting.batch_size}",
        f"rate {setting.learning_rate:.3g}",
    ]
    words += [f"momentum {setting.momentum:.2g}"] if setting.momentum else []
    words += [f"{setting.transfer_bits} bits"] if setting.transfer_bits != 32 else []
    return ", ".join(words)
