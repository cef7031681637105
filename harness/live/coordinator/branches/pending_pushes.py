"""The owner of pushes that are not over: results that have arrived, blocks that are staged, commits without a decision."""

from __future__ import annotations

from harness.live.coordinator.branches.branch import PushFacts
from harness.live.protocol.blocks import Blocks, union
from harness.live.protocol.messages import GradientDone

__all__ = ["PendingPushes"]


class PendingPushes:
    """What has arrived of the push of each worker, by the worker's number."""

    journaled = ("undecided",)

    def __init__(self, blocks: int) -> None:
        """`blocks`: of the model."""
        self._blocks = blocks
        self.undecided: dict[int, PushFacts] = {}  # committed pushes that wait for the loss after them
        self._results: dict[int, GradientDone] = {}
        self._staged: dict[int, Blocks] = {}
        self._late: dict[int, Blocks] = {}

    def computed(self, worker: int, result: GradientDone) -> bool:
        """The gradient is computed. Returns False if that was known."""
        new = worker not in self._results
        if new:
            self._results[worker] = result
        return new

    def is_computed(self, worker: int) -> bool:
        """Whether its gradient is computed."""
        return worker in self._results

    def stage(self, worker: int, blocks: Blocks) -> bool:
        """Servers have these blocks of the push. Returns whether they have all now."""
        before = self._staged.get(worker)
        self._staged[worker] = staged = blocks if before is None else union(before, blocks)
        return len(staged) >= self._blocks

    def staged(self, worker: int) -> Blocks:
        """The blocks of the push that servers have."""
        return self._staged.get(worker, frozenset())

    def to_commit(self, worker: int) -> GradientDone | None:
        """The result of a push that can be committed; None before, and after it is."""
        # Only when every block is staged: the commit must be applicable at every server.
        if worker in self.undecided or len(self._staged.get(worker, ())) < self._blocks:
            return None
        return self._results.get(worker)

    def await_blocks(self, worker: int, blocks: Blocks) -> None:
        """Note which blocks of the worker's pull are late; none once they have arrived."""
        self._late[worker] = blocks

    def awaited(self, worker: int) -> Blocks:
        """The blocks of the worker's pull that are late."""
        return self._late.get(worker, frozenset())

    def forget(self, worker: int) -> None:
        """The worker's mini-batch is over, or dropped."""
        self._late.pop(worker, None)
        self.undecided.pop(worker, None)
        self._results.pop(worker, None)
        self._staged.pop(worker, None)

    def forget_staged(self) -> None:
        """A view begins: servers have dropped all staged pushes. Late blocks stay late: workers go on with their pulls."""
        self._staged.clear()
