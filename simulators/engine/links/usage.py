"""What each transfer puts on the links, where every NIC is a resource of its own: matrices of NumPy, from which
`network.maxmin` and `network.fifo_of_nics` compute rates. Nothing here is compiled.

A row per transfer of k nodes: pulls first, 0 to k - 1, then pushes, k to 2k - 1, then snapshots, 2k to 3k - 1. A column per
resource, [r]. What a node moves to itself crosses no NIC.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.typing import NDArray

from simulators.engine.links.connections import Servers
from simulators.engine.links.network import Proportions

__all__ = ["of_nics", "of_queues", "proportions", "with_switch"]

_Floats = NDArray[np.float64]

_UNLIMITED = 1e30  # bytes/s; finite, because 0 * inf is nan


def of_nics(names: Sequence[str], servers: Servers, ring: Sequence[str], *, whole: bool) -> tuple[_Floats, _Floats]:
    """What a byte of each pull, push and snapshot puts on every NIC and server process, [3k, r], and what these carry, [r].

    Resources, k each: a node's NIC out, its NIC in, its server's pulls, its server's pushes. A server process without a
    limit of its own is no resource; with `whole`, all of them are, or none. `ring`: as in `connections.between`.
    """
    k = len(names)
    usage = np.zeros((3 * k, 4 * k))
    out, into, pulls, pushes = (np.arange(k) + part * k for part in range(4))
    for j, server in enumerate(names):
        pull, push = servers.pulled.get(server, 0.0), servers.pushed.get(server, 0.0)
        usage[:k, pulls[j]] += pull
        usage[k : 2 * k, pushes[j]] += push
        others = np.flatnonzero(np.arange(k) != j)
        usage[others, into[others]] += pull
        usage[others, out[j]] += pull
        usage[k + others, out[others]] += push
        usage[k + others, into[j]] += push
    for i, j in _backups(names, ring):
        usage[2 * k + i, [out[i], pulls[i]]] = 1.0
        if i != j:
            usage[2 * k + i, [into[j], pushes[j]]] = 1.0
    capacity = _capacity(names, servers)
    kept = np.isfinite(capacity)
    if whole:
        kept[2 * k :] = kept[2 * k :].any()
        capacity = np.minimum(capacity, _UNLIMITED)
    return usage[:, kept], capacity[kept]


def proportions(names: Sequence[str], servers: Servers, ring: Sequence[str]) -> tuple[Proportions, _Floats]:
    """`of_nics` without a matrix, of pulls, of pushes and, where there is a `ring`, of snapshots."""
    pulled, pushed = (np.array([part.get(n, 0.0) for n in names]) for part in (servers.pulled, servers.pushed))
    capacity = np.minimum(_capacity(names, servers), _UNLIMITED)
    if not ring:
        return Proportions(pulled, pushed), capacity
    backup = np.arange(len(names), dtype=np.int32)
    for i, j in _backups(names, ring):
        backup[i] = j
    return Proportions(pulled, pushed, backup), capacity


def of_queues(names: Sequence[str], servers: Servers) -> tuple[_Floats, _Floats]:
    """As `of_nics`, without snapshots, where each server has one queue for both ways: one resource, of which a byte takes
    the seconds that the server needs for it, by its NIC or its process. Resources, k each: NICs out, NICs in, servers."""
    k = len(names)
    usage = np.zeros((2 * k, 3 * k))
    for way, (share, limit) in enumerate(((servers.pulled, servers.out), (servers.pushed, servers.into))):
        rows = slice(way * k, (way + 1) * k)
        for j, server in enumerate(names):
            part, service, nic = share.get(server, 0.0), servers.service[server], limit[server]
            mine = np.arange(k) == j
            usage[rows, 2 * k + j] = np.where(mine, part / service, part / min(service, nic))
            others = np.flatnonzero(~mine)
            sender, receiver = (np.full(k, j), np.arange(k)) if way == 0 else (np.arange(k), np.full(k, j))
            usage[way * k + others, sender[others]] += part
            usage[way * k + others, k + receiver[others]] += part
    nics = [limit[n] for limit in (servers.out, servers.into) for n in names]
    return usage, np.array([*nics, *np.ones(k)])


def with_switch(
    names: Sequence[str], servers: Servers, usage: _Floats, capacity: _Floats, *, switch: float, both_ways: bool
) -> tuple[_Floats, _Floats]:
    """The `usage` of pulls and pushes, and the `capacity`, with a switch of so many bytes per second: one resource of each
    way or of both, for all but what a node moves to itself."""
    abroad = [[1.0 - share.get(n, 0.0) for n in names] for share in (servers.pulled, servers.pushed)]
    k, ways = len(names), 1 if both_ways else 2
    through = np.zeros((2 * k, ways))
    through[:k, 0], through[k:, -1] = abroad
    return np.hstack([usage, through]), np.concatenate([capacity, np.full(ways, switch)])


def _backups(names: Sequence[str], ring: Sequence[str]) -> Iterator[tuple[int, int]]:
    """Each server, and the one that it sends its snapshots to: the next. One that is alone sends them out of the cluster,
    and is its own next one here."""
    for server, backup in zip(ring, (*ring[1:], *ring[:1]), strict=True):
        yield names.index(server), names.index(backup)


def _capacity(names: Sequence[str], servers: Servers) -> _Floats:
    """What the resources of `of_nics` carry, [4k] bytes per second."""
    return np.array([way[n] for way in (servers.out, servers.into, servers.service, servers.service) for n in names])
