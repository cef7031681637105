"""What a job can go on from: its beginning, or a checkpoint; for another job that resumes it, and for itself when servers
have died with all the copies there were."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Mapping
from typing import Any

import cloudpickle
import numpy as np

from harness.live.driver.branch_view import Sight
from harness.live.driver.checkpoint_file import Checkpoint
from harness.live.processes.runtime import Procedure, Runtime
from harness.live.worker.spec import Spec
from tuners.actions import SyncPolicy

__all__ = ["Keeping"]

_COORDINATOR, _DRIVER = "coordinator", "driver"  # tensors of a checkpoint: what each of them knows, pickled


class Keeping:
    """The last of a job's checkpoints, and how to come by the next one."""

    def __init__(self, runtime: Runtime, spec: Spec, begun: Checkpoint | None, keep: Callable[[Checkpoint], None]) -> None:
        """`begun` is what the job begins from; None: from the scenario's first setting and parameters."""
        self._runtime, self._spec, self._keep, self._last = runtime, spec, keep, begun
        self._policies: dict[int, SyncPolicy] = {}  # by branch, then
        self.seconds = 0.0 if begun is None else float(begun.state["seconds"])  # of the last checkpoint

    @staticmethod
    def driver(begun: Checkpoint) -> tuple[dict[int, Sight], int | None, dict[int, int]]:
        """What a driver knew at a checkpoint: branches, which of them trains, and how many rows of each it had taken."""
        kept: tuple[dict[int, Sight], int | None, dict[int, int]]
        kept = pickle.loads(begun.tensors[_DRIVER].tobytes())  # noqa: S301 - the job's own checkpoint
        return kept

    def begin(self, sights: Mapping[int, Sight]) -> None:
        """Have the coordinator stand where the job begins. `recover` and `run` come next."""
        self._policies = {number: sight.policy for number, sight in sights.items()}
        self._restore()

    def _restore(self) -> dict[int, int]:
        """How many pushes each branch has."""
        if self._last is None:
            self._runtime.call("begin", self._spec.job.start, self._policies[0], self._spec.parameters)
            return {0: 0}
        tensors = self._last.tensors
        pushes: dict[int, int] = self._runtime.call("begin_from", tensors[_COORDINATOR].tobytes(), _vectors(tensors))
        return pushes

    def go_back(self, sights: Mapping[int, Sight]) -> None:
        """Have a coordinator under way stand where it stood at the last checkpoint; `recover` and `run` come next.

        Settings and policies remain those of now, and so do branches: one that was forked since is forked again, and has
        learned what the one had that it comes from. What a tuner was told stays told: clocks count lost pushes, too.
        """
        call, pushes = self._runtime.call, self._restore()
        gone = pushes.keys() - sights.keys()
        for number, sight in sorted(sights.items()):  # those first that others come from
            if number in pushes:
                call("put", number, sight.setting, self._changed(number, sight.policy))
            else:
                parent = next(n for n in sight.ancestors if n in pushes)
                call("fork", parent, sight.setting, sight.policy, testing=sight.testing, number=number)
                pushes[number] = pushes[parent]
            sight.lost = sight.clocks - pushes[number]
        for number in gone:
            call("free", number)

    def _changed(self, number: int, policy: SyncPolicy) -> SyncPolicy | None:
        """None where it is the one that the branch had, which goes on as it stood."""
        return None if self._policies.get(number) is policy else policy

    def keep(self, sights: Mapping[int, Sight], running: int | None, state: Mapping[str, Any]) -> Procedure:
        """Have the job kept as it is; training goes on. What goes on from there is exact where nobody was in a mini-batch;
        for those who were, `Coordinator.begin_from` says what holds. Nothing is lost or counted twice.

        Raises KeyError where the coordinator has died meanwhile: the next one knows nothing of the snapshot.
        """
        runtime = self._runtime
        index: int = runtime.call("snapshot", save=True)
        driver = cloudpickle.dumps((dict(sights), running, runtime.taken))
        policies = {number: sight.policy for number, sight in sights.items()}
        yield from runtime.durable(index)
        tensors = {_COORDINATOR: _as_tensor(runtime.call("checkpoint", index)), _DRIVER: _as_tensor(driver)}
        for number, vectors in runtime.call("saved", index).items():
            tensors |= {f"{number}/{name}": vector for name, vector in vectors.items()}
        self._last, self._policies, self.seconds = Checkpoint(tensors, state), policies, runtime.now
        self._keep(self._last)


def _as_tensor(data: bytes) -> Any:
    return np.frombuffer(data, np.uint8)


def _vectors(tensors: Mapping[str, Any]) -> dict[int, dict[str, Any]]:
    """The servers' vectors, by branch and name."""
    made: dict[int, dict[str, Any]] = {}
    for name, tensor in tensors.items():
        number, _, vector = name.partition("/")
        if vector:
            made.setdefault(int(number), {})[vector] = tensor
    return made
