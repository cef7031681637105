"""AdaComm: local SGD whose number of local steps falls with the loss.

Wang and Joshi, "Adaptive Communication Strategies to Achieve the Best Error-Runtime Trade-off in Local-Update SGD", SysML
2019: rare averages save time at the beginning, frequent ones lower the error floor at the end. After every interval of
wall-clock time T_0, number l, the communication period is tau_l = ceil(sqrt(F(x_l) / F(x_0)) tau_0), and where that is not
less than tau_(l-1), it is gamma tau_(l-1) with gamma = 1/2. We had the abstract only: the rule is from memory.
PaddlePaddle's version (`localsgd_optimizer.py`) is another one: ceil(sqrt(F(x_l) / F(x_0) tau_0)) where the rate stays.

Where we differ: the paper searches tau_0 by short runs on a grid; here it is an option. T_0 is a share of the budget, and F
is the mean training loss of an interval's mini-batches; F(x_0) is that of each worker's first push. The learning rate is
the job's.
"""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np

from tuners.actions import Job, Reconfigure, Rejected, Run, Tuner, Window
from tuners.applicability import learns_nothing, nothing_to_tune_if
from tuners.baselines.local_steps.synchronous import steps_are_held, synchronous
from tuners.factory_options import Count, Share

__all__ = ["adacomm", "next_period"]


def _no_schedule(job: Job) -> str:
    return learns_nothing(job, "it has no loss that could set the number of local steps") or steps_are_held(job)


@nothing_to_tune_if(_no_schedule)
def adacomm(job: Job, *, initial: Count = 32, interval: Share = 0.02, decay: Share = 0.5) -> Tuner:
    """Begin with `initial` local steps, and take fewer as the loss falls.

    Args:
        job: what is tuned.
        initial: local steps at the beginning, tau_0.
        interval: of the budget, between two decisions, T_0.
        decay: of the number of steps where the loss has not lowered it, gamma.
    """
    if _no_schedule(job):
        return
    current = job.start
    wanted = synchronous(job, {"local_steps": initial, "outer_rate": 1.0, "outer_momentum": 0.0})
    period, first = initial, math.nan
    while True:
        try:
            if wanted != current:
                yield from Reconfigure(wanted, reason=f"{wanted.local_steps} local steps")
            seen: Window = yield from Run(seconds=interval * job.budget_seconds)
        except Rejected:
            return
        current = seen.setting or wanted
        if seen.status != "running":
            return
        if not seen.clocks:
            wanted = current
            continue
        if math.isnan(first):
            first = float(np.mean(seen.pushes.loss[: len(current.workers)]))
        period = next_period(period, initial, first, float(np.mean(seen.pushes.loss)), decay)
        wanted = replace(current, local_steps=synchronous(job, {"local_steps": period}).local_steps)


def next_period(period: int, initial: int, first_loss: float, loss: float, decay: float) -> int:
    """tau_l after tau_(l-1) = `period`; at least 1."""
    by_loss = math.ceil(math.sqrt(max(loss, 0.0) / first_loss) * initial) if first_loss > 0 else period
    return max(1, math.ceil(by_loss if by_loss < period else decay * period))
