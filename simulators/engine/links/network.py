"""How transfers share bandwidth: pure functions from the transfers in progress to their rates, in bytes per second.

A pull (or push) is a *coflow*: one flow to every server, as large as the server's share of the model; it ends with the
last of its flows. Every worker moves the same proportions, so where nodes are workers or servers but not both, all
servers together act as one resource of capacity min_j(capacity_j / share_j), and max-min fairness is water-filling over
it. Where roles overlap, a node's NIC carries its own transfers and its server's, and `maxmin` fills all NICs
progressively. Where servers are not alike, the flows of a transfer end one after another, each with rates of its own
(`connected`; `simulators.engine.links.connections` says when).

TCP is fair only in the long run: how much of a busy link a transfer of some dozen packets gets differs from one to the next.
With weights, capacity is shared in proportion to them (discriminatory processor sharing, Kleinrock 1967). Weights are drawn
for pulls; those of pushes are the rates of their senders, which fill the queue of a server's link in that proportion.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike

jax.config.update("jax_enable_x64", True)  # type: ignore[no-untyped-call]

__all__ = ["MANY_NICS", "Proportions", "connected", "fifo", "fifo_of_nics", "first_of", "maxmin", "uneven", "waterfill"]

MANY_NICS = 64  # nodes from which on NICs are shared by `Proportions`: a matrix takes as long up to about 40
_MANY = 40  # transfers from which on to compare all pairs of them takes longer than to go through them step by step
_UNLIMITED = 1e30  # bytes/s; finite, because 0 * inf is nan


def waterfill(limits: Array, capacity: Array, active: Array, levels: Array | None = None) -> Array:
    """Max-min fair rates [k] of transfers that share one resource, each with a limit of its own.

    Args:
        limits: what each transfer could use alone, [k] bytes/s.
        capacity: of the shared resource, scalar bytes/s; may be infinite.
        active: which transfers are in progress, bool [k]; the others get 0.
        levels: the values that occur in `limits`, [t]; few where machines are alike. None takes `limits` themselves.
    """
    # Used bandwidth is a concave, piecewise linear function of the water level, so the level that fills the capacity is
    # the largest of those that its linear pieces give: no sorting, no loop. Piece i: all below levels[i] are at their limit.
    levels = limits if levels is None else levels
    if levels.shape == (1,):
        # Equal machines: nobody is below the level of another. The sums below are zeros then, which XLA adds one by one.
        rising = jnp.sum(active, dtype=jnp.int32)
        level = jnp.where(rising > 0, capacity / jnp.maximum(rising, 1), 0.0)
        return jnp.where(active, jnp.minimum(limits, level), 0.0)
    lower = (limits[None, :] < levels[:, None]) & active[None, :]
    used = jnp.sum(jnp.where(lower, limits[None, :], 0.0), axis=1)
    rising = jnp.sum(active) - jnp.sum(lower, axis=1)
    level = jnp.max(jnp.where(rising > 0, (capacity - used) / jnp.maximum(rising, 1), 0.0))
    return jnp.where(active, jnp.minimum(limits, level), 0.0)


def uneven(limits: Array, capacity: Array, active: Array, weights: Array) -> Array:
    """As `waterfill`, but each transfer gets its weight, [k], times the water level, up to its limit."""
    if limits.shape[0] >= _MANY:
        return _uneven_of_many(limits, capacity, active, weights)
    full_at = limits / weights
    lower = (full_at[None, :] < full_at[:, None]) & active[None, :]
    used = jnp.sum(jnp.where(lower, limits[None, :], 0.0), axis=1)
    rising = jnp.sum(jnp.where(active[None, :] & ~lower, weights[None, :], 0.0), axis=1)
    level = jnp.max(jnp.where(rising > 0, (capacity - used) / jnp.where(rising > 0, rising, 1.0), 0.0))
    return jnp.where(active, jnp.minimum(limits, weights * level), 0.0)


def fifo(limits: Array, capacity: Array, active: Array, arrival: Array) -> Array:
    """Rates [k] when a shared resource serves in order of `arrival` [k]: each takes what earlier ones leave."""
    if limits.shape[0] >= _MANY:
        return _fifo_of_many(limits, capacity, active, arrival)
    older = (arrival[None, :] < arrival[:, None]) & active[None, :]
    left = jnp.maximum(capacity - jnp.sum(jnp.where(older, limits[None, :], 0.0), axis=1), 0.0)
    return jnp.where(active, jnp.minimum(limits, left), 0.0)


def _uneven_of_many(limits: Array, capacity: Array, active: Array, weights: Array) -> Array:
    """`uneven` without a comparison of all pairs, by Newton's method.

    The used bandwidth is a concave function of the water level. So every step ends below the level that fills the capacity,
    until a step brings nobody else to the limit.
    """
    full_at = limits / weights

    def rise(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        _, full, _ = carry
        used, rising = jnp.sum(jnp.where(full, limits, 0.0)), jnp.sum(jnp.where(active & ~full, weights, 0.0))
        level = (capacity - used) / rising
        more = active & (full | (full_at < level))
        return level, more, jnp.any(more & ~full) & jnp.any(active & ~more)

    start = (jnp.asarray(0.0, limits.dtype), jnp.zeros_like(active), jnp.any(active))
    level, _, _ = jax.lax.while_loop(lambda carry: carry[2], rise, start)
    return jnp.where(active, jnp.minimum(limits, weights * level), 0.0)


def _fifo_of_many(limits: Array, capacity: Array, active: Array, arrival: Array) -> Array:
    """`fifo` without a comparison of all pairs: one arrival after another, until nothing is left."""

    def serve(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rates, waiting, left = carry
        first = jnp.min(jnp.where(waiting, arrival, np.iinfo(arrival.dtype).max))
        served = waiting & (arrival == first)
        taken = jnp.sum(jnp.where(served, limits, 0.0))
        return jnp.where(served, jnp.minimum(limits, left), rates), waiting & ~served, jnp.maximum(left - taken, 0.0)

    start = (jnp.zeros_like(limits), active, jnp.asarray(capacity, limits.dtype))
    rates, _, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]) & (carry[2] > 0), serve, start)
    return rates


class Proportions(NamedTuple):
    """What each byte of a transfer puts on each NIC and server process, where all nodes move the same proportions: the
    matrix `usage` of `maxmin`, without its k^2 entries.

    Transfers: a pull of each node, its push, and, if `backup` is given, a snapshot of its server; [2k] or [3k]. Resources,
    k each: a node's NIC out, its NIC in, its server's pulls and pushes. What a node moves to itself crosses no NIC.
    """

    pull: Any  # [k]: the part of each pull that each node sends
    push: Any  # [k]: the part of each push that each node receives
    backup: Any = ()  # int32 [k]: the node that each one's snapshots go to, itself if they leave the cluster

    def on_resources(self, rates: Any) -> Any:
        """What transfers at these `rates` put on all resources, [4k]; of NumPy or JAX, but with snapshots of JAX."""
        pulls, pushes, *copies = rates.reshape(-1, len(self.pull))
        of_pull, of_push = self.pull.sum() - self.pull, self.push.sum() - self.push
        out = self.pull * (pulls.sum() - pulls) + pushes * of_push
        into = self.push * (pushes.sum() - pushes) + pulls * of_pull
        sent, received = self.pull * pulls.sum(), self.push * pushes.sum()
        if copies:
            copied = jnp.zeros_like(out).at[self.backup].add(jnp.where(self._leaves(), 0.0, copies[0]))
            out, into, sent, received = out + copies[0], into + copied, sent + copies[0], received + copied
        return (jnp if isinstance(out, Array) else np).concatenate([out, into, sent, received])

    def on_any(self, resources: Array) -> Array:
        """Which transfers use any of these `resources`, bool [4k]."""
        out, into, sent, received = resources.reshape(4, -1)
        serves, takes = self.pull > 0, self.push > 0
        of_pull, of_push = self.pull.sum() - self.pull > 0, self.push.sum() - self.push > 0
        sending, taking = serves & out, takes & into
        pull = (sending.sum() > sending) | (into & of_pull) | (sent & serves).any()
        push = (taking.sum() > taking) | (out & of_push) | (received & takes).any()
        if isinstance(self.backup, tuple):
            return jnp.concatenate([pull, push])
        copy = out | sent | (~self._leaves() & (into | received)[self.backup])
        return jnp.concatenate([pull, push, copy])

    def _leaves(self) -> Array:
        """The servers whose snapshots leave the cluster, bool [k]."""
        leaves: Array = jnp.arange(len(self.pull), dtype=self.backup.dtype) == self.backup
        return leaves


def maxmin(usage: Array | Proportions, capacity: Array, active: Array, weights: ArrayLike = 1.0) -> Array:
    """Max-min fair rates [f] of transfers over any resources, by progressive filling (Bertsekas and Gallager, 6.5.2).

    Args:
        usage: bytes that each byte of a transfer puts on each resource, [f, r], or these as `Proportions`.
        capacity: of each resource, [r] bytes/s.
        active: which transfers are in progress, bool [f]. One that uses no resource gets 1e30.
        weights: rates grow in proportion to these, [f].
    """
    if isinstance(usage, Proportions):
        on_resources, on_any = usage.on_resources, usage.on_any
    else:
        touches = usage > 0

        def on_resources(rates: Array) -> Array:
            return rates @ usage

        def on_any(resources: Array) -> Array:
            return jnp.any(touches & resources[None, :], axis=1)

    def fill(carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rates, rising, free = carry
        demand = on_resources(rising * weights)
        headroom = jnp.where(demand > 0, free / jnp.where(demand > 0, demand, 1.0), jnp.inf)
        grow = jnp.min(headroom)
        rates = jnp.where(rising, rates + grow * weights, rates)
        full = headroom <= grow  # at least one resource fills up in every round, so there are at most r rounds
        return rates, rising & ~on_any(full), jnp.maximum(free - grow * demand, 0.0)

    unlimited = active & ~on_any(jnp.ones(capacity.shape, bool))
    start = (jnp.zeros(active.shape, capacity.dtype), active & ~unlimited, capacity)
    rates, _, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[1]), fill, start)
    return jnp.where(unlimited, _UNLIMITED, rates)


def fifo_of_nics(usage: Array | Proportions, capacity: Array, active: Array, arrival: Array) -> Array:
    """Rates [f] where several resources serve in order of `arrival`: each transfer takes all that earlier ones leave to it.

    Args:
        usage: as in `maxmin`.
        capacity: of each resource, [r] bytes/s.
        active: which transfers are in progress, bool [f]. One that uses no resource gets 1e30.
        arrival: int32 [f]; of equals the first is served first.
    """
    on_resources = usage.on_resources if isinstance(usage, Proportions) else lambda rates: rates @ usage
    transfers = jnp.arange(active.shape[0], dtype=jnp.int32)

    def serve(_: Array, carry: tuple[Array, Array, Array]) -> tuple[Array, Array, Array]:
        rates, free, left = carry
        mine = transfers == first_of(arrival, left)
        each = on_resources(jnp.where(mine, 1.0, 0.0))
        least = jnp.min(jnp.where(each > 0, free / jnp.where(each > 0, each, 1.0), _UNLIMITED))
        return jnp.where(mine, least, rates), jnp.maximum(free - least * each, 0.0), left & ~mine

    start = (jnp.zeros(active.shape, capacity.dtype), capacity, active)
    rates: Array = jax.lax.fori_loop(0, jnp.sum(active), serve, start)[0]
    return rates


def first_of(arrival: Array, left: Array) -> Array:
    """Which of those that are `left`, bool [f], came first by `arrival`, int32 [f]; of equals the first.

    Transfers are served one by one by this and not by a sorted order: a program of one function (`one_function.py`) that
    sorts cannot be read from the cache of compiled programs, because XLA does not find its own function for sorting then.
    """
    return jnp.argmin(jnp.where(left, arrival, np.iinfo(arrival.dtype).max))


def connected(
    capacity: tuple[Array, Array, Array, Array], count: Array, server: Array, pulls: Array, pushes: Array, weights: Array
) -> tuple[Array, Array]:
    """Max-min fair rates [k, s] of flows between k nodes and each server of s kinds: of pulls, and of pushes.

    A resource that offers each of its flows no more than the flow's other resources do is their bottleneck: it divides what
    it has left at once. So there are fewer rounds than in `maxmin`, which waits for the one with the least to offer.

    Args:
        capacity: of NICs that send and that receive, [k], and of servers that do, [s]; bytes/s, finite.
        count: servers of each kind, [s]; equal flows of a node go to each.
        server: the node whose NIC a kind shares, int32 [s], -1 for none; [0] where no kind does. What a node moves to itself
            crosses no NIC.
        pulls: which flows pull, bool [k, s].
        pushes: which flows push, bool [k, s].
        weights: of each node's pull and push, [2, k]; rates grow in proportion to these.
    """
    coupled, weight = server.shape[0] > 0, weights[:, :, None]
    mine = jnp.arange(pulls.shape[0], dtype=jnp.int32)[:, None] == server

    def abroad(flows: Array, none: Any) -> Array:
        """The flows that cross NICs."""
        return jnp.where(mine, none, flows) if coupled else flows

    def of_servers(values: Array, none: Any) -> Array:
        """The `values` [k] of the nodes whose NICs kinds share."""
        return jnp.where(server >= 0, values[server], none) if coupled else jnp.asarray(none)

    def on_resources(pull: Array, push: Array, least: bool = False) -> tuple[Array, Array, Array, Array]:
        """The sum of the flows on every resource, or the least of them."""
        none = jnp.inf if least else 0.0
        of, times = (jnp.min, 1.0) if least else (jnp.sum, count)
        out, into = (of(abroad(flows, none) * times, axis=1) for flows in (push, pull))
        if coupled:
            both = jnp.minimum if least else jnp.add
            served = (of(jnp.where(mine, of(abroad(flows, none), axis=0), none), axis=1) for flows in (pull, push))
            out, into = (both(a, b) for a, b in zip((out, into), served, strict=True))
        return out, into, of(pull, axis=0), of(push, axis=0)

    def divide(carry: tuple[Array, Array, Array, Array]) -> tuple[Array, Array, Array, Array]:
        pull, push, pulling, pushing = carry
        demand = on_resources(jnp.where(pulling, weight[0], 0.0), jnp.where(pushing, weight[1], 0.0))
        level = [
            jnp.where(d > 0, jnp.maximum(c - used, 0.0) / jnp.where(d > 0, d, 1.0), jnp.inf)
            for c, used, d in zip(capacity, on_resources(pull, push), demand, strict=True)
        ]
        out, into, sends, receives = level
        pulled = jnp.minimum(abroad(jnp.minimum(into[:, None], of_servers(out, jnp.inf)), jnp.inf), sends)
        pushed = jnp.minimum(abroad(jnp.minimum(out[:, None], of_servers(into, jnp.inf)), jnp.inf), receives)
        least = on_resources(jnp.where(pulling, pulled, jnp.inf), jnp.where(pushing, pushed, jnp.inf), least=True)
        out, into, sends, receives = (offered <= low for offered, low in zip(level, least, strict=True))
        ends = pulling & (abroad(into[:, None] | of_servers(out, False), False) | sends)
        stops = pushing & (abroad(out[:, None] | of_servers(into, False), False) | receives)
        pull, push = jnp.where(ends, weight[0] * pulled, pull), jnp.where(stops, weight[1] * pushed, push)
        return pull, push, pulling & ~ends, pushing & ~stops

    none = jnp.zeros(pulls.shape)
    start = (none, none, pulls, pushes)
    pull, push, _, _ = jax.lax.while_loop(lambda carry: jnp.any(carry[2] | carry[3]), divide, start)
    return pull, push
