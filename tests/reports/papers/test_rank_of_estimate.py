"""TensorFlowOnline's Table VI: the rank of the setting that is estimated best."""

import math

from hypothesis import given
from hypothesis import strategies as st

from reports.papers.cruise_and_bo_online import rank_of_estimate


def test_the_rank_of_the_estimated_optimum():
    """The paper's example: X_2 seems best at iteration 60, X_1 at 120."""
    estimated = [[5555, 4444, 7777], [3333, 4222, 6666]]
    assert rank_of_estimate(estimated, [10.0, 20.0, 30.0]) == 1.5
    assert rank_of_estimate(estimated, [30.0, 20.0, 10.0]) == 2.5
    assert rank_of_estimate(estimated, [[3, 1, 2], [3, 1, 2]]) == 2.0


@given(st.lists(st.floats(1, 1e6), min_size=1, max_size=30, unique=True))
def test_a_perfect_estimate_ranks_first(seconds):
    assert rank_of_estimate([seconds] * 3, seconds) == 1.0
    assert rank_of_estimate([[-s for s in seconds]], seconds) == len(seconds)


def test_ranks_with_ties_and_gaps():
    nan = math.nan
    assert rank_of_estimate([[1, 1, 2]], [30, 10, 20]) == 1.0
    assert rank_of_estimate([[1, 2, 3]], [10, 10, 20]) == 1.5
    assert rank_of_estimate([[nan, 2, 3], [nan, nan, nan]], [1, 2, 3]) == 1.0
    assert rank_of_estimate([[1, 2, 3]], [nan, 2, 1]) == 2.0
    assert math.isnan(rank_of_estimate([[nan]], [1]))
