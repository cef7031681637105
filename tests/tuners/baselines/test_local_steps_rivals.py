"""Rivals with local steps: what they ask for, and their papers' effect where a push takes longer than a mini-batch."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from tests.support.toy import job, toys, window
from tests.tuners.test_policies import MASKS, ORDERS, K, groups, run
from tuners import policies
from tuners.actions import Install, Reconfigure, Rejected, Run
from tuners.baselines.local_steps.adacomm import adacomm, next_period
from tuners.baselines.local_steps.diloco import diloco
from tuners.baselines.local_steps.dylu import dylu, steps_by_speed
from tuners.baselines.local_steps.fedbuff import fedbuff
from tuners.baselines.local_steps.local_sgd import local_sgd
from tuners.baselines.local_steps.quorum import quorum
from tuners.settings import Choice, Integer, Real
from tuners.space import Space

RIVALS = (local_sgd, diloco, adacomm)
UNEQUAL = (dylu, fedbuff, quorum)


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


@pytest.mark.parametrize("factory", [*RIVALS, *UNEQUAL], ids=lambda f: f.__name__)
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


@pytest.mark.slow
def test_dilocos_gain_is_not_its_outer_optimizers_alone():
    assert seconds("diloco") < 0.5 * seconds("diloco[steps=1]")


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["local_sgd", "diloco", "adacomm"])
def test_local_steps_pay_where_a_push_takes_longer_than_a_mini_batch(tuner):
    assert seconds(tuner) < 0.6 * seconds("fixed")


# ------------------------------------------------------------------------------------------- workers of unequal speed


def test_dylu_gives_the_fastest_worker_all_steps_and_the_others_what_they_can_do_in_that_time():
    """Liu et al.: floor(v / max v H), here at least 1."""
    assert steps_by_speed({"a": 2.0, "b": 1.0, "c": 0.74, "d": 0.01}, 8) == {"a": 8, "b": 4, "c": 2, "d": 1}


def test_dylu_asks_once_while_speeds_stay():
    of = local_job(*ALL)
    tuner, asked, answer, setting = dylu(of), [], None, None
    for _ in range(6):
        action = tuner.send(answer)
        if isinstance(action, Reconfigure):
            setting = action.setting
            of.space.check(setting)
            asked.append([setting.steps_of(w) for w in setting.workers])
            action = tuner.send(None)
        assert isinstance(action, Run)
        answer = replace(_window(1.0, setting), workers=_unequal(setting))
    slower = [max(1, 8 // (n + 1)) for n in range(len(of.start.workers))]
    assert asked == [[8] * len(slower), slower]


def _unequal(setting):
    """The n-th worker takes n + 1 seconds for a mini-batch of four samples."""
    seen = toys()["one knob"](0).perform(Run(clocks=6)).workers[0]
    rows = [(w, setting.steps_of(w), n + 1) for n, w in enumerate(setting.workers)]
    return tuple(seen._replace(node=w, pushes=2, samples=2 * h * 4, compute_seconds=2.0 * h * slow) for w, h, slow in rows)


def test_fedbuff_installs_a_buffer_that_nobody_waits_for():
    tuner = fedbuff(replace(local_job(*ALL), installs_policies=True), share=0.5)
    setting = next(tuner).setting
    assert (setting.local_steps, setting.outer_rate, setting.outer_momentum) == (8, 1.0, 0.0)
    installed = tuner.send(None)
    assert isinstance(installed, Install)
    assert installed.policy.name == f"buffered({round(len(setting.workers) / 2)})"
    with pytest.raises(StopIteration):
        tuner.throw(Rejected("Cannot do that: the test refuses it."))


def test_a_quorums_grace_is_a_share_of_a_round():
    of = replace(local_job(*ALL), installs_policies=True)
    tuner = quorum(of, share=0.5, grace=0.25)
    setting = next(tuner).setting
    assert (setting.local_steps, setting.policy) == (8, "bsp")
    assert tuner.send(None) == Run(clocks=2 * len(of.start.workers))
    seen = window(of, [1.0] * 12, compute=0.5, pull=0.29)  # and .01 s for each push
    assert tuner.send(seen).policy.name == f"quorum({round(len(of.start.workers) / 2)},0.2)"


@given(ORDERS, MASKS, st.integers(1, K))
def test_a_buffer_holds_so_many_pushes_and_nobody_waits(order, active, size):
    for group in groups(run(policies.buffered(size), order, active)):
        assert len(group) == size
        assert all(np.flatnonzero(m.release).tolist() == [m.worker] and m.accept for m in group)


def _unequal_speeds():
    """Eight workers, four of which sleep about twelve seconds in every mini-batch; a sample is like any other."""
    return harness.scenario(
        "digits-logistic",
        name="unequal-speeds",
        cluster={"nodes": [{"type": "edge-4core", "count": 10}]},
        workload={"name": "digits-logistic", "overrides": {"aggregation": "mean", "model_bytes": 20e6}},
        start={"worker_count": 8, "policy": "bsp", "batch_size": 8, "learning_rate": 0.05},
        free={
            "worker_count": None,
            "policy": None,
            "learning_rate": None,
            "batch_size": None,
            "local_steps": {"integer": [1, 64], "log": True},
        },
        rules={"install_policies": True},
        conditions={
            "sleeps": None,
            "jitter": 0.1,
            "stragglers": {"nodes": ["n4", "n5", "n6", "n7"], "mean_seconds": 12.0, "sd_seconds": 1.0},
        },
        target={"metric": "accuracy", "value": 0.9, "check_clocks": 8},
        budget={"seconds": 40000},
    )


def _sleepers():
    """The same eight workers, none slow, each of which falls asleep for a minute in 3 % of its mini-batches."""
    sleeps = {"probability": 0.03, "mean_seconds": 60.0, "sd_seconds": 20.0}
    return harness.scenario(
        _unequal_speeds(), name="sleepers", conditions={"stragglers": None, "jitter": 0.3, "sleeps": sleeps}
    )


@cache
def unequal_seconds(tuner, seed=0):
    return harness.play(_unequal_speeds(), tuner, seed=seed).score.completion_seconds


@pytest.mark.slow
@pytest.mark.parametrize("tuner", ["dylu", "fedbuff"])
def test_workers_of_unequal_speed_need_no_equal_rounds(tuner):
    """Nguyen et al.: 3.3 times as fast as synchronous rounds; Liu et al.: sooner with local steps by speed."""
    assert unequal_seconds(tuner) < 0.6 * unequal_seconds("local_sgd")


@pytest.mark.slow
def test_a_quorum_is_faster_than_waiting_for_workers_that_sleep():
    took = {
        t: sum(harness.play(_sleepers(), t, seed=s).score.completion_seconds for s in range(2))
        for t in ("local_sgd", "quorum")
    }
    assert took["quorum"] < 0.85 * took["local_sgd"]
