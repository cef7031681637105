"""The page of `harness trace replayed`: is a run under replayed conditions in the same world as the recording, and does a
comparison end as it does under distributions that are fitted to the same recording?

The distance between two distributions is that of Kolmogorov and Smirnov: the largest difference of their distribution
functions, from 0 to 1. Numbers of one machine, or of one run, depend on each other, so there is no p value of a test for
independent numbers: the interval is a bootstrap over the seeds of the runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from numpy.typing import NDArray

from harness.scenario import Scenario
from harness.scenario.building import scenario as changed
from reports.figures.drawing import BLUE, INK, MUTED, ORANGE, Drawing, canvas, drawn
from reports.templates.rendering import fill
from reports.verdicts.conclusions import answer
from reports.verdicts.numbers import relative
from reports.verdicts.summary import summary
from simulators.cluster.condition_series import STEPS, ConditionSeries, condition_series, with_fitted
from traces.store import Results, write_bytes

__all__ = ["KsDistance", "RoleCheck", "Verdict", "autocorrelation", "check", "distance", "fitted_twin", "verdict", "write"]

_Floats = NDArray[np.float64]

_SEEDS = 20  # whose conditions are compared with the recording; it takes no runs
_LAGS = 20
_RESAMPLED = 200
_QUANTILES = np.linspace(0.01, 0.99, 99)
_QUANTITY = {
    "compute": "time of a mini-batch over the usual one",
    "stragglers": "slowness of a machine over the usual one",
    "bandwidth": "recorded seconds at the full rate (10,000: never throttled)",
    "nodes": "nodes lost in an interval",
}


class KsDistance(NamedTuple):
    """Distance of Kolmogorov and Smirnov with its 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.3f} ({self.low:.3f}\u2013{self.high:.3f})"


@dataclass(frozen=True, slots=True)
class RoleCheck:
    """The conditions of one role: in the recording, replayed, and drawn from the distribution fitted to it."""

    role: str
    recorded: _Floats  # quantiles 1 % to 99 %
    replayed: _Floats
    fitted: _Floats
    replayed_distance: KsDistance
    fitted_distance: KsDistance
    memory: tuple[_Floats, _Floats, _Floats] | None  # autocorrelation at lags 1, 2, ...: recorded, replayed, fitted


@dataclass(frozen=True, slots=True)
class Verdict:
    """How a comparison ends under replay and under the fitted distributions."""

    replayed: str
    fitted: str
    leaders: tuple[str, str]  # "" where no tuner leads
    differs: bool  # whether one of the leaders is told apart from the other, in one of the two comparisons at least
    rows: list[tuple[str, str, str]]  # tuner, ratio to fixed under replay and under the fit


def fitted_twin(scenario: Scenario) -> Scenario:
    """The same scenario with distributions fitted to its recordings in place of their replay. Raises ValueError where it
    replays nothing, or replays a recording in order."""
    if scenario.conditions.replay is None:
        raise ValueError(f"Cannot compare {scenario.name} with a recording: it has no [conditions.replay].")
    replay = {}
    for role, trace in scenario.conditions.replay.traces().items():
        if trace.deal == "order":
            raise ValueError(f"Cannot fit replay.{role} of {scenario.name}: it replays one recording in order.")
        replay[role] = {name: getattr(trace, name) for name in trace.__struct_fields__} | {"fitted": True}
        replay[role]["nodes"] = list(trace.nodes)
    return changed(scenario, name=f"{scenario.name}-fitted", conditions={"replay": replay})


def check(scenario: Scenario) -> list[RoleCheck]:
    """Compare the conditions that 20 seeds get with the recording, for each role that the scenario replays."""
    nodes, budget, seeds = scenario.cluster.nodes, scenario.budget.seconds, range(_SEEDS)
    replayed = condition_series(scenario.conditions, nodes, budget, seeds)
    fitted = condition_series(with_fitted(scenario.conditions), nodes, budget, seeds)
    return [_role(role, replayed[role], fitted[role]) for role in replayed]


def _role(role: str, replayed: ConditionSeries, fitted: ConditionSeries) -> RoleCheck:
    drawn_by = [[x for run in one.simulated for x in run] for one in (replayed, fitted)]
    worlds = [replayed.recorded, *drawn_by]
    recorded, ours, theirs = (np.quantile(np.concatenate(series), _QUANTILES) for series in worlds)
    memory = None
    if role in STEPS:
        memory = autocorrelation(worlds[0]), autocorrelation(worlds[1]), autocorrelation(worlds[2])
    return RoleCheck(
        role=role,
        recorded=recorded,
        replayed=ours,
        fitted=theirs,
        replayed_distance=distance(replayed.recorded, replayed.simulated),
        fitted_distance=distance(fitted.recorded, fitted.simulated),
        memory=memory,
    )


def distance(recorded: Sequence[_Floats], simulated: Sequence[Sequence[_Floats]]) -> KsDistance:
    """The distance of the simulated numbers, by seed, from the recorded ones; the interval is a bootstrap over seeds."""
    ours, runs = np.concatenate(recorded), [np.concatenate(run) for run in simulated]
    rng = np.random.default_rng(0)
    drawn_runs = (rng.integers(len(runs), size=len(runs)) for _ in range(_RESAMPLED))
    values = [_distance(ours, np.concatenate([runs[i] for i in drawn])) for drawn in drawn_runs]
    low, high = np.quantile(values, (0.025, 0.975))
    return KsDistance(_distance(ours, np.concatenate(runs)), float(low), float(high))


def _distance(one: _Floats, other: _Floats) -> float:
    """The two-sample Kolmogorov-Smirnov statistic. SciPy's function spends most of its time on p values."""
    at = np.concatenate([one, other])
    shares = [np.searchsorted(np.sort(values), at, side="right") / len(values) for values in (one, other)]
    return float(np.abs(shares[0] - shares[1]).max())


def autocorrelation(series: Sequence[_Floats], lags: int = _LAGS) -> _Floats:
    """Mean over series of their autocorrelation at lags 1 to `lags`, each about its own mean, [lags]; series that do not
    vary, or are shorter than twice the lags, do not count. NaN where none does."""
    found = []
    for values in series:
        apart = values - values.mean()
        power = float(apart @ apart)
        if len(values) >= 2 * lags and power > 1e-12 * len(values):
            found.append([float(apart[k:] @ apart[:-k]) / power for k in range(1, lags + 1)])
    return np.mean(found, axis=0) if found else np.full(lags, math.nan)


def verdict(results: Results, scenario: str) -> Verdict:
    """How the comparison of `scenario` and of its fitted twin, both in `results`, end."""
    table = summary(results)
    ours, theirs = (table.filter(pl.col("scenario") == name) for name in (scenario, f"{scenario}-fitted"))
    leaders = [next(iter(rows.filter(pl.col("standing") == "leader")["tuner"]), "") for rows in (ours, theirs)]
    close = [{"", *rows.filter(pl.col("standing").is_in(["leader", "not told apart"]))["tuner"]} for rows in (ours, theirs)]
    differs = leaders[0] not in close[1] or leaders[1] not in close[0]
    ratios = [dict(rows.select("tuner", "ratio").iter_rows()) for rows in (ours, theirs)]
    rows = [(t, *(relative(r[t]) if t in r else "-" for r in ratios)) for t in ours["tuner"].to_list()]
    return Verdict(str(answer(ours)), str(answer(theirs)), (leaders[0], leaders[1]), differs, rows)


# ------------------------------------------------------------------------------------------------------------------- page


@dataclass(frozen=True, slots=True)
class _Section:
    """What the page shows of one scenario."""

    name: str
    summary: str
    roles: list[_RoleRow]
    drawings: list[Drawing]
    verdict: Verdict | None


class _RoleRow(NamedTuple):
    role: str
    quantity: str
    replayed: str
    fitted: str
    memory: str  # autocorrelation at lag 1


def write(path: Path, scenarios: Sequence[Scenario], results: Results | None = None) -> Path:
    """Write the page on these scenarios, with the verdicts of `results` where there are any; return its path."""
    sections = [_section(scenario, results, f"s{i}") for i, scenario in enumerate(scenarios)]
    differing = [s.name for s in sections if s.verdict is not None and s.verdict.differs]
    judged = sum(s.verdict is not None for s in sections)
    lead = (
        f"{len(sections)} arenas that replay recordings, and the same arenas under distributions that are fitted to them. "
    )
    if judged:
        lead += f"The winner differs on {len(differing)} of {judged}{': ' if differing else ''}{', '.join(differing)}."
    page = fill("replayed.html.j2", title="Is a replay the same world as its recording?", lead=lead, sections=sections)
    write_bytes(path, page.encode())
    return path


def _section(scenario: Scenario, results: Results | None, prefix: str) -> _Section:
    found = check(scenario)
    rows = [_role_row(one) for one in found]
    drawings = [_drawn(one, f"{prefix}-{one.role}") for one in found]
    known = results is not None and f"{scenario.name}-fitted" in results.scores["scenario"]
    judged = verdict(results, scenario.name) if results is not None and known else None
    return _Section(scenario.name, scenario.summary, rows, drawings, judged)


def _role_row(found: RoleCheck) -> _RoleRow:
    memory = "-" if found.memory is None else ", ".join(_plain(one[0]) for one in found.memory)
    return _RoleRow(found.role, _QUANTITY[found.role], str(found.replayed_distance), str(found.fitted_distance), memory)


def _plain(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.2f}"


def _drawn(found: RoleCheck, name: str) -> Drawing:
    panels = 1 if found.memory is None else 2
    with canvas(2.9, left=0.75, bottom=0.5) as figure:
        figure.subplots_adjust(wspace=0.25)
        left, *right = figure.subplots(1, panels, squeeze=False)[0]
        _quantiles(left, found)
        if found.memory is not None:
            _memory(right[0], found)
        caption = (
            "Left: quantiles (1 % to 99 %) in runs against those of the recording; on the line both are equal. Right: "
            f"autocorrelation, over lags in {STEPS[found.role]}. Blue: replayed; orange: drawn from the fitted "
            "distribution; black: recorded."
            if found.memory is not None
            else "Quantiles (1 % to 99 %) in runs against those of the recording; on the line both are equal. Blue: "
            "replayed; orange: drawn from the fitted distribution."
        )
        data = pl.DataFrame(
            {"share": _QUANTILES, "recorded": found.recorded, "replayed": found.replayed, "fitted": found.fitted}
        )
        return drawn(figure, name, caption, data)


def _quantiles(axes: Axes, found: RoleCheck) -> None:
    ends = np.array([min(found.recorded.min(), found.replayed.min()), max(found.recorded.max(), found.fitted.max())])
    axes.plot(ends, ends, color=MUTED, linewidth=0.8)
    axes.plot(found.recorded, found.fitted, ".", color=ORANGE, markersize=4)
    axes.plot(found.recorded, found.replayed, "o", color=BLUE, markersize=4, fillstyle="none", markeredgewidth=0.9)
    axes.set_xlabel(f"recorded: {_QUANTITY[found.role]}", fontsize=9)
    axes.set_ylabel("in runs", fontsize=9)


def _memory(axes: Axes, found: RoleCheck) -> None:
    lags = np.arange(1, _LAGS + 1)
    for values, color, style in zip(found.memory or (), (INK, BLUE, ORANGE), ("-", "o", "."), strict=True):
        axes.plot(lags, values, style, color=color, markersize=4, fillstyle="none" if style == "o" else "full")
    axes.axhline(0.0, color=MUTED, linewidth=0.8)
    axes.set_xlabel(f"lag, {STEPS[found.role]}", fontsize=9)
    axes.set_ylabel("autocorrelation", fontsize=9)
