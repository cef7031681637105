"""Prints the ratios of the benchmarks after a run, with the ratio that each should reach; its files name no machine."""

from __future__ import annotations

from typing import Any


def pytest_benchmark_generate_machine_info(config: Any) -> dict[str, Any]:
    """Nothing: what is stored and compared is simulated, and the same everywhere."""
    return {}


def pytest_benchmark_generate_commit_info(config: Any) -> dict[str, Any]:
    """Nothing: the commit that stores a reference is not the one that it was made with."""
    return {}


def pytest_terminal_summary(terminalreporter: Any, config: Any) -> None:
    session = getattr(config, "_benchmarksession", None)
    rows = [b.extra_info for b in getattr(session, "benchmarks", []) if "ratio" in b.extra_info]
    if rows:
        terminalreporter.section("ratios (best of each side; ratio of medians in brackets)")
    for row in rows:
        median = f" [{row['ratio_of_medians']:.2f}]" if "ratio_of_medians" in row else ""
        terminalreporter.write_line(f"{row['what']:<62} {row['ratio']:>9.2f}{median:>8}   reach {row['reach']:g}")
