"""TensorFlowOnline's Table VI: the rank of the setting that is estimated best."""

import inspect
import math
import re
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from reports.papers.cruise_and_bo_online import FORMS, estimate_options, estimates, rank_of_estimate
from tests.support.toy import window
from tests.tuners.bo_online.test_bo_online import GOAL, NAMES, START
from tests.tuners.bo_online.test_convergence import hidden_for, hogwild_losses
from tuners import bo_online as bo_online_package
from tuners import resolve
from tuners.bo_online import bo_online
from tuners.bo_online.tuner import stretch_clocks


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


def noisy_runs(workers, noise=0.1):
    """Runs on six nodes, each with one more clock per second for every worker; all need the same number of clocks."""
    found = []
    for count in workers:
        losses = hogwild_losses(hidden_for(20_000), 1.0, np.arange(1, 2001))
        noisy = losses * (1 + noise * np.random.default_rng(count).normal(size=2000))
        setting = replace(START, workers=NAMES[:count], servers=NAMES[count:])
        found.append((setting, window(GOAL, noisy, np.arange(1, 2001) / count, workers=setting.workers).pushes))
    return found


def test_the_check_looks_at_segments_that_the_tuner_makes():
    runs = noisy_runs([2, 4])
    assert len(estimates(runs, GOAL)) == 2000 // next(bo_online(GOAL)).clocks
    assert stretch_clocks(START, 6) == next(bo_online(GOAL)).clocks
    defaults = inspect.signature(bo_online).parameters
    checked = inspect.signature(estimates).parameters
    options = ("clocks_per_worker", "per", "estimator", "pooled")
    assert all(checked[name].default == defaults[name].default for name in options)


@pytest.mark.parametrize("policy", ["asp", "bsp"])
@pytest.mark.parametrize("form", FORMS)
def test_each_form_is_checked_on_the_segments_that_it_makes(form, policy):
    """At a barrier the paper's form observes three rounds, and the others ten."""
    of = replace(GOAL, start=replace(GOAL.start, policy=policy))
    runs = [(replace(setting, policy=policy), pushes) for setting, pushes in noisy_runs([len(of.start.workers)])]
    length = next(bo_online(of, **FORMS[form])).clocks
    assert len(estimates(runs, of, **estimate_options(form))) == 2000 // length


def test_every_third_segment_is_estimated_as_if_all_were():
    runs = noisy_runs([2, 4])
    np.testing.assert_array_equal(estimates(runs, GOAL, every=3), estimates(runs, GOAL)[2::3])


def test_the_estimate_prefers_the_setting_with_the_most_clocks_per_second():
    """Under such noise the best of five segments, each by itself, is nearly a blind choice, whose mean rank is 3."""
    runs, seconds = noisy_runs(range(1, 6), noise=0.4), [1 / w for w in range(1, 6)]
    pooled, alone = (rank_of_estimate(estimates(runs, GOAL, pooled=p)[:60], seconds) for p in (True, False))
    assert pooled < 1.8 < alone


def test_the_commands_of_the_readme_are_the_forms_that_are_measured():
    text = Path(bo_online_package.__file__).with_name("README.md").read_text("utf-8")
    printed, code = re.findall(r"^'(bo_online\[.*\])'$", text, re.MULTILINE)
    assert dict(resolve(printed).factory.keywords) == FORMS["paper"]
    assert dict(resolve(code).factory.keywords) == FORMS["code"]
