"""A system whose losses follow a formula: each branch starts from its parent's loss, which falls as its setting says."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from tests.support.toy import window
from tuners.actions import Evaluate, Evaluation, Fork, Free, Job, Run, Setting, Space, Target
from tuners.playing.system import branch_of
from tuners.settings import Choice, Knob, Node, Real

NODES = (Node("w0", "toy", 2, ("cpu",), 1e9, 1e9), Node("w1", "toy", 2, ("cpu",), 1e9, 1e9))
START = Setting(workers=("w0", "w1"), servers=("w0", "w1"), policy="ssp", batch_size=10, learning_rate=0.01)
RATE = Real("learning_rate", 1e-3, 1.0, log=True)
EPOCH = 50  # pushes, of one second each
_FAR = Target("accuracy", 2.0)


def job(*knobs: Knob, target: Target = _FAR, **changes: Any) -> Job:
    """A job with 50 pushes per epoch and a target that is out of reach."""
    return Job(
        name="forest",
        nodes=NODES,
        start=START,
        space=Space(START, NODES, knobs or (RATE,)),
        target=target,
        budget_seconds=1e6,
        model_bytes=1e6,
        samples=500,
        seed=changes.pop("seed", 3),
        **changes,
    )


def falls(setting: Setting, loss: float, clocks: int) -> float:
    """The loss after one push: it falls by a tenth of the learning rate, relatively; rates from 0.5 on diverge."""
    del clocks
    return loss * (1 - setting.learning_rate / 10) if setting.learning_rate < 0.5 else loss * 4


@dataclass
class Branch:
    setting: Setting
    loss: float
    clocks: int = 0  # since the job began
    trained: int = 0  # since it was forked
    testing: bool = False
    seconds: list[float] = field(default_factory=list)  # of each run


@dataclass
class Forest:
    """Runs branches. `law` gives the loss after one more push, `accuracy` the accuracy of a branch."""

    job: Job
    law: Callable[[Setting, float, int], float] = falls
    accuracy: Callable[[Branch], float] = lambda b: 1 - b.loss
    pace: Callable[[Setting], float] = lambda _: 1.0  # seconds per push
    now: float = 0.0
    status: str = "running"
    log: list[tuple[Any, Any]] = field(default_factory=list)
    live_after: list[int] = field(default_factory=list)  # branches after each action
    branches: dict[int, Branch] = field(default_factory=dict)
    dead: dict[int, Branch] = field(default_factory=dict)
    next: int = 1

    def __post_init__(self) -> None:
        self.branches[0] = Branch(self.job.start, 1.0)

    def perform(self, action: Any) -> Any:
        answer = self._answer(action)
        self.log.append((action, answer))
        self.live_after.append(len(self.branches))
        return answer

    def _answer(self, action: Any) -> Any:
        branch = branch_of(self.branches, action.branch)
        if isinstance(action, Fork):
            self.job.space.check(action.setting or branch.setting)
            child = replace(branch, setting=action.setting or branch.setting, testing=action.testing, trained=0, seconds=[])
            self.next += 1
            self.branches[self.next - 1] = child
            return self.next - 1
        if isinstance(action, Free):
            self.dead[action.branch] = self.branches.pop(action.branch)
            return None
        if isinstance(action, Evaluate):
            return Evaluation(self.now, branch.clocks, branch.loss, self.accuracy(branch))
        return self._run(branch, action)

    def _run(self, branch: Branch, action: Run) -> Any:
        pace = self.pace(branch.setting)
        count = action.clocks if action.clocks is not None else int((action.seconds or 0) / pace)
        start, losses = self.now, []
        for _ in range(count):
            losses.append(branch.loss)
            if not branch.testing:
                branch.loss = self.law(branch.setting, branch.loss, branch.clocks)
                branch.clocks += 1
                branch.trained += 1
            self.now += pace
            if not math.isfinite(branch.loss):
                break
        if action.seconds is not None:
            self.now = start + action.seconds
        branch.seconds.append(self.now - start)
        seen = window(self.job, losses, start + pace * (1.0 + np.arange(len(losses))), start=start)
        lost = not math.isfinite(branch.loss)
        return replace(seen, end_seconds=self.now, setting=branch.setting, status="diverged" if lost else "running")

    # ------------------------------------------------------------------------------------------------------- actions

    def asked(self, kind: type[Any]) -> list[Any]:
        return [a for a, _ in self.log if isinstance(a, kind)]

    def trials(self) -> list[tuple[int, Setting]]:
        """Branches that were forked with a setting of their own, in order."""
        return [(answer, a.setting) for a, answer in self.log if isinstance(a, Fork) and a.setting is not None]

    def seconds_of(self, branch: int) -> list[float]:
        return (self.branches.get(branch) or self.dead[branch]).seconds


class Scripted:
    """A searcher that proposes given learning rates in order, and records the scores."""

    def __init__(self, *rates: float) -> None:
        self.rates = list(rates)
        self.told: list[tuple[float, float]] = []

    def __call__(self, space: Space, seed: Any) -> Scripted:
        return self

    def propose(self) -> dict[str, Any] | None:
        return {"learning_rate": self.rates.pop(0)} if self.rates else None

    def tell(self, values: Any, score: float) -> None:
        self.told.append((values["learning_rate"], score))


ONE_POINT = (Real("learning_rate", 0.01, 0.01), Choice("batch_size", (10,)))
