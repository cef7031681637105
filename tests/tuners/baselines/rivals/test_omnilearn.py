"""OmniLearn: batches follow throughput, outside a dead band; its paper's effect on unequal machines."""

from dataclasses import replace

import pytest

import harness
from tests.tuners.bespoke_bo.test_schedules import JOB, Fake
from tuners.actions import Reconfigure
from tuners.baselines.rivals.omnilearn import changed_most, omnilearn
from tuners.testing import check_tuner, exchanges


def test_omnilearn_keeps_the_contract():
    check_tuner(omnilearn, systems={"fake": lambda seed: Fake(), "loses a node": lambda seed: Fake(3000.0)}, most=60)


def test_the_batches_of_all_devices_sum_to_the_same():
    changes = [e.action.setting for e in exchanges(omnilearn, Fake(), most=60) if isinstance(e.action, Reconfigure)]
    assert changes
    assert {sum(map(sum, s.loads)) for s in changes} == {sum(map(sum, JOB.start.loads))}


def test_within_the_dead_band_nothing_changes():
    wide = [e.action for e in exchanges(lambda job: omnilearn(job, dead_band=1.0), Fake(), most=60)]
    calm = [a for a in wide if isinstance(a, Reconfigure)]
    assert len(calm) <= len([e for e in exchanges(omnilearn, Fake(), most=60) if isinstance(e.action, Reconfigure)])
    before = replace(JOB.start, loads=tuple(tuple(4 if n else 0 for n in row) for row in JOB.start.loads))
    after = replace(before, loads=((5, *before.loads[0][1:]), *before.loads[1:]))
    assert changed_most(before, before) == 0
    assert changed_most(before, after) == (0.25 if before.loads[0][0] else 0)


@pytest.mark.slow
def test_omnilearn_is_faster_than_equal_batches_on_unequal_machines():
    """Tyagi and Sharma: training takes 14 to 85 % less time."""
    arena = harness.scenario("boat-digits", name="boat")
    took = {t: harness.play(arena, t, seed=0).score.completion_seconds for t in ("fixed", "omnilearn")}
    assert took["omnilearn"] < 0.6 * took["fixed"]
