"""The first index of what is looked for, by minima of integers.

XLA compiles `argmin` and `argmax`, and the minimum of floats, to a chain of comparisons, one value after another, and the
minimum of integers to vector instructions: for 32 values five times as fast.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["first_least", "first_of"]


def first_of(flags: Array) -> Array:
    """The lowest index in `flags`, bool [k]; k if there is none. Unsigned, so that JAX counts none from the end."""
    nodes = flags.shape[0]
    return jnp.min(jnp.where(flags, jnp.arange(nodes, dtype=jnp.uint32), jnp.uint32(nodes)))


def first_least(values: Array) -> tuple[Array, Array]:
    """The index of the least of `values`, float64 [k], of equals the first; and that value. None may be negative."""
    bits = jax.lax.bitcast_convert_type(values, jnp.int64)  # of floats that are not negative, in the order of the floats
    least = jnp.min(bits)
    return first_of(bits == least), jax.lax.bitcast_convert_type(least, jnp.float64)
