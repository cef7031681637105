"""AdaRevision against AdaGrad and its own theory (the oracle has a plain one); what state optimizers keep."""

import jax.numpy as jnp
import optax
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from simulators.cluster.conditions import Conditions
from simulators.engine.optimizers import OPTIMIZERS, optimizer, slots
from simulators.workloads.catalogue import workload
from tests.support.small_jobs import MODEL, cluster, job, start, system

GRADIENTS = st.lists(st.floats(-3, 3, width=32).filter(lambda g: g == 0 or abs(g) > 1e-2), min_size=1, max_size=20)


def applied(name, gradients, missed=None, rate=0.1):
    """One parameter after these gradients, in this order; `missed` is, for each, the sum of gradients since its pull."""
    made, weight = optimizer(name, rate, 0.0), jnp.zeros(1)
    kept = made.init(weight)
    for g, u in zip(gradients, missed or [0.0] * len(gradients), strict=True):
        step, kept = made.update(jnp.full(1, g), kept, weight, missed=jnp.full(1, u))
        weight = optax.apply_updates(weight, step)
    return float(weight[0])


def test_slots_are_what_the_optimizers_papers_keep():
    kept = {"sgd": 0, "momentum": 1, "nesterov": 1, "adam": 2, "rmsprop": 1, "adagrad": 1, "adadelta": 2, "adarevision": 3}
    assert {name: slots(name) for name in OPTIMIZERS} == kept


@settings(max_examples=20, deadline=None)
@given(GRADIENTS)
def test_without_delay_it_is_adagrad(gradients):
    assert applied("adarevision", gradients) == pytest.approx(applied("adagrad", gradients), rel=1e-6, abs=1e-7)


@pytest.mark.slow
@settings(max_examples=20, deadline=None)
@given(st.lists(st.floats(0.1, 3.0), min_size=2, max_size=12), st.sampled_from([1, -1]))
def test_gradients_of_one_pull_are_like_one_gradient_of_their_sum(sizes, sign):
    """z is the square of the sum, and all earlier steps are revised to its rate: n steps at one point are one AdaGrad step,
    where AdaGrad itself would go about sqrt(n) times as far, however late they are."""
    gradients = [sign * g for g in sizes]
    before = [sum(gradients[:i]) for i in range(len(gradients))]
    assert applied("adarevision", gradients, before) == pytest.approx(applied("adagrad", [sum(gradients)]), rel=1e-4)
    assert abs(applied("adagrad", gradients)) > abs(applied("adarevision", gradients, before))


def test_a_delayed_gradient_that_turns_back_does_not_raise_the_rate():
    """z falls with gradients that cancel out; the largest so far stays."""
    first, second = -0.1, -0.1 + 0.1 * 1.0 / 2.0
    assert applied("adarevision", [2.0], [0.0]) == pytest.approx(first, rel=1e-5)
    assert applied("adarevision", [2.0, -1.0], [0.0, 2.0]) == pytest.approx(second, rel=1e-5)


def test_a_mean_of_gradients_has_no_one_delay():
    with pytest.raises(ValueError, match=r"Cannot apply the mean of gradients by 'adarevision': .* aggregation"):
        system(cluster(), job(model=MODEL, optimizer="adarevision", aggregation="mean"), start(), Conditions())


def test_workloads_can_name_it():
    assert workload("ratings-mf", {"optimizer": "adarevision"}).optimizer == "adarevision"
