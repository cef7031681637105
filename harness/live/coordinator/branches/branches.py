"""The owner of the branches: which of them trains, what they have come to, and what the driver has not heard yet."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from harness.live.coordinator.branches.branch import CoordinatorBranch, LiveJob
from harness.live.coordinator.ledger.ledger import Ledger
from simulators.engine.job_state import Records
from tuners.actions import Evaluation

__all__ = ["Branches"]


class Branches:
    """All branches, by number. One of them trains at a time."""

    journaled = ("by_number", "running", "finishing", "next_number")

    def __init__(self, job: LiveJob, ledger: Ledger, now: Callable[[], float]) -> None:
        self._job, self._ledger, self._now = job, ledger, now
        self.by_number: dict[int, CoordinatorBranch] = {}
        self.running: int | None = None
        self.finishing = False  # workers complete their mini-batches, and begin no others
        self.next_number = 1

    @property
    def current(self) -> CoordinatorBranch | None:
        """The branch that trains."""
        return None if self.running is None else self.by_number.get(self.running)

    @property
    def busy(self) -> frozenset[str]:
        """The names of the workers that are in a mini-batch."""
        branch = self.current
        return frozenset() if branch is None else frozenset(self._job.workers[w] for w in branch.busy)

    def in_cycle(self, name: str, cycle: int) -> int | None:
        """The number of the worker that is in this cycle now; None if the cycle is over, or was dropped."""
        worker, branch = self._job.worker_numbers.get(name), self.current
        if worker is None or branch is None or (begun := branch.busy.get(worker)) is None or begun.number != cycle:
            return None
        return worker

    # ------------------------------------------------------------------------------------------------------- a new model

    def replace(self, branches: dict[int, CoordinatorBranch]) -> dict[int, CoordinatorBranch]:
        """Replace all branches; none of them trains. Returns the former ones."""
        before, self.by_number, self.running = self.by_number, branches, None
        # The driver is told of lost pushes, too: it has seen some of them, and counts rows.
        for number in before.keys() & branches.keys():
            branches[number].rows, branches[number].rows_taken = before[number].rows, before[number].rows_taken
        return before

    def restart_clocks(self) -> None:
        """Forget the times of the coordinator that the branches come from."""
        for branch in self.by_number.values():
            branch.restart_clock(self._now())

    def lost_since(self, before: dict[int, CoordinatorBranch]) -> int:
        """How many pushes of the former branches the present ones do not have."""
        now = self.by_number
        return sum(b.pushes - (now[n].pushes if n in now else b.inherited) for n, b in before.items())

    # ------------------------------------------------------------------------------------------------ targets and statuses

    def update_status(self, branch: CoordinatorBranch) -> None:
        """A push has been counted, and workers were released: the branch may have ended."""
        target = self._job.target
        if branch.status != "running":
            return
        if target.counts and target.reached(np.nan, np.nan, branch.pushes, branch.samples):
            branch.status = "target"
        elif not branch.busy and not branch.due:
            branch.status = "deadlock"

    def evaluated(self, branch: int, evaluation: Evaluation) -> None:
        """A branch has been evaluated: it may have reached the target."""
        of, target = self.by_number[branch], self._job.target
        if of.status == "running" and not target.counts and target.reached(evaluation.loss, evaluation.accuracy):
            of.status = "target"

    # --------------------------------------------------------------------------------------------- what the driver is told

    def held_seconds(self) -> dict[str, float]:
        """How long the running branch's policy has held back each worker that waits now, by node."""
        branch = self.current
        if branch is None:
            return {}
        now, since = self._now(), branch.waiting_since_seconds
        return {self._job.nodes[w]: now - float(since[w]) for w in branch.waiting_workers()}

    def rows_from(self, branch: CoordinatorBranch, taken: int | None) -> tuple[int, NDArray[np.float64]]:
        """The index of the first row that the driver has not confirmed, and the rows from there on, [n, 11]. `taken`
        confirms the rows before it; None confirms all that are returned."""
        if taken is not None and taken > branch.rows_taken:
            self.confirm_rows(branch.number, taken - branch.rows_taken)
        first, rows = branch.rows_taken, np.array(branch.rows).reshape(-1, len(Records._fields))
        if taken is None and len(rows):
            self.confirm_rows(branch.number, len(rows))
        return first, rows

    def confirm_rows(self, branch: int, rows: int) -> None:
        """The driver has taken so many more rows. A journal replays this."""
        self._ledger.write("told", branch, rows)
        of = self.by_number[branch]
        del of.rows[:rows]
        of.rows_taken += rows
