"""From runs to one row per scenario and tuner, and from those to a table for the terminal.

The method, with its sources, is in `reports.statistics`. Times and ratios are medians with 95 % intervals; what a tuner
spent (reconfigurations, overhead, trials, thinking) and where it ended are means over its runs that did not fail. The
oracle `best_fixed` knows in hindsight what no contestant can, so it is not ranked and stands apart: *regret* is
completion time over the oracle's, seed by seed, less 1.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import polars as pl

from reports.statistics import (
    LEVEL,
    Bounds,
    Interval,
    Ranking,
    censored,
    coverage_limit,
    median_interval,
    rank,
    rank_keys,
    ratios,
)

if TYPE_CHECKING:
    from rich.table import Table
    from rich.text import Text

    from traces.store import Results

__all__ = [
    "ORACLE",
    "REFERENCE",
    "SUMMARY",
    "against",
    "blocks_of",
    "interval_text",
    "notes",
    "quantity",
    "ranking_of",
    "relative",
    "render",
    "shows_accuracy",
    "summary",
    "winner",
]

REFERENCE = "fixed"
"""The tuner that changes nothing: ratios are to it."""

ORACLE = "best_fixed"
"""The best fixed setting in hindsight: regret is against it."""


def _interval_columns(name: str, kind: str) -> dict[str, pl.DataType]:
    ends = {f"{kind}_low": pl.Float64(), f"{kind}_high": pl.Float64(), f"{kind}_bound": pl.String()}
    return {name: pl.Float64(), **ends}


SUMMARY: dict[str, pl.DataType] = {
    "scenario": pl.String(),
    "tuner": pl.String(),
    "role": pl.String(),  # contestant | reference | oracle
    "runs": pl.Int64(),
    "reached": pl.Int64(),  # runs that came to the target within the budget
    "failed": pl.Int64(),  # runs with status "error"
    "budget_seconds": pl.Float64(),
    # *_low, *_high: 95 % interval, nan where there is none, high infinite where open; *_bound: `Interval.bound`
    **_interval_columns("completion_seconds", "completion"),
    **_interval_columns("ratio", "ratio"),  # to `fixed`
    **_interval_columns("regret", "regret"),  # ratio to `best_fixed`, less 1
    **_interval_columns("mean_rank", "rank"),
    "group": pl.String(),  # tuners that share a letter are not ranked against each other; "" where nothing is ranked
    "reconfigurations": pl.Float64(),
    "overhead_seconds": pl.Float64(),
    "slow_seconds": pl.Float64(),
    "trial_seconds": pl.Float64(),
    "thinking_seconds": pl.Float64(),  # measured on the host
    "branches_peak": pl.Float64(),
    "branch_bytes_peak": pl.Float64(),
    "final_accuracy": pl.Float64(),
    "final_loss": pl.Float64(),
    "blocks": pl.Int64(),  # seeds that every contestant was run with
    "p_value": pl.Float64(),
    "critical_difference": pl.Float64(),
    "verdict": pl.String(),
}
"""Columns of `summary`."""

_ENOUGH = 0.9  # coverage below which an interval supports no conclusion
_DASH = "\u2013"  # from - to
_GLUE = "\u00a0"  # a space at which no line is broken
_SPENT = (
    "reconfigurations",
    "overhead_seconds",
    "slow_seconds",
    "trial_seconds",
    "thinking_seconds",
    "branches_peak",
    "branch_bytes_peak",
)


# -------------------------------------------------------------------------------------------------------------- summary


def summary(results: Results) -> pl.DataFrame:
    """One row per scenario and tuner, by mean rank, the oracle last. Units and meanings: `SUMMARY`."""
    host = results.host.select("scenario", "tuner", "seed", "thinking_seconds")
    scores = results.scores.join(host, on=["scenario", "tuner", "seed"], how="left")
    rows: list[dict[str, Any]] = []
    for (_,), runs in scores.sort("scenario", "tuner", "seed").group_by(["scenario"], maintain_order=True):
        rows += _scenario_rows(runs)
    return pl.DataFrame(rows, schema=SUMMARY)


def _scenario_rows(runs: pl.DataFrame) -> list[dict[str, Any]]:
    ranking = ranking_of(runs)
    by_tuner = {str(name): mine for (name,), mine in runs.group_by(["tuner"], maintain_order=True)}
    names = [*ranking.tuners, *(name for name in by_tuner if name not in ranking.tuners)]
    return [_row(name, by_tuner[name], by_tuner, ranking) for name in names]


def _row(name: str, mine: pl.DataFrame, by_tuner: dict[str, pl.DataFrame], ranking: Ranking) -> dict[str, Any]:
    ran = mine.filter(pl.col("status") != "error")
    place = ranking.tuners.index(name) if name in ranking.tuners else None
    placed = Interval(math.nan, math.nan, math.nan, "?") if place is None else ranking.ranks[place]
    ratio = Interval(1.0, 1.0, 1.0) if name == REFERENCE and ran.height else _ratio(ran, by_tuner.get(REFERENCE))
    against = Interval(1.0, 1.0, 1.0) if name == ORACLE and ran.height else _ratio(ran, by_tuner.get(ORACLE))
    regret = Interval(against.estimate - 1, against.low - 1, against.high - 1, against.bound)
    return {
        "scenario": mine["scenario"][0],
        "tuner": name,
        "role": {REFERENCE: "reference", ORACLE: "oracle"}.get(name, "contestant"),
        "runs": mine.height,
        "reached": int(ran["reached"].sum()),
        "failed": mine.height - ran.height,
        "budget_seconds": float(mine["budget_seconds"].to_numpy().max()),
        **_ends("completion_seconds", "completion", median_interval(_times(ran))),
        **_ends("ratio", "ratio", ratio),
        **_ends("regret", "regret", regret),
        **_ends("mean_rank", "rank", placed),
        "group": "" if place is None else ranking.groups[place],
        **{column: _mean(ran[column]) for column in (*_SPENT, "final_accuracy", "final_loss")},
        "blocks": ranking.blocks,
        "p_value": ranking.p_value,
        "critical_difference": ranking.critical_difference,
        "verdict": ranking.verdict,
    }


def _ends(name: str, kind: str, found: Interval) -> dict[str, Any]:
    return {name: found.estimate, f"{kind}_low": found.low, f"{kind}_high": found.high, f"{kind}_bound": found.bound}


def _times(ran: pl.DataFrame) -> Bounds:
    return censored(ran["completion_seconds"].to_numpy(), ran["reached"].to_numpy())


def _ratio(ran: pl.DataFrame, base: pl.DataFrame | None) -> Interval:
    """Median of completion times over the base's, by seeds that failed for neither."""
    if base is None:
        return Interval(math.nan, math.nan, math.nan, "?")
    theirs = base.filter(pl.col("status") != "error").select("seed", "completion_seconds", "reached")
    pairs = ran.join(theirs, on="seed", how="inner", suffix="_base").sort("seed")
    bases = censored(pairs["completion_seconds_base"].to_numpy(), pairs["reached_base"].to_numpy())
    return median_interval(ratios(_times(pairs), bases))


def _mean(column: pl.Series) -> float:
    """Of the finite values, nan where there is none."""
    values = column.cast(pl.Float64).drop_nulls().to_numpy()
    finite = values[abs(values) < math.inf]
    return float(finite.mean()) if finite.size else math.nan


def blocks_of(scores: pl.DataFrame, tuners: Sequence[str]) -> pl.DataFrame:
    """Rank keys, a row per (scenario, seed) that all `tuners` were run with, a column per tuner."""
    keyed = scores.with_columns(
        key=pl.Series(rank_keys(scores["completion_seconds"].to_list(), scores["reached"].to_list(), _failed(scores)))
    )
    if not tuners:
        return pl.DataFrame()
    wide = keyed.pivot(on="tuner", index=["scenario", "seed"], values="key").sort("scenario", "seed")
    return wide.select("scenario", "seed", *tuners).drop_nulls()


def _failed(scores: pl.DataFrame) -> list[bool]:
    return [status == "error" for status in scores["status"]]


def ranking_of(scores: pl.DataFrame) -> Ranking:
    """The contestants (all but the oracle) ranked over every (scenario, seed) in `scores`.

    With several scenarios, only those contestants are ranked that were run in all of them.
    """
    scenarios = scores["scenario"].n_unique()
    played = scores.group_by("tuner").agg(pl.col("scenario").n_unique())
    everywhere = played.filter((pl.col("scenario") == scenarios) & (pl.col("tuner") != ORACLE))
    tuners = sorted(everywhere["tuner"].to_list())
    keys = blocks_of(scores, tuners)
    return rank(tuners, keys.select(tuners).to_numpy().reshape(keys.height, len(tuners)))


def winner(summary: pl.DataFrame, scenario: str) -> str:
    """Who won on a scenario: of those in `summary` that can play again (no oracle) and that came to the target in some run
    and failed in none, the one with the lowest mean rank. Raises ValueError where there is nobody.
    """
    rows = summary.filter(pl.col("scenario") == scenario)
    if rows.is_empty():
        played = ", ".join(summary["scenario"].unique(maintain_order=True)) or "none"
        raise ValueError(f"Nobody won on {scenario!r}: these results have no finished run of it; scenarios: {played}.")
    able = rows.filter((pl.col("role") != "oracle") & (pl.col("reached") > 0) & (pl.col("failed") == 0))
    if able.is_empty():
        raise ValueError(
            f"Nobody won on {scenario!r}: no tuner came to the target without a failed run. Name one with --tuner."
        )
    return str(able["tuner"][0])  # rows are in the order of ranks


# --------------------------------------------------------------------------------------------------------------- render


def quantity(value: float) -> str:
    """A number with three significant digits, whole from 100 on; a dash where there is none."""
    if math.isnan(value):
        return "-"
    if math.isinf(value):
        return "∞" if value > 0 else "-∞"
    size = abs(value)
    digits = 0 if size >= 99.95 or size == 0 else 1 if size >= 9.995 else 2 if size >= 0.9995 else 3
    return f"{value:.{digits}f}" if size >= 0.01 or size == 0 else f"{value:.2g}"


def relative(value: float) -> str:
    """A ratio, a regret or a mean rank: two digits after the point, fewer from 10 on, more below 0.1."""
    return f"{value:.2f}" if 0.095 <= abs(value) < 9.995 else quantity(value)


def interval_text(row: dict[str, Any], name: str, kind: str) -> tuple[str, str]:
    """An estimate of a row of `summary` and its interval, as two texts, the second empty where there is no interval."""
    text = quantity if kind == "completion" else relative
    estimate, low, high, bound = row[name], row[f"{kind}_low"], row[f"{kind}_high"], row[f"{kind}_bound"]
    if math.isnan(estimate):
        return ("unknown" if bound == "?" and not math.isnan(low) else "-"), ""
    shown = text(estimate) if bound == "=" else f"{bound}{_GLUE}{text(estimate)}"
    if math.isnan(low) or (low == high and bound == "=") or (math.isinf(high) and low == estimate and bound == ">"):
        return shown, ""
    return shown, f"≥{_GLUE}{text(low)}" if math.isinf(high) else f"{text(low)}{_DASH}{text(high)}"


def against(row: dict[str, Any]) -> str:
    """Whether a row of `summary` is "faster" or "slower" than the reference with its whole interval; else "".

    Never with so few seeds that an interval holds the true median less than nine times in ten (fewer than five).
    """
    if coverage_limit(row["runs"] - row["failed"]) < _ENOUGH:
        return ""
    return "faster" if row["ratio_high"] < 1 else "slower" if row["ratio_low"] > 1 else ""


def shows_accuracy(rows: pl.DataFrame) -> bool:
    """Whether these rows of `summary` have accuracies to show; where not, losses are shown."""
    return bool(rows["final_accuracy"].is_not_nan().any())


def render(summary: pl.DataFrame, *, columns: int = 100) -> list[Table]:
    """A table per scenario for a terminal of so many columns, 80 or more."""
    return [_table(rows, columns) for _, rows in summary.group_by(["scenario"], maintain_order=True)]


def _table(rows: pl.DataFrame, columns: int) -> Table:
    from rich import box
    from rich.table import Table
    from rich.text import Text

    accuracy = shows_accuracy(rows)
    regret = ORACLE in set(rows["tuner"])
    gap = (0, int(columns >= 100), 0, 0)
    table = Table(box=box.SIMPLE_HEAD, padding=gap, pad_edge=False, title_justify="left", caption_justify="left")
    table.title = Text(str(rows["scenario"][0]), style="bold")
    longest = max((len(name) for name in rows["tuner"]), default=0)
    table.add_column("tuner", overflow="fold", min_width=min(max(longest, 8), 20 if columns >= 100 else 8))
    for head in ("time, s", f"ratio to {REFERENCE}"):
        table.add_column(head, justify="right", min_width=11, overflow="fold")
    heads = [
        *(["regret"] if regret else []),
        "done",
        "re-\nconf",
        "over-\nhead s",
        "think-\ning s",
        "accu-\nracy" if accuracy else "loss",
    ]
    for head in heads:
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("group")
    for row in rows.iter_rows(named=True):
        if row["role"] == "oracle":
            table.add_section()
        table.add_row(*_cells(row, accuracy, regret), style="dim" if row["role"] == "oracle" else None)
    table.caption = Text("\n".join(notes(rows)))
    return table


def _cells(row: dict[str, Any], accuracy: bool, regret: bool) -> list[Text]:
    from rich.text import Text

    def ends(name: str, kind: str, style: str = "") -> Text:
        shown, interval = interval_text(row, name, kind)
        return Text.assemble((shown, style), (f" ({interval})" if interval else "", "dim"))

    style = {"faster": "green", "slower": "red"}.get(against(row), "")
    oracle = row["role"] == "oracle"
    changes = row["reconfigurations"]
    final = row["final_accuracy"] if accuracy else row["final_loss"]
    return [
        Text(row["tuner"]),
        ends("completion_seconds", "completion"),
        Text("1") if row["role"] == "reference" else ends("ratio", "ratio", style),
        *([Text("-" if oracle else interval_text(row, "regret", "regret")[0])] if regret else []),
        Text(f"{row['reached']}/{row['runs']}"),
        Text("-" if math.isnan(changes) else f"{changes:.0f}" if changes == int(changes) else f"{changes:.1f}"),
        *(Text(quantity(row[name])) for name in ("overhead_seconds", "thinking_seconds")),
        Text(quantity(final)),
        Text("-" if oracle else row["group"] or "-"),
    ]


def notes(rows: pl.DataFrame) -> list[str]:
    """What a reader of one scenario's rows must know: seeds, censoring, reference, oracle, failures, verdict."""
    present = set(rows["tuner"])
    runs = int(rows["runs"].to_numpy().max())
    if runs == 1:
        said = ["One seed: no intervals, and no telling tuners from luck. Run more."]
    else:
        said = [f"Times and ratios: medians over {runs} paired seeds (95 % intervals); else means. Done: target reached."]
    if runs > 1 and coverage_limit(runs) < LEVEL:
        best = 100 * coverage_limit(runs)
        said.append(f"{runs} seeds: an interval covers the true median {best:.3g} % of the time at best, not 95 %.")
    if ">" in rows["completion_bound"]:
        said.append("> means: most runs had not reached the target when the budget ended.")
    if REFERENCE in present:
        said.append(f"Ratio: seed by seed to {REFERENCE}, the setting that the job starts with; below 1 is faster.")
    if ORACLE in present:
        said.append(f"Regret: time over that of {ORACLE} (best fixed setting in hindsight, no contestant), less 1.")
    lost = [f"{n} ({f} of {r})" for n, f, r in rows.select("tuner", "failed", "runs").iter_rows() if f]
    if lost:
        said.append(f"Failed runs, ranked last and left out of times: {', '.join(lost)}.")
    return [*said, str(rows["verdict"][0])]
