"""The page of `harness fidelity`: predicted against recorded, per recording, on rows fitted and on rows held out."""

from __future__ import annotations

import html
import math
from collections.abc import Callable, Sequence
from importlib import resources
from pathlib import Path
from typing import NamedTuple

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.ticker import NullLocator
from scipy.stats import kendalltau

from reports.drawing import BLUE, GREEN, MUTED, ORANGE, Drawing, canvas, svg
from simulators.calibration.validation import COMPLETION, Check, Prediction
from traces.store import write_bytes

__all__ = ["Errors", "errors", "page", "tables", "write"]

_RULE = (
    "Every row is held out once, in {0} folds. A workload with ten settings or more is divided by settings, in order "
    "of policy, workers, servers, batch and threads: setting i is in fold i mod {0}, with all its runs. One with "
    "fewer is divided by rows in that order, runs of a setting by name. A row's prediction comes from constants that were "
    "fitted without its fold; only how compute times vary, how fast workers are beside one another, and the usual link "
    "where the trace tells it are of the whole recording. Nothing is drawn by chance."
)
_PLAIN = (
    "The plain closed form is a sum, with no constant below nothing, of a fixed cost, one by samples over threads, one per "
    "server and one by workers over servers, fitted to the same rows; for switches it is the mean."
)


_COMPLETION = (
    "Seconds from the first mini-batch under a setting to the last before the next change, for as many mini-batches as "
    "were recorded: the simulator begins with that setting and does as many. Changes themselves are not in it."
)


class Errors(NamedTuple):
    """How far predictions of one group are from what was recorded, relative."""

    rows: int
    median: float
    p95: float
    tau: float  # Kendall's, of predicted and recorded; nan where fewer than three settings differ


def errors(made: Sequence[Prediction], which: Callable[[Prediction], float]) -> Errors:
    """Of the predictions that `which` picks; those that could not be made do not count."""
    pairs = [(which(p), p.recorded, p.label) for p in made if math.isfinite(which(p))]
    if not pairs:
        return Errors(0, math.nan, math.nan, math.nan)
    off = np.array([abs(a / b - 1) for a, b, _ in pairs])
    told = len({label for *_, label in pairs}) >= 3
    tau = float(kendalltau([a for a, *_ in pairs], [b for _, b, _ in pairs]).statistic) if told else math.nan
    return Errors(len(pairs), float(np.median(off)), float(np.quantile(off, 0.95)), tau)


_KINDS: tuple[tuple[str, Callable[[Prediction], float]], ...] = (
    ("simulator, fitted", lambda p: p.fitted),
    ("simulator, held out", lambda p: p.held_out),
    ("plain closed form, fitted", lambda p: p.plain_fitted),
    ("plain closed form, held out", lambda p: p.plain_held_out),
)


def tables(checks: Sequence[Check]) -> list[str]:
    """The same as plain text for a terminal, a table per recording."""
    found = []
    for made in checks:
        lines = [f"{made.origin.source} ({made.origin.of})", f"{'':34}{'rows':>6}{'median':>9}{'95th %':>9}{'tau':>7}"]
        for group, rows in _groups(made):
            lines.append(group)
            lines += [f"  {name:32}{_cells(errors(rows, which))}" for name, which in _KINDS]
        found.append("\n".join([*lines, *(f"note: {why}" for why in made.caveats), ""]))
    return found


def _cells(e: Errors) -> str:
    return f"{e.rows:>6}{_percent(e.median):>9}{_percent(e.p95):>9}{'-' if math.isnan(e.tau) else f'{e.tau:.2f}':>7}"


def _percent(value: float) -> str:
    return "-" if math.isnan(value) else f"{value:.1%}"


def _groups(made: Check) -> list[tuple[str, list[Prediction]]]:
    names = dict.fromkeys(p.group for p in made.predictions)
    return [(name, [p for p in made.predictions if p.group == name]) for name in names]


# ----------------------------------------------------------------------------------------------------------------- page


def write(folder: Path, checks: Sequence[Check], findings: str = "") -> Path:
    """Write `fidelity.html` and every prediction, `predictions.csv`, into a folder; the page's path.

    `findings` are what whoever looked into the differences found: paragraphs, with empty lines between them.
    """
    folder.mkdir(parents=True, exist_ok=True)
    rows = [
        {"source": c.origin.source} | {name: getattr(p, name) for name in Prediction.__slots__}
        for c in checks
        for p in c.predictions
    ]
    write_bytes(folder / "predictions.csv", pl.DataFrame(rows, infer_schema_length=None).write_csv().encode())
    path = folder / "fidelity.html"
    write_bytes(path, page(checks, findings).encode())
    return path


def page(checks: Sequence[Check], findings: str = "") -> str:
    """The page: what was found, a section per recording, with a table and a drawing, and how it was made."""
    css = resources.files("reports").joinpath("page.css").read_text(encoding="utf-8")
    title = "How far the simulator is from recorded clusters"
    folds = " or ".join(sorted({str(made.folds) for made in checks}))
    body = [
        f"<h1>{title}</h1>",
        f'<p class="lead">{_text(_lead(checks))}</p>',
        _found(findings),
        *(_section(i, made) for i, made in enumerate(checks)),
        '<section aria-labelledby="how"><h2 id="how">How to read this page</h2><dl>',
        f"<dt>Held out</dt><dd>{_text(_RULE.format(folds))}</dd><dt>Plain closed form</dt><dd>{_text(_PLAIN)}</dd>",
        "<dt>Error</dt><dd>|predicted / recorded - 1| of a worker's cycle (of a step, in a synchronous run), one push to "
        "the next: its median and 95th percentile over rows.</dd>",
        f"<dt>Completion</dt><dd>{_text(_COMPLETION)}</dd>" if _completes(checks) else "",
        "<dt>tau</dt><dd>Kendall's rank correlation of predicted and recorded: 1 says that settings are ranked as they were "
        "recorded. It is left out where fewer than three settings differ.</dd></dl></section>",
    ]
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{title}</title>\n<style>\n{css}</style>\n</head>\n<body>\n<main>\n"
        + "\n".join(body)
        + "\n</main>\n</body>\n</html>\n"
    )


def _completes(checks: Sequence[Check]) -> bool:
    return any(p.group.endswith(COMPLETION) for c in checks for p in c.predictions)


def _title(made: Check) -> str:
    """What it is a recording of, where it is one of our own; else its source."""
    return made.origin.of.partition(",")[0] if made.origin.source == "harness" else made.origin.source


def _lead(checks: Sequence[Check]) -> str:
    rows = sum(len(c.predictions) for c in checks)
    count = f"{len(checks)} recording{'s' * (len(checks) != 1)}, {rows} rows"
    return f"{count}; predicted by the simulator, and by a plain closed form."


def _found(findings: str) -> str:
    paragraphs = [f"<p>{_text(' '.join(p.split()))}</p>" for p in findings.split("\n\n") if p.strip()]
    head = '<section aria-labelledby="why"><h2 id="why">Where they part, and why</h2>'
    return "\n".join([head, *paragraphs, "</section>"]) if paragraphs else ""


def _section(index: int, made: Check) -> str:
    groups = _groups(made)
    divided = f"Divided by settings: {', '.join(made.by_settings) or 'none'}; the others by rows."
    left = "".join(f"<li>{_text(why)}</li>" for why in made.caveats)
    origin = f"{made.origin.of}. Licence: {made.origin.licence or 'none stated'}. SHA-256 {made.origin.digest}."
    parts = [
        f'<section aria-labelledby="r{index}"><h2 id="r{index}">{_text(_title(made))}</h2>',
        f'<div class="finding"><p>{_text(_worst(groups))}</p><p>{_text(divided)}</p></div>',
        _table(groups),
        _figure(_drawn(groups, f"r{index}")),
        _constants(made),
        f'<p class="note">To be read with care:</p><ul class="note">{left}</ul>' if left else "",
        f'<p class="note">{_text(origin)}</p></section>',
    ]
    return "\n".join(part for part in parts if part)


def _worst(groups: Sequence[tuple[str, list[Prediction]]]) -> str:
    """What is said of the largest error of a group, and of groups that the other folds could not tell."""
    medians = [errors(rows, lambda p: p.held_out).median for _, rows in groups]
    told = [median for median in medians if math.isfinite(median)]
    if not told:
        return ""
    but = f" but {len(medians) - len(told)}, of which the other folds tell nothing" if len(told) < len(medians) else ""
    return f"Held out, the median error is at most {_percent(max(told))} in every group{but}."


def _table(groups: Sequence[tuple[str, list[Prediction]]]) -> str:
    heads = "".join(
        f'<th scope="col">{name}</th>'
        for name in (
            "group",
            "rows",
            *(f"{k}<br><small>median / 95th</small>" for k, _ in _KINDS),
            "tau<br><small>held out</small>",
        )
    )
    body = []
    for name, rows in groups:
        found = [errors(rows, which) for _, which in _KINDS]
        cells = "".join(f"<td>{_percent(e.median)} / {_percent(e.p95)}</td>" for e in found)
        tau = "-" if math.isnan(found[1].tau) else f"{found[1].tau:.2f}"
        body.append(f'<tr><th scope="row">{_text(name)}</th><td>{len(rows)}</td>{cells}<td>{tau}</td></tr>')
    return f'<div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{"".join(body)}</tbody></table></div>'


def _constants(made: Check) -> str:
    body = []
    for name, fit in made.fits.items():
        told = [(c, getattr(fit.constants, c), f"{low:.3g} to {high:.3g}") for c, (low, high) in fit.intervals.items()]
        told += [(c, value, "from other workloads") for c, value in fit.borrowed.items()]
        for constant, value, interval in told:
            cells = f'<td class="text">{constant}</td><td>{value:.4g}</td><td>{interval}</td>'
            body.append(f'<tr><th scope="row">{_text(name)}</th>{cells}</tr>')
    said = [f"{name}, {constant}: {why}" for name, fit in made.fits.items() for constant, why in fit.refused.items()]
    refused = "".join(f"<li>{_text(why)}</li>" for why in said)
    head = '<th scope="col">workload</th><th scope="col" class="text">constant</th>'
    head += '<th scope="col">value</th><th scope="col">95 % interval</th>'
    return (
        '<details><summary>Constants fitted to all rows</summary><div class="wide"><table>'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div></details>"
        f'<details><summary>Constants that this recording cannot tell</summary><ul class="note">{refused}</ul></details>'
    )


def _panel(axes: Axes, title: str, rows: Sequence[Prediction]) -> None:
    recorded = np.array([p.recorded for p in rows])
    both = [p.recorded for p in rows] + [p.held_out for p in rows if math.isfinite(p.held_out)]
    ends = np.array([min(both) / 1.1, max(both) * 1.1])
    axes.fill_between(ends, ends / 1.1, ends * 1.1, color=MUTED, alpha=0.18, linewidth=0)
    axes.plot(ends, ends, color=MUTED, linewidth=0.8)
    for marker, color, which in (("x", ORANGE, "plain_held_out"), ("o", BLUE, "held_out"), (".", GREEN, "fitted")):
        predicted = np.array([getattr(p, which) for p in rows])
        style = "none" if marker == "o" else "full"
        axes.plot(recorded, predicted, marker, color=color, markersize=4, fillstyle=style, markeredgewidth=0.9)
    axes.set_title(title, loc="left", fontsize=9, fontweight="bold")
    axes.set_xlim(*ends)
    axes.set_ylim(*ends)
    if ends[1] > 2.5 * ends[0]:
        axes.set_xscale("log")
        axes.set_yscale("log")
        ticks = [float(f"{x:.1g}") for x in np.geomspace(ends[0] * 1.15, ends[1] / 1.15, 4)]
        axes.set_xticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        axes.set_yticks(ticks, [f"{x:g}" for x in ticks], minor=False)
        axes.xaxis.set_minor_locator(NullLocator())
        axes.yaxis.set_minor_locator(NullLocator())


def _drawn(groups: Sequence[tuple[str, list[Prediction]]], name: str) -> Drawing:
    """Predicted against recorded, a panel per group."""
    jobs = {group.partition(", ")[0] for group, _ in groups if ", " in group}
    common = f"{jobs.pop()}, " if len(jobs) == 1 else ""  # which the section is about
    columns = min(4, len(groups))
    lines = -(-len(groups) // columns)
    with canvas(0.7 + 2.3 * lines, left=0.75, gaps=0.42, bottom=0.5) as figure:
        figure.subplots_adjust(wspace=0.3)
        grid = figure.subplots(lines, columns, squeeze=False)
        for axes, (group, rows) in zip(grid.flat, groups, strict=False):
            _panel(axes, group.removeprefix(common), rows)
        for axes in grid.flat[len(groups) :]:
            axes.set_visible(False)
        figure.supxlabel("recorded, seconds", fontsize=9)
        figure.supylabel("predicted, seconds", fontsize=9, x=0.01)
        caption = (
            "Predicted against recorded seconds, a panel per group. Blue rings: simulator, held out; green dots: simulator, "
            "fitted to all rows; orange crosses: plain closed form, held out. On the line both are equal; in the grey band "
            "they differ by at most 10 %."
        )
        return Drawing(svg(figure, name, caption), caption)


def _figure(drawing: Drawing) -> str:
    return f"<figure>{drawing.svg}<figcaption>{_text(drawing.caption)}</figcaption></figure>"


def _text(value: str) -> str:
    return html.escape("".join(c if c.isprintable() else " " for c in value), quote=True)
