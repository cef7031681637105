"""Fits the constants of a workload and of its machines to recorded times.

The predictions are those of the engine. Simulating inside the search would be too slow, so the closed form of
`simulators.calibration.closed_form` is fitted to the logarithms of the recorded times by least squares. Then the engine
simulates every setting, the closed form is multiplied by the ratio engine / closed form, and is fitted again. After a few
rounds, the engine itself fits the recording.

A constant is refused if its knob never varied, or if its confidence interval is wider than an order of magnitude either way.
It then keeps its default, and `Fit.refused` says which measurement would determine it. How large it may be nevertheless is
in `Fit.alternatives`, for the intervals of predictions: what hardly matters in the fitted rows may decide others. A constant
that takes up a measurement of its own leaves no degree of freedom to tell its error from, and is fitted without an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from copy import copy
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import norm, t

from simulators.calibration import closed_form
from simulators.calibration.closed_form import Spans
from simulators.calibration.discrepancy import Discrepancy, positions
from simulators.calibration.model import (
    SEEDS,
    Constants,
    Estimate,
    Row,
    common_guess,
    plant,
    simulated,
    simulated_seconds,
    with_speeds,
)

__all__ = [
    "NO_FREEDOM",
    "Constants",
    "Estimates",
    "Fit",
    "Residual",
    "Row",
    "closed_form_cycles",
    "completed",
    "cycles",
    "fit",
    "fit_all",
    "predicted",
    "slopes",
]

_FEW_SEEDS = 4  # of a row while the constants are searched for; the same ones every time, so that rounds can be compared
_ROUNDS = 3  # of correcting the closed form to the engine
_MACHINE = ("apply_exponent", "nic_bytes_per_second", "service_bytes_per_second", "latency_seconds")
_RESAMPLES = 400
_DRAWS = 100  # of the resamples, the first ones, which are kept for scenarios
_WIDE = math.log(10.0) / 1.96  # standard error of a logarithm at which the interval is an order of magnitude either way
_STEP = 1e-6  # of a logarithm, for derivatives
_REACH = 7.0  # standard deviation of the prior, and half-width of the search interval, in logarithms
_SHARES = ("serial_fraction", "apply_exponent")  # constants in [0, 1]
_CONVERGED = 1e-8  # relative change of cost, and of constants, at which a search ends
_EVALUATIONS = 100  # of one search, at most
_DECIMALS = 4  # of the logarithms of constants, which are rounded before the engine sees them
_LEAST_NOISE = 0.003  # relative error that every recorded mean is assumed to have at least
_SCALE = 0.05  # relative error above which a row weighs less than its square (soft L1)
_UNKNOWN = 10.0  # times its guess: the most that a refused constant may be where the rows tell nothing of it
_MOST = 0.975  # quantile of a constant's error; as it cannot be below 0, 95 % of what it may be are below
_NEEDED = 1.5  # an uncertain constant stays if the cost without it is more than so many times the cost with it
_SATURATED = 0.99  # leverage of a single row above which its residual is 0 whatever its noise is
_REDUNDANT = 0.05  # relative difference below which a cycle is the sum of its parts, and no measurement of its own
_VISIBLE = 0.01  # a part of a cycle is fitted if it takes at least this share of the cycle

NO_FREEDOM = "no degree of freedom: as many constants as measurements that determine them"

# The measurement that would determine each constant, in the order in which uncertain constants are dropped.
_MEASUREMENTS: dict[str, str] = {
    "apply_exponent": "the same job on one, two and many servers, with enough workers to keep all of them busy",
    "delay_messages": "the same job with a link delayed and without, and how long the delay was",
    "commit_seconds": "the same job on one, two and three servers, with few and with many workers",
    "master_sample_seconds": "synchronous runs at two batch sizes or more, besides asynchronous ones at two",
    "latency_seconds": "iterations with seconds of pulls and pushes, of a model small enough to take no time",
    "service_bytes_per_second": "iterations with seconds of pulls while many workers pull from one server",
    "serial_fraction": "two batch sizes under each of two counts of threads",
    "step_seconds": "synchronous runs on one, two and many servers, or synchronous and asynchronous ones",
    "message_seconds": "the same job on few and on many servers",
    "apply_seconds": "the same job on one server with few and with many workers",
    "transfer": "iterations with seconds of pulls and pushes, or runs with few servers and many workers",
    "fixed_seconds": "two batch sizes at least, or two counts of threads",
    "sample_seconds": "runs of at least one worker",
}


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of fitting one workload of a recording."""

    constants: Constants
    intervals: Mapping[
        str, tuple[float, float] | None
    ]  # of the fitted constants: 95 %, bootstrap; None: no degree of freedom
    refused: Mapping[str, str]  # constants that keep their default, and why
    borrowed: Mapping[str, float]  # constants of the machines that were fitted on other workloads of the recording
    rows: int
    error: float  # median relative error on these rows
    common_seconds: float = 0.0  # compute seconds that do not depend on a worker's speed
    covariance: NDArray[np.float64] = field(
        default_factory=lambda: np.zeros((0, 0)), compare=False
    )  # of logs of `intervals`
    residuals: tuple[Residual, ...] = ()  # of the rows; those that took up a degree of freedom are left out
    draws: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # of `intervals`: values of the first resamples
    discrepancy: Discrepancy | None = field(default=None, compare=False)  # what the model lacks; None: not inferred
    alternatives: tuple[Constants, ...] = ()  # each with a refused constant as large as may be (95 %), the others fitted

    @property
    def unsure(self) -> tuple[str, ...]:
        """The constants that were fitted without a degree of freedom."""
        return tuple(name for name, ends in self.intervals.items() if ends is None)


class Residual(NamedTuple):
    """The logarithm of a recorded cycle over the fitted one, corrected for the share of it that the fit has taken up."""

    combination: tuple[str, int, int]  # of policy, workers and servers
    barrier: bool
    value: float


class Estimates(NamedTuple):
    """Means over seeds of the engine, [n]."""

    seconds: NDArray[np.float64]
    errors: NDArray[np.float64]  # relative standard errors of the means


def fit_all(
    rows: Sequence[Row],
    given: Mapping[str, Constants],
    *,
    resamples: int = _RESAMPLES,
    without: Sequence[str] = (),
    watch: Callable[[str], None] = lambda _: None,
    engine: bool = True,
) -> dict[str, Fit]:
    """Fit every workload of a recording. A constant of the machines that one workload cannot determine is taken from others.

    `given` are the initial constants, by workload. Transfers determine only the ratio of the model's size to the NIC's rate:
    where `model_bytes` is 0 in `given`, the size is fitted, otherwise the NIC's rate. Constants in `without` stay as given.
    Without `engine`, the closed form is fitted as it is, for a baseline. `watch` is told what is fitted next. Raises
    ValueError for no rows.
    """
    if not rows:
        raise ValueError(
            "Cannot calibrate: no run has both a setting and times. Record the numbers of workers and servers (table "
            "settings), and times: seconds and steps (runs or progress), or iterations: three of each worker, or more."
        )
    by_workload: dict[str, list[Row]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    fits: dict[str, Fit] = {}
    for number, (name, mine) in enumerate(by_workload.items(), 1):
        watch(f"{name}, {len(mine)} rows, workload {number} of {len(by_workload)}")
        fits[name] = fit(mine, given[name], resamples=resamples, without=without, engine=engine)
    for name, mine in by_workload.items():
        borrowed: dict[str, Any] = {}
        for constant in _MACHINE:
            found = [
                getattr(f.constants, constant) for other, f in fits.items() if other != name and constant in f.intervals
            ]
            if found and constant in fits[name].refused:
                borrowed[constant] = math.exp(float(np.mean(np.log(found))))
        if borrowed:
            kept = (*without, *borrowed)
            made = fit(mine, replace(given[name], **borrowed), resamples=resamples, without=kept, engine=engine)
            fits[name] = replace(made, borrowed=borrowed)
    return fits


def fit(
    rows: Sequence[Row],
    given: Constants,
    *,
    resamples: int = _RESAMPLES,
    without: Sequence[str] = (),
    engine: bool = True,
) -> Fit:
    """Fit the constants that `rows`, of one workload, can determine, except `without`; the others stay as `given`.

    Without `engine`, the closed form is not corrected to the engine, and its constants and errors are its own.
    """
    machines = max(r.workers + r.servers for r in rows)
    rows = [replace(r, machines=machines) for r in rows]
    if any(r.batch_sizes for r in rows):
        # Without a guess of what does not grow with the batch, workers with small batches look slow in the first fit.
        rows = list(with_speeds(rows, common_guess(rows)))
    transfer = "nic_bytes_per_second" if given.model_bytes else "model_bytes"
    refused = {name: why for name, why in _not_measured(rows).items() if name not in without}
    names = [name for name in _MEASUREMENTS if name not in refused and name not in without]
    free = [transfer if name == "transfer" else name for name in names]
    problems = [_Problem(rows, given, engine)]
    if any(r.has_parts for r in rows):
        # Recordings do not say which part of a cycle includes messages and latency: try both, keep the better fit.
        problems.append(_Problem(rows, replace(given, in_transfers=not given.in_transfers), engine))
    (solved, refusals), *others = [_fit_determined(p, free, refused) for p in problems]
    for other, why in others:
        # Where no message is determined, both are the same problem, and only the search's path differs.
        if _clearly_less(other.cost, solved.cost):
            solved, refusals = other, why
    common = 0.0
    if any(r.speeds for r in rows):
        # A worker's speed follows from its compute time without the part that is common to all workers. This part is known
        # only after a first fit, so the speeds are computed again, and everything is fitted again.
        found = solved.constants
        common = found.fixed_seconds + (0.0 if found.in_transfers else found.overhead_seconds(rows[0]))
        rows = with_speeds(rows, common)
        solved, refusals = _fit_determined(_Problem(rows, solved.problem.given, engine), free, refused)
    constants = _with_jitter(solved.constants, rows)
    told = predicted(constants, rows) if engine else closed_form_cycles(constants, rows)
    errors = np.abs(told / np.array([r.cycle_seconds for r in rows]) - 1)
    drawn = solved.resampled(resamples)
    return Fit(
        constants,
        solved.intervals(drawn),
        refusals,
        {},
        len(rows),
        float(np.median(errors)),
        common,
        np.atleast_2d(np.cov(drawn.T)) if resamples else np.zeros((len(solved.free), len(solved.free))),
        solved.adjusted_residuals(),
        {n: tuple(_decoded(n, float(x)) for x in codes) for n, codes in zip(solved.free, drawn[:_DRAWS].T, strict=True)},
        solved.discrepancy(),
        tuple(replace(other, jitter=constants.jitter) for other in solved.alternatives(map(_field, refusals))),
    )


def _with_jitter(constants: Constants, rows: Sequence[Row]) -> Constants:
    """With the jitter of computing alone: recorded compute times include messages, whose time is constant."""
    timed = [r for r in rows if r.has_parts and not constants.in_transfers]
    shares = [min(constants.overhead_seconds(r) / r.compute_seconds, 0.9) for r in timed]
    return replace(constants, jitter=constants.jitter / (1 - float(np.median(shares)))) if shares else constants


def predicted(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of a cycle that the engine simulates for each row."""
    return cycles(constants, rows).seconds


def cycles(constants: Constants, rows: Sequence[Row]) -> Estimates:
    """Seconds of a cycle that the engine simulates for each row, and their errors."""
    machines = max(r.workers + r.servers for r in rows)
    found = [_engine(constants, replace(r.setting_only(), machines=machines)) for r in rows]
    return Estimates(np.array([float(e.spans.cycle) for e in found]), np.array([e.error for e in found]))


def closed_form_cycles(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of a cycle of each row by the closed form alone, [n]."""
    return closed_form.spans([plant(constants, r) for r in rows], [r.barrier for r in rows]).cycle


def completed(constants: Constants, rows: Sequence[Row]) -> Estimates:
    """Seconds from the first to the last of `Row.all_pushes` pushes that the engine simulates for each row."""
    machines = max(r.workers + r.servers for r in rows)
    settings = [replace(r.setting_only(), machines=machines) for r in rows]
    found = [simulated_seconds(constants, s, r.all_pushes) for s, r in zip(settings, rows, strict=True)]
    return Estimates(*np.array(found).reshape(-1, 2).T)


def slopes(found: Fit, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Derivatives of the logarithm of each row's cycle by the logarithms of the fitted constants, [n, k]: closed form."""
    step = 1e-3
    free = tuple(found.intervals)
    at = np.array([_coded(name, getattr(found.constants, name)) for name in free])

    def logs(codes: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = _with(found.constants, free, codes)
        seconds: NDArray[np.float64] = np.log(closed_form_cycles(constants, rows))
        return seconds

    moved = [logs(at + step * unit) - logs(at - step * unit) for unit in np.eye(len(free))]
    return np.stack(moved, axis=1) / (2 * step) if moved else np.zeros((len(rows), 0))


# ------------------------------------------------------------------------------------------- which constants can be fitted


def _not_measured(rows: Sequence[Row]) -> dict[str, str]:
    """Constants whose knob did not vary, or whose time was not recorded, and the reason for each."""
    vary = {name: len({getattr(r, name) for r in rows}) > 1 for name in ("intra_threads", "servers", "workers")}
    vary["batch_size"] = len({size for r in rows for size in r.batches}) > 1
    parts = any(r.has_parts for r in rows)
    barrier = {r.barrier for r in rows}
    refused = {}

    def refuse(name: str, why: str) -> None:
        refused[name] = f"{why}: record {_MEASUREMENTS[name]}"

    if not (vary["batch_size"] or vary["intra_threads"]):
        refuse("fixed_seconds", "neither batch size nor threads ever varied")
    if not (vary["batch_size"] and vary["intra_threads"]):
        refuse("serial_fraction", "batch size and threads did not both vary")
    if len({r.delays for r in rows}) < 2:
        refuse("delay_messages", "no link was delayed in some runs and not in others")
    if not vary["servers"]:
        refuse("message_seconds", "the number of servers never varied")
    if not (vary["servers"] and vary["workers"]):
        refuse("commit_seconds", "the numbers of servers and of workers did not both vary")
    if not (vary["servers"] or vary["workers"] or parts):
        refuse("apply_seconds", "neither workers nor servers ever varied, and pushes were not timed")
    if len({r.servers for r in rows}) < 3:
        refuse("apply_exponent", "there are fewer than three numbers of servers")
    if not parts:
        refuse("transfer", "transfers were not timed")
        refuse("latency_seconds", "transfers were not timed")
        refuse("service_bytes_per_second", "transfers were not timed")
    if True not in barrier or (barrier == {True} and len({r.servers for r in rows}) < 3):
        refuse("step_seconds", "no synchronous runs on three numbers of servers, or beside asynchronous ones, were recorded")
    if barrier != {True, False} or len({r.batch_size for r in rows if r.barrier}) < 2:
        refuse("master_sample_seconds", "no synchronous runs of two batch sizes were recorded beside asynchronous ones")
    return refused


def _field(name: str) -> str:
    """The field of `Constants` whose default is 0, of a name in `_MEASUREMENTS`."""
    return "model_bytes" if name == "transfer" else name


def _clearly_less(cost: float, other: float) -> bool:
    return 1.02 * cost + _LEAST_NOISE**2 < other


def _measurement(name: str) -> str:
    return _MEASUREMENTS["transfer" if name in ("model_bytes", "nic_bytes_per_second") else name]


def _fit_determined(problem: _Problem, free: Sequence[str], refused: Mapping[str, str]) -> tuple[_Solved, dict[str, str]]:
    """The fit of those `free` constants that the recording determines, and all refused constants with their reasons.

    Uncertain constants are dropped one by one: the one whose absence increases the cost least; of several with about the
    same increase, the first in the order of `_MEASUREMENTS`.
    """
    left, out = list(free), dict(refused)
    if not problem.given.in_transfers and "latency_seconds" in left:
        left.remove("latency_seconds")
        out["latency_seconds"] = f"it is recorded with the seconds of computing: record {_measurement('latency_seconds')}"
    solved = problem.corrected(problem.solve(left), rounds=1)
    while len(left) > 1:
        errors = solved.standard_errors()
        doubtful = [name for name in left if errors[name] > _WIDE]
        if not doubtful:
            break
        idle = [name for name in doubtful if problem.cost(solved.constants, name) <= solved.cost + _LEAST_NOISE**2]
        if len(idle) > 1 or (idle and len(doubtful) > 1):
            # The cost does not rise even without fitting the others again, so no new fit is needed.
            worst = idle[0]
            out[worst] = _why_uncertain(solved, worst, errors[worst])
            left.remove(worst)
            solved = problem.dropping(solved, worst)
            continue
        without = {name: problem.solve([n for n in left if n != name], solved) for name in doubtful}
        least = min(s.cost for s in without.values())
        if least > _NEEDED * solved.cost + _LEAST_NOISE:
            break
        worst = next(name for name in doubtful if without[name].cost <= 1.02 * least + _LEAST_NOISE**2)
        out[worst] = _why_uncertain(solved, worst, errors[worst])
        left.remove(worst)
        solved = without[worst]
    return problem.corrected(solved), out


def _why_uncertain(solved: _Solved, name: str, error: float) -> str:
    if name in _SHARES:
        return f"it lies anywhere from 0 to 1: record {_measurement(name)}"
    span = math.exp(min(1.96 * error, 50.0))
    value = getattr(solved.constants, name)
    return f"it lies anywhere from {value / span:.1g} to {value * span:.1g}: record {_measurement(name)}"


# ------------------------------------------------------------------------------------------------------------- fitting


class _Problem:
    """The settings to fit, the median times recorded under each, and the engine's correction of the closed form."""

    def __init__(self, rows: Sequence[Row], given: Constants, engine: bool = True) -> None:
        self.given = given
        self.engine = engine
        self.rows = rows
        self.settings = list(dict.fromkeys(r.setting_only() for r in rows))
        every = [np.log(np.array([r.measured() for r in rows if r.setting_only() == s])) for s in self.settings]
        self.measured = np.array([_medians(each) for each in every])  # [n, 4], logarithms
        self.spread = np.array([_standard_error(each[:, 3]) for each in every])  # of the medians of cycles
        share = np.exp(np.where(np.isfinite(self.measured), self.measured, -np.inf) - self.measured[:, 3:])
        self.visible = share > _VISIBLE
        self.repetitions = np.array([len(each) for each in every])
        self.values = [each[:, 3] for each in every]  # cycles of the rows of each setting, logarithms
        summed = np.abs(share[:, :3].sum(axis=1) - 1) < _REDUNDANT
        self.redundant = np.zeros_like(self.visible)  # cycles that their parts have told already
        self.redundant[:, 3] = summed & self.visible[:, :3].any(axis=1)
        self.correction = np.zeros_like(self.measured)

    def begun_with(self, **values: Any) -> _Problem:
        """The same problem, with other initial constants."""
        made = copy(self)
        made.given = replace(self.given, **values)
        return made

    def residuals(self, *several: Constants) -> NDArray[np.float64]:
        """Logarithm of predicted over measured time, of the visible parts, [m]; for several constants one row each."""
        off = np.log(self.closed_form_times(*several)) + self.correction - self.measured
        visible: NDArray[np.float64] = np.clip(off[..., self.visible], -20, 20)
        return visible

    def derivatives(self, free: Sequence[str], at: NDArray[np.float64]) -> NDArray[np.float64]:
        """Of the residuals by the constants `free`, [m, k]: forward differences, in one evaluation of the closed form."""
        moved = [_with(self.given, free, at + step) for step in (np.zeros(len(at)), *(_STEP * np.eye(len(at))))]
        here, *ahead = self.residuals(*moved)
        slopes: NDArray[np.float64] = (np.stack(ahead, axis=1) - here[:, None]) / _STEP
        return slopes

    def cost(self, constants: Constants, without: str) -> float:
        """The cost of least squares (soft L1), with one constant as it was given."""
        return _soft_cost(self.residuals(replace(constants, **{without: getattr(self.given, without)})))

    def dropping(self, solved: _Solved, name: str) -> _Solved:
        """The solution without one constant, with the others unchanged."""
        kept = [i for i, free in enumerate(solved.free) if free != name]
        free, jacobian = tuple(solved.free[i] for i in kept), solved.jacobian[:, kept]
        return replace(solved, free=free, at=solved.at[kept], jacobian=jacobian)

    def closed_form_times(self, *several: Constants) -> NDArray[np.float64]:
        """The times of the closed form for each setting, [n, 4]; for several constants, [c, n, 4]."""
        plants = [plant(constants, r) for constants in several for r in self.settings]
        whole = closed_form.spans(plants, [r.barrier for r in self.settings] * len(several))
        each = [Spans(*part) for part in np.stack(whole).reshape(4, len(several), -1).swapaxes(0, 1)]
        found = np.stack([_observed(c, self.settings, s) for c, s in zip(several, each, strict=True)])
        return found if len(several) > 1 else found[0]

    def solve(self, free: Sequence[str], near: _Solved | None = None) -> _Solved:
        """The least-squares fit of the constants `free`, started at `near` if given.

        Each constant is drawn to its guess, as by a prior whose standard deviation is a factor of e^7: too weak to be felt
        by a constant that the rows determine. Without it, the cost is flat along the others, and the last bits of a
        logarithm, which processors round differently, decided where a search ended. What is left of that is rounded away
        before the engine sees it: its means change by their noise where constants change at all.
        """
        guess = np.array([_coded(name, _guess(name, self.rows, self.given)) for name in free])
        start = guess if near is None else np.array([_coded(name, getattr(near.constants, name)) for name in free])
        prior = _SCALE / _REACH * np.eye(len(free))
        found = least_squares(
            lambda at: np.concatenate([self.residuals(_with(self.given, free, at)), prior @ (at - guess)]),
            start,
            jac=lambda at: np.concatenate([self.derivatives(free, at), prior]),
            bounds=(np.minimum(start, guess) - _REACH, np.maximum(start, guess) + _REACH),
            loss="soft_l1",
            f_scale=_SCALE,
            max_nfev=_EVALUATIONS,
            ftol=_CONVERGED,
            xtol=_CONVERGED,
            gtol=_CONVERGED,
        )
        data = slice(0, len(found.fun) - len(free))
        at, off = found.x.round(_DECIMALS), found.fun[data]
        return _Solved(self, tuple(free), at, found.jac[data], off, _soft_cost(off))

    def corrected(self, solved: _Solved, rounds: int = _ROUNDS) -> _Solved:
        """The fit with the closed form corrected to the engine, repeated `rounds` times; as it is without an engine."""
        if not self.engine:
            return solved
        for _ in range(rounds):
            found = [_engine(solved.constants, r, _FEW_SEEDS) for r in self.settings]
            simulated_times = Spans(*np.array([e.spans for e in found]).T)
            wanted = _observed(solved.constants, self.settings, simulated_times)
            ratio = np.log(wanted / self.closed_form_times(solved.constants))
            self.correction = np.where(np.isfinite(ratio), ratio, 0.0)
            solved = self.solve(solved.free, solved)
        return solved


@dataclass(frozen=True, slots=True)
class _Solved:
    """A solution of least squares."""

    problem: _Problem
    free: tuple[str, ...]
    at: NDArray[np.float64]  # logarithms, see `_coded`
    jacobian: NDArray[np.float64]
    residuals: NDArray[np.float64]
    cost: float

    @property
    def constants(self) -> Constants:
        return _with(self.problem.given, self.free, self.at)

    @property
    def _spare(self) -> int:
        """Degrees of freedom."""
        return max(len(self.residuals) - len(self.free), 1)

    @property
    def _noise(self) -> float:
        """Standard deviation of a residual."""
        squares = np.minimum(self.residuals**2, (3 * _SCALE) ** 2)
        return max(math.sqrt(float(squares.sum()) / self._spare), float(np.median(self.problem.spread)), _LEAST_NOISE)

    def alternatives(self, refused: Iterable[str]) -> list[Constants]:
        """The constants with one of the `refused` ones as large as it may be (95 %), for each whose default is 0.

        The others are fitted to that. How large it may be is told by a linear model, at most `_UNKNOWN` guesses, and halved
        until the rows do not contradict the result.
        """
        kept = self.constants
        return [self._with_more(name) for name in refused if getattr(kept, name) == 0 and name not in self.free]

    def _with_more(self, name: str) -> Constants:
        guess = _guess(name, self.problem.rows, self.problem.given)
        step = 1e-3 * guess
        more: dict[str, Any] = {name: step}
        here, moved = self.problem.residuals(self.constants, replace(self.constants, **more))
        by = (moved - here) / step
        # What the other constants cannot make up for.
        alone = by - self.jacobian @ (np.linalg.pinv(self.jacobian, rcond=1e-9) @ by)
        far = self._noise * float(t.ppf(_MOST, self._spare))
        value = min(far / max(float(np.linalg.norm(alone)), 1e-300), _UNKNOWN * guess)
        while True:
            other = self.problem.begun_with(**{name: value}).solve(self.free, self)
            if other.cost - self.cost <= far**2 / 2 or value < step:
                return other.constants
            value /= 2

    def standard_errors(self) -> dict[str, float]:
        """Standard errors of the logarithms; huge where the data do not determine a constant."""
        # The small diagonal keeps the matrix invertible where a column of the Jacobian is 0.
        information = self.jacobian.T @ self.jacobian + 1e-12 * np.eye(len(self.free))
        errors = self._noise * np.sqrt(np.maximum(np.diag(np.linalg.inv(information)), 0.0))
        return dict(zip(self.free, map(float, errors), strict=True))

    def resampled(self, resamples: int) -> NDArray[np.float64]:
        """The logarithms of the constants under each resample of a wild bootstrap, [resamples, k].

        The residuals of each setting keep or change their sign at random, noise of the recorded median is added, and one
        Gauss-Newton step fits the result.
        """
        # Signs are drawn instead of settings: a setting that alone determines a constant must never be left out.
        rng = np.random.default_rng(0)
        spare = math.sqrt(len(self.residuals) / max(len(self.residuals) - len(self.free), 1))
        signs = rng.choice((-1.0, 1.0), (resamples, len(self.problem.settings)))
        noise = rng.standard_normal(signs.shape) * np.maximum(self.problem.spread, _LEAST_NOISE)
        owner = self._owner
        steps = (signs[:, owner] * self.residuals * spare + noise[:, owner]) @ np.linalg.pinv(self.jacobian, rcond=1e-9).T
        return np.asarray(self.at + np.clip(steps, -9, 9))

    def intervals(self, drawn: NDArray[np.float64]) -> dict[str, tuple[float, float] | None]:
        """95 % percentile intervals of `resampled` constants; None without a degree of freedom, and for no resamples.

        A bootstrap of few settings is too narrow: the distance from the fitted value is multiplied as that of a
        cluster-robust interval is, whose quantile is Student's with one degree less than settings (Cameron and Miller 2015,
        A practitioner's guide to cluster-robust inference, Section VI).
        """
        if not len(drawn):
            return dict.fromkeys(self.free)
        unsure, count = self._without_freedom(), len(self.problem.settings)
        few = math.sqrt(count / (count - 1)) * float(t.ppf(0.975, count - 1) / norm.ppf(0.975)) if count > 1 else 1.0
        ends = self.at + few * (np.percentile(drawn, [2.5, 97.5], axis=0) - self.at)
        return {
            n: None if n in unsure else (_decoded(n, float(a)), _decoded(n, float(b)))
            for n, a, b in zip(self.free, *ends, strict=True)
        }

    @property
    def _owner(self) -> NDArray[np.int64]:
        """The setting of each residual, [m]."""
        return np.nonzero(self.problem.visible)[0]

    def _saturated(self) -> tuple[NDArray[np.bool_], NDArray[np.float64]]:
        """Whether a residual tells nothing of errors, [m], and how much each constant follows each residual, [k, m].

        A residual that one row alone decides is 0, or nearly so, whatever the noise of that row is: it takes up a degree of
        freedom. And where a cycle is the sum of its recorded parts, it is no measurement of its own.
        """
        own = ~self.problem.redundant[self.problem.visible]
        follows = np.zeros((len(self.free), len(self.residuals)))
        follows[:, own] = np.linalg.pinv(self.jacobian[own], rcond=1e-9)
        leverage = np.einsum("mk,km->m", self.jacobian, follows)
        return ~own | (leverage / self.problem.repetitions[self._owner] > _SATURATED), follows

    def _without_freedom(self) -> set[str]:
        """Constants of which saturated residuals decide more than half of the variance, and those that nothing decides."""
        saturated, follows = self._saturated()
        total = (follows**2).sum(axis=1)
        share = (follows[:, saturated] ** 2).sum(axis=1)
        return {name for name, mine, all_ in zip(self.free, share, total, strict=True) if not mine < all_ / 2}

    def adjusted_residuals(self) -> tuple[Residual, ...]:
        """Of every row: the residual of its setting, times (I - H)^(-1/2) of its combination, and its own distance from it.

        H is the block of the hat matrix that belongs to one policy, number of workers and number of servers (Bell and
        McCaffrey 2002, Bias reduction in standard errors for linear regression with multi-stage samples, Section 3).
        """
        problem, owner = self.problem, self._owner
        hat = self.jacobian @ np.linalg.pinv(self.jacobian, rcond=1e-9)
        saturated, _ = self._saturated()
        cycle = np.nonzero(problem.visible)[1] == 3
        found = []
        combinations = [s.combination for s in problem.settings]
        for combination in dict.fromkeys(combinations):
            mine = np.array([combinations[i] == combination for i in owner])
            values, vectors = np.linalg.eigh(np.eye(int(mine.sum())) - hat[np.ix_(mine, mine)])
            root = (vectors / np.sqrt(np.clip(values, 1 - _SATURATED, 1.0))) @ vectors.T
            adjusted = root @ self.residuals[mine]
            for k, i in enumerate(np.nonzero(mine)[0]):
                if not cycle[i] or saturated[mine & (owner == owner[i])].all():
                    continue
                logs = problem.values[owner[i]]
                away = logs - np.median(logs) - adjusted[k]
                found += [Residual(combination, problem.settings[owner[i]].barrier, float(v)) for v in away]
        return tuple(found)

    def discrepancy(self) -> Discrepancy:
        """What the process of a discrepancy sees: the cycles; what their parts tell of the constants is known beforehand."""
        problem, owner = self.problem, self._owner
        cycle = np.nonzero(problem.visible)[1] == 3
        slopes = problem.derivatives(self.free, self.at)
        off = np.minimum(self.residuals[~cycle] ** 2, (3 * _SCALE) ** 2)
        noise = max(float(off.mean()) if len(off) else 0.0, _LEAST_NOISE**2)
        information = slopes[~cycle].T @ slopes[~cycle] / noise + np.eye(len(self.free)) / _REACH**2
        settings = [problem.settings[i] for i in owner[cycle]]
        apart = np.concatenate([logs - np.median(logs) for logs in problem.values])
        return Discrepancy(
            positions(settings),
            np.array([s.barrier for s in settings]),
            slopes[cycle],
            self.residuals[cycle],
            np.linalg.inv(information),
            float(np.mean(apart**2)),
        )


def _soft_cost(residuals: NDArray[np.float64]) -> float:
    """The cost of least squares with soft L1."""
    return float(_SCALE**2 * np.sum(np.sqrt(1 + (residuals / _SCALE) ** 2) - 1))


def _medians(logs: NDArray[np.float64]) -> list[float]:
    """The median of each column, without missing values; nan for a column without values."""
    kept = [column[np.isfinite(column)] for column in logs.T]
    return [float(np.median(column)) if len(column) else math.nan for column in kept]


def _standard_error(logs: NDArray[np.float64]) -> float:
    """Standard error of the median, from the median absolute deviation; 0 for one value."""
    distance = float(np.median(np.abs(logs - np.median(logs))))
    return 1.4826 * 1.2533 * distance / math.sqrt(len(logs))


def _observed(constants: Constants, rows: Sequence[Row], spans: Spans) -> NDArray[np.float64]:
    """Compute, pull, push and cycle, [n, 4], divided as in the recording: messages belong to transfers or to computing."""
    table = np.stack(spans, axis=1)
    if constants.in_transfers:
        moved = np.array([constants.overhead_seconds(r) for r in rows])
        table = table + np.stack([-moved, moved / 2, moved / 2, 0 * moved], axis=1)
    return np.maximum(table, 1e-12)


def _guess(name: str, rows: Sequence[Row], given: Constants) -> float:
    """A start value of the right order of magnitude."""
    cycle = float(np.median([r.cycle_seconds for r in rows]))
    compute = float(np.nanmedian([r.compute_seconds if r.has_parts else 0.5 * r.cycle_seconds for r in rows]))
    batch = float(np.median([r.batch_size for r in rows]))
    servers, workers = max(r.servers for r in rows), max(r.workers for r in rows)
    # The fastest recorded pull had the links for itself; a push takes longer than a pull by the apply.
    pulls = [r.pull_seconds * 32 / r.transfer_bits for r in rows if r.pull_seconds > 0]
    alone = min(pulls) if pulls else 0.02 * cycle
    longer = [r.push_seconds - r.pull_seconds for r in rows if r.push_seconds > r.pull_seconds > 0]
    apply = float(np.median(longer)) if longer else (0.02 if pulls else 0.3 / workers) * cycle
    guesses: dict[str, float] = {
        "fixed_seconds": 0.3 * compute,
        "sample_seconds": 0.7 * compute / batch,
        "serial_fraction": 0.1,
        "message_seconds": 0.05 * compute / servers,
        "latency_seconds": 0.05 * alone,
        "model_bytes": alone * given.nic_bytes_per_second,
        "nic_bytes_per_second": given.model_bytes / max(alone, 1e-9),
        "service_bytes_per_second": 3 * (given.model_bytes or alone * given.nic_bytes_per_second) / max(alone, 1e-9),
        "apply_seconds": apply,
        "apply_exponent": 0.8,
        "commit_seconds": 0.3 * apply / servers,
        "delay_messages": given.delay_messages,
        "step_seconds": 0.02 * cycle,
        "master_sample_seconds": 0.02 * cycle / batch / workers,
    }
    return guesses[name]


def _coded(name: str, value: float) -> float:
    return math.log(value / (1 - value)) if name in _SHARES else math.log(max(value, 1e-12))


def _decoded(name: str, code: float) -> float:
    return 1 / (1 + math.exp(-code)) if name in _SHARES else math.exp(code)


def _with(base: Constants, free: Sequence[str], at: NDArray[np.float64]) -> Constants:
    values: dict[str, Any] = {name: _decoded(name, float(x)) for name, x in zip(free, at, strict=True)}
    return replace(base, **values)


@cache
def _engine(constants: Constants, row: Row, seeds: int = SEEDS) -> Estimate:
    return simulated(constants, row, seeds)
