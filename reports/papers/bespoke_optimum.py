"""The seconds of an iteration of synchronous training without noise, and the schedule with the fewest.

Both are computed from the simulator's constants, which no tuner sees, to report how far from the optimum a tuner ends.

An iteration follows the bespoke optimiser's assumptions: every worker pulls from time 0, computes when it has pulled, and
pushes; the iteration ends with the last push. Transfers share all network interfaces (NICs) max-min fairly, so a machine
with a fast NIC computes while others still pull. `reports.papers.bespoke_bo` prints the results.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace

import numpy as np
from numpy.typing import NDArray

from simulators.cluster.cluster import Cluster
from simulators.cluster.profiles import NodeType, device_seconds
from simulators.engine.preparation import compute_times
from simulators.workloads.workload import Demand
from tuners.settings import Setting

__all__ = ["balanced", "iteration_seconds", "optimum", "placements", "push_ends", "schedule"]

_Floats = NDArray[np.float64]


# -------------------------------------------------------------------------------------------------------- one schedule


def iteration_seconds(cluster: Cluster, demand: Demand, setting: Setting) -> float:
    """Seconds of one iteration under a setting, without noise."""
    return float(np.nanmax(_push_ends(cluster, demand, setting)))


def _push_ends(cluster: Cluster, demand: Demand, setting: Setting) -> _Floats:
    """When each node's push ends in an iteration under a setting, without noise, seconds [k]; nan: not a worker."""
    seconds = {w: t for w, (t, _) in compute_times(cluster.nodes, demand, setting).items()}
    compute = np.array([seconds.get(n, np.nan) for n, _ in cluster.nodes])
    return push_ends(cluster, setting, demand.model_bytes, compute)


def _usage(cluster: Cluster, shares: dict[str, float]) -> tuple[_Floats, _Floats]:
    """The load of one byte of each node's pull (first k rows) and push (last k rows) on the outgoing (first k columns) and
    incoming sides of all NICs, [2 k, 2 k]; and the capacity of these sides in bytes per second, [2 k]."""
    k = len(cluster.nodes)
    share = np.array([shares.get(n, 0.0) for n, _ in cluster.nodes])
    served = np.tile(share, (k, 1)) * (1 - np.eye(k))  # a node's transfer with itself crosses no NIC
    own = np.diag(served.sum(1))
    nics = np.array([kind.nic_bytes_per_second for _, kind in cluster.nodes])
    return np.block([[served, own], [own, served]]), np.concatenate([nics, nics])


def push_ends(cluster: Cluster, setting: Setting, model_bytes: float, compute: _Floats) -> _Floats:
    """Seconds until each node's push ends, by events, from the compute seconds of each node, [k]; nan: not a worker."""
    usage, capacity = _usage(cluster, setting.model_by_server())
    k, now = len(compute), 0.0
    works = ~np.isnan(compute)
    bytes_left = np.full(2 * k, model_bytes)
    flying = np.concatenate([works, np.zeros(k, bool)])
    due = np.full(k, np.inf)  # when each worker that computes has finished
    ended = np.full(k, np.nan)
    while flying.any() or np.isfinite(due).any():
        rates = _maxmin(usage, capacity, flying)
        ends = np.where(flying, bytes_left / np.where(flying, rates, 1.0), np.inf)
        step = min(ends.min(), due.min() - now)
        now += step
        bytes_left = np.where(flying, bytes_left - rates * step, bytes_left)
        done = flying & (ends <= step * (1 + 1e-12))
        ended[done[k:]] = now
        computed = due <= now
        flying = (flying & ~done) | np.concatenate([np.zeros(k, bool), computed])
        due = np.where(done[:k], now + compute, np.where(computed, np.inf, due))
    return ended


def _maxmin(usage: _Floats, capacity: _Floats, flying: NDArray[np.bool_]) -> _Floats:
    """Max-min fair rates [f] by progressive filling, for `usage` [f, r]. A transfer that uses no NIC ends at once."""
    rates, rising, free = np.zeros(len(usage)), flying & usage.any(1), capacity.copy()
    while rising.any():
        demand = usage[rising].sum(0)
        room = np.where(demand > 1e-15, free / np.maximum(demand, 1e-15), np.inf)
        grow = room.min()
        rates[rising] += grow
        free -= grow * demand
        rising &= ~usage[:, room <= grow * (1 + 1e-12)].any(1)
    return np.where(flying & ~usage.any(1), 1e30, rates)


# ---------------------------------------------------------------------------------------------------------- placements


def _types(cluster: Cluster) -> list[tuple[NodeType, list[str]]]:
    """The machine types, with the names of their machines."""
    found: dict[str, tuple[NodeType, list[str]]] = {}
    for name, kind in cluster.nodes:
        found.setdefault(kind.name, (kind, []))[1].append(name)
    return list(found.values())


def placements(cluster: Cluster) -> NDArray[np.int64]:
    """All numbers of machines that are idle, worker, server and both, [n, types, 4], with a worker and a server at least."""
    parts = [
        [(total - w - s - b, w, s, b) for w, s, b in itertools.product(range(total + 1), repeat=3) if w + s + b <= total]
        for total in (len(names) for _, names in _types(cluster))
    ]
    made: NDArray[np.int64] = np.array(list(itertools.product(*parts)))
    works, serves = made[..., [1, 3]].sum((1, 2)) > 0, made[..., [2, 3]].sum((1, 2)) > 0
    allowed: NDArray[np.int64] = made[works & serves]
    return allowed


def balanced(cluster: Cluster, demand: Demand, batch: int) -> tuple[NDArray[np.int64], _Floats]:
    """All placements, and the seconds of an iteration in which all workers end at the same moment, loads not rounded.

    If all pushes end together, they take as long as the pulls, in reverse. So a worker that pulls for P seconds has T - 2 P
    to compute, and T follows from the batch by bisection. T is infinite if that leaves some worker no time to compute.
    """
    kinds = [kind for kind, _ in _types(cluster)]
    counts = placements(cluster)
    pulls = _pull_seconds(counts, np.array([k.nic_bytes_per_second for k in kinds]), demand.model_bytes)
    working = counts[..., [1, 3]]  # [n, types, (worker, both)]
    low, high = np.zeros(len(counts)), np.full(len(counts), 1e9)
    for _ in range(100):
        middle = (low + high) / 2
        enough = (working * _samples_in(kinds, demand, middle[:, None, None] - 2 * pulls)).sum((1, 2)) >= batch
        low, high = np.where(enough, low, middle), np.where(enough, middle, high)
    idle = (working > 0) & (_samples_in(kinds, demand, high[:, None, None] - 2 * pulls) <= 0)
    return counts, np.where(idle.any((1, 2)), np.inf, high)


def _pull_seconds(counts: NDArray[np.int64], nics: _Floats, model_bytes: float) -> _Floats:
    """Seconds of a pull that all workers begin together, [n, types, (pure worker, both)]."""
    working, serving = counts[..., [1, 3]].astype(float), counts[..., [2, 3]].sum((1, 2))
    share = 1.0 / serving[:, None]
    both = np.array([0.0, 1.0])
    left = np.where(working > 0, model_bytes, 0.0)
    ended = np.zeros(working.shape)
    now = np.zeros(len(counts))
    for _ in range(2 * len(nics)):
        flying = left > 0
        rates = _class_rates(np.where(flying, working, 0.0), flying, counts, nics, share, both)
        step = np.where(flying, left / np.where(flying, rates, 1.0), np.inf).min((1, 2))
        step = np.where(np.isfinite(step), step, 0.0)
        now += step
        left = np.where(left <= rates * step[:, None, None] * (1 + 1e-12), 0.0, left - rates * step[:, None, None])
        ended = np.where(flying & (left == 0), now[:, None, None], ended)
    return ended


def _class_rates(
    weight: _Floats, flying: NDArray[np.bool_], counts: NDArray[np.int64], nics: _Floats, share: _Floats, both: _Floats
) -> _Floats:
    """Max-min fair rates of pulls [n, types, 2] by progressive filling; machines of one type and role are equal."""
    rates, rising = np.zeros(weight.shape), flying.copy()
    alone = (counts[..., [2, 3]].sum((1, 2)) == 1)[:, None, None] & (both == 1)  # the only server pulls from itself
    rates, rising = np.where(rising & alone, 1e30, 0.0), rising & ~alone
    into = 1.0 - both * share[..., None]  # share of a pulled byte that crosses the worker's own NIC, [n, 1, 2]
    for _ in range(2 * len(nics)):
        fixed = np.where(alone, 0.0, rates)
        used_in, grow_in = fixed * into, rising * into
        all_used, all_grow = (weight * fixed).sum((1, 2))[:, None], (weight * rising).sum((1, 2))[:, None]
        # A machine that is both serves all workers but itself.
        used_out = np.stack([share * all_used + 0 * nics, share * (all_used - fixed[..., 1])], -1)
        grow_out = np.stack([share * all_grow + 0 * nics, share * (all_grow - rising[..., 1])], -1)
        serves = counts[..., [2, 3]] > 0
        room_in = np.where(rising, (nics[:, None] - used_in) / np.maximum(grow_in, 1e-15), np.inf)
        room_out = np.where(serves & (grow_out > 1e-12), (nics[:, None] - used_out) / np.maximum(grow_out, 1e-15), np.inf)
        grow = np.minimum(room_in.min((1, 2)), room_out.min((1, 2)))
        step = np.where(np.isfinite(grow), grow, 0.0)[:, None, None]
        rates = np.where(rising, rates + step, rates)
        full = grow[:, None, None] * (1 + 1e-12)
        full_out = room_out <= full
        # A full server limits all workers. If it is the only full one, it does not limit itself: its own pull skips its NIC.
        several = counts[..., 3] > 1
        held = full_out.any((1, 2))[:, None, None] & np.ones_like(rising)
        only_own = full_out.sum((1, 2)) == 1
        own = np.stack([np.zeros_like(several), full_out[..., 1] & ~several], -1) & only_own[:, None, None]
        rising &= ~((room_in <= full) | (held & ~own))
    return rates


def _samples_in(kinds: Sequence[NodeType], demand: Demand, seconds: _Floats) -> _Floats:
    """Samples that a machine of each type (second axis) computes in `seconds`, with the best choice of its devices."""
    found = np.zeros(seconds.shape)
    for t, kind in enumerate(kinds):
        for chosen in _device_sets(kind):
            left = seconds[:, t] - (demand.aggregate_seconds if len(chosen) > 1 else 0.0)
            samples = sum(_device_samples(kind, d, demand, left) for d in chosen)
            found[:, t] = np.maximum(found[:, t], samples)
    return found


def _device_sets(kind: NodeType) -> Iterator[tuple[int, ...]]:
    able = [d for d, device in enumerate(kind.devices) if device.speed > 0]
    for size in range(1, len(able) + 1):
        yield from itertools.combinations(able, size)


def _device_samples(kind: NodeType, device: int, demand: Demand, seconds: _Floats) -> _Floats:
    """The inverse of `simulators.cluster.profiles.device_seconds`, which is linear in the samples."""
    one, two = (device_seconds(kind.devices[device], demand, n, kind.cores) for n in (1, 2))
    return np.maximum((seconds - one) / (two - one) + 1, 0.0)


# ------------------------------------------------------------------------------------------------------------ schedules


def schedule(
    cluster: Cluster, demand: Demand, batch: int, counts: NDArray[np.int64], seconds: float, like: Setting
) -> Setting:
    """The setting `like` under a placement, every worker with the whole samples that it can compute by one moment.

    That moment is the first, not before `seconds`, at which the samples reach the batch. Surplus samples are taken from the
    devices with the most.
    """
    kinds = _types(cluster)
    pulls = _pull_seconds(counts[None], np.array([k.nic_bytes_per_second for k, _ in kinds]), demand.model_bytes)[0]
    names = {n: (kind, role) for kind, n, role in _roles(kinds, counts)}
    pull = {n: float(pulls[t, int(names[n][1] == 3)]) for t, (_, group) in enumerate(kinds) for n in group}

    def rows(by: float) -> dict[str, list[int]]:
        return {n: _row(names[n][0], demand, by - 2 * pull[n]) for n, _ in cluster.nodes if names[n][1] in (1, 3)}

    low, high = seconds, 2 * seconds
    while sum(map(sum, rows(high).values())) < batch:
        high *= 2
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if sum(map(sum, rows(middle).values())) >= batch else (middle, high)
    made = rows(high)
    for _ in range(sum(map(sum, made.values())) - batch):
        row = max(made.values(), key=max)
        row[row.index(max(row))] -= 1
    loads = {n: tuple(row) for n, row in made.items() if any(row)}
    servers = tuple(n for n, _ in cluster.nodes if names[n][1] in (2, 3))
    return replace(like, workers=tuple(loads), servers=servers, loads=tuple(loads.values()))


def _roles(kinds: list[tuple[NodeType, list[str]]], counts: NDArray[np.int64]) -> Iterator[tuple[NodeType, str, int]]:
    """Every machine's type, name and role: 0 idle, 1 worker, 2 server, 3 both."""
    for (kind, names), count in zip(kinds, counts, strict=True):
        for name, role in zip(names, np.repeat([0, 1, 2, 3], count), strict=True):
            yield kind, name, int(role)


def _row(kind: NodeType, demand: Demand, seconds: float) -> list[int]:
    """The most whole samples per device that a machine computes in `seconds`."""

    def row(chosen: tuple[int, ...]) -> list[int]:
        left = np.array([seconds - (demand.aggregate_seconds if len(chosen) > 1 else 0.0)])
        samples = [_device_samples(kind, d, demand, left)[0] if d in chosen else 0.0 for d in range(len(kind.devices))]
        return [int(x + 1e-9) for x in samples]

    return max((row(chosen) for chosen in _device_sets(kind)), key=sum)


_TRIED, _REFINED = 40, 3  # placements


def optimum(cluster: Cluster, demand: Demand, batch: int, like: Setting) -> Setting:
    """The schedule with the shortest iteration: of the 40 best placements with whole loads, three are refined."""
    counts, seconds = balanced(cluster, demand, batch)
    order = [i for i in np.argsort(seconds, kind="stable")[:_TRIED] if np.isfinite(seconds[i])]
    made = {schedule(cluster, demand, batch, counts[i], seconds[i], like) for i in order}
    ranked = sorted(made, key=lambda s: (iteration_seconds(cluster, demand, s), s.workers))
    return min((_refined(cluster, demand, s) for s in ranked[:_REFINED]), key=lambda found: found[1])[0]


def _refined(cluster: Cluster, demand: Demand, setting: Setting) -> tuple[Setting, float]:
    """The setting with loads moved between devices while that shortens an iteration; and its seconds.

    Rounding may have given the wrong device a sample too many. Also, ending together is not quite optimal: pushes that meet
    at a server slow each other down, and an early push avoids that. Where several machines end last, each of them has to
    lose samples before the iteration is shorter: so of equal iterations, that is better in which fewer end so late.
    """
    batch = sum(map(sum, setting.loads))
    least = max(1, batch // 4096)
    unit = 1e-6 * iteration_seconds(cluster, demand, setting)

    def lateness(under: Setting) -> tuple[float, ...]:
        """When pushes end, the last one first, in units that rounding does not change."""
        ends = _push_ends(cluster, demand, under)
        return tuple(np.sort(np.rint(ends[~np.isnan(ends)] / unit))[::-1])

    best, step = lateness(setting), max(least, batch // 64)
    while step >= least:
        better = min(
            ((lateness(s), s) for s in _neighbours(setting, step)), key=lambda found: found[0], default=(best, setting)
        )
        if better[0] < best:
            best, setting = better
        else:
            step //= 2
    return setting, iteration_seconds(cluster, demand, setting)


def _neighbours(setting: Setting, step: int) -> Iterator[Setting]:
    """Settings with `step` samples moved from one working device to another. Every worker keeps some."""
    slots = [(i, d) for i, row in enumerate(setting.loads) for d, samples in enumerate(row) if samples]
    for (i, d), (j, e) in itertools.permutations(slots, 2):
        rows = [list(row) for row in setting.loads]
        rows[i][d], rows[j][e] = rows[i][d] - step, rows[j][e] + step
        if rows[i][d] >= 0 and any(rows[i]):
            yield replace(setting, loads=tuple(map(tuple, rows)))
