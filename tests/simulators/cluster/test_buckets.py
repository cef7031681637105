"""Token buckets on what machines send: exact rates, agreement with the reference simulation, buckets belong to machines."""

import math
import warnings
from itertools import product

import msgspec
import numpy as np
import pytest

import harness
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Bucket, Conditions, Episode, check
from simulators.engine import changes
from simulators.engine.links import network
from simulators.workloads.workload import Demand
from tests.support.marks import slow
from tests.support.oracle import Bounded, Oracle
from tests.support.small_jobs import CHEAP, KNOBS, NAMES, SMALL, branch, cluster, job, machine, start, system
from tuners.actions import Fork, Reconfigure, Run

CALM = Conditions(jitter=0.0, stagger=False)


SIZES = [pytest.param(network.MANY_NICS, id="few nodes"), pytest.param(1, id="as in large clusters", marks=pytest.mark.slow)]


@pytest.fixture(params=SIZES, autouse=True)
def many_nics(request, monkeypatch):
    monkeypatch.setattr(network, "MANY_NICS", request.param)


def timed(conditions, seed=0, setting=None, **changed):
    """Five nodes, three of them workers; nothing is learned."""
    rules = {"knobs": KNOBS, "costs": CHEAP, "cluster": cluster()} | changed
    return system(rules.pop("cluster"), job(SMALL), setting or start(), conditions, seed, **rules)


def alone(conditions, **demand):
    """One worker on a NIC of 100 bytes/s, two servers: pulls of 100 bytes, computes for two seconds, pushes 100."""
    kinds = Cluster(tuple((n, machine(100.0)) for n in NAMES))
    one = start(workers=("a",), servers=("b", "c"))
    return system(kinds, job(Demand(**({"model_bytes": 100.0, "sample_seconds": 0.25} | demand))), one, conditions)


def test_an_empty_bucket_throttles_to_the_refill_rate():
    """The worker sends 100 bytes in a second and gains 10 tokens per second. A cycle without waiting takes 4 s, so the first
    push leaves 60 of 150 tokens, the second leaves none, and the third starts with 30."""
    seen = alone(msgspec.structs.replace(CALM, buckets=(Bucket(("a",), 150.0, 10.0),))).perform(Run(clocks=3))
    assert seen.pushes.push_seconds.tolist() == pytest.approx([1.0, 1.0, 1 / 3 + (100 - 100 / 3) / 10])
    assert seen.pushes.pull_seconds.tolist() == pytest.approx([1.0] * 3)


def test_servers_throttle_pulls():
    """Each server sends half a pull. The first pull has tokens; the other 3 s of a cycle do not bring all of them back."""
    throttled = (Bucket(("b", "c"), 50.0, 50.0 / 4.5),)
    seen = alone(msgspec.structs.replace(CALM, buckets=throttled)).perform(Run(clocks=6)).pushes
    assert seen.push_seconds.tolist() == pytest.approx([1.0] * 6)
    # At full rate a pull takes a second and 50 - 50/4.5 tokens; between two of them 3 s bring 33.3.
    tokens, expected = 50.0, []
    for _ in range(6):
        seconds = min(1.0, tokens / (50 - 50 / 4.5))
        left = 50 - 50 * seconds
        expected.append(seconds + left / (50 / 4.5))
        tokens = 50 / 4.5 * 3 + (tokens - (50 - 50 / 4.5) if left == 0 else 0.0)
    assert seen.pull_seconds.tolist() == pytest.approx(expected)
    assert max(expected) > 1.01


def test_servers_tell_the_rate_that_an_empty_bucket_leaves_them():
    """Of 50 bytes, at most one has a token, and the others leave at the refill rate; the other server sends 100 bytes/s."""
    run = alone(msgspec.structs.replace(CALM, buckets=(Bucket(("b",), 1.0, 5.0),)))
    parts = [run.perform(Run(clocks=n)).servers for n in (1, 2, 3)]
    for throttled, free in parts:
        assert throttled.pull_bytes / throttled.pull_seconds == pytest.approx(50 / (49 / 5 + 1 / 100), rel=0.02)
        assert free.pull_bytes / free.pull_seconds == pytest.approx(100.0)
    plenty = alone(msgspec.structs.replace(CALM, buckets=(Bucket(("b",), 1e9, 5.0),))).perform(Run(clocks=6)).servers
    assert plenty == alone(CALM).perform(Run(clocks=6)).servers


@pytest.mark.slow
def test_cruise_uses_more_servers_where_buckets_throttle_them():
    tables = {
        "cluster": {"nodes": [{"type": "m4.xlarge", "count": 8}]},
        "workload": {"name": "cruise-mlr"},
        "start": {"worker_count": 6},
        "free": {"worker_count": {"integer": [1, 7]}},
        "target": {"metric": "clocks", "value": 300},
        "budget": {"seconds": 60_000},
        "conditions": {
            "buckets": [{"nodes": [f"n{i}" for i in range(8)], "capacity_bytes": 1e9, "refill_bytes_per_second": 1.5e7}]
        },
    }
    arena = harness.scenario(name="throttled", **tables)
    cruise, fixed = (harness.play(arena, t, seed=0).score for t in ("cruise", "fixed"))
    assert cruise.final_workers < 6
    assert cruise.completion_seconds < fixed.completion_seconds


def test_a_bucket_that_is_never_empty_changes_nothing():
    full = msgspec.structs.replace(CALM, buckets=(Bucket(NAMES, 1e9, 1.0),))
    one, other = (timed(c, seed=1).perform(Run(clocks=60)).pushes for c in (CALM, full))
    for name in one._fields:
        np.testing.assert_allclose(getattr(one, name), getattr(other, name), rtol=1e-9, atol=1e-9)


TIGHT = (Bucket(("a", "d"), 150.0, 20.0), Bucket(("e",), 400.0, 35.0))


ROLES = {"asp": {}, "bsp": {"policy": "bsp"}, "both roles": {"workers": NAMES[:4], "servers": NAMES[2:], "batch_size": 4}}
EACH_ONCE = {
    ("asp", False, "maxmin"),
    ("bsp", False, "fifo"),
}


@pytest.mark.parametrize("many_nics", [slow(network.MANY_NICS), 1], ids=["few nodes", "as in large clusters"], indirect=True)
@pytest.mark.parametrize(
    ("roles", "independent", "discipline"),
    [
        pytest.param(*each, marks=() if each in EACH_ONCE else pytest.mark.slow)
        for each in product(ROLES, (False, True), ("maxmin", "fifo", "serial"))
    ],
)
def test_the_reference_simulation_agrees_on_buckets(roles, independent, discipline):
    """Throttled workers and servers, slow-downs, noise: event by event as in the plain simulation."""
    conditions = Conditions(buckets=TIGHT, episodes=(Episode("b", 10.0, 25.0, 2.0),))
    setting = start(**ROLES[roles])
    machines = cluster(discipline, independent_flows=independent)
    seen = timed(conditions, seed=4, setting=setting, cluster=machines).perform(Run(clocks=150)).pushes
    bound = 0 if setting.policy == "bsp" else np.inf
    judge = Oracle(machines, job(SMALL), setting, conditions, Bounded(bound), 4).run(150)
    np.testing.assert_array_equal(seen.worker, judge.column("worker"))
    np.testing.assert_allclose(seen.seconds, judge.column("seconds"), rtol=1e-9)
    calm = Conditions(episodes=conditions.episodes)
    free = timed(calm, seed=4, setting=setting, cluster=machines).perform(Run(clocks=150)).pushes
    assert seen.seconds[-1] > 1.1 * free.seconds[-1]


def test_all_branches_share_the_buckets_of_the_machines():
    """A branch starts with the tokens that the branch before it left; during a stall, tokens come back."""
    simulated = timed(Conditions(buckets=(Bucket(NAMES, 300.0, 1.0),)), setting=start(policy="bsp"))
    simulated.perform(Run(clocks=30))
    spent, then = np.asarray(branch(simulated).clock.flight.tokens), simulated.now
    assert (spent < 50).any()
    child = simulated.perform(Fork())
    simulated.perform(Run(clocks=1, branch=child))
    now = np.asarray(branch(simulated, child).clock.flight.tokens)
    assert (now <= spent + (simulated.now - then) + 1e-9).all()
    before = simulated.now
    simulated.perform(Reconfigure(start(policy="bsp", intra_threads=1), method="checkpoint", branch=child))
    restarted = np.asarray(branch(simulated, child).clock.flight.tokens)
    assert simulated.now >= before + CHEAP.restart_seconds
    assert (restarted > CHEAP.restart_seconds - 1e-9).all()


def test_no_pause_between_branches_leaves_buckets_as_they_are():
    """Nodes without a bucket have one without end, whose refill is infinite: in no time, it gains nothing, too."""
    simulated = timed(Conditions(buckets=TIGHT), seed=4)
    simulated.perform(Run(clocks=20))
    one, held = simulated.branches[0], np.asarray(branch(simulated).clock.flight.tokens)
    assert np.isinf(held).any()
    assert np.isfinite(held).any()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        resumed = changes.resumed(one.inputs, one.state, 0.0)
    np.testing.assert_array_equal(resumed.clock.flight.tokens, held)


@pytest.mark.parametrize(
    ("buckets", "reason"),
    [
        ((Bucket(("z",), 1.0, 1.0),), "'z'"),
        ((Bucket(("a", "b"), 1.0, 1.0), Bucket(("b",), 1.0, 1.0)), "Cannot give b two buckets"),
        ((Bucket(("a",), -1.0, 1.0),), "buckets.capacity_bytes = -1.0"),
        ((Bucket(("a",), math.inf, 1.0),), "buckets.capacity_bytes = inf"),
        ((Bucket(("a",), 1.0, 0.0),), "Cannot refill a bucket by 0.0"),
    ],
)
def test_impossible_buckets_are_refused(buckets, reason):
    with pytest.raises(ValueError, match=reason):
        check(Conditions(buckets=buckets), NAMES)
