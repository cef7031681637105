"""Communication in an iteration of synchronous SGD: the semi-parametric part of the bespoke model (Dalibard et al., "Tuning
the Scheduling of Distributed Stochastic Gradient Descent with Bayesian Optimization", Section 3).

The paper predicts max over machines of transfer(m) / connection_speed(type of m), with a Gaussian process for the rest. What
transfer(m) is, the priors and the process's inputs are ours; the public framework has no such model.

* Of a model of P bytes equally held by S servers, a worker moves P each way, or P - P / S if it is a server itself, and a
  server moves P / S for each worker but itself. A machine that is both moves the one while it moves the other, or both
  in turn, or something between: `duplex`, in [0, 1], is inferred.
* Nobody has the model before its slowest server has sent it; beyond that a worker's own connection is its own affair: who
  has pulled early computes early, and who has computed early has pushed before the others want to. `overlap`, in [0, 1], is
  inferred, too: how far an iteration is that, between 0, where everybody waits for the slowest connection as printed
  (``overlap=False`` keeps it there), and 1, where it ends with the last push.
* The process depends on the numbers of workers and servers and on the parametric prediction, and goes in proportion to it.
* Connection speeds are uniform in their logarithm around half of what the vendor states, for an iteration pulls and pushes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_bo.parts import Part, Prior

if TYPE_CHECKING:
    from tuners.bespoke_bo.model import Cluster

__all__ = ["communication", "overlapping", "transfer_seconds"]

_Floats = NDArray[np.float64]


def communication(cluster: Cluster, *, overlap: bool = True) -> Part:
    """The seconds of an iteration that its slowest machine does not account for, from `Cluster.traffic`."""
    unit = cluster.model_bytes / float(np.median(cluster.speeds))

    def mean(parameters: _Floats, inputs: _Floats) -> _Floats:
        own, served = transfer_seconds(cluster, parameters, inputs)
        share = overlapping(cluster, parameters)[:, None]
        early = _of_workers(inputs[..., 2::2])
        slowest = np.maximum(np.where(early >= 0, own, 0.0).max((-2, -1)), served.max(-1))
        found: _Floats = share * _last_push(own, served, inputs) + (1 - share) * slowest
        return found

    def features(inputs: _Floats, mean_seconds: _Floats) -> _Floats:
        counts = np.broadcast_to(np.log(np.maximum(inputs[..., :2], 1)), (*mean_seconds.shape, 2))
        return np.concatenate([counts, np.log(mean_seconds / unit + 0.1)[..., None]], axis=-1)

    return Part(
        name="communication",
        parameters=(
            *(Prior(f"speed {t}", s / 6, s * 1.5) for t, s in zip(cluster.types, cluster.speeds, strict=True)),
            Prior("duplex", 0.0, 1.0, log=False),
            *([Prior("overlap", 0.0, 1.0, log=False)] if overlap else []),
        ),
        mean=mean,
        features=features,
        width=3,
        amplitude=Prior("amplitude", 0.005, 0.15),
        length=Prior("length", 0.3, 5.0),
        noise=Prior("noise", 1e-3, 0.02),  # of the slowest machine's seconds, which communication is the rest to
        floor=0.05 * unit,
    )


def overlapping(cluster: Cluster, parameters: _Floats) -> _Floats:
    """How much of its own transfer a machine can hide, [N], from parameters [N, p]; 0 where the part has no such thing."""
    column = len(cluster.types) + 1
    found: _Floats = parameters[:, column] if parameters.shape[1] > column else np.zeros(len(parameters))
    return found


def transfer_seconds(cluster: Cluster, parameters: _Floats, inputs: _Floats) -> tuple[_Floats, _Floats]:
    """How long connections are busy in an iteration, from parameters [N, p] at inputs [.., n, d].

    Those of workers with their own transfer, [N, n, types, 2]: worker only, and both; for types without a worker as well.
    And those of servers with all workers, [N, n, 2 types]: of each type the server only, and both; 0 where there is none.
    """
    size, count = cluster.model_bytes, len(cluster.types)
    speeds, duplex = parameters[:, None, :count], parameters[:, None, count]
    workers, servers = inputs[..., 0], np.maximum(inputs[..., 1], 1)
    own, served = size - size / servers, size / servers * np.maximum(workers - 1, 0)
    meanwhile = duplex * np.minimum(own, served)
    alone = np.broadcast_to(size / speeds, (*meanwhile.shape, count))
    paired = (own + meanwhile)[..., None] / speeds
    only, both = inputs[..., 4::6] >= 0, inputs[..., 6::6] >= 0
    serving = only * (size / servers * workers)[..., None] / speeds, both * (served + meanwhile)[..., None] / speeds
    return np.stack([alone, paired], axis=-1), np.concatenate(serving, axis=-1)


def _of_workers(columns: _Floats) -> _Floats:
    """Of columns for workers, servers and both of each type, [.., 3 types], the first and the last, [.., types, 2]."""
    return np.stack([columns[..., 0::3], columns[..., 2::3]], axis=-1)


def _last_push(own: _Floats, served: _Floats, inputs: _Floats) -> _Floats:
    """When the last push has ended, in seconds since the slowest machine would have computed without communication, [N, n].

    All pull at once. Of what is pushed a server takes in what comes first, and is never idle while something is there.
    """
    early, count = (_of_workers(inputs[..., first::2]).reshape(*inputs.shape[:-1], -1) for first in (2, 3))
    each = own.reshape(*own.shape[:-2], -1)
    ready = 0.5 * np.maximum(each, served.max(-1, keepdims=True)) - early
    ready = np.where(early >= 0, ready, -np.inf)
    last = np.where(early >= 0, ready + 0.5 * each, 0.0).max(-1)
    later = ready[..., None, :] >= ready[..., :, None]  # who pushes no sooner than each
    pushes, mine = (later * count[..., None, :]).sum(-1), later[..., 1::2]
    kinds, workers = mine.shape[-1], inputs[..., 0]
    for server in range(2 * kinds):
        # What a machine that is both pushes to itself crosses no connection.
        itself = mine[..., server - kinds] if server >= kinds else 0
        crossing = (pushes - itself) / np.maximum(workers - (server >= kinds), 1)[..., None]
        busy = np.where(early >= 0, ready + 0.5 * served[..., None, server] * crossing, 0.0)
        last = np.maximum(last, np.where(served[..., server] > 0, busy.max(-1), 0.0))
    found: _Floats = np.maximum(last, 0.0)
    return found
