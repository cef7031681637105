"""One branch of a live job as the driver sees it: setting, policy, and what its next window will report."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulators import windows
from simulators.engine.job_state import Records
from tuners.actions import Cost, Evaluation, Job, NodeEvent, Setting, Status, SyncPolicy, Window
from tuners.settings import OF_NODES
from tuners.space import Space

__all__ = ["DriverBranch"]

_NO_ROWS = np.zeros((0, len(Records._fields)))


class DriverBranch:
    """A branch, with what has happened since the tuner's last window."""

    def __init__(
        self,
        setting: Setting,
        policy: SyncPolicy,
        since_seconds: float,
        *,
        ancestors: tuple[int, ...] = (),
        testing: bool = False,
    ) -> None:
        """`ancestors` are the branches that it was forked from, nearest first; a `testing` branch applies no gradient."""
        self.setting, self.policy, self.ancestors, self.testing = setting, policy, ancestors, testing
        self.installed: int | None = None  # the exchange by which a tuner installed the policy; None: the setting names it
        self.setting_before_loss: Setting | None = None  # while nodes of it are lost; restored when they return
        self.status: Status = "running"
        self.clocks = 0  # pushes completed since the job began, those before the fork included
        self.lost_pushes = 0  # counted in `clocks`, but not in the model: it was rolled back to a checkpoint
        self.since_seconds = since_seconds  # start of its next window
        self._unseen = [_NO_ROWS]  # [n, 11] each, the columns of `Records`; seconds of the job
        self.evaluations: list[Evaluation] = []
        self.latest_evaluation: Evaluation | None = None
        self.changes: list[Cost] = []

    def add(self, rows: NDArray[np.float64]) -> None:
        """Add completed pushes."""
        self._unseen.append(rows)
        self.clocks += len(rows)

    @property
    def unseen_rows(self) -> NDArray[np.float64]:
        """Pushes that no window has reported yet, [n, 11]."""
        if len(self._unseen) > 1:  # put together when they are read: to copy all with every report takes long
            self._unseen = [np.concatenate(self._unseen)]
        return self._unseen[0]

    @unseen_rows.setter
    def unseen_rows(self, rows: NDArray[np.float64]) -> None:
        self._unseen = [rows]

    def fork(self, number: int, setting: Setting, policy: SyncPolicy, now: float, *, testing: bool) -> DriverBranch:
        """A new branch that continues from this one, which is branch `number`."""
        made = DriverBranch(setting, policy, now, ancestors=(number, *self.ancestors), testing=testing)
        made.clocks, made.lost_pushes, made.latest_evaluation = self.clocks, self.lost_pushes, self.latest_evaluation
        made.installed = self.installed if policy is self.policy else None
        return made

    def whole(self, setting: Setting, space: Space) -> Setting | None:
        """The setting to return to with the lost nodes, where the branch, or a fork of it, goes on under `setting`.

        Where the scenario holds their roles, they are wanted back; where a tuner chooses roles, it has chosen without them.
        """
        before = self.setting_before_loss
        if before is None or setting == self.setting:
            return before
        lost = {*before.workers, *before.servers} - {*setting.workers, *setting.servers}
        wanted = replace(setting, **{field: getattr(before, field) for field in OF_NODES})
        return wanted if any(map(space.holds_role, lost)) else None

    def window(
        self,
        job: Job,
        *,
        rows: int,
        end_seconds: float,
        available: frozenset[str],
        events: tuple[NodeEvent, ...],
        samples: dict[str, int],
        rows_of_blocks: Callable[[NDArray[np.float64]], tuple[float, ...]] = lambda _: (),
    ) -> Window:
        """A window with the first `rows` unseen pushes that ends at `end_seconds`; what it reports is removed here.
        `rows_of_blocks` gives `Window.blocks` of these pushes."""
        table, self.unseen_rows = self.unseen_rows[:rows], self.unseen_rows[rows:].copy()  # a view would keep all of it
        whole = windows.window(
            job,
            self.setting,
            table,
            start_seconds=min((self.since_seconds, *map(float, table[:1, 0]), end_seconds)),
            end_seconds=end_seconds,
            pushes_before=self.clocks - len(self.unseen_rows) - rows,
            status=self.status,
            devices={n.name: (1.0, (1.0, *(0.0 for _ in n.devices[1:]))) for n in job.nodes},
            samples=samples,
            available=available,
            events=events,
            changes=tuple(self.changes),
            blocks=rows_of_blocks(table),
        )
        reported = tuple(e for e in self.evaluations if e.seconds <= end_seconds)
        self.evaluations = [e for e in self.evaluations if e.seconds > end_seconds]
        self.changes, self.since_seconds = [], end_seconds
        return replace(whole, evaluations=reported)
