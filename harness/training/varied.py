"""Draw jobs that differ in everything that matters to who waits for whom: what RLP's broad policy is trained on.

4 to 16 workers, 0 to 6 hidden layers, digits in mini-batches of 4, 16 and 64 and MNIST-1D, learning rates from a twentieth
of the edge of stability to just above it, data that is mixed or distributed by class, stragglers as in the paper, mild ones
or none. The *edge* of a network is the rate at which BSP on ten workers just fails to converge on its data, as measured; for
k workers it is 10 / k of that, since BSP applies k gradients of the same parameters one after the other.

Instances come from a few shapes (workers, network, data, mini-batch), as each shape is compiled once. Other numbers of
workers, other depths, wider deep networks and Gaussian clouds are left out on purpose: `reports.papers.rlp_broad` tests on
them.
"""

from __future__ import annotations

from typing import NamedTuple

import msgspec
import numpy as np

from harness.training.instances import Instance, InstanceKind, draw
from simulators.cluster.conditions import Conditions, Stragglers
from tuners import policies
from tuners.actions import SyncPolicy, Target

__all__ = ["CONDITIONS", "SHAPES", "Shape", "drawn_instance", "simple_rules"]


class Shape(NamedTuple):
    """Workers, a perceptron and its data, and the edge of stability of this network."""

    workers: int
    depth: int  # hidden layers
    units: int  # per hidden layer
    edge: float  # learning rate at which BSP on ten workers just fails to converge
    batch: int = 16  # samples of a mini-batch; whatever their number, it takes as long
    data: str = "rlp-digits"  # workload
    accuracy: float = 0.88  # target: one that a few hundred pushes reach


SHAPES = (
    Shape(4, 1, 256, 0.2),
    Shape(10, 1, 256, 0.2),
    Shape(16, 1, 256, 0.2),
    Shape(7, 0, 256, 0.4),
    Shape(10, 2, 64, 0.1),
    Shape(13, 3, 64, 0.07),
    Shape(5, 6, 64, 0.035),
    Shape(11, 1, 128, 0.14, batch=4),
    Shape(14, 1, 128, 0.28, batch=64),
    Shape(9, 1, 128, 0.35, data="mnist1d-mlp", accuracy=0.33),
)
_BATCH_SECONDS = 16 * 0.2996  # of a mini-batch on digits, on a node that does not straggle; pulls and pushes take none
_USUAL = InstanceKind().conditions  # stragglers as in the paper
_EVEN = msgspec.structs.replace(_USUAL, stragglers=None)
_MILD = msgspec.structs.replace(_EVEN, stragglers=Stragglers(1.5, 0.5, probability=0.3, spread_seconds=0.5))
CONDITIONS: dict[str, Conditions] = {"usual": _USUAL, "mild": _MILD, "even": _EVEN}


def drawn_instance(seed: int) -> Instance:
    """The instance of a seed: its shape, rate, skew, stragglers, data and first parameters."""
    rng = np.random.default_rng([seed, 7])
    shape = SHAPES[int(rng.integers(len(SHAPES)))]
    low = rng.random() < 0.3
    share = float(np.exp(rng.uniform(np.log(0.05), np.log(0.3)))) if low else float(rng.uniform(0.3, 1.05))
    skew = float(rng.uniform(0.3, 1.0)) if rng.random() < 0.4 else 0.0
    conditions = ("usual", "usual", "usual", "mild", "even")[int(rng.integers(5))]
    kind = InstanceKind(
        workload=shape.data,
        overrides={"learning_rate": share * shape.edge * 10 / shape.workers, "skew": skew, **_demand(shape)},
        workers=shape.workers,
        depths=(shape.depth,),
        units=shape.units,
        conditions=CONDITIONS[conditions],
        target=Target("accuracy", shape.accuracy),
    )
    return draw(kind, seed)


def _demand(shape: Shape) -> dict[str, float]:
    """Overrides: a mini-batch of the shape takes as long as one of digits in RLP's job, and communication nothing."""
    usual = InstanceKind()
    if (shape.data, shape.batch) == (usual.workload, 16):
        return {}
    nothing = ("fixed_seconds", "serial_fraction", "message_seconds", "apply_seconds", "aggregate_seconds")
    free = {f"demand.{name}": 0.0 for name in nothing} | {"demand.model_bytes": 1e4}
    return free | {"batch_size": shape.batch, "demand.sample_seconds": _BATCH_SECONDS / shape.batch}


def simple_rules(workers: int) -> dict[str, SyncPolicy]:
    """The simple rules that a policy is held against, by a name that is the same for any number of workers."""
    made = {"asp": policies.asp(), "bsp": policies.bsp()}
    made |= {f"ssp({bound})": policies.ssp(bound) for bound in (1, 2, 4, 8, 16)}
    sizes = {share: max(1, round(share * workers)) for share in (0.2, 0.4, 0.7)}
    made |= {f"k_async({share:g}k)": policies.k_async(size) for share, size in sizes.items()}
    return made | {f"k_sync({share:g}k)": policies.k_sync(size) for share, size in sizes.items() if share > 0.2}
