"""Scenarios of recorded runs: a table of recorded runs answers the tuner in place of the simulator (`traces.replay`)."""

from __future__ import annotations

import math
import textwrap
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from simulators.cluster.cluster import Cluster
from simulators.cluster.profiles import Device, NodeType
from tuners.actions import Job, Rejected, Setting

if TYPE_CHECKING:
    from harness.scenario.description import Scenario
    from harness.scenario.tables import RecordedTable
    from traces.recorded_runs import Recorded
    from traces.replay import RecordedSystem

__all__ = ["CLUSTER", "check_target", "job", "show", "system"]

_PLACEHOLDER = NodeType("recorded", 1, 1e9, 1e9, (Device("cpu", 1.0),), "stands for what was recorded")
CLUSTER = Cluster((("workers", _PLACEHOLDER), ("servers", _PLACEHOLDER)))
"""The cluster of every recorded scenario: recordings do not name their machines."""


def job(scenario: Scenario, table: RecordedTable, seed: int) -> Job:
    """The job as tuners see it. Raises ValueError if there are no such runs, or none under the start setting."""
    from traces.recorded_runs import recorded_job

    try:
        return recorded_job(
            scenario.name,
            list(_runs_of(scenario, table)),
            target=scenario.target,
            budget_seconds=scenario.budget.seconds,
            budget_usd=math.inf if scenario.budget.usd is None else scenario.budget.usd,
            seed=seed,
            samples=table.samples,
            start=table.start,
        )
    except Rejected as error:
        raise ValueError(f"start: {error}") from None


def check_target(scenario: Scenario, table: RecordedTable) -> None:
    """Raise ValueError where no run says what the target is about: it could never be reached."""
    metric = scenario.target.metric
    runs = _runs_of(scenario, table)
    if (metric == "samples" or table.samples) and (silent := sum("batch_size" in run.untold for run in runs)):
        raise ValueError(
            f"metric: {silent} of {len(runs)} recorded runs do not tell batch_size, so samples cannot be counted; write it "
            "in the table settings, or count clocks, and leave out samples under [recorded]."
        )
    if metric == "clocks" and scenario.target.value > (most := max(run.clocks for run in runs)):
        raise ValueError(f"value: no recorded run has {scenario.target.value:g} steps; give at most {most}.")
    if scenario.target.counts:
        return
    if all(math.isnan(getattr(seen, metric)) for run in runs for seen in run.evaluations):
        raise ValueError(
            f"metric: no recorded run says its {metric}; record it (in the table runs, or progress), or choose another one."
        )


def system(scenario: Scenario, table: RecordedTable, seed: int, start: Setting | None) -> RecordedSystem:
    """A fresh system of recorded runs. Raises ValueError if no run was recorded under `start`."""
    from traces.replay import RecordedSystem

    made = job(scenario, table, seed)
    try:
        began = made if start is None else replace(made, start=start)
        return RecordedSystem(began, list(_runs_of(scenario, table)), restart_seconds=scenario.restart_seconds)
    except Rejected as error:
        raise ValueError(str(error)) from None


def show(scenario: Scenario, table: RecordedTable) -> str:
    """The scenario's file under a comment that summarises the recorded runs."""
    from traces.recorded_runs import change_seconds, left_out
    from traces.shipped import locate

    seen, runs = job(scenario, table, 0), _runs_of(scenario, table)
    count, recorded = len(runs), change_seconds(runs)
    lacking = left_out(locate(table.trace, scenario.origin.parent), table.workload, table.runs, runs)
    values, settings = seen.space.values(seen.start), len(seen.space.recorded)
    said = [
        f"{scenario.name}: {scenario.summary}",
        f"{count} recorded runs under {settings} settings; starts with {', '.join(f'{k} {v}' for k, v in values.items())}",
        *(
            [f"left out: {lacking} further runs, without seconds, steps or a setting, or with several settings"]
            * bool(lacking)
        ),
        f"free: {', '.join(k.name for k in seen.space.knobs) or 'nothing'}",
        *([] if settings < 2 else [_change(scenario.restart_seconds, recorded)]),
    ]
    lines = [line for text in said for line in textwrap.wrap(text, 110, subsequent_indent="  ")]
    return "".join(f"# {line}\n" for line in lines) + "\n" + scenario.text


def _change(given: float | None, recorded: float | None) -> str:
    if given is not None or recorded is not None:
        return f"a change to another run takes {recorded if given is None else given:g} s"
    return "a change to another run takes no time, as none was recorded: give restart_seconds under [costs]"


def _runs_of(scenario: Scenario, table: RecordedTable) -> tuple[Recorded, ...]:
    from traces.shipped import locate

    folder = locate(table.trace, scenario.origin.parent)
    return _runs(folder, table.workload, table.runs, _files(folder))


def _files(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Name, size and time of change of every file, which differ where a trace was written again."""
    found = ((str(path), path.stat()) for path in sorted(folder.rglob("*")) if path.is_file())
    return tuple((name, seen.st_size, seen.st_mtime_ns) for name, seen in found)


@lru_cache(maxsize=32)
def _runs(folder: Path, workload: str, pattern: str, files: tuple[Any, ...]) -> tuple[Recorded, ...]:
    from traces.recorded_runs import recorded_runs

    del files  # they are a part of the cache's key

    return tuple(recorded_runs(folder, workload, pattern))
