"""Live runs beside simulated ones: how long each tuner took in both worlds, and whether both put the tuners in one order."""

from __future__ import annotations

import math
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import polars as pl
from scipy.stats import kendalltau

from reports.verdicts.numbers import quantity, relative
from traces.store import Results, load_results

if TYPE_CHECKING:
    from rich.table import Table

__all__ = ["BesideRow", "agreement", "beside_rows", "beside_tables", "ratio_text", "simulated_of", "tau"]


class BesideRow(NamedTuple):
    """A tuner on a scenario, in both worlds; medians over seeds, with a run without its target at its budget."""

    tuner: str
    live_seconds: float
    simulated_seconds: float  # nan: it was not simulated
    live_done: str  # "2/3": runs that reached the target
    simulated_done: str

    @property
    def ratio(self) -> float:
        """Live time over simulated time; nan without the latter."""
        return self.live_seconds / self.simulated_seconds if self.simulated_seconds else math.nan


def beside_rows(live: Results, simulated: Results, scenario: str) -> list[BesideRow]:
    """The tuners of a scenario that were played live and did not fail in all runs, the fastest first."""
    found = [_medians(results.scores, scenario) for results in (live, simulated)]
    rows = []
    for tuner, (seconds, done) in found[0].items():
        simulated_seconds, simulated_done = found[1].get(tuner, (math.nan, "-"))
        rows.append(BesideRow(tuner, seconds, simulated_seconds, done, simulated_done))
    return sorted(rows, key=lambda row: row.live_seconds)


def _medians(scores: pl.DataFrame, scenario: str) -> dict[str, tuple[float, str]]:
    made = scores.filter((pl.col("scenario") == scenario) & ~pl.col("status").is_in(("error", "not applicable")))
    found = {}
    for tuner in made["tuner"].unique(maintain_order=True):
        runs = made.filter(pl.col("tuner") == tuner)
        found[str(tuner)] = float(np.median(runs["completion_seconds"])), f"{int(runs['reached'].sum())}/{len(runs)}"
    return found


def tau(rows: list[BesideRow]) -> float:
    """Kendall's tau-b between the two orders of the tuners that were played in both worlds; nan for fewer than two."""
    both = [(row.live_seconds, row.simulated_seconds) for row in rows if not math.isnan(row.simulated_seconds)]
    return float(kendalltau(*zip(*both, strict=True)).statistic) if len(both) > 1 else math.nan


def agreement(rows: list[BesideRow]) -> str:
    """Kendall's tau as a sentence."""
    agreed = tau(rows)
    said = "- (fewer than two tuners in both)" if math.isnan(agreed) else f"{agreed:.2f}"
    return f"Kendall's tau of the two orders: {said}"


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
