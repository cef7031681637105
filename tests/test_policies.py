"""Synchronisation policies under arbitrary orders of pushes: bounds hold, nobody is locked out, relatives agree."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tuners import policies
from tuners.actions import Push, Rejected

K = 5
ORDERS = st.lists(st.integers(0, K - 1), min_size=1, max_size=80)
MASKS = st.lists(st.booleans(), min_size=K, max_size=K).filter(any)
RATES = st.lists(st.floats(0.1, 10.0), min_size=K, max_size=K)


@dataclass
class Moment:
    """What one push led to. Arrays are [k], after the decision."""

    worker: int
    clocks: np.ndarray
    busy: np.ndarray
    release: np.ndarray
    step: bool
    waiting: np.ndarray


def run(policy, order, active=None, seconds_per_cycle=None):
    """Let busy workers push: the one that `order` picks among them, or the next to finish where cycles take time."""
    active = np.ones(K, bool) if active is None else np.array(active)
    clocks, busy, state = np.zeros(K, np.int32), active.copy(), policy.init(active)
    due = np.where(active, 0.0 if seconds_per_cycle is None else np.array(seconds_per_cycle), np.inf)
    decide = jax.jit(policy.decide)
    for number, pick in enumerate(order):
        assert busy.any(), "deadlock: nobody is left who could push"
        ready = np.flatnonzero(busy)
        worker = int(ready[pick % len(ready)] if seconds_per_cycle is None else np.argmin(due))
        seconds = float(number + 1 if seconds_per_cycle is None else due[worker])
        clocks[worker] += 1
        busy[worker], due[worker] = False, np.inf
        waiting = active & ~busy
        push = Push(np.int32(worker), clocks.copy(), waiting, active, seconds, np.int32(0), np.float32(1.0))
        state, decision = decide(state, push)
        release = np.asarray(decision.release)
        busy |= release
        if seconds_per_cycle is not None:
            due[release] = seconds + np.array(seconds_per_cycle)[release]
        yield Moment(worker, clocks.copy(), busy.copy(), release, bool(decision.step), waiting)
    assert busy.any()


def lead(moment, active):
    """How far each worker is ahead of the slowest."""
    return moment.clocks - moment.clocks[np.array(active)].min()


@given(ORDERS, MASKS, st.integers(0, 6))
def test_ssp_never_exceeds_its_bound_and_never_deadlocks(order, active, bound):
    for m in run(policies.ssp(bound), order, active):
        assert (lead(m, active)[m.busy] <= bound).all()
        assert not (m.release & ~np.array(active)).any()
        assert not (m.release & ~m.waiting).any()
        # And it holds nobody back without need.
        assert (lead(m, active)[np.array(active) & ~m.busy] > bound).all()


@given(ORDERS, MASKS)
def test_bsp_is_ssp_without_slack(order, active):
    for a, b in zip(run(policies.bsp(), order, active), run(policies.ssp(0), order, active), strict=True):
        assert a.release.tolist() == b.release.tolist()
        assert a.step == b.step


@given(ORDERS, MASKS)
def test_bsp_closes_a_group_when_everybody_has_pushed_once_more(order, active):
    group = []
    for m in run(policies.bsp(), order, active):
        group.append(m.worker)
        assert m.step == (sorted(group) == np.flatnonzero(active).tolist())
        assert m.step == m.release.any()
        group = [] if m.step else group


@given(ORDERS, MASKS)
def test_asp_lets_the_pusher_go_on_and_steps_at_every_push(order, active):
    for m in run(policies.asp(), order, active):
        assert np.flatnonzero(m.release).tolist() == [m.worker]
        assert m.step


@given(ORDERS, st.integers(1, 6))
def test_rlp_prints_ssp_with_one_more(order, s):
    """Zhu et al. 2020, Section 3: with D = p_s - min p, W_s goes on if 0 < D < s, all idle if D = 0, else nobody."""
    for m in run(policies.ssp_as_printed(s), order):
        ahead = lead(m, np.ones(K, bool))[m.worker]
        expected = np.zeros(K, bool)
        if ahead == 0:
            expected = m.waiting
        elif ahead < s:
            expected[m.worker] = True
        assert m.release.tolist() == expected.tolist()


def test_rlps_smallest_bounds():
    with pytest.raises(ValueError, match="s = 0 deadlocks, s = 1 is BSP"):
        policies.ssp_as_printed(0)
    assert policies.ssp_as_printed(1).name == policies.ssp(0).name


@settings(max_examples=60)
@given(RATES, MASKS, st.integers(0, 4), st.integers(0, 12))
def test_dssp_stays_within_its_range_and_never_deadlocks(cycle_seconds, active, low, extra):
    moments = list(run(policies.dssp(low, low + extra), [0] * 80, active, cycle_seconds))
    for m in moments:
        assert (lead(m, active)[m.busy] <= low + extra).all()
        # Everybody has the lower bound for certain.
        assert (lead(m, active)[np.array(active) & ~m.busy] > low).all()


@given(ORDERS, MASKS, st.integers(0, 4))
def test_dssp_without_a_range_is_ssp(order, active, bound):
    for a, b in zip(run(policies.dssp(bound, bound), order, active), run(policies.ssp(bound), order, active), strict=True):
        assert a.release.tolist() == b.release.tolist()


def test_dssp_lets_the_fast_run_ahead_to_wait_less():
    """A worker three times as fast: SSP(1) makes it wait for most of its time, the dynamic bound for less of it."""

    def waited(policy):
        moments = list(run(policy, [0] * 200, [True, True, False, False, False], [1.0, 3.1, 1, 1, 1]))
        return sum(not m.busy[0] for m in moments) / len(moments), max(m.clocks[0] - m.clocks[1] for m in moments)

    static, _ = waited(policies.ssp(1))
    dynamic, furthest = waited(policies.dssp(1, 9))
    assert dynamic <= static
    assert 2 < furthest <= 10


@pytest.mark.parametrize("name", policies.names())
def test_every_name_makes_a_policy(name):
    assert policies.named(name, 3).name.startswith(name)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: policies.ssp(-1), ValueError, "Cannot bound staleness by -1"),
        (lambda: policies.dssp(3, 2), ValueError, r"\[3, 2\]"),
        (lambda: policies.named("gossip", 0), Rejected, "choose one of bsp, asp, ssp, dssp"),
    ],
)
def test_policies_that_make_no_sense_are_refused(make, error, reason):
    with pytest.raises(error, match=reason):
        make()


def test_relatives_share_one_decision():
    """So that a comparison of many bounds compiles one engine."""
    assert policies.bsp().decide is policies.asp().decide is policies.ssp(7).decide
    assert policies.dssp(0, 3).decide is policies.dssp(2, 9).decide
