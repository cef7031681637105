"""FedBuff: no worker waits, and the servers step when K of their differences have come.

Nguyen et al., "Federated Learning with Buffered Asynchronous Aggregation", AISTATS 2022: a client takes its local steps on
what it has pulled, pushes the difference, and goes on with what the server has then; the server averages K differences.

We had the abstract only. The authors' public code (FLSim: `async_staleness_weights.py`) can weigh a difference by a power
of 1 / (1 + its staleness); the paper's is the square root, from memory. Here all of a buffer count the same, as servers
average. K is 10 of about a thousand clients there; here it is a share of the workers.
"""

from __future__ import annotations

from contextlib import suppress

from tuners import policies
from tuners.actions import Install, Job, Reconfigure, Rejected, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.local_steps.synchronous import steps_or_policy_are_held, with_nearest
from tuners.factory_options import AboveZero, Count, Share

__all__ = ["fedbuff"]


@nothing_to_tune_if(steps_or_policy_are_held)
def fedbuff(job: Job, *, steps: Count = 8, share: Share = 0.5, outer_rate: AboveZero = 1.0) -> Tuner:
    """Take `steps` local steps without waiting for others; the servers average the pushes of a `share` of the workers.

    Args:
        job: what is tuned.
        steps: mini-batches between a pull and its push.
        share: K, the pushes that the servers average, as a share of the number of workers; at least 1.
        outer_rate: of the servers, for that average.
    """
    if steps_or_policy_are_held(job):
        return
    wanted = with_nearest(job, {"local_steps": steps, "outer_rate": outer_rate, "outer_momentum": 0.0})
    size = max(1, round(share * len(job.start.workers)))
    with suppress(Rejected):
        if wanted != job.start:
            yield from Reconfigure(wanted, reason=f"{wanted.local_steps} local steps")
        yield from Install(policies.buffered(size), reason=f"the servers average {size} pushes")
