"""The closed network of machines' links against what can be computed by hand, and against the simulator."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.scenario import scenario
from tests.support.toy import job as toy_job
from tests.support.toy import window
from tuners.actions import Run
from tuners.joint.models.link_network import AlikeMachines, LinkFactors, closed_network, flow_of, round_of_all
from tuners.joint.models.system_model import SystemModel

AS_RATED = LinkFactors(1.0, 1.0)

UNLIKE = """
summary = "Machines of unlike links, any of which may work and serve."
[cluster]
nodes = [{ type = "m4.xlarge", count = 3 }, { type = "edge-4core", count = 3 }]
[workload]
name = "cruise-nmf"
[workload.overrides]
samples = 100000
batch_size = 100
model_bytes = 100000000
fixed_seconds = 0.1
sample_seconds = 0.1
serial_fraction = 0
[start]
workers = ["n0", "n1", "n3", "n4"]
servers = ["n2", "n5"]
policy = "asp"
batch_size = 100
[free]
"role/*" = { choice = ["worker", "server", "both", "idle"] }
[target]
metric = "clocks"
value = 10000
check_clocks = 25
[budget]
seconds = 100000
"""


def test_one_worker_waits_for_nobody():
    """It pulls twice as long as its own link takes, because the server's link is slower, and pushes as long."""
    found = flow_of([AlikeMachines(1, 3.0, 1.0, None), AlikeMachines(2, None, 0.0, 2.0)], AS_RATED, LinkFactors(1.0, 0.1))
    assert found.pushes_per_second == pytest.approx(1 / (3.0 + 2.0 + 1.0), rel=1e-3)
    assert (found.pull_seconds, found.push_seconds) == (pytest.approx((2.0,), rel=1e-3), pytest.approx((1.0,), rel=1e-3))
    assert found.evenness == pytest.approx(1.0)


def test_alike_workers_and_servers_apart_are_one_queue():
    for workers in (2, 5, 9):
        kinds = [AlikeMachines(workers, 6.0, 1.0, None), AlikeMachines(2, None, 0.0, 0.8)]
        rate, (pull, push) = closed_network(6.0, [1.0, 1.0], [0.8, 0.8], workers)
        found = flow_of(kinds, AS_RATED, AS_RATED)
        assert found[:3] == (
            pytest.approx(rate, rel=0.06),
            (pytest.approx(pull, rel=0.06),),
            (pytest.approx(push, rel=0.06),),
        )


def test_no_link_carries_more_than_it_can():
    """Seven workers were predicted to push 1.8 times as often as two servers' links allow: while the queue grew that nobody
    waited for yet, the rates stood still, and were taken for settled."""
    found = flow_of([AlikeMachines(7, 5.3, 5.8, None), AlikeMachines(2, None, 2.9, 2.9)], AS_RATED, LinkFactors(0.02, 0.02))
    assert 0.9 / 2.9 < found.pushes_per_second < 1.001 / 2.9


def test_a_worker_on_the_only_server_transfers_nothing_and_makes_most_pushes():
    kinds = [AlikeMachines(1, 1.0, 0.0, 2.0), AlikeMachines(3, 1.0, 2.0, None)]
    found = flow_of(kinds, AS_RATED, AS_RATED)
    others = found.pushes_per_second - 1.0  # the one on the server completes a push every second
    assert 0.25 < others < 0.5  # at most one every two seconds passes the server's link
    assert found.evenness == pytest.approx(found.pushes_per_second**2 / (4 * (1 + others**2 / 3)), rel=0.01)
    apart = flow_of([AlikeMachines(4, 1.0, 2.0, None), AlikeMachines(1, None, 0.0, 2.0)], AS_RATED, AS_RATED)
    assert apart.evenness == pytest.approx(1.0)
    assert found.pushes_per_second > 2 * apart.pushes_per_second


def test_a_machine_of_both_roles_has_one_link_for_what_it_pulls_and_what_others_push():
    both, apart = (
        [AlikeMachines(3, 4.0, 2.0, served), *rest]
        for served, rest in ((1.0, []), (None, [AlikeMachines(3, None, 0.0, 1.0)]))
    )
    slow, fast = (flow_of(kinds, AS_RATED, AS_RATED) for kinds in (both, apart))
    assert slow.pull_seconds[0] > 1.1 * fast.pull_seconds[0]
    # Where all wait, they pull at one time and push at another, and a machine sends nothing to itself.
    both_at_once, apart_at_once = (round_of_all(kinds, 4.0, AS_RATED, AS_RATED) for kinds in (both, apart))
    assert (both_at_once.pull_seconds, apart_at_once.pull_seconds) == ((2.0,), (3.0,))


def test_workers_of_unlike_links_that_wait_for_each_other_transfer_at_their_own_pace():
    """All were predicted to take as long as the slowest, so that links seemed to be faster than they are rated."""
    kinds = [AlikeMachines(3, 4.0, 6.0, None), AlikeMachines(3, 4.0, 1.0, None), AlikeMachines(1, None, 0.0, 0.1)]
    found = round_of_all(kinds, 4.0, AS_RATED, AS_RATED)
    assert found.pull_seconds == (6.0, 1.0)
    assert found.pushes_per_second == pytest.approx(6 / (4.0 + 6.0 + 6.0))


def test_unlike_machines_of_one_or_both_roles_are_predicted_as_they_are_simulated():
    """With one mean for all workers and their links, it was 2.6 times as slow as predicted where all six machines work and a
    slow one serves, and other numbers of machines with both roles were wrongly ordered."""
    found = scenario.parse(UNLIKE, name="unlike", origin=Path("unlike.toml"))
    begun = scenario.system(found, 0)
    model, start = SystemModel(begun.job), begun.job.start
    model.learn(start, begun.perform(Run(clocks=12)))
    names = tuple(n.name for n in begun.job.nodes)
    fast, slow = names[:3], names[3:]
    roles = (
        (fast, fast[2:]),
        (fast, fast),
        (names, fast),
        (names, slow[2:]),
        (names, names),
        (slow, slow[:2]),
        (slow, fast),
    )
    settings = [replace(start, workers=workers, servers=servers) for workers, servers in roles]
    truth = []
    for setting in settings:
        simulated = scenario.system(found, 0, setting)
        simulated.perform(Run(clocks=2 * len(setting.workers)))
        seen = simulated.perform(Run(clocks=20 * len(setting.workers)))
        truth.append(seen.seconds / seen.clocks)
    predicted = [model.push_seconds(s) for s in settings]
    np.testing.assert_allclose(predicted, truth, rtol=0.12)


def test_links_are_not_taken_to_be_fast_where_a_worker_on_the_only_server_makes_most_pushes():
    """Where links are slower, the others push less often, and the mean over pushes falls. Links were taken to be 50 times as
    fast as they are rated, and seven workers to push 16 times as often as they do."""
    of = toy_job()
    setting = replace(of.start, workers=("n0", "n1"), servers=("n0",), policy="asp", loads=())
    model = SystemModel(of)
    rated = model.flow(setting).pull_seconds[1]
    seen = window(of, [1.0] * 20, workers=setting.workers, compute=0.01)
    others = np.arange(20) == 19  # one push in 20 is of the worker that is no server
    pulls = np.where(others, 5 * rated, 0.0)
    pushes = seen.pushes._replace(worker=others.astype(np.int32), pull_seconds=pulls, push_seconds=pulls)
    model.learn(setting, replace(seen, pushes=pushes))
    assert model.flow(setting).pull_seconds == pytest.approx((0.0, 5 * rated), rel=0.05)


def test_links_of_servers_that_became_slow_are_not_taken_for_those_of_workers():
    """Three servers were throttled. The model took that for links of workers, and chose one server for all."""
    of = toy_job()
    workers = tuple(n.name for n in of.nodes[:-2])
    two = replace(of.start, workers=workers, servers=tuple(n.name for n in of.nodes[-2:]), policy="asp", loads=())
    model = SystemModel(of)
    rated = np.mean(model.flow(two).pull_seconds)
    count = 4 * len(workers)
    model.learn(two, window(of, [1.0] * count, workers=workers, compute=0.01 * rated, pull=3 * rated))
    model.learn(two, window(of, [1.0] * count, workers=workers, compute=rated, pull=8 * rated))
    one = replace(two, servers=two.servers[:1])
    assert np.mean(model.flow(two).pull_seconds) == pytest.approx(8 * rated, rel=0.05)
    assert model.push_seconds(one) > 1.5 * model.push_seconds(two)


def test_links_of_servers_are_not_taken_for_quick_where_those_of_workers_make_transfers_long():
    """Servers' links were taken to be up to 16 times as fast as rated, and one server was chosen for 17 workers."""
    of = scenario.system(scenario.load("digits"), 0).job
    names = tuple(n.name for n in of.nodes)
    ten = replace(of.start, policy="asp", staleness=0)
    few = replace(ten, workers=names[:15], servers=names[15:], batch_size=8, transfer_bits=16)
    one = replace(few, workers=names[:17], servers=names[17:])
    pulls = []
    for times in (1.0, 0.9):  # as long as rated, and a little quicker
        model = SystemModel(of)
        rated = np.mean(model.flow(ten).pull_seconds)
        model.learn(ten, window(of, [1.0] * 40, workers=ten.workers, compute=5.0, pull=1.1 * rated))
        model.learn(few, window(of, [1.0] * 60, workers=few.workers, compute=2.3, pull=times * rated * 16 / 32))
        pulls.append(np.mean(model.flow(one).pull_seconds))
    assert pulls[1] > 0.75 * pulls[0] > 0.75 * 5 * rated
