"""Whole runs of tuners, optionally stored in a file, and figures about them: for the program `reports.papers.mltuner`."""

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

from harness.drive import Outcome, Played, drive
from harness.scenario import Scenario, scenario
from harness.score import score
from reports.verdicts.statistics import Bounds, Interval, censored, median_interval
from traces.exchanges import Exchange
from tuners import resolve
from tuners.actions import Action, Evaluate, Evaluation, Fork, Job, Run, System, Target, Tuner
from tuners.search.branches import TrainedBranch
from tuners.search.epochs import Course, plateaued, train_on

__all__ = [
    "Lab",
    "RunRequest",
    "RunResult",
    "convergence",
    "count",
    "median",
    "shares",
    "short",
    "times",
    "trial_shares",
    "variation",
]


@dataclass(frozen=True, kw_only=True)
class RunRequest:
    """One run to make. Stored runs are found by these fields, so their names and order are part of the file format."""

    scenario: str
    tuner: str  # a name that `harness` takes; or "train": the start setting until the plateau
    seed: int = 0
    tuner_seed: int | None = None  # None: the seed of the job
    start: dict[str, Any] | None = None  # knobs that replace those of the scenario
    optimizer: str | None = None
    budgets: float = 1.0  # factor on the budget of the scenario
    until: str = "target"  # the run ends at the target, when the tuner has "finished", after "both", or at the "plateau"
    plateau: int = 5  # epochs without improvement


@dataclass(frozen=True, kw_only=True)
class RunResult:
    """The result of a run. A quality is an accuracy, or minus a loss."""

    budget: float
    ended: float
    finished: float | None  # when the tuner ended; None: it did not
    curve: list[tuple[float, float]]  # (seconds, best quality so far) of any branch, as validated by the system
    epochs: list[tuple[float, float]]  # (seconds, quality) as validated by the tuner
    phases: list[tuple[str, float, int]]  # how the time was spent, as printed: (kind, end in seconds, settings tried)
    trial_seconds: float = 0.0  # on branches that were not gone on with
    trials: int = 0  # branches with a setting of their own

    def reached(self, quality: float) -> float:
        """Seconds until some branch reached `quality`; infinite if none did."""
        return next((s for s, q in self.curve if q >= quality), math.inf)

    @property
    def best(self) -> float:
        """The best quality of any branch, as validated by the system."""
        return self.curve[-1][1] if self.curve else -math.inf

    @property
    def peak(self) -> float:
        """The best quality, as validated by the tuner."""
        return max((q for _, q in self.epochs), default=-math.inf)

    @property
    def converged(self) -> float:
        """Seconds until the tuner ended; infinite if it did not."""
        return math.inf if self.finished is None else self.finished

    def spent(self, kind: str, until: float = math.inf) -> float:
        """Seconds up to `until` in phases whose name starts with `kind`."""
        begins = [0.0, *(end for _, end, _ in self.phases)]
        return sum(
            max(min(end, until) - begin, 0.0)
            for begin, (name, end, _) in zip(begins, self.phases, strict=False)
            if name.startswith(kind)
        )

    def tried(self, kind: str) -> int:
        """Settings tried in phases whose name starts with `kind`."""
        return sum(settings for name, _, settings in self.phases if name.startswith(kind))


class Lab:
    """Makes runs, and stores them in the file `kept`, if given, so that none is made twice."""

    def __init__(self, kept: Path | None) -> None:
        self._path, self._kept = kept, dict[str, Any]()
        if kept is not None and kept.exists():
            self._kept = {json.dumps(line["case"]): line for line in map(json.loads, kept.read_text().splitlines())}

    def __call__(self, case: RunRequest) -> RunResult:
        key = json.dumps(asdict(case))
        if key not in self._kept:
            line = {"case": asdict(case), "commit": _commit(), "ran": asdict(_made(case))}
            self._kept[key] = line
            if self._path is not None:
                with self._path.open("a") as out:
                    out.write(json.dumps(line) + "\n")
        return RunResult(**self._kept[key]["ran"])

    def each(self, case: RunRequest, seeds: int) -> list[RunResult]:
        """The run with each of the first `seeds` seeds."""
        return [self(replace(case, seed=seed)) for seed in range(seeds)]

    def commits(self) -> str:
        """The commits of the code that made the runs."""
        return ", ".join(sorted({line["commit"] for line in self._kept.values()}))


@cache
def _commit() -> str:
    """The commit of this code."""
    words = ["git", "describe", "--always", "--exclude=*", "--abbrev=10"]
    found = subprocess.run(words, cwd=Path(__file__).parent, capture_output=True, text=True, check=True)  # noqa: S603  # ours
    return found.stdout.strip()


@cache
def _loaded(name: str, optimizer: str | None) -> Scenario:
    """The scenario, with another optimizer if one is given."""
    found = scenario.load(name)
    if optimizer is None:
        return found
    overrides = {**found.workload.overrides, "optimizer": optimizer}
    return replace(found, workload=msgspec.structs.replace(found.workload, overrides=overrides))


def _made(case: RunRequest) -> RunResult:
    """Make the run."""
    found = _loaded(case.scenario, case.optimizer)
    metric = found.target.metric
    wanted = found.target.value if metric == "accuracy" else -found.target.value
    # A target that no run reaches, so that the run lasts until the tuner ends.
    target = found.target if case.until == "target" else Target(metric, 2.0 if metric == "accuracy" else -1.0)
    budget = found.budget.seconds * case.budgets
    found = replace(found, target=target, budget=msgspec.structs.replace(found.budget, seconds=budget))
    start = None if case.start is None else replace(scenario.job(found).start, **case.start)
    system = scenario.system(found, case.seed, start)
    seed = case.seed if case.tuner_seed is None else case.tuner_seed
    sign, value = (1.0, "accuracy") if metric == "accuracy" else (-1.0, "loss")
    exchanges, finished = list[Exchange](), False
    curve, epochs = list[tuple[float, float]](), list[tuple[float, float]]()
    for exchange in _driven(_factory(case)(replace(system.job, seed=seed)), system):
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
    return RunResult(
        budget=budget,
        ended=system.now,
        finished=asked[-1].seconds if finished and asked else None,
        curve=curve,
        epochs=epochs,
        phases=list(_phases(exchanges)),
        trial_seconds=score(
            Played(system.job, tuple(exchanges), Outcome("budget", "", system.now, 0.0)), scenario="", tuner="", seed=0
        ).score.trial_seconds,
        trials=sum(isinstance(e.action, Fork) and e.action.setting is not None for e in exchanges),
    )


def _driven(tuner: Tuner, system: System) -> Iterator[Exchange]:
    """The exchanges of a run. Raises RuntimeError if the tuner fails."""
    outcome = yield from drive(tuner, system)
    if outcome.status == "error":
        raise RuntimeError(outcome.reason)


def _factory(case: RunRequest) -> Callable[[Job], Tuner]:
    if case.tuner != "train":
        return resolve(case.tuner).factory

    def train(job: Job) -> Tuner:
        yield from train_on(job, Course(TrainedBranch(0, job.start)), plateau_epochs=case.plateau)

    return train


def _phases(exchanges: Sequence[Exchange]) -> Iterator[tuple[str, float, int]]:
    """MLtuner's searches, the training between them, and the time after its end."""
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


def times(runs: Sequence[RunResult], quality: float) -> Bounds:
    """Seconds of each run until `quality`, censored at its budget."""
    found = [r.reached(quality) for r in runs]
    return censored([min(f, r.budget) for f, r in zip(found, runs, strict=True)], [math.isfinite(f) for f in found])


def convergence(runs: Sequence[RunResult]) -> Bounds:
    """Seconds of each run until the tuner ended, censored at its budget."""
    return censored([min(r.converged, r.budget) for r in runs], [math.isfinite(r.converged) for r in runs])


def median(values: Bounds | Sequence[float], form: str = ".0f") -> str:
    """The median with its interval; "> ..." if censored values decide it."""
    if not isinstance(values, Bounds):
        values = Bounds(np.asarray(values), np.asarray(values))
    found = median_interval(values)
    return f"{short(found, form)} ({found.low:{form}}, {found.high:{form}})"


def short(found: Interval, form: str = ".0f") -> str:
    """The estimate alone, with its bound."""
    return f"{'' if found.bound == '=' else found.bound}{found.estimate:{form}}"


def count(values: Bounds) -> str:
    """How many of the values are not censored."""
    return f"{np.isfinite(values.most).sum()}/{len(values.most)}"


def variation(values: Sequence[float]) -> float:
    """The coefficient of variation."""
    return statistics.stdev(values) / statistics.fmean(values)


def trial_shares(runs: Sequence[RunResult]) -> str:
    """The shares of whole runs that went into branches that were not gone on with: the median and its interval."""
    return (
        f"{median([r.trial_seconds / r.ended for r in runs], '.0%')} of the run in {median([r.trials for r in runs])} trials"
    )


def shares(runs: Sequence[RunResult], until: Bounds) -> str:
    """How the time until `until` was spent, in mean shares over runs."""
    found = [
        [r.spent(kind, end) / end for r, end in zip(runs, until.least, strict=True)]
        for kind in ("search 1", "search", "training", "after")
    ]
    first, searches, training, after = map(statistics.fmean, found)
    said = f"initial tuning {first:.0%}, re-tuning {searches - first:.0%}, training {training:.0%}"
    return said + (f", after it had finished {after:.0%}" if after > 0.005 else "")
