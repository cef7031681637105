"""Transfers whose connections end one by one: where they are compiled, what a change of servers keeps, windows and lanes.

Whole jobs are compared with the oracle in `test_engine.py`, rates with progressive filling in `test_network.py`, and two
pulls with arithmetic in `test_theory.py`.
"""

import math

import jax
import numpy as np
import pytest

from simulators.branch import stacked
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Bucket, Conditions
from simulators.engine import changes, loop, timing
from simulators.engine.links import connections
from simulators.workloads.workload import Demand
from tests.bench.tables import unlike_servers
from tests.support.marks import slow
from tests.support.oracle import Bounded, Oracle
from tests.support.small_jobs import KNOBS, MODEL, NAMES, assert_same_bytes, branch, job, machine, start, system, together
from tuners.actions import Reconfigure, Run, Setting

ROUGH = Conditions(jitter=0.4)
ALIKE = (100.0,) * 5
UNLIKE = (100.0, 100.0, 100.0, 60.0, 150.0)


def made(links=ALIKE, conditions=ROUGH, discipline="maxmin", seed=0, knobs=(), independent=True, **changed):
    """Three workers and two servers with these links that learn; `knobs` are free."""
    nodes = tuple((n, machine(link)) for n, link in zip(NAMES, links, strict=True))
    cluster = Cluster(nodes, discipline, independent_flows=independent)
    return system(cluster, job(model=MODEL), start(**changed), conditions, seed, knobs=knobs)


def net_of(simulated):
    return simulated.branches[0].inputs.connections


@pytest.mark.parametrize("changed", [{"model_shares": (0.3, 0.7)}, {"workers": NAMES[:4]}], ids=["shares", "both roles"])
def test_they_are_off_by_default(changed):
    simulated = made(UNLIKE, independent=Cluster((("a", machine()),)).independent_flows, **changed)
    assert net_of(simulated) == ()
    assert branch(simulated).clock.flight.parts == ()


def test_alike_servers_have_none_and_the_run_has_the_same_bytes():
    on, off = (made(independent=independent) for independent in (True, False))
    assert net_of(on) == ()
    shapes = [jax.tree.map(np.shape, (s.branches[0].inputs, branch(s))) for s in (on, off)]
    assert shapes[0] == shapes[1]
    assert_same_bytes(*(s.perform(Run(clocks=60)).pushes for s in (on, off)))


def test_one_server_has_none():
    assert net_of(made(UNLIKE, servers=("e",))) == ()


@pytest.mark.parametrize(
    ("links", "changed"),
    [
        slow(ALIKE, {"model_shares": (0.3, 0.7)}),
        slow(UNLIKE, {}),
        slow(ALIKE, {"workers": NAMES[:4]}),
        slow(ALIKE, {"conditions": Conditions(jitter=0.4, buckets=(Bucket(("d",), 150.0, 20.0),))}),
        slow(UNLIKE, {"conditions": Conditions(jitter=0.4, buckets=(Bucket(("a",), 150.0, 20.0),))}),
        (UNLIKE, {"discipline": "fifo"}),
    ],
    ids=["shares", "links", "a server that works", "a server's bucket", "a worker's bucket", "first come first served"],
)
@pytest.mark.parametrize("policy", ["asp", "bsp"])
def test_servers_that_are_not_alike_have_connections(links, changed, policy):
    simulated = made(links, policy=policy, **changed)
    assert net_of(simulated)
    seen = simulated.perform(Run(clocks=60)).pushes
    context, bound = simulated.branches[0].context, math.inf if policy == "asp" else 0
    plain = (context.cluster, context.workload, simulated.job.start, context.conditions, Bounded(bound), 0, MODEL)
    judge = Oracle(*plain).run(60)
    np.testing.assert_array_equal(seen.worker, judge.column("worker"))
    np.testing.assert_allclose(seen.seconds, judge.column("seconds"), rtol=1e-9)


def test_servers_of_one_kind_are_one_column():
    names = tuple(f"n{i}" for i in range(12))
    cluster = Cluster(tuple((n, machine()) for n in names), independent_flows=True)
    setting = Setting(workers=names[:3], servers=names[3:], model_shares=(0.2, *(0.1,) * 8))
    net = net_of(system(cluster, job(), setting, ROUGH))
    assert net.number.tolist() == [1, 8]
    assert net.pull @ net.number == pytest.approx(1.0)


@pytest.mark.slow
def test_what_is_left_of_transfers_stays_where_servers_change():
    """From equal shares to unequal ones and back, in the middle of transfers."""
    simulated = made(knobs=KNOBS, conditions=Conditions(jitter=0.4, stagger=True))
    simulated.perform(Run(seconds=20.3))
    line = simulated.branches[0]
    line.catch_up(20.3)
    uneven = line.context.prepare(start(model_shares=(0.3, 0.7)), line.policy)
    even = line.context.prepare(start(), line.policy)
    flight = line.state.clock.flight
    moving = np.isin(flight.phase, (timing.PULL, timing.PUSH))
    assert moving.any()
    divided = changes.redivided(even.inputs, uneven.inputs, line.state).clock.flight
    np.testing.assert_allclose((divided.parts @ uneven.inputs.connections.number)[moving], flight.remaining[moving])
    back = changes.redivided(
        uneven.inputs, even.inputs, line.state._replace(clock=line.state.clock._replace(flight=divided))
    )
    assert back.clock.flight.parts == ()
    np.testing.assert_array_equal(back.clock.flight.remaining, flight.remaining)
    kept = changes.redivided(uneven.inputs, uneven.inputs, back._replace(clock=back.clock._replace(flight=divided)))
    assert kept.clock.flight.parts is divided.parts


def test_a_job_may_change_between_alike_and_other_servers():
    simulated = made(knobs=KNOBS, conditions=Conditions(jitter=0.0, stagger=False))
    first = simulated.perform(Run(clocks=30)).pushes.pull_seconds[-3:]
    for shares in ((0.2, 0.8), ()):
        simulated.perform(Reconfigure(start(model_shares=shares)))
        pulls = simulated.perform(Run(clocks=30)).pushes.pull_seconds[-3:]
        # All three pull at once: the server with the most has 0.8 of three models to send, in place of half.
        assert pulls == pytest.approx(first * (max(shares, default=0.5) / 0.5))


def test_only_asynchronous_cycles_are_longer_where_a_server_has_two_thirds_of_the_model():
    """With links of one rate, `tests.bench.tables.unlike_servers` says 26 %, and -0.4 % at a barrier."""
    case = unlike_servers.CASES[0]
    asynchronous, at_barriers = (unlike_servers.longer(case, 3, policy, 1.0, seeds=(1,)) for policy in ("asp", "bsp"))
    assert asynchronous > 15
    assert abs(at_barriers) < 2


def queued(links, sent, left, **changed):
    """Seconds that a request waits, where the first workers push 100 bytes, have sent so many and have so many left."""
    net, pushing = net_of(made(links, **changed)), np.arange(5) < len(sent)
    parts = np.zeros((5, len(net.push)))
    parts[: len(left)] = left
    return float(connections.queued_seconds(net, 100.0, np.pad(sent, (0, 5 - len(sent)), mode="constant"), parts, pushing))


@pytest.mark.parametrize(
    ("links", "shares", "sent", "left", "seconds"),
    [
        # After a quarter of a second, 25 bytes to each server: the slow one has carried 12.5 of them, the other one all.
        ((200.0, 100.0, 100.0, 50.0, 100.0), (), (50.0,), ((37.5, 25.0),), 12.5 / 50),
        # After half a second all are sent: 25 bytes wait for the slow one.
        ((200.0, 100.0, 100.0, 50.0, 100.0), (), (100.0,), ((25.0, 0.0),), 25 / 50),
        # 20 bytes to each, and then 40 more to the one with the larger part; its link has carried 45.
        ((200.0, 100.0, 100.0, 75.0, 75.0), (0.2, 0.8), (80.0,), ((0.0, 35.0),), 15 / 75),
        ((200.0, 200.0, 100.0, 50.0, 100.0), (), (50.0, 100.0), ((37.5, 25.0), (25.0, 0.0)), (12.5 + 25) / 50),
    ],
)
def test_a_request_waits_behind_what_each_server_has_not_carried(links, shares, sent, left, seconds):
    assert queued(links, sent, left, model_shares=shares) == pytest.approx(seconds)


@pytest.mark.slow
def test_requests_wait_as_long_for_a_slow_server_beside_a_fast_one():
    """Both have half of the model, so that the fast one is never waited for. One queue for both was half as long, and two
    workers fell into step."""
    nodes = tuple((n, machine(link)) for n, link in zip(NAMES, (200.0, 100.0, 100.0, 50.0, 100.0), strict=True))

    def cycle(*, independent):
        cluster = Cluster(nodes, "uneven", control_queue=1.0, independent_flows=independent)
        setting = start(workers=NAMES[:2], policy="asp")
        pushed = system(cluster, job(Demand(100.0, 0.0, fixed_seconds=0.01)), setting, Conditions(jitter=0.2), 0)
        seconds = pushed.perform(Run(clocks=600)).pushes.seconds
        return seconds[-1] - seconds[99]

    assert cycle(independent=True) == pytest.approx(cycle(independent=False), rel=0.02)


@pytest.mark.slow
def test_windows_change_nothing():
    changed = {"links": UNLIKE, "model_shares": (0.3, 0.7), "seed": 3}
    whole, cut = made(**changed), made(**changed)
    window = whole.perform(Run(clocks=100))
    pieces = [cut.perform(Run(seconds=x)) for x in (0.7, 1e-3, 5.05, 3.3)]
    pieces.append(cut.perform(Run(clocks=100 - sum(p.clocks for p in pieces))))
    assert_same_bytes(together(pieces), window.pushes)
    jax.tree.map(np.testing.assert_array_equal, branch(cut), branch(whole))


@pytest.mark.slow
def test_lanes_are_jobs():
    systems = [made(UNLIKE, seed=seed, model_shares=(0.3, 0.7)) for seed in range(3)]
    branches = [s.branches[0] for s in systems]
    data, inputs, states = stacked(branches)
    limits = (np.int32(40), np.float64(np.inf))
    _, tables, used = loop.advance_lanes(branches[0].program, data, inputs, states, *limits, rows=64, own_data=True)
    for simulated, table, count in zip(systems, np.asarray(tables), used, strict=True):
        assert int(count) == 40
        np.testing.assert_allclose(table[:40, 0], simulated.perform(Run(clocks=40)).pushes.seconds, rtol=1e-9)
