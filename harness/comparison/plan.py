"""What a comparison plays: its scenarios, tuners and seeds, checked, and the runs that follow from them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from harness.comparison import oracle
from harness.comparison.run_process import Task
from harness.families import drawn, members, single
from harness.scenario import Scenario, building, load, matching, own_model
from harness.scenario.tables import MOST_SEEDS
from harness.version import HARNESS_VERSION
from traces.schema import VERSION
from tuners import Entry

__all__ = ["Plan", "check_each_once", "oracle_tasks", "planned"]


@dataclass(frozen=True, slots=True)
class Plan:
    """What a comparison plays."""

    scenarios: tuple[Scenario, ...]
    entries: tuple[Entry, ...]
    counts: dict[str, int]  # seeds of each scenario
    draws: dict[str, list[str]]  # by scenario: those that differ from it in a draw of its calibrated constants
    entries_of: dict[str, tuple[Entry, ...]]  # by scenario: those that are played there
    tasks: tuple[Task, ...]
    own_models: dict[str, str]  # by scenario: digest of the user's file that its model is in; "": it is in none

    @property
    def contestants(self) -> tuple[str, ...]:
        """The tuners, without references that are chosen in hindsight."""
        return tuple(e.name for e in self.entries if e.contestant)

    def manifest(self, seeds: int | None) -> dict[str, Any]:
        """What the folder's `manifest.json` says about these runs; `seeds` as they were asked for."""
        return {
            "harness": HARNESS_VERSION,
            "schema": VERSION,
            "scenarios": [s.name for s in self.scenarios],
            "tuners": [e.name for e in self.entries],
            "oracles": [e.name for e in self.entries if not e.contestant],
            "seeds": seeds or max(self.counts.values()),
            "seeds_of": self.counts,
        } | ({"draws": self.draws} if self.draws else {})


def check_each_once(what: str, names: Sequence[str]) -> None:
    """Raise ValueError where one of the `names` of scenarios or tuners is given twice; `what` says of which of the two."""
    if twice := sorted({n for n in names if names.count(n) > 1}):
        raise ValueError(f"Cannot compare {what} {twice[0]!r} with itself: name each once, and files by different names.")


def planned(
    scenarios: Sequence[str | Path | Scenario],
    entries: tuple[Entry, ...],
    seeds: int | None,
    system: str,
    calibration_draws: int,
    *,
    record: bool,
) -> Plan:
    """The runs of a comparison, checked. Raises ValueError where a scenario, a tuner or a number does not fit."""
    if not scenarios or not entries:
        raise ValueError("Cannot compare nothing: name at least one scenario and one tuner.")
    if seeds is not None and not 1 <= seeds <= MOST_SEEDS:
        advice = "at least 1" if seeds < 1 else f"at most {MOST_SEEDS}"
        raise ValueError(f"Cannot compare on {seeds} seeds: give {advice}.")
    if calibration_draws < 0:
        raise ValueError(f"Cannot draw constants {calibration_draws} times: give at least 1, or 0 for none.")
    drawn.keep_goals([name for many in scenarios for name in _members(many)])
    given = [s if isinstance(s, Scenario) else load(s) for many in scenarios for s in _each(many)]
    variants = {s.name: list(_under_draws(s, calibration_draws)) for s in given} if calibration_draws else {}
    loaded = tuple(each for s in given for each in (s, *variants.get(s.name, ())))
    check_each_once("scenario", [s.name for s in loaded])
    check_each_once("tuner", [e.name for e in entries])
    counts = {s.name: seeds or s.seeds.count for s in loaded}
    draws = {name: [s.name for s in each] for name, each in variants.items()}
    # Draws are there to compare contestants; the oracle of each would be a search of its own.
    contestants = tuple(e for e in entries if e.contestant)
    entries_of = {s.name: entries for s in loaded} | {name: contestants for each in draws.values() for name in each}
    models = {s.name: own_model(s)[1] for s in loaded}
    tasks = [
        t for s in loaded for t in _tasks(s, entries_of[s.name], counts[s.name], _given(s, models, system, record=record))
    ]
    # First seed 0 of all scenarios and tuners, then seed 1: an interrupted comparison can be compared, too.
    return Plan(loaded, entries, counts, draws, entries_of, tuple(sorted(tasks, key=lambda t: t.seed)), models)


def _under_draws(scenario: Scenario, count: int) -> Iterator[Scenario]:
    """The scenario under each of `count` draws of its calibrated constants. Raises ValueError where it has none."""
    if scenario.draw:
        raise ValueError(f"Cannot draw constants of {scenario.name!r}: it is a draw itself. Name the scenario without one.")
    for number in range(1, count + 1):
        name = f"{scenario.name}+draw{number}"
        try:
            yield building.scenario(scenario, name=name, calibration={"draw": number})
        except ValueError as error:  # says where by the name of the draw, which the user has never read
            what = str(error).removeprefix(f"harness.scenario({name!r}): ")
            raise ValueError(f"Cannot draw constants of {scenario.name!r}: {what}") from None


def _each(scenario: str | Path | Scenario) -> Sequence[str | Path | Scenario]:
    """The scenarios that a text means: each member of "drawn:FAMILY[0:20]", those of a pattern, or itself."""
    if isinstance(scenario, Scenario):
        return [scenario]
    return [single(name) for name in _members(scenario)] or matching(str(scenario))


def _members(scenario: str | Path | Scenario) -> list[str]:
    """The names of the members of a family that a text means; [] for any other scenario."""
    if isinstance(scenario, Scenario):
        return []
    kind, _, which = str(scenario).partition(":")
    return members(which) if kind == "drawn" else []


def _tasks(scenario: Scenario, entries: Sequence[Entry], seeds: int, given: dict[str, Any]) -> Iterator[Task]:
    """The contestants' runs, and those that an oracle wants whatever the contestants do."""
    for entry in entries:
        if entry.contestant:
            pickled = _pickled(entry)
            for seed in range(seeds):
                yield Task(**given, seed=seed, tuner=entry.name, plays=entry.name, pickled=pickled)
        else:
            for name, start, seed in oracle.first(scenario, entry.name, seeds):
                yield Task(**given, seed=seed, tuner=name, plays="fixed", start=start)


def oracle_tasks(plan: Plan, out: Path, *, record: bool, system: str) -> Iterator[Task]:
    """The runs that the oracles want next, when all others are in place."""
    for scenario in plan.scenarios:
        for entry in plan.entries_of[scenario.name]:
            if not entry.contestant:
                wanted = oracle.wanted(out, scenario, entry.name, list(plan.contestants), plan.counts[scenario.name])
                for name, start, seed, limit in wanted:
                    given = _given(scenario, plan.own_models, system, record=record)
                    limit_seconds = math.inf if record else limit  # every run leaves its trace
                    yield Task(**given, seed=seed, tuner=name, plays="fixed", start=start, limit_seconds=limit_seconds)


def _given(scenario: Scenario, models: dict[str, str], system: str, *, record: bool) -> dict[str, Any]:
    """What all tasks of a scenario have."""
    given: dict[str, Any] = {"scenario": scenario.name, "origin": str(scenario.origin), "text": scenario.text}
    return given | {"system": system, "folder": "", "record": record, "own_model": models[scenario.name]}


def _pickled(entry: Entry) -> bytes:
    """The function that the entry holds, as bytes; b"" if it names one. Raises ValueError if it cannot be sent."""
    if entry.given is None:
        return b""
    import cloudpickle

    try:
        pickled: bytes = cloudpickle.dumps(entry.given)
    except Exception as error:
        raise ValueError(
            f"Cannot send tuner {entry.name!r} to other processes ({type(error).__name__}: {error}): it refers to something "
            "that cannot be copied. Open files, locks and connections inside the function."
        ) from None
    return pickled
