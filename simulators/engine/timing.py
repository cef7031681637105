"""Time in the data plane: the phase of every worker's cycle, and the events that end a phase.

A cycle is WAIT, PULL, COMPUTE, PUSH, APPLY. Transfers share the network (`simulators.engine.links.network`), computing and
applying take their time, and a worker waits until the synchronisation policy releases it. Where requests queue, a pull
begins with a REQUEST that waits behind the pushes in the servers' links. All arrays are small, with one entry per node, [k].
This is the one place where simulated time advances: `to_next_push`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from simulators.engine.indices import first_least, first_of
from simulators.engine.inputs import EngineInputs
from simulators.engine.links import connections, network

__all__ = [
    "APPLY",
    "COMPUTE",
    "PULL",
    "PUSH",
    "REQUEST",
    "WAIT",
    "Flight",
    "all_waiting",
    "begin_cycles",
    "catch_up",
    "mini_batch_seconds",
    "redivided",
    "refilled",
    "shifted",
    "spans",
    "to_next_push",
    "with_parts",
    "with_snapshot",
]

WAIT, PULL, COMPUTE, PUSH, APPLY, REQUEST = range(6)
_QUEUES = ("fifo", "serial")  # disciplines that serve in the order of arrival
_ROUNDING = 1e-9  # relative
_SHARES = 0x9D2C5680F1A3B7E5  # key of the noise in bandwidth shares, which must differ from that of compute times


class Flight(NamedTuple):
    """Where every worker is in its cycle ("in flight")."""

    phase: Array  # int32 [k]: WAIT, PULL, COMPUTE, PUSH, APPLY or REQUEST
    remaining: Array  # [k] seconds, or bytes while transferring
    since: Array  # [5, k]: when each worker last entered each phase; a pull's request belongs to the pull
    waited: Array  # [k] seconds that the policy held it back before this cycle
    drawn: Array  # [k] seconds of compute drawn for this cycle
    arrival: Array  # int32 [k]: order in which transfers began
    arrivals: Array  # int32 scalar: how many transfers began
    server_free_seconds: Array  # scalar: when the apply queue will be empty; [t] of each thread, where servers have several
    tokens: Array  # [k] in each node's bucket; [0] where no node has one
    late_bytes: Array  # [k] that each node has sent so far while its bucket was empty; [0] as above
    copying: Any = ()  # [k] bytes that each server has yet to send of its snapshots; () where none is taken
    uncopied: Any = ()  # int32 scalar: pushes since the last snapshot; () as above
    parts: Any = ()  # [k, s] of `remaining` bytes, by connection; () where the flows of a transfer move as one
    lots: Any = ()  # [k] weight of each worker's pull, drawn as it begins; () where bandwidth is not shared unevenly


def all_waiting(
    nodes: int,
    tokens: Array,
    now: float = 0.0,
    *,
    uneven: bool = False,
    snapshots: bool = False,
    net: Any = (),
    threads: int = 1,
) -> Flight:
    """No worker has begun anything, and no server takes a snapshot; all wait since `now`. `uneven`: bandwidth is shared so;
    `net`: the job's connections, () for none; `threads` of each server."""
    zeros: Any = np.zeros(nodes)  # of NumPy, because JAX would compile each outside of a program
    none: Any = np.zeros(nodes, np.int32)
    since: Any = np.full((5, nodes), now, np.float64)
    return Flight(
        phase=none,
        remaining=zeros,
        since=since,
        waited=zeros,
        drawn=zeros,
        arrival=none,
        arrivals=cast(Any, np.int32(0)),
        server_free_seconds=cast(Any, np.float64(now) if threads == 1 else np.full(threads, now, np.float64)),
        tokens=tokens,
        late_bytes=cast(Any, np.zeros(len(tokens))),
        copying=zeros if snapshots else (),
        uncopied=np.int32(0) if snapshots else (),
        parts=np.zeros((nodes, len(net.pull))) if net else (),
        lots=zeros if uneven else (),
    )


def redivided(before: EngineInputs, after: EngineInputs, flight: Flight) -> Flight:
    """The flight as the inputs change from `before` to `after`: where servers or their shares are others, what is left of
    each transfer is divided as the new shares are."""
    if not (before.connections or after.connections) or connections.kept(before.connections, after.connections):
        return flight
    everybody = np.ones(len(np.asarray(flight.phase)), bool)
    return flight._replace(parts=()) if not after.connections else with_parts(after, flight, everybody, None)


def with_parts(inputs: EngineInputs, flight: Flight, workers: NDArray[np.bool_], parts: Any) -> Flight:
    """The flight with what `workers` [k] have left of their transfers divided among connections; others have `parts` [k, s]
    left (None: no others)."""
    phase = np.asarray(flight.phase)
    found = connections.divided(inputs.connections, np.asarray(flight.remaining), phase == PULL, phase == PUSH)
    return flight._replace(parts=found if parts is None else np.where(workers[:, None], found, np.asarray(parts)))


class _Turn(NamedTuple):
    seconds: Array
    flight: Flight
    worker: Array  # int32: worker of the last event
    pushed: Array  # bool: that event completed a push
    halted: Array  # bool: the next event is after the limit, or there is none


def to_next_push(
    inputs: EngineInputs, seconds: Array, flight: Flight, until_seconds: Array, *, discipline: str, overlapping: bool
) -> tuple[Array, Flight, Array, Array]:
    """Events up to and including the next completed push, none later than `until_seconds`.

    A bucket that runs empty is an event, too, and so is the end of a server's snapshot. Both belong to no worker, but rates
    change with them.

    Returns (seconds of the last event, flight after it, the worker that pushed, whether there was a push).
    """
    rates_now = partial(_rates, inputs, discipline=discipline, overlapping=overlapping)
    limited, copies = inputs.bucket_bytes.shape[0] > 0, bool(inputs.snapshots)

    def event(turn: _Turn) -> _Turn:
        seconds, flight = turn.seconds, turn.flight
        rates, drains, sending, flows = rates_now(flight)
        # The division comes last, so that XLA compiles it to vector instructions, with what is before it.
        waits, rests = flight.phase == WAIT, flight.remaining > 0
        todo = jnp.where(waits, jnp.inf, jnp.where(rests, flight.remaining, 0.0))
        left = todo / jnp.where(rests & ~waits, rates, 1.0)
        if inputs.connections:
            # The next event of a transfer is the end of a connection, because that changes rates.
            moves = _transferring(flight)
            last = jnp.where(flight.parts > 0, flight.parts / flows, jnp.inf)
            some = jnp.where(jnp.any(flight.parts > 0, axis=1), jnp.min(last, axis=1), 0.0)
            left = jnp.where(moves, some, left)
        first, elapsed = first_least(left)  # of equals the first: this is how ties are broken
        worker = first.astype(jnp.int32)
        if limited:
            lasting = jnp.where((flight.tokens > 0) & (drains > 0), flight.tokens / drains, jnp.inf)
            emptied = jnp.min(lasting) < elapsed
            elapsed = jnp.minimum(jnp.min(lasting), elapsed)
        if copies:
            copied = jnp.where(flight.copying > 0, flight.copying / jnp.where(flight.copying > 0, sending, 1.0), jnp.inf)
            sent = jnp.min(copied) < elapsed
            elapsed = jnp.minimum(jnp.min(copied), elapsed)
        now = seconds + elapsed
        due = (now <= until_seconds) & jnp.isfinite(now)  # if all wait, `now` is infinite
        # What ends at the same moment gets exactly 0 left. Otherwise a rest of rounding would become an event of its own,
        # and workers in step with each other would drift apart from cycle to cycle.
        remaining = jnp.where(seconds + left <= now, 0.0, jnp.maximum(flight.remaining - rates * elapsed, 0.0))
        # An event after the limit is not carried out at all, not even half: the next call finds the same state, so that a
        # run gives the same bytes however it is cut into windows. Each array is selected where it changes, because a
        # selection of the whole flight would copy all of it at every event.
        ends = due
        if inputs.connections:
            parts = jnp.where(seconds + last <= now, 0.0, jnp.maximum(flight.parts - flows * elapsed, 0.0))
            remaining = jnp.where(moves, parts @ inputs.connections.number, remaining)
            ends = due & ~(moves[worker] & (remaining[worker] > 0))
            flight = flight._replace(parts=jnp.where(due, parts, flight.parts))
        moved = flight._replace(remaining=jnp.where(due, remaining, flight.remaining))
        if limited:
            kept = jnp.where(seconds + lasting <= now, 0.0, _filled(inputs, flight.tokens, drains, elapsed))
            late = flight.late_bytes + _late_bytes(inputs, flight.tokens, drains, elapsed)
            moved = moved._replace(
                tokens=jnp.where(due, kept, flight.tokens), late_bytes=jnp.where(due, late, flight.late_bytes)
            )
            ends = ends & ~emptied  # no worker's phase ends when a bucket empties; the next turn computes rates anew
        if copies:
            rest = jnp.where(seconds + copied <= now, 0.0, jnp.maximum(flight.copying - sending * elapsed, 0.0))
            moved = moved._replace(copying=jnp.where(due, rest, flight.copying))
            ends = ends & ~sent
        flight, pushed = _next_phase(inputs, moved, worker, now, ends)
        return _Turn(jnp.where(due, now, seconds), flight, worker, pushed, ~due)

    no = jnp.asarray(False)
    turn = _Turn(seconds, flight, jnp.asarray(0, jnp.int32), no, no)
    turn = jax.lax.while_loop(lambda t: ~(t.pushed | t.halted), event, turn)
    return turn.seconds, turn.flight, turn.worker, turn.pushed


def catch_up(
    inputs: EngineInputs, seconds: Array, flight: Flight, now: Array, *, discipline: str, overlapping: bool
) -> Flight:
    """Progress of all workers from the last event (at `seconds`) to `now`, with no event between: before inputs change."""
    rates, drains, sending, flows = _rates(inputs, flight, discipline=discipline, overlapping=overlapping)
    remaining = jnp.maximum(flight.remaining - rates * (now - seconds), 0.0)
    if inputs.connections:
        parts = jnp.maximum(flight.parts - flows * (now - seconds), 0.0)
        remaining = jnp.where(_transferring(flight), parts @ inputs.connections.number, remaining)
        flight = flight._replace(parts=parts)
    if inputs.snapshots:
        flight = flight._replace(copying=jnp.maximum(flight.copying - sending * (now - seconds), 0.0))
    if not len(inputs.bucket_bytes):
        return flight._replace(remaining=remaining)
    late = flight.late_bytes + _late_bytes(inputs, flight.tokens, drains, now - seconds)
    return flight._replace(
        remaining=remaining, tokens=_filled(inputs, flight.tokens, drains, now - seconds), late_bytes=late
    )


def shifted(flight: Flight, seconds: float) -> Flight:
    """The same flight, `seconds` later."""
    since, free = np.asarray(flight.since) + seconds, np.asarray(flight.server_free_seconds) + seconds
    return flight._replace(since=cast(Any, since), server_free_seconds=cast(Any, free))


def refilled(inputs: EngineInputs, tokens: Array, seconds: ArrayLike) -> Array:
    """What buckets hold, [k], after `seconds` in which no node sends."""
    if not len(inputs.bucket_bytes):
        return tokens
    # A bucket without end is always full and gains nothing; its infinite refill times 0 seconds would be nan.
    gained: Any = np.where(np.isinf(inputs.bucket_refill), 0.0, inputs.bucket_refill)
    return _filled(inputs, tokens, -gained, seconds)


def _late_bytes(inputs: EngineInputs, tokens: Array, drains: Array, seconds: ArrayLike) -> Array:
    """What nodes whose bucket is empty send for workers in `seconds`, [k]; 0 for the others."""
    empty = tokens <= 0
    sent = jnp.where(empty, drains + inputs.bucket_refill - inputs.bucket_taken, 0.0)
    return jnp.where(empty, jnp.maximum(sent, 0.0) * seconds, 0.0)


def _filled(inputs: EngineInputs, tokens: Array, drains: Array | NDArray[np.float64], seconds: ArrayLike) -> Array:
    # A full bucket that does not drain stays exactly full: an infinite one has infinite refill, and inf - inf is nan.
    full = tokens >= inputs.bucket_bytes
    change = jnp.where(full & (drains <= 0), 0.0, drains * seconds)
    return jnp.clip(tokens - change, 0.0, inputs.bucket_bytes)


def _transferring(flight: Flight) -> Array:
    """Workers that pull or push, bool [k]."""
    return (flight.phase == PULL) | (flight.phase == PUSH)


def _rates(inputs: EngineInputs, flight: Flight, *, discipline: str, overlapping: bool) -> tuple[Array, Array, Any, Any]:
    """Progress per second of every worker's present phase, [k], 0 while waiting; tokens that every bucket loses, [k]; what
    every server sends of its snapshots, [k], () where none is taken; and of the phase by connection, [k, s], () without.

    Bytes per second for a transfer, seconds per second for the rest.
    """
    pulling, pushing = flight.phase == PULL, flight.phase == PUSH
    threads = flight.server_free_seconds.size
    if discipline == "serial" and threads == 1:  # servers send and receive nothing while they apply a push
        pulling, pushing = (way & ~jnp.any(flight.phase == APPLY) for way in (pulling, pushing))
    nodes, drains = pulling.shape[0], inputs.bucket_refill
    sending: Any = ()
    flows: Any = ()
    weights = _weights(inputs, flight) if discipline == "uneven" else jnp.ones((2, nodes))
    if inputs.connections:
        pull, push, sending, drains, flows = _connection_rates(inputs, flight, pulling, pushing, weights, discipline)
    elif overlapping:
        capacity = inputs.capacity
        if len(inputs.bucket_bytes):
            left = jnp.maximum(inputs.bucket_refill - inputs.bucket_taken, 1.0)
            sending = jnp.where(flight.tokens > 0, capacity[:nodes], jnp.minimum(capacity[:nodes], left))
            capacity = capacity.at[:nodes].set(sending)
        usage, moving, each = inputs.usage, jnp.concatenate([pulling, pushing]), weights.reshape(-1)
        proportions = isinstance(usage, network.Proportions)  # these have snapshots, too
        if inputs.snapshots:
            usage = usage if proportions else jnp.concatenate([usage, inputs.snapshots.usage])
            moving = jnp.concatenate([moving, flight.copying > 0])
            each = jnp.concatenate([each, inputs.snapshots.weights])
        if discipline in _QUEUES:
            both = network.fifo_of_nics(usage, capacity, moving, jnp.tile(flight.arrival, 2))
        else:
            both = network.maxmin(usage, capacity, moving, each)
        pull, push = both[:nodes], both[nodes : 2 * nodes]
        if inputs.snapshots:
            sending = both[2 * nodes :]
        if len(inputs.bucket_bytes):
            drains = _drains(inputs, usage.on_resources(both)[:nodes] if proportions else both @ usage[:, :nodes])
    elif discipline == "serial":
        # Transfers of both ways divide the servers' time; of several threads, each that applies a push does nothing else.
        rate = jnp.where(pulling, inputs.serve_out, inputs.serve_in)
        idle = jnp.ones(()) if threads == 1 else jnp.maximum(1.0 - jnp.sum(flight.phase == APPLY) / threads, 0.0)
        either = rate * network.fifo(inputs.nic / rate, idle, pulling | pushing, flight.arrival)
        pull, push = (jnp.where(way, either, 0.0) for way in (pulling, pushing))
    else:
        both, capacity = jnp.stack([pulling, pushing]), jnp.stack([inputs.serve_out, inputs.serve_in])
        served: dict[str, Callable[..., Array]] = {
            "fifo": lambda nic, c, on, _: network.fifo(nic, c, on, arrival=flight.arrival),
            "uneven": network.uneven,
            "maxmin": lambda nic, c, on, _: network.waterfill(nic, c, on, levels=inputs.nic_levels),
        }
        pull, push = jax.vmap(served[discipline], in_axes=(None, 0, 0, 0))(inputs.nic, capacity, both, weights)
    computing = jnp.where(flight.phase == COMPUTE, 1.0 / inputs.slowdown, 0.0)
    timed = flight.phase == APPLY
    if len(inputs.control_queue):
        timed = timed | (flight.phase == REQUEST)
    return pull + push + computing + timed, drains, sending, flows


def _drains(inputs: EngineInputs, sent: Array) -> Array:
    """Tokens that every bucket loses per second, [k], where nodes send `sent` [k] for workers."""
    drains = sent + inputs.bucket_taken - inputs.bucket_refill
    # A node that sends as fast as its bucket is refilled neither gains nor loses. Rounding would make it "run empty" again
    # and again: events without end at one instant.
    return jnp.where(jnp.abs(drains) <= _ROUNDING * inputs.bucket_refill, 0.0, drains)


def _connection_rates(
    inputs: EngineInputs, flight: Flight, pulling: Array, pushing: Array, weights: Array, discipline: str
) -> tuple[Array, Array, Any, Array, Array]:
    """Where connections are independent: rates of pulls and of pushes, [k], of snapshots, [k] or (), tokens that buckets
    lose, [k], and rates by connection, [k, s]."""
    net, out = inputs.connections, inputs.connections.out
    sends = flight.parts > 0
    pulls, pushes = (sends & way[:, None] for way in (pulling, pushing))
    if len(inputs.bucket_bytes):
        left = jnp.maximum(inputs.bucket_refill - inputs.bucket_taken, 1.0)
        out = jnp.where(flight.tokens > 0, out, jnp.minimum(out, left))
    sending: Any = ()
    if discipline in _QUEUES:
        serial = discipline == "serial"
        pull, push = connections.first_come(net, out, pulls, pushes, flight.arrival, serial=serial)
    elif inputs.snapshots:
        copied = (net.server >= 0) & (flight.copying[net.server] > 0)
        pull, push, copies = connections.with_copies(net, out, pulls, pushes, weights, inputs.snapshots.usage, copied)
        sending = jnp.zeros(out.shape).at[net.server].add(copies)
    else:
        capacity = (out, net.into, net.sends, net.receives)
        pull, push = network.connected(capacity, net.number, net.server, pulls, pushes, weights)
    drains = inputs.bucket_refill
    if len(inputs.bucket_bytes):
        owners: Any = net.server if len(net.server) else -1  # no server's NIC does anything else: only workers have buckets
        mine = jnp.arange(len(out), dtype=jnp.int32)[:, None] == owners
        away, home = (jnp.where(mine, 0.0, flows) for flows in (pull, push))
        sent = home @ net.number + jnp.sum(jnp.where(mine, jnp.sum(away, axis=0), 0.0), axis=1)
        drains = _drains(inputs, sent + sending if inputs.snapshots else sent)
    return pull @ net.number, push @ net.number, sending, drains, pull + push


def _weights(inputs: EngineInputs, flight: Flight) -> Array:
    """Weight of every worker's present transfer, [2, k]: of a pull, and of a push.

    Pulls: lognormal of deviation 1, constant from beginning to end. Recordings on hosts with shaped links (`traces/data`)
    show that the deviation is not 0; 0.7, 1 and 1.5 fit about as well. The servers send to each worker over a connection of
    its own, and TCP is fair only in the long run.

    Pushes: the sender's rate. What comes to the servers faster than their links carry it waits in one queue, first come,
    first served, so that each sender gets a share of the link as large as its share of what arrives.
    """
    return jnp.stack([flight.lots, jnp.maximum(inputs.nic / jnp.max(inputs.nic), _ROUNDING)])


def _next_phase(inputs: EngineInputs, flight: Flight, worker: Array, now: Array, ends: Array) -> tuple[Flight, Array]:
    """`worker` ends its phase at `now`, if it `ends`: the flight after that, and whether a push is complete."""
    phase = flight.phase[worker]
    is_worker = (jnp.arange(flight.phase.shape[0]) == worker) & ends
    pull_bytes, push_bytes, apply_seconds = (
        _of(worker, cost) for cost in (inputs.pull_bytes, inputs.push_bytes, inputs.apply_seconds)
    )
    free = flight.server_free_seconds
    free = jnp.min(free) if free.ndim else free  # of threads, the first that is
    queued = jnp.maximum(free - now, 0.0) + apply_seconds
    held = jnp.maximum(inputs.blocked_until_seconds - now, 0.0)
    applying = queued + jnp.where(push_bytes > 0, held, 0.0)  # a push without bytes waits for no block
    # Applying that takes no time needs no event of its own: the phase is skipped.
    pushed = (phase == APPLY) | ((phase == PUSH) & (applying <= 0))
    after, entered = jnp.where(pushed, WAIT, phase + 1), jnp.asarray(True)
    if len(inputs.control_queue):
        after, entered = jnp.where(phase == REQUEST, PULL, after), phase != REQUEST
    # What the next phase has to do, in the order of the phases: nothing, a pull, computing, a push, applying. Waiting for
    # blocks that move is counted with the phase after the transfer.
    left = jnp.where(after == APPLY, applying, 0.0)
    for of_phase, new in ((PULL, pull_bytes), (COMPUTE, flight.drawn[worker] + held), (PUSH, push_bytes)):
        left = jnp.where(after == of_phase, new, left)
    if inputs.connections:
        net, begins = inputs.connections, is_worker & ((after == PULL) | (after == PUSH))
        parts = left * jnp.where(after == PULL, net.pull, net.push)
        flight = flight._replace(parts=jnp.where(begins[:, None], parts, flight.parts))
    return flight._replace(
        phase=jnp.where(is_worker, after, flight.phase),
        remaining=jnp.where(is_worker, left, flight.remaining),
        since=jnp.where(is_worker & entered & (jnp.arange(5) == after)[:, None], now, flight.since),
        arrival=jnp.where(is_worker & (after == PUSH), flight.arrivals, flight.arrival),
        arrivals=flight.arrivals + (ends & (after == PUSH)),
        server_free_seconds=_taken(flight.server_free_seconds, now + queued, ends & (phase == PUSH)),
    ), pushed & ends


def _taken(server_free_seconds: Array, until: Array, taken: Array) -> Array:
    """When the threads of servers are free, after the first of them is `taken` until then."""
    if not server_free_seconds.ndim:
        return jnp.where(taken, until, server_free_seconds)
    mine = jnp.arange(server_free_seconds.shape[0]) == jnp.argmin(server_free_seconds)
    return jnp.where(taken & mine, until, server_free_seconds)


def _of(worker: Array, cost: Array) -> Array:
    """One worker's `cost`, which is one for all workers (scalar), or of the rows that each touches, [k]."""
    return cost[worker] if cost.ndim else cost


def begin_cycles(
    inputs: EngineInputs, flight: Flight, release: Array, clocks: Array, now: Array, *, for_all: bool, pulls: Any = None
) -> Flight:
    """The workers in `release` [k] start to pull at `now`, each for its mini-batch number `clocks` [k].

    `for_all`: compute times are drawn for all workers, also where only one begins.

    With `pulls` [k], only those in it do: the others have a copy, and compute at once.

    A worker that was busy loses what it did, and has not waited.
    """

    def begin(new: ArrayLike, old: Array) -> Array:
        return jnp.where(release, new, old)

    workers = jnp.arange(release.shape[0], dtype=jnp.int32)
    waited = jnp.where(flight.phase == WAIT, now - flight.since[WAIT], 0.0)
    first, left = jnp.asarray(PULL, jnp.int32), inputs.pull_bytes
    if len(inputs.control_queue):
        queued = _queued_seconds(inputs, flight, now)
        first = jnp.where(queued > 0, REQUEST, PULL).astype(jnp.int32)
        left = jnp.where(queued > 0, queued, inputs.pull_bytes)
    drawn = _draw(inputs, release, clocks, for_all=for_all)
    arrival = flight.arrivals + workers
    if len(flight.lots):
        drawn_lots = _of_released(release, partial(_lot, inputs, arrival), for_all=for_all)
        flight = flight._replace(lots=begin(drawn_lots, flight.lots))
    if pulls is not None:
        first, left = jnp.where(pulls, first, PULL), jnp.where(pulls, left, 0.0)
        drawn = jnp.where(pulls, drawn, jnp.maximum(drawn - inputs.copies.pull_overhead_seconds, 0.0))
    if inputs.connections:
        parts = jnp.where(first == PULL, left, 0.0)[..., None] * inputs.connections.pull
        flight = flight._replace(parts=jnp.where(release[:, None], parts, flight.parts))
    return flight._replace(
        phase=begin(first, flight.phase),
        remaining=begin(left, flight.remaining),
        since=jnp.where(release & (jnp.arange(5) == PULL)[:, None], now, flight.since),
        waited=begin(waited, flight.waited),
        drawn=begin(drawn, flight.drawn),
        arrival=begin(arrival, flight.arrival),
        arrivals=flight.arrivals + jnp.where(jnp.any(release), release.shape[0], 0).astype(jnp.int32),
    )


def with_snapshot(inputs: EngineInputs, flight: Flight, pushed: Array) -> Flight:
    """The flight after a push, if it is `pushed`: every so many of them, all servers begin to send a snapshot. As in live
    jobs, it takes twice as many while another snapshot is on its way."""
    uncopied = flight.uncopied + pushed
    due = pushed & (uncopied >= inputs.snapshots.clocks * (1 + jnp.any(flight.copying > 0)))
    copying = flight.copying + jnp.where(due, inputs.snapshots.bytes, 0.0)
    return flight._replace(copying=copying, uncopied=jnp.where(due, 0, uncopied).astype(jnp.int32))


def _queued_seconds(inputs: EngineInputs, flight: Flight, now: Array) -> Array:
    """How long messages to the servers wait behind the pushes in the queues of their links, until the last one is there:
    scalar.

    A worker sends its push as fast as its own NIC allows; what the servers' links have not carried yet is in their queues,
    and a message that comes later leaves them later.
    """
    pushing = flight.phase == PUSH
    sent = jnp.minimum(inputs.push_bytes, inputs.nic * (now - flight.since[PUSH]))
    if inputs.connections:
        behind = connections.queued_seconds(inputs.connections, inputs.push_bytes, sent, flight.parts, pushing)
        return inputs.control_queue[0] * behind
    carried = inputs.push_bytes - flight.remaining
    queued = jnp.where(pushing, jnp.maximum(sent - carried, 0.0), 0.0)
    return inputs.control_queue[0] * jnp.sum(queued) / inputs.serve_in


def spans(flight: Flight, worker: Array) -> tuple[Array, Array, Array, Array]:
    """Seconds of the cycle whose push `worker` has just completed: computing, pulling, pushing, and waiting before it.

    Pushing lasts from the first byte to the end of the apply.
    """
    since = flight.since[:, worker]
    compute, pull, push = since[PUSH] - since[COMPUTE], since[COMPUTE] - since[PULL], since[WAIT] - since[PUSH]
    return compute, pull, push, flight.waited[worker]


def _draw(inputs: EngineInputs, release: Array, clocks: Array, *, for_all: bool) -> Array:
    """Seconds [k] of compute for the workers in `release`; the other entries mean nothing."""
    drawn = _local_seconds if len(inputs.local_steps) else _compute_seconds

    def seconds(workers: Array) -> Array:
        if workers.ndim:
            return drawn(inputs, workers, clocks)
        return drawn(inputs._replace(**{f: getattr(inputs, f)[workers] for f in _NOISE}), workers, clocks[workers])

    return _of_released(release, seconds, for_all=for_all)


def _of_released(release: Array, draw: Callable[[Array], Array], *, for_all: bool) -> Array:
    """What `draw` gives for the workers in `release`, [k]; the other entries mean nothing. It takes one worker, or all [k].

    One worker is the usual case, and the only one under ASP; only where there are more, or with `for_all`, it draws for all.
    """
    workers = jnp.arange(release.shape[0], dtype=jnp.int32)
    if for_all:
        return draw(workers)
    alone = draw(first_of(release))

    def all_workers(carry: tuple[Array, Array]) -> tuple[Array, Array]:
        many, _ = carry
        # The indices depend on the carry: otherwise XLA would draw before the loop, even if the loop does not run.
        names = workers + jnp.where(many, 0, 1).astype(jnp.int32)
        return jnp.zeros_like(many), draw(names)

    start = (jnp.sum(release) > 1, jnp.full(release.shape, alone))
    return jax.lax.while_loop(lambda carry: carry[0], all_workers, start)[1]


def _lot(inputs: EngineInputs, arrival: Array, workers: Array) -> Array:
    """Weights of the pulls of `workers`, one or all, that begin as the transfers number `arrival` [k]; see `_weights`."""
    uniform = _uniforms(inputs.key ^ jnp.uint64(_SHARES), workers, arrival if workers.ndim else arrival[workers])
    noise = jax.scipy.special.ndtri(uniform[..., 0])
    return jnp.exp(noise if isinstance(inputs.unevenness, tuple) else inputs.unevenness * noise)


_NOISE = ("compute_seconds", "overhead_seconds", "sleep_probability", "sleep_mean_seconds", "sleep_sd_seconds")


def _compute_seconds(inputs: EngineInputs, workers: Array, clocks: Array) -> Array:
    """Seconds that each of `workers` computes in its mini-batch number `clocks`; the same whenever it is called.

    The fields of `inputs` in `_NOISE` are those workers', of the same shape as `workers`.
    """
    uniform = _uniforms(inputs.key, workers, clocks)
    noise = jax.scipy.special.ndtri(uniform[..., ::2])
    sigma = jnp.sqrt(jnp.log1p(inputs.jitter**2))
    factor = jnp.exp(sigma * noise[..., 0] - sigma**2 / 2)
    if len(inputs.factors):
        counts = inputs.factor_counts[workers]
        recorded = inputs.factors[workers, clocks % jnp.maximum(counts, 1)]
        factor = jnp.where(counts > 0, recorded, factor)
    compute = inputs.compute_seconds * factor
    sleep = jnp.maximum(inputs.sleep_mean_seconds + inputs.sleep_sd_seconds * noise[..., 1], 0.0)
    return compute + inputs.overhead_seconds + jnp.where(uniform[..., 1] < inputs.sleep_probability, sleep, 0.0)


def _local_seconds(inputs: EngineInputs, workers: Array, clocks: Array) -> Array:
    """As `_compute_seconds`, for the local steps of a cycle, mini-batches `clocks` and those after it; messages take their
    time once."""
    silent = inputs._replace(overhead_seconds=jnp.zeros_like(inputs.overhead_seconds))

    steps = inputs.local_steps[workers]

    def with_step(number: Array, seconds: Array) -> Array:
        return seconds + jnp.where(number < steps, _compute_seconds(silent, workers, clocks + number), 0.0)

    start = jnp.zeros_like(inputs.compute_seconds) + inputs.overhead_seconds
    whole: Array = jax.lax.fori_loop(0, jnp.max(steps), with_step, start)
    return whole


@jax.jit
def mini_batch_seconds(inputs: EngineInputs, worker: ArrayLike, clock: ArrayLike, compute_seconds: ArrayLike) -> Array:
    """Seconds that one worker, an index, computes and sleeps in its mini-batch number `clock`, with the draws of a simulated
    run: `compute_seconds` on average, without messages and slow-downs."""
    at = jnp.asarray(worker, jnp.int32)
    its = {field: getattr(inputs, field)[at] for field in _NOISE}
    its |= {"compute_seconds": jnp.asarray(compute_seconds, jnp.float64), "overhead_seconds": jnp.zeros(())}
    return _compute_seconds(inputs._replace(**its), at, jnp.asarray(clock, jnp.int32))


def _uniforms(key: Array, workers: Array, clocks: Array) -> Array:
    """Three uniforms in (0, 1) for each of `workers`, [..., 3]: SplitMix64 (Steele et al. 2014) of key, worker, clock.

    A hash of a counter: noise depends on (key, worker, clock) only, and not on the order of events, so that all tuners meet
    the same noise. JAX's own generator runs as loops on CPU, which would cost more than everything else in an event.
    """
    name = (workers.astype(jnp.uint64) << 40) + (clocks.astype(jnp.uint64) << 2)
    x = key + (name[..., None] + jnp.arange(3, dtype=jnp.uint64)) * jnp.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> 30)) * jnp.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> 27)) * jnp.uint64(0x94D049BB133111EB)
    x = x ^ (x >> 31)
    uniform: Array = ((x >> 11).astype(jnp.float64) + 0.5) * 2.0**-53
    return uniform
