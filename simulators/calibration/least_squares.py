"""Least squares of the logarithms of recorded times: the search, and what its solution tells of errors.

The closed form is fitted, corrected to the engine (`TimesProblem.corrected`): see `simulators.calibration.fit`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from copy import copy
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import numpy as np
from numpy.typing import NDArray
from scipy.optimize import least_squares
from scipy.stats import norm, t

from simulators.calibration import closed_form
from simulators.calibration.closed_form import Spans
from simulators.calibration.discrepancy import Discrepancy, positions
from simulators.calibration.model import Constants, plants
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.stragglers import ERROR_OF_MEDIAN
from simulators.calibration.simulations import SEEDS, Estimate, simulated

__all__ = [
    "LEAST_NOISE",
    "SHARES",
    "TimesProblem",
    "TimesSolution",
    "beside_computing",
    "clearly_less",
    "coded",
    "decoded",
    "engine_mean",
    "soft_cost",
    "with_logs",
]

_FEW_SEEDS = 4  # of a row while the constants are searched for; the same ones every time, so that rounds can be compared
_ROUNDS = 3  # of correcting the closed form to the engine
_STEP = 1e-6  # of a logarithm, for derivatives
_REACH = 7.0  # standard deviation of the prior, and half-width of the search interval, in logarithms
SHARES = ("serial_fraction", "apply_exponent")  # constants in [0, 1]
_CONVERGED = 1e-8  # relative change of cost, and of constants, at which a search ends
_EVALUATIONS = 100  # of one search, at most
_DECIMALS = 4  # of the logarithms of constants, which are rounded before the engine sees them
_OTHER = 1.5  # times the cost of the other optimum, from which the search begins there
_FILLED = 0.9  # of what a lone worker's transfers seem to have, the part from which a search for a switch's rate starts
_WIDER = 1.02  # of one link's rate, up to which a switch counts as no wider
_SIZES = ("model_bytes", "nic_bytes_per_second", "service_bytes_per_second", "switch_bytes_per_second")
LEAST_NOISE = 0.003  # relative error that every recorded mean is assumed to have at least
_SCALE = 0.05  # relative error above which a row weighs less than its square (soft L1)
_CONFIRMED = 2.0  # times as many messages follow each other where the protocol, or TCP, waits for an answer to each
_UNKNOWN = 10.0  # times its guess: the most that a refused constant may be where the rows tell nothing of it
_MOST = 0.975  # quantile of a constant's error; as it cannot be below 0, 95 % of what it may be are below
_TELLING = 1e-3  # singular value above which shares of cycles tell a combination of constants
_OF_MEDIAN = math.pi / 2  # variance of the median over that of the mean, of many normal values
_SATURATED = 0.99  # leverage of a single row above which its residual is 0 whatever its noise is
_REDUNDANT = 0.05  # relative difference below which a cycle is the sum of its parts, and no measurement of its own
_VISIBLE = 0.01  # a part of a cycle is fitted if it takes at least this share of the cycle


class TimesProblem:
    """The settings to fit, the median times recorded under each, and the engine's correction of the closed form."""

    def __init__(self, rows: Sequence[Row], given: Constants, engine: bool = True, *, transfers_first: bool = False) -> None:
        self.given = given
        self.engine = engine
        self.transfers_first = transfers_first  # the search starts where transfers, not updates, keep the servers busy
        self.evaluations = _EVALUATIONS  # of one search, at most
        self.servers_first = False  # it starts where servers' processes, not workers' links, limit transfers
        self.wide_first = False  # it starts where a switch carries more than one link
        self.rows = rows
        self.settings = list(dict.fromkeys(r.setting_only() for r in rows))
        every = [np.log(np.array([r.measured() for r in rows if r.setting_only() == s])) for s in self.settings]
        self.measured = np.array([_medians(each) for each in every])  # [n, 4], logarithms
        self.spread = np.array([_standard_error(each[:, 3]) for each in every])  # of the medians of cycles
        share = np.exp(np.where(np.isfinite(self.measured), self.measured, -np.inf) - self.measured[:, 3:])
        self.visible = share > _VISIBLE
        self.repetitions = np.array([len(each) for each in every])
        apart = np.concatenate([each[:, 3] - each[:, 3].mean() for each in every])
        # Of rows around their settings, logarithms; 0 without repetitions.
        self.row_variance = float(apart @ apart) / max(len(rows) - len(every), 1)
        squares = [[r.error**2 for r in rows if r.setting_only() == s] for s in self.settings]
        self.errors = np.sqrt([float(np.mean(of)) for of in squares])  # of the recorded mean cycle of a row, relative
        summed = np.abs(share[:, :3].sum(axis=1) - 1) < _REDUNDANT
        self.redundant = np.zeros_like(self.visible)  # cycles that their parts have told already
        self.redundant[:, 3] = summed & self.visible[:, :3].any(axis=1)
        self.correction = np.zeros_like(self.measured)

    def guess(self, name: str) -> float:
        """Where the search for a constant starts."""
        if self.servers_first and name in _SIZES:
            return _guess_of_servers(name, self.rows, self.given)
        if self.wide_first and name == "switch_bytes_per_second":
            # As far, as a factor, from one link as from all.
            return math.sqrt(_links_together(self.rows)) / _FILLED * _guess(name, self.rows, self.given)
        return _guess(name, self.rows, self.given, transfers_first=self.transfers_first)

    def begun(self, free: Sequence[str]) -> TimesSolution:
        """The first fit of the constants `free`: with the closed form, then corrected to the engine once.

        It is of the problem itself, or of one that starts at another optimum, if its cost is so much less that the closed
        form's own error does not make it. A worker's transfers may be limited by its own link, or by the servers: then more
        servers make them shorter. And of a switch that is no wider than one link, only the ratio of the model's size to its
        rate is told: a search that comes there does not leave it, as a switch that is slightly wider is no better.
        """
        first = self._begun_with_servers(free)
        found = first.problem.corrected(first, rounds=1)
        if "switch_bytes_per_second" not in free or not first.switch_is_narrow or _links_together(self.rows) < 2:
            return found
        # Of queues at a barrier, the closed form is too far off the engine to tell which of these is nearer to the rows.
        other = copy(self)
        other.wide_first, other.correction = True, found.problem.correction
        second = other.corrected(other.solve(free), rounds=1)
        return second if second.far_below(found) else found

    def _begun_with_servers(self, free: Sequence[str]) -> TimesSolution:
        """The first fit where workers' links limit transfers, or where servers do."""
        first = self.solve(free)
        pulls = {r.servers for r in self.rows if r.pull_seconds > 0}
        if not {*_SIZES[:2]} & {*free} or "service_bytes_per_second" not in free or len(pulls) < 2:
            return first
        other = copy(self)
        other.servers_first = True
        second = other.solve(free)
        return second if second.far_below(first) else first

    def shared_as(self, given: Constants) -> TimesProblem:
        """The same problem with links shared as the `given` constants have them, not yet corrected to the engine."""
        made = self.begun_with()
        made.given, made.correction = given, np.zeros_like(self.measured)
        return made

    def begun_with(self, **values: Any) -> TimesProblem:
        """The same problem, with other initial constants."""
        made = copy(self)
        made.given = replace(self.given, **values)
        return made

    def residuals(self, *several: Constants) -> NDArray[np.float64]:
        """Logarithm of predicted over measured time, of the visible parts, [m]; for several constants one row each."""
        off = np.log(self.closed_form_times(*several)) + self.correction - self.measured
        visible: NDArray[np.float64] = np.clip(off[..., self.visible], -20, 20)
        return visible

    def derivatives(
        self, free: Sequence[str], at: NDArray[np.float64], here: NDArray[np.float64] | None = None
    ) -> NDArray[np.float64]:
        """Derivatives of the residuals by the constants `free`, [m, k]: forward differences, in one evaluation of the closed
        form.

        `here` are the residuals themselves, [m], if known.
        """
        steps = _STEP * np.eye(len(at))
        if here is None:
            steps = np.vstack([np.zeros(len(at)), steps])
        found = self.residuals(*(with_logs(self.given, free, at + step) for step in steps)).reshape(len(steps), -1)
        begin, ahead = (found[0], found[1:]) if here is None else (here, found)
        slopes: NDArray[np.float64] = (np.stack(list(ahead), axis=1) - begin[:, None]) / _STEP
        return slopes

    def cost(self, constants: Constants, without: str) -> float:
        """The cost of least squares (soft L1), with one constant as it was given."""
        return soft_cost(self.residuals(replace(constants, **{without: getattr(self.given, without)})))

    def dropping(self, solved: TimesSolution, name: str) -> TimesSolution:
        """The solution without one constant, with the others unchanged."""
        kept = [i for i, free in enumerate(solved.free) if free != name]
        free, jacobian = tuple(solved.free[i] for i in kept), solved.jacobian[:, kept]
        return replace(solved, free=free, at=solved.at[kept], jacobian=jacobian)

    def closed_form_times(self, *several: Constants) -> NDArray[np.float64]:
        """The times of the closed form for each setting, [n, 4]; for several constants, [c, n, 4]."""
        made = [of for constants in several for of in plants(constants, self.settings)]
        whole = closed_form.spans(made, [r.barrier for r in self.settings] * len(several))
        each = [Spans(*part) for part in np.stack(whole).reshape(4, len(several), -1).swapaxes(0, 1)]
        found = np.stack([_observed(c, self.settings, s) for c, s in zip(several, each, strict=True)])
        return found if len(several) > 1 else found[0]

    def solve(self, free: Sequence[str], near: TimesSolution | None = None) -> TimesSolution:
        """The least-squares fit of the constants `free`, started at `near` if given.

        Each constant is drawn to its guess, as by a prior whose standard deviation is a factor of e^7: too weak to be felt
        by a constant that the rows determine. Without it, the cost is flat along the others, and the last bits of a
        logarithm, which processors round differently, decided where a search ended. What is left of that is rounded away
        before the engine sees it: its means change by their noise where constants change at all.
        """
        guess = np.array([coded(name, self.guess(name)) for name in free])
        start = guess if near is None else np.array([coded(name, getattr(near.constants, name)) for name in free])
        prior = _SCALE / _REACH * np.eye(len(free))
        known: dict[bytes, NDArray[np.float64]] = {}  # the last residuals: derivatives are asked for at the same place

        def off_at(at: NDArray[np.float64]) -> NDArray[np.float64]:
            known.clear()
            known[at.tobytes()] = self.residuals(with_logs(self.given, free, at))
            return np.concatenate([*known.values(), prior @ (at - guess)])

        found = least_squares(
            off_at,
            start,
            jac=lambda at: np.concatenate([self.derivatives(free, at, known.get(at.tobytes())), prior]),
            bounds=(np.minimum(start, guess) - _REACH, np.maximum(start, guess) + _REACH),
            loss="soft_l1",
            f_scale=_SCALE,
            max_nfev=self.evaluations,
            ftol=_CONVERGED,
            xtol=_CONVERGED,
            gtol=_CONVERGED,
        )
        data = slice(0, len(found.fun) - len(free))
        at, off = found.x.round(_DECIMALS), found.fun[data]
        return TimesSolution(self, tuple(free), at, found.jac[data], off, soft_cost(off))

    def corrected(self, solved: TimesSolution, rounds: int | None = None) -> TimesSolution:
        """The fit with the closed form corrected to the engine, in so many `rounds`; as it is without an engine."""
        if not self.engine:
            return solved
        for _ in range(_ROUNDS if rounds is None else rounds):
            found = [engine_mean(solved.constants, r, _FEW_SEEDS) for r in self.settings]
            simulated_times = Spans(*np.array([e.spans for e in found]).T)
            wanted = _observed(solved.constants, self.settings, simulated_times)
            ratio = np.log(wanted / self.closed_form_times(solved.constants))
            self.correction = np.where(np.isfinite(ratio), ratio, 0.0)
            solved = self.solve(solved.free, solved)
        return solved


@dataclass(frozen=True, slots=True)
class TimesSolution:
    """A solution of least squares."""

    problem: TimesProblem
    free: tuple[str, ...]
    at: NDArray[np.float64]  # logarithms, see `coded`
    jacobian: NDArray[np.float64]
    residuals: NDArray[np.float64]
    cost: float

    @property
    def constants(self) -> Constants:
        return with_logs(self.problem.given, self.free, self.at)

    @property
    def switch_is_narrow(self) -> bool:
        """Whether a switch is no wider than one link."""
        of = self.constants
        return of.switch_bytes_per_second <= _WIDER * min(of.nic_bytes_per_second, of.service_bytes_per_second)

    def far_below(self, other: TimesSolution) -> bool:
        """Whether the cost is so much less than that of the `other` one that this must be another optimum."""
        return _OTHER * self.cost < other.cost

    @property
    def _spare(self) -> int:
        """Degrees of freedom."""
        return max(len(self.residuals) - len(self.free), 1)

    @property
    def _noise(self) -> float:
        """Standard deviation of a residual."""
        squares = np.minimum(self.residuals**2, (3 * _SCALE) ** 2)
        return max(math.sqrt(float(squares.sum()) / self._spare), float(np.median(self.problem.spread)), LEAST_NOISE)

    def alternatives(self, refused: Iterable[str]) -> dict[str, Constants]:
        """The constants with one of the `refused` ones as large as it may be (95 %), by that one: each whose default is 0.

        The others are fitted to that. How large it may be is told by a linear model, at most `_UNKNOWN` guesses, and halved
        until the rows do not contradict the result. Rows without a delayed link tell nothing of `delay_messages`.
        """
        kept, refused = self.constants, list(refused)
        names = [name for name in refused if getattr(kept, name) == 0 and name not in self.free]
        found = {name: self._moved(name, self.problem.guess(name)) for name in names}
        if "delay_messages" in refused:
            found["delay_messages"] = replace(kept, delay_messages=_CONFIRMED * kept.delay_messages)
        return found

    def with_least_exponent(self) -> Constants:
        """The constants with updates that further servers make as little faster as may be (95 %), the others fitted to that.

        Where updates wait for each other over all servers, one and two of these look like servers that divide an update, and
        a coordinator that takes longer for each of them.
        """
        # Logarithms, and the prior, keep a coordinator's time from 0.
        free = [name for name in self.free if name != "commit_seconds"]
        alone = self.problem.begun_with(apply_exponent=0.0).solve(free, self)
        if alone.cost - self.cost <= self._far**2 / 2:
            return alone.constants
        return self._moved("apply_exponent", 1.0 / _UNKNOWN, side=-1)

    @property
    def _weights(self) -> NDArray[np.float64]:
        """Square roots of the second derivatives of `soft_cost` by residuals, with which SciPy scales the Jacobian, [m]."""
        weights: NDArray[np.float64] = (1 + (self.residuals / _SCALE) ** 2) ** -0.75
        return weights

    @property
    def _far(self) -> float:
        """How far residuals may be from these without a contradiction (95 %)."""
        return self._noise * float(t.ppf(_MOST, self._spare))

    def _moved(self, name: str, guess: float, side: int = 1) -> Constants:
        step, begin = 1e-3 * guess, getattr(self.constants, name)

        def put(value: float) -> dict[str, Any]:
            return {name: begin + side * value}

        here, moved = self.problem.residuals(self.constants, replace(self.constants, **put(step)))
        # The Jacobian's rows weigh as the robust cost has them: unweighted, what the others make up for seems to remain.
        by = (moved - here) / step * self._weights
        # What the other constants cannot make up for.
        alone = by - self.jacobian @ (np.linalg.pinv(self.jacobian, rcond=1e-9) @ by)
        far = self._far
        value = min(far / max(float(np.linalg.norm(alone)), 1e-300), _UNKNOWN * guess)
        while True:
            other = self.problem.begun_with(**put(value)).solve(self.free, self)
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
        noise = rng.standard_normal(signs.shape) * np.maximum(self.problem.spread, LEAST_NOISE)
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
            n: None if n in unsure else (decoded(n, float(a)), decoded(n, float(b)))
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

    def left_out_costs(self) -> NDArray[np.float64]:
        """The cost of the residuals of each combination had it been left out of the fit, [c].

        A combination is a policy, a number of workers and a number of servers. For a linear model with the hat matrix H, its
        residuals are multiplied by (I - H)^(-1) (Cook and Weisberg 1982, Residuals and Influence in Regression, Section
        2.2).
        """
        hat = self.jacobian @ np.linalg.pinv(self.jacobian, rcond=1e-9)
        combinations = [s.combination for s in self.problem.settings]
        costs = []
        for combination in dict.fromkeys(combinations):
            mine = np.array([combinations[i] == combination for i in self._owner])
            values, vectors = np.linalg.eigh(np.eye(int(mine.sum())) - hat[np.ix_(mine, mine)])
            factor = (vectors / np.clip(values, 1 - _SATURATED, 1.0)) @ vectors.T
            costs.append(soft_cost(factor @ self.residuals[mine]))
        return np.array(costs)

    def discrepancy(self) -> Discrepancy | None:
        """What is known of errors of predictions; None without a degree of freedom: where less than two combinations of
        policy, workers and servers have residuals that tell of errors.

        The parts of a cycle tell how it is divided, its length tells the rest: what slows a whole run down is in all of its
        parts. So the constants are known beforehand by the parts' shares of their cycles alone.
        """
        problem, owner, k = self.problem, self._owner, len(self.free)
        column = np.nonzero(problem.visible)[1]
        cycles, parts = (np.nonzero((column == 3) == is_cycle)[0] for is_cycle in (True, False))
        saturated, _ = self._saturated()
        telling = {problem.settings[owner[i]].combination for i in cycles if not saturated[owner == owner[i]].all()}
        if len(telling) < 2:
            return None
        slopes = problem.derivatives(self.free, self.at)
        of_setting = np.zeros(len(problem.settings), dtype=np.int64)
        of_setting[owner[cycles]] = cycles
        own = of_setting[owner[parts]]  # the cycle that a part belongs to
        by, off = slopes[parts] - slopes[own], self.residuals[parts] - self.residuals[own]
        spare = len(parts) - int(np.linalg.matrix_rank(by, tol=_TELLING)) if len(parts) else 1
        squares = float(np.minimum(off**2, (3 * _SCALE) ** 2).sum())
        noise = max(squares / max(spare, 1), LEAST_NOISE**2)
        covariance = np.linalg.inv(by.T @ by / noise + np.eye(k) / _REACH**2).astype(np.float64)
        shift = -covariance @ (by.T @ off) / noise
        settings = [problem.settings[i] for i in owner[cycles]]
        within, errors = problem.row_variance, problem.errors[owner[cycles]] ** 2
        between = max(within - float(problem.errors @ problem.errors) / len(problem.errors), 0.0) if within else 0.0
        count = problem.repetitions[owner[cycles]]
        fewer = np.where(count > 2, _OF_MEDIAN, 1.0) / count
        timed = any(row.has_parts for row in problem.rows)
        return Discrepancy(
            positions(settings),
            np.array([s.barrier for s in settings]),
            slopes[cycles],
            self.residuals[cycles] + slopes[cycles] @ shift,
            errors * fewer,
            between * fewer,
            covariance,
            shift,
            between,
            beside_computing(self.constants, settings) if timed else None,
        )


def beside_computing(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """The part of each row's cycle that other times than those of computing decide, [n]: closed form."""
    return closed_form.beside_computing(plants(constants, rows), [row.barrier for row in rows])


def soft_cost(residuals: NDArray[np.float64]) -> float:
    """The cost of least squares with soft L1."""
    return float(_SCALE**2 * np.sum(np.sqrt(1 + (residuals / _SCALE) ** 2) - 1))


def _medians(logs: NDArray[np.float64]) -> list[float]:
    """The median of each column, without missing values; nan for a column without values."""
    kept = [column[np.isfinite(column)] for column in logs.T]
    return [float(np.median(column)) if len(column) else math.nan for column in kept]


def _standard_error(logs: NDArray[np.float64]) -> float:
    """Standard error of the median, from the median absolute deviation; 0 for one value."""
    distance = float(np.median(np.abs(logs - np.median(logs))))
    return 1.4826 * ERROR_OF_MEDIAN * distance / math.sqrt(len(logs))


def _observed(constants: Constants, rows: Sequence[Row], spans: Spans) -> NDArray[np.float64]:
    """Compute, pull, push and cycle, [n, 4], divided as in the recording: messages and delays belong to transfers or to
    computing."""
    table = np.stack(spans, axis=1)
    if constants.in_transfers:
        moved = np.array([constants.between_seconds(r) for r in rows])
        table = table + np.stack([-moved, moved / 2, moved / 2, 0 * moved], axis=1)
    return np.maximum(table, 1e-12)


def _guess(name: str, rows: Sequence[Row], given: Constants, *, transfers_first: bool = False) -> float:
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
    if transfers_first:
        alone, apply = apply, alone
    guesses: dict[str, float] = {
        "fixed_seconds": 0.3 * compute,
        "sample_seconds": 0.7 * compute / batch,
        "saturation_samples": 0.5 * batch,
        "serial_fraction": 0.1,
        "message_seconds": 0.05 * compute / servers,
        "latency_seconds": 0.05 * alone,
        "model_bytes": alone * given.nic_bytes_per_second,
        "nic_bytes_per_second": given.model_bytes / max(alone, 1e-9),
        "service_bytes_per_second": 3 * (given.model_bytes or alone * given.nic_bytes_per_second) / max(alone, 1e-9),
        "apply_seconds": apply,
        "switch_bytes_per_second": _FILLED * (given.model_bytes or alone * given.nic_bytes_per_second) / max(alone, 1e-9),
        "apply_exponent": 0.8,
        "apply_growth": 0.3,
        "commit_seconds": 0.3 * apply / servers,
        "delay_messages": given.delay_messages,
        "step_seconds": 0.02 * cycle,
        "master_sample_seconds": 0.02 * cycle / batch / workers,
    }
    return guesses[name]


def _guess_of_servers(name: str, rows: Sequence[Row], given: Constants) -> float:
    """A start value of the model's size, or of the rates of links and servers, where links are fast enough to keep twice as
    many servers busy as were recorded, and the fastest recorded pull had the servers for itself."""
    alone = min(r.pull_seconds * 32 / r.transfer_bits * r.servers for r in rows if r.pull_seconds > 0)
    faster = 2.0 * max(r.servers for r in rows)
    model_bytes = given.model_bytes or given.nic_bytes_per_second * alone / faster
    return {
        "model_bytes": model_bytes,
        "nic_bytes_per_second": faster * model_bytes / alone,
        "service_bytes_per_second": given.server_threads * model_bytes / alone,
        "switch_bytes_per_second": _FILLED * model_bytes / alone,
    }[name]


def _links_together(rows: Sequence[Row]) -> float:
    """The rate of the links of all workers, or of all servers if that is less, over that of one: most of any row."""
    return max(float(min(r.workers, r.servers)) for r in rows)


def clearly_less(cost: float, other: float) -> bool:
    """Whether a cost is less than another one by more than a search's path makes."""
    return 1.02 * cost + LEAST_NOISE**2 < other


def coded(name: str, value: float) -> float:
    """The logarithm of a constant; of a share in [0, 1], that of its odds."""
    return math.log(value / (1 - value)) if name in SHARES else math.log(max(value, 1e-12))


def decoded(name: str, code: float) -> float:
    """The constant of which `coded` gives `code`."""
    return 1 / (1 + math.exp(-code)) if name in SHARES else math.exp(code)


def with_logs(base: Constants, free: Sequence[str], at: NDArray[np.float64]) -> Constants:
    """The constants `base` with those in `free` as their logarithms `at` tell, [k]."""
    values: dict[str, Any] = {name: decoded(name, float(x)) for name, x in zip(free, at, strict=True)}
    return replace(base, **values)


@cache
def engine_mean(constants: Constants, row: Row, seeds: int = SEEDS) -> Estimate:
    """`simulated`, once for the same arguments."""
    return simulated(constants, row, seeds)
