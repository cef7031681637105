"""One self-contained HTML page per comparison: what was run, what can be concluded, how it went, how to read it.

It opens without a network and without scripts, in light and in dark. This module prepares plain values; the templates
`comparison`, `scenario`, `scores` and `reading` lay them out. `rendering` escapes what comes from files (names, reasons,
scenario text).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import polars as pl

from reports.conclusions import against_reference, headline, limits, tally
from reports.drawing import Drawing
from reports.facts import facts, target_of
from reports.figures import (
    SETTINGS_NOTE,
    completion_times,
    critical_differences,
    learning_curves,
    settings_over_time,
    typical_seed,
)
from reports.rendering import fill
from reports.tables import ORACLE, REFERENCE, interval_text, quantity, ranking_of, shows_accuracy, summary
from reports.workers import WORKERS_NOTE, workers_of_run
from traces.store import Results, load_results, write_bytes

__all__ = ["page", "write"]

_Workers: TypeAlias = Callable[[str, str, int, str], Drawing | None]
"""Draws the workers of a run: of a scenario, a tuner and a seed, with a name for the ids of the drawing."""


def write(folder: Path) -> Path:
    """Write `report.html` into a results folder and return its path. Raises ValueError where `folder` holds no results."""
    results = load_results(folder)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder / "scenarios").glob("*.toml"))}
    path = folder / "report.html"
    write_bytes(path, page(results, texts, partial(workers_of_run, folder)).encode())
    return path


def page(results: Results, scenarios: Mapping[str, str], workers: _Workers = lambda *_: None) -> str:
    """The page for `results`; `scenarios` are the texts of the scenarios as they were run, by name.

    `workers` draws the workers of a run, as `workers.workers_of_run` does.
    """
    table = summary(results)
    names = list(dict.fromkeys(table["scenario"].to_list()))
    return fill(
        "comparison.html.j2",
        title=f"{_count(results.manifest.get('tuners', []), 'tuner')} on {_count(names, 'scenario')}",
        lead=_lead(table),
        across=_across(results.scores) if len(names) > 1 else None,
        scenarios=[_section(i, name, table, results, scenarios.get(name, ""), workers) for i, name in enumerate(names)],
        versions=_versions(results.manifest),
        reference=REFERENCE,
        oracle=ORACLE,
        settings_note=SETTINGS_NOTE,
        workers_note=WORKERS_NOTE,
    )


def _lead(table: pl.DataFrame) -> str:
    counts = sorted(set(table.group_by("scenario").agg(pl.col("runs").max())["runs"])) if table.height else [0]
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return (
        f"{seeds} paired seed{'' if seeds == '1' else 's'} per scenario: with the same seed, every tuner meets the same "
        "random draws. Times are simulated seconds unless a column says host."
    )


def _versions(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the results and the page were made with."""
    return {
        "harness": manifest.get("harness", "of unknown version"),
        "format": manifest.get("schema", "unknown"),
        "libraries": [f"{name} {metadata.version(name)}" for name in ("numpy", "scipy", "polars", "matplotlib")],
    }


def _count(things: Iterable[Any], noun: str) -> str:
    n = len(list(things))
    return f"{n} {noun}{'' if n == 1 else 's'}"


# -------------------------------------------------------------------------------------------------------- all scenarios


@dataclass(frozen=True, slots=True)
class _AcrossSection:
    """The ranking over all scenarios."""

    verdict: str
    places: list[str]  # a tuner, its mean rank and its group, best first
    ranks: Drawing | None


def _across(scores: pl.DataFrame) -> _AcrossSection:
    ranking = ranking_of(scores)
    placed = zip(ranking.tuners, ranking.ranks, ranking.groups, strict=True)
    places = [f"{tuner} {rank.estimate:.2f}{f' ({group})' if group else ''}" for tuner, rank, group in placed]
    return _AcrossSection(ranking.verdict, places, critical_differences(ranking, "across"))


# --------------------------------------------------------------------------------------------------------- one scenario


class _Cell(NamedTuple):
    """A cell of the table of scores."""

    text: str
    small: str = ""  # the interval, or another addition in small print


@dataclass(frozen=True, slots=True)
class _ScoreRow:
    """A tuner's row in the table of scores; a cell per column of the template `scores`, after the tuner."""

    tuner: str
    is_oracle: bool
    cells: list[_Cell]


@dataclass(frozen=True, slots=True)
class _ScenarioSection:
    """What the page shows of one scenario, in the order of the template `scenario`."""

    name: str
    text: str  # of the scenario file; "" where the results folder lacks it
    summary: str
    facts: list[tuple[str, str]]  # terms and what the text says of them
    findings: list[str]
    limits: list[str]
    scores: list[_ScoreRow]
    final_metric: str  # of the last column of scores
    verdict: str
    times: Drawing
    ranks: Drawing | None
    metric: str  # "accuracy" or "loss", of `curves`; `other_metric` is the other one
    curves: Drawing | None
    other_metric: str
    other_curves: Drawing | None
    settings: list[tuple[str, Drawing]]  # by tuner
    unchanged: list[str]  # tuners that kept one setting
    seed: int  # of the runs in `workers`
    workers: list[tuple[str, Drawing]]  # by tuner
    missed: list[dict[str, Any]]  # runs that did not reach the target: tuner, seed, status, reason


def _section(index: int, name: str, table: pl.DataFrame, results: Results, text: str, workers: _Workers) -> _ScenarioSection:
    here = pl.col("scenario") == name
    rows = table.filter(here)
    scores, evaluations, settings = (f.filter(here) for f in (results.scores, results.evaluations, results.settings))
    tuners = rows["tuner"].to_list()
    accuracy = shows_accuracy(rows)
    known = facts(text)
    metric, target = target_of(text) or ("accuracy" if accuracy else "loss", None)
    other = "loss" if metric == "accuracy" else "accuracy"
    drawn, unchanged = _settings(tuners, settings, scores, f"s{index}")
    seed = typical_seed(scores)
    busy = [(tuner, workers(name, tuner, seed, f"s{index}-workers-{i}")) for i, tuner in enumerate(tuners)]
    return _ScenarioSection(
        name=name,
        text=text,
        summary=known[0][1],
        facts=known[1:],
        findings=[headline(rows), *against_reference(rows), tally(rows)],
        limits=limits(rows),
        scores=[_score_row(row, accuracy) for row in rows.iter_rows(named=True)],
        final_metric="accuracy" if accuracy else "loss",
        verdict=str(rows["verdict"][0]),
        times=completion_times(rows, scores, f"s{index}-times"),
        ranks=critical_differences(ranking_of(scores), f"s{index}-ranks"),
        metric=metric,
        curves=learning_curves(evaluations, tuners, metric, f"s{index}-{metric}", target),
        other_metric=other,
        other_curves=learning_curves(evaluations, tuners, other, f"s{index}-{other}"),
        settings=drawn,
        unchanged=unchanged,
        seed=seed,
        workers=[(tuner, drawing) for tuner, drawing in busy if drawing is not None],
        missed=scores.filter(~pl.col("reached")).sort("tuner", "seed").to_dicts(),
    )


def _score_row(row: dict[str, Any], accuracy: bool) -> _ScoreRow:
    oracle = row["role"] == "oracle"
    spent = ("reconfigurations", "overhead_seconds", "trial_seconds", "thinking_seconds")
    cells = [
        _Cell(*interval_text(row, "completion_seconds", "completion")),
        _Cell("1") if row["role"] == "reference" else _Cell(*interval_text(row, "ratio", "ratio")),
        _Cell("-") if oracle else _Cell(*interval_text(row, "regret", "regret")),
        _Cell("-") if oracle else _Cell(*interval_text(row, "mean_rank", "rank")),
        _Cell("oracle" if oracle else row["group"] or "-"),
        _Cell(f"{row['reached']}/{row['runs']}", f"{row['failed']} failed" if row["failed"] else ""),
        *(_Cell(quantity(row[name])) for name in spent),
        _Cell(quantity(row["branches_peak"]), f"{quantity(row['branch_bytes_peak'] / 1e6)} MB"),
        _Cell(quantity(row["final_accuracy" if accuracy else "final_loss"])),
    ]
    return _ScoreRow(row["tuner"], oracle, cells)


def _settings(
    tuners: list[str], settings: pl.DataFrame, scores: pl.DataFrame, prefix: str
) -> tuple[list[tuple[str, Drawing]], list[str]]:
    """Drawings of the tuners that changed the setting, and the names of those that did not."""
    drawn, unchanged = [], []
    for i, tuner in enumerate(tuners):
        mine = pl.col("tuner") == tuner
        drawing = settings_over_time(settings.filter(mine), scores.filter(mine), f"{prefix}-settings-{i}")
        if drawing is not None:
            drawn.append((tuner, drawing))
        elif settings.filter(mine).height:
            unchanged.append(tuner)
    return drawn, unchanged
