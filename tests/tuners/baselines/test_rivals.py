"""Rivals of 2020 to 2025: each follows its paper's algorithm, and shows its paper's effect in a small arena of its own."""

from dataclasses import replace
from functools import cache
from itertools import pairwise

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from simulators.engine import loop
from tests.support.small_jobs import learning
from tests.support.toy import job
from tests.tuners.bespoke_bo.test_schedules import JOB, Fake
from tests.tuners.test_policies import MASKS, ORDERS, K, groups, run
from tuners.actions import Install, Push, Rejected
from tuners.baselines.abs import abs_policy, adaptive_bounded_staleness
from tuners.baselines.adasync import adasync, adasync_policy
from tuners.baselines.dbw import dbw, dbw_policy
from tuners.baselines.lb_bsp import balanced, lb_bsp
from tuners.baselines.ringmaster import ringmaster, ringmaster_policy, threshold
from tuners.baselines.rivals.ata import ata_policy
from tuners.policies import buffered
from tuners.testing import check_tuner

DBW = dbw_policy(5)  # compiled once for all tests


@cache
def seconds(arena, tuner, seed=0):
    """Simulated seconds to the target of an arena of this file."""
    return harness.play(ARENAS[arena](), tuner, seed=seed).score.completion_seconds


def _slow_majority():
    """Four workers, and twelve that take ten times as long; the rate is at the edge of what their staleness allows."""
    return harness.scenario(
        "digits-logistic",
        name="slow-majority",
        cluster={"nodes": [{"type": "edge-4core", "count": 20}]},
        workload={"name": "clouds-mlp"},
        start={"worker_count": 16, "policy": "asp", "learning_rate": 0.3},
        conditions={
            "sleeps": None,
            "jitter": 0.1,
            "stragglers": {"nodes": [f"n{i}" for i in range(4, 16)], "mean_seconds": 20.0, "sd_seconds": 3.0},
        },
        target={"metric": "accuracy", "value": 0.86, "check_clocks": 25},
    )


def _sleepers(aggregation, rate):
    """Ten workers, each of which falls asleep in a fifth of its mini-batches."""
    return harness.scenario(
        "digits-logistic",
        name=f"sleepers-{aggregation}",
        cluster={"nodes": [{"type": "edge-4core", "count": 12}]},
        workload={"name": "digits-logistic", "overrides": {"aggregation": aggregation}},
        start={"worker_count": 10, "policy": "bsp", "learning_rate": rate},
        conditions={"sleeps": {"probability": 0.2, "mean_seconds": 10.0, "sd_seconds": 3.0}, "jitter": 0.1},
        target={"metric": "accuracy", "value": 0.9, "check_clocks": 10},
    )


ARENAS = {
    "slow majority": _slow_majority,
    "averaged": lambda: _sleepers("mean", 0.5),
    "one by one": lambda: _sleepers("each", 0.1),
    "boat-digits": lambda: harness.scenario("boat-digits", name="boat"),
}


# ------------------------------------------------------------------------------------------------------------- Ringmaster


@given(ORDERS, MASKS, st.integers(1, 8), st.booleans())
def test_ringmaster_is_its_algorithms_4_and_5(order, active, late, stops):
    updates, pulled = 0, np.zeros(K, int)
    for m in run(ringmaster_policy(late, stops=stops), order, active):
        assert m.accept == (updates - pulled[m.worker] < late)
        updates += m.accept
        expected = np.arange(K) == m.worker
        if stops:
            expected |= np.array(active) & (updates - pulled >= late)
        assert m.release.tolist() == expected.tolist()
        assert m.step
        pulled[m.release] = updates


def test_ringmasters_threshold_is_the_papers():
    assert [threshold(x) for x in (0.2, 1.0, 6.1)] == [1, 1, 7]
    asked = [next(ringmaster(job(), noise_ratio=x)).policy.name for x in (0.0, 6.1)]
    assert asked == ["ringmaster(3)", "ringmaster(7)"]  # without the ratio, the number of workers


@pytest.mark.slow
def test_ringmaster_is_faster_than_asp_where_most_workers_are_slow():
    """Maranjyan et al., Section G: the stalest gradients do more harm than good."""
    assert seconds("slow majority", "ringmaster") < 0.85 * seconds("slow majority", "fixed")


# -------------------------------------------------------------------------------------------------------------------- DBW


@pytest.mark.slow
def test_dbw_times_a_round_of_all_and_then_leaves_the_slow_one_out():
    moments = run(DBW, [0] * 200, seconds_per_cycle=[1.0, 1.1, 1.2, 1.3, 10.0])
    sizes = [sum(m.accept for m in group) for group in groups(moments)]
    assert sizes[:2] == [3, K]  # the first round has no known start, so the second is the first that is timed
    assert set(sizes[3:]) == {4}


@pytest.mark.slow
def test_dbw_waits_for_all_where_all_are_alike():
    sizes = [sum(m.accept for m in g) for g in groups(run(DBW, [0] * 100, seconds_per_cycle=[1.0] * K))]
    assert set(sizes[1:]) == {K}


@pytest.mark.slow
def test_dbw_asks_for_more_gradients_when_the_loss_rises():
    policy = DBW
    calm = [sum(1 for _ in g) for g in _rounds(policy, lambda number: 1.0)]
    worse = [sum(1 for _ in g) for g in _rounds(policy, lambda number: 1.02**number)]
    assert set(calm[3:]) == {4}
    assert K in worse[3:]


def _rounds(policy, loss):
    """The accepted gradients of each round, where the slow worker takes ten times as long, and losses are as given."""
    cycle, due = np.array([1.0, 1.1, 1.2, 1.3, 10.0]), np.array([1.0, 1.1, 1.2, 1.3, 10.0])
    state, clocks, busy, active = policy.init(np.ones(K, bool)), np.zeros(K, np.int32), np.ones(K, bool), np.ones(K, bool)
    decide, group = jax.jit(policy.decide), []
    for number in range(100):
        worker = int(np.argmin(due))
        now, clocks[worker], busy[worker], due[worker] = due[worker], clocks[worker] + 1, False, np.inf
        push = Push(np.int32(worker), clocks.copy(), ~busy, active, now, np.int32(0), loss(number))
        state, decision = decide(state, push)
        release = np.asarray(decision.release)
        busy |= release
        due[release] = now + cycle[release]
        if decision.accept:
            group.append(worker)
        if decision.step:
            yield group
            group = []


@pytest.mark.slow
@pytest.mark.parametrize("arena", ["averaged", "one by one"])
def test_dbw_is_faster_than_waiting_for_all(arena):
    """Xu et al.: without a number of backup workers that has to be tuned. The README has fixed numbers beside it."""
    seeds = range(3)
    assert sum(seconds(arena, "dbw", s) for s in seeds) < 0.85 * sum(seconds(arena, "fixed", s) for s in seeds)


# ---------------------------------------------------------------------------------------------------------------- AdaSync


@given(ORDERS, MASKS, st.integers(1, K))
def test_adasync_interrupts_nobody_and_keeps_k_while_the_loss_stays(order, active, initial):
    for group in groups(run(adasync_policy(initial), order, active)):
        assert len(group) == min(initial, sum(active))
        assert group[-1].release.tolist() == group[-1].waiting.tolist()


def test_adasyncs_k_grows_with_the_inverse_root_of_the_loss():
    policy, active = adasync_policy(1), np.ones(K, bool)
    state, sizes = policy.init(active), []
    for number in range(200):
        push = Push(np.int32(0), np.ones(K, np.int32), active, active, 1.0, np.int32(0), 1.6 if number < K else 0.2)
        state, _ = policy.decide(state, push)
        sizes.append(int(state.size))
    assert sizes[0] == 1
    assert sizes[-1] == 3  # sqrt(1.6 / 0.2) = 2.8
    assert sizes == sorted(sizes)


@pytest.mark.slow
def test_adasync_is_faster_than_bsp_where_workers_fall_asleep():
    assert seconds("one by one", "adasync") < seconds("one by one", "fixed")


# -------------------------------------------------------------------------------------------------------------------- ABS


@given(ORDERS, MASKS, st.integers(1, K), st.integers(1, 3))
def test_abs_restarts_who_is_older_than_its_bound_and_nobody_else(order, active, initial, patience):
    active, begun = np.array(active), np.zeros(K, int)
    size = min(initial, active.sum())
    for number, group in enumerate(groups(run(abs_policy(initial, patience), order, active)), start=1):
        assert len(group) == size
        for before in group[:-1]:
            assert not before.release.any()
        last = group[-1]
        late = active & ~last.waiting & (number - begun > patience * active.sum() / initial)
        assert last.release.tolist() == (last.waiting | late).tolist()
        begun[last.release] = number


def test_abs_with_a_bound_that_nobody_reaches_is_adasync():
    order = [3, 1, 4, 1, 5, 9, 2, 6] * 10
    made, plain = run(abs_policy(2, 1000.0), order), run(adasync_policy(2), order)
    assert [m.release.tolist() for m in made] == [m.release.tolist() for m in plain]


def test_the_bound_of_abs_falls_as_k_grows():
    """A worker that never pushes: one round in M is enough to be late with K = 1, and one in two with K = M / 2."""
    restarts = {size: _rounds_between_restarts(size) for size in (1, 2)}
    assert restarts == {1: 2 * 4 + 1, 2: 2 * 2 + 1}  # the first round that is more than `patience` M / K after the pull


def _rounds_between_restarts(size):
    policy, active = abs_policy(size, 2.0), np.ones(4, bool)
    state, decide, rounds = policy.init(active), jax.jit(policy.decide), 0
    waiting = np.zeros(4, bool)
    for number in range(100):
        waiting[number % 3] = True  # the fourth worker is asleep
        push = Push(np.int32(number % 3), np.zeros(4, np.int32), waiting.copy(), active, 1.0, np.int32(0), 1.0)
        state, decision = decide(state, push)
        rounds += bool(decision.step)
        release = np.asarray(decision.release)
        if release[3]:
            return rounds
        waiting &= ~release
    raise AssertionError("the sleeper never starts over")


@pytest.mark.slow
def test_abs_is_faster_than_bsp_where_workers_fall_asleep():
    assert seconds("one by one", "abs") < seconds("one by one", "fixed")


# ----------------------------------------------------------------------------------------------------------------- LB-BSP


@given(st.lists(st.floats(0.1, 50.0), min_size=4, max_size=4))
def test_lb_bsp_shares_the_batch_out_by_speed(rates):
    start = JOB.start
    places = [(w, d) for w, row in zip(start.workers, start.loads, strict=True) for d, n in enumerate(row) if n]
    speeds = {place: rates[i % 4] for i, place in enumerate(places)}
    made = balanced(start, speeds)
    JOB.space.check(made)
    samples = [dict(zip(made.workers, made.loads, strict=True))[w][d] for w, d in places]
    assert min(samples) >= 1
    for (a, b), (p, q) in zip(pairwise(samples), pairwise(places), strict=True):
        assert speeds[p] <= speeds[q] or a >= b - 1


def test_lb_bsp_keeps_the_samples_of_a_device_without_a_speed():
    assert balanced(JOB.start, {}) == JOB.start


def test_lb_bsp_keeps_the_contract():
    check_tuner(lb_bsp, systems={"fake": lambda seed: Fake(), "loses a node": lambda seed: Fake(3000.0)}, most=60)


@pytest.mark.slow
def test_lb_bsp_is_faster_than_equal_batches_on_unequal_machines():
    """Chen et al.: up to 54 % faster."""
    assert seconds("boat-digits", "lb_bsp") < 0.6 * seconds("boat-digits", "fixed")


# ----------------------------------------------------------------------------------------------------------- all of them


@pytest.mark.parametrize(
    "policy",
    [ringmaster_policy(3), DBW, adasync_policy(2), abs_policy(2, 1.5), ata_policy(1, 0.25), buffered(2)],
    ids=lambda policy: policy.name.partition("(")[0],
)
def test_the_engine_can_be_compiled_with_the_policy(policy):
    """Its shapes and types; compiling it would take ten times as long."""
    simulated = learning()
    simulated.perform(Install(policy))
    run = simulated.branches[0]
    facts = (run.program, run.context.data, run.inputs, run.state, np.int32(10), np.float64(np.inf))
    traced = loop.advance.jitted.trace(*facts, rows=10)
    assert jax.tree.structure(traced.out_info[0]) == jax.tree.structure(run.state)


@pytest.mark.parametrize("factory", [ringmaster, dbw, adasync, adaptive_bounded_staleness], ids=lambda f: f.__name__)
def test_a_rival_that_may_not_install_its_policy_leaves_the_job_alone(factory):
    tuner = factory(job())
    assert isinstance(next(tuner), Install)
    with pytest.raises(StopIteration):
        tuner.throw(Rejected("Cannot do that: the test refuses it."))
    assert list(factory(replace(job("one knob"), installs_policies=False))) == []
    assert list(factory(job("timing only"))) == []


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: ringmaster_policy(0), "delay of 0 updates"),
        (lambda: dbw_policy(0), "over 0 rounds"),
        (lambda: adasync_policy(0), "wait for 0 workers"),
        (lambda: abs_policy(0, 2.0), "wait for 0 workers"),
        (lambda: abs_policy(1, 0.5), "after 0.5 times the mean age"),
    ],
)
def test_rivals_that_make_no_sense_are_refused(make, reason):
    with pytest.raises(ValueError, match=reason):
        make()
