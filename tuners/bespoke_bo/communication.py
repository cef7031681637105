"""Communication in an iteration of synchronous SGD: the semi-parametric part of the bespoke model (Dalibard et al., "Tuning
the Scheduling of Distributed Stochastic Gradient Descent with Bayesian Optimization", Section 3).

The paper predicts max over machines of transfer(m) / connection_speed(type of m), with a Gaussian process for the residual.
The definition of transfer(m), the priors and the inputs of the process are ours; the public framework has no such model.

* The model of P bytes is spread equally over S servers. A worker moves P each way, or P - P / S if it is a server itself. A
  server moves P / S for each worker but itself. A machine that is both moves the two at the same time, one after the other,
  or something between: `duplex`, in [0, 1], is inferred.
* No worker has the whole model before the slowest server has sent it. Apart from that, workers need not wait for each other:
  a worker with a fast connection computes early and pushes early. `overlap`, in [0, 1], is inferred, too: at 0 all workers
  wait for the slowest connection, as printed (``overlap=False`` fixes it at 0); at 1 the iteration ends with the last push.
* The process depends on the numbers of workers and servers and on the parametric prediction, and scales with the latter.
* Connection speeds have a log-uniform prior around half of the vendor's figure, because an iteration pulls and pushes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from tuners.bespoke_bo.grouped_cluster import BOTH, SERVER, GroupedCluster, Traffic
from tuners.bespoke_bo.parts import Part, Prior

__all__ = ["communication", "overlapping", "transfer_seconds"]

_Floats = NDArray[np.float64]


def communication(cluster: GroupedCluster, *, overlap: bool = True) -> Part:
    """The seconds of an iteration beyond the compute time of its slowest machine, from `GroupedCluster.traffic`."""
    unit = cluster.model_bytes / float(np.median(cluster.speeds))

    def mean(parameters: _Floats, inputs: _Floats) -> _Floats:
        own, served = transfer_seconds(cluster, parameters, inputs)
        share = overlapping(cluster, parameters)[:, None]
        early = Traffic.of(inputs).early_workers
        slowest = np.maximum(np.where(early >= 0, own, 0.0).max((-2, -1)), served.max(-1))
        found: _Floats = share * _last_push(own, served, Traffic.of(inputs)) + (1 - share) * slowest
        return found

    def features(inputs: _Floats, mean_seconds: _Floats) -> _Floats:
        traffic = Traffic.of(inputs)
        machines = np.stack([traffic.workers, traffic.servers], axis=-1)
        counts = np.broadcast_to(np.log(np.maximum(machines, 1)), (*mean_seconds.shape, 2))
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
        noise=Prior("noise", 1e-3, 0.02),  # relative to the slowest machine's compute time
        floor=0.05 * unit,
    )


def overlapping(cluster: GroupedCluster, parameters: _Floats) -> _Floats:
    """The share of its own transfer that a machine can hide, [N], from parameters [N, p]; 0 for a part without `overlap`."""
    column = len(cluster.types) + 1
    found: _Floats = parameters[:, column] if parameters.shape[1] > column else np.zeros(len(parameters))
    return found


def transfer_seconds(cluster: GroupedCluster, parameters: _Floats, inputs: _Floats) -> tuple[_Floats, _Floats]:
    """How long connections are busy in an iteration, from parameters [N, p] at inputs [.., n, d].

    First a worker's own transfer, [N, n, types, 2]: pure workers, and machines that are both; also for types without a
    worker. Then a server's transfer for all workers, [N, n, 2 types]: pure servers of each type, then machines that are
    both; 0 where there is none.
    """
    size, count, traffic = cluster.model_bytes, len(cluster.types), Traffic.of(inputs)
    speeds, duplex = parameters[:, None, :count], parameters[:, None, count]
    workers, servers = traffic.workers, np.maximum(traffic.servers, 1)
    own, served = size - size / servers, size / servers * np.maximum(workers - 1, 0)
    meanwhile = duplex * np.minimum(own, served)
    alone = np.broadcast_to(size / speeds, (*meanwhile.shape, count))
    paired = (own + meanwhile)[..., None] / speeds
    only, both = traffic.present(SERVER), traffic.present(BOTH)
    serving = only * (size / servers * workers)[..., None] / speeds, both * (served + meanwhile)[..., None] / speeds
    return np.stack([alone, paired], axis=-1), np.concatenate(serving, axis=-1)


def _last_push(own: _Floats, served: _Floats, traffic: Traffic) -> _Floats:
    """The end of the last push, in seconds after the slowest machine would have computed without communication, [N, n].

    All workers pull at once. A server receives pushes in the order in which they become ready, and idles only if none is.
    """
    flat = (*traffic.workers.shape, -1)
    early, count = traffic.early_workers.reshape(flat), traffic.worker_machines.reshape(flat)
    each = own.reshape(*own.shape[:-2], -1)
    ready = 0.5 * np.maximum(each, served.max(-1, keepdims=True)) - early
    ready = np.where(early >= 0, ready, -np.inf)
    last = np.where(early >= 0, ready + 0.5 * each, 0.0).max(-1)
    later = ready[..., None, :] >= ready[..., :, None]  # whether a worker is ready no sooner than another
    pushes, mine = (later * count[..., None, :]).sum(-1), later[..., 1::2]
    types, workers = mine.shape[-1], traffic.workers
    for server in range(2 * types):
        # A machine that is both pushes its own share to itself, without a connection.
        itself = mine[..., server - types] if server >= types else 0
        crossing = (pushes - itself) / np.maximum(workers - (server >= types), 1)[..., None]
        busy = np.where(early >= 0, ready + 0.5 * served[..., None, server] * crossing, 0.0)
        last = np.maximum(last, np.where(served[..., server] > 0, busy.max(-1), 0.0))
    found: _Floats = np.maximum(last, 0.0)
    return found
