"""One row per scenario and tuner from the runs of a comparison, and from these rows a table for the terminal and the winner.

The method, with its sources, is in `reports.statistics`. Times and ratios are medians with 95 % intervals; what a tuner
spent (reconfigurations, overhead, trials, thinking) and its final loss and accuracy are means over its runs that did not
fail. The oracle `best_fixed` is chosen in hindsight, so it is not ranked. *Regret* is the completion time divided by the
oracle's with the same seed, minus 1.
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
    "blocks_of",
    "faster_or_slower",
    "interval_text",
    "not_applicable",
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
"""The tuner that never changes the setting: ratios are relative to it."""

ORACLE = "best_fixed"
"""The best fixed setting in hindsight: regret is relative to it."""


def _interval_columns(name: str, kind: str) -> dict[str, pl.DataType]:
    ends = {f"{kind}_low": pl.Float64(), f"{kind}_high": pl.Float64(), f"{kind}_bound": pl.String()}
    return {name: pl.Float64(), **ends}


SUMMARY: dict[str, pl.DataType] = {
    "scenario": pl.String(),
    "tuner": pl.String(),
    "role": pl.String(),  # contestant | reference | oracle
    "runs": pl.Int64(),
    "reached": pl.Int64(),  # runs that reached the target within the budget
    "failed": pl.Int64(),  # runs with status "error"
    "budget_seconds": pl.Float64(),
    # *_low, *_high: 95 % interval, nan where there is none, high infinite where open; *_bound: `Interval.bound`
    **_interval_columns("completion_seconds", "completion"),
    **_interval_columns("ratio", "ratio"),  # to `fixed`
    **_interval_columns("regret", "regret"),  # ratio to `best_fixed`, minus 1
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

_LEAST_COVERAGE = 0.9  # an interval with less coverage supports no conclusion
_DASH = "\u2013"  # between the ends of an interval
_NO_BREAK = "\u00a0"  # a space that stays on its line
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
    """One row per scenario and tuner, in order of mean rank, the oracle last. Columns: `SUMMARY`."""
    host = results.host.select("scenario", "tuner", "seed", "thinking_seconds")
    scores = results.scores.join(host, on=["scenario", "tuner", "seed"], how="left")
    rows: list[dict[str, Any]] = []
    for (_,), runs in scores.sort("scenario", "tuner", "seed").group_by(["scenario"], maintain_order=True):
        rows += _scenario_rows(runs)
    return pl.DataFrame(rows, schema=SUMMARY)


def not_applicable(results: Results) -> list[str]:
    """A sentence per scenario that names the tuners which had nothing to tune there, with their reasons; in no row above."""
    said: list[str] = []
    for (scenario,), rows in results.not_applicable.group_by(["scenario"], maintain_order=True):
        reasons: dict[str, list[str]] = {}
        for tuner, reason in rows.select("tuner", "reason").unique(maintain_order=True).iter_rows():
            reasons.setdefault(str(reason), []).append(str(tuner))
        each = "; ".join(f"{', '.join(names)} ({reason.rstrip('.')})" for reason, names in reasons.items())
        said.append(f"{scenario}: not applicable, and not run: {each}.")
    return said


def _scenario_rows(runs: pl.DataFrame) -> list[dict[str, Any]]:
    ranking = ranking_of(runs)
    by_tuner = {str(name): mine for (name,), mine in runs.group_by(["tuner"], maintain_order=True)}
    names = [*ranking.tuners, *(name for name in by_tuner if name not in ranking.tuners)]
    return [_row(name, by_tuner[name], by_tuner, ranking) for name in names]


def _row(name: str, mine: pl.DataFrame, by_tuner: dict[str, pl.DataFrame], ranking: Ranking) -> dict[str, Any]:
    # A failed run says nothing about time, nor does what it spent until it failed.
    ran = mine.filter(pl.col("status") != "error")
    place = ranking.tuners.index(name) if name in ranking.tuners else None
    placed = Interval(math.nan, math.nan, math.nan, "?") if place is None else ranking.ranks[place]
    ratio = Interval(1.0, 1.0, 1.0) if name == REFERENCE and ran.height else _ratio(ran, by_tuner.get(REFERENCE))
    to_oracle = Interval(1.0, 1.0, 1.0) if name == ORACLE and ran.height else _ratio(ran, by_tuner.get(ORACLE))
    regret = Interval(to_oracle.estimate - 1, to_oracle.low - 1, to_oracle.high - 1, to_oracle.bound)
    return {
        "scenario": mine["scenario"][0],
        "tuner": name,
        "role": {REFERENCE: "reference", ORACLE: "oracle"}.get(name, "contestant"),
        "runs": mine.height,
        "reached": int(ran["reached"].sum()),
        "failed": mine.height - ran.height,
        "budget_seconds": float(mine["budget_seconds"].to_numpy().max()),
        **_interval_values("completion_seconds", "completion", median_interval(_times(ran))),
        **_interval_values("ratio", "ratio", ratio),
        **_interval_values("regret", "regret", regret),
        **_interval_values("mean_rank", "rank", placed),
        "group": "" if place is None else ranking.groups[place],
        **{column: _mean(ran[column]) for column in (*_SPENT, "final_accuracy", "final_loss")},
        "blocks": ranking.blocks,
        "p_value": ranking.p_value,
        "critical_difference": ranking.critical_difference,
        "verdict": ranking.verdict,
    }


def _interval_values(name: str, kind: str, found: Interval) -> dict[str, Any]:
    return {name: found.estimate, f"{kind}_low": found.low, f"{kind}_high": found.high, f"{kind}_bound": found.bound}


def _times(ran: pl.DataFrame) -> Bounds:
    return censored(ran["completion_seconds"].to_numpy(), ran["reached"].to_numpy())


def _ratio(ran: pl.DataFrame, base: pl.DataFrame | None) -> Interval:
    """Median of the ratios of completion times to those of `base`, over seeds with which neither run failed."""
    if base is None:
        return Interval(math.nan, math.nan, math.nan, "?")
    theirs = base.filter(pl.col("status") != "error").select("seed", "completion_seconds", "reached")
    pairs = ran.join(theirs, on="seed", how="inner", suffix="_base").sort("seed")
    bases = censored(pairs["completion_seconds_base"].to_numpy(), pairs["reached_base"].to_numpy())
    return median_interval(ratios(_times(pairs), bases))


def _mean(column: pl.Series) -> float:
    """Mean of the finite values; nan where there is none."""
    values = column.cast(pl.Float64).drop_nulls().to_numpy()
    finite = values[abs(values) < math.inf]
    return float(finite.mean()) if finite.size else math.nan


def blocks_of(scores: pl.DataFrame, tuners: Sequence[str]) -> pl.DataFrame:
    """Rank keys: a row per (scenario, seed) with a run of every one of `tuners`, a column per tuner."""
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
    """The contestants (every tuner but the oracle) ranked over every (scenario, seed) in `scores`.

    With several scenarios, only the contestants that were run on all of them are ranked.
    """
    scenarios = scores["scenario"].n_unique()
    counts = scores.group_by("tuner").agg(pl.col("scenario").n_unique())
    everywhere = counts.filter((pl.col("scenario") == scenarios) & (pl.col("tuner") != ORACLE))
    tuners = sorted(everywhere["tuner"].to_list())
    keys = blocks_of(scores, tuners)
    return rank(tuners, keys.select(tuners).to_numpy().reshape(keys.height, len(tuners)))


def winner(summary: pl.DataFrame, scenario: str) -> str:
    """The tuner with the lowest mean rank on a scenario that reached the target in some run and failed in none.

    The oracle cannot win, because it cannot be run on its own. Raises ValueError where no tuner can win.
    """
    rows = summary.filter(pl.col("scenario") == scenario)
    if rows.is_empty():
        known = ", ".join(summary["scenario"].unique(maintain_order=True)) or "none"
        raise ValueError(
            f"Cannot name the winner on {scenario!r}: these results have no finished run of it; scenarios: {known}."
        )
    able = rows.filter((pl.col("role") != "oracle") & (pl.col("reached") > 0) & (pl.col("failed") == 0))
    if able.is_empty():
        raise ValueError(
            f"Cannot name the winner on {scenario!r}: no tuner reached the target without a failed run. Name one with "
            "--tuner."
        )
    return str(able["tuner"][0])  # rows are in order of mean ranks


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
    """A ratio, a regret or a mean rank: two digits after the point; `quantity` from 10 on and below 0.1."""
    return f"{value:.2f}" if 0.095 <= abs(value) < 9.995 else quantity(value)


def interval_text(row: dict[str, Any], name: str, kind: str) -> tuple[str, str]:
    """An estimate of a row of `summary` and its interval, as two texts; the second is "" where there is no interval."""
    text = quantity if kind == "completion" else relative
    estimate, low, high, bound = row[name], row[f"{kind}_low"], row[f"{kind}_high"], row[f"{kind}_bound"]
    if math.isnan(estimate):
        return ("unknown" if bound == "?" and not math.isnan(low) else "-"), ""
    shown = text(estimate) if bound == "=" else f"{bound}{_NO_BREAK}{text(estimate)}"
    if math.isnan(low) or (low == high and bound == "=") or (math.isinf(high) and low == estimate and bound == ">"):
        return shown, ""
    return shown, f"≥{_NO_BREAK}{text(low)}" if math.isinf(high) else f"{text(low)}{_DASH}{text(high)}"


def faster_or_slower(row: dict[str, Any]) -> str:
    """The side of the reference on which a row of `summary` has its whole interval: "faster" or "slower", else "".

    With fewer than five seeds always "": an interval then contains the true median less than nine times in ten.
    """
    if coverage_limit(row["runs"] - row["failed"]) < _LEAST_COVERAGE:
        return ""
    return "faster" if row["ratio_high"] < 1 else "slower" if row["ratio_low"] > 1 else ""


def shows_accuracy(rows: pl.DataFrame) -> bool:
    """Whether these rows of `summary` have accuracies; tables and pages show losses where not."""
    return bool(rows["final_accuracy"].is_not_nan().any())


def render(summary: pl.DataFrame, *, columns: int = 100) -> list[Table]:
    """A table per scenario for a terminal with `columns` characters per line, 80 or more."""
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

    style = {"faster": "green", "slower": "red"}.get(faster_or_slower(row), "")
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
    """What a reader of one scenario's rows must know: seeds, censoring, reference, oracle, failed runs, verdict."""
    present = set(rows["tuner"])
    runs = int(rows["runs"].to_numpy().max())
    if runs == 1:
        sentences = ["One seed: no intervals; a difference may be due to random draws alone. Run more seeds."]
    else:
        sentences = [f"Times, ratios: medians over {runs} paired seeds (95 % intervals); else means. Done: target reached."]
    if runs > 1 and coverage_limit(runs) < LEVEL:
        best = 100 * coverage_limit(runs)
        sentences.append(f"{runs} seeds: an interval covers the true median {best:.3g} % of the time at best, not 95 %.")
    if ">" in rows["completion_bound"]:
        sentences.append("> means: most runs did not reach the target within the budget.")
    if REFERENCE in present:
        sentences.append(f"Ratio: time over that of {REFERENCE}, which keeps the start setting, by seed; below 1 is faster.")
    if ORACLE in present:
        sentences.append(f"Regret: time over that of {ORACLE} (best fixed setting in hindsight, not ranked), minus 1.")
    failed = [f"{n} ({f} of {r})" for n, f, r in rows.select("tuner", "failed", "runs").iter_rows() if f]
    if failed:
        sentences.append(f"Failed runs, ranked last and left out of times: {', '.join(failed)}.")
    return [*sentences, str(rows["verdict"][0])]
