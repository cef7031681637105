"""RLP's random instances, and data that is distributed by class."""

from dataclasses import replace

import jax
import numpy as np
import pytest

from harness.training.instances import InstanceKind, draw
from simulators import jobs
from simulators.branch import stacked
from simulators.cluster.conditions import Conditions, Stragglers
from simulators.workloads.catalogue import workload
from tests.simulators.workloads.test_datasets import mnist_folder  # noqa: F401
from tuners import policies
from tuners.actions import Target

KIND = InstanceKind(depths=(0,), workers=4, target=Target("clocks", 40))


def inputs(instance):
    context = instance.context
    return context.prepare(context.job.start, policies.asp()).inputs


def test_an_instance_follows_from_its_seed():
    one, same, other = (draw(KIND, seed) for seed in (3, 3, 4))
    for a, b in zip(one.context.data.train, same.context.data.train, strict=True):
        np.testing.assert_array_equal(a, b)
    assert not np.array_equal(one.context.data.train[0], other.context.data.train[0])
    assert np.array_equal(*(draw(KIND, seed).context.data.valid[0] for seed in (3, 4)))


def test_half_of_the_data_is_drawn_without_repetition():
    whole = workload("rlp-digits").proxy.train[0]
    half = draw(KIND, 0).context.data.train[0]
    assert len(half) == round(len(whole) / 2)
    rows = {row.tobytes() for row in np.asarray(whole)}
    assert {row.tobytes() for row in np.asarray(half)} <= rows


def test_depths_are_drawn_and_can_be_given():
    kind = InstanceKind(units=4, depths=(0, 1))
    found = [draw(kind, seed) for seed in range(12)]
    assert {i.depth for i in found} == {0, 1}
    again = draw(kind, 0, depth=1)
    assert [layer["w"].shape for layer in again.parameters] == [(64, 4), (4, 10)]
    assert again.straggles == found[0].straggles
    # The seed also determines the first parameters.
    one, other, *_ = [i.parameters for i in found if i.depth == 1]
    assert not np.array_equal(one[0]["w"], other[0]["w"])
    same = draw(kind, next(i.seed for i in found if i.depth == 1)).parameters
    assert jax.tree.all(jax.tree.map(lambda a, b: bool((a == b).all()), one, same))


def test_stragglers_take_as_much_longer_as_in_table_1():
    """Zhu et al. 2020: 4.4, 5.3, 10.6 and 17.4 s more than the 4.8 s of the others, each in all of its steps."""
    kind = InstanceKind(depths=(0,), conditions=Conditions(jitter=0.0, stragglers=InstanceKind().conditions.stragglers))
    found = [draw(kind, seed) for seed in range(60)]
    slow = np.array([i.straggles for i in found])
    mean = np.array([inputs(i).sleep_mean_seconds[:-1] for i in found])
    assert slow.mean() == pytest.approx(0.3, abs=4 * np.sqrt(0.3 * 0.7 / slow.size))
    extra = mean[slow]
    assert extra.mean() == pytest.approx(9.4, abs=4 * 6.0 / np.sqrt(extra.size))
    assert extra.std() == pytest.approx(6.0, rel=0.3)
    assert (mean[~slow] == 0).all()


def test_without_a_spread_all_stragglers_are_equally_slow():
    stragglers = Stragglers(mean_seconds=5.0, sd_seconds=1.0, probability=1.0)
    made = inputs(draw(replace(KIND, conditions=Conditions(stragglers=stragglers)), 0))
    assert made.sleep_mean_seconds.tolist() == [5.0] * 5


def test_instances_of_one_depth_share_one_engine_and_can_be_lanes():
    begun = [draw(KIND, seed).begin(policies.ssp(2)) for seed in range(3)]
    assert len({b.program for b in begun}) == 1
    data, inputs, states = stacked(begun)
    lanes = [jax.tree.map(lambda leaf, i=i: leaf[i], (data.train, inputs, states)) for i in range(3)]
    for branch, lane in zip(begun, lanes, strict=True):
        alone = (branch.context.data.train, branch.inputs, branch.state)
        jax.tree.map(np.testing.assert_array_equal, lane, alone)
    np.testing.assert_array_equal(data.valid[0], begun[2].context.data.valid[0])


def test_instances_of_mnists_files(mnist_folder):  # noqa: F811
    kind = InstanceKind(workload="rlp-mnist", overrides={"valid_samples": 0}, data=mnist_folder, workers=2)
    found = draw(kind, 0, depth=0)
    assert [layer["w"].shape for layer in found.parameters] == [(784, 10)]
    assert [len(column) for column in found.context.data.train] == [15, 15]


def test_one_worker_is_a_cluster():
    assert inputs(draw(replace(KIND, workers=1), 0)).active.tolist() == [True, False]


def test_impossible_instances_are_refused():
    with pytest.raises(ValueError, match="instance of 0 workers"):
        draw(replace(KIND, workers=0), 0)
    with pytest.raises(ValueError, match="timing-only"):
        draw(InstanceKind(workload="cruise-nmf", depths=()), 0)


# ------------------------------------------------------------------------------------------------------------------ skew


def classes_held(skew, parts):
    made = replace(workload("digits-logistic"), skew=skew)
    labels = np.asarray(jobs.drawn(made, 0, parts)[0].train[1])
    return [np.bincount(part, minlength=10) / len(part) for part in np.array_split(labels, parts)]


@pytest.mark.parametrize("parts", [1, 3, 10])
@pytest.mark.parametrize("skew", [0.0, 0.5, 1.0])
def test_skewed_data_is_the_same_data(skew, parts):
    made = workload("digits-logistic")
    labels = jobs.drawn(replace(made, skew=skew), 0, parts)[0].train[1]
    np.testing.assert_array_equal(np.bincount(labels), np.bincount(made.proxy.train[1]))


def test_each_of_ten_workers_holds_mostly_one_of_ten_classes():
    assert np.mean([held.max() for held in classes_held(1.0, 10)]) > 0.8
    assert 0.4 < np.mean([held.max() for held in classes_held(0.5, 10)]) < 0.8
    assert np.mean([held.max() for held in classes_held(0.0, 10)]) < 0.25


def test_fewer_workers_hold_more_classes_each_in_mixed_order():
    assert all((held > 0.1).sum() in (5, 6) for held in classes_held(1.0, 2))
    labels = np.asarray(jobs.drawn(replace(workload("digits-logistic"), skew=1.0), 0, 2)[0].train[1])
    assert len(set(labels[:100].tolist())) >= 5


def test_an_order_without_skew_is_that_of_the_seed():
    """Runs that were recorded before there was skew stay the same."""
    made = workload("digits-logistic")
    order = np.random.default_rng([5, 3]).permutation(len(made.proxy.train[0]))
    np.testing.assert_array_equal(jobs.drawn(made, 5, 4)[0].train[1], np.asarray(made.proxy.train[1])[order])


def test_data_without_classes_cannot_be_skewed():
    with pytest.raises(ValueError, match="it has no classes; set skew to 0"):
        jobs.drawn(workload("ratings-mf", {"skew": 0.5}), 0)
