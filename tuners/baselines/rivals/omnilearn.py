"""OmniLearn: the batch of every worker follows its throughput, by a proportional controller on iteration times.

Tyagi and Sharma, "OmniLearn: A Framework for Distributed Deep Learning over Heterogeneous Clusters", IEEE TPDS 2025 (arXiv
2503.17469). The error of worker k is t_k - mean(t), its iteration's seconds beyond the mean; with a throughput of
X_k = b_k / t_k its batch changes by -X_k times that error, to b_k = X_k mean(t), and the sum of all batches stays. Times are
smoothed exponentially, and batches change only where one changes by more than a dead band. Gradients count by their samples.

We had the abstract only; the controller is from memory, and to be checked. Where we differ: a device is what the paper calls
a worker. The paper also scales the learning rate of each worker under ASP; a rate per worker is no knob here. With the gain
of 1, and the sum held, the controller's batches are those in proportion to throughput, as in LB-BSP; the two differ in what
they measure (times since the last change, or speeds of all time), in when they act, and in that this one acts under ASP too.
"""

from __future__ import annotations

from tuners.actions import Job, Reconfigure, Rejected, Run, Setting, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.lb_bsp import balanced, measured_speeds
from tuners.factory_options import Count, Share

__all__ = ["changed_most", "omnilearn"]


def _loads_are_held(job: Job) -> str:
    return "" if job.space.frees("load") and job.start.loads else "The batch of each worker is not free here."


@nothing_to_tune_if(_loads_are_held)
def omnilearn(job: Job, *, iterations: Count = 5, weight: Share = 0.5, dead_band: Share = 0.05) -> Tuner:
    """Measure the time of every device's mini-batch, and move samples from those that take longer than the mean.

    Args:
        job: what is tuned.
        iterations: between two decisions.
        weight: of the new measurement in the moving average of a device's time.
        dead_band: the change of a device's batch from which on batches are changed, as a share of it.
    """
    if _loads_are_held(job):
        return
    current, smoothed = job.start, dict[tuple[str, int], float]()
    while True:
        seen = yield from Run(clocks=iterations * len(current.workers))
        if seen.status != "running":
            return
        if seen.setting is not None and seen.setting != current:
            current, smoothed = seen.setting, {}
        if seen.changes or not current.loads:
            continue
        for device, speed in measured_speeds(current, seen.workers).items():
            # At one batch the mean of times is the harmonic mean of speeds.
            seconds = 1 / speed if device not in smoothed else (1 - weight) / smoothed[device] + weight / speed
            smoothed[device] = 1 / seconds
        wanted = balanced(current, smoothed)
        change = changed_most(current, wanted)
        if change > dead_band:
            try:
                yield from Reconfigure(wanted, reason=f"the batch of one device changes by {change:.0%}")
            except Rejected:
                continue
            current, smoothed = wanted, {}


def changed_most(before: Setting, after: Setting) -> float:
    """The largest change of a device's samples, as a share of what it had."""
    pairs = zip(before.loads, after.loads, strict=True)
    return max((abs(b - a) / a for old, new in pairs for a, b in zip(old, new, strict=True) if a), default=0.0)
