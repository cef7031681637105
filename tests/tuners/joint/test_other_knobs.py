"""Knobs that no model of joint knows: a job of which only such knobs were free ran as it had begun."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from harness.drive import play
from harness.scenario import scenario
from tests.support.toy import job, window
from tests.tuners.joint.answers import Answers, course
from tests.tuners.joint.test_joint import fixed
from tuners.actions import Cost, Reconfigure, Run
from tuners.joint import joint
from tuners.joint.learning.heat import CopyHeat, fresh
from tuners.joint.other_knobs import OtherKnobs, expected_of_quorum, progress
from tuners.settings import Choice, Integer, Real


def job_with(*knobs, **start):
    of = job("no knobs")
    begun = replace(of.start, **start)
    space = replace(of.space, base=begun, knobs=knobs)
    return replace(of, start=begun, space=space, budget_seconds=1e5, methods=("relocate",))


def tried(of, speed, cost=Cost(seconds=0.0, stall_seconds=0.0)):  # noqa: B008
    """The answers to the trials of a job that completes `speed(setting)` pushes per second."""
    begun, answers = course(of), Answers(of, lambda setting, clocks: [1.0] * clocks)

    def answer(action):
        if isinstance(action, Reconfigure):
            Answers.answer(answers, action)
            return cost
        if not isinstance(action, Run):
            return Answers.answer(answers, action)
        start = answers.now
        seconds = start + np.arange(1.0, action.clocks + 1) / speed(answers.settings[action.branch])
        answers.now = seconds[-1]
        return window(of, [1.0] * action.clocks, seconds, start=start)

    answers.answer = answer
    answers.run(begun.placing.measure())
    answers.run(OtherKnobs(of, begun.training, begun.placing).run())
    return answers


def test_a_number_is_halved_as_long_as_that_serves_and_doubled_where_it_does_not():
    knob = Integer("inter_threads", 1, 16)
    for best in (1, 2, 3, 8, 16):
        of = job_with(knob, inter_threads=8)
        answers = tried(of, lambda setting, best=best: 1 / (1 + abs(np.log2(setting.inter_threads / best))))
        assert answers.settings[0].inter_threads == best


def test_each_option_is_tried_and_the_best_one_is_held():
    of = job_with(Choice("option/jit", ("off", "on", "more")), options=(("jit", "off"),))
    answers = tried(of, lambda setting: {"off": 1.0, "on": 2.0, "more": 1.5}[dict(setting.options)["jit"]])
    assert [dict(s.options)["jit"] for s in answers.changes()] == ["on", "more", "on"]


def test_where_no_value_is_better_the_start_is_held():
    answers = tried(job_with(Integer("inter_threads", 1, 16), inter_threads=8), lambda setting: 1.0)
    assert [s.inter_threads for s in answers.changes()] == [4, 16, 8]


def test_a_trial_that_takes_longer_than_it_may_save_is_not_made():
    of = replace(job_with(Integer("inter_threads", 1, 16), inter_threads=8), budget_seconds=1000.0)
    assert not tried(of, lambda setting: 1.0).changes()


def test_where_changes_take_time_trials_in_vain_end_soon():
    """`tf36-cifar` took 1.16 times as long: 22 changes of options, each as long as six windows."""
    knobs = [Choice(f"option/{i}", (False, True)) for i in range(30)]
    of = replace(job_with(*knobs, options=tuple((str(i), False) for i in range(10, 30))), budget_seconds=1e4)
    answers = tried(of, lambda setting: 1.0, Cost(seconds=10.0, stall_seconds=10.0))
    assert 1 < len(answers.changes()) < 8


@pytest.mark.parametrize("policy", ["bsp", "quorum"])
def test_a_quorum_is_tried_only_where_rounds_end_by_one(policy):
    of = job_with(Integer("quorum", 0, 4), policy=policy, quorum=1)
    assert bool(tried(of, lambda setting: 1.0).changes()) is (policy == "quorum")
    # Machines that are alike need no smaller one.
    assert not tried(job_with(Integer("quorum", 0, 4), policy=policy), lambda setting: 1.0).changes()


def test_gradients_that_come_after_their_round_do_not_count():
    of = job_with(policy="quorum", quorum=2)
    seen = window(of, [1.0] * 8)
    pushes = seen.pushes._replace(staleness=np.array([0, 1, 2, 2, 0, 1, 2, 2], np.int32))
    assert progress(replace(seen, pushes=pushes), of.start) == pytest.approx(4 / 1.0**0.5 / seen.seconds)


def test_with_some_grace_a_gradient_counts_unless_a_round_has_ended_while_it_was_computed():
    of = job_with(policy="quorum", quorum=2, grace_seconds=1.0)
    seen = window(of, [1.0] * 4, [1.0, 2.0, 3.0, 10.0], compute=0.5, pull=0.1)
    begun = np.array([0.0, 0.0, 2.5, 1.5])  # a round has ended at 2.5, while the last push was computed
    waited = np.array([0.0, 0.0, 1.5, 0.0])
    pushes = seen.pushes._replace(compute_seconds=seen.pushes.seconds - begun - 0.11, wait_seconds=waited)
    assert progress(replace(seen, pushes=pushes), of.start) == pytest.approx(3 / 0.5**0.5 / seen.seconds)


def test_older_gradients_make_less_progress_as_they_bear_a_lower_rate():
    of = job_with()
    seen = window(of, [1.0] * 8)
    old = replace(seen, pushes=seen.pushes._replace(staleness=np.full(8, 7, np.int32)))
    assert progress(seen, of.start) == pytest.approx(15 * progress(old, of.start))


@pytest.mark.parametrize("knobs", [(), (Real("learning_rate", 0.001, 1.0, log=True),)])
def test_copies_of_the_model_that_are_old_are_given_up_at_once_or_where_they_are_seen_to_hurt(knobs):
    """Where the rate is free, it would come down for the copies; where it is held, they may be what it bears."""
    of = job_with(Integer("pull_clocks", 1, 16), *knobs, pull_clocks=16)
    of = replace(of, target=replace(of.target, metric="loss", value=0.1))
    begun, answers = course(of), Answers(of, lambda setting, clocks: [1.0] * clocks)
    assert isinstance(begun.heat, CopyHeat) is not bool(knobs)
    answers.run(begun.begin())
    assert answers.settings[0].pull_clocks == (1 if knobs else 16)
    assert fresh(of, of.start).pull_clocks == 1


def test_copies_of_rows_come_down_to_a_few_mini_batches():
    """They grow so old that a job on whose tables nothing else was free diverged, as without a tuner."""
    knobs = (Integer("cache_clocks", 0, 64), Choice("cache_rows", (0, 64)))
    of = job_with(cache_clocks=64, cache_rows=64)
    of = replace(of, space=replace(of.space, knobs=knobs, blocks=4), blocks=4)
    assert (fresh(of, of.start).cache_clocks, fresh(of, of.start).cache_rows) == (4, 64)
    held = replace(of, space=replace(of.space, knobs=knobs[1:]))
    assert fresh(held, of.start) == of.start


QUORUM = """
summary = "Two of eight workers are slow, and rounds wait for them."
[cluster]
nodes = [{ type = "edge-4core", count = 12 }]
[workload]
name = "digits-mlp"
[start]
worker_count = 8
policy = "quorum"
learning_rate = 0.05
[free]
quorum = { integer = [0, 8] }
[target]
metric = "accuracy"
value = 0.94
check_clocks = 50
[budget]
seconds = 20000
[conditions]
jitter = 0.15
stragglers = { nodes = ["n1", "n5"], mean_seconds = 9.0, sd_seconds = 3.0 }
[seeds]
count = 2
"""


def test_a_quorum_is_chosen_by_what_every_worker_takes():
    """Quorums far from the best one were tried for many rounds: the trials took a third of a short job."""
    of = job_with(Integer("quorum", 1, 4), policy="quorum", quorum=1)
    names = [n.name for n in of.nodes]
    of = replace(of, start=replace(of.start, workers=tuple(names[:4])))
    took = dict(zip(names, (1.0, 1.0, 1.1, 9.0), strict=False))
    seen = window(of, [1.0] * 16, compute=took, workers=of.start.workers)
    told = [expected_of_quorum(seen, of.start, quorum) for quorum in (1, 2, 3, 4)]
    assert np.argmax(told) == 2
    # One that has not pushed yet takes at least as long as the window.
    early = replace(window(of, [1.0] * 12, compute=took, workers=of.start.workers[:3]), start_seconds=-20.0)
    assert expected_of_quorum(early, of.start, 4) < expected_of_quorum(early, of.start, 3)


@pytest.mark.parametrize(("knobs", "policy"), [((), "quorum"), ((Real("learning_rate", 0.001, 1.0, log=True),), "asp")])
def test_a_quorum_stays_where_the_rate_is_held(knobs, policy):
    """Its rate was right for rounds: without them the model swung, and the job took 1.4 times as long."""
    of = job_with(Choice("policy", ("quorum", "bsp", "asp")), *knobs, policy="quorum", quorum=1)
    of = replace(of, start=replace(of.start, workers=tuple(n.name for n in of.nodes[:3])))
    begun, answers = course(of), Answers(of, lambda setting, clocks: [1.0] * clocks)
    answers.run(begun.begin())
    assert begun.training.branch.setting.policy == policy


@pytest.mark.slow
def test_rounds_that_end_without_stragglers_save_a_third_of_the_time():
    found = scenario.parse(QUORUM, name="quorum", origin=Path("quorum.toml"))
    ours, theirs = (play(factory, scenario.system(found, 0)).outcome for factory in (joint, fixed))
    assert ours.status == theirs.status == "target"
    assert ours.seconds < 0.75 * theirs.seconds
