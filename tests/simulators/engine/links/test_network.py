"""Bandwidth shared by the engine's functions against brute force, against what fairness means, and against two papers."""

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulators.engine.links import network
from tests.support.marks import examples, slow
from tests.support.oracle import first_come, progressive_filling

F, R = 5, 4  # transfers and resources; fixed, so that each function compiles once
K = 4  # nodes
waterfill, fifo, maxmin = jax.jit(network.waterfill), jax.jit(network.fifo), jax.jit(network.maxmin)
uneven, connected = jax.jit(network.uneven), jax.jit(network.connected)
fifo_of_nics = jax.jit(network.fifo_of_nics)
fifo_of_many, uneven_of_many = jax.jit(network._fifo_of_many), jax.jit(network._uneven_of_many)

BANDWIDTHS = st.floats(0.1, 1e9)
LIMITS = st.lists(BANDWIDTHS, min_size=F, max_size=F).map(np.array)
MASKS = st.lists(st.booleans(), min_size=F, max_size=F).map(np.array)
SHARES = st.one_of(st.just(0.0), st.floats(0.01, 1.0))
USAGES = st.lists(st.lists(SHARES, min_size=R, max_size=R), min_size=F, max_size=F).map(np.array)
CAPACITIES = st.lists(BANDWIDTHS, min_size=R, max_size=R).map(np.array)
ORDERS = st.permutations(range(F)).map(np.array)


def one_resource(limits, capacity, active):
    """The same transfers as the oracle takes them: each with its own limit, and the shared resource."""
    flows = {f: {("own", f): 1.0, "shared": 1.0} for f in range(F) if active[f]}
    return flows, {("own", f): limits[f] for f in range(F)} | {"shared": capacity}


def full(loads, capacity):
    return loads >= capacity * (1 - 1e-9)


@given(LIMITS, BANDWIDTHS, MASKS)
def test_waterfill_fills_progressively(limits, capacity, active):
    expected = progressive_filling(*one_resource(limits, capacity, active))
    rates = np.asarray(waterfill(limits, capacity, active))
    np.testing.assert_allclose(rates, [expected.get(f, 0.0) for f in range(F)], rtol=1e-9)


@given(LIMITS, MASKS)
def test_waterfill_without_a_shared_limit_gives_each_its_own(limits, active):
    np.testing.assert_array_equal(np.asarray(waterfill(limits, np.inf, active)), np.where(active, limits, 0.0))


@given(LIMITS, BANDWIDTHS, MASKS)
def test_maxmin_over_one_shared_resource_is_waterfill(limits, capacity, active):
    usage = np.concatenate([np.eye(F), np.ones((F, 1))], axis=1)
    rates = np.asarray(maxmin(usage, np.append(limits, capacity), active))
    np.testing.assert_allclose(rates, np.asarray(waterfill(limits, capacity, active)), rtol=1e-9)


@given(USAGES, CAPACITIES, MASKS)
def test_maxmin_fills_progressively(usage, capacity, active):
    flows = {f: dict(enumerate(usage[f])) for f in range(F) if active[f]}
    expected = progressive_filling(flows, dict(enumerate(capacity)))
    rates = np.asarray(maxmin(usage, capacity, active))
    np.testing.assert_allclose(rates, [min(expected.get(f, 0.0), 1e30) for f in range(F)], rtol=1e-9)


@given(USAGES, CAPACITIES, MASKS)
def test_maxmin_is_feasible_and_each_transfer_has_a_bottleneck(usage, capacity, active):
    """Bertsekas and Gallager, 6.5.2: rates are max-min fair if and only if every transfer has a full resource on which
    no other is faster."""
    rates = np.asarray(maxmin(usage, capacity, active))
    uses = active & (usage > 0).any(axis=1)
    loads = np.where(uses, rates, 0.0) @ usage
    assert (loads <= capacity * (1 + 1e-9)).all()
    assert (rates[~active] == 0).all()
    assert (rates[active & ~uses] == 1e30).all()
    for f in np.flatnonzero(uses):
        bottlenecks = np.flatnonzero((usage[f] > 0) & full(loads, capacity))
        fastest = [max(rates[g] for g in np.flatnonzero(uses) if usage[g, r] > 0) for r in bottlenecks]
        assert any(rates[f] >= other * (1 - 1e-9) for other in fastest)


K, S = 5, 4  # nodes, and kinds of servers
SENDING = st.lists(st.sampled_from(("", "pull", "push")), min_size=K, max_size=K)
FLOWS = st.lists(st.lists(st.booleans(), min_size=S, max_size=S), min_size=K, max_size=K).map(np.array)
NUMBERS = st.lists(st.sampled_from((1.0, 1.0, 3.0)), min_size=S, max_size=S).map(np.array)
CLOSE = st.floats(1.0, 100.0)  # so that several resources are bottlenecks at once, one after another
NODES = st.tuples(*(st.lists(CLOSE, min_size=n, max_size=n).map(np.array) for n in (K, K, S, S)))


@pytest.mark.parametrize("works", [slow(False), True], ids=["servers only", "workers that serve"])
@examples(40)
@given(made=st.data())
def test_connections_fill_progressively(works, made):
    """Every connection by itself, also of equal servers, and NICs by name; node 2 may serve, then as a kind of its own."""
    ways, active, number, weights = (made.draw(s) for s in (SENDING, FLOWS, NUMBERS, LIMITS))
    out, into, sends, receives = made.draw(NODES)
    weights = np.clip(weights, 0.5, 5.0)
    server = np.array([2, -1, -1, -1], np.int32) if works else np.zeros(0, np.int32)
    if works:
        number[0] = 1.0
    flows, capacity = {}, {}
    for i, way in enumerate(ways):
        mine, theirs, limits = (into, "sends", sends) if way == "pull" else (out, "receives", receives)
        for j in np.flatnonzero(active[i]) if way else ():
            for copy in range(int(number[j])):
                uses = {(theirs, j, copy): 1.0}
                capacity[theirs, j, copy] = limits[j]
                if not (works and j == 0 and i == 2):  # what a node moves to itself crosses no NIC
                    uses["into" if way == "pull" else "out", i] = 1.0
                    capacity["into" if way == "pull" else "out", i] = mine[i]
                    if works and j == 0:
                        uses["out" if way == "pull" else "into", 2] = 1.0
                        capacity["out" if way == "pull" else "into", 2] = (out if way == "pull" else into)[2]
                flows[i, j, copy] = uses
    expected = progressive_filling(flows, capacity, {f: weights[f[0]] for f in flows})
    pulls, pushes = (active & np.array([w == way for w in ways])[:, None] for way in ("pull", "push"))
    facts = (out, into, sends, receives), number, server, pulls, pushes, np.stack([weights, weights])
    found = np.asarray(connected(*facts)).sum(axis=0)
    for i, j in np.ndindex(K, S):
        for copy in range(int(number[j])):
            assert found[i, j] == pytest.approx(expected.get((i, j, copy), 0.0), rel=1e-9)


@pytest.mark.parametrize("fifo", [fifo, fifo_of_many], ids=["few", "many"])
@given(LIMITS, BANDWIDTHS, MASKS, ORDERS)
def test_first_come_first_served_gives_each_what_earlier_ones_leave(fifo, limits, capacity, active, arrival):
    flows, resources = one_resource(limits, capacity, active)
    in_order = {f: flows[f] for f in np.argsort(arrival) if active[f]}
    expected = first_come(in_order, resources)
    rates = np.asarray(fifo(limits, capacity, active, arrival))
    # What is left is a difference of sums as large as the limits.
    np.testing.assert_allclose(rates, [expected.get(f, 0.0) for f in range(F)], rtol=1e-9, atol=1e-14 * limits.sum())


@pytest.mark.parametrize("fifo", [fifo, fifo_of_many], ids=["few", "many"])
@given(LIMITS, BANDWIDTHS, MASKS, ORDERS)
def test_first_come_first_served_never_lets_later_transfers_slow_earlier_ones(fifo, limits, capacity, active, arrival):
    rates = np.asarray(fifo(limits, capacity, active, arrival))
    assert rates.sum() <= capacity * (1 + 1e-9)
    for young in np.flatnonzero(active):
        without = active.copy()
        without[young] = False
        elders = arrival < arrival[young]
        np.testing.assert_array_equal(rates[elders], np.asarray(fifo(limits, capacity, without, arrival))[elders])


@given(USAGES, CAPACITIES, MASKS, ORDERS)
def test_first_come_first_served_gives_each_what_earlier_ones_leave_of_all_that_it_uses(usage, capacity, active, arrival):
    flows = {f: dict(enumerate(usage[f])) for f in np.argsort(arrival) if active[f]}
    expected = first_come(flows, dict(enumerate(capacity)))
    rates = np.asarray(fifo_of_nics(usage, capacity, active, arrival))
    rest = 1e-14 * capacity.max() / usage[usage > 0].min(initial=1.0)
    np.testing.assert_allclose(rates, [min(expected.get(f, 0.0), 1e30) for f in range(F)], rtol=1e-9, atol=rest)


@pytest.mark.parametrize("uneven", [uneven, uneven_of_many], ids=["few", "many"])
@settings(max_examples=40)
@given(LIMITS, BANDWIDTHS, MASKS, LIMITS)
def test_weights_divide_a_shared_resource(uneven, limits, capacity, active, weights):
    """Each has all that it can use, or the largest rate for its weight; progressive filling at these paces agrees."""
    rates = np.asarray(uneven(limits, capacity, active, weights))
    for f in np.flatnonzero(active & (rates < limits * (1 - 1e-9))):
        assert rates[f] / weights[f] >= (rates / weights).max() * (1 - 1e-9)
    np.testing.assert_allclose(rates.sum(), min(capacity, limits[active].sum()), rtol=1e-9, atol=1e-14 * limits.sum())
    usage = np.concatenate([np.eye(F), np.ones((F, 1))], axis=1)
    filled = np.asarray(maxmin(usage, np.append(limits, capacity), active, weights))
    np.testing.assert_allclose(filled, rates, rtol=1e-6, atol=1e-9 * rates.max())
    np.testing.assert_allclose(
        np.asarray(uneven(limits, capacity, active, np.ones(F))), np.asarray(waterfill(limits, capacity, active)), rtol=1e-9
    )


@given(LIMITS, BANDWIDTHS, MASKS, ORDERS)
def test_no_discipline_leaves_bandwidth_idle_that_a_transfer_could_use(limits, capacity, active, arrival):
    possible = min(capacity, limits[active].sum())
    served = [f(limits, capacity, active, arrival) for f in (fifo, fifo_of_many)]
    shared = [f(limits, capacity, active, arrival + 1.0) for f in (uneven, uneven_of_many)]
    for rates in (waterfill(limits, capacity, active), *served, *shared):
        np.testing.assert_allclose(np.asarray(rates).sum(), possible, rtol=1e-9, atol=1e-14 * limits.sum())


@pytest.mark.parametrize("capacity", [5e8, 1e30, np.inf])
def test_many_transfers_have_the_rates_of_a_comparison_of_all_pairs(capacity, monkeypatch):
    """Machines of few kinds, of which many reach their limits at one level, and transfers that arrive at one moment."""
    rng = np.random.default_rng(3)
    limits, active = rng.choice([1e6, 3e6, 7.5e6], 200), rng.random(200) < 0.9
    weights, arrival = limits / 7.5e6, rng.integers(0, 60, 200)
    monkeypatch.setattr(network, "_MANY", 1000)
    for of_many, all_pairs, by in ((uneven_of_many, network.uneven, weights), (fifo_of_many, network.fifo, arrival)):
        rates = np.asarray(of_many(limits, capacity, active, by))
        np.testing.assert_allclose(rates, np.asarray(all_pairs(limits, capacity, active, by)), rtol=1e-12)
        assert (rates[active] > 0).any()


@examples(25)
@given(st.data())
def test_proportions_are_the_matrix_of_what_transfers_use(data):
    """Nodes of some speeds, any of which work and serve; transfers with weights, and snapshots beside them."""
    draw = data.draw
    parts = [np.array(draw(st.lists(SHARES, min_size=K, max_size=K))) for _ in range(2)]
    backup = np.array(draw(st.lists(st.integers(0, K - 1), min_size=K, max_size=K)), np.int32)
    capacity = np.array(draw(st.lists(st.sampled_from([1.0, 2.5, 7.0, 1e30]), min_size=4 * K, max_size=4 * K)))
    active = np.array(draw(st.lists(st.booleans(), min_size=3 * K, max_size=3 * K)))
    weights = np.array(draw(st.lists(st.floats(0.1, 10.0), min_size=3 * K, max_size=3 * K)))
    usage, proportions = matrix(*parts, backup), network.Proportions(*parts, backup)
    used = [np.asarray(proportions.on_resources(active * weights)), (active * weights) @ usage]
    np.testing.assert_allclose(*used, rtol=1e-9, atol=1e-12)
    rates = [np.asarray(maxmin(u, capacity, active, weights)) for u in (proportions, usage)]
    np.testing.assert_allclose(*rates, rtol=1e-9)
    two = [np.asarray(maxmin(u, capacity, active[: 2 * K])) for u in (network.Proportions(*parts), usage[: 2 * K])]
    np.testing.assert_allclose(*two, rtol=1e-9)


def matrix(pull, push, backup):
    """What each byte of pulls, of pushes and of snapshots puts on NICs out, NICs in, and servers' pulls and pushes."""
    usage = np.zeros((3, K, 4, K))
    for node in range(K):
        for server in range(K):
            for kind, part, (own, other), served in ((0, pull, (1, 0), 2), (1, push, (0, 1), 3)):
                usage[kind, node, served, server] += part[server]
                if server != node:
                    usage[kind, node, own, node] += part[server]
                    usage[kind, node, other, server] += part[server]
        usage[2, node, [0, 2], node] = 1.0
        if backup[node] != node:
            usage[2, node, [1, 3], backup[node]] = 1.0
    return usage.reshape(3 * K, 4 * K)


@settings(max_examples=40)
@given(st.integers(1, 8), st.integers(1, 8), st.floats(1.0, 1e9), st.floats(1e3, 1e9))
def test_two_papers_cost_models_are_the_transfer_times_of_equal_disjoint_shards(workers, servers, model_bytes, speed):
    """Cruise (Lee et al. 2019): max(w m_j / b, sum m_j / b). BOAT (Dalibard et al. 2017): max over machines of what it
    transfers / its connection's speed. With w workers and s servers, disjoint, equal shards, both are
    max(P, w P / s) / speed."""
    shards = [model_bytes / servers] * servers
    cruise = max(workers * shards[0] / speed, sum(shards) / speed)
    moved = [model_bytes] * workers + [workers * shard for shard in shards]
    boat = max(m / speed for m in moved)
    limits, capacity = np.full(8, speed), speed / (1 / servers)
    rates = np.asarray(waterfill(limits, capacity, np.arange(8) < workers))
    usage = np.zeros((8, 16))
    usage[np.arange(8), np.arange(8)] = 1.0
    usage[:, 8 : 8 + servers] = 1 / servers
    over_nics = np.asarray(maxmin(usage, np.full(16, speed), np.arange(8) < workers))
    times = model_bytes / np.stack([rates, over_nics])[:, :workers]
    assert cruise == pytest.approx(boat, rel=1e-12)
    np.testing.assert_allclose(times, boat, rtol=1e-9)
