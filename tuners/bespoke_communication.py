"""Communication in an iteration of synchronous SGD: the semi-parametric part of the bespoke model (Dalibard et al., "Tuning
the Scheduling of Distributed Stochastic Gradient Descent with Bayesian Optimization", Section 3).

The paper predicts max over machines of transfer(m) / connection_speed(type of m), with a Gaussian process for the rest. What
transfer(m) is, the priors and the process's inputs are ours; the public framework has no such model.

* Of a model of P bytes equally held by S servers, a worker moves P each way, or P - P / S if it is a server itself, and a
  server moves P / S for each worker but itself. A machine that is both moves the one while it moves the other, or both
  in turn, or something between: `duplex`, in [0, 1], is inferred.
* Nobody has the model before its slowest server has sent it; beyond that a worker's own connection is its own affair: who
  has pulled early computes early. `overlap`, in [0, 1], is inferred, too: at 0 everybody waits for the slowest connection,
  as printed (``overlap=False`` keeps it there); at 1 an iteration is as long as the slowest machine with its *own* transfer.
* The process depends on the numbers of workers and servers and on the parametric prediction, and goes in proportion to it.
* Connection speeds are uniform in their logarithm around half of what the vendor states, for an iteration pulls and pushes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_parts import Part, Prior

if TYPE_CHECKING:
    from tuners.bespoke_model import Cluster

__all__ = ["communication", "overlapping", "transfer_seconds"]

_Floats = NDArray[np.float64]


def communication(cluster: Cluster, *, overlap: bool = True) -> Part:
    """The seconds of an iteration that its slowest machine does not account for, from `Cluster.traffic`."""
    unit = cluster.model_bytes / float(np.median(cluster.speeds))

    def mean(parameters: _Floats, inputs: _Floats) -> _Floats:
        own = transfer_seconds(cluster, parameters, inputs)
        early = np.stack([inputs[..., 2::3], inputs[..., 4::3]], axis=-1)  # seconds before the slowest, -1: nobody
        share = overlapping(cluster, parameters)[:, None]
        slowest = np.where(early >= 0, own, 0.0).max((-2, -1))
        last = np.where(early >= 0, share[..., None, None] * own - early, -np.inf).max((-2, -1))
        found: _Floats = np.maximum(last, 0.0) + (1 - share) * slowest
        return found

    def features(inputs: _Floats, mean_seconds: _Floats) -> _Floats:
        counts = np.broadcast_to(np.log(np.maximum(inputs[..., :2], 1)), (*mean_seconds.shape, 2))
        return np.concatenate([counts, np.log(mean_seconds / unit + 0.1)[..., None]], axis=-1)

    return Part(
        name="communication",
        parameters=(
            *(Prior(f"speed {t}", s / 16, s * 4) for t, s in zip(cluster.types, cluster.speeds, strict=True)),
            Prior("duplex", 0.0, 1.0, log=False),
            *([Prior("overlap", 0.0, 1.0, log=False)] if overlap else []),
        ),
        mean=mean,
        features=features,
        width=3,
        amplitude=Prior("amplitude", 0.01, 0.3),
        length=Prior("length", 0.3, 5.0),
        noise=Prior("noise", 1e-3, 0.1),  # of the slowest machine's seconds, which communication is the rest to
        floor=0.05 * unit,
    )


def overlapping(cluster: Cluster, parameters: _Floats) -> _Floats:
    """How much of its own transfer a machine can hide, [N], from parameters [N, p]; 0 where the part has no such thing."""
    column = len(cluster.types) + 1
    found: _Floats = parameters[:, column] if parameters.shape[1] > column else np.zeros(len(parameters))
    return found


def transfer_seconds(cluster: Cluster, parameters: _Floats, inputs: _Floats) -> _Floats:
    """Until a worker of each type has the model and its gradient is away, [N, n, types, 2]: worker only, and both.

    For parameters [N, p] at inputs [.., n, d]; for types that have no worker as well.
    """
    size, count = cluster.model_bytes, len(cluster.types)
    speeds, duplex = parameters[:, None, :count], parameters[:, None, count]
    workers, servers = inputs[..., 0], np.maximum(inputs[..., 1], 1)
    own, served = size - size / servers, size / servers * np.maximum(workers - 1, 0)
    meanwhile = duplex * np.minimum(own, served)
    slowest = np.zeros(np.broadcast_shapes(inputs.shape[:-1], duplex.shape))
    for kind in range(count):
        only, both = (inputs[..., 2 + 3 * kind + role] >= 0 for role in (1, 2))
        moved = np.maximum(only * size / servers * workers, both * (served + meanwhile))
        slowest = np.maximum(slowest, moved / speeds[..., kind])
    alone = size / speeds * np.ones((*slowest.shape, 1))
    paired = (own + meanwhile)[..., None] / speeds
    return np.maximum(np.stack([alone, paired], axis=-1), slowest[..., None, None])
