"""Searchers: their proposals, when they stop, and that a seed determines everything."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.forest import NODES, ONE_POINT, START
from tests.support.marks import slow
from tuners.search.searchers import Search, corner, grid, points, searcher, settled
from tuners.settings import Choice, Integer, Real
from tuners.space import Space

KNOBS = (Real("learning_rate", 1e-5, 1.0, log=True), Real("momentum", 0.0, 1.0), Choice("batch_size", (4, 16)))
SPACE = Space(START, NODES, KNOBS)
FINITE = Space(START, NODES, (Choice("batch_size", (4, 16, 64)), Integer("staleness", 0, 3)))
KINDS = ("tpe", "gp", "random", "grid")


def score(values):
    """A hill of height one, its top at a rate of 10^-2 and momentum 0.7."""
    return math.exp(-((math.log10(values["learning_rate"]) + 2) ** 2) - 4 * (values["momentum"] - 0.7) ** 2)


def proposals(kind, space=SPACE, seed=(1,), count=15, scored=score):
    search, found = searcher(kind, space, seed), []
    for _ in range(count):
        values = search.propose()
        if values is None:
            break
        search.tell(values, scored(values))
        found.append(values)
    return found


@pytest.mark.parametrize("kind", ["tpe", slow("gp"), "random", "grid"])
def test_proposals_are_points_of_the_space_and_come_of_the_seed(kind):
    found = proposals(kind)
    assert all(k.contains(v[k.name]) for v in found for k in KNOBS)
    assert all(list(v) == list(SPACE.names) for v in found)
    assert proposals(kind, count=8) == found[:8]
    assert proposals(kind, seed=(2,), count=8) != found[:8]


@pytest.mark.parametrize("kind", KINDS)
def test_a_finite_space_is_gone_through_once(kind):
    found = proposals(kind, FINITE, count=50, scored=lambda v: float(v["batch_size"] * 10 ** v["staleness"]))
    assert points(FINITE) == 12
    assert sorted(tuple(v.values()) for v in found) == sorted(itertools.product((4, 16, 64), range(4)))


@pytest.mark.parametrize("kind", KINDS)
def test_a_space_of_one_point_has_one_proposal(kind):
    found = proposals(kind, Space(START, NODES, ONE_POINT), scored=lambda _: 0.0)
    assert found == [{"learning_rate": 0.01, "batch_size": 10}]


@pytest.mark.parametrize("kind", ["tpe", slow("gp")])
def test_what_learns_does_better_than_chance(kind):
    """Thirty proposals on the hill, over three seeds."""

    def best(kind, seed):
        return max(map(score, proposals(kind, seed=(seed,), count=30, scored=lambda v: score(v) ** 3)), default=0.0)

    learnt, drawn = ([best(k, s) for s in range(3)] for k in (kind, "random"))
    assert np.mean(learnt) > np.mean(drawn)


def test_bayesian_optimisation_begins_in_the_corner_as_spearmint_does():
    assert proposals("gp", count=1) == [{"learning_rate": 1e-5, "momentum": 0.0, "batch_size": 4}] == [corner(SPACE)]
    assert corner(Space(START, NODES, (Choice("policy", ("bsp", "asp")),))) == {"policy": "bsp"}


def test_the_grid_has_eleven_values_of_a_continuous_knob():
    made = grid(SPACE, (1,))
    assert len(made) == 11 * 11 * 2 == len({tuple(p.values()) for p in made})
    rates = sorted({p["learning_rate"] for p in made})
    np.testing.assert_allclose(rates, 10.0 ** np.linspace(-5, 0, 11))
    assert [p["staleness"] for p in grid(Space(START, NODES, (Integer("staleness", 1, 3),)), (1,))] != []


# ------------------------------------------------------------------------------------------------------------- stopping


@pytest.mark.parametrize(
    ("scores", "stops"),
    [
        ([1.0, 0.99, 0.95, 0.92, 0.91], True),
        ([1.0, 0.99, 0.95, 0.92, 0.899], False),
        ([1.0, 0.99, 0.95, 0.92], False),
        ([0.0] * 10, False),
        ([1.0, 0.99, 0.95, 0.92, 0.0, 0.0], False),
        ([0.2, 1.0, 0.1, 0.91, 0.99, 0.95, 0.92], True),
    ],
)
def test_the_best_five_that_differ_by_less_than_a_tenth_stop_a_search(scores, stops):
    assert settled(scores) == stops


@given(st.lists(st.floats(0.0, 10.0), max_size=12))
def test_stopping_depends_on_no_order_and_no_unit(scores):
    assert settled(scores) == settled(scores[::-1]) == settled([4.0 * s for s in scores])


@pytest.mark.parametrize("kind", KINDS)
def test_all_but_the_grid_stop_when_settled(kind):
    found = proposals(kind, count=20, scored=lambda _: 1.0)
    assert len(found) == (20 if kind == "grid" else 5)


def test_a_point_told_of_again_counts_with_its_last_score():
    search = searcher("random", SPACE, (1,))
    told = [search.propose() for _ in range(1)]
    for _ in range(4):
        search.tell(told[-1], 1.0)
        told.append(search.propose())
    search.tell(told[-1], 1.0)
    assert search.propose() is None
    search.tell(told[0], 5.0)
    assert search.propose() is not None
    search.tell(told[0], math.nan)  # is worthless
    assert search.propose() is not None


def test_a_way_that_insists_on_one_point_is_helped_out_by_chance():
    search = Search(SPACE, lambda *_: corner(SPACE), (1,))
    first = search.propose()
    search.tell(first, 1.0)
    assert first == corner(SPACE)
    assert search.propose() not in (None, first)


def test_an_unknown_kind_is_refused():
    with pytest.raises(ValueError, match="choose one of tpe, gp, random, grid"):
        searcher("anneal", SPACE, (1,))
