"""The memory of TensorFlowOnline: stretches as triples, settings seen twice, and epsilon."""

import math

import numpy as np
import pytest

from tuners.actions import Evaluation, Target
from tuners.bo_online.convergence import Estimator, LossCurve
from tuners.bo_online.repository import Stretch, contiguous, threshold, triples

LOSS = Target("loss", 0.2)


def stretch(name, losses, before=1.0, clocks=0, seconds=4.0):
    losses = np.asarray(losses, float)
    return Stretch(np.array([float(name)]), LossCurve(losses, before, clocks), seconds, float(losses[-1]))


def test_a_triple_is_seconds_per_clock_times_clocks():
    s = stretch(1, [1.0, 0.9, 0.8, 0.7], before=1.1, seconds=8.0)
    (made,) = triples([s], LOSS, 1e6, 0.2, Estimator()).triples
    assert made.state == 1.1
    assert made.seconds == pytest.approx(2.0 * Estimator().remaining(s.curve, 0.2).clocks)
    (last,) = triples([s], LOSS, 1e6, 0.2, Estimator(), state="last").triples
    assert (last.state, last.seconds) == (0.7, made.seconds)


def test_a_setting_seen_twice_counts_as_last_seen():
    falling = [1.0, 0.9, 0.8, 0.7]
    seen = [stretch(1, falling, clocks=0), stretch(2, falling, clocks=4), stretch(1, falling, clocks=8)]
    seen += [stretch(1, falling, before=0.7, clocks=12), stretch(2, falling, clocks=16)]
    latest = triples(seen, LOSS, 1e6, 0.2, Estimator()).triples
    assert [(t.row[0], t.state) for t in latest] == [(1, 0.7), (2, 1.0)]
    assert len(triples(seen, LOSS, 1e6, 0.2, Estimator(), "all").triples) == 5
    joined = contiguous(seen)
    assert [(s.row[0], len(s.curve.losses), s.seconds, s.curve.clocks_before) for s in joined] == [
        (1, 4, 4.0, 0),
        (2, 4, 4.0, 4),
        (1, 8, 8.0, 8),
        (2, 4, 4.0, 16),
    ]
    assert [t.state for t in triples(seen, LOSS, 1e6, 0.2, Estimator(), "contiguous").triples] == [1.0, 1.0]
    apart = contiguous([stretch(1, falling, clocks=0), stretch(1, falling, clocks=5)])
    assert len(apart) == 2


def test_no_progress_counts_as_the_worst_there_is():
    good, bad = stretch(1, [1.0, 0.9, 0.8, 0.7]), stretch(2, [0.7, 0.8, 0.9, 1.0], clocks=4)
    first, second = triples([good, bad], LOSS, 1e6, 0.2, Estimator()).triples
    assert (first.progress, second.progress) == (True, False)
    assert second.seconds == first.seconds
    (alone,) = triples([bad], LOSS, 1e6, 0.2, Estimator()).triples
    assert alone.seconds == 1e6


def test_a_job_that_counts_clocks_knows_what_is_left():
    nothing = stretch(1, [math.nan] * 4, before=math.nan, clocks=40, seconds=8.0)
    (made,) = triples([nothing], Target("clocks", 100), 1e6, math.nan, Estimator()).triples
    assert (made.state, made.seconds, made.progress) == (60, 120.0, True)
    (last,) = triples([nothing], Target("clocks", 100), 1e6, math.nan, Estimator(), state="last").triples
    assert (last.state, last.seconds) == (56, 120.0)


def test_without_an_end_there_are_no_triples():
    assert triples([stretch(1, [1.0, 0.9, 0.8])], LOSS, 1e6, math.nan, Estimator()).triples == []


def evaluations(*pairs):
    return [Evaluation(0.0, 0, loss, accuracy) for accuracy, loss in pairs]


def test_where_the_end_lies():
    accuracy = Target("accuracy", 0.9)
    assert threshold(LOSS, [], 2.3) == 0.2
    assert threshold(LOSS, [], 2.3, epsilon=0.4) == 0.4
    assert math.isnan(threshold(Target("clocks", 100), [], math.nan))
    assert threshold(accuracy, [], 2.3) == pytest.approx(0.23)
    assert threshold(accuracy, evaluations((0.5, 1.0)), 2.3) == pytest.approx(0.23)
    assert threshold(accuracy, evaluations((0.5, 1.5), (0.6, 1.3), (0.7, 1.1)), 2.3) == pytest.approx(0.7)
    # No further than half-way to nothing; and no higher than it has been, where loss and accuracy rise together.
    assert threshold(accuracy, evaluations((0.1, 2.0), (0.5, 1.0)), 2.3) == pytest.approx(0.5)
    assert threshold(accuracy, evaluations((0.5, 1.0), (0.6, 1.5)), 2.3) == pytest.approx(1.0)
    assert threshold(accuracy, evaluations((math.nan, 1.0), (0.6, math.nan)), 2.3) == pytest.approx(0.23)
    assert threshold(Target("loss", -1.0), [], 2.0) == pytest.approx(0.2)
