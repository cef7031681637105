"""The driver's requests about the whole state of a job: what it begins with, and what a checkpoint saves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob, PushFacts
from harness.live.coordinator.branches.branch_state import branches_as_bytes, branches_of
from harness.live.coordinator.branches.branches import Branches
from harness.live.coordinator.branches.complete_pushes import CompletePushes
from harness.live.coordinator.branches.evaluations import Evaluations
from harness.live.coordinator.branches.pending_pushes import PendingPushes
from harness.live.coordinator.ledger.ledger import Ledger
from harness.live.coordinator.ledger.moves import Moves
from harness.live.coordinator.ledger.snapshots import Snapshots
from harness.live.coordinator.membership.views import Views
from harness.live.coordinator.state_record import StateRecord
from harness.live.protocol.messages import Array
from tuners.actions import Setting, SyncPolicy

__all__ = ["StateRequests"]


@dataclass(frozen=True, eq=False)
class StateRequests:
    """Answers the questions of `StateQuestions` in `harness.live.processes.client`."""

    _job: LiveJob
    _ledger: Ledger
    _snapshots: Snapshots
    _moves: Moves
    _views: Views
    _branches: Branches
    _pending: PendingPushes
    _pushes: CompletePushes
    _evaluations: Evaluations
    _record: StateRecord

    def begin(self, setting: Setting, policy: SyncPolicy, parameters: Array) -> None:
        """Create branch 0 with these parameters, [P] float32. Then `expect` processes, `recover` when the servers have
        joined, which gives them the model, and `run` when the workers have. A job that runs already starts over."""
        self._job.check(policy)
        groups = self._job.aggregation != "each"
        branch = CoordinatorBranch(0, setting, policy, self._job.shards(setting), testing=False, groups=groups)
        self._begin({0: branch}, (), {0: {"parameters": parameters}})

    def begin_from(
        self, state: bytes, vectors: dict[int, dict[str, Array]], policies: Mapping[int, SyncPolicy]
    ) -> dict[int, int]:
        """Like `begin`, from the results of `checkpoint` and `saved`: of another job, or of this one when a block has no
        copy any more. `policies` are those that the branches had then. Later pushes are lost. Returns the branches of the
        checkpoint, and the pushes of each. Raises ValueError for a state that is damaged.

        A worker that was in a mini-batch repeats it on the restored model. Training is the same as without the interruption
        if the branch had made no step since the worker's release: after `finish`, right after a barrier, and anywhere under
        BSP with grouped gradients.
        """
        branches, next_branch, undecided = branches_of(state, self._job, policies)
        if branches.keys() != vectors.keys():
            raise ValueError("Cannot restore the state of a job: its branches are not those of the vectors.")
        self._branches.next_number = max(self._branches.next_number, next_branch)
        self._begin(branches, undecided, vectors)
        return {number: branch.pushes for number, branch in branches.items()}

    def _begin(
        self,
        branches: dict[int, CoordinatorBranch],
        undecided: Iterable[tuple[int, PushFacts]],
        vectors: dict[int, dict[str, Array]],
    ) -> None:
        self._evaluations.reset()
        before = self._branches.replace(branches)
        self._pushes.decide_restored(undecided)
        self._branches.restart_clocks()
        self._views.lost_pushes += self._branches.lost_since(before)
        self._ledger.reset()
        self._moves.goal = None
        self._snapshots.keep_model(vectors)
        self._record.write()

    def snapshot(self, *, save: bool = False) -> int:
        """Copy the model to backups; with `save`, also to the coordinator. Returns its index in the log: the snapshot is
        complete when `durable` has reached it."""
        index = self._snapshots.take(save=save)
        if save:
            running = self._branches.running
            undecided = [] if running is None else [(running, facts) for facts in self._pending.undecided.values()]
            state = branches_as_bytes(self._branches.by_number.values(), self._branches.next_number, undecided)
            self._snapshots.keep_state(index, state)
        return index

    def checkpoint(self, index: int) -> bytes:
        """The coordinator's state at a snapshot that was taken with `save`, for `begin_from`. Raises KeyError if a later
        one of these is complete."""
        return self._snapshots.state(index)

    def saved(self, index: int) -> dict[int, dict[str, Array]]:
        """A snapshot that was taken with `save`: by branch, each vector (parameters, slots, group), [P]. Raises KeyError
        if it is not complete, or a later one is."""
        return self._snapshots.saved(index)
