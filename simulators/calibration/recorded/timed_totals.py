"""Rows of recordings without single pushes: with pairs of steps and seconds during the runs, or with totals of runs only."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import polars as pl

from simulators.calibration.recorded.recorded_settings import first_of, moments, row_of
from simulators.calibration.recorded.row import Row
from simulators.calibration.recorded.segments import FEWEST, SYNCHRONOUS
from simulators.calibration.recorded.selection import Selection

__all__ = ["rows_of_totals"]

_STEADY = 3  # mini-batches of every worker, over which the mean time of a step hardly varies


def rows_of_totals(
    tables: Mapping[str, pl.DataFrame],
    settings: pl.DataFrame,
    left_out: pl.DataFrame,
    wanted: Selection,
    caveats: list[str],
) -> list[Row]:
    """A row for each of the `wanted` settings with steps and seconds: by their progress, or else by the totals of runs.

    `settings` and `left_out` are as `settings_of` returns them; notes are added to `caveats`.
    """
    progress = tables.get("progress")
    rates = pl.DataFrame() if progress is None else wanted.among(_rates(progress, settings, left_out, caveats))
    if progress is not None and rates.height:
        if silent := {*wanted.among(settings)["run"]} - {*progress["run"]}:
            caveats.append(
                f"{len(silent)} runs are left out: they have no progress, and others have; calibrate to them alone: "
                f"{first_of(sorted(silent))}"
            )
        return list(_rows_of_progress(rates))
    alone = settings.filter(~pl.col("run").is_duplicated(), ~pl.col("run").is_in(left_out["run"].implode()))
    if several := settings["run"].n_unique() - alone.height:
        caveats.append(f"{several} runs with several settings have totals only, and are left out: record progress")
    trimmed = tables["runs"].filter(pl.col("seconds").is_null(), pl.col("trimmed_seconds").is_not_null())
    if trimmed.height:
        names = ", ".join(sorted(set(trimmed["workload"].drop_nulls())))
        caveats.append(
            f"{trimmed.height} runs ({names}) have trimmed seconds only, but all their steps: cycle times are too short"
        )
    return list(_rows_of_runs(tables, wanted.among(alone)))


def _rates(progress: pl.DataFrame, settings: pl.DataFrame, left_out: pl.DataFrame, caveats: list[str]) -> pl.DataFrame:
    """Steps and seconds under each setting, summed over the intervals between two records under the same setting.

    An interval counts as a pause or switch, and is left out, if a step takes over three times the median; in asynchronous
    runs only if the interval is also longer than a minute, or has several mini-batches of every worker: the time of a single
    push varies that much.
    """
    known = moments(settings, left_out, mode="policy", crew="workers")
    steps = progress.filter(pl.col("seconds").is_not_null(), pl.col("steps").is_not_null())
    if steps["training_loss"].null_count() < steps.height:
        # Rows of a validation alone follow a pause.
        steps = steps.filter(pl.col("training_loss").is_not_null())
    joined = steps.sort("seconds", maintain_order=True).join_asof(
        known, on="seconds", by=["run", "branch"], check_sortedness=False
    )
    within = (
        joined.filter(pl.col("segment").is_not_null())
        .with_columns(
            pl.col("seconds").diff().over("segment").alias("took"), pl.col("steps").diff().over("segment").alias("done")
        )
        .filter(pl.col("done") > 0, pl.col("took") > 0)
    )
    each = pl.col("took") / pl.col("done")
    steady = pl.col("mode").is_in(SYNCHRONOUS) | (pl.col("took") > 60) | (pl.col("done") >= _STEADY * pl.col("crew"))
    long = (each > 3 * each.median().over("segment")) & steady
    sums = within.filter(~long).group_by("segment", maintain_order=True).agg(pl.col("done", "took").sum(), pl.len())
    found = settings.join(sums, on="segment", how="inner", maintain_order="left").filter(pl.col("len") >= FEWEST)
    if few := {*progress["run"]} & {*settings["run"]} - {*found["run"]}:
        caveats.append(
            f"{len(few)} runs are left out: of no setting of theirs does progress have {FEWEST} intervals between records "
            f"after its beginning: {first_of(sorted(few))}"
        )
    return found


def _rows_of_progress(rates: pl.DataFrame) -> Iterator[Row]:
    for setting in rates.to_dicts():
        yield row_of(setting, _cycle(setting, setting["took"] / setting["done"]), pushes=setting["done"])


def _rows_of_runs(tables: Mapping[str, pl.DataFrame], settings: pl.DataFrame) -> Iterator[Row]:
    runs = tables["runs"].drop("workload", "extras").rename({"seconds": "run_seconds"})
    joined = settings.join(runs, on="run", how="inner", maintain_order="left")
    for made in joined.to_dicts():
        seconds = made["run_seconds"] or made["trimmed_seconds"]
        row = row_of(made, 0.0, pushes=made["steps"] or 0)
        if made["steps"] and seconds:
            yield replace(row, cycle_seconds=_cycle(made, seconds / made["steps"]))
        elif made["samples_per_second"]:
            total = json.loads(made["extras"] or "{}").get("total_batch_size", sum(row.batches))
            yield replace(row, cycle_seconds=total / made["samples_per_second"])
        else:
            yield row


def _cycle(setting: Mapping[str, Any], step_seconds: float) -> float:
    return step_seconds if setting["policy"] in SYNCHRONOUS else setting["workers"] * step_seconds
