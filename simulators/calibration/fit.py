"""Fits the constants of a workload and of its machines to recorded times.

The predictions are those of the engine. Simulating inside the search would be too slow, so the closed form of
`simulators.calibration.closed_form` is fitted to the logarithms of the recorded times by least squares. Then the engine
simulates every setting, the closed form is multiplied by the ratio engine / closed form, and is fitted again. After a few
rounds, the engine itself fits the recording.

A constant is refused if its knob never varied, or if its confidence interval is wider than an order of magnitude either way.
It then keeps its default, and `Fit.refused` says which measurement would determine it. How large it may be nevertheless is
in `Fit.alternatives`, for the intervals of predictions: what hardly matters in the fitted rows may decide others. What a
refused constant may be takes part of the fitted ones, so that it is in their intervals and draws, too. A constant that
takes up a measurement of its own leaves no degree of freedom to tell its error from, and is fitted without an interval.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from simulators.calibration import closed_form
from simulators.calibration.determined import fit_determined, fittable, scaled_samples
from simulators.calibration.discrepancy import Discrepancy
from simulators.calibration.draws import DRAWN
from simulators.calibration.least_squares import TimesProblem, clearly_less, coded, decoded, engine_mean, with_logs
from simulators.calibration.links import Sharing, SharingChoice, choose, told_apart
from simulators.calibration.model import Constants, plants
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.speeds import comparable, with_speeds
from simulators.calibration.simulations import SEEDS, simulated_seconds
from tuners.reasons import counted

__all__ = [
    "NO_FREEDOM",
    "Constants",
    "Estimates",
    "FarRows",
    "Fit",
    "Row",
    "closed_form_computing",
    "closed_form_cycles",
    "completed",
    "cycles",
    "fit",
    "fit_all",
    "predicted",
    "slopes",
]

_MACHINE = (
    "apply_exponent",
    "nic_bytes_per_second",
    "service_bytes_per_second",
    "switch_bytes_per_second",
    "latency_seconds",
)
_MISFIT = 0.1  # median error on its own rows from which a fit is warned of: twice what unseen rows may have
_UNEXPLAINED = 0.05  # the same, where recorded means are certain: what unseen rows may have
_CERTAIN = 3.0  # of the median standard error of recorded means: errors beyond it are not by chance
_APART = 5.0  # of the median error: normal errors beyond it are one in a thousand
_NAMED = 3  # combinations that a message names, at most
_RESAMPLES = 400
_DRAWS = 100  # of the resamples, the first ones, which are kept for scenarios

_NOT_SCALED = (
    "it may be nothing of what no sample adds to, or all of it: record machines of unlike speeds, each at two sizes of "
    "mini-batches, and name them in the column setting where these are different runs"
)
NO_FREEDOM = "no degree of freedom: as many constants as measurements that determine them"


class FarRows(NamedTuple):
    """Rows of one combination that a fit misses by far more than repetitions deviate, and than it misses the others."""

    policy: str
    workers: int
    servers: int
    rows: int
    off: float  # logarithm of simulated over recorded seconds, of the row that is furthest off
    noise: float  # what repetitions of that row's setting deviate by, relative

    def __str__(self) -> str:
        found = math.exp(self.off) - 1
        said = f"{self.policy} with {counted(self.workers, 'worker')} and {counted(self.servers, 'server')}"
        return f"{said} ({abs(found):.1%} too {'slow' if found > 0 else 'fast'}, noise {self.noise:.1%})"


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of fitting one workload of a recording."""

    constants: Constants
    intervals: Mapping[
        str, tuple[float, float] | None
    ]  # of the fitted constants: 95 %, bootstrap and `alternatives`; None: no degree of freedom
    refused: Mapping[str, str]  # constants that keep their default, and why
    borrowed: Mapping[str, float]  # constants of the machines that were fitted on other workloads of the recording
    rows: int
    error: float  # median relative error on these rows
    common_seconds: float = 0.0  # compute seconds that do not depend on a worker's speed
    draws: Mapping[str, tuple[float, ...]] = field(default_factory=dict)  # values of the first resamples, and `alternatives`
    discrepancy: Discrepancy | None = field(default=None, compare=False)  # errors of predictions; None: no degree of freedom
    alternatives: tuple[Constants, ...] = ()  # each with a refused constant as large as may be (95 %), the others fitted
    choice: SharingChoice | None = None  # how links are shared; None: as given
    rivals: tuple[tuple[float, Constants], ...] = ()  # forms that are not told from the chosen one, with their chances
    least_exponent: Constants | None = None  # with a refused `apply_exponent` as small as may be (95 %), the others fitted
    servers: frozenset[int] = frozenset()  # numbers of servers that were fitted to
    recorded_error: float = 0.0  # median relative standard error of the recorded means, by how cycles vary; 0: not known
    far: tuple[FarRows, ...] = ()  # what the constants miss although they describe most rows, the furthest first

    @property
    def misfit(self) -> str:
        """What to say of constants that do not describe even the rows that they are fitted to; "" where they do."""
        if _UNEXPLAINED < self.error <= _MISFIT and 0 < _CERTAIN * self.recorded_error < self.error:
            return (
                f"constants are off by {self.error:.0%} in the median on their own {self.rows} rows, whose recorded means "
                f"are within {self.recorded_error:.1%}: something takes time there that the simulator lacks; predictions of "
                "larger clusters may be further off than their intervals say"
            )
        if not self.error > _MISFIT:
            return self._misses
        return (
            f"constants are off by {self.error:.0%} in the median on their own {self.rows} rows: something takes time there "
            "that they do not tell, the rows are of different jobs or units, or noise is large; do not rely on predictions"
        )

    @property
    def _misses(self) -> str:
        """What to say of constants that describe most of their rows, and are far off on some; "" where there are none."""
        if not self.far:
            return ""
        more = len(self.far) - _NAMED
        named = "; ".join(map(str, self.far[:_NAMED])) + (f"; and {more} more" if more > 0 else "")
        return (
            f"constants are off by {self.error:.1%} in the median on their own {self.rows} rows, but by "
            f"far more, and beyond noise, on {sum(of.rows for of in self.far)} of these: {named}; something takes time "
            "there that the simulator lacks, or these runs were not yet steady; predictions may be further off than "
            "their intervals say"
        )

    @property
    def unsure(self) -> tuple[str, ...]:
        """The constants that were fitted without a degree of freedom."""
        return tuple(name for name, ends in self.intervals.items() if ends is None)


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
    links: Sequence[Sharing] = (),
    wanted: Sequence[Row] = (),
) -> dict[str, Fit]:
    """Fit every workload of a recording. A constant of the machines that one workload cannot determine is taken from others.

    `given` are the initial constants, by workload. Transfers determine only the ratio of the model's size to the NIC's rate:
    where `model_bytes` is 0 in `given`, the size is fitted, otherwise the NIC's rate. Constants in `without` stay as given.
    Without `engine`, the closed form is fitted as it is, for a baseline. How links are shared is chosen from `links` by the
    error of rows that are left out; a single form is taken. It is as `given` without any, or where transfers are not
    fitted. What the engine cannot simulate of the `wanted` rows, which are to be predicted, is not chosen. `watch` is told
    what is fitted next. Raises ValueError for no rows.
    """
    if not rows:
        raise ValueError(
            "Cannot calibrate: no run has both a setting and times. Record the numbers of workers and servers (table "
            "settings), and times: seconds and steps (runs or progress), or iterations: three of each worker, or more."
        )
    by_workload: dict[str, list[Row]] = {}
    for row in rows:
        by_workload.setdefault(row.workload, []).append(row)
    choice, form, forms = None, None, told_apart(links, rows)
    if engine and len(forms) > 1:
        watch(f"choosing how links are shared: {len(forms)} forms, {len(rows)} rows")
        choice = choose(by_workload, given, forms, without, wanted)
        form = None if choice is None else choice.links
    elif forms and any(row.has_parts for row in rows):
        form = forms[0]
    if form is not None:
        given = {name: form.put_into(constants) for name, constants in given.items()}
    fits = _fits(by_workload, given, resamples, without, watch, engine)
    if choice is not None and choice.plain is not None and not choice.links.has_effect(f.constants for f in fits.values()):
        # The whole search refuses what the short one of the choice has found.
        choice = choice.plain
        given = {name: choice.links.put_into(constants) for name, constants in given.items()}
        fits = _fits(by_workload, given, resamples, without, watch, engine)
    return {name: replace(found, choice=choice, rivals=_rivals(name, found, choice)) for name, found in fits.items()}


def _fits(
    by_workload: Mapping[str, Sequence[Row]],
    given: Mapping[str, Constants],
    resamples: int,
    without: Sequence[str],
    watch: Callable[[str], None],
    engine: bool,
) -> dict[str, Fit]:
    """The fits of all workloads, under one form of sharing links."""
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


def _rivals(workload: str, found: Fit, choice: SharingChoice | None) -> tuple[tuple[float, Constants], ...]:
    """The forms that are not told from the chosen one, with the noise of computing that was found."""
    jitter = found.constants.jitter
    return tuple((chance, replace(of, jitter=jitter)) for chance, of in (choice.undecided(workload) if choice else ()))


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
    rows = comparable(rows)
    free, refused = fittable(rows, given, without)
    scaled, is_told = scaled_samples(rows)
    given = replace(given, saturation_samples=scaled)
    if not is_told:
        refused["saturation_samples"] = _NOT_SCALED
    problems = [TimesProblem(rows, given, engine)]
    if any(r.has_parts for r in rows):
        # Recordings do not say which part of a cycle includes messages and latency: try both, keep the better fit.
        problems.append(TimesProblem(rows, replace(given, in_transfers=not given.in_transfers), engine))
    elif {"model_bytes", "nic_bytes_per_second"} & set(free):
        # Totals may be told by busy links or by slow updates, each an optimum of its own: try both, keep the better fit.
        problems.append(TimesProblem(rows, given, engine, transfers_first=True))
    (solved, refusals), *others = [fit_determined(p, free, refused) for p in problems]
    for other, why in others:
        # Where no message is determined, both are the same problem, and only the search's path differs.
        if clearly_less(other.cost, solved.cost):
            solved, refusals = other, why
    # A worker's speed follows from its compute time without the part that is common to all workers. This part is known only
    # after a first fit, so the speeds are computed again, and where that changes them, everything is fitted again. Rows that
    # are predicted may have unlike workers where those fitted are alike.
    found = solved.constants
    common = found.fixed_seconds + (0.0 if found.in_transfers else found.overhead_seconds(rows[0]))
    told_apart = with_speeds(rows, common, scaled)
    if [r.speeds for r in told_apart] != [r.speeds for r in rows]:
        rows = told_apart
        solved, refusals = fit_determined(TimesProblem(rows, solved.problem.given, engine), free, refused)
    constants = _with_jitter(solved.constants, rows)
    told = predicted(constants, rows) if engine else closed_form_cycles(constants, rows)
    errors = np.abs(told / np.array([r.cycle_seconds for r in rows]) - 1)
    drawn = solved.resampled(resamples)
    alternatives = {name: replace(other, jitter=constants.jitter) for name, other in solved.alternatives(refusals).items()}
    return Fit(
        constants,
        {n: _widened(n, ends, constants, alternatives.values()) for n, ends in solved.intervals(drawn).items()},
        refusals,
        {},
        len(rows),
        float(np.median(errors)),
        common,
        _draws(drawn[:_DRAWS], solved.free, constants, alternatives),
        solved.discrepancy(),
        tuple(alternatives.values()),
        least_exponent=solved.with_least_exponent() if "apply_exponent" in refusals else None,
        servers=frozenset(r.servers for r in rows),
        recorded_error=float(np.median([r.error for r in rows])),
        far=_far_rows(rows, told),
    )


def _far_rows(rows: Sequence[Row], told: NDArray[np.float64]) -> tuple[FarRows, ...]:
    """The combinations with rows that simulated seconds, `told`, miss by far more than by noise, the furthest first.

    Noise is what the cycles of the setting's runs tell, or the deviation of its repetitions, whichever is more, and no less
    than the medians of both over all: of few cycles or runs, noise may seem small. Where none is known, no row is far off.
    """
    by_setting: dict[Row, list[int]] = {}
    for i, row in enumerate(rows):
        by_setting.setdefault(row.setting_only(), []).append(i)
    off = np.log(told / np.array([row.cycle_seconds for row in rows]))
    between = {setting: float(off[of].std(ddof=1)) for setting, of in by_setting.items() if len(of) > 1}
    usual = max(float(np.median(of)) for of in ([row.error for row in rows], [*between.values()] or [0.0]))
    least = max(_UNEXPLAINED, _APART * float(np.median(np.abs(off))))
    found: dict[tuple[str, int, int], list[tuple[float, float]]] = {}
    for setting, of in by_setting.items():
        within = math.sqrt(float(np.mean([rows[i].error ** 2 for i in of])))
        noise = max(within, between.get(setting, 0.0), usual)
        found.setdefault(setting.combination, []).extend(
            (float(off[i]), noise) for i in of if noise and abs(off[i]) > max(least, _CERTAIN * noise)
        )
    far = [FarRows(*which, len(each), *max(each, key=lambda one: abs(one[0]))) for which, each in found.items() if each]
    return tuple(sorted(far, key=lambda of: -abs(of.off)))


def _widened(
    name: str, ends: tuple[float, float] | None, fitted: Constants, alternatives: Iterable[Constants]
) -> tuple[float, float] | None:
    """The interval of a constant, with what it would be where a refused one is as large as it may be.

    Each of these is on one side. Squares of distances are added, as in the intervals of predictions (`spread`).
    """
    if ends is None:
        return None
    at = coded(name, getattr(fitted, name))
    moved = np.array([coded(name, getattr(other, name)) - at for other in alternatives])
    low, high = (
        math.sqrt(max(side * (coded(name, end) - at), 0.0) ** 2 + float((np.maximum(side * moved, 0.0) ** 2).sum()))
        for side, end in zip((-1, 1), ends, strict=True)
    )
    return decoded(name, at - low), decoded(name, at + high)


def _draws(
    resampled: NDArray[np.float64], free: Sequence[str], fitted: Constants, alternatives: Mapping[str, Constants]
) -> dict[str, tuple[float, ...]]:
    """The constants of each draw: resampled ones, [draws, k], in turn as they are and with one refused constant as large as
    it may be, to which the others are fitted."""
    turns = [(None, fitted), *((name, other) for name, other in alternatives.items() if name in DRAWN)]
    moved = np.array([[coded(n, getattr(other, n)) - coded(n, getattr(fitted, n)) for n in free] for _, other in turns])
    turn = np.arange(len(resampled)) % len(turns)
    codes = resampled + moved.reshape(len(turns), len(free))[turn]
    found = {n: tuple(decoded(n, float(x)) for x in column) for n, column in zip(free, codes.T, strict=True)}
    for number, (name, other) in enumerate(turns):
        if name is not None:
            found[name] = tuple(np.where(turn == number, getattr(other, name), 0.0).tolist())
    return found


def _with_jitter(constants: Constants, rows: Sequence[Row]) -> Constants:
    """The constants with the jitter of computing alone: recorded compute times include messages, whose time is constant."""
    timed = [r for r in rows if r.has_parts and not constants.in_transfers]
    shares = [min(constants.between_seconds(r) / r.compute_seconds, 0.9) for r in timed]
    return replace(constants, jitter=constants.jitter / (1 - float(np.median(shares)))) if shares else constants


def predicted(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of a cycle that the engine simulates for each row."""
    return cycles(constants, rows).seconds


def cycles(constants: Constants, rows: Sequence[Row], seeds: int = SEEDS) -> Estimates:
    """Seconds of a cycle that the engine simulates for each row, by at most so many `seeds`, and their errors."""
    machines = max(r.workers + r.servers for r in rows)
    found = [engine_mean(constants, replace(r.setting_only(), machines=machines), seeds) for r in rows]
    return Estimates(np.array([float(e.spans.cycle) for e in found]), np.array([e.error for e in found]))


def closed_form_cycles(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of a cycle of each row by the closed form alone, [n]."""
    return closed_form.spans(plants(constants, rows), [r.barrier for r in rows]).cycle


def closed_form_computing(constants: Constants, rows: Sequence[Row]) -> NDArray[np.float64]:
    """Seconds of computing in a cycle of each row by the closed form, divided from transfers as recorded, [n]."""
    found = closed_form.spans(plants(constants, rows), [r.barrier for r in rows]).compute
    apart = np.array([constants.between_seconds(r) if constants.in_transfers else 0.0 for r in rows])
    seconds: NDArray[np.float64] = found - apart
    return seconds


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
    at = np.array([coded(name, getattr(found.constants, name)) for name in free])

    def logs(codes: NDArray[np.float64]) -> NDArray[np.float64]:
        constants = with_logs(found.constants, free, codes)
        seconds: NDArray[np.float64] = np.log(closed_form_cycles(constants, rows))
        return seconds

    moved = [logs(at + step * unit) - logs(at - step * unit) for unit in np.eye(len(free))]
    return np.stack(moved, axis=1) / (2 * step) if moved else np.zeros((len(rows), 0))
