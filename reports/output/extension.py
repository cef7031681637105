"""The tuners of a comparison among those of a published site, so that a new tuner is played alone, and not all others again.

A published site has the scores of its runs, but neither their evaluations nor their settings. So what is joined here can be
shown as an overview only.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

import polars as pl

from harness.comparison.merge import ComparisonFolder, check_same
from reports.pages.page import texts
from reports.verdicts.summary import OUTCOME, SUMMARY, alike
from traces import store
from traces.schema import HOST, KEYS, NOT_APPLICABLE, SCORES
from traces.store import Results

__all__ = ["among_published", "hosts_by_tuner", "published_hosts", "summed"]


def among_published(
    results: Results, folder: Path, scenarios: Mapping[str, str], site: Path, replaced: Collection[str] = ()
) -> Results:
    """The scores of `results` together with those of the published `site`, on the scenarios of `results`.

    `results` were read from `folder`; `scenarios` are their texts, by name. The runs of a tuner in `replaced` are those of
    `results` on each scenario where it was played. Any other tuner that both have must have the same outcomes in both, which
    shows that this program still computes what the site's did.

    Raises ValueError where `site` is no published site; where it lacks a scenario, or has another text of it; where
    `results` have fewer seeds of a scenario, or more and lack one of the site's tuners there; where both have no tuner in
    common; where a tuner that is not `replaced` has other code or outcomes; or where one that is `replaced` was not played.
    """
    manifest, published = _read(site)
    _check_scenarios(results, folder, scenarios, site, manifest, published)
    here = published.filter(pl.col("scenario").is_in(results.manifest["scenarios"]))
    own = set(results.manifest["tuners"])
    _check_code(results, folder, site, manifest, set(replaced))
    _check_tuners(results, folder, here, site, own, set(replaced))
    added = here.join(_runs(results), on=["scenario", "tuner"], how="anti")
    played = pl.col("status") != NOT_APPLICABLE
    return Results(
        _manifest(results, manifest),
        pl.concat([added.filter(played), results.scores]).sort(KEYS),
        results.evaluations,
        results.settings,
        pl.concat([_host(added, site), results.host]),
        pl.concat([added.filter(~played), results.not_applicable]).sort(KEYS),
        results.oracles,
    )


def published_hosts(results: Results, site: Path) -> pl.DataFrame:
    """What the runs of the site's tuners cost their hosts, in all its scenarios, where some of these runs are kept beside
    `results`: sums per tuner and machine, which have those that are replaced, too.

    Empty where `results` have only some of these scenarios.
    """
    hosts, (manifest, published) = hosts_by_tuner(site / "tables" / "host.csv"), _read(site)
    if set(manifest["scenarios"]) != set(results.manifest["scenarios"]):
        return hosts.clear()
    kept = published.join(_runs(results), on=["scenario", "tuner", "seed"], how="anti")
    return hosts.filter(pl.col("tuner").is_in(kept["tuner"].unique().to_list()))


def hosts_by_tuner(path: Path) -> pl.DataFrame:
    """What the runs of each tuner cost the host: number of runs, and sums of seconds, by machine. The oracle's are one.

    `path` is the table of a results folder, or of a site with all pages, which has a row per run; or that of an overview,
    which has these sums.
    """
    if "runs" in pl.scan_csv(path, glob=False).collect_schema():
        return pl.read_csv(path, glob=False)
    name = pl.col("tuner").str.split("+").list.first()
    return summed(store.read_host(path).select(name, "machine", "thinking_seconds", "wall_seconds", runs=pl.lit(1)))


def summed(hosts: pl.DataFrame) -> pl.DataFrame:
    """A row per tuner and machine."""
    seconds = pl.col("thinking_seconds", "wall_seconds").sum().round(1)
    return hosts.group_by("tuner", "machine").agg(pl.col("runs").sum(), seconds).sort("tuner", "machine")


def _read(site: Path) -> tuple[dict[str, Any], pl.DataFrame]:
    if not (site / "tables" / "scores.parquet").is_file():
        raise ValueError(f"Cannot add to {site}: it is no site of `harness publish`, as it lacks tables/scores.parquet.")
    return store.read_manifest(site), store.read(site / "tables" / "scores.parquet", SCORES)


def _runs(results: Results) -> pl.DataFrame:
    """The rows of all runs, also of tuners that do not apply."""
    return pl.concat([results.scores, results.not_applicable])


def _check_scenarios(
    results: Results,
    folder: Path,
    scenarios: Mapping[str, str],
    site: Path,
    manifest: dict[str, Any],
    published: pl.DataFrame,
) -> None:
    """Raise ValueError where the site lacks a scenario of the results, or has another text or other seeds of it."""
    known = manifest.get("seeds_of", {})
    for name, seeds in sorted(results.manifest.get("seeds_of", {}).items()):
        if name not in known:
            raise ValueError(
                f"Cannot add {folder} to {site}: no scenario {name!r} is there. Play those of {site / 'scenarios'}."
            )
        # A pair of tuners is compared on the seeds of both, so that a tuner with few seeds would leave few of the others'.
        theirs_here, ours_here = (frame.filter(pl.col("scenario") == name)["tuner"] for frame in (published, _runs(results)))
        if seeds < known[name] or (seeds > known[name] and not set(theirs_here) <= set(ours_here)):
            go_on = " --resume" if seeds < known[name] else ""
            raise ValueError(
                f"Cannot add {folder} to {site}: {name} has {seeds} seeds, and {known[name]} there. "
                f"Play it with --seeds {known[name]}{go_on}."
            )
    parts = ((site, manifest, texts(site)), (folder, results.manifest, scenarios))
    theirs, ours = (
        ComparisonFolder(
            place,
            {key: value for key, value in made.items() if key != "own_tuners"},  # `_check_tuners` compares these
            {name: text.encode() for name, text in of.items()},
        )
        for place, made, of in parts
    )
    check_same(theirs, ours)


def _check_code(results: Results, folder: Path, site: Path, manifest: dict[str, Any], replaced: set[str]) -> None:
    """Raise ValueError where a tuner of the user's that both have has other code."""
    before = manifest.get("own_tuners", {})
    for tuner, digest in results.manifest.get("own_tuners", {}).items():
        if tuner not in replaced and before.get(tuner, digest) != digest:
            raise ValueError(
                f"Cannot add {folder} to {site}: the code of tuner {tuner!r} has changed since. To have its new runs there, "
                f"use --replace {tuner!r}."
            )


def _check_tuners(
    results: Results, folder: Path, published: pl.DataFrame, site: Path, own: set[str], replaced: set[str]
) -> None:
    """Raise ValueError where runs that both have differ, or where no tuner was played in both."""
    if unknown := sorted(replaced - own):
        raise ValueError(f"Cannot replace {unknown[0]!r} in {site}: {folder} has no run of it.")
    common = own & set(published["tuner"])
    if not common:
        raise ValueError(
            f"Cannot add {folder} to {site}: no tuner is in both, so nothing shows that both were computed alike. "
            "Play fixed, too: `harness compare ... --resume`."
        )
    before = {row[:3]: row[3:] for row in published.select(*KEYS, *OUTCOME).iter_rows()}
    for row in results.scores.sort(KEYS).select(*KEYS, *OUTCOME).iter_rows():
        scenario, tuner, seed = row[:3]
        if tuner in replaced or row[:3] not in before:
            continue
        pairs = zip(OUTCOME, before[row[:3]], row[3:], strict=True)
        for column, there, here in pairs:
            if not alike(there, here):
                raise ValueError(
                    f"Cannot add {folder} to {site}: {column} of {tuner} on {scenario} with seed {seed} is {here}, and "
                    f"{there} there. Where the tuner has changed since, or another processor rounds differently, use "
                    f"--replace {tuner}."
                )


def _manifest(results: Results, published: dict[str, Any]) -> dict[str, Any]:
    """The manifest of the results, with the tuners and oracles of the site, of which no run counts as missing."""
    made = dict(results.manifest) | {"played_in_part": published.get("tuners", [])}
    for key in ("tuners", "oracles"):
        made[key] = list(dict.fromkeys([*published.get(key, []), *results.manifest.get(key, [])]))
    if own := published.get("own_tuners", {}) | results.manifest.get("own_tuners", {}):
        made["own_tuners"] = own
    return made


def _host(added: pl.DataFrame, site: Path) -> pl.DataFrame:
    """Thinking seconds by the site's tables, which have means per scenario and tuner, and no wall seconds of single runs."""
    known = store.read(site / "tables" / "summary.parquet", SUMMARY).select("scenario", "tuner", "thinking_seconds")
    return (
        added.select(KEYS)
        .join(known, on=["scenario", "tuner"], how="left")
        .with_columns(
            thinking_seconds=pl.col("thinking_seconds").fill_null(math.nan), wall_seconds=math.nan, machine=pl.lit("")
        )
        .select([pl.col(name).cast(kind) for name, kind in HOST.items()])
    )
