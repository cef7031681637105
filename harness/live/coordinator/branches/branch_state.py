"""The coordinator's branches in a checkpoint: as data, without the code of their policies.

Whoever restores a checkpoint gives the policies, and the state of each is put back into the form that its `init` has.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import jax
import msgspec
import numpy as np
from numpy.typing import NDArray

from harness.live.coordinator.branches.branch import CoordinatorBranch, Cycle, LiveJob, ModelVersions, PushFacts
from harness.live.protocol.plain_data import packed, unpacked
from simulators.engine.job_state import Records
from tuners.actions import Setting, Status, SyncPolicy

__all__ = ["branches_as_bytes", "branches_of"]


class _Branch(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    """A `CoordinatorBranch` without policy and shards."""

    number: int
    testing: bool
    setting: Setting
    status: Status
    policy_state: list[NDArray[Any]] | None  # the leaves; None: the policy was never started
    active: NDArray[np.bool_]
    clocks: NDArray[np.int32]
    begun: NDArray[np.int32]
    waiting_since_seconds: NDArray[np.float64]
    pushes: int
    samples: int
    version: int
    grouped: int
    steps: int
    inherited: int
    busy: dict[int, Cycle]
    due: set[int]
    halted: bool
    rows: NDArray[np.float64]  # [n, 11]
    rows_taken: int
    staleness: dict[int, int]


class _Branches(msgspec.Struct, array_like=True, forbid_unknown_fields=True):
    branches: list[_Branch]
    next_branch: int
    undecided: list[tuple[int, PushFacts]]


_SAME: tuple[str, ...] = (
    "testing",
    "setting",
    "status",
    "active",
    "clocks",
    "begun",
    "waiting_since_seconds",
    "pushes",
    "samples",
)
_SAME += ("grouped", "steps", "inherited", "busy", "due", "halted", "rows_taken")


def branches_as_bytes(
    branches: Iterable[CoordinatorBranch], next_branch: int, undecided: Iterable[tuple[int, PushFacts]]
) -> bytes:
    """The state of all branches, and the pushes on which a policy has not decided yet, by branch."""
    rows = [
        _Branch(
            number=branch.number,
            policy_state=None if branch.state is None else [np.asarray(leaf) for leaf in jax.tree.leaves(branch.state)],
            rows=np.array(branch.rows, np.float64).reshape(-1, len(Records._fields)),
            staleness=branch.staleness,
            version=branch.versions.latest,
            **{name: getattr(branch, name) for name in _SAME},
        )
        for branch in branches
    ]
    return packed(_Branches(rows, next_branch, list(undecided)))


def branches_of(
    data: bytes, job: LiveJob, policies: Mapping[int, SyncPolicy]
) -> tuple[dict[int, CoordinatorBranch], int, list[tuple[int, PushFacts]]]:
    """The inverse of `branches_as_bytes`; `policies` are those of the branches, by number. Raises ValueError for other
    bytes, and without the policy of a branch."""
    found = unpacked(data, _Branches)
    return {row.number: _restored(row, job, policies) for row in found.branches}, found.next_branch, found.undecided


def _restored(row: _Branch, job: LiveJob, policies: Mapping[int, SyncPolicy]) -> CoordinatorBranch:
    policy = policies.get(row.number)
    if policy is None:
        raise ValueError(f"Cannot restore branch {row.number}: its policy is not given.")
    nodes, by_node = len(job.nodes), (row.active, row.clocks, row.begun, row.waiting_since_seconds)
    fits = all(array.shape == (nodes,) for array in by_node) and row.rows.shape[1:] == (len(Records._fields),)
    if not fits or not {*row.busy, *row.due, *row.staleness} <= set(range(nodes)):
        raise ValueError(f"Cannot restore branch {row.number}: its state is damaged, or of a job with other nodes.")
    groups = job.aggregation != "each"
    shards = job.shards(row.setting)
    made = CoordinatorBranch(row.number, row.setting, policy, shards, testing=row.testing, groups=groups)
    for name in _SAME:
        setattr(made, name, getattr(row, name))
    made.rows, made.staleness = [tuple(r) for r in row.rows.tolist()], row.staleness
    made.versions = ModelVersions(row.version)
    if row.policy_state is not None:
        leaves, form = jax.tree.flatten(policy.init(np.zeros_like(row.active)))
        if [np.shape(leaf) for leaf in leaves] != [leaf.shape for leaf in row.policy_state]:
            raise ValueError(f"Cannot restore branch {row.number}: its state is not one of policy {policy.name}.")
        made.state = jax.tree.unflatten(form, row.policy_state)
    return made
