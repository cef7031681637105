"""When the model is written, where servers have no replicas: Young's interval (`models.machine_losses`), as both of
its terms become known while the job runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from tuners.actions import Fork, Job, Reconfigure, Rejected, Run, Setting, Tuner
from tuners.joint.job.steps import Steps, relayed
from tuners.joint.models.machine_losses import MachineLosses

__all__ = ["first_checkpoint_seconds", "with_checkpoints"]

_NEAR = 1.25  # an interval so near to the best costs 3 % more, of a few per cent


def first_checkpoint_seconds(job: Job, losses: MachineLosses) -> float:
    """How long a job trains as it begins, so that its first checkpoint tells what one takes; 0: not worth waiting for.

    A short interval soon tells that. Later, while servers are away, no change may be accepted.
    """
    start, knob = job.start.checkpoint_seconds, job.space.knob("checkpoint_seconds")
    is_short = knob is not None and 0 < start <= _Choice(losses, knob.nearest).of(job.start)
    return 2 * (start + losses.pause_seconds) if is_short else 0.0


def with_checkpoints(job: Job, tuner: Tuner, losses: MachineLosses) -> Tuner:
    """`tuner`, with the interval of checkpoints chosen beside it: it sees that of the start, whichever is in force. Where
    the first checkpoint is worth waiting for, the tuner waits."""
    start, knob = job.start.checkpoint_seconds, job.space.knob("checkpoint_seconds")
    if knob is None or not start:
        yield from tuner
        return
    choice, branches = _Choice(losses, knob.nearest), {0: job.start}  # the settings in force
    if not first_checkpoint_seconds(job, losses):
        yield from choice.make(branches, 0)

    def carry_out(action: Any) -> Steps[Any]:
        if isinstance(action, Reconfigure | Fork) and action.setting is not None:
            now = branches[action.branch].checkpoint_seconds
            better = choice.of(replace(action.setting, checkpoint_seconds=now))
            action = replace(action, setting=replace(action.setting, checkpoint_seconds=better))
        answer = yield from action
        if isinstance(action, Fork):
            branches[answer] = action.setting or branches[action.branch]
        elif isinstance(action, Reconfigure) and answer.done:
            branches[action.branch] = action.setting
        elif isinstance(action, Run):
            losses.see(answer)
            branches[action.branch] = answer.setting or branches[action.branch]
            if answer.status == "running":
                yield from choice.make(branches, action.branch)
            if answer.setting is not None:
                answer = replace(answer, setting=replace(answer.setting, checkpoint_seconds=start))
        return answer

    yield from relayed(tuner, carry_out)


class _Choice:
    """The interval of each branch."""

    def __init__(self, losses: MachineLosses, nearest: Callable[[float], float]) -> None:
        self._losses, self._nearest = losses, nearest  # `nearest`: interval that the job offers
        self._barred = set[tuple[str, ...]]()  # servers with which no change is accepted: others are to come back first

    def of(self, setting: Setting) -> float:
        """Young's interval for these servers, where that is clearly better than that of `setting`; else this."""
        now, losses = setting.checkpoint_seconds, self._losses
        best = float(self._nearest(math.sqrt(2 * losses.pause_seconds * losses.mean_seconds(setting.servers))))
        return now if max(best, now) < _NEAR * min(best, now) else best

    def make(self, branches: dict[int, Setting], branch: int) -> Steps[None]:
        """Change the interval of `branch` where another is clearly better. That takes effect at once and moves nothing."""
        setting, losses = branches[branch], self._losses
        better = self.of(setting)
        if better == setting.checkpoint_seconds or setting.servers in self._barred:
            return
        known = "takes" if losses.measured else "may take"
        why = (
            f"a checkpoint every {better:.3g} s instead of {setting.checkpoint_seconds:.3g} s: one {known} "
            f"{losses.pause_seconds:.3g} s, and {losses.told(setting.servers)}"
        )
        wanted = replace(setting, checkpoint_seconds=better)
        try:
            yield from Reconfigure(wanted, branch=branch, reason=why)
        except Rejected:
            self._barred.add(setting.servers)
        else:
            branches[branch] = wanted
