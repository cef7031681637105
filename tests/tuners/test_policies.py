"""Synchronisation policies under arbitrary orders of pushes: bounds hold, no worker waits forever, relatives agree."""

from dataclasses import dataclass

import jax
import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from tests.support.marks import examples
from tuners import policies
from tuners.actions import Push, Rejected
from tuners.settings import POLICIES

K = 5
ORDERS = st.lists(st.integers(0, K - 1), min_size=1, max_size=80)
MASKS = st.lists(st.booleans(), min_size=K, max_size=K).filter(any)
RATES = st.lists(st.floats(0.1, 10.0), min_size=K, max_size=K)


@dataclass
class Moment:
    """The result of one push. Arrays are [k], after the decision."""

    worker: int
    clocks: np.ndarray
    busy: np.ndarray
    release: np.ndarray
    step: bool
    waiting: np.ndarray
    accept: bool
    age: int  # of the gradient: updates between its pull and its push


def run(policy, order, active=None, seconds_per_cycle=None):
    """Let busy workers push: the one that `order` selects, or, where mini-batches take time, the next to finish."""
    active = np.ones(K, bool) if active is None else np.array(active)
    clocks, busy, state = np.zeros(K, np.int32), active.copy(), policy.init(active)
    updates, pulled = 0, np.zeros(K, np.int32)
    due = np.where(active, 0.0 if seconds_per_cycle is None else np.array(seconds_per_cycle), np.inf)
    decide = jax.jit(policy.decide)
    for number, pick in enumerate(order):
        assert busy.any(), "deadlock: no worker is left that could push"
        ready = np.flatnonzero(busy)
        worker = int(ready[pick % len(ready)] if seconds_per_cycle is None else np.argmin(due))
        seconds = float(number + 1 if seconds_per_cycle is None else due[worker])
        clocks[worker] += 1
        busy[worker], due[worker] = False, np.inf
        waiting = active & ~busy
        age = np.int32(updates - pulled[worker])
        push = Push(np.int32(worker), clocks.copy(), waiting, active, seconds, age, np.float32(1.0))
        state, decision = decide(state, push)
        release = np.asarray(decision.release)
        busy |= release
        updates += bool(decision.accept)
        pulled[release] = updates
        if seconds_per_cycle is not None:
            due[release] = seconds + np.array(seconds_per_cycle)[release]
        yield Moment(
            worker, clocks.copy(), busy.copy(), release, bool(decision.step), waiting, bool(decision.accept), int(age)
        )
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
        # And no worker waits without need.
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
    """Zhu et al. 2020, Section 3: with D = p_s - min p, W_s goes on if 0 < D < s, all idle workers if D = 0, else none."""
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


@pytest.mark.slow
@examples(8)
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


# --------------------------------------------------------------------------------------------------- bounds on the age

AGES = st.integers(0, K + 1)


@given(ORDERS, MASKS, AGES)
def test_discard_drops_what_is_older_and_lets_nobody_wait(order, active, bound):
    for m in run(policies.discard(bound), order, active):
        assert m.accept == (m.age <= bound)
        assert np.flatnonzero(m.release).tolist() == [m.worker]
        assert m.step


@given(ORDERS, MASKS, AGES)
def test_discard_that_stops_drops_nothing_because_nothing_gets_too_old(order, active, bound):
    for m in run(policies.discard(bound, stops=True), order, active):
        assert m.accept
        assert m.busy.tolist() == list(active)


@given(ORDERS, MASKS, AGES)
def test_admit_limits_the_gradients_in_progress_and_loses_none(order, active, bound):
    """All begin at once, so that the bound holds after as many pushes as there were too many."""
    too_many = max(sum(active) - (bound + 1), 0)
    for number, m in enumerate(run(policies.admit(bound), order, active), start=1):
        assert m.busy.sum() == max(min(bound + 1, sum(active)), sum(active) - number)
        assert not (m.release & ~m.waiting).any()
        assert m.accept
        assert m.step
        if number > too_many and m.release.any():
            begun = m.clocks[m.release].max()
            assert (begun <= m.clocks[m.waiting & ~m.release]).all()  # the fewest pushes go first


@pytest.mark.slow
@examples(10)
@example([1.0, 1.0, 3.0, 6.0, 0.25], 4)
@given(st.lists(st.floats(0.5, 2.0), min_size=K, max_size=K), st.integers(0, K - 1))
def test_under_admit_gradients_are_as_old_as_the_bound_on_average(cycle_seconds, bound):
    """Whatever the speeds: every update ages the other gradients in progress by one, and these are `bound`.

    The ages of gradients that are in progress at the end are not seen: with 1,000 pushes, these are few enough.
    """
    ages = [m.age for m in run(policies.admit(bound), [0] * 1000, seconds_per_cycle=cycle_seconds)]
    assert abs(np.mean(ages[K:]) - bound) < 0.1


@given(ORDERS, MASKS, AGES)
def test_a_bound_that_nothing_reaches_is_asp(order, active, extra):
    for a, b in zip(run(policies.admit(K + extra), order, active), run(policies.asp(), order, active), strict=True):
        assert (a.release.tolist(), a.accept, a.step) == (b.release.tolist(), b.accept, b.step)
    for a, b in zip(run(policies.discard(80), order, active), run(policies.asp(), order, active), strict=True):
        assert (a.release.tolist(), a.accept, a.step) == (b.release.tolist(), b.accept, b.step)


# --------------------------------------------------------------------------------------------------- groups of K pushes


def groups(moments):
    """The pushes of each group, the one that ends it included; an unfinished group is left out."""
    group = []
    for m in moments:
        group.append(m)
        if m.step:
            yield group
            group = []


SIZES = st.integers(1, K + 2)  # more than there are workers, too


@given(ORDERS, MASKS, SIZES)
def test_k_sync_ends_a_round_with_the_first_k_and_all_begin_anew(order, active, size):
    for group in groups(run(policies.k_sync(size), order, active)):
        assert len(group) == min(size, sum(active))
        assert len({m.worker for m in group}) == len(group)
        assert not any(m.release.any() for m in group[:-1])
        assert group[-1].release.tolist() == list(active)


@given(ORDERS, MASKS, SIZES)
def test_k_batch_sync_counts_mini_batches_whoevers_they_are(order, active, size):
    for group in groups(run(policies.k_batch_sync(size), order, active)):
        assert len(group) == size
        assert all(np.flatnonzero(m.release).tolist() == [m.worker] for m in group[:-1])
        assert group[-1].release.tolist() == list(active)


@given(ORDERS, MASKS, SIZES)
def test_k_async_interrupts_nobody(order, active, size):
    for group in groups(run(policies.k_async(size), order, active)):
        assert len(group) == min(size, sum(active))
        assert not any(m.release.any() for m in group[:-1])
        assert group[-1].release.tolist() == group[-1].waiting.tolist()
        assert group[-1].release.sum() == len(group)


@pytest.mark.slow
@given(ORDERS, MASKS)
def test_groups_of_everybody_are_bsp_and_of_one_asp(order, active):
    for whole in (policies.k_sync(K), policies.k_async(K), policies.backup_workers(K)):
        for a, b in zip(run(whole, order, active), run(policies.bsp(), order, active), strict=True):
            assert (a.release.tolist(), a.step, a.accept) == (b.release.tolist(), b.step, b.accept)
    for a, b in zip(run(policies.k_async(1), order, active), run(policies.asp(), order, active), strict=True):
        assert a.release.tolist() == b.release.tolist()


@given(ORDERS, MASKS, SIZES)
def test_backup_workers_drop_what_comes_after_its_round(order, active, size):
    """A push counts if its worker pulled in the current round; a round ends with the first N that count."""
    size_now, begun, rounds, counted = min(size, sum(active)), np.zeros(K, int), 0, 0
    for m in run(policies.backup_workers(size), order, active):
        assert m.accept == (begun[m.worker] == rounds)
        counted += m.accept
        assert m.step == (counted == size_now)
        if m.step:
            rounds, counted = rounds + 1, 0
            assert m.release.tolist() == m.waiting.tolist()
        else:
            assert np.flatnonzero(m.release).tolist() == ([] if m.accept else [m.worker])
        begun[m.release] = rounds


@given(ORDERS, MASKS, st.integers(0, 60))
def test_sync_switch_is_bsp_and_then_asp(order, active, clocks):
    moments = list(run(policies.sync_switch(clocks), order, active))
    first, then = moments[: max(clocks - 1, 0)], moments[max(clocks - 1, 0) :]
    for m, b in zip(first, run(policies.bsp(), order, active), strict=False):
        assert m.release.tolist() == b.release.tolist()
    for number, m in enumerate(then):
        # At the switch all who wait go on.
        assert m.release.tolist() == m.waiting.tolist()
        assert m.step
        assert number == 0 or m.release.sum() == 1


@pytest.mark.parametrize("name", POLICIES)
def test_every_name_makes_a_policy(name):
    assert policies.named(name, 3).name.startswith(name)


@pytest.mark.parametrize(
    ("make", "error", "reason"),
    [
        (lambda: policies.ssp(-1), ValueError, "Cannot bound staleness by -1"),
        (lambda: policies.dssp(3, 2), ValueError, r"\[3, 2\]"),
        (lambda: policies.k_sync(0), ValueError, r"wait for 0 workers \(k_sync\(0\)\)"),
        (lambda: policies.backup_workers(-1), ValueError, "wait for -1 workers"),
        (lambda: policies.sync_switch(-1), ValueError, "after -1 pushes"),
        (lambda: policies.discard(-1), ValueError, "discard gradients by an age of -1 updates"),
        (lambda: policies.admit(-1), ValueError, "gradients in progress by an age of -1 updates"),
        (lambda: policies.named("gossip", 0), Rejected, "choose one of bsp, asp, ssp, dssp"),
    ],
)
def test_policies_that_make_no_sense_are_refused(make, error, reason):
    with pytest.raises(error, match=reason):
        make()


def test_relatives_share_one_decision():
    """Then a comparison of many bounds compiles one engine."""
    assert policies.bsp().decide is policies.asp().decide is policies.ssp(7).decide
    assert policies.discard(0).decide is policies.discard(9, stops=True).decide
    assert policies.admit(0).decide is policies.admit(9).decide
    assert policies.dssp(0, 3).decide is policies.dssp(2, 9).decide
    assert policies.k_sync(2).decide is policies.k_batch_sync(9).decide is policies.k_async(1).decide
