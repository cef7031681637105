"""Live runs beside simulated ones: how long each tuner took in both worlds, how far simulated times are off, and whether
both worlds put the tuners in one order.

How sure the order is: seeds are drawn again, with replacement, in each world by itself (bootstrap: Efron and Tibshirani
1993, chapter 13), and their medians are compared as those of all seeds are.
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from numpy.typing import NDArray
from scipy.stats import kendalltau

from reports.verdicts.numbers import percent, quantity, relative
from traces.store import Results, load_results

if TYPE_CHECKING:
    from rich.table import Table

__all__ = [
    "Agreement",
    "BesideRow",
    "agreement",
    "agreement_of",
    "beside_rows",
    "beside_tables",
    "ratio_text",
    "simulated_of",
    "tau",
]

_RESAMPLES = 1999
_FEWEST_SEEDS = 3  # of fewer, resampling says nothing


class BesideRow(NamedTuple):
    """A tuner on a scenario, in both worlds; medians over seeds, with a run without its target at its budget."""

    tuner: str
    live_seconds: float
    simulated_seconds: float  # nan: it was not simulated
    live_done: str  # "2/3": runs that reached the target
    simulated_done: str
    live_by_seed: dict[int, float]  # seconds
    simulated_by_seed: dict[int, float]

    @property
    def ratio(self) -> float:
        """Live time over simulated time; nan without the latter."""
        return self.live_seconds / self.simulated_seconds if self.simulated_seconds else math.nan


def beside_rows(live: Results, simulated: Results, scenario: str) -> list[BesideRow]:
    """The tuners of a scenario that were played live and did not fail in all runs, the fastest first."""
    found = [_medians(results.scores, scenario) for results in (live, simulated)]
    rows = []
    for tuner, (seconds, done, by_seed) in found[0].items():
        simulated_seconds, simulated_done, simulated_by_seed = found[1].get(tuner, (math.nan, "-", {}))
        rows.append(BesideRow(tuner, seconds, simulated_seconds, done, simulated_done, by_seed, simulated_by_seed))
    return sorted(rows, key=lambda row: row.live_seconds)


def _medians(scores: pl.DataFrame, scenario: str) -> dict[str, tuple[float, str, dict[int, float]]]:
    made = scores.filter((pl.col("scenario") == scenario) & ~pl.col("status").is_in(("error", "not applicable")))
    found = {}
    for tuner in made["tuner"].unique(maintain_order=True):
        runs = made.filter(pl.col("tuner") == tuner)
        done = f"{int(runs['reached'].sum())}/{len(runs)}"
        by_seed = dict(runs.select("seed", "completion_seconds").iter_rows())
        found[str(tuner)] = float(np.median(runs["completion_seconds"])), done, by_seed
    return found


def tau(rows: list[BesideRow]) -> float:
    """Kendall's tau-b between the two orders of the tuners that were played in both worlds; nan for fewer than two, and
    where one world puts them in no order: all took equally long there."""
    both = [(row.live_seconds, row.simulated_seconds) for row in rows if not math.isnan(row.simulated_seconds)]
    return float(kendalltau(*zip(*both, strict=True)).statistic) if len(both) > 1 else math.nan


class Agreement(NamedTuple):
    """Whether both worlds put the tuners in one order, and take as long."""

    tau: float  # nan for fewer than two tuners in both, and where all of them took equally long in one world
    low: float  # 90 % interval of tau over resampled seeds; nan for fewer than three seeds that all tuners have
    high: float
    fastest: tuple[str, str]  # live, simulated
    same_fastest: float  # share of resampled seeds in which both worlds have the same fastest tuner; nan as above
    median_error: float  # of simulated times, relative to live ones, over the tuners; nan for fewer than two in both
    largest_error: float


def agreement_of(rows: list[BesideRow]) -> Agreement:
    """How far the tuners of `rows` that were played in both worlds are in the same order there."""
    both = [row for row in rows if not math.isnan(row.simulated_seconds)]
    if len(both) < 2:
        return Agreement(math.nan, math.nan, math.nan, ("", ""), math.nan, math.nan, math.nan)
    fastest = both[0].tuner, min(both, key=lambda row: row.simulated_seconds).tuner
    off = [abs(row.simulated_seconds / row.live_seconds - 1) for row in both]
    errors = float(np.median(off)), max(off)
    worlds = [_common([row.live_by_seed for row in both]), _common([row.simulated_by_seed for row in both])]
    if min(seconds.shape[1] for seconds in worlds) < _FEWEST_SEEDS:
        return Agreement(tau(rows), math.nan, math.nan, fastest, math.nan, *errors)
    rng = np.random.default_rng(0)
    live, simulated = (_resampled(seconds, rng) for seconds in worlds)
    taus = [float(kendalltau(a, b).statistic) for a, b in zip(live, simulated, strict=True)]
    same = float((live.argmin(axis=1) == simulated.argmin(axis=1)).mean())
    low, high = np.nanquantile(taus, (0.05, 0.95)) if np.isfinite(taus).any() else (math.nan, math.nan)
    return Agreement(tau(rows), float(low), float(high), fastest, same, *errors)


def _common(by_seed: list[dict[int, float]]) -> NDArray[np.float64]:
    """Seconds [tuners, seeds] of the seeds that all tuners have."""
    seeds = sorted(set.intersection(*(set(one) for one in by_seed)))
    return np.array([[one[seed] for seed in seeds] for one in by_seed])


def _resampled(seconds: NDArray[np.float64], rng: np.random.Generator) -> NDArray[np.float64]:
    """Medians [resamples, tuners] over seeds that are drawn again; the tuners keep their seeds in common."""
    drawn = rng.integers(seconds.shape[1], size=(_RESAMPLES, seconds.shape[1]))
    return np.median(seconds[:, drawn], axis=2).T


def agreement(rows: list[BesideRow]) -> str:
    """The same in words."""
    found = agreement_of(rows)
    if math.isnan(found.median_error):
        return "Kendall's tau of the two orders: - (fewer than two tuners in both)."
    off = (
        f"Simulated times are off by {found.median_error:.1%} in the median over tuners, {found.largest_error:.1%} at most."
    )
    if math.isnan(found.tau):
        return f"Kendall's tau of the two orders: - (in one world, all took equally long). {off}"
    said = f"Kendall's tau of the two orders: {found.tau:.2f}"
    live, simulated = found.fastest
    fastest = f"{live} is the fastest in both" if live == simulated else f"{live} is the fastest live, {simulated} simulated"
    if math.isnan(found.low):
        return f"{said}. {fastest}. {off}"
    return (
        f"{said} (90 % of resampled seeds: {found.low:.2f} to {found.high:.2f}). {fastest}; resampled seeds have the same "
        f"fastest tuner in both worlds {percent(found.same_fastest)} of the time. {off}"
    )


def ratio_text(row: BesideRow) -> str:
    """A tuner's live time over its simulated one; "-" where it has none."""
    return "-" if math.isnan(row.ratio) else relative(row.ratio)


def simulated_of(folder: Path, named: Path | None = None) -> Results | None:
    """The simulated runs that belong beside the live ones in `folder`: those in `named`, or in `folder`/simulated; None if
    there are none."""
    simulated = named or folder / "simulated"
    return load_results(simulated) if (simulated / "manifest.json").is_file() else None


def beside_tables(live: Results, simulated: Results) -> list[Table]:
    """A table per scenario, for a terminal."""
    from rich import box
    from rich.table import Table
    from rich.text import Text

    tables = []
    for scenario in live.manifest["scenarios"]:
        rows = beside_rows(live, simulated, scenario)
        table = Table(box=box.SIMPLE_HEAD, pad_edge=False, title_justify="left", caption_justify="left")
        table.title = Text(f"{scenario}, live beside simulated", style="bold")
        for head in ("tuner", "live, s", "done", "simulated, s", "done", "live / simulated"):
            table.add_column(head, justify="left" if head == "tuner" else "right")
        for row in rows:
            times = quantity(row.live_seconds), row.live_done, quantity(row.simulated_seconds), row.simulated_done
            table.add_row(row.tuner, *times, ratio_text(row))
        table.caption = Text(agreement(rows))
        tables.append(table)
    return tables
