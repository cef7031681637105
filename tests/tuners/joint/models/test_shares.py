"""Loads of devices and shares of data and model: a job that freed them ran with those that it had begun with."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.drive import play
from harness.scenario import scenario
from tests.support.toy import job, window
from tests.tuners.joint.test_joint import fixed
from tuners.actions import ServerWindow
from tuners.joint import joint
from tuners.joint.models.shares import Shares
from tuners.joint.models.system_model import SystemModel
from tuners.settings import Choice, Integer, Real


def balancing(of, start, knobs, **target):
    """The job with this start and these knobs, its system model, and what balances its settings."""
    of = replace(of, start=start, target=replace(of.target, **target))
    of = replace(of, space=replace(of.space, base=start, knobs=tuple(knobs)))
    model = SystemModel(of)
    return of, model, Shares(of, model)


def whole_batch(samples=30, knob=Real, **more):
    """Two workers that share out a batch and wait for each other; the second is four times as fast."""
    of = job("no knobs")
    workers, servers = tuple(n.name for n in of.nodes[:2]), (of.nodes[2].name,)
    half = (samples // 2,)
    start = replace(of.start, workers=workers, servers=servers, loads=(half, half), policy="bsp", **more)
    high = 1.0 if knob is Real else samples
    of, model, shares = balancing(of, start, [knob(f"load/{w}/0", 0 if knob is Integer else 0.0, high) for w in workers])
    for each in (half[0], max(half[0] // 5, 1)):  # 0.1 s fixed, and 0.04 or 0.01 s for each sample
        seconds = dict(zip(workers, (0.1 + 0.04 * each, 0.1 + 0.01 * each), strict=True))
        loads = ((each,), (each,))
        model.learn(replace(start, loads=loads), window(of, [1.0] * 8, compute=seconds, workers=workers))
    return of, model, shares


def test_devices_that_wait_for_each_other_end_at_the_same_time():
    of, _, shares = whole_batch()
    slow, fast = (row[0] for row in shares.balanced(of.start).loads)
    assert slow + fast == 30
    assert 0.1 + 0.04 * slow == pytest.approx(0.1 + 0.01 * fast, abs=0.06)


def test_half_as_uneven_loads_are_compared_too_where_the_job_learns():
    of, _, shares = whole_batch()
    full, half = shares.choices(of.start)
    assert full.loads[0][0] < half.loads[0][0] < 15
    assert shares.coverage(full) < shares.coverage(half) < shares.coverage(of.start) == 1.0


def test_loads_of_workers_that_do_not_wait_stay():
    of, _, shares = whole_batch()
    assert shares.balanced(replace(of.start, policy="asp")).loads == of.start.loads


@pytest.mark.parametrize(("policy", "workers"), [("bsp", 2), ("bsp", 1), ("asp", 2)])
def test_loads_are_of_the_mini_batch_that_is_chosen(policy, workers):
    """Mini-batches of 64 were chosen, and a rate four times as high for them, while the one worker had a load of 4."""
    of, model, shares = whole_batch(8, Integer)
    of = replace(of, space=replace(of.space, knobs=(*of.space.knobs, Choice("batch_size", (4, 64)))))
    shares = Shares(of, model)
    small = replace(of.start, policy=policy, batch_size=4, workers=of.start.workers[:workers], loads=((4,),) * workers)
    assert sum(map(sum, shares.balanced(small).loads)) == 4 * workers
    large = shares.balanced(replace(small, batch_size=64))
    assert sum(map(sum, large.loads)) in (64 * workers, 0)  # without loads, the first device has all


def test_the_knob_of_a_device_bounds_its_samples():
    of, model, _ = whole_batch(knob=Integer)
    knobs = [replace(k, high=18) for k in of.space.knobs]
    bounded = replace(of, space=replace(of.space, knobs=tuple(knobs)))
    loads = Shares(bounded, model).balanced(of.start).loads
    assert loads == ((12,), (18,))


def test_every_device_keeps_a_sample():
    of, _, shares = whole_batch(samples=4)
    assert min(row[0] for row in shares.balanced(of.start).loads) == 1


def test_servers_hold_as_much_as_they_serve():
    of = job("no knobs")
    names = [n.name for n in of.nodes]
    start = replace(of.start, workers=(names[0],), servers=tuple(names[1:3]))
    of, model, shares = balancing(of, start, [Real(f"model_share/{n}", 0.0, 1.0) for n in names])
    assert shares.balanced(start).model_shares == ()
    rate = of.nodes[1].nic_bytes_per_second
    seen = replace(
        window(of, [1.0] * 4, workers=start.workers),
        servers=(ServerWindow(names[1], rate, 1.0, 0.0, 0.0), ServerWindow(names[2], rate, 4.0, 0.0, 0.0)),
    )
    model.learn(start, seen)
    assert shares.balanced(start).model_shares == pytest.approx((0.8, 0.2))


def test_a_worker_gets_as_much_of_the_work_as_it_completes():
    of = job("no knobs")
    names = [n.name for n in of.nodes]
    start = replace(of.start, workers=tuple(names[:2]), servers=(names[2],), policy="asp")
    knobs = [Real(f"data_share/{n}", 0.0, 1.0) for n in names]
    of, model, shares = balancing(of, start, knobs, metric="clocks", value=100.0, by_share=True)
    model.learn(start, window(of, [1.0] * 8, compute={names[0]: 0.97, names[1]: 0.22}, pull=0.02, workers=start.workers))
    found = shares.balanced(start)
    np.testing.assert_allclose(found.data_shares, (0.2, 0.8))  # cycles of 1 s and of 0.25 s
    assert shares.push_seconds(found) == pytest.approx(0.2)
    assert shares.push_seconds(start) == pytest.approx(0.5)


LOADS = """
summary = "Machines of three speeds share out each batch, and wait for each other."
[cluster]
nodes = [
  { type = "edge-2core", count = 3, prefix = "a" },
  { type = "server-16core", count = 3, prefix = "b" },
  { type = "server-16core", count = 1, prefix = "s" },
]
[workload]
name = "digits-logistic"
overrides = { aggregation = "mean", skew = SKEW }
[start]
workers = ["a0", "a1", "a2", "b0", "b1", "b2"]
servers = ["s0"]
policy = "bsp"
global_batch_size = 72
learning_rate = 0.05
[free]
"load/*" = { real = [0.0, 1.0] }
MORE
[target]
metric = "accuracy"
value = 0.9
check_clocks = 12
[budget]
seconds = 40000
[seeds]
count = 2
"""
DATA = '"data_share/*" = { real = [0.0, 1.0] }'


def over_fixed(skew, more):
    """Seconds of `joint` over those of `fixed`."""
    text = LOADS.replace("SKEW", str(skew)).replace("MORE", more)
    found = scenario.parse(text, name="loads", origin=Path("loads.toml"))
    ours, theirs = (play(factory, scenario.system(found, 0)).outcome for factory in (joint, fixed))
    assert ours.status == theirs.status == "target"
    return ours.seconds / theirs.seconds


@pytest.mark.slow
def test_slow_machines_compute_less_and_hold_less_of_the_data():
    assert over_fixed(0.0, DATA) < 0.6


@pytest.mark.slow
def test_where_workers_data_differ_their_loads_become_equal_again():
    """What fast workers' data alone had taught the model took three times as long to unlearn as the job does."""
    assert over_fixed(0.7, "") < 1.3
