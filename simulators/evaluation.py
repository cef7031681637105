"""What a tuner can ask of a branch's model, as it is: how good it is, and how noisy its gradients are."""

from __future__ import annotations

import numpy as np

from simulators.branch import Branch
from simulators.engine import learning
from simulators.programs.stored_programs import StoredProgram
from tuners.actions import Evaluation, GradientNoise

__all__ = ["evaluation", "gradient_noise"]

_evaluate = StoredProgram(learning.evaluate)
_squares = StoredProgram(learning.gradient_squares)


def evaluation(branch: Branch, now: float) -> Evaluation:
    """The model as it is, on the validation set."""
    clocks, learned = int(branch.state.clock.pushes), branch.state.learned
    if branch.program.model is None or learned is None:
        return Evaluation(now, clocks, float("nan"), float("nan"))
    loss, accuracy = _evaluate(branch.program.model, branch.context.data, learned.parameters)
    return Evaluation(now, clocks, float(loss), float(accuracy))


def gradient_noise(branch: Branch, now: float, batches: int) -> GradientNoise:
    """How much gradients of the next mini-batches of all workers differ, at the model as it is."""
    learned, active = branch.state.learned, np.asarray(branch.inputs.active)
    count = batches * int(active.sum())
    if branch.program.model is None or learned is None or count < 2:
        return GradientNoise(now, float("nan"), float("nan"))
    clocks = branch.state.clock.drawn
    mean, single = map(
        float,
        _squares(branch.program.model, branch.context.data, branch.inputs, learned.parameters, clocks, batches=batches),
    )
    # single = |G|^2 + tr(Sigma) / b and mean = |G|^2 + tr(Sigma) / (b count), where 1 / b is the mean over workers.
    inverse_batch = float(np.mean(1 / np.asarray(branch.inputs.samples)[active]))
    square = (count * mean - single) / (count - 1)
    return GradientNoise(now, square, (single - square) / inverse_batch)
