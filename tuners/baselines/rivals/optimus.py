"""Optimus: numbers of workers and servers by a fitted speed function, one machine after another by marginal gain.

Peng, Bao, Chen, Wu, Guo, "Optimus: An Efficient Dynamic Resource Scheduler for Deep Learning Clusters", EuroSys 2018. The
speed of a job with w workers and p servers is w / (t0 + t1 w / p + t2 w + t3 p) steps per second: computing, transfers
through shared links, and overhead per worker and per server. The coefficients are fitted to a few short sample runs, by
least squares without negative ones. Beginning with one of each, the scheduler adds a worker or a server, whichever gains
more, until machines are used up or nothing gains.

From memory, and to be checked: the form of the terms. The paper has one more form for synchronous jobs, whose whole batch is
shared out among the workers: steps per second are 1 / (t0 M / w + t1 + t2 w / p + t3 w + t4 p), which is used where loads
share out a batch. Where we differ: there is one job, so that the fit of its convergence, which decides between jobs, is not
needed; samples are taken on the running job, and the fit is made again with what each move has shown.
"""

from __future__ import annotations

from tuners.actions import Job, Tuner
from tuners.applicability import nothing_to_tune_if
from tuners.baselines.rivals.speed_model import Pair, Speed, roles_are_held, tuned
from tuners.factory_options import Count, NonNegative

__all__ = ["by_marginal_gain", "optimus", "terms"]


@nothing_to_tune_if(roles_are_held)
def optimus(job: Job, *, samples: Count = 4, clocks: Count = 3, gain: NonNegative = 0.05) -> Tuner:
    """Measure a few numbers of workers and servers, fit the speed function, and move where that gains.

    Args:
        job: what is tuned.
        samples: pairs of numbers that are measured, the start among them.
        clocks: pushes per worker in each measurement.
        gain: the least expected gain in speed for which the job is reconfigured, as a share.
    """
    if not roles_are_held(job):
        yield from tuned(job, terms, by_marginal_gain, samples=samples, clocks=clocks, gain=gain)


def terms(workers: int, servers: int) -> tuple[float, ...]:
    """The terms of a worker's seconds: computing, transfers, overhead per worker, overhead per server."""
    return 1.0, workers / servers, float(workers), float(servers)


def by_marginal_gain(speed: Speed, able: frozenset[Pair]) -> Pair:
    """The pair of `able` that is reached by adding, from (1, 1) on, a worker or a server, whichever gains more speed.

    Where machines may be idle, the first pair from which neither gains; else the fastest pair on the way.
    """
    most = max(w + p for w, p in able)
    here, best = (1, 1), max(able, key=lambda pair: (-abs(pair[0] - 1) - abs(pair[1] - 1), pair))
    while sum(here) < most:
        grown = max(((here[0] + 1, here[1]), (here[0], here[1] + 1)), key=speed)
        if here in able and speed(grown) <= speed(here):
            break
        here = grown
        if here in able and speed(here) > speed(best):
            best = here
    return best
