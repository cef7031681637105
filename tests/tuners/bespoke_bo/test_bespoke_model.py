"""The bespoke model: Gaussian processes against GPy, inference against theory, forward draws against closed forms."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import GPy
import numpy as np
import pytest
from scipy.stats import binom, norm

from harness import scenario
from reports.papers.bespoke_optimum import push_ends
from simulators.engine.preparation import compute_times
from simulators.workloads.catalogue import workload
from tests.support.bespoke_truth import HYPERTHREAD, SPEEDS, Truth
from tuners.bespoke_bo.communication import communication
from tuners.bespoke_bo.draws import Draws, Iterations, expected_improvement, load_grid
from tuners.bespoke_bo.grouped_cluster import BOTH, SERVER, WORKER, GroupedCluster, Traffic
from tuners.bespoke_bo.model import IterationModel, device_rate
from tuners.bespoke_bo.parts import Evidence, Prior, draw_paths, log_likelihood, predict, trusted
from tuners.bespoke_bo.schedules import schedule
from tuners.bespoke_bo.smc import Posterior
from tuners.bespoke_bo.tuner import proportional

PART = device_rate("rate", 100.0, 1024)
LOADS = np.array([[1.0], [16.0], [100.0], [128.0], [1024.0]])


def particle(rate=90.0, saturation=4.0, amplitude=0.2, length=1.5, noise=0.05):
    return np.log([[rate, saturation, amplitude, length, noise]])


def evidence(values, inputs=LOADS):
    return Evidence(inputs, np.asarray(values, float), np.ones(len(values)))


def gpy_model(seen, amplitude=0.2, length=1.5, noise=0.05):
    kernel = GPy.kern.Matern52(1, variance=amplitude**2, lengthscale=length)
    residual = seen.values - np.log(90.0) + np.log1p(4.0 / seen.inputs[:, 0])
    return GPy.models.GPRegression(np.log(seen.inputs), residual[:, None], kernel, noise_var=noise**2)


# ------------------------------------------------------------------------------------------------------ Gaussian processes


def test_the_likelihood_is_that_of_gpy():
    seen = evidence([4.0, 4.3, 4.4, 4.6, 4.5])
    expected = gpy_model(seen).log_likelihood()
    np.testing.assert_allclose(log_likelihood(PART, particle(), seen), expected, rtol=1e-4)


def test_predictions_are_those_of_gpy():
    seen, there = evidence([4.0, 4.3, 4.4, 4.6, 4.5]), np.array([[3.0], [100.0], [5000.0]])
    mean, variance = gpy_model(seen).predict_noiseless(np.log(there))
    found, deviation = predict(PART, particle(), seen, there)
    np.testing.assert_allclose(found[0], mean[:, 0] + np.log(90.0) - np.log1p(4.0 / there[:, 0]), rtol=1e-5)
    np.testing.assert_allclose(deviation[0], np.sqrt(variance[:, 0]), rtol=1e-4)


@pytest.mark.parametrize("known", [True, False], ids=["observed", "prior"])
def test_drawn_functions_have_the_mean_and_covariance_of_the_process(known):
    seen = evidence([4.0, 4.3, 4.4, 4.6, 4.5]) if known else evidence([], np.zeros((0, 1)))
    there, many = np.array([[3.0], [40.0], [5000.0]]), 4000
    paths = draw_paths(PART, np.repeat(particle(), many, axis=0), seen, np.random.default_rng(1))
    drawn = paths(there)
    mean, deviation = predict(PART, particle(), seen, there)
    np.testing.assert_allclose(drawn.mean(0), mean[0], atol=4 * deviation.max() / np.sqrt(many))
    if known:
        _, covariance = gpy_model(seen).predict_noiseless(np.log(there), full_cov=True)
    else:
        covariance = GPy.kern.Matern52(1, variance=0.04, lengthscale=1.5).K(np.log(there))
    np.testing.assert_allclose(np.cov(drawn.T), covariance, atol=6 * deviation.max() ** 2 / np.sqrt(many))


def test_a_drawn_function_is_asked_each_draw_at_its_own_inputs():
    paths = draw_paths(PART, np.repeat(particle(), 2, axis=0), evidence([4.0, 4.3, 4.4, 4.6, 4.5]), np.random.default_rng(1))
    each = paths(np.array([[[3.0], [40.0]], [[40.0], [700.0]]]))
    np.testing.assert_allclose(each[0], paths(np.array([[3.0], [40.0]]))[0])
    np.testing.assert_allclose(each[1], paths(np.array([[40.0], [700.0]]))[1])


def test_a_residual_can_go_with_the_mean():
    part = replace(PART, floor=0.5)
    none, there = evidence([], np.zeros((0, 1))), np.array([[3.0], [40.0]])
    mean, deviation = predict(part, particle(), none, there)
    np.testing.assert_allclose(deviation, 0.2 * (mean + 0.5))


def test_a_prior_without_a_range_is_refused():
    with pytest.raises(ValueError, match="low must be less than high"):
        Prior("rate", 2.0, 1.0)
    with pytest.raises(ValueError, match="positive if log"):
        Prior("rate", 0.0, 1.0)


# ---------------------------------------------------------------------------------------------------------------- inference


def test_sequential_monte_carlo_and_importance_sampling_agree():
    """Both are right if there are many particles of the prior: expectations agree within their own errors."""
    seen, part = evidence([4.1, 4.4], LOADS[[1, 3]]), PART
    smc = Posterior(part, np.random.default_rng(0), 512, moves=8)
    plain = Posterior(part, np.random.default_rng(1), 20_000, "importance")
    for known in (smc, plain):
        known.observe(seen)
    for name in ("rate", "saturation"):
        (a, b), (one, other) = (smc.weights, plain.weights), (np.log(smc.values(name)), np.log(plain.values(name)))
        means, spread = (a @ one, b @ other), np.sqrt(a @ one**2 - (a @ one) ** 2)
        # Moved particles are correlated, so 512 count as about 100.
        error = spread * np.sqrt(1 / 100 + 1 / plain.effective[0])
        assert abs(means[0] - means[1]) < 4 * error


def test_effective_particles_are_counted_and_too_few_are_told():
    seen = evidence(np.log(90.0) - np.log1p(4.0 / LOADS[:, 0]))
    smc = Posterior(PART, np.random.default_rng(0), 256)
    smc.observe(seen)
    assert smc.effective[-1] > 10
    assert 0.02 < np.mean(smc.accepted) < 0.9
    plain = Posterior(PART, np.random.default_rng(0), 256, "importance")
    with pytest.warns(RuntimeWarning, match=r"of 256 particles count for 'rate': use more"):
        plain.observe(seen)
    assert plain.effective[-1] < 10
    assert not plain.accepted


def test_evidence_may_come_piece_by_piece():
    """The same posterior as all at once, within the error of its particles."""
    values = np.log(90.0) - np.log1p(4.0 / LOADS[:, 0]) + 0.01 * np.array([1, -1, 1, 1, -1])
    whole, pieces = (Posterior(PART, np.random.default_rng(s), 256) for s in (0, 1))
    whole.observe(evidence(values))
    for n in (2, 3, 5):
        pieces.observe(evidence(values[:n], LOADS[:n]))
    a, b = np.log(whole.values("rate")), np.log(pieces.values("rate"))
    assert abs(whole.weights @ a - pieces.weights @ b) < 5 * a.std() / np.sqrt(50)


@pytest.mark.slow
def test_intervals_cover_what_they_say():
    """Truths drawn from the prior lie in their 80 % intervals as often as that: one of the rate, one of a prediction."""
    rng, times, hits = np.random.default_rng(5), 40, np.zeros(2)
    for i in range(times):
        truth = rng.uniform(*np.array([p.ends for p in PART.priors]).T)[None, :]
        function = draw_paths(PART, truth, evidence([], np.zeros((0, 1))), rng)
        values = function(LOADS[1:4])[0] + np.exp(truth[0, -1]) * rng.standard_normal(3)
        known = Posterior(PART, np.random.default_rng(i), 96)
        known.observe(evidence(values, LOADS[1:4]))
        low, high = np.quantile(known.sample(96, rng)[:, 0], [0.1, 0.9])
        drawn = known.draw(96, rng)(np.array([[400.0]]))[:, 0]
        least, most = np.quantile(drawn, [0.1, 0.9])
        hits += low < truth[0, 0] < high, least < function(np.array([[400.0]]))[0, 0] < most
    # Of 40 at 80 %, fewer than 24 or all 40 come once in a thousand times.
    assert (binom.cdf(hits, times, 0.8) > 1e-3).all(), hits
    assert (binom.sf(hits - 1, times, 0.8) > 1e-3).all(), hits


def test_an_outlier_is_left_out_and_its_neighbours_are_not():
    held_up = np.log(90.0) - np.log1p(4.0 / LOADS[:, 0]) - np.log(10) * np.array([0, 0, 1, 0, 0])  # ten times as slow
    found = trusted(PART, particle(amplitude=0.05), evidence(held_up), np.ones(5, bool))
    np.testing.assert_array_equal(found, [True, True, False, True, True])
    np.testing.assert_array_equal(trusted(PART, particle(amplitude=0.05), evidence(held_up), found), found)


def test_who_was_left_out_comes_back_when_the_others_agree():
    values = np.log(90.0) - np.log1p(4.0 / LOADS[:, 0])
    assert trusted(PART, particle(), evidence(values), np.arange(5) != 2).all()


def test_an_outlier_teaches_nothing():
    clean = np.log(90.0) - np.log1p(4.0 / LOADS[:, 0]) + 0.01 * np.array([1, -1, 0, 1, -1])
    found = []
    for slower in (1.0, 10.0):
        known = Posterior(PART, np.random.default_rng(0), 256)
        known.observe(evidence(clean - np.log(slower) * np.array([0, 0, 1, 0, 0])))
        assert known.trusted.all() == (slower == 1)
        found.append(np.median(known.draw(256, np.random.default_rng(1))(np.array([[100.0]]))))
    assert abs(found[0] - found[1]) < 0.1


# ---------------------------------------------------------------------------------------------------------- communication


@pytest.mark.parametrize(("workers", "servers"), [(3, 1), (1, 3), (2, 2)])
def test_communication_of_disjoint_roles_is_what_cruise_predicts(workers, servers):
    """Each way max(P, w P / s) / speed (Cruise, Eq. 4, with equal shares)."""
    cluster = GroupedCluster.of(Truth({"c4.8xlarge": 4}, 64).job)
    placement = np.array([[4 - workers - servers, workers, servers, 0]])
    seconds = mean_seconds(cluster, [1e8], 0.3, placement)
    assert seconds == pytest.approx(max(173e6, workers * 173e6 / servers) / 1e8)


def mean_seconds(cluster, speeds, duplex, placement, late=None, overlap=0.0):
    """The parametric prediction; `late` [groups, 4] is when the slowest of each group and role has computed."""
    part = communication(cluster)
    return part.mean(np.array([[*speeds, duplex, overlap]]), cluster.traffic(placement, late))[0]


def test_traffic_has_a_name_for_every_column():
    cluster = GroupedCluster.of(Truth({"g2.2xlarge": 2, "c4.8xlarge": 3}, 64).job)
    placement, late = np.array([[0, 1, 0, 1], [1, 0, 2, 0]]), np.zeros((2, 4))
    late[0, WORKER], late[0, BOTH] = 3.0, 5.0
    inputs = cluster.traffic(placement, late)
    found = Traffic.of(inputs)
    assert (found.workers, found.servers) == (2, 3)
    np.testing.assert_array_equal(found.machines, [[1, 0, 1], [0, 2, 0]])
    np.testing.assert_array_equal(found.early_seconds, [[2, -1, 0], [-1, 0, -1]])
    np.testing.assert_array_equal(found.early_workers, [[2, 0], [-1, -1]])
    np.testing.assert_array_equal(found.worker_machines, [[1, 1], [0, 0]])
    np.testing.assert_array_equal(found.present(SERVER), [False, True])
    np.testing.assert_array_equal(found.inputs, inputs)


def test_communication_knows_who_moves_what():
    """The closed form against one that goes through the machines."""
    truth = Truth({"g2.2xlarge": 1, "c4.8xlarge": 2}, 64)
    cluster, job = GroupedCluster.of(truth.job), truth.job
    for roles in product(range(4), repeat=3):
        works, serves = [r in (1, 3) for r in roles], np.array([r in (2, 3) for r in roles])
        if not any(works) or not any(serves):
            continue
        loads = np.array([[w, 0] for w in works], int)
        found = mean_seconds(cluster, [SPEEDS[t] / 2 for t in cluster.types], 0.0, cluster.placement(loads, serves))
        names = [n.name for n in job.nodes]
        setting = replace(
            job.start,
            workers=tuple(n for n, w in zip(names, works, strict=True) if w),
            servers=tuple(n for n, s in zip(names, serves, strict=True) if s),
        )
        assert found == pytest.approx(max(truth.transfers(setting).values())), roles


def test_overlapping_communication_is_nearly_what_an_event_simulation_says():
    """Random schedules that compute about as long as they communicate: within 1 % for most iterations, 5 % on average.

    The printed model, in which all workers wait for the slowest connection, has a far larger error in total.
    """
    made = scenario.load("boat-c-speechnet")
    job, demand, rng = scenario.job(made), workload("bespoke-speechnet").demand, np.random.default_rng(0)
    cluster, off = GroupedCluster.of(job), []
    for _ in range(30):
        setting = job.space.setting(job.space.sample(rng))
        clean = {w: seconds for w, (seconds, _) in compute_times(made.cluster.nodes, demand, setting).items()}
        drawn = np.array([clean.get(n.name, np.nan) * rng.uniform(0.1, 0.2) for n in job.nodes])
        of = schedule(job, setting)
        loads, serves = np.array([[sum(row)] for row in of.loads]), np.array([n.name in of.servers for n in job.nodes])
        late, placement = cluster.slowest_seconds(loads, serves, drawn[None])[0], cluster.placement(loads, serves)
        exact = np.nanmax(push_ends(made.cluster, setting, demand.model_bytes, drawn))
        speeds = [s / 2 for s in cluster.speeds]
        found = [mean_seconds(cluster, speeds, 0.0, placement, late, overlap)[0] for overlap in (1.0, 0.0)]
        off.append([abs(np.nanmax(drawn) + x - exact) / exact for x in found])
    overlapping, printed = np.array(off).T
    assert np.median(overlapping) < 0.01
    assert overlapping.mean() < 0.05
    assert printed.sum() > 5 * overlapping.sum()


def test_traffic_of_a_machine_that_is_both_can_add_up():
    cluster = GroupedCluster.of(Truth({"c4.8xlarge": 2}, 64).job)
    both = np.array([[0, 0, 0, 2]])
    one_way, two_ways = (mean_seconds(cluster, [173e6], duplex, both) for duplex in (0.0, 1.0))
    assert (one_way, two_ways) == (pytest.approx(0.5), pytest.approx(1.0))


# ------------------------------------------------------------------------------------------------------------ the whole


def learnt(truth, settings, noise=0.01, **options):
    model = IterationModel(GroupedCluster.of(truth.job), 3, **options)
    rng = np.random.default_rng(truth.seed)
    model.observe([truth.observed(s, rng, noise) for s in settings])
    return model


def test_rates_aggregation_and_the_connection_that_binds_are_recovered():
    truth = Truth({"g2.2xlarge": 1, "c4.4xlarge": 2, "c4.8xlarge": 2}, 4096)
    first = proportional(truth.job, GroupedCluster.of(truth.job))
    big = ("c4.8xlarge-0", "c4.8xlarge-1")
    tried = [truth.job.start, first, *(replace(first, servers=s) for s in (big, big[:1], ("g2.2xlarge-0", *big)))]
    model = learnt(truth, tried, 0.002)
    rates = model.posteriors["rate c4.8xlarge cpu"].draw(200, np.random.default_rng(0))(np.array([[1000.0]]))
    assert np.exp(np.median(rates)) == pytest.approx(36 * HYPERTHREAD, rel=0.05)
    gpu = model.posteriors["rate g2.2xlarge gpu"].draw(200, np.random.default_rng(0))(np.array([[1000.0]]))
    assert np.exp(np.median(gpu)) == pytest.approx(1e12 / 272e6, rel=0.1)
    assert np.median(model.posteriors["aggregation g2.2xlarge"].values("seconds")) == pytest.approx(0.05, rel=0.3)
    # g2 is the slowest connection throughout; that of c4.4xlarge never binds, and stays about as wide as its prior.
    known = model.posteriors["communication"]
    binding, other = (np.log(known.values(f"speed {t}")) for t in ("g2.2xlarge", "c4.4xlarge"))
    low, high = np.exp(np.quantile(binding, [0.05, 0.95]))
    assert low < SPEEDS["g2.2xlarge"] / 2 < high < 3 * low
    assert np.std(other) > 2 * np.std(binding)


def test_independent_draws_make_the_slowest_of_many_seem_slower():
    """Four equal machines under one load: drawn jointly all are equally slow; independently, one is 1.03 deviations late."""
    truth = Truth({"c4.8xlarge": 4}, 400)
    job = truth.job
    model = learnt(truth, [replace(job.start, workers=job.start.workers[:1], loads=((400,),))])
    cluster, loads = GroupedCluster.of(job), np.full((1, 4, 1), 100)
    joint, apart = (Draws(model, cluster, 300, 1, joint) for joint in (True, False))
    together, each = joint.machine_seconds(0, loads), apart.machine_seconds(0, loads)
    np.testing.assert_allclose(together.max(2), together[:, :, 0])
    late = np.log(each.max(2)).mean() - np.log(together.max(2)).mean()
    assert late > 0.5 * np.log(together[:, 0, 0]).std()
    serves = np.ones((1, 4), bool)
    assert apart.iterations(loads, serves).slowest.mean() > joint.iterations(loads, serves).slowest.mean()


def test_expected_improvement_is_that_of_simulated_iterations():
    rng = np.random.default_rng(0)
    drawn = Iterations(rng.normal(3.0, 0.3, (50, 2)), rng.normal(1.0, 0.1, (50, 2)), np.full((50, 2), 0.2))
    many = 20_000
    noise = rng.standard_normal((many, 1, 1))
    simulated = np.maximum(4.0 - (drawn.seconds + 0.2 * noise), 0.0).mean((0, 1))
    np.testing.assert_allclose(expected_improvement(drawn, 4.0), simulated, atol=4 * 0.2 / np.sqrt(many))


def test_expected_improvement_of_one_draw_is_the_textbook_one():
    drawn = Iterations(np.array([[2.0]]), np.array([[1.0]]), np.array([[0.5]]))
    z = (2.8 - 3.0) / 0.5
    assert expected_improvement(drawn, 2.8)[0] == pytest.approx(-0.2 * norm.cdf(z) + 0.5 * norm.pdf(z))


def test_the_same_draws_are_used_for_all_candidates():
    truth = Truth({"c4.8xlarge": 2}, 64)
    model = learnt(truth, [truth.job.start])
    drawn = Draws(model, GroupedCluster.of(truth.job), 20, 1)
    loads, serves = np.array([[[32], [32]], [[32], [32]]]), np.ones((2, 2), bool)
    both = drawn.iterations(loads, serves).seconds
    np.testing.assert_array_equal(both[:, 0], both[:, 1])
    np.testing.assert_array_equal(both, Draws(model, GroupedCluster.of(truth.job), 20, 1).iterations(loads, serves).seconds)


def test_a_grid_of_loads_has_both_ends_and_all_that_there_are_where_they_are_few():
    np.testing.assert_array_equal(load_grid(5), [1, 2, 3, 4, 5])
    many = load_grid(65536)
    assert (many[0], many[-1]) == (1, 65536)
    assert len(load_grid(1)) == 1


def test_the_cluster_knows_what_is_free():
    truth = Truth({"g2.2xlarge": 2, "c4.8xlarge": 1}, 64, dead=("g2.2xlarge-1",))
    groups = GroupedCluster.of(truth.job).groups
    assert [(g.type, g.members, g.device_kinds) for g in groups] == [
        ("g2.2xlarge", (0,), ("gpu", "cpu")),
        ("g2.2xlarge", (1,), ("cpu",)),
        ("c4.8xlarge", (2,), ("cpu",)),
    ]
    assert len(GroupedCluster.of(truth.job, ["c4.8xlarge-0"]).groups) == 1
