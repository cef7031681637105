"""How far a comparison is, from what its finished runs took: the time that is left, the work in a run, the standing so far.

A run mostly ends long before its budget, so its share of the work is its time over the expected one: the median of finished
runs of the same tuner, else of all tuners on that scenario, else the budget.
"""

from __future__ import annotations

import re
from collections import defaultdict
from dataclasses import dataclass
from statistics import median

from harness.comparison.compare import Finished, Planned, RunKey, Underway
from harness.comparison.run_process import GIVEN_UP
from traces.schema import NOT_APPLICABLE

__all__ = ["Forecast", "Standing"]


@dataclass(frozen=True, slots=True)
class Standing:
    """One tuner on one scenario, so far."""

    tuner: str
    seconds: float  # median completion time; a run that missed its target counts with its budget
    finished: int
    missed: int  # of these, runs that did not reach the target


class Forecast:
    """Takes every event of a comparison, with the host's clock, and forecasts the rest."""

    def __init__(self) -> None:
        self._left: set[RunKey] = set()
        self._contestants: tuple[str, ...] = ()
        self._since: dict[RunKey, float] = {}  # when a run in progress was first heard of, on the host's clock
        self._wall: dict[tuple[str, str], list[float]] = defaultdict(list)  # host seconds, by scenario and tuner
        self._done: dict[tuple[str, str], list[tuple[float, bool]]] = defaultdict(list)  # completion, target reached

    def add(self, event: Planned | Underway | Finished, now: float) -> None:
        """Note an event that came at `now`, in seconds of any steady clock."""
        if isinstance(event, Planned):
            self._left, self._contestants = set(event.left), event.contestants
        elif isinstance(event, Underway):
            self._since.setdefault(event.run, now)
        else:
            key = _group(event.run)
            self._left.discard(event.run)
            self._since.pop(event.run, None)
            self._wall[key].append(event.done.wall_seconds)
            if event.done.status not in ("error", GIVEN_UP, NOT_APPLICABLE):
                self._done[key].append((event.done.completion_seconds, event.done.status == "target"))

    def share(self, event: Underway) -> float:
        """The part of a run's expected work that is done, 0 to 1; below 1 until the run is over."""
        scenario, tuner = _group(event.run)
        same = [seconds for seconds, _ in self._done.get((scenario, tuner), ())]
        others = [seconds for (where, _), runs in self._done.items() if where == scenario for seconds, _ in runs]
        expected = median(same or others or [event.progress.budget_seconds])
        return min(event.progress.seconds / expected, 0.99) if expected > 0 else 0.0

    def left_seconds(self, now: float) -> float | None:
        """The host seconds until all runs are over, roughly; None before the first run is."""
        known = [wall for walls in self._wall.values() for wall in walls]
        if not known:
            return None
        usual = median(known)
        each = {run: median(self._wall.get(_group(run)) or [usual]) for run in self._left}
        rest = {run: max(each[run] - (now - self._since.get(run, now)), 0.0) for run in self._left}
        longest = max((rest[run] for run in self._since if run in rest), default=0.0)
        return max(sum(rest.values()) / max(len(self._since), 1), longest)

    def standings(self, scenario: str) -> list[Standing]:
        """The contestants that have finished a run on `scenario`, the fastest first."""
        found = []
        for (where, tuner), runs in self._done.items():
            if where == scenario and runs and tuner in self._contestants:
                missed = sum(not reached for _, reached in runs)
                found.append(Standing(tuner, median(seconds for seconds, _ in runs), len(runs), missed))
        return sorted(found, key=lambda s: (s.seconds, s.tuner))


def _group(run: RunKey) -> tuple[str, str]:
    """Scenario and tuner; the candidates of a reference (`harness.comparison.results.candidate_name`) count as one."""
    return run.scenario, re.sub(r"\+[0-9a-f]{8}$", "", run.tuner)
