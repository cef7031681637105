"""The driver's state in a checkpoint: as data, without the code of policies.

A policy that the setting names is made again from its name. One that a tuner has installed is given by the tuner itself,
which is replayed before its job is resumed.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.live.driver.checkpoints.checkpoint_file import DRIVER, Checkpoint
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.protocol.plain_data import packed, unpacked
from tuners import policies
from tuners.actions import Cost, Evaluation, NodeEvent, Rejected, Setting, Status, SyncPolicy

__all__ = ["DriverState", "KnownNodes", "driver_state", "state_as_bytes"]

_SAME: tuple[str, ...] = (
    "setting",
    "installed",
    "setting_before_loss",
    "status",
    "clocks",
    "lost_pushes",
    "since_seconds",
    "unseen_rows",
)
_SAME += ("evaluations", "latest_evaluation", "changes")


class KnownNodes(NamedTuple):
    """What the tuner knows of nodes."""

    absent: tuple[str, ...] = ()  # nodes that it was told are absent, or will be told by `events`
    events: tuple[NodeEvent, ...] = ()  # for its next window


class DriverState(NamedTuple):
    """What a checkpoint keeps of the driver."""

    branches: dict[int, DriverBranch]
    running: int | None
    rows_taken: dict[int, int]
    told: KnownNodes


class _DriverBranchState(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A `DriverBranch` without its policy."""

    ancestors: tuple[int, ...]
    testing: bool
    setting: Setting
    installed: int | None
    setting_before_loss: Setting | None
    status: Status
    clocks: int
    lost_pushes: int
    since_seconds: float
    unseen_rows: NDArray[np.float64]  # [n, 11]
    evaluations: list[Evaluation]
    latest_evaluation: Evaluation | None
    changes: list[Cost]


class _DriverState(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    branches: dict[int, _DriverBranchState]
    running: int | None
    rows_taken: dict[int, int]
    told: KnownNodes = KnownNodes()


def state_as_bytes(
    branches: Mapping[int, DriverBranch], running: int | None, rows_taken: Mapping[int, int], told: KnownNodes
) -> bytes:
    """The branches, the one that trains, the number of rows taken of each, and what the tuner knows of nodes."""
    rows = {
        number: _DriverBranchState(
            ancestors=branch.ancestors, testing=branch.testing, **{name: getattr(branch, name) for name in _SAME}
        )
        for number, branch in branches.items()
    }
    return packed(_DriverState(rows, running, dict(rows_taken), told))


def driver_state(begun: Checkpoint, installed: Mapping[int, SyncPolicy]) -> DriverState:
    """The inverse of `state_as_bytes`, from a checkpoint. `installed`: policies by the exchange that installed them. Raises
    ValueError for a checkpoint that is damaged, or needs a policy that is not among these."""
    try:
        found = unpacked(begun.tensors[DRIVER].tobytes(), _DriverState)
        made = {number: _restored(row, installed) for number, row in found.branches.items()}
    except (KeyError, ValueError, Rejected) as error:
        raise ValueError(f"Cannot resume: the driver's state in the checkpoint is damaged ({error}).") from None
    if made.keys() != begun.vectors.keys() or found.running not in {None, *made}:
        raise ValueError("Cannot resume: the driver's state in the checkpoint has other branches than the model.")
    return DriverState(made, found.running, found.rows_taken, found.told)


def _restored(row: _DriverBranchState, installed: Mapping[int, SyncPolicy]) -> DriverBranch:
    if row.installed is None:
        policy = policies.of_setting(row.setting)
    elif row.installed in installed:
        policy = installed[row.installed]
    else:
        raise ValueError(f"exchange {row.installed} installed no policy")
    made = DriverBranch(row.setting, policy, row.since_seconds, ancestors=row.ancestors, testing=row.testing)
    for name in _SAME:
        setattr(made, name, getattr(row, name))
    return made
