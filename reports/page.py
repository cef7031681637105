"""One self-contained HTML page per comparison: what was run, what can be concluded, how it went, how to read it.

It opens without a network and without scripts, in light and in dark. Everything that comes from files (names, reasons,
scenario text) is escaped.
"""

from __future__ import annotations

import html
from collections.abc import Callable, Iterable, Mapping
from functools import partial
from importlib import metadata, resources
from pathlib import Path
from typing import Any, TypeAlias

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
from reports.tables import ORACLE, REFERENCE, interval_text, quantity, ranking_of, shows_accuracy, summary
from reports.workers import WORKERS_NOTE, workers_of_run
from traces.store import Results, load_results, write_bytes

__all__ = ["page", "write"]

_Workers: TypeAlias = Callable[[str, str, int, str], Drawing | None]
"""Draws who worked in a run: of a scenario, a tuner and a seed, with a name for its ids."""


def write(folder: Path) -> Path:
    """Write `report.html` into a results folder and return its path. Raises ValueError where `folder` holds no results."""
    results = load_results(folder)
    texts = {path.stem: path.read_text(encoding="utf-8") for path in sorted((folder / "scenarios").glob("*.toml"))}
    path = folder / "report.html"
    write_bytes(path, page(results, texts, partial(workers_of_run, folder)).encode())
    return path


def page(results: Results, scenarios: Mapping[str, str], workers: _Workers = lambda *_: None) -> str:
    """The page for `results`; `scenarios` are the texts of the scenarios as they were run, by name.

    `workers` draws who worked and who waited, as `workers.workers_of_run` does.
    """
    table = summary(results)
    names = list(dict.fromkeys(table["scenario"].to_list()))
    title = f"{_count(results.manifest.get('tuners', []), 'tuner')} on {_count(names, 'scenario')}"
    css = resources.files("reports").joinpath("page.css").read_text(encoding="utf-8")
    sections = [_scenario(i, name, table, results, scenarios.get(name, ""), workers) for i, name in enumerate(names)]
    body = [
        f"<h1>{_text(title)}</h1>",
        f'<p class="lead">{_text(_lead(table))}</p>',
        _contents(names),
        *(_across(results.scores) if len(names) > 1 else []),
        *(sections or ["<p>No run is in this folder yet.</p>"]),
        _how_to_read(),
        _versions(results.manifest),
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{_text(title)}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


# ------------------------------------------------------------------------------------------------------------- sections


def _lead(table: pl.DataFrame) -> str:
    counts = sorted(set(table.group_by("scenario").agg(pl.col("runs").max())["runs"])) if table.height else [0]
    seeds = f"{counts[0]} to {counts[-1]}" if len(counts) > 1 else str(counts[0])
    return (
        f"{seeds} paired seed{'' if seeds == '1' else 's'} per scenario: every tuner meets the same luck. "
        "Times are simulated seconds unless a column says host."
    )


def _contents(names: list[str]) -> str:
    if len(names) < 2:
        return ""
    links = "".join(f'<li><a href="#scenario-{i}">{_text(name)}</a></li>' for i, name in enumerate(names))
    return f'<nav aria-label="Scenarios"><ul><li><a href="#across">All scenarios</a></li>{links}</ul></nav>'


def _across(scores: pl.DataFrame) -> list[str]:
    ranking = ranking_of(scores)
    caution = (
        "Every (scenario, seed) counts as one paired run. Seeds of one scenario resemble each other, so this speaks of "
        "these scenarios, not of those that were not run."
    )
    placed = zip(ranking.tuners, ranking.ranks, ranking.groups, strict=True)
    places = f"Mean ranks: {', '.join(f'{t} {r.estimate:.2f}{_mark(g)}' for t, r, g in placed)}."
    drawn = critical_differences(ranking, "across")
    return [
        '<section aria-labelledby="across"><h2 id="across">All scenarios</h2>',
        f'<div class="finding"><p>{_text(ranking.verdict)}</p><p>{_text(places)}</p><p>{_text(caution)}</p></div>',
        _figure(drawn),
        "</section>",
    ]


def _mark(group: str) -> str:
    return f" ({group})" if group else ""


def _scenario(index: int, name: str, table: pl.DataFrame, results: Results, text: str, workers: _Workers) -> str:
    rows = table.filter(pl.col("scenario") == name)
    here = pl.col("scenario") == name
    scores, evaluations, settings = (f.filter(here) for f in (results.scores, results.evaluations, results.settings))
    found = "".join(f"<p>{_text(said)}</p>" for said in (headline(rows), *against_reference(rows), tally(rows)))
    cautions = "".join(f"<li>{_text(said)}</li>" for said in limits(rows))
    prefix = f"s{index}"
    parts = [
        f'<section aria-labelledby="scenario-{index}"><h2 id="scenario-{index}">{_text(name)}</h2>',
        _what_was_run(text),
        f'<div class="finding">{found}</div>',
        f'<p class="note">What these runs cannot show:</p><ul class="note">{cautions}</ul>',
        _score_table(rows),
        f'<p class="note">{_text(str(rows["verdict"][0]))}</p>',
        "<h3>Completion times</h3>",
        _figure(completion_times(rows, scores, f"{prefix}-times")),
        *_ranks(scores, prefix),
        *_learning(rows, evaluations, text, prefix),
        *_settings(rows["tuner"].to_list(), settings, scores, prefix),
        *_workers(name, rows["tuner"].to_list(), scores, prefix, workers),
        *_failures(scores),
        "</section>",
    ]
    return "\n".join(part for part in parts if part)


def _what_was_run(text: str) -> str:
    if not text:
        return '<p class="note">The scenario\'s text is not in this folder.</p>'
    known = facts(text)
    shown = "".join(f"<dt>{_text(term)}</dt><dd>{_text(value)}</dd>" for term, value in known[1:])
    lead = f"<p>{_text(known[0][1])}</p>" if known and known[0][1] else ""
    whole = f"<details><summary>The scenario as it was run</summary><pre>{_text(text, lines=True)}</pre></details>"
    return f"{lead}{f'<dl>{shown}</dl>' if shown else ''}{whole}"


def _ranks(scores: pl.DataFrame, prefix: str) -> list[str]:
    drawn = critical_differences(ranking_of(scores), f"{prefix}-ranks")
    return ["<h3>Mean ranks</h3>", _figure(drawn)] if drawn else []


def _learning(rows: pl.DataFrame, evaluations: pl.DataFrame, text: str, prefix: str) -> list[str]:
    tuners = rows["tuner"].to_list()
    metric, value = target_of(text) or ("accuracy" if shows_accuracy(rows) else "loss", None)
    other = "loss" if metric == "accuracy" else "accuracy"
    first = learning_curves(evaluations, tuners, metric, f"{prefix}-{metric}", value)
    second = learning_curves(evaluations, tuners, other, f"{prefix}-{other}")
    shown = [] if first is None else [_figure(first)]
    if second is not None:
        shown.append(f"<details><summary>Validation {other} over time</summary>{_figure(second)}</details>")
    return [f"<h3>Validation {metric} over time</h3>", *(shown or ['<p class="note">No run was evaluated.</p>'])]


def _settings(tuners: list[str], settings: pl.DataFrame, scores: pl.DataFrame, prefix: str) -> list[str]:
    shown, still = [], []
    for i, tuner in enumerate(tuners):
        mine = pl.col("tuner") == tuner
        drawn = settings_over_time(settings.filter(mine), scores.filter(mine), f"{prefix}-settings-{i}")
        if drawn is None:
            still += [tuner] if settings.filter(mine).height else []
        else:
            shown.append(f"<details open><summary>{_text(tuner)}</summary>{_figure(drawn)}</details>")
    if still:
        shown.append(f'<p class="note">Kept one setting through every run: {_text(", ".join(still))}.</p>')
    note = f'<p class="note">{_text(SETTINGS_NOTE)}</p>' if len(shown) > bool(still) else ""
    return ["<h3>Settings over time</h3>", note, *shown]


def _workers(scenario: str, tuners: list[str], scores: pl.DataFrame, prefix: str, draw: _Workers) -> list[str]:
    seed = typical_seed(scores)
    drawn = [(tuner, draw(scenario, tuner, seed, f"{prefix}-workers-{i}")) for i, tuner in enumerate(tuners)]
    shown = [f"<details><summary>{_text(tuner)}</summary>{_figure(d)}</details>" for tuner, d in drawn if d is not None]
    note = f'<p class="note">{_text(f"Seed {seed}, under every tuner. {WORKERS_NOTE}")}</p>'
    return ["<h3>Workers over time</h3>", note, *shown] if shown else []


def _failures(scores: pl.DataFrame) -> list[str]:
    lost = scores.filter(~pl.col("reached")).sort("tuner", "seed")
    if not lost.height:
        return []
    cells = "".join(
        f'<tr><th scope="row">{_text(tuner)}</th><td>{seed}</td><td class="text">{_text(status)}</td>'
        f'<td class="text">{_text(reason)}</td></tr>'
        for tuner, seed, status, reason in lost.select("tuner", "seed", "status", "reason").iter_rows()
    )
    head = '<th scope="col">tuner</th><th scope="col">seed</th>'
    head += '<th scope="col" class="text">ended by</th><th scope="col" class="text">reason</th>'
    return [
        "<h3>Runs that did not reach the target</h3>",
        f'<div class="wide"><table><thead><tr>{head}</tr></thead><tbody>{cells}</tbody></table></div>',
    ]


# ---------------------------------------------------------------------------------------------------------------- table


def _score_table(rows: pl.DataFrame) -> str:
    accuracy = shows_accuracy(rows)
    heads = [
        ("tuner", ""),
        ("time", "s"),
        ("ratio", f"to {REFERENCE}"),
        ("regret", f"to {ORACLE}"),
        ("mean rank", "1 is best"),
        ("group", ""),
        ("reached", "runs"),
        ("changes", ""),
        ("overhead", "s"),
        ("trials", "s"),
        ("thinking", "host s"),
        ("branches", "at once"),
        ("final accuracy" if accuracy else "final loss", "mean"),
    ]
    head = "".join(f'<th scope="col">{_text(a)}{f"<br><small>{_text(b)}</small>" if b else ""}</th>' for a, b in heads)
    body = "".join(_score_row(row, accuracy) for row in rows.iter_rows(named=True))
    return (
        '<p class="note">Time, ratio and regret are medians, with their 95 % intervals in small print; from changes on, '
        "means over runs. Branches: as many at once at the most, with the parameters and optimizer slots that servers "
        'then hold.</p><div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    )


def _score_row(row: dict[str, Any], accuracy: bool) -> str:
    def ends(name: str, kind: str) -> str:
        shown, interval = interval_text(row, name, kind)
        return f"{_text(shown)}{f'<small>{_text(interval)}</small>' if interval else ''}"

    oracle = row["role"] == "oracle"
    reached = f"{row['reached']}/{row['runs']}" + (f"<small>{row['failed']} failed</small>" if row["failed"] else "")
    names = ("reconfigurations", "overhead_seconds", "trial_seconds", "thinking_seconds")
    cells = [
        ends("completion_seconds", "completion"),
        "1" if row["role"] == "reference" else ends("ratio", "ratio"),
        "-" if oracle else ends("regret", "regret"),
        "-" if oracle else ends("mean_rank", "rank"),
        "oracle" if oracle else _text(row["group"] or "-"),
        reached,
        *(_text(quantity(row[name])) for name in names),
        f"{_text(quantity(row['branches_peak']))}<small>{_text(quantity(row['branch_bytes_peak'] / 1e6))} MB</small>",
        _text(quantity(row["final_accuracy" if accuracy else "final_loss"])),
    ]
    filled = "".join(f"<td>{cell}</td>" for cell in cells)
    apart = ' class="apart"' if oracle else ""
    return f'<tr{apart}><th scope="row">{_text(row["tuner"])}</th>{filled}</tr>'


# ------------------------------------------------------------------------------------------------------- how to read it


_READING = (
    (
        "Median and interval",
        "Times and ratios are medians over seeds. The interval is a percentile bootstrap: were the comparison repeated "
        "with other seeds, about 95 % of such intervals would hold the true median (fewer with less than six seeds).",
    ),
    (
        f"Ratio to {REFERENCE}",
        "A tuner's time over the reference's on the same seed, then the median: shared luck cancels. Below 1 is faster. "
        "Each interval is at 95 % by itself; with many tuners, expect one of them to miss.",
    ),
    (
        "Censoring",
        "A run that did not reach the target took at least its budget, and no more is known. Where such runs decide a "
        "median it is shown as > that many seconds, and an interval without upper end as ≥ its lower one.",
    ),
    (
        "Failed runs",
        "A run that ended in an error says nothing about time: it is counted, left out of medians and means, and ranked "
        "last.",
    ),
    (
        "Groups",
        "Mean ranks over seeds, Friedman's test, then Nemenyi's critical difference. Tuners that share a letter are not "
        "ranked against each other, whatever their order in the table; no letters mean too few seeds for any ranking.",
    ),
    (
        f"Regret and {ORACLE}",
        "The oracle is the best of many fixed settings, chosen in hindsight: no contestant, and not ranked. Regret is time "
        "over the oracle's on the same seed, less 1; below 0 a tuner beat every fixed setting that was tried.",
    ),
    (
        "What a tuner spends",
        "Changes: settings put in force. Overhead: simulated seconds in which nobody trained because of them. Trials: "
        "simulated seconds of training that did not become part of the final model. Thinking: seconds of the host that "
        "ran the comparison, the only column that differs when the comparison is repeated.",
    ),
)


def _how_to_read() -> str:
    said = "".join(f"<dt>{_text(term)}</dt><dd>{_text(meaning)}</dd>" for term, meaning in _READING)
    source = "J. Demšar, Statistical comparisons of classifiers over multiple data sets, JMLR 7 (2006) 1-30."
    return (
        f'<section aria-labelledby="reading"><h2 id="reading">How to read this page</h2><dl>{said}</dl>'
        f'<p class="note">{_text(source)}</p></section>'
    )


def _versions(manifest: Mapping[str, Any]) -> str:
    drawn = ", ".join(f"{name} {metadata.version(name)}" for name in ("numpy", "scipy", "polars", "matplotlib"))
    version, form = manifest.get("harness", "of unknown version"), manifest.get("schema", "unknown")
    ran = f"Run by harness {version}, results format {form}"
    return f'<footer class="note">{_text(f"{ran}. Page made with {drawn}.")}</footer>'


def _figure(drawing: Drawing | None) -> str:
    return f"<figure>{drawing.svg}<figcaption>{_text(drawing.caption)}</figcaption></figure>" if drawing else ""


def _count(things: Iterable[Any], noun: str) -> str:
    n = len(list(things))
    return f"{n} {noun}{'' if n == 1 else 's'}"


def _text(value: str, *, lines: bool = False) -> str:
    """Text that is safe in HTML: escaped, and without control characters (line ends stay where `lines` says so)."""
    kept = "".join(c if c.isprintable() or c == "\u00a0" or (lines and c in "\n\t") else " " for c in value)
    return html.escape(kept, quote=True)
