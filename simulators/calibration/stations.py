"""The closed form where servers are unlike or also work: every server's link, each way, is a station of its own.

A transfer has a flow to each server and visits their stations at the same time; it ends with its last flow (fork and join).
As all flows begin together, and the same other workers are in their way, the last one is nearly always the same: the mean of
the maximum is taken for the maximum of the means. A flow that has the links for itself takes what its worker's own link
leaves to it while the others go on; beyond its service at the server's link that is a delay without a queue (Seidmann's
approximation). A node that works and serves has both on its link: its own transfers visit its stations, too, and what it
moves to itself visits none. The engine's counterpart is `simulators.engine.connections`.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

__all__ = ["Stations", "Visits", "together", "visits"]

_Array = NDArray[np.float64]


class Stations(NamedTuple):
    """The servers of a cluster."""

    shares: tuple[float, ...]  # of the model
    rates: tuple[float, ...]  # of each server, one direction, bytes per second
    nodes: tuple[int, ...]  # the place of each among the nodes
    independent: bool  # each flow ends by itself; otherwise all flows of a transfer move in proportion


class Visits(NamedTuple):
    """What transfers do at stations, padded with servers without a share; n plants, k workers, s servers."""

    sizes: _Array  # bytes of each flow, [n, k, s]
    rates: _Array  # bytes per second of the servers' links, [n, 1, s]
    nic: _Array  # of the workers' links, [n, k, 1]
    service: _Array  # seconds at the servers' links, [n, k, s]; where workers serve, then at their own, [n, k, 2s]
    direct: _Array  # further seconds, without a queue, of the same shape
    alone: _Array  # seconds of the transfer that has all links for itself, [n, k]
    independent: NDArray[np.bool_]  # [n, 1, 1]


def visits(plants: Sequence[Stations], active: NDArray[np.bool_], nic: _Array, transfer_bytes: _Array) -> Visits:
    """Of one way, pulls or pushes of `transfer_bytes` [n, 1], by nodes that are `active` [n, m], with links `nic` [n, m];
    the last one that works is number k - 1."""
    workers = int(np.nonzero(active.any(axis=0))[0].max()) + 1
    size = max(len(p.shares) for p in plants)

    def stacked(values: Iterable[Sequence[float]], blank: float) -> _Array:
        return np.array([[*of, *[blank] * (size - len(of))] for of in values], dtype=np.float64)[:, None, :]

    shares, rates = stacked((p.shares for p in plants), 0.0), stacked((p.rates for p in plants), 1.0)
    nodes = stacked((p.nodes for p in plants), -1.0)
    independent = np.array([p.independent for p in plants])[:, None, None]
    active, nic = active[:, :workers], nic[:, :workers]
    mine = nodes == np.arange(workers)[:, None]
    sizes = np.where(mine | ~active[:, :, None], 0.0, shares * transfer_bytes[:, :, None])
    nic = nic[:, :, None]
    ends = _alone(sizes, rates, nic, independent)
    alone = ends.max(axis=2)
    far = sizes / rates
    own = np.where(mine, sizes.sum(axis=2, keepdims=True) / nic, 0.0)
    service, direct = far, ends - far
    if (mine & active[:, :, None]).any():
        service = np.concatenate([far, own], axis=2)
        direct = np.concatenate([direct, np.where(mine, alone[:, :, None] - own, 0.0)], axis=2)
    return Visits(sizes, rates, nic, service, np.maximum(direct, 0.0), alone, independent)


def together(of: Visits) -> _Array:
    """Seconds until all workers have ended a transfer that all begin at once, [n, 1]."""
    flows = (of.sizes > 0).sum(axis=1, keepdims=True)
    busiest = of.service[:, :, : of.sizes.shape[2]].sum(axis=1).max(axis=1)
    fair = _alone(of.sizes, of.rates / np.maximum(flows, 1), of.nic, of.independent).max(axis=(1, 2))
    # Equal links share each server evenly; where links differ, what slow ones leave goes to the others.
    active = of.alone > 0
    least = np.where(active, of.nic[:, :, 0], np.inf).min(axis=1)
    alike = np.where(active, of.nic[:, :, 0], 0.0).max(axis=1) <= least
    seconds = np.maximum(of.alone.max(axis=1), busiest)
    found: _Array = np.where(alike, np.maximum(seconds, fair), seconds)[:, None]
    return found


def _alone(sizes: _Array, rates: _Array, nic: _Array, independent: NDArray[np.bool_]) -> _Array:
    """When each flow of a transfer ends that has the links for itself, [n, k, s]; 0 for none."""
    sends = sizes > 0
    whole = np.maximum(sizes.sum(axis=2, keepdims=True) / nic, (sizes / rates).max(axis=2, keepdims=True))
    left, now, ends = sizes, np.zeros_like(whole), np.zeros_like(sizes)
    for _ in range(sizes.shape[2]):
        going = left > 0
        rate = _shared(np.broadcast_to(rates, sizes.shape), nic, going)
        lasting = np.where(going, left / np.where(going, rate, 1.0), np.inf)
        step = lasting.min(axis=2, keepdims=True)
        step = np.where(np.isfinite(step), step, 0.0)
        done = going & (lasting <= step * (1 + 1e-9))
        now = now + step
        ends = np.where(done, now, ends)
        left = np.where(done, 0.0, np.maximum(left - rate * step, 0.0))
    return np.where(sends, np.where(independent, ends, whole), 0.0)


def _shared(limits: _Array, capacity: _Array, going: NDArray[np.bool_]) -> _Array:
    """Max-min fair rates of the flows that are `going` over a link of this `capacity` [n, k, 1], each with its own limit."""
    level = np.zeros_like(capacity)
    for j in range(limits.shape[2]):
        # As `network.waterfill`: the level that fills the link is the largest of its linear pieces.
        lower = going & (limits < limits[:, :, j : j + 1])
        rising = going.sum(axis=2, keepdims=True) - lower.sum(axis=2, keepdims=True)
        rest = capacity - np.where(lower, limits, 0.0).sum(axis=2, keepdims=True)
        level = np.maximum(level, np.where(rising > 0, rest / np.maximum(rising, 1), 0.0))
    return np.where(going, np.minimum(limits, level), 0.0)
