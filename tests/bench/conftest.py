"""Prints what the benchmarks have found after a run, and writes it to a file; stored benchmarks name no machine."""

from __future__ import annotations

import csv
from pathlib import Path
from typing import Any

from tests.bench.rounds import Finding

RATIOS = Path(".benchmarks") / "ratios.csv"
"""What the last `make bench` has found, a row per benchmark."""


def pytest_benchmark_generate_machine_info(config: Any) -> dict[str, Any]:
    """Nothing: what is stored and compared is simulated, and the same everywhere."""
    return {}


def pytest_benchmark_generate_commit_info(config: Any) -> dict[str, Any]:
    """Nothing: the commit that stores a reference is not the one that it was made with."""
    return {}


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    found = [Finding(**b.extra_info["finding"]) for b in getattr(session, "benchmarks", []) if "finding" in b.extra_info]
    if not found:
        return
    terminalreporter.section("what should be reached")
    for finding in found:
        terminalreporter.write_line(str(finding))
    path = config.rootpath / RATIOS
    write_findings(found, path)
    terminalreporter.write_line(f"Written to {path}.")


def write_findings(found: list[Finding], path: Path) -> None:
    path.parent.mkdir(exist_ok=True)
    with path.open("w", newline="", encoding="utf-8") as out:
        rows = csv.writer(out)
        rows.writerow(["name", "what", "unit", "value", "low", "high", "rounds", "reach", "fails_beyond", "verdict"])
        for f in found:
            facts = f.reach.what, f.reach.unit, f.value, f.low, f.high, f.rounds, f.reach.value, f.reach.line, f.said
            rows.writerow([f.name, *facts])
