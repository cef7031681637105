"""ATA: rounds hold the gradients that were allocated, most of them of fast workers, and no work is thrown away."""

from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from tests.tuners.test_policies import MASKS, ORDERS, RATES, K, groups, run
from tuners.actions import Window
from tuners.baselines.rivals.ata import allocated, ata_policy

ALLOCATED = jax.jit(allocated)  # as a policy calls it: once compiled


@given(ORDERS, MASKS, st.integers(1, 3))
def test_a_round_holds_its_gradients_and_nobody_starts_over(order, active, tasks):
    busy = np.array(active)
    for group in groups(run(ata_policy(tasks, 0.25), order, active)):
        assert len(group) == tasks * sum(active)
        for moment in group:
            assert moment.accept
            assert not (moment.release & ~moment.waiting).any()
            busy = moment.busy
        assert (busy == group[-1].release).all()  # at the end of a round everybody had finished


@given(RATES, st.integers(1, 30))
def test_no_other_allocation_ends_sooner(seconds, tasks):
    seconds = np.array(seconds)
    given_ = np.asarray(ALLOCATED(seconds, np.ones(K, bool), tasks))
    assert given_.sum() == tasks
    # Nobody else could take the last task of the worker that is last, and be done before it is.
    longest = (given_ * seconds).max()
    assert ((given_ + 1) * seconds >= longest - 1e-9).all()


def test_bounds_of_zero_share_tasks_out_evenly():
    assert np.asarray(allocated(jnp.zeros(K), jnp.arange(K) != 1, jnp.asarray(6))).tolist() == [2, 0, 2, 1, 1]


def test_fast_workers_get_more():
    moments = list(run(ata_policy(1, 0.25), [0] * 400, seconds_per_cycle=[1.0, 1.0, 2.0, 4.0, 20.0]))
    pushes = np.bincount([m.worker for m in moments[-200:]], minlength=K)
    assert pushes[0] >= pushes[2] >= pushes[3] > pushes[4]
    assert pushes[:2].sum() > 100


def test_less_than_one_gradient_is_refused():
    with pytest.raises(ValueError, match="0 gradients per worker"):
        ata_policy(0, 0.25)


def _unequal():
    """Ten workers, seven of which sleep in every mini-batch, each for a time of its own; gradients are averaged."""
    stragglers = {"nodes": [f"n{i}" for i in range(3, 10)], "mean_seconds": 8.0, "sd_seconds": 2.0, "spread_seconds": 4.0}
    return harness.scenario(
        "digits-logistic",
        name="unequal",
        cluster={"nodes": [{"type": "edge-4core", "count": 12}]},
        workload={"name": "digits-logistic", "overrides": {"aggregation": "mean"}},
        start={"worker_count": 10, "policy": "bsp", "learning_rate": 0.5},
        conditions={"sleeps": None, "jitter": 0.3, "stragglers": stragglers},
        target={"metric": "accuracy", "value": 0.9, "check_clocks": 10},
    )


@cache
def worked(tuner, seed):
    """Simulated seconds to the target, and seconds that workers computed for it, without work that was thrown away."""
    played = harness.play(_unequal(), tuner, seed=seed)
    windows = [e.answer for e in played.exchanges if isinstance(e.answer, Window)]
    return played.score.completion_seconds, sum(float(w.pushes.compute_seconds.sum()) for w in windows)


@pytest.mark.slow
def test_ata_takes_less_work_than_the_greedy_way_and_less_time_than_equal_shares():
    """Maranjyan et al.: as fast as knowing the best allocation, at a fraction of the greedy way's worker seconds."""
    seconds, work = np.sum([worked("ata", s) for s in range(3)], axis=0)
    greedy = sum(worked("k_batch_sync[share=1.0]", s)[0] for s in range(3))
    equal, equal_work = np.sum([worked("fixed", s) for s in range(3)], axis=0)
    assert work < 0.6 * 10 * greedy  # of the greedy way's ten workers none ever rests
    assert work < 0.8 * equal_work
    assert seconds < 0.9 * equal
