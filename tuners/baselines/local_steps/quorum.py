"""Local steps in rounds of a quorum: a round ends some grace after enough workers have pushed, and later ones are dropped.

No paper of its own: this is how synchronous rounds are run over unreliable links, as in fault-tolerant data parallelism
(torchft's quorum) and federated averaging's over-selection (Bonawitz et al., "Towards Federated Learning at Scale: System
Design", MLSys 2019: more clients are asked than are needed, and a round has a time limit). From memory, and to be checked.
"""

from __future__ import annotations

from contextlib import suppress

import numpy as np

from tuners import policies
from tuners.actions import Install, Job, Reconfigure, Rejected, Run, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.local_steps.synchronous import steps_or_policy_are_held, synchronous
from tuners.factory_options import Count, NonNegative, Share

__all__ = ["quorum"]


@nothing_to_tune_if(steps_or_policy_are_held)
def quorum(job: Job, *, steps: Count = 8, share: Share = 0.75, grace: NonNegative = 0.1) -> Tuner:
    """Take `steps` local steps; average the copies of those that come within the grace after a `share` of the workers.

    Args:
        job: what is tuned.
        steps: mini-batches between two averages.
        share: of the workers, the quorum.
        grace: how long a round stays open after its quorum, as a share of the median seconds of a worker's first round.
    """
    if steps_or_policy_are_held(job):
        return
    wanted = synchronous(job, {"local_steps": steps, "outer_rate": 1.0, "outer_momentum": 0.0})
    size = max(1, round(share * len(job.start.workers)))
    with suppress(Rejected):
        if wanted != job.start:
            yield from Reconfigure(wanted, reason=f"{wanted.local_steps} local steps")
        seen = yield from Run(clocks=2 * len(job.start.workers))  # those that had begun before, and a round
        if seen.status != "running" or not seen.clocks:
            return
        cycles = seen.pushes.pull_seconds + seen.pushes.compute_seconds + seen.pushes.push_seconds
        seconds = grace * float(np.median(cycles[-len(job.start.workers) :]))
        yield from Install(policies.quorum(size, seconds), reason=f"{size} pushes and {seconds:.3g} s end a round")
