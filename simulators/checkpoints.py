"""Periodic checkpoints, and what is lost where a job returns to the last one.

With `Setting.checkpoint_seconds` 0, servers keep replicas of each other: where one is lost, its part of the model is read
back, and no push is lost. With an interval there are no replicas. Every so many seconds all workers pause while the model
is written ([costs] `checkpoint_bytes_per_second`); where a server is lost, the job returns to the last checkpoint that was
completed, and what was pushed since has to be done again. A short interval costs pauses, a long one costs work: with a cost
of C seconds and a failure every M seconds, about sqrt(2 C M) is best (Young 1974, "A first order approximation to the
optimum checkpoint interval").
"""

from __future__ import annotations

from typing import Any, NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from simulators.engine import loop
from simulators.engine.inputs import EngineInputs
from simulators.engine.learning import Learned

__all__ = ["ModelCheckpoint", "rolled_back", "taken", "with_work_redone"]


class ModelCheckpoint(NamedTuple):
    """A job as it was written. Immutable, so the arrays are shared with the job."""

    learned: Learned | None
    grouped: NDArray[np.int32]  # gradients that were waiting in the group
    left: NDArray[np.float64]  # [k] work left for a target by share, and the data shares that it belongs to
    assigned: NDArray[np.float64]
    clocks: int  # of progress: pushes without those that had been lost before
    samples: int


def taken(inputs: EngineInputs, state: loop.State, lost_clocks: int, lost_samples: int) -> ModelCheckpoint:
    """A checkpoint of the job as it is; so many of its pushes and samples have been lost before."""
    clock = state.clock
    return ModelCheckpoint(
        learned=state.learned,
        grouped=np.asarray(clock.grouped),
        left=np.asarray(clock.left),
        assigned=np.asarray(inputs.assigned),
        clocks=int(clock.pushes) - lost_clocks,
        samples=int(clock.samples) - lost_samples,
    )


def rolled_back(inputs: EngineInputs, state: loop.State, saved: ModelCheckpoint) -> loop.State:
    """The job with parameters, optimizer and work left as they were saved. Its pushes are still counted: they were made."""
    clock = state.clock._replace(grouped=cast(Any, saved.grouped), left=cast(Any, saved.left))
    learned = saved.learned
    if learned is not None and state.learned is not None:
        learned = learned._replace(touched=state.learned.touched)  # rows were pulled and pushed, as pushes were made
    made = loop.State(clock, learned)
    if len(saved.left):
        made = loop.with_data_moved(made, saved.assigned, np.asarray(inputs.assigned))
    return made


def with_work_redone(inputs: EngineInputs, target: EngineInputs, lost_clocks: int, lost_samples: int) -> EngineInputs:
    """`inputs` with the target of `target`, which counts so many pushes and samples more, because they are lost."""
    most = np.iinfo(np.int32).max, np.iinfo(np.int64).max  # where the target does not count them
    clocks, samples = int(target.target_clocks), int(target.target_samples)
    raised: dict[str, Any] = {
        "target_clocks": np.int32(min(clocks + lost_clocks, most[0])),
        "target_samples": np.int64(samples if samples == most[1] else samples + lost_samples),
    }
    return inputs._replace(**raised)
