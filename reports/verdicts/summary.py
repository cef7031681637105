"""One row per scenario and tuner from the runs of a comparison: what was measured, what was compared, and who leads.

The method, with its sources, is in `statistics.py`. Times and ratios are medians with 95 % intervals; what a tuner
spent (reconfigurations, overhead, trials, thinking) and its final loss and accuracy are means over its runs that did not
fail. The oracle `best_fixed` is chosen in hindsight, so it is not compared. *Regret* is the completion time, or the cost in
USD, divided by the oracle's with the same seed, minus 1. Where a scenario minimises cost, tuners are compared by cost, and
ratios are of costs; a run that missed its target counts with all that the scenario allows to spend.

Identical runs count once. Tuners whose runs have the same outcome on all seeds have one row that is compared; the others get
the role "same", with the name of the one that stands for them. `fixed` stands for all that changed nothing. So a tuner that
does nothing never changes what is said of others.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import polars as pl

from reports.verdicts.statistics import (
    LEVEL,
    Bounds,
    Interval,
    PairedComparison,
    censored,
    compare,
    median_interval,
    paired_t,
    ratios,
)
from traces.schema import minimised

if TYPE_CHECKING:
    from numpy.typing import NDArray

    from traces.store import Results

__all__ = [
    "ORACLE",
    "OUTCOME",
    "REFERENCE",
    "SUMMARY",
    "alike",
    "compared",
    "log_minimised",
    "same_runs",
    "shows_accuracy",
    "shows_usd",
    "side_of_reference",
    "standing",
    "summary",
    "winner",
]

REFERENCE = "fixed"
"""The tuner that never changes the setting: ratios are relative to it."""

ORACLE = "best_fixed"
"""The best fixed setting in hindsight: regret is relative to it."""


def _interval_columns(name: str, kind: str) -> dict[str, pl.DataType]:
    ends = {f"{kind}_low": pl.Float64(), f"{kind}_high": pl.Float64(), f"{kind}_bound": pl.String()}
    return {name: pl.Float64(), **ends}


SUMMARY: dict[str, pl.DataType] = {
    "scenario": pl.String(),
    "tuner": pl.String(),
    "role": pl.String(),  # contestant | reference | same | oracle
    "same_as": pl.String(),  # the tuner that stands for this one, whose runs are identical; else ""
    "runs": pl.Int64(),
    "reached": pl.Int64(),  # runs that reached the target within the budget
    "failed": pl.Int64(),  # runs with status "error"
    "diverged": pl.Int64(),  # runs whose loss was no longer finite
    "deadlocked": pl.Int64(),  # runs in which no worker was left that could push
    "budget_seconds": pl.Float64(),
    "budget_usd": pl.Float64(),  # what all machines cost for that time, or less where the scenario says so; nan: not known
    # *_low, *_high: 95 % interval, nan where there is none, high infinite where open; *_bound: `Interval.bound`
    **_interval_columns("completion_seconds", "completion"),
    **_interval_columns("ratio", "ratio"),  # to `fixed`, of what the scenario minimises
    **_interval_columns("regret", "regret"),  # ratio of times to `best_fixed`, minus 1
    "standing": pl.String(),  # leader; not told apart, behind or ahead of it; "" for the roles "same" and "oracle"
    "p_leader": pl.Float64(),  # of the difference to the leader, corrected by Holm (`statistics`); nan: not tested
    "p_reference": pl.Float64(),  # the same of the difference to `fixed`
    "reconfigurations": pl.Float64(),
    "overhead_seconds": pl.Float64(),
    "slow_seconds": pl.Float64(),
    "trial_seconds": pl.Float64(),
    "thinking_seconds": pl.Float64(),  # measured on the host
    "branches_peak": pl.Float64(),
    "branch_bytes_peak": pl.Float64(),
    "final_accuracy": pl.Float64(),
    "final_loss": pl.Float64(),
    "seeds": pl.Int64(),  # that the comparison used
    "minimise": pl.String(),  # seconds | usd
    "machine_seconds": pl.Float64(),
    **_interval_columns("usd", "usd"),  # cost until the target; nan where a price is not known
    **_interval_columns("usd_regret", "usd_regret"),  # ratio of costs to `best_fixed`, minus 1
}
"""Columns of `summary`."""

_SPENT = (
    "reconfigurations",
    "overhead_seconds",
    "slow_seconds",
    "trial_seconds",
    "thinking_seconds",
    "branches_peak",
    "branch_bytes_peak",
    "machine_seconds",
)

_MINIMISED = {"seconds": "completion_seconds", "usd": "usd"}
"""The column of the scores that a scenario minimises."""

_UNKNOWN = Interval(math.nan, math.nan, math.nan, "?")

OUTCOME = (
    "status",
    "completion_seconds",
    "reconfigurations",
    "overhead_seconds",
    "slow_seconds",
    "bytes_moved",
    "trial_seconds",
    "clocks",
    "final_loss",
    "final_accuracy",
    "final_setting",
)
"""Columns of the scores that are `alike` where two runs are one and the same."""


def summary(results: Results) -> pl.DataFrame:
    """One row per scenario and tuner. Columns: `SUMMARY`.

    In order of mean (logarithmic) time, then those whose runs are identical to others', then the oracle.
    """
    host = results.host.select("scenario", "tuner", "seed", "thinking_seconds")
    scores = results.scores.join(host, on=["scenario", "tuner", "seed"], how="left")
    rows: list[dict[str, Any]] = []
    for (_,), runs in scores.sort("scenario", "tuner", "seed").group_by(["scenario"], maintain_order=True):
        rows += _scenario_rows(runs)
    return pl.DataFrame(rows, schema=SUMMARY)


def alike(a: object, b: object) -> bool:
    """Whether two values of a column are one, but for the last digits, which processors round differently. A model that has
    diverged has no loss: nan and infinity both say so."""
    if isinstance(a, float) and isinstance(b, float):
        return math.isclose(a, b, rel_tol=1e-6) or not (math.isfinite(a) or math.isfinite(b))
    return a == b


def same_runs(runs: pl.DataFrame) -> dict[str, str]:
    """Which tuner stands for which, from the scores of one scenario: by tuner, the name of the one with identical runs.

    `fixed` stands for all that did what it did; else the one of most seeds, then the first by name. Of a tuner with fewer
    seeds than another, as in a comparison that goes on, only these are compared. Has only tuners for which another stands.
    """
    runs_of: dict[str, dict[int, tuple[Any, ...]]] = {}
    for (name,), mine in runs.group_by(["tuner"]):
        # A run that failed is like no other.
        if name != ORACLE and "error" not in mine["status"]:
            runs_of[str(name)] = {row[0]: row[1:] for row in mine.select("seed", *OUTCOME).iter_rows()}
    stand: list[str] = []
    same: dict[str, str] = {}
    for name in sorted(runs_of, key=lambda n: (n != REFERENCE, -len(runs_of[n]), n)):
        if one := next((one for one in stand if _within(runs_of[name], runs_of[one])), None):
            same[name] = one
        else:
            stand.append(name)
    return same


def _within(some: Mapping[int, tuple[Any, ...]], others: Mapping[int, tuple[Any, ...]]) -> bool:
    """Whether each of the runs, by seed, is like that of the others with this seed."""
    return all(seed in others and all(map(alike, row, others[seed])) for seed, row in some.items())


def log_minimised(runs: pl.DataFrame, tuners: Sequence[str]) -> NDArray[np.float64]:
    """Logarithms of the restricted times of one scenario, or of its costs where it minimises these, [seeds, tuners]: a run
    that missed its target counts its budget.

    NaN where a tuner was not run with a seed.
    """
    seeds = sorted(runs["seed"].unique())
    values = np.full((len(seeds), len(tuners)), math.nan)
    place = {name: i for i, name in enumerate(tuners)}
    # A run that failed before it began does not know what it might have cost; the others of its scenario do.
    known: Any = runs["budget_usd"].fill_nan(None).max()
    for row in runs.with_columns(pl.col("budget_usd").fill_nan(known)).iter_rows(named=True):
        if row["tuner"] in place:
            values[seeds.index(row["seed"]), place[row["tuner"]]] = math.log(max(minimised(row), 1e-9))
    return values


def compared(runs: pl.DataFrame) -> PairedComparison:
    """The tuners of one scenario's scores compared over its seeds; identical ones once, and without the oracle."""
    same = same_runs(runs)
    tuners = [t for t in sorted(runs["tuner"].unique()) if t != ORACLE and t not in same]
    able = runs.group_by("tuner").agg(able=pl.col("reached").any() & (pl.col("status") != "error").all())
    may_lead = able.filter("able")["tuner"].to_list()
    return compare(tuners, log_minimised(runs, tuners), paired_t, reference=REFERENCE, may_lead=may_lead)


def _scenario_rows(runs: pl.DataFrame) -> list[dict[str, Any]]:
    same, found = same_runs(runs), compared(runs)
    by_tuner = {str(name): mine for (name,), mine in runs.group_by(["tuner"], maintain_order=True)}
    names = [*found.tuners, *same, *(name for name in by_tuner if name == ORACLE)]
    return [_row(name, by_tuner, found, same) for name in names]


def _row(name: str, by_tuner: dict[str, pl.DataFrame], found: PairedComparison, same: Mapping[str, str]) -> dict[str, Any]:
    """The row of the tuner `name`: its medians and intervals, and how it compares with the reference and the oracle."""
    mine = by_tuner[name]
    # A failed run says nothing about time, nor does what it spent until it failed.
    ran = mine.filter(pl.col("status") != "error")
    minimise = mine["minimise"][0]
    one = Interval(1.0, 1.0, 1.0)
    ratio = one if name == REFERENCE and ran.height else _ratio(ran, by_tuner.get(REFERENCE), _MINIMISED[minimise])

    def regret(column: str) -> Interval:
        found = one if name == ORACLE and ran.height else _ratio(ran, by_tuner.get(ORACLE), column)
        # Equal times may differ in their last digit; -0.0 + 0.0 is 0.0.
        estimate, low, high = (round(x - 1, 12) + 0.0 for x in found[:3])
        return Interval(estimate, low, high, found.bound)

    return {
        "scenario": mine["scenario"][0],
        "tuner": name,
        "role": "same" if name in same else {REFERENCE: "reference", ORACLE: "oracle"}.get(name, "contestant"),
        "same_as": same.get(name, ""),
        "runs": mine.height,
        "reached": int(ran["reached"].sum()),
        "failed": mine.height - ran.height,
        "diverged": int((ran["status"] == "diverged").sum()),
        "deadlocked": int((ran["status"] == "deadlock").sum()),
        "budget_seconds": float(mine["budget_seconds"].to_numpy().max()),
        "budget_usd": _mean(mine["budget_usd"]),
        **_interval_values("completion_seconds", "completion", median_interval(_bounds(ran))),
        **_interval_values("ratio", "ratio", ratio),
        **_interval_values("regret", "regret", regret("completion_seconds")),
        "standing": standing(found, name, mine) if name in found.tuners else "",
        "p_leader": found.p_leader.get(name, math.nan),
        "p_reference": found.p_reference.get(name, math.nan),
        **{column: _mean(ran[column]) for column in (*_SPENT, "final_accuracy", "final_loss")},
        "seeds": found.blocks,
        "minimise": minimise,
        **_interval_values("usd", "usd", median_interval(_bounds(ran, "usd")) if _priced(ran) else _UNKNOWN),
        **_interval_values("usd_regret", "usd_regret", regret("usd") if _priced(ran) else _UNKNOWN),
    }


def standing(found: PairedComparison, tuner: str, mine: pl.DataFrame) -> str:
    """What is known of `tuner`, whose runs are `mine`, and the leader: if it has failed in all of them, it is behind, also
    where there are too few seeds or arenas for a test."""
    if found.leader and (mine["status"] == "error").all():
        return "behind"
    return found.standing(tuner)


def _interval_values(name: str, kind: str, found: Interval) -> dict[str, Any]:
    return {name: found.estimate, f"{kind}_low": found.low, f"{kind}_high": found.high, f"{kind}_bound": found.bound}


def _bounds(ran: pl.DataFrame, column: str = "completion_seconds") -> Bounds:
    """The times or costs of runs; one that missed its target would have taken more."""
    return censored(ran[column].to_numpy(), ran["reached"].to_numpy())


def _priced(ran: pl.DataFrame) -> bool:
    """Whether the cost of every run is known."""
    return ran.height > 0 and bool(ran["usd"].is_not_nan().all())


def _ratio(ran: pl.DataFrame, base: pl.DataFrame | None, column: str) -> Interval:
    """Median of the ratios of times or costs to those of `base`, over seeds with which neither run failed."""
    if base is None or (column == "usd" and not _priced(base.filter(pl.col("status") != "error"))):
        return _UNKNOWN
    theirs = base.filter(pl.col("status") != "error").select("seed", column, "reached")
    pairs = ran.join(theirs, on="seed", how="inner", suffix="_base").sort("seed")
    bases = censored(pairs[f"{column}_base"].to_numpy(), pairs["reached_base"].to_numpy())
    return median_interval(ratios(_bounds(pairs, column), bases))


def _mean(column: pl.Series) -> float:
    """Mean of the finite values; nan where there is none."""
    values = column.cast(pl.Float64).drop_nulls().to_numpy()
    finite = values[abs(values) < math.inf]
    return float(finite.mean()) if finite.size else math.nan


def winner(summary: pl.DataFrame, scenario: str) -> str:
    """The leader on a scenario: of those that reached the target in some run and failed in none, the one of least mean time.

    The oracle cannot win, because it cannot be run on its own. Raises ValueError where no tuner can win.
    """
    rows = summary.filter(pl.col("scenario") == scenario)
    if rows.is_empty():
        known = ", ".join(summary["scenario"].unique(maintain_order=True)) or "none"
        raise ValueError(
            f"Cannot name the winner on {scenario!r}: these results have no finished run of it; scenarios: {known}."
        )
    leader = rows.filter(pl.col("standing") == "leader")
    if leader.is_empty():
        raise ValueError(
            f"Cannot name the winner on {scenario!r}: no tuner reached the target without a failed run. Name one with "
            "--tuner."
        )
    return str(leader["tuner"][0])


def side_of_reference(row: dict[str, Any]) -> str:
    """Where a row of `summary` differs from the reference: "faster" or "slower", else ""."""
    if not row["p_reference"] < 1 - LEVEL:
        return ""
    return "faster" if row["ratio"] < 1 else "slower" if row["ratio"] > 1 else ""


def shows_accuracy(rows: pl.DataFrame) -> bool:
    """Whether these rows of `summary` have accuracies; tables and pages show losses where not."""
    return bool(rows["final_accuracy"].is_not_nan().any())


def shows_usd(rows: pl.DataFrame) -> bool:
    """Whether these rows of `summary` have costs in USD; machine-seconds they always have."""
    return bool(rows["usd"].is_not_nan().any())
