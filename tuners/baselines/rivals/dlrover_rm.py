"""DLRover-RM: numbers of workers and servers by a resource-performance model, and no more machines than they are worth.

Wang et al., "DLRover-RM: Resource Optimization for Deep Recommendation Models Training in the Cloud", VLDB 2024 (arXiv
2304.01468). The time of an iteration is that of the gradient, of the update at the servers, of their synchronisation, and of
looking up embeddings; throughput is w / that. Its coefficients are fitted while the job runs. Plans are judged by what they
gain in throughput and what they take in resources.

We had the abstract only. From memory, and to be checked: with machines of one kind and a batch per worker that stays, the
four parts are t0 (gradient), t1 w / p (update and synchronisation: w pushes over p servers) and t2 / p (look-ups). Where we
differ: the paper searches plans by NSGA-II for many jobs at once, also over cores and memory; here all pairs (w, p) of one
job are tried. Of those whose speed is within `slack` of the fastest, the one with the highest speed per machine is chosen;
where the job asks for the least money, of all. The migration of hot servers, a part of the paper's system, is not here.
"""

from __future__ import annotations

from functools import partial

from tuners.actions import Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.rivals.speed_model import Pair, Speed, roles_are_held, tuned
from tuners.factory_options import Count, NonNegative, Share

__all__ = ["by_worth", "dlrover_rm", "terms"]


@nothing_to_tune_if(roles_are_held)
def dlrover_rm(job: Job, *, samples: Count = 4, clocks: Count = 3, gain: NonNegative = 0.05, slack: Share = 0.05) -> Tuner:
    """Measure a few numbers of workers and servers, fit the model, and move to the cheapest that is nearly the fastest.

    Args:
        job: what is tuned.
        samples: pairs of numbers that are measured, the start among them.
        clocks: pushes per worker in each measurement.
        gain: the least expected gain in speed for which the job is reconfigured, as a share.
        slack: of the fastest plan's speed, which a plan with fewer machines may lack.
    """
    if not roles_are_held(job):
        choose = partial(by_worth, slack=1.0 if job.target.minimise == "usd" else slack)
        # The paper's jobs do not stop for a change, and its workers fetch their data as they go: only parameters move.
        yield from tuned(
            job, terms, choose, samples=samples, clocks=clocks, gain=gain, method=job.method("relocate", "migrate")
        )


def terms(workers: int, servers: int) -> tuple[float, ...]:
    """The terms of a worker's seconds: gradient, update and synchronisation, look-ups."""
    return 1.0, workers / servers, 1.0 / servers


def by_worth(speed_of: Speed, able: frozenset[Pair], *, slack: float) -> Pair:
    """Of the pairs whose speed is within `slack` of the fastest, the one with the highest speed per machine."""
    speed = {pair: speed_of(pair) for pair in sorted(able)}
    fastest = max(speed.values())
    return max((p for p in speed if speed[p] >= (1 - slack) * fastest), key=lambda p: speed[p] / sum(p))
