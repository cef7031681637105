"""Progress per second of settings under a quorum."""

from dataclasses import replace

import pytest

from tests.support.toy import window
from tests.tuners.joint.answers import RATE, course, of
from tuners.joint.machines.predicted_progress import PredictedProgress
from tuners.settings import Integer

NAMES = ("n0", "n1", "n2", "n3")


def progress_of(made, seconds):
    """Predicts progress where the workers of the start of the job `made` compute for so many `seconds`."""
    begun = course(made)
    took = dict(zip(NAMES, seconds, strict=True))
    begun.system.learn(made.start, window(made, [1.0] * 12, start=100.0, compute=took, pull=0.1, workers=NAMES))
    return PredictedProgress(made, begun.training, begun.system, begun.placing.shares, begun.heat)


def job_of_quorum(quorum):
    made = of(space=(RATE, Integer("batch_size", 8, 64)))
    servers = tuple(n.name for n in made.nodes if n.name not in NAMES)[:1] or NAMES[:1]
    return replace(made, start=replace(made.start, workers=NAMES, servers=servers, policy="quorum", quorum=quorum, loads=()))


def test_gradients_that_a_round_has_ended_before_bring_nothing():
    """A worker that takes ten times as long as others is always late: it is as if it did not work."""
    made = job_of_quorum(3)
    slow, even = progress_of(made, (1.0, 1.0, 1.0, 10.0)), progress_of(made, (1.0, 1.0, 1.0, 1.0))
    assert slow.per_second(made.start) < 0.8 * even.per_second(made.start)
    assert slow.per_second(made.start) == pytest.approx(slow.per_second(replace(made.start, workers=NAMES[:3])), rel=0.15)


def test_workers_are_not_left_out_because_a_round_needs_one_gradient():
    """One of two workers was chosen, as a round of one gradient needs no other; its data were of some classes only."""
    made = job_of_quorum(1)
    progress = progress_of(made, (1.0, 1.0, 1.0, 1.0))
    assert progress.per_second(replace(made.start, workers=NAMES[:1])) < 0.4 * progress.per_second(made.start)
