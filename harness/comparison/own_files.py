"""Digests of what a user may change between two calls of a comparison: code of own tuners, and files that scenarios name.

A results folder's manifest has them, so that runs of two versions are never taken for runs of one.
"""

from __future__ import annotations

import sys
import tomllib
from collections.abc import Iterable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from harness.scenario import Scenario, own_model
from simulators.programs.own_code import digest_of, with_neighbours
from tuners import Entry

__all__ = ["digests_of_scenarios", "digests_of_tuners", "named_by"]


def digests_of_tuners(entries: Iterable[Entry]) -> dict[str, str]:
    """By name, a digest of the code of every tuner that does not ship; without those whose code is in no file, as in a
    notebook. Raises ValueError where a tuner cannot be imported."""
    found = {entry.name: _code_files(entry) for entry in entries if not entry.embedded}
    return {name: digest_of(files) for name, files in found.items() if files}


def digests_of_scenarios(scenarios: Iterable[Scenario]) -> dict[str, dict[str, str]]:
    """By scenario, a digest of every file and folder of the user's that it names, as its text names them, and of the file
    of a model of the user's. Raises ValueError where the latter does not exist."""
    found = {scenario.name: _files_of(scenario) for scenario in scenarios}
    return {name: files for name, files in found.items() if files}


def _code_files(entry: Entry) -> tuple[Path, ...]:
    """The files of the tuner's package, or of its module and what that imports from the same folder."""
    factory = entry.plain_factory
    while isinstance(factory, partial):
        factory = factory.func
    named = entry.where.partition(":")[0] or str(getattr(factory, "__module__", ""))
    top = sys.modules.get(named.partition(".")[0])
    origin = getattr(top, "__file__", None)
    if origin is None or named == "__main__":
        return ()
    if hasattr(top, "__path__"):
        return tuple(sorted(Path(origin).parent.rglob("*.py")))
    return tuple(with_neighbours(Path(origin)))


def _files_of(scenario: Scenario) -> dict[str, str]:
    found = {}
    for named in named_by(tomllib.loads(scenario.text)):
        path = scenario.origin.parent / named
        finished = path / "trace.json"  # of a trace; it has the digests of all parts
        if path.is_file() or finished.is_file():
            found[named] = digest_of([path if path.is_file() else finished])
        elif path.is_dir():
            found[named] = digest_of(sorted(p for p in path.rglob("*") if p.is_file()))
    model, digest = own_model(scenario)
    return found | ({model: digest} if model else {})


def named_by(tables: dict[str, Any]) -> Iterator[str]:
    """The files and folders that a scenario's text names."""
    cluster, workload = tables.get("cluster", {}), tables.get("workload", {})
    replay = tables.get("conditions", {}).get("replay", {})
    given = [cluster.get("profiles"), workload.get("file"), workload.get("data"), tables.get("recorded", {}).get("trace")]
    given += [role.get("trace") if isinstance(role, dict) else role for role in replay.values()]
    yield from dict.fromkeys(each for each in given if isinstance(each, str) and not each.startswith("shipped:"))
