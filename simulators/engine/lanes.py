"""Many jobs side by side under `vmap`, and how they agree on what to do next."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import Array

__all__ = ["anywhere"]


def anywhere(flag: Array, lanes: bool) -> Array:
    """Whether `flag` holds in any lane: a loop that asks so runs for all lanes alike, and its arrays stay in place.

    Without `lanes` there is only one job, and this is its flag.
    """
    return jax.lax.pmax(flag.astype(jnp.int32), "lanes") > 0 if lanes else flag  # type: ignore[no-untyped-call]
