"""When another evaluation no longer pays: what it is expected to save against what it costs. The whole file is ours.

The paper tunes before the training and always makes ten evaluations. In a running job an evaluation trains too. It costs its
reconfigurations, and its iterations as far as they are slower than those of the best schedule so far. It saves the expected
improvement of an iteration, times the iterations that are left after it.

How many iterations are left follows from the target:

* Clocks or samples: they are counted.
* Loss or accuracy: unknown. The learning curve is extended as a power law (Hestness et al. 2017): a straight line of the
  logarithm of the level (the validation loss, or 1 - accuracy) over the logarithm of the iterations. With a fixed batch and
  synchronous training the curve does not depend on the schedule. With fewer than three points, or if the level does not
  fall, the budget is the only bound.
* Never more than the budget allows. A number that is too large makes too many evaluations, never more than the paper's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from tuners.actions import Cost, Evaluation, Job

__all__ = ["JobCourse", "iterations_to", "worthwhile"]


def worthwhile(improvement: float, iterations_left: float, lost_seconds: float) -> bool:
    """Whether `improvement` seconds per iteration save more, over the iterations left, than the `lost_seconds`."""
    return improvement * max(iterations_left, 0.0) > lost_seconds


def iterations_to(level: float, curve: Sequence[tuple[float, float]]) -> float:
    """The iteration at which a power law through `curve`, pairs of (iterations, level), comes down to `level`.

    Infinite where the pairs do not determine it.
    """
    points = np.array([(n, y) for n, y in curve if n > 0 and 0 < y < np.inf]).reshape(-1, 2)
    if len(points) < 3 or not level > 0:
        return np.inf
    x, y = np.log(points).T
    off = x - x.mean()
    if not off.any():
        return np.inf
    slope = float(off @ y / (off @ off))
    if not slope < 0:
        return np.inf
    return float(np.exp(min(x.mean() + (np.log(level) - y.mean()) / slope, 700.0)))


class JobCourse:
    """How far a job has come, and what its reconfigurations have cost."""

    def __init__(self, job: Job) -> None:
        self.job = job
        self.seconds = 0.0  # of the job, at the last window
        self.clocks = 0
        self.iterations = 0.0
        self.curve: dict[float, float] = {}  # the level at each number of iterations
        self.changes: list[float] = []  # seconds that each reconfiguration cost

    def trained(self, clocks: int, workers: int, seconds: float, evaluations: Sequence[Evaluation]) -> None:
        """Count `clocks` of `workers`, which ended at `seconds`, and note what the validation set said meanwhile."""
        before = self.iterations
        self.seconds, self.clocks, self.iterations = seconds, self.clocks + clocks, before + clocks / workers
        for made in evaluations:
            at = self.iterations - (self.clocks - made.clocks) / workers
            # Clocks of an evaluation that was interrupted are not all counted.
            level = 1.0 - made.accuracy if self.job.target.metric == "accuracy" else made.loss
            self.curve[min(max(at, before), self.iterations)] = level

    def changed(self, cost: Cost) -> None:
        """Note a reconfiguration. Seconds in which training was slower count in full: the most that they can have cost."""
        self.changes.append(cost.stall_seconds + cost.slow_seconds)

    @property
    def change_seconds(self) -> float:
        """What a reconfiguration costs: the mean so far; 0 before the first."""
        return float(np.mean(self.changes)) if self.changes else 0.0

    def iterations_left(self, seconds: float, workers: int) -> float:
        """Iterations to the target, for iterations of `seconds` by that number of `workers`."""
        target, affordable = self.job.target, (self.job.budget_seconds - self.seconds) / seconds
        if target.metric == "clocks":
            left = (target.value - self.clocks) / workers
        elif target.metric == "samples":
            left = target.value / self.job.space.whole_batch - self.iterations
        else:
            level = 1.0 - target.value if target.metric == "accuracy" else target.value
            left = iterations_to(level, list(self.curve.items())) - self.iterations
        return max(min(left, affordable), 0.0)
