"""DiLoCo: many local steps, and an outer optimizer with Nesterov momentum on what they have changed.

Douillard et al., "DiLoCo: Distributed Low-Communication Training of Language Models", 2023, Algorithm 1: each worker takes H
steps of an inner optimizer, whose state it keeps; the mean difference between the parameters before and after them is the
gradient of the outer optimizer, Nesterov momentum with a rate of 0.7 and a momentum of 0.9.

Where we differ: the inner optimizer is the workload's (the paper's is AdamW), and H is by default 16, not 500, because a job
here has some hundreds to thousands of pushes in all.
"""

from __future__ import annotations

from tuners.actions import Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.local_steps.synchronous import once, steps_are_held
from tuners.factory_options import AboveZero, Count, NonNegative

__all__ = ["diloco"]


@nothing_to_tune_if(steps_are_held)
def diloco(job: Job, *, steps: Count = 16, outer_rate: AboveZero = 0.7, outer_momentum: NonNegative = 0.9) -> Tuner:
    """Take `steps` local steps between two outer ones, whose rate and momentum are the paper's.

    Args:
        job: what is tuned.
        steps: mini-batches between two outer steps, H.
        outer_rate: of the outer optimizer.
        outer_momentum: of the outer optimizer, Nesterov's.
    """
    if not steps_are_held(job):
        wanted = {"local_steps": steps, "outer_rate": outer_rate, "outer_momentum": outer_momentum}
        yield from once(job, wanted, "an outer step after every {steps} local ones")
