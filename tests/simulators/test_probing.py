"""Policies that look at the loss around an update (`SyncPolicy.probes`), as learned ones do."""

import jax.numpy as jnp
import numpy as np
import pytest

from simulators.jobs import drawn
from tests.support.small_jobs import MODEL, NAMES, branch, plain_job, system
from tuners.actions import Decision, Install, Run, SyncPolicy


def _nothing_seen(active):
    return jnp.zeros(3)


def _note_losses(state, push):
    return jnp.stack([push.loss, push.loss_before, push.loss_after]), Decision(release=push.waiting)


PROBE = SyncPolicy("probe", _nothing_seen, _note_losses, probes=True)


def test_a_policy_that_probes_sees_the_mini_batch_around_the_update():
    cluster, workload, setting, around = plain_job(workers=NAMES[:1])
    simulated = system(cluster, workload, setting, around)
    simulated.perform(Install(PROBE))
    samples = [np.asarray(column) for column in drawn(workload, 0)[0].train]
    for number in range(4):
        batch = [column[number * 8 + np.arange(8)] for column in samples]
        before = {k: np.asarray(v, np.float64) for k, v in branch(simulated).learned.parameters.items()}
        seen = simulated.perform(Run(clocks=1))
        after = {k: np.asarray(v, np.float64) for k, v in branch(simulated).learned.parameters.items()}
        pulled_loss, loss_before, loss_after = np.asarray(branch(simulated).clock.policy)
        assert pulled_loss == seen.pushes.loss[0]
        assert loss_before == pytest.approx(MODEL.gradient(before, batch)[0], rel=1e-5)
        assert loss_after == pytest.approx(MODEL.gradient(after, batch)[0], rel=1e-5)
        assert loss_after < loss_before


def test_probing_sees_the_servers_parameters_not_those_that_were_pulled():
    cluster, workload, setting, around = plain_job()
    simulated = system(cluster, workload, setting, around)
    simulated.perform(Install(PROBE))
    stale = simulated.perform(Run(clocks=40)).pushes.staleness[-1]
    pulled_loss, loss_before, _ = np.asarray(branch(simulated).clock.policy)
    assert stale > 0
    assert pulled_loss != loss_before


@pytest.mark.parametrize(
    ("begins", "goes_on", "said"),
    [
        (lambda _: jnp.float32(0), lambda state, push: state + push.loss, r"float32\[\] into float64\[\]"),
        (lambda _: (jnp.zeros(2), 0), lambda state, push: (push.loss, state[1]), r"float64\[2\] into float64\[\]"),
        (lambda _: jnp.zeros(2), lambda state, push: (state, push.loss), r"PyTreeDef\(\*\) into"),
    ],
)
def test_a_policy_whose_state_changes_its_type_is_told_so(begins, goes_on, said):
    cluster, workload, setting, around = plain_job()
    simulated = system(cluster, workload, setting, around)
    changing = SyncPolicy("changing", begins, lambda state, push: (goes_on(state, push), Decision(release=push.waiting)))
    simulated.perform(Install(changing))
    with pytest.raises(TypeError, match=rf"`decide` changes the type of its state: {said}"):
        simulated.perform(Run(clocks=2))


def test_a_policy_may_begin_with_a_python_number():
    cluster, workload, setting, around = plain_job()
    simulated = system(cluster, workload, setting, around)
    counts = SyncPolicy("counts", lambda _: 0, lambda state, push: (state + 1, Decision(release=push.waiting)))
    simulated.perform(Install(counts))
    simulated.perform(Run(clocks=3))
    assert int(branch(simulated).clock.policy) == 3


@pytest.mark.slow
def test_probing_changes_nothing_else():
    cluster, workload, setting, around = plain_job()
    plain, probed = (system(cluster, workload, setting, around) for _ in range(2))  # under asp, which decides the same
    probed.perform(Install(PROBE))
    one, two = (s.perform(Run(clocks=60)).pushes for s in (plain, probed))
    np.testing.assert_array_equal(one.seconds, two.seconds)
    np.testing.assert_allclose(one.loss, two.loss, rtol=1e-5)
