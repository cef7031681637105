"""Predictions of recorded rows by the simulator and by two baselines, each with its interval.

The baselines need no simulation. The closed network (mean-value analysis, `closed_form`) has the constants of the simulator
and is fitted to the same rows. The plain form is a linear model. In cross-validation it is fitted to all rows without the
combination that it predicts (leave one out): on a fold of few combinations its terms would become collinear.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from simulators.calibration.fit import Estimates, Fit, closed_form_cycles, completed, cycles
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.speeds import with_speeds
from simulators.calibration.spread import Residual, log_half_widths, row_noise

__all__ = [
    "COMPLETION",
    "HELD_OUT",
    "LARGER",
    "OTHER",
    "UNLIKE",
    "Forms",
    "Prediction",
    "Values",
    "forms_of",
    "left_out",
    "order_of",
    "predictions_of",
    "with_speeds_by",
]

COMPLETION = ", completion"  # suffix of groups that predict the time of all pushes of a segment instead of a cycle
HELD_OUT, LARGER, UNLIKE, OTHER = "held out", "small to large", "equal to unlike hosts", "other recordings"


@dataclass(frozen=True, slots=True)
class Prediction:
    """One recorded value and its predictions: seconds, or a ratio of mini-batches."""

    group: str  # workload and policy, or a kind of reconfiguration
    run: str
    label: str  # the setting in words
    recorded: float
    fitted: float  # by the simulator, fitted to all rows; nan for other recordings
    held_out: float  # by the simulator, fitted without this row's combination; nan where the other rows do not determine it
    plain_fitted: float  # by the plain form, a linear model (see `_plain`), fitted to all rows
    plain_held_out: float
    split: str = HELD_OUT  # how the rows of the fit were chosen, see `validation`
    error: float = float("nan")  # relative standard error of `held_out` as a mean over seeds
    low: float = float("nan")  # ends of the 90 % interval around `held_out`; nan without degrees of freedom
    high: float = float("nan")
    workers: int = 0  # of the setting; 0: the row describes none
    servers: int = 0
    batch_size: int = 0  # of one worker
    setting: int = -1  # equal for runs of one setting on the same links; -1: the row describes none
    compute_share: float = float("nan")  # recorded seconds of computing over those of the cycle
    network_fitted: float = float("nan")  # by the closed network (see `closed_form`), fitted to all rows
    network_held_out: float = float("nan")
    network_low: float = float("nan")  # ends of the 90 % interval around `network_held_out`
    network_high: float = float("nan")
    plain_low: float = float("nan")  # ends of the 90 % interval around `plain_held_out`
    plain_high: float = float("nan")
    recorded_error: float = 0.0  # relative standard error of `recorded`, by how its cycles vary within the run; 0: not known


def with_speeds_by(fit: Fit, rows: Sequence[Row]) -> tuple[Row, ...]:
    """The rows with the speeds of their workers, as `fit` tells them apart from what all machines have in common."""
    return with_speeds(rows, fit.common_seconds, fit.constants.saturation_samples)


class Values(NamedTuple):
    """Predictions of n rows: of a cycle, and of all pushes of a segment; and half-widths of their intervals, logarithms."""

    cycle: Estimates
    whole: Estimates
    widths: NDArray[np.float64]  # [n, 2, 2]: of both, below and above

    @staticmethod
    def empty(count: int) -> Values:
        """Nothing known yet: nan."""
        cycle, whole = (Estimates(np.full(count, np.nan), np.full(count, np.nan)) for _ in range(2))
        return Values(cycle, whole, np.full((count, 2, 2), np.nan))

    def put(self, at: Sequence[int], values: Values) -> None:
        """Fill in the predictions of some rows."""
        index = list(at)
        for mine, new in zip(
            (*self.cycle, *self.whole, self.widths), (*values.cycle, *values.whole, values.widths), strict=True
        ):
            mine[index] = new

    def at(self, index: Sequence[int]) -> Values:
        """The predictions of some rows."""
        some = list(index)
        return Values(
            Estimates(*(x[some] for x in self.cycle)), Estimates(*(x[some] for x in self.whole)), self.widths[some]
        )


class Forms(NamedTuple):
    """Predictions of the same rows by the simulator and by both baselines."""

    simulator: Values
    network: Values
    plain: Values

    @staticmethod
    def empty(count: int) -> Forms:
        """Nothing known yet: nan."""
        return Forms(*(Values.empty(count) for _ in range(3)))

    def put(self, at: Sequence[int], forms: Forms) -> None:
        """Fill in the predictions of some rows."""
        for mine, new in zip(self, forms, strict=True):
            mine.put(at, new)

    def at(self, index: Sequence[int]) -> Forms:
        """The predictions of some rows."""
        return Forms(*(values.at(index) for values in self))


def predictions_of(
    rows: Sequence[Row], wanted: Sequence[int], split: str, fitted: Forms, held: Forms, *, whole: bool = True
) -> list[Prediction]:
    """Predictions of the cycle of each `wanted` row, then, if `whole`, of the completion of those that have it.

    `fitted` and `held`, held out, are of the wanted rows.
    """
    groups = _groups(rows)
    settings = {same: i for i, same in enumerate(dict.fromkeys(map(_same, rows)))}

    def made(group: str, k: int, row: Row, column: int, recorded: float) -> Prediction:
        seen = [(of.cycle, of.whole)[column].seconds[k] for of in fitted]
        told = [(of.cycle, of.whole)[column] for of in held]
        at = np.array([of.seconds[k] for of in told])
        below, above = np.array([of.widths[k, column] for of in held]).T
        lows, highs = at * np.exp(-below), at * np.exp(above)
        return Prediction(
            group=group,
            run=row.run,
            label=_label(row),
            recorded=recorded,
            fitted=float(seen[0]),
            held_out=float(at[0]),
            plain_fitted=float(seen[2]),
            plain_held_out=float(at[2]),
            split=split,
            error=float(told[0].errors[k]),
            low=float(lows[0]),
            high=float(highs[0]),
            workers=row.workers,
            servers=row.servers,
            batch_size=row.batch_size,
            setting=settings[_same(row)],
            compute_share=row.compute_seconds / row.cycle_seconds,
            network_fitted=float(seen[1]),
            network_held_out=float(at[1]),
            network_low=float(lows[1]),
            network_high=float(highs[1]),
            plain_low=float(lows[2]),
            plain_high=float(highs[2]),
            recorded_error=row.error,
        )

    all_ = [(k, rows[i], groups[i]) for k, i in enumerate(wanted)]
    found = [made(group, k, r, 0, r.cycle_seconds) for k, r, group in all_]
    return found + [made(group + COMPLETION, k, r, 1, r.all_seconds) for k, r, group in all_ if whole and _completes(r)]


def _same(row: Row) -> Row:
    """Equal for runs of one setting on the same links. Speeds and sleeps are measured in each run."""
    return replace(row.setting_only(), speeds=(), sleeps=(), machines=0, snapshot_clocks=0, cycle_snapshot_clocks=0)


def _completes(row: Row) -> bool:
    """Whether the time of all pushes under the setting was recorded."""
    return row.all_pushes > 1


def order_of(row: Row) -> tuple[str, int, int, int, int, int, int]:
    """What rows are sorted by: equal for rows of one combination, with equal batches, threads and bits."""
    return (*row.combination, row.staleness, row.batch_size, row.intra_threads, row.transfer_bits)


def _groups(rows: Sequence[Row]) -> list[str]:
    """The workload and policy of each row; if most rows of these have one setting, the others form a group of their own."""
    found = []
    for row in rows:
        alike = [order_of(r) for r in rows if (r.workload, r.policy) == (row.workload, row.policy)]
        usual, count = Counter(alike).most_common(1)[0]
        other = count > len(alike) / 2 and order_of(row) != usual
        found.append(f"{row.workload}, {row.policy}{', other settings' if other else ''}")
    return found


def forms_of(
    fits: Mapping[str, Fit],
    network: Mapping[str, Fit],
    known: Sequence[Row],
    rows: Sequence[Row],
    wanted: Sequence[int],
    *,
    whole: bool = True,
) -> Forms:
    """The predictions of the `wanted` rows by `fits` of the engine, by the closed `network`, and by the plain form fitted to
    `known` rows; without `whole`, of cycles only."""
    some = [rows[i] for i in wanted]
    simulated = _fitted(fits, rows, wanted, lambda fit, mine: _simulated(fit, mine, whole=whole))
    return Forms(simulated, _fitted(network, rows, wanted, _by_network), _plain(known, some))


def _fitted(
    fits: Mapping[str, Fit],
    rows: Sequence[Row],
    wanted: Sequence[int],
    predict: Callable[[Fit, Sequence[Row]], Values],
) -> Values:
    """What `predict` tells of the `wanted` rows of each workload with its fit."""
    found = Values.empty(len(wanted))
    for name, fit in fits.items():
        ours = [i for i, r in enumerate(rows) if r.workload == name]
        # The speeds of a run's workers come from all its rows, held out or not: they belong to the machines of that run.
        speedy = dict(zip(ours, with_speeds_by(fit, [rows[i] for i in ours]), strict=True))
        mine = [k for k, i in enumerate(wanted) if i in speedy]
        if mine:
            found.put(mine, predict(fit, [speedy[wanted[k]] for k in mine]))
    return found


def _simulated(fit: Fit, rows: Sequence[Row], *, whole: bool) -> Values:
    """The predictions of rows of one workload by the engine; without `whole`, of cycles only."""
    cycle, completion = cycles(fit.constants, rows), Values.empty(len(rows)).whole
    complete = [k for k, row in enumerate(rows) if whole and _completes(row)]
    if complete:
        told = completed(fit.constants, [rows[k] for k in complete])
        completion.seconds[complete], completion.errors[complete] = told
    return Values(cycle, completion, log_half_widths(fit, rows, cycle.errors, completion.errors))


def _by_network(fit: Fit, rows: Sequence[Row]) -> Values:
    """The predictions of rows of one workload by the closed form, with intervals as the engine's have."""
    return _steady(rows, closed_form_cycles(fit.constants, rows), log_half_widths(fit, rows, np.zeros(len(rows)))[:, 0])


def _steady(rows: Sequence[Row], seconds: NDArray[np.float64], widths: NDArray[np.float64]) -> Values:
    """Predictions of a formula, which tells no warm-up: all pushes of a segment take as many cycles as they are.

    `widths` are those of the intervals, below and above, [n, 2].
    """
    counts = np.array([max(r.all_pushes - 1, 0) / r.workers for r in rows])
    exact = np.zeros(len(rows))
    both = Estimates(seconds, exact), Estimates(seconds * counts, exact.copy())
    return Values(*both, np.stack([widths, widths], axis=1))


def _plain(known: Sequence[Row], wanted: Sequence[Row]) -> Values:
    """The plain form, fitted to `known` rows. Intervals are from its errors on these, each with its combination left out."""
    known, widths = list(known), np.full((len(wanted), 2), np.nan)
    told = list(zip(known, _without_own(known), strict=True))
    residuals = [(r, Residual(r.combination, r.barrier, float(np.log(r.cycle_seconds / at)))) for r, at in told if at > 0]
    for i, row in enumerate(wanted):
        mine = [residual for r, residual in residuals if (r.workload, r.policy) == (row.workload, row.policy)]
        quantile, variance = row_noise(mine, row.barrier)
        widths[i] = quantile * np.sqrt(variance)
    return _steady(wanted, _linear(known, wanted), widths)


def _linear(known: Sequence[Row], wanted: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of a cycle, [n], by a linear model with four costs >= 0, fitted to `known` rows.

    The terms are a constant, samples per thread, servers, and workers times the largest server's share of the model; for
    each workload and policy separately, by least squares of relative errors.
    """

    def terms(row: Row) -> list[float]:
        samples = max(row.batches) if row.barrier else row.batch_size
        return [1.0, samples / max(row.intra_threads, 1), row.servers, row.workers * row.largest_share]

    found = np.full(len(wanted), np.nan)
    for kind in {(r.workload, r.policy) for r in wanted}:
        mine = [r for r in known if (r.workload, r.policy) == kind]
        if mine:
            table = np.array([[x / r.cycle_seconds for x in terms(r)] for r in mine])
            costs, _ = nnls(table, np.ones(len(mine)))
            at = [i for i, r in enumerate(wanted) if (r.workload, r.policy) == kind]
            found[at] = np.array([terms(wanted[i]) for i in at]) @ costs
    return found


def _without_own(rows: Sequence[Row]) -> NDArray[np.float64]:
    """The linear model's seconds of each row's cycle, [n], fitted to all rows without the row's combination."""
    found = np.full(len(rows), np.nan)
    for out, kept in _combinations(rows):
        found[out] = _linear(kept, [rows[i] for i in out])
    return found


def left_out(rows: Sequence[Row]) -> Values:
    """The plain form's predictions of each row, fitted to all rows without the row's combination."""
    found = Values.empty(len(rows))
    for out, kept in _combinations(rows):
        found.put(out, _plain(kept, [rows[i] for i in out]))
    return found


def _combinations(rows: Sequence[Row]) -> Iterator[tuple[list[int], list[Row]]]:
    """For every combination of a workload, the indices of its rows, and the other rows."""
    for kind in dict.fromkeys((r.workload, r.combination) for r in rows):
        out = [i for i, r in enumerate(rows) if (r.workload, r.combination) == kind]
        yield out, [r for r in rows if (r.workload, r.combination) != kind]


def _label(row: Row) -> str:
    threads = f", {row.intra_threads} threads" if row.intra_threads else ""
    batch = f"batches {min(row.batches)} to {max(row.batches)}" if row.batch_sizes else f"batch {row.batch_size}"
    return f"{row.workers} workers, {row.servers} servers, {batch}{threads}"
