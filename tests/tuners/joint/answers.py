"""Answers, made by hand, to steps of joint: its tests show it windows that it would hardly meet in a simulation."""

import math
from dataclasses import replace

import numpy as np

from tests.support.toy import job, window
from tuners.actions import Cost, Evaluate, Evaluation, Fork, Reconfigure, Rejected, Run
from tuners.joint.learning.holding import RuleParts
from tuners.joint.tuner import JointCourse
from tuners.settings import Real

RATE = Real("learning_rate", 0.001, 100.0, log=True)


DONE = Cost(seconds=0.0, stall_seconds=0.0)


def of(*, space=None, target=None, nodes=None, **changed):
    made = job("every knob")
    target = replace(made.target, metric="loss", value=0.1) if target is None else target
    space = made.space if space is None else replace(made.space, knobs=space)
    return replace(made, target=target, space=space, budget_seconds=1e5, **changed)


class Answers:
    """Answers a tuner's steps: every window has the losses that `losses(setting, clocks)` gives."""

    def __init__(self, job, losses, refuse=lambda action: False):
        self.job, self.losses, self.refuse = job, losses, refuse
        self.asked, self.settings, self.branches, self.now = [], {0: job.start}, 0, 0.0

    def run(self, steps):
        """Carry out `steps` to their end; returns their result."""
        answer = None
        while True:
            try:
                action = steps.throw(answer) if isinstance(answer, Rejected) else steps.send(answer)
            except StopIteration as end:
                return end.value
            self.asked.append(action)
            answer = Rejected("not now") if self.refuse(action) else self.answer(action)

    def answer(self, action):
        if isinstance(action, Run):
            losses = self.losses(self.settings[action.branch], action.clocks)
            made = window(self.job, losses, self.now + np.arange(1.0, action.clocks + 1))
            self.now += action.clocks
            return made
        if isinstance(action, Reconfigure):
            self.settings[action.branch] = action.setting
            return DONE
        if isinstance(action, Fork):
            self.branches += 1
            self.settings[self.branches] = self.settings[action.branch]
            return self.branches
        return Evaluation(self.now, 0, 1.0, float("nan")) if isinstance(action, Evaluate) else None

    def changes(self):
        return [a.setting for a in self.asked if isinstance(a, Reconfigure)]

    def show(self, *windows, after=(9.0, 9.0), spread=0.0, evaluated=None):
        """Let each window have a training loss, give or take `spread`, and a validation: loss (None: none was due) and
        accuracy. `after`: the windows from then on. An `Evaluate` finds the loss `evaluated`."""
        left, answer = iter(windows), self.answer

        def validated(action):
            if isinstance(action, Evaluate) and evaluated is not None:
                return Evaluation(self.now, 0, evaluated, math.nan)
            if not isinstance(action, Run):
                return answer(action)
            trained, loss, *accuracy = next(left, after)
            self.losses = lambda _setting, clocks: [trained + spread * (-1) ** i for i in range(clocks)]
            made = answer(action)
            found = () if loss is None else (Evaluation(made.end_seconds, 0, loss, *(accuracy or [math.nan])),)
            return replace(made, evaluations=found)

        self.answer = validated


def course(made, *, prior=False):
    begun = JointCourse(made, RuleParts(prior=prior))
    begun.gauge.begin(1.0)
    return begun


def flat(_setting, clocks):
    return [1.0 + 0.1 * (-1) ** i for i in range(clocks)]


def noisy_validations(made, answers, levels):
    """Every evaluation gives the loss that `levels(setting)` tells."""
    answer = answers.answer

    def measured(action):
        if isinstance(action, Run) and answers.now > 5_000:
            return replace(answer(action), status="budget")
        if isinstance(action, Evaluate):
            return Evaluation(answers.now, 0, levels(answers.settings[action.branch]), float("nan"))
        return answer(action)

    answers.answer = measured
