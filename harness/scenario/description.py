"""The record that a scenario's file is parsed into; apart from the parser, so that every module here can import it."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from harness.scenario.tables import BudgetTable, RecordedTable, RulesTable, SeedsTable, StartTable, WorkloadTable
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.reconfiguration.costs import Costs
from tuners.actions import Target
from tuners.settings import Knob

__all__ = ["Scenario"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """A scenario: what one TOML file says, checked."""

    name: str
    origin: Path  # the file that it was read from; relative paths in the text start at its folder
    text: str
    summary: str
    cluster: Cluster
    workload: WorkloadTable
    start: StartTable
    knobs: tuple[Knob, ...]
    target: Target
    check_clocks: int
    budget: BudgetTable
    conditions: Conditions
    costs: Costs
    seeds: SeedsTable
    rules: RulesTable = field(default_factory=RulesTable)
    recorded: RecordedTable | None = None  # recorded runs, which answer in place of a simulator of all the above
    draw: int = 0  # of the calibrated constants, from 1 on; 0: as they were fitted
    restart_seconds: float | None = None  # with `recorded` only: of a change; None is as recorded
