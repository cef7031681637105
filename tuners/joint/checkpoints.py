"""When the model is written, where servers have no replicas: Young's interval, from what the job has shown.

A checkpoint pauses all workers for C seconds; a loss of servers, every M seconds, costs what was pushed since the last one.
About sqrt(2 C M) seconds between two checkpoints cost least (Young 1974, "A first order approximation to the optimum
checkpoint interval"). Both are measured as the job runs. After t seconds with n losses, M is taken as t / (n + 1/2), so that
a job without losses writes its model ever less often; until a checkpoint was seen, C is that of a slow store.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tuners.actions import Fork, Job, Reconfigure, Rejected, Run, Setting, Tuner, Window
from tuners.joint.training import Steps, relayed

__all__ = ["LossRecord", "with_checkpoints"]

_STORED_BYTES_PER_SECOND = 20e6  # of a slow store: what TensorFlowOnline's published checkpoints were fitted to
_BEFORE = 0.5  # losses that are counted before any was seen
_NEAR = 1.25  # an interval so near to the best costs 3 % more, of a few per cent


class LossRecord:
    """What is known of the losses of servers, and of the pause that a checkpoint takes."""

    def __init__(self, job: Job, nearest: Callable[[float], float]) -> None:
        self.pause_seconds = job.model_bytes / _STORED_BYTES_PER_SECOND
        self._nearest = nearest  # interval that the job offers
        self._measured = False
        self._seconds = 0.0
        self._moments = set[float]()  # at which servers were lost; those of one moment cost one return

    def see(self, window: Window, servers: frozenset[str]) -> None:
        """Take in a window at whose beginning these were the servers."""
        self._seconds = window.end_seconds
        self._moments |= {e.seconds for e in window.events if e.event in ("failed", "left") and e.node in servers}
        pauses = [c.stall_seconds for c in window.changes if c.steps == ("checkpoint",)]
        if pauses:
            self.pause_seconds, self._measured = pauses[-1], True

    def better(self, seconds: float) -> float:
        """Young's interval, where that is clearly better than `seconds` between two checkpoints; else these."""
        best = float(self._nearest(math.sqrt(2 * self.pause_seconds * self.mean_seconds)))
        return seconds if max(best, seconds) < _NEAR * min(best, seconds) else best

    @property
    def mean_seconds(self) -> float:
        """Between two losses. A job that has just begun is taken to be as old as four checkpoints are long."""
        return max(self._seconds, 4 * self.pause_seconds) / (len(self._moments) + _BEFORE)

    def __str__(self) -> str:
        known = "takes" if self._measured else "may take"
        return f"one {known} {self.pause_seconds:.3g} s, and servers are lost every {self.mean_seconds:.3g} s"


def with_checkpoints(job: Job, tuner: Tuner) -> Tuner:
    """`tuner`, with the interval of checkpoints chosen beside it: it sees that of the start, whichever is in force."""
    start, knob = job.start.checkpoint_seconds, job.space.knob("checkpoint_seconds")
    if knob is None or not start:
        yield from tuner
        return
    losses, branches = LossRecord(job, knob.nearest), {0: job.start}  # the settings in force
    # A short interval soon tells what a checkpoint takes. Later, while servers are away, no change may be accepted.
    if start <= losses.better(start):
        first = yield from Run(seconds=2 * (start + losses.pause_seconds), reason="first, what a checkpoint takes")
        losses.see(first, frozenset(job.start.servers))
        branches[0] = first.setting or job.start
    barred = set[tuple[str, ...]]()  # servers with which no change is accepted: others are to come back first
    yield from _choose(losses, branches, 0, barred)

    def carry_out(action: Any) -> Steps[Any]:
        if isinstance(action, Reconfigure | Fork) and action.setting is not None:
            better = losses.better(branches[action.branch].checkpoint_seconds)
            action = replace(action, setting=replace(action.setting, checkpoint_seconds=better))
        answer = yield from action
        if isinstance(action, Fork):
            branches[answer] = action.setting or branches[action.branch]
        elif isinstance(action, Reconfigure) and answer.done:
            branches[action.branch] = action.setting
        elif isinstance(action, Run):
            losses.see(answer, frozenset(branches[action.branch].servers))
            branches[action.branch] = answer.setting or branches[action.branch]
            if answer.status == "running":
                yield from _choose(losses, branches, action.branch, barred)
            if answer.setting is not None:
                answer = replace(answer, setting=replace(answer.setting, checkpoint_seconds=start))
        return answer

    yield from relayed(tuner, carry_out)


def _choose(losses: LossRecord, branches: dict[int, Setting], branch: int, barred: set[tuple[str, ...]]) -> Steps[None]:
    """Change the interval of `branch` where another is clearly better. That takes effect at once and moves nothing."""
    setting = branches[branch]
    better = losses.better(setting.checkpoint_seconds)
    if better == setting.checkpoint_seconds or setting.servers in barred:
        return
    why = f"a checkpoint every {better:.3g} s instead of {setting.checkpoint_seconds:.3g} s: {losses}"
    wanted = replace(setting, checkpoint_seconds=better)
    try:
        yield from Reconfigure(wanted, branch=branch, reason=why)
    except Rejected:
        barred.add(setting.servers)
    else:
        branches[branch] = wanted
