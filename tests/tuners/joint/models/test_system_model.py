"""The system model of joint against the simulator, on settings that it has not seen."""

import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.scenario import scenario
from tests.support.toy import job as toy_job
from tests.support.toy import window
from tuners.actions import Run
from tuners.joint.models.system_model import SystemModel


def per_push(found, setting):
    """Seconds per push in the simulator, after the first two mini-batches of each worker."""
    simulated = scenario.system(found, 0, setting)
    simulated.perform(Run(clocks=2 * len(setting.workers)))
    seen = simulated.perform(Run(clocks=20 * len(setting.workers)))
    return seen.seconds / seen.clocks


def test_other_numbers_of_workers_are_ordered_as_in_the_simulator():
    """NMF on 32 alike machines, where servers are the bottleneck from about 24 workers on (Cruise, Table III)."""
    found = scenario.load("cruise-nmf-32")
    simulated = scenario.system(found, 0)
    job, start = simulated.job, simulated.job.start
    model = SystemModel(job)
    model.learn(start, simulated.perform(Run(clocks=3 * len(start.workers))))
    names = [n.name for n in job.nodes]
    settings = [replace(start, workers=tuple(names[:w]), servers=tuple(names[w:])) for w in (8, 16, 22, 25, 29)]
    truth = [per_push(found, s) for s in settings]
    predicted = [model.push_seconds(s) for s in settings]
    assert np.argsort(predicted).tolist() == np.argsort(truth).tolist()
    np.testing.assert_allclose(predicted, truth, rtol=0.25)


QUORUM = """
summary = "Two of eight workers are slow."
[cluster]
nodes = [{ type = "edge-4core", count = 10 }]
[workload]
name = "digits-mlp"
[start]
worker_count = 8
policy = "quorum"
quorum = 6
[free]
learning_rate = { real = [0.001, 1.0], log = true }
quorum = { integer = [0, 8] }
grace_seconds = { real = [0.0, 10.0] }
[target]
metric = "accuracy"
value = 0.94
check_clocks = 50
[budget]
seconds = 20000
[conditions]
jitter = 0.15
stragglers = { nodes = ["n1", "n5"], mean_seconds = 9.0, sd_seconds = 3.0 }
[seeds]
count = 2
"""


def test_rounds_that_end_early_are_predicted_as_in_the_simulator():
    """A quorum was predicted as if nobody waited and nothing was dropped: applied gradients up to twice as often."""
    found = scenario.parse(QUORUM, name="quorum", origin=Path("quorum.toml"))
    simulated = scenario.system(found, 0)
    model, start = SystemModel(simulated.job), simulated.job.start
    simulated.perform(Run(clocks=16))
    model.learn(start, simulated.perform(Run(clocks=24)))
    for changed in ({}, {"quorum": 3}, {"quorum": 7}, {"quorum": 3, "grace_seconds": 2.0}):
        setting = replace(start, **changed)
        simulated = scenario.system(found, 0, setting)
        simulated.perform(Run(clocks=16))
        seen, flow = simulated.perform(Run(clocks=160)), model.flow(setting)
        assert flow.pushes_per_second == pytest.approx(seen.clocks / seen.seconds, rel=0.25)
        if not setting.grace_seconds:
            assert flow.applied == pytest.approx(np.mean(seen.pushes.staleness < setting.quorum), abs=0.1)


def test_transfers_that_queue_at_servers_are_predicted_as_they_were_measured():
    """Their queue was counted twice: a factor from queued transfers was applied to those that queue again."""
    of = toy_job()
    few = replace(of.start, workers=("n0",), servers=("n1", "n2", "n3"), policy="asp")
    many = replace(few, workers=("n0", "n1"), servers=("n2",))
    model = SystemModel(of)
    for setting, pull in ((few, 0.1), (many, 0.5)):
        model.learn(setting, window(of, [1.0] * 8, pull=pull, workers=setting.workers))
        measured = (0.04 + pull + 0.01) / len(setting.workers)
        np.testing.assert_allclose(model.push_seconds(setting), measured, rtol=0.01)
    # What was learned of a busy server leaves what a transfer takes alone.
    np.testing.assert_allclose(model.push_seconds(few), 0.15, rtol=0.01)


def test_two_batch_sizes_tell_the_fixed_part_of_computing():
    of = toy_job()
    model = SystemModel(of)
    for size, seconds in ((8, 0.5), (32, 0.8)):  # 0.4 s fixed and 0.0125 s for each sample
        model.learn(replace(of.start, batch_size=size), window(of, [1.0] * 8, compute=seconds))
    pull = model.push_seconds(replace(of.start, batch_size=32)) / model.push_seconds(replace(of.start, batch_size=8))
    assert 1.0 < pull < 0.8 / 0.5
    small = model.push_seconds(replace(of.start, batch_size=2))
    assert small < model.push_seconds(replace(of.start, batch_size=8))
    assert small > 0.8 * model.push_seconds(replace(of.start, batch_size=8))  # most of it is fixed


def test_cores_of_a_kind_that_was_not_seen_count_once():
    """Amdahl's law for its threads was applied, and then its number of cores again: 16 cores were taken to be 28 times as
    fast as two."""
    of = toy_job()
    slow = replace(of.nodes[0], cores=2)
    fast = replace(of.nodes[1], type="of 16 cores", cores=16)
    of = replace(of, nodes=(slow, fast, *of.nodes[2:]))
    setting = replace(of.start, workers=(slow.name,), servers=(of.nodes[2].name,), intra_threads=0, loads=())
    model = SystemModel(of)
    model.learn(setting, window(of, [1.0] * 4, compute=1.0, workers=setting.workers))
    assert model.compute.seconds(setting, slow.name) == pytest.approx(1.0)
    assert model.compute.seconds(replace(setting, workers=(fast.name,)), fast.name) == pytest.approx(
        (0.1 + 0.9 / 16) / (0.1 + 0.9 / 2)
    )


def test_a_window_that_does_not_tell_compute_seconds_teaches_nothing():
    of = toy_job()
    model = SystemModel(of)
    model.learn(of.start, window(of, [1.0] * 8, compute=math.nan))
    assert not model.knows


@pytest.mark.parametrize("told", [{"workers": ("n2",)}, {"pull": math.nan}], ids=["of others", "without transfers"])
def test_pushes_that_tell_nothing_of_transfers_leave_what_is_known_of_them(told):
    of = toy_job()
    two = replace(of.start, workers=("n0", "n1"), servers=("n3",), loads=())
    model = SystemModel(of)
    model.learn(two, window(of, [1.0] * 8, pull=0.5, workers=two.workers))
    known = model.flow(two)
    model.learn(two, window(of, [1.0] * 8, **{"workers": two.workers} | told))
    assert model.flow(two).pull_seconds == pytest.approx(known.pull_seconds, rel=0.2)


@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_a_slower_machine_makes_every_push_later(policy):
    of = toy_job()
    even, slow = SystemModel(of), SystemModel(of)
    start = replace(of.start, policy=policy)
    first, *others = start.workers
    even.learn(start, window(of, [1.0] * 12, compute=dict.fromkeys(start.workers, 0.5)))
    slow.learn(start, window(of, [1.0] * 12, compute=dict.fromkeys(others, 0.5) | {first: 2.0}))
    assert slow.push_seconds(start) > even.push_seconds(start)


def test_mini_batches_that_were_begun_before_a_change_are_not_measured_as_those_after_it():
    """A smaller batch was four times as fast, but the mini-batches under way were of the old size; it was taken back."""
    of = toy_job()
    model = SystemModel(of)
    small = replace(of.start, batch_size=8)
    model.learn(replace(of.start, batch_size=32), window(of, [1.0] * 8, compute=0.8))
    predicted = model.push_seconds(small)
    model.learn(small, window(of, [1.0] * 8, [10.0 + 0.1 * i for i in range(8)], compute=0.8), since_seconds=10.5)
    assert model.push_seconds(small) == predicted
    model.learn(small, window(of, [1.0] * 8, [20.0 + 0.1 * i for i in range(8)], compute=0.2), since_seconds=10.5)
    assert model.push_seconds(small) < predicted


def test_mini_batches_that_were_begun_with_the_job_are_measured_although_sums_are_rounded():
    """All first mini-batches of `tf36-imagenet8` were left out by 1e-16 s, and machines were chosen by guesses alone."""
    of = toy_job()
    model, seen = SystemModel(of), window(of, [1.0] * 2, np.array([0.6, 0.6]))
    pushes = seen.pushes._replace(
        pull_seconds=np.full(2, 0.1), push_seconds=np.full(2, 0.2), compute_seconds=np.full(2, 0.6 - 0.2 - 0.1 + 1e-16)
    )
    assert (pushes.seconds - pushes.push_seconds - pushes.compute_seconds - pushes.pull_seconds < 0).all()
    assert model.learn(of.start, replace(seen, pushes=pushes))


def test_pulls_that_were_begun_before_a_change_are_not_measured_as_those_after_it():
    """Pulls of 40 s from two servers had begun before six served; the better split was taken back."""
    of = toy_job()
    model = SystemModel(of)
    assert model.learn(of.start, window(of, [1.0] * 8, compute=0.4, pull=4.0))
    predicted = model.push_seconds(of.start)
    assert not model.learn(of.start, window(of, [1.0] * 8, [10.0 + 0.1 * i for i in range(8)], pull=9.0), since_seconds=3.0)
    assert model.push_seconds(of.start) == predicted


def test_local_steps_take_the_seconds_of_as_many_mini_batches_and_one_exchange():
    of = toy_job("local steps")
    model, one = SystemModel(of), of.start
    model.learn(one, window(of, [1.0] * 12, start=100.0, compute=2.0))
    single, many = model.push_seconds(one), model.push_seconds(replace(one, local_steps=8))
    seen = SystemModel(of)
    seen.learn(replace(one, local_steps=8), window(of, [1.0] * 12, start=100.0, compute=16.0))
    assert many == pytest.approx(seen.push_seconds(replace(one, local_steps=8)), rel=0.05)
    assert 7 < many / single < 8
