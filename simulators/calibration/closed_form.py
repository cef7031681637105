"""The mean time of a cycle in steady state, in closed form. The fit evaluates it thousands of times, so it must be fast.

A cycle is that of `simulators.engine.timing`. Without a barrier the cluster is a closed queueing network: workers compute
independently and share three stations, the servers' outgoing bandwidth, their incoming bandwidth, and their queue of pushes
to apply. Mean values are the fixed point of Bard and Schweitzer, with one class per worker (Lazowska et al., Quantitative
System Performance, Section 7.4.2). A worker whose own NIC limits a transfer waits only for the shared part of it (Seidmann's
approximation). An apply has a constant time, so an arriving push waits for half of the apply in service; and so do transfers
that are served first come, first served. At a barrier all workers pull together, the slowest computes longest, and all push
together, or one after another as their pulls were served. The engine is the reference; it differs from
this by a few percent, and `simulators.calibration.fit` corrects for the difference.

Servers that are unlike or also work are stations of their own, each way (`Stations`). A transfer has a flow to each of
them, and ends with its last flow (fork and join). As all flows begin together, and the same other workers are in their way,
the last one is nearly always the same: the mean of the maximum is taken for the maximum of the means. A flow that has the
links for itself takes what its worker's own link leaves to it while the others go on. A node that works and serves has both
on its link: its own transfers visit its stations, too, and what it moves to itself visits none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import log_ndtr

from simulators.cluster.cluster import Discipline
from simulators.engine.preparation import CycleCosts

__all__ = ["Plant", "Spans", "Stations", "beside_computing", "spans"]

_Parts = tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]
_Pair = tuple[NDArray[np.float64], NDArray[np.float64]]

_ROUNDS = 60
_LONGER = 1.01  # times as long, for the part of a cycle that follows computing
_LEAST = 0.05  # part of a cycle that does not: computing is not known better than that
_GRID = np.linspace(-5.0, 9.0, 141)  # grid for the distribution of a maximum, in standard deviations of the logarithm


class Stations(NamedTuple):
    """The servers of a cluster."""

    shares: tuple[float, ...]  # of the model
    rates: tuple[float, ...]  # of each server, one direction, bytes per second
    nodes: tuple[int, ...]  # the place of each among the nodes
    independent: bool  # each flow ends by itself; otherwise all flows of a transfer move in proportion


class Plant(NamedTuple):
    """A cluster under one setting, as far as its mean times depend on it."""

    costs: CycleCosts
    jitter: float  # coefficient of variation of compute times
    sleep_seconds: float  # mean per mini-batch
    stations: Stations | None = None  # None: all servers are one station, as large as the busiest one
    discipline: Discipline = (
        "maxmin"  # as in `Cluster`; of servers that are stations of their own, shares are taken for even
    )
    one_way: bool = False  # pulls and pushes share what limits both, a switch
    threads: int = 1  # of each server, where one station stands for all of them


class Spans(NamedTuple):
    """Mean seconds of the parts of a cycle and of the whole cycle, [n]; means over pushes, so fast workers weigh more."""

    compute: NDArray[np.float64]
    pull: NDArray[np.float64]
    push: NDArray[np.float64]
    cycle: NDArray[np.float64]


def spans(plants: Sequence[Plant], barrier: Sequence[bool]) -> Spans:
    """The parts of a cycle under each of n `plants`; `barrier` says where all workers wait for each other."""
    found = np.empty((4, len(plants)))
    for held, form in ((False, _without_barrier), (True, _at_barrier)):
        for apart in (False, True):
            mine = [i for i, b in enumerate(barrier) if b == held and (plants[i].stations is not None) == apart]
            if mine:
                found[:, mine] = form([plants[i] for i in mine])
    return Spans(*found)


def beside_computing(plants: Sequence[Plant], barrier: Sequence[bool]) -> NDArray[np.float64]:
    """The part of each cycle that is decided by other times than those of computing, [n]: by how much less than computing
    the cycle grows where computing takes longer."""
    slow = [p._replace(costs=p.costs._replace(compute_seconds=_LONGER * p.costs.compute_seconds)) for p in plants]
    here, longer = spans([*plants, *slow], [*barrier, *barrier]).cycle.reshape(2, -1)
    part: NDArray[np.float64] = np.clip(1 - np.log(longer / here) / np.log(_LONGER), _LEAST, 1.0)
    return part


class _Visits(NamedTuple):
    """What transfers do at stations, padded with servers without a share; n plants, k workers, s servers."""

    sizes: NDArray[np.float64]  # bytes of each flow, [n, k, s]
    rates: NDArray[np.float64]  # bytes per second of the servers' links, [n, 1, s]
    nic: NDArray[np.float64]  # of the workers' links, [n, k, 1]
    # Seconds at the servers' links, [n, k, s]; where workers serve, at their own, too, [n, k, 2s]:
    service: NDArray[np.float64]
    direct: NDArray[np.float64]  # further seconds, without a queue, of the same shape
    alone: NDArray[np.float64]  # seconds of the transfer that has all links for itself, [n, k]
    independent: NDArray[np.bool_]  # [n, 1, 1]


class _Arrays(NamedTuple):
    """What both forms need of n plants with up to k workers."""

    active: NDArray[np.bool_]  # [n, k]
    compute: NDArray[np.float64]  # seconds, with sleeps, [n, k]
    overhead: NDArray[np.float64]  # seconds, [n, k]
    jitter: NDArray[np.float64]  # [n, 1]
    alone: _Pair  # seconds of a pull and of a push that have the links for themselves, [n, k]
    shared: _Pair  # seconds that they take of the servers' links, [n, 1]
    apply: NDArray[np.float64]  # seconds, [n, 1]
    turn: NDArray[np.float64]  # seconds until the next push can be applied: shorter where threads do so side by side, [n, 1]
    one_way: NDArray[np.bool_]  # pulls and pushes share a station, [n, 1]
    queues: NDArray[np.bool_]  # transfers are served first come, first served, [n, 1]
    serial: NDArray[np.bool_]  # in one queue with updates, [n, 1]
    ways: tuple[_Visits, _Visits] | None  # of pulls and of pushes, where servers are stations of their own


def _without_barrier(plants: Sequence[Plant]) -> NDArray[np.float64]:
    """The parts of a cycle of each plant, [4, n]."""
    of = _arrays(plants)
    think = of.compute + of.overhead
    if of.ways is not None:
        return np.stack(_network_of_stations(of.active, think, of.ways, of.apply))[:, :, 0]
    return np.stack(_network(of, think))[:, :, 0]


def _at_barrier(plants: Sequence[Plant]) -> NDArray[np.float64]:
    """The parts of a synchronous step of each plant, [4, n]."""
    of = _arrays(plants)
    workers = of.active.sum(axis=1, keepdims=True)
    if of.ways is None and of.queues.any():
        found = np.stack(_barrier_in_turn(of))[:, :, 0]
        if of.queues.all():
            return found
        rest = ~of.queues[:, 0]
        found[:, rest] = _at_barrier([p for p, left in zip(plants, rest, strict=True) if left])
        return found
    if of.ways is not None:
        pulled, pushed = of.ways
        alone: _Pair = (pulled.alone, pushed.alone)
        transfers = [_together(way) for way in of.ways]
    else:
        alone = of.alone
        transfers = [
            np.maximum(np.where(of.active, a, 0.0).max(axis=1, keepdims=True), workers * s)
            for a, s in zip(of.alone, of.shared, strict=True)
        ]
    return np.stack(_barrier(of, alone, transfers))[:, :, 0]


def _arrays(plants: Sequence[Plant]) -> _Arrays:
    sizes = {len(p.costs.active) for p in plants}
    size, alike = max(sizes), len(sizes) == 1

    def stacked(name: str) -> NDArray[np.float64]:
        if alike:
            return np.array([getattr(p.costs, name) for p in plants], dtype=np.float64)
        made = np.zeros((len(plants), size))
        for row, p in zip(made, plants, strict=True):
            values = getattr(p.costs, name)
            row[: len(values)] = values
        return made

    def each(name: str) -> NDArray[np.float64]:
        return np.array([[float(getattr(p.costs, name))] for p in plants])

    active = stacked("active") > 0
    sleeping, jitter = (np.array([[getattr(p, name)] for p in plants]) for name in ("sleep_seconds", "jitter"))
    compute = np.where(active, stacked("compute_seconds") + sleeping, 0.0)
    overhead = np.where(active, stacked("overhead_seconds"), 0.0)
    nic = np.where(active, stacked("nic"), 1.0)
    pull, push, apply = each("pull_bytes"), each("push_bytes"), each("apply_seconds")
    alone = (pull / nic, push / nic)
    shared = (pull / each("serve_out"), push / each("serve_in"))
    ways = None
    stations = [p.stations for p in plants if p.stations is not None]
    if stations:
        ways = (_visits(stations, active, nic, pull), _visits(stations, active, nic, push))
    queues, serial = (np.array([[p.discipline in names] for p in plants]) for names in (("fifo", "serial"), ("serial",)))
    one_way, threads = (np.array([[getattr(p, name)] for p in plants]) for name in ("one_way", "threads"))
    turn = apply / threads
    return _Arrays(active, compute, overhead, jitter, alone, shared, apply, turn, one_way, queues, serial, ways)


def _network(of: _Arrays, think: NDArray[np.float64]) -> _Parts:
    """Mean values of the closed network, each [n, 1]: compute, pull, push with apply, cycle."""
    # The stations, pulls, pushes and updates, are the first axis of arrays [3, n, ...]: most time is numpy's per call.
    active, one_way, queues, serial = of.active, of.one_way, of.queues, of.serial
    own = np.stack([*of.shared, of.turn])  # seconds in service, [3, n, 1]
    some_queues, some_one_way, some_serial = queues.any(), one_way.any(), serial.any()

    def others(of: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the other workers add up to, for each worker, of values that are 0 where none is."""
        rest: NDArray[np.float64] = np.add.reduce(of, axis=-1, keepdims=True) - of
        return rest

    direct = [np.maximum(a - s, 0.0) for a, s in zip(of.alone, of.shared, strict=True)]
    # As transfers that a worker's own link, or a thread, makes longer, an apply waits only for the shared part of others.
    aside = of.apply - of.turn
    apart = think + sum(direct)
    spent = np.broadcast_to(own, (3, *active.shape))
    for _ in range(_ROUNDS):
        rate = np.where(active, 1.0 / (apart + spent[0] + spent[1] + spent[2] + aside + 1e-300), 0.0)
        met = others(rate * spent)
        busy = others(rate * own) if some_queues else others(rate * of.turn)[None]
        served = np.minimum(busy, 1.0)
        waits = np.maximum(met[2] - served[-1] / 2, 0.0)
        ways = met[:2]
        if some_one_way:
            ways = np.where(one_way, ways[0] + ways[1], ways)
        if some_queues:
            taken = served[:2]
            if some_one_way:
                taken = np.where(one_way, np.minimum(taken[0] + taken[1], 1.0), taken)
            ways = np.where(queues, np.maximum(ways - taken / 2, 0.0), ways)
        told = np.concatenate([ways, waits[None]])
        found = own * (1.0 + told)
        if some_serial:
            whole = own[1] + own[2]
            ahead = own[0] * (met[0] - busy[0] / 2)
            ahead = np.maximum(ahead + whole * (others(rate * (spent[1] + spent[2])) - others(rate * whole) / 2), 0.0)
            in_turn = np.stack([own[0] + ahead, own[1] + ahead, np.broadcast_to(own[2], ahead.shape)])
            found = np.where(serial, in_turn, found)
        # Damped by one half; the undamped iteration oscillates.
        spent = 0.5 * spent + 0.5 * found
    return _over_pushes(active, think, spent[0] + direct[0], spent[1] + direct[1], spent[2] + aside)


def _over_pushes(
    active: NDArray[np.bool_],
    think: NDArray[np.float64],
    pull: NDArray[np.float64],
    push: NDArray[np.float64],
    queue: NDArray[np.float64],
) -> _Parts:
    """The parts of a cycle, each [n, 1], as means over pushes, from those of each worker, [n, k]."""
    rate = np.where(active, 1.0 / (think + pull + push + queue + 1e-300), 0.0)
    total = rate.sum(axis=1, keepdims=True)
    mean = [(rate * x).sum(axis=1, keepdims=True) / total for x in (think, pull, push + queue)]
    return mean[0], mean[1], mean[2], active.sum(axis=1, keepdims=True) / total


def _network_of_stations(
    active: NDArray[np.bool_], think: NDArray[np.float64], ways: tuple[_Visits, _Visits], apply: NDArray[np.float64]
) -> _Parts:
    """As `_network`, where each server's link is a station each way, and the slowest flow ends a transfer."""
    count = ways[0].sizes.shape[2]
    own = ways[0].service.shape[2] > count
    active = active[:, : ways[0].sizes.shape[1]]
    think = think[:, : active.shape[1]]

    def others(of: NDArray[np.float64]) -> NDArray[np.float64]:
        """What the other workers add up to, at each worker's stations."""
        rest: NDArray[np.float64] = of.sum(axis=1, keepdims=True) - of
        return rest

    spent = [way.service for way in ways]  # seconds at stations, queues included
    queue = np.broadcast_to(apply, active.shape)
    for _ in range(_ROUNDS):
        ends = [(way.direct + x).max(axis=2) for way, x in zip(ways, spent, strict=True)]
        rate = np.where(active, 1.0 / (think + sum(ends) + queue + 1e-300), 0.0)
        busy = np.minimum(others(rate * apply), 1.0)
        pulls, pushes = (rate[:, :, None] * x for x in spent)
        # Pulls leave servers, and pushes come to them ...
        leaving, coming = pulls[:, :, :count], pushes[:, :, :count]
        if own:  # ... but what a worker pulls to its own station comes there, and what it pushes leaves.
            leaving, coming = leaving + pushes[:, :, count:], coming + pulls[:, :, count:]
        leaving, coming = others(leaving), others(coming)
        met = [leaving, coming]
        if own:
            met = [np.concatenate(pair, axis=2) for pair in ((leaving, coming), (coming, leaving))]
        spent = [0.5 * old + 0.5 * way.service * (1.0 + q) for old, way, q in zip(spent, ways, met, strict=True)]
        queue = 0.5 * queue + 0.5 * apply * (1.0 + np.maximum(others(rate * queue) - busy / 2, 0.0))
    pull, push = ((way.direct + x).max(axis=2) for way, x in zip(ways, spent, strict=True))
    return _over_pushes(active, think, pull, push, queue)


def _barrier_in_turn(of: _Arrays) -> _Parts:
    """The parts of a synchronous step, each [n, 1], of plants whose servers serve first come, first served.

    The first to pull computes and pushes while others still pull.
    """
    workers = of.active.sum(axis=1, keepdims=True)
    pull, push = of.shared
    first, pushed = (
        np.maximum(np.where(of.active, a, 0.0).max(axis=1, keepdims=True), s)
        for a, s in zip(of.alone, of.shared, strict=True)
    )
    last = np.maximum(first, workers * pull)
    constant, slowest = of.overhead.max(axis=1, keepdims=True), _slowest(of.active, of.compute, of.jitter)
    mean = np.where(of.active, of.compute, 0.0).sum(axis=1, keepdims=True) / workers
    quickest = np.maximum(2 * mean - slowest, 0.0)
    # In one queue, pushes wait until all have pulled; in two, for those before them that came faster than they are served.
    one = of.serial | of.one_way
    each = np.where(of.serial, push + of.turn, np.maximum(push, of.turn))
    begun = np.where(one, np.maximum(last, first + quickest), first + quickest)
    end = np.maximum(np.maximum(last + mean, (first + last) / 2 + slowest), begun + (workers - 1) * each) + pushed + of.apply
    apart = np.where(one, 0.0, (last - first) / np.maximum(workers - 1, 1))
    waits = np.where(one, np.maximum(begun - (first + last) / 2 - mean, 0.0), 0.0)
    waits = waits + (workers - 1) / 2 * np.maximum(each - apart, 0.0)
    return mean + constant, (first + last) / 2, waits + pushed + of.apply, constant + end


def _barrier(of: _Arrays, alone: _Pair, transfers: Sequence[NDArray[np.float64]]) -> _Parts:
    """The parts of a synchronous step, each [n, 1]; `transfers` are those of all workers at once, `alone` of each."""
    active, compute, overhead, jitter, apply = of.active, of.compute, of.overhead, of.jitter, of.apply
    workers = active.sum(axis=1, keepdims=True)
    constant = overhead.max(axis=1, keepdims=True)
    slowest = _slowest(active, compute, jitter)
    mean = np.where(active, compute, 0.0).sum(axis=1, keepdims=True) / workers
    quickest = np.maximum(2 * mean - slowest, 0.0)
    # Fast workers push while others still compute. The step ends with the slowest worker's own push, with the queue of all
    # applies that starts with the fastest worker, or with the transfers of all pushes, whichever is latest.
    alone_push = np.where(active[:, : alone[1].shape[1]], alone[1], 0.0).max(axis=1, keepdims=True)
    applied = workers * of.turn + (apply - of.turn)
    ends = np.stack([slowest + alone_push + apply, quickest + alone_push + applied, quickest + transfers[1] + apply])
    end = ends.max(axis=0)
    return mean + constant, transfers[0], end - mean, transfers[0] + constant + end


def _slowest(active: NDArray[np.bool_], compute: NDArray[np.float64], jitter: NDArray[np.float64]) -> NDArray[np.float64]:
    """Mean of the maximum of lognormal times with these means and the coefficient of variation `jitter`, [n, 1]."""
    sigma = np.maximum(np.sqrt(np.log1p(jitter**2)), 1e-9)
    center = np.log(np.where(active, np.maximum(compute, 1e-300), 1e-300)) - sigma**2 / 2
    top = center.max(axis=1, keepdims=True)
    at = top + sigma * _GRID  # [n, g]
    # The maximum is below `at` if all workers are: the product of their distributions. Most workers are equal, in other
    # plants, too, and their distribution is computed once.
    each = np.stack([np.broadcast_to(x, active.shape)[active] for x in (top, sigma, center)], axis=1)
    (top_of, sigma_of, center_of), number = _distinct(each)
    logs = np.zeros((*active.shape, len(_GRID)))
    logs[active] = log_ndtr((top_of + sigma_of * _GRID - center_of) / sigma_of)[number]
    below = np.exp(logs.sum(axis=1))
    steps = np.diff(np.exp(at), axis=1)
    above = 1.0 - (below[:, 1:] + below[:, :-1]) / 2
    mean: NDArray[np.float64] = np.exp(at[:, :1]) + (steps * above).sum(axis=1, keepdims=True)
    return mean


def _distinct(rows: NDArray[np.float64]) -> tuple[list[NDArray[np.float64]], NDArray[np.intp]]:
    """The columns, each [u, 1], of the rows that differ, and which of these each row is."""
    found, number = np.unique(rows, axis=0, return_inverse=True)
    return [column[:, None] for column in found.T], number.reshape(-1)


def _visits(
    plants: Sequence[Stations], active: NDArray[np.bool_], nic: NDArray[np.float64], transfer_bytes: NDArray[np.float64]
) -> _Visits:
    """The visits of one way, pulls or pushes of `transfer_bytes` [n, 1], by nodes that are `active` [n, m], with links `nic`
    [n, m]; the last one that works is number k - 1."""
    workers = int(np.nonzero(active.any(axis=0))[0].max()) + 1
    size = max(len(p.shares) for p in plants)

    def stacked(values: Iterable[Sequence[float]], blank: float) -> NDArray[np.float64]:
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
    return _Visits(sizes, rates, nic, service, np.maximum(direct, 0.0), alone, independent)


def _together(of: _Visits) -> NDArray[np.float64]:
    """Seconds until all workers have ended a transfer that all begin at once, [n, 1]."""
    flows = (of.sizes > 0).sum(axis=1, keepdims=True)
    busiest = of.service[:, :, : of.sizes.shape[2]].sum(axis=1).max(axis=1)
    fair = _alone(of.sizes, of.rates / np.maximum(flows, 1), of.nic, of.independent).max(axis=(1, 2))
    # Equal links share each server evenly; where links differ, what slow ones leave goes to the others.
    active = of.alone > 0
    least = np.where(active, of.nic[:, :, 0], np.inf).min(axis=1)
    alike = np.where(active, of.nic[:, :, 0], 0.0).max(axis=1) <= least
    seconds = np.maximum(of.alone.max(axis=1), busiest)
    found: NDArray[np.float64] = np.where(alike, np.maximum(seconds, fair), seconds)[:, None]
    return found


def _alone(
    sizes: NDArray[np.float64], rates: NDArray[np.float64], nic: NDArray[np.float64], independent: NDArray[np.bool_]
) -> NDArray[np.float64]:
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


def _shared(limits: NDArray[np.float64], capacity: NDArray[np.float64], going: NDArray[np.bool_]) -> NDArray[np.float64]:
    """Max-min fair rates of the flows that are `going` over a link of this `capacity` [n, k, 1], each with its own limit."""
    level = np.zeros_like(capacity)
    for j in range(limits.shape[2]):
        # As `network.waterfill`: the level that fills the link is the largest of its linear pieces.
        lower = going & (limits < limits[:, :, j : j + 1])
        rising = going.sum(axis=2, keepdims=True) - lower.sum(axis=2, keepdims=True)
        rest = capacity - np.where(lower, limits, 0.0).sum(axis=2, keepdims=True)
        level = np.maximum(level, np.where(rising > 0, rest / np.maximum(rising, 1), 0.0))
    return np.where(going, np.minimum(limits, level), 0.0)
