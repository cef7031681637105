"""What an iteration of synchronous training takes without noise, and the schedule for which it takes least.

Computed from the simulator's constants, which no tuner sees: for reports, to tell how far from the best a tuner ends.

An iteration under all of the bespoke optimiser's assumptions: everybody pulls from time 0, computes once it has pulled,
and pushes; the iteration ends with the last push. Transfers share all NICs max-min fairly, so a machine with a wide NIC
computes while others still pull.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.cluster.cluster import Cluster
from simulators.cluster.profiles import NodeType, device_seconds
from simulators.engine.inputs import compute_times
from simulators.workloads.catalogue import Demand
from tuners.settings import Setting

__all__ = ["Placement", "balanced", "iteration_seconds", "optimum", "placements", "polished", "schedule", "types"]

_Floats = NDArray[np.float64]


# -------------------------------------------------------------------------------------------------------- one schedule


def iteration_seconds(cluster: Cluster, demand: Demand, setting: Setting) -> float:
    """Seconds of one iteration under a setting, without noise: event by event."""
    seconds = {w: t for w, (t, _) in compute_times(cluster.nodes, demand, setting).items()}
    names = [n for n, _ in cluster.nodes]
    compute = np.array([seconds.get(n, np.nan) for n in names])
    shares = dict(zip(setting.servers, setting.shares()[1], strict=True))
    return float(_iteration(compute, *_usage(cluster, shares), demand.model_bytes))


def _usage(cluster: Cluster, shares: dict[str, float]) -> tuple[_Floats, _Floats]:
    """What a byte of each node's pull (first k rows) and push puts on the NICs' outgoing (first k columns) and incoming
    sides, and how much these carry in a second."""
    k = len(cluster.nodes)
    share = np.array([shares.get(n, 0.0) for n, _ in cluster.nodes])
    served = np.tile(share, (k, 1)) * (1 - np.eye(k))  # by whom: what one serves itself crosses no NIC
    own = np.diag(served.sum(1))
    nics = np.array([kind.nic_bytes_per_second for _, kind in cluster.nodes])
    return np.block([[served, own], [own, served]]), np.concatenate([nics, nics])


def _iteration(compute: _Floats, usage: _Floats, capacity: _Floats, model_bytes: float) -> float:
    """Seconds until the last push has ended, from seconds of computing [k], nan for who does not work."""
    k, now = len(compute), 0.0
    works = ~np.isnan(compute)
    bytes_left = np.full(2 * k, model_bytes)
    flying = np.concatenate([works, np.zeros(k, bool)])
    due = np.full(k, np.inf)  # when those that compute will have computed
    while flying.any() or np.isfinite(due).any():
        rates = _maxmin(usage, capacity, flying)
        ends = np.where(flying, bytes_left / np.where(flying, rates, 1.0), np.inf)
        step = min(ends.min(), due.min() - now)
        now += step
        bytes_left = np.where(flying, bytes_left - rates * step, bytes_left)
        done = flying & (ends <= step * (1 + 1e-12))
        computed = due <= now
        flying = (flying & ~done) | np.concatenate([np.zeros(k, bool), computed])
        due = np.where(done[:k], now + compute, np.where(computed, np.inf, due))
    return now


def _maxmin(usage: _Floats, capacity: _Floats, flying: NDArray[np.bool_]) -> _Floats:
    """Max-min fair rates [f] by progressive filling, for `usage` [f, r]. One that uses nothing is as good as done."""
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


class Placement(NamedTuple):
    """How many machines of each type are idle, workers only, servers only, and both; and the iteration it allows."""

    counts: tuple[tuple[int, int, int, int], ...]
    seconds: float


def types(cluster: Cluster) -> list[tuple[NodeType, list[str]]]:
    """Machine types and the names of their machines."""
    found: dict[str, tuple[NodeType, list[str]]] = {}
    for name, kind in cluster.nodes:
        found.setdefault(kind.name, (kind, []))[1].append(name)
    return list(found.values())


def placements(cluster: Cluster) -> NDArray[np.int64]:
    """All ways to give roles to machines that differ in more than names, [n, types, 4]: at least one works, one serves."""
    parts = [
        [(total - w - s - b, w, s, b) for w, s, b in itertools.product(range(total + 1), repeat=3) if w + s + b <= total]
        for total in (len(names) for _, names in types(cluster))
    ]
    made: NDArray[np.int64] = np.array(list(itertools.product(*parts)))
    works, serves = made[..., [1, 3]].sum((1, 2)) > 0, made[..., [2, 3]].sum((1, 2)) > 0
    allowed: NDArray[np.int64] = made[works & serves]
    return allowed


def balanced(cluster: Cluster, demand: Demand, batch: int) -> tuple[NDArray[np.int64], _Floats]:
    """All placements, and the seconds of an iteration in which everybody ends at the same moment, loads not rounded.

    What is pushed so that all end together is a pull played backwards. So whoever pulls for P seconds has T - 2 P to
    compute, and T is where all that can be computed in that is the batch. Infinite where somebody would have no time.
    """
    kinds = [kind for kind, _ in types(cluster)]
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
    """Seconds of a pull in which all workers begin together, [n, types, (worker only, both)]."""
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
    """Max-min fair rates of pulls [n, types, 2] by progressive filling, all machines of a type and role alike."""
    rates, rising = np.zeros(weight.shape), flying.copy()
    alone = (counts[..., [2, 3]].sum((1, 2)) == 1)[:, None, None] & (both == 1)  # the only server pulls from itself
    rates, rising = np.where(rising & alone, 1e30, 0.0), rising & ~alone
    into = 1.0 - both * share[..., None]  # what of a byte that it pulls crosses a worker's own NIC, [n, 1, 2]
    for _ in range(2 * len(nics)):
        fixed = np.where(alone, 0.0, rates)
        used_in, grow_in = fixed * into, rising * into
        all_used, all_grow = (weight * fixed).sum((1, 2))[:, None], (weight * rising).sum((1, 2))[:, None]
        # A server that works serves everybody but itself.
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
        # Who is held up by a full server: everybody, but a machine by its own side only where others of its kind serve.
        several = counts[..., 3] > 1
        held = full_out.any((1, 2))[:, None, None] & np.ones_like(rising)
        only_own = full_out.sum((1, 2)) == 1
        own = np.stack([np.zeros_like(several), full_out[..., 1] & ~several], -1) & only_own[:, None, None]
        rising &= ~((room_in <= full) | (held & ~own))
    return rates


def _samples_in(kinds: Sequence[NodeType], demand: Demand, seconds: _Floats) -> _Floats:
    """Samples that a machine of each type (second axis) computes in so many seconds, with the best choice of its devices."""
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
    """The setting `like` under a placement, everybody with so many whole samples as can be done by the same moment.

    That is the first one, from `seconds` on, by which the batch can be done; what can be done beyond it is left out where
    most is done.
    """
    kinds = types(cluster)
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
    """The most whole samples per device that together are done in so many seconds."""

    def row(chosen: tuple[int, ...]) -> list[int]:
        left = np.array([seconds - (demand.aggregate_seconds if len(chosen) > 1 else 0.0)])
        samples = [_device_samples(kind, d, demand, left)[0] if d in chosen else 0.0 for d in range(len(kind.devices))]
        return [int(x + 1e-9) for x in samples]

    return max((row(chosen) for chosen in _device_sets(kind)), key=sum)


def optimum(cluster: Cluster, demand: Demand, batch: int, like: Setting, *, tried: int = 40, refined: int = 3) -> Setting:
    """The schedule of the least iteration: the `tried` best placements with loads in whole samples, the best few refined."""
    counts, seconds = balanced(cluster, demand, batch)
    order = [i for i in np.argsort(seconds, kind="stable")[:tried] if np.isfinite(seconds[i])]
    made = {schedule(cluster, demand, batch, counts[i], seconds[i], like) for i in order}
    ranked = sorted(made, key=lambda s: (iteration_seconds(cluster, demand, s), s.workers))
    return min((polished(cluster, demand, s) for s in ranked[:refined]), key=lambda found: found[1])[0]


def polished(cluster: Cluster, demand: Demand, setting: Setting) -> tuple[Setting, float]:
    """A setting with its loads moved between devices as long as that makes an iteration shorter, and its seconds.

    Rounding may have given the wrong device one sample too many; and to end together is not quite the best, for of pushes
    that meet at a server one that comes early is out of the way.
    """
    batch = sum(map(sum, setting.loads))
    least = max(1, batch // 4096)
    best, step = iteration_seconds(cluster, demand, setting), max(least, batch // 64)
    while step >= least:
        better = min(_neighbours(cluster, demand, setting, step), key=lambda found: found[1], default=(setting, best))
        if better[1] < best * (1 - 1e-6):
            setting, best = better
        else:
            step //= 2
    return setting, best


def _neighbours(cluster: Cluster, demand: Demand, setting: Setting, step: int) -> Iterator[tuple[Setting, float]]:
    """Settings with so many samples moved from one working device to another, and their seconds. Nobody stops working."""
    slots = [(i, d) for i, row in enumerate(setting.loads) for d, samples in enumerate(row) if samples]
    for (i, d), (j, e) in itertools.permutations(slots, 2):
        rows = [list(row) for row in setting.loads]
        rows[i][d], rows[j][e] = rows[i][d] - step, rows[j][e] + step
        if rows[i][d] >= 0 and any(rows[i]):
            moved = replace(setting, loads=tuple(map(tuple, rows)))
            yield moved, iteration_seconds(cluster, demand, moved)
