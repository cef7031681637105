"""What `MeasureNoise` answers and costs in the simulator, and that it changes nothing of the training."""

import math

import numpy as np
import pytest

from harness.drive import play
from harness.score import score
from simulators.cluster.cluster import Cluster
from simulators.cluster.conditions import Conditions
from simulators.workloads.workload import Demand
from tests.support.small_jobs import Quadratic, job, machine, system
from tuners.actions import GradientNoise, MeasureNoise, Reconfigure, Rejected, Run, Setting, Target
from tuners.settings import Integer

CENTRES = (0.0, 1.0, 2.0, 5.0, 7.0, 9.0)


def learns(workers=("a", "b"), *, model=True, batch=1, **changed):
    """Machines that learn centres, a sample's gradient being x minus its centre; a mini-batch takes .6 s per sample."""
    cluster = Cluster(tuple((n, machine()) for n in "abcd"))
    demand = Demand(model_bytes=100.0, sample_seconds=0.6)
    workload = job(demand, Quadratic(centres=CENTRES)) if model else job(demand)
    start = Setting(workers=workers, servers=("c", "d"), batch_size=batch, learning_rate=0.01)
    return system(cluster, workload, start, Conditions(), knobs=(Integer("worker_count", 1, 3),), **changed)


@pytest.mark.parametrize(("workers", "batches"), [(("a",), 6), (("a", "b"), 3)])
def test_the_estimates_are_unbiased_over_the_whole_data(workers, batches):
    """Every sample once: then the variance is the sample variance, and |G|^2 lacks the variance of a mean of six."""
    seen = learns(workers).perform(MeasureNoise(batches=batches))
    variance = np.var(CENTRES, ddof=1)
    assert seen.variance == pytest.approx(variance, rel=1e-6)
    assert seen.square == pytest.approx((1.0 - np.mean(CENTRES)) ** 2 - variance / 6, rel=1e-6)
    assert seen.samples == pytest.approx(seen.variance / seen.square)


def test_the_variance_is_that_of_a_sample_whatever_the_batch():
    simulated = learns(("a",), batch=2)
    seen = simulated.perform(MeasureNoise(batches=3))
    means = np.asarray(simulated.branches[0].context.data.train[0]).reshape(3, 2).mean(axis=1)
    assert seen.variance == pytest.approx(2 * np.var(means, ddof=1), rel=1e-6)


def test_it_takes_a_pull_its_gradients_and_a_push_of_all_workers():
    simulated = learns()
    simulated.perform(Run(clocks=2))
    before = simulated.now
    seen = simulated.perform(MeasureNoise(batches=5))
    assert seen.seconds == before
    transfer = 2 * 100 / (2 * 100)  # two workers and two servers; 100 bytes, and as many per second and machine
    assert simulated.now - before == pytest.approx(transfer + 5 * 0.6 + transfer)


def test_it_is_overhead_and_changes_nothing_of_the_training():
    def asks(job):
        for _ in range(3):
            yield from Run(clocks=5)
            yield from MeasureNoise()
        yield from Run(clocks=5)

    def runs(job):
        yield from Run(clocks=20)

    rules = {"target": Target("clocks", 20), "budget_seconds": 1e6, "evaluate_clocks": 20}
    quiet, asked = (score(play(t, learns(**rules)), scenario="s", tuner="t", seed=0).score for t in (runs, asks))
    assert asked.overhead_seconds > 0
    assert asked.completion_seconds == pytest.approx(quiet.completion_seconds + asked.overhead_seconds)
    assert asked.final_loss == quiet.final_loss


def test_a_job_that_does_not_learn_has_no_noise():
    seen = learns(model=False).perform(MeasureNoise())
    assert math.isnan(seen.square)
    assert math.isnan(seen.variance)
    assert seen.samples == math.inf


def test_a_gradient_of_zero_has_an_infinite_noise_scale():
    assert GradientNoise(0.0, -0.1, 3.0).samples == math.inf


def test_it_waits_for_the_end_of_a_reconfiguration():
    simulated = learns()
    simulated.perform(Run(clocks=4))
    fewer = simulated.job.space.setting({"worker_count": 1})
    simulated.perform(Reconfigure(fewer, method="migrate", wait=False))
    with pytest.raises(Rejected, match="Cannot measure the noise of branch 0: a reconfiguration is under way"):
        simulated.perform(MeasureNoise())


def test_one_mini_batch_shows_no_noise():
    with pytest.raises(ValueError, match="from 1 mini-batches"):
        MeasureNoise(batches=1)
