"""Transfers as independent connections: a flow per worker and server, which ends when its own bytes are sent.

A worker sends to each server, and receives of it, over a connection of its own. One that ends early, because its server has
a small part of the model or a fast link, frees both ends for the others; the transfer ends with its last connection. Those
with servers that are alike run at equal rates and end together: they are one column here, with a count. Where all servers
are alike, and in a cluster without `independent_flows`, there are no `Connections`: the transfer is one flow
(`simulators.engine.links.network`).
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from simulators.engine.links import network

__all__ = [
    "Connections",
    "Servers",
    "between",
    "divided",
    "first_come",
    "kept",
    "queued_seconds",
    "usage_with_copies",
    "with_copies",
]

_LEAST = 2  # columns
_DIGITS = 9  # of shares: smaller differences are rounding
_UNLIMITED = 1e30  # bytes/s; finite, because 0 * inf is nan


class Connections(NamedTuple):
    """What the connections of k nodes with s kinds of servers share. Rates are bytes per second.

    s is rounded up to a power of two, so that few programs are compiled where it changes: the last kinds may have no server.
    """

    column: Array  # int32 [k]: the kind that each node is a server of; -1: none
    number: Array  # [s]: servers of each kind
    pull: Array  # [s]: the share of a pull that each of them has
    push: Array  # [s]: of a push
    out: Array  # [k]: what each node's NIC can send ...
    into: Array  # [k]: ... and receive
    sends: Array  # [s]: what each server can send, by its process and, where `server` is -1, its NIC ...
    receives: Array  # [s]: ... and receive
    server: Array  # int32 [s]: the node of a kind of one, whose NIC it shares with what else the node does; -1: none. [0]
    # where no kind has one
    backup: Array  # int32 [s]: the node that a server sends its snapshots to, itself where it is alone; [0] where none does


class Servers(NamedTuple):
    """What servers do and can do, by node; rates are bytes per second."""

    pulled: Mapping[str, float]  # share of a pull
    pushed: Mapping[str, float]  # share of a push
    out: Mapping[str, float]
    into: Mapping[str, float]
    service: Mapping[str, float]

    def kind(self, name: str) -> tuple[float, ...]:
        """What two servers have in common if they are alike."""
        shares = (round(part.get(name, 0.0), _DIGITS) for part in (self.pulled, self.pushed))
        return (*shares, *(min(way[name], self.service[name]) for way in (self.out, self.into)))


def between(
    names: Sequence[str],
    ring: Sequence[str],
    servers: Servers,
    *,
    shared: Collection[str],
    apart: bool,
    snapshots: bool,
) -> Any:
    """The connections of nodes `names` with `servers`; () where all of these are alike.

    `ring` has the servers in the order in which each sends its `snapshots` to the next. NICs of the `shared` nodes do more
    than to serve: these nodes are workers, too, or have a token bucket. `apart`: no two servers are of one kind.
    """
    # A server without a part of the model has no flows, but keeps the snapshots of another one.
    serving = [n for n in names if servers.pulled.get(n) or servers.pushed.get(n) or (snapshots and n in ring)]
    single = {*serving} if apart or snapshots else {*serving} & {*shared}
    keys = [(n,) if n in single else servers.kind(n) for n in serving]
    kinds = list(dict.fromkeys(keys))
    if len(serving) == 1 or (len({servers.kind(n) for n in serving}) == 1 and not {*serving} & {*shared}):
        return ()
    firsts = [serving[keys.index(kind)] for kind in kinds]
    size = max(_LEAST, 1 << (len(kinds) - 1).bit_length())

    def column(values: Sequence[float], blank: float = 0.0) -> Any:
        return np.array([*values, *[blank] * (size - len(kinds))], np.float64)

    with_nic = [n in shared or snapshots for n in firsts]
    limits = [
        column(
            [min(servers.service[n], _UNLIMITED if nic else way[n]) for n, nic in zip(firsts, with_nic, strict=True)], 1.0
        )
        for way in (servers.out, servers.into)
    ]
    nodes = [names.index(n) if nic else -1 for n, nic in zip(firsts, with_nic, strict=True)]
    nexts = dict(zip(ring, (*ring[1:], *ring[:1]), strict=True)) if snapshots else {}
    backups = [names.index(nexts.get(n, n)) for n in firsts] if snapshots else []
    made: dict[str, Any] = {
        "column": np.array([kinds.index(keys[serving.index(n)]) if n in serving else -1 for n in names], np.int32),
        "number": column([keys.count(kind) for kind in kinds]),
        "pull": column([servers.pulled.get(n, 0.0) for n in firsts]),
        "push": column([servers.pushed.get(n, 0.0) for n in firsts]),
        "out": np.array([servers.out[n] for n in names]),
        "into": np.array([servers.into[n] for n in names]),
        "sends": limits[0],
        "receives": limits[1],
        "server": column(nodes, -1).astype(np.int32) if any(with_nic) else np.zeros(0, np.int32),
        "backup": column(backups, -1).astype(np.int32) if snapshots else np.zeros(0, np.int32),
    }
    return Connections(**made)


def usage_with_copies(net: Connections) -> NDArray[np.float64]:
    """What each byte of all flows puts on every NIC and server process, [2ks + s, 2k + 2s]: of pulls and of pushes, worker
    by worker, and of the servers' snapshots."""
    k, s = len(net.out), len(net.pull)
    usage = np.zeros((2 * k * s + s, 2 * k + 2 * s))
    out, into, sends, receives = np.split(np.arange(usage.shape[1]), [k, 2 * k, 2 * k + s])
    columns = {int(node): j for j, node in enumerate(net.server) if node >= 0}
    for node, j in columns.items():
        for i in range(k):
            pull, push = i * s + j, (k + i) * s + j
            usage[pull, sends[j]] = usage[push, receives[j]] = 1.0
            if i != node:  # what a node moves to itself crosses no NIC
                usage[pull, [into[i], out[node]]] = usage[push, [out[i], into[node]]] = 1.0
        copy, backup = 2 * k * s + j, int(net.backup[j])
        usage[copy, [out[node], sends[j]]] = 1.0
        if backup != node:
            usage[copy, [into[backup], receives[columns[backup]]]] = 1.0
    return usage


def divided(
    net: Connections, remaining: NDArray[np.float64], pulling: NDArray[np.bool_], pushing: NDArray[np.bool_]
) -> NDArray[np.float64]:
    """Bytes that each worker has left by connection, [k, s], if `remaining` [k] are left of its pull or push, divided as the
    servers' shares are."""
    shares = np.where(pulling[:, None], net.pull, np.where(pushing[:, None], net.push, 0.0))
    found: NDArray[np.float64] = remaining[:, None] * shares
    return found


def kept(before: Any, after: Any) -> bool:
    """Whether transfers over connections `before` go on over those `after`: same servers, same shares; () is none."""
    return bool(before and after) and all(np.array_equal(a, b) for a, b in zip(before[:4], after[:4], strict=True))


def with_copies(
    net: Connections, out: Array, pulls: Array, pushes: Array, weights: Array, usage: Array, copied: Array
) -> tuple[Array, Array, Array]:
    """As `network.connected`, beside snapshots of the servers that are `copied`, bool [s], each with a weight of 1.

    `out` [k] is what NICs can send at present, `usage` that of `usage_with_copies`. Returns rates of pulls, of pushes,
    [k, s], and of snapshots, [s].
    """
    nodes, servers = pulls.shape
    each = jnp.broadcast_to(weights[:, :, None], (2, nodes, servers)).reshape(-1)
    flows = jnp.concatenate([pulls.reshape(-1), pushes.reshape(-1), copied])
    capacity = jnp.concatenate([out, net.into, net.sends, net.receives])
    found = network.maxmin(usage, capacity, flows, jnp.concatenate([each, jnp.ones(servers)]))
    pull, push = found[: 2 * nodes * servers].reshape(2, nodes, servers)
    return pull, push, found[2 * nodes * servers :]


def first_come(
    net: Connections, out: Array, pulls: Array, pushes: Array, arrival: Array, *, serial: bool
) -> tuple[Array, Array]:
    """Rates [k, s] of pulls and of pushes where links serve transfers in the order of `arrival` [k]: the connections of
    each divide what earlier transfers leave of the worker's own link, and of the servers' links and processes.

    Every kind is one server. `out` [k] is what NICs can send at present. `serial`: pulls and pushes divide a server's time.
    """
    coupled = net.server.shape[0] > 0
    nodes: Any = jnp.maximum(net.server, 0)

    def of_servers(nics: Array) -> Array:
        """What the NICs of nodes, [k], leave to servers, [s]."""
        return jnp.where(net.server >= 0, nics[nodes], _UNLIMITED) if coupled else jnp.asarray(_UNLIMITED)

    def one_way(
        worker: Array, flows: Array, own: Array, nics: Array, process: Array, abroad: Array, idle: Array
    ) -> tuple[Array, Array, Array, Array]:
        """Rates [s] of one worker's `flows`, and what they leave of workers' NICs, of servers' NICs, and of servers' time.

        A server's process moves so many bytes per second, `process` [s], and those of other nodes as fast as `abroad` [s].
        """
        mine = net.server == worker if coupled else jnp.zeros(flows.shape, bool)
        limits = jnp.minimum(idle * abroad, of_servers(nics))
        away = network.waterfill(limits, own[worker], flows & ~mine)
        home = jnp.where(flows & mine, idle * process, 0.0)  # what a node moves to itself crosses no NIC
        own = own.at[worker].add(-jnp.sum(away))
        if coupled:
            nics = nics.at[nodes].add(-jnp.where(net.server >= 0, away, 0.0))
        return away + home, own, nics, jnp.maximum(idle - away / abroad - home / process, 0.0)

    sends, receives = (
        jnp.minimum(process, of_servers(nics)) if serial else process
        for process, nics in ((net.sends, net.out), (net.receives, net.into))
    )

    def serve(_: Array, carry: tuple[Array, ...]) -> tuple[Array, ...]:
        left, pull, push, free_out, free_into, sending, receiving = carry
        worker = network.first_of(arrival, left)
        pulled, free_into, free_out, sending = one_way(worker, pulls[worker], free_into, free_out, net.sends, sends, sending)
        receiving = sending if serial else receiving
        pushed, free_out, free_into, receiving = one_way(
            worker, pushes[worker], free_out, free_into, net.receives, receives, receiving
        )
        sending = receiving if serial else sending
        free_out, free_into = jnp.maximum(free_out, 0.0), jnp.maximum(free_into, 0.0)
        pull, push, left = pull.at[worker].set(pulled), push.at[worker].set(pushed), left.at[worker].set(False)
        return left, pull, push, free_out, free_into, sending, receiving

    none, whole = jnp.zeros(pulls.shape), jnp.ones(net.sends.shape)
    start = (jnp.ones(arrival.shape, bool), none, none, out, net.into, whole, whole)
    _, pull, push, *_ = jax.lax.fori_loop(0, pulls.shape[0], serve, start)
    return pull, push


def queued_seconds(net: Connections, push_bytes: Array, sent: Array, left: Array, pushing: Array) -> Array:
    """How long the longest queue of pushes at a server takes, scalar: each server's link carries its own queue alone.

    Workers that are `pushing`, bool [k], have sent `sent` bytes [k] of their `push_bytes`, evenly over the connections that
    were not done, and have `left` [k, s] bytes for the servers' links to carry.
    """
    sizes = push_bytes * net.push
    # As in `network.waterfill`: what each connection has sent is the largest of the linear pieces, up to its size.
    lower = sizes[None, :] < sizes[:, None]
    used = jnp.sum(jnp.where(lower, net.number * sizes, 0.0), axis=1)
    rising = jnp.sum(net.number) - jnp.sum(jnp.where(lower, net.number, 0.0), axis=1)
    level = jnp.max((sent[:, None] - used) / rising, axis=1, keepdims=True)
    waiting = jnp.maximum(jnp.minimum(sizes, level) - (sizes - left), 0.0)
    queued = jnp.sum(jnp.where(pushing[:, None], waiting, 0.0), axis=0)
    links = jnp.where(net.server >= 0, net.into[net.server], _UNLIMITED) if len(net.server) else _UNLIMITED
    return jnp.max(queued / jnp.minimum(net.receives, links))
