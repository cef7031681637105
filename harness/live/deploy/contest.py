"""A contest on real processes: tuners on one scenario, one job after the other on the same cluster, into a results folder as
`harness compare` writes it."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from rich.console import Console

from harness.comparison.compare import compare
from harness.comparison.plan import check_each_once
from harness.comparison.results_folder import check_folder
from harness.comparison.run_process import Done, Task, save
from harness.lines import say
from harness.live.deploy.deployment import Deployment, LiveOptions, check, cluster_for, play_on
from harness.live.deploy.job_folder import LOG
from harness.live.processes import launch
from harness.scenario import Scenario, limits, load, parse
from harness.score import Score, Scored, score, unplayed
from tuners import resolve
from tuners.applicability import nothing_to_tune

__all__ = ["LiveContest", "check_contest", "contest", "jobs_and_time"]


@dataclass(frozen=True, slots=True)
class LiveContest:
    """What to play, and where."""

    scenario: str  # a name, or a file
    tuners: tuple[str, ...]
    seeds: int | None  # None: as many as the scenario says
    out: Path
    resume: bool
    live: LiveOptions


def check_contest(wanted: LiveContest) -> bool:
    """Raise ValueError where a tuner of the contest is unknown, is given twice, or cannot be played live. Returns whether
    its folder has no results yet; raises ValueError where it has some and is not to be resumed."""
    scenario = load(wanted.scenario)
    check_each_once("tuner", wanted.tuners)
    for name in wanted.tuners:
        entry = resolve(name)
        if not entry.contestant:
            raise ValueError(f"Cannot play {name} live: it is the best of many runs, in hindsight. Leave it out.")
        check(_deployment(wanted, scenario, name))
    return check_folder(wanted.out, resume=wanted.resume)


def jobs_and_time(jobs: int, budget_seconds: float) -> str:
    """How many jobs a contest starts, and how long they take at most: a sentence without its full stop."""
    longest = jobs * budget_seconds
    whole = f"{longest / 3600:.3g} h" if longest >= 3600 else f"{longest:g} s"
    many = f"{jobs} jobs, one after the other" if jobs > 1 else "1 job"
    return f"{many}, of at most {budget_seconds:g} s each: {whole} in all, besides the time to start them"


def contest(wanted: LiveContest, console: Console) -> None:
    """Play every tuner on every seed. A run that fails is a row with a reason; one that was interrupted is repeated by
    `resume`. Raises ValueError, before anything is started, for what cannot be played; Interrupted if the user stops it."""
    fresh = check_contest(wanted)
    with ExitStack() as ray:

        def joined() -> tuple[launch.ClusterNode, ...]:
            job = _deployment(wanted, load(wanted.scenario), wanted.tuners[0])
            spec = check(job)
            offers = ray.enter_context(cluster_for(job, spec))
            launch.place_nodes(spec.job.nodes, offers)  # every run would fail alike
            return offers

        # What is refused leaves no folder, so the cluster is joined before there is one. There is one already if the contest
        # goes on, and then perhaps no run is left.
        offers = joined() if fresh else None

        def work(tasks: Sequence[Task]) -> Iterator[tuple[Task, Done]]:
            there = joined() if tasks and offers is None else offers or ()
            if tasks:
                length = jobs_and_time(len(tasks), load(wanted.scenario).budget.seconds)
                say(console, f"{length}.")
            for number, task in enumerate(tasks, start=1):
                say(console, f"{task.tuner}, seed {task.seed}: run {number} of {len(tasks)}")
                yield task, _run(wanted, task, there, console)

        compare([wanted.scenario], wanted.tuners, out=wanted.out, seeds=wanted.seeds, resume=wanted.resume, work=work)


def _deployment(wanted: LiveContest, scenario: Scenario, tuner: str) -> Deployment:
    return Deployment(scenario, resolve(tuner), 0, wanted.out, live=wanted.live)


def _run(wanted: LiveContest, task: Task, offers: tuple[launch.ClusterNode, ...], console: Console) -> Done:
    began = time.perf_counter()
    scenario = parse(task.text, name=task.scenario, origin=Path(task.origin))
    entry, folder = resolve(task.plays), Path(task.folder)
    job = Deployment(scenario, entry, task.seed, folder, live=wanted.live)
    ended_seconds = thinking_seconds = float("nan")
    try:
        if idle := nothing_to_tune(entry.factory, check(job).job):
            row = _saved(folder, unplayed("not applicable", idle, **job.run, **limits(scenario)))
        else:
            played = play_on(job, offers, console)
            row, thinking_seconds = score(played, **job.run).score, played.outcome.thinking_seconds
            ended_seconds = played.outcome.seconds
    except (RuntimeError, ValueError) as error:
        row = _saved(folder, unplayed("error", str(error), **job.run, **limits(scenario)))
    after = "" if math.isnan(ended_seconds) else f" after {ended_seconds:.1f} s"
    say(console, f"{row.status}{after}. {row.reason}".rstrip())
    return Done(row.status, row.reason, row.completion_seconds, thinking_seconds, time.perf_counter() - began)


def _saved(folder: Path, made: Scored) -> Score:
    """Write the row of a run that was not played to its end."""
    folder.mkdir(parents=True, exist_ok=True)
    save(folder, made, None if (folder / LOG).exists() else ())
    return made.score
