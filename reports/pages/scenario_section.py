"""What a page shows of one scenario, as plain values: scores, figures, workers, reasons, and every run."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import polars as pl

from harness.comparison.results import run_folder
from reports.fidelity import live
from reports.figures.completion import completion_times
from reports.figures.costs import pareto, time_split
from reports.figures.drawing import Drawing
from reports.figures.gantt import PackedRun, headers
from reports.figures.progress import learning_curves, progress
from reports.figures.settings_over_time import settings_over_time, typical_seed, unmoved
from reports.pages.cells import Cell, NumberedDrawing, numbered, p_text
from reports.pages.facts import facts, target_of
from reports.verdicts import calibration_ranks
from reports.verdicts.conclusions import Answer, against_reference, answer, coverage, identical, limits, not_run, tally
from reports.verdicts.numbers import count, host_seconds, interval_text, quantity
from reports.verdicts.summary import ORACLE, shows_accuracy, shows_usd
from traces.store import Results

__all__ = ["PackRun", "ScenarioFigures", "ScenarioSection", "scenario_figures", "scenario_section"]

PackRun: TypeAlias = Callable[[str, str, int, int], PackedRun | None]
"""Packs a run of a scenario, a tuner and a seed, with at most so many pushes."""

_ALL_PUSHES, _MOST_PUSHES, _LEAST_PUSHES = 60_000, 1500, 100  # in the drawings of one page, and in one of them


@dataclass(frozen=True, slots=True)
class ScenarioFigures:
    """The figures of one scenario."""

    split: Drawing | None
    front: Drawing | None
    metric: str  # "accuracy" or "loss", of `progress` and `curves`; `other_metric` is the other one
    progress: Drawing | None
    curves: Drawing | None
    other_metric: str
    other_progress: Drawing | None
    times: Drawing
    settings: dict[str, Drawing]  # by tuner

    def all(self) -> list[Drawing]:
        made = (self.split, self.front, self.progress, self.curves, self.other_progress, self.times, *self.settings.values())
        return [drawing for drawing in made if drawing is not None]


def scenario_figures(rows: pl.DataFrame, results: Results, text: str) -> ScenarioFigures:
    """The figures of one scenario from its rows of `summary.summary`."""
    here = pl.col("scenario") == rows["scenario"][0]
    scores, evaluations, settings = (f.filter(here) for f in (results.scores, results.evaluations, results.settings))
    distinct = rows.filter(pl.col("role") != "same")
    tuners = distinct["tuner"].to_list()
    metric, target = target_of(text) or ("accuracy" if shows_accuracy(rows) else "loss", None)
    other = "loss" if metric == "accuracy" else "accuracy"
    drawn = {}
    for tuner in tuners:
        mine = pl.col("tuner") == tuner
        name = f"settings-{quote(tuner, safe='')}".replace("%", "_")
        if (drawing := settings_over_time(settings.filter(mine), scores.filter(mine), name, results.unit)) is not None:
            drawn[tuner] = drawing
    return ScenarioFigures(
        split=time_split(rows, scores, "time-split"),
        front=pareto(rows, "time-against-overhead", results.unit),
        metric=metric,
        progress=progress(evaluations, settings, scores, rows, metric, f"progress-{metric}", target, results.unit),
        curves=learning_curves(evaluations, tuners, metric, f"each-{metric}", target, results.unit),
        other_metric=other,
        other_progress=progress(evaluations, settings, scores, rows, other, f"progress-{other}", None, results.unit),
        times=completion_times(distinct, scores, "completion-times", results.unit),
        settings=drawn,
    )


@dataclass(frozen=True, slots=True)
class _ScoreRow:
    """A tuner's row in the table of scores; a cell per column of the template `scores`, after the tuner."""

    tuner: str
    kind: str  # the row's class: leader, close, behind, ahead or oracle
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class _RunRow:
    """One run in the table of runs."""

    seed: int
    cells: list[Cell]
    status: str
    reason: str
    folder: str  # of its files, relative to the page; "" where the page stands without them


class _TunerLine(NamedTuple):
    """A tuner's row in a table: that of ranks under draws of the calibrated constants, or of live beside simulated runs."""

    tuner: str
    cells: list[Cell]


@dataclass(frozen=True, slots=True)
class ScenarioSection:
    """What the page shows of one scenario, in the order of the template `scenario`."""

    name: str
    answer: Answer
    text: str  # of the scenario file; "" where the results folder lacks it
    summary: str
    facts: list[tuple[str, str]]  # terms and what the text says of them
    findings: list[str]
    limits: list[str]
    scores: list[_ScoreRow]
    identical: list[str]
    final_metric: str  # of the last column of scores
    coverage: str  # what the intervals are worth
    usd: bool  # whether costs are shown
    figures: ScenarioFigures
    split: NumberedDrawing | None
    front: NumberedDrawing | None
    progress: NumberedDrawing | None
    curves: NumberedDrawing | None
    other_progress: NumberedDrawing | None
    times: NumberedDrawing | None
    settings: list[tuple[str, NumberedDrawing | None]]  # by tuner
    unmoved: str  # knobs that no tuner moved
    unchanged: list[str]  # tuners that kept one setting
    workers: list[tuple[str, str, str, list[PackedRun]]]  # tuner, id, headers, runs
    reasons: list[tuple[str, int, tuple[tuple[float, str], ...]]]  # by tuner: seed, and seconds with sentences
    runs: list[tuple[str, list[_RunRow]]]  # by tuner
    machines: list[str]  # that the runs were made on
    oracle_settings: int  # that the oracle has run; 0 where it is not known
    beside: list[_TunerLine]  # live runs beside simulated ones; [] where it is no live contest
    agreement: str
    spends: bool  # whether any run had overhead or trials
    live: bool  # whether the jobs ran on real processes
    draws: list[_TunerLine]  # tuners under draws of the calibrated constants; [] without draws
    undecided: str  # the words for a rank that the calibration does not decide


def scenario_section(
    name: str,
    table: pl.DataFrame,
    results: Results,
    text: str,
    runs: PackRun,
    up: str | None,
    simulated: Results | None,
) -> ScenarioSection:
    """What the page shows of the scenario `name`; `table` has the rows of `summary`, and `text` is the scenario's file.

    `runs` packs a run for the drawing of its workers. `up` is the way from the page to the results folder; None: the page
    stands without the files of runs. `simulated` are runs to be put beside `results`, which are live then.
    """
    here = pl.col("scenario") == name
    rows = table.filter(here)
    scores, settings = results.scores.filter(here), results.settings.filter(here)
    accuracy, usd = shows_accuracy(rows), shows_usd(rows)
    known = facts(text)
    made = scenario_figures(rows, results, text)
    distinct = rows.filter(pl.col("role") != "same")["tuner"].to_list()
    absent = results.not_applicable.filter(here)
    host = results.host.filter(here)
    machines = sorted({machine for machine in host["machine"] if machine})
    workers = _workers(name, distinct, scores, runs)
    under = calibration_ranks.ranks(results, rows)
    both = live.beside_rows(results, simulated, name) if simulated is not None else []
    return ScenarioSection(
        name=name,
        answer=answer(rows),
        text=text,
        summary=known[0][1],
        facts=known[1:],
        findings=[*(calibration_ranks.sentences(under) if under else []), *against_reference(rows), tally(rows)],
        limits=limits(rows),
        scores=[_score_row(row, accuracy, usd) for row in rows.filter(pl.col("role") != "same").iter_rows(named=True)],
        identical=[*identical(rows), *not_run(absent)],
        final_metric="accuracy" if accuracy else "loss",
        coverage=coverage(rows),
        usd=usd,
        figures=made,
        split=numbered(made.split),
        front=numbered(made.front),
        progress=numbered(made.progress),
        curves=numbered(made.curves),
        other_progress=numbered(made.other_progress),
        times=numbered(made.times),
        settings=[(tuner, numbered(drawing)) for tuner, drawing in made.settings.items()],
        unmoved=", ".join(unmoved(settings.filter(pl.col("tuner") != ORACLE), text)),
        unchanged=[t for t in distinct if t not in made.settings and t in settings["tuner"]],
        workers=workers,
        reasons=_reasons(scores, workers),
        machines=machines,
        oracle_settings=_oracle_settings(results, name),
        beside=[_beside_line(row) for row in both],
        agreement=live.agreement(both),
        spends=bool((scores["overhead_seconds"] + scores["trial_seconds"]).fill_nan(0.0).sum() > 0),
        live=results.live,
        draws=[_draw_line(row) for row in under.rows] if under else [],
        undecided=calibration_ranks.NOT_DECIDED,
        runs=_runs_by_tuner(name, results, up, machines),
    )


def _runs_by_tuner(name: str, results: Results, up: str | None, machines: list[str]) -> list[tuple[str, list[_RunRow]]]:
    """The runs of a scenario, by tuner and seed."""
    scores, host = (frame.filter(pl.col("scenario") == name) for frame in (results.scores, results.host))
    joined = scores.join(host, on=("scenario", "tuner", "seed"), how="left").sort("tuner", "seed")
    return [
        (str(tuner), [_run_row(run, up, _best(results, name, str(tuner)), machines) for run in mine.iter_rows(named=True)])
        for (tuner,), mine in joined.group_by(["tuner"], maintain_order=True)
    ]


def _beside_line(row: live.BesideRow) -> _TunerLine:
    times = (row.live_seconds, row.live_done), (row.simulated_seconds, row.simulated_done)
    cells = [Cell(quantity(seconds), done, seconds) for seconds, done in times]
    return _TunerLine(row.tuner, [*cells, Cell(live.ratio_text(row), "", row.ratio)])


def _draw_line(row: calibration_ranks.CalibrationRank) -> _TunerLine:
    def rank(what: str, agree: float, verdict: str) -> Cell:
        return Cell(f"{what}: {verdict}" if verdict else what or "-", _share(agree), agree)

    def _share(agree: float) -> str:
        return "" if math.isnan(agree) else calibration_ranks.share_text(agree, row.draws)

    cells = [
        Cell(*calibration_ranks.ratio_text(row), row.ratio),
        Cell("-" if math.isnan(row.first) else f"{row.first:.0%}", "", row.first),
        rank(row.standing, row.agree, row.verdict),
        rank(row.side, row.side_agree, row.side_verdict),
    ]
    return _TunerLine(row.tuner, cells)


def _best(results: Results, scenario: str, tuner: str) -> str:
    """The name under which the runs of an oracle's best setting are stored; "" for a contestant."""
    return str(results.oracles.get(scenario, {}).get(tuner, {}).get("best", ""))


def _oracle_settings(results: Results, scenario: str) -> int:
    return int(results.oracles.get(scenario, {}).get(ORACLE, {}).get("settings", 0))


def _workers(
    name: str, tuners: list[str], scores: pl.DataFrame, runs: PackRun
) -> list[tuple[str, str, str, list[PackedRun]]]:
    """The packed runs of every tuner; the more runs there are, the fewer pushes of each."""
    shown = scores.filter(pl.col("tuner").is_in(tuners))
    most = min(max(_ALL_PUSHES // max(shown.height, 1), _LEAST_PUSHES), _MOST_PUSHES)
    found = []
    for i, tuner in enumerate(tuners):
        seeds = sorted(shown.filter(pl.col("tuner") == tuner)["seed"])
        packed = [run for seed in seeds if (run := runs(name, tuner, seed, most)) is not None]
        if packed:
            found.append((tuner, f"gantt-{i}", headers(packed), packed))
    return found


def _reasons(
    scores: pl.DataFrame, workers: list[tuple[str, str, str, list[PackedRun]]]
) -> list[tuple[str, int, tuple[tuple[float, str], ...]]]:
    """What every tuner that gives reasons did in its run with the median completion time, and why."""
    found = []
    for tuner, _, _, packed in workers:
        typical = typical_seed(scores.filter(pl.col("tuner") == tuner))
        found += [(tuner, run.seed, run.reasons) for run in packed if run.seed == typical and run.reasons]
    return found


def _score_row(row: dict[str, Any], accuracy: bool, usd: bool) -> _ScoreRow:
    oracle = row["role"] == "oracle"

    def ends(name: str, kind: str) -> Cell:
        return Cell(*interval_text(row, name, kind), row[name])

    def plain(name: str) -> Cell:
        return Cell(quantity(row[name]), "", row[name])

    cells = [
        ends("completion_seconds", "completion"),
        ends("ratio", "ratio") if row["role"] != "reference" or math.isnan(row["ratio"]) else Cell("1", "", 1.0),
        Cell("-") if oracle else ends("regret", "regret"),
        Cell("oracle" if oracle else row["standing"] or "-", p_text(row["p_leader"]), row["p_leader"]),
        Cell(f"{row['reached']}/{row['runs']}", f"{row['failed']} failed" if row["failed"] else "", row["reached"]),
        Cell(count(row["reconfigurations"]), "", row["reconfigurations"]),
        plain("overhead_seconds"),
        plain("trial_seconds"),
        Cell(host_seconds(row["thinking_seconds"]), "", row["thinking_seconds"]),
        Cell(count(row["branches_peak"]), _megabytes(row["branch_bytes_peak"]), row["branches_peak"]),
        plain("machine_seconds"),
        *([ends("usd", "usd"), Cell("-") if oracle else ends("usd_regret", "usd_regret")] if usd else []),
        plain("final_accuracy" if accuracy else "final_loss"),
    ]
    return _ScoreRow(
        row["tuner"], "oracle" if oracle else "close" if row["standing"] == "not told apart" else row["standing"], cells
    )


def _megabytes(amount: float) -> str:
    return "" if math.isnan(amount) else f"{quantity(amount / 1e6)} MB"


_OF_RUN: dict[str, Callable[[float], str]] = {
    "reconfigurations": count,
    "overhead_seconds": quantity,
    "trial_seconds": quantity,
    "clocks": count,
    "machine_seconds": quantity,
    "usd": quantity,
    "final_loss": quantity,
    "final_accuracy": quantity,
    "thinking_seconds": host_seconds,
    "wall_seconds": host_seconds,
}
"""The columns of a run on the page after its time, and how their numbers are written."""


def _time_cell(run: dict[str, Any]) -> Cell:
    """The time of a run to its target: more than its budget where it missed that, none where it failed."""
    if run["status"] == "error":
        return _number_cell(None, quantity)
    seconds = float(run["completion_seconds"])
    return Cell(quantity(seconds) if run["reached"] else f">\u00a0{quantity(seconds)}", "", seconds)


def _number_cell(value: float | None, text: Callable[[float], str]) -> Cell:
    number = math.nan if value is None else float(value)
    return Cell(text(number), "", number)


def _run_row(run: dict[str, Any], up: str | None, best: str, machines: list[str]) -> _RunRow:
    cells = [_time_cell(run), *(_number_cell(run[name], text) for name, text in _OF_RUN.items())]
    folder = "" if up is None else quote(up + str(run_folder(Path(), run["scenario"], best or run["tuner"], run["seed"])))
    if len(machines) > 1 and run["machine"] in machines:
        cells[-1] = cells[-1]._replace(small=f"machine {machines.index(run['machine']) + 1}")
    return _RunRow(run["seed"], cells, run["status"], run["reason"], folder)
