"""The HTML pages of a comparison: the answer first, then what it costs, how it went, every run, and how to read it.

A comparison of one scenario is one self-contained file. With several, the first page is an overview, and a page per scenario
lies behind it, in the folder `pages`. They open without a network, in light and in dark; without scripts, only sorting,
downloads and the drawings of workers are missing. `overview` and `scenario_section` prepare plain values, templates lay them
out, and `rendering` escapes what comes from files (names, reasons, scenario text).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from importlib import metadata
from pathlib import Path
from typing import Any
from urllib.parse import quote

import polars as pl

from reports.fidelity import live
from reports.figures.gantt import packed_run
from reports.figures.settings_over_time import SETTINGS_NOTE
from reports.figures.workers import WORKERS_NOTE
from reports.pages.overview import overview
from reports.pages.scenario_section import PackRun, scenario_section
from reports.templates.rendering import fill
from reports.verdicts.arenas import Arenas
from reports.verdicts.conclusions import missing_runs
from reports.verdicts.summary import ORACLE, REFERENCE, summary
from traces.store import Results, is_job, load_results, read_manifest, write_bytes

__all__ = ["page_name", "pages", "texts", "write"]


def write(folder: Path, simulated: Path | None = None, *, table: pl.DataFrame | None = None) -> Path:
    """Write the pages of a results folder and return the path of the first one, `report.html`. Live runs are put beside
    those in `simulated`, or in the folder of that name in `folder`. `table` is the summary, where the caller has it already.

    Raises ValueError where `folder` holds no results.
    """
    results = load_results(folder)
    beside = live.simulated_of(folder, simulated)
    runs = partial(packed_run, folder)
    made = pages(results, texts(folder), runs, with_files=not is_job(folder), simulated=beside, table=table)
    for name, text in made.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        write_bytes(path, text.encode())
    return folder / "report.html"


def texts(folder: Path) -> dict[str, str]:
    """The scenarios of a results folder as they were run, by name."""
    if is_job(folder):
        return dict.fromkeys(read_manifest(folder)["scenarios"], (folder / "scenario.toml").read_text(encoding="utf-8"))
    return {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder / "scenarios").glob("*.toml"))}


def page_name(scenario: str, scenarios: Sequence[str], first: str = "report.html") -> str:
    """The file of a scenario's page: the first page where there is only one scenario."""
    return first if len(scenarios) < 2 else f"pages/{quote(scenario, safe='+=,()')}.html"


def pages(
    results: Results,
    scenarios: Mapping[str, str],
    runs: PackRun = lambda *_: None,
    *,
    first: str = "report.html",
    with_files: bool = True,
    only_overview: bool = False,
    simulated: Results | None = None,
    table: pl.DataFrame | None = None,
    over: Sequence[Arenas] | None = None,
) -> dict[str, str]:
    """The pages for `results`, by file name; `scenarios` are the texts of the scenarios as they were run, by name.

    `runs` packs a run for the drawing of its workers, as `gantt.packed_run` does. `first` is the name of the first page.
    Without `with_files`, nothing refers to the files of single runs. With `only_overview`, there is no page per scenario
    beside the overview of several. `simulated` are runs to be put beside `results`, which are live then.
    `table` is their summary, and `over` are the tuners by family, where the caller has these already.
    """
    table = summary(results) if table is None else table
    names = list(dict.fromkeys(table["scenario"].to_list()))
    common: dict[str, Any] = {
        "versions": _versions(results.manifest),
        "reference": REFERENCE,
        "oracle": ORACLE,
        "live": results.live,
    }
    made = {}
    # On the first page, those of all scenarios, also of such that have no run yet.
    common["missing"] = missing_runs(results, simulated=simulated)
    alone = only_overview and len(names) > 1
    if len(names) != 1:
        addresses = {name: "" if alone else quote(page_name(name, names, first)) for name in names}
        made[first] = overview(results, table, addresses, common, over)
    for name in () if alone else names:
        own = page_name(name, names, first)
        section = scenario_section(
            name, table, results, scenarios.get(name, ""), runs, "../" * own.count("/") if with_files else None, simulated
        )
        if own != first:
            common["missing"] = missing_runs(results, name, simulated)
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
