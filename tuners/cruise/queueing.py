"""How long a pull takes where asynchronous workers queue for busy servers: approximate mean value analysis.

The workers and the servers are a closed queueing network. A worker computes, then it pulls; every pull needs S seconds of
the servers, which serve several workers at once if those are narrow. A worker that comes to the servers finds, of every
other one, what the average over time says (the arrival theorem of Reiser and Lavenberg, JACM 1980, with Schweitzer's
approximation of 1979: the network with one worker less looks like this one). The work of others that it finds there makes
it wait for

    W = (N - 1) / N  S  sum_i (W + S / 2) / (c_i + p_i),    p_i = max(M / b_i, S + W)

seconds: worker i computes for c_i seconds, then it waits for W or is served. A pull in service is half done on average,
because pulls have one size. A narrow worker, with a NIC of b_i, is served while it waits, so that p_i is not a sum. W is
never so short that the servers would be busy for longer than there is time:

    W >= S  sum_i W / (c_i + p_i)

The right sides are concave in W, so that Newton's method comes to the larger solution of the two from above.
"""

from __future__ import annotations

from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

__all__ = ["pulls_in_queue"]

_Array: TypeAlias = NDArray[np.float64]

_LEFT = 0.5  # of a pull that is being served when another worker comes
_MOST_STEPS, _CONVERGED = 100, 1e-13


def pulls_in_queue(workers: _Array, compute: _Array, alone: _Array, service: _Array) -> _Array:
    """Seconds of a pull at a worker of each kind, [v, u], for v networks of workers of u kinds.

    Args:
        workers: how many of each kind there are, [v, u].
        compute: seconds between the pulls of a worker, [v, u] or [u].
        alone: seconds for which a worker's own NIC takes, [v, u] or [u].
        service: seconds of the servers that one pull needs, [v].
    """
    service = service[:, None]
    everyone = workers.sum(axis=1, keepdims=True)
    wait = service * (everyone - 1)  # no more work can be there than one pull of every other worker
    for _ in range(_MOST_STEPS):
        cycle = compute + np.maximum(alone, service + wait)
        rate = workers / cycle
        falls = np.where(service + wait > alone, rate / cycle, 0.0)  # the rate, with the wait
        met = _newton(wait, service * (1 - 1 / everyone), _LEFT * service, rate, falls)
        busy = _newton(wait, service, np.zeros_like(service), rate, falls)
        less = np.clip(np.maximum(met, busy), 0.0, wait)
        done = wait - less <= _CONVERGED * (wait + service)
        wait = less
        if done.all():
            break
    pulls: _Array = np.maximum(alone, service + wait)
    return pulls


def _newton(wait: _Array, service: _Array, left: _Array, rate: _Array, falls: _Array) -> _Array:
    """A step of Newton's method towards wait = service x sum of rate x (wait + left), [v, 1]; not where it has no slope."""
    work = wait + left
    excess = wait - service * (rate * work).sum(axis=1, keepdims=True)
    slope = 1 - service * (rate - falls * work).sum(axis=1, keepdims=True)
    step: _Array = wait - np.divide(excess, slope, out=np.zeros_like(wait), where=slope > 0)
    return step
