"""A static site of a finished comparison: overview, a page per scenario, and the tables, without files of single runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Collection
from functools import partial
from pathlib import Path

import polars as pl

from reports.figures.gantt import packed_run
from reports.output.export import markdown
from reports.output.extension import among_published, hosts_by_tuner, published_hosts, summed
from reports.pages.page import pages, texts
from reports.verdicts.arenas import by_family
from reports.verdicts.summary import summary
from traces import store
from traces.schema import EVALUATIONS, SCORES, SETTINGS
from traces.store import Results, load_results, write_bytes

__all__ = ["publish"]


def publish(
    folder: Path, out: Path, *, only_overview: bool = False, onto: Path | None = None, replaced: Collection[str] = ()
) -> Path:
    """Write the site of the comparison in `folder` to the new folder `out`, and return the path of its first page.

    With `only_overview`, a comparison of several scenarios gets no page per scenario. The tables of evaluations and of
    settings, which are most of its bytes, are left out, and the host's times are summed per tuner.

    With `onto`, a published site, its tuners are shown beside those of `folder`, as an overview. The runs of the tuners
    `replaced` are those of `folder`, where it has any (`reports.output.extension`).

    Raises ValueError, and writes nothing, where `folder` holds no results or lacks a run, where `out` is there already, or
    where the runs of `folder` do not fit to those of `onto`.
    """
    if replaced and onto is None:
        raise ValueError("Cannot replace tuners of no site: name one with --onto.")
    if out.exists():
        raise ValueError(f"Cannot publish to {out}: it is there already. Name another folder with --out.")
    store.check_comparison(folder, "publish")
    results, scenarios, elsewhere = load_results(folder), texts(folder), set[str]()
    hosts = hosts_by_tuner(folder / "host.csv")
    if onto is not None:
        own, results = results, among_published(results, folder, scenarios, onto, replaced)
        hosts = summed(pl.concat([hosts, published_hosts(own, onto)], how="vertical_relaxed"))
        only_overview, elsewhere = True, set(store.read_manifest(onto)["tuners"])
    if (missing := _missing(results, elsewhere)) is not None:
        raise ValueError(
            f"Cannot publish {folder}: it is unfinished; there is no run of {missing}. Go on with it by "
            "`harness compare --resume`."
        )
    table = summary(results)
    over = by_family(results, list(dict.fromkeys(table["scenario"].to_list())))
    of_runs = partial(packed_run, folder)
    written = pages(
        results,
        scenarios,
        of_runs,
        first="index.html",
        with_files=False,
        only_overview=only_overview,
        table=table,
        over=over,
    )
    partly = out.with_name(f".{out.name}.partly")
    shutil.rmtree(partly, ignore_errors=True)
    try:
        for name, text in written.items():
            _write(partly / name, text.encode())
        _write_tables(partly / "tables", results, table, host=folder / "host.csv", hosts=hosts if only_overview else None)
        _write(partly / "report.md", markdown(results, table, over).encode())
        for path in sorted((folder / "scenarios").glob("*.toml")):
            _write(partly / "scenarios" / path.name, path.read_bytes())
        _write(partly / "manifest.json", (json.dumps(results.manifest, indent=1) + "\n").encode())
        partly.rename(out)
    finally:
        shutil.rmtree(partly, ignore_errors=True)
    return out / "index.html"


def _write_tables(folder: Path, results: Results, table: pl.DataFrame, *, host: Path, hosts: pl.DataFrame | None) -> None:
    """The tables of a site; without evaluations and settings where `hosts`, the host's times by tuner, replace `host`."""
    folder.mkdir(parents=True)
    store.write(pl.concat([results.scores, results.not_applicable, results.draws]), folder / "scores.parquet", SCORES)
    if hosts is not None:
        _write(folder / "host.csv", hosts.write_csv().encode())
    else:
        store.write(results.evaluations, folder / "evaluations.parquet", EVALUATIONS)
        store.write(results.settings, folder / "settings.parquet", SETTINGS)
        _write(folder / "host.csv", host.read_bytes())
    store.write(table, folder / "summary.parquet", table.schema)  # as CSV, four times as many bytes


def _missing(results: Results, elsewhere: Collection[str]) -> str | None:
    """The first run of the manifest that is in no table, in words.

    A tuner that was also played `elsewhere` may have no run in a scenario: it was not played here, or does not apply.
    """
    manifest = results.manifest
    played = {
        (scenario, tuner, seed)
        for frame in (results.scores, results.not_applicable, results.draws)
        for scenario, tuner, seed in frame.select("scenario", "tuner", "seed").iter_rows()
    }
    begun = {(scenario, tuner) for scenario, tuner, _ in played}
    drawn = set(store.drawn_scenarios(manifest))
    for scenario in manifest.get("scenarios", []):
        seeds = manifest.get("seeds_of", {}).get(scenario, manifest.get("seeds", 1))
        oracles = manifest.get("oracles", []) if scenario in drawn else []  # these are not run under draws
        for tuner in (t for t in manifest.get("tuners", []) if t not in oracles):
            if tuner in elsewhere and (scenario, tuner) not in begun:
                continue
            for seed in range(int(seeds)):
                if (scenario, tuner, seed) not in played:
                    return f"{tuner} on {scenario} with seed {seed}"
    return None if manifest.get("scenarios") else "any tuner"


def _write(path: Path, data: bytes) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_bytes(path, data)
