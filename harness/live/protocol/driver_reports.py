"""The coordinator's answer to the driver's poll."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Evaluation, Status

__all__ = ["Poll", "Report"]


class Report(NamedTuple):
    """The events of one branch that the driver has not taken yet."""

    first: int  # index of the first row; a branch's own pushes are numbered from 0
    rows: NDArray[np.float64]  # [n, 11], the columns of `simulators.engine.job_state.Records`
    evaluations: tuple[tuple[int, Evaluation], ...]  # (request, result); request 0: automatic, after `evaluate_clocks`


class Poll(NamedTuple):
    """The state of the job, as the driver reads it again and again."""

    now: float
    reports: dict[int, Report]
    statuses: dict[int, Status]
    moving: int
    durable: int
    recovering: bool
    members: dict[str, int]
    held_seconds: dict[str, float]  # by node: how long the running branch's policy has held back its worker by now
    lost_pushes: int  # so far: gradients lost because a worker and a server died at once; they no longer count
    cancelled_requests: int = 0  # evaluation requests up to this one are cancelled unless answered here: ask again
