"""Local SGD: workers take H steps on their own copies, and the servers average the copies.

Stich, "Local SGD Converges Fast and Communicates Little", ICLR 2019: all workers average after every H steps. Where the
servers average what workers push (a workload's aggregation "mean"), an outer rate of 1 without momentum makes the average of
the copies the new model.
"""

from __future__ import annotations

from tuners.actions import Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.local_steps.synchronous import once, steps_are_held
from tuners.factory_options import Count

__all__ = ["local_sgd"]


@nothing_to_tune_if(steps_are_held)
def local_sgd(job: Job, *, steps: Count = 8) -> Tuner:
    """Average the copies of all workers after every `steps` local steps.

    Args:
        job: what is tuned.
        steps: mini-batches between two averages, H.
    """
    if not steps_are_held(job):
        wanted = {"local_steps": steps, "outer_rate": 1.0, "outer_momentum": 0.0}
        yield from once(job, wanted, "copies are averaged after every {steps} local steps")
