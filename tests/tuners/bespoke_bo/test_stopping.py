"""When another evaluation of the bespoke optimiser pays: the rule, the iterations that are left, and the whole tuner."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.support.bespoke_truth import Truth, TruthSystem, play
from tests.support.marks import slow
from tuners.actions import Cost, Evaluation, Reconfigure, Target
from tuners.bespoke_bo import bespoke_bo
from tuners.bespoke_bo.stopping import JobCourse, iterations_to, worthwhile

QUICK = {"draws": 32, "particles": 64}
SMALL = Truth({"g2.2xlarge": 1, "c4.2xlarge": 1, "c4.8xlarge": 2}, 4096, model_bytes=4e7, jitter=0.01, overlap=True)


class TruthUntil(TruthSystem):
    """A system with another target; it does not end at it."""

    def __init__(self, truth: Truth, target: Target) -> None:
        super().__init__(truth)
        self.job = replace(self.job, target=target)


def tried(system: TruthSystem, most: int = 45, **options):
    asked = play(bespoke_bo(system.job, **(QUICK | options)), system, most)
    return [a.setting for a in asked if isinstance(a, Reconfigure)]


def test_an_evaluation_pays_if_it_saves_more_than_it_costs():
    assert worthwhile(0.1, 1001, 100.0)
    assert not worthwhile(0.1, 999, 100.0)
    assert not worthwhile(0.1, -5, 0.0)
    assert not worthwhile(0.0, np.inf, 0.0)


@pytest.mark.parametrize(("exponent", "level"), [(0.5, 0.1), (1.0, 0.02), (0.2, 0.3)])
def test_a_power_law_is_extended_exactly(exponent, level):
    curve = [(n, 2.0 * n**-exponent) for n in (20.0, 40.0, 70.0)]
    assert iterations_to(level, curve) == pytest.approx((2.0 / level) ** (1 / exponent))


@pytest.mark.parametrize(
    "curve",
    [[], [(20.0, 1.0), (40.0, 0.5)], [(20.0, 1.0), (40.0, 1.0), (60.0, 1.0)], [(20.0, 1.0), (40.0, 1.1), (60.0, 1.3)]],
    ids=["no points", "two points", "level", "rising"],
)
def test_a_curve_that_does_not_fall_tells_nothing(curve):
    assert iterations_to(0.1, curve) == np.inf


def course(target: Target, budget: float = 1e6) -> JobCourse:
    return JobCourse(replace(SMALL.job, target=target, budget_seconds=budget))


def test_counted_work_tells_the_iterations_left():
    for target in (Target("clocks", 400.0), Target("samples", 100.0 * 4096)):
        at = course(target)
        at.trained(80, 4, 30.0, ())
        assert at.iterations_left(1.5, 4) == 80
        at.trained(400, 4, 180.0, ())
        assert at.iterations_left(1.5, 4) == 0


@pytest.mark.parametrize("metric", ["loss", "accuracy"])
def test_a_learning_curve_tells_them_and_the_budget_bounds_them(metric):
    at = course(Target(metric, 0.1 if metric == "loss" else 0.9), budget=10_000.0)
    assert at.iterations_left(2.0, 4) == 5_000  # nothing is known: what the budget allows
    for n in (1, 2, 3):
        level = (20.0 * n) ** -0.5  # 0.1 after 100 iterations
        at.trained(80, 4, 40.0 * n, (Evaluation(40.0 * n, 80 * n, level, 1 - level),))
    assert at.iterations_left(2.0, 4) == pytest.approx(100 - 60)
    at.trained(0, 4, 9_990.0, ())
    assert at.iterations_left(2.0, 4) == 5


def test_each_validation_of_a_window_counts_where_it_was_made():
    """All were noted at the end of their window, so that the last one replaced the others."""
    at = course(Target("loss", 0.1))
    at.trained(40, 4, 20.0, ())
    made = [Evaluation(n / 2, n, (n / 4) ** -0.5, float("nan")) for n in (80, 160, 240)]  # 0.1 after 100 iterations
    at.trained(200, 4, 120.0, made)
    assert at.iterations_left(2.0, 4) == pytest.approx(100 - 60)


def test_a_reconfiguration_costs_the_mean_of_those_so_far():
    at = course(Target("clocks", 400.0))
    assert at.change_seconds == 0.0
    at.changed(Cost(seconds=9.0, stall_seconds=5.0, slow_seconds=1.0))
    at.changed(Cost(seconds=9.0, stall_seconds=2.0))
    assert at.change_seconds == 4.0


@pytest.mark.slow
@pytest.mark.parametrize("batches", [(25, 10**7), slow((25, 600, 10**7))], ids=["two jobs", "three jobs"])
def test_a_long_job_makes_more_evaluations_than_a_short_one(batches):
    """The cluster and all random numbers are equal; only the samples that are left differ."""
    counts = [len(tried(TruthUntil(SMALL, Target("samples", n * 4096.0)), most=30)) for n in batches]
    assert counts[0] == 1  # five iterations are left after the first evaluation
    assert counts == sorted(counts)
    assert counts[0] < counts[-1]


@pytest.mark.slow
def test_a_job_that_ends_soon_takes_no_longer_than_with_the_papers_ten():
    """Work is counted: the iterations of the whole job, and five seconds per reconfiguration."""

    def seconds(**options) -> float:
        system = TruthUntil(SMALL, Target("samples", 400.0 * 4096))
        tuner, answer = bespoke_bo(system.job, **(QUICK | options)), None
        while system.count < 400:
            answer = system.perform(tuner.send(answer))
        tuner.close()
        return system.now

    assert seconds() < seconds(stop_early=False)


@pytest.mark.slow
def test_where_no_work_is_left_to_save_it_stays_with_the_best():
    system = TruthUntil(SMALL, Target("samples", 10.0 * 4096))
    assert len(tried(system)) == 1
    assert len(tried(TruthUntil(SMALL, Target("samples", 10.0 * 4096)), stop_early=False)) >= 10
