"""Jobs whose gradients are small: XLA compiles their steps as one function, with other code for products of matrices. Times
are the same bytes as else, and losses the same up to rounding."""

import jax
import numpy as np
import pytest

from simulators.cluster.conditions import Conditions
from simulators.engine import loop
from tests.support.small_jobs import MODEL, Cluster, Setting, Softmax, job, machine, system
from tuners import policies
from tuners.actions import Install
from tuners.baselines.rivals.ringleader import ringleader_policy

LARGE = Softmax(features=1000, classes=10)


def small(policy, nodes=9, model=MODEL, conditions=None, setting=(), **workload):
    names = tuple(f"n{i}" for i in range(nodes))
    cluster = Cluster(tuple((name, machine(100.0 - i % 7, speed=1.0 + i % 3)) for i, name in enumerate(names)))
    start = Setting(**{"workers": names[1:], "servers": names[:1], "batch_size": 8, "learning_rate": 0.1} | dict(setting))
    simulated = system(cluster, job(model=model, **workload), start, conditions or Conditions(jitter=0.3))
    simulated.perform(Install(policy))
    return simulated.branches[0]


def as_one(of):
    return loop._gradients_as_one(of.program, of.context.data, of.inputs, of.state.learned)


def advanced(program, of, clocks=300, rows=300):
    return loop.advance(program, of.context.data, of.inputs, of.state, np.int32(clocks), np.float64(np.inf), rows=rows)


@pytest.mark.parametrize(
    ("policy", "more"),
    [
        (policies.asp(), {}),
        (policies.bsp(), {}),
        (policies.ssp(2), {"optimizer": "momentum"}),
        (policies.k_sync(3), {"aggregation": "mean"}),
        (policies.quorum(3, 0.5), {}),
        (policies.asp(), {"optimizer": "adarevision"}),
        (policies.asp(), {"setting": {"local_steps": 3}}),
        (policies.asp(), {"setting": {"workers": ("n0", "n1", "n2"), "servers": ("n0", "n1", "n2")}}),
        (ringleader_policy(), {}),
        (policies.asp(), {"nodes": 160}),
    ],
    ids=["asp", "bsp", "momentum", "k_sync", "timer", "adarevision", "local steps", "both roles", "table", "many"],
)
def test_times_are_the_same_bytes_and_losses_close(policy, more):
    of = small(policy, **more)
    assert as_one(of)
    (state, table, used), (others, theirs, count) = (
        advanced(program, of) for program in (of.program, of.program._replace(dispatched=True))
    )
    assert int(used) == int(count) == 300
    loss = loop.Records._fields.index("loss")
    np.testing.assert_array_equal(np.asarray(table)[:, :loss], np.asarray(theirs)[:, :loss])
    # Of nodes that are no workers, a batch of all nodes has losses and gradients, too, which nobody reads.
    parameters = zip(*(jax.tree.leaves(s.learned.parameters) for s in (state, others)), strict=True)
    for mine, other in parameters:
        np.testing.assert_allclose(np.asarray(mine), np.asarray(other), rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(np.asarray(table)[:, loss], np.asarray(theirs)[:, loss], rtol=1e-4, atol=1e-5)


def test_the_size_of_a_window_changes_no_byte():
    """Programs with large results are compiled with other options."""
    of = small(policies.asp())
    few, many = (jax.device_get(advanced(of.program, of, rows=rows)) for rows in (300, 20_000))
    assert few[1].tobytes() == many[1][:300].tobytes()
    for mine, other in zip(jax.tree.leaves(few[0]), jax.tree.leaves(many[0]), strict=True):
        assert np.asarray(mine).tobytes() == np.asarray(other).tobytes()


def test_larger_models_are_not_asked_for():
    """The code of one function is that of plain loops, which takes longer for large products."""
    assert not as_one(small(policies.asp(), model=LARGE))
    assert not as_one(small(policies.asp(), setting={"batch_size": 4096}))


def test_policies_that_probe_are_not_asked_for():
    assert not as_one(small(policies.asp()._replace(probes=True)))
