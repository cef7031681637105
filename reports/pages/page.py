"""The HTML pages of a comparison: the answer first, then what it costs, how it went, every run, and how to read it.

A comparison of one scenario is one self-contained file. With several, the first page is an overview, and a page per scenario
lies behind it, in the folder `pages`. They open without a network, in light and in dark; without scripts, only sorting,
downloads and the drawings of workers are missing. This module prepares plain values; the templates `overview`, `comparison`,
`scenario`, `scores`, `runs` and `reading` lay them out. `rendering` escapes what comes from files (names, reasons, scenario
text).
"""

from __future__ import annotations

import base64
import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias
from urllib.parse import quote

import polars as pl

from harness.comparison.results import run_folder
from reports.fidelity import live
from reports.figures.across import heat_map, mean_ratios, performance
from reports.figures.completion import completion_times
from reports.figures.costs import pareto, time_split
from reports.figures.drawing import Drawing
from reports.figures.gantt import PackedRun, headers, packed_run
from reports.figures.progress import learning_curves, progress
from reports.figures.settings_over_time import SETTINGS_NOTE, settings_over_time, typical_seed, unmoved
from reports.figures.workers import WORKERS_NOTE
from reports.pages.facts import facts, target_of
from reports.templates.rendering import fill
from reports.verdicts import arenas, calibration_ranks
from reports.verdicts.conclusions import NOTHING_TO_TUNE, Answer, against_reference, answer, limits, tally
from reports.verdicts.tables import (
    ORACLE,
    REFERENCE,
    count,
    coverage,
    host_seconds,
    identical,
    interval_text,
    not_applicable,
    quantity,
    relative,
    shows_accuracy,
    shows_usd,
    summary,
)
from traces.store import Results, load_results, write_bytes

__all__ = [
    "OverviewFigures",
    "ScenarioFigures",
    "overview_figures",
    "page_name",
    "pages",
    "scenario_figures",
    "texts",
    "write",
]

_Runs: TypeAlias = Callable[[str, str, int, int], PackedRun | None]
"""Packs a run of a scenario, a tuner and a seed, with at most so many pushes."""

_ALL_PUSHES, _MOST_PUSHES, _LEAST_PUSHES = 60_000, 1500, 100  # in the drawings of one page, and in one of them


def write(folder: Path, simulated: Path | None = None) -> Path:
    """Write the pages of a results folder and return the path of the first one, `report.html`. Live runs are put beside
    those in `simulated`, or in the folder of that name in `folder`.

    Raises ValueError where `folder` holds no results.
    """
    results = load_results(folder)
    made = pages(results, texts(folder), partial(packed_run, folder), simulated=live.simulated_of(folder, simulated))
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, text.encode())
    return folder / "report.html"


def texts(folder: Path) -> dict[str, str]:
    """The scenarios of a results folder as they were run, by name."""
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder / "scenarios").glob("*.toml"))}


def page_name(scenario: str, scenarios: Sequence[str], first: str = "report.html") -> str:
    """The file of a scenario's page: the first page where there is only one scenario."""
    return first if len(scenarios) < 2 else f"pages/{quote(scenario, safe='+=,()')}.html"


def pages(
    results: Results,
    scenarios: Mapping[str, str],
    runs: _Runs = lambda *_: None,
    *,
    first: str = "report.html",
    with_files: bool = True,
    only_overview: bool = False,
    simulated: Results | None = None,
) -> dict[str, str]:
    """The pages for `results`, by file name; `scenarios` are the texts of the scenarios as they were run, by name.

    `runs` packs a run for the drawing of its workers, as `gantt.packed_run` does. `first` is the name of the first page.
    Without `with_files`, nothing refers to the files of single runs. With `only_overview`, there is no page per scenario
    beside the overview of several. `simulated` are runs to be put beside `results`, which are live then.
    """
    table = summary(results)
    names = list(dict.fromkeys(table["scenario"].to_list()))
    common = {"versions": _versions(results.manifest), "reference": REFERENCE, "oracle": ORACLE}
    made = {}
    alone = only_overview and len(names) > 1
    if len(names) != 1:
        made[first] = _overview(results, table, names, None if alone else first, common)
    for name in () if alone else names:
        own = page_name(name, names, first)
        section = _section(
            name, table, results, scenarios.get(name, ""), runs, "../" * own.count("/") if with_files else None, simulated
        )
        made[own] = fill(
            "comparison.html.j2",
            title=name,
            back=f"../{first}" if len(names) > 1 else "",
            scenario=section,
            settings_note=SETTINGS_NOTE,
            workers_note=WORKERS_NOTE,
            **common,
        )
    return made


def _versions(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """What the results and the page were made with."""
    return {
        "harness": manifest.get("harness", "of unknown version"),
        "format": manifest.get("schema", "unknown"),
        "libraries": [f"{name} {metadata.version(name)}" for name in ("numpy", "scipy", "polars", "matplotlib")],
    }


class _Numbered(NamedTuple):
    """A drawing with its numbers, as the templates take it."""

    drawing: Drawing
    csv: str  # the numbers as CSV, compressed, in base 64


def _figure(drawing: Drawing | None) -> _Numbered | None:
    if drawing is None:
        return None
    return _Numbered(
        drawing, base64.b64encode(zlib.compress(drawing.data.write_csv(float_precision=6).encode(), 9)).decode()
    )


class _Cell(NamedTuple):
    """A cell of a table."""

    text: str
    small: str = ""  # the interval, or another addition in small print
    value: float = math.nan  # to sort by


# ------------------------------------------------------------------------------------------------------------- overview


@dataclass(frozen=True, slots=True)
class OverviewFigures:
    """The figures of one family."""

    means: Drawing
    regret: Drawing
    profile: Drawing

    def all(self) -> list[Drawing]:
        return [self.means, self.regret, self.profile]


def overview_figures(found: arenas.Arenas, name: str) -> OverviewFigures:
    """The figures over the arenas of `found`."""
    return OverviewFigures(
        mean_ratios(found, f"{name}-means"), heat_map(found, f"{name}-regret"), performance(found, f"{name}-profile")
    )


@dataclass(frozen=True, slots=True)
class _FamilySection:
    """What the overview shows of one family, or of all arenas together."""

    title: str
    answer: Answer
    sentences: list[str]
    base: str
    rows: list[tuple[str, str, list[_Cell]]]  # tuner, class of the row, cells
    figures: list[_Numbered | None]


def _overview(results: Results, table: pl.DataFrame, names: list[str], first: str | None, common: dict[str, Any]) -> str:
    """The overview; `first` is its name, for the addresses of the pages that it links to. None: it links to none."""
    sections = []
    for i, (family, members) in enumerate(arenas.families(names).items()):
        found = arenas.arenas_of(results, members, family)
        rows = [_family_row(row, len(found.arenas)) for row in found.rows.iter_rows(named=True)]
        figures = [_figure(d) for d in overview_figures(found, f"over{i}").all()] if found.rows.height else []
        title = f"Family {family}" if family else "All scenarios"
        sections.append(_FamilySection(title, arenas.answer(found), arenas.sentences(found), found.base, rows, figures))
    each = [
        (name, quote(page_name(name, names, first)) if first else "", answer(table.filter(pl.col("scenario") == name)))
        for name in names
    ]
    idle = [] if names else not_applicable(results)
    title = f"{len(names)} scenarios" if names or not idle else NOTHING_TO_TUNE
    return fill("overview.html.j2", title=title, sections=sections, scenarios=each, idle=idle, **common)


def _family_row(row: dict[str, Any], arenas_in_all: int) -> tuple[str, str, list[_Cell]]:
    def ends(name: str, text: Callable[[float], str]) -> _Cell:
        low, high = row[f"{name}_low"], row[f"{name}_high"]
        return _Cell(text(row[name]), "" if math.isnan(low) else f"{text(low)}\u2013{text(high)}", row[name])

    def percent(value: float) -> str:
        return f"{value:.0%}"

    cells = [
        _Cell(f"{row['arenas']}/{arenas_in_all}", "", row["arenas"]),
        ends("ratio", relative),
        ends("first", percent),
        _Cell(relative(row["mean_rank"]), "", row["mean_rank"]),
        _Cell(row["standing"] or "-", _p_text(row["p_leader"]), row["p_leader"]),
        _Cell(_p_text(row["p_reference"]) or "-", "", row["p_reference"]),
        _Cell(percent(row["reached"]), f"{row['failed']} failed" if row["failed"] else "", row["reached"]),
    ]
    return row["tuner"], "close" if row["standing"] == "not told apart" else row["standing"], cells


def _p_text(p_value: float) -> str:
    return "" if math.isnan(p_value) else "p < 0.001" if p_value < 0.001 else f"p = {p_value:.2g}"


# --------------------------------------------------------------------------------------------------------- one scenario


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


def scenario_figures(rows: pl.DataFrame, results: Results, text: str, prefix: str = "") -> ScenarioFigures:
    """The figures of one scenario from its rows of `tables.summary`; names of figures begin with `prefix`."""
    here = pl.col("scenario") == rows["scenario"][0]
    scores, evaluations, settings = (f.filter(here) for f in (results.scores, results.evaluations, results.settings))
    distinct = rows.filter(pl.col("role") != "same")
    tuners = distinct["tuner"].to_list()
    metric, target = target_of(text) or ("accuracy" if shows_accuracy(rows) else "loss", None)
    other = "loss" if metric == "accuracy" else "accuracy"
    drawn = {}
    for tuner in tuners:
        mine = pl.col("tuner") == tuner
        name = f"{prefix}settings-{quote(tuner, safe='')}".replace("%", "_")
        if (drawing := settings_over_time(settings.filter(mine), scores.filter(mine), name)) is not None:
            drawn[tuner] = drawing
    return ScenarioFigures(
        split=time_split(rows, scores, f"{prefix}time-split"),
        front=pareto(rows, f"{prefix}time-against-overhead"),
        metric=metric,
        progress=progress(evaluations, settings, scores, rows, metric, f"{prefix}progress-{metric}", target),
        curves=learning_curves(evaluations, tuners, metric, f"{prefix}each-{metric}", target),
        other_metric=other,
        other_progress=progress(evaluations, settings, scores, rows, other, f"{prefix}progress-{other}"),
        times=completion_times(distinct, scores, f"{prefix}completion-times"),
        settings=drawn,
    )


@dataclass(frozen=True, slots=True)
class _ScoreRow:
    """A tuner's row in the table of scores; a cell per column of the template `scores`, after the tuner."""

    tuner: str
    kind: str  # the row's class: leader, close, behind, ahead or oracle
    cells: list[_Cell]


@dataclass(frozen=True, slots=True)
class _RunRow:
    """One run in the table of runs."""

    seed: int
    cells: list[_Cell]
    status: str
    reason: str
    folder: str  # of its files, relative to the page; "" where the page stands without them


class _TunerLine(NamedTuple):
    """A tuner's row in a table: that of ranks under draws of the calibrated constants, or of live beside simulated runs."""

    tuner: str
    cells: list[_Cell]


@dataclass(frozen=True, slots=True)
class _ScenarioSection:
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
    split: _Numbered | None
    front: _Numbered | None
    progress: _Numbered | None
    curves: _Numbered | None
    other_progress: _Numbered | None
    times: _Numbered | None
    settings: list[tuple[str, _Numbered | None]]  # by tuner
    unmoved: str  # knobs that no tuner moved
    unchanged: list[str]  # tuners that kept one setting
    workers: list[tuple[str, str, str, list[PackedRun]]]  # tuner, id, headers, runs
    reasons: list[tuple[str, int, tuple[tuple[float, str], ...]]]  # by tuner: seed, and seconds with sentences
    runs: list[tuple[str, list[_RunRow]]]  # by tuner
    machines: list[str]  # that the runs were made on
    oracle_settings: int  # that the oracle has run; 0 where it is not known
    beside: list[_TunerLine]  # live runs beside simulated ones; [] where it is no live contest
    agreement: str
    draws: list[_TunerLine]  # tuners under draws of the calibrated constants; [] without draws
    undecided: str  # the words for a rank that the calibration does not decide


def _section(
    name: str,
    table: pl.DataFrame,
    results: Results,
    text: str,
    runs: _Runs,
    up: str | None,
    simulated: Results | None,
) -> _ScenarioSection:
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
    return _ScenarioSection(
        name=name,
        answer=answer(rows),
        text=text,
        summary=known[0][1],
        facts=known[1:],
        findings=[*(calibration_ranks.sentences(under) if under else []), *against_reference(rows), tally(rows)],
        limits=limits(rows),
        scores=[_score_row(row, accuracy, usd) for row in rows.filter(pl.col("role") != "same").iter_rows(named=True)],
        identical=[*identical(rows), *_absent(absent)],
        final_metric="accuracy" if accuracy else "loss",
        coverage=coverage(rows),
        usd=usd,
        figures=made,
        split=_figure(made.split),
        front=_figure(made.front),
        progress=_figure(made.progress),
        curves=_figure(made.curves),
        other_progress=_figure(made.other_progress),
        times=_figure(made.times),
        settings=[(tuner, _figure(drawing)) for tuner, drawing in made.settings.items()],
        unmoved=", ".join(unmoved(settings.filter(pl.col("tuner") != ORACLE), text)),
        unchanged=[t for t in distinct if t not in made.settings and t in settings["tuner"]],
        workers=workers,
        reasons=_reasons(scores, workers),
        machines=machines,
        oracle_settings=_oracle_settings(results, name),
        beside=[_beside_line(row) for row in both],
        agreement=live.agreement(both),
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
    cells = [_Cell(quantity(seconds), done, seconds) for seconds, done in times]
    return _TunerLine(row.tuner, [*cells, _Cell(live.ratio_text(row), "", row.ratio)])


def _draw_line(row: calibration_ranks.CalibrationRank) -> _TunerLine:
    def rank(what: str, agree: float, verdict: str) -> _Cell:
        return _Cell(f"{what}: {verdict}" if verdict else what or "-", _share(agree), agree)

    def _share(agree: float) -> str:
        return "" if math.isnan(agree) else calibration_ranks.share_text(agree, row.draws)

    cells = [
        _Cell(*calibration_ranks.ratio_text(row), row.ratio),
        _Cell("-" if math.isnan(row.first) else f"{row.first:.0%}", "", row.first),
        rank(row.standing, row.agree, row.verdict),
        rank(row.side, row.side_agree, row.side_verdict),
    ]
    return _TunerLine(row.tuner, cells)


def _best(results: Results, scenario: str, tuner: str) -> str:
    """The name under which the runs of an oracle's best setting are stored; "" for a contestant."""
    return str(results.oracles.get(scenario, {}).get(tuner, {}).get("best", ""))


def _oracle_settings(results: Results, scenario: str) -> int:
    return int(results.oracles.get(scenario, {}).get(ORACLE, {}).get("settings", 0))


def _absent(rows: pl.DataFrame) -> list[str]:
    """Sentences on the tuners that have nothing to tune in a scenario."""
    reasons: dict[str, list[str]] = {}
    for tuner, reason in rows.select("tuner", "reason").unique(maintain_order=True).iter_rows():
        reasons.setdefault(str(reason), []).append(str(tuner))
    return [f"Not applicable, and not run: {', '.join(tuners)}. {reason}" for reason, tuners in reasons.items()]


def _workers(name: str, tuners: list[str], scores: pl.DataFrame, runs: _Runs) -> list[tuple[str, str, str, list[PackedRun]]]:
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

    def ends(name: str, kind: str) -> _Cell:
        return _Cell(*interval_text(row, name, kind), row[name])

    def plain(name: str) -> _Cell:
        return _Cell(quantity(row[name]), "", row[name])

    cells = [
        ends("completion_seconds", "completion"),
        _Cell("1", "", 1.0) if row["role"] == "reference" else ends("ratio", "ratio"),
        _Cell("-") if oracle else ends("regret", "regret"),
        _Cell("oracle" if oracle else row["standing"] or "-", _p_text(row["p_leader"]), row["p_leader"]),
        _Cell(f"{row['reached']}/{row['runs']}", f"{row['failed']} failed" if row["failed"] else "", row["reached"]),
        _Cell(count(row["reconfigurations"]), "", row["reconfigurations"]),
        plain("overhead_seconds"),
        plain("trial_seconds"),
        _Cell(host_seconds(row["thinking_seconds"]), "", row["thinking_seconds"]),
        _Cell(count(row["branches_peak"]), f"{quantity(row['branch_bytes_peak'] / 1e6)} MB", row["branches_peak"]),
        plain("machine_seconds"),
        *([ends("usd", "usd"), _Cell("-") if oracle else ends("usd_regret", "usd_regret")] if usd else []),
        plain("final_accuracy" if accuracy else "final_loss"),
    ]
    return _ScoreRow(
        row["tuner"], "oracle" if oracle else "close" if row["standing"] == "not told apart" else row["standing"], cells
    )


def _run_row(run: dict[str, Any], up: str | None, best: str, machines: list[str]) -> _RunRow:
    spent = ("reconfigurations", "overhead_seconds", "trial_seconds", "clocks", "machine_seconds", "usd")
    names = (*spent, "final_loss", "final_accuracy")
    host = ("thinking_seconds", "wall_seconds")
    values = [run["completion_seconds"], *(run[n] for n in names), *(math.nan if run[n] is None else run[n] for n in host)]
    folder = "" if up is None else quote(up + str(run_folder(Path(), run["scenario"], best or run["tuner"], run["seed"])))
    cells = [_Cell(quantity(float(v)), "", float(v)) for v in values]
    if len(machines) > 1 and run["machine"] in machines:
        cells[-1] = cells[-1]._replace(small=f"machine {machines.index(run['machine']) + 1}")
    return _RunRow(run["seed"], cells, run["status"], run["reason"], folder)
