"""One branch of a live job as its driver sees it: setting, policy, and what has happened since a tuner last looked."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulators import windows
from simulators.engine.loop import Records
from tuners.actions import Cost, Evaluation, Job, NodeEvent, Setting, Status, SyncPolicy, Window

__all__ = ["Sight"]

_NOTHING = np.zeros((0, len(Records._fields)))


class Sight:
    """A branch."""

    def __init__(
        self,
        setting: Setting,
        policy: SyncPolicy,
        since_seconds: float,
        *,
        ancestors: tuple[int, ...] = (),
        testing: bool = False,
    ) -> None:
        """`ancestors` are the branches that it comes from, the nearest first; one that is `testing` applies nothing."""
        self.setting, self.policy, self.ancestors, self.testing = setting, policy, ancestors, testing
        self.before: Setting | None = None  # that losses have taken from it, until the nodes are back
        self.status: Status = "running"
        self.clocks = 0  # pushes completed since the job began, those before the fork counted
        self.lost = 0  # of them; the model has not seen these, for it went back to a checkpoint
        self.since_seconds = since_seconds  # where its next window begins
        self.unseen = _NOTHING  # [n, 11], the columns of `Records`; seconds of the job
        self.evaluations: list[Evaluation] = []
        self.latest: Evaluation | None = None
        self.changes: list[Cost] = []

    def take(self, rows: NDArray[np.float64]) -> None:
        """These pushes have been completed."""
        self.unseen = np.concatenate([self.unseen, rows])
        self.clocks += len(rows)

    def fork(self, number: int, setting: Setting, policy: SyncPolicy, now: float, *, testing: bool) -> Sight:
        """A branch that goes on from here, which is branch `number`."""
        made = Sight(setting, policy, now, ancestors=(number, *self.ancestors), testing=testing)
        made.clocks, made.lost, made.latest = self.clocks, self.lost, self.latest
        made.before = self.before if setting == self.setting else None
        return made

    def window(
        self,
        job: Job,
        *,
        rows: int,
        end_seconds: float,
        available: frozenset[str],
        events: tuple[NodeEvent, ...],
        samples: dict[str, int],
    ) -> Window:
        """The first `rows` pushes that nobody has seen, as a window that ends at `end_seconds`; they are seen now."""
        table, self.unseen = self.unseen[:rows], self.unseen[rows:]
        whole = windows.window(
            job,
            self.setting,
            table,
            start_seconds=min((self.since_seconds, *map(float, table[:1, 0]), end_seconds)),
            end_seconds=end_seconds,
            pushes_before=self.clocks - len(self.unseen) - rows,
            status=self.status,
            devices={n.name: (1.0, (1.0, *(0.0 for _ in n.devices[1:]))) for n in job.nodes},
            samples=samples,
            available=available,
            events=events,
            changes=tuple(self.changes),
        )
        told = tuple(e for e in self.evaluations if e.seconds <= end_seconds)
        self.evaluations = [e for e in self.evaluations if e.seconds > end_seconds]
        self.changes, self.since_seconds = [], end_seconds
        return replace(whole, evaluations=told)
