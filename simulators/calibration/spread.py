"""The 90 % interval of a prediction: how far a recorded mean may be from the simulated one.

Of these errors, the first three are independent of each other, on a logarithmic scale, and make one distribution
(`simulators.calibration.discrepancy`), whose half-width is taken:

* of the constants, of what the model lacks, which grows away from the fitted rows, and of a row beside its setting, as the
  fitted rows show them: in proportion to the cycle, or to the part of it that is not computing;
* of the seeds: the standard error of the simulated mean;
* of the recorded mean: fewer recorded cycles have a less certain mean (`Row.error`), of fitted rows and of predicted ones.

Constants that the fitted rows do not determine add to that: each of `Fit.alternatives` predicts something else. Such a
constant is 0 in the fit, or counts the messages that delays of links hold up, and can only be larger, so each of these
errors is on one side. Queues grow faster than it does, so the error is taken where the constant is as large as it may be,
and is a half-width already. Squares of half-widths are added. How much faster updates are on numbers of servers that were
not fitted may not be told, either: then there is an alternative in which they are as little faster as the fitted rows allow
(`Fit.least_exponent`).

Forms of the network that the fitted rows do not tell apart (`Fit.rivals`) predict something else, too. The distribution is
then a mixture over them, each at the place of its own prediction and with its chance; the interval leaves as much out on
either side.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.stats import t

from simulators.calibration.fit import Fit, closed_form_cycles, cycles, slopes
from simulators.calibration.least_squares import beside_computing
from simulators.calibration.recorded.row import Row

__all__ = ["LEVEL_PERCENT", "Residual", "log_half_widths", "row_noise"]

LEVEL_PERCENT = 90
_QUANTILE = 0.5 + LEVEL_PERCENT / 200
_OF_ITS_KIND = 4  # least combinations of a kind, with a barrier or without, from which its own residuals are taken
_FEW_SEEDS = 4  # of the difference between two forms, which is far larger than their errors where it matters
_IDLE = 0.02  # derivative below which a constant hardly takes part in a prediction


def log_half_widths(fit: Fit, rows: Sequence[Row], *errors: NDArray[np.float64]) -> NDArray[np.float64]:
    """How far the intervals of `rows` reach below and above the prediction, in logarithms, [n, e, 2].

    Each of e `errors`, [n], has relative standard errors of the rows' means. nan without a degree of freedom: with too few
    residuals, or where a prediction depends on a constant without an interval.
    """
    if fit.discrepancy is None:
        return np.full((len(rows), len(errors), 2), np.nan)
    by = slopes(fit, rows)
    here = closed_form_cycles(fit.constants, rows)
    away = np.array([np.log(closed_form_cycles(other, rows) / here) for other in fit.alternatives]).reshape(-1, len(rows))
    if fit.least_exponent is not None:
        seen = [row.servers in fit.servers for row in rows]
        slower = np.where(seen, 0.0, np.log(closed_form_cycles(fit.least_exponent, rows) / here))
        away = np.vstack([away, slower])
    open_ends = np.array([(np.maximum(side * away, 0.0) ** 2).sum(axis=0) for side in (-1, 1)])[:, None]  # [2, 1, n]
    unsure = np.array([ends is None for ends in fit.intervals.values()], dtype=bool)
    beside = beside_computing(fit.constants, rows)
    known = fit.discrepancy.half_widths(rows, by, np.array(errors), LEVEL_PERCENT / 100, _of_rivals(fit, rows), beside)
    widths: NDArray[np.float64] = np.sqrt(known**2 + open_ends)
    widths[:, :, (np.abs(by[:, unsure]) > _IDLE).any(axis=1)] = np.nan
    return widths.T


def _of_rivals(fit: Fit, rows: Sequence[Row]) -> list[tuple[float, NDArray[np.float64]]]:
    """The chance of every form that is not told apart, and the logarithm of what it predicts of `rows` over what the chosen
    one does: both by the engine, because the closed form does not know all forms."""
    if not fit.rivals:
        return []
    here = cycles(fit.constants, rows, _FEW_SEEDS).seconds
    return [(chance, np.log(cycles(other, rows, _FEW_SEEDS).seconds / here)) for chance, other in fit.rivals]


class Residual(NamedTuple):
    """The logarithm of a recorded cycle over the predicted one, of a model that was fitted without its combination."""

    combination: tuple[str, int, int]  # of policy, workers and servers
    barrier: bool
    value: float


def row_noise(residuals: Sequence[Residual], barrier: bool) -> tuple[float, float]:
    """The quantile of Student's t, and the mean square of the residuals; nan where there are too few."""
    mine = [r for r in residuals if r.barrier == barrier]
    if len({r.combination for r in mine}) < _OF_ITS_KIND:
        mine = list(residuals)
    free = len({r.combination for r in mine}) - 1
    if free < 1:
        return float("nan"), float("nan")
    return float(t.ppf(_QUANTILE, free)), float(np.mean([r.value**2 for r in mine]))
