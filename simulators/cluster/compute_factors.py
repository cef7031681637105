"""Recorded compute times of nodes, as factors of the usual one: what a trace gives the engine in place of noise."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from jax import Array
from numpy.typing import NDArray

__all__ = ["NO_FACTORS", "Factors"]


class Factors(NamedTuple):
    """Recorded compute times over the usual one, and how many of them each node has, as `EngineInputs` holds them."""

    values: Array | NDArray[np.float64]  # [k, m]
    counts: NDArray[np.int32]  # [k]


NO_FACTORS = Factors(np.zeros((0, 0)), np.zeros(0, np.int32))
