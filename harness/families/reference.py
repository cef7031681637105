"""The reference run of a member, and the rule by which it sets target and budget.

The member is played under each of its reference settings, on one or three seeds that no comparison uses, with no target and
no end, until the fastest of them has made a given number of pushes. Then

* jobs that learn: the target asks for 98 % of the best improvement that any of them has made on the validation set, on the
  seed where that is least, rounded to the side that is easier to reach. The reference time is that of the setting that
  reaches it first, in the median over the seeds; it has to reach it on all of them. Where the cheapest run wins, it is the
  one that costs least, at the price of all its machines.
* timing only: the target is the largest number of pushes (or samples) that any of them has made, rounded down. The
  reference time is that run's share of its time.

The budget is `slack` times the reference time, rounded up. A draw is accepted if something is learned in the reference run,
if its target is not reached in the first fifth of it, and if its start has not reached the target after `margin` times the
reference time, or cost (of three seeds, on two). Otherwise the member is drawn again. So a good setting reaches the target
well within the budget, and the start reaches it late or not at all, or is expensive.

Target and budget are rounded coarsely, because processors differ in the last digits of what a model learns.

As a program, ``python -m harness.families.reference NAME ...`` writes the goal of each member as a line of JSON.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from dataclasses import asdict, replace
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

from harness.families.draft import Draft, MemberGoal, written
from harness.families.families import FAMILIES, parse_name
from harness.families.lot import Lot, rounded
from harness.machines.machine import collect_garbage_rarely
from harness.scenario import Scenario, job, parse, system
from harness.scenario.tables import BudgetTable
from tuners.actions import Evaluate, Evaluation, Rejected, Run, Setting, System, Target

__all__ = ["goal_of", "main", "settled"]

_SEEDS = (999_983, 999_979, 999_961)  # comparisons count their seeds from 0
_ATTEMPTS = 40  # draws of one member
_EARLIEST = 0.2  # share of the reference run; a target that is reached before is too easy
_SHARE = 0.98  # of the best improvement that the target asks for
_LEAST_RISE = 0.25  # of the accuracy; with less, nothing was learned
_PACE_CLOCKS = 6  # per worker, to measure how fast a setting is
_ENDLESS = Target("clocks", 2**30)


class _Course(NamedTuple):
    """One run without a target."""

    seconds: float
    progress: float  # pushes or samples
    evaluations: tuple[Evaluation, ...]


def settled(name: str, draw: Callable[[Lot], Draft]) -> tuple[Draft, MemberGoal]:
    """The first draw of the member `name` that is accepted, and its goal. Raises RuntimeError where none is."""
    for attempt in range(_ATTEMPTS):
        draft = draw(Lot(f"{name}/{attempt}"))
        goal = goal_of(draft, attempt)
        if goal is not None:
            return draft, goal
    raise RuntimeError(f"Cannot draw {name}: no start of {_ATTEMPTS} draws is slow enough; that is an error of the family.")


def goal_of(draft: Draft, attempt: int = 0) -> MemberGoal | None:
    """Target and budget of a draw; None where it is not accepted."""
    stand_in = {"accuracy": 0.5, "loss": 1.0}.get(draft.metric, 1e9)
    text = written(draft, MemberGoal(attempt, stand_in, draft.check_clocks, 1e9))
    read = parse(text, name="reference", origin=Path("reference.toml"))
    scenario = replace(read, target=_ENDLESS, budget=BudgetTable(seconds=draft.longest_seconds))
    seeds = _SEEDS[: draft.seeds]
    settings, courses = _courses(draft, scenario, seeds[0])
    if not courses:
        return None
    if draft.metric not in ("accuracy", "loss"):
        return _counted(draft, scenario, courses, attempt)
    span = Run(seconds=max(c.seconds for c in courses))
    others = [[_run(draft, system(scenario, seed, setting), span) for setting in settings] for seed in seeds[1:]]
    rates = [_rate(draft, scenario, setting) for setting in settings]
    return _learned(draft, scenario, rates, dict(zip(seeds, [courses, *others], strict=True)), attempt)


def _courses(draft: Draft, scenario: Scenario, seed: int) -> tuple[list[Setting], list[_Course]]:
    """The reference settings that can run, and a run under each, all equally long."""
    seen = job(scenario, seed)
    begun: list[tuple[System, _Course, float]] = []
    settings: list[Setting] = []
    for values in draft.good:
        setting = seen.space.setting(values)
        try:
            seen.space.check(setting)
            made = system(scenario, seed, setting)
        except (Rejected, ValueError):
            continue  # of several settings that are thought to be good, some cannot run on every draw
        if setting in settings:
            continue
        first = _run(draft, made, Run(clocks=_PACE_CLOCKS * len(setting.workers)))
        if first.seconds > 0:
            settings.append(setting)
            begun.append((made, first, _PACE_CLOCKS * len(setting.workers) / first.seconds))
    if not begun:
        return [], []
    span = draft.pushes / max(pace for *_, pace in begun)
    return settings, [_continued(draft, made, first, span) for made, first, _ in begun]


def _continued(draft: Draft, made: System, first: _Course, span: float) -> _Course:
    if made.status != "running" or made.now >= span:
        return first
    rest = _run(draft, made, Run(seconds=span - made.now))
    return _Course(made.now, first.progress + rest.progress, first.evaluations + rest.evaluations)


def _run(draft: Draft, made: System, action: Run) -> _Course:
    window = made.perform(action)
    progress = sum(w.samples for w in window.workers) if draft.metric == "samples" else window.clocks
    return _Course(window.end_seconds, float(progress), window.evaluations)


# ----------------------------------------------------------------------------------------------------------------- the rule


def _rate(draft: Draft, scenario: Scenario, setting: Setting) -> float:
    """What a second under that setting costs: 1, or the price of its machines where money counts."""
    return 1.0 if draft.minimise == "seconds" else job(scenario).prices.setting_rate(setting).usd_per_hour


def _learned(
    draft: Draft, scenario: Scenario, rates: list[float], courses: dict[int, list[_Course]], attempt: int
) -> MemberGoal | None:
    """The goal by the runs of each seed, one per reference setting, each of which has one of the `rates`."""
    accuracy = draft.metric == "accuracy"
    wanted = [_wanted(draft, system(scenario, seed).perform(Evaluate()), own) for seed, own in courses.items()]
    if not all(map(math.isfinite, wanted)):
        return None
    easiest = min(wanted) if accuracy else max(wanted)
    value = math.floor(easiest * 200 + 1e-9) / 200 if accuracy else rounded(easiest, 3, up=True)
    times = [[_reached(draft, value, c) for c in of_setting] for of_setting in zip(*courses.values(), strict=True)]
    medians = [
        (rate * seconds, seconds)
        for rate, each in zip(rates, times, strict=True)
        if None not in each and (seconds := median(t for t in each if t is not None))
    ]
    span = max(c.seconds for own in courses.values() for c in own)
    if not medians or min(medians)[1] < _EARLIEST * span:
        return None
    least, reference = min(medians)
    early = Run(seconds=draft.margin * least / _rate(draft, scenario, job(scenario).start))
    starts = [_reached(draft, value, _run(draft, system(scenario, seed), early)) for seed in courses]
    if 2 * sum(t is not None for t in starts) >= len(starts):
        return None
    return MemberGoal(attempt, value, draft.check_clocks, rounded(draft.slack * reference, up=True))


def _wanted(draft: Draft, first: Evaluation, courses: list[_Course]) -> float:
    """The level that the target asks for, by the runs of one seed; nan if none of them has learned much."""
    accuracy = draft.metric == "accuracy"
    values = [e.accuracy if accuracy else e.loss for c in courses for e in c.evaluations]
    finite = [v for v in values if math.isfinite(v)]
    if not finite:
        return math.nan
    best, begin = (max(finite), first.accuracy) if accuracy else (min(finite), first.loss)
    learned = best >= begin + _LEAST_RISE if accuracy else best <= draft.least_fall * begin
    return begin + _SHARE * (best - begin) if learned else math.nan


def _reached(draft: Draft, value: float, course: _Course) -> float | None:
    target = Target(draft.metric, value)
    return next((e.seconds for e in course.evaluations if target.reached(e.loss, e.accuracy)), None)


def _counted(draft: Draft, scenario: Scenario, courses: list[_Course], attempt: int) -> MemberGoal | None:
    best = max(courses, key=lambda c: c.progress)
    value = rounded(best.progress, up=False)
    reference = best.seconds * value / best.progress
    start = _run(draft, system(scenario, _SEEDS[0]), Run(seconds=draft.margin * reference))
    if start.progress >= value:
        return None
    return MemberGoal(attempt, value, draft.check_clocks, rounded(draft.slack * reference, up=True))


def main(names: list[str]) -> int:
    """Write the goal of each member that is named, as a line of JSON."""
    for name in names:
        _, goal = settled(name, FAMILIES[parse_name(name)[0]].draw)
        made: dict[str, Any] = {"name": name} | asdict(goal)
        print(json.dumps(made), flush=True)  # noqa: T201 (what the program does)
    return 0


if __name__ == "__main__":
    collect_garbage_rarely()
    sys.exit(main(sys.argv[1:]))
