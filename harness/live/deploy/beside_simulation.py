"""Compares a live run with the same run in the simulator: completion time, iteration time, reconfigurations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass

from rich import box
from rich.table import Table
from rich.text import Text

from harness.drive import Played
from harness.score import score
from traces.exchanges import Exchange
from tuners.actions import Cost, Reconfigure, Window

__all__ = ["RunFigures", "beside", "measured"]

_PARTS = ("compute", "pull", "push", "wait")
_DECIMALS = 9  # of seconds: a part that takes no time is a rest of rounding in simulation, and no measure for a ratio


@dataclass(frozen=True, slots=True)
class RunFigures:
    """The compared figures of a run; nan if the run had nothing of the kind."""

    completion_seconds: float
    reached: bool
    clocks: int
    iteration_seconds: float  # mean of a worker's cycle: compute, pull, push and wait
    part_seconds: tuple[float, float, float, float]  # means, in this order
    changes: int  # reconfigurations that the tuner asked for and that were carried out
    change_seconds: float  # mean, from the request until the new setting is in force
    stall_seconds: float  # mean: time in which nobody trained
    bytes_moved: float  # mean
    final_accuracy: float
    final_loss: float


def measured(played: Played, exchanges: Iterable[Exchange]) -> RunFigures:
    """The figures of one run. `exchanges` are all of it, with their pushes; they are read once."""
    row = score(played, scenario=played.job.name, tuner="", seed=played.job.seed).score
    clocks, sums = 0, [0.0] * len(_PARTS)
    for exchange in exchanges:
        if isinstance(window := exchange.answer, Window):
            clocks += len(window.pushes.seconds)
            sums = [s + math.fsum(getattr(window.pushes, f"{p}_seconds")) for s, p in zip(sums, _PARTS, strict=True)]
    parts = [round(s / clocks, _DECIMALS) if clocks else math.nan for s in sums]
    costs = [c for c in _costs(played) if c.done and c.seconds > 0]
    return RunFigures(
        completion_seconds=row.completion_seconds,
        reached=row.reached,
        clocks=row.clocks,
        iteration_seconds=math.fsum(parts),
        part_seconds=(parts[0], parts[1], parts[2], parts[3]),
        changes=len(costs),
        change_seconds=_mean([c.seconds for c in costs]),
        stall_seconds=_mean([c.stall_seconds for c in costs]),
        bytes_moved=_mean([c.bytes_moved for c in costs]),
        final_accuracy=row.final_accuracy,
        final_loss=row.final_loss,
    )


def _costs(played: Played) -> Iterator[Cost]:
    for exchange in played.exchanges:
        if isinstance(exchange.action, Reconfigure) and isinstance(exchange.answer, Cost):
            yield exchange.answer
        elif isinstance(exchange.answer, Window):
            yield from exchange.answer.changes


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values) if values else math.nan


def beside(live: RunFigures, simulated: RunFigures) -> Table:
    """A table with a column for each run, and one with the ratio of live to simulated."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("")
    for head in ("live", "simulated", "live / simulated"):
        table.add_column(head, justify="right")
    rows: list[tuple[str, float, float, str]] = [
        ("completion time", live.completion_seconds, simulated.completion_seconds, "s"),
        ("clocks", live.clocks, simulated.clocks, ""),
        ("iteration time", live.iteration_seconds, simulated.iteration_seconds, "ms"),
    ]
    rows += [
        (f"  {name}", mine, theirs, "ms")
        for name, mine, theirs in zip(_PARTS, live.part_seconds, simulated.part_seconds, strict=True)
    ]
    rows += [("reconfigurations", live.changes, simulated.changes, "")]
    if live.changes or simulated.changes:
        rows += [
            ("  time of one", live.change_seconds, simulated.change_seconds, "s"),
            ("  stall", live.stall_seconds, simulated.stall_seconds, "s"),
            ("  moved", live.bytes_moved, simulated.bytes_moved, "kB"),
        ]
    rows += [
        ("accuracy at the end", live.final_accuracy, simulated.final_accuracy, ""),
        ("loss at the end", live.final_loss, simulated.final_loss, ""),
    ]
    for name, mine, theirs, unit in rows:
        ratio = mine / theirs if theirs else math.nan
        table.add_row(name, _shown(mine, unit), _shown(theirs, unit), "-" if math.isnan(ratio) else f"{ratio:.2f}")
    missed = [name for name, run in (("live", live), ("in simulation", simulated)) if not run.reached]
    if missed:
        note = f"The target was not reached {' nor '.join(missed)}; completion time is the budget then."
        table.caption, table.caption_justify = Text(note), "left"
    return table


def _shown(value: float, unit: str) -> str:
    if math.isnan(value):
        return "-"
    scaled = value * {"ms": 1e3, "kB": 1e-3}.get(unit, 1.0)
    number = f"{scaled:,.0f}" if scaled == int(scaled) and unit in ("", "kB") else f"{scaled:.3g}"
    return f"{number} {unit}".strip()
