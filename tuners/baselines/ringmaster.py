"""Ringmaster ASGD: asynchronous SGD that ignores gradients whose delay has reached a threshold.

Maranjyan, Tyurin, Richtarik, "Ringmaster ASGD: The First Asynchronous SGD with Optimal Time Complexity", ICML 2025:
Algorithm 4 (a late gradient is ignored when it comes), Algorithm 5 (`stops`: its computation is stopped when it becomes
late), and the threshold of their convergence theorem, R = max(1, ceil(sigma^2 / epsilon)), where sigma^2 is the variance of
one worker's gradient and epsilon the squared norm of the gradient at which the job is done.

Where we differ: the learning rate is the job's, because it is a knob of its own; the paper sets it from R and the
smoothness. A tuner of this contract sees no gradients and does not know the noise, so that `noise_ratio`, sigma^2 / epsilon,
is an option. Without it, R is the number of workers: workers of equal speed have delays of up to one less, so that among
them nothing is ignored, and only a worker that is slower than the others loses gradients.
"""

from __future__ import annotations

import math
from contextlib import suppress

from tuners import policies
from tuners.actions import Install, Job, Rejected, SyncPolicy, Tuner
from tuners.applicability import learns_nothing, nothing_to_tune_if, policy_cannot_be_installed
from tuners.factory_options import NonNegative

__all__ = ["ringmaster", "ringmaster_policy", "threshold"]


def _nothing_is_late(job: Job) -> str:
    return learns_nothing(job, "no gradient of it can be too stale") or policy_cannot_be_installed(job)


@nothing_to_tune_if(_nothing_is_late)
def ringmaster(job: Job, *, noise_ratio: NonNegative = 0.0, stops: bool = False) -> Tuner:
    """Install asynchronous SGD that ignores gradients with a delay of R updates or more.

    Args:
        job: what is tuned.
        noise_ratio: sigma^2 / epsilon, from which R follows; 0: unknown, R is the number of workers.
        stops: stop a computation as soon as its gradient is late, as in Algorithm 5.
    """
    if _nothing_is_late(job):
        return
    late = threshold(noise_ratio) if noise_ratio else len(job.start.workers)
    with suppress(Rejected):
        yield from Install(ringmaster_policy(late, stops=stops), reason=f"gradients {late} or more updates old are ignored")


def threshold(noise_ratio: float) -> int:
    """R = max(1, ceil(sigma^2 / epsilon)): the largest delay threshold that costs no more updates than plain SGD needs."""
    return max(1, math.ceil(noise_ratio))


def ringmaster_policy(threshold: int, *, stops: bool = False) -> SyncPolicy:
    """Ignore a gradient whose delay is `threshold` updates or more (Algorithm 4, with `stops` Algorithm 5).

    The delay is the number of gradients that were applied since the worker pulled: this is `policies.discard` with the
    largest delay that is not ignored. Raises ValueError for less than 1.
    """
    if threshold < 1:
        raise ValueError(f"Cannot ignore gradients with a delay of {threshold} updates or more: give at least 1.")
    name = f"ringmaster({threshold}{',stops' if stops else ''})"
    return policies.discard(threshold - 1, stops=stops)._replace(name=name)
