"""The oracle's search: where it looks, what it runs on every seed, and that it can be interrupted anywhere."""

import math

import numpy as np
import pytest

from tests.support.toy import job
from tuners.baselines.best_fixed import candidates, neighbours, search
from tuners.settings import Choice, Integer, Real
from tuners.space import Space


def played(seconds, ended=(), seeds=3):
    """The batches of a search under `seconds`, and everything that was run."""
    ran = {}

    def known(setting, seed):
        return ran[setting, seed]

    batches = []
    for batch in search(job(), ended, seeds, known):
        batches.append(batch)
        for setting, seed, limit in batch:
            assert (setting, seed) not in ran
            ran[setting, seed] = seconds(setting, seed, limit)
    return batches, ran


def distance(setting, seed, limit=math.inf):
    """Least at a learning rate of 0.3, with a little of every seed."""
    return 100 + 50 * abs(math.log(setting.learning_rate / 0.3)) + seed


def best(ran, seeds=3):
    # In the order of their runs, which decides between equals: that of a set is another one in each process.
    whole = [s for s, seed in ran if seed == 0 and all((s, i) in ran for i in range(seeds))]
    return min(whole, key=lambda s: sum(ran[s, i] for i in range(seeds)))


def test_the_search_goes_on_from_what_contestants_ended_with():
    base = candidates(job())
    ended = job().space.setting({"learning_rate": 0.29}) if job().space.knob("learning_rate") else base[1]
    _, alone = played(distance)
    _, helped = played(distance, [ended])
    assert (ended, 0) in helped
    assert distance(best(helped), 0) <= min(distance(best(alone), 0), distance(ended, 0))


def test_the_local_search_improves_on_random_settings():
    batches, ran = played(distance)
    random = min(distance(s, 0) for s in candidates(job()))
    assert distance(best(ran), 0) < random
    assert len(batches) > 2


def test_only_the_best_of_a_stage_are_run_on_every_seed():
    batches, ran = played(distance)
    start, *drawn = candidates(job())
    assert batches[0] == [(start, seed, math.inf) for seed in range(3)]
    assert batches[1] == [(setting, 0, 1.1 * distance(start, 0)) for setting in drawn]
    assert {setting for setting, _, _ in batches[2]} <= set(drawn)
    assert len({setting for setting, _, _ in batches[2]}) <= 3
    assert {seed for _, seed, _ in batches[5]} <= {0}  # neighbours are screened on the first seed
    later = {s for s, seed in ran if seed == 1} - {start}
    assert 0 < len(later) <= 4 * 3


def test_a_search_that_is_made_again_with_the_same_answers_wants_the_same():
    first, ran = played(distance)
    again = []
    for batch in search(job(), [], 3, lambda setting, seed: ran[setting, seed]):
        again.append(batch)
    assert again == first


@pytest.mark.parametrize("seeds", [1, 3])
@pytest.mark.parametrize("scale", [0.02, 1.0])
def test_runs_that_are_stopped_at_their_limits_change_no_choice(seeds, scale):
    """Where settings are far apart, and where all take about as long."""
    ended, stopped = job().space.sample(np.random.default_rng(0)), []

    def taken(setting, seed, limit):
        return 100 + scale * (distance(setting, seed) - 100)

    def limited(setting, seed, limit):
        seconds = taken(setting, seed, limit)
        stopped.append(seconds >= limit)
        return math.inf if seconds >= limit else seconds

    batches, ran = played(taken, [job().space.setting(ended)], seeds)
    again, known = played(limited, [job().space.setting(ended)], seeds)
    assert again == batches
    whole = {key: seconds for key, seconds in known.items() if seconds < math.inf}
    assert best(whole, seeds) == best(ran, seeds)
    assert any(stopped) == (scale == 1.0)


def test_with_one_seed_everything_is_run_once():
    _, ran = played(distance, seeds=1)
    assert {seed for _, seed in ran} == {0}


def test_neighbours_are_admitted_different_and_one_step_away():
    space, start = job().space, job().start
    found = neighbours(space, start)
    assert found
    assert start not in found
    assert len(set(found)) == len(found)
    for near in found:
        space.check(near)
        values, before = space.values(near), space.values(start)
        assert sum(values[k] != before[k] for k in values) <= 2  # the policy's bound may come and go with it


def test_steps_stay_in_range_and_integers_move():
    base = job().start
    knobs = (Real("learning_rate", 0.01, 1.0, log=True), Integer("staleness", 0, 3), Choice("transfer_bits", (16, 32)))
    space = Space(base, job().nodes, knobs)
    at = space.setting({"learning_rate": 1.0, "staleness": 0, "transfer_bits": 32})
    found = [space.values(s) for s in neighbours(space, at)]
    assert found == [
        {"learning_rate": pytest.approx(10**-0.2), "staleness": 0, "transfer_bits": 32},
        {"learning_rate": 1.0, "staleness": 1, "transfer_bits": 32},
        {"learning_rate": 1.0, "staleness": 0, "transfer_bits": 16},
    ]
    assert len(neighbours(space, at, most=2)) == 2
