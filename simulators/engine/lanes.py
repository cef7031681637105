"""Lanes: many jobs side by side under `vmap`. Loops run until the last lane is done."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["anywhere"]


def anywhere(flag: Array, lanes: bool) -> Array:
    """Whether `flag` holds in any lane; without `lanes` there is one job only, and this is its flag.

    A loop whose condition is the same in all lanes updates its arrays in place. If it differed, `vmap` would select between
    old and new arrays in every lane and copy them at each iteration.
    """
    return jax.lax.pmax(flag.astype(jnp.int32), "lanes") > 0 if lanes else flag  # type: ignore[no-untyped-call]
