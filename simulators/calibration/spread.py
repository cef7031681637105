"""The 90 % interval of a prediction: how far a recorded mean may be from the simulated one.

Four errors are independent of each other, and their variances are added on a logarithmic scale:

* of the seeds: the standard error of the simulated mean;
* of the constants: the covariance of the bootstrap, carried over to the prediction by the closed form's derivatives (delta
  method), because simulating every resample would take hours;
* of constants that the fitted rows do not determine: how far each of `Fit.alternatives` predicts from the fit. Such a
  constant is 0 in the fit, and can only be larger, so each of these errors is on one side. Queues grow faster than it does,
  so the error is taken where the constant is as large as it may be, and is a half-width already;
* of a row: what remains between recorded and fitted rows, repetition noise and what the model lacks, from the residuals of
  the fit, adjusted for the share that the fit has taken up.

Away from the fitted rows, what the model lacks grows. Where a discrepancy that the residuals allow
(`simulators.calibration.discrepancy`) makes more than the errors of the constants and of a row together, its mean square
error stands for both.

The half-width is that standard deviation times the quantile of Student's t, whose degrees of freedom are one less than the
combinations (policy, workers, servers) with a residual: rows of one combination are not independent.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from simulators.calibration.fit import Fit, Residual, closed_form_cycles, slopes
from simulators.calibration.model import Row

__all__ = ["LEVEL_PERCENT", "log_half_widths", "row_noise"]

LEVEL_PERCENT = 90
_QUANTILE = 0.5 + LEVEL_PERCENT / 200
_OF_ITS_KIND = 4  # least combinations of a kind, with a barrier or without, from which its own residuals are taken
_IDLE = 0.02  # derivative below which a constant hardly takes part in a prediction


def log_half_widths(fit: Fit, rows: Sequence[Row], *errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far the intervals of `rows` reach below and above the prediction, in logarithms, [n, e, 2].

    Each of e `errors`, [n], has relative standard errors of the rows' means. nan without a degree of freedom: with too few
    residuals, or where a prediction depends on a constant without an interval.
    """
    by = slopes(fit, rows)
    constants = np.maximum(np.einsum("nk,kl,nl->n", by, fit.covariance, by), 0.0)
    here = closed_form_cycles(fit.constants, rows)
    away = np.array([np.log(closed_form_cycles(other, rows) / here) for other in fit.alternatives]).reshape(-1, len(rows))
    open_ends = np.array([(np.maximum(side * away, 0.0) ** 2).sum(axis=0) for side in (-1, 1)])[:, None]  # [2, 1, n]
    unsure = np.array([ends is None for ends in fit.intervals.values()], dtype=bool)
    quantile, noise = np.array([row_noise(fit.residuals, row.barrier) for row in rows]).reshape(-1, 2).T
    lacking = fit.discrepancy.mean_squares(rows, by) if fit.discrepancy else np.zeros(len(rows))
    known = np.maximum(constants + noise, lacking) + np.array(errors) ** 2  # [e, n]
    widths: NDArray[np.float64] = np.sqrt(quantile**2 * known + open_ends)
    widths[:, :, (np.abs(by[:, unsure]) > _IDLE).any(axis=1)] = np.nan
    return widths.T


def row_noise(residuals: Sequence[Residual], barrier: bool) -> tuple[float, float]:
    """The quantile of Student's t, and the mean square of the residuals; nan where there are too few."""
    mine = [r for r in residuals if r.barrier == barrier]
    if len({r.combination for r in mine}) < _OF_ITS_KIND:
        mine = list(residuals)
    free = len({r.combination for r in mine}) - 1
    if free < 1:
        return float("nan"), float("nan")
    return float(t.ppf(_QUANTILE, free)), float(np.mean([r.value**2 for r in mine]))
