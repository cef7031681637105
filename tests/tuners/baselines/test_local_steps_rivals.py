"""Rivals with local steps: what they ask for, and their papers' effect where a push takes longer than a mini-batch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

import harness
from tests.support.toy import job, toys
from tuners.actions import Reconfigure, Run
from tuners.baselines.local_steps.adacomm import adacomm, next_period
from tuners.baselines.local_steps.diloco import diloco
from tuners.baselines.local_steps.local_sgd import local_sgd
from tuners.settings import Choice, Integer, Real, Space

RIVALS = (local_sgd, diloco, adacomm)


def local_job(*knobs):
    plain = job()
    return replace(plain, space=Space(plain.start, plain.nodes, knobs))


ALL = (
    Integer("local_steps", 1, 64),
    Real("outer_rate", 0.3, 1.5),
    Real("outer_momentum", 0.0, 0.8),
    Choice("policy", ("asp", "bsp")),
)


def test_each_asks_for_its_papers_rounds_within_what_is_free():
    asked = [next(factory(local_job(*ALL))).setting for factory in RIVALS]
    assert [(s.local_steps, s.outer_rate, s.outer_momentum) for s in asked] == [
        (8, 1.0, 0.0),
        (16, 0.7, 0.8),
        (32, 1.0, 0.0),
    ]
    assert {s.policy for s in asked} == {"bsp"}
    few = next(diloco(local_job(Choice("local_steps", (1, 2, 12))))).setting
    assert (few.local_steps, few.outer_rate, few.policy) == (12, 1.0, "asp")


@pytest.mark.parametrize("factory", RIVALS, ids=lambda f: f.__name__)
def test_where_local_steps_are_held_they_leave_the_job_alone(factory):
    assert list(factory(local_job(ALL[1]))) == []
    assert "held at 1" in vars(factory)["nothing_to_tune"](local_job(ALL[1]))


def test_adacomms_period_follows_the_loss_and_else_halves():
    """Wang and Joshi, Section 4: ceil(sqrt(F / F_0) tau_0) where that is less, else gamma tau."""
    assert next_period(32, 32, 2.0, 0.5, 0.5) == 16
    assert next_period(32, 32, 2.0, 2.0, 0.5) == 16
    assert next_period(16, 32, 2.0, 0.5, 0.5) == 8
    assert next_period(8, 32, 2.0, 0.03, 0.5) == 4
    assert next_period(1, 32, 2.0, 0.03, 0.5) == 1


def test_adacomm_takes_fewer_steps_as_the_loss_falls():
    tuner, of = adacomm(local_job(*ALL)), local_job(*ALL)
    asked, setting, answer = [], None, None
    for loss in (2.0, 0.5, 0.1, 0.02):
        action = tuner.send(answer)
        while isinstance(action, Reconfigure):
            setting = action.setting
            asked.append(setting.local_steps)
            action = tuner.send(None)
        assert isinstance(action, Run)
        assert action.seconds == pytest.approx(0.02 * of.budget_seconds)
        answer = _window(loss, setting)
    assert asked == [32, 16, 8, 4]


def _window(loss, setting):
    seen = toys()["one knob"](0).perform(Run(clocks=6))
    return replace(seen, pushes=seen.pushes._replace(loss=np.full(6, loss)), setting=setting)


@cache
def seconds(tuner, seed=0):
    return harness.play("slow-link", tuner, seed=seed).score.completion_seconds


def test_dilocos_gain_is_not_its_outer_optimizers_alone():
    assert seconds("diloco") < 0.5 * seconds("diloco[steps=1]")


@pytest.mark.parametrize("tuner", ["local_sgd", "diloco", "adacomm"])
def test_local_steps_pay_where_a_push_takes_longer_than_a_mini_batch(tuner):
    assert seconds(tuner) < 0.6 * seconds("fixed")
