"""Transfers as independent connections: one flow per worker and server, which ends when its own bytes are sent.

A worker sends to each server, and receives of it, over a connection of its own. One that ends early, because its server has
a small part of the model or a fast link, frees both ends for the others; the transfer ends with the last. Where all servers
are alike, the connections of a transfer run at the same rates and end together, so that the engine moves them as one flow
(`simulators.engine.network`), which is exact then, and cheaper. `Connections` are there where servers are not alike, in jobs
in which their shares may differ.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from numpy.typing import NDArray

from simulators.engine import network

__all__ = ["Connections", "alike", "between", "divided", "first_come", "kept", "usage_with_copies", "with_copies"]

_LEAST = 4  # columns, so that small numbers of servers share a compiled program
_UNLIMITED = 1e30  # bytes/s; finite, because 0 * inf is nan
_ROUNDING = 1e-9  # relative; a smaller difference of shares is none


class Connections(NamedTuple):
    """What the connections between k nodes and s servers share. Units are bytes per second.

    s is rounded up to a power of two, so that few programs are compiled where the number of servers changes; columns that
    are too many have node -1 and shares of 0.
    """

    server: Array  # int32 [s]: the node that each server is
    backup: Array  # int32 [s]: the node that it sends its snapshots to; itself where it is the only server
    pull: Array  # [s]: its share of a pull
    push: Array  # [s]: its share of a push
    out: Array  # [k]: what each node's NIC can send ...
    into: Array  # [k]: ... and receive
    sends: Array  # [s]: what each server process can send ...
    receives: Array  # [s]: ... and receive


def alike(
    pulled: Mapping[str, float],
    pushed: Mapping[str, float],
    out: Mapping[str, float],
    into: Mapping[str, float],
    service: Mapping[str, float],
) -> bool:
    """Whether all servers, none of which is a worker, do the same: they have equal shares of pulls and of pushes, [0, 1],
    and equal links and processes, in bytes per second by node."""
    facts = [(pulled.get(n, 0.0), pushed.get(n, 0.0), min(out[n], service[n]), min(into[n], service[n])) for n in pushed]
    near = all(math.isclose(a, b, rel_tol=_ROUNDING) for fact in facts for a, b in zip(fact, facts[0], strict=True))
    return near and {n for n, share in pulled.items() if share} <= pushed.keys()


def between(
    names: Sequence[str],
    servers: Sequence[str],
    pulled: Mapping[str, float],
    pushed: Mapping[str, float],
    out: Mapping[str, float],
    into: Mapping[str, float],
    service: Mapping[str, float],
) -> Connections:
    """The connections of nodes `names` with `servers`, and with the nodes that parameters are still `pulled` from.

    `pulled` and `pushed` have the servers' shares, the others bytes per second, by node.
    """
    serving = [n for n in names if n in servers or pulled.get(n)]
    size = max(_LEAST, 1 << (len(serving) - 1).bit_length())
    backups = dict(zip(servers, (*servers[1:], *servers[:1]), strict=True))

    def column(values: Sequence[float], blank: float) -> Any:
        return np.array([*values, *[blank] * (size - len(serving))])

    limits = column([min(service[n], _UNLIMITED) for n in serving], _UNLIMITED)
    return Connections(
        server=column([names.index(n) for n in serving], -1).astype(np.int32),
        backup=column([names.index(backups.get(n, n)) for n in serving], -1).astype(np.int32),
        pull=column([pulled.get(n, 0.0) for n in serving], 0.0),
        push=column([pushed.get(n, 0.0) for n in serving], 0.0),
        out=np.array([out[n] for n in names]),  # type: ignore[arg-type]  # numpy, as all of `EngineInputs`
        into=np.array([into[n] for n in names]),  # type: ignore[arg-type]
        sends=limits,
        receives=limits,
    )


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


def first_come(net: Connections, nic: Array, pulls: Array, pushes: Array, arrival: Array) -> tuple[Array, Array]:
    """Rates [k, s] of pulls and of pushes where links serve transfers in the order of `arrival` [k]: the connections of
    each divide what earlier transfers leave of the servers' links, and its own limit `nic` [k]."""
    order = jnp.argsort(arrival)
    sends, receives = (jnp.minimum(a[net.server], b) for a, b in ((net.out, net.sends), (net.into, net.receives)))

    def serve(turn: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        found, free = carry
        worker = order[turn]
        mine = jnp.stack([pulls[worker], pushes[worker]])
        taken = jax.vmap(network.waterfill, in_axes=(0, None, 0))(free, nic[worker], mine)
        return found.at[:, worker].set(taken), jnp.maximum(free - taken, 0.0)

    start = (jnp.zeros((2, *pulls.shape)), jnp.stack([sends, receives]))
    (pull, push), _ = jax.lax.fori_loop(0, pulls.shape[0], serve, start)
    return pull, push
