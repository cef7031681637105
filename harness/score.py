"""Compute from the exchanges of one run its row of the score table, its validation curve and its settings over time.

A tuner that forks makes a tree of branches. The *path* is the branch that trained last, with each ancestor up to the fork:
the path is the job's history. Everything else that trained was a trial.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from harness.drive import Ending, Outcome, Played
from harness.spending import Spending, highest_usd, spending
from traces.exchanges import Exchange
from traces.schema import setting_text, worker_count
from tuners.actions import (
    Cost,
    Evaluate,
    Evaluation,
    Fork,
    Free,
    GradientNoise,
    Job,
    Reconfigure,
    Rejected,
    Run,
    Setting,
    Window,
)
from tuners.playing.system import wanted_setting

__all__ = ["Score", "Scored", "ending", "score", "unplayed"]


@dataclass(frozen=True, slots=True)
class Score:
    """One row of `traces.schema.SCORES`, which defines each field."""

    scenario: str
    tuner: str
    seed: int
    status: Ending | Literal["not applicable"]
    reason: str
    completion_seconds: float
    budget_seconds: float
    reached: bool
    reconfigurations: int
    overhead_seconds: float
    slow_seconds: float
    bytes_moved: float
    trial_seconds: float
    clocks: int
    rejected: int
    final_loss: float
    final_accuracy: float
    final_setting: str
    final_workers: int | None
    branches_peak: int
    branch_bytes_peak: float
    machine_seconds: float
    usd: float
    budget_usd: float
    minimise: Literal["seconds", "usd"]


@dataclass(frozen=True, slots=True)
class Scored:
    """One run as rows of the three tables."""

    score: Score
    evaluations: tuple[Evaluation, ...]
    settings: tuple[tuple[float, Setting], ...]  # (seconds, setting), the first at 0

    def rows(self) -> Mapping[str, list[dict[str, Any]]]:
        """The rows of each table, by the table's name."""
        run = {"scenario": self.score.scenario, "tuner": self.score.tuner, "seed": self.score.seed}
        return {
            "scores": [asdict(self.score)],
            "evaluations": [run | e._asdict() for e in self.evaluations],
            "settings": [
                run | {"seconds": s, "setting": setting_text(x), "workers": worker_count(x)} for s, x in self.settings
            ],
        }


def ending(row: Score, seconds: float) -> str:
    """How a run ended, after how many simulated seconds, and what it did: one line."""
    reason = row.reason if not row.reason or row.reason.endswith((".", "!", "?")) else f"{row.reason}."
    ended = f"{row.status} after {seconds:.1f} s. {reason}".rstrip()
    changes = f"{row.reconfigurations} change{'' if row.reconfigurations == 1 else 's'}"
    return f"{ended} {row.clocks} pushes, {changes}, overhead {row.overhead_seconds:.1f} s."


def score(played: Played, *, scenario: str, tuner: str, seed: int) -> Scored:
    """Score one run. A run that did not reach its target counts with its whole budget as completion time."""
    job, exchanges, outcome = played.job, played.exchanges, played.outcome
    path = _Path(exchanges)
    evaluations = tuple(_evaluations(exchanges, path))
    settings, changes = _settings(job, exchanges, path)
    costs = [(e, list(_costs(e))) for e in exchanges]
    windows = [(path.holds(i, e), e.answer) for i, e in enumerate(exchanges) if isinstance(e.answer, Window)]
    spent = spending(job, exchanges)
    dear = outcome.status == "target" and spent.usd > job.budget_usd
    reached = outcome.status == "target" and not dear
    pushes = sum(w.clocks for _, w in windows)
    stalls = (_in_time(job, e, [c.stall_seconds for c in found]) for e, found in costs)
    overhead_seconds = math.fsum([*stalls, *_branching(job, exchanges)])
    reason = outcome.reason or _reason(outcome, job, pushes, overhead_seconds, validated=bool(evaluations))
    branches = _branches_peak(exchanges)
    final = evaluations[-1] if evaluations else Evaluation(0.0, 0, math.nan, math.nan)
    row = Score(
        scenario=scenario,
        tuner=tuner,
        seed=seed,
        status="budget" if dear else outcome.status,
        reason=_too_dear(outcome, job, spent) if dear else reason,
        completion_seconds=outcome.seconds if reached else job.budget_seconds,
        budget_seconds=job.budget_seconds,
        reached=reached,
        reconfigurations=changes,
        overhead_seconds=overhead_seconds,
        slow_seconds=math.fsum(_in_time(job, e, [c.slow_seconds for c in found]) for e, found in costs),
        bytes_moved=math.fsum(c.bytes_moved for _, found in costs for c in found),
        trial_seconds=_training([w for on_path, w in windows if not on_path]),
        clocks=pushes,
        rejected=sum(isinstance(e.answer, Rejected) for e in exchanges),
        final_loss=float(final.loss),
        final_accuracy=float(final.accuracy),
        final_setting=setting_text(settings[-1][1]),
        final_workers=worker_count(settings[-1][1]),
        branches_peak=branches,
        branch_bytes_peak=branches * job.branch_bytes,
        machine_seconds=spent.machine_seconds,
        usd=spent.usd,
        budget_usd=min(job.budget_usd, highest_usd(job.prices, (n.name for n in job.nodes), job.budget_seconds)),
        minimise=job.target.minimise,
    )
    return Scored(row, evaluations, tuple(settings))


def unplayed(
    status: Literal["error", "not applicable"],
    reason: str,
    *,
    scenario: str,
    tuner: str,
    seed: int,
    budget_seconds: float,
    budget_usd: float = math.nan,
    minimise: Literal["seconds", "usd"] = "seconds",
) -> Scored:
    """The row of a run without exchanges: "error" where it failed before the first one, or its process died; "not
    applicable" where it was not played, because its tuner has nothing to tune in the scenario."""
    row = Score(
        scenario=scenario,
        tuner=tuner,
        seed=seed,
        status=status,
        reason=reason,
        completion_seconds=budget_seconds if status == "error" else math.nan,
        budget_seconds=budget_seconds,
        reached=False,
        reconfigurations=0,
        overhead_seconds=0.0,
        slow_seconds=0.0,
        bytes_moved=0.0,
        trial_seconds=0.0,
        clocks=0,
        rejected=0,
        final_loss=math.nan,
        final_accuracy=math.nan,
        final_setting="",
        final_workers=None,
        branches_peak=0,
        branch_bytes_peak=0.0,
        machine_seconds=0.0,
        usd=math.nan,
        budget_usd=budget_usd,
        minimise=minimise,
    )
    return Scored(row, (), ())


class _Path:
    """Which exchanges belong to the branch that trained last, or is at the target, or to its ancestors before the fork."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        forks = {e.answer: (i, e.action.branch) for i, e in enumerate(exchanges) if isinstance(e.action, Fork) and _done(e)}
        # A branch that was evaluated and is at the target cannot train: the last `Run` names it, and is refused.
        trained = [e.action.branch for e in exchanges if isinstance(e.action, Run) and (_done(e) or e.after_end)]
        branch = trained[-1] if trained else 0
        self._until = {branch: len(exchanges)}
        self._forks = set()
        # From the last branch back to the root: an ancestor is on the path until the fork that leads to its descendant.
        while branch in forks:
            index, branch = forks[branch]
            self._forks.add(index)
            self._until[branch] = index

    def holds(self, index: int, exchange: Exchange) -> bool:
        if isinstance(exchange.action, Fork):
            return index in self._forks
        return index < self._until.get(getattr(exchange.action, "branch", 0), 0)


def _in_time(job: Job, exchange: Exchange, seconds: Sequence[float]) -> float:
    """The sum of `seconds` that `exchange` took, without those after the end of the budget: the job is over by then."""
    return max(math.fsum(seconds) - max(exchange.seconds - job.budget_seconds, 0.0), 0.0)


def _training(windows: Sequence[Window]) -> float:
    """Seconds of these windows without those in which nobody trained, because a machine was lost, say: that is overhead."""
    return max(math.fsum([w.seconds for w in windows] + [-c.stall_seconds for w in windows for c in w.changes]), 0.0)


def _branching(job: Job, exchanges: Sequence[Exchange]) -> Iterator[float]:
    """Stall seconds of evaluations, forks and switches between branches: passes over data, copying, refilling caches."""
    before = 0.0
    for exchange in exchanges:
        if isinstance(exchange.answer, Evaluation | GradientNoise):  # its seconds are those at which the pass began
            yield _in_time(job, exchange, [exchange.seconds - exchange.answer.seconds])
        elif isinstance(exchange.action, Fork) and _done(exchange):  # a refused one copies nothing
            yield _in_time(job, exchange, [exchange.seconds - before])
        elif isinstance(exchange.answer, Window):  # it starts earlier if it reports pushes that no window has had yet
            yield max(min(exchange.answer.start_seconds, job.budget_seconds) - before, 0.0)
        before = exchange.seconds


def _branches_peak(exchanges: Sequence[Exchange]) -> int:
    """The largest number of branches at one time."""
    alive = peak = 1
    for exchange in exchanges:
        if _done(exchange):
            alive += isinstance(exchange.action, Fork) - isinstance(exchange.action, Free)
            peak = max(peak, alive)
    return peak


def _costs(exchange: Exchange) -> Iterator[Cost]:
    """The cost of every reconfiguration that `exchange` tells, also of those that the tuner did not wait for."""
    if isinstance(exchange.answer, Cost):
        yield exchange.answer
    elif isinstance(exchange.answer, Window):
        yield from exchange.answer.changes


def _done(exchange: Exchange) -> bool:
    return not isinstance(exchange.answer, Rejected)


def _evaluations(exchanges: Sequence[Exchange], path: _Path) -> Iterator[Evaluation]:
    seen = set()
    for index, exchange in enumerate(exchanges):
        if not _done(exchange) or not path.holds(index, exchange):
            continue
        measured = exchange.answer.evaluations if isinstance(exchange.action, Run) else ()
        if isinstance(exchange.action, Evaluate):
            measured = (exchange.answer,)
        for evaluation in measured:
            if (moment := (evaluation.seconds, evaluation.clocks)) not in seen:
                seen.add(moment)
                yield evaluation


def _settings(job: Job, exchanges: Sequence[Exchange], path: _Path) -> tuple[list[tuple[float, Setting]], int]:
    """The settings along the path, and how often the tuner changed the setting of a branch, by Reconfigure or Fork.

    A reconfiguration that was rolled back does not count. Changes by the system itself (it lost a node, it rolled back) are
    part of the windows and do not count as changes by the tuner.
    """
    of_branch, changes = {0: job.start}, 0
    along, there = [(0.0, job.start)], {n.name for n in job.nodes}
    for index, exchange in enumerate(exchanges):
        action = exchange.action
        if not _done(exchange) or not isinstance(action, Fork | Reconfigure | Run):
            continue
        if isinstance(action, Run):
            setting = exchange.answer.setting or of_branch.get(action.branch, job.start)
            of_branch[action.branch], there = setting, {n.name for n in exchange.answer.nodes}
        elif isinstance(action, Fork):
            parent = of_branch.get(action.branch, job.start)
            setting = wanted_setting(action.setting or parent, parent, job.space, there)
            changes += setting != parent
            of_branch[exchange.answer] = setting
        else:
            before = of_branch.get(action.branch, job.start)
            wanted = wanted_setting(action.setting, before, job.space, there)
            changes += exchange.answer.done and wanted != before
            # With wait=False the new setting is in force once a window reports it.
            setting = wanted if exchange.answer.done and action.wait else before
            of_branch[action.branch] = setting
        if path.holds(index, exchange) and setting != along[-1][1]:
            along.append((exchange.seconds, setting))
    return along, changes


def _too_dear(outcome: Outcome, job: Job, spent: Spending) -> str:
    return (
        f"The target was reached after {outcome.seconds:g} s, and that cost {spent.usd:.4g} USD of {job.budget_usd:g} USD."
    )


def _reason(outcome: Outcome, job: Job, pushes: int, stall: float, *, validated: bool) -> str:
    if outcome.status == "budget":
        missed = f"The target {job.target.metric} {job.target.value:g} was not reached in {job.budget_seconds:g} s"
        if not pushes and stall > job.budget_seconds / 2:
            why = "by what the tuner asked for, or by machines that were lost"
            return f"{missed}: no push was completed, as training was stopped for {stall:g} s of these, {why}."
        if not pushes:
            return f"{missed}: no push was completed in this time. Raise [budget] seconds."
        if not validated and job.target.metric in ("accuracy", "loss"):
            return f"{missed}: the model was not validated once. Lower [target] check_clocks, or raise [budget] seconds."
        return f"{missed}."
    if outcome.status == "diverged":
        return f"The loss was no longer finite after {outcome.seconds:g} s."
    if outcome.status == "deadlock":
        return f"After {outcome.seconds:g} s no worker was left that could push."
    return ""
