"""The error of the simulator's predictions, on recorded rows that it was fitted to and on rows that were held out.

Cross-validation: every row is held out once. A workload with ten settings or more is divided by settings, in the order of
policy, workers, servers, batch and threads: setting i is in fold i mod 5, with all its runs. A workload with fewer settings
is divided by rows in that order, because too few settings would be left to fit if whole settings were held out.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import median

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import nnls

from simulators.calibration.fit import Fit, completed, fit_all, predicted
from simulators.calibration.model import Constants, Row, with_speeds
from simulators.calibration.output import Provenance
from simulators.calibration.recordings import Recording
from simulators.calibration.staleness import LEVEL, Effort, fitted_rate, proxy_ratio, ratio
from simulators.reconfiguration import plan as reconfigure
from simulators.reconfiguration.plan import Costs, Load
from tuners.actions import Setting

__all__ = ["COMPLETION", "FOLDS", "STALE", "Check", "Prediction", "check"]

FOLDS = 5
STALE = "mini-batches, asynchronous over synchronous"
COMPLETION = ", completion"  # suffix of groups that predict the time of all pushes of a segment instead of a cycle
_SETTINGS = 10  # least number of settings of a workload that is divided by settings


@dataclass(frozen=True, slots=True)
class Prediction:
    """One recorded value and its predictions: seconds, or a ratio of mini-batches."""

    group: str  # workload and policy, or a kind of reconfiguration
    run: str
    label: str  # the setting in words
    recorded: float
    fitted: float  # by the simulator, fitted to all rows
    held_out: float  # by the simulator, fitted to the other folds; nan where they do not determine it
    plain_fitted: float  # by the baseline, a linear model (see `_plain`), fitted to all rows
    plain_held_out: float


@dataclass(frozen=True, slots=True)
class Check:
    """A recording and its predictions."""

    origin: Provenance
    predictions: tuple[Prediction, ...]
    fits: Mapping[str, Fit]
    by_settings: tuple[str, ...]  # workloads divided by settings; the others are divided by rows
    folds: int
    caveats: tuple[str, ...]


def check(
    recording: Recording,
    given: Mapping[str, Constants],
    origin: Provenance,
    folds: int = FOLDS,
    watch: Callable[[str], None] = lambda _: None,
) -> Check:
    """Fit to all rows, and to all rows but each fold; predict. Raises ValueError without rows, and for one fold.

    `watch` is told what is fitted next.
    """
    if folds < 2:
        raise ValueError(f"Cannot hold out with {folds} folds: give at least 2, which are halves.")
    fits = fit_all(recording.rows, given, watch=watch)
    rows = sorted(recording.rows, key=lambda r: (r.workload, _order(r), r.run))
    fold_of, by_settings = _folds(rows, folds)
    held, plain = np.full((len(rows), 2), np.nan), np.full((len(rows), 2), np.nan)
    for fold in range(folds):
        out = [i for i, f in enumerate(fold_of) if f == fold]
        kept = [r for r, f in zip(rows, fold_of, strict=True) if f != fold]
        if not (out and kept):
            continue
        watch(f"fold {fold + 1} of {folds}: fitting {len(kept)} rows, predicting {len(out)}")
        known = fit_all(kept, given, resamples=0)
        held[out] = _predicted(known, rows, out)
        plain[out] = _plain(kept, [rows[i] for i in out])
    fitted = _predicted(fits, rows, range(len(rows)))
    values = np.stack([fitted, held, _plain(rows, rows), plain])  # [4, n, 2]
    groups = _groups(rows)
    made = [_made(groups[i], r, r.cycle_seconds, values[:, i, 0]) for i, r in enumerate(rows)]
    made += [_made(groups[i] + COMPLETION, r, r.all_seconds, values[:, i, 1]) for i, r in enumerate(rows) if _completes(r)]
    others = (*_switches(recording.switch_seconds, folds), *_stale(recording.efforts))
    return Check(origin, (*made, *others), fits, by_settings, folds, recording.caveats)


def _made(group: str, row: Row, recorded: float, values: NDArray[np.float64]) -> Prediction:
    return Prediction(group, row.run, _label(row), recorded, *map(float, values))


def _completes(row: Row) -> bool:
    """Whether the time of all pushes under the setting was recorded."""
    return row.all_pushes > 1


def _order(row: Row) -> tuple[str, int, int, int, int, int]:
    return (row.policy, row.workers, row.servers, row.batch_size, row.intra_threads, row.transfer_bits)


def _folds(rows: Sequence[Row], count: int) -> tuple[NDArray[np.int64], tuple[str, ...]]:
    """The fold of each row, and the workloads that are divided by settings."""
    folds, by_settings = np.zeros(len(rows), int), []
    for name in dict.fromkeys(r.workload for r in rows):
        mine = [i for i, r in enumerate(rows) if r.workload == name]
        settings = list(dict.fromkeys(_order(rows[i]) for i in mine))
        if len(settings) >= _SETTINGS:
            by_settings.append(name)
            folds[mine] = [settings.index(_order(rows[i])) % count for i in mine]
        else:
            folds[mine] = np.arange(len(mine)) % count
    return folds, tuple(by_settings)


def _groups(rows: Sequence[Row]) -> list[str]:
    """The workload and policy of each row; if most rows of these have one setting, the others form a group of their own."""
    found = []
    for row in rows:
        alike = [_order(r) for r in rows if (r.workload, r.policy) == (row.workload, row.policy)]
        usual, count = Counter(alike).most_common(1)[0]
        other = count > len(alike) / 2 and _order(row) != usual
        found.append(f"{row.workload}, {row.policy}{', other settings' if other else ''}")
    return found


def _predicted(fits: Mapping[str, Fit], rows: Sequence[Row], wanted: Sequence[int]) -> NDArray[np.float64]:
    """Seconds of a cycle, and from the first to the last of all pushes, of the `wanted` rows, [n, 2]."""
    found = np.full((len(wanted), 2), np.nan)
    for name, fit in fits.items():
        ours = [i for i, r in enumerate(rows) if r.workload == name]
        # The speeds of a run's workers come from all its rows, held out or not: they belong to the machines of that run.
        speedy = dict(zip(ours, with_speeds([rows[i] for i in ours], fit.common_seconds), strict=True))
        mine = [k for k, i in enumerate(wanted) if i in speedy]
        if mine:
            found[mine, 0] = predicted(fit.constants, [speedy[wanted[k]] for k in mine])
        whole = [k for k in mine if _completes(rows[wanted[k]])]
        if whole:
            found[whole, 1] = completed(fit.constants, [speedy[wanted[k]] for k in whole])
    return found


def _plain(known: Sequence[Row], wanted: Sequence[Row]) -> NDArray[np.float64]:
    """The baseline: seconds of a cycle, and of all cycles of a segment, [n, 2], by a linear model with four costs >= 0.

    The terms are a constant, samples per thread, servers, and workers per server; for each workload and policy separately,
    by least squares of relative errors.
    """

    def terms(row: Row) -> list[float]:
        return [1.0, row.batch_size / max(row.intra_threads, 1), row.servers, row.workers / row.servers]

    found = np.full(len(wanted), np.nan)
    for kind in {(r.workload, r.policy) for r in wanted}:
        mine = [r for r in known if (r.workload, r.policy) == kind]
        if mine:
            table = np.array([[x / r.cycle_seconds for x in terms(r)] for r in mine])
            costs, _ = nnls(table, np.ones(len(mine)))
            at = [i for i, r in enumerate(wanted) if (r.workload, r.policy) == kind]
            found[at] = np.array([terms(wanted[i]) for i in at]) @ costs
    cycles = np.array([max(r.all_pushes - 1, 0) / r.workers for r in wanted])
    return np.stack([found, found * cycles], axis=1)


def _switches(recorded: Sequence[float], folds: int) -> tuple[Prediction, ...]:
    """Predictions of a change of the policy, by the simulator's own plan; the baseline is the mean."""
    if not recorded:
        return ()
    before = Setting(workers=("a",), servers=("b",), policy="bsp")
    after = replace(before, policy="asp")

    def planned(known: Sequence[float]) -> float:
        costs = Costs(policy_restart_seconds=median(known))
        plan = reconfigure.plan(before, after, "checkpoint", Load(0.0, 0, 0.0), costs)
        return sum(step.seconds for step in plan.steps)

    made = []
    for i, seconds in enumerate(recorded):
        others = [s for j, s in enumerate(recorded) if j % folds != i % folds] or [float("nan")]
        plain = (float(np.mean(recorded)), float(np.mean(others)))
        made.append(Prediction("switch of policy", str(i), "switch", seconds, planned(recorded), planned(others), *plain))
    return tuple(made)


def _stale(recorded: Sequence[Effort]) -> tuple[Prediction, ...]:
    """Predictions of the staleness ratio in each half of the runs from the other half; the baseline ignores staleness: 1."""
    made = []
    for name in dict.fromkeys(e.workload for e in recorded):
        mine = [e for e in recorded if e.workload == name]
        halves: tuple[list[Effort], list[Effort]] = ([], [])
        for policy in ("asp", "bsp"):
            alike = [e for e in mine if e.policy == policy]
            for half in (0, 1):
                halves[half].extend(alike[half::2])
        known = [(half, ratio(half), ratio(rest)) for half, rest in (halves, halves[::-1])]
        if not all(np.isfinite(value) for _, *values in known for value in values):
            continue
        workers = mine[0].workers
        fitted = proxy_ratio(fitted_rate(ratio(mine), workers), workers)
        for i, (_, seen, others) in enumerate(known):
            held = proxy_ratio(fitted_rate(others, workers), workers)
            made.append(Prediction(STALE, str(i), f"{name}, {100 * LEVEL:g} % of the best", seen, fitted, held, 1.0, 1.0))
    return tuple(made)


def _label(row: Row) -> str:
    threads = f", {row.intra_threads} threads" if row.intra_threads else ""
    return f"{row.workers} workers, {row.servers} servers, batch {row.batch_size}{threads}"
