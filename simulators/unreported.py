"""What has happened in a branch since its last window. The next window reports it."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from simulators.engine.job_state import Records
from tuners.actions import Cost

__all__ = ["NO_RECORDS", "Unreported"]

NO_RECORDS = np.zeros((0, len(Records._fields)))

_SECONDS = Records._fields.index("seconds")  # the column


class Unreported:
    """What the next window reports besides its own pushes; at first nothing."""

    def __init__(self, nodes: int, blocks: int) -> None:
        self.served = np.zeros((nodes, 4))  # by every server, with the columns of `simulators.engine.preparation.served`
        self.rows = np.zeros(blocks)  # of each block of embedding tables, in pushes
        self.records = NO_RECORDS  # [n, 11] of pushes outside of a window
        self.seconds = 0.0  # how long these took; the next window begins earlier by this
        self._until_seconds = 0.0  # when that training ended
        self.changes: list[Cost] = []  # of reconfigurations and checkpoints

    def add_load(self, served: NDArray[np.float64], rows: NDArray[np.float64]) -> None:
        """Add what the servers did, [k, 4], and the rows of each block that pushes carried, [b]."""
        self.served = self.served + served
        self.rows = self.rows + rows

    def resume_at(self, now: float) -> None:
        """Move the pushes so far, as if they had ended `now`: another branch has trained since, and this one's clock stood
        still. The next window begins so many seconds earlier as they took, and would begin after them."""
        self.records[:, _SECONDS] += now - self._until_seconds
        self._until_seconds = now

    def add_records(self, records: NDArray[np.float64], until_seconds: float) -> None:
        """Add pushes of training that ended at `until_seconds`."""
        self.records, self._until_seconds = np.concatenate([self.records, records]), until_seconds
