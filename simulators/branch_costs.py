"""What it takes to fork a branch, to go on with another one, and to measure the noise of gradients."""

from __future__ import annotations

import numpy as np

from simulators.branch import Branch
from simulators.engine.links.network import Proportions
from simulators.engine.preparation import overlapping

__all__ = ["copy_bytes", "noise_seconds", "refill_seconds"]


def copy_bytes(branch: Branch) -> float:
    """Bytes that a fork copies at the server with the largest share; servers copy in parallel."""
    job = branch.context.job
    return job.branch_bytes * max(branch.setting.held(job.blocks, job.hottest).values())


def refill_seconds(branch: Branch) -> float:
    """Seconds until all workers have pulled the whole model at the same time, through the busiest link."""
    if branch.inputs.placement:  # workers have no copy of embedding tables that they would have to pull again
        return 0.0
    return _transfer_seconds(branch, float(branch.inputs.pull_bytes), float(branch.inputs.serve_out), pushes=False)


def noise_seconds(branch: Branch, batches: int) -> float:
    """Seconds in which all workers pull, compute `batches` gradients and push once, without noise."""
    inputs, active = branch.inputs, np.asarray(branch.inputs.active)
    computing = np.asarray(inputs.compute_seconds) * np.asarray(inputs.slowdown) * batches
    computing = computing + np.asarray(inputs.overhead_seconds)
    pushing = _transfer_seconds(branch, float(inputs.push_bytes), float(inputs.serve_in), pushes=True)
    return refill_seconds(branch) + float(np.max(computing[active], initial=0.0)) + pushing


def _transfer_seconds(branch: Branch, each_bytes: float, served: float, *, pushes: bool) -> float:
    """Seconds in which all workers transfer `each_bytes` at the same time; servers take `served` bytes per second."""
    inputs, workers = branch.inputs, np.flatnonzero(branch.inputs.active)
    if not len(workers):
        return 0.0
    if overlapping(branch.setting):
        rows = workers + len(inputs.active) if pushes else workers
        if isinstance(inputs.usage, Proportions):
            moving = np.zeros(2 * len(inputs.active))
            moving[rows] = 1.0
            each = inputs.usage.on_resources(moving)
        else:
            each = np.sum(np.asarray(inputs.usage)[rows], axis=0)
        return float(each_bytes * np.max(each / np.asarray(inputs.capacity), initial=0.0))
    slowest = min(float(np.min(np.asarray(inputs.nic)[workers])), served / len(workers))
    return each_bytes / slowest
