"""From one setting to another: the steps of the change and what each costs.

Two kinds so far. What the servers read anew at every push or pull (rate, momentum, policy, batch and data shares) changes
in place. Everything else goes the papers' baseline way, quiescent: checkpoint, restart under the new setting, restore.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import msgspec

from tuners.actions import Setting

__all__ = ["Costs", "Step", "check", "in_place", "plan"]

_IN_PLACE = ("learning_rate", "momentum", "policy", "staleness", "batch_size", "loads", "data_shares")
_MOVES_MODEL = ("workers", "servers", "model_shares")


class Costs(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a reconfiguration costs.

    The defaults are fitted to TensorFlowOnline's Table V (checkpoint and restart, four workloads, within 15 %).
    """

    restart_seconds: float = 14.1  # stop all processes and start them again
    checkpoint_bytes_per_second: float = 20e6  # writing the model
    restore_bytes_per_second: float = 28e6  # and reading it back, placed anew
    fork_bytes_per_second: float = 5e9  # copying parameters and optimizer slots in memory


class Step(NamedTuple):
    """One step of a change; nobody trains meanwhile."""

    name: str
    seconds: float
    bytes_moved: float


def check(costs: Costs) -> None:
    """Raise ValueError for costs that cannot be."""
    if not 0 <= costs.restart_seconds < math.inf:
        raise ValueError(f"Cannot use restart_seconds = {costs.restart_seconds}: it must be finite and not negative.")
    for name in ("checkpoint_bytes_per_second", "restore_bytes_per_second", "fork_bytes_per_second"):
        if not getattr(costs, name) > 0:
            raise ValueError(f"Cannot use {name} = {getattr(costs, name)}: it must be positive.")


def in_place(old: Setting, new: Setting) -> bool:
    """Whether nobody has to stop for the change."""
    return all(getattr(old, f) == getattr(new, f) for f in Setting.__slots__ if f not in _IN_PLACE)


def plan(old: Setting, new: Setting, model_bytes: float, costs: Costs) -> tuple[Step, ...]:
    """The steps from `old` to `new`, in order. A model that stays where it is need not be written and read back."""
    if in_place(old, new):
        return ()
    restart = Step("restart", costs.restart_seconds, 0.0)
    if all(getattr(old, f) == getattr(new, f) for f in _MOVES_MODEL):
        return (restart,)
    return (
        Step("checkpoint", model_bytes / costs.checkpoint_bytes_per_second, model_bytes),
        restart,
        Step("restore", model_bytes / costs.restore_bytes_per_second, model_bytes),
    )
