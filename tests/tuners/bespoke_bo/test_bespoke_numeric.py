"""The numeric stage: with a known model the decomposed search finds what brute force finds."""

from __future__ import annotations

from dataclasses import replace
from itertools import product

import numpy as np
import pytest

from tests.support.bespoke_truth import HYPERTHREAD, Truth
from tests.support.compositions import compositions
from tuners.bespoke_bo.draws import Draws
from tuners.bespoke_bo.grouped_cluster import BOTH, SERVER, WORKER, GroupedCluster
from tuners.bespoke_bo.model import IterationModel
from tuners.bespoke_bo.numeric import candidates, placements
from tuners.bespoke_bo.smc import Posterior
from tuners.bespoke_bo.tuner import candidate_setting, proportional

RNG = np.random.default_rng


def known(truth: Truth, available=None, draws=2) -> Draws:
    """Draws of a model that knows the truth: all particles have its values."""
    cluster, job = GroupedCluster.of(truth.job), truth.job
    model = IterationModel(cluster, 0, particles=32)
    model.observe([truth.observed(job.start, RNG(0))])
    for name, learnt in model.posteriors.items():
        posterior = model.posteriors[name] = Posterior(learnt.part, RNG(0), 32)  # no evidence, equal weights
        posterior.particles[:, -3] = np.log(1e-9)
        if name.startswith("rate"):
            _, kind, device = name.split()
            rate = 1e12 / 272e6 if device == "gpu" else HYPERTHREAD * next(n.cores for n in job.nodes if n.type == kind)
            posterior.particles[:, :2] = np.log([rate, max(truth.saturation, 1e-12)])
        elif name.startswith("aggregation"):
            posterior.particles[:, 0] = np.log(truth.aggregation)
        else:
            speeds = [np.log(truth.speeds[t] / 2) for t in cluster.types]
            posterior.particles[:, : len(speeds) + 2] = [*speeds, 0.0, float(truth.overlap)]
    return Draws(model, GroupedCluster.of(job, available), draws, 1)


def brute_force(truth: Truth) -> float:
    """The least seconds over all placements and all loads."""
    job, best = truth.job, np.inf
    sizes = [len(n.devices) for n in job.nodes]
    names, ends = [n.name for n in job.nodes], np.cumsum(sizes)
    for flat in compositions(truth.batch, sum(sizes)):
        rows = [flat[end - size : end] for size, end in zip(sizes, ends, strict=True)]
        used = {n: r for n, r in zip(names, rows, strict=True) if any(r)}
        for chosen in product([False, True], repeat=len(names)):
            servers = tuple(n for n, c in zip(names, chosen, strict=True) if c)
            if servers:
                setting = replace(job.start, workers=tuple(used), servers=servers, loads=tuple(used.values()))
                best = min(best, truth.seconds(setting))
    return best


SMALL = {
    "one type": Truth({"c4.8xlarge": 3}, 13, model_bytes=4e5),
    "two types": Truth({"c4.2xlarge": 2, "c4.8xlarge": 1}, 14, model_bytes=2e6, saturation=2.0),
    "two devices": Truth({"g2.2xlarge": 1, "c4.4xlarge": 1}, 24, model_bytes=1e5, aggregation=5e-4),
    "summing costs more than it brings": Truth({"g2.2xlarge": 1, "c4.4xlarge": 1}, 24, model_bytes=1e5, aggregation=0.5),
    "own transfers hide": Truth({"c4.2xlarge": 2, "c4.8xlarge": 1}, 14, model_bytes=2e6, overlap=True),
    "two devices that hide transfers": Truth(
        {"g2.2xlarge": 1, "c4.4xlarge": 1}, 24, model_bytes=1e5, aggregation=5e-4, overlap=True
    ),
    "communication rules": Truth({"c4.2xlarge": 2, "c4.8xlarge": 2}, 6, model_bytes=5e7),
}


@pytest.mark.parametrize("name", SMALL)
def test_the_decomposed_search_is_as_good_as_brute_force(name):
    truth = SMALL[name]
    first = candidates(known(truth), np.inf, "decomposed", RNG(0))[0]
    found, best = truth.seconds(candidate_setting(truth.job, first)), brute_force(truth)
    assert found == pytest.approx(best, rel=1e-9)
    assert first.seconds == pytest.approx(found, rel=1e-3)


def test_expected_improvement_leads_to_the_same_schedule():
    truth = SMALL["two types"]
    best = brute_force(truth)
    first = candidates(known(truth), 1.5 * best, "decomposed", RNG(0))[0]
    assert truth.seconds(candidate_setting(truth.job, first)) == pytest.approx(best)
    assert first.improvement == pytest.approx(0.5 * best, rel=1e-3)


@pytest.mark.parametrize("overlap", [False, True], ids=["together", "overlapping"])
def test_balanced_loads_finish_together_on_the_papers_setting(overlap):
    """Large loads: moving a sample to another worker gains nothing, up to the half per cent of the grid."""
    counts = {"g2.2xlarge": 2, "c4.2xlarge": 2, "c4.4xlarge": 2, "c4.8xlarge": 4}
    truth = Truth(counts, 65536, saturation=300.0, overlap=overlap)
    first = candidates(known(truth), np.inf, "decomposed", RNG(0))[0]
    setting = candidate_setting(truth.job, first)
    assert sum(map(sum, setting.loads)) == 65536
    seconds = truth.finish_seconds(setting)
    assert max(seconds) < 1.005 * min(seconds)
    assert first.seconds == pytest.approx(truth.seconds(setting), rel=0.005)


def test_setting_c_has_34731_placements():
    job = Truth({"g2.2xlarge": 2, "c4.2xlarge": 2, "c4.4xlarge": 2, "c4.8xlarge": 4}, 65536).job
    placed = placements(GroupedCluster.of(job), RNG(0))
    assert len(placed) == 34_731
    np.testing.assert_array_equal(placed.sum((1, 2)), 10)


def test_a_cluster_of_many_is_searched_in_part():
    job = Truth(dict.fromkeys(("g2.2xlarge", "c4.2xlarge", "c4.4xlarge", "c4.8xlarge"), 6), 65536).job
    placed = placements(GroupedCluster.of(job), RNG(0))
    assert 30_000 < len(placed) <= 40_000
    assert (placed[:, :, [WORKER, BOTH]].sum((1, 2)) > 0).all()
    assert (placed[:, :, [SERVER, BOTH]].sum((1, 2)) > 0).all()


def test_fewer_samples_than_devices():
    truth = Truth({"g2.2xlarge": 2, "c4.8xlarge": 2}, 3, model_bytes=1e5)
    for found in candidates(known(truth), np.inf, "decomposed", RNG(0)):
        assert found.loads.sum() == 3
        truth.job.space.check(candidate_setting(truth.job, found))
    first = proportional(truth.job, GroupedCluster.of(truth.job))
    assert sum(map(sum, first.loads)) == 3


def test_a_device_that_cannot_compute_gets_nothing():
    truth = Truth({"g2.2xlarge": 2, "c4.4xlarge": 1}, 64, model_bytes=1e5, dead=("g2.2xlarge-0",))
    for numeric in ("decomposed", "direct"):
        for found in candidates(known(truth), np.inf, numeric, RNG(0), points=50):
            assert found.loads[0, 0] == 0
            assert found.loads.sum() == 64


def test_one_machine_does_everything():
    truth = Truth({"g2.2xlarge": 1}, 64, aggregation=1e-4)
    first = candidates(known(truth), np.inf, "decomposed", RNG(0))[0]
    setting = candidate_setting(truth.job, first)
    assert setting.workers == setting.servers == ("g2.2xlarge-0",)
    assert truth.seconds(setting) == pytest.approx(
        min(truth.machine_seconds("g2.2xlarge", (n, 64 - n)) for n in range(65)), rel=1e-9
    )


def test_machines_that_are_gone_get_nothing():
    truth = Truth({"c4.8xlarge": 3}, 64)
    for found in candidates(known(truth, ["c4.8xlarge-1"]), np.inf, "decomposed", RNG(0)):
        np.testing.assert_array_equal(found.loads[:, 0], [0, 64, 0])
        np.testing.assert_array_equal(found.serves, [False, True, False])


@pytest.mark.parametrize("numeric", ["direct", "cmaes"])
def test_searching_the_whole_domain_finds_schedules_that_are_allowed_and_no_better(numeric):
    truth = Truth({"g2.2xlarge": 1, "c4.2xlarge": 2, "c4.8xlarge": 2}, 4096)
    draws = known(truth)
    whole, best = candidates(draws, np.inf, numeric, RNG(0), points=120), candidates(draws, np.inf, "decomposed", RNG(0))[0]
    assert len(whole) >= 100
    assert whole[0].seconds >= best.seconds * 0.999
    assert whole[0].seconds <= np.median([c.seconds for c in whole])
    for found in whole[:20]:
        truth.job.space.check(candidate_setting(truth.job, found))
