"""What is kept of gradients: factors that are smaller than their products, and the same bytes."""

from dataclasses import replace
from math import prod

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from simulators.engine import changes, learning
from simulators.engine.kept_gradients import kept_form
from simulators.workloads.catalogue import workload
from tests.bench.jobs import engine_job
from tests.support.marks import slow
from tests.support.small_jobs import plain_job, system
from tuners import policies
from tuners.settings import Choice, Real


def values(loss, *arrays):
    return [np.asarray(a) for a in jax.tree.leaves((loss, *arrays))]


def dense(parameters, x):
    return jnp.sum(jnp.tanh(x @ parameters["w"] + parameters["b"]))


@pytest.mark.slow
def test_a_product_is_kept_as_its_factors_only_where_these_are_smaller():
    parameters = {"w": jnp.ones((20, 30)), "b": jnp.ones(30)}
    for rows, kept in ((4, {(30,), (4, 20), (4, 30)}), (12, {(30,), (20, 30)})):  # 4 * (20 + 30) < 20 * 30 = 12 * (20 + 30)
        x = jnp.linspace(-1.0, 1.0, rows * 20).reshape(rows, 20)
        form = kept_form(jax.value_and_grad(dense), parameters, x)
        assert {tuple(a.shape) for a in form.kept} == kept
        loss, between = form.begun(parameters, x)
        assert [a.shape for a in between] == [a.shape for a in form.kept]
        for a, b in zip(
            values(loss, form.finished(between)), values(*jax.value_and_grad(dense)(parameters, x)), strict=True
        ):
            np.testing.assert_array_equal(a, b)


def test_a_product_that_something_is_added_to_is_kept_whole():
    def decayed(parameters, x):
        return dense(parameters, x) + jnp.sum(parameters["w"] ** 2)

    form = kept_form(jax.value_and_grad(decayed), {"w": jnp.ones((20, 30)), "b": jnp.ones(30)}, jnp.ones((4, 20)))
    assert {tuple(a.shape) for a in form.kept} == {(30,), (20, 30)}


def test_a_parameter_that_the_loss_does_not_use_has_a_gradient_of_zero():
    def loss(parameters, x):
        return jnp.sum(jnp.tanh(x @ parameters["w"])) + 2.0 * parameters["twice"]

    unused = {"number": jnp.float32(1.0), "row": jnp.ones(3)}
    parameters = {"w": jnp.ones((20, 30)), "twice": jnp.float32(1.0), **unused}
    form = kept_form(jax.value_and_grad(loss), parameters, jnp.ones((4, 20)))
    gradient = form.finished(form.begun(parameters, jnp.ones((4, 20)))[1])
    assert [float(gradient["twice"]), float(gradient["number"]), gradient["row"].tolist()] == [2.0, 0.0, [0.0] * 3]


@pytest.mark.parametrize(
    "policy",
    [slow(policies.asp()), policies.bsp(), slow(policies.k_sync(3))],
    ids=lambda p: p.name,
)
def test_a_job_that_keeps_factors_has_the_bytes_of_one_that_keeps_gradients(policy):
    made = engine_job(64, (96,), 6, policy)
    model = made.program.model._replace(rows=())
    program = made.program._replace(model=model)
    blank = changes.blank(program, made.inputs, made.state.learned.parameters)
    begun = policy.init(made.inputs.active)
    first = changes.launch(program, made.data, made.inputs, blank, begun, made.inputs.active, jnp.linspace(0.0, 4.0, 6))
    whole = replace(made, program=program, state=first)
    (some, records, _), (all_, expected, _) = made.advance(60), whole.advance(60)
    np.testing.assert_array_equal(np.asarray(records), np.asarray(expected))
    for a, b in zip(*(jax.tree.leaves(s.learned.parameters) for s in (some, all_)), strict=True):
        np.testing.assert_array_equal(np.asarray(a), np.asarray(b))
    kept, all_kept = (sum(a.nbytes for a in jax.tree.leaves(s.learned.gradients)) for s in (some, all_))
    assert kept < 0.8 * all_kept


@pytest.mark.parametrize("name", [slow("digits-cnn"), slow("digits-lstm"), "digits-svm", slow("sentences-lm"), "ratings-mf"])
def test_every_kind_of_model_goes_in_two_parts(name):
    proxy = workload(name).proxy
    rows = tuple(np.asarray(column)[:8] for column in proxy.train)
    model = learning.LearningProgram(proxy.losses, proxy.correct, "sgd", "each", 8)
    function = jax.value_and_grad(lambda p, r: learning.mean_loss(model, p, r, jnp.int32(8)))
    parameters = proxy.init(0)
    form = kept_form(function, parameters, rows)
    assert sum(prod(a.shape) for a in form.kept) <= sum(np.size(p) for p in jax.tree.leaves(parameters))
    loss, between = jax.jit(form.begun)(parameters, rows)
    made, whole = values(loss, jax.jit(form.finished)(between)), values(*jax.jit(function)(parameters, rows))
    for a, b in zip(made, whole, strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize(
    ("knobs", "whole"),
    [
        ((Real("learning_rate", 0.01, 1.0),), False),
        ((Choice("batch_size", (8, 64)),), True),
        ((Choice("load/a/0", (4, 8)),), True),
    ],
    ids=["rate", "batch", "loads"],
)
def test_factors_are_kept_only_where_no_mini_batch_can_change(knobs, whole):
    """A change of the batch compiles another program, which goes on with what the one before has kept."""
    cluster, learns, setting, conditions = plain_job(loads=((8,), (8,), (8,)) if "load/a/0" in knobs[0].name else ())
    simulated = system(cluster, learns, setting, conditions, knobs=knobs)
    assert simulated.branches[0].program.model.rows == (() if whole else (((8, 6), "float32"), ((8,), "int32")))


@pytest.mark.parametrize("workers", [[0, 1, 2, 3, 4], [1, 4, 5, 8]])
def test_pairs_of_nodes_leave_the_same_bytes_as_all_nodes_at_once(workers):
    """Where some nodes do not work, workers that pull together do so by pairs of nodes, also where one of a pair is idle."""
    pushes, nodes = 40, 9
    whole = engine_job(64, (256,), nodes, policies.bsp())
    active = jnp.zeros(nodes, bool).at[jnp.asarray(workers)].set(True)
    inputs = whole.inputs._replace(active=active)
    idle = changes.workers_stopped(whole.state, np.ones(nodes, bool), 0.0)
    policy = policies.bsp().init(active)
    begun = changes.launch(whole.program, whole.data, inputs, idle, policy, active, jnp.zeros(nodes))
    whole = replace(whole, inputs=inputs, state=begun)
    paired = replace(whole, program=whole.program._replace(idle=True))
    (one, table, used), (other, other_table, other_used) = whole.advance(pushes), paired.advance(pushes)
    assert int(used) == int(other_used) == pushes
    assert np.array_equal(table, other_table, equal_nan=True)
    learned, others, before = (jax.tree.leaves(s.learned.parameters) for s in (one, other, begun))
    assert all(np.array_equal(a, b) for a, b in zip(learned, others, strict=True))
    assert not np.array_equal(learned[0], before[0])
