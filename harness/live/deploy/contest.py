"""A contest on real processes: tuners on one scenario, one job after the other on the same cluster, into a results folder as
`harness compare` writes it."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from harness.comparison.compare import compare
from harness.comparison.run_process import Done, Task, save
from harness.live.deploy.deployment import Deployment, check, play_on
from harness.live.driver.standstill import Limits
from harness.live.processes import launch
from harness.scenario import load, parse
from harness.score import failed, score
from tuners import resolve

__all__ = ["LiveContest", "contest"]


@dataclass(frozen=True, slots=True)
class LiveContest:
    """What to play, and where."""

    scenario: str  # a name, or a file
    tuners: tuple[str, ...]
    seeds: int | None  # None: as many as the scenario says
    out: Path
    address: str | None
    resume: bool
    insecure: bool
    limits: Limits


def contest(wanted: LiveContest, console: Console) -> None:
    """Play every tuner on every seed. A run that fails is a row with a reason; one that was interrupted is repeated by
    `resume`. Raises ValueError, before anything is started, for what cannot be played; Interrupted if the user stops it."""
    scenario = load(wanted.scenario)
    for name in wanted.tuners:
        entry = resolve(name)
        if not entry.contestant:
            raise ValueError(f"Cannot play {name} live: it is the best of many runs, in hindsight. Leave it out.")
        check(Deployment(scenario, entry, 0, wanted.out))

    def work(tasks: Sequence[Task]) -> Iterator[tuple[Task, Done]]:
        if not tasks:
            return
        with launch.cluster(wanted.address, insecure=wanted.insecure) as offers:
            for number, task in enumerate(tasks, start=1):
                console.print(f"{task.tuner}, seed {task.seed}: run {number} of {len(tasks)}", highlight=False, markup=False)
                yield task, _run(wanted, task, offers, console)

    compare([wanted.scenario], wanted.tuners, out=wanted.out, seeds=wanted.seeds, resume=wanted.resume, work=work)


def _run(wanted: LiveContest, task: Task, offers: tuple[launch.ClusterNode, ...], console: Console) -> Done:
    began = time.perf_counter()
    scenario = parse(task.text, name=task.scenario, origin=Path(task.origin))
    entry, folder = resolve(task.plays), Path(task.folder)
    job = Deployment(scenario, entry, task.seed, folder, insecure=wanted.insecure, limits=wanted.limits)
    try:
        played = play_on(job, offers, console)
        row = score(played, **job.run).score
        thinking_seconds = played.outcome.thinking_seconds
    except (RuntimeError, ValueError) as error:
        limits: dict[str, Any] = {"budget_seconds": scenario.budget.seconds, "minimise": scenario.target.minimise}
        made = failed(str(error), **job.run, **limits)
        folder.mkdir(parents=True, exist_ok=True)
        save(folder, made)
        row, thinking_seconds = made.score, float("nan")
    console.print(f"{row.status} after {row.completion_seconds:.1f} s. {row.reason}".rstrip(), highlight=False, markup=False)
    return Done(row.status, row.reason, row.completion_seconds, thinking_seconds, time.perf_counter() - began)
