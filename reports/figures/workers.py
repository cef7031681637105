"""A drawing of when every worker computes, transfers and waits during a run, as in RLP (Zhu et al. 2020, Fig. 4)."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import polars as pl
from matplotlib.axes import Axes
from matplotlib.patches import PathPatch
from matplotlib.path import Path as Outline
from numpy.typing import NDArray

from harness.comparison.results import run_folder
from reports.figures.drawing import BLUE, MUTED, ORANGE, Drawing, canvas, drawn
from traces.exchanges import Exchange, read_log
from traces.store import SIMULATED_SECONDS
from tuners.actions import Pushes, Window

__all__ = [
    "WORKERS_NOTE",
    "held_at",
    "pushes_of",
    "same_workers_until",
    "silent_seconds",
    "workers_of_run",
    "workers_over_time",
]

_MOST = 1500  # pushes in one drawing, at the most: later ones would be too narrow to see
_ROW = 0.17  # inches per worker
_VISIBLE = 0.0005  # share of the width, about a third of a point

WORKERS_NOTE = (
    "One row per node, numbered in the scenario's order. Blue: computing. Orange, thinner: pulling and pushing, with "
    "waiting for servers and network. Grey, thin: held back by the synchronisation policy, after the last push too, if the "
    "node is then silent for longer than its longest mini-batch. Empty: the node is no worker at that time, or its "
    "mini-batch was cancelled or has not ended."
)
"""How to read the drawings of `workers_over_time`."""


def workers_of_run(
    folder: Path, scenario: str, tuner: str, seed: int, name: str, unit: str = SIMULATED_SECONDS
) -> Drawing | None:
    """The drawing of one run in a results folder; None where its log is missing or holds no push."""
    path = run_folder(folder, scenario, tuner, seed) / "exchanges.jsonl.gz"
    if not path.is_file():
        return None
    exchanges = list(read_log(path))
    return workers_over_time(pushes_of(exchanges), name, same_workers_until(exchanges), unit)


def same_workers_until(exchanges: Iterable[Exchange]) -> float | None:
    """The end of the last window if all windows have the same workers, else None: a node that left has not waited."""
    windows = [e.answer for e in exchanges if isinstance(e.answer, Window)]
    return windows[-1].end_seconds if len({frozenset(w.node for w in x.workers) for x in windows}) == 1 else None


def pushes_of(exchanges: Iterable[Exchange]) -> Pushes | None:
    """All pushes in a log, in its order; None where it holds none."""
    windows = [e.answer.pushes for e in exchanges if isinstance(e.answer, Window) and len(e.answer.pushes.seconds)]
    return Pushes(*(np.concatenate(columns) for columns in zip(*windows, strict=True))) if windows else None


def silent_seconds(pushes: Pushes, end_seconds: float) -> NDArray[np.float64]:
    """How long each worker was held back after its last push, until the run ended; workers in order of their number.

    Pushes do not say whether a worker computes at the end. So only a silence longer than its longest mini-batch counts;
    where their parts were not recorded, none does.
    """
    nodes, rows = np.unique(pushes.worker, return_inverse=True)
    last, longest = np.zeros((2, len(nodes)))
    np.maximum.at(last, rows, pushes.seconds)
    took = pushes.compute_seconds + pushes.pull_seconds + pushes.push_seconds
    np.maximum.at(longest, rows, np.where(np.isnan(took), np.inf, took))
    silent: NDArray[np.float64] = np.where(end_seconds - last > longest, end_seconds - last, 0.0)
    return silent


def held_at(pushes: Pushes, moment_seconds: float, end_seconds: float | None) -> NDArray[np.float64]:
    """From when to when each worker was held back up to a moment, [workers, 2]; empty, at the moment, for one that was not.

    A drawing that ends at the moment would miss these waits: the push that tells of a wait comes after it, or never. With
    `end_seconds`, the end of a run with the same workers throughout, a wait may last until then.
    """
    nodes, rows = np.unique(pushes.worker, return_inverse=True)
    found = np.full((len(nodes), 2), moment_seconds)
    released = pushes.seconds - pushes.push_seconds - pushes.compute_seconds - pushes.pull_seconds
    since = released - pushes.wait_seconds
    some = (since < moment_seconds) & (pushes.seconds > moment_seconds) & (pushes.wait_seconds > 0)
    found[rows[some]] = np.stack([since[some], np.minimum(released[some], moment_seconds)], axis=1)
    if end_seconds is not None:
        end = max(end_seconds, float(pushes.seconds.max()))
        silent_since = end - silent_seconds(pushes, end)
        found[silent_since < moment_seconds, 0] = silent_since[silent_since < moment_seconds]
    return found


def workers_over_time(
    pushes: Pushes | None, name: str, end_seconds: float | None = None, unit: str = SIMULATED_SECONDS
) -> Drawing | None:
    """Every worker's completed cycles; of a long run, only the beginning. None without pushes.

    With `end_seconds`, the end of a run with the same workers throughout, waiting until then counts, too.
    """
    if pushes is None or not len(pushes.seconds):
        return None
    columns: Any = [column[:_MOST] for column in pushes]
    shown = Pushes(*columns)
    nodes = np.unique(pushes.worker)
    rows = np.searchsorted(nodes, shown.worker)
    end = shown.seconds
    whole = len(shown.seconds) == len(pushes.seconds)
    last = float(end[-1]) if end_seconds is None or not whole else max(end_seconds, float(end[-1]))
    since_push, since_compute = end - shown.push_seconds, end - shown.push_seconds - shown.compute_seconds
    since_pull = since_compute - shown.pull_seconds
    held = held_at(pushes, last, end_seconds)
    with canvas(0.75 + _ROW * len(nodes), left=0.6, top=0.1) as figure:
        axes = figure.add_subplot()
        _bars(axes, rows, since_pull - shown.wait_seconds, since_pull, MUTED, 3)
        _bars(axes, np.arange(len(nodes)), held[:, 0], held[:, 1], MUTED, 3)
        _bars(axes, rows, since_pull, since_compute, ORANGE, 5)
        _bars(axes, rows, since_push, end, ORANGE, 5)
        # A gap behind every bar, so that a reader can count the steps.
        gap = np.minimum(2 * _VISIBLE * end[-1], 0.2 * shown.compute_seconds)
        _bars(axes, rows, since_compute, since_push - gap, BLUE, 8)
        axes.set_yticks(range(len(nodes)), [str(n) for n in nodes])
        axes.set_ylim(len(nodes) - 0.4, -0.6)
        axes.set_xlim(0, last)
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(unit)
        axes.set_ylabel("node")
        return drawn(figure, name, _caption(pushes, shown, nodes, end_seconds), _data(shown))


def _caption(pushes: Pushes, shown: Pushes, nodes: NDArray[Any], end_seconds: float | None) -> str:
    steps = ", ".join(str(int((shown.worker == node).sum())) for node in nodes)
    end = float(pushes.seconds.max())
    silent = 0.0
    if end_seconds is not None:
        end = max(end, end_seconds)
        silent = float(silent_seconds(pushes, end).sum())
    idle = (pushes.wait_seconds.sum() + silent) / (len(nodes) * end)
    few, many = len(shown.seconds), len(pushes.seconds)
    what, when = (f"{many} pushes", "") if few == many else (f"The first {few} of {many} pushes", " in the whole run")
    return f"{what}; by node: {steps}. Held back by the policy: {idle:.1%} of the workers' time{when}."


def _bars(axes: Axes, rows: NDArray[Any], start: NDArray[Any], end: NDArray[Any], color: str, width: float) -> None:
    """All visible bars of one colour as one path: a shape per bar would take ten times the bytes."""
    some = end - start > _VISIBLE * end[-1]
    if not some.any():
        return
    ends = np.stack([start[some], end[some]], axis=1)
    corners = np.stack([ends, np.repeat(rows[some, None], 2, axis=1)], axis=2).reshape(-1, 2)
    codes = np.tile([Outline.MOVETO, Outline.LINETO], len(ends))
    outline = Outline(corners, codes)
    outline.should_simplify = False  # it would join bars that are near each other
    drawn = PathPatch(outline, fill=False, edgecolor=color, linewidth=width, capstyle="butt")
    drawn.set_snap(False)
    axes.add_patch(drawn)


def _data(shown: Pushes) -> pl.DataFrame:
    """The pushes that are drawn."""
    return pl.DataFrame(dict(zip(Pushes._fields, shown, strict=True)))
