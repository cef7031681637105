"""The parts of a gradient's age: they sum to its staleness, and each is what others pushed meanwhile."""

from dataclasses import replace

import numpy as np
import pytest

from harness.scenario import load, system
from tests.support.marks import slow
from tuners.actions import Pushes, Reconfigure, Run
from tuners.ages import ages


def _pushes(rows):
    """Of rows (end, worker, compute, pull, push, staleness)."""
    end, worker, compute, pull, push, staleness = (np.array(c) for c in zip(*rows, strict=True))
    nothing = np.zeros(len(rows))
    return Pushes(end, worker, nothing.astype(int), compute, pull, push, nothing, staleness, nothing)


def test_each_phase_has_the_updates_that_came_in_it():
    """Worker 0 pulls at 1, computes from 2, sends from 5, ends at 7; the others push at 1.5, 3, 4 and 6."""
    rows = [(1.0, 0, 0.5, 0.2, 0.3, 0), (1.5, 1, 0.5, 0.5, 0.5, 1), (3.0, 2, 1.0, 0.5, 0.5, 1), (4.0, 1, 1.0, 1.0, 0.5, 1)]
    rows += [(6.0, 2, 2.0, 0.5, 0.5, 1), (7.0, 0, 3.0, 1.0, 2.0, 4)]
    found = ages(_pushes(rows))
    assert [part[-1] for part in found] == [1.0, 2.0, 1.0]


def test_of_dropped_gradients_nothing_ages():
    """Two of the four pushes were dropped: the parts keep their proportion, and sum to what was applied."""
    rows = [(1.0, 0, 0.5, 0.2, 0.3, 0), (1.5, 1, 0.5, 0.5, 0.5, 1), (3.0, 2, 1.0, 0.5, 0.5, 1), (4.0, 1, 1.0, 1.0, 0.5, 1)]
    rows += [(6.0, 2, 2.0, 0.5, 0.5, 1), (7.0, 0, 3.0, 1.0, 2.0, 2)]
    assert [part[-1] for part in ages(_pushes(rows))] == [0.5, 1.0, 0.5]


def test_what_began_before_the_first_push_is_divided_by_seconds():
    assert [part[0] for part in ages(_pushes([(8.0, 0, 4.0, 2.0, 2.0, 6)]))] == [1.5, 3.0, 1.5]


def test_no_pushes_have_no_ages():
    empty = Pushes(*(np.zeros(0) for _ in Pushes._fields))
    assert [part.tolist() for part in ages(empty)] == [[], [], []]


@pytest.mark.parametrize("policy", [slow("discard"), "admit"])
def test_in_a_simulated_job_the_parts_sum_to_the_staleness(policy):
    job = system(load("bounded-age"), 0)
    job.perform(Reconfigure(replace(job.job.start, policy=policy, staleness=4)))
    found = job.perform(Run(clocks=300)).pushes
    parts = ages(found)
    np.testing.assert_allclose(sum(parts), found.staleness)
    assert all((part >= 0).all() for part in parts)
    later = slice(50, None)  # what began before the first push is divided by seconds
    if policy == "admit":  # every gradient is applied: parts are whole numbers of updates
        np.testing.assert_allclose(parts.generation[later], np.round(parts.generation[later]), atol=1e-9)
    assert parts.generation[later].mean() > parts.queueing[later].mean() > 0
