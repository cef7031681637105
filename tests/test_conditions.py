"""What a run meets: read from TOML, checked, and drawn from its seed alone."""

import math

import msgspec
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from simulators.conditions import Conditions, Episode, Sleeps, Stragglers, check, straggling

NODES = ("a", "b", "c", "d")
TEXT = """
jitter = 0.3
stagger = false
thinking_seconds = 1.5
sleeps = { probability = 0.1, mean_seconds = 2.0 }
stragglers = { mean_seconds = 5.0, sd_seconds = 1.0, nodes = ["b"] }
[[episodes]]
node = "c"
start_seconds = 10.0
seconds = 60.0
factor = 4.0
"""


def test_conditions_are_read_from_toml():
    assert msgspec.toml.decode(TEXT.encode(), type=Conditions) == Conditions(
        jitter=0.3,
        stagger=False,
        thinking_seconds=1.5,
        sleeps=Sleeps(0.1, 2.0),
        stragglers=Stragglers(5.0, 1.0, nodes=("b",)),
        episodes=(Episode("c", 10.0, 60.0, 4.0),),
    )


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("jiter = 0.3", "jiter"),
        ('jitter = "much"', "jitter"),
        ("sleeps = { probability = 0.1 }", "mean_seconds"),
        ("[[episodes]]\nnode = 3\nstart_seconds = 0.0\nseconds = 1.0\nfactor = 2.0", "node"),
    ],
)
def test_wrong_keys_and_types_are_named(text, reason):
    with pytest.raises(msgspec.ValidationError, match=reason):
        msgspec.toml.decode(text.encode(), type=Conditions)


@pytest.mark.parametrize(
    ("conditions", "reason"),
    [
        (Conditions(episodes=(Episode("z", 0.0, 1.0, 2.0),)), "'z'.*a, b, c, d"),
        (Conditions(stragglers=Stragglers(1.0, nodes=("a", "y"))), "'y'"),
        (Conditions(sleeps=Sleeps(1.1, 1.0)), r"sleeps.probability = 1.1.*from 0 to 1"),
        (Conditions(stragglers=Stragglers(1.0, probability=-0.1)), "stragglers.probability = -0.1"),
        (Conditions(sleeps=Sleeps(math.nan, 1.0)), "sleeps.probability = nan"),
        (Conditions(jitter=-0.2), "jitter = -0.2"),
        (Conditions(jitter=math.inf), "jitter = inf"),
        (Conditions(thinking_seconds=math.nan), "thinking_seconds = nan"),
        (Conditions(sleeps=Sleeps(0.5, -1.0)), "sleeps.mean_seconds = -1.0"),
        (Conditions(stragglers=Stragglers(1.0, -1.0)), "stragglers.sd_seconds = -1.0"),
        (Conditions(episodes=(Episode("a", -1.0, 1.0, 2.0),)), "episodes.start_seconds = -1.0"),
        (Conditions(episodes=(Episode("a", 1.0, math.inf, 2.0),)), "episodes.seconds = inf"),
        (Conditions(episodes=(Episode("a", 1.0, 1.0, 0.0),)), "slow a down by 0.0"),
    ],
)
def test_conditions_that_cannot_be_are_refused(conditions, reason):
    with pytest.raises(ValueError, match=reason):
        check(conditions, NODES)


def test_usual_conditions_pass():
    check(Conditions(), NODES)
    check(msgspec.toml.decode(TEXT.encode(), type=Conditions), NODES)


def drawn(conditions, seed, nodes=NODES):
    return straggling(conditions, nodes, np.random.default_rng(seed)).tolist()


@given(st.integers(0, 2**31), st.floats(0.0, 1.0), st.floats(0.0, 1.0))
def test_a_higher_probability_adds_stragglers_and_takes_none(seed, one, other):
    low, high = (drawn(Conditions(stragglers=Stragglers(1.0, probability=p)), seed) for p in sorted((one, other)))
    assert all(b or not a for a, b in zip(low, high, strict=True))


@given(st.integers(0, 2**31))
def test_named_nodes_straggle_and_chance_is_drawn_whether_needed_or_not(seed):
    chance = drawn(Conditions(stragglers=Stragglers(1.0, probability=0.5)), seed)
    both = drawn(Conditions(stragglers=Stragglers(1.0, probability=0.5, nodes=("c",))), seed)
    assert both == [c or n == "c" for c, n in zip(chance, NODES, strict=True)]
    rng, again = np.random.default_rng(seed), np.random.default_rng(seed)
    straggling(Conditions(), NODES, rng)
    straggling(Conditions(stragglers=Stragglers(1.0, nodes=("a",))), NODES, again)
    assert rng.random() == again.random()


def test_nobody_straggles_unless_asked_and_everybody_at_one():
    assert drawn(Conditions(), 0) == [False] * 4
    assert drawn(Conditions(stragglers=Stragglers(1.0, probability=1.0)), 0) == [True] * 4


def test_so_many_straggle_as_the_probability_says():
    nodes = tuple(str(i) for i in range(4000))
    count = sum(drawn(Conditions(stragglers=Stragglers(1.0, probability=0.3)), 1, nodes))
    assert count == pytest.approx(0.3 * 4000, abs=4 * math.sqrt(4000 * 0.3 * 0.7))
