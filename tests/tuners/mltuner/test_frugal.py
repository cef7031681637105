"""MLtuner's default form, decision by decision: when a trial begins, who wins, what is cut short, and what is left alone."""

import math
from dataclasses import dataclass, replace
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness.drive import play
from tests.support.forest import NODES, RATE, START, Forest, falls, job
from tests.support.marks import examples
from tests.support.toy import window
from tuners.actions import Evaluate, Fork, Free, Rejected, Run, Space, Target
from tuners.mltuner import mltuner
from tuners.mltuner.branch_record import BranchRecord
from tuners.mltuner.moves import moves
from tuners.mltuner.segments import Segments
from tuners.mltuner.time_left import seconds_left
from tuners.search.branches import TrainedBranch
from tuners.settings import Choice, Integer, Real
from tuners.testing import check_tuner, exchanges
from tuners.testing.toys import toys

FAR = Target("loss", 1e-60)
CLOCKS = 6  # three of each of two workers


@dataclass
class Timed(Forest):
    """A forest that ends at its target, and in which an evaluation takes time."""

    evaluation_seconds: float = 0.0

    def perform(self, action):
        if isinstance(action, Evaluate):
            self.now += self.evaluation_seconds
        answer = super().perform(action)
        if self.job.target.metric == "loss" and any(b.loss <= self.job.target.value for b in self.branches.values()):
            self.status = "target"
        return answer


def started(rate, *knobs, target=FAR, budget=1e4, **start):
    """A job that begins with that rate."""
    of = job(*(knobs or (RATE,)), target=target)
    begun = replace(START, learning_rate=rate, **start)
    return replace(of, start=begun, space=Space(begun, NODES, of.space.knobs), budget_seconds=budget)


def forest_of(of, law, **rules):
    forest = Timed(of, law=law, **rules)
    forest.branches[0].setting = of.start
    return forest


def played(of, law=falls, *, most=400, refuses=lambda _index, _action: False):
    """The tuner on a forest, up to `most` exchanges."""
    forest = forest_of(of, law)
    exchanges(mltuner, forest, most=most, refuses=refuses)
    return forest


def to_target(of, law=falls, tuner=mltuner, **rules):
    """Seconds until the job was done, and the forest."""
    forest = forest_of(of, law, **rules)
    outcome = play(tuner, forest).outcome
    assert outcome.status == "target", outcome.reason
    return outcome.seconds, forest


def idle(job):
    """A tuner that does nothing."""
    return
    yield


def trained_last(forest):
    """The setting that the job trains under at the end; a trial may just have been freed."""
    return forest.branches[next(a.branch for a in reversed(forest.asked(Run)) if a.branch in forest.branches)].setting


# ------------------------------------------------------------------------------------------------------------ segments


def test_it_trains_first_and_pays_for_nothing_before():
    """Three clocks of each worker come before the first evaluation, and no branch but a snapshot."""
    forest = played(started(0.01), most=12)
    first = next(i for i, (a, _) in enumerate(forest.log) if isinstance(a, Evaluate))
    before = [a for a, _ in forest.log[:first]]
    assert before[0] == Fork(0)
    assert all(isinstance(a, Run) and a.branch == 0 for a in before[1:])
    assert forest.branches[0].trained >= CLOCKS - 2


def test_trials_train_as_long_as_the_reference_from_the_same_snapshot():
    forest = played(started(0.01), most=60)
    trials = forest.trials()
    assert trials
    snapshot = next(answer for a, answer in forest.log if isinstance(a, Fork) and a.setting is None)
    forks = [a for a in forest.asked(Fork) if a.setting is not None]
    first = [a for a in forks if a.branch == snapshot]
    assert first
    reference = sum(forest.seconds_of(0)[:8])
    assert sum(forest.seconds_of(trials[0][0])[:4]) == pytest.approx(reference, abs=1.0)


# -------------------------------------------------------------------------------------------- starts that never arrive


def test_dear_evaluations_do_not_make_segments_too_long_for_a_trial():
    """One takes a fiftieth of the budget. Segments of ten times that would cost more than a trial is expected to save."""
    of = started(0.001, target=Target("loss", 0.05), budget=1000.0)
    seconds, forest = to_target(replace(of, evaluate_seconds=20.0), evaluation_seconds=20.0)
    assert seconds < 800
    assert trained_last(forest).learning_rate > 0.01


def test_an_accuracy_that_rises_says_nothing_while_the_loss_does_not_fall():
    """As of softmax at a tiny rate: most digits are soon right, at a loss that hardly changes, and then no more are."""

    def accuracy(branch):
        return max(1.0 - branch.loss, 0.9 * -math.expm1(-branch.clocks / 40))

    of = started(1e-4, Real("learning_rate", 1e-5, 1.0, log=True), target=Target("accuracy", 0.93), budget=2000.0)
    forest = forest_of(of, falls, accuracy=accuracy)
    exchanges(mltuner, forest, most=120, refuses=lambda _index, _action: False)
    assert trained_last(forest).learning_rate > 0.01


def test_a_job_that_would_end_with_its_budget_goes_on_with_trials():
    """At first higher rates do harm, and three trials fail, which take more than a job is else to lose. Later they help."""

    def later(setting, loss, clocks):
        if clocks < 60:
            return loss * (0.999 if setting.learning_rate <= 0.01 else 1.01)
        return falls(setting, loss, clocks)

    of = started(0.01, target=Target("loss", 0.2), budget=700.0)
    _, forest = to_target(of, later, evaluation_seconds=5.0)
    assert trained_last(forest).learning_rate > 0.01


# ------------------------------------------------------------------------------------------------------- who wins


def test_a_higher_rate_that_learns_faster_wins_and_is_followed():
    forest = played(started(0.01), most=120)
    tried = [s.learning_rate for _, s in forest.trials()]
    assert tried[:2] == pytest.approx([0.04, 0.16])
    assert trained_last(forest).learning_rate >= 0.16


def test_a_lower_rate_is_tried_only_while_the_loss_does_not_fall():
    """A calm setting always looks good for a while, so that a good one must not be left for it."""
    forest = played(started(0.4), most=200)
    assert all(s.learning_rate >= 0.4 for _, s in forest.trials())


def test_a_good_start_is_left_alone_after_a_few_trials():
    of = started(0.45, target=Target("loss", 1e-4))
    alone, _ = to_target(of, tuner=idle)
    tuned, forest = to_target(of, evaluation_seconds=0.05)
    assert tuned <= 1.1 * alone
    assert len(forest.trials()) <= 3


@pytest.mark.parametrize("seconds", [20, 60, 200, 1000])
def test_a_job_that_cannot_be_made_faster_is_hardly_slower(seconds):
    """Nothing that can be tuned matters, however long the job is: 10 % at most, and the evaluations."""

    def same(setting, loss, clocks):
        return loss * 0.999

    of = started(0.1, RATE, Choice("batch_size", (5, 10, 20)), target=Target("loss", 0.999 ** (20 * seconds)), budget=2e4)
    tuned, forest = to_target(replace(of, evaluate_seconds=0.2), law=same, pace=lambda _: 0.05, evaluation_seconds=0.2)
    # A forest makes no part of a push, so that the end of a run in seconds is lost.
    unused = sum(answer.seconds - 0.05 * answer.clocks for a, answer in forest.log if isinstance(a, Run))
    assert tuned - unused <= 1.1 * seconds


def test_a_start_up_bump_is_not_held_against_a_higher_rate():
    """Rates above .05 double the loss in the first pushes of a trial, and then fall much faster."""

    def bump(setting, loss, clocks):
        rate = setting.learning_rate
        if rate > 0.05 and loss <= 1.0 and clocks < 3:
            return loss * 1.2
        return loss * (1 - rate / 5)

    forest = played(started(0.02), law=bump, most=80)
    assert max(s.learning_rate for _, s in forest.trials()) > 0.05
    assert trained_last(forest).learning_rate > 0.05


# ------------------------------------------------------------------------------------------------------- cut short


def test_a_trial_whose_loss_has_tripled_stops():
    """From .5 on the loss is four times as high with every push."""
    forest = played(started(0.3), most=80)
    cut = [(b, s) for b, s in forest.trials() if s.learning_rate >= 0.5]
    assert cut
    for branch, _ in cut:
        assert branch in forest.dead
        assert len(forest.seconds_of(branch)) <= 2
    assert trained_last(forest).learning_rate < 0.5


def test_a_trial_that_cannot_come_down_to_the_reference_is_cut_short():
    """A larger batch has no effect on the loss; a smaller one makes it stand still."""

    def law(setting, loss, clocks):
        return loss * (0.97 if setting.batch_size == 10 else 1.0)

    forest = played(started(0.1, Choice("batch_size", (5, 10))), law=law, most=60)
    (branch, setting), *_ = forest.trials()
    assert setting.batch_size == 5
    assert len(forest.seconds_of(branch)) < 4


# ------------------------------------------------------------------------------------------------------- bad starts


@pytest.mark.parametrize("rate", [1e-3, 3e-3, 0.03, 0.3, 0.5, 0.7, 1.0])
def test_it_recovers_from_any_starting_rate(rate):
    """Rates that hardly learn, and rates that diverge at once."""
    of = started(rate, target=Target("loss", 1e-3))
    seconds, forest = to_target(of, evaluation_seconds=0.5)
    assert seconds < 0.1 * of.budget_seconds
    assert 0.03 < trained_last(forest).learning_rate < 0.5


def test_a_job_that_diverges_goes_back_to_its_snapshot_with_a_lower_rate():
    """Rate .3 works for a hundred pushes, then no more."""

    def breaks(setting, loss, clocks):
        return math.nan if setting.learning_rate >= 0.3 and clocks > 100 else falls(setting, loss, clocks)

    forest = played(started(0.3, Real("learning_rate", 1e-3, 0.3, log=True)), law=breaks, most=200)
    back = [s.learning_rate for _, s in forest.trials()]
    assert back
    assert trained_last(forest).learning_rate < 0.3
    assert all(math.isfinite(b.loss) for b in forest.branches.values())


def test_without_anything_calmer_the_job_ends_as_it_would_have():
    def nan(setting, loss, clocks):
        return math.nan

    forest = played(started(1e-3), law=nan, most=50)
    assert len(forest.log) < 50


# ------------------------------------------------------------------------------------------------------- branches


@examples(8)
@given(st.floats(1e-3, 1.0), st.integers(0, 3))
def test_there_are_three_branches_at_most_and_none_is_left_behind(rate, seed):
    of = started(rate, RATE, Real("momentum", 0.0, 0.9), Choice("batch_size", (5, 10, 20)), Integer("staleness", 0, 4))
    forest = played(replace(of, seed=seed), most=200)
    assert max(forest.live_after) <= 3
    named = {a.branch for a in forest.asked(Run)[-20:]}
    assert named & set(forest.branches)


@pytest.mark.parametrize("recovers", [True, False], ids=["recovers", "has all machines"])
def test_refusals_while_the_job_recovers_from_a_loss_do_not_end_the_tuner(recovers):
    of = started(0.01)
    there = tuple(n for n in of.nodes if n.name != of.start.workers[0]) if recovers else of.nodes
    segments = Segments(of, moves(of))
    for _ in range(5):
        segments.main.trained = segments.main.trained._replace(nodes=there)
        snapshot = segments.renew()
        next(snapshot)
        with pytest.raises(StopIteration):
            snapshot.throw(Rejected("Cannot fork branch 0: a reconfiguration is under way."))
    assert segments.refusals == (0 if recovers else 5)


def test_a_job_that_diverges_after_a_loss_goes_back_to_a_snapshot_that_has_to_recover_first():
    of = started(0.5)
    left = replace(of.start, workers=of.start.workers[1:], servers=of.start.servers[1:])  # the first machine is lost
    there = of.nodes[1:]
    segments = Segments(of, moves(of))
    segments.snapshot, segments.main = 1, BranchRecord(TrainedBranch(0, left, nodes=there))
    segments.main.lost = True
    back = segments.go_back(1.0)
    asked = next(back)
    assert (asked.branch, asked.setting.workers) == (1, left.workers)
    assert asked.setting.learning_rate < 0.5
    assert back.throw(Rejected("Cannot fork branch 1: it has lost n0.")) == Run(clocks=len(of.start.workers), branch=1)
    recovered = replace(window(of, [1.0, 0.9]), setting=left, nodes=there)
    assert back.send(recovered) == Run(clocks=len(left.workers), branch=1)
    assert back.send(recovered) == asked
    assert back.send(7) == Free(0)
    with pytest.raises(StopIteration) as end:
        back.send(None)
    assert end.value.value is True
    assert segments.main.trained.branch == 7


@pytest.mark.parametrize("kind", [Fork, Evaluate])
def test_a_system_that_refuses_branches_or_evaluations_trains_on(kind):
    forest = played(started(0.01), most=200, refuses=lambda _, action: isinstance(action, kind))
    assert forest.now > 0
    if kind is Fork:
        assert len(forest.branches) == 1
        assert not forest.asked(Free)


def test_eight_tunables_cost_little_more_than_four():
    """A duplicate has no effect, and costs its trials only as far as they are expected to pay."""
    knobs = (RATE, Real("momentum", 0.0, 0.9), Choice("batch_size", (5, 10, 20)), Choice("staleness", (0, 1, 3, 7)))
    of = started(0.01, *knobs, target=Target("loss", 1e-4))
    spent = []
    for copies in (1, 2):
        _, forest = to_target(of, tuner=partial(mltuner, copies=copies))
        spent.append(sum(sum(forest.seconds_of(b)) for b, _ in forest.trials() if b in forest.dead))
    assert spent[1] <= 2 * spent[0]


# --------------------------------------------------------------------------------------------------------- time left


def test_the_time_left_is_exact_for_an_exponential_decay():
    of = started(0.1, target=Target("loss", 1e-3))
    curve = [(float(t), math.exp(-t / 100)) for t in range(0, 300, 20)]
    assert seconds_left(of, curve, 300.0) == pytest.approx(100 * math.log(1e3) - 280)
    accuracy = started(0.1, target=Target("accuracy", 1 - 1e-3))
    assert seconds_left(accuracy, curve, 300.0) == pytest.approx(100 * math.log(1e3) - 280)


def test_the_time_left_is_exact_for_a_power_law():
    of = started(0.1, target=Target("loss", 0.01))
    curve = [(float(t), 2.0 * t**-0.7) for t in range(20, 220, 20)]
    assert seconds_left(of, curve, 200.0) == pytest.approx(200 ** (1 / 0.7) - 200)
    high = started(0.1, target=Target("loss", 2.0))
    assert seconds_left(high, [(t, 100 * level) for t, level in curve], 200.0) == pytest.approx(100 ** (1 / 0.7) - 200)


def test_the_time_left_goes_down_while_levels_are_unknown():
    of = started(0.1, target=Target("loss", 1e-3))
    curve = [(float(t), math.exp(-t / 100)) for t in range(0, 300, 20)]
    later = [*curve, (300.0, math.nan), (320.0, math.nan)]
    assert seconds_left(of, later, 320.0) == pytest.approx(100 * math.log(1e3) - 320)


def test_the_time_left_is_bounded_where_nothing_is_known():
    of = started(0.1, target=FAR, budget=1000.0)
    assert seconds_left(of, [], 10.0) == 300.0  # thirty times the time so far
    assert seconds_left(of, [(0.0, 1.0), (10.0, 1.0)], 10.0) == 300.0  # it does not fall
    assert seconds_left(of, [(0.0, math.nan), (10.0, math.nan)], 400.0) == 600.0  # the rest of the budget


@pytest.mark.parametrize("target", [Target("loss", 0.0), Target("loss", -2.0)])
def test_a_loss_that_may_be_negative_is_extended_as_a_line(target):
    of = started(0.1, target=target)
    curve = [(0.0, 3.0), (10.0, 2.0), (20.0, 1.0)]
    assert seconds_left(of, curve, 20.0) == pytest.approx((1.0 - target.value) * 10)


# ----------------------------------------------------------------------------------------------------- edges, options


def test_where_nothing_is_free_it_does_nothing():
    nothing_free = replace(job(), space=Space(START, NODES, ()))
    other = replace(job(), space=Space(START, NODES, (Integer("intra_threads", 1, 2),)))
    for of in (nothing_free, other, job(target=Target("clocks", 100)), job(target=Target("samples", 100))):
        assert list(mltuner(of)) == []


@pytest.mark.parametrize(
    ("name", "knob"), [("policy", Choice("policy", ("bsp", "asp"))), ("batch_size", Choice("batch_size", (5, 10)))]
)
def test_one_knob_is_enough(name, knob):
    """Only the policy, or only the mini-batch: the other value learns twice as fast."""
    good = {"policy": "asp", "batch_size": 5}[name]

    def law(setting, loss, clocks):
        return loss * (0.96 if getattr(setting, name) == good else 0.98)

    forest = played(started(0.1, knob, **({"policy": "bsp"} if name == "policy" else {})), law=law, most=400)
    assert getattr(trained_last(forest), name) == good


@pytest.mark.parametrize("option", [{"search": "gp"}, {"bound": "retune"}, {"retune": False}, {"windows": 5}])
def test_an_option_of_the_papers_form_is_refused_without_it(option):
    with pytest.raises(ValueError, match=r"only the paper's form has this option; add as_printed=true"):
        next(mltuner(job(), **option))


def test_copies_below_one_are_refused():
    with pytest.raises(ValueError, match="copies=0: give at least 1"):
        next(mltuner(job(), copies=0))


@pytest.mark.slow
def test_it_keeps_the_contract():
    check_tuner(mltuner)


@pytest.mark.parametrize("toy", ["one knob", "every knob", "no forks", "a node leaves"])
def test_it_is_no_slower_than_leaving_a_toy_alone(toy):
    found = [play(tuner, toys()[toy](0)).outcome for tuner in (mltuner, idle)]
    assert found[0].status in ("target", "budget")
    assert found[0].seconds <= 1.1 * found[1].seconds
