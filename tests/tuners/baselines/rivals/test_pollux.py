"""Pollux: goodput, AdaScale's rate, what is asked, and its effect where transfers take longer than computing."""

from dataclasses import replace
from functools import cache

import pytest
from hypothesis import given
from hypothesis import strategies as st

import harness
from tests.support.toy import job, toys
from tuners.actions import MeasureNoise, Reconfigure, Rejected, Run
from tuners.baselines.rivals.pollux import adascale, cycle_seconds, efficiency, pollux
from tuners.settings import Real
from tuners.space import Space
from tuners.testing import exchanges

SIZES = st.floats(1.0, 1e4)


@given(SIZES, SIZES, st.floats(1.0, 100.0))
def test_the_rate_makes_up_for_what_a_larger_batch_loses(scale, first, factor):
    """AdaScale: a step of M samples makes r steps' progress, so that r = efficiency times M / M0, between 1 and M / M0."""
    batch = factor * first
    gained = adascale(scale, first, batch)
    assert gained == pytest.approx(efficiency(scale, first, batch) * factor)
    assert 1 - 1e-9 <= gained <= factor + 1e-9


def test_a_cycle_is_what_was_measured():
    one = cycle_seconds({16: (5.0, 1.0)})
    assert [one(b) for b in (16, 32)] == pytest.approx([5.0, 6.0])
    two = cycle_seconds({16: (5.0, 1.0), 64: (6.5, 2.5)})
    assert [two(b) for b in (16, 64, 128)] == pytest.approx([5.0, 6.5, 8.5])


def test_a_cycle_without_computing_is_what_transfers_take():
    one = cycle_seconds({16: (5.0, 0.0)})
    assert [one(b) for b in (1, 16, 64)] == pytest.approx([5.0, 5.0, 5.0])
    two = cycle_seconds({16: (5.0, 0.0), 64: (7.0, 0.0)})
    assert [two(b) for b in (16, 64)] == pytest.approx([6.0, 6.0])


def test_it_measures_and_changes_batch_and_rate_together():
    done = [e for e in exchanges(pollux, toys()["every knob"](0), most=60) if not isinstance(e.answer, Rejected)]
    assert {type(e.action) for e in done} == {Run, MeasureNoise, Reconfigure}
    start = toys()["every knob"](0).job.start
    for e in done:
        if isinstance(e.action, Reconfigure):
            other = replace(e.action.setting, batch_size=start.batch_size, learning_rate=start.learning_rate)
            assert other == start
            larger = e.action.setting.batch_size > start.batch_size
            assert not larger or e.action.setting.learning_rate >= start.learning_rate


def test_where_only_the_rate_is_free_it_leaves_the_job_alone():
    of = job()
    held = replace(of, space=Space(of.start, of.nodes, (Real("learning_rate", 0.001, 1.0),)))
    assert list(pollux(held)) == []
    assert "not both free" in vars(pollux)["nothing_to_tune"](held)


def test_a_system_that_measures_no_noise_keeps_its_job():
    tuner = pollux(job())
    tuner.send(None)
    system = toys()["every knob"](0)
    assert isinstance(tuner.send(system.perform(Run(clocks=10))), MeasureNoise)
    with pytest.raises(StopIteration):
        tuner.throw(Rejected("Cannot do that: the test refuses it."))


def _small_batches():
    """Eight workers with batches of 4, whose transfers take about thirty times as long as their computing."""
    return harness.scenario(
        "digits-logistic",
        name="small-batches",
        cluster={"nodes": [{"type": "edge-4core", "count": 10}]},
        workload={"name": "digits-logistic", "overrides": {"aggregation": "mean", "model_bytes": 100e6}},
        start={"worker_count": 8, "policy": "bsp", "batch_size": 4, "learning_rate": 0.2},
        free={
            "worker_count": None,
            "policy": None,
            "batch_size": {"choice": [4, 8, 16, 32, 64, 128, 256]},
            "learning_rate": {"real": [0.001, 10.0], "log": True},
        },
        conditions={"sleeps": None, "jitter": 0.1, "stragglers": None},
        target={"metric": "accuracy", "value": 0.9, "check_clocks": 8},
        budget={"seconds": 20000},
    )


@cache
def seconds(tuner, seed=0):
    return harness.play(_small_batches(), tuner, seed=seed).score.completion_seconds


@pytest.mark.slow
def test_pollux_is_faster_than_the_batch_of_the_start():
    """Qiao et al.: average completion 37 to 50 % less than with batches that users choose."""
    assert seconds("pollux") < 0.7 * seconds("fixed")
