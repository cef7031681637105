"""The axis of heat: which knob it is, and how far it reaches."""

from dataclasses import replace

import pytest

from tests.support.toy import job
from tuners.actions import Setting
from tuners.joint.learning.heat import MomentumHeat, PolicyHeat, RateHeat, WorkerHeat, as_hot, heat, outer_heat, stress
from tuners.settings import Choice, Integer, Real

RATE = Real("learning_rate", 0.001, 1.0, log=True)
RATES = Choice("learning_rate", (0.1, 0.0, 1, 0.001, 0.01))
MOMENTUM = Real("momentum", 0.0, 0.95)
POLICY = Choice("policy", ("bsp", "asp", "ssp"))
BOUND = Integer("staleness", 0, 8)
COUNT = Integer("worker_count", 1, 4)


def job_with(*knobs):
    of = job("no knobs")
    return replace(of, space=replace(of.space, knobs=knobs))


def keep(workers: int) -> Setting:
    return replace(job().start, workers=tuple(n.name for n in job().nodes[:workers]))


@pytest.mark.parametrize(
    ("knobs", "start", "kind"),
    [
        ((RATE, MOMENTUM, POLICY, COUNT), "asp", RateHeat),
        ((RATES, COUNT), "asp", RateHeat),  # a job with five rates to choose from kept the first, and missed its target
        ((Choice("learning_rate", (0.1,)), COUNT), "asp", WorkerHeat),
        ((POLICY, BOUND, COUNT), "asp", PolicyHeat),
        ((COUNT,), "asp", WorkerHeat),
        ((COUNT,), "bsp", type(None)),  # `tf36-imagenet8` came down to 2 workers of 31, as if fewer were cooler
        ((MOMENTUM, COUNT), "asp", MomentumHeat),  # a job whose rate was held ran as it had begun: 6,049 s and not 814
        ((MOMENTUM, POLICY), "asp", PolicyHeat),
        ((Choice("momentum", (0.0, 0.9)),), "bsp", MomentumHeat),
        ((Choice("momentum", (0.9,)),), "bsp", type(None)),
    ],
)
def test_the_rate_comes_before_the_policy_and_the_policy_before_workers(knobs, start, kind):
    of = job_with(*knobs)
    assert type(heat(replace(of, start=replace(of.start, policy=start)), keep)) is kind


def test_momentum_carries_the_rate_beyond_its_knob_and_is_dropped_below():
    axis = RateHeat(RATE, MOMENTUM)
    start = replace(job().start, learning_rate=0.6, momentum=0.5)
    assert axis.of(start) == pytest.approx(1.2 * stress(start))
    hot = axis.scaled(start, 4.0)
    assert (hot.learning_rate, axis.of(hot)) == (1.0, pytest.approx(4.8 * stress(start)))
    cool = axis.scaled(hot, 0.1)
    assert (cool.learning_rate, cool.momentum) == (pytest.approx(0.48), 0.0)
    assert axis.of(axis.scaled(start, 1e9)) == pytest.approx(10.0 * stress(start))  # momentum 0.9 at most
    assert axis.scaled(start, 1e-9).learning_rate == 0.001


@pytest.mark.parametrize("knob", [Real("learning_rate", 0.0, 1.0), RATES])
def test_a_rate_of_0_is_left_for_the_one_that_is_expected(knob):
    """It was divided by, and its logarithm taken."""
    axis, start = heat(job_with(knob), keep), replace(job().start, learning_rate=0.0)
    assert 0 < axis.of(start) < 1e-20
    usual = axis.scaled(start, axis.expected.median / axis.of(start))
    assert axis.of(usual) == pytest.approx(axis.expected.median, rel=0.0 if isinstance(knob, Real) else 3.0)
    assert axis.expected.chance_above(axis.of(start)) == pytest.approx(1.0)


def test_a_rate_that_can_only_be_0_is_no_heat():
    assert isinstance(heat(job_with(Real("learning_rate", 0.0, 0.0), COUNT), keep), WorkerHeat)


def test_where_the_rate_is_held_momentum_is_heat():
    axis, start = MomentumHeat(MOMENTUM), replace(job().start, learning_rate=0.1, momentum=0.5)
    assert axis.of(start) == pytest.approx(0.2 * stress(start))
    assert axis.scaled(start, 2.0).momentum == pytest.approx(0.75)
    assert axis.scaled(start, 0.1).momentum == 0.0
    assert axis.scaled(start, 1e9).momentum == 0.95
    chosen = MomentumHeat(Choice("momentum", (0.9, 0.0, 0.5)))
    assert [chosen.scaled(start, f).momentum for f in (2.0, 1.0, 0.5)] == [0.9, 0.5, 0.0]
    assert chosen.scaled(replace(start, momentum=0.9), 2.0).momentum == 0.9


@pytest.mark.parametrize(("kept", "counts"), [(0.0, True), (1.0, False), (2.0, True)])
def test_momentum_counts_where_servers_keep_more_than_the_model(kept, counts):
    """Plain gradient descent has none: with a momentum of 0.9 at the start, rates were taken for ten times as hot."""
    of = job_with(RATE, MOMENTUM)
    axis = heat(replace(of, branch_bytes=kept * of.model_bytes), keep)
    start = replace(job().start, learning_rate=0.1, momentum=0.5)
    assert axis.of(start) == pytest.approx((0.2 if counts else 0.1) * stress(start))
    assert axis.scaled(start, 1.0) == (replace(start, learning_rate=0.2, momentum=0.0) if counts else start)
    assert axis.scaled(start, 1e9).momentum == (0.9 if counts else 0.5)


def test_momentum_is_no_heat_where_it_does_not_count():
    of = job_with(MOMENTUM)
    assert heat(replace(of, branch_bytes=of.model_bytes), keep) is None


def test_of_rates_to_choose_from_every_step_takes_another_one():
    axis, start = RateHeat(RATES, None), replace(job().start, learning_rate=0.001)
    seen = [start.learning_rate]
    for factor in (2.0, 2.0, 20.0, 2.0, 2.0, 0.5, 0.1, 0.5, 0.5):
        start = axis.scaled(start, factor)
        seen.append(start.learning_rate)
    assert seen == [0.001, 0.01, 0.1, 1, 1, 1, 0.1, 0.01, 0.001, 0.001]
    assert isinstance(replace(axis.scaled(start, 1e9)).learning_rate, int)  # the option itself, which the knob contains
    # A small correction, as when a machine is lost, changes the rate only if another one is nearer.
    assert axis.scaled(start, 1.4).learning_rate == 0.001
    assert axis.scaled(replace(start, learning_rate=0.1), 1.0).learning_rate == 0.1


def test_a_rate_is_hotter_where_more_workers_do_not_wait_and_cooler_with_larger_mini_batches():
    """The best rates of 13 workers were a third of those of 4, and the prior and the search expected the same."""
    axis, start = RateHeat(RATE, None), replace(job().start, policy="asp", learning_rate=0.1, batch_size=4)
    two, four = (replace(start, workers=start.workers[:1] * k) for k in (2, 4))
    assert axis.of(four) == pytest.approx(2 * axis.of(two))
    assert axis.of(replace(four, policy="bsp")) == pytest.approx(axis.of(four) / 2)  # four pushes make one update
    assert axis.of(replace(four, batch_size=16)) == pytest.approx(axis.of(four) / 2)
    assert as_hot(axis, four, two).learning_rate == pytest.approx(0.05)
    assert as_hot(axis, two, two) is two


def test_policies_are_ordered_by_the_staleness_that_they_allow():
    axis = heat(job_with(POLICY, BOUND), keep)
    setting, seen = replace(job().start, policy="bsp"), []
    for _ in range(6):
        seen.append((setting.policy, setting.staleness))
        setting = axis.scaled(setting, 2.0)
    assert [p for p, _ in seen] == ["bsp", "ssp", "ssp", "ssp", "asp", "asp"]
    assert [s for p, s in seen if p == "ssp"] == [1, 3, 7]
    assert axis.scaled(replace(setting, policy="asp"), 0.5).policy == "ssp"


def test_workers_double_and_halve_within_their_knob():
    axis = WorkerHeat(keep, 4)
    assert len(axis.scaled(keep(2), 2.0).workers) == 4
    assert axis.scaled(keep(4), 2.0) == keep(4)
    assert len(axis.scaled(keep(4), 0.5).workers) == 2


OUTER = (Real("outer_rate", 0.3, 1.5), Real("outer_momentum", 0.0, 0.9))


def test_where_the_rate_is_held_the_servers_rate_for_local_steps_is_heat():
    """Jobs that free local steps and the outer optimizer alone ran as they had begun."""
    axis = heat(job_with(Integer("local_steps", 1, 64, log=True), *OUTER), keep)
    start = replace(job().start, outer_rate=1.0, outer_momentum=0.0)
    assert isinstance(axis, RateHeat)
    hot = axis.scaled(start, 7.0)
    assert (hot.outer_rate, axis.of(hot)) == (1.5, pytest.approx(7.0))
    assert hot.learning_rate == start.learning_rate
    assert axis.words(hot) == "effective outer rate 7"


def test_the_usual_outer_rate_is_that_of_rounds_and_1_where_pushes_come_one_by_one():
    of = job_with(*OUTER)
    rounds = replace(of, start=replace(of.start, policy="bsp"))
    assert outer_heat(rounds).expected.median == pytest.approx(0.7 / (1 - 0.9))
    assert outer_heat(replace(of, start=replace(of.start, policy="asp"))).expected.median == 1.0
    assert outer_heat(job_with(RATE)) is None


@pytest.mark.parametrize("momentum", [OUTER[1], Choice("outer_momentum", (0.0, 0.5, 0.8))])
def test_where_the_servers_rate_is_held_their_momentum_is_heat(momentum):
    """A job of which it alone was free ran as it had begun, and missed its target."""
    of = job_with(momentum)
    axis = heat(of, keep)
    start = replace(job().start, outer_rate=0.2, outer_momentum=0.0, learning_rate=0.1, momentum=0.5)
    assert isinstance(axis, MomentumHeat)
    assert axis.of(start) == pytest.approx(0.2)
    assert axis.scaled(start, 2.0) == replace(start, outer_momentum=0.5)
    assert axis.words(axis.scaled(start, 5.0)) == "effective outer rate 1"
    assert outer_heat(replace(of, start=replace(of.start, policy="bsp"))).expected.median == pytest.approx(7.0)
    assert outer_heat(job_with(Choice("outer_momentum", (0.9,)))) is None
