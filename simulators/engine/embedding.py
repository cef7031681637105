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
from numpy.typing import NDArray

from simulators.engine.inputs import EngineInputs
from simulators.workloads.workload import Embedding

__all__ = [
    "SparseGradient",
    "Touched",
    "begin_pulls",
    "block_of",
    "count_push",
    "gradient_of",
    "in_flight",
    "nothing_touched",
    "placed",
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


class Touched(NamedTuple):
    """The distinct rows that mini-batches touch."""

    blocks: Array  # float64 [k, b]: by each worker's mini-batch in progress, in each block
    sent: Array  # float64 [k, k]: of these, what each worker (first axis) pulls from each server
    received: Array  # float64 [k, k]: what each worker pushes to each server
    pushed: Array  # float64 [b]: in all completed pushes


def zeros(embedding: Embedding, parameters: Any, nodes: int, samples: int) -> SparseGradient:
    """No gradient yet of `nodes` workers, for mini-batches of up to `samples`; leading worker axis."""
    rows, dense = parameters["rows"], _dense(parameters)
    looked_up = samples * embedding.lookups
    return SparseGradient(
        keys=jnp.full((nodes, looked_up), embedding.rows, jnp.int32),
        rows=jnp.zeros((nodes, looked_up, rows.shape[1]), rows.dtype),
        dense=jax.tree.map(lambda p: jnp.zeros((nodes, *p.shape), p.dtype), dense),
    )


def nothing_touched(nodes: int, blocks: int) -> Touched:
    """No row is touched yet."""
    none = jnp.zeros((nodes, nodes))
    return Touched(jnp.zeros((nodes, blocks)), none, none, jnp.zeros(blocks))


def gradient_of(
    embedding: Embedding, parameters: Any, batch: tuple[Array, ...], count: Array, mean: Callable[[Array], Array]
) -> tuple[Array, SparseGradient]:
    """Loss of a mini-batch and its gradient, of which the first `count` samples count; `mean` is over these, of losses [n].

    The loss is differentiated by the rows that are looked up, [n, lookups, width], so that no array of the tables' size is
    made.
    """

    def loss(looked_up: Array, dense: Any) -> Array:
        return mean(embedding.losses(dense, looked_up, batch))

    looked_up = jnp.take(parameters["rows"], batch[0], axis=0, mode="clip")
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
    inputs: EngineInputs, embedding: Embedding, touched: Touched, keys: Array, is_first: Array, worker: Array
) -> Touched:
    """`worker` begins a mini-batch that looks up `keys` [n]; `is_first` [samples, lookups] where none of its samples before
    looks up the same row.

    A row counts once, however often it is looked up. Where a mini-batch goes over the end of a worker's data, it takes two
    messages, and a row that is in both counts twice.
    """
    blocks = touched.pushed.shape[0]
    counts = is_first.reshape(-1) & (keys < embedding.rows)
    found = (
        jnp.zeros(blocks, jnp.int32).at[block_of(keys, embedding.rows, blocks)].add(counts.astype(jnp.int32), mode="drop")
    )
    rows = found.astype(jnp.float64)
    place = inputs.placement
    return touched._replace(
        blocks=touched.blocks.at[worker].set(rows, mode="drop"),
        sent=touched.sent.at[worker].set(rows @ place.pulled, mode="drop"),
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
    return touched._replace(sent=touched.blocks @ place.pulled, received=touched.blocks @ place.pushed)


def count_push(touched: Touched, worker: Array, pushed: Array) -> Touched:
    """`worker` has completed a push, if `pushed`."""
    return touched._replace(pushed=touched.pushed + jnp.where(pushed, touched.blocks[worker], 0.0))


def begin_pulls(inputs: EngineInputs, touched: Touched, pulls: Array, remaining: Array) -> Array:
    """Bytes that every worker has left, [k], after those in `pulls` [k] have begun to pull their rows."""
    return jnp.where(pulls, jnp.sum(touched.sent, axis=1) * inputs.placement.pull_row_bytes, remaining)


def in_flight(inputs: EngineInputs, touched: Touched) -> EngineInputs:
    """`inputs` for the mini-batches in progress: the bytes of each worker's pull and push, [k], what these put on every
    network interface, [2k, r], and the seconds for which servers apply each worker's push, [k].

    Resources are those of `simulators.engine.inputs.build`: NICs out and in and, if some server process has a limit of its
    own, servers' pulls and pushes.
    """
    place, nodes, sent, received = inputs.placement, inputs.active.shape[0], touched.sent, touched.received
    pulled, pushed = jnp.sum(sent, axis=1), jnp.sum(received, axis=1)
    pull, push = (rows / jnp.maximum(whole, 1.0)[:, None] for rows, whole in ((sent, pulled), (received, pushed)))
    other = 1.0 - jnp.eye(nodes)  # what a node moves to itself crosses no NIC
    none = jnp.zeros((nodes, nodes))
    out = jnp.concatenate([pull * other, jnp.diag(jnp.sum(push * other, axis=1))])
    into = jnp.concatenate([jnp.diag(jnp.sum(pull * other, axis=1)), push * other])
    usage = [out, into]
    if inputs.capacity.shape[0] > 2 * nodes:
        usage += [jnp.concatenate([pull, none]), jnp.concatenate([none, push])]
    return inputs._replace(
        usage=jnp.concatenate(usage, axis=1),
        pull_bytes=pulled * place.pull_row_bytes,
        push_bytes=pushed * place.push_row_bytes,
        apply_seconds=jnp.max(received, axis=1) * place.apply_row_seconds,
    )


def _dense(parameters: Any) -> Any:
    return {name: value for name, value in parameters.items() if name != "rows"}
