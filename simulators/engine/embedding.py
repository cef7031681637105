"""Sparse pulls and pushes: the rows of embedding tables that a mini-batch touches, their gradient, and who serves them.

A worker pulls the distinct rows that its mini-batch looks up, and pushes as many. Rows are placed in blocks of consecutive
rows, [b]. From the rows touched in each block, and from the servers of each block, follow the bytes between every worker and
every server, for every single mini-batch. Nothing here costs more where tables have more rows.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array
from jax.typing import ArrayLike
from numpy.typing import NDArray

from simulators.engine.inputs import EngineInputs
from simulators.workloads.workload import Embedding

__all__ = [
    "Caches",
    "Forwarded",
    "SparseGradient",
    "Touched",
    "begin_pulls",
    "block_of",
    "count_push",
    "forgotten",
    "gradient_of",
    "hottest_blocks",
    "in_flight",
    "look_up",
    "nothing_touched",
    "placed",
    "popularity",
    "seen_before",
    "stepped",
    "touch",
    "zeros",
]


class SparseGradient(NamedTuple):
    """The gradient of a mini-batch: of the rows that it looks up, and of what is dense."""

    keys: Array  # int32 [n]: the rows looked up, with repetitions; of samples that do not count, a row beyond the tables
    rows: Array  # float32 [n, width]: the gradient of each look-up
    dense: Any  # pytree


class Caches(NamedTuple):
    """Copies of the most popular rows that each worker keeps."""

    rows: Array  # float32 [k, h, width]
    clocks: Array  # int32 [k, h]: the mini-batch that pulled each copy


class Forwarded(NamedTuple):
    """Pushed rows that servers send on, because several of them hold a block; by the worker that pushes (first axis)."""

    out: Array  # float64 [k, k]: what each server sends on
    into: Array  # float64 [k, k]: what each server receives of another one


class Touched(NamedTuple):
    """The distinct rows that mini-batches touch."""

    blocks: Array  # int32 [k, b]: pushed by each worker's mini-batch in progress, to each block
    asked: Any  # int32 [k, b]: of these, pulled; () where workers keep no copies, and pull what they push
    sent: Array  # float64 [k, k]: of these, what each worker (first axis) pulls from each server
    received: Array  # float64 [k, k]: what each worker pushes to each server
    pulled: Array  # float64 [b]: in the pulls before all completed pushes
    pushed: Array  # float64 [b]: in all completed pushes
    caches: Any = ()  # `Caches`; () where workers keep no copies
    forwarded: Any = ()  # `Forwarded`; () where every block has one server


def zeros(embedding: Embedding, parameters: Any, nodes: int, samples: int) -> SparseGradient:
    """No gradient yet of `nodes` workers, for mini-batches of up to `samples`; leading worker axis."""
    rows, dense = parameters["rows"], _dense(parameters)
    looked_up = samples * embedding.lookups
    return SparseGradient(
        keys=jnp.full((nodes, looked_up), embedding.rows, jnp.int32),
        rows=jnp.zeros((nodes, looked_up, rows.shape[1]), rows.dtype),
        dense=jax.tree.map(lambda p: jnp.zeros((nodes, *p.shape), p.dtype), dense),
    )


def nothing_touched(parameters: Any, nodes: int, blocks: int, cached: int, *, replicated: bool = False) -> Touched:
    """No row is touched yet; workers will keep up to `cached` copies of rows, and blocks may be `replicated`."""
    none, each, total = jnp.zeros((nodes, nodes)), jnp.zeros((nodes, blocks), jnp.int32), jnp.zeros(blocks)
    caches: Any = ()
    if cached:
        empty = jnp.zeros((nodes, cached, parameters["rows"].shape[1]), parameters["rows"].dtype)
        caches = Caches(empty, jnp.full((nodes, cached), _NEVER, jnp.int32))
    asked = each if cached else ()
    return Touched(each, asked, none, none, total, total, caches, Forwarded(none, none) if replicated else ())


_NEVER = -(2**30)  # a mini-batch that no copy is used after


def forgotten(touched: Touched, workers: ArrayLike) -> Touched:
    """What is `touched`, after `workers` [k] have lost their copies."""
    if not touched.caches:
        return touched
    clocks = jnp.where(jnp.asarray(workers)[:, None], _NEVER, touched.caches.clocks)
    return touched._replace(caches=touched.caches._replace(clocks=clocks))


def look_up(
    inputs: EngineInputs, caches: Any, parameters: Any, keys: Array, ranks: Array, worker: Array, clock: Array
) -> tuple[Array, Array, Any]:
    """The rows that `worker` uses for its look-ups `keys` [n, lookups] in mini-batch `clock`, [n, lookups, width]; which of
    them are copies that it has, [n, lookups]; and its copies after that.

    `ranks` [n, lookups] are the popularity of each row, from 0. Of a popular row, a copy that is no older than
    `Setting.cache_clocks` is used, and any other is pulled and kept.
    """
    current = jnp.take(parameters["rows"], keys, axis=0, mode="clip")
    if not caches:
        return current, jnp.zeros(keys.shape, bool), caches
    place, most = inputs.placement, caches.clocks.shape[1]
    kept = (ranks < place.cache_rows) & (place.cache_clocks > 0)
    slot = jnp.where(kept, ranks, most)
    pulled_at = jnp.take(caches.clocks[worker], slot, mode="clip")
    fresh = kept & (clock - pulled_at <= place.cache_clocks)
    rows = jnp.where(fresh[..., None], jnp.take(caches.rows[worker], slot, axis=0, mode="clip"), current)
    write = jnp.where(kept & ~fresh, slot, most)
    return (
        rows,
        fresh,
        Caches(
            caches.rows.at[worker, write].set(current, mode="drop"),
            caches.clocks.at[worker, write].set(clock, mode="drop"),
        ),
    )


def popularity(rows: NDArray[np.int32], count: int) -> NDArray[np.int32]:
    """For each look-up of `rows` [n, lookups], how many of `count` rows are looked up more often, ties in their order."""
    counts = np.bincount(rows.reshape(-1), minlength=count)
    ranks = np.empty(count, np.int32)
    ranks[np.argsort(-counts, kind="stable")] = np.arange(count, dtype=np.int32)
    found: NDArray[np.int32] = ranks[rows]
    return found


def hottest_blocks(rows: NDArray[np.int32], count: int, blocks: int) -> tuple[int, ...]:
    """The numbers of `blocks` blocks of `count` rows, the one with most of the look-ups `rows` first; ties in order."""
    size = -(-count // blocks)
    counts = np.bincount(rows.reshape(-1) // size, minlength=blocks)
    return tuple(int(b) for b in np.argsort(-counts, kind="stable"))


def gradient_of(
    embedding: Embedding,
    looked_up: Array,
    parameters: Any,
    batch: tuple[Array, ...],
    count: Array,
    mean: Callable[[Array], Array],
) -> tuple[Array, SparseGradient]:
    """Loss of a mini-batch and its gradient, of which the first `count` samples count; `mean` is over these, of losses [n].

    The loss is differentiated by the rows `looked_up`, [n, lookups, width], so that no array of the tables' size is made.
    """

    def loss(looked_up: Array, dense: Any) -> Array:
        return mean(embedding.losses(dense, looked_up, batch))

    value, (rows, dense) = jax.value_and_grad(loss, argnums=(0, 1))(looked_up, _dense(parameters))
    counts = jnp.arange(batch[0].shape[0], dtype=jnp.int32) < count
    keys = jnp.where(counts[:, None], batch[0], embedding.rows).reshape(-1)
    return value, SparseGradient(keys, rows.reshape(len(keys), -1), dense)


def stepped(parameters: Any, gradient: SparseGradient, rate: Array, take: Array) -> Any:
    """`parameters` after a step of SGD, if `take`: rows that were looked up several times change by the sum."""
    step = jnp.where(take, -rate, 0.0).astype(jnp.float32)
    dense = jax.tree.map(lambda p, g: p + step * g, _dense(parameters), gradient.dense)
    return dense | {"rows": parameters["rows"].at[gradient.keys].add(step * gradient.rows, mode="drop")}


def seen_before(rows: NDArray[np.int32]) -> NDArray[np.int32]:
    """For each look-up of `rows` [n, lookups], the last sample before it that looks up the same row; -1 where none does."""
    n, lookups = rows.shape
    flat = rows.reshape(-1)
    order = np.argsort(flat, kind="stable")
    samples, same = order // lookups, np.append(False, flat[order[1:]] == flat[order[:-1]])
    found = np.empty(n * lookups, np.int32)
    found[order] = np.where(same, np.append(-1, samples[:-1]), -1)
    return found.reshape(n, lookups)


def touch(
    inputs: EngineInputs,
    embedding: Embedding,
    touched: Touched,
    keys: Array,
    is_first: Array,
    is_copy: Array,
    worker: Array,
) -> Touched:
    """`worker` begins a mini-batch that looks up `keys` [n]; `is_first` [samples, lookups] where none of its samples before
    looks up the same row, and `is_copy` [samples, lookups] where it uses a copy that it has, and pulls nothing.

    A row counts once, however often it is looked up. Where a mini-batch goes over the end of a worker's data, it takes two
    messages, and a row that is in both counts twice.
    """
    blocks = touched.pushed.shape[0]
    place, at = inputs.placement, block_of(keys, embedding.rows, blocks)

    def by_block(counts: Array) -> Array:
        counted = (counts.reshape(-1) & (keys < embedding.rows)).astype(jnp.int32)
        return jnp.zeros(blocks, jnp.int32).at[at].add(counted, mode="drop")

    rows = by_block(is_first)
    asked = rows
    if touched.caches:
        asked = by_block(is_first & ~is_copy)
        touched = touched._replace(asked=touched.asked.at[worker].set(asked, mode="drop"))
    if touched.forwarded:
        out, into = touched.forwarded
        sent_on = Forwarded(
            out.at[worker].set(rows @ place.forwarded, mode="drop"), into.at[worker].set(rows @ place.copied, mode="drop")
        )
        touched = touched._replace(forwarded=sent_on)
    return touched._replace(
        blocks=touched.blocks.at[worker].set(rows, mode="drop"),
        sent=touched.sent.at[worker].set(asked @ place.pulled, mode="drop"),
        received=touched.received.at[worker].set(rows @ place.pushed, mode="drop"),
    )


def block_of(keys: Array, rows: int, blocks: int) -> Array:
    """The block of each row: as many consecutive rows in each but the last ones; `blocks` for one beyond the tables."""
    size = -(-rows // blocks)
    # Unsigned, because XLA corrects the sign of a division of signed numbers, which takes as long as the division.
    block = jax.lax.div(keys.astype(jnp.uint32), jnp.uint32(size)).astype(jnp.int32)
    return jnp.where(keys < rows, block, blocks)


def placed(inputs: EngineInputs, touched: Touched) -> Touched:
    """The same mini-batches after blocks have changed their servers."""
    place = inputs.placement
    if touched.forwarded:
        touched = touched._replace(forwarded=Forwarded(touched.blocks @ place.forwarded, touched.blocks @ place.copied))
    return touched._replace(sent=_asked(touched) @ place.pulled, received=touched.blocks @ place.pushed)


def _asked(touched: Touched) -> Array:
    """Rows that each worker's mini-batch in progress pulls from each block, int32 [k, b]."""
    asked: Array = touched.asked if touched.caches else touched.blocks
    return asked


def count_push(touched: Touched, worker: Array, pushed: Array) -> Touched:
    """`worker` has completed a push, if `pushed`."""
    return touched._replace(
        pulled=touched.pulled + jnp.where(pushed, _asked(touched)[worker], 0),
        pushed=touched.pushed + jnp.where(pushed, touched.blocks[worker], 0),
    )


def begin_pulls(inputs: EngineInputs, touched: Touched, pulls: Array, remaining: Array) -> Array:
    """Bytes that every worker has left, [k], after those in `pulls` [k] have begun to pull their rows."""
    return jnp.where(pulls, jnp.sum(touched.sent, axis=1) * inputs.placement.pull_row_bytes, remaining)


def in_flight(inputs: EngineInputs, touched: Touched) -> EngineInputs:
    """`inputs` for the mini-batches in progress: the bytes of each worker's pull and push, [k], what these put on every
    network interface, [2k, r], and the seconds for which servers apply each worker's push, [k].

    Resources are those of `links.usage.of_nics`: NICs out and in and, if some server process has a limit of
    its own, servers' pulls and pushes.
    """
    place, nodes, sent, received = inputs.placement, inputs.active.shape[0], touched.sent, touched.received
    pulled, pushed = jnp.sum(sent, axis=1), jnp.sum(received, axis=1)
    pull, push = (rows / jnp.maximum(whole, 1.0)[:, None] for rows, whole in ((sent, pulled), (received, pushed)))
    other = 1.0 - jnp.eye(nodes)  # what a node moves to itself crosses no NIC
    none = jnp.zeros((nodes, nodes))
    out = jnp.concatenate([pull * other, jnp.diag(jnp.sum(push * other, axis=1))])
    into = jnp.concatenate([jnp.diag(jnp.sum(pull * other, axis=1)), push * other])
    applied = received
    if touched.forwarded:
        # From server to server as the push comes in: the slowest link of the chain sets the pace, and each byte of the push
        # puts bytes on these links, too.
        sent_on, copied = (rows / jnp.maximum(pushed, 1.0)[:, None] for rows in touched.forwarded)
        out, into = (a.at[nodes:].add(b) for a, b in ((out, sent_on), (into, copied)))
        push, applied = push + copied, received + touched.forwarded.into
    usage = [out, into]
    if inputs.capacity.shape[0] > 2 * nodes:
        usage += [jnp.concatenate([pull, none]), jnp.concatenate([none, push])]
    return inputs._replace(
        usage=jnp.concatenate(usage, axis=1),
        pull_bytes=pulled * place.pull_row_bytes,
        push_bytes=pushed * place.push_row_bytes,
        apply_seconds=jnp.max(applied, axis=1) * place.apply_row_seconds,
    )


def _dense(parameters: Any) -> Any:
    return {name: value for name, value in parameters.items() if name != "rows"}
