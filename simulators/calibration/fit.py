"""Constants of a workload and of the machines it runs on, fitted to recorded times.

What is predicted is the simulator's own time. The closed form of `simulators.calibration.closed_form` is fitted by least
squares to the logarithms of what was recorded; the engine then simulates every setting, and the closed form is multiplied by
the ratio of the two and fitted again, until the engine's answers are those that fit.

A constant that never had a chance to show (its knob did not vary), or that the recording leaves open by more than an order
of magnitude, is refused: it keeps its default, and `Fit.refused` says which measurement would tell.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares

from simulators.calibration import closed_form
from simulators.calibration.closed_form import Spans
from simulators.calibration.model import Constants, Row, plant, simulated, simulated_seconds, with_speeds

__all__ = ["Constants", "Fit", "Row", "completed", "fit", "fit_all", "predicted"]

_ROUNDS = 3  # of fitting what the engine says
_MACHINE = ("apply_exponent", "nic_bytes_per_second", "service_bytes_per_second", "latency_seconds")
_RESAMPLES = 400
_WIDE = math.log(10.0) / 1.96  # standard error of a logarithm at which the interval is an order of magnitude either way
_REACH = 7.0  # of the search, in logarithms, from where it begins
_SHARES = ("serial_fraction", "apply_exponent")  # from 0 to 1
_LEAST_NOISE = 0.003  # of a recorded mean, relative: fits better than this tell no more about their constants
_SCALE = 0.05  # beyond this relative error a row counts less than its square (soft L1)
_NEEDED = 1.5  # times the cost without a constant, beyond which it stays though it is uncertain
_VISIBLE = 0.01  # share of a cycle from which on a part of it is fitted

# Which measurement would tell each constant, in the order in which doubtful ones are given up.
_TELLS: dict[str, str] = {
    "apply_exponent": "the same job on one, two and many servers, with enough workers to keep all of them busy",
    "master_sample_seconds": "synchronous runs at two batch sizes or more, besides asynchronous ones at two",
    "latency_seconds": "iterations with seconds of pulls and pushes, of a model small enough to take no time",
    "service_bytes_per_second": "iterations with seconds of pulls while many workers pull from one server",
    "serial_fraction": "two batch sizes under each of two counts of threads",
    "master_seconds": "synchronous and asynchronous runs at the same batch size",
    "message_seconds": "the same job on few and on many servers",
    "apply_seconds": "the same job on one server with few and with many workers",
    "transfer": "iterations with seconds of pulls and pushes, or runs with few servers and many workers",
    "fixed_seconds": "two batch sizes at least, or two counts of threads",
    "sample_seconds": "runs of at least one worker",
}


@dataclass(frozen=True, slots=True)
class Fit:
    """What a recording says about a workload and its machines."""

    constants: Constants
    intervals: Mapping[str, tuple[float, float]]  # 95 %, of those that were fitted: bootstrap over rows
    refused: Mapping[str, str]  # constants that keep their default, and why
    lent: Mapping[str, float]  # constants of the machines that other workloads of the recording told
    rows: int
    error: float  # median relative error on these rows
    alike_seconds: float = 0.0  # of computing that take all workers alike: their speeds are of the rest


def fit_all(rows: Sequence[Row], given: Mapping[str, Constants], *, resamples: int = _RESAMPLES) -> dict[str, Fit]:
    """Fit every workload of a recording. What one leaves open about the machines, the others tell where they can.

    `given` are the constants to begin with, by workload. Where `model_bytes` is 0 there, transfers tell only the ratio of
    the model's size and the NIC's rate: the NIC stays as given, and the size is what fits. Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError("Cannot calibrate: no run has both a setting and times; record seconds and steps, or iterations.")
    apart: dict[str, list[Row]] = {}
    for row in rows:
        apart.setdefault(row.workload, []).append(row)
    fits = {name: fit(mine, given[name], resamples=resamples) for name, mine in apart.items()}
    for name, mine in apart.items():
        lent: dict[str, Any] = {}
        for constant in _MACHINE:
            told = [getattr(f.constants, constant) for other, f in fits.items() if other != name and constant in f.intervals]
            if told and constant in fits[name].refused:
                lent[constant] = math.exp(float(np.mean(np.log(told))))
        if lent:
            made = fit(mine, replace(given[name], **lent), resamples=resamples, without=tuple(lent))
            fits[name] = replace(made, lent=lent)
    return fits


def fit(rows: Sequence[Row], given: Constants, *, resamples: int = _RESAMPLES, without: Sequence[str] = ()) -> Fit:
    """Fit to `rows`, of one workload, what they can tell, but for `without`; the rest stays as `given`."""
    machines = max(r.workers + r.servers for r in rows)
    rows = [replace(r, machines=machines) for r in rows]
    transfer = "nic_bytes_per_second" if given.model_bytes else "model_bytes"
    refused = {name: why for name, why in _out_of_reach(rows).items() if name not in without}
    names = [name for name in _TELLS if name not in refused and name not in without]
    free = [transfer if name == "transfer" else name for name in names]
    problems = [_Problem(rows, given)]
    if any(r.has_parts for r in rows):
        problems.append(_Problem(rows, replace(given, in_transfers=not given.in_transfers)))
    solved, left = min((_narrowed(p, free, refused) for p in problems), key=lambda f: f[0].cost)
    alike = 0.0
    if any(r.speeds for r in rows):
        # How fast workers are is told by what they take longer than what all take alike, and that is known only now.
        found = solved.constants
        alike = found.fixed_seconds + (0.0 if found.in_transfers else found.overhead_seconds(rows[0]))
        rows = with_speeds(rows, alike)
        solved, left = _narrowed(_Problem(rows, solved.problem.given), free, refused)
    refused = left
    constants = _with_jitter(solved.constants, rows)
    errors = np.abs(predicted(constants, rows) / np.array([r.cycle_seconds for r in rows]) - 1)
    return Fit(constants, solved.intervals(resamples), refused, {}, len(rows), float(np.median(errors)), alike)


def _with_jitter(constants: Constants, rows: Sequence[Row]) -> Constants:
    """With the variation of computing alone, where messages, which take the same time whenever, are recorded with it."""
    timed = [r for r in rows if r.has_parts and not constants.in_transfers]
    shares = [min(constants.overhead_seconds(r) / r.compute_seconds, 0.9) for r in timed]
    return replace(constants, jitter=constants.jitter / (1 - float(np.median(shares)))) if shares else constants


def predicted(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of a cycle that the engine simulates for each row."""
    machines = max(r.workers + r.servers for r in rows)
    return np.array([_engine(constants, replace(r.shape(), machines=machines)).cycle for r in rows])


def completed(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds from the first of `Row.all_pushes` to the last that the engine simulates for each row."""
    machines = max(r.workers + r.servers for r in rows)
    shapes = [replace(r.shape(), machines=machines) for r in rows]
    return np.array([simulated_seconds(constants, s, r.all_pushes) for s, r in zip(shapes, rows, strict=True)])


# ---------------------------------------------------------------------------------------------------- what can be told


def _out_of_reach(rows: Sequence[Row]) -> dict[str, str]:
    """Constants whose knob did not vary, or whose time nobody recorded."""
    vary = {
        name: len({getattr(r, name) for r in rows}) > 1 for name in ("batch_size", "intra_threads", "servers", "workers")
    }
    parts = any(r.has_parts for r in rows)
    barrier = {r.held for r in rows}
    refused = {}

    def refuse(name: str, why: str) -> None:
        refused[name] = f"{why}: record {_TELLS[name]}"

    if not (vary["batch_size"] or vary["intra_threads"]):
        refuse("fixed_seconds", "neither batch size nor threads ever varied")
    if not (vary["batch_size"] and vary["intra_threads"]):
        refuse("serial_fraction", "batch size and threads did not both vary")
    if not vary["servers"]:
        refuse("message_seconds", "the number of servers never varied")
    if not (vary["servers"] or vary["workers"] or parts):
        refuse("apply_seconds", "neither workers nor servers ever varied, and pushes were not timed")
    if len({r.servers for r in rows}) < 3:
        refuse("apply_exponent", "there are fewer than three numbers of servers")
    if not parts:
        refuse("transfer", "transfers were not timed")
        refuse("latency_seconds", "transfers were not timed")
        refuse("service_bytes_per_second", "transfers were not timed")
    if barrier != {True, False}:
        refuse("master_seconds", "not both synchronous and asynchronous runs were recorded")
    if barrier != {True, False} or len({r.batch_size for r in rows if r.held}) < 2:
        refuse("master_sample_seconds", "no synchronous runs of two batch sizes were recorded beside asynchronous ones")
    return refused


def _tells(name: str) -> str:
    return _TELLS["transfer" if name in ("model_bytes", "nic_bytes_per_second") else name]


def _narrowed(problem: _Problem, free: Sequence[str], refused: Mapping[str, str]) -> tuple[_Solved, dict[str, str]]:
    """The fit of as many of the `free` constants as can be told apart, and who else is refused.

    Of those that the recording leaves open, the one goes that is missed least; of several that are missed alike, the first
    in the order of `_TELLS`.
    """
    left, out = list(free), dict(refused)
    if not problem.given.in_transfers and "latency_seconds" in left:
        left.remove("latency_seconds")
        out["latency_seconds"] = f"it is recorded with the seconds of computing: record {_tells('latency_seconds')}"
    solved = problem.engine_true(problem.solve(left), rounds=1)
    while len(left) > 1:
        errors = solved.standard_errors()
        doubtful = [name for name in left if errors[name] > _WIDE]
        if not doubtful:
            break
        idle = [name for name in doubtful if problem.cost(solved.constants, name) <= solved.cost + _LEAST_NOISE**2]
        if len(idle) > 1 or (idle and len(doubtful) > 1):
            # What nobody misses even before the others are fitted again.
            worst = idle[0]
            out[worst] = _open(solved, worst, errors[worst])
            left.remove(worst)
            solved = problem.lessened(solved, worst)
            continue
        without = {name: problem.solve([n for n in left if n != name], solved) for name in doubtful}
        least = min(s.cost for s in without.values())
        if least > _NEEDED * solved.cost + _LEAST_NOISE:
            break
        worst = next(name for name in doubtful if without[name].cost <= 1.02 * least + _LEAST_NOISE**2)
        out[worst] = _open(solved, worst, errors[worst])
        left.remove(worst)
        solved = without[worst]
    return problem.engine_true(solved), out


def _open(solved: _Solved, name: str, error: float) -> str:
    if name in _SHARES:
        return f"it lies anywhere from 0 to 1: record {_tells(name)}"
    span = math.exp(min(1.96 * error, 50.0))
    value = getattr(solved.constants, name)
    return f"it lies anywhere from {value / span:.1g} to {value * span:.1g}: record {_tells(name)}"


# ------------------------------------------------------------------------------------------------------------- fitting


class _Problem:
    """Settings to fit, the median of what was recorded under each, and how the closed form differs from the engine there."""

    def __init__(self, rows: Sequence[Row], given: Constants) -> None:
        self.given = given
        self.rows = rows
        self.shapes = list(dict.fromkeys(r.shape() for r in rows))
        every = [np.log(np.array([r.measured() for r in rows if r.shape() == s])) for s in self.shapes]
        self.measured = np.array([_medians(each) for each in every])  # [n, 4], logarithms
        self.spread = np.array([_spread(each[:, 3]) for each in every])  # of the medians of cycles: standard errors
        share = np.exp(np.where(np.isfinite(self.measured), self.measured, -np.inf) - self.measured[:, 3:])
        self.seen = share > _VISIBLE
        self.correction = np.zeros_like(self.measured)

    def residuals(self, constants: Constants) -> NDArray[np.float64]:
        """Logarithm of predicted over measured, of what is seen, [m]."""
        off = np.log(self.closed(constants)) + self.correction - self.measured
        seen: NDArray[np.float64] = np.clip(off[self.seen], -20, 20)
        return seen

    def cost(self, constants: Constants, without: str) -> float:
        """What least squares would call the cost, with one constant as it was given."""
        off = self.residuals(replace(constants, **{without: getattr(self.given, without)})) / _SCALE
        return float(_SCALE**2 * np.sum(np.sqrt(1 + off**2) - 1))

    def lessened(self, solved: _Solved, name: str) -> _Solved:
        """The solution without a constant that it does not need."""
        kept = [i for i, free in enumerate(solved.free) if free != name]
        free, jacobian = tuple(solved.free[i] for i in kept), solved.jacobian[:, kept]
        return replace(solved, free=free, at=solved.at[kept], jacobian=jacobian)

    def closed(self, constants: Constants) -> NDArray[np.float64]:
        """What the closed form says of each shape, [n, 4]."""
        spans = closed_form.spans([plant(constants, r) for r in self.shapes], [r.held for r in self.shapes])
        return _observed(constants, self.shapes, spans)

    def solve(self, free: Sequence[str], near: _Solved | None = None) -> _Solved:
        start = {name: _guess(name, self.rows, self.given) for name in free}
        if near:
            # What had all but vanished begins anew: on a logarithmic scale there is no way back.
            values = {name: getattr(near.constants, name) for name in free}
            start = {name: value if value > start[name] / 100 else start[name] / 3 for name, value in values.items()}
        x = np.array([_coded(name, start[name]) for name in free])
        base = self.given
        found = least_squares(
            lambda at: self.residuals(_with(base, free, at)),
            x,
            bounds=(x - _REACH, x + _REACH),
            loss="soft_l1",
            f_scale=_SCALE,
            max_nfev=40,
            ftol=1e-6,
            xtol=1e-5,
        )
        return _Solved(self, tuple(free), found.x, found.jac, found.fun, float(found.cost))

    def engine_true(self, solved: _Solved, rounds: int = _ROUNDS) -> _Solved:
        """Fitted again with the closed form corrected to what the engine says, so many times."""
        for _ in range(rounds):
            said = Spans(*np.array([_engine(solved.constants, r) for r in self.shapes]).T)
            ratio = np.log(_observed(solved.constants, self.shapes, said) / self.closed(solved.constants))
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

    def standard_errors(self) -> dict[str, float]:
        """Of the logarithms; huge where the data say nothing."""
        spare = max(len(self.residuals) - len(self.free), 1)
        squares = np.minimum(self.residuals**2, (3 * _SCALE) ** 2)
        noise = max(math.sqrt(float(squares.sum()) / spare), float(np.median(self.problem.spread)), _LEAST_NOISE)
        information = self.jacobian.T @ self.jacobian + 1e-12 * np.eye(len(self.free))
        errors = noise * np.sqrt(np.maximum(np.diag(np.linalg.inv(information)), 0.0))
        return dict(zip(self.free, map(float, errors), strict=True))

    def intervals(self, resamples: int) -> dict[str, tuple[float, float]]:
        """95 % percentile intervals from a wild bootstrap: what is off in every setting changes sign or not, by chance, its
        recorded median is drawn anew, and one step of Gauss and Newton fits both. The settings stay, for there may be one
        alone of its kind."""
        rng = np.random.default_rng(0)
        owner = np.nonzero(self.problem.seen)[0]  # of each residual
        spare = math.sqrt(len(self.residuals) / max(len(self.residuals) - len(self.free), 1))
        signs = rng.choice((-1.0, 1.0), (resamples, len(self.problem.shapes)))
        noise = rng.standard_normal(signs.shape) * np.maximum(self.problem.spread, _LEAST_NOISE)
        steps = (signs[:, owner] * self.residuals * spare + noise[:, owner]) @ np.linalg.pinv(self.jacobian, rcond=1e-9).T
        ends = np.percentile(self.at + np.clip(steps, -9, 9), [2.5, 97.5], axis=0) if resamples else (self.at, self.at)
        return {n: (_decoded(n, float(a)), _decoded(n, float(b))) for n, a, b in zip(self.free, *ends, strict=True)}


def _medians(logs: NDArray[np.float64]) -> list[float]:
    """Of each column, without what is not there; nan where nothing is."""
    kept = [column[np.isfinite(column)] for column in logs.T]
    return [float(np.median(column)) if len(column) else math.nan for column in kept]


def _spread(logs: NDArray[np.float64]) -> float:
    """Standard error of their median, by their median distance from it; 0 for one alone."""
    distance = float(np.median(np.abs(logs - np.median(logs))))
    return 1.4826 * 1.2533 * distance / math.sqrt(len(logs))


def _observed(constants: Constants, rows: Sequence[Row], spans: Spans) -> NDArray[np.float64]:
    """Compute, pull, push and cycle, [n, 4], as the recording divides a cycle: messages count with one part or the other."""
    table = np.stack(spans, axis=1)
    if constants.in_transfers:
        moved = np.array([constants.overhead_seconds(r) for r in rows])
        table = table + np.stack([-moved, moved / 2, moved / 2, 0 * moved], axis=1)
    return np.maximum(table, 1e-12)


def _guess(name: str, rows: Sequence[Row], given: Constants) -> float:
    """A value of the right size to begin at."""
    cycle = float(np.median([r.cycle_seconds for r in rows]))
    compute = float(np.nanmedian([r.compute_seconds if r.has_parts else 0.5 * r.cycle_seconds for r in rows]))
    batch = float(np.median([r.batch_size for r in rows]))
    servers, workers = max(r.servers for r in rows), max(r.workers for r in rows)
    # Pulling alone is the quickest pull that was recorded; a push takes longer by what is applied.
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
        "master_seconds": 0.02 * cycle,
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
def _engine(constants: Constants, row: Row) -> Spans:
    return simulated(constants, row)
