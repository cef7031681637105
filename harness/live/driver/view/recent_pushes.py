"""The pushes of the last seconds of a job, for its status."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Collection, Mapping

import numpy as np
from numpy.typing import NDArray

from harness.live.driver.view.status import NodeStatus
from simulators.engine.job_state import Records
from tuners.actions import Job, Setting

__all__ = ["RECENT_SECONDS", "RecentPushes"]

RECENT_SECONDS = 3.0


class RecentPushes:
    """Pushes of the last `RECENT_SECONDS`."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._tables: deque[NDArray[np.float64]] = deque()  # [n, 11] each, the columns of `Records`; seconds of the job
        self._seconds = 0.0  # length of the interval that they cover

    def add(self, rows: NDArray[np.float64]) -> None:
        """Add completed pushes."""
        if len(rows):
            self._tables.append(rows)

    def drop_old(self, now: float) -> None:
        """Drop pushes that are no longer recent."""
        while self._tables and self._tables[0][-1, 0] < now - RECENT_SECONDS:
            self._tables.popleft()
        self._seconds = min(RECENT_SECONDS, max(now, 1e-9))

    @property
    def _rows(self) -> Records:
        return Records(*np.concatenate([np.zeros((0, len(Records._fields))), *self._tables]).T)

    @property
    def span_seconds(self) -> float:
        """Seconds from the first push that is kept to the last."""
        return float(self._tables[-1][-1, 0] - self._tables[0][0, 0]) if self._tables else 0.0

    @property
    def clocks_per_second(self) -> float:
        return sum(map(len, self._tables)) / self._seconds

    @property
    def loss(self) -> float:
        """The mean; nan without pushes."""
        return float(np.mean(self._rows.loss)) if self._tables else math.nan

    def nodes(self, setting: Setting, away: Collection[str], held: Mapping[str, float]) -> tuple[NodeStatus, ...]:
        """The status of each node; `held` says for how many seconds the policy has held back those that wait now.

        A push tells only of the wait before it, and a worker that waits makes none.
        """
        rows = self._rows
        return tuple(self._node(i, setting, rows, away, held) for i in range(len(self._job.nodes)))

    def _node(
        self, index: int, setting: Setting, rows: Records, away: Collection[str], held: Mapping[str, float]
    ) -> NodeStatus:
        name = self._job.nodes[index].name
        works, serves = name in setting.workers, name in setting.servers
        role = "both" if works and serves else "worker" if works else "server" if serves else "idle"
        mine, seconds = rows.worker == index, self._seconds
        return NodeStatus(
            name,
            "lost" if name in away else role,
            float(mine.sum()) / seconds,
            min(float(rows.compute_seconds[mine].sum()) / seconds, 1.0),
            min(float((rows.pull_seconds + rows.push_seconds)[mine].sum()) / seconds, 1.0),
            min((float(rows.wait_seconds[mine].sum()) + held.get(name, 0.0)) / seconds, 1.0),
        )
