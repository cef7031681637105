"""What a fitted model lacks, by its residuals: the error of a prediction grows with distance from the fitted rows.

A model of a wrong form can still fit its rows, since the constants make up for it. Where it is extrapolated, they do not.
The recorded logarithms are the model's, plus a discrepancy that varies smoothly with the setting, plus noise (Kennedy and
O'Hagan 2001, Bayesian calibration of computer models, Section 4). The discrepancy is a Gaussian process of mean 0 over the
logarithms of the setting, with a squared exponential covariance; the model is linear in its constants near the fit. How
large the discrepancy is, over which distance it changes, and how large the noise is, is not chosen: the prediction is an
average over a grid of them, weighted by the likelihood of the fitted rows. So a discrepancy that noise hides counts as far
as the rows allow it.

A prediction stays that of the model. Its mean square error is that of the constants and the discrepancy together, the mean
of which it does not correct, and of the noise.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.calibration.model import Row

__all__ = ["Discrepancy", "positions"]

_NOISES = np.geomspace(0.003, 0.3, 25)  # relative; below the first, recorded means do not tell
_SIZES = np.geomspace(0.01, 0.64, 9)  # of the discrepancy, relative: from what cannot be seen to a factor of two
_LENGTHS = np.log([2.0, 4.0, 16.0])  # the discrepancy changes when a number is multiplied by this
_MOST_ROWS = 300  # of which a process is made: its cost grows with their cube


class Discrepancy(NamedTuple):
    """The n fitted settings, as the process sees them, and k constants."""

    at: NDArray[np.float64]  # `positions` of the settings, [n, p]
    barrier: NDArray[np.bool_]  # synchronous and other settings have discrepancies of their own, [n]
    slopes: NDArray[np.float64]  # derivatives of the logarithm of a cycle by those of the constants, [n, k]
    residuals: NDArray[np.float64]  # logarithms of fitted over recorded cycles, [n]
    covariance: NDArray[np.float64]  # of the constants, by all that is known of them without these cycles, [k, k]
    repetition: float  # mean square distance of a row from the median of its setting, logarithms

    def mean_squares(self, rows: Sequence[Row], slopes: NDArray[np.float64]) -> NDArray[np.float64]:
        """The mean square errors of predictions of `rows`, logarithms, [r]; `slopes` are their derivatives, [r, k]."""
        known = self._thinned()
        at, barrier = positions(rows), np.array([row.barrier for row in rows])
        by_constants = known.slopes @ known.covariance @ known.slopes.T
        to_constants = slopes @ known.covariance @ known.slopes.T
        alone = np.einsum("rk,kl,rl->r", slopes, known.covariance, slopes)
        near, far = (
            (_squares(a, known.at), b[:, None] == known.barrier) for a, b in ((known.at, known.barrier), (at, barrier))
        )
        weights, found = [], []
        for size, length in _processes():
            among, to = (size**2 * np.exp(-away / (2 * length**2)) * same for away, same in (near, far))
            values, vectors = np.linalg.eigh(by_constants + among)
            seen, across = vectors.T @ known.residuals, (to_constants + to) @ vectors
            for noise in _NOISES:
                spread = np.maximum(values, 0.0) + noise**2
                weights.append(-0.5 * float((np.log(spread) + seen**2 / spread).sum()))
                left = np.maximum(alone + size**2 - (across**2 / spread).sum(axis=1), 0.0)
                found.append((across @ (seen / spread)) ** 2 + left + noise**2)
        share = np.exp(np.array(weights) - max(weights))
        mean: NDArray[np.float64] = share / share.sum() @ np.array(found) + self.repetition
        return mean

    def _thinned(self) -> Discrepancy:
        """With at most so many settings, evenly chosen."""
        chosen = np.unique(np.linspace(0, len(self.at) - 1, min(len(self.at), _MOST_ROWS)).astype(int))
        of_settings = {name: getattr(self, name)[chosen] for name in self._fields[:4]}
        return self._replace(**of_settings)


def positions(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Where settings are: logarithms of their numbers, and of how unlike their links, speeds and batches are, [n, 8]."""

    def ratio(values: Sequence[float]) -> float:
        return max(values) / max(min(values), 1e-9) if values else 1.0

    def unlike(row: Row) -> list[float]:
        return [ratio(values) for values in (row.nics, row.speeds, row.batch_sizes)]

    each = [(r.workers, r.servers, r.batch_size, max(r.intra_threads, 1), r.transfer_bits, *unlike(r)) for r in rows]
    return np.log(np.array(each, dtype=np.float64).reshape(-1, 8))


def _processes() -> Iterator[tuple[float, float]]:
    """The size and the length of each process; one of size 0, which has no length."""
    yield 0.0, math.inf
    for length in _LENGTHS:
        for size in _SIZES:
            yield float(size), float(length)


def _squares(one: NDArray[np.float64], other: NDArray[np.float64]) -> NDArray[np.float64]:
    """Squared distances of two sets of positions, [m, n]."""
    squares: NDArray[np.float64] = ((one[:, None] - other[None]) ** 2).sum(axis=-1)
    return squares
