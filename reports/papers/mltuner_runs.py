"""Whole runs of tuners, kept in a file if wanted, and what can be read off them: for `published_mltuner.py`."""

from __future__ import annotations

import json
import math
import statistics
import subprocess
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

import msgspec
import numpy as np

from harness.drive import drive
from harness.scenario import Scenario, scenario
from reports.statistics import Bounds, Interval, censored, median_interval
from traces.exchanges import Exchange
from tuners import resolve
from tuners.actions import Action, Evaluate, Evaluation, Fork, Job, Run, System, Target, Tuner
from tuners.search.epochs import Course, TrainedBranch, plateaued, train_on

__all__ = [
    "Case",
    "Lab",
    "Ran",
    "commit",
    "convergence",
    "count",
    "driven",
    "loaded",
    "made",
    "median",
    "phases",
    "shares",
    "short",
    "times",
    "tuner",
    "variation",
]


@dataclass(frozen=True, kw_only=True)
class Case:
    """One run to be made."""

    scenario: str
    tuner: str  # as `harness` has it, or "train": the start, to the plateau
    seed: int = 0
    tuner_seed: int | None = None  # if not the job's
    start: dict[str, Any] | None = None  # in place of the scenario's, by knob
    optimizer: str | None = None
    budgets: float = 1.0  # of the scenario's
    until: str = "target"  # reached; or the tuner has "finished"; or "both"; or the "plateau"
    plateau: int = 5  # epochs that have made it no better


@dataclass(frozen=True, kw_only=True)
class Ran:
    """What came of it. A quality is an accuracy, or minus a loss."""

    budget: float
    ended: float
    finished: float | None  # when the tuner had, if it had
    curve: list[tuple[float, float]]  # (seconds, best quality so far) of any branch, as the system validates them
    epochs: list[tuple[float, float]]  # (seconds, quality) as the tuner validates them
    phases: list[tuple[str, float, int]]  # what the time went to: kind, until which second, settings tried in it

    def reached(self, quality: float) -> float:
        """Seconds until some branch was so good; infinite where none was."""
        return next((s for s, q in self.curve if q >= quality), math.inf)

    @property
    def best(self) -> float:
        """The best quality of any branch, as the system validates them."""
        return self.curve[-1][1] if self.curve else -math.inf

    @property
    def peak(self) -> float:
        """The best quality as the tuner validates."""
        return max((q for _, q in self.epochs), default=-math.inf)

    @property
    def converged(self) -> float:
        return math.inf if self.finished is None else self.finished

    def spent(self, kind: str, until: float = math.inf) -> float:
        """Seconds in phases whose name starts so."""
        begins = [0.0, *(end for _, end, _ in self.phases)]
        return sum(
            max(min(end, until) - begin, 0.0)
            for begin, (name, end, _) in zip(begins, self.phases, strict=False)
            if name.startswith(kind)
        )

    def tried(self, kind: str) -> int:
        """Settings tried in phases whose name starts so."""
        return sum(settings for name, _, settings in self.phases if name.startswith(kind))


class Lab:
    """Makes runs, and keeps them."""

    def __init__(self, kept: Path | None) -> None:
        self._path, self._kept = kept, dict[str, Any]()
        if kept is not None and kept.exists():
            self._kept = {json.dumps(line["case"]): line for line in map(json.loads, kept.read_text().splitlines())}

    def __call__(self, case: Case) -> Ran:
        key = json.dumps(asdict(case))
        if key not in self._kept:
            line = {"case": asdict(case), "commit": commit(), "ran": asdict(made(case))}
            self._kept[key] = line
            if self._path is not None:
                with self._path.open("a") as out:
                    out.write(json.dumps(line) + "\n")
        return Ran(**self._kept[key]["ran"])

    def each(self, case: Case, seeds: int) -> list[Ran]:
        return [self(replace(case, seed=seed)) for seed in range(seeds)]

    def commits(self) -> str:
        return ", ".join(sorted({line["commit"] for line in self._kept.values()}))


@cache
def commit() -> str:
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=10"]
    found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)  # noqa: S603  # ours
    return found.stdout.strip()


@cache
def loaded(name: str, optimizer: str | None) -> Scenario:
    found = scenario.load(name)
    if optimizer is None:
        return found
    overrides = {**found.workload.overrides, "optimizer": optimizer}
    return replace(found, workload=msgspec.structs.replace(found.workload, overrides=overrides))


def made(case: Case) -> Ran:
    found = loaded(case.scenario, case.optimizer)
    metric = found.target.metric
    wanted = found.target.value if metric == "accuracy" else -found.target.value
    # A target that nothing reaches, so that the tuner goes on to its end.
    target = found.target if case.until == "target" else Target(metric, 2.0 if metric == "accuracy" else -1.0)
    budget = found.budget.seconds * case.budgets
    found = replace(found, target=target, budget=msgspec.structs.replace(found.budget, seconds=budget))
    start = None if case.start is None else replace(scenario.job(found).start, **case.start)
    system = scenario.system(found, case.seed, start)
    seed = case.seed if case.tuner_seed is None else case.tuner_seed
    sign, value = (1.0, "accuracy") if metric == "accuracy" else (-1.0, "loss")
    exchanges, finished = list[Exchange](), False
    curve, epochs = list[tuple[float, float]](), list[tuple[float, float]]()
    for exchange in driven(tuner(case)(replace(system.job, seed=seed)), system):
        finished = not exchange.asked
        if finished and (case.until == "finished" or (case.until == "both" and curve and curve[-1][1] >= wanted)):
            break
        exchanges.append(exchange)
        for e in getattr(exchange.answer, "evaluations", ()):
            quality = float(sign * getattr(e, value))
            if math.isfinite(quality) and (not curve or quality > curve[-1][1]):
                curve.append((float(e.seconds), quality))
        if isinstance(exchange.answer, Evaluation):
            epochs.append((exchange.seconds, float(sign * getattr(exchange.answer, value))))
            if case.until == "plateau" and plateaued([q for _, q in epochs[1:]], case.plateau):
                break
    asked = [e for e in exchanges if e.asked]
    return Ran(
        budget=budget,
        ended=system.now,
        finished=asked[-1].seconds if finished and asked else None,
        curve=curve,
        epochs=epochs,
        phases=list(phases(exchanges)),
    )


def driven(tuner: Tuner, system: System) -> Iterator[Exchange]:
    """Raises RuntimeError where the tuner fails."""
    outcome = yield from drive(tuner, system)
    if outcome.status == "error":
        raise RuntimeError(outcome.reason)


def tuner(case: Case) -> Callable[[Job], Tuner]:
    if case.tuner != "train":
        return resolve(case.tuner).factory

    def train(job: Job) -> Tuner:
        yield from train_on(job, Course(TrainedBranch(0, job.start)), plateau_epochs=case.plateau)

    return train


def phases(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, float, int]]:
    """MLtuner's searches, its training between them, and what comes after it has finished."""
    kind, until, tried, searches = "training", 0.0, 0, 0
    following: list[Action[Any] | None] = [e.action for e in exchanges[1:]]
    for e, after in zip(exchanges, [*following, None], strict=True):
        now = kind
        if not e.asked:
            now = "after"
        elif isinstance(e.action, Fork) and (e.action.testing or e.action.setting is not None):
            searches += not kind.startswith("search")
            now = f"search {searches}"
        elif (isinstance(e.action, Run) and isinstance(after, Evaluate)) or isinstance(e.action, Fork):
            now = "training"
        if now != kind:
            yield kind, until, tried
            tried = 0
        kind, until = now, e.seconds
        tried += isinstance(e.action, Fork) and e.action.setting is not None
    yield kind, until, tried


# --------------------------------------------------------------------------------------------------------------- figures


def times(runs: Sequence[Ran], quality: float) -> Bounds:
    found = [r.reached(quality) for r in runs]
    return censored([min(f, r.budget) for f, r in zip(found, runs, strict=True)], [math.isfinite(f) for f in found])


def convergence(runs: Sequence[Ran]) -> Bounds:
    return censored([min(r.converged, r.budget) for r in runs], [math.isfinite(r.converged) for r in runs])


def median(values: Bounds | Sequence[float], form: str = ".0f") -> str:
    """The median with its interval, "> ..." where censored values decide it."""
    if not isinstance(values, Bounds):
        values = Bounds(np.asarray(values), np.asarray(values))
    found = median_interval(values)
    return f"{short(found, form)} ({found.low:{form}}, {found.high:{form}})"


def short(found: Interval, form: str = ".0f") -> str:
    return f"{'' if found.bound == '=' else found.bound}{found.estimate:{form}}"


def count(values: Bounds) -> str:
    """How many of them were measured."""
    return f"{np.isfinite(values.most).sum()}/{len(values.most)}"


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation."""
    return statistics.stdev(values) / statistics.fmean(values)


def shares(runs: Sequence[Ran], until: Bounds) -> str:
    """What the time until then went to, as means over runs."""
    found = [
        [r.spent(kind, end) / end for r, end in zip(runs, until.least, strict=True)]
        for kind in ("search 1", "search", "training", "after")
    ]
    first, searches, training, after = map(statistics.fmean, found)
    said = f"initial tuning {first:.0%}, re-tuning {searches - first:.0%}, training {training:.0%}"
    return said + (f", after it had finished {after:.0%}" if after > 0.005 else "")
