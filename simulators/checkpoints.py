"""Periodic checkpoints, and what is lost where a job returns to the last one.

With `Setting.checkpoint_seconds` 0, servers keep replicas of each other: where one is lost, its part of the model is read
back, and no push is lost. With an interval there are no replicas. Once per interval all workers pause while the model
is written ([costs] `checkpoint_bytes_per_second`); where a server is lost, the job returns to the last checkpoint that was
completed, and what was pushed since has to be done again. A short interval costs pauses, a long one costs work: with a cost
of C seconds and a failure every M seconds, about sqrt(2 C M) is best (Young 1974, "A first order approximation to the
optimum checkpoint interval").
"""

from __future__ import annotations

import copy
from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from simulators.engine import changes
from simulators.engine.inputs import EngineInputs
from simulators.engine.job_state import State
from simulators.engine.learning import Learned

__all__ = ["Checkpoints", "ModelCheckpoint"]


class ModelCheckpoint(NamedTuple):
    """A job as it was written. Immutable, so the arrays are shared with the job."""

    learned: Learned | None
    grouped: NDArray[np.int32]  # gradients that were waiting in the group
    left: NDArray[np.float64]  # [k] work left for a target by share, and the data shares that it belongs to
    assigned: NDArray[np.float64]
    clocks: int  # of progress: pushes without those that had been lost before
    samples: int


class Checkpoints:
    """The last checkpoint of a branch, at first the untrained model, and what has been lost by returning to it.

    In a job that makes no checkpoints, none is kept: it would be memory that the job does not need.
    """

    def __init__(self, inputs: EngineInputs, state: State, *, makes: bool) -> None:
        self._lost_clocks = self._lost_samples = 0  # pushes that were made, and are lost
        self._last = self.taken(inputs, state) if makes else None
        self._last_seconds = 0.0  # when it was completed, on the branch's clock

    def copy(self) -> Checkpoints:
        """The checkpoints of a branch that continues from here. What was written is shared: it never changes."""
        return copy.copy(self)

    def due_seconds(self, every_seconds: float) -> float:
        """When the next checkpoint begins, on the branch's clock; inf where the interval is 0: none is made."""
        return self._last_seconds + every_seconds if every_seconds else float("inf")

    def taken(self, inputs: EngineInputs, state: State) -> ModelCheckpoint:
        """A checkpoint of the job as it is."""
        clock = state.clock
        return ModelCheckpoint(
            learned=state.learned,
            grouped=np.asarray(clock.grouped),
            left=np.asarray(clock.left),
            assigned=np.asarray(inputs.assigned),
            clocks=int(clock.pushes) - self._lost_clocks,
            samples=int(clock.samples) - self._lost_samples,
        )

    def keep(self, written: ModelCheckpoint | None, now: float) -> None:
        """From `now` on, a loss returns to `written`; None: it could not be written, try again after an interval."""
        self._last, self._last_seconds = written or self._last, now

    def pause(self, seconds: float) -> None:
        """The branch's clock was shifted by `seconds`, in which it did not train."""
        self._last_seconds += seconds

    def rolled_back(self, inputs: EngineInputs, state: State) -> tuple[State, int]:
        """The job with parameters, optimizer and work left as in the last checkpoint, and how many pushes that has lost.
        They are still counted: they were made. Raises RuntimeError in a job that makes no checkpoints."""
        if (saved := self._last) is None:
            raise RuntimeError("Cannot roll back: this job makes no checkpoints.")
        clock = state.clock._replace(grouped=cast(Any, saved.grouped), left=cast(Any, saved.left))
        learned = saved.learned
        if learned is not None and state.learned is not None:
            learned = learned._replace(touched=state.learned.touched)  # rows were pulled and pushed, as pushes were made
        before, self._lost_clocks = self._lost_clocks, int(clock.pushes) - saved.clocks
        self._lost_samples = int(clock.samples) - saved.samples
        made = State(clock, learned)
        if len(saved.left):
            made = changes.with_data_moved(made, saved.assigned, np.asarray(inputs.assigned))
        return made, self._lost_clocks - before

    def with_work_redone(self, inputs: EngineInputs, target: EngineInputs) -> EngineInputs:
        """`inputs` with the target of `target`, which counts the lost pushes and samples once more."""
        most = np.iinfo(np.int32).max, np.iinfo(np.int64).max  # where the target does not count them
        clocks, samples = int(target.target_clocks), int(target.target_samples)
        raised: dict[str, Any] = {
            "target_clocks": np.int32(min(clocks + self._lost_clocks, most[0])),
            "target_samples": np.int64(samples if samples == most[1] else samples + self._lost_samples),
        }
        return inputs._replace(**raised)
