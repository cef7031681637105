"""How many mini-batches recorded runs took to an accuracy."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import polars as pl

__all__ = ["LEVEL", "Effort", "efforts"]

LEVEL = 0.7  # accuracy to reach, as a share of the best


class Effort(NamedTuple):
    """The mini-batches that one run took to reach the accuracy."""

    workload: str
    run: str
    policy: str  # of the whole run
    workers: int
    minibatches: int


def efforts(tables: Mapping[str, pl.DataFrame]) -> list[Effort]:
    """The effort of each run with one policy (asp or bsp) and one batch size that reached the accuracy, without variants."""
    progress = tables.get("progress")
    if progress is None or "accuracy" not in progress.columns:
        return []
    each = (
        tables["settings"]
        .group_by("run")
        .agg(pl.col("policy").unique(), pl.col("workers").first(), pl.col("batch_size").n_unique().alias("batches"))
    )
    pure = each.filter(pl.col("policy").list.len() == 1, pl.col("batches") == 1, pl.col("workers").is_not_null())
    runs = pure.with_columns(pl.col("policy").list.first()).filter(pl.col("policy").is_in(["asp", "bsp"]))
    plain = ~pl.col("extras").fill_null("{}").str.contains('"variant": "[^"]')  # variants are single, special experiments
    named = runs.join(tables["runs"].filter(plain).select("run", "workload"), on="run").drop_nulls("workload")
    seen = progress.drop("policy").filter(pl.col("accuracy").is_not_null()).join(named, on="run").sort("run", "steps")
    many = seen.filter(pl.len().over("run") > 5)
    found = []
    for (job,), mine in many.group_by("workload", maintain_order=True):
        best = mine.group_by("policy").agg(pl.col("accuracy").max())["accuracy"]
        reached = mine.filter(pl.col("accuracy") >= LEVEL * best.min()).group_by("run", maintain_order=True).first()  # type: ignore[operator]
        for r in reached.sort("run").to_dicts():
            steps = r["steps"] * (r["workers"] if r["policy"] == "bsp" else 1)
            found.append(Effort(str(job), r["run"], r["policy"], r["workers"], steps))
    return found
