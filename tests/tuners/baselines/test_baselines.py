"""The searches that MLtuner is compared with: what each trains, for how long, and what it keeps."""

from dataclasses import replace
from functools import partial
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.forest import EPOCH, RATE, Forest, falls, job
from tuners.actions import Evaluation, Fork, Free, Run, Target
from tuners.baselines.asha import asha
from tuners.baselines.hyperband import brackets, hyperband
from tuners.baselines.spearmint import spearmint
from tuners.search.epochs import epoch_clocks, plateaued, quality, score
from tuners.settings import Choice, Real
from tuners.testing import exchanges


def _name(factory):
    """Of a factory, the same in every process."""
    if isinstance(factory, partial):
        return f"{factory.func.__name__}-{'-'.join(map(str, factory.keywords.values()))}"
    return factory.__name__


ALL = [spearmint, hyperband, asha, partial(hyperband, schedule="paper"), partial(asha, pruner="median")]


TAME, WILD = job(Real("learning_rate", 1e-3, 0.49, log=True)), Real("learning_rate", 0.3, 1.0)


def played(factory, *, most=400, of=None, law=falls, accuracy=None, refuses=lambda _index, _action: False):
    of = of or job(RATE, Real("momentum", 0.0, 1.0))
    forest = Forest(of, law=law, **({"accuracy": accuracy} if accuracy else {}))
    exchanges(factory, forest, most=most, refuses=refuses)
    return forest


def rising(branch):
    """After ten epochs the quality of a model equals its rate, and stays so."""
    return branch.setting.learning_rate * min(branch.clocks / EPOCH, 10) / 10


def epochs_of(forest, branch):
    return len(forest.seconds_of(branch))


# --------------------------------------------------------------------------------------------------------------- epochs


def test_an_epoch_is_one_pass_whatever_the_mini_batch():
    of = job(Choice("batch_size", (10, 30)))
    assert epoch_clocks(of, of.start) == 50
    assert epoch_clocks(of, of.space.setting({"batch_size": 30})) == 17  # 16.7 of 30 samples
    assert epoch_clocks(of, replace(of.start, local_steps=5)) == 10  # a push has the samples of five mini-batches


@given(st.lists(st.integers(0, 5), min_size=1, max_size=12), st.integers(1, 5))
def test_a_plateau_is_that_no_late_entry_beats_every_early_one(found, epochs):
    late = range(max(len(found) - epochs, 0), len(found))
    better = any(found[i] > max(found[: len(found) - epochs], default=-1) for i in late)
    assert plateaued(found, epochs) == (len(found) > epochs and not better)


@pytest.mark.parametrize(("metric", "expected"), [("accuracy", 0.8), ("loss", -0.3)])
def test_quality_is_accuracy_or_minus_the_loss(metric, expected):
    of = job(target=Target(metric, 0.5))
    assert quality(of, Evaluation(1.0, 1, 0.3, 0.8)) == expected
    assert quality(of, Evaluation(1.0, 1, float("nan"), float("nan"))) == -float("inf")
    assert score(of, -float("inf")) == 0.0 < score(of, expected)


# ------------------------------------------------------------------------------------------------------------ Hyperband


def test_the_schedule_that_was_measured():
    """By hand from B = 2^(K+1), 2^(L+1) settings, B / (settings left) / L epochs; L = 4 is first allowed at K = 6."""
    assert list(islice(brackets("measured"), 6)) == [
        (4, (1,)),  # K = 1, L = 1
        (4, (2,)),
        (4, (4,)),  # K = 3
        (8, (1, 2)),  # L = 2
        (4, (8,)),
        (8, (2, 4)),
    ]
    assert (32, (1, 2, 4, 8)) in list(islice(brackets("measured"), 12))


def test_the_schedule_as_hyperband_prints_it():
    assert list(islice(brackets("paper"), 5)) == [(2, (1,)), (2, (2,)), (2, (4,)), (4, (1, 3)), (2, (8,))]


@pytest.mark.parametrize("schedule", ["measured", "paper"])
def test_no_bracket_trains_for_less_than_an_epoch_or_beyond_its_budget(schedule):
    for settings, epochs in islice(brackets(schedule), 40):
        assert epochs[0] >= 1
        assert list(epochs) == sorted(epochs)
        assert settings >= 2 ** len(epochs)
        before = (0, *epochs[:-1])
        spent = sum((settings >> i) * (now - then) for i, (now, then) in enumerate(zip(epochs, before, strict=True)))
        budget = max(
            (settings >> i) * (now if schedule == "measured" else now - then) * len(epochs)
            for i, (now, then) in enumerate(zip(epochs, before, strict=True))
        )
        assert spent <= budget


def test_the_better_half_goes_on():
    """The fourth bracket has eight settings: all train for one epoch, the best four for two."""
    forest = played(hyperband, accuracy=rising, most=200)
    eight = forest.trials()[12:20]
    ranked = sorted(eight, key=lambda t: -t[1].learning_rate)
    assert [epochs_of(forest, b) for b, _ in ranked] == [2] * 4 + [1] * 4
    assert all(b in forest.dead for b, _ in eight)
    assert 0 in forest.branches


def test_a_setting_on_its_plateau_trains_no_further():
    forest = played(partial(hyperband, plateau_epochs=2), accuracy=lambda b: 0.5, most=400)
    assert max(epochs_of(forest, b) for b, _ in forest.trials()) == 3


# ------------------------------------------------------------------------------------------------------------ Spearmint


def test_the_first_setting_is_the_corner_and_every_one_trains_to_its_plateau():
    def flat_after_two(branch):
        return min(branch.clocks, 2 * EPOCH) / 200 * branch.setting.learning_rate

    forest = played(partial(spearmint, plateau_epochs=3), accuracy=flat_after_two, most=120)
    first = forest.trials()[0][1]
    assert (first.learning_rate, first.momentum) == (1e-3, 0.0)
    finished = [b for b, s in forest.trials() if b in forest.dead and s.learning_rate < 0.5]
    assert {epochs_of(forest, b) for b in finished} == {5}
    assert max(forest.live_after) <= 3


def test_it_stops_only_where_that_is_asked_for_and_goes_on_with_the_best():
    forest = played(partial(spearmint, stops=True, plateau_epochs=2), accuracy=rising, most=900)
    assert len(forest.log) < 900
    (left,) = forest.branches.values()
    assert left.setting.learning_rate == max(s.learning_rate for _, s in forest.trials() if s.learning_rate < 0.5)
    assert len(played(partial(spearmint, plateau_epochs=2), accuracy=lambda b: 0.5, most=150).log) == 150


# ----------------------------------------------------------------------------------------------------------------- ASHA


@pytest.mark.parametrize("pruner", ["asha", "median"])
def test_settings_that_fall_behind_are_stopped_early_and_the_best_is_kept(pruner):
    forest = played(partial(asha, pruner=pruner, plateau_epochs=3), accuracy=rising, most=900, of=TAME)
    done = [(s.learning_rate, epochs_of(forest, b)) for b, s in forest.trials()[5:-1]]
    slow, fast = ([n for rate, n in done if (rate > 0.1) == above] for above in (False, True))
    assert sum(slow) / len(slow) < sum(fast) / len(fast)
    best = max((s.learning_rate, b) for b, s in forest.trials()[:-1])
    assert best[1] in forest.branches
    assert max(forest.live_after) <= 3


# ------------------------------------------------------------------------------------------------------------------ all


@pytest.mark.parametrize("factory", ALL, ids=_name)
def test_every_setting_begins_from_the_untrained_model(factory):
    forest = played(factory, accuracy=rising)
    assert {a.branch for a in forest.asked(Fork)} == {0}
    assert 0 not in {a.branch for a in forest.asked(Run)}
    assert 0 not in {a.branch for a in forest.asked(Free)}


@pytest.mark.parametrize("factory", ALL, ids=_name)
def test_diverged_settings_are_worth_nothing_and_freed(factory):
    forest = played(factory, of=job(WILD), law=lambda s, x, n: x if s.learning_rate < 0.5 else float("nan"), accuracy=rising)
    wild = [b for b, s in forest.trials()[:8] if s.learning_rate >= 0.5]
    assert wild
    assert all(b in forest.dead and epochs_of(forest, b) == 1 for b in wild)


@pytest.mark.parametrize("factory", ALL, ids=_name)
def test_a_job_that_cannot_be_searched_just_runs(factory):
    for of in (job(Choice("transfer_bits", (16, 32))), job(target=Target("clocks", 100))):
        with pytest.raises(StopIteration):
            next(factory(of))
    assert len(played(factory, refuses=lambda _index, action: isinstance(action, Fork)).log) == 0


@pytest.mark.parametrize("factory", [spearmint, hyperband, asha], ids=_name)
def test_options_that_make_no_search_are_refused(factory):
    with pytest.raises(ValueError, match="plateau of 0 epochs"):
        next(factory(job(), plateau_epochs=0))


def test_unknown_rules_are_refused():
    with pytest.raises(ValueError, match="Cannot prune by 'hope'"):
        next(asha(job(), pruner="hope"))
    with pytest.raises(ValueError, match="Cannot schedule by 'hope'"):
        next(hyperband(job(), schedule="hope"))
