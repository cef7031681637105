"""MLtuner as printed, decision by decision: how long trials are, who wins, when it tunes again, and how it ends."""

import math
from dataclasses import replace
from functools import partial

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.support.forest import EPOCH, ONE_POINT, RATE, START, Forest, Scripted, falls, job
from tests.support.marks import slow
from tuners.actions import Evaluate, Fork, Free, Run, Target
from tuners.mltuner import mltuner as either
from tuners.settings import Choice, Real
from tuners.testing import check_tuner, exchanges
from tuners.testing.toys import toys

mltuner = partial(either, as_printed=True)
LOSS = Target("loss", 1e-9)


def played(
    search=None, *, most=300, refuses=lambda _index, _action: False, of=None, law=falls, accuracy=None, pace=None, **options
):
    """MLtuner on a forest, up to `most` exchanges."""
    more = {name: rule for name, rule in (("accuracy", accuracy), ("pace", pace)) if rule}
    forest = Forest(of or job(), law=law, **more)
    if search is not None:
        options["search"] = search
    exchanges(partial(mltuner, **options), forest, most=most, refuses=refuses)
    return forest


def rates(forest):
    return [round(setting.learning_rate, 6) for _, setting in forest.trials()]


# ------------------------------------------------------------------------------------------------- the parent's loss


def test_trials_start_from_the_loss_of_the_parent_measured_on_a_testing_branch():
    forest = played(Scripted(0.1), most=6)
    fork, run, free = [a for a, _ in forest.log if not isinstance(a, Evaluate)][:3]
    assert fork == Fork(0, testing=True)
    assert run == Run(clocks=20, branch=1)  # ten of each of two workers
    assert free == Free(1)
    assert forest.dead[1].loss == 1.0  # nothing was learnt there


def test_the_starting_point_can_be_left_out_as_the_paper_does():
    forest = played(Scripted(0.1), most=6, start_clocks=0)
    assert not any(a.testing for a in forest.asked(Fork))


def test_the_parents_loss_takes_an_epoch_at_most():
    assert played(Scripted(0.1), most=4, start_clocks=100).asked(Run)[0].clocks == EPOCH


# ----------------------------------------------------------------------------------- the time of a trial (Algorithm 1)


def late(setting, loss, clocks):
    """Nothing happens in the first 40 pushes."""
    return loss if clocks < 40 else falls(setting, loss, clocks)


def test_as_long_as_nothing_converges_the_time_doubles_and_earlier_trials_are_prolonged():
    """Three clocks of two workers are six seconds; then 12, 24, 48 and 96 seconds in all, the last of which is enough."""
    search = Scripted(0.2, 0.1, 0.05, 0.02, 0.15, 0.12)
    forest = played(search, law=late, most=60, of=job(target=LOSS), decision_seconds=0.0)
    total = [sum(forest.seconds_of(branch)) for branch, _ in forest.trials()]
    assert forest.seconds_of(forest.trials()[1][0])[:3] == [6.0, 6.0, 12.0]
    decided = total[1]
    assert decided in {48.0, 96.0}
    assert total[1:] == [decided] * (len(total) - 1)
    assert math.log2(decided / 6).is_integer()


def test_a_slow_setting_does_not_make_the_time_longer_for_all():
    """The second trial needs a hundred seconds for its three clocks; the time goes on from the first one's six."""
    search = Scripted(0.2, 0.1, 0.05, 0.02, 0.15, 0.12)
    pace = {0.1: 100 / 6}
    forest = played(search, law=late, most=60, of=job(target=LOSS), pace=lambda s: pace.get(round(s.learning_rate, 6), 1.0))
    slow, third, fourth = [branch for branch, _ in forest.trials()][1:4]
    assert [sum(forest.seconds_of(b)) for b in (slow, third, fourth)] == [pytest.approx(s) for s in (100.0, 48.0, 48.0)]


def test_a_trial_is_as_long_as_the_searcher_takes_to_decide():
    forest = played(Scripted(0.2, 0.1), most=20, of=job(target=LOSS), decision_seconds=30.0)
    assert [sum(forest.seconds_of(b)) for b, _ in forest.trials()[1:]] == [30.0]


def test_diverged_trials_are_freed_at_once_are_worth_nothing_and_double_nothing():
    search = Scripted(0.9, 0.8, 0.1, 0.05)
    forest = played(search, most=60, of=job(target=LOSS))
    (first, _), (second, _), (third, _), (fourth, _) = forest.trials()
    assert {first, second} <= forest.dead.keys()
    assert sum(forest.seconds_of(first)) == sum(forest.seconds_of(fourth)) == 6.0
    assert [speed for rate, speed in search.told if rate > 0.5] == [0.0, 0.0]
    assert third in forest.branches  # the winner


def test_trials_whose_numbers_overflow_are_freed():
    search = Scripted(0.9, 0.1)
    forest = played(
        search, most=40, of=job(target=LOSS), law=lambda s, x, n: falls(s, x, n) if s.learning_rate < 0.5 else math.nan
    )
    assert search.told[0] == (0.9, 0.0)
    assert forest.trials()[0][0] in forest.dead


@pytest.mark.parametrize(("option", "length"), [("decided", 6.0), ("branch", 6.0)])
def test_the_time_decided_is_every_later_trials(option, length):
    forest = played(Scripted(0.1, 0.2, 0.3, 0.05), most=60, of=job(target=LOSS), trial_time=option)
    assert {sum(forest.seconds_of(b)) for b, _ in forest.trials() if b in forest.dead} == {length}


@settings(max_examples=30, deadline=None)
@given(st.lists(st.floats(0.001, 1.0), min_size=1, max_size=12, unique=True), st.sampled_from([falls, late]))
def test_outside_the_trial_time_search_there_are_three_branches_at_most(listed, law):
    """Invariant: once one trial has converged, only the parent, the best and the trial are there."""
    search = Scripted(*listed, *listed[::-1])
    forest = played(search, law=law, retune=True, plateau_epochs=2, most=250, accuracy=lambda b: 0.5)
    outside = searching = 0
    for (action, _), live in zip(forest.log, forest.live_after, strict=True):
        searching = searching + 1 if isinstance(action, Fork) and action.setting is not None else searching
        if isinstance(action, Evaluate) and searching:
            outside = max(outside, live)
    assert outside <= 3
    # Three plus one for each trial before the time was decided: with `falls` the first that does not diverge decides it.
    if law is falls:
        assert max(forest.live_after) <= 3


# ------------------------------------------------------------------------------------------------------------- who wins


@settings(max_examples=40, deadline=None)
@given(st.lists(st.integers(1, 490).map(lambda n: n / 1000), min_size=2, max_size=8, unique=True))
def test_the_fastest_trial_wins_and_goes_on_where_it_was(listed):
    """Brute force: without noise the largest rate below the edge falls fastest."""
    forest = played(Scripted(*listed), most=120, of=job(target=LOSS))
    trained = forest.asked(Run)[-1].branch
    winner = dict(forest.trials())[trained]
    assert winner.learning_rate == max(listed)
    branch = forest.branches[trained]
    assert branch.trained % EPOCH == 0  # to the end of the epoch that its trial had begun
    assert branch.seconds[0] == 6.0


def test_noise_is_held_against_a_trial():
    """The faster one jumps by a fifth of what it falls every third push."""

    def jumpy(setting, loss, clocks):
        return loss + 0.02 if setting.learning_rate == 0.3 and clocks % 3 == 0 else falls(setting, loss, clocks)

    forest = played(Scripted(0.2, 0.3), law=jumpy, most=40, of=job(target=LOSS))
    assert dict(forest.trials())[forest.asked(Run)[-1].branch].learning_rate == 0.2


def test_all_tunables_of_the_paper_are_set_and_duplicates_cost_trials_only():
    knobs = (RATE, Real("momentum", 0.0, 1.0), Choice("batch_size", (10, 20)), Choice("staleness", (0, 1, 3, 7)))
    for copies in (1, 2):
        forest = played(most=60, of=job(*knobs), copies=copies)
        found = [setting for _, setting in forest.trials()]
        assert len({s.momentum for s in found}) > 3
        assert {s.policy for s in found} == {"ssp"}
        assert all(s.options == () for s in found)


def test_the_rate_alone_is_tuned_for_an_adaptive_optimizer():
    knobs = (RATE, Choice("batch_size", (10, 20)))
    forest = played(most=250, of=job(*knobs), tuned="rate", retune=False, plateau_epochs=2, accuracy=lambda b: 0.5)
    assert {setting.batch_size for _, setting in forest.trials()} == {10}
    assert len(forest.asked(Evaluate)) > 5  # no end and no second search, although the model does not improve
    assert sum(a.testing for a in forest.asked(Fork)) == 1


# --------------------------------------------------------------------------------------------------------- re-tuning


def standing(branch):
    """A model that becomes no better after two epochs."""
    return min(branch.clocks / 100, 1.0)


def test_it_tunes_again_one_epoch_before_the_rule_of_convergence_and_ends_one_after():
    """The second epoch is the best; three as good as it begin a search, the fourth ends the job."""
    search = Scripted(0.1)
    later = Scripted(*[0.05] * 10)
    searches = [search, later]
    forest = played(lambda space, seed: searches.pop(0), plateau_epochs=4, accuracy=standing)
    evaluated = [i for i, (a, _) in enumerate(forest.log) if isinstance(a, Evaluate)]
    tuned = [i for i, (a, _) in enumerate(forest.log) if isinstance(a, Fork) and a.testing]
    assert len(tuned) == 2
    # The start and five epochs are validated before the second search, one epoch after it.
    assert sum(e < tuned[1] for e in evaluated) == 1 + 5
    assert sum(e > tuned[1] for e in evaluated) == 1
    assert searches == []


def test_a_model_that_becomes_better_again_goes_on():
    """Each new rate is worth another tenth."""
    rate_of = {0.1: 0.5, 0.05: 0.6, 0.02: 0.7}

    def jumps(branch):
        return rate_of.get(round(branch.setting.learning_rate, 3), 0.1)

    searches = [Scripted(0.1), Scripted(0.05), Scripted(0.02), Scripted(0.02)]
    forest = played(lambda space, seed: searches.pop(0), plateau_epochs=2, accuracy=jumps)
    assert rates(forest) == [0.1, 0.05, 0.02, 0.02]
    assert searches == []


def test_a_search_has_no_more_trials_than_the_one_before_and_its_trials_last_an_epoch_at_most():
    """The second search cannot find anything: its losses stand still, so that trials would double for ever."""

    def flat(setting, loss, clocks):
        return falls(setting, loss, clocks) if clocks < 100 else loss

    searches = [Scripted(0.1, 0.2, 0.3), Scripted(*[0.1 + i / 100 for i in range(30)])]
    forest = played(lambda space, seed: searches.pop(0), law=flat, plateau_epochs=3, accuracy=standing, most=900)
    tuned = [i for i, (a, _) in enumerate(forest.log) if isinstance(a, Fork) and a.testing]
    later = [n for a, n in forest.log[tuned[1] :] if isinstance(a, Fork) and a.setting is not None]
    assert len(later) == 3
    assert [sum(forest.seconds_of(n)) for n in later] == [EPOCH] * 3
    assert searches == []
    assert len(forest.branches) == 1  # it has ended, with the best model


def test_a_plateau_at_the_optimum_ends_whatever_the_searcher_proposes():
    forest = played(law=lambda s, x, n: x, accuracy=lambda b: 1.0, most=5000)
    assert len(forest.log) < 5000
    assert len(forest.branches) == 1


def test_the_first_search_is_bounded_as_in_the_public_code_and_can_be_free_as_in_the_paper():
    bounded, free = (
        played(Scripted(0.1, 0.2), law=lambda s, x, n: x, bound=bound, retune=False, most=30)
        for bound in ("always", "retune")
    )
    assert max(sum(bounded.seconds_of(b)) for b, _ in bounded.trials()) == EPOCH
    assert max(sum(free.seconds_of(b)) for b, _ in free.trials()) > EPOCH


def test_a_first_search_that_finds_nothing_ends_after_half_of_the_budget():
    of = replace(job(), budget_seconds=2000.0)
    forest = played(law=lambda s, x, n: x, of=of, retune=False, most=400)
    begun = next(i for i, (a, _) in enumerate(forest.log) if isinstance(a, Run) and a.branch == 0)
    assert sum(isinstance(a, Fork) and a.setting is not None for a, _ in forest.log[begun:]) == 0


def test_a_first_search_has_no_bound_at_all_as_in_the_paper():
    """It is the searcher that ends it: neither a number of trials, nor a share of the budget (Section 4.4)."""
    of, many = replace(job(), budget_seconds=2000.0), [0.1 + i / 1000 for i in range(60)]
    free = played(Scripted(*many), law=lambda s, x, n: x, of=of, bound="retune", most_trials=5, retune=False, most=50)
    assert free.now > of.budget_seconds / 2
    assert len(list(free.trials())) > 5


def test_a_target_that_is_a_loss_is_trained_to_with_no_re_tuning():
    forest = played(Scripted(0.1), of=job(target=LOSS), law=lambda s, x, n: max(falls(s, x, n), 0.3), most=100)
    assert len(forest.log) == 100
    assert sum(a.testing for a in forest.asked(Fork)) == 1


def test_a_hard_coded_start_is_left_to_re_tuning():
    forest = played(Scripted(0.1), initial=False, plateau_epochs=3, accuracy=lambda b: 0.2)
    first = next(i for i, (a, _) in enumerate(forest.log) if isinstance(a, Fork) and a.testing)
    before = [a for a, _ in forest.log[:first] if isinstance(a, Run)]
    assert before == [Run(clocks=EPOCH)] * 3
    assert rates(forest)[0] == 0.1


# ---------------------------------------------------------------------------------------------------- the snapshot


def overfits(branch):
    """Best after two epochs, worse ever after."""
    return 0.9 - abs(branch.clocks - 2 * EPOCH) / 1000


def test_the_best_model_is_kept_searched_from_and_gone_on_with():
    searches = [Scripted(0.1), Scripted(0.05), Scripted()]
    forest = played(lambda space, seed: searches.pop(0), plateau_epochs=3, accuracy=overfits)
    second = [a for a in forest.asked(Fork) if a.testing][1]
    assert (forest.branches.get(second.branch) or forest.dead[second.branch]).clocks == 2 * EPOCH
    (left,) = forest.branches.values()
    assert left.clocks == 2 * EPOCH


def test_without_a_snapshot_it_searches_from_the_model_as_it_is():
    searches = [Scripted(0.1), Scripted(0.05), Scripted()]
    forest = played(lambda space, seed: searches.pop(0), plateau_epochs=3, accuracy=overfits, snapshot="none")
    second = [a for a in forest.asked(Fork) if a.testing][1]
    assert second.branch == forest.trials()[0][0]  # the winner of the first search, five epochs later
    assert max(forest.live_after) <= 3
    (left,) = forest.branches.values()
    assert left.clocks > 4 * EPOCH


def test_a_winner_that_diverges_later_is_replaced_from_the_snapshot():
    def breaks(setting, loss, clocks):
        return math.nan if setting.learning_rate == 0.3 and clocks > 80 else falls(setting, loss, clocks)

    searches = [Scripted(0.3), Scripted(0.1)]
    forest = played(lambda space, seed: searches.pop(0), law=breaks, of=job(target=LOSS), most=40)
    assert rates(forest) == [0.3, 0.1]
    assert forest.asked(Run)[-1].branch == forest.trials()[-1][0]
    lost = played(Scripted(0.3), law=breaks, of=job(target=LOSS), most=40, snapshot="none")
    assert len(lost.log) < 40  # the paper's way: nothing is left to go on with


# ---------------------------------------------------------------------------------------------------------- edges


def test_a_space_of_one_point_ends():
    forest = played(of=job(*ONE_POINT), plateau_epochs=3, accuracy=lambda b: 0.5)
    assert {s.learning_rate for _, s in forest.trials()} == {START.learning_rate}
    assert len(forest.log) < 100


@pytest.mark.parametrize("good", [0, 3])
def test_a_searcher_that_raises_ends_its_search_with_what_it_has(good):
    class Broken(Scripted):
        def propose(self):
            if not self.rates:
                raise ZeroDivisionError("so it goes")
            return super().propose()

        def tell(self, values, score):
            raise KeyError("nobody listens")

    with pytest.warns(RuntimeWarning, match="The searcher raised") as told:
        forest = played(Broken(*[0.1, 0.2, 0.3][:good]), of=job(target=LOSS), most=40)
    said = " ".join(str(w.message) for w in told)
    assert "ZeroDivisionError: so it goes. The search ends with what it has found." in said
    assert ("KeyError: 'nobody listens'. It goes on without that score." in said) == bool(good)
    assert len(forest.trials()) == good
    under = forest.branches[forest.asked(Run)[-1].branch].setting.learning_rate
    assert under == (0.3 if good else START.learning_rate)


def test_a_searcher_that_cannot_be_made_leaves_the_job_as_it_is():
    def fails(space, seed):
        raise OSError("no such searcher")

    with pytest.warns(RuntimeWarning, match="OSError: no such searcher. It cannot be made, and tuning ends"):
        forest = played(fails, of=job(target=LOSS), most=20)
    assert forest.trials() == []
    assert {a.branch for a in forest.asked(Run)} == {0}


def test_a_job_without_tunables_or_losses_just_runs():
    for of in (job(Choice("transfer_bits", (16, 32))), job(target=Target("clocks", 100))):
        with pytest.raises(StopIteration):
            next(mltuner(of))


@pytest.mark.parametrize(
    "options", [{"plateau_epochs": 1}, {"most_trials": 0}, {"copies": 0}, {"start_clocks": -1}], ids=str
)
def test_options_that_make_no_tuner_are_refused(options):
    with pytest.raises(ValueError, match="Cannot tune with"):
        next(mltuner(job(), **options))


def test_an_unknown_searcher_is_refused():
    with pytest.raises(ValueError, match="Cannot search by 'anneal'"):
        next(mltuner(job(), search="anneal"))


@pytest.mark.parametrize("names", [("a node leaves",), slow(tuple(toys()))], ids=["one toy", "all"])
def test_the_contract_is_kept_when_it_tunes_again(names):
    """What the toys have is a loss, so that re-tuning has to be asked for."""
    check_tuner(partial(mltuner, retune=True, plateau_epochs=2), systems={name: toys()[name] for name in names})
