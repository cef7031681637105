"""What a job can begin from: the scenario, or a checkpoint.

A checkpoint serves another process that resumes the job, and the job itself when servers have died with all copies of a
block.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from harness.live.driver.checkpoints.checkpoint_file import COORDINATOR, DRIVER, Checkpoint
from harness.live.driver.checkpoints.driver_state import KnownNodes, state_as_bytes
from harness.live.driver.view.branch_view import DriverBranch
from harness.live.processes.runtime import Procedure, Runtime
from harness.live.worker.spec import Spec
from tuners.actions import SyncPolicy

__all__ = ["RestorePoints"]


class RestorePoints:
    """The latest checkpoint of a job, and the way back to it."""

    def __init__(self, runtime: Runtime, spec: Spec, begun: Checkpoint | None, keep: Callable[[Checkpoint], None]) -> None:
        """`begun` is the checkpoint that the job resumes; None: it begins with the scenario's setting and parameters.
        `keep` is called with every new checkpoint."""
        self._runtime, self._spec, self._keep, self._last = runtime, spec, keep, begun
        self._policies: dict[int, SyncPolicy] = {}  # by branch, at the last checkpoint
        self.seconds = 0.0 if begun is None else begun.seconds  # of the last checkpoint

    def begin(self, branches: Mapping[int, DriverBranch]) -> None:
        """Bring the coordinator to where the job begins; it then needs `recover` and `run`."""
        self._policies = {number: branch.policy for number, branch in branches.items()}
        self._restore()

    def _restore(self) -> dict[int, int]:
        """Restore the coordinator; returns how many pushes each branch has. Raises ValueError for a damaged checkpoint."""
        coordinator = self._runtime.coordinator
        if self._last is None:
            coordinator.begin(self._spec.job.start, self._policies[0], self._spec.parameters)
            return {0: 0}
        try:
            return coordinator.begin_from(self._last.tensors[COORDINATOR].tobytes(), self._last.vectors, self._policies)
        except (IndexError, KeyError, TypeError) as error:
            raise ValueError(f"Cannot resume: the coordinator's state in the checkpoint is damaged ({error}).") from None

    def roll_back(self, branches: Mapping[int, DriverBranch]) -> None:
        """Roll a running job's coordinator back to the last checkpoint; it then needs `recover` and `run`.

        Settings, policies and branches stay as they are now. A branch that is younger than the checkpoint is forked again,
        with what its nearest ancestor had learned. Windows that a tuner has seen stay true: clocks include lost pushes.
        """
        coordinator, pushes = self._runtime.coordinator, self._restore()
        gone = pushes.keys() - branches.keys()
        for number, branch in sorted(branches.items()):  # a parent has a smaller number than its forks
            if number in pushes:
                coordinator.put(number, branch.setting, self._policy_if_new(number, branch.policy))
            else:
                parent = next(n for n in branch.ancestors if n in pushes)
                coordinator.fork(parent, branch.setting, branch.policy, testing=branch.testing, number=number)
                pushes[number] = pushes[parent]
            branch.lost_pushes = branch.clocks - pushes[number]
        # Last: a freed branch may be the nearest ancestor of one that is forked again.
        for number in gone:
            coordinator.free(number)

    def _policy_if_new(self, number: int, policy: SyncPolicy) -> SyncPolicy | None:
        """None if the branch had this policy at the checkpoint: the policy then continues with its state of then."""
        return None if self._policies.get(number) is policy else policy

    def save(
        self, branches: Mapping[int, DriverBranch], running: int | None, told: KnownNodes, state: Mapping[str, Any]
    ) -> Procedure:
        """Make a checkpoint while training continues. Resuming from it loses nothing and counts nothing twice. It is exact
        if no worker is within a mini-batch; otherwise `StateRequests.begin_from` says what holds.

        Raises KeyError if the coordinator dies meanwhile: its successor does not have the snapshot.
        """
        runtime, coordinator = self._runtime, self._runtime.coordinator
        index = coordinator.snapshot(save=True)
        # Taken now and not when the snapshot is durable: both must be of the same moment.
        driver = state_as_bytes(branches, running, runtime.rows_taken, told)
        policies = {number: branch.policy for number, branch in branches.items()}
        yield from runtime.wait_durable(index)
        tensors = {COORDINATOR: _as_tensor(coordinator.checkpoint(index)), DRIVER: _as_tensor(driver)}
        for number, vectors in coordinator.saved(index).items():
            tensors |= {f"{number}/{name}": vector for name, vector in vectors.items()}
        # Also where it cannot be written: this job can be rolled back to it, and the next one is made when it is due.
        self._last, self._policies, self.seconds = Checkpoint(tensors, state), policies, runtime.now
        self._keep(self._last)


def _as_tensor(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)
