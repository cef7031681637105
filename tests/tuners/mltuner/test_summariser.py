"""MLtuner's progress summariser and tunables, by hand, by theory and by property."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.support.forest import NODES, RATE, START, job
from tuners.mltuner.summariser import ProgressSummary, Summariser
from tuners.search.tunables import heavy_ball, tunables
from tuners.settings import Choice, Integer, Real
from tuners.space import Space

SUMMARISE = Summariser()
LOSSES = st.lists(st.floats(0.01, 100.0), min_size=1, max_size=60)

# --------------------------------------------------------------------------------------------------------------- speed


@pytest.mark.parametrize("rule", ["equal", "code"])
@pytest.mark.parametrize("n", [10, 20, 57, 100])
def test_a_straight_fall_is_as_fast_as_it_is_steep(rule, n):
    t = 2.0 * np.arange(n)
    found = Summariser(windows_rule=rule)(t, 50 - 0.3 * t)
    assert found.label == "converging"
    assert found.speed == pytest.approx(0.3)
    assert found.noise == 0


def test_the_noise_is_the_largest_rise_and_is_taken_off_the_fall():
    """Windows of one: 10, 8, 9, 4, 4.5, 0 over five seconds: falls by 10, rises by 1 at most."""
    found = Summariser(windows=6)(np.arange(6.0), [10, 8, 9, 4, 4.5, 0])
    assert found == ProgressSummary("converging", (10 - 1) / 5, 10.0, 1.0)


def test_windows_are_averages_over_equal_shares():
    found = Summariser(windows=2)([0, 1, 2, 3], [4, 6, 1, 1])
    assert (found.fall, found.speed) == (4.0, 2.0)  # from 5 at 0.5 s to 1 at 2.5 s


def test_the_starting_point_counts_from_the_first_push():
    found = Summariser(windows=2)([1, 2, 3, 4], [4, 4, 2, 2], start=8.0)
    assert (found.fall, found.speed) == (6.0, pytest.approx(6.0 / 2.5))


@pytest.mark.parametrize(("n", "count"), [(9, 9), (10, 10), (19, 19), (20, 10), (39, 13), (57, 11)])
def test_the_public_code_cuts_up_to_twice_as_many_windows_and_drops_the_rest(n, count):
    found = Summariser(windows_rule="code").window_means(np.arange(float(n)))
    assert len(found) == count
    assert found[-1] == pytest.approx(np.mean(np.arange(n)[: n // max(n // 10, 1) * max(n // 10, 1)][-max(n // 10, 1) :]))


# --------------------------------------------------------------------------------------------------------------- labels


@pytest.mark.parametrize(("rise", "label"), [(0.0, "converging"), (0.99, "converging"), (1.01, "unstable")])
def test_a_tenth_of_the_fall_is_the_most_noise(rise, label):
    """A fall of ten in all, with one rise in it."""
    x = np.array([20.0, 18, 16, 16 + rise, 15, 14, 13, 12, 11, 10])
    assert SUMMARISE(np.arange(10.0), x).label == label


@pytest.mark.parametrize("losses", [[1.0] * 20, list(range(1, 21)), [1.0], []])
def test_what_does_not_fall_is_unstable_and_has_no_speed(losses):
    assert SUMMARISE(np.arange(float(len(losses))), losses, None)[:2] in {("unstable", 0.0), ("diverged", 0.0)}
    assert Summariser(diverges=math.inf)(np.arange(float(len(losses))), losses)[:2] == ("unstable", 0.0)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
def test_numbers_that_overflow_have_diverged(bad):
    assert SUMMARISE([1, 2, 3], [3.0, 2.0, bad]) == ProgressSummary("diverged", 0.0)


def test_ten_times_the_start_has_diverged_unless_that_is_left_out():
    t, x = np.arange(10.0), np.linspace(1, 11, 10)
    assert SUMMARISE(t, x).label == "diverged"
    assert SUMMARISE(t, x, start=2.0).label == "unstable"
    assert Summariser(diverges=math.inf)(t, x).label == "unstable"


@pytest.mark.parametrize("options", [{"windows": 1}, {"diverges": 1.0}])
def test_options_that_make_no_summariser_are_refused(options):
    with pytest.raises(ValueError, match="Cannot summarise"):
        Summariser(**options)


@pytest.mark.slow
def test_white_noise_seldom_looks_like_convergence():
    """The paper bounds the chance by 2^-10, about one in a thousand; 20,000 draws of it would make 20 on average."""
    rng, t = np.random.default_rng(5), np.arange(10.0)
    found = sum(SUMMARISE(t, x).label == "converging" for x in 100 + rng.normal(size=(20_000, 10)))
    assert found < 10


# ----------------------------------------------------------------------------------------------------------- properties


@given(LOSSES, st.floats(0.1, 10.0), st.floats(0.1, 10.0))
def test_the_speed_goes_with_the_loss_and_against_the_time(losses, higher, longer):
    t = np.arange(1.0, len(losses) + 1)
    one, other = SUMMARISE(t, losses), SUMMARISE(longer * t, higher * np.array(losses))
    assert other.speed == pytest.approx(one.speed * higher / longer, abs=1e-9 * higher / longer)
    assert one.speed >= 0


@given(LOSSES)
def test_a_converging_trial_keeps_nine_tenths_of_its_fall(losses):
    t = np.arange(1.0, len(losses) + 1)
    found = SUMMARISE(t, losses)
    if found.label == "converging":
        span = np.ptp([w.mean() for w in np.array_split(t, min(10, len(t)))])
        assert 0.9 * found.fall <= found.speed * span * (1 + 1e-9) <= found.fall * (1 + 2e-9)


# ------------------------------------------------------------------------------------------------------------- tunables


@given(st.floats(1e-3, 1.0), st.floats(0.0, 0.99))
def test_both_conventions_of_momentum_go_the_same_way(rate, momentum):
    ball, _ = heavy_ball(rate, momentum)
    w_ball = w_mean = 1.0
    v = h = 0.0
    for _ in range(20):
        v, h = momentum * v + 0.3 * w_ball, momentum * h + (1 - momentum) * 0.3 * w_mean
        w_ball, w_mean = w_ball - ball * v, w_mean - rate * h
    assert w_ball == pytest.approx(w_mean, abs=1e-9)


def test_a_moving_average_with_momentum_one_stands_still():
    assert heavy_ball(0.5, 1.0) == (0.0, 1.0)


def test_the_searched_convention_is_converted_and_kept_within_the_range():
    of = job(RATE, Real("momentum", 0.0, 1.0))
    mean, ball = (tunables(of, convention=c) for c in ("moving_average", "heavy_ball"))
    values = {"learning_rate": 0.1, "momentum": 0.9}
    assert ball.setting(values, START).learning_rate == 0.1
    assert mean.setting(values, START).learning_rate == pytest.approx(0.01)
    assert mean.setting({"learning_rate": 0.1, "momentum": 1.0}, START).learning_rate == 1e-3


def test_only_training_tunables_are_tuned_or_the_rate_alone():
    of = job(RATE, Real("momentum", 0.0, 1.0), Integer("intra_threads", 1, 2), Choice("staleness", (0, 1)))
    assert tunables(of).space.names == ("learning_rate", "momentum", "staleness")
    assert tunables(of, "rate").space.names == ("learning_rate",)


@pytest.mark.parametrize(
    ("policy", "knobs", "tuned"),
    [("ssp", (), True), ("bsp", (), False), ("bsp", (Choice("policy", ("bsp", "ssp")),), True), ("dssp", (), False)],
)
def test_staleness_is_tuned_where_it_bounds_something(policy, knobs, tuned):
    of = job(RATE, Choice("staleness", (0, 3)), *knobs)
    start = START.__class__(workers=("w0",), servers=("w1",), policy=policy)
    of = of.__class__(
        **{f: getattr(of, f) for f in of.__slots__} | {"start": start, "space": Space(start, NODES, of.space.knobs)}
    )
    what = tunables(of)
    assert ("staleness" in what.space.names) == tuned
    if tuned:
        setting = what.setting({"learning_rate": 0.1, "staleness": 3}, start)
        assert (setting.policy, setting.staleness) == ("ssp", 3)


def test_duplicates_double_the_space_and_change_nothing():
    what = tunables(job(RATE, Choice("batch_size", (10, 20))), copies=2)
    assert len(what.space.knobs) == 4
    values = what.space.sample(np.random.default_rng(1))
    setting = what.setting(values, START)
    assert (setting.learning_rate, setting.batch_size) == (values["learning_rate"], values["batch_size"])
    assert setting.options == ()
