"""A mini-batch of an emulated worker takes what the simulator draws for it."""

import time

import numpy as np
import pytest

from harness.drive import play
from harness.live.protocol.messages import Release
from harness.live.worker.emulated_compute import EmulatedCompute
from harness.live.worker.spec import Spec
from harness.live.worker.tasks import WorkerTask
from harness.scenario import system
from tuners.actions import Run

TEXT = """
summary = "Three machines of two types, some of which sleep."
[cluster]
nodes = [{ type = "c4.2xlarge", count = 2, prefix = "slow" }, { type = "c4.8xlarge", count = 2, prefix = "fast" }]
[workload]
name = "digits-logistic"
[workload.overrides.demand]
sample_seconds = 1e-3
fixed_seconds = 2e-3
message_seconds = 0.0
[start]
workers = ["slow0", "slow1", "fast0"]
servers = ["fast1"]
policy = "asp"
batch_size = 16
learning_rate = 0.01
[target]
metric = "clocks"
value = 60
check_clocks = 60
[budget]
seconds = 100
[conditions]
jitter = 0.3
stagger = false
stragglers = { nodes = ["fast0"], mean_seconds = 0.05, sd_seconds = 0.02 }
sleeps = { probability = 0.5, mean_seconds = 0.02, sd_seconds = 0.01 }
"""
SPEC = Spec("slow", "slow.toml", TEXT, 3)
NODES = ("slow0", "slow1", "fast0")


def fixed(job):
    yield from Run(clocks=60)


def test_the_draws_are_those_of_the_simulated_run():
    window = play(fixed, system(SPEC.scenario, 3)).exchanges[0].answer
    pushes = window.pushes
    for index, node in enumerate(NODES):
        emulated = EmulatedCompute(SPEC, node)
        mine = pushes.worker == index
        drawn = [sum(emulated.seconds(int(clock), 16, 0, 0)) for clock in pushes.clock[mine]]
        assert len(drawn) >= 3
        assert drawn == pytest.approx(pushes.compute_seconds[mine])
    assert {EmulatedCompute(SPEC, node).seconds(0, 16, 0, 0)[1] > 0 for node in NODES} == {True, False}


def test_a_mini_batch_lasts_as_long_as_was_drawn_and_computes_the_same():
    emulated, work = EmulatedCompute(SPEC, "fast0"), Release(1, 0, 7, 0, 0, 16, 0, 100, slowdown=1.5)
    task = WorkerTask("gradient", 1, work, SPEC.parameters)
    plain, began = SPEC.compute(task), time.monotonic()
    made = emulated(task)
    took = time.monotonic() - began
    assert took >= made.seconds >= 1.5 * sum(emulated.seconds(7, 16, 0, 0))
    assert made.loss == plain.loss
    np.testing.assert_array_equal(made.gradient, plain.gradient)


def test_what_is_no_mini_batch_is_not_slowed_down():
    task = WorkerTask("evaluate", 1, None, SPEC.parameters)
    assert EmulatedCompute(SPEC, "slow0")(task).loss == SPEC.compute(task).loss
