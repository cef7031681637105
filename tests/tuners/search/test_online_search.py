"""Online search: the score of a trial, how trials are made, and the optimisers that propose them."""

import math
from dataclasses import replace
from functools import partial

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.toy import REFUSED, finishes, job, toys, window
from tuners import adapters
from tuners.actions import Cost, Evaluate, Fork, Free, Reconfigure, Rejected, Run, Target
from tuners.baselines.random_search import random_search
from tuners.baselines.tpe import _Study, tpe
from tuners.search import progress_rate
from tuners.search.online_search import search
from tuners.testing import check_tuner, exchanges

# --------------------------------------------------------------------------------------------------------------- progress


@given(st.floats(0.001, 2.0), st.floats(1e-3, 1e3), st.integers(20, 200))
def test_the_decay_of_an_exponential_is_its_rate(rate, level, n):
    """Means over equal groups of e^(-rt) on an even grid all shrink by one factor, so the slope is exact."""
    seconds = np.linspace(0, 5, 10 * n)
    seen = window(job(), level * np.exp(-rate * seconds), seconds)
    decay = progress_rate.loss_decay(seen.pushes)
    assert decay.per_second == pytest.approx(rate, rel=1e-6)
    assert decay.error == pytest.approx(0, abs=1e-6 * rate)


def test_the_decay_does_not_drown_in_the_noise_of_mini_batches():
    rng = np.random.default_rng(11)
    seconds = np.linspace(0, 10, 1000)
    found = []
    for _ in range(200):
        noisy = np.exp(-0.1 * seconds) * rng.lognormal(-0.125, 0.5, 1000)
        found.append(progress_rate.loss_decay(window(job(), noisy, seconds).pushes))
    rates, errors = np.array(found).T
    assert rates.mean() == pytest.approx(0.1, abs=4 * rates.std() / math.sqrt(200))
    assert rates.std() < 0.01
    # What it says of its own error is what its rates show: the standard error of a standard deviation is 1 / sqrt(2 n).
    assert math.sqrt((errors**2).mean()) == pytest.approx(rates.std(), rel=4 / math.sqrt(400))


def test_noise_counts_against_a_trial():
    smooth = np.exp(-0.1 * np.arange(30.0))
    noisy = smooth * np.where(np.arange(30) // 3 % 2, 1.2, 0.8)
    scores = [progress_rate.progress_per_second(window(job(), x), Target("loss", 1)) for x in (smooth, noisy)]
    assert scores[1] < scores[0] - 0.005


@pytest.mark.parametrize(
    ("losses", "status", "metric", "score"),
    [
        ([2.0, 2.0, 2.0], "running", "loss", 0.0),
        ([2.0, 1.0], "running", "loss", 0.0),
        ([], "running", "accuracy", 0.0),
        ([2.0, math.inf], "running", "loss", -math.inf),
        ([2.0, math.nan], "running", "loss", -math.inf),
        ([2.0, 1.0], "diverged", "loss", -math.inf),
        ([math.nan, math.nan, math.nan, math.nan], "running", "clocks", 1.0),
        ([], "deadlock", "clocks", -math.inf),
        ([], "running", "clocks", 0.0),
    ],
)
def test_trials_that_show_no_decay(losses, status, metric, score):
    assert progress_rate.progress_per_second(window(job(), losses, status=status), Target(metric, 1)) == pytest.approx(score)


def test_equal_moments_have_no_slope():
    assert progress_rate.loss_decay(window(job(), [4.0, 2.0, 1.0], [1.0, 1.0, 1.0]).pushes) == (0.0, 0.0)


# ----------------------------------------------------------------------------------------------------------- online search


def falling(of, rate, *, start=0.0, status="running", branch_seconds=4.0):
    seconds = start + np.linspace(0.1, branch_seconds, 40)
    return window(of, np.exp(-rate * seconds), seconds, start=start, status=status)


class Script:
    """An optimiser that proposes learning rates in turn and records the scores."""

    def __init__(self, *rates):
        self.rates = list(rates)
        self.told = []

    def ask(self):
        return {"learning_rate": self.rates.pop(0)}

    def tell(self, values, score):
        self.told.append((values["learning_rate"], round(score, 6)))

    def on(self, of, *, trials, clocks=30, share=1.0):
        return search(of, self.ask, self.tell, trials=trials, share=share, clocks=clocks)


def at(of, rate):
    return replace(of.start, learning_rate=rate)


def test_search_forks_every_trial_from_the_start_and_stays_with_the_fastest():
    of, script = job(), Script(0.1, 1.0, 10.0)
    tuner = script.on(of, trials=3)
    assert next(tuner) == Fork(0, of.start)
    assert tuner.send(1) == Run(clocks=30, branch=1)
    assert tuner.send(falling(of, 0.1)) == Fork(0, at(of, 0.1))
    assert tuner.send(2) == Run(clocks=30, branch=2)
    assert tuner.send(falling(of, 0.5)) == Free(1)
    assert tuner.send(None) == Fork(0, at(of, 1.0))
    assert tuner.send(3) == Run(clocks=30, branch=3)
    assert tuner.send(falling(of, 0.2)) == Free(3)
    assert tuner.send(None) == Fork(0, at(of, 10.0))
    assert tuner.send(4) == Run(clocks=30, branch=4)
    assert tuner.send(falling(of, 0.9, status="diverged")) == Free(4)
    assert tuner.send(None) == Free(0)
    assert tuner.send(None) == Run(seconds=of.budget_seconds, branch=2)
    assert finishes(tuner, falling(of, 0.5))
    assert script.told == [(0.1, 0.5), (1.0, 0.2), (10.0, -math.inf)]


def test_search_keeps_the_start_where_nothing_beats_it():
    of, script = job(), Script(0.1)
    tuner = script.on(of, trials=1)
    next(tuner)
    tuner.send(1)
    tuner.send(falling(of, 0.5))
    tuner.send(2)
    assert tuner.send(falling(of, 0.5)) == Free(2)
    assert tuner.send(None) == Free(0)
    assert tuner.send(None) == Run(seconds=of.budget_seconds, branch=1)


def test_search_goes_on_with_the_parent_where_every_trial_diverged():
    of, script = job(), Script(1.0)
    tuner = script.on(of, trials=1)
    next(tuner)
    tuner.send(1)
    tuner.send(falling(of, 0.0, status="diverged"))
    tuner.send(2)
    assert tuner.send(falling(of, 0.0, status="diverged")) == Free(2)
    assert tuner.send(None) == Free(1)
    assert finishes(tuner)


def test_search_tries_in_place_where_forks_are_refused():
    of, script = job("no forks"), Script(0.1, 1.0)
    tuner = script.on(of, trials=2)
    assert next(tuner) == Fork(0, of.start)
    assert tuner.throw(REFUSED) == Run(clocks=30)
    changed = Cost(seconds=1.0, stall_seconds=1.0)
    assert tuner.send(falling(of, 0.1)) == Reconfigure(at(of, 0.1))
    assert tuner.send(changed) == Run(clocks=30)
    assert tuner.send(falling(of, 0.4)) == Reconfigure(at(of, 1.0))
    assert tuner.send(changed) == Run(clocks=30)
    assert tuner.send(falling(of, 0.3)) == Reconfigure(at(of, 0.1))
    assert finishes(tuner)
    assert script.told == [(0.1, 0.4), (1.0, 0.3)]


def test_search_tells_that_a_setting_was_refused_and_asks_for_the_next():
    of, script = job(), Script(1e6, 0.1, 0.2)
    tuner = script.on(of, trials=3)
    next(tuner)
    tuner.send(1)
    # 1e6 is outside the space, so that it is never asked of the system.
    assert tuner.send(falling(of, 0.1)) == Fork(0, at(of, 0.1))
    assert tuner.throw(REFUSED) == Fork(0, at(of, 0.2))
    assert script.told == [(1e6, -math.inf), (0.1, -math.inf)]


def test_search_stops_when_its_share_of_the_budget_is_spent():
    of, script = job(), Script(0.1, 0.2)
    tuner = script.on(of, trials=2, share=0.25)
    next(tuner)
    tuner.send(1)
    late = falling(of, 0.1, start=of.budget_seconds / 4)
    assert tuner.send(late) == Free(0)
    assert script.told == []


def test_trials_share_the_time_evenly_unless_clocks_are_given():
    of, script = job(), Script(0.1)
    tuner = script.on(of, trials=4, share=0.25, clocks=None)
    next(tuner)
    assert tuner.send(1) == Run(seconds=of.budget_seconds / 4 / 5, branch=1)


@pytest.mark.parametrize("wrong", [{"trials": 0}, {"share": 0.0}, {"share": 1.5}])
@pytest.mark.parametrize("factory", [random_search, tpe], ids=["random_search", "tpe"])
def test_searches_that_make_none_are_refused(factory, wrong):
    with pytest.raises(ValueError, match="Cannot search with"):
        next(factory(job(), **wrong))


@pytest.mark.parametrize("factory", [random_search, tpe], ids=["random_search", "tpe"])
def test_a_search_with_nothing_free_lets_the_job_run(factory):
    assert finishes(factory(job("no knobs")))


@pytest.mark.parametrize("factory", [random_search, tpe], ids=["random_search", "tpe"])
def test_a_search_finds_a_faster_setting_than_the_start(factory):
    """On the quadratic toy the loss decays in proportion to the learning rate; the start's is a hundred times too small."""
    system = toys()["one knob"](3)
    log = exchanges(partial(factory, trials=12, clocks=40, share=0.9), system)
    kept = log[-1].action
    settings = {e.answer: e.action.setting for e in log if isinstance(e.action, Fork)}
    assert 0.1 < settings[kept.branch].learning_rate < 10
    assert system.status == "target"
    still = toys()["one knob"](3)
    exchanges(adapters.from_pair(lambda _: (None, Run(seconds=100.0)), lambda s, _: (s, None)), still)
    assert still.status == "budget"


def test_random_search_draws_other_settings_for_another_seed():
    def proposals(seed):
        log = exchanges(partial(random_search, trials=3, clocks=5), toys()["every knob"](seed))
        return [e.action.setting for e in log if isinstance(e.action, Fork)]

    assert len(proposals(1)) == 4
    assert proposals(1)[1:] != proposals(2)[1:]


def test_tpe_learns_from_what_it_is_told():
    """After scores that favour small values, its later proposals are smaller than its first, random ones."""

    first, later = [], []
    for seed in range(5):
        study = _Study(replace(job("one knob", seed)), startup=8)
        for n in range(30):
            values = study.ask()
            (first if n < 8 else later).append(math.log10(values["learning_rate"]))
            study.tell(values, -values["learning_rate"] if n % 5 else -math.inf)
    assert np.mean(later) < np.mean(first) - 1


def test_tpe_is_told_only_what_it_asked():

    with pytest.raises(ValueError, match="ask first"):
        _Study(job(), startup=1).tell({}, 0.0)


# ---------------------------------------------------------------------------------------------------------------- adapters


def test_an_ask_tell_optimiser_becomes_a_tuner():
    script = Script(0.1)
    tuner = adapters.from_ask_tell(lambda _: script, trials=1, clocks=7)(job())
    assert next(tuner) == Fork(0, job().start)
    assert tuner.send(1) == Run(clocks=7, branch=1)


def test_a_pair_becomes_a_tuner_and_sees_refusals_as_answers():
    def init(of):
        return 0, Reconfigure(of.start)

    def update(count, answer):
        if isinstance(answer, Rejected):
            return count, Run(clocks=5)
        return count + 1, Evaluate() if count == 0 else None

    tuner = adapters.from_pair(init, update)(job())
    assert isinstance(next(tuner), Reconfigure)
    assert tuner.throw(REFUSED) == Run(clocks=5)
    assert tuner.send(window(job(), [1.0])) == Evaluate()
    assert finishes(tuner)
    check_tuner(adapters.from_pair(init, update))
