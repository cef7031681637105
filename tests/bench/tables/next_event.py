"""Prints what it costs to find the next event among many workers where only the time of one changes, in three ways.

python -m tests.bench.tables.next_event
"""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array

import simulators.engine.job_state  # noqa: F401 (it sets JAX to floats of 64 bits)
from simulators.engine.indices import first_least
from tests.bench.rounds import timed

WORKERS = tuple(2**n for n in range(7, 14))
EVENTS, ROUNDS = 20_000, 5


def seconds_after(event: Array) -> Array:
    """When the worker of an event has its next one: 0.5 to 1.5 s later, by a hash."""
    mixed = event.astype(jnp.uint32) * jnp.uint32(2654435761)
    return (mixed ^ (mixed >> 15)).astype(jnp.float64) * 2.0**-32 + 0.5


def whole(times: Array) -> Array:
    """The least of all `times`, float64 [k], as the engine finds it."""

    def event(number: Array, times: Array) -> Array:
        worker, least = first_least(times)
        return times.at[worker].set(least + seconds_after(number))

    return jax.lax.fori_loop(0, EVENTS, event, times)


def buckets(times: Array) -> Array:
    """The least of each bucket of about sqrt(k) times is kept."""
    size = 2 ** (int(math.log2(times.shape[0])) // 2)
    table = times.reshape(-1, size)

    def event(number: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
        table, least = carry
        at = first_least(least)[0]
        begin = (at, jnp.zeros_like(at))
        bucket = jax.lax.dynamic_slice(table, begin, (1, size))[0]
        worker, now = first_least(bucket)
        bucket = bucket.at[worker].set(now + seconds_after(number))
        table = jax.lax.dynamic_update_slice(table, bucket[None], begin)
        return table, least.at[at].set(first_least(bucket)[1])

    return jax.lax.fori_loop(0, EVENTS, event, (table, jnp.min(table, axis=1)))[0].reshape(-1)


def segment_tree(times: Array) -> Array:
    """Each node of a binary tree keeps the least below it."""
    workers = times.shape[0]
    depth = int(math.log2(workers))
    tree = jnp.concatenate([jnp.zeros(workers), times])  # the nodes below i are 2 i and 2 i + 1
    for level in reversed(range(depth)):
        first = 2**level
        tree = tree.at[first : 2 * first].set(jnp.min(tree[2 * first : 4 * first].reshape(first, 2), axis=1))

    def event(number: Array, tree: Array) -> Array:
        node = jnp.asarray(1)
        for _ in range(depth):
            node = 2 * node + (tree[2 * node + 1] < tree[2 * node])
        tree = tree.at[node].add(seconds_after(number))
        for _ in range(depth):
            node = node // 2
            tree = tree.at[node].set(jnp.minimum(tree[2 * node], tree[2 * node + 1]))
        return tree

    return jax.lax.fori_loop(0, EVENTS, event, tree)[workers:]


def microseconds(way: Callable[[Array], Array], times: Array) -> tuple[float, Array]:
    """CPU microseconds of an event, the best of some rounds, and the times at the end."""
    program = jax.jit(way)
    run = timed(lambda: program(times))
    run()
    return min(run() for _ in range(ROUNDS)) / EVENTS * 1e6, program(times)


def main() -> None:
    print("| workers | all times, us | buckets, us | segment tree, us |\n| --- | --- | --- | --- |")  # noqa: T201
    for workers in WORKERS:
        times = jax.random.uniform(jax.random.key(0), (workers,), jnp.float64)
        found = [microseconds(way, times) for way in (whole, buckets, segment_tree)]
        for _, ends in found[1:]:
            np.testing.assert_array_equal(ends, found[0][1])
        print(f"| {workers:,} | {' | '.join(f'{us:.2g}' for us, _ in found)} |", flush=True)  # noqa: T201


if __name__ == "__main__":
    main()
