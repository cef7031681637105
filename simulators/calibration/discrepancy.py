"""How far a prediction of a fitted model may be off, by its residuals: errors of constants, of the form, and of a row.

A model of a wrong form can still fit its rows, since the constants make up for it. Where it is extrapolated, they do not.
The recorded logarithms are the model's, plus a discrepancy that varies smoothly with the setting, plus noise (Kennedy and
O'Hagan 2001, Bayesian calibration of computer models, Section 4). The discrepancy is a Gaussian process of mean 0 over the
logarithms of the setting, with a squared exponential covariance; the model is linear in its constants near the fit. How
large the discrepancy is, over which distance it changes, and how large the noise is, is not chosen: the error of a
prediction has a mixture of normal distributions, one for each of a grid of them, weighted by the likelihood of the fitted
rows. So a discrepancy that noise hides counts as far as the rows allow it.

What a cycle lacks is mostly in its transfers and updates, because computing is measured by itself. Then a row that computes
for most of its cycle is off by less. Whether it is so, the rows tell, too: where computing was timed, half of the grid has a
discrepancy, noise and repetitions in proportion to the part of a cycle that is decided by other times, and half in
proportion to the whole cycle.

A prediction stays that of the model: the mean of the discrepancy does not correct it, and counts as an error.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.special import ndtr

from simulators.calibration.recorded.row import Row

__all__ = ["Discrepancy", "positions"]

_NOISES = np.geomspace(0.003, 0.3, 25)  # relative; below the first, recorded means do not tell
_SIZES = np.geomspace(0.01, 0.64, 9)  # of the discrepancy, relative: from what cannot be seen to a factor of two
_LENGTHS = np.log([2.0, 4.0, 16.0])  # the discrepancy changes when a number is multiplied by this
_MOST_ROWS = 300  # of which a process is made: its cost grows with their cube
_WIDEST = 20.0  # half-width, logarithm, from which it does not matter
_HALVINGS = 30  # of an interval of half-widths


class Discrepancy(NamedTuple):
    """The n fitted settings, as the process sees them, and k constants."""

    at: NDArray[np.float64]  # `positions` of the settings, [n, p]
    barrier: NDArray[np.bool_]  # synchronous and other settings have discrepancies of their own, [n]
    slopes: NDArray[np.float64]  # derivatives of the logarithm of a cycle by those of the constants, [n, k]
    residuals: NDArray[np.float64]  # logarithms of cycles over recorded ones, by the constants that `shift` leads to, [n]
    variances: NDArray[np.float64]  # of the recorded cycles' logarithms, by how cycles vary within runs, [n]
    between: NDArray[np.float64]  # the same, by how runs of a setting vary, [n]
    covariance: NDArray[np.float64]  # of the constants, by all that is known of them without the length of cycles, [k, k]
    shift: NDArray[np.float64]  # from the fitted constants to those that are known so, logarithms, [k]
    repetition: float  # variance of a row around its setting, beyond its own `Row.error`
    beside: NDArray[np.float64] | None = None  # `closed_form.beside_computing` of the settings, [n]; None: nobody timed it

    def half_widths(
        self,
        rows: Sequence[Row],
        slopes: NDArray[np.float64],
        errors: NDArray[np.float64],
        level: float,
        rivals: Sequence[tuple[float, NDArray[np.float64]]] = (),
        beside: NDArray[np.float64] | None = None,
    ) -> NDArray[np.float64]:
        """How far the recorded logarithms of `rows` are below and above predicted ones with probability `level`, [2, e, r].

        `slopes` are derivatives as above, [r, k]; `errors`, [e, r], are standard errors of the predictions, of e kinds.
        `rivals` are other models, each with the chance that it is the right one, and the logarithms of what it predicts of
        the rows over what this one does, [r]. Without any, both distances are the same. `beside` is that of the rows, [r].
        """
        weights, means, variances = self._mixture(rows, slopes, beside)
        own = np.array([row.error for row in rows]) ** 2
        deviations = np.sqrt(variances[:, None] + own + errors**2)  # [c, e, r]
        alone = _distance(
            lambda far: np.einsum(
                "c,cer->er",
                weights,
                ndtr((far - means[:, None]) / deviations) - ndtr((-far - means[:, None]) / deviations),
            ),
            level,
            errors.shape,
        )
        if not rivals:
            return np.stack([alone, alone])
        chances = np.array([1.0, *(chance for chance, _ in rivals)])
        chances[0] -= chances[1:].sum()
        shifts = [np.zeros(len(rows)), *(shift for _, shift in rivals)]

        def inside(side: int) -> NDArray[np.float64]:
            def within(far: NDArray[np.float64]) -> NDArray[np.float64]:
                total = np.zeros(errors.shape)
                for chance, shift in zip(chances, shifts, strict=True):
                    below = ndtr((far - side * (means + shift)[:, None]) / deviations)
                    total += chance * np.einsum("c,cer->er", weights, below)
                return total

            return _distance(within, (1 + level) / 2, errors.shape)

        return np.stack([inside(-1), inside(1)])

    def _mixture(
        self, rows: Sequence[Row], slopes: NDArray[np.float64], beside: NDArray[np.float64] | None
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
        """The weight of each of c processes, [c], and the mean and the variance of each row's error by it, [c, r]."""
        known = self._thinned()
        at, barrier = positions(rows), np.array([row.barrier for row in rows])
        by_constants = known.slopes @ known.covariance @ known.slopes.T + np.diag(known.variances)
        to_constants = slopes @ known.covariance @ known.slopes.T
        alone = np.einsum("rk,kl,rl->r", slopes, known.covariance, slopes)
        near, far = (
            (_squares(a, known.at), b[:, None] == known.barrier) for a, b in ((known.at, known.barrier), (at, barrier))
        )
        logs, means, variances = [], [], []
        for mine, theirs in known._proportions(beside, len(rows)):
            # All is divided by what errors are in proportion to, whose logarithms have the mean 0 over the settings.
            certain = by_constants / np.outer(mine, mine) + np.diag(known.between)
            across_constants = to_constants / np.outer(theirs, mine)
            off = known.residuals / mine
            for size, length in _processes():
                among, to = (size**2 * np.exp(-away / (2 * length**2)) * same for away, same in (near, far))
                values, vectors = np.linalg.eigh(certain + among)
                seen, across = -vectors.T @ off, (across_constants + to) @ vectors
                for noise in _NOISES:
                    spread = np.maximum(values, 0.0) + noise**2
                    logs.append(-0.5 * float((np.log(spread) + seen**2 / spread).sum()))
                    means.append(theirs * (across @ (seen / spread)) + slopes @ known.shift)
                    left = np.maximum(alone / theirs**2 + size**2 - (across**2 / spread).sum(axis=1), 0.0)
                    variances.append(theirs**2 * (left + noise**2 + known.repetition))
        share = np.exp(np.array(logs) - max(logs))
        return share / share.sum(), np.array(means), np.array(variances)

    def _proportions(
        self, beside: NDArray[np.float64] | None, count: int
    ) -> list[tuple[NDArray[np.float64], NDArray[np.float64]]]:
        """What errors may be in proportion to, of the settings, [n], and of as many rows, [r]: to whole cycles, and, where
        computing was timed, to what is beside it."""
        found = [(np.ones(len(self.at)), np.ones(count))]
        if self.beside is not None and beside is not None:
            usual = math.exp(float(np.log(self.beside).mean()))
            found.append((self.beside / usual, beside / usual))
        return found

    def _thinned(self) -> Discrepancy:
        """The same discrepancy, told by at most `_MOST_ROWS` settings, evenly chosen."""
        chosen = np.unique(np.linspace(0, len(self.at) - 1, min(len(self.at), _MOST_ROWS)).astype(int))
        of_settings = {name: getattr(self, name)[chosen] for name in self._fields[:6]}
        return self._replace(**of_settings, beside=None if self.beside is None else self.beside[chosen])


def _distance(
    within: Callable[[NDArray[np.float64]], NDArray[np.float64]], level: float, shape: tuple[int, ...]
) -> NDArray[np.float64]:
    """The least distances, of this shape, `within` which that much probability is; 0 at least."""
    below, above = np.zeros(shape), np.full(shape, _WIDEST)
    for _ in range(_HALVINGS):
        middle = (below + above) / 2
        short = within(middle) < level
        below, above = np.where(short, middle, below), np.where(short, above, middle)
    found: NDArray[np.float64] = (below + above) / 2
    return found


def positions(rows: Sequence[Row]) -> NDArray[np.float64]:
    """Where settings are: logarithms of their numbers, and of how unlike links, speeds, batches and servers' shares of the
    model are, [n, 9]."""

    def ratio(values: Sequence[float]) -> float:
        return max(values) / max(min(values), 1e-9) if values else 1.0

    def unlike(row: Row) -> list[float]:
        return [*(ratio(values) for values in (row.nics, row.speeds, row.batch_sizes)), row.largest_share * row.servers]

    each = [(r.workers, r.servers, r.batch_size, max(r.intra_threads, 1), r.transfer_bits, *unlike(r)) for r in rows]
    return np.log(np.array(each, dtype=np.float64).reshape(-1, 9))


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
