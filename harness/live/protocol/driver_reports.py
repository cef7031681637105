"""What the coordinator tells its driver."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from tuners.actions import Evaluation, Status

__all__ = ["Poll", "Report"]


class Report(NamedTuple):
    """What has happened to a branch, as far as the driver has not taken it yet."""

    first: int  # number of the first row; the branch's own pushes are numbered from 0
    rows: NDArray[np.float64]  # [n, 11], the columns of `simulators.engine.loop.Records`
    evaluations: tuple[tuple[int, Evaluation], ...]  # by number of the request; 0 for those after `evaluate_clocks`


class Poll(NamedTuple):
    """Everything that a driver wants to know again and again."""

    now: float
    reports: dict[int, Report]
    statuses: dict[int, Status]
    moving: int
    durable: int
    recovering: bool
    members: dict[str, int]
    lost_pushes: int  # so far, whose payload died with a worker and a server at once: they no longer count
    forgotten: int = 0  # evaluations that were asked for by this number or an earlier one, and are not told, never will be
